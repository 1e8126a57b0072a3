"""Change of a policy for control: sensitivity to observations, hidden units, and maps of policy and value."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from algos.evaluation import evaluate
from algos.lab.insight.activations import FEATURES, activations
from algos.lab.insight.finding import Finding, compared, draw_lines, draw_maps
from algos.make import remake_environment
from algos.policies.distributions import Categorical, Gaussian
from algos.policies.policy import ControlPolicy
from algos.training.save import load, read_description

MAX_STATES, GRID = 512, 25
"""Maximum number of states; points along a dimension of a map."""
OBSERVED = {
    "CartPole": ("position", "velocity", "angle", "angular velocity"),
    "MountainCar": ("position", "velocity"),
}
"""Names of observations, by the environment's id without its version."""
Policies = Mapping[str, ControlPolicy]


def control_run(folder: str | Path, *, num_episodes: int = 8, **env: Any) -> tuple[Any, Any, TensorDict, Sequence[str]]:
    """Arguments of `interpret_control` for a run, whose trained policy plays some episodes; raises as `algos.load`.

    Before is the policy that the config's seed gives, as in ``algos train`` and `Recipe.build`; after one made by hand
    with another seed, call `interpret_control`. ``env``: arguments of `algos.make.remake_environment`.
    """
    description, after = read_description(folder), load(folder)
    if not isinstance(after, ControlPolicy) or after.trained_by_values:
        raise ValueError(f"{folder} holds a {type(after).__name__}, which has no action probabilities to compare")
    spaces = after.observation_space, after.action_space
    before = type(after)(*spaces, **after.arguments(), seed=description.get("config", {}).get("seed", 0))
    vector_env = remake_environment(description, num_envs=num_episodes, **env)
    saved = description["environment"]
    env_id = env.get("env_id") or ("" if saved is None else saved["id"])
    name = env_id.rpartition(":")[2].partition("-")[0]
    return before, after, evaluate(vector_env, after, num_episodes=num_episodes).rollout, OBSERVED.get(name, ())


