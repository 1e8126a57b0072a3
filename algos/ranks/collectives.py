"""Data parallelism under ``torchrun``: every rank has the whole rollout, and runs networks on its share of the rows.

So advantages, normalizers, minibatches and metrics are those of one process, computed everywhere; a rank is a
micro-batch that happens to be elsewhere. A process alone returns from every function at once.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, pad
from torch import Tensor, distributed, nn

T = TypeVar("T")
COUNTS = ("reward/left_out", "reward/failed")
"""Metrics of an environment that are numbers of answers."""
TIMEOUT = timedelta(hours=1)
"""Maximum time for which a rank waits for the others: rank 0 alone evaluates, saves and logs."""
LARGE = 2**18
"""Number of elements above which a gradient is sent in a message of its own (1 MiB in float32)."""


def start() -> None:
    """Join the processes of ``torchrun`` or ``accelerate launch``, if this is one of several and has not joined."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not _joined():
        if (own := int(os.environ.get("LOCAL_RANK", 0))) < torch.cuda.device_count():
            torch.cuda.set_device(own)  # what "cuda" means in this process
        found, place, size = next(distributed.rendezvous("env://", timeout=TIMEOUT))
        # torchrun's store, if shared, outlives a restart, with the addresses of the processes that have ended.
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the count of restarts is that of this node
        store = distributed.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT'] if shared else 0}", found)
        distributed.init_process_group(store=store, rank=place, world_size=size, timeout=TIMEOUT)  # gloo, NCCL on GPUs


def rank() -> int:
    """Number of this process, from 0."""
    return distributed.get_rank() if _joined() else 0


def world_size() -> int:
    """Number of processes that train together."""
    return distributed.get_world_size() if _joined() else 1


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()  # builds without it have no is_initialized


def local_count(count: int, name: str, among: int | None = None) -> int:
    """Part of a count that belongs to each rank, or process; raises a ValueError if it cannot be split evenly."""
    among = world_size() if among is None else among
    if count % among:
        raise ValueError(f"{name} is {count}, which {among} processes cannot share: give a multiple")
    return count // among


def local_seed(seed: int, place: int | None = None) -> int:
    """Seed of the environments and actions of this rank, or place; that of the minibatches is one for all."""
    return seed + (rank() if place is None else place) * 10_000_019


def gather(value: T) -> list[T]:
    """Values of all ranks, in their order; `clone` views before, whose pickles hold all of their storage."""
    found: list[Any] = [value] * world_size()
    if world_size() > 1:
        distributed.all_gather_object(found, value)
    return found


def gather_rows(rollout: TensorDict) -> TensorDict:
    """Rows of all ranks' rollouts, as `join_rows` joins them."""
    return rollout if world_size() == 1 else join_rows(gather(rollout.cpu().clone()))


def join_rows(parts: Sequence[TensorDict]) -> TensorDict:
    """Rows of rollouts ``[b, t]``, which are changed, one below the other, ``[B, T]``; groups stay apart."""
    longest = max(part.shape[1] for part in parts)
    groups, allowed = 0, list[Tensor]()
    for part in parts:
        part["group"] = part["group"] + max(groups - int(part["group"].min()), 0)
        groups = int(part["group"].max()) + 1
        if "allowed" in part.keys():
            part["allowed"] = part["allowed"] + sum(map(len, allowed))
            allowed.append(part.get_non_tensor("allowed_sets"))
            del part["allowed_sets"]
    found: TensorDict = TensorDict.cat([pad(part, [0, 0, 0, longest - part.shape[1]]) for part in parts])
    return found.set_non_tensor("allowed_sets", torch.cat(allowed)) if allowed else found


def local_rows(batch: TensorDict) -> TensorDict:
    """This rank's rows of a batch: as many as every other's, by repeated ones of ``weight`` and ``log_weight`` 0."""
    if world_size() == 1:
        return batch
    count = -(-len(batch) // world_size())
    places = torch.arange(rank() * count, (rank() + 1) * count, device=batch.device)
    part = batch[places.clamp(max=len(batch) - 1)]
    for name in {"weight", "log_weight"} & part.keys():
        part[name][places >= len(batch)] = 0
    return part


def map_rows(function: Callable[[TensorDict], Sequence[Tensor]], batch: TensorDict) -> Sequence[Tensor]:
    """Results of a function that has a result for each row, the rows shared by the ranks."""
    if world_size() == 1:
        return function(batch)
    whole = []
    for own in function(local_rows(batch)):
        parts = [torch.empty_like(own) for _ in range(world_size())]
        distributed.all_gather(parts, own.contiguous())
        whole.append(torch.cat(parts)[: len(batch)])
    return whole


@torch.no_grad()
def all_reduce(parameters: Iterable[nn.Parameter], numbers: Iterable[Tensor]) -> None:
    """Replace gradients and numbers by their sums over the ranks; the same bits on every rank."""
    if world_size() == 1:
        return
    tensors = [*numbers]
    for parameter in parameters:  # a rank whose rows do not use it has no gradient, which counts as 0
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        tensors.append(parameter.grad)
    small = []
    for x in tensors:  # a large one by itself, in its own memory; the others in one message
        if x.numel() > LARGE and x.dtype is torch.float32 and x.is_contiguous():
            distributed.all_reduce(x)
        else:
            small.append(x)
    whole = torch.cat([x.detach().float().flatten() for x in small])
    distributed.all_reduce(whole)
    for x, found in zip(small, whole.split([x.numel() for x in small]), strict=True):
        x.copy_(found.view_as(x))


def mean(metrics: Mapping[str, float]) -> dict[str, float]:
    """Mean of each number over the ranks that have it; the sum of those in `COUNTS`."""
    if world_size() == 1:
        return dict(metrics)
    found = gather(dict(metrics))
    names = dict.fromkeys(name for each in found for name in each)
    values = {name: [each[name] for each in found if name in each] for name in names}
    return {name: sum(each) / (1 if name in COUNTS else len(each)) for name, each in values.items()}


def broadcast(value: T) -> T:
    """Value of rank 0."""
    return gather(value)[0]


def gather_parts(parts: Sequence[TensorDict]) -> Sequence[TensorDict]:
    """Parts of a minibatch on all ranks."""
    if world_size() == 1:
        return parts
    return [part.to(parts[0].device) for each in gather([part.cpu().clone() for part in parts]) for part in each]


def scale_by_world_size(
    compute: Callable[[], tuple[Tensor, dict[str, Tensor]]],
) -> Callable[[], tuple[Tensor, dict[str, Tensor]]]:
    """Divide a loss, and its metrics, that every rank computes in full by the world size: gradients are summed."""
    if world_size() == 1:
        return compute

    def shared() -> tuple[Tensor, dict[str, Tensor]]:
        loss, quantities = compute()
        return loss / world_size(), {name: x.detach() / world_size() for name, x in quantities.items()}

    return shared


def check_same(config: Any, weights: Iterable[Tensor]) -> None:
    """Raise a ValueError if ranks have different hyper-parameters or weights."""
    if world_size() > 1 and len({*gather(str((config, [x.double().sum().item() for x in weights])))}) > 1:
        raise ValueError("the processes have different configs or weights: give them the same seed in each of them")
