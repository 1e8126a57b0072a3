"""Evaluation of a policy on whole episodes, without learning."""

import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from tensordict import TensorDict

from algos.collection import collect
from algos.make import is_ours, make_vector_environment
from algos.policies.policy import Policy, check_policy, check_spaces
from algos.storage.env_state import share_objects
from algos.training.metrics import EpisodeMeter, Metrics, reference_metrics
from algos.training.run import Callback, Run
from textenv.envs.text_env import TextEnv
from textenv.kl.penalty import KLPenalty
from textenv.names import check_names
from textenv.rendering import rollout_html
from textenv.rollout import is_episode_env

SHOWN = 8
"""Episodes that a notebook shows."""


class _Played(NamedTuple):
    returns: list[float]
    """Return of each episode, as paid by the environment."""
    rollout: TensorDict


class EvaluationResult(_Played):
    """Result of `evaluate`: ``returns`` of the episodes, and the ``rollout``. A notebook shows texts, shaded."""

    tokenizer: Any = None
    """Of a policy that writes text."""

    def __repr__(self) -> str:
        return f"Played(mean_return={self.mean_return:.4g}, std_return={self.std_return:.4g}, n={len(self.returns)})"

    def _repr_html_(self) -> str:
        """Return, and the first episodes of text, each token shaded by its log-probability."""
        head = f"<p>mean return {self.mean_return:.4g} over {len(self.returns)} episodes</p>"
        rows = range(min(SHOWN, len(self.rollout)) if self.tokenizer is not None else 0)
        return head + "".join(rollout_html(self.rollout, row, self.tokenizer) for row in rows)

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation over the episodes."""
        return float(np.std(self.returns))


@check_names
def evaluate(
    env: VectorEnv | gymnasium.Env | str,
    policy: Policy,
    *,
    num_episodes: int = 20,
    deterministic: bool = False,
    seed: int = 0,
) -> EvaluationResult:
    """Play whole episodes.

    Rewards with a state, such as `Normalize`, use the one that they have, and keep it.

    Args:
        env: is reset with ``seed`` first. An id (see `algos.make.make_vector_environment`) gives up to 16 slots (text:
            prompts of the test split); a single environment is one slot.
        policy: the policy to evaluate; its generator and memory are unchanged afterwards.
        num_episodes: exact number of episodes.
        deterministic: take the most probable action instead of a sample.
        seed: seed of prompts or start states, and of the sampled actions.

    Returns:
        Return of each episode, and the rollout: read ``.mean_return``, or unpack the tuple.

    Raises:
        TypeError: on arguments in another order.
        ValueError: if the policy was made for other spaces, or the environment id is unknown.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}, expected at least 1")
    env = _vector_env(env, policy, num_episodes)
    check_spaces(env, policy)
    player, state = policy.fork(), policy.generator.get_state()
    policy.generator.manual_seed(seed)
    try:
        # Evaluating during training changes neither what is trained nor which prompts come next.
        with env.fork() if is_episode_env(env) else nullcontext():
            rollout = collect(env, player, num_episodes=num_episodes, seed=seed, deterministic=deterministic)
    finally:
        policy.generator.set_state(state)
    played = EvaluationResult(EpisodeMeter().finished(rollout)[0], rollout)
    played.tokenizer = getattr(policy, "tokenizer", None)
    return played


def _vector_env(env: Any, policy: Any, num_episodes: int) -> VectorEnv:
    """Return the environment given, or a vector environment of it."""
    check_policy(policy, call="evaluate(env, policy), in this order")
    if isinstance(env, str):
        split: dict[str, Any] = {"split": "test"} if is_ours(env) else {}
        return make_vector_environment(env, min(num_episodes, 16), **split)
    if isinstance(env, gymnasium.Env):
        inner, layer = env.unwrapped, env
        if not isinstance(inner, TextEnv):
            return SyncVectorEnv([lambda: env])
        while isinstance(layer, gymnasium.Wrapper):
            if not isinstance(layer, (OrderEnforcing, PassiveEnvChecker)):  # those of `gymnasium.make`
                raise ValueError(
                    f"{type(layer).__name__} wraps a text environment, which is played in whole episodes, so that the "
                    "wrapper would see none of its steps: pass the unwrapped one"
                )
            layer = layer.env
        return inner.vector
    if not isinstance(env, VectorEnv):
        raise TypeError(f"env is {env!r:.100}, expected an environment, a vector environment or a Gymnasium id")
    return env


