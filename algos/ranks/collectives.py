"""Data parallelism under ``torchrun``: every rank has the whole rollout, and runs networks on its share of the rows.

So every rank computes the same advantages, normalizers, minibatches and metrics as a single process would; a rank is
only a micro-batch that is computed elsewhere. In a single process every function here returns at once.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from tensordict import TensorDict, pad
from torch import Tensor, distributed, nn

from textenv.rollout import episode_of_row

T = TypeVar("T")
COUNTS = ("reward/left_out", "reward/failed")
"""Metrics of an environment that count answers; they are summed over the ranks."""
TIMEOUT = timedelta(hours=1)
"""Maximum time for which a rank waits for the others, because rank 0 alone evaluates, saves and logs."""
LARGE_GRADIENT_ELEMENTS = 2**18
"""Elements of a gradient above which it is sent in a message of its own (1 MiB in float32)."""


def start() -> None:
    """Join the processes of ``torchrun`` or ``accelerate launch``, if this is one of several and has not joined."""
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1 or _joined():
        return

    # What "cuda" means in this process
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)

    # A shared store of torchrun outlives a restart, and still has the addresses of the processes that have ended. So
    # each attempt uses a prefix of its own. Without a shared store all use one, because each node counts its restarts
    # for itself.
    rendezvous_store, own_rank, size = next(distributed.rendezvous("env://", timeout=TIMEOUT))
    attempt = "0"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = distributed.PrefixStore(f"attempt {attempt}", rendezvous_store)
    distributed.init_process_group(store=store, rank=own_rank, world_size=size, timeout=TIMEOUT)  # gloo, NCCL on GPUs


def rank() -> int:
    """Return the number of this process, from 0."""
    return distributed.get_rank() if _joined() else 0


def world_size() -> int:
    """Return the number of processes that train together."""
    return distributed.get_world_size() if _joined() else 1


def _joined() -> bool:
    """Return True in a process of a group."""
    return distributed.is_available() and distributed.is_initialized()  # builds without it have no is_initialized


def local_count(count: int, name: str, among: int | None = None) -> int:
    """Return the part of a count that belongs to each process.

    Args:
        count: number to split.
        name: name of the number in the error message.
        among: number of processes; None: `world_size`.

    Raises:
        ValueError: if it cannot be split evenly.
    """
    if among is None:
        among = world_size()
    if count % among:
        raise ValueError(f"{name} is {count}, which {among} processes cannot share: give a multiple")
    return count // among


def local_seed(seed: int, process: int | None = None) -> int:
    """Return the seed of environments and actions for a rank; minibatches have the same seed on all ranks.

    Args:
        seed: seed of the run.
        process: number of the rank, or of a worker; None: this rank.
    """
    if process is None:
        return local_seed(seed, rank())
    return seed + process * 10_000_019


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in their order; `clone` a view first, because its pickle holds its whole storage.

    Every rank must call this, and gets all values.
    """
    values = [value] * world_size()
    if world_size() > 1:
        distributed.all_gather_object(values, value)
    return values


def gather_rows(rollout: TensorDict) -> TensorDict:
    """Return the rows of all ranks' rollouts, joined by `join_rows`."""
    if world_size() == 1:
        return rollout
    return join_rows(gather(rollout.cpu().clone()))


def join_rows(parts: Sequence[TensorDict]) -> TensorDict:
    """Concatenate rollouts by rows, padded to the longest; groups and episodes are renumbered. Modifies its arguments.

    Args:
        parts: rollouts ``[b, t]``.

    Returns:
        A rollout ``[B, T]``.
    """
    next_group = 0
    next_episode = 0
    has_several_rows = any("episode" in part.keys() for part in parts)
    allowed_sets: list[Tensor] = []
    for part in parts:
        # Groups of different parts stay different
        group = part["group"]
        shift = max(next_group - int(group.min()), 0)
        part["group"] = group + shift
        next_group = int(part["group"].max()) + 1

        # So do episodes, if one of them has several rows
        if has_several_rows:
            episode = episode_of_row(part) + next_episode
            next_episode = int(episode.max()) + 1
            part["episode"] = episode[:, None].expand(part.shape)

        # Indices into the concatenated sets of allowed tokens
        if "allowed" in part.keys():
            num_earlier_sets = sum(len(earlier_sets) for earlier_sets in allowed_sets)
            part["allowed"] = part["allowed"] + num_earlier_sets
            allowed_sets.append(part.get_non_tensor("allowed_sets"))
            del part["allowed_sets"]

    # [b, t] -> [b, T] -> [B, T]
    num_columns = max(part.shape[1] for part in parts)
    padded = [pad(part, [0, 0, 0, num_columns - part.shape[1]]) for part in parts]
    rollout: TensorDict = TensorDict.cat(padded)
    if allowed_sets:
        rollout.set_non_tensor("allowed_sets", torch.cat(allowed_sets))
    return rollout


