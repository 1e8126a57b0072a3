"""The command line, ``algos train|evaluate|…``; also ``textenv`` and ``python -m algos``.

Nothing here imports torch before a command runs, so that help and errors appear at once.
"""

import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from signal import SIGPIPE
from traceback import TracebackException
from typing import Annotated, Any

import tyro

from algos.cli.arguments import ModelCommand, named, with_files
from algos.cli.check import Check, CheckReward
from algos.cli.compare import Compare
from algos.cli.evaluate import Evaluate, Merge, Push
from algos.cli.interpret import Interpret
from algos.cli.plan import Plan
from algos.cli.report import Report, Watch
from algos.cli.sample import Sample
from algos.cli.serve import Serve
from algos.cli.show import Envs, Runs, Show
from algos.cli.tables import print_table
from algos.cli.train import Train, switches, train_command
from algos.cli.tune import Tune
from algos.cli.user_code import UserExit, end_in_spite_of_threads, escaped_traceback, exits_are_errors, output_on_stderr
from algos.config import CONFIGS, find_config
from algos.envs.subprocess_env import EnvironmentFailure
from algos.make import is_text
from algos.storage.provenance import versions
from algos.training.signals import Interrupted
from textenv.errors import InvariantError
from textenv.foreign import our_names
from textenv.lm.loading import trust_remote_code
from textenv.names import flag_advice, nearest
from textenv.processes import end_if_forked
from textenv.rendering import printable

COMMANDS = {
    "evaluate": Evaluate, "sample": Sample, "interpret": Interpret, "serve": Serve, "compare": Compare, "tune": Tune,
    "report": Report, "watch": Watch, "merge": Merge, "push": Push, "runs": Runs, "show": Show, "envs": Envs,
    "check": Check, "check-reward": CheckReward,
}  # fmt: skip
"""All commands by name, but ``train``, whose flags depend on the environment and the algorithm."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console scripts; exit status 2 on wrong input."""
    status = 1
    try:
        _main(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        end_in_spite_of_threads(status)


def _main(arguments: Sequence[str] | None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(", ".join(" ".join(item) for item in {**versions(), "Python": platform.python_version()}.items()))
        return
    try:
        arguments = with_files(given, switches())
        _refuse_foreign_flags(arguments)
        commands = train_command(arguments) | train_command(arguments, "plan", Plan)
        for name, kind in COMMANDS.items():
            commands |= Annotated[kind, tyro.conf.subcommand(name)]
        description = "Train and compare policies for control and text with one kit of algorithms."
        command: Any = tyro.cli(commands, args=arguments, prog="algos", description=description)
        _refuse_model_of_control(command, given)
        quiet = command.json and not command.announces
        with _code_of_models(command, given), output_on_stderr(quiet), exits_are_errors():
            process = os.getpid()
            result = command.run()
            end_if_forked(process, "an environment or a callback")
    except KeyboardInterrupt as stop:
        if not isinstance(stop, Interrupted):
            stop = Interrupted("SIGINT", "stopped by SIGINT", resumable=False)
        advice = f"; to continue: algos train --resume {command.folder}" if stop.resumable else ""
        _tell("\n".join(f"algos: {line}" for line in (f"{stop}{advice}", *_notes(stop))))
        raise SystemExit(stop.status) from stop
    except (ValueError, TypeError, OSError, ImportError, InvariantError, EnvironmentFailure) as error:
        _tell("\n".join(f"algos: {printable(line)}" for line in (str(error), *_notes(error))))
        raise SystemExit(1 if isinstance(error, (InvariantError, EnvironmentFailure, UserExit)) else 2) from error
    except Exception as error:  # of an environment, which its author has to find
        _tell(escaped_traceback(error))
        raise SystemExit(1) from error
    if result is None:  # another process has it
        return
    _print_result(command, result)
    if isinstance(command, (Check, CheckReward)) and not result["sound"]:
        raise SystemExit(1)


def _print_result(command: Any, result: dict[str, Any]) -> None:
    """Print the result of a command to stdout, if there is one; an output that cannot be written is told of."""
    if sys.stdout is None:
        return
    if sys.stdout.closed:
        _tell("algos: the result cannot be shown, as other code has closed the standard output")
        raise SystemExit(1)
    try:
        if command.json:
            print(json.dumps(result))
        elif not command.prints:
            print_table(result.items())
        sys.stdout.flush()
    except OSError as error:
        where = f"; the run is complete and saved in {command.folder}" if isinstance(command, Train) else ""
        _tell(f"algos: the result could not be printed: {error}{where}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again when it ends
        status = 128 + SIGPIPE if isinstance(error, BrokenPipeError) else 1
        raise SystemExit(status) from None


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error: paths of the files that a failed run saved."""
    return TracebackException.from_exception(error).__notes__ or []


def _tell(text: str) -> None:
    """Print to stderr, if anybody can read it: the terminal or the pipe may have gone."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


def _refuse_foreign_flags(arguments: Sequence[str]) -> None:
    """Raise a ValueError that suggests our flag, for a flag of another library or one without ``config.``."""
    commands: dict[str, Any] = COMMANDS | {"train": Train, "plan": Plan}
    if not arguments or arguments[0] not in commands:
        return
    own = [field.name for field in fields(commands[arguments[0]])]
    config = find_config(named(arguments, "--algo", "ppo")) if arguments[0] in ("train", "plan") else None
    hyper = [] if config is None else [field.name for field in fields(config) if field.name != "seed"]
    own += [] if config is None else ["seed"]  # a config field, but its flag has no prefix
    for word in arguments[1:]:
        name = word.partition("=")[0].removeprefix("--").removeprefix("config.").replace("-", "_")
        known = own if not word.startswith("--config.") else hyper
        if not word.startswith("--") or {name, name.removeprefix("no_")} & {*known, "help"}:
            continue
        flag = word.partition("=")[0]
        renamed = any(ours in (*own, *hyper) for ours in our_names(name))
        having = [algo for algo, kind in CONFIGS.items() if name in (field.name for field in fields(kind))]
        if config is not None and having and name not in (*own, *hyper) and not renamed:
            raise ValueError(f"--algo {named(arguments, '--algo', 'ppo')} has no {flag}: it is for {', '.join(having)}")
        trains = arguments[0] in ("train", "plan", "tune")
        instead = flag_advice(name) if trains and not renamed and name not in hyper else ""
        if instead:
            raise ValueError(f"there is no {flag}: {instead}")
        ours = nearest(name, [*own, *hyper]) or ""
        if ours:
            prefix = "" if ours in own else "config."
            raise ValueError(f"there is no {flag}: did you mean --{prefix}{ours.replace('_', '-')}?")


def _refuse_model_of_control(command: Any, given: Sequence[str]) -> None:
    """Raise a ValueError if a language model is named for control, also one that is the default for text."""
    trains = isinstance(command, (Train, Tune)) and not isinstance(command, Plan)
    if trains and named(given, "--model") and not is_text(command.env):
        raise ValueError(f"--model: only for text environments, not for {command.env}; leave out what does not fit")


def _code_of_models(command: Any, given: Sequence[str]) -> AbstractContextManager[None]:
    """Allow models to run their own code in this context, if this command asks for it (a stored one cannot)."""
    if not (isinstance(command, ModelCommand) and command.trust_remote_code):
        return nullcontext()
    if not any(word.replace("_", "-") == "--trust-remote-code" for word in given):
        raise ValueError(
            "trust_remote_code is never read from a file, such as that of --config or of the run: give "
            "--trust-remote-code if you trust the model's code"
        )
    return trust_remote_code()