def summarise(env: Any, policy: Policy, *, penalty: KLPenalty | None = None, **options: Any) -> dict[str, float]:
    """Evaluate a policy and return the results as numbers.

    Args:
        env: as in `evaluate`.
        policy: the policy to evaluate.
        penalty: KL penalty to measure; None means the environment's own, if any.
        options: further arguments of `evaluate`.

    Returns:
        ``mean_return`` and ``std_return`` as paid by the environment, ``episodes``, ``steps``, ``seconds``. With a
        penalty also ``score`` (equal to ``mean_return``, without KL), ``kl`` in nats per episode, ``penalised_return``.
    """
    start = time.perf_counter()
    played = evaluate(env, policy, **options)
    rollout = played.rollout
    result = {
        "mean_return": played.mean_return,
        "std_return": played.std_return,
        "episodes": len(played.returns),
        "steps": int(rollout["mask"].sum()),
        "seconds": time.perf_counter() - start,
    }
    if penalty is None and is_episode_env(env):
        penalty = env.penalty
    if penalty is None:
        return result
    rollout = rollout.to(policy.device)
    penalty(rollout, policy)
    kl = reference_metrics(rollout, coefficient=penalty.coef)["reference/kl"]
    penalised = result["mean_return"] - penalty.coef * kl
    return result | {"score": result["mean_return"], "kl": kl, "penalised_return": penalised}


class EvaluateEvery(Callback):
    """Evaluates the policy during the training, keeps the best agent, and may end the training.

    Rewards with a state, such as `textenv.rewards.Normalize`, use that of the training, and do not change it. The
    results of `summarise` are logged as ``eval/mean_return`` and so on. The agent with the best ``mean_return`` is
    saved in the folder ``best`` of the run. Training is the same as without it, to the last bit on a CPU.

    Args:
        env: a fresh environment, or held-out prompts: as in `evaluate`.
        every: steps between evaluations; the last iteration is evaluated too.
        num_episodes: episodes of an evaluation.
        stop_at: end the training at this ``mean_return``.
        patience: end the training after this number of evaluations in a row without a better one.
        seed: seed of every evaluation, so that all have the same start states or prompts.
    """

    @check_names
    def __init__(
        self,
        env: VectorEnv | gymnasium.Env | str,
        every: int,
        *,
        num_episodes: int = 20,
        stop_at: float | None = None,
        patience: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, count in (("every", every), ("num_episodes", num_episodes), ("patience", patience)):
            if count is not None and not count >= 1:
                raise ValueError(f"{name} is {count}, expected at least 1")
        self.env, self.every, self.num_episodes, self.seed = env, every, num_episodes, seed
        self.stop_at, self.patience = stop_at, patience
        self.best: float | None = None
        """Best ``mean_return`` so far."""
        self.waited = 0
        """Evaluations since the best one."""
        self.evaluated = 0
        """Steps at the last evaluation."""

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`; raises as `evaluate` does."""
        self.env = _vector_env(self.env, run.agent.policy, self.num_episodes)
        check_spaces(self.env, run.agent.policy)

    def on_iteration(self, run: Run, metrics: Metrics) -> bool:
        """See `Callback.on_iteration`."""
        if run.steps // self.every == self.evaluated // self.every and run.steps < run.total_steps:
            return False
        agent, self.evaluated = run.agent, run.steps
        share_objects(agent.env, self.env)
        penalty = agent.penalty if is_episode_env(self.env) else None
        found = summarise(self.env, agent.policy, penalty=penalty, num_episodes=self.num_episodes, seed=self.seed)
        metrics |= {f"eval/{name}": value for name, value in found.items() if name != "seconds"}
        score = found["mean_return"]
        self.waited += 1
        if self.best is None or score > self.best:
            self.best, self.waited = score, 0
            if run.run_dir is not None:
                agent.save(run.run_dir / "best")
        reached = self.stop_at is not None and score >= self.stop_at
        return reached or (self.patience is not None and self.waited >= self.patience)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"best": self.best, "waited": self.waited, "evaluated": self.evaluated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.best, self.waited, self.evaluated = state["best"], state["waited"], state["evaluated"]
