"""What studies and long benchmarks share: a file of runs that are not repeated, and how their tables are written."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Run = dict[str, Any]
"""The settings of a run, what it has measured, and its ``seconds``."""


@dataclass(frozen=True)
class RunFile:
    """A file of runs, one to a line, as JSON."""

    path: Path
    settings: tuple[str, ...]
    """Names of the fields that tell runs apart."""
    defaults: Run = field(default_factory=dict)
    """Fields that the first lines of the file lack."""
    clock: Callable[[], float] = time.perf_counter
    """What the seconds of a run are read from."""

    def read(self) -> dict[tuple, Run]:
        """Return the runs so far by their settings, in the order in which they ended; of equal ones, the last."""
        runs = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                run = self.defaults | json.loads(line)
                runs[self._key(run)] = run
        return runs

    def run_missing(self, all_settings: Iterable[Run], measure: Callable[..., Run]) -> Iterator[Run]:
        """Measure what is not in the file, and yield each run as soon as it is there.

        Args:
            all_settings: the settings of each run, in order.
            measure: gets the settings as keywords and returns what it measured. If this has no ``seconds``, the time
                of the call is added.
        """
        for settings in all_settings:
            # Read again each time: another process may have added it
            if self._key(settings) in self.read():
                continue
            start = self.clock()
            run = settings | measure(**settings)
            run.setdefault("seconds", round(self.clock() - start, 1))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run, ensure_ascii=False) + "\n")
            yield run

    def _key(self, run: Run) -> tuple:
        return tuple(run[name] for name in self.settings)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as Markdown."""
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(row)} |")


def mean_and_range(values: Sequence[float], number_format: str = ".2f") -> str:
    """Return the mean of a figure over seeds, the smallest and the largest: ``0.90 [0.88, 0.91]``."""
    mean, low, high = (format(x, number_format) for x in (statistics.mean(values), min(values), max(values)))
    return f"{mean} [{low}, {high}]"
