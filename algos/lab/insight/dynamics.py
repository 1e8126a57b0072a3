"""`Dynamics`: rank of features, dead units, noise of the gradient, change of weights and plasticity while training."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.lab.insight.activations import FEATURES, activations
from algos.minibatches import shuffle_and_split
from algos.training.metrics import Metrics
from algos.training.run import Callback, Run
from textenv.lm.model import language_model_of
from textenv.rollout import is_episode_env

PARTS, ROWS, STEPS, FITS = 8, 32, 512, 10
"""Batches for the gradient's noise; rows or steps for the features; gradient steps of `fit_error`."""

UNITS_OF_ROUNDING = 4
"""Units in the last place by which an output that never changes may vary."""


class Dynamics(Callback):
    """Logs ``dynamics/...`` (docs/insight.md) every few iterations; the training itself is the same, bit by bit."""

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every is {every}, expected at least 1 iteration")
        self.every = every
        self._acted: tuple[TensorDict, Any] | None = None

    def on_rollout(self, run: Run, rollout: TensorDict) -> None:
        """See `Callback.on_rollout`."""
        due = len(run.history) % self.every == 0
        self._acted = (rollout, copy.deepcopy(run.agent.policy)) if due else None

    def on_iteration(self, run: Run, metrics: Metrics) -> None:
        """See `Callback.on_iteration`; measures a copy of the policy that acted, and how far the update moved it."""
        if self._acted is not None:
            rollout, before = self._acted
            found = weight_changes(run.agent.policy, before) | _measurements(run.agent, before, rollout)
            metrics |= {f"dynamics/{name}": value for name, value in found.items()}
            self._acted = None


