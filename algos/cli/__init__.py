"""The command line, ``algos train|evaluate|…``; also ``textenv`` and ``python -m algos``.

Nothing here imports torch before a command runs, so that help and errors appear at once.
"""

import json
import math
import os
import platform
import select
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from signal import SIGINT, SIGPIPE
from traceback import TracebackException
from typing import Annotated, Any

import tyro

from algos.cli.arguments import ModelCommand, flag, named, refuse_repeated, with_files
from algos.cli.check import Check, CheckReward
from algos.cli.compare import Compare
from algos.cli.doctor import Doctor, findings_of
from algos.cli.evaluate import Evaluate, Merge, Push
from algos.cli.export import Export
from algos.cli.interpret import Interpret
from algos.cli.plan import Plan
from algos.cli.report import Report, Watch
from algos.cli.sample import Sample
from algos.cli.serve import Serve
from algos.cli.show import Envs, Runs, Show
from algos.cli.tables import print_table
from algos.cli.train import Train, switches, train_command, with_preset_arguments
from algos.cli.tune import Tune
from algos.cli.user_code import UserExit, end_in_spite_of_threads, escaped_traceback, exits_are_errors, output_on_stderr
from algos.config import CONFIGS, find_config
from algos.envs.subprocess_env import EnvironmentFailure
from algos.storage.provenance import versions
from algos.training.signals import Interrupted
from textenv.errors import InvariantError
from textenv.foreign import OF_CONFIG, our_names
from textenv.lm.loading import trust_remote_code
from textenv.names import flag_advice, nearest
from textenv.processes import end_if_forked
from textenv.rendering import printable
from textenv.rewards.scores import StopTraining

COMMANDS = {
    "evaluate": Evaluate, "sample": Sample, "interpret": Interpret, "serve": Serve, "compare": Compare, "tune": Tune,
    "doctor": Doctor, "report": Report, "watch": Watch, "merge": Merge, "export": Export, "push": Push, "runs": Runs,
    "show": Show, "envs": Envs, "check": Check, "check-reward": CheckReward,
}  # fmt: skip
"""All commands by name, but ``train`` and ``plan``, whose flags depend on the environment and the algorithm."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console scripts; exit status 2 on wrong input."""
    status = 1
    try:
        _main(arguments)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is None:
            status = 0
        raise
    finally:
        end_in_spite_of_threads(status)


def _main(arguments: Sequence[str] | None) -> None:
    """Run a command and print its result; errors become messages and exit statuses."""
    words = sys.argv[1:]
    if arguments is not None:
        words = list(arguments)
    if words == ["--version"]:
        _print_versions()
        return

    # Run
    command: Any = None
    try:
        command = _parse(words)
        quiet = command.json and not command.announces
        with _code_of_models(command, words), output_on_stderr(quiet), exits_are_errors():
            process = os.getpid()
            result = command.run()
            end_if_forked(process, "an environment or a callback")

    # Interrupted: a training says how to go on
    except KeyboardInterrupt as stop:
        if command is None or not isinstance(stop, Interrupted):  # perhaps in the middle of an import: import no more
            _tell("algos: stopped by SIGINT")
            raise SystemExit(128 + SIGINT) from stop
        message = str(stop)
        if stop.resumable:
            message += f"; to continue: algos train --resume {command.folder}"
        _tell_lines([message, *_notes(stop), *findings_of(command)])
        raise SystemExit(stop.status) from stop

    # Wrong input has status 2, what happened while the command ran 1; the reader of the output may have gone
    except (ValueError, TypeError, OSError, ImportError, InvariantError, EnvironmentFailure, StopTraining) as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            _forget_output()
            raise SystemExit(128 + SIGPIPE) from None
        _tell_lines([printable(text) for text in (str(error), *_notes(error))])
        status = 2
        is_request = isinstance(error, StopTraining) and not isinstance(error, ValueError)  # of a person who quits
        if is_request or isinstance(error, (InvariantError, EnvironmentFailure, UserExit)):
            status = 1
        raise SystemExit(status) from error
    except Exception as error:  # of an environment, which its author has to find
        _tell(escaped_traceback(error))
        raise SystemExit(1) from error

    # The result
    if result is None:  # another process has it
        return
    _print_result(command, result)
    findings = findings_of(command)
    if findings:
        _tell_lines(findings)
    if isinstance(command, (Check, CheckReward, Doctor)) and not result["sound"]:
        raise SystemExit(1)


def _print_versions() -> None:
    """Print the versions of our packages, of those that we use, and of Python."""
    all_versions = {**versions(), "Python": platform.python_version()}
    print(", ".join(f"{name} {version}" for name, version in all_versions.items()))


def _parse(words: list[str]) -> Any:
    """Return the command that the words of the command line make; tyro ends the program with help on wrong ones."""
    _refuse_misspelt_command(words)
    arguments = with_files(words, switches())
    _refuse_foreign_flags(arguments, words)
    refuse_repeated(words)
    arguments = with_preset_arguments(arguments, words)
    commands = train_command(arguments) | train_command(arguments, "plan", Plan)
    for name, kind in COMMANDS.items():
        commands |= Annotated[kind, tyro.conf.subcommand(name)]
    description = "Train and compare policies for control and text with one kit of algorithms."
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The field `")  # of tyro; a wrong value gets a sentence of ours
        command = tyro.cli(commands, args=arguments, prog="algos", description=description)
    _refuse_model_of_control(command, words)
    return command


def _has_no_reader() -> bool:
    """Return True if stdout is a pipe whose reader has gone."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    except (AttributeError, OSError, ValueError):  # there is no stdout, or it is no file
        return False


def _forget_output() -> None:
    """Send further output nowhere: where it cannot be written, Python would fail again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_result(command: Any, result: dict[str, Any]) -> None:
    """Print the result of a command to stdout, if there is one; an output that cannot be written is told of."""
    if sys.stdout is None:
        return
    if sys.stdout.closed:
        _tell("algos: the result cannot be shown, as other code has closed the standard output")
        raise SystemExit(1)

    # Writing fails on a full disk, or if the reader of a pipe has gone
    try:
        if command.json:
            print(json.dumps(_finite(result), allow_nan=False))
        elif not command.prints:
            print_table(result.items())
        sys.stdout.flush()
    except OSError as error:
        message = f"algos: the result could not be printed: {error}"
        if isinstance(command, Train):
            message += f"; the run is complete and saved in {command.folder}"
        _tell(message)
        _forget_output()
        status = 1
        if isinstance(error, BrokenPipeError):
            status = 128 + SIGPIPE
        raise SystemExit(status) from None


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error: paths of the files that a failed run saved."""
    return TracebackException.from_exception(error).__notes__ or []


def _finite(value: Any) -> Any:
    """Return a result for JSON, which knows neither NaN nor infinity: None in their places."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _tell(text: str) -> None:
    """Print to stderr, if anybody can read it: the terminal or the pipe may have gone."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def _tell_lines(texts: Sequence[str]) -> None:
    """Print texts to stderr, one below the other, with the name of the program."""
    _tell("\n".join(f"algos: {text}" for text in texts))


def _refuse_foreign_flags(arguments: Sequence[str], words: Sequence[str]) -> None:
    """Raise a ValueError that suggests our flag, for a flag of another library or one without ``config.``.

    Args:
        arguments: of the command, with the options of files.
        words: of the command line, without these.
    """
    commands: dict[str, Any] = COMMANDS | {"train": Train, "plan": Plan}
    if not arguments or arguments[0] not in commands:
        return

    # Names that this command has
    command_name = arguments[0]
    options = [field.name for field in fields(commands[command_name])]
    hyper_parameters: list[str] = []
    algorithm = None
    if command_name in ("train", "plan"):
        algorithm = named(arguments, "--algo", "ppo")
        hyper_parameters = [field.name for field in fields(find_config(algorithm)) if field.name != "seed"]
        options.append("seed")  # a config field, but its flag has no prefix

    # Flags that it does not have
    for word in arguments[1:]:
        if not word.startswith("--"):
            continue
        flag_as_typed = word.partition("=")[0]
        name = flag_as_typed.removeprefix("--").removeprefix("config.").replace("-", "_")
        expected_names = options
        if word.startswith("--config."):
            expected_names = hyper_parameters
        if {name, name.removeprefix("no_")} & {*expected_names, "help"}:
            continue
        message = _message_about_flag(
            flag_as_typed, name, options, hyper_parameters, algorithm=algorithm, command_name=command_name
        )
        if message is None:
            continue
        typed_flags = [word.partition("=")[0].replace("_", "-") for word in words]
        if flag_as_typed.replace("_", "-") not in typed_flags:
            message += " (it stands in a file of options)"
        raise ValueError(message)


def _message_about_flag(
    flag_as_typed: str,
    name: str,
    options: list[str],
    hyper_parameters: list[str],
    *,
    algorithm: str | None,
    command_name: str,
) -> str | None:
    """Return what to say of a flag that a command does not have; None leaves it to tyro.

    Args:
        flag_as_typed: the flag, such as ``--n-steps``.
        name: its name, without ``config.`` and with underscores.
        options: names of the command's options.
        hyper_parameters: names of its options ``config.NAME``.
        algorithm: name of the algorithm that has these hyper-parameters; None: a command without any.
        command_name: name of the command.
    """
    names = [*options, *hyper_parameters]
    is_renamed = any(our_name in names for our_name in our_names(name))

    # A name of another library that this algorithm has another name for
    if algorithm is not None:
        of_config = OF_CONFIG.get(CONFIGS[algorithm].__name__, {})
        if name in of_config:
            return f"there is no {flag_as_typed}: {of_config[name]}"

    # A hyper-parameter of other algorithms
    algorithms = []
    for other_algorithm, config in CONFIGS.items():
        if name in (field.name for field in fields(config)):
            algorithms.append(other_algorithm)
    if algorithm is not None and algorithms and name not in names and not is_renamed:
        return f"--algo {algorithm} has no {flag_as_typed}: it is for {', '.join(algorithms)}"

    # A flag of another library that is written in another way here
    if command_name in ("train", "plan", "tune") and not is_renamed and name not in hyper_parameters:
        advice = flag_advice(name)
        if advice:
            return f"there is no {flag_as_typed}: {advice}"

    # A flag of ours with nearly this name
    our_name = nearest(name, names)
    if our_name is None:
        return None
    if our_name not in options:
        our_name = f"config.{our_name}"
    return f"there is no {flag_as_typed}: did you mean {flag(our_name)}?"


def _refuse_misspelt_command(words: Sequence[str]) -> None:
    """Raise a ValueError that suggests a command, if the first word is none but nearly one; tyro answers others."""
    names = [*COMMANDS, "train", "plan"]
    if words and words[0] not in names and not words[0].startswith("-"):
        name = nearest(words[0], names)
        if name is not None:
            raise ValueError(f"there is no command {words[0]}: did you mean {name}?")


def _refuse_model_of_control(command: Any, words: Sequence[str]) -> None:
    """Raise a ValueError if a language model is named for a control policy that has none."""
    trains = isinstance(command, Train) and not isinstance(command, Plan)
    if trains and named(words, "--model") and not command.is_text_run() and command.policy != "words":
        raise ValueError(
            f"--model: the policy {command.policy} of {command.env} has no language model; leave it out, or give "
            "--policy words"
        )


def _code_of_models(command: Any, words: Sequence[str]) -> AbstractContextManager[None]:
    """Allow models to run their own code in this context, if this command asks for it (a stored one cannot)."""
    if not (isinstance(command, ModelCommand) and command.trust_remote_code):
        return nullcontext()
    if not any(word.replace("_", "-") == "--trust-remote-code" for word in words):
        raise ValueError(
            "trust_remote_code is never read from a file, such as that of --config or of the run: give "
            "--trust-remote-code if you trust the model's code"
        )
    return trust_remote_code()
