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
from textenv.console import PipeConsole
from textenv.rendering import printable, sparkline

CURVES = {
    "episode/return": "return",
    "eval/mean_return": "evaluation",
    "reference/kl": "KL",
    "policy/entropy": "entropy",
    "policy/approx_kl": "approx. KL",
    "value/explained_variance": "expl. variance",
    "episode/length": "length",
    "sft/loss": "loss",
}
"""Metrics that are shown, and their labels."""
LABEL_WIDTH = 15
"""Width of the labels, in columns."""
NUMBER_WIDTH = 10
"""Width of the numbers, in columns."""
MAX_TEXT_CHARACTERS = 300
"""Characters shown of a prompt (its end) and of a completion (its beginning)."""
LINE_SECONDS = 10.0
"""Seconds between plain lines."""
NOTEBOOK_SECONDS = 0.5
"""Seconds between updates of the panel in a notebook."""


class LiveView:
    """Logger that shows progress, rate, time left, curves and the newest sample; by default on stderr."""

    def __init__(self, total_steps: float, console: Console | None = None) -> None:
        if console is None:
            console = PipeConsole(stderr=True)  # stdout stays clean for programs
        self.total_steps = total_steps
        self.console = console
        self._title = ""

        # What is shown
        self._curves: dict[str, list[float]] = defaultdict(list)
        self._sample: Mapping[str, Any] = {}
        self._last: dict[str, float] = {}
        """Last value of each metric."""

        # Where: in a terminal, in a notebook's cell, or in lines
        self._live = Live(console=self.console, auto_refresh=False)
        self._cell: Any = None
        self._last_output = -LINE_SECONDS
        """Time of the last line, or of the last update of a cell."""

    def start(self, run_dir: Path | None, config: Mapping[str, object], *, step: int) -> None:
        """See `Logger.start`."""
        parts = (config["algorithm"], config["environment"], run_dir)
        self._title = " · ".join(str(part) for part in parts if part)
        self._start_time = time.perf_counter()
        self._start_step = step
        if "turns_end_with" in config:
            ends = Text(f"turns end with {printable(str(config['turns_end_with']))}")
            self.console.print(ends, soft_wrap=True)
        if self.console.is_jupyter:
            from IPython.display import display

            self._cell = display(self._panel(), display_id=True)
        elif self.console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=2)
            self._live.start()

    def log(self, values: Values, *, step: int) -> None:
        """See `Logger.log`."""
        # What is shown; a terminal shows it by itself
        for value in values.values():
            if isinstance(value, list) and value:
                self._sample = value[0]
        if "steps" not in values:
            return
        self._last |= values  # a rollout in which no episode ended shows the last return
        for name in CURVES.keys() & values.keys():
            self._curves[name].append(values[name])

        # A notebook's cell, or a line; always at the end and after an evaluation
        now = time.perf_counter()
        is_due = step >= self.total_steps or "eval/mean_return" in values
        if self._cell is not None:
            if is_due or now - self._last_output >= NOTEBOOK_SECONDS:
                self._last_output = now
                self._cell.update(self._panel())
        elif not self.console.is_terminal and (is_due or now - self._last_output >= LINE_SECONDS):
            self._last_output = now
            self.console.print(self._line(), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """See `Logger.close`."""
        self._live.stop()

    def _line(self) -> str:
        """Return progress and metrics as a plain line."""
        parts = [self._progress()]
        for name, label in CURVES.items():
            if name in self._last:
                parts.append(f"{label} {self._last[name]:.4g}")
        return "  ".join(parts)

    def _progress(self) -> str:
        """Return steps, steps per second and the time left, as text."""
        steps = self._last.get("steps", self._start_step)
        seconds = time.perf_counter() - self._start_time
        rate = 0.0
        if seconds > 0:
            rate = (steps - self._start_step) / seconds
        time_left = "?"
        if rate > 0:
            time_left = _duration(max(0.0, self.total_steps - steps) / rate)
        return f"{steps:,.0f} of {self.total_steps:,.0f} steps · {rate:,.0f}/s · {time_left} left"

    def _panel(self) -> RenderableType:
        """Return progress, curves and the newest sample as a panel."""
        width = self.console.width
        progress = Text(self._progress(), no_wrap=True, overflow="ellipsis")
        bar = Table.grid()  # in a grid, because a bar does not end its own line
        bar.add_row(ProgressBar(self.total_steps, self._last.get("steps", self._start_step), width=width - 4))
        parts: list[RenderableType] = [progress, bar, self._curve_table(width)]
        if self._sample:
            parts += self._sample_texts()
        return Panel(Group(*parts), title=Text(self._title), title_align="left", width=width)

    def _curve_table(self, width: int) -> Table:
        """Return a table with label, last value and curve of each metric."""
        curve_width = max(10, width - LABEL_WIDTH - NUMBER_WIDTH - 10)
        number_column = Column(width=NUMBER_WIDTH, justify="right")
        table = Table.grid(Column(width=LABEL_WIDTH), number_column, Column(), padding=(0, 1))
        for name, label in CURVES.items():
            curve = self._curves.get(name)
            if curve:
                line = Text(sparkline(curve, curve_width), style="cyan", no_wrap=True)
                table.add_row(label, f"{curve[-1]:.4g}", line)
        return table

    def _sample_texts(self) -> list[Text]:
        """Return a headline with score and KL, and the text of the newest sample."""
        # Headline
        score = self._sample["score"]
        score_text = "no score"
        if score is not None:
            score_text = f"score {score:.4g}"
        kl = self._sample.get("kl")
        if kl is not None:
            score_text += f", KL {kl:.3g}"
        headline = Text(f"iteration {self._sample['iteration']}, {score_text}:", style="green")

        # The end of the prompt and the beginning of the completion
        prompt = printable(str(self._sample["prompt"]))
        if len(prompt) > MAX_TEXT_CHARACTERS:
            prompt = f"…{prompt[-MAX_TEXT_CHARACTERS:]}"
        completion = printable(str(self._sample["completion"]))
        if len(completion) > MAX_TEXT_CHARACTERS:
            completion = f"{completion[:MAX_TEXT_CHARACTERS]}…"
        return [headline, Text.assemble((prompt, "dim"), (completion, "bold"))]


def _duration(seconds: float) -> str:
    """Return a duration as ``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{minutes}:{whole_seconds:02}"
