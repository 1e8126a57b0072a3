"""Command-line arguments: those of ``algos train`` (stored to resume a run), JSON options, number of threads.

``switches`` are the names of the options that take no value.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from textenv.json_files import parse_json, read_json

ARGUMENTS = "arguments.json"
"""File in a run's folder with the arguments that started the run."""


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


def with_remembered(arguments: list[str], switches: Collection[str]) -> list[str]:
    """Return the arguments of a resumed run: those that started it, updated by those given now."""
    resume = named(arguments, "--resume", "")
    if arguments[:1] != ["train"] or not resume:
        return arguments
    env, given = options(arguments, switches)
    run = Path(resume).parent.parent if Path(resume).parent.name == "checkpoints" else Path(resume)
    given.setdefault("run-dir", ["--run-dir", str(run)])
    path = run / ARGUMENTS
    if not path.is_file() and env:  # a new run
        return _words(env, given)
    if not path.is_file():
        raise FileNotFoundError(
            f"{run} holds no run to resume ({ARGUMENTS} is missing): give the folder of a run, or add the environment "
            "and the other arguments to start a run there"
        )
    remembered = read_json(path, what="a list of arguments: repair the file", kind=list)
    if not all(isinstance(word, str) for word in remembered):
        raise ValueError(f"{path} holds {remembered!r:.200}, expected a list of arguments: repair the file")
    first, before = options(remembered, switches)
    if env and env != first:
        raise ValueError(f"{run} holds a run on {first}, not on {env}: leave {env} out, or give another folder")
    return _words(first, before | given)


def to_remember(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """Return the arguments to remember for a resume, without those that set where and how the run starts."""
    env, given = options(arguments, switches)
    kept = {name: words for name, words in given.items() if name not in ("resume", "run-dir", "overwrite")}
    model = kept.get("model", [])
    if len(model) == 2 and Path(model[1]).is_dir():  # make it absolute
        model[1] = str(Path(model[1]).resolve())
    return _words(env, kept)


def options(arguments: Sequence[str], switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Return the environment (empty if none) and the options of ``train``, each with the words of its last use."""
    place, env = place_of_environment(arguments, switches), ""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for at, word in enumerate(arguments[1:], start=1):
        if at == place:
            env = word
            continue
        if word.startswith("--"):
            words = found[word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")] = []
        words.append(word)
    return env, found


def _words(env: str, options: dict[str, list[str]]) -> list[str]:
    return ["train", *([env] if env else []), *itertools.chain.from_iterable(options.values())]


def place_of_environment(arguments: Sequence[str], switches: Collection[str]) -> int | None:
    """Return the index of the environment's id among the arguments of ``train``; None if it is not given."""
    for place, (before, word) in enumerate(itertools.pairwise(arguments), start=1):
        option = before.removeprefix("--").removeprefix("config.").removeprefix("no-").replace("-", "_")
        is_value = before.startswith("-") and "=" not in before and option not in switches
        if not is_value and re.fullmatch(r"[^\W\d][\w./:-]*", word):
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
