"""Export of control policies to ONNX, for programs without torch."""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from algos.envs.flatten import NOT_IN_TORCH
from algos.storage.run_folder import check_new_file
from textenv.optional import package

BATCH = "N"
"""Name of the free first dimension of all inputs and outputs."""
OBSERVATION = "observation"
"""Name of the input with the observations; of a Dict or Tuple, what the names of the parts' inputs begin with."""
STATE = "state"
"""Name of the input with the recurrent state."""
NEXT_STATE = "next_state"
"""Name of the output with the recurrent state after the action."""


class NetworkStep(NamedTuple):
    """What a policy's network computes from observations, as a pure function."""

    output: Tensor
    """``[N, size]``: parameterizes the action distribution."""
    value: Tensor
    """``[N]``: state values."""
    state: Tensor | None = None
    """``[N, *]``: recurrent state after the action; None if there is none."""


class Distribution(Protocol):
    """What an export needs of an action distribution (`algos.policies.distributions`)."""

    def most_probable(self, output: Tensor) -> Tensor:
        """Most probable actions, int64 or float32 ``[N, *]``."""


class ExportedPolicy(Protocol):
    """What an export needs of a policy (`algos.policies.policy.ControlPolicy`)."""

    observation_space: spaces.Space
    action_space: spaces.Space

    @property
    def distribution(self) -> Distribution:
        """Action distribution."""

    @property
    def initial_state(self) -> Tensor | None:
        """Recurrent state of one slot at the start of an episode, ``[*]``; None if there is none."""

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """Compute a step as a pure function."""

    def named_parts(self, output: Tensor) -> dict[str, Tensor]:
        """What an output of the network consists of, by name, ``[N, *]`` each."""


