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

from algos.envs.flatten import unpack
from algos.evaluation import evaluate
from algos.lab.insight.activations import FEATURES, activations
from algos.lab.insight.finding import Finding, compared, draw_lines, draw_maps
from algos.make import remake_environment
from algos.policies.distributions import Categorical, Gaussian
from algos.policies.policy import ControlPolicy
from algos.policies.words import WordsPolicy
from algos.training.save import load, read_description

MAX_STATES = 512
"""Maximum number of states that are measured."""
GRID = 25
"""Points of a map along each of its two dimensions."""
OBSERVED = {
    "CartPole": ("position", "velocity", "angle", "angular velocity"),
    "MountainCar": ("position", "velocity"),
}
"""Names of observations, by the environment's id without its version."""
Policies = Mapping[str, ControlPolicy]


def control_run(
    folder: str | Path, *, num_episodes: int = 8, **env: Any
) -> tuple[ControlPolicy, ControlPolicy, TensorDict, Sequence[str]]:
    """Return the arguments of `interpret_control` for a run, whose trained policy plays some episodes.

    The policy before the training is made with the seed of the config, as by ``algos train``. If yours was made with
    another seed, call `interpret_control` yourself.

    Args:
        folder: folder of the run.
        num_episodes: number of episodes, and of slots.
        env: arguments of `algos.make.remake_environment`.

    Raises:
        ValueError: if the policy has no action probabilities, or is a language model; and all errors of `algos.load`.
    """
    description = read_description(folder)
    trained = load(folder)
    if not isinstance(trained, ControlPolicy) or trained.trained_by_values:
        raise ValueError(f"{folder} holds a {type(trained).__name__}, which has no action probabilities to compare")
    if isinstance(trained, WordsPolicy):
        raise ValueError(
            f"{folder} holds a {type(trained).__name__}, a language model that reads descriptions of the observations: "
            "expected a network that reads them as numbers. `algos evaluate --video` shows what it reads and writes"
        )
    seed = description.get("config", {}).get("seed", 0)
    untrained = type(trained)(trained.observation_space, trained.action_space, **trained.arguments(), seed=seed)

    vector_env = remake_environment(description, num_envs=num_episodes, **env)
    states = evaluate(vector_env, trained, num_episodes=num_episodes).rollout

    # Names of the observations, by the environment's id without module and version
    env_id = env.get("env_id")
    if not env_id and description["environment"] is not None:
        env_id = description["environment"]["id"]
    name = (env_id or "").rpartition(":")[2].partition("-")[0]
    return untrained, trained, states, OBSERVED.get(name, ())


