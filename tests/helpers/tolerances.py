"""Tolerances of tests, each named after what it bounds.

float32 keeps 24 bits, so a rounded result is off by at most half a unit in the last place, `EPS` / 2 of its size.
Another processor sums in another order, and its exp and tanh may be off by one unit. What that does to a number is
bounded by how many roundings it goes through and how large the numbers in between are. ``make rounding`` tries it out:
every product, softmax, exp and layer norm is off by up to one unit.
"""

import torch

EPS = torch.finfo(torch.float32).eps
"""Distance from 1 to the next float32: 1.2e-7."""


def output_through(layers: int, *, terms: float) -> float:
    """Difference of an output, such as a value, between two computations by a model of so many layers.

    Each layer adds two sums to the residual stream (attention, MLP), each of about four products, softmaxes and norms
    in a row; the output layer and what follows it are one more. Each may be off by one unit, in the worst case all in
    one direction. The output is a sum; ``terms`` is the sum of the sizes of its terms, such as 32 for a head of unit
    weights on 32 normalized features.
    """
    steps = 8 * layers + 4
    return steps * EPS * terms


def log_prob_through(layers: int, *, largest_logit: float = 10.0, temperature: float = 1.0) -> float:
    """Difference of a log-probability, nats, between two computations by a model of so many layers.

    It is that of the largest logit. A temperature below 1 amplifies it.
    """
    return output_through(layers, terms=largest_logit) / min(temperature, 1.0)


GRADIENT = 3e-5
"""Difference of an entry of a gradient, as a fraction of the largest entry of its tensor (`close_gradients`): small
entries are sums of terms as large as the largest, some 100 of them through a model of two layers, 2 * 100 * `EPS`."""

METRIC = 1e-5
"""Relative difference of a mean over a batch, some 100 roundings one after the other: 100 * `EPS`."""

METRIC_NEAR_0 = 1e-5
"""Absolute difference of a mean that may be 0, of numbers about 1: advantages, KL, losses."""


def adam_weight(*, learning_rate: float, steps: int, adam_eps: float, largest_gradient: float = 1.0) -> float:
    """Difference of a weight after so many steps of Adam.

    Each step is the learning rate times m / (√v + eps). Where a gradient is nothing but rounding, it is at most
    `GRADIENT` of the largest, and the step at most that over eps. By Adam's usual eps of 1e-8 such a step is as long as
    any other: then no tolerance helps, and the test needs a larger eps.
    """
    return steps * learning_rate * GRADIENT * largest_gradient / adam_eps
