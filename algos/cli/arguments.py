"""What commands share: options of ``algos train`` from words and files, JSON options, saved agents, threads.

``switches`` are the options that take no value, such as ``quiet`` and ``config.skip-nonfinite``.
"""

import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.constructors import PrimitiveConstructorSpec

from algos.make import PROMPTS
from algos.storage.run_files import CHECKPOINTS, CONFIG, RUN
from algos.storage.run_folder import is_in_checkpoint, is_own, run_folder_of
from algos.storage.run_reader import MOST_BYTES_OF_OPTIONS, read_options_file
from algos.storage.saved_environment import runs_code
from textenv.json_files import parse_json, read_bytes
from textenv.startup import load_torch

ENVIRONMENT_PATTERN = r"[^\W\d][\w./:-]*"
"""Regular expression of an environment's id, perhaps with a module before it."""

REPEATED = ("reward", "wrapper", "stop")
"""Options of ``train`` that may be given several times."""
SEVERAL_VALUES = ("config.adam-betas", "k")
"""Options of ``train`` whose values are words after one flag."""
GIVEN_AS_SEVERAL = ("prompts", "eval-prompts", "k")
"""Options that people repeat to give several values, though the last use alone counts."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options of every command."""

    prints: ClassVar[bool] = False
    """True if the command prints its result itself, unless as JSON."""
    announces: ClassVar[bool] = False
    """True if the command prints an address while it runs, also with JSON."""
    json: bool = False
    """Print one JSON object at the end, instead of a table."""


def _whole_number(words: list[str]) -> int:
    """Return a whole number, which may be written as 1e6 or 1_000_000."""
    number = None
    with suppress(ValueError):
        number = float(words[0])
    if number is None or not number.is_integer():
        raise ValueError(f"{words[0]!r} is no whole number, such as 10000 or 1e4")
    return int(number)


WholeNumber = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=_whole_number,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda number: [str(number)],
    ),
]
"""An option that is an integer, such as a number of steps."""


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """Options of the commands that load a model."""

    trust_remote_code: bool = False
    """Text only: run Python code that comes with the model. Only for a model whose code you trust."""


def with_files(arguments: list[str], switches: Collection[str]) -> list[str]:
    """Return the arguments of ``train`` or ``plan`` together with the options of files.

    Options of the command line replace those of ``--config FILE``, a later file those of an earlier one, and these
    replace those of the run to resume.

    Raises:
        OSError: if a file or the run cannot be read.
        ValueError: if a file is wrong, an option is empty, or a file of somebody else would run code.
    """
    if arguments[:1] not in (["train"], ["plan"]):
        return arguments
    env, typed_options = options(arguments, switches)
    _check_values(typed_options)

    # Options of --config FILE
    file_env = ""
    file_options: dict[str, list[str]] = {}
    typed_options.pop("config", None)
    for name in uses(arguments, "--config"):
        path = Path(name)
        env_of_file, options_of_file = read_options(path, switches)
        if path.name == RUN:  # of a run, which may be somebody else's
            _check_own(path.parent, env_of_file, options_of_file, named_env=env, named_again=typed_options)
        file_env = env_of_file or file_env
        file_options |= options_of_file
    env = env or file_env

    # Options of the run to resume
    if "resume" in typed_options:
        run = run_folder_of(named(arguments, "--resume"))
        typed_options.setdefault("run-dir", [f"--run-dir={run}"])
        if (run / RUN).is_file():
            run_env, run_options = read_options(run / RUN, switches)
            _check_own(run, run_env, run_options, named_env=env, named_again=file_options | typed_options)
            if env and env != run_env:
                raise ValueError(
                    f"{run} holds a run on {run_env}, not on {env}: leave {env} out, or give another folder"
                )
            env = run_env
            algorithm_of_run = named(run_options.get("algo", []), "--algo")
            named_options = file_options | typed_options
            algorithm = named(named_options.get("algo", []), "--algo", algorithm_of_run)
            if algorithm != algorithm_of_run:
                raise ValueError(
                    f"{run} was trained by {algorithm_of_run}, not by {algorithm}: leave --algo out, or give another "
                    "folder"
                )
            file_options = run_options | file_options
        elif not env and not file_options and "prompts" not in typed_options:
            raise _nothing_to_resume(run)

    # Prompts of one's own need no name of an environment
    all_options: dict[str, list[str]] = {"": []} | file_options | typed_options
    has_own_prompts = "prompts" in all_options or "reward" in all_options
    if not env and (has_own_prompts or arguments[0] == "plan"):
        env = PROMPTS

    words = [arguments[0]]
    if env:
        words.append(env)
    for option_words in all_options.values():
        words += option_words
    return words


