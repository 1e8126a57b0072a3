"""Prompts from files: JSON lines and CSV read record by record on demand, parquet and datasets through `datasets`.

Of a text file, only the byte offset of each record is in memory (8 bytes per record), so a file may be larger than
memory, and its records can be read in any order.
"""

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from textenv.json_files import parse_json
from textenv.optional import package
from textenv.prompts.special_tokens import check_unicode

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
    kinds = {".jsonl": JSONLines, ".csv": CSVRecords, ".tsv": CSVRecords, ".parquet": DatasetRecords}
    kind = DatasetRecords if path.is_dir() else kinds.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"{path} is not a .jsonl, .csv, .tsv or .parquet file, nor a folder written by save_to_disk")
    records = kind(path, prompt_column)
    if next(iter(records), None) is None:  # reads the first record, which raises if it lacks the column
        raise ValueError(f"{path} has no records")
    return records


class _Records(Sequence[dict[str, Any]]):
    """Records of a file, read on demand; the prompt's column gets the name ``"prompt"``."""

    def __init__(self, path: Path, prompt_column: str) -> None:
        self.path, self._prompt_column = path, prompt_column
        self._starts = self._find()

    def _find(self) -> Sequence[int]:
        """Return the place of each record: its byte offset or its number."""
        raise NotImplementedError

    def _read(self, start: int, index: int) -> dict[str, Any]:
        """Return record ``index``, which is at this place; the caller may change the record."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} is out of range: {self.path} has {len(self)} records")
        index, column = index % len(self), self._prompt_column
        record = self._read(self._starts[index], index)
        if column not in record:
            raise self._broken(
                index,
                f"it has the columns {list(record)} but not {column!r}: name one by --prompt-column",
            )
        if column == "prompt":
            return record
        if "prompt" in record:
            raise self._broken(index, f"it has both columns, 'prompt' and {column!r}: rename 'prompt'")
        return {"prompt": record.pop(column)} | record

    def _broken(self, index: int, reason: object) -> ValueError:
        return ValueError(f"{self.path}, record {index + 1}: {reason}")


class JSONLines(_Records):
    """Records of a file with one JSON object per line; empty lines are skipped."""

    def _find(self) -> Sequence[int]:
        starts, start = array("q"), 0
        with self.path.open("rb") as file:
            for line in _lines(file, self.path):
                if line.strip():
                    starts.append(start)
                start += len(line)
        return starts

    def _read(self, start: int, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.readline(MAX_LINE)
        try:
            record = parse_json(line)
            if b"\\ud" in line.lower():  # only these escapes can encode an unpaired surrogate
                check_unicode(record)
        except ValueError as error:
            raise self._broken(index, error) from error
        if not isinstance(record, Mapping):
            raise self._broken(index, f"{line[:60]!r} is JSON, but not an object with columns")
        return dict(record)


class CSVRecords(_Records):
    """Records of comma-separated (``.tsv``: tab-separated) values with a header; quoted newlines are kept."""

    def _find(self) -> Sequence[int]:
        starts = array("q")
        with self.path.open("rb") as file:
            rows = self._rows(file)
            self._columns = self._next(rows, -1) or []
            if len(set(self._columns)) < len(self._columns):
                raise ValueError(f"{self.path} has repeated names in the columns {self._columns}: rename them")
            start = file.tell()
            while (row := self._next(rows, len(starts))) is not None:
                if row:
                    starts.append(start)
                start = file.tell()
        return starts

    def _read(self, start: int, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(start)
            row = self._next(self._rows(file), index) or []
        if len(row) != len(self._columns):
            raise self._broken(index, f"{len(row)} values for the {len(self._columns)} columns {self._columns}")
        return dict(zip(self._columns, row, strict=True))

    def _rows(self, file: IO[bytes]) -> Iterator[list[str]]:
        return csv.reader(
            _decoded_lines(file, self.path), delimiter="\t" if self.path.suffix.lower() == ".tsv" else ",", strict=True
        )

    def _next(self, rows: Iterator[list[str]], index: int) -> list[str] | None:
        try:
            return next(rows, None)
        except (csv.Error, UnicodeDecodeError) as error:
            if "field limit" in str(error):
                most = csv.field_size_limit()
                raise self._broken(index, f"a value has more than {most:,} characters: use JSON lines") from error
            raise self._broken(index, f"not CSV in UTF-8 ({error})") from error


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ValueError(
                f"{path} has a line of more than {MAX_LINE} bytes: is it a text file with one record per line?"
            )
        yield line


def _decoded_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    encoding = "utf-8" if file.tell() else "utf-8-sig"
    for line in _lines(file, path):
        yield line.decode(encoding)
        encoding = "utf-8"


class DatasetRecords(_Records):
    """Rows of a parquet file or saved dataset, memory-mapped by `datasets`."""

    def _find(self) -> Sequence[int]:
        datasets = package("datasets", "data")
        load = datasets.load_from_disk if self.path.is_dir() else datasets.Dataset.from_parquet
        try:
            self._rows = load(str(self.path))
        except Exception as error:  # pyarrow and datasets raise errors of many types for a broken file
            raise ValueError(f"{self.path} could not be read as a dataset ({error})") from error
        if isinstance(self._rows, datasets.DatasetDict):
            raise ValueError(
                f"{self.path} has the splits {sorted(self._rows)}: give the folder of one, such as "
                f"{self.path / next(iter(self._rows))}"
            )
        return range(len(self._rows))

    def _read(self, start: int, index: int) -> dict[str, Any]:
        try:
            return dict(self._rows[start])
        except UnicodeDecodeError as error:
            raise self._broken(index, f"not UTF-8 ({error})") from error
