"""`UnsavedState`: what a training changes in a user's objects and no checkpoint has."""

import inspect
import itertools
import logging
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from numbers import Number
from pickle import dumps
from random import Random
from types import FunctionType, GeneratorType
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from algos.policies.policy import Policy
from algos.storage.env_state import user_objects
from textenv.rewards.calling import reward_name
from textenv.state import attributes_of, is_our_code, stateful_objects, used_objects, variables_of

logger = logging.getLogger(__name__)
OF_AGENT = {"progress", "steps", "update_generator"}
"""Attributes of every agent that a resumed run sets again, or that are saved under another name."""

OF_POLICY = {"_parameters", "_buffers", "_modules", "training", "generator", "memory"}
"""Attributes of a policy that are saved."""


class Plays(Protocol):
    """What has an environment and a policy that plays it."""

    env: VectorEnv
    policy: Policy


class UnsavedState:
    """Attributes of a user's algorithm, policy, rewards or tasks that a training changes and that no checkpoint has.

    Objects that only watch the training, such as callbacks, are not looked at: they may count as they like.

    Args:
        agent: the agent, or a rollout worker with a copy of its policy and an environment of its own.
        evaluated: False if evaluations have other objects, as with rollout workers.
    """

    def __init__(self, agent: Plays, *, evaluated: bool = True) -> None:
        self.agent = agent
        self.evaluated = evaluated
        self._first_fingerprints = self._fingerprints()
        self._warned_about: set[str] = set()

    def warn(self) -> None:
        """Log a warning about the attributes that have changed since the start and are not saved, once for each."""
        changed = set()
        for name, fingerprint in self._fingerprints().items():
            if self._first_fingerprints.get(name) != fingerprint:
                changed.add(name)
        changed -= self._warned_about
        if not changed:
            return
        self._warned_about |= changed
        nor_evaluations = "" if self.evaluated else ", nor an evaluation"
        logger.warning(
            "the training changes %s, which no checkpoint has%s: a resumed run begins without it. Give the class "
            "state_dict and load_state_dict (docs/algorithms.md, docs/rewards.md)",
            ", ".join(sorted(changed)),
            nor_evaluations,
        )

    def _fingerprints(self) -> dict[str, Hashable]:
        """Return the fingerprint of each attribute that is not saved, by the names of class and attribute."""
        fingerprints: dict[str, Hashable] = {}

        # Algorithm and policy, if their classes are the user's
        if not is_our_code(type(self.agent)):
            library_names, added_fingerprints = _saved_by(self.agent)
            for name, fingerprint in _attributes(_attributes_beside_policy(self.agent), modules=True):
                # Saved under its own name, or by the user's class with the same content under another name
                has_saved_name = name.lstrip("_") in {*library_names, *added_fingerprints}
                is_saved = has_saved_name or fingerprint in added_fingerprints.values()
                if not is_saved:
                    fingerprints[f"{type(self.agent).__name__}.{name}"] = fingerprint
        policy = self.agent.policy
        if not is_our_code(type(policy)):
            values = {name: value for name, value in vars(policy).items() if name not in OF_POLICY}
            for name, fingerprint in _attributes(values):
                fingerprints[f"{type(policy).__name__}.{name}"] = fingerprint

        # Rewards, tasks and what they use
        for used in self._stateless_objects():
            attributes = dict(attributes_of(used))
            if isinstance(used, type):
                attributes = dict(vars(used))
            if isinstance(used, FunctionType):
                attributes |= dict(variables_of(used))
            for name, fingerprint in _attributes(attributes):
                fingerprints[f"{reward_name(used)}.{name}"] = fingerprint
        return fingerprints

    def _stateless_objects(self) -> Iterator[object]:
        """Yield the user's own objects that the training calls and that have no state to save."""
        objects = user_objects(self.agent.env)
        saved = {id(used) for used in stateful_objects(objects).values()}
        for _, used in used_objects(objects):
            defined = used if isinstance(used, (FunctionType, type)) else type(used)
            has_attributes = hasattr(used, "__dict__") or hasattr(defined, "__slots__")
            is_library = is_our_code(defined) or defined.__module__ == "functools"
            if has_attributes and not is_library and id(used) not in saved:
                yield used


