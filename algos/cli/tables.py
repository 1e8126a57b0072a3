"""Tables for a terminal: in a narrow one, names are folded, never cut."""

from collections.abc import Iterable, Sequence

from textenv.rendering import printable, text_of

FULL_WIDTH_CHARACTERS = 12
"""Longest text, in characters, of a column that always has its full width, so that longer ones fold instead."""

MAX_FILE_WIDTH = 160
"""Maximum width, in characters, of a table that goes to a file; in a terminal it is the terminal's."""


def print_table(rows: Iterable[Iterable[object]], header: Sequence[str] = ()) -> None:
    """Print rows of texts and numbers; a float has four digits, None is a dash.

    Args:
        rows: at least one row; all of one length.
        header: names of the columns; none prints no header.
    """
    from rich.table import Table
    from rich.text import Text

    rows_of_cells = [[_cell(value) for value in row] for row in rows]
    names = header or [""] * len(rows_of_cells[0])
    table = Table(show_header=bool(header))
    for name, *column in zip(names, *rows_of_cells, strict=True):
        longest = max(map(len, [name, *column]))
        table.add_column(Text(printable(name)), overflow="fold", no_wrap=longest <= FULL_WIDTH_CHARACTERS)
    for cells in rows_of_cells:
        table.add_row(*map(Text, cells))
    print(text_of(table, widest=MAX_FILE_WIDTH), end="")


def _cell(value: object) -> str:
    """Return a value as it stands in a table."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))
