"""Read JSON files from anyone: their size is bounded, and an error says what is wrong with other contents."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
"""A value of JSON."""
MOST_BYTES = 2**28
"""Maximum size of a JSON file, unless a reader says otherwise; larger files are not read at all."""
MOST_BYTES_OF_LINES = 2**31
"""Maximum size of a file of JSON lines."""
LONGEST_LINE = 2**24
"""Maximum size of one of its lines, in bytes."""


@contextmanager
def open_regular(path: Path, *, most: int = MOST_BYTES) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes, unless it is too large, a folder, a pipe or a device.

    Args:
        path: the file; links are followed.
        most: maximum size, in bytes.

    Raises:
        OSError: if it cannot be read, or is no regular file. Opening never blocks.
        ValueError: if it is larger.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode):
        os.close(handle)
        raise OSError(f"{path} is a folder, a pipe or a device, expected a file")
    with os.fdopen(handle, "rb") as file:
        if state.st_size > most:
            raise ValueError(f"{path} has {state.st_size:,} bytes, expected at most {most:,}")
        yield file


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Read the bytes of a file; the arguments and errors are those of `open_regular`."""
    with open_regular(path, most=most) as file:
        return file.read(most)


def read_json(path: Path, *, what: str, kind: type | tuple[type, ...] = object, most: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: expected content, for errors, such as ``"the description of an agent"``.
        kind: type or types of the outermost value, such as ``dict``.
        most: maximum size, in bytes.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not JSON in UTF-8 (the message names file and position), or holds another kind of value.
    """
    content = read_bytes(path, most=most)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is {error}, expected {what}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} holds {value!r:.200} ({type(value).__name__}), expected {what}")
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in UTF-8, with or without a byte order mark; a ValueError names the position if it is invalid.

    Example:
        >>> parse_json('{"k": }')
        Traceback (most recent call last):
        ValueError: not JSON in UTF-8 (Expecting value: line 1 column 7 (char 6))
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"not JSON in UTF-8 ({error})") from error


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects in a file of JSON lines; skip lines that are cut off or damaged. A missing file has none.

    Raises:
        OSError: if it is no file, or cannot be read.
        ValueError: if it is larger than `MOST_BYTES_OF_LINES`.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    with open_regular(path, most=MOST_BYTES_OF_LINES) as file:
        while line := file.readline(LONGEST_LINE):
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows
