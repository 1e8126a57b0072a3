"""Linear systems that are known by their products with vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradient(product: Callable[[Tensor], Tensor], target: Tensor, *, steps: int) -> Tensor:
    """Solve A x = b for a positive definite A that is known by its products (Hestenes and Stiefel 1952).

    Args:
        product: from a vector ``[n]`` to A times it.
        target: b ``[n]``.
        steps: at most so many; fewer once the residual is gone.

    Returns:
        x ``[n]``, exact after n steps but for rounding.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction, size = residual.clone(), residual @ residual
    for _ in range(steps):
        image = product(direction)
        stride = size / (direction @ image)
        solution, residual = solution + stride * direction, residual - stride * image
        size, last = residual @ residual, size
        if size < 1e-10 * (target @ target):
            break
        direction = residual + size / last * direction
    return solution
