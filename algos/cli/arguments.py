"""Command-line arguments: those of ``algos train`` from files, JSON options, number of threads.

``switches`` are the options that take no value, such as ``quiet`` and ``config.skip-nonfinite``.
"""

import itertools
import json
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from algos.make import PROMPTS
from algos.storage.run_folder import RUN, is_in_checkpoint, is_own, run_folder_of
from algos.storage.run_reader import MOST_BYTES_OF_OPTIONS, read_options_file
from algos.storage.saved_environment import names_that_run_code
from textenv.json_files import parse_json, read_bytes

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
        file = Path(named(arguments, "--config"))
        first, before = read_options(file, switches)
        if file.name == RUN:  # of a run, which may be somebody else's
            _check_own(file.parent, "" if env else first, before, named_again=given)
        env = env or first
    if "resume" in given:
        run = run_folder_of(named(arguments, "--resume"))
        given.setdefault("run-dir", [f"--run-dir={run}"])
        if (run / RUN).is_file():
            first, started = read_options(run / RUN, switches)
            _check_own(run, "" if env else first, started, named_again=before | given)
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


def _check_own(run: Path, env: str, options: dict[str, list[str]], *, named_again: Collection[str]) -> None:
    """Raise a ValueError if a run that this user did not start has options that would run code, not named again.

    Args:
        run: folder of the run.
        env: its environment, if that is taken from the file.
        options: its options, as `read_options` returns them.
        named_again: names of options that the user has given.
    """
    if is_own(run):
        return
    words = [env] if ":" in env else []
    for name, own_words in names_that_run_code(options).items():
        if name not in named_again:
            words += own_words
    if words:
        raise ValueError(
            f"{run / RUN} was not written by a command of yours, or changed since; what would run or be asked by it is "
            f"used only if you name it: {shlex.join(words):.500} (or copy the file under another name, for --config)"
        )


def read_options(path: Path, switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Read a file of options of ``train`` (TOML or YAML, which JSON is too), as `options` returns those of words.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is neither TOML nor YAML, does not map names of options to values, or is too large.
    """
    import tomllib

    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml", ".json"):
        raise ValueError(f"--config is {path}, expected a .toml, .yaml or .json file with names of options and values")
    if not path.is_file():
        raise FileNotFoundError(f"--config is {path}, but there is no such file")
    if kind == ".toml":
        try:
            found = tomllib.loads(read_bytes(path, most=MOST_BYTES_OF_OPTIONS).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no toml in UTF-8 ({' '.join(str(error).split())})") from error
    else:
        found = read_options_file(path)
    if not isinstance(found.get("config", {}), dict):
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


def load_newest(folder: str, *, device: str | None = None, policy_class: type | None = None) -> tuple[Any, Path | None]:
    """Load the policy of a saved agent as `algos.load` does; of a run under way, that of its newest checkpoint.

    Then a line on stderr says which.

    Returns:
        The policy, and the checkpoint's folder; None if the agent was saved by itself.

    Raises:
        FileNotFoundError, ValueError: as `algos.load`.
    """
    from algos.storage.hub import agent_folder
    from algos.training.save import load

    while True:
        agent = agent_folder(folder)
        try:
            policy = load(agent, device=device, policy_class=policy_class)
            break
        except (OSError, ValueError):
            if agent.exists() or not is_in_checkpoint(agent):
                raise
            # The run has replaced this checkpoint meanwhile by newer ones
    checkpoint = agent.parent if is_in_checkpoint(agent) else None
    if checkpoint is not None and Path(folder).resolve() != checkpoint.resolve():
        print(f"algos: {folder} has not ended: this is its newest checkpoint, {checkpoint.name}", file=sys.stderr)
    return policy, checkpoint


def one_thread() -> None:
    """Use one thread (fastest for small models), unless OMP_NUM_THREADS is set."""
    import os

    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