def _saved_by(agent: Any) -> tuple[set[str], dict[str, Hashable]]:
    """Return the names that our part of an agent saves, and the fingerprints of what its own class adds, by name."""
    library: Any = next((base for base in type(agent).__mro__ if is_our_code(base)), None)
    try:
        state = agent.state_dict()
    except TypeError:  # of a policy that cannot be saved, which the checkpoint says
        return set(vars(agent)), {}
    if library is None:
        return set(), dict(_leaves(state))
    ours = library.state_dict(agent)
    added = {name: value for name, value in state.items() if name not in ours}
    return set(ours), dict(_leaves(added))


def _leaves(state: Mapping[Any, object]) -> Iterator[tuple[str, Hashable]]:
    for name, value in state.items():
        yield str(name).lstrip("_"), _fingerprint(value)
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{index}", _fingerprint(part)) for index, part in enumerate(value))


def _attributes_beside_policy(agent: Plays) -> dict[str, object]:
    """Return the attributes of an agent, without `OF_AGENT`, layers of the policy and lists of its parameters."""
    weights_of_policy = {id(weight) for weight in _weights(agent.policy)}
    attributes = {}
    for name, value in vars(agent).items():
        weights = {id(weight) for weight in _weights(value)}
        is_of_policy = weights and weights <= weights_of_policy
        if name not in OF_AGENT and not is_of_policy:
            attributes[name] = value
    return attributes


def _weights(value: object) -> Sequence[object]:
    """Return the parameters of a network, or the parts of a list, which may be parameters; nothing for others."""
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, (list, tuple)):
        return value
    return ()


def _attributes(values: Mapping[str, object], *, modules: bool = False) -> Iterator[tuple[str, Hashable]]:
    """Yield the names and fingerprints of attributes that could be saved; of networks too, if ``modules``."""
    for name, value in values.items():
        if is_our_code(type(value)):
            continue
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            if not modules:
                continue
            value = value.state_dict()
        fingerprint = _fingerprint(value)
        if fingerprint is not None:
            yield name, fingerprint


def _fingerprint(value: object) -> Hashable:
    """Return a value that changes with numbers, texts, arrays, generators and containers of these; None for others."""
    # Numbers, texts and arrays
    if isinstance(value, (Number, np.generic)):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return hash(value)  # Python keeps it, so that long texts are read once
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (tuple(value.shape), str(value.dtype), zlib.crc32(flat.view(torch.uint8).numpy().tobytes()))
    if isinstance(value, np.ndarray):
        content = value.tobytes() if value.dtype != object else repr(value).encode()
        return (value.shape, str(value.dtype), zlib.crc32(content))

    # Generators, of random numbers and others
    if isinstance(value, torch.Generator):
        return _fingerprint(value.get_state())
    if isinstance(value, (np.random.Generator, Random)):
        return zlib.crc32(dumps(value))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, GeneratorType):
        return _of_parts(inspect.getgeneratorlocals(value).values())
    if isinstance(value, ContextVar):
        return _fingerprint(value.get(None))

    # Containers
    if isinstance(value, Mapping):
        return _of_parts([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple, set, frozenset, deque)) and _is_standard(value):
        return _of_parts(value)
    return None


def _is_standard(container: object) -> bool:
    """Whether a container is of Python's own classes, and not one of a user's or a library's."""
    return type(container).__module__ in ("builtins", "collections")


def _of_parts(parts: Iterable[object]) -> Hashable:
    """Return the fingerprints of the parts of a container; None if it has parts, and no part has a fingerprint.

    An empty container has a fingerprint: numbers may be added to it later.
    """
    fingerprints = tuple(_fingerprint(part) for part in parts)
    if fingerprints and not any(fingerprints):
        return None
    return fingerprints