def _measurements(agent: Any, policy: Any, rollout: TensorDict) -> Metrics:
    mask, generator = rollout["mask"], torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"sequential": policy.sequential, "generator": generator}
    part = next(shuffle_and_split(rollout, size=ROWS if policy.sequential else STEPS, **options))
    with torch.no_grad():
        layers = activations(policy, part)
        found: Metrics = {"effective_rank": effective_rank(layers.pop(FEATURES)), "dead_units": dead_units(layers)}
        if is_episode_env(agent.env):
            found |= by_position(rollout, policy.evaluate(rollout).entropy)
    units = int((mask.any(1) if policy.sequential else mask).sum())
    size = max(1, units // PARTS)
    if units > 1 and "advantage" in rollout.keys():
        batches, steps = list(shuffle_and_split(rollout, size=size, **options))[:PARTS], int(mask.sum()) * size / units
        noise, signal = gradient_noise((_gradient(policy, each, steps) for each in batches), size)
        found |= {"gradient_noise": noise, "gradient_signal": signal}
        found |= {"noise_scale": noise / signal} if signal > 0 else {}
    return found | {"fit_error": fit_error(policy, part, rate=agent.config.learning_rate)}


def effective_rank(features: Tensor, *, delta: float = 0.01) -> int:
    """Least number of singular values of ``[n, units]`` that have 1 - δ of their sum (Kumar et al. 2021, srank)."""
    share = torch.linalg.svdvals(features.float()).cumsum(0)
    return int((share < (1 - delta) * share[-1]).sum()) + 1


def dead_units(layers: dict[str, Tensor], *, share: float = 0.025) -> float:
    """Share of units whose standard deviation is at most this share of their layer's mean, so saturated ones too.

    One that rounding alone can explain counts as 0: where a whole layer is saturated, rounding would be its mean.
    Dormant neurons (Sokar et al. 2023, eq. 1) are the same by the mean activation.
    """
    if not layers:
        return 0.0
    dead = []
    for outputs in layers.values():
        spread = outputs.std(0)
        by_rounding = UNITS_OF_ROUNDING * torch.finfo(outputs.dtype).eps * outputs.abs().amax(0)
        spread = torch.where(spread <= by_rounding, 0.0, spread)
        dead.append(spread <= share * spread.mean())
    return torch.cat(dead).float().mean().item()


def gradient_noise(gradients: Iterable[Tensor], size: int) -> tuple[float, float]:
    """Trace of the covariance of a sample's gradient, and squared norm of the mean gradient: both unbiased.

    From those of disjoint batches of ``size``. The first divided by the second is the simple noise scale (McCandlish et
    al. 2018, eq. 2.9 and appendix A.1).
    """
    total, squares, count = torch.zeros(()), 0.0, 0
    for each in gradients:
        total, squares, count = total + each, squares + each.square().sum().item(), count + 1
    whole = (total / count).square().sum().item()
    noise = (squares / count - whole) * size * count / (count - 1)
    return noise, whole - noise / (size * count)


def weight_changes(policy: Any, before: Any) -> Metrics:
    """Norm of the change of the trained weights divided by their norm before: of all, and of each layer."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2))
    for (name, new), (_, old) in zip(_trained(policy), _trained(before), strict=True):
        layer = re.sub(r"(\.\d+)\..*|\.[^.]*$", r"\1", name)
        squares = torch.stack([(new - old).square().sum(), old.square().sum()]).detach().cpu()
        for key in ("weight_change", f"weight_change/{layer}"):
            sums[key] = sums[key] + squares
    return {name: math.sqrt(change / max(norm, 1e-12)) for name, (change, norm) in sums.items()}


def by_position(rollout: TensorDict, entropy: Tensor) -> Metrics:
    """Mean entropy, KL and squared error of the value in each quarter of the answers."""
    mask, columns, keys = rollout["mask"], {"entropy": entropy}, rollout.keys()
    columns |= {"kl": rollout["kl"]} if "kl" in keys else {}
    columns |= {"value_error": (rollout["value_target"] - rollout["value"]).square()} if "value_target" in keys else {}
    quarter = torch.where(mask, (mask.cumsum(1) - 1) * 4 // mask.sum(1, keepdim=True).clamp(min=1), -1)
    places = [(i, quarter == i) for i in range(4) if (quarter == i).any()]
    return {f"{name}/quarter_{i + 1}": x[here].mean().item() for name, x in columns.items() for i, here in places}


def fit_error(policy: Any, part: TensorDict, *, rate: float) -> float:
    """Share of the variance of a fresh target that is left after `FITS` steps; changes the weights (Lyle et al. 2022).

    The target is a sine of a random sum of observations, or a random number for each token that is read. A linear head
    is solved for it before each step of the trunk.
    """
    generator, seen = torch.Generator().manual_seed(0), part["observation"][part["mask"]]
    if (lm := language_model_of(policy)) is not None:
        target = torch.randn(lm.num_tokens, generator=generator).to(seen.device)[seen]
    else:
        x = seen.flatten(1).float()
        x = (x - x.mean(0)) / (x.std(0) + 1e-6)
        target = (2 * x @ torch.randn(x.shape[1], generator=generator).to(x)).sin()
    target, optimizer = target - target.mean(), torch.optim.Adam([x for _, x in _trained(policy)], lr=rate)
    for step in range(FITS + 1):
        features = activations(policy, part)[FEATURES]
        features = features - features.mean(0)
        with torch.no_grad():
            square = features.T @ features
            ridge = torch.eye(len(square)).to(square) * square.diagonal().mean().clamp(min=1e-6) * 1e-4
            head = torch.linalg.solve(square + ridge, features.T @ target)
        error = (features @ head - target).square().mean()
        if step < FITS:
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    return (error / target.square().mean()).item()


def _gradient(policy: Any, part: TensorDict, steps: float) -> Tensor:
    loss = -(part["advantage"] * policy.evaluate(part).log_prob)[part["mask"]].sum() / steps
    found = torch.autograd.grad(loss, [x for _, x in _trained(policy)], allow_unused=True)
    return torch.cat([x.flatten() for x in found if x is not None])


def _trained(policy: Any) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in policy.named_parameters() if x.requires_grad]
