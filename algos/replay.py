"""What the algorithms that learn from a replay buffer share: the buffer (torchrl's), its state, and target networks."""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

if TYPE_CHECKING:
    from torchrl.data import TensorDictReplayBuffer

from algos.config import ReplayConfig
from algos.envs.flatten import pack
from textenv.device import free_memory
from textenv.rollout import waits_after

logger = logging.getLogger(__name__)

STORED = ("observation", "action", "reward", "next_observation", "terminated")
"""Rollout columns stored in the replay buffer. A truncated step is like any other: its target is bootstrapped."""
BATCHES_AT_ONCE = 64
"""Maximum number of batches that are copied from the buffer at a time."""
BYTES_AT_ONCE = 2**26
"""Maximum number of bytes that are copied at a time, but at least one batch: few batches of images, many of vectors."""


def replay_buffer(config: ReplayConfig, generator: torch.Generator) -> "TensorDictReplayBuffer":
    """Make torchrl's replay buffer; imported here, so that other algorithms do not load torchrl.

    Args:
        config: its size.
        generator: generator that chooses the steps of each batch.
    """
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)  # torchrl logs every storage that it creates
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(config.buffer_size))
    buffer.set_rng(generator)
    return buffer


def store(rollout: TensorDict, buffer: "TensorDictReplayBuffer", *, num_actions: int | None = None) -> int:
    """Add a rollout's steps (True entries) to the buffer; return their number.

    Args:
        rollout: the rollout.
        buffer: the buffer.
        num_actions: number of Discrete actions, whose masks are stored too; None for other actions.

    Raises:
        ValueError: if agents wait for one another: the reward of a step, and the state after it, come later.
    """
    if (rollout["mask"] & waits_after(rollout)).any():
        raise ValueError(
            "in this environment agents wait for one another, so a step is not complete when it is taken, which the "
            "replay buffer of DQN, SAC and TD3 needs: use PPO or A2C"
        )
    columns = rollout.select(*STORED, "next_action_mask", strict=False)
    mask = rollout["mask"]
    if mask.sum() > buffer.storage.max_size:
        # It keeps what it is given last: the newest steps of all slots, not all steps of the last slots
        columns = columns.transpose(0, 1)
        mask = mask.transpose(0, 1)
    steps = _as_stored(columns[mask], num_actions)
    if len(steps) and not len(buffer):
        _warn_of_memory(steps, buffer.storage.max_size)
    buffer.extend(steps)
    return len(steps)


def _warn_of_memory(steps: TensorDict, buffer_size: int) -> None:
    """Log a warning if a full buffer of such steps takes more memory than is free."""
    full = _bytes_of_step(steps) * buffer_size
    free = free_memory(None)
    if free is not None and full > free:
        logger.warning(
            "a full replay buffer of %s steps takes %s GiB, but %s GiB are free: give a smaller buffer_size, unless "
            "the training has fewer steps than buffer_size",
            f"{buffer_size:,}",
            f"{full / 2**30:,.1f}",
            f"{free / 2**30:,.1f}",
        )


def _bytes_of_step(steps: TensorDict) -> int:
    return sum(values[0].nbytes for values in steps.values())


def _as_stored(steps: TensorDict, num_actions: int | None) -> TensorDict:
    """Return steps ``[n]`` as the buffer holds them.

    The columns are `STORED` and, of Discrete actions, ``next_action_mask``, bool ``[n, num_actions]``. It is always
    stored, because the storage would fill a column that comes and goes with False.
    """
    stored = steps.select(*STORED)

    # Observations in float32, as policies read them: half the memory
    for name in ("observation", "next_observation"):
        if stored[name].dtype == torch.float64:
            stored[name] = stored[name].float()

    # Without a mask all actions are available. Version 0.11 and earlier stored such a step with a mask of only False
    if num_actions is not None:
        masks = steps.get("next_action_mask", None)
        if masks is None:
            masks = torch.zeros(len(steps), num_actions, dtype=torch.bool, device=steps["reward"].device)
        has_no_mask = ~masks.any(dim=1, keepdim=True)
        stored["next_action_mask"] = masks | has_no_mask
    return stored


def may_learn(buffer: "TensorDictReplayBuffer", config: ReplayConfig) -> bool:
    """Whether the buffer holds enough steps to learn from; a batch may have a step twice."""
    return len(buffer) >= max(config.learning_starts, 1)


def count_updates(updates_due: float, num_steps: int, updates_per_step: float) -> tuple[int, float]:
    """Return the number of updates that follow ``num_steps`` new steps, and the fraction that is left for later."""
    updates_due += num_steps * updates_per_step
    num_updates = int(updates_due)
    return num_updates, updates_due - num_updates


def sample_batches(buffer: "TensorDictReplayBuffer", config: ReplayConfig, count: int) -> Iterator[TensorDict]:
    """Draw ``count`` batches of steps uniformly, many at once, which is much faster than one by one."""
    bytes_of_batch = _bytes_of_step(buffer[:1]) * config.batch_size
    batches_at_once = max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // bytes_of_batch))
    while count > 0:
        count_now = min(count, batches_at_once)
        yield from buffer.sample(count_now * config.batch_size).split(config.batch_size)
        count -= count_now


def buffer_state(buffer: "TensorDictReplayBuffer") -> dict[str, object]:
    """Return the steps in the buffer and its position, for `restore_buffer`."""
    remembered = dict(buffer[:].items()) if len(buffer) else None
    return {"remembered": remembered, "writer": buffer.writer.state_dict()}


def restore_buffer(
    buffer: "TensorDictReplayBuffer",
    state: Mapping[str, Any],
    space: spaces.Space,
    *,
    num_actions: int | None = None,
) -> None:
    """Restore what `buffer_state` returned, in an empty buffer. One of another size goes on with the newest steps.

    Args:
        buffer: the buffer.
        state: the state.
        space: space of one observation.
        num_actions: as for `store`.
    """
    if state["remembered"] is not None:
        columns = state["remembered"]
        steps = TensorDict(columns, batch_size=[len(columns["reward"])])
        # Up to version 0.11 there was float64, masks could lack, and images among other parts were not packed
        steps = _as_stored(steps, num_actions)
        for name in ("observation", "next_observation"):
            steps[name] = torch.from_numpy(pack(space, steps[name].cpu().numpy()))

        # A full buffer writes over its oldest step next, at the cursor
        cursor = state["writer"]["_cursor"]
        size = buffer.storage.max_size
        was_full = cursor < len(steps)
        is_as_before = size >= len(steps)
        if was_full:
            is_as_before = size == len(steps)
        if not is_as_before:
            oldest_first = torch.arange(len(steps)).roll(-cursor)
            if size < len(steps):
                logger.warning(
                    "buffer_size is %s, and the run remembers %s steps: the oldest are dropped", size, len(steps)
                )
            buffer.extend(steps[oldest_first[-size:]])
            return
        buffer.extend(steps)
    buffer.writer.load_state_dict(state["writer"])


@torch.no_grad()
def move_towards(target: nn.Module, network: nn.Module, rate: float) -> None:
    """Move a target network's weights towards another network's: θ' ← θ' + rate (θ - θ') (Polyak averaging)."""
    for target_weight, weight in zip(target.parameters(), network.parameters(), strict=True):
        target_weight.lerp_(weight, rate)
