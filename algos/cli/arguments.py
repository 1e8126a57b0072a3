"""Command-line arguments: those of ``algos train`` from files, JSON options, number of threads.

``switches`` are the names of the options that take no value.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from algos.make import PROMPTS
from algos.training.run_folder import RUN
from textenv.json_files import parse_json

ENVIRONMENT = r"[^\W\d][\w./:-]*"


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options of every command."""

    prints: ClassVar[bool] = False
    """True if the command prints its result itself, unless as JSON."""
    json: bool = False
    """Print one JSON object at the end, instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """Options of the commands that load a model."""

    trust_remote_code: bool = False
    """Text only: run Python code that comes with the model. Only for a model whose code you trust."""


def with_files(arguments: list[str], switches: Collection[str]) -> list[str]:
    """Return the arguments of ``train`` with the options of the resumed run and of ``--config FILE`` before them."""
    if arguments[:1] != ["train"]:
        return arguments
    env, given = options(arguments, switches)
    before: dict[str, list[str]] = {}
    if "config" in given:
        path = Path(_value(given.pop("config"), "--config", "run.yaml"))
        first, before = read_options(path, switches)
        env = env or first
    if "resume" in given:
        resume = Path(_value(given["resume"], "--resume", "runs/my-run"))
        run = resume.parent.parent if resume.parent.name == "checkpoints" else resume
        given.setdefault("run-dir", ["--run-dir", str(run)])
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
    found = before | given
    if not env and not found.keys().isdisjoint({"prompts", "reward"}):
        env = PROMPTS
    return ["train", *([env] if env else []), *itertools.chain.from_iterable(found.values())]


def read_options(path: Path, switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Read a file of options of ``train`` (TOML or YAML, which JSON is too), as `options` returns those of words.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is neither TOML nor YAML, or does not map names of options to values.
    """
    import tomllib

    import yaml

    if not path.is_file() and path.suffix:
        raise FileNotFoundError(f"--config is {path}, but there is no such file")
    if path.suffix not in (".toml", ".yaml", ".yml", ".json"):
        raise ValueError(f"--config is {path}, expected a .toml, .yaml or .json file with names of options and values")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no {path.suffix[1:]} in UTF-8 ({' '.join(str(error).split())})") from error
    settings = found.get("config", {}) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(settings, dict):
        raise ValueError(
            f"{path} holds {found!r:.200}, expected names of options with their values, hyper-parameters under config"
        )
    own = {name: value for name, value in found.items() if name not in ("env", "config")}
    own |= {f"config.{name}": value for name, value in settings.items()}
    env = str(found.get("env") or "")
    if env and not re.fullmatch(ENVIRONMENT, env):
        raise ValueError(f"{path} has the environment {env!r:.100}, expected an id such as CartPole-v1")
    words = itertools.chain.from_iterable(_words(str(name), value, switches) for name, value in own.items())
    return env, options(["train", *words], switches)[1]


def _words(name: str, value: Any, switches: Collection[str]) -> Iterator[str]:
    """Return an option of a file as words of the command line."""
    prefix, flag = "config." * name.startswith("config."), name.removeprefix("config.").replace("_", "-")
    if isinstance(value, bool) and flag.replace("-", "_") in switches:
        yield f"--{prefix}{'' if value else 'no-'}{flag}"
    elif isinstance(value, list) and flag != "reward":
        yield f"--{prefix}{flag}"
        yield from (json.dumps(number) for number in value)
    else:
        for each in value if isinstance(value, list) else [value]:
            yield f"--{prefix}{flag}={json.dumps(each) if isinstance(each, (dict, list)) else each}"


def _value(words: Sequence[str], option: str, example: str) -> str:
    """Return the value of an option from its words."""
    found = [words[0].partition("=")[2]] if "=" in words[0] else list(words[1:])
    if len(found) != 1 or not found[0]:
        raise ValueError(f"{option} has {len(found)} values, expected one, such as {option} {example}")
    return found[0]


def options(arguments: Sequence[str], switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Return the environment (empty if none) and the options of ``train``, each with the words of its last use.

    ``--reward`` has the words of every use.
    """
    place, env = place_of_environment(arguments, switches), ""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for at, word in enumerate(arguments[1:], start=1):
        if at == place:
            env = word
            continue
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")
            words = found[name] = found.get(name, []) if name == "reward" else []
        words.append(word)
    return env, found


def place_of_environment(arguments: Sequence[str], switches: Collection[str]) -> int | None:
    """Return the index of the environment's id among the arguments of ``train``; None if it is not given."""
    for place, (before, word) in enumerate(itertools.pairwise(arguments), start=1):
        option = before.removeprefix("--").removeprefix("config.").removeprefix("no-").replace("-", "_")
        is_value = before.startswith("-") and "=" not in before and option not in switches
        if not is_value and re.fullmatch(ENVIRONMENT, word):
            return place
    return None


def named(arguments: Sequence[str], option: str, otherwise: str) -> str:
    """Return the value of an option at any position, before the arguments are parsed."""
    for word, following in zip(arguments, [*arguments[1:], otherwise], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return otherwise


def absolute(name: str) -> str:
    """Return a name with its path made absolute, if there is such a file: of a model, or of ``rewards.py:f=0.5``."""
    path, colon, rest = name.rpartition(":") if not Path(name).exists() else (name, "", "")
    return f"{Path(path).resolve()}{colon}{rest}" if path and Path(path).exists() else name


def plain(value: Any) -> Any:
    """Return the value of an option as YAML holds it."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


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
