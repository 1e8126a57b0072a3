"""Live view of a training in a terminal or a notebook; plain lines elsewhere."""

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from algos.training.loggers import Values
from textenv.rendering import printable, sparkline

CURVES = {
    "episode/return": "return", "eval/mean_return": "evaluation", "reference/kl": "KL", "policy/entropy": "entropy",
    "policy/approx_kl": "approx. KL", "value/explained_variance": "expl. variance", "episode/length": "length",
    "sft/loss": "loss",
}  # fmt: skip
"""Metrics that are shown, and their labels."""
LABELS = 15
"""Width of the labels, in columns."""
LONGEST = 300
"""Characters shown of a prompt (its end) and of a completion (its beginning)."""
QUIET, NOTEBOOK = 10.0, 0.5
"""Seconds between plain lines, and between pictures of the panel in a notebook."""


class PipeConsole(Console):
    """Console that raises a BrokenPipeError when nobody reads its pipe; rich would end the program and its stdout."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise  # noqa: PLE0704


class LiveView:
    """Logger that shows progress, rate, time left, curves and the newest sample; by default on stderr."""

    def __init__(self, total_steps: float, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self.console = PipeConsole(stderr=True) if console is None else console  # stdout stays clean for programs
        self._curves: dict[str, list[float]] = defaultdict(list)
        self._sample: Mapping[str, Any] = {}
        self._last: dict[str, float] = {}
        self._cell: Any = None
        self._title, self._printed, self._live = "", -QUIET, Live(console=self.console, auto_refresh=False)

    def start(self, run_dir: Path | None, config: Mapping[str, Any], *, step: int) -> None:
        """See `Logger.start`."""
        self._title = " · ".join(str(x) for x in (config["algorithm"], config["environment"], run_dir) if x)
        self._start, self._first = time.perf_counter(), step
        if "turns_end_with" in config:
            ends = Text(f"turns end with {printable(config['turns_end_with'])}")
            self.console.print(ends, soft_wrap=True)
        if self.console.is_jupyter:
            from IPython.display import display

            self._cell = display(self._panel(), display_id=True)
        elif self.console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=2)
            self._live.start()

    def log(self, values: Values, *, step: int) -> None:
        """See `Logger.log`."""
        for value in values.values():
            if isinstance(value, list) and value:
                self._sample = value[0]
        if "steps" not in values:
            return
        self._last |= values  # a rollout in which no episode ended shows the last return
        for name in CURVES.keys() & values.keys():
            self._curves[name].append(values[name])
        over = step >= self.total_steps or "eval/mean_return" in values
        if self._cell is not None:
            if over or time.perf_counter() - self._printed >= NOTEBOOK:
                self._printed = time.perf_counter()
                self._cell.update(self._panel())
        elif not self.console.is_terminal and (over or time.perf_counter() - self._printed >= QUIET):
            self._printed = time.perf_counter()
            numbers = (f"{label} {self._last[name]:.4g}" for name, label in CURVES.items() if name in self._last)
            self.console.print("  ".join([self._progress(), *numbers]), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """See `Logger.close`."""
        self._live.stop()

    def _progress(self) -> str:
        steps, seconds = self._last.get("steps", self._first), time.perf_counter() - self._start
        rate = (steps - self._first) / seconds if seconds else 0.0
        left = _duration(max(0.0, self.total_steps - steps) / rate) if rate else "?"
        return f"{steps:,.0f} of {self.total_steps:,.0f} steps · {rate:,.0f}/s · {left} left"

    def _panel(self) -> RenderableType:
        width = self.console.width
        table = Table.grid(Column(width=LABELS), Column(width=10, justify="right"), Column(), padding=(0, 1))
        for name, label in CURVES.items():
            if curve := self._curves.get(name):
                shown = sparkline(curve, max(10, width - LABELS - 20))
                table.add_row(label, f"{curve[-1]:.4g}", Text(shown, style="cyan", no_wrap=True))
        bar = Table.grid()  # in a grid, because a bar does not end its own line
        bar.add_row(ProgressBar(self.total_steps, self._last.get("steps", self._first), width=width - 4))
        parts: list[RenderableType] = [Text(self._progress(), no_wrap=True, overflow="ellipsis"), bar, table]
        if self._sample:
            score, kl = self._sample["score"], self._sample.get("kl")
            noted = "no score" if score is None else f"score {score:.4g}"
            noted += "" if kl is None else f", KL {kl:.3g}"
            prompt, completion = (printable(str(self._sample[name])) for name in ("prompt", "completion"))
            prompt = prompt if len(prompt) <= LONGEST else f"…{prompt[-LONGEST:]}"
            completion = completion if len(completion) <= LONGEST else f"{completion[:LONGEST]}…"
            text = Text.assemble((prompt, "dim"), (completion, "bold"))
            parts += [Text(f"iteration {self._sample['iteration']}, {noted}:", style="green"), text]
        return Panel(Group(*parts), title=Text(self._title), title_align="left", width=width)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"
