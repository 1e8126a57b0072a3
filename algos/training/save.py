"""Saving an agent and loading its policy: weights in safetensors, everything else in one JSON file."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec

from algos.sharing.hub import agent_folder, download
from algos.training.made_by import made_by
from algos.training.run_folder import replacing
from textenv.device import find_device
from textenv.foreign import our_names
from textenv.json_files import read_json
from textenv.kl.coefficients import as_coefficient
from textenv.plain import plain
from textenv.rewards.calling import reward_name

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

    Earlier files in the folder stay until the new ones are complete.

    Raises:
        OSError: if they cannot be written (a full disk, a read-only folder).
    """
    from safetensors import SafetensorError

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
                "policy": type(agent.policy).__name__,
                "policy_arguments": agent.policy.save(weights),
                "reward_normalizer": None if rewards is None else rewards.state_dict(),
                "penalty": None if penalty is None else penalty.state_dict(),
                "made_by": made_by(),
            }
            config.write_text(json.dumps(description, indent=2, default=describe) + "\n", encoding="utf-8")
    except SafetensorError as error:
        raise OSError(f"the agent could not be saved in {folder}: {error}") from error
    return folder


def load(folder: str | Path, *, device: str | torch.device | None = None) -> Policy:
    """Load the policy of a saved agent, ready to act: on the CPU, or on another device (`textenv.device.find_device`).

    The folder may also be the name of an agent on the hub, such as ``user/name``; see `from_hub`.

    Raises:
        FileNotFoundError: if the folder holds no saved agent, and the hub has none of this name.
        ValueError: if it has an unknown format, or holds a policy of an unknown class; or if there is no such device.
    """
    place, folder = find_device(device), agent_folder(folder)
    description = read_description(folder)
    from algos.policies.registry import CONTROL_POLICIES, find_policy

    weights = Path(folder) / "policy"
    name = description["policy"]
    known = [home.partition(":")[2] for home in CONTROL_POLICIES.values()]
    if name not in known and name != "LMPolicy":
        raise ValueError(f"{folder} holds a {name}, expected one of {', '.join(known)}, LMPolicy")
    try:
        if name == "LMPolicy":
            from algos.policies.lm import LMPolicy

            return LMPolicy.load(weights, device=place)
        return find_policy(name).load(weights, description["policy_arguments"]).to(place)
    except ImportError:  # its message names what to install
        raise
    except Exception as error:  # the arguments come from a file, and safetensors has its own errors
        reason = error if type(error) is ValueError else repr(error)
        raise ValueError(f"{weights} does not match the {name} in config.json: {reason}") from error


def from_hub(
    repo_id: str, *, revision: str | None = None, token: str | None = None, device: str | torch.device | None = None
) -> Policy:
    """Load the policy of an agent that `push_to_hub` has shared; only data is read, no code runs.

    Args:
        repo_id: ``user/name``.
        revision: commit, tag or branch; a commit never changes.
        token: access token; None is the one of ``hf auth login`` or ``HF_TOKEN``, if any.
        device: see `load`.

    Raises:
        OSError: if there is no such agent, no access, or no network.
        ValueError: as `load`.
    """
    return load(download(repo_id, revision=revision, token=token), device=device)


def read_description(folder: str | Path) -> dict[str, Any]:
    """Read the ``config.json`` of a saved agent, in a folder or on the hub; raises as `load` does."""
    path = agent_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no saved agent ({path.name} is missing): give a folder written by agent.save(folder) "
            "or by 'algos train --run-dir'"
        )
    description = read_json(path, what="the description of an agent", kind=dict)
    if "model_type" in description:
        raise ValueError(f"{folder} holds a transformers model, not an agent: algos.LMPolicy.load or --model reads it")
    if description.get("format") not in (2, 3, FORMAT):
        raise ValueError(
            f"{path} has format {description.get('format')}, but this version reads 2 to {FORMAT}: "
            "load it with the version of algos that wrote it"
        )
    match description:
        case {"environment": None | {"id": str(), "kwargs": dict()}, "policy": str(), "policy_arguments": dict()}:
            pass
        case _:
            env, policy = (description.get(name) for name in ("environment", "policy"))
            raise ValueError(
                f"{path} has the environment {env!r:.100} and the policy {policy!r:.100}: expected "
                "null or {id, kwargs}; and a policy's name with policy_arguments"
            )
    arguments = description["policy_arguments"]
    if description["format"] == 2 and "observation_shape" in arguments:
        dtype = "uint8" if description["policy"] == "CNNPolicy" else "float32"
        arguments["observation"] = {"shape": arguments.pop("observation_shape"), "dtype": dtype}
    if description["format"] < FORMAT and arguments.get("sde_sample_freq") is not None:
        description["policy"] = "GSDEPolicy"
    elif description["format"] < FORMAT:
        arguments.pop("sde_sample_freq", None)
    environment = description["environment"] or {"id": "", "kwargs": {}}
    if description["format"] < FORMAT and environment["id"].startswith("textenv/"):
        environment["kwargs"] = {
            next(iter(our_names(name)), name): value for name, value in environment["kwargs"].items()
        }
    if ":" in environment["id"]:  # Gymnasium would import the text before ':'
        raise ValueError(
            f"{path} names the environment {environment['id']!r}, whose module would be imported: if you trust it, "
            f"name it yourself (algos evaluate {path.parent} --env module:id)"
        )
    return description


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
    names = [x if isinstance(x, str) else f"{x.__module__}:{reward_name(x)}" for x in spec.kwargs.get("wrappers", ())]
    module = getattr(spec, "module", None)
    return {"id": spec.id, "kwargs": arguments, "module": module} | ({"wrappers": names} if names else {})
