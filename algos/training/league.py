"""`League`: earlier versions of the policy as opponents in games that it plays against itself."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algos.collection import Collector, agree_on_ends
from algos.policies.policy import Policy
from algos.storage.weights import load_weights, trained_weights
from algos.training.metrics import Metrics
from algos.training.run import Callback, Run
from textenv.programs.opponents import Opponents
from textenv.programs.run import Question
from textenv.programs.vector_env import ProgramVectorEnv


class League(Callback):
    """Adds the policy, as it is now, to the opponents of its environment: self-play against earlier versions.

    For each game the environment draws one opponent, each with the same probability: an earlier version, or what it was
    given (``opponents=[None]``: the policy as it is). The log has the return against each of them
    (`textenv.programs.opponents.opponent_metrics`); the name of a version says after how many iterations it was added.

    Of each version only the trained weights are kept. One copy of the policy, into which they are loaded, plays them
    all.

    Args:
        every: iterations between one version and the next.
        size: maximum number of versions; the oldest one is removed.

    A training begins without versions, also where an earlier one has left some in the environment.

    Raises:
        ValueError: if one of the two is below 1; or in a training of several processes, which have environments of
            their own.

    Example:
        >>> env = ProgramVectorEnv(play, agents=2, opponents=[None], tokenizer=tokenizer)  # doctest: +SKIP
        >>> PPO(env, policy).learn(100_000, callbacks=[League(every=20, size=5)])  # doctest: +SKIP
    """

    several_processes = False

    def __init__(self, every: int = 10, size: int = 5) -> None:
        if every < 1 or size < 1:
            raise ValueError(f"every is {every} and size {size}, expected at least 1 of each")
        self.every = every
        self.size = size
        self.weights: dict[str, dict[str, Tensor]] = {}
        """By name of a version: its weights, the oldest first."""
        self._is_restored = False
        """Whether the weights are those of the training that is resumed."""

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`; adds the versions of a resumed run.

        Raises:
            ValueError: if the environment has no opponents.
        """
        opponents = _opponents(run)
        earlier = [name for name, opponent in opponents.by_name.items() if isinstance(opponent, _Version)]
        for name in earlier:
            opponents.remove(name)
        if not self._is_restored:
            self.weights = {}
        self._is_restored = False

        # The newest versions of a resumed run, which may have had room for more
        self.weights = dict(list(self.weights.items())[-self.size :])
        self._player = PolicyOpponent(run.agent.policy, _environment(run))
        for name, weights in self.weights.items():
            opponents.add(name, _Version(self._player, weights))

    def on_iteration(self, run: Run, metrics: Metrics) -> None:
        """See `Callback.on_iteration`."""
        iterations = len(run.history) + 1
        if iterations % self.every:
            return
        opponents = _opponents(run)
        if len(self.weights) >= self.size:
            oldest = next(iter(self.weights))
            del self.weights[oldest]
            opponents.remove(oldest)
        name = f"after {iterations}"
        weights = trained_weights(run.agent.policy)
        self.weights[name] = {key: weight.detach().clone() for key, weight in weights.items()}
        opponents.add(name, _Version(self._player, self.weights[name]))

    def state_dict(self) -> dict[str, object]:
        """See `Callback.state_dict`."""
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.weights = state["weights"]
        self._is_restored = True


class PolicyOpponent:
    """A copy of a policy that answers the questions of other agents (`textenv.programs.opponents.BatchOpponent`).

    Args:
        policy: a language model's policy; what becomes of it later does not change the copy.
        env: the environment whose limits (``max_new_tokens``, ``stop``, ``allowed``) an answer obeys.
    """

    def __init__(self, policy: Policy, env: ProgramVectorEnv) -> None:
        self.policy = copy.deepcopy(policy.fork())
        self.env = env

    @torch.no_grad()
    def answer(self, questions: Sequence[Question]) -> list[str]:
        """Return an answer to each question, sampled with the question's seed."""
        env = self.env.answering_env(questions)
        agree_on_ends(env, self.policy)
        seeds = np.array([question.seed for question in questions], dtype=np.int64)
        Collector(env, self.policy).play_episodes(env, len(questions), seeds=seeds)
        return [turn.completion for turn in env.scored_turns.turns]


class _Version:
    """An earlier version of the policy: its weights, and the copy that plays them."""

    def __init__(self, player: PolicyOpponent, weights: dict[str, Tensor]) -> None:
        self.player = player
        self.weights = weights

    def answer(self, questions: Sequence[Question]) -> list[str]:
        """See `PolicyOpponent.answer`."""
        load_weights(self.player.policy, self.weights)
        return self.player.answer(questions)


def _environment(run: Run) -> ProgramVectorEnv:
    """Return the environment of a run; raise a ValueError unless it is one of programs."""
    env = run.agent.env
    if not isinstance(env, ProgramVectorEnv):
        raise ValueError(f"League is for games of programs, not for a {type(env).__name__}: use a ProgramVectorEnv")
    return env


def _opponents(run: Run) -> Opponents:
    """Return the opponents of a run's environment; raise a ValueError if it has none."""
    opponents = _environment(run).task.opponents
    if opponents is None:
        raise ValueError("League adds opponents, but the environment has none: give it opponents=[None]")
    return opponents
