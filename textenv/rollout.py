"""The rollout: one schema for control and for text.

A rollout is a `TensorDict` with batch size ``[B, T]``; every key has those two dimensions first and no
trailing 1. In control a row is one environment slot, T steps long. In text a row is one whole episode: it
starts at position 0 and is padded on the right, so causal attention needs no attention mask.

============================  =====================================  ==========================================
key                           control                                text
============================  =====================================  ==========================================
``observation``               ``[B, T, *]``                          int64, the token at position t; the state
                                                                     at t is the prefix ``[:, :t+1]``
``next_observation``          ``[B, T, *]``, the final observation   absent (the shifted observation, then the
                              where an episode ended                 last action)
``action``                    int64 or float32                       int64, the token at position t+1
``reward``                    float32, the environment's             float32, the score on a turn's last token
``terminated``, ``truncated`` bool; the first stops the bootstrap,   EOS; the length limit
                              both cut the trace
``mask``                      False on reset rows and where an       True on the tokens that the policy chose
                              environment failed
``is_init``                   True on an episode's first observation True at position 0
``log_prob``                  of the behaviour policy                the same
``state``                     ``[B, T, *]`` of recurrent policies,    absent
                              before the action, detached
``action_mask``/``allowed``   bool ``[B, T, A]``, if there is one     int64 index into ``allowed_sets``
``next_action_mask``          bool ``[B, T, A]``, of                 absent
                              ``next_observation``
``group``                     int64, the slot, or rows that share    int64, rows that share a prompt
                              a reset seed
``value``, ``next_value``,    added by whoever needs them            the same
``advantage``,
``value_target``,
``reference_log_prob``, ``kl``
============================  =====================================  ==========================================

Beside the columns a text rollout may carry ``allowed_sets`` (non-tensor): a bool tensor ``[S, n]`` of which
row 0 allows every token. One True entry of ``mask`` is one step, everywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor


class Evaluation(NamedTuple):
    """What a policy says about the actions of a rollout; every tensor is ``[B, T]``. Only True entries count."""

    log_prob: Tensor
    """log π(action | state), float32, nats."""
    entropy: Tensor
    """Entropy of π(· | state), float32, nats."""
    value: Tensor | None
    """Value of the state, float32; None from a reference, which has none."""


class Reference(Protocol):
    """Anything that scores the actions of a rollout can be a KL penalty's reference."""

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """Score the rollout's actions."""
        ...


class EpisodeEnv(Protocol):
    """A vector environment that hands over whole episodes in the schema (`TextVectorEnv` is one)."""

    @property
    def running(self) -> np.ndarray:
        """Bool ``[num_envs]``: slots with an episode under way."""
        ...

    @property
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column in the coming rollout of the next action of each running slot."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers about the episodes taken last, for the log."""
        ...

    @property
    def action_mask(self) -> Tensor | None:
        """Bool ``[num_envs, n]``, or None where every action is open."""
        ...

    def fork(self) -> AbstractContextManager[None]:
        """Within it prompts are dealt in an order of its own; after it the order is as it was."""
        ...

    def start_episodes(self, episodes: int, *, seed: int | None = None, group_size: int = 1) -> dict[str, np.ndarray]:
        """Deal prompts for exactly that many episodes, neighbours of a group sharing one; the first observation."""
        ...

    def advance(self, actions: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Act in the running slots; returns the observation and bool, the slots that changed their episode."""
        ...

    def take_episodes(self) -> TensorDict:
        """Return the finished episodes, scored, one a row."""
        ...


def is_episode_env(env: Any) -> TypeGuard[EpisodeEnv]:
    """Whether an environment hands over whole episodes."""
    return hasattr(type(env), "take_episodes")


def check_mask(mask: Tensor, **tensors: Tensor) -> None:
    """Raise unless the mask is bool and the tensors have its shape.

    A swapped argument of equal shape is caught by its dtype; ``[B]`` against ``[B, 1]`` would broadcast to
    ``[B, B]`` without a word.

    Raises:
        TypeError: if the mask is not bool.
        ValueError: if a tensor has another shape; names it and prints both.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}, expected torch.bool: pass the rollout's 'mask' column")
    for name, x in tensors.items():
        if x.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, mask has {tuple(mask.shape)}: they must be equal")


def masked_mean(x: Tensor, *, mask: Tensor) -> Tensor:
    """Mean of ``x`` over the True entries; what stands elsewhere (NaN included) has no effect."""
    check_mask(mask, x=x)
    return torch.where(mask, x, 0).sum() / mask.sum()


def sequences(rollout: TensorDict) -> Tensor:
    """Tokens of a text rollout with the last action appended: int64 ``[B, T+1]``."""
    return torch.cat([rollout["observation"][:, :1], rollout["action"]], dim=1)


def following(values: Tensor, *, mask: Tensor, done: Tensor) -> Tensor:
    """Value at each entry's successor: the episode's next True entry, or its final observation.

    Args:
        values: ``[B, T+1]``, the value at every position.
        mask: bool ``[B, T]``.
        done: bool ``[B, T]``, terminated or truncated.

    Returns:
        ``[B, T]``: entry t holds ``values`` at the first position after t that is a True entry, or at the
        position after the one where the episode ends.
    """
    steps = mask.shape[1]
    position = torch.arange(steps, device=mask.device).expand_as(mask)
    # A stop is a place where a state is looked at: the start of a True entry, or the end of an episode.
    stop_here = torch.where(mask, position, steps)
    stop_after = torch.where(done, position + 1, steps)
    coming = torch.cat([stop_here[:, 1:], stop_here.new_full((len(mask), 1), steps)], dim=1)
    nearest = torch.minimum(stop_after, coming).flip(1).cummin(dim=1).values.flip(1)
    return values.gather(1, nearest)


class Allowed(NamedTuple):
    """Which tokens may be chosen at each of m entries."""

    chosen: Tensor
    """int64 ``[m]``, a row of ``sets`` for each entry."""
    sets: Tensor
    """bool ``[S, n]``."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Bool ``[stop - start, n]``: the tokens allowed at these entries. Never ask for all at once."""
        return self.sets[self.chosen[start:stop]]


def allowed_tokens(rollout: TensorDict) -> Allowed | None:
    """What is allowed at each True entry of a text rollout; None if everything is everywhere."""
    if "allowed" not in rollout.keys():
        return None
    chosen = rollout["allowed"][rollout["mask"]]
    return Allowed(chosen, rollout.get_non_tensor("allowed_sets").to(chosen.device))