def write_onnx(policy: ExportedPolicy, path: str | Path, *, all_outputs: bool) -> Path:
    """Write a policy as one file of the format ONNX; see `algos.policies.policy.ControlPolicy.export`.

    Raises:
        ImportError: if the extra ``onnx`` is not installed.
        OSError: if the file cannot be written.
    """
    for name in ("onnx", "onnxscript"):
        package(name, "onnx")
    path = Path(path)
    check_new_file("path", path)

    # A copy on the CPU, because torch's exporter replaces attributes of LSTM layers
    network = copy.deepcopy(policy)
    assert isinstance(network, nn.Module), "a ControlPolicy is one"
    network.requires_grad_(False).to("cpu").eval()
    graph = _PolicyGraph(network, all_outputs=all_outputs)

    # The inputs; two examples, because the exporter takes a dimension of 1 for a constant
    names = _input_names(policy.observation_space)
    parts = tuple(_zeros(leaf) for leaf in names.values())
    batch = torch.export.Dim(BATCH)
    inputs: tuple[Any, ...] = (parts,)
    shapes: tuple[Any, ...] = (tuple({0: batch} for _ in parts),)
    input_names = list(names)
    if network.initial_state is not None:
        inputs += (torch.stack([network.initial_state, network.initial_state]),)
        shapes += ({0: batch},)
        input_names.append(STATE)
    with torch.no_grad():
        output_names = list(graph.named_outputs(*inputs))

    with _silence():
        program = torch.onnx.export(
            graph,
            inputs,
            input_names=input_names,
            output_names=output_names,
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert program is not None, "the exporter returns a program, as it writes no file"
        program.save(path)
    return path


class _PolicyGraph(nn.Module):
    """Everything between an environment's observations and its actions, as a function of tensors."""

    def __init__(self, policy: ExportedPolicy, *, all_outputs: bool) -> None:
        super().__init__()
        self.policy = policy
        self.all_outputs = all_outputs
        self.leaves = list(_input_names(policy.observation_space).values())

    def forward(self, parts: tuple[Tensor, ...], state: Tensor | None = None) -> tuple[Tensor, ...]:
        """Outputs in the order of `named_outputs`."""
        return tuple(self.named_outputs(parts, state).values())

    def named_outputs(self, parts: tuple[Tensor, ...], state: Tensor | None = None) -> dict[str, Tensor]:
        """Outputs by name, from the parts of the observations ``[N, *]`` and the recurrent state ``[N, *]``."""
        policy = self.policy
        step = policy.forward(self._network_input(parts), state)
        outputs = {"action": _fit_actions(policy.action_space, policy.distribution.most_probable(step.output))}
        if step.state is not None:
            outputs[NEXT_STATE] = step.state
        if self.all_outputs:
            outputs |= policy.named_parts(step.output)
            outputs["value"] = step.value
        return outputs

    def _network_input(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Observations as `algos.envs.flatten.flatten` makes them, without packing."""
        if isinstance(self.policy.observation_space, spaces.Box):
            return parts[0]
        columns = [_flat_columns(leaf, part) for leaf, part in zip(self.leaves, parts, strict=True)]
        return torch.cat(columns, dim=-1)


def _input_names(space: spaces.Space, name: str = OBSERVATION) -> dict[str, spaces.Space]:
    """Parts without further parts by the names of their inputs, such as ``observation/camera``."""
    if isinstance(space, spaces.Dict):
        parts = {f"{name}/{key}": part for key, part in space.items()}
    elif isinstance(space, spaces.Tuple):
        parts = {f"{name}/{i}": part for i, part in enumerate(space)}
    else:
        return {name: space}
    names: dict[str, spaces.Space] = {}
    for part_name, part in parts.items():
        names_of_part = _input_names(part, part_name)
        for clash in names.keys() & names_of_part.keys():
            raise ValueError(f"two parts of observation_space have the name {clash} in the file: rename one")
        names |= names_of_part
    return names


def _zeros(leaf: spaces.Space) -> Tensor:
    """Two examples of an input, in the dtype in which the environment gives them if ONNX tools know it."""
    dtype = leaf.dtype
    assert dtype is not None, "a part without further parts has a dtype"
    if dtype in NOT_IN_TORCH:
        dtype = np.dtype("float32") if isinstance(leaf, spaces.Box) else np.dtype("int64")
    return torch.from_numpy(np.zeros((2, *(leaf.shape or ())), dtype=dtype))


def _flat_columns(leaf: spaces.Space, part: Tensor) -> Tensor:
    """Columns float32 ``[N, size]`` of a part: choices one-hot, numbers side by side."""
    rows = part.reshape(part.shape[0], -1)
    if isinstance(leaf, spaces.Discrete):
        return _one_hot(rows, int(leaf.start), int(leaf.n))
    if isinstance(leaf, spaces.MultiDiscrete):
        starts = leaf.start.ravel().tolist()
        counts = leaf.nvec.ravel().tolist()
        choices = zip(rows.split(1, dim=-1), starts, counts, strict=True)
        return torch.cat([_one_hot(column, start, count) for column, start, count in choices], dim=-1)
    return rows.to(torch.float32)


def _one_hot(column: Tensor, start: int, count: int) -> Tensor:
    """One-hot float32 ``[N, count]`` of integers ``[N, 1]`` from ``start`` on."""
    options = torch.arange(start, start + count, device=column.device)
    return (column.to(torch.int64) == options).to(torch.float32)


def _fit_actions(space: spaces.Space, action: Tensor) -> Tensor:
    """Actions within the bounds of a Box and of the space's dtype, as `algos.envs.spaces.fit_actions`."""
    dtype = getattr(torch, str(space.dtype))
    if isinstance(space, spaces.Box):
        low = torch.from_numpy(space.low).to(action.device)
        high = torch.from_numpy(space.high).to(action.device)
        precise = torch.promote_types(action.dtype, dtype)
        action = action.to(precise).clamp(low.to(precise), high.to(precise))
    return action.to(dtype)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch's exporter from telling what it could not find and what torch will change."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
