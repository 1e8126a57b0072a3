"""Supervised training: AdamW with warm-up and cosine decay, dropout as in the model's config, and length buckets."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from algos.config import Count, Natural, NotNegative, Positive, UnitInterval, check_fields
from textenv.names import NamedFields


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(NamedFields):
    """Hyper-parameters of supervised training."""

    num_epochs: Count = 1
    """Passes over the data."""
    batch_size: Count = 32
    """Examples (scored answers, pairs) per optimizer step."""
    learning_rate: Positive = 5e-5
    """Peak learning rate of AdamW; 1e-3 and more for small models from scratch."""
    warmup_ratio: UnitInterval = 0.05
    """Fraction of the steps for linear learning-rate warm-up; after it, cosine decay to 0."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of matrices (not of biases, norms, other vectors), per step, times the learning rate."""
    max_grad_norm: Positive = 1.0
    """Maximum global gradient norm (clipping)."""
    seed: Natural = 1
    """Seed of the order of the data and of dropout."""

    def __post_init__(self) -> None:
        check_fields(self)


class CosineOptimizer:
    """AdamW (Loshchilov and Hutter 2019) with linear learning-rate warm-up, then cosine decay to 0.

    Args:
        parameters: parameters to train; those with ``requires_grad`` False are skipped.
        config: learning rate and warm-up, weight decay, clipping.
        steps: total number of optimizer steps.

    Raises:
        ValueError: if no parameter requires a gradient.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], config: SupervisedConfig, *, steps: int) -> None:
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
        self.optimizer.zero_grad()  # gradients left by an earlier training, such as PPO's last step
        self.config = config
        self._steps, self._rising, self._done = steps, math.ceil(config.warmup_ratio * steps), 0

    def step(self) -> Tensor:
        """Clip the accumulated gradients, take a step and clear them; returns their norm before clipping.

        Raises:
            FloatingPointError: if the gradient is not finite.
        """
        norm = clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        if not norm.isfinite():
            said = f"the norm of the gradient is {norm.item()}: the weights are unchanged"
            raise FloatingPointError(f"{said}. Look for a learning rate that is too high, or very large scores")
        if self._done < self._rising:
            share = (self._done + 1) / self._rising
        else:
            fallen = (self._done - self._rising) / max(1, self._steps - self._rising)
            share = 0.5 * (1 + math.cos(math.pi * fallen))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._done += 1
        return norm


@contextmanager
def dropout_on(model: PreTrainedModel, *, seed: int) -> Iterator[None]:
    """Context manager that turns dropout on, as in the model's config, with random numbers from the seed.

    Afterwards the model is in evaluation mode, and the global random state is as before.
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
    """Split all indices into batches of rows of similar length, in random order, to reduce padding.

    Args:
        lengths: length of each row.
        size: batch size; one batch may be smaller.
        generator: generator for the random order.
    """
    shuffled = partial(torch.randperm, generator=generator, device=generator.device)
    order, sizes = shuffled(len(lengths)), torch.tensor(lengths, device=generator.device)
    batches = [
        batch for chunk in order.split(20 * size) for batch in chunk[sizes[chunk].argsort(stable=True)].split(size)
    ]
    return [batches[i].tolist() for i in shuffled(len(batches)).tolist()]
