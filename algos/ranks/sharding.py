"""Weights shared by the ranks for the steps of an update: FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from algos.ranks import collectives
from textenv.lm.model import ForwardWrapper

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Shards:
    """Sharded copy of a policy: each rank holds 1/N of the weights, of their gradients and of Adam's averages.

    The policy itself stays whole: collecting, references, evaluation and saving need it. Its weights are copied into
    the shards before the steps of an update, and gathered after them. A layer is gathered while it computes.

    Args:
        policy: the policy to train, with the same weights on all ranks. Each child of its outermost ``nn.ModuleList``
            (the layers of a language model, and of its critic) is gathered by itself.
    """

    def __init__(self, policy: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.unsharded = policy
        """The policy that is not sharded."""
        self.policy = copy.deepcopy(policy)
        """The sharded copy."""
        self.run = ForwardWrapper(self.policy)
        """Root of the shards: calls a function while the weights outside the layers are gathered, with gradients."""

        # Layers, and everything else
        mesh = init_device_mesh(policy.device.type, (collectives.world_size(),))
        for module in [*layers_of(self.policy), self.run]:
            fully_shard(module, mesh=mesh)

        # Gradients are summed, not averaged: the ranks' losses are parts of one sum
        for module in self.run.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    @contextmanager
    def used_by(self, agent: Any) -> Iterator[None]:
        """Context in which the agent has the sharded policy; at its end the weights are gathered."""
        # Copy the weights into the shards
        with torch.no_grad():
            for sharded, full in zip(self.policy.parameters(), self.unsharded.parameters(), strict=True):
                sharded.to_local().copy_(_shard(full, like=sharded).to_local())
            for buffer, full in zip(self.policy.buffers(), self.unsharded.buffers(), strict=True):
                buffer.copy_(full)

        self._agent = agent
        agent.policy = self.policy
        try:
            yield
            self.leave()
        finally:
            agent.policy = self.unsharded  # after an error it has the weights from before the update

    @torch.no_grad()
    def leave(self) -> Any:
        """Gather the trained weights into the whole policy, put this back into the agent, and return it."""
        for sharded, full in zip(self.policy.parameters(), self.unsharded.parameters(), strict=True):
            if sharded.requires_grad:
                full.copy_(sharded.full_tensor())
        self._agent.policy = self.unsharded
        return self.unsharded


class ShardedAdam(torch.optim.AdamW):
    """`algos.optimizer.Adam` for shards; its saved state is that of whole parameters, and only rank 0 has it."""

    def clip_grad_norm_(self, max_norm: float, groups: Sequence[int]) -> Tensor:
        """See `algos.optimizer.Adam.clip_grad_norm_`."""
        parameters = [p for i in groups for p in self.param_groups[i]["params"]]
        norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm.full_tensor()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of whole parameters, gathered one by one; other ranks than 0 have None for averages."""
        state_dict = super().state_dict()
        state = {}
        for i, state_of_parameter in state_dict["state"].items():
            state[i] = {name: _gathered(name, value) for name, value in state_of_parameter.items()}
        return state_dict | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of whole parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for i, state_of_parameter in state_dict["state"].items():
            state[i] = {}
            for name, value in state_of_parameter.items():
                if name != "step":
                    value = _shard(value, like=parameters[i])
                state[i][name] = value
        super().load_state_dict(state_dict | {"state": state})


def _gathered(name: str, value: Any) -> Any:
    """Return an entry of Adam's state: the step count itself; averages gathered on rank 0, None on other ranks."""
    if name == "step":
        return value
    full = value.full_tensor()  # all ranks take part
    return full.cpu() if collectives.rank() == 0 else None


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of each outermost ``nn.ModuleList`` in a module."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers_of(child)


def _shard(full: Tensor, *, like: "DTensor") -> "DTensor":
    """Return this rank's part of a tensor that all ranks have, as a DTensor laid out like another."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
