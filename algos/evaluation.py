"""Evaluation of a policy on whole episodes, without learning."""

import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from tensordict import TensorDict

from algos.collection import collect
from algos.make import is_ours, make_vector_environment
from algos.policies.policy import Policy, check_policy, check_spaces
from algos.training.metrics import EpisodeMeter, reference_metrics
from textenv.envs.text_env import TextEnv
from textenv.names import check_names
from textenv.rollout import is_episode_env


class Played(NamedTuple):
    """Result of `evaluate`."""

    returns: list[float]
    """Return of each episode, as paid by the environment."""
    rollout: TensorDict

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
) -> Played:
    """Play whole episodes.

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
    return Played(EpisodeMeter().finished(rollout)[0], rollout)


def _vector_env(env: Any, policy: Any, num_episodes: int) -> VectorEnv:
    """Return the environment given, or a vector environment of it."""
    check_policy(policy, call="evaluate(env, policy), in this order")
    if isinstance(env, str):
        split: dict[str, Any] = {"split": "test"} if is_ours(env) else {}
        return make_vector_environment(env, min(num_episodes, 16), **split)
    if isinstance(env, gymnasium.Env):
        inner = env.unwrapped
        return inner.vector if isinstance(inner, TextEnv) else SyncVectorEnv([lambda: env])
    if not isinstance(env, VectorEnv):
        raise TypeError(f"env is {env!r:.100}, expected an environment, a vector environment or a Gymnasium id")
    return env


def summarise(env: Any, policy: Policy, **options: Any) -> dict[str, float]:
    """Evaluate a policy and return the results as numbers.

    Args:
        env: as in `evaluate`; its KL penalty, if any, is measured too.
        policy: the policy to evaluate.
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
    penalty = env.penalty if is_episode_env(env) else None
    if penalty is None:
        return result
    penalty(rollout, policy)
    kl = reference_metrics(rollout, coefficient=penalty.coef)["reference/kl"]
    penalised = result["mean_return"] - penalty.coef * kl
    return result | {"score": result["mean_return"], "kl": kl, "penalised_return": penalised}
