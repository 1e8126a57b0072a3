"""Evaluation of a policy on whole episodes, without learning."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from tensordict import TensorDict

from algos.collection import collect
from algos.make import make_vector_environment, takes_model
from algos.policies.policy import Policy, check_policy, check_spaces
from algos.storage.env_state import share_objects
from algos.storage.run_files import BEST
from algos.training.metrics import EpisodeMeter, Metrics, reference_metrics
from algos.training.run import Callback, Run
from textenv.envs.text_env import TextEnv
from textenv.kl.penalty import KLPenalty
from textenv.names import check_names
from textenv.rendering import rollout_html
from textenv.rollout import is_episode_env

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SLOTS = 16
"""Maximum number of slots of an environment that is given by its id."""
EPISODES_IN_NOTEBOOK = 8
"""Maximum number of episodes whose texts a notebook shows."""


class _ReturnsAndRollout(NamedTuple):
    """What ``returns, rollout = evaluate(…)`` unpacks; the tokenizer of `EvaluationResult` is not a part of it."""

    returns: list[float]
    """Return of each episode, as paid by the environment."""
    rollout: TensorDict


class EvaluationResult(_ReturnsAndRollout):
    """Result of `evaluate`: ``returns`` of the episodes, and the ``rollout``.

    A notebook shows the first texts, each token shaded by its log-probability.
    """

    tokenizer: "PreTrainedTokenizerBase | None" = None
    """Tokenizer of a policy that writes text; None in control."""

    def __repr__(self) -> str:
        statistics = f"mean_return={self.mean_return:.4g}, std_return={self.std_return:.4g}"
        return f"EvaluationResult({statistics}, n={len(self.returns)})"

    def _repr_html_(self) -> str:
        """Mean return, and the first episodes of text, each token shaded by its log-probability."""
        page = f"<p>mean return {self.mean_return:.4g} over {len(self.returns)} episodes</p>"
        if self.tokenizer is None:
            return page
        for row in range(min(EPISODES_IN_NOTEBOOK, len(self.rollout))):
            page += rollout_html(self.rollout, row, self.tokenizer)
        return page

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

    Rewards with a state, such as `Normalize`, use their present state and do not change it.

    Args:
        env: vector environment, which is reset with ``seed`` first. A single environment becomes one slot. An id (see
            `algos.make.make_vector_environment`) becomes up to 16 slots, for text with prompts of the test split.
        policy: the policy to evaluate; its generator and memory are unchanged afterwards.
        num_episodes: exact number of episodes.
        deterministic: take the most probable action instead of a sample.
        seed: seed of prompts or start states, and of the sampled actions.

    Returns:
        Return of each episode, and the rollout: read ``.mean_return``, or unpack the tuple.

    Raises:
        TypeError: if ``env`` is not an environment, or ``policy`` cannot play it; perhaps they are swapped.
        ValueError: if the policy was made for other spaces, or the environment id is unknown.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}, expected at least 1")
    env = _vector_env(env, policy, num_episodes)
    check_spaces(env, policy)

    # Evaluating during training changes neither what is trained nor which prompts come next. The fork has a memory of
    # its own, but shares the policy's generator, whose state is put back.
    player = policy.fork()
    generator_state = policy.generator.get_state()
    policy.generator.manual_seed(seed)
    try:
        env_fork = env.fork() if is_episode_env(env) else nullcontext()
        with env_fork:
            rollout = collect(env, player, num_episodes=num_episodes, seed=seed, deterministic=deterministic)
    finally:
        policy.generator.set_state(generator_state)

    returns, _ = EpisodeMeter().finished(rollout)
    result = EvaluationResult(returns, rollout)
    result.tokenizer = getattr(policy, "tokenizer", None)
    return result


def _vector_env(env: object, policy: Policy, num_episodes: int) -> VectorEnv:
    """Return a vector environment as it is; make one of a single environment or of an id."""
    check_policy(policy, call="evaluate(env, policy), in this order")
    if isinstance(env, str):
        slots = min(num_episodes, NUM_SLOTS)
        if takes_model(env):
            return make_vector_environment(env, slots, split="test")
        return make_vector_environment(env, slots)
    if isinstance(env, gymnasium.Env):
        if isinstance(env.unwrapped, TextEnv):
            return _text_vector_env(env, env.unwrapped)
        return SyncVectorEnv([lambda: env])
    if not isinstance(env, VectorEnv):
        raise TypeError(f"env is {env!r:.100}, expected an environment, a vector environment or a Gymnasium id")
    return env


def _text_vector_env(env: gymnasium.Env, text_env: TextEnv) -> VectorEnv:
    """Return the vector environment inside a text environment, or raise if a wrapper would have no effect."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if not isinstance(layer, (OrderEnforcing, PassiveEnvChecker)):  # `gymnasium.make` adds these two
            raise ValueError(
                f"{type(layer).__name__} wraps a text environment, which is played in whole episodes, so that the "
                "wrapper would see none of its steps: pass the unwrapped one"
            )
        layer = layer.env
    return text_env.vector


