"""Saving an agent and loading its policy: weights in safetensors, everything else in one JSON file."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec

from algos.storage.hub import agent_folder, download
from algos.storage.provenance import made_by
from algos.storage.run_folder import replacing
from algos.storage.run_reader import AgentRecord, DamagedRunError, check_record, read_record
from textenv.device import find_device
from textenv.foreign import our_names
from textenv.importing import name_of
from textenv.kl.coefficients import as_coefficient
from textenv.plain import plain

if TYPE_CHECKING:
    import torch

    from algos.policies.policy import Policy
    from algos.training.learner import Learner

FORMAT = 4
"""Format version of the folder; also read: 3 (argument names of 0.2) and 2 (no dtype of observations)."""
VECTOR_ONLY = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
"""Arguments of a vector environment's spec that the environment itself does not have."""


def save(agent: Learner, folder: str | Path) -> Path:
    """Write an agent's policy and config; a language model goes to ``policy/`` as a `transformers` folder.

    States of rewards and of other objects of the environment go to ``objects.safetensors``, for
    `algos.storage.env_state.load_objects`. Earlier files in the folder stay until the new ones are complete.

    Raises:
        OSError: if they cannot be written (a full disk, a read-only folder).
    """
    from safetensors import SafetensorError

    from algos.storage.env_state import save_objects
    from textenv.envs.vector_env import TextVectorEnv

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(folder / "config.json") as config, replacing(folder / "policy") as weights:
            weights.mkdir()
            rewards, penalty = agent.reward_normalizer, agent.penalty
            description = {
                "format": FORMAT,
                "environment": _describe_environment(spec_of(agent.env)),
                "algorithm": type(agent).__name__,
                "config": dataclasses.asdict(agent.config),
                "steps": agent.steps,
                "policy": _class_name(type(agent.policy)),
                "policy_arguments": agent.policy.save(weights),
                "reward_normalizer": None if rewards is None else rewards.state_dict(),
                "penalty": None if penalty is None else penalty.state_dict(),
                "made_by": made_by(),
            }
            if isinstance(agent.env, TextVectorEnv):
                description["turns_end_with"] = str(agent.env.ends)  # for readers; the policy's folder has the ids
            config.write_text(json.dumps(description, indent=2, default=describe) + "\n", encoding="utf-8")
        save_objects(agent.env, folder)
    except SafetensorError as error:
        raise OSError(f"the agent could not be saved in {folder}: {error}") from error
    return folder


def load(
    folder: str | Path,
    *,
    device: str | torch.device | None = None,
    policy_class: type[Policy] | None = None,
) -> Policy:
    """Load the policy of a saved agent, ready to act: on the CPU, or on another device (`textenv.device.find_device`).

    The folder may also be the name of an agent on the hub, such as ``user/name``; see `from_hub`.

    Args:
        folder: folder of a run or of a saved agent.
        device: where to move the policy; None is the CPU.
        policy_class: class of the policy if it is one of your own, which is never looked up by what a folder says. It
            needs a classmethod ``load(folder, saved)`` that reads what its ``save(folder)`` wrote and returned, as
            `ControlPolicy` has.

    Raises:
        FileNotFoundError: if the folder holds no saved agent, and the hub has none of this name.
        TypeError: if ``policy_class`` is no class of policies with a method ``load``.
        ValueError: if it has an unknown format, or holds a policy of another class; or if there is no such device.
    """
    target = find_device(device)
    folder = agent_folder(folder)
    description = read_description(folder)
    saved_name = description["policy"]
    loaded_class: Any = policy_class
    if policy_class is None:
        loaded_class = _policy_class(saved_name, folder)
    _check_class(loaded_class, saved_name, folder)

    weights = Path(folder) / "policy"
    try:
        if _is_language_model(loaded_class):
            return loaded_class.load(weights, device=target)
        policy = loaded_class.load(weights, description["policy_arguments"])
    except ImportError:  # its message names what to install
        raise
    except Exception as error:  # the arguments come from a file, and safetensors has its own errors
        reason = error if type(error) is ValueError else repr(error)
        raise ValueError(f"{weights} does not match the {saved_name} in config.json: {reason}") from error
    return policy if target is None else policy.to(target)


def _class_name(policy_class: type) -> str:
    """Name of a policy's class in a saved agent: of ours the name alone, of others ``module:name``."""
    ours = policy_class.__module__.startswith("algos.policies.")
    return policy_class.__name__ if ours else f"{policy_class.__module__}:{policy_class.__qualname__}"


def _policy_class(saved_name: str, folder: Path) -> Any:
    """Find a class of ours by the name in a saved agent; a ValueError on any other name, which is not imported."""
    from algos.policies.registry import CONTROL_POLICIES, find_policy

    ours = [home.partition(":")[2] for home in CONTROL_POLICIES.values()]
    if saved_name in ours:
        return find_policy(saved_name)
    if saved_name == "LMPolicy":
        from algos.policies.lm import LMPolicy

        return LMPolicy
    raise ValueError(
        f"{folder} holds a {saved_name:.100}, expected one of {', '.join(ours)}, LMPolicy: a "
        "class of your own runs only if you name it, algos.load(folder, policy_class=Mine), or on the command line "
        "algos evaluate RUN --policy-class file.py:Mine"
    )


