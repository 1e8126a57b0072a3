"""Ready-made callbacks of the learning loop; see also `algos.evaluation.EvaluateEvery`."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

from algos.ranks import collectives
from algos.training.loggers import SHADED
from algos.training.metrics import Metrics
from algos.training.run import Callback, Run
from textenv.rendering import answer_tokens
from textenv.rollout import is_episode_env, join_episodes, num_episodes_of, number_in_episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISTRIBUTIONS = ("reward", "kl", "value", "advantage", "log_prob")
"""Columns of a rollout whose histograms are logged."""


class RecordSamples(Callback):
    """Logs what the policy writes, with scores, and histograms of the rollout's columns.

    The first table is from before any update. ``samples`` has the columns ``prompt``, ``completion``, ``score``,
    ``parts`` (by name), ``logged`` (by name, if rewards log numbers) and ``kl`` (nats, if measured). ``tokens`` has the
    tokens of the same episodes, with those columns of `SHADED` that the algorithm has; of an episode of several rows
    those of the first row.

    Args:
        every: iterations from one table to the next.
        num_samples: rows of a table, spread over the episodes of the rollout.
    """

    def __init__(self, every: int = 10, num_samples: int = 8) -> None:
        if every < 1 or num_samples < 1:
            raise ValueError(f"every is {every} and num_samples {num_samples}, expected at least 1 of each")
        self.every = every
        self.num_samples = num_samples

        # What `on_rollout` keeps for `on_iteration`
        self._rollout: TensorDict | None = None
        self._rows: list[int] = []
        self._entropy = torch.zeros(0)

    def on_rollout(self, run: Run, rollout: TensorDict) -> None:
        """See `Callback.on_rollout`."""
        if len(run.history) % self.every:
            return
        self._rollout = rollout
        self._rows = []
        env = run.agent.env
        policy = run.agent.policy
        if not is_episode_env(env):
            return

        # Episodes of this rank's environment, which come first
        num_episodes = num_episodes_of(rollout) // collectives.world_size()
        sampled_episodes = np.unique(np.linspace(0, num_episodes - 1, self.num_samples).astype(int)).tolist()
        iteration = {"steps": run.steps, "iteration": len(run.history) + 1}
        table = [iteration | sample for sample in env.samples(sampled_episodes)]
        if "kl" in rollout.keys():
            joined_rollout = join_episodes(rollout)
            for episode, sample in zip(sampled_episodes, table, strict=False):
                kl = joined_rollout["kl"][episode][joined_rollout["mask"][episode]]
                sample["kl"] = kl.sum().item()
        if not table:
            return
        run.log({"samples": table})

        # Entropies of the policy before the update
        if hasattr(policy, "tokenizer"):
            first_rows = (number_in_episode(rollout) == 0).nonzero().flatten()
            self._rows = first_rows[sampled_episodes].tolist()
            with torch.no_grad():
                self._entropy = policy.evaluate(rollout[self._rows]).entropy

    def on_iteration(self, run: Run, metrics: Metrics) -> None:
        """See `Callback.on_iteration`; the update has added values and advantages to the rollout."""
        if self._rollout is None:
            return
        rollout = self._rollout
        self._rollout = None
        mask = rollout["mask"]
        if self._rows:
            rows = rollout[self._rows].set("entropy", self._entropy)
            run.log({"tokens": self._tokens(run, rows)})
        histograms = {}
        for name in DISTRIBUTIONS:
            if name in rollout.keys():
                histograms[f"rollout/{name}"] = rollout[name].detach()[mask].float().cpu().numpy()
        run.log(histograms)

    def _tokens(self, run: Run, rows: TensorDict) -> list[dict[str, object]]:
        """Return the tokens of some episodes from their first answer on, with values of those that the policy chose."""
        if "reference_log_prob" in rows.keys():
            log_ratio = rows["log_prob"] - rows["reference_log_prob"]
            rows["log_ratio"] = torch.where(rows["mask"], log_ratio, 0.0)  # an answer without a score has no reference
        tokenizer: PreTrainedTokenizerBase = getattr(run.agent.policy, "tokenizer")  # noqa: B009
        iteration = {"steps": run.steps, "iteration": len(run.history) + 1}
        table: list[dict[str, object]] = []
        for row in range(len(rows)):
            tokens = answer_tokens(rows, row, tokenizer, SHADED)
            table.append({**iteration, "row": row, **tokens})
        return table


class StopAtKL(Callback):
    """Ends the training when the KL to the reference exceeds a limit.

    Args:
        limit: nats per finished episode (``reference/kl``).
    """

    def __init__(self, limit: float) -> None:
        if not limit > 0:
            raise ValueError(f"limit is {limit}, expected nats above 0")
        self.limit = limit

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`; raises a ValueError if the KL is not measured."""
        if run.agent.penalty is None:
            raise ValueError("StopAtKL needs a KL, but this agent has no penalty: give kl_coef=0 to measure it only")

    def on_iteration(self, run: Run, metrics: Metrics) -> bool:
        """See `Callback.on_iteration`."""
        return metrics.get("reference/kl", 0.0) > self.limit