def summarise(
    env: VectorEnv | gymnasium.Env | str,
    policy: Policy,
    *,
    penalty: KLPenalty | None = None,
    num_episodes: int = 20,
    deterministic: bool = False,
    seed: int = 0,
) -> dict[str, float]:
    """Evaluate a policy and return the results as numbers.

    Args:
        env: as in `evaluate`.
        policy: the policy to evaluate.
        penalty: KL penalty to measure; None means the environment's own, if any.
        num_episodes, deterministic, seed: as in `evaluate`.

    Returns:
        ``mean_return`` and ``std_return`` as paid by the environment, ``episodes``, ``steps``, ``seconds``. With a
        penalty also ``score`` (equal to ``mean_return``, without KL), ``kl`` in nats per episode, ``penalised_return``.
    """
    start = time.perf_counter()
    result = evaluate(env, policy, num_episodes=num_episodes, deterministic=deterministic, seed=seed)
    rollout = result.rollout
    numbers = {
        "mean_return": result.mean_return,
        "std_return": result.std_return,
        "episodes": len(result.returns),
        "steps": int(rollout["mask"].sum()),
        "seconds": time.perf_counter() - start,
    }

    # KL to the reference, measured after the clock has stopped
    if penalty is None and is_episode_env(env):
        penalty = env.penalty
    if penalty is None:
        return numbers
    rollout = rollout.to(policy.device)
    penalty(rollout, policy)
    kl = reference_metrics(rollout, coefficient=penalty.coef)["reference/kl"]
    numbers["score"] = result.mean_return
    numbers["kl"] = kl
    numbers["penalised_return"] = result.mean_return - penalty.coef * kl
    return numbers


class EvaluateEvery(Callback):
    """Evaluates the policy during the training, keeps the best agent, and may end the training.

    The results of `summarise` are logged as ``eval/mean_return`` and so on. The agent with the best ``mean_return`` is
    saved in the folder ``best`` of the run. Rewards with a state, such as `textenv.rewards.Normalize`, use the state of
    the training and do not change it. On a CPU, the training has the same bits as without this callback.

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
        self.env = env
        self.every = every
        self.num_episodes = num_episodes
        self.seed = seed
        self.stop_at = stop_at
        self.patience = patience
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
        is_due = run.steps // self.every != self.evaluated // self.every
        if not is_due and run.steps < run.total_steps:
            return False
        agent = run.agent
        self.evaluated = run.steps

        # Evaluate and log; rewards with a state use that of the training
        share_objects(agent.env, self.env)
        penalty = agent.penalty if is_episode_env(self.env) else None
        results = summarise(self.env, agent.policy, penalty=penalty, num_episodes=self.num_episodes, seed=self.seed)
        for name, value in results.items():
            if name != "seconds":
                metrics[f"eval/{name}"] = value

        # Save the best agent
        mean_return = results["mean_return"]
        self.waited += 1
        if self.best is None or mean_return > self.best:
            self.best = mean_return
            self.waited = 0
            if run.run_dir is not None:
                agent.save(run.run_dir / BEST)

        # End the training
        if self.stop_at is not None and mean_return >= self.stop_at:
            return True
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, object]:
        """See `Callback.state_dict`."""
        return {"best": self.best, "waited": self.waited, "evaluated": self.evaluated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.best = state["best"]
        self.waited = state["waited"]
        self.evaluated = state["evaluated"]
