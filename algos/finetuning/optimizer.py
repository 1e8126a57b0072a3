"""Supervised training: AdamW with warm-up and cosine decay, dropout as in the model's config, and length buckets."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algos.config import Count, Natural, NotNegative, Positive, UnitInterval, check_fields
from algos.optimizer import Adam, check_dtypes
from textenv.names import NamedFields

_BATCHES_PER_CHUNK = 20
"""Batches whose rows are sorted by length together; more save padding, but make batches less random."""


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
    """Decoupled weight decay of matrices, multiplied by the learning rate at each step. Biases, norms and other vectors
    have none."""
    max_grad_norm: Positive = 1.0
    """Maximum global gradient norm (clipping)."""
    seed: Natural = 1
    """Seed of the order of the data and of dropout."""

    def __post_init__(self) -> None:
        check_fields(self)


class CosineOptimizer:
    """AdamW (Loshchilov and Hutter 2019) with linear learning-rate warm-up, then cosine decay to 0.

    Args:
        parameters: parameters to train, those with ``requires_grad``.
        config: learning rate and warm-up, weight decay, clipping.
        steps: total number of optimizer steps.

    Raises:
        ValueError: if no parameter requires a gradient, or one that does is float16.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], config: SupervisedConfig, *, steps: int) -> None:
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            raise ValueError(
                "no parameter of the model requires a gradient, so nothing would be trained: call "
                "model.requires_grad_(True), or train the policy and not its reference"
            )

        check_dtypes(trained)

        # Weight decay is for matrices
        matrices = [p for p in trained if p.dim() > 1]
        vectors = [p for p in trained if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = Adam([group for group in groups if group["params"]], fused=True)
        self.optimizer.zero_grad()  # gradients left by an earlier training, such as PPO's last step
        self.config = config
        self._num_steps = steps
        self._warmup_steps = math.ceil(config.warmup_ratio * steps)
        self._steps_done = 0

    def step(self) -> Tensor:
        """Clip the accumulated gradients, take a step and clear them; returns their norm before clipping.

        Raises:
            FloatingPointError: if the gradient is not finite.
        """
        groups = range(len(self.optimizer.param_groups))
        grad_norm = self.optimizer.clip_grad_norm_(self.config.max_grad_norm, groups)
        if not grad_norm.isfinite():
            raise FloatingPointError(
                f"the norm of the gradient is {grad_norm.item()}: the weights are unchanged. Look for a learning rate "
                "that is too high, or very large scores"
            )
        learning_rate = self.config.learning_rate * self._schedule()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps_done += 1
        return grad_norm

    def _schedule(self) -> float:
        """Factor of the learning rate: rises linearly to 1 in the warm-up, then falls along a cosine to 0."""
        if self._steps_done < self._warmup_steps:
            return (self._steps_done + 1) / self._warmup_steps
        decay_steps = max(1, self._num_steps - self._warmup_steps)
        progress = (self._steps_done - self._warmup_steps) / decay_steps
        return 0.5 * (1 + math.cos(math.pi * progress))


@contextmanager
def dropout_on(model: PreTrainedModel, *, seed: int) -> Iterator[None]:
    """Turn dropout on in a context, at the rates of the model's config, with random numbers from the seed.

    Afterwards the model is in evaluation mode, and the global random state is as before.
    """
    devices = []
    if model.device.type == "cuda":
        devices.append(model.device)
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
    # Sort large chunks of the shuffled rows by length, and cut them into batches
    row_lengths = torch.tensor(lengths, device=generator.device)
    order = torch.randperm(len(lengths), generator=generator, device=generator.device)
    batches: list[Tensor] = []
    for chunk in order.split(_BATCHES_PER_CHUNK * size):
        by_length = row_lengths[chunk].argsort(stable=True)
        batches += chunk[by_length].split(size)

    # Shuffle the batches
    batch_order = torch.randperm(len(batches), generator=generator, device=generator.device)
    return [batches[i].tolist() for i in batch_order.tolist()]
