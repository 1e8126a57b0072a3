"""Command-line arguments: those of ``algos train`` from files, JSON options, number of threads.

``switches`` are the options that take no value, such as ``quiet`` and ``config.skip-nonfinite``.
"""

import itertools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from algos.make import PROMPTS
from algos.training.run_folder import RUN, run_of
from textenv.json_files import parse_json

ENVIRONMENT = r"[^\W\d][\w./:-]*"
REPEATED = ("reward", "wrapper", "stop")
"""Options of ``train`` that may be given several times."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options of every command."""

    prints: ClassVar[bool] = False
    """True if the command prints its result itself, unless as JSON."""
    announces: ClassVar[bool] = False
    """True if the command prints an address while it runs, also with JSON."""
    json: bool = False
    """Print one JSON object at the end, instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """Options of the commands that load a model."""

    trust_remote_code: bool = False
    """Text only: run Python code that comes with the model. Only for a model whose code you trust."""


def with_files(arguments: list[str], switches: Collection[str]) -> list[str]:
    """Return arguments of ``train`` or ``plan`` with the resumed run's and those of ``--config FILE`` before them."""
    if arguments[:1] not in (["train"], ["plan"]):
        return arguments
    env, given = options(arguments, switches)
    for name, words in given.items():
        if name not in ("", "system-prompt") and words[-1] in ("", f"--{name}="):
            raise ValueError(f"--{name} is empty, expected a value: is a variable of the shell not set?")
    before: dict[str, list[str]] = {}
    if given.pop("config", None):
        first, before = read_options(Path(named(arguments, "--config")), switches)
        env = env or first
    if "resume" in given:
        run = run_of(named(arguments, "--resume"))
        given.setdefault("run-dir", [f"--run-dir={run}"])
        if (run / RUN).is_file():
            first, started = read_options(run / RUN, switches)
            if env and env != first:
                raise ValueError(f"{run} holds a run on {first}, not on {env}: leave {env} out, or give another folder")
            env, before = first, started | before
        elif not env and not before and "prompts" not in given:
            older = ", arguments.json is of an older version" if (run / "arguments.json").is_file() else ""
            raise FileNotFoundError(
                f"{run} holds no run to resume ({RUN} is missing{older}): give the folder of a run, or add the "
                "environment and the other arguments, which also start a run there"
            )
    found: dict[str, list[str]] = {"": []} | before | given
    env = env or (PROMPTS if {"prompts", "reward"} & found.keys() or arguments[0] == "plan" else "")
    return [arguments[0], *([env] if env else []), *itertools.chain.from_iterable(found.values())]


def read_options(path: Path, switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Read a file of options of ``train`` (TOML or YAML, which JSON is too), as `options` returns those of words.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is neither TOML nor YAML, or does not map names of options to values.
    """
    import tomllib

    import yaml

    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml", ".json"):
        raise ValueError(f"--config is {path}, expected a .toml, .yaml or .json file with names of options and values")
    if not path.is_file():
        raise FileNotFoundError(f"--config is {path}, but there is no such file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        found = tomllib.loads(text) if kind == ".toml" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no {path.suffix[1:]} in UTF-8 ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict) or not isinstance(found.get("config", {}), dict):
        raise ValueError(
            f"{path} holds {found!r:.200}, expected names of options with their values, hyper-parameters under config"
        )
    for name in {"overwrite", "resume"} & found.keys():
        raise ValueError(f"{path} sets {name}, which is for the command line only: a file must not decide about runs")
    own = found | {f"config.{name}": value for name, value in found.pop("config", {}).items()}
    env = str(own.pop("env", None) or "")
    if env and not re.fullmatch(ENVIRONMENT, env):
        raise ValueError(f"{path} has the environment {env!r:.100}, expected an id such as CartPole-v1")
    flags = {str(name).replace("_", "-"): value for name, value in own.items()}
    if len(flags) < len(own):
        raise ValueError(f"{path} has an option twice, with _ and with -: {', '.join(map(str, own))}")
    try:
        return env, {name: _words(name, value, switches) for name, value in flags.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _words(name: str, value: Any, switches: Collection[str]) -> list[str]:
    """Return an option of a file as words of the command line."""
    if isinstance(value, bool) and name in switches:
        prefix, dot, switch = name.rpartition(".")
        return [f"--{prefix}{dot}{'' if value else 'no-'}{switch}"]
    if isinstance(value, list) and name == "config.adam-betas":
        return [f"--{name}", *map(json.dumps, value)]
    if isinstance(value, list) and name == "logger":
        value = ",".join(map(str, value))
    if isinstance(value, list) and name not in REPEATED:
        raise ValueError(f"{name} is {value!r:.100}, expected a single value")
    values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
    return [f"--{name}={each}" for each in values]


def options(arguments: Sequence[str], switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Return the environment (empty if none) and the options of ``train``, each with the words of its last use.

    Those of `REPEATED` have the words of every use; other words before the first option have the name "".
    """
    env, name = "", ""
    found: dict[str, list[str]] = {"": []}
    for before, word in itertools.pairwise(arguments):
        is_value = before.startswith("-") and "=" not in before and name not in switches
        if word.startswith("--"):
            name = re.sub(r"^--(config\.)?(no-)?", r"\1", word.partition("=")[0].replace("_", "-"))
            found[name] = [*found.get(name, []), word] if name in REPEATED else [word]
        elif not env and not is_value and re.fullmatch(ENVIRONMENT, word):
            env = word
        else:
            found[name].append(word)
    return env, found


def named(arguments: Sequence[str], option: str, otherwise: str = "") -> str:
    """Return the value of an option's last use, before the arguments are parsed; empty if it has none."""
    for word, following in reversed([*itertools.pairwise([*arguments, ""])]):
        if word.partition("=")[0] == option:
            return word.partition("=")[2] or following
    return otherwise


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse the JSON object of an option; raises a ValueError that names the option."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{option} is {text!r:.200}, which is {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{option} is {text!r:.200}, expected a JSON object such as '{{\"k\": 4}}'")
    return found


def one_thread() -> None:
    """Use one thread (fastest for small models), unless OMP_NUM_THREADS is set."""
    import os

    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
