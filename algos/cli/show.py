"""``algos runs``, ``algos show`` and ``algos envs``: what was run, and what can be."""

import inspect
import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from shutil import get_terminal_size
from typing import Any, ClassVar

import tyro

from algos.cli.arguments import Command
from algos.cli.tables import print_table
from algos.lab.run_summary import SUMMARY, read_run
from algos.storage.run_reader import METRICS
from textenv.registration import NAMES
from textenv.rendering import sparkline


@dataclass(frozen=True, kw_only=True)
class Runs(Command):
    """List the runs in a folder and below it: status, steps, score and seconds."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path] = Path("runs")
    """Folder to search."""

    def run(self) -> list[dict[str, Any]]:
        """Find and summarise the runs."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}: give the folder that holds your runs")
        found = []
        for path in sorted(self.folder.rglob(METRICS)):
            try:
                run = read_run(path.parent)
            except ValueError:  # 'algos show' says what is wrong with it
                run = {"run": str(path.parent), "status": "damaged"}
            found.append({name: run.get(name) for name in SUMMARY})
        if not self.json:
            _print_runs(found)
        return found


@dataclass(frozen=True, kw_only=True)
class Envs(Command):
    """List our text environments, with the task of each."""

    prints: ClassVar[bool] = True

    def run(self) -> list[dict[str, Any]]:
        """Read the first line about each task."""
        from textenv.extras.reasoning_gym import ReasoningGym
        from textenv.tasks.builtin import GAMES, TASKS, WORLDS

        tasks = TASKS | {name: make for name, (make, _) in GAMES.items()} | {"ReasoningGym": ReasoningGym}
        tasks |= {name: resolve_name(world) for name, world in WORLDS.items()}
        lines = {name: str(inspect.getdoc(tasks[name])).partition("\n")[0] for name in NAMES}
        found = [{"environment": f"textenv/{name}-v0", "task": line.replace("`", "")} for name, line in lines.items()]
        if not self.json:
            print_table([entry.values() for entry in found], ["environment", "task"])
        return found


@dataclass(frozen=True, kw_only=True)
class Show(Command):
    """Show a run: how it was made, its configuration, its curves, its newest samples."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path]
    """Folder of the run."""

    def run(self) -> dict[str, Any]:
        """Read the folder, and print what it holds."""
        if not (self.folder / METRICS).is_file():
            raise FileNotFoundError(
                f"{self.folder} holds no run ({METRICS} is missing): 'algos runs FOLDER' lists the runs in a folder"
            )
        result = read_run(self.folder)
        if not self.json:
            _print_run(result)
        return result


def _print_runs(found: list[dict[str, Any]]) -> None:
    """Print two lines for each run: with a column for each name, 80 characters are too few."""
    if not found:
        print(f"no runs: a run is a folder with {METRICS}")
        return
    rows = []
    for run in found:
        name = f"{run['run']}\n  {run['algorithm'] or '?'} on {run['environment'] or '?'}"
        time = _duration(run["seconds"] or 0)
        rows.append((name, *(run[column] for column in ("status", "steps", "last_score", "best_score")), time))
    print_table(rows, ["run", "status", "steps", "last", "best", "time"])


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds; a question mark if the number is no duration."""
    if not math.isfinite(seconds) or not 0 <= seconds < 1e9:
        return "?"
    return str(timedelta(seconds=round(seconds)))


def _print_run(result: dict[str, Any]) -> None:
    made_by, config, curves, samples = (result.pop(name) for name in ("made_by", "config", "curves", "samples"))
    for name, value in made_by.items():
        result[name] = ", ".join(f"{key} {x}" for key, x in value.items()) if isinstance(value, dict) else value
    print_table(result.items())
    if config:
        print_table([(name, str(x)) for name, x in config.items()], ["hyper-parameter", "not its default"])
    if curves:
        width = max(8, min(64, get_terminal_size().columns - 56))
        rows = [(name, sparkline(values, width), values[0], values[-1]) for name, values in curves.items()]
        print_table(rows, ["metric", "curve", "first", "last"])
    if samples:
        texts = [[sample.get("steps"), *_spoken(sample), sample.get("score")] for sample in samples]
        print_table(texts, ["steps", "prompt", "completion", "score"])


def _spoken(sample: dict[str, Any]) -> tuple[str, str]:
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


def _messages(messages: list[Any]) -> str:
    """Return messages with who speaks, one below the other; what is no message is shown as it is."""
    lines = []
    for message in messages:
        spoken = isinstance(message, dict) and {"role", "content"} <= message.keys()
        lines.append(f"{message['role']}: {str(message['content']).strip()}" if spoken else str(message))
    return "\n".join(lines)
