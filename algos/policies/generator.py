"""`Generator`: the interface of engines that generate text for a policy, and rollouts that an engine generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.config import ClippedConfig, Config, weighs_samples
from algos.policies.policy import Policy
from algos.policies.random_streams import episode_seeds
from algos.ranks import collectives
from textenv.envs.episode_batch import OpenTurn
from textenv.envs.task import Conversation
from textenv.envs.vector_env import TextVectorEnv
from textenv.rollout import LogProbs

if TYPE_CHECKING:
    from algos.policies.lm import LMPolicy

ConfigT = TypeVar("ConfigT", bound=Config)

DEFAULT_MAX_IMPORTANCE_WEIGHT = 2.0
"""``max_importance_weight`` of a config without one, if an engine samples (Yao et al. 2025)."""


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
        """Take the policy's current weights, with adapters merged; called before each rollout."""

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> Sequence[Generated]:
        """Continue every turn, in any order and batches. The same seed (0 to 2^63) gives a turn the same sample."""


def check_generator(env: VectorEnv, policy: Policy, config: ConfigT) -> ConfigT:
    """Check that an engine can generate for an agent; return its config with importance weights.

    Args:
        env: the agent's environment.
        policy: the agent's policy.
        config: the agent's config.

    Returns:
        The config; without importance weights it gets a ``max_importance_weight``, `DEFAULT_MAX_IMPORTANCE_WEIGHT`.

    Raises:
        TypeError: if the policy is no language model, the environment is not of text, or the config has no
            importance weights.
        ValueError: in several processes, or if the policy truncates its distribution.
    """
    from algos.policies.lm import LMPolicy  # loads transformers

    # What an engine can generate for
    if not isinstance(env, TextVectorEnv) or not isinstance(policy, LMPolicy):
        raise TypeError(
            f"generator is given for a {type(policy).__name__} in a {type(env).__name__}: it generates text, for an "
            "LMPolicy in a TextVectorEnv"
        )
    if policy.truncates:
        raise ValueError(
            "the policy has top_k or top_p, but an engine does not say which tokens it kept: set both to None"
        )
    if not isinstance(config, ClippedConfig):
        raise TypeError(
            f"generator is given with {type(config).__name__}, which has no importance weights to correct "
            "for the engine's own log-probabilities: use PPO or GRPO"
        )
    if collectives.world_size() > 1:
        raise ValueError(f"generator is given to {collectives.world_size()} processes, expected one: omit torchrun")

    # Its probabilities are not exactly the policy's
    if weighs_samples(config):
        return config
    return replace(config, max_importance_weight=DEFAULT_MAX_IMPORTANCE_WEIGHT)


def collect_turns(
    generator: Generator,
    env: TextVectorEnv,
    policy: LMPolicy,
    num_episodes: int,
    group_size: int,
    seed: int | None,
) -> TensorDict:
    """Collect a rollout as `Collector` does, with whole turns from an engine.

    Args:
        generator: the engine; it takes the policy's weights first.
        env: text environment. Without replies, all episodes run at once.
        policy: the policy; its random generator draws the seeds of the turns.
        num_episodes: exact number of episodes.
        group_size: number of neighbouring episodes that share a prompt.
        seed: seed of the environment's reset, or None.

    Raises:
        ValueError: if the engine returns no tokens or too many, or a log-probability is missing or not finite.
    """
    generator.update_weights(policy)
    num_slots = num_episodes
    if isinstance(env.task, Conversation):
        num_slots = env.num_envs  # each slot of a conversation may need a process of its own
    env.start_episodes(num_episodes, seed=seed, group_size=group_size, slots=num_slots)
    sampling = Sampling(policy.temperature, policy.num_actions, env.ends.ids, env.ends.texts)
    recorded = LogProbs()

    # A turn of every running episode, until all have ended
    turns = env.open_turns
    while turns:
        seeds = episode_seeds(num_episodes, policy.generator)
        turn_seeds = [int(seeds[turn.episode]) for turn in turns]
        generated = generator.generate(turns, seeds=turn_seeds, sampling=sampling)
        for turn, (ids, log_probs) in zip(turns, generated, strict=True):
            _check_generated(generator, turn, ids, log_probs)
        counts = env.play_turns([ids for ids, _ in generated])

        # Log-probabilities of the tokens that the environment took, which may be fewer (a stop text)
        for turn, (_, log_probs), count in zip(turns, generated, counts.tolist(), strict=True):
            first_column = len(turn.prefix) - 1  # of the turn's first action
            columns = np.arange(first_column, first_column + count)
            recorded.record(np.full(count, turn.row), columns, log_probs[:count])
        turns = env.open_turns
    return recorded.added_to(env.take_episodes())


def _check_generated(generator: Generator, turn: OpenTurn, ids: Sequence[int], log_probs: Sequence[float]) -> None:
    """Raise a ValueError unless an engine has continued a turn as `Generator` says."""
    fits = 0 < len(ids) == len(log_probs) <= turn.max_new_tokens
    if not fits or not np.isfinite(log_probs).all():
        raise ValueError(
            f"{type(generator).__name__}.generate returned {ids!r:.100} with {log_probs!r:.100}, expected 1 to "
            f"{turn.max_new_tokens} token ids and the finite log-probability of each"
        )