def local_rows(batch: TensorDict) -> TensorDict:
    """Return this rank's rows of a batch, equally many on every rank.

    If they cannot be split evenly, the last row is repeated with ``weight`` and ``log_weight`` 0.
    """
    if world_size() == 1:
        return batch
    num_rows = -(-len(batch) // world_size())  # rounded up
    indices = torch.arange(rank() * num_rows, (rank() + 1) * num_rows, device=batch.device)
    part = batch[indices.clamp(max=len(batch) - 1)]
    for name in {"weight", "log_weight"} & part.keys():
        part[name][indices >= len(batch)] = 0
    return part


def map_rows(function: Callable[[TensorDict], Sequence[Tensor]], batch: TensorDict) -> Sequence[Tensor]:
    """Return the results of a function for all rows; each rank computes its share of them.

    Args:
        function: returns tensors with one entry per row, which depends on this row only.
        batch: rows, the same on all ranks.
    """
    if world_size() == 1:
        return function(batch)
    results = []
    for local_result in function(local_rows(batch)):
        parts = [torch.empty_like(local_result) for _ in range(world_size())]
        distributed.all_gather(parts, local_result.contiguous())
        results.append(torch.cat(parts)[: len(batch)])
    return results


@torch.no_grad()
def all_reduce(parameters: Iterable[nn.Parameter], numbers: Iterable[Tensor]) -> None:
    """Replace gradients and numbers by their sums over the ranks; the same bits on every rank."""
    if world_size() == 1:
        return

    # A rank whose rows do not use a parameter has no gradient, which counts as 0
    tensors = [*numbers]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        tensors.append(parameter.grad)

    # Large tensors are summed one by one, in their own memory
    small = []
    for x in tensors:
        if x.numel() > LARGE_GRADIENT_ELEMENTS and x.dtype is torch.float32 and x.is_contiguous():
            distributed.all_reduce(x)
        else:
            small.append(x)

    # The others in one message
    message = torch.cat([x.detach().float().flatten() for x in small])
    distributed.all_reduce(message)
    sums = message.split([x.numel() for x in small])
    for x, total in zip(small, sums, strict=True):
        x.copy_(total.view_as(x))


def mean(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each number over the ranks that have it; the sum of those in `COUNTS`."""
    if world_size() == 1:
        return dict(metrics)

    # Values of each number, in the order of ranks
    values: dict[str, list[float]] = {}
    for metrics_of_rank in gather(dict(metrics)):
        for name, value in metrics_of_rank.items():
            values.setdefault(name, []).append(value)

    results = {}
    for name, values_of_ranks in values.items():
        count = len(values_of_ranks)
        if name in COUNTS:
            count = 1
        results[name] = sum(values_of_ranks) / count
    return results


def broadcast(value: T) -> T:
    """Return rank 0's value on all ranks; every rank must call this."""
    return gather(value)[0]


def gather_parts(parts: Sequence[TensorDict]) -> Sequence[TensorDict]:
    """Return the parts of a minibatch of all ranks, in their order, on this rank's device."""
    if world_size() == 1:
        return parts
    device = parts[0].device
    all_parts = []
    for parts_of_rank in gather([part.cpu().clone() for part in parts]):
        all_parts += [part.to(device) for part in parts_of_rank]
    return all_parts


def scale_by_world_size(
    compute: Callable[[], tuple[Tensor, dict[str, Tensor]]],
) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
    """Divide a loss that every rank computes in full by the world size, because gradients are summed.

    Args:
        compute: returns the loss and metrics.

    Returns:
        A function that returns both, divided.
    """
    if world_size() == 1:
        return compute

    def compute_scaled() -> tuple[Tensor, dict[str, Tensor]]:
        loss, quantities = compute()
        scaled_quantities = {name: x.detach() / world_size() for name, x in quantities.items()}
        return loss / world_size(), scaled_quantities

    return compute_scaled


def check_same(config: object, weights: Iterable[Tensor]) -> None:
    """Raise a ValueError if ranks have different hyper-parameters or weights."""
    if world_size() == 1:
        return
    sums = [x.double().sum().item() for x in weights]
    descriptions = gather(str((config, sums)))
    if len(set(descriptions)) > 1:
        raise ValueError("the processes have different configs or weights: give them the same seed in each of them")