def interpret_control(
    before: ControlPolicy, after: ControlPolicy, states: TensorDict, names: Sequence[str] = (), dims: Sequence[int] = ()
) -> list[Finding]:
    """Compare policies of one kind: ``sensitivity`` and ``hidden_units``; for vectors of observations also ``map``.

    Args:
        before: policy before the training.
        after: policy after the training.
        states: a rollout ``[B, T]``; at most `MAX_STATES` of its states are used.
        names: names of the observations; by default their indices.
        dims: indices of the map's two dimensions. By default angle and angular velocity, if there are such names, else
            those that the actions depend on most.

    Raises:
        ValueError: if the policies are of different kinds, or names or dims do not fit the observations.
    """
    if type(before) is not type(after) or before.arguments() != after.arguments():
        raise ValueError(f"before is {before!r:.200} and after {after!r:.200}, expected policies of one kind")

    # Evenly spread states; whole rows of a sequential policy
    if after.sequential:
        units = states[states["mask"].any(1)]
        max_units = max(1, MAX_STATES // states.shape[1])
    else:
        units = states[states["mask"]]
        max_units = MAX_STATES
    indices = np.unique(np.linspace(0, len(units) - 1, max_units).astype(int))
    part = units[torch.from_numpy(indices)]
    part["observation"] = unpack(after.observation_space, part["observation"])

    # Names of inputs and outputs
    shape = tuple(part["observation"].shape[part["mask"].ndim :])
    size = math.prod(shape)
    names = list(names) or [",".join(map(str, index)) for index in np.ndindex(shape)]
    dims_fit = not dims or (len(dims) == 2 and len({*dims} & {*range(len(names))}) == 2)
    if len(names) != size or not dims_fit:
        expected = f"{size} names, and as dims two different numbers below that"
        raise ValueError(f"names is {names!r:.200} and dims {dims}; observations of shape {shape} need {expected}")
    distribution = type(after.distribution).__name__
    symbol = {"Categorical": "P", "MultiCategorical": "logit"}.get(distribution, "mean")

    policies = {"before": before, "after": after}
    sensitivities = {name: _sensitivity(policy, part) for name, policy in policies.items()}
    actions_after = sensitivities["after"][:-1]
    labels = [*(f"{symbol}({i})" for i in range(len(actions_after))), "value"]
    findings = [_sensitivities(sensitivities, labels, names, shape), _units(policies, part)]

    # A map, if there are two observations at least
    if len(shape) == 1 and len(names) > 1:
        swing = [i for i, name in enumerate(names) if name in ("angle", "angular velocity")]
        if not dims and len(swing) == 2:
            dims = swing
        elif not dims:
            by_influence = actions_after[:, :-1].sum(0).argsort()
            dims = sorted(by_influence[-2:].tolist())
        findings.append(_map(policies, part, dims, names, labels))
    return findings


def integrated_gradients(function: Callable[[Tensor], Tensor], x: Tensor, baseline: Tensor) -> Tensor:
    """Attribute the change of outputs from a baseline to ``x`` to the inputs: ``[K, *x.shape]``.

    Sundararajan et al. 2017, eq. 1, by Gauss-Legendre quadrature: the attributions of an output add up to its change.

    Args:
        function: function of inputs like ``x`` that returns ``[*, K]``, whose sums over ``*`` are attributed.
        x: inputs.
        baseline: inputs of the same shape.
    """
    total = torch.zeros(())
    nodes, weights = np.polynomial.legendre.leggauss(32)  # on [-1, 1]
    for node, weight in zip(nodes, weights, strict=True):
        point = (baseline + (node + 1) / 2 * (x - baseline)).detach().requires_grad_()
        sums = function(point).flatten(0, -2).sum(0)
        slopes = [torch.autograd.grad(output, point, retain_graph=True)[0] for output in sums]
        total = total + weight / 2 * torch.stack(slopes)
    return (x - baseline) * total


def _outputs(policy: ControlPolicy, rollout: TensorDict) -> Tensor:
    """Action probabilities (Box: means; else logits) and the value, ``[n, K]``."""
    output = policy.output(rollout)
    value = policy.evaluate(rollout).value
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

    attributions = integrated_gradients(function, x, baseline)
    changes = (function(x) - function(baseline)).sum(0).detach()
    gaps = attributions.flatten(1).sum(1) - changes
    mean_gaps = gaps.abs()[:, None] / part["mask"].sum()
    means = attributions[:, part["mask"]].abs().mean(1).flatten(1)
    return torch.cat([means, mean_gaps], dim=1).numpy()


def _sensitivities(
    sensitivities: Mapping[str, np.ndarray], labels: list[str], names: Sequence[str], shape: tuple[int, ...]
) -> Finding:
    """Table of `_sensitivity` of the policies, drawn as points, or as maps if observations have several dimensions."""
    panels: dict[str, dict[str, np.ndarray]] = {}
    for i, label in enumerate(labels):
        panels[label] = {name: x[i, :-1].reshape(shape) for name, x in sensitivities.items()}
    if len(shape) > 1:
        maps = []
        for label, by_policy in panels.items():
            maps.append({f"{label} {name}": _as_map(x) for name, x in by_policy.items()})
        draw = partial(draw_maps, rows=maps)
    else:
        draw = partial(draw_lines, panels=panels, style="o", xticks=range(len(names)), xticklabels=names)
    title = "Sensitivity: mean absolute integrated gradient from the median state, in units of the output"
    row_labels = itertools.product(labels, [*names, "(unexplained)"])
    values = {name: x[None] for name, x in sensitivities.items()}
    return compared("sensitivity", title, ("output", "observation"), row_labels, values, draw, ranked=False)


def _as_map(image: np.ndarray) -> np.ndarray:
    """Add up the channels of an image, which are the smallest of three dimensions."""
    if image.ndim == 2:
        return image
    return image.sum(int(np.argmin(image.shape)))


@torch.no_grad()
def _units(policies: Policies, part: TensorDict) -> Finding:
    """Mean activations of hidden units and their change; the features only of a sequential policy."""
    outputs_before = activations(policies["before"], part)
    outputs_after = activations(policies["after"], part)
    panels: dict[str, dict[str, list[float]]] = {}
    rows: list[tuple[Any, ...]] = []
    for name, old in outputs_before.items():
        if name == FEATURES and not policies["after"].sequential:
            continue  # the last layer's units, which are listed already
        new = outputs_after[name]
        changes = (new - old).square().mean(0).sqrt().tolist()
        panels[name] = {"change of each unit": sorted(changes, reverse=True)}
        columns = old.mean(0).tolist(), new.mean(0).tolist(), changes
        for unit, values in enumerate(zip(*columns, strict=True)):
            rows.append((name, unit, *values))
    title = "Hidden units over the states: mean activations, and root mean square change, most changed first"
    rows.sort(key=lambda row: -row[-1])
    header = ("layer", "unit", "mean before", "mean after", "change")
    return Finding("hidden_units", title, header, rows, partial(draw_lines, panels=panels, xlabel="units in order"))


@torch.no_grad()
def _map(policies: Policies, part: TensorDict, dims: Sequence[int], names: Sequence[str], labels: list[str]) -> Finding:
    """Outputs on a grid over two observations, ``dims``, as a table and as maps."""
    # Points of the grid, [GRID * GRID, observations], and the ranges of the two
    observations = part["observation"][part["mask"]].float()
    chosen = list(dims)
    low = observations[:, chosen].amin(0).tolist()
    high = observations[:, chosen].amax(0).tolist()
    ticks = [torch.linspace(start, end, GRID) for start, end in zip(low, high, strict=True)]
    count = GRID * GRID
    points = observations.median(0).values.repeat(count, 1)
    points[:, chosen] = torch.cartesian_prod(*ticks)

    # A rollout of them, in which each point begins an episode
    yes = torch.ones(count, dtype=torch.bool)
    grid = part.exclude("action_mask").flatten()[:1].expand(count).clone()
    grid.update({"observation": points, "mask": yes, "is_init": yes})
    if policies["after"].sequential:
        grid = grid[:, None]

    # Outputs, [1, K, GRID, GRID]; pictures have the second observation upwards
    values = {}
    for name, policy in policies.items():
        values[name] = _outputs(policy, grid).T.reshape(1, -1, GRID, GRID).numpy()
    maps = []
    for i, label in enumerate(labels):
        maps.append({f"{label} {name}": x[0, i].T[::-1] for name, x in values.items()})
    x_name, y_name = (names[i] for i in dims)
    extent = [low[0], high[0], low[1], high[1]]
    draw = partial(draw_maps, rows=maps, extent=extent, xlabel=x_name, ylabel=y_name)
    title = f"Map: policy and value over {x_name} and {y_name}, the other observations at their median"
    row_labels = itertools.product(labels, *(line.tolist() for line in ticks))
    return compared("map", title, ("output", x_name, y_name), row_labels, values, draw, ranked=False)