def _check_values(typed_options: dict[str, list[str]]) -> None:
    """Raise a ValueError if the value of an option is empty; a system prompt may be."""
    for name, words in typed_options.items():
        if name not in ("", "system-prompt") and words[-1] in ("", f"--{name}="):
            raise ValueError(f"--{name} is empty, expected a value: is a variable of the shell not set?")


def _nothing_to_resume(run: Path) -> FileNotFoundError:
    """Return the error that says what ``--resume`` lacks."""
    older = ""
    if (run / "arguments.json").is_file():
        older = ", arguments.json is of an older version"
    if (run / CONFIG).is_file() or (run / CHECKPOINTS).is_dir():
        return FileNotFoundError(
            f"{run} is a run of a Python program ({RUN} is missing{older}): resume it there (learn(resume=...)), or "
            "add the environment and every other setting that it had"
        )
    return FileNotFoundError(
        f"{run} holds no run to resume ({RUN} is missing{older}): give the folder of a run, or add the "
        "environment and the other arguments, which also start a run there"
    )


def _check_own(
    run: Path, env: str, options: dict[str, list[str]], *, named_env: str, named_again: Collection[str]
) -> None:
    """Raise a ValueError if a run that this user did not start has options that would run code, not named again.

    Args:
        run: folder of the run.
        env: its environment, whose module would be imported.
        options: its options, as `read_options` returns them.
        named_env: environment that the user has typed or stored, which replaces that of the run; empty if none.
        named_again: names of options that the user has typed or stored.
    """
    if is_own(run):
        return
    words = []
    if ":" in env and not named_env:
        words.append(env)
    for name, option_words in options.items():
        if name not in named_again and any(_runs_code(word) for word in option_words):
            words += option_words
    if words:
        raise ValueError(
            f"{run / RUN} was not written by a command of yours, or changed since; what would run or be asked by it is "
            f"used only if you name it: {shlex.join(words):.500} (or copy the file under another name, for --config)"
        )


def _runs_code(word: str) -> bool:
    """Return True if an option, ``--name=value``, would import, execute or connect to what it names."""
    option, _, text = word.partition("=")
    name = option.removeprefix("--").replace("-", "_")
    value: object = text
    if name in ("env_kwargs", "policy_kwargs"):
        with suppress(ValueError):  # what is no JSON is no plain object
            value = parse_json(text)
    return runs_code(name, value)


