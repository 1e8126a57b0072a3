"""Change of a policy for control: sensitivity to observations, hidden units, and maps of policy and value."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from algos.evaluation import evaluate
from algos.insight.activations import FEATURES, activations
from algos.insight.finding import Finding
from algos.make import remake_environment
from algos.policies.distributions import Categorical, Gaussian
from algos.policies.policy import ControlPolicy
from algos.policies.q_network import QPolicy
from algos.training.save import load, read_description

MAX_STATES, MAX_NUMBERS, GRID = 512, 2**21, 25
"""Maximum number of states, and of numbers in them; points along a dimension of a map."""
NAMES = {"CartPole": ("position", "velocity", "angle", "angular velocity"), "MountainCar": ("position", "velocity")}
"""Names of observations, by the environment's id without its version."""


def control_run(folder: str | Path, *, num_episodes: int = 8, **env: Any) -> tuple[Any, Any, TensorDict, Sequence[str]]:
    """Arguments of `interpret_control` for a run, whose trained policy plays some episodes; raises as `algos.load`.

    Before is the policy that the config's seed gives, as in ``algos train`` and `Recipe.build`; after one made by hand
    with another seed, call `interpret_control`. ``env``: arguments of `algos.make.remake_environment`.
    """
    description, after = read_description(folder), load(folder)
    if not isinstance(after, ControlPolicy):
        raise ValueError(f"{folder} holds a {type(after).__name__}, expected a policy for control, such as MLPPolicy")
    make, spaces = type(after), (after.observation_space, after.action_space)
    before = make(*spaces, **after.arguments(), seed=description["config"]["seed"])
    vector_env = remake_environment(description, num_envs=num_episodes, **env)
    name = (env.get("env_id") or description["environment"]["id"]).rpartition(":")[2].partition("-")[0]
    return before, after, evaluate(vector_env, after, num_episodes=num_episodes).rollout, NAMES.get(name, ())


def interpret_control(
    before: ControlPolicy, after: ControlPolicy, states: TensorDict, names: Sequence[str] = (), dims: Sequence[int] = ()
) -> list[Finding]:
    """Compare policies of one kind on a rollout ``[B, T]``: ``sensitivity``, ``hidden_units``; of vectors also ``map``.

    ``names`` are those of the observations, ``dims`` the map's two dimensions: by default angle and angular velocity,
    if there are such names, else those that the actions depend on most. Raises a ValueError if these do not fit.
    """
    if type(before) is not type(after) or before.arguments() != after.arguments():
        raise ValueError(f"before is {before!r:.200} and after {after!r:.200}, expected policies of one kind")
    part, policies = _sample(states, sequential=after.sequential), (before, after)
    shape = tuple(part["observation"].shape[part["mask"].ndim :])
    names = list(names) or [",".join(map(str, place)) for place in np.ndindex(shape)]
    if len(names) != math.prod(shape) or (dims and not len({*dims} & {*range(len(names))}) == len(dims) == 2):
        raise ValueError(f"observations have shape {shape}, but there are {len(names)} names, and dims is {dims}")
    what = {"Categorical": "P", "MultiCategorical": "logit"}.get(type(after.distribution).__name__, "mean")
    what, found = "Q" if isinstance(after, QPolicy) else what, np.stack([_sensitivity(each, part) for each in policies])
    labels = [*(f"{what}({i})" for i in range(found.shape[1] - 1)), "value"]

    def draw(axis: Any, values: np.ndarray, label: str) -> None:
        picture = values[:-1].reshape(shape)
        if len(shape) == 1:
            axis.barh(names, picture)
        else:  # channels, the smallest of three dimensions, are added up
            axis.imshow(picture if len(shape) == 2 else picture.sum(int(np.argmin(shape))))

    title = "sensitivity: mean absolute integrated gradient from the median state, in units of the output"
    findings = [_finding(title, ["observation"], found, labels, [[x] for x in (*names, "(unexplained)")], draw)]
    findings.append(_units(policies, part))
    if len(shape) == 1 < len(names):
        swing = [i for i, name in enumerate(names) if name in ("angle", "angular velocity")]
        chosen = dims or (swing if len(swing) == 2 else sorted(found[1, :-1, :-1].sum(0).argsort()[-2:].tolist()))
        findings.append(_map(policies, part, chosen, [names[i] for i in chosen], labels))
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
    """Action probabilities (Box: means; else logits; Q-network: its values) and the value, ``[n, K]``."""
    if isinstance(policy, QPolicy):
        output = policy.action_values(rollout["observation"])
        return torch.cat([output, output.amax(-1, keepdim=True)], dim=-1)
    output, value = policy.output(rollout), policy.evaluate(rollout).value
    assert value is not None, "a policy's evaluation has a value"
    if isinstance(policy.distribution, Categorical):
        allowed = rollout.get("action_mask", torch.tensor(True))
        output = output.masked_fill(~allowed, torch.finfo(output.dtype).min).softmax(-1)
    elif isinstance(policy.distribution, Gaussian):
        output = policy.distribution.parametrize(output)[0]
    return torch.cat([output, value[..., None]], dim=-1)[rollout["mask"]]


