"""Files of JSON in UTF-8, from anyone: bounded in size, and refused in words if they hold something else."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 2**28
"""Bytes that a file of JSON may have, unless a reader says otherwise; larger ones are not read at all."""
MOST_BYTES_OF_LINES = 2**31
"""Bytes that a file of JSON lines may have."""
LONGEST_LINE = 2**24
"""Bytes that a line of such a file may have."""


@contextmanager
def open_regular(path: Path, *, most: int = MOST_BYTES) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes, unless it is too large, a folder, a pipe or a device.

    Args:
        path: the file; links are followed.
        most: bytes that it may have.

    Raises:
        OSError: if it cannot be read, or is no regular file; it never blocks.
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
    """Read a file as `open_regular` opens it."""
    with open_regular(path, most=most) as file:
        return file.read(most)


def read_json(path: Path, *, what: str, kind: type | tuple[type, ...] = object, most: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: expected content, for errors, such as ``"the description of an agent"``.
        kind: type or types of the outermost value, such as ``dict``.
        most: bytes that the file may have.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not JSON in UTF-8 (the message names file and position), or holds another kind of value.
    """
    content = read_bytes(path, most=most)
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is {error}, expected {what}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{path} holds {found!r:.200} ({type(found).__name__}), expected {what}")
    return found


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in UTF-8, with or without a byte order mark; a ValueError names the position if it is invalid.

    Example:
        >>> parse_json('{"k": }')
        Traceback (most recent call last):
        ValueError: not JSON in UTF-8 (Expecting value: line 1 column 7 (char 6))
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"not JSON in UTF-8 ({error})") from error


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects in a file of JSON lines: none if it is missing; lines that are cut off or damaged are left out.

    Raises:
        OSError: if it is no file, or cannot be read.
        ValueError: if it is larger than `MOST_BYTES_OF_LINES`.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    with open_regular(path, most=MOST_BYTES_OF_LINES) as file:
        for line in iter(partial(file.readline, LONGEST_LINE), b""):
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows
