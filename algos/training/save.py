"""Saving an agent and loading its policy: weights in safetensors, everything else in one JSON file."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorWrapper

from algos.envs.wrapping import NO_LIMIT, VECTOR_ONLY, vector_wrappers
from algos.storage.hub import agent_folder, download
from algos.storage.provenance import provenance
from algos.storage.run_files import CONFIG, POLICY
from algos.storage.run_folder import refuse_tilde, replacing
from algos.storage.run_reader import AgentRecord, DamagedRunError, check_record, read_record
from algos.storage.saved_environment import UnnamedCodeError
from textenv.device import find_device
from textenv.foreign import our_names
from textenv.importing import load_function, name_of
from textenv.kl.coefficients import as_coefficient
from textenv.plain import plain

if TYPE_CHECKING:
    import torch

    from algos.config import Config
    from algos.policies.policy import Policy
    from algos.training.learner import Learner

FORMAT = 5
"""Format version of the folder."""
READ_FORMATS = (2, 3, 4, FORMAT)
"""Formats that are read: up to 4, networks divide all pixels by 255, whatever their space; up to 3, arguments have the
names of version 0.2; 2 has no dtype of observations."""


def save(agent: Learner[Config], folder: str | Path) -> Path:
    """Write an agent's policy and config; a language model goes to ``policy/`` as a `transformers` folder.

    States of rewards and of other objects of the environment go to ``objects.safetensors``, which
    `algos.storage.env_state.load_objects` reads. Earlier files in the folder stay until the new ones are complete.

    Returns:
        The folder.

    Raises:
        OSError: if they cannot be written (a full disk, a read-only folder).
        ValueError: if the path begins with ``~``.
    """
    from safetensors import SafetensorError

    from algos.storage.env_state import save_objects

    refuse_tilde("folder", folder)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(folder / CONFIG) as new_config, replacing(folder / POLICY) as new_weights:
            new_weights.mkdir()
            description = _write_policy_and_describe(agent, new_weights)
            new_config.write_text(json.dumps(description, indent=2, default=describe) + "\n", encoding="utf-8")
        save_objects(agent.env, folder)
    except SafetensorError as error:
        raise OSError(f"the agent could not be saved in {folder}: {error}") from error
    return folder


def _write_policy_and_describe(agent: Learner[Config], policy_folder: Path) -> dict[str, Any]:
    """Write the policy into a folder; return the content of ``config.json``."""
    from textenv.envs.vector_env import TextVectorEnv

    description: dict[str, Any] = {
        "format": FORMAT,
        "environment": _describe_environment(spec_of(agent.env)),
        "algorithm": type(agent).__name__,
        "config": dataclasses.asdict(agent.config),
        "steps": agent.steps,
        "policy": _class_name(type(agent.policy)),
        "policy_arguments": agent.policy.save(policy_folder),
        "reward_normalizer": None,
        "penalty": None,
        "made_by": provenance(),
    }

    # What not every agent has
    if agent.reward_normalizer is not None:
        description["reward_normalizer"] = agent.reward_normalizer.state_dict()
    if agent.penalty is not None:
        description["penalty"] = agent.penalty.state_dict()
    if isinstance(agent.env, TextVectorEnv):
        description["turns_end_with"] = str(agent.env.ends)  # for readers; the policy's folder has the ids
    return description


def load(
    folder: str | Path,
    *,
    device: str | torch.device | None = None,
    policy_class: type[Policy] | None = None,
    describe: Callable[[Any], str] | str | None = None,
) -> Policy:
    """Load the policy of a saved agent, ready to act.

    Args:
        folder: folder of a run or of a saved agent; or the name of an agent on the hub, such as ``user/name`` (see
            `from_hub`).
        device: where to move the policy, see `textenv.device.find_device`; None is the CPU.
        policy_class: class of a policy of your own; a class that a folder names is never imported. It needs a
            classmethod ``load(folder, saved)`` that reads what its ``save(folder)`` wrote and returned, like
            `ControlPolicy`.
        describe: for a `WordsPolicy` with a description of your own: the function, or its name ``file.py:function``; a
            function that a folder names is never imported.

    Raises:
        FileNotFoundError: if the folder holds no saved agent, and the hub has none of this name.
        TypeError: if ``policy_class`` is no class of policies with a method ``load``.
        ValueError: if the folder has an unknown format, or holds a policy of another class; or if there is no such
            device.
    """
    # Description and class
    target = find_device(device)
    folder = agent_folder(folder)
    description = read_description(folder)
    saved_name = description["policy"]
    loaded_class: Any = policy_class
    if policy_class is None:
        loaded_class = _policy_class(saved_name, folder)
    _check_class(loaded_class, saved_name, folder)

    # Policy
    own_describe: object = describe
    if isinstance(describe, str):
        own_describe = load_function(describe)
    weights = Path(folder) / POLICY
    try:
        if _is_language_model(loaded_class):
            return loaded_class.load(weights, device=target)
        options: dict[str, object] = {}
        if describe is not None:
            options["describe"] = own_describe
        arguments = description["policy_arguments"]
        observation = arguments.get("observation")
        if description["format"] < 5 and isinstance(observation, dict):
            _widen_bounds_of_pixels(observation)
        policy = loaded_class.load(weights, arguments, **options)
    except (ImportError, UnnamedCodeError):  # their messages say what to do
        raise
    except Exception as error:  # the arguments come from a file, and safetensors has its own errors
        reason = repr(error)
        if type(error) is ValueError:
            reason = str(error)
        raise ValueError(f"{weights} does not match the {saved_name} in config.json: {reason}") from error
    if target is None:
        return policy
    return policy.to(target)


def _class_name(policy_class: type) -> str:
    """Return the name of a policy's class for a saved agent: the name alone for ours, ``module:name`` for others."""
    if policy_class.__module__.startswith("algos.policies."):
        return policy_class.__name__
    return f"{policy_class.__module__}:{policy_class.__qualname__}"


def _policy_class(saved_name: str, folder: Path) -> Any:
    """Return a class of ours by its name in a saved agent; raise a ValueError on other names, and import nothing."""
    from algos.policies.registry import CONTROL_POLICIES, find_policy

    control_classes = [path.partition(":")[2] for path in CONTROL_POLICIES.values()]
    if saved_name in control_classes:
        return find_policy(saved_name)
    if saved_name == "LMPolicy":
        from algos.policies.lm import LMPolicy

        return LMPolicy
    raise ValueError(
        f"{folder} holds a {saved_name:.100}, expected one of {', '.join(control_classes)}, LMPolicy: a "
        "class of your own runs only if you name it, algos.load(folder, policy_class=Mine), or on the command line "
        "algos evaluate RUN --policy-class file.py:Mine"
    )


def _check_class(policy_class: object, saved_name: str, folder: Path) -> None:
    """Raise an error unless a class can load policies and has the name of the saved class."""
    if not isinstance(policy_class, type) or not callable(getattr(policy_class, "load", None)):
        raise TypeError(
            f"policy_class is {policy_class!r:.100}, expected a class of policies with a classmethod "
            "load(folder, saved), which reads what its save(folder) wrote and returned"
        )
    # Compare only the name of the class: the saved module is `__main__` if the program that trained defined the class
    name = saved_name.rpartition(":")[2].rpartition(".")[2]
    if policy_class.__name__ != name:
        raise ValueError(f"{folder} holds a {name:.100}, but policy_class is {policy_class.__name__}: give that class")


def _is_language_model(policy_class: type) -> bool:
    """Return True if a class is `LMPolicy` or inherits from it; a control run need not import it for this."""
    return any(base.__module__ == "algos.policies.lm" for base in policy_class.__mro__)


def from_hub(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    device: str | torch.device | None = None,
    policy_class: type[Policy] | None = None,
) -> Policy:
    """Load the policy of an agent that `push_to_hub` has shared; only data is read, no code runs.

    Args:
        repo_id: ``user/name``.
        revision: commit, tag or branch; a commit never changes.
        token: access token; None is the one of ``hf auth login`` or ``HF_TOKEN``, if any.
        device, policy_class: see `load`.

    Raises:
        OSError: if there is no such agent, no access, or no network.
        ValueError: as `load`.
    """
    return load(download(repo_id, revision=revision, token=token), device=device, policy_class=policy_class)


def read_description(folder: str | Path) -> AgentRecord:
    """Read the ``config.json`` of a saved agent, in a folder or on the hub, in one of `READ_FORMATS`.

    Raises:
        FileNotFoundError: if there is no saved agent.
        DamagedRunError: if it is damaged, has another format, or names an environment with a module to import.
    """
    # The file
    path = agent_folder(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no saved agent ({path.name} is missing): give a folder written by agent.save(folder) "
            "or by 'algos train --run-dir'"
        )
    content = read_record(path)

    # Format and fields
    if "model_type" in content:
        raise DamagedRunError(
            f"{folder} holds a transformers model, not an agent: algos.LMPolicy.load or --model reads it"
        )
    if content.get("format") not in READ_FORMATS:
        raise DamagedRunError(
            f"{path} has format {content.get('format')!r:.100}, but this version reads 2 to {FORMAT}: "
            "load it with the version of algos that wrote it"
        )
    record = check_record(content, path)
    if record["format"] < 4:
        _rename_old_arguments(record)

    # Gymnasium would import what stands before a colon
    environment = record["environment"]
    if environment is not None and ":" in environment["id"]:
        raise DamagedRunError(
            f"{path} names the environment {environment['id']!r:.200}, whose module would be imported: if you trust "
            f"it, name it yourself (algos evaluate {path.parent} --env module:id)"
        )
    return record


