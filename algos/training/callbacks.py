"""Ready-made callbacks of the learning loop; see also `algos.evaluation.EvaluateEvery`."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from algos.ranks import collectives
from algos.training.loggers import SHADED
from algos.training.metrics import Metrics
from algos.training.run import Callback, Run
from textenv.rendering import answer_tokens
from textenv.rollout import is_episode_env

DISTRIBUTIONS = ("reward", "kl", "value", "advantage", "log_prob")
"""Columns of a rollout whose histograms are logged."""


class RecordSamples(Callback):
    """Logs what the policy writes, with scores, and histograms of the rollout's columns.

    The table ``samples`` has ``prompt``, ``completion``, ``score``, ``parts`` and ``logged`` (by name; the latter only
    if rewards log numbers) and ``kl`` (nats, if measured). The first one is from before any update. The table
    ``tokens`` has their tokens with `SHADED`, as far as the algorithm has them.

    Args:
        every: iterations from one table to the next.
        num_samples: rows of a table, spread over the rollout.
    """

    def __init__(self, every: int = 10, num_samples: int = 8) -> None:
        if every < 1 or num_samples < 1:
            raise ValueError(f"every is {every} and num_samples {num_samples}, expected at least 1 of each")
        self.every, self.num_samples = every, num_samples
        self._rollout: TensorDict | None = None
        self._rows: list[int] = []
        self._entropy = torch.zeros(0)

    def on_rollout(self, run: Run, rollout: TensorDict) -> None:
        """See `Callback.on_rollout`."""
        if len(run.history) % self.every:
            return
        self._rollout, self._rows = rollout, []
        env, policy = run.agent.env, run.agent.policy
        if not is_episode_env(env):
            return
        own = len(rollout) // collectives.world_size()  # the environment's here, which come first
        rows = np.unique(np.linspace(0, own - 1, self.num_samples).astype(int)).tolist()
        table = [{"steps": run.steps, "iteration": len(run.history) + 1} | sample for sample in env.samples(rows)]
        if "kl" in rollout.keys():
            for row, sample in zip(rows, table, strict=False):
                sample["kl"] = rollout["kl"][row][rollout["mask"][row]].sum().item()
        if table:
            run.log({"samples": table})
        if table and hasattr(policy, "tokenizer"):
            with torch.no_grad():
                self._rows, self._entropy = rows, policy.evaluate(rollout[rows]).entropy

    def on_iteration(self, run: Run, metrics: Metrics) -> None:
        """See `Callback.on_iteration`; the update has added values and advantages to the rollout."""
        if (rollout := self._rollout) is not None:
            self._rollout = None
            columns = [name for name in DISTRIBUTIONS if name in rollout.keys()]
            mask = rollout["mask"]
            if self._rows:
                run.log({"tokens": self._tokens(run, rollout[self._rows].set("entropy", self._entropy))})
            run.log({f"rollout/{name}": rollout[name].detach()[mask].float().cpu().numpy() for name in columns})

    def _tokens(self, run: Run, rollout: TensorDict) -> list[dict[str, Any]]:
        """Tokens of some episodes from their first answer on, and the values of those that the policy chose."""
        if "reference_log_prob" in rollout.keys():
            rollout["log_ratio"] = rollout["log_prob"] - rollout["reference_log_prob"]
        tokenizer: Any = getattr(run.agent.policy, "tokenizer")  # noqa: B009
        place, table = {"steps": run.steps, "iteration": len(run.history) + 1}, []
        for row in range(len(rollout)):
            table.append(place | {"row": row} | answer_tokens(rollout, row, tokenizer, SHADED))
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
