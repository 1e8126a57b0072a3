"""Fast `Adam` (Kingma and Ba 2015): torch's kernels, with less overhead per step, and without subnormal numbers."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

LARGEST_FLAT = 2**16
"""Maximum number of elements of all gradients to concatenate them, so that their norm is one call."""
NEGLIGIBLE = 1e-30
"""Averages below this size are set to 0 by `clear_negligible`."""
CLEARED_EVERY = 100
"""Steps from one search for negligible averages to the next."""
# A Python number would be converted to a tensor for each parameter that it is added to.
_ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


class Adam(torch.optim.AdamW):
    """Equivalent of `algos.optimizer.Adam` that scales the gradients inside the step.

    On a small network, `torch.optim.AdamW.step` and `torch.nn.utils.clip_grad_norm_` spend most of their time on unused
    options. This class passes the same lists to the same kernels. Arguments, state and groups are those of its parent.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> adam = Adam([{"params": [weight]}], lr=0.1, fused=True)
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> adam.clip_grad_norm_(0.5, [0])
        tensor(5.)
        >>> adam.step()
        >>> weight.data
        tensor([-0.1000,  0.1000])
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        self._sort_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, of which torch keeps only its own attributes."""
        super().__setstate__(state)
        self._sort_parameters()

    def _sort_parameters(self) -> None:
        """Find the parameters of each kind."""
        self._by_kind: list[dict[tuple[torch.device, torch.dtype], list[nn.Parameter]]] = []
        """Parameters of each group, by kind: device and dtype."""
        kinds = set()
        num_elements = 0
        for group in self.param_groups:
            group_by_kind = defaultdict(list)
            for parameter in group["params"]:
                kind = (parameter.device, parameter.dtype)
                group_by_kind[kind].append(parameter)
                kinds.add(kind)
                num_elements += parameter.numel()
            self._by_kind.append(group_by_kind)
        self._has_one_kind = len(kinds) == 1
        self._is_small = self._has_one_kind and num_elements <= LARGEST_FLAT
        self._scales: dict[int, Tensor] = {}
        """Divisor of each group's gradient in the next step."""

    def clip_grad_norm_(self, max_norm: float, groups: Sequence[int]) -> Tensor:
        """See `algos.optimizer.Adam.clip_grad_norm_`; the gradients are scaled by the next step."""
        # Norm of all gradients
        gradients = [p.grad for p in self._parameters_of(groups) if p.grad is not None]
        if not gradients:
            norm = torch.zeros((), device="cpu")
        elif self._is_small:
            norm = torch.linalg.vector_norm(_flatten_dense_tensors(gradients))
        else:
            norms = list(torch._foreach_norm(gradients))
            if not self._has_one_kind:
                norms = [x.to(norms[0].device, torch.float32) for x in norms]
            norm = torch.linalg.vector_norm(torch.stack(norms))

        # Divisor that clips it
        scale = ((norm + 1e-6) / max_norm).clamp_(min=1.0)
        self._scales |= dict.fromkeys(groups, scale)
        return norm

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step, with the gradients divided by the factor of `clip_grad_norm_`."""
        if self.has_hooks():
            _step_with_hooks(self)
        else:
            self._step()

    # Otherwise torch wraps `step` in a profiler's context and a search for hooks, which costs as much as the step
    step.hooked = True  # type: ignore[attr-defined]

    def has_hooks(self) -> bool:
        """Whether something is to be called before or after each step (`torch.optim.Optimizer` registers it)."""
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        return any(hooks)

    @torch.no_grad()
    def _step(self) -> None:
        for number, group_by_kind in enumerate(self._by_kind):
            for (device, _), parameters in group_by_kind.items():
                self._step_kind(self.param_groups[number], device, parameters, self._scales[number])

    def _step_kind(
        self, group: dict[str, Any], device: torch.device, parameters: list[nn.Parameter], scale: Tensor
    ) -> None:
        """Step the parameters of one device and dtype that have a gradient."""
        trained: list[Tensor] = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        if not trained:
            return
        states = [self.state[p] or self.begin(p) for p in trained]

        # Count the step
        steps = [state["step"] for state in states]
        if device.type == "cpu":
            torch._foreach_add_(steps, _ONE, alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)

        # Step all parameters by one kernel
        torch._fused_adamw_(
            trained,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # maximum of the squares, for amsgrad
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
        if device.type == "cpu" and int(steps[0]) % CLEARED_EVERY == 0:
            for state in states:
                clear_negligible(state["exp_avg"], state["exp_avg_sq"])

    def _parameters_of(self, groups: Sequence[int]) -> list[nn.Parameter]:
        """Parameters of the groups with these numbers."""
        return [p for group in groups for p in self.param_groups[group]["params"]]

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Initialize the state of a parameter, with the keys of `torch.optim.Adam`; return it."""
        self.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
        return self.state[parameter]


def clear_negligible(mean: Tensor, square: Tensor) -> None:
    """Set averages that are smaller than `NEGLIGIBLE` to 0, in place.

    With an eps of 1e-8 or more this changes no step, but it saves time. The averages of a weight whose gradient is 0,
    such as one of a hidden unit that is off, shrink by a factor in each step, until rounding holds them just above 0. A
    CPU computes 25 times slower with such subnormal numbers (below 1.2e-38 in float32): docs/results/speed.md.

    Args:
        mean: Adam's average of the gradient of some weights.
        square: its average of the squared gradient, of the same shape.
    """
    mean.masked_fill_(mean.abs() < NEGLIGIBLE, 0.0)
    # A mean that is left would be divided by 0
    square.masked_fill_((square < NEGLIGIBLE) & (mean == 0.0), 0.0)


_step_with_hooks = torch.optim.Optimizer.profile_hook_step(Adam._step)
"""`Adam._step` as torch wraps it: hooks before and after, in a profiler's context."""
