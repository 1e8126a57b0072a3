"""`Adam` (Kingma and Ba 2015): torch's, with a step that small networks do not wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

BETAS = 0.9, 0.999
"""Decay a step of the means of the gradient and of its square."""
EPS = 1e-5
"""Added to the square root, as in Huang et al. 2022."""
SMALL = 2**16
"""Elements up to which a gradient is copied into one piece to be measured: one call, where else it is one a tensor."""
# A Python number is made a tensor for each parameter that it is added to.
_ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


class Adam(torch.optim.Adam):
    """Adam whose step also cuts the gradient, and does nothing but the arithmetic.

    `torch.optim.Adam.step` and `torch.nn.utils.clip_grad_norm_` spend most of their time on a small network in options
    that nobody set. This one hands the same lists to the same kernels. State and groups are those of its parent.

    Args:
        parameters: what is trained; they may be of several dtypes and devices.
        learning_rate: at the start; ``param_groups[0]["lr"]`` changes it.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> adam = Adam([weight], learning_rate=0.1)
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> adam.cut_and_step(adam.grad_norm(), longest=0.5)
        >>> weight.data
        tensor([-0.1000,  0.1000])
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float) -> None:
        super().__init__(parameters, lr=learning_rate, betas=BETAS, eps=EPS, fused=True)
        self._kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        for p in self.param_groups[0]["params"]:
            self._kinds[p.device, p.dtype].append(p)
        self._small = len(self._kinds) == 1 and sum(p.numel() for p in self.param_groups[0]["params"]) <= SMALL

    def grad_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, a scalar; 0 if there is none."""
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        if self._small:
            return torch.linalg.vector_norm(_flatten_dense_tensors(gradients))
        norms = list(torch._foreach_norm(gradients))
        if len(self._kinds) > 1:
            norms = [norm.to(norms[0].device, torch.float32) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def cut_and_step(self, grad_norm: Tensor, *, longest: float) -> None:
        """One step along the gradient, which is divided so that it is no longer than ``longest``."""
        scale = ((grad_norm + 1e-6) / longest).clamp_(min=1.0)
        for (device, _), parameters in self._kinds.items():
            moved: list[Tensor] = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in moved if p.grad is not None]
            if not moved:
                continue
            states = [self.state[p] or self._begin(p) for p in moved]
            steps = [state["step"] for state in states]
            if device.type == "cpu":
                torch._foreach_add_(steps, _ONE, alpha=1.0)
            else:
                torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                moved,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=self.param_groups[0]["lr"],
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=0.0,
                eps=EPS,
                amsgrad=False,
                maximize=False,
                grad_scale=scale.to(device, torch.float32),
            )

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state before the first step, under the names that `torch.optim.Adam` gives it."""
        self.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
        return self.state[parameter]
