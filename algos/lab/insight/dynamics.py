"""`Dynamics`: rank of features, dead units, noise of the gradient, change of weights and plasticity while training."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.envs.flatten import unpack
from algos.lab.insight.activations import FEATURES, activations
from algos.minibatches import shuffle_and_split
from algos.policies.policy import Policy
from algos.training.learner import Learner
from algos.training.metrics import Metrics
from algos.training.run import Callback, Run
from textenv.lm.model import language_model_of
from textenv.rollout import is_episode_env

GRADIENT_BATCHES = 8
"""Batches whose gradients are compared for the gradient's noise."""
FEATURE_ROWS = 32
"""Rows of a rollout whose features are measured, if the policy is sequential."""
FEATURE_STEPS = 512
"""Steps of a rollout whose features are measured, if the policy is not sequential."""
FIT_STEPS = 10
"""Gradient steps of `fit_error`."""
UNITS_OF_ROUNDING = 4
"""Units in the last place by which an output that never changes may vary."""


class Dynamics(Callback):
    """Logs ``dynamics/...`` (docs/insight.md) every few iterations; the training itself is the same, bit by bit."""

    def __init__(self, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every is {every}, expected at least 1 iteration")
        self.every = every
        self._acted: tuple[TensorDict, Policy] | None = None

    def on_rollout(self, run: Run, rollout: TensorDict) -> None:
        """See `Callback.on_rollout`."""
        if len(run.history) % self.every == 0:
            self._acted = (rollout, copy.deepcopy(run.agent.policy))
        else:
            self._acted = None

    def on_iteration(self, run: Run, metrics: Metrics) -> None:
        """See `Callback.on_iteration`; measures a copy of the policy that acted, and how far the update moved it."""
        if self._acted is None:
            return
        rollout, old_policy = self._acted
        self._acted = None
        measurements = weight_changes(run.agent.policy, old_policy) | _measurements(run.agent, old_policy, rollout)
        metrics |= {f"dynamics/{name}": value for name, value in measurements.items()}


def _measurements(agent: Learner, policy: Policy, rollout: TensorDict) -> Metrics:
    """Measure the policy that acted, which is changed by the last measurement."""
    mask = rollout["mask"]
    generator = torch.Generator().manual_seed(0)
    split = partial(shuffle_and_split, rollout, sequential=policy.sequential, generator=generator)

    # Features, of a part of the rollout
    part_size = FEATURE_STEPS
    if policy.sequential:
        part_size = FEATURE_ROWS
    part = next(split(size=part_size))
    metrics: Metrics = {}
    with torch.no_grad():
        layers = activations(policy, part)
        metrics["effective_rank"] = effective_rank(layers.pop(FEATURES))
        metrics["dead_units"] = dead_units(layers)
        if is_episode_env(agent.env):
            metrics |= by_position(rollout, policy.evaluate(rollout).entropy)

    # Noise of the gradient; units are rows of a sequential policy, else steps
    num_steps = int(mask.sum())
    num_units = num_steps
    if policy.sequential:
        num_units = int(mask.any(1).sum())
    size = max(1, num_units // GRADIENT_BATCHES)
    if num_units > 1 and "advantage" in rollout.keys():
        batches = list(split(size=size))[:GRADIENT_BATCHES]
        steps_per_batch = num_steps * size / num_units
        gradients = (_gradient(policy, batch, steps_per_batch) for batch in batches)
        noise, signal = gradient_noise(gradients, size)
        metrics["gradient_noise"] = noise
        metrics["gradient_signal"] = signal
        if signal > 0:
            metrics["noise_scale"] = noise / signal

    metrics["fit_error"] = fit_error(policy, part, rate=agent.config.learning_rate)
    return metrics


def effective_rank(features: Tensor, *, delta: float = 0.01) -> int:
    """Return how many singular values of ``[n, units]`` have 1 - δ of their sum (srank, Kumar et al. 2021)."""
    sums = torch.linalg.svdvals(features.float()).cumsum(0)
    return int((sums < (1 - delta) * sums[-1]).sum()) + 1


def dead_units(layers: dict[str, Tensor], *, share: float = 0.025) -> float:
    """Return the fraction of units whose standard deviation is at most this share of their layer's mean.

    Saturated units count as dead, too. A standard deviation that rounding alone can explain counts as 0: where a whole
    layer is saturated, rounding would be its mean. Dormant neurons (Sokar et al. 2023, eq. 1) are the same by the mean
    activation.
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
    """Estimate the trace of the covariance of a sample's gradient, and the squared norm of the mean gradient.

    Both are unbiased, from gradients of disjoint batches of ``size``. The first divided by the second is the simple
    noise scale (McCandlish et al. 2018, eq. 2.9 and appendix A.1).
    """
    total = torch.zeros(())
    sum_of_squares = 0.0
    count = 0
    for gradient in gradients:
        total = total + gradient
        sum_of_squares += gradient.square().sum().item()
        count += 1
    square_of_mean = (total / count).square().sum().item()
    noise = (sum_of_squares / count - square_of_mean) * size * count / (count - 1)
    return noise, square_of_mean - noise / (size * count)


def weight_changes(policy: Policy, before: Policy) -> Metrics:
    """Return the norm of the change of the trained weights divided by their norm before: of all, and of each layer."""
    # Squares of changes and of weights, [2]
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2))
    for (name, new), (_, old) in zip(_trained(policy), _trained(before), strict=True):
        layer = re.sub(r"(\.\d+)\..*|\.[^.]*$", r"\1", name)
        squares = torch.stack([(new - old).square().sum(), old.square().sum()]).detach().cpu()
        for key in ("weight_change", f"weight_change/{layer}"):
            sums[key] = sums[key] + squares
    return {name: math.sqrt(change / max(norm, 1e-12)) for name, (change, norm) in sums.items()}


def by_position(rollout: TensorDict, entropy: Tensor) -> Metrics:
    """Return mean entropy, KL and squared error of the value in each quarter of the answers."""
    columns = {"entropy": entropy}
    if "kl" in rollout.keys():
        columns["kl"] = rollout["kl"]
    if "value_target" in rollout.keys():
        columns["value_error"] = (rollout["value_target"] - rollout["value"]).square()

    # Quarter of each token, 0 to 3; -1 outside the answers
    mask = rollout["mask"]
    position = mask.cumsum(1) - 1
    length = mask.sum(1, keepdim=True).clamp(min=1)
    quarter = torch.where(mask, position * 4 // length, -1)

    metrics: Metrics = {}
    for name, column in columns.items():
        for i in range(4):
            inside = quarter == i
            if inside.any():
                metrics[f"{name}/quarter_{i + 1}"] = column[inside].mean().item()
    return metrics


def fit_error(policy: Policy, part: TensorDict, *, rate: float) -> float:
    """Return the fraction of the variance of a fresh target that is left after training for it (Lyle et al. 2022).

    The target is a sine of a random sum of observations, or a random number for each token that is read. A linear head
    is solved for it before each of `FIT_STEPS` steps of the trunk. Changes the policy's weights.
    """
    # Target
    generator = torch.Generator().manual_seed(0)
    observations = part["observation"][part["mask"]]
    lm = language_model_of(policy)
    if lm is not None:
        of_tokens = torch.randn(lm.num_tokens, generator=generator)
        target = of_tokens.to(observations.device)[observations]
    else:
        if policy.observation_space is not None:
            observations = unpack(policy.observation_space, observations)
        x = observations.flatten(1).float()
        x = (x - x.mean(0)) / (x.std(0) + 1e-6)
        direction = torch.randn(x.shape[1], generator=generator).to(x)
        target = (2 * x @ direction).sin()
    target = target - target.mean()

    # Training; the last error is measured after the last step
    optimizer = torch.optim.Adam([p for _, p in _trained(policy)], lr=rate)
    for step in range(FIT_STEPS + 1):
        features = activations(policy, part)[FEATURES]
        features = features - features.mean(0)
        with torch.no_grad():
            square = features.T @ features
            ridge = torch.eye(len(square)).to(square) * square.diagonal().mean().clamp(min=1e-6) * 1e-4
            head = torch.linalg.solve(square + ridge, features.T @ target)
        error = (features @ head - target).square().mean()
        if step < FIT_STEPS:
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    return (error / target.square().mean()).item()


def _gradient(policy: Policy, part: TensorDict, steps: float) -> Tensor:
    """Gradient of the policy gradient's loss, the sum over a part divided by ``steps``, as one vector."""
    terms = part["advantage"] * policy.evaluate(part).log_prob
    loss = -terms[part["mask"]].sum() / steps
    parameters = [p for _, p in _trained(policy)]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def _trained(policy: Any) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
