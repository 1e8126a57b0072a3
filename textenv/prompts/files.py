"""Prompts from files: JSON lines and CSV read record by record on demand, parquet and data sets through `datasets`.

For a text file, only the byte offset of each record is in memory (8 bytes per record). So a file may be larger than
memory, and records can be read in any order.
"""

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

from textenv.cache import sha256
from textenv.json_files import parse_json
from textenv.optional import package
from textenv.prompts.hub import HUB_NAME, is_hub_name, load_hub_dataset
from textenv.prompts.special_tokens import check_unicode

MAX_LINE = 2**24
"""Maximum line length, in bytes, so that a file without newlines is not read into memory whole."""


def load_prompts(path: str | Path, *, prompt_column: str | None = "prompt") -> Sequence[dict[str, object]]:
    """Open a file of prompts as a sequence of mappings for `PromptList`.

    Args:
        path: ``.jsonl`` (one object per line), ``.csv`` or ``.tsv`` (with a header line), ``.parquet``, a folder
            written by ``datasets.Dataset.save_to_disk``, or a data set of the Hugging Face Hub,
            ``hf:owner/name:config/split`` (`textenv.prompts.hub`). The last three need the extra ``data``.
        prompt_column: name of the prompt's column; records have it under the name ``"prompt"``. None: records are
            returned as they are, for tasks of a program.

    Raises:
        FileNotFoundError: if the file does not exist.
        OSError: if a data set cannot be loaded from the hub.
        ValueError: if a data set has no such configuration or split; if the file has another type, is empty, lacks the
            column, or (when read) has a broken record; the message names file and record.

    Example:
        >>> load_prompts("questions.jsonl", prompt_column="question")  # doctest: +SKIP
    """
    kind: type[_Records]
    if is_hub_name(path):
        return _not_empty(HubRecords(str(path), prompt_column))
    path = Path(path)
    if not path.exists():
        hint = ""
        if HUB_NAME.fullmatch(str(path)) and not path.suffix:
            hint = f"; a data set of the Hugging Face Hub is named hf:{path}"
        raise FileNotFoundError(f"there is no file {path} in {Path.cwd()}{hint}")
    if path.is_dir():
        kind = DatasetRecords
    elif path.suffix.lower() in _KINDS:
        kind = _KINDS[path.suffix.lower()]
    else:
        raise ValueError(f"{path} is not a .jsonl, .csv, .tsv or .parquet file, nor a folder written by save_to_disk")
    return _not_empty(kind(path, prompt_column))


def _not_empty(records: "_Records") -> "_Records":
    """Return the records; raise a ValueError if there is none, or the first one lacks the prompt's column."""
    if next(iter(records), None) is None:
        raise ValueError(f"{records.path} has no records")
    return records


def with_prompt(record: dict[str, object], column: str) -> dict[str, object]:
    """Return a record, which may change, with the name ``"prompt"`` for the prompt's column.

    Raises:
        ValueError: if it lacks the column, or has another one of this name.
    """
    if column not in record:
        raise ValueError(
            f"it has the columns {list(record)} but not {column!r}: name one by --prompt-column (prompt_column=)"
        )
    if column == "prompt":
        return record
    if "prompt" in record:
        raise ValueError(f"it has both columns, 'prompt' and {column!r}: rename 'prompt'")
    return {"prompt": record.pop(column)} | record


class _Records(Sequence[dict[str, object]]):
    """Records of a file, read on demand; the prompt's column gets the name ``"prompt"``."""

    def __init__(self, path: Path, prompt_column: str | None) -> None:
        self.path = path
        self._prompt_column = prompt_column
        self._starts = self._find_starts()

    def _find_starts(self) -> Sequence[int]:
        """Return where each record starts: a byte offset or a row number."""
        raise NotImplementedError

    def _read(self, start: int, index: int) -> dict[str, object]:
        """Return record ``index``, which starts there; the caller may change the record."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> dict[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, object]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, object] | list[dict[str, object]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} is out of range: {self.path} has {len(self)} records")
        index = index % len(self)  # a negative index counts from the end
        record = self._read(self._starts[index], index)

        if self._prompt_column is None:
            return record
        try:
            return with_prompt(record, self._prompt_column)
        except ValueError as error:
            raise self._broken(index, error) from error

    def _broken(self, index: int, reason: object) -> ValueError:
        """Return the error for a broken record."""
        return ValueError(f"{self.path}, record {index + 1}: {reason}")


class JSONLines(_Records):
    """Records of a file with one JSON object per line; empty lines are skipped."""

    def _find_starts(self) -> Sequence[int]:
        starts = array("q")
        start = 0
        with self.path.open("rb") as file:
            for line in _lines(file, self.path):
                if line.strip():
                    starts.append(start)
                start += len(line)
        return starts

    def _read(self, start: int, index: int) -> dict[str, object]:
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

    def _find_starts(self) -> Sequence[int]:
        starts = array("q")
        with self.path.open("rb") as file:
            rows = self._rows(file)
            self._columns = self._next(rows, -1) or []  # for errors, the header is record 0
            if len(set(self._columns)) < len(self._columns):
                raise ValueError(f"{self.path} has repeated names in the columns {self._columns}: rename them")

            # Rows start where the row before them ends; empty ones are skipped
            start = file.tell()
            row = self._next(rows, 0)
            while row is not None:
                if row:
                    starts.append(start)
                start = file.tell()
                row = self._next(rows, len(starts))
        return starts

    def _read(self, start: int, index: int) -> dict[str, object]:
        with self.path.open("rb") as file:
            file.seek(start)
            row = self._next(self._rows(file), index) or []
        if len(row) != len(self._columns):
            raise self._broken(index, f"{len(row)} values for the {len(self._columns)} columns {self._columns}")
        return dict(zip(self._columns, row, strict=True))

    def _rows(self, file: IO[bytes]) -> Iterator[list[str]]:
        """Iterate over the rows from the file's position on."""
        delimiter = ","
        if self.path.suffix.lower() == ".tsv":
            delimiter = "\t"
        return csv.reader(_decoded_lines(file, self.path), delimiter=delimiter, strict=True)

    def _next(self, rows: Iterator[list[str]], index: int) -> list[str] | None:
        """Return the next row; None at the end of the file. An error names it as record ``index``."""
        try:
            return next(rows, None)
        except (csv.Error, UnicodeDecodeError) as error:
            if "field limit" in str(error):
                limit = csv.field_size_limit()
                raise self._broken(index, f"a value has more than {limit:,} characters: use JSON lines") from error
            raise self._broken(index, f"not CSV in UTF-8 ({error})") from error


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Iterate over the lines from the file's position on; raise a ValueError at one of more than `MAX_LINE` bytes."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ValueError(
                f"{path} has a line of more than {MAX_LINE} bytes: is it a text file with one record per line?"
            )
        yield line


def _decoded_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    """Iterate over the lines as texts; a byte order mark at the beginning of the file is left out."""
    at_beginning = file.tell() == 0
    encoding = "utf-8-sig" if at_beginning else "utf-8"
    for line in _lines(file, path):
        yield line.decode(encoding)
        encoding = "utf-8"


class DatasetRecords(_Records):
    """Rows of a parquet file or saved dataset, memory-mapped by `datasets`, which keeps its own copy of a file."""

    def _find_starts(self) -> Sequence[int]:
        datasets = package("datasets", "data")
        try:
            if self.path.is_dir():
                self._rows = datasets.load_from_disk(str(self.path))
            else:
                self._rows = self._load_parquet()
        except Exception as error:  # pyarrow and datasets raise errors of many types for a broken file
            hint = ""
            if self.path.is_dir():
                hint = f"; a folder in the format of the Hugging Face Hub is named hf:{self.path}"
            raise ValueError(f"{self.path} could not be read as a dataset ({error}){hint}") from error
        if isinstance(self._rows, datasets.DatasetDict):
            raise ValueError(
                f"{self.path} has the splits {sorted(self._rows)}: give the folder of one, such as "
                f"{self.path / next(iter(self._rows))}"
            )
        return range(len(self._rows))

    def _load_parquet(self) -> Any:
        """Load a parquet file; the copy has the digest of its content, as `datasets` looks only at path and time."""
        datasets = package("datasets", "data")
        parquet = package("pyarrow.parquet", "data")
        if not parquet.read_metadata(self.path).num_rows:
            return []  # which datasets cannot convert
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "files" / sha256(self.path)[:16]
        return datasets.Dataset.from_parquet(str(self.path), cache_dir=str(cache))

    def _read(self, start: int, index: int) -> dict[str, object]:
        try:
            return dict(self._rows[start])
        except UnicodeDecodeError as error:
            raise self._broken(index, f"not UTF-8 ({error})") from error


class HubRecords(DatasetRecords):
    """Rows of a split of a data set of the Hugging Face Hub."""

    def __init__(self, name: str, prompt_column: str | None) -> None:
        self._name = name  # a path would not keep all of its characters
        super().__init__(Path(name), prompt_column)

    def _find_starts(self) -> Sequence[int]:
        self._rows = load_hub_dataset(self._name)
        return range(len(self._rows))


_KINDS: dict[str, type[_Records]] = {
    ".jsonl": JSONLines,
    ".csv": CSVRecords,
    ".tsv": CSVRecords,
    ".parquet": DatasetRecords,
}
"""Class of records for each suffix of a file."""