def interpret_control(
    before: ControlPolicy, after: ControlPolicy, states: TensorDict, names: Sequence[str] = (), dims: Sequence[int] = ()
) -> list[Finding]:
    """Compare policies of one kind on a rollout ``[B, T]``: ``sensitivity``, ``hidden_units``; of vectors also ``map``.

    ``names`` are those of the observations, ``dims`` the map's two dimensions: by default angle and angular velocity,
    if there are such names, else those that the actions depend on most. Raises a ValueError if these do not fit.
    """
    if type(before) is not type(after) or before.arguments() != after.arguments():
        raise ValueError(f"before is {before!r:.200} and after {after!r:.200}, expected policies of one kind")
    units = states[states["mask"].any(1)] if after.sequential else states[states["mask"]]
    most = max(1, MAX_STATES // (states.shape[1] if after.sequential else 1))
    part = units[torch.from_numpy(np.unique(np.linspace(0, len(units) - 1, most).astype(int)))]
    shape = tuple(part["observation"].shape[part["mask"].ndim :])
    names = list(names) or [",".join(map(str, place)) for place in np.ndindex(shape)]
    if len(names) != math.prod(shape) or (dims and not len({*dims} & {*range(len(names))}) == len(dims) == 2):
        expected = f"{math.prod(shape)} names, and as dims two different numbers below that"
        raise ValueError(f"names is {names!r:.200} and dims {dims}; observations of shape {shape} need {expected}")
    policies, kind = {"before": before, "after": after}, type(after.distribution).__name__
    what = {"Categorical": "P", "MultiCategorical": "logit"}.get(kind, "mean")
    found = {name: _sensitivity(policy, part) for name, policy in policies.items()}
    labels = [*(f"{what}({i})" for i in range(len(found["after"]) - 1)), "value"]
    findings = [_sensitivities(found, labels, names, shape), _units(policies, part)]
    if len(shape) == 1 < len(names):
        swing = [i for i, name in enumerate(names) if name in ("angle", "angular velocity")]
        strongest = sorted(found["after"][:-1, :-1].sum(0).argsort()[-2:].tolist())
        findings.append(_map(policies, part, dims or (swing if len(swing) == 2 else strongest), names, labels))
    return findings


def integrated_gradients(function: Callable[[Tensor], Tensor], x: Tensor, baseline: Tensor) -> Tensor:
    """Attributions ``[K, *x.shape]`` of outputs ``[*, K]``, summed but for the last dimension, to inputs like baseline.

    Sundararajan et al. 2017, eq. 1, by Gauss-Legendre quadrature: those of an output add up to its change.
    """
    total = torch.zeros(())
    for node, weight in zip(*np.polynomial.legendre.leggauss(32), strict=True):
        point = (baseline + (node + 1) / 2 * (x - baseline)).detach().requires_grad_()
        sums = function(point).flatten(0, -2).sum(0)
        slopes = [torch.autograd.grad(each, point, retain_graph=True)[0] for each in sums]
        total = total + weight / 2 * torch.stack(slopes)
    return (x - baseline) * total


def _outputs(policy: ControlPolicy, rollout: TensorDict) -> Tensor:
    """Action probabilities (Box: means; else logits) and the value, ``[n, K]``."""
    output, value = policy.output(rollout), policy.evaluate(rollout).value
    assert value is not None, "a policy's evaluation has a value"
    if isinstance(policy.distribution, Categorical):
        allowed = rollout.get("action_mask", torch.tensor(True))
        output = output.masked_fill(~allowed, torch.finfo(output.dtype).min).softmax(-1)
    elif isinstance(policy.distribution, Gaussian):
        output = policy.distribution.parametrize(output)[0]
    return torch.cat([output, value[..., None]], dim=-1)[rollout["mask"]]


def _sensitivity(policy: ControlPolicy, part: TensorDict) -> np.ndarray:
    """Mean absolute attributions ``[K, dimensions + 1]``; the last is the error of their mean sum."""
    x = part["observation"].float()
    baseline = x[part["mask"]].median(0).values.expand_as(x)

    def function(point: Tensor) -> Tensor:
        return _outputs(policy, part.copy().update({"observation": point}))

    found = integrated_gradients(function, x, baseline)
    gap = found.flatten(1).sum(1) - (function(x) - function(baseline)).sum(0).detach()
    means = found[:, part["mask"]].abs().mean(1).flatten(1)
    return torch.cat([means, gap.abs()[:, None] / part["mask"].sum()], dim=1).numpy()


def _sensitivities(found: Any, labels: list[str], names: Sequence[str], shape: tuple[int, ...]) -> Finding:
    rows = [{name: x[i, :-1].reshape(shape) for name, x in found.items()} for i in range(len(labels))]
    panels, ticks = dict(zip(labels, rows, strict=True)), range(len(names))
    draw = partial(draw_lines, panels=panels, style="o", xticks=ticks, xticklabels=names)
    if len(shape) > 1:  # channels, the smallest of three dimensions, are added up
        flat = (lambda x: x) if len(shape) == 2 else (lambda x: x.sum(int(np.argmin(shape))))
        maps = [{f"{label} {name}": flat(x) for name, x in row.items()} for label, row in panels.items()]
        draw = partial(draw_maps, rows=maps)
    title = "Sensitivity: mean absolute integrated gradient from the median state, in units of the output"
    places, values = itertools.product(labels, [*names, "(unexplained)"]), {name: x[None] for name, x in found.items()}
    return compared("sensitivity", title, ("output", "observation"), places, values, draw, ranked=False)


@torch.no_grad()
def _units(policies: Policies, part: TensorDict) -> Finding:
    first, last = (activations(policy, part) for policy in policies.values())
    panels: dict[str, Any] = {}
    rows: list[tuple[Any, ...]] = []
    for name in (each for each in first if each != FEATURES or policies["after"].sequential):
        moved = (last[name] - first[name]).square().mean(0).sqrt().tolist()
        panels[name] = {"change of each unit": sorted(moved, reverse=True)}
        means = (x[name].mean(0).tolist() for x in (first, last))
        rows += [(name, unit, *values) for unit, values in enumerate(zip(*means, moved, strict=True))]
    title = "Hidden units over the states: mean activations, and root mean square change, most changed first"
    rows.sort(key=lambda row: -row[-1])
    columns = ("layer", "unit", "mean before", "mean after", "change")
    return Finding("hidden_units", title, columns, rows, partial(draw_lines, panels=panels, xlabel="units in order"))


@torch.no_grad()
def _map(policies: Policies, part: TensorDict, dims: Sequence[int], names: Sequence[str], labels: list[str]) -> Finding:
    seen, chosen, count = part["observation"][part["mask"]].float(), list(dims), GRID * GRID
    low, high = seen[:, chosen].amin(0).tolist(), seen[:, chosen].amax(0).tolist()
    lines = [torch.linspace(*limits, GRID) for limits in zip(low, high, strict=True)]
    points, each = seen.median(0).values.repeat(count, 1), torch.ones(count, dtype=torch.bool)
    points[:, chosen] = torch.cartesian_prod(*lines)
    grid = part.exclude("action_mask").flatten()[:1].expand(count).clone()
    grid.update({"observation": points, "mask": each, "is_init": each})  # each point begins an episode
    grid = grid[:, None] if policies["after"].sequential else grid
    values = {name: _outputs(policy, grid).T.reshape(1, -1, GRID, GRID).numpy() for name, policy in policies.items()}
    rows = [{f"{label} {name}": x[0, i].T[::-1] for name, x in values.items()} for i, label in enumerate(labels)]
    x, y = (names[i] for i in dims)
    draw = partial(draw_maps, rows=rows, extent=[low[0], high[0], low[1], high[1]], xlabel=x, ylabel=y)
    title = f"Map: policy and value over {x} and {y}, the other observations at their median"
    places = itertools.product(labels, *(line.tolist() for line in lines))
    return compared("map", title, ("output", x, y), places, values, draw, ranked=False)