def _sample(states: TensorDict, *, sequential: bool) -> TensorDict:
    """Whole rows ``[B, T]`` or single steps ``[n]``, spread over the rollout."""
    mask, size = states["mask"], states["observation"][0, 0].numel()
    units = states[mask.any(1)] if sequential else states[mask]
    most = max(16, min(MAX_STATES, MAX_NUMBERS // size)) // (mask.shape[1] if sequential else 1)
    return units[torch.from_numpy(np.unique(np.linspace(0, len(units) - 1, max(1, most)).astype(int)))]


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


def _finding(title: str, columns: Any, found: np.ndarray, labels: list[str], places: list[Any], draw: Any) -> Finding:
    """A row for each output and place, and panels for each output, of numbers ``[2, K, places]``."""

    def draw_panels(figure: Any) -> None:
        figure.set_size_inches(1 + 3.2 * len(labels), 6)
        panels = figure.subplots(2, len(labels), squeeze=False, sharex="col", sharey=True)
        for (when, k), axis in np.ndenumerate(panels):
            axis.set_title(labels[k] + (" before", " after")[when], fontsize=9)
            draw(axis, found[when, k], labels[k])

    rows = [(a, *b, *found[:, k, i].tolist()) for k, a in enumerate(labels) for i, b in enumerate(places)]
    return Finding(title.partition(":")[0], title, ("output", *columns, "before", "after"), rows, draw_panels)


@torch.no_grad()
def _units(policies: Sequence[ControlPolicy], part: TensorDict) -> Finding:
    first, last = (activations(policy, part) for policy in policies)
    moved: dict[str, list[float]] = {}
    rows: list[tuple[Any, ...]] = []
    for name in (each for each in first if each != FEATURES or policies[0].sequential):
        moved[name] = (last[name] - first[name]).square().mean(0).sqrt().tolist()
        means = (x[name].mean(0).tolist() for x in (first, last))
        rows += [(name, unit, *values) for unit, values in enumerate(zip(*means, moved[name], strict=True))]

    def draw(figure: Any) -> None:
        for axis, (name, change) in zip(figure.subplots(len(moved), squeeze=False)[:, 0], moved.items(), strict=True):
            axis.bar(range(len(change)), sorted(change, reverse=True), width=1.0)
            axis.set_title(name, fontsize=9)

    title = "hidden units over the states: mean activations, and root mean square change, most changed first"
    columns = ("layer", "unit", "mean before", "mean after", "change")
    return Finding("hidden_units", title, columns, sorted(rows, key=lambda row: -float(row[-1])), draw)


@torch.no_grad()
def _map(policies: Any, part: TensorDict, dims: Sequence[int], names: Sequence[str], labels: list[str]) -> Finding:
    seen, count = part["observation"][part["mask"]].float(), GRID * GRID
    limits = [(float(seen[:, dim].min()), float(seen[:, dim].max())) for dim in dims]
    points, each = seen.median(0).values.repeat(count, 1), torch.ones(count, dtype=torch.bool)
    points[:, list(dims)] = places = torch.cartesian_prod(*(torch.linspace(*limit, GRID) for limit in limits))
    grid = part.exclude("action_mask").flatten()[:1].expand(count).clone()
    grid.update({"observation": points, "mask": each, "is_init": each})  # each point begins an episode
    grid = grid[:, None] if policies[0].sequential else grid

    def draw(axis: Any, values: np.ndarray, label: str) -> None:
        look: dict[str, Any] = {"vmin": 0, "vmax": 1} if label[0] == "P" else {}
        look |= {"origin": "lower", "aspect": "auto", "extent": (*limits[0], *limits[1])}
        axis.figure.colorbar(axis.imshow(values.reshape(GRID, GRID).T, **look), ax=axis)
        axis.set(xlabel=names[0], ylabel=names[1])

    title = f"map: policy and value over {names[0]} and {names[1]}, the other observations at their median"
    found = torch.stack([_outputs(policy, grid).T for policy in policies]).numpy()
    return _finding(title, names, found, labels, places.tolist(), draw)
