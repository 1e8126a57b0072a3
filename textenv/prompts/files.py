"""Prompts from files: JSON lines and CSV read record by record on demand, parquet and data sets through `datasets`.

For a text file only the byte offset of each record is in memory (8 bytes per record), so a file may be larger than
memory and its records are read in any order.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from textenv.prompts.special_tokens import check_unicode, strings

MAX_LINE = 2**24
"""Maximum line length, in bytes, so that a file without newlines is not read into memory whole."""


def load_prompts(path: str | Path, *, prompt_column: str = "prompt") -> Sequence[dict[str, Any]]:
    """Open a file of prompts as a sequence of mappings for `textenv.PromptList`.

    Args:
        path: ``.jsonl`` (one object per line), ``.csv`` or ``.tsv`` (with a header line), ``.parquet``, or a
            folder written by ``datasets.Dataset.save_to_disk``; the last two need ``pip install 'textenv[data]'``.
        prompt_column: name of the prompt's column; records have it under the name ``"prompt"``.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file has another type, is empty, lacks the column, or (when read) has a broken record; the
            message names file and record.

    Example:
        >>> load_prompts("questions.jsonl", prompt_column="question")  # doctest: +SKIP
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    records: Sequence[dict[str, Any]]
    if path.suffix == ".jsonl":
        records = JSONLines(path)
    elif path.suffix in (".csv", ".tsv"):
        records = CSVRecords(path)
    elif path.suffix == ".parquet" or path.is_dir():
        records = _dataset(path)
    else:
        raise ValueError(f"{path} is no .jsonl, .csv, .tsv or .parquet file and no folder written by save_to_disk")
    if not len(records):
        raise ValueError(f"{path} has no records")
    columns = list(records[0])
    if prompt_column not in columns:
        raise ValueError(f"{path} has the columns {columns} and no {prompt_column!r}: name one of them")
    if prompt_column == "prompt":
        return records
    if "prompt" in columns:
        raise ValueError(f"{path} has a column 'prompt' beside {prompt_column!r}: rename it first")
    return _Renamed(records, prompt_column, path)


class _Records(Sequence[dict[str, Any]]):
    """Records of a text file, each read from its byte offset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {self.path}, which has {len(self)}")
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return self._read(file, index % len(self))

    def _read(self, file: IO[bytes], index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _broken(self, index: int, reason: object) -> ValueError:
        return ValueError(f"{self.path}, record {index + 1}: {reason}")


class JSONLines(_Records):
    """Records of a file with one JSON object per line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        start = 0
        with path.open("rb") as file:
            for line in _lines(file, path):
                if line.strip():
                    self._starts.append(start)
                start += len(line)

    def _read(self, file: IO[bytes], index: int) -> dict[str, Any]:
        line = file.readline(MAX_LINE)
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            raise self._broken(index, f"no JSON in UTF-8 ({error})") from error
        if not isinstance(record, Mapping):
            raise self._broken(index, f"{line[:60]!r} is JSON, but no object with columns")
        if b"\\ud" in line.lower():  # only these escapes can encode an unpaired surrogate
            for text in (text for column in record.items() for text in strings(column)):
                try:
                    check_unicode(text)
                except ValueError as error:
                    raise self._broken(index, error) from error
        return dict(record)


class CSVRecords(_Records):
    """Records of comma-separated (``.tsv``: tab-separated) values with a header; quoted newlines are kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._dialect: dict[str, Any] = {"delimiter": "\t" if path.suffix == ".tsv" else ",", "strict": True}
        with path.open("rb") as file:
            read = _Counted(file, path)
            rows = csv.reader(read, **self._dialect)
            self._columns = self._guard(lambda: next(rows, []), -1)
            if len(set(self._columns)) < len(self._columns):
                raise ValueError(f"{path} has the columns {self._columns}, of which some have one name: rename them")
            while True:
                start = read.bytes
                row = self._guard(lambda: next(rows, None), len(self._starts))
                if row is None:
                    break
                if row:
                    self._starts.append(start)

    def _read(self, file: IO[bytes], index: int) -> dict[str, Any]:
        rows = csv.reader(_Counted(file, self.path), **self._dialect)
        row = self._guard(lambda: next(rows), index)
        if len(row) != len(self._columns):
            raise self._broken(index, f"{len(row)} values for the {len(self._columns)} columns {self._columns}")
        return dict(zip(self._columns, row, strict=True))

    def _guard(self, read: Callable[[], Any], index: int) -> Any:
        try:
            return read()
        except (csv.Error, UnicodeDecodeError) as error:
            if "field limit" in str(error):
                most = csv.field_size_limit()
                raise self._broken(index, f"a value of more than {most:,} characters: write JSON lines") from error
            raise self._broken(index, f"no CSV in UTF-8 ({error})") from error


class _Counted(Iterator[str]):
    """Iterator over a file's lines as text, which counts their bytes."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._lines, self.bytes = _lines(file, path), 0

    def __next__(self) -> str:
        line = next(self._lines)
        first = self.bytes == 0
        self.bytes += len(line)
        return line.decode("utf-8-sig" if first else "utf-8")


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ValueError(
                f"{path} has a line of more than {MAX_LINE} bytes: is it a text file of one record a line?"
            )
        yield line


class _Renamed(Sequence[dict[str, Any]]):
    """Records with one column renamed to ``"prompt"``."""

    def __init__(self, records: Sequence[dict[str, Any]], column: str, path: Path) -> None:
        self._records, self._column, self._path = records, column, path

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        record = dict(self._records[index])
        if self._column not in record:
            raise ValueError(
                f"{self._path}, record {index + 1}, has the columns {sorted(record)} and no {self._column!r}"
            )
        return {"prompt": record.pop(self._column)} | record


def _dataset(path: Path) -> Any:
    """Open a parquet file or saved data set, memory-mapped by `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"to read {path}: pip install 'textenv[data]'") from error
    try:
        found = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # pyarrow and datasets raise errors of many types for a broken file
        raise ValueError(f"{path} could not be read as a data set ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(
            f"{path} holds the splits {sorted(found)}: give the folder of one, as {path / next(iter(found))}"
        )
    return _DatasetRecords(found, path)


class _DatasetRecords(Sequence[dict[str, Any]]):
    """Records of a data set; text that is not UTF-8 raises when read."""

    def __init__(self, found: Any, path: Path) -> None:
        self._found, self._path = found, path

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        try:
            return self._found[index]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path}, record {index + 1}: no UTF-8 ({error})") from error
