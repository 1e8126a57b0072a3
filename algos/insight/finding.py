"""`Finding`: one result of an interpretation, as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Finding:
    """A table with a name, and maybe a picture of it."""

    name: str
    """Name of its files, such as ``logit_lens``."""
    title: str
    """What it shows, with units: a short phrase."""
    columns: tuple[str, ...]
    rows: list[tuple[str | int | float, ...]]
    draw: Callable[[Figure], None] | None = None
    """Draws it into an empty figure."""

    def write(self, folder: Path) -> None:
        """Write ``NAME.csv`` and, if it can be drawn, ``NAME.png`` into an existing folder."""
        with (folder / f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self.rows])
        if self.draw is not None:
            from matplotlib.figure import Figure

            figure = Figure(layout="constrained")
            self.draw(figure)
            figure.savefig(folder / f"{self.name}.png", dpi=150)
