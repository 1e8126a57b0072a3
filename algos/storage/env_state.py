"""Save and restore mid-episode state of Gymnasium environments, and the states of the objects that they call."""

import copy
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, TypedDict
from weakref import WeakKeyDictionary, WeakSet

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers.utils import RunningMeanStd
from torch import Tensor, nn

from algos.envs.wrapping import CopiesFinalObservation
from algos.storage.run_files import OBJECTS
from algos.storage.run_folder import remove, replacing
from algos.storage.serialization import attributes, from_json, set_attributes, to_json, write_tensors
from textenv.importing import name_of
from textenv.json_files import parse_json
from textenv.rollout import is_episode_env
from textenv.state import Stateful, class_name, is_our_code, set_states, stateful_objects, states_of

logger = logging.getLogger(__name__)
KNOWN_PACKAGES = (
    "gymnasium.envs.classic_control",
    "gymnasium.envs.toy_text",
    "gymnasium.vector",
    "gymnasium.wrappers",
)
"""Packages whose environments keep all state in attributes, as ours do; others may hide some (a simulator's memory)."""
INERT_TYPES = (spaces.Space, EnvSpec, gymnasium.Env, gymnasium.vector.VectorEnv, Enum, str, int, float, type(None))
"""Types of attributes that hold no state of an episode, or whose state is saved elsewhere."""

NO_SETTINGS = ("num_envs", "vectorization_mode", "render_mode", "_np_random_seed")
"""Arguments and attributes of environments that do not change an episode, or are compared elsewhere."""

AnyEnv: TypeAlias = gymnasium.Env | gymnasium.vector.VectorEnv
"""One environment, or several in a vector."""
PartState = TypedDict(
    "PartState",
    {
        "class": str,
        "state": dict[str, Any],
        "objects": dict[str, dict[str, object]],
        "made_with": str,
        "unchanged": dict[str, str],
    },
    total=False,
)
"""State of one wrapper or environment, with the name of its class, the objects that it holds, its arguments, and a
digest of each attribute that the training has not changed."""

_BEFORE: WeakKeyDictionary[AnyEnv, dict[str, str]] = WeakKeyDictionary()
"""Digests of the attributes of wrappers and environments when their first training began."""

_WARNED: WeakSet[AnyEnv] = WeakSet()
"""Environments that cannot be saved, for which a warning was logged."""


def env_state(env: AnyEnv) -> list[PartState] | None:
    """Return the state of an environment, wrapper by wrapper, including the single environments of a vector.

    Args:
        env: a `gymnasium.Env` or `gymnasium.vector.VectorEnv`. Its ``state_dict`` and ``load_state_dict`` are used if
            it has them. Otherwise the state is its attributes that are numbers, text, arrays and random generators, and
            such attributes of the objects that it holds (running statistics). What it calls, such as the function of a
            wrapper, is not a part of it: see `user_objects`.

    Returns:
        Input for `set_env_state`. None if a part is neither ours nor of `KNOWN_PACKAGES`, holds something that cannot
        be saved, or runs in another process: such an environment is reset when a run resumes.
    """
    try:
        return [_state_of(part) for part in _parts(env)]
    except TypeError as error:
        if env not in _WARNED:
            _WARNED.add(env)
            logger.warning(
                "%s; so a run that is resumed begins new episodes: it learns as before, but with other numbers", error
            )
        return None


def _state_of(part: AnyEnv) -> PartState:
    """Return the state of one wrapper or environment; raise a TypeError if something in it cannot be saved."""
    if isinstance(part, Stateful):
        return {"class": class_name(part), "state": dict(part.state_dict())}
    if not _is_known(part):
        raise TypeError(
            f"{name_of(type(part))} cannot be saved mid-episode: only Gymnasium's small games and ours can, and "
            "environments with methods state_dict() and load_state_dict(state), all in this process"
        )

    # Attributes that can be saved, and objects all of whose attributes can
    state = attributes(part)
    objects = {}
    for name, value in vars(part).items():
        if name in state or _is_inert(value):
            continue
        object_state = {}
        if _is_known(value):
            object_state = attributes(value)
        if not object_state or object_state.keys() != vars(value).keys():
            raise TypeError(f"{class_name(part)} cannot be saved mid-episode: its {name} is a {type(value).__name__}")
        objects[name] = object_state
    first_digests = _BEFORE.get(part, {})
    digests = _digests(part, first_digests)
    unchanged = {name: digest for name, digest in digests.items() if first_digests[name] == digest}
    return {
        "class": class_name(part),
        "state": state,
        "objects": objects,
        "made_with": _made_with(part),
        "unchanged": unchanged,
    }


def note_settings(env: AnyEnv) -> None:
    """Note the attributes of a new environment before its training, so that `changed_arguments` knows its settings.

    Settings are attributes that the training does not change. They stand for arguments that Gymnasium does not know
    (of a class that was made directly), or that cannot be compared (arrays). An environment that has been reset before
    is left out: its attributes may be the state of an episode.
    """
    parts = list(_parts(env))
    if any(vars(part).get("_np_random") is not None for part in parts):
        return
    for part in parts:
        if _is_known(part) and not isinstance(part, Stateful) and not _are_arguments_known(part):
            _BEFORE.setdefault(part, _digests(part, vars(part)))


def _are_arguments_known(part: AnyEnv) -> bool:
    """Return True if Gymnasium knows all arguments of a wrapper or environment, and JSON can hold them."""
    arguments = _arguments(part)
    try:
        json.dumps(arguments)
    except (TypeError, ValueError):
        return False
    return bool(arguments)


def _digests(part: AnyEnv, names: Iterable[str]) -> dict[str, str]:
    """Return a digest of each of these attributes that can be saved and may be a setting."""
    digests = {}
    for name in names:
        value = vars(part).get(name)
        if name in NO_SETTINGS or isinstance(value, np.random.Generator):
            continue
        tensors: dict[str, Tensor] = {}
        try:
            text = json.dumps(to_json(value, tensors))
        except TypeError:  # it cannot be saved
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        for tensor in tensors.values():
            digest.update(tensor.cpu().numpy().tobytes())
        digests[name] = digest.hexdigest()
    return digests


def _arguments(part: object) -> dict[str, object]:
    """Return the arguments with which a wrapper or environment was made, as far as Gymnasium knows them."""
    arguments: dict[str, object] = dict(vars(part).get("_saved_kwargs", {}))
    spec = vars(part).get("spec")
    if isinstance(spec, EnvSpec):
        arguments |= {"id": spec.id, "max_episode_steps": spec.max_episode_steps} | spec.kwargs
    return arguments


def _made_with(part: object) -> str:
    """Return the arguments with which a wrapper or environment was made, as JSON, as far as Gymnasium knows them."""
    plain_arguments = {}
    for name, value in _arguments(part).items():
        if name in NO_SETTINGS:
            continue
        with suppress(TypeError, ValueError):  # what JSON does not have, such as functions, cannot be compared
            plain_arguments[name] = json.loads(json.dumps(value))
    return json.dumps(plain_arguments, sort_keys=True)


def changed_arguments(env: AnyEnv, state: list[PartState]) -> str:
    """Say which arguments an environment was made with, and which the saved one; empty if they are equal or unknown.

    Args:
        env: an environment, noted by `note_settings`.
        state: of `env_state`; those of earlier versions do not know the arguments, or not the settings.
    """
    for part, saved in zip(_parts(env), state, strict=False):
        if saved["class"] != class_name(part) or "made_with" not in saved:
            continue
        made_with = _made_with(part)
        if _without_empty_wrappers(saved["made_with"]) != _without_empty_wrappers(made_with):
            return f"{class_name(part)} was made with {saved['made_with']}, now with {made_with}"

        # What Gymnasium does not know of: attributes that stayed as they were in the saved run, and are others now
        unchanged = saved.get("unchanged", {})
        for name, digest in _BEFORE.get(part, {}).items():
            if unchanged.get(name, digest) != digest:
                what = "the arguments" if name == "_saved_kwargs" else name
                return f"{class_name(part)} had {what} {saved['state'][name]!r:.200}, now {vars(part).get(name)!r:.200}"
    return ""


def _without_empty_wrappers(made_with: str) -> dict[str, object]:
    """Read what `_made_with` returned: an empty list of wrappers, as the command line has it, is none."""
    arguments: dict[str, object] = json.loads(made_with)
    if not arguments.get("wrappers"):
        arguments.pop("wrappers", None)
    return arguments


def set_env_state(env: AnyEnv, state: list[PartState]) -> None:
    """Restore saved mid-episode state in an environment of the same kind.

    Args:
        env: built like the saved one. It is reset first, to create what only a reset creates; whole episodes of text
            need none, and would start programs and games in vain.
        state: from `env_state`.

    Raises:
        ValueError: if it is wrapped or built differently.
    """
    if not is_episode_env(env):
        env.reset(seed=0)
    parts = list(_parts(env))
    names = [class_name(part) for part in parts]
    saved_names = [saved["class"] for saved in state]
    if names != saved_names:
        raise ValueError(
            f"the environment is {' > '.join(names)}, but the saved one was {' > '.join(saved_names)}: make it in the "
            "same way as for the run"
        )
    for part, saved in zip(parts, state, strict=True):
        if isinstance(part, Stateful):
            part.load_state_dict(saved["state"])
        else:
            set_attributes(part, saved["state"])
            for name, values in saved["objects"].items():
                set_attributes(vars(part)[name], values)


def wrappers_with_statistics(env: AnyEnv) -> list[str]:
    """Return the names of the wrappers with running statistics, such as Gymnasium's ``NormalizeObservation``."""
    names = []
    for part in _parts(env):
        if any(isinstance(value, RunningMeanStd) for value in vars(part).values()):
            names.append(type(part).__name__)
    return list(dict.fromkeys(names))  # each slot has its own


def user_objects(env: object) -> dict[str, object]:
    """Return the objects that an environment calls: its task with the rewards, in control the functions of wrappers.

    The names of the latter begin with the number of the slot, or with ``vector`` for wrappers of all slots at once.
    """
    if is_episode_env(env):
        return env.user_objects
    if not isinstance(env, AnyEnv):
        return {}

    # Wrappers of all slots, and each slot's own
    singles = [env] if isinstance(env, gymnasium.Env) else vars(env.unwrapped).get("envs", ())
    objects: dict[str, object] = {}
    if isinstance(env, gymnasium.vector.VectorEnv):
        objects |= _called_by(env, "vector")
    for slot, single in enumerate(singles):
        objects |= _called_by(single, str(slot))
    return objects


def _called_by(env: AnyEnv, place: str) -> dict[str, object]:
    """Return what an environment and its wrappers call, by the place, the wrapper's number and class, and attribute."""
    objects = {}
    index = 0
    part: Any = env
    while part is not None:
        if not isinstance(part, CopiesFinalObservation):
            for name, called in _called(part).items():
                objects[f"{place}.{index}.{type(part).__name__}.{name}"] = called
            index += 1
        part = vars(part).get("env")
    return objects


def object_states(env: object) -> dict[str, dict[str, object]]:
    """Return the states of the objects that an environment calls, for `set_object_states`."""
    return states_of(user_objects(env))


def set_object_states(env: object, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore what `object_states` returned; return the names of objects and states that do not match.

    In control, slots that the saved environment did not have get the states of those that it had, in turn.
    """
    if is_episode_env(env):
        return set_states(user_objects(env), saved)
    objects = user_objects(env)
    places = {path.partition(".")[0] for path in saved}
    num_saved = 1 + max((int(place) for place in places if place.isdigit()), default=-1)
    states: dict[str, Mapping[str, Any]] = {}
    for path in stateful_objects(objects):
        slot, _, path_in_slot = path.partition(".")
        saved_path = path
        if slot.isdigit() and num_saved:
            saved_path = f"{int(slot) % num_saved}.{path_in_slot}"
        if saved_path in saved:
            states[path] = saved[saved_path]
    return set_states(objects, states)


@contextmanager
def kept_object_states(env: AnyEnv) -> Iterator[None]:
    """Context after which the objects that a control environment calls are as before."""
    states = copy.deepcopy(object_states(env))
    try:
        yield
    finally:
        set_object_states(env, states)


def _called(part: AnyEnv) -> dict[str, object]:
    """Return what a wrapper or environment of Gymnasium calls, by the name of the attribute; no models."""
    if not _is_known(part) or isinstance(part, Stateful):
        return {}
    inert = (type, nn.Module, *INERT_TYPES)
    return {name: value for name, value in vars(part).items() if callable(value) and not isinstance(value, inert)}


def share_objects(training_env: object, env: object) -> None:
    """Copy the states of rewards and other objects from the training's environment to one for evaluation."""
    set_object_states(env, object_states(training_env))


def restore_objects(env: AnyEnv, state: list[PartState] | None) -> None:
    """Restore only the states of the objects that an environment calls, from a result of `env_state`."""
    if state is None:
        return
    for saved in state:
        if isinstance(saved.get("state"), dict):
            set_states(user_objects(env), saved["state"].get("objects", {}))


def save_objects(env: AnyEnv, folder: Path) -> None:
    """Write the states of the objects that an environment calls into a folder; without any, remove an earlier file.

    Raises:
        OSError, SafetensorError: if the file cannot be written.
        TypeError: if a state holds something that cannot be saved.
    """
    states = object_states(env)
    if not states:
        remove(folder / OBJECTS)
        return
    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_json(states, tensors))
    with replacing(folder / OBJECTS) as draft:
        write_tensors(draft, tensors, metadata={"states": text})


def load_objects(folder: str | Path, env: AnyEnv) -> None:
    """Put the rewards and other objects of an environment into the state in which a saved agent was trained.

    An object that has another path or class than in the training is left as it is, and is named in the log.

    Args:
        folder: folder of the saved agent; without states in it, nothing happens.
        env: environment to change, for example one for an evaluation.

    Raises:
        ValueError: if the file is damaged.
    """
    from safetensors import safe_open

    path = Path(folder) / OBJECTS
    if not path.is_file():
        return
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            saved = parse_json(file.metadata()["states"])
        states = from_json(saved, tensors)
        different = set_object_states(env, states)
    except Exception as error:  # complete, but not written by `save_objects`: anything may fail
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if different:
        logger.warning(
            "objects and saved states that do not match (such an object starts afresh): %s", ", ".join(different)
        )


def _is_known(part: object) -> bool:
    """Return True if the class of an object is ours, or of `KNOWN_PACKAGES`."""
    module = type(part).__module__
    return is_our_code(type(part)) or any(f"{module}.".startswith(f"{package}.") for package in KNOWN_PACKAGES)


def _is_inert(value: object) -> bool:
    """Return True for values that hold no episode state, or whose state is saved elsewhere, and lists of these."""
    if isinstance(value, (list, tuple)):
        return all(_is_inert(item) for item in value)
    if isinstance(value, dict):
        return all(_is_inert(item) for item in value.values())
    return isinstance(value, INERT_TYPES) or callable(value)


def _parts(env: AnyEnv) -> Iterator[AnyEnv]:
    """Yield the environment, what it wraps, and the single environments inside; not our wrapper, which has no state."""
    if not isinstance(env, CopiesFinalObservation):  # which environments of earlier versions do not have
        yield env
    if vars(env).get("envs") is not None:
        for single in vars(env)["envs"]:
            yield from _parts(single)
    elif "env" in vars(env):
        yield from _parts(vars(env)["env"])