def read_options(path: Path, switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Read a file of options of ``train`` (TOML or YAML, which JSON is too), as `options` returns those of words.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is neither TOML nor YAML, does not map names of options to values, or is too large.
    """
    values = _parse_file(path)
    hyper_parameters = values.pop("config", {})
    if not isinstance(hyper_parameters, dict):
        raise ValueError(
            f"{path} has config: {hyper_parameters!r:.200}, expected names of hyper-parameters with their values"
        )
    for name in {"overwrite", "resume"} & values.keys():
        raise ValueError(f"{path} sets {name}, which is for the command line only: a file must not decide about runs")

    # Hyper-parameters become options config.NAME, after the others
    for name, value in hyper_parameters.items():
        values[f"config.{name}"] = value

    env = str(values.pop("env", None) or "")
    if env and not re.fullmatch(ENVIRONMENT_PATTERN, env):
        raise ValueError(f"{path} has the environment {env!r:.100}, expected an id such as CartPole-v1")

    # Names and words as on the command line
    options_by_name = {str(name).replace("_", "-"): value for name, value in values.items()}
    if len(options_by_name) < len(values):
        raise ValueError(f"{path} has an option twice, with _ and with -: {', '.join(map(str, values))}")
    try:
        return env, {name: _words(name, value, switches) for name, value in options_by_name.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_file(path: Path) -> dict[str, object]:
    """Return what a file of options holds; a ValueError or an OSError names the file."""
    import tomllib

    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml", ".json"):
        raise ValueError(f"--config is {path}, expected a .toml, .yaml or .json file with names of options and values")
    if not path.is_file():
        raise FileNotFoundError(f"--config is {path}, but there is no such file")
    if kind != ".toml":
        return read_options_file(path)
    try:
        text = read_bytes(path, most=MOST_BYTES_OF_OPTIONS).decode("utf-8-sig")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no toml in UTF-8 ({' '.join(str(error).split())})") from error


def _words(name: str, value: object, switches: Collection[str]) -> list[str]:
    """Return an option of a file as words of the command line."""
    if isinstance(value, bool) and name in switches:
        prefix, dot, switch = name.rpartition(".")
        if not value:
            switch = f"no-{switch}"
        return [f"--{prefix}{dot}{switch}"]
    if isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, list):
        return [f"--{name}={value}"]

    # Lists
    if name in SEVERAL_VALUES:
        return [f"--{name}", *map(json.dumps, value)]
    if name == "logger":
        return [f"--{name}={','.join(map(str, value))}"]
    if name not in REPEATED:
        raise ValueError(f"{name} is {value!r:.100}, expected a single value")
    return [f"--{name}={item}" for item in value]


def options(arguments: Sequence[str], switches: Collection[str]) -> tuple[str, dict[str, list[str]]]:
    """Return the environment (empty if none) and the options of ``train``, each with the words of its last use.

    Those of `REPEATED` have the words of every use; other words before the first option have the name "".
    """
    env = ""
    name = ""
    words: dict[str, list[str]] = {"": []}
    for previous, word in itertools.pairwise(arguments):
        is_value = previous.startswith("--") and "=" not in previous and name not in switches
        if word.startswith("--"):
            # "--config.lr=1" has the name config.lr, and "--no-quiet" the name quiet
            written_name = word.partition("=")[0].replace("_", "-")
            name = re.sub(r"^--(config\.)?(no-)?", r"\1", written_name)
            if name not in REPEATED:
                words[name] = []
            words.setdefault(name, []).append(word)
        elif not env and not is_value and re.fullmatch(ENVIRONMENT_PATTERN, word):
            env = word
        else:
            words[name].append(word)
    return env, words


def named(arguments: Sequence[str], option: str, default: str = "") -> str:
    """Return the value of an option's last use, before the arguments are parsed; empty if that has none."""
    return [default, *uses(arguments, option)][-1]


def uses(arguments: Sequence[str], option: str) -> list[str]:
    """Return the value of each use of an option, before the arguments are parsed; empty for one that has none."""
    values = []
    for word, following in itertools.pairwise([*arguments, ""]):
        written_name, _, value = word.partition("=")
        if written_name == option:
            values.append(value or following)
    return values


def refuse_repeated(words: Sequence[str]) -> None:
    """Raise a ValueError if an option of `GIVEN_AS_SEVERAL` has several values, of which the last would count.

    Other options of one value may be typed again to replace it, as scripts do that add to a command.
    """
    for name in GIVEN_AS_SEVERAL:
        spellings = dict.fromkeys([name, name.replace("-", "_")])
        values = list(dict.fromkeys(value for spelling in spellings for value in uses(words, f"--{spelling}")))
        if len(values) < 2:
            continue
        advice = "it takes one, so join them into one file"
        if name in SEVERAL_VALUES:
            advice = f"give all its values after one flag, --{name} {' '.join(values)}"
        raise ValueError(f"--{name} is given with {', '.join(values)}: {advice}")


def flag(name: str) -> str:
    """Return the flag of an option: ``--num-envs`` for ``num_envs``."""
    return f"--{name.replace('_', '-')}"


def json_object(text: str, option: str) -> dict[str, object]:
    """Parse the JSON object of an option; raises a ValueError that names the option."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{option} is {text!r:.200}, which is {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} is {text!r:.200}, expected a JSON object such as '{{\"k\": 4}}'")
    return value


def load_newest(folder: str, *, policy_class: str | None = None, **options: Any) -> tuple[Any, Path | None]:
    """Load the policy of a saved agent as `algos.load` does; of a run under way, that of its newest checkpoint.

    A line on stderr names this checkpoint.

    Args:
        folder: folder of a run or of a saved agent, or a name on the hub.
        policy_class: name of the class of the agent's policy, if it is one of your own: file.py:Mine or
            package.module:Mine.
        options: further arguments of `algos.load`.

    Returns:
        The policy, and the checkpoint's folder; None if the agent was saved by itself.

    Raises:
        FileNotFoundError, ValueError: as `algos.load`.
    """
    from algos.storage.hub import agent_folder
    from algos.training.save import load
    from textenv.importing import load_function

    loaded_class: Any = None
    if policy_class is not None:
        loaded_class = load_function(policy_class)
    load_torch()
    while True:
        agent = agent_folder(folder)
        try:
            policy = load(agent, policy_class=loaded_class, **options)
            break
        except (OSError, ValueError):
            if agent.exists() or not is_in_checkpoint(agent):
                raise
            # The run has replaced this checkpoint meanwhile by newer ones

    if not is_in_checkpoint(agent):
        return policy, None
    checkpoint = agent.parent
    if Path(folder).resolve() != checkpoint.resolve():
        print(f"algos: {folder} has not ended: this is its newest checkpoint, {checkpoint.name}", file=sys.stderr)
    return policy, checkpoint


def one_thread() -> None:
    """Import torch, and use one thread (fastest for small models), unless OMP_NUM_THREADS is set."""
    load_torch()
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
