"""`read_json`, `parse_json` and `json_lines`: JSON in UTF-8; anything else raises a ValueError, or is left out."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json(path: Path, *, what: str, kind: type | tuple[type, ...] = object) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: expected content, for errors, such as ``"the description of an agent"``.
        kind: type or types of the outermost value, such as ``dict``.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not JSON in UTF-8 (the message names file and position), or holds another kind of value.
    """
    try:
        found = parse_json(path.read_bytes())
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
    """Objects in a file of JSON lines, none if it is missing, without a line that a killed process left incomplete."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            found.append(parse_json(line))
    return [line for line in found if isinstance(line, dict)]
