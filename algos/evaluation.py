"""Evaluating a policy: whole episodes, returns, and nothing learnt."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.collection import Cursor, collect
from algos.metrics import EpisodeMeter
from algos.policy import Policy


def evaluate(
    env: VectorEnv, policy: Policy, *, episodes: int = 20, deterministic: bool = False, seed: int = 0
) -> tuple[list[float], TensorDict]:
    """Play whole episodes.

    Args:
        env: reset with ``seed`` first.
        policy: who plays; its generator is seeded with ``seed``.
        episodes: exactly this many.
        deterministic: the most probable action instead of a sample.
        seed: of prompts or start states, and of the sampled actions.

    Returns:
        The return of each episode, as the environment paid it, and the rollout itself.
    """
    policy.generator.manual_seed(seed)
    cursor = Cursor(seed=seed)
    rollout = collect(env, policy, episodes=episodes, cursor=cursor, deterministic=deterministic)
    returns: list[Any] = EpisodeMeter().finished(rollout)[0]
    return returns, rollout
