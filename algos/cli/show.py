"""``algos runs``, ``algos show`` and ``algos envs``: what was run, and what can be."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from shutil import get_terminal_size
from typing import Any, ClassVar

import tyro

from algos.cli.arguments import Command
from algos.cli.tables import print_table
from algos.lab.run_summary import SUMMARY, RunSummary, read_run
from algos.storage.run_files import METRICS
from textenv.registration import NAMES
from textenv.rendering import sparkline

MIN_CURVE_WIDTH = 8
"""Smallest width, in characters, of a curve in a terminal."""

MAX_CURVE_WIDTH = 64
"""Largest width of a curve, in characters."""

OTHER_COLUMNS_WIDTH = 56
"""Characters of a terminal's width that the columns beside a curve take."""


@dataclass(frozen=True, kw_only=True)
class Runs(Command):
    """List the runs in a folder and below it: status, steps, score and seconds."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path] = Path("runs")
    """Folder to search."""

    def run(self) -> list[dict[str, object]]:
        """Find and summarise the runs."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}: give the folder that holds your runs")
        summaries = []
        for path in sorted(self.folder.rglob(METRICS)):
            try:
                run: Mapping[str, object] = read_run(path.parent)
            except ValueError:  # 'algos show' says what is wrong with it
                run = {"run": str(path.parent), "status": "damaged"}
            summaries.append({name: run.get(name) for name in SUMMARY})
        if not self.json:
            _print_runs(summaries)
        return summaries


@dataclass(frozen=True, kw_only=True)
class Envs(Command):
    """List our text environments, with the task of each."""

    prints: ClassVar[bool] = True

    def run(self) -> list[dict[str, object]]:
        """Read the first line about each task."""
        from textenv.extras.reasoning_gym import ReasoningGym
        from textenv.programs.builtin import PROGRAMS
        from textenv.programs.vector_env import ProgramVectorEnv
        from textenv.tasks.builtin import GAMES, TASKS, WORLDS
        from textenv.words.wrapper import LanguageWrapper

        # What describes each: a class or a function
        tasks: dict[str, object] = {**TASKS}
        for name, (make, _) in GAMES.items():
            tasks[name] = make
        for name, world in WORLDS.items():
            tasks[name] = resolve_name(world)
        for name, game in PROGRAMS.items():
            tasks[name] = game.play
        tasks["Program"] = ProgramVectorEnv
        tasks["ReasoningGym"] = ReasoningGym
        tasks["Words"] = LanguageWrapper

        rows: list[dict[str, object]] = []
        for name in NAMES:
            first_line, _, _ = str(inspect.getdoc(tasks[name])).partition("\n")
            rows.append({"environment": f"textenv/{name}-v0", "task": first_line.replace("`", "")})
        if not self.json:
            print_table([row.values() for row in rows], ["environment", "task"])
        return rows


@dataclass(frozen=True, kw_only=True)
class Show(Command):
    """Show a run: how it was made, its configuration, its curves, its newest samples."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path]
    """Folder of the run."""

    def run(self) -> RunSummary:
        """Read the folder, and print what it holds."""
        if not (self.folder / METRICS).is_file():
            raise FileNotFoundError(
                f"{self.folder} holds no run ({METRICS} is missing): 'algos runs FOLDER' lists the runs in a folder"
            )
        result = read_run(self.folder)
        if not self.json:
            _print_run(result)
        return result


def _print_runs(summaries: list[dict[str, Any]]) -> None:
    """Print two lines for each run: with a column for each name, 80 characters are too few."""
    if not summaries:
        print(f"no runs: a run is a folder with {METRICS}")
        return
    rows = []
    for run in summaries:
        algorithm = run["algorithm"] or "?"
        environment = run["environment"] or "?"
        name = f"{run['run']}\n  {algorithm} on {environment}"
        duration = _duration(run["seconds"] or 0)
        rows.append((name, run["status"], run["steps"], run["last_score"], run["best_score"], duration))
    print_table(rows, ["run", "status", "steps", "last", "best", "time"])


def _duration(seconds: float) -> str:
    """Return hours, minutes and seconds; a question mark if the number is no duration."""
    if not math.isfinite(seconds) or not 0 <= seconds < 1e9:
        return "?"
    return str(timedelta(seconds=round(seconds)))


def _print_run(run: RunSummary) -> None:
    """Print the tables of a run that `read_run` has returned."""
    # One line for each value, and for how the run was made one for each part of that
    values = dict(run)
    for name in ("made_by", "config", "curves", "samples"):
        values.pop(name)
    for name, value in run["made_by"].items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {x}" for key, x in value.items())
        values[name] = value
    print_table(values.items())

    if run["config"]:
        rows = [(name, str(value)) for name, value in run["config"].items()]
        print_table(rows, ["hyper-parameter", "not its default"])
    if run["curves"]:
        room = get_terminal_size().columns - OTHER_COLUMNS_WIDTH
        width = max(MIN_CURVE_WIDTH, min(MAX_CURVE_WIDTH, room))
        curves = [(name, sparkline(curve, width), curve[0], curve[-1]) for name, curve in run["curves"].items()]
        print_table(curves, ["metric", "curve", "first", "last"])
    if run["samples"]:
        samples = [[sample.get("steps"), *_spoken(sample), sample.get("score")] for sample in run["samples"]]
        print_table(samples, ["steps", "prompt", "completion", "score"])


def _spoken(sample: dict[str, object]) -> tuple[str, str]:
    """Return prompt and completion of a sample; of a chat, each message begins with the role that says it."""
    prompt = str(sample.get("prompt"))
    completion = str(sample.get("completion"))
    chat = sample.get("chat")
    turns = sample.get("turns")
    if isinstance(chat, list):
        prompt = _messages(chat)
    if isinstance(turns, list):
        completion = _messages(turns)
    elif isinstance(chat, list):
        completion = _messages([{"role": "assistant", "content": completion}])
    return prompt, completion


def _messages(messages: list[object]) -> str:
    """Return messages with who speaks, one below the other; what is no message is shown as it is."""
    lines = []
    for message in messages:
        if isinstance(message, dict) and {"role", "content"} <= message.keys():
            content = str(message["content"]).strip()
            lines.append(f"{message['role']}: {content}")
        else:
            lines.append(str(message))
    return "\n".join(lines)