def _check_class(policy_class: Any, saved_name: str, folder: Path) -> None:
    """Raise an error unless a class loads policies, and has the name of the class that was saved."""
    if not isinstance(policy_class, type) or not callable(getattr(policy_class, "load", None)):
        raise TypeError(
            f"policy_class is {policy_class!r:.100}, expected a class of policies with a classmethod "
            "load(folder, saved), which reads what its save(folder) wrote and returned"
        )
    # The module may have another name now: a program that trained is __main__ there
    name = saved_name.rpartition(":")[2].rpartition(".")[2]
    if policy_class.__name__ != name:
        raise ValueError(f"{folder} holds a {name:.100}, but policy_class is {policy_class.__name__}: give that class")


def _is_language_model(policy_class: type) -> bool:
    """Whether a class is `LMPolicy` or inherits it, without importing it for control."""
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
    """Read the ``config.json`` of a saved agent, in a folder or on the hub, of any format that this version reads.

    Raises:
        FileNotFoundError: if there is no saved agent.
        DamagedRunError: if it is damaged, of another format, or names an environment with a module to import.
    """
    path = agent_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no saved agent ({path.name} is missing): give a folder written by agent.save(folder) "
            "or by 'algos train --run-dir'"
        )
    content = read_record(path)
    if "model_type" in content:
        raise DamagedRunError(
            f"{folder} holds a transformers model, not an agent: algos.LMPolicy.load or --model reads it"
        )
    if content.get("format") not in (2, 3, FORMAT):
        raise DamagedRunError(
            f"{path} has format {content.get('format')!r:.100}, but this version reads 2 to {FORMAT}: "
            "load it with the version of algos that wrote it"
        )
    record = check_record(content, path)
    if record["format"] < FORMAT:
        _rename_old_arguments(record)
    environment = record["environment"]
    if environment is not None and ":" in environment["id"]:  # Gymnasium would import the text before ':'
        raise DamagedRunError(
            f"{path} names the environment {environment['id']!r:.200}, whose module would be imported: if you trust "
            f"it, name it yourself (algos evaluate {path.parent} --env module:id)"
        )
    return record


def _rename_old_arguments(record: AgentRecord) -> None:
    """Change what formats 2 and 3 called otherwise into what `FORMAT` calls it."""
    arguments = record["policy_arguments"]
    if record["format"] == 2 and "observation_shape" in arguments:
        dtype = "uint8" if record["policy"] == "CNNPolicy" else "float32"
        arguments["observation"] = {"shape": arguments.pop("observation_shape"), "dtype": dtype}
    if arguments.get("sde_sample_freq") is not None:
        record["policy"] = "GSDEPolicy"
    else:
        arguments.pop("sde_sample_freq", None)
    environment = record["environment"]
    if environment is not None and environment["id"].startswith("textenv/"):
        environment["kwargs"] = {
            next(iter(our_names(name)), name): value for name, value in environment["kwargs"].items()
        }


def describe(function: Any) -> Any:
    """Describe a function in a config, such as a loss: its name, and the arguments of `functools.partial`."""
    if isinstance(function, partial):
        return {"function": describe(function.func), "arguments": function.keywords}
    return f"{function.__module__}.{function.__qualname__}"


def spec_of(env: Any) -> EnvSpec | None:
    """Gymnasium's specification of an environment; None if it has none, or one of another kind, as EnvPool's."""
    return env.spec if isinstance(env.spec, EnvSpec) else None


def _describe_environment(spec: Any) -> dict[str, Any] | None:
    """Id and arguments of the environment; None if it was built by hand or has arguments that JSON cannot hold."""
    if spec is None:
        return None
    arguments = {
        name: str(x) if isinstance(x, Path) else plain(x) for name, x in spec.kwargs.items() if name not in VECTOR_ONLY
    }
    kl_coef: Any = arguments.get("kl_coef")
    if kl_coef is not None:  # of a changing one, what it is at the start: it only says that a KL is measured
        arguments["kl_coef"] = as_coefficient(kl_coef).value
    if isinstance(arguments.get("model"), str) and Path(arguments["model"]).is_dir():  # make it absolute
        arguments["model"] = str(Path(arguments["model"]).resolve())
    try:
        json.dumps(arguments)
    except TypeError:
        return None
    names = [x if isinstance(x, str) else name_of(x) for x in spec.kwargs.get("wrappers", ())]
    module = getattr(spec, "module", None)
    return {"id": spec.id, "kwargs": arguments, "module": module} | ({"wrappers": names} if names else {})
