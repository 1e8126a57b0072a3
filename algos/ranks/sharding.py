"""Weights shared by the ranks for the steps of an update: FSDP2 (``torch.distributed.fsdp.fully_shard``)."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from algos.ranks import collectives
from textenv.lm.model import ForwardWrapper


class Shards:
    """Copy of a policy of which each rank holds 1/N of the weights, their gradients and Adam's averages.

    The policy itself stays whole: collecting, references, evaluation and saving need it. Its weights are copied into
    the shards before the steps of an update, and gathered after them; a layer is gathered while it computes.

    Args:
        policy: the policy to train, with the same weights on all ranks; each child of its outermost ``nn.ModuleList``
            (the layers of a language model, and of its critic) is gathered by itself.
    """

    def __init__(self, policy: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.whole, self.policy = policy, copy.deepcopy(policy)
        self.run = ForwardWrapper(self.policy)
        """Root of the shards: a call gathers its own weights, and returns the result of a function, with a gradient."""
        mesh = init_device_mesh(policy.device.type, (collectives.world_size(),))
        for module in [*layers_of(self.policy), self.run]:
            fully_shard(module, mesh=mesh)
        for module in self.run.modules():
            if isinstance(module, FSDPModule):  # gradients are added up: the ranks' losses are parts of one sum
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    @contextmanager
    def used_by(self, agent: Any) -> Iterator[None]:
        """Context in which the agent's policy is that of the shards; they are gathered at its end."""
        with torch.no_grad():
            for own, other in zip(self.policy.parameters(), self.whole.parameters(), strict=True):
                own.to_local().copy_(_shard(other, like=own).to_local())
            for own, other in zip(self.policy.buffers(), self.whole.buffers(), strict=True):
                own.copy_(other)
        self._agent, agent.policy = agent, self.policy
        try:
            yield
            self.leave()
        finally:
            agent.policy = self.whole  # after an error the weights are those of before

    @torch.no_grad()
    def leave(self) -> Any:
        """Gather the trained weights into the whole policy, and return it to the agent."""
        for own, other in zip(self.policy.parameters(), self.whole.parameters(), strict=True):
            if own.requires_grad:
                other.copy_(own.full_tensor())
        self._agent.policy = self.whole
        return self.whole


class ShardedAdam(torch.optim.AdamW):
    """`algos.optimizer.Adam` of shards; its saved state is that of whole parameters, on rank 0."""

    def clip_grad_norm_(self, max_norm: float, groups: Sequence[int]) -> Tensor:
        """See `algos.optimizer.Adam.clip_grad_norm_`."""
        parameters = [p for i in groups for p in self.param_groups[i]["params"]]
        norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm.full_tensor()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, gathered tensor by tensor: on rank 0; on others it has no averages."""

        def whole(x: Any) -> Tensor | None:
            found = x.full_tensor()
            return None if collectives.rank() else found.cpu()

        found = super().state_dict()
        state = {
            i: {name: x if name == "step" else whole(x) for name, x in of.items()} for i, of in found["state"].items()
        }
        return found | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of whole parameters."""
        owners = [p for group in self.param_groups for p in group["params"]]
        saved = state_dict["state"].items()
        state = {i: {n: x if n == "step" else _shard(x, like=owners[i]) for n, x in of.items()} for i, of in saved}
        super().load_state_dict(state_dict | {"state": state})


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Children of a module's outermost ``nn.ModuleList``."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else layers_of(child)


def _shard(whole: Tensor, *, like: Any) -> Any:
    """This rank's part of a tensor that all ranks have, as a DTensor laid out like another."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
