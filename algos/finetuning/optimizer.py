"""Supervised training's optimiser: AdamW on a warm-up and a cosine, with dropout as the model's config says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from algos.training.invariants import check_finite_gradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CosineOptimizer:
    """AdamW (Loshchilov and Hutter 2019) whose step size rises linearly, then falls to 0 on a half cosine.

    Args:
        parameters: what is trained; those without a gradient of their own (``requires_grad`` False) are left out.
        config: its ``learning_rate`` is the step size at its highest, ``warmup`` the share of the steps in which it
            rises; matrices decay by ``weight_decay``, but no biases, norms and other vectors; a gradient longer than
            ``max_grad_norm`` is scaled down to it.
        steps: how many there will be.

    Raises:
        ValueError: if nothing can be trained.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], config: Any, *, steps: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ValueError(
                "no parameter of the model requires a gradient, so nothing would be trained: call "
                "model.requires_grad_(True), or train the policy and not its reference"
            )
        groups = [
            {"params": [p for p in self._parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True)
        self.optimizer.zero_grad()  # of what another training left behind, such as PPO's last step
        self.config = config
        self._steps, self._rising, self._done = steps, math.ceil(config.warmup_ratio * steps), 0

    def step(self) -> Tensor:
        """Step along the gradients that have gathered and clear them; returns their norm before it was cut.

        Raises:
            FloatingPointError: on a gradient that is not finite.
        """
        norm = clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        check_finite_gradient(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * self._share()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._done += 1
        return norm

    def _share(self) -> float:
        """The coming step's size as a share of the highest."""
        if self._done < self._rising:
            return (self._done + 1) / self._rising
        fallen = (self._done - self._rising) / max(1, self._steps - self._rising)
        return 0.5 * (1 + math.cos(math.pi * fallen))


@contextmanager
def dropout_on(model: PreTrainedModel, *, seed: int) -> Iterator[None]:
    """Within it the model drops out as its own config says, by random numbers from the seed.

    After it the model is in evaluation mode, and the caller's random numbers go on as if nothing had been drawn.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            model.eval()


def length_buckets(lengths: Sequence[int], *, size: int, generator: torch.Generator) -> list[list[int]]:
    """Every index once, in batches of about equal length and random order, so that little of a batch is padding.

    Args:
        lengths: of the rows.
        size: of a batch; the last one of each 20 may be smaller.
        generator: of the order.
    """
    order, sizes = torch.randperm(len(lengths), generator=generator), torch.tensor(lengths)
    batches = [
        batch for chunk in order.split(20 * size) for batch in chunk[sizes[chunk].argsort(stable=True)].split(size)
    ]
    return [batches[i].tolist() for i in torch.randperm(len(batches), generator=generator).tolist()]