def _rename_old_arguments(record: AgentRecord) -> None:
    """Rename what formats 2 and 3 call by other names; changes the record."""
    # Policy
    arguments = record["policy_arguments"]
    if record["format"] == 2 and "observation_shape" in arguments:
        dtype = "float32"
        if record["policy"] == "CNNPolicy":
            dtype = "uint8"
        arguments["observation"] = {"shape": arguments.pop("observation_shape"), "dtype": dtype}
    if arguments.get("sde_sample_freq") is not None:
        record["policy"] = "GSDEPolicy"
    else:
        arguments.pop("sde_sample_freq", None)

    # Environment
    environment = record["environment"]
    if environment is not None and environment["id"].startswith("textenv/"):
        renamed = {}
        for name, value in environment["kwargs"].items():
            new_name = next(iter(our_names(name)), name)
            renamed[new_name] = value
        environment["kwargs"] = renamed


def _widen_bounds_of_pixels(space: dict[str, Any]) -> None:
    """Set the largest pixel of a described space to 255, by which networks divided up to format 4; changes it."""
    for _, part in space.get("dict", ()):
        _widen_bounds_of_pixels(part)
    for part in space.get("tuple", ()):
        _widen_bounds_of_pixels(part)
    if space.get("dtype") == "uint8" and len(space.get("shape", ())) > 1:
        space["high"] = 255


def describe(function: Callable[..., object]) -> str | dict[str, object]:
    """Describe a function in a config, such as a loss: its module and name; for `functools.partial` also arguments.

    An object that is called has the name of its class.
    """
    if isinstance(function, partial):
        return {"function": describe(function.func), "arguments": function.keywords}
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def plain_config(config: Config) -> dict[str, int | float | str | bool | None]:
    """Return the fields of a config as plain values; functions as ``config.json`` describes them."""
    values: dict[str, int | float | str | bool | None] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, (int, float, str, bool, NoneType)):
            values[name] = value
        else:
            values[name] = json.dumps(value, default=describe)
    return values


def spec_of(env: Any) -> EnvSpec | None:
    """Return Gymnasium's specification of an environment; None if it has none, or another kind, such as EnvPool's.

    Its argument ``wrappers`` has all that wraps the environment, the innermost first: also wrappers in a specification
    that ``make_vec`` was given, by name, and those of all slots at once (`vector_wrappers`), by class. Another limit of
    steps than the registered one is an argument, too, where a specification has it as a field.
    """
    spec = env.spec
    if not isinstance(spec, EnvSpec):
        return None

    # The wrappers with which the id is registered are made with it
    num_registered = 0
    limit: dict[str, int] = {}
    registered = gymnasium.registry.get(spec.id)
    if registered is not None:
        num_registered = len(registered.additional_wrappers)
        if spec.max_episode_steps != registered.max_episode_steps:
            limit["max_episode_steps"] = spec.max_episode_steps or NO_LIMIT
    in_spec = [wrapper.entry_point for wrapper in spec.additional_wrappers[num_registered:]]

    of_slots = spec.kwargs.get("wrappers", ())
    complete = copy.copy(spec)  # with the module that `make_vector_environment` notes in it
    complete.kwargs = {**limit, **spec.kwargs, "wrappers": [*in_spec, *of_slots, *vector_wrappers(env)]}
    return complete


def _describe_environment(spec: EnvSpec | None) -> dict[str, object] | None:
    """Describe an environment for ``config.json``.

    Returns:
        ``id``, ``kwargs``, ``module`` and, if there are any, names of ``wrappers``; ``vector_wrappers`` are those of
        them that wrap all slots at once. None without a spec (an environment built by hand), or if JSON cannot hold
        the arguments.
    """
    if spec is None:
        return None

    # Arguments as plain data
    arguments: dict[str, object] = {}
    for name, value in spec.kwargs.items():
        if name in VECTOR_ONLY or name == "sampler":  # evaluations use no sampler
            continue
        if isinstance(value, Path):
            arguments[name] = str(value)
        elif name == "describe" and callable(value):
            arguments[name] = name_of(value)
        else:
            arguments[name] = plain(value)

    # The initial value of a coefficient that changes: a reader only needs to know that a KL is measured
    kl_coef: Any = arguments.get("kl_coef")
    if kl_coef is not None:
        arguments["kl_coef"] = as_coefficient(kl_coef).value

    # An absolute path, so that the model is found from another working folder too
    model = arguments.get("model")
    if isinstance(model, str) and Path(model).is_dir():
        arguments["model"] = str(Path(model).resolve())
    try:
        json.dumps(arguments)
    except TypeError:
        return None

    # Wrappers, which are functions or their names
    description = {"id": spec.id, "kwargs": arguments, "module": getattr(spec, "module", None)}
    names = []
    names_of_vector_wrappers = []
    for wrapper in spec.kwargs.get("wrappers", ()):
        name = wrapper if isinstance(wrapper, str) else name_of(wrapper)
        names.append(name)
        if isinstance(wrapper, type) and issubclass(wrapper, VectorWrapper):
            names_of_vector_wrappers.append(name)
    if names:
        description["wrappers"] = names
    if names_of_vector_wrappers:
        description["vector_wrappers"] = names_of_vector_wrappers
    return description
