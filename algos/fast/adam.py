"""`Adam` (Kingma and Ba 2015): torch's, with less overhead per step for small networks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

SMALL = 2**16
"""Maximum number of elements for which gradients are concatenated for the norm: one call, not one per tensor."""
# A Python number would be converted to a tensor for each parameter that it is added to.
_ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


class Adam(torch.optim.AdamW):
    """AdamW with gradient clipping in the step, and without the overhead of unused options.

    On a small network, `torch.optim.AdamW.step` and `torch.nn.utils.clip_grad_norm_` spend most of their time on unused
    options. This class passes the same lists to the same kernels. State and groups are those of its parent.

    Args:
        groups: parameter groups; dtypes and devices may differ.
        learning_rate: initial learning rate; ``param_groups[i]["lr"]`` changes it.
        eps: added to the square root in the denominator.
        betas: decay rates per step of the running means of the gradient and of its square.
        weight_decay: decoupled weight decay; 0 gives Adam.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> adam = Adam([[weight]], learning_rate=0.1)
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> adam.clip_and_step(adam.grad_norm(), longest=0.5)
        >>> weight.data
        tensor([-0.1000,  0.1000])
    """

    def __init__(
        self,
        groups: Sequence[Iterable[nn.Parameter]],
        *,
        learning_rate: float,
        eps: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            [{"params": list(group)} for group in groups],
            lr=learning_rate,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )
        self._kinds: list[dict[tuple[torch.device, torch.dtype], list[nn.Parameter]]] = []
        for group in self.param_groups:
            self._kinds.append(defaultdict(list))
            for p in group["params"]:
                self._kinds[-1][p.device, p.dtype].append(p)
        self._one_kind = len({kind for kinds in self._kinds for kind in kinds}) == 1
        self._small = self._one_kind and sum(p.numel() for group in self._of() for p in group) <= SMALL

    def grad_norm(self, *groups: int) -> Tensor:
        """Global gradient norm (L2) of these groups, or of all: a scalar; 0 if there are no gradients."""
        gradients = [p.grad for group in self._of(*groups) for p in group if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        if self._small:
            return torch.linalg.vector_norm(_flatten_dense_tensors(gradients))
        norms = list(torch._foreach_norm(gradients))
        if not self._one_kind:
            norms = [norm.to(norms[0].device, torch.float32) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def clip_and_step(self, grad_norm: Tensor, *groups: int, longest: float) -> None:
        """Step these groups, or all, with gradients scaled down if ``grad_norm`` exceeds ``longest``."""
        scale = ((grad_norm + 1e-6) / longest).clamp_(min=1.0)
        for group in groups or range(len(self.param_groups)):
            for (device, _), parameters in self._kinds[group].items():
                self._step_kind(self.param_groups[group], device, parameters, scale)

    def _step_kind(
        self, group: dict[str, Any], device: torch.device, parameters: list[nn.Parameter], scale: Tensor
    ) -> None:
        """Step the parameters of one device and dtype."""
        moved: list[Tensor] = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in moved if p.grad is not None]
        if not moved:
            return
        states = [self.state[p] or self._begin(p) for p in moved]
        steps = [state["step"] for state in states]
        if device.type == "cpu":
            torch._foreach_add_(steps, _ONE, alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            moved,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale.to(device, torch.float32),
        )

    def _of(self, *groups: int) -> list[list[nn.Parameter]]:
        """Parameters of these groups, or of all."""
        return [self.param_groups[group]["params"] for group in groups or range(len(self.param_groups))]

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Initialize the state of a parameter, with the keys of `torch.optim.Adam`."""
        self.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
        return self.state[parameter]
