"""`Generator`: the interface of engines that generate text for a policy, and rollouts of whole turns by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict

from algos.config import ClippedConfig
from algos.policies.random_streams import episode_seeds
from algos.ranks import collectives
from textenv.envs.episode_batch import OpenTurn
from textenv.envs.task import Conversation
from textenv.envs.vector_env import TextVectorEnv

if TYPE_CHECKING:
    from algos.policies.lm import LMPolicy


class Sampling(NamedTuple):
    """How every token of a rollout is sampled; what differs by turn is in its `OpenTurn`."""

    temperature: float
    num_tokens: int
    """Size of the vocabulary; a model may have more ids, which are never sampled."""
    ends: list[int]
    """Ids that end a turn, and belong to it."""
    stop: tuple[str, ...]
    """Texts that end a turn; the environment looks for them too, so an engine may ignore them."""


Generated = tuple[Sequence[int], Sequence[float]]
"""Token ids that continue a turn, at least one, and the log-probability of each, nats, after temperature and masks."""


class Generator(Protocol):
    """Engine that generates text with a policy's weights."""

    def update_weights(self, policy: LMPolicy) -> None:
        """Take the policy's current weights, adapters merged; called before each rollout."""

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> Sequence[Generated]:
        """Continue every turn, in any order and batches; the same seed (0 to 2^63) gives it the same sample."""


def check_generator(env: Any, policy: Any, config: Any) -> Any:
    """Return the config of an agent with a generator: ``max_importance_weight`` is 2 instead of None (Yao et al. 2025).

    A TypeError without importance weights, language model or text environment; a ValueError in several processes.
    """
    from algos.policies.lm import LMPolicy  # loads transformers

    if not isinstance(env, TextVectorEnv) or not isinstance(policy, LMPolicy):
        names = f"a {type(policy).__name__} in a {type(env).__name__}"
        raise TypeError(f"generator is given for {names}: it generates text, for an LMPolicy in a TextVectorEnv")
    if not isinstance(config, ClippedConfig):
        raise TypeError(
            f"generator is given with {type(config).__name__}, which has no max_importance_weight to correct what an "
            "engine computes otherwise: use PPO or GRPO"
        )
    if collectives.world_size() > 1:
        raise ValueError(f"generator is given to {collectives.world_size()} processes, expected one: omit torchrun")
    return config if config.max_importance_weight else replace(config, max_importance_weight=2.0)


def collect_turns(
    generator: Generator, env: Any, policy: Any, num_episodes: int, group_size: int, seed: int | None
) -> TensorDict:
    """Collect a rollout as `Collector` does, with whole turns from an engine; a ValueError if it breaks its contract.

    Environment and policy are those that `check_generator` has checked. Without replies, all episodes run at once.
    """
    generator.update_weights(policy)
    slots = env.num_envs if isinstance(env.task, Conversation) else num_episodes  # a game may hold a process
    env.start_episodes(num_episodes, seed=seed, group_size=group_size, slots=slots)
    sampling = Sampling(policy.temperature, policy.num_actions, env.ends.ids, env.ends.texts)
    log_prob = np.zeros((num_episodes, env.max_length), dtype=np.float32)
    while turns := env.open_turns:
        seeds = episode_seeds(num_episodes, policy.generator)
        found = generator.generate(turns, seeds=[int(seeds[turn.row]) for turn in turns], sampling=sampling)
        for turn, (ids, log_probs) in zip(turns, found, strict=True):
            if not (0 < len(ids) == len(log_probs) <= turn.max_new_tokens) or not np.isfinite(log_probs).all():
                raise ValueError(
                    f"{type(generator).__name__}.generate returned {ids!r:.100} with {log_probs!r:.100}, expected 1 to "
                    f"{turn.max_new_tokens} token ids and the finite log-probability of each"
                )
        taken = env.play_turns([ids for ids, _ in found])
        for turn, (_, log_probs), count in zip(turns, found, taken.tolist(), strict=True):
            start = len(turn.prefix) - 1
            log_prob[turn.row, start : start + count] = log_probs[:count]
    rollout = env.take_episodes()
    rollout["log_prob"] = torch.from_numpy(log_prob[:, : rollout.shape[1]].copy())
    return rollout
