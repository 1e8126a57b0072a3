"""Tables for a terminal: in a narrow one, names are folded, never cut."""

from collections.abc import Iterable, Sequence
from typing import Any

from textenv.rendering import printable, text_of

SHORT = 12
"""Longest text, in characters, of a column that always has its full width, so that longer ones fold instead."""

WIDEST = 160
"""Maximum width, in characters, of a table that goes to a file; in a terminal it is the terminal's."""


def print_table(rows: Iterable[Iterable[Any]], header: Sequence[str] = ()) -> None:
    """Print rows of texts and numbers; a float has four digits, None is a dash."""
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(_shown(value)) for value in row] for row in rows]
    table = Table(show_header=bool(header))
    for name, *column in zip(header or [""] * len(cells[0]), *cells, strict=True):
        table.add_column(Text(printable(name)), overflow="fold", no_wrap=max(map(len, [name, *column])) <= SHORT)
    for row in cells:
        table.add_row(*map(Text, row))
    print(text_of(table, widest=WIDEST), end="")


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
