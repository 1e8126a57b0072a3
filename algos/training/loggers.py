"""Loggers of a run: JSON lines always; TensorBoard, Weights & Biases, trackio and your own as you choose."""

import json
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self, runtime_checkable

import numpy as np

from algos.storage.run_files import METRICS, SAMPLES, TENSORBOARD, TOKENS, WANDB_ID
from algos.storage.run_folder import replacing
from textenv.json_files import parse_json
from textenv.optional import package

SHADED = ("log_ratio", "advantage", "value", "entropy")
"""Columns in `TOKENS` by which a report shades tokens."""
Values = Mapping[str, Any]
"""Values to log, by name: numbers, arrays (histograms) and lists of dictionaries (tables)."""
PROJECT = "textenv"
"""Project name in Weights & Biases and trackio; WANDB_PROJECT and TRACKIO_PROJECT override it."""
_Identity = tuple[int, int]
"""Device and inode of a file or folder."""
_log = logging.getLogger(__name__)


@runtime_checkable
class Logger(Protocol):
    """Destination of a run's metrics. An error in one is logged and counted, and never ends the run."""

    def start(self, run_dir: Path | None, config: Mapping[str, object], *, step: int) -> None:
        """Open the destination.

        Args:
            run_dir: folder of the run, if it has one.
            config: algorithm, environment, length and hyper-parameters of the run.
            step: steps so far: 0, or more if the run is resumed. Values that the run logged for later steps before it
                was interrupted are void: these steps are taken again.
        """

    def log(self, values: Values, *, step: int) -> None:
        """Log values after this number of steps; several calls may have the same step."""

    def close(self) -> None:
        """Write what is buffered, and close."""


class _TensorBoard:
    """TensorBoard files in the run's folder ``tensorboard/``; tables become text."""

    def start(self, run_dir: Path | None, config: Mapping[str, object], *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if run_dir is not None:
            folder = str(run_dir / TENSORBOARD)
        else:  # a folder of its own, or several trainings would be one curve
            Path(TENSORBOARD).mkdir(exist_ok=True)
            folder = tempfile.mkdtemp(prefix=datetime.now().strftime("%Y-%m-%d-%H-%M-%S-"), dir=TENSORBOARD)
        purge_step = None
        if step > 0:  # values of later steps, logged before the interruption, are void
            purge_step = step + 1
        self._writer = SummaryWriter(folder, purge_step=purge_step)

    def log(self, values: Values, *, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                self._writer.add_histogram(name, value, step)
            elif isinstance(value, list):
                self._writer.add_text(name, _markdown(value), step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Weights & Biases (in the run's folder if ``WANDB_MODE=offline``), or trackio, which has the same functions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = package(name, name)

    def start(self, run_dir: Path | None, config: Mapping[str, object], *, step: int) -> None:
        # A resumed run continues under its name, in Weights & Biases under its id.
        options: dict[str, object] = {
            "project": os.environ.get(f"{self.name.upper()}_PROJECT", PROJECT),
            "config": dict(config),
            "resume": "allow" if step else "never",
        }
        if run_dir is not None:
            options["name"] = run_dir.name
        if run_dir is not None and self.name == "wandb":
            options["dir"] = str(run_dir)
            options["id"] = self._run_id(run_dir / WANDB_ID, is_resumed=step > 0)
        with redirect_stdout(sys.stderr):  # stdout is for results
            self._run = self._module.init(**options)

    def _run_id(self, path: Path, *, is_resumed: bool) -> str:
        """Return the id in this file; a run that is not resumed gets a new one."""
        if not (is_resumed and path.is_file()):
            path.write_text(secrets.token_hex(4), encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def log(self, values: Values, *, step: int) -> None:
        self._run.log({name: self._converted(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._module.finish()

    def _converted(self, value: object) -> object:
        """Return an array as a histogram of the package, a list as a table; other values unchanged."""
        if isinstance(value, np.ndarray):
            return self._module.Histogram(value)
        if isinstance(value, list):
            columns, rows = _columns(value)
            return self._module.Table(columns=columns, data=rows)
        return value


NAMED: dict[str, Callable[[], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": partial(_Tracker, "wandb"),
    "trackio": partial(_Tracker, "trackio"),
}
"""Loggers by name; each is an extra of the same name."""


def make_loggers(chosen: Sequence[str | Logger]) -> list[Logger]:
    """Return the chosen loggers; a name stands for the logger of this name.

    Raises:
        ValueError: on an unknown name, or a logger that is given twice.
        ImportError: if the package of a named logger is not installed.
        TypeError: on an object without the methods of `Logger`.
    """
    if isinstance(chosen, str):
        chosen = (chosen,)
    if not isinstance(chosen, Sequence):
        raise TypeError(f"loggers is {chosen!r:.200}, expected a list of names and loggers")
    if len({str(choice) for choice in chosen}) < len(chosen):
        raise ValueError(f"loggers are {', '.join(map(str, chosen))}: give each of them once")
    return [_make_logger(choice) for choice in chosen]


def _make_logger(choice: str | Logger) -> Logger:
    """Return the logger of a name; an object with the methods of `Logger` is returned unchanged."""
    if isinstance(choice, str):
        if choice not in NAMED:
            raise ValueError(f"logger is {choice!r}, expected one of {', '.join(NAMED)}, or a Logger")
        package(choice, choice)
        return NAMED[choice]()
    if isinstance(choice, Logger) and not isinstance(choice, type):
        return choice
    raise TypeError(f"logger is {choice!r:.100}, expected a name or an object with start, log and close")


class Logs:
    """All loggers of a run. Only the JSON lines may raise (a full disk); errors of others are logged and counted.

    ``metrics.jsonl`` has a line per iteration, ``samples.jsonl`` one per row of a table. The table ``tokens`` is only
    for the page of `algos.lab.comparison.page`: its rows are in ``tokens.jsonl``, and no other logger gets them.

    Args:
        run_dir: existing folder for these files; None writes none.
        loggers: further loggers.
        config: as in `Logger.start`.
        history: metrics of the iterations so far, to which the caller appends. Lines of later iterations are removed
            from the files. A file that disappears is written again from this history.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        loggers: Sequence[Logger] = (),
        *,
        config: Mapping[str, object],
        history: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self.failures = 0
        """Errors of loggers so far."""
        self._warned: set[int] = set()
        """Loggers (their ``id``) whose first error was logged."""
        self._history = history

        # Files, and what tells them from later ones of the same names
        self.folder = None if run_dir is None else Path(run_dir)
        self._folder_identity: _Identity | None = None
        self._files: dict[str, IO[str]] = {}
        self._file_identities: dict[str, _Identity | None] = {}
        if self.folder is not None:
            for name in (METRICS, SAMPLES, TOKENS):
                self._open(name)
            self._folder_identity = _identity(self.folder)

        # Further loggers; one that cannot start is left out
        step = 0
        if history:
            step = int(history[-1]["steps"])
        self._loggers: list[Logger] = []
        for logger in loggers:
            with self._counted(logger):
                logger.start(self.folder, config, step=step)
                self._loggers.append(logger)

    def _open(self, name: str) -> None:
        """Open a file to append to, with the lines of the iterations so far."""
        assert self.folder is not None
        path = self.folder / name
        if name == METRICS:
            lines = [json.dumps(row) for row in self._history]
        else:
            lines = _lines_of_first_iterations(path, len(self._history))
        with replacing(path) as new_path:  # so that the old file is never lost
            new_path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        file = path.open("a", encoding="utf-8")
        self._files[name] = file
        self._file_identities[name] = _identity(file.fileno())

    def __enter__(self) -> Self:
        return self

    def lost_folder(self) -> str | None:
        """Return where the folder is now, in words, or that it does not exist; None if it is still there."""
        if self.folder is None or _identity(self.folder) == self._folder_identity:
            return None
        with suppress(OSError):
            descriptor = self._files[METRICS].fileno()
            moved_file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # exists on Linux only
            if moved_file.exists():
                return f"it is now {moved_file.parent}"
        return "it does not exist any more"

    def write_again(self) -> None:
        """Make a lost folder again, with the metrics of all iterations so far."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self._files:
            self._files[name].close()
            self._open(name)
        self._folder_identity = _identity(self.folder)

    def write(self, values: Values, *, step: int, iteration: int) -> None:
        """Log values everywhere; rows of tables that have no ``steps`` or ``iteration`` get these."""
        for name, file in self._files.items():
            self._check_open(name, file)
        if self._files:
            self._replace_lost_files()
            self._write_files(values, step=step, iteration=iteration)
        if "tokens" in values:  # for the page only
            return
        for logger in self._loggers:
            with self._counted(logger):
                logger.log(values, step=step)

    def _write_files(self, values: Values, *, step: int, iteration: int) -> None:
        """Append the rows of tables to their files, then a line with all numbers to `METRICS`."""
        numbers = {}
        for name, value in values.items():
            if isinstance(value, list):
                file = self._files[SAMPLES]
                if name == "tokens":
                    file = self._files[TOKENS]
                rows = [{"steps": step, "iteration": iteration} | row for row in value]
                lines = [json.dumps(row, ensure_ascii=False, default=_plain_number) + "\n" for row in rows]
                file.writelines(lines)
            elif not isinstance(value, np.ndarray):
                numbers[name] = value
        if numbers:
            self._files[METRICS].write(json.dumps(numbers, default=_plain_number) + "\n")
        for file in self._files.values():
            file.flush()

    def _check_open(self, name: str, file: IO[str]) -> None:
        """Raise an OSError if a file's descriptor is closed, or belongs to another file that was opened since."""
        if _identity(file.fileno()) != self._file_identities[name]:
            raise OSError(
                f"{name} was closed by other code in this process: does a reward, an environment or a callback close "
                "file descriptors that it has not opened (os.close, os.closerange)?"
            )

    def __exit__(self, *error: object) -> None:
        for logger in self._loggers:
            with self._counted(logger):
                logger.close()
        for name, file in self._files.items():
            with suppress(OSError):  # must not hide the error of a folder that has gone, or of a closed descriptor
                file.close()
                path = Path(file.name)
                if name != METRICS and path.stat().st_size == 0:  # a run of control has no texts
                    path.unlink()

    def _replace_lost_files(self) -> None:
        """Write files again that were removed from the run's folder; do nothing if the folder itself is lost."""
        if self.lost_folder() is not None:
            return
        for name, file in self._files.items():
            path = Path(file.name)
            if _identity(path) == _identity(file.fileno()):
                continue
            remedy = "it begins anew"
            if name == METRICS:
                remedy = "it is written again from memory"
            try:
                self._open(name)
            except FileNotFoundError:  # the folder is being removed; the end of the iteration reports it
                return
            file.close()
            _log.warning("%s was removed or replaced while the training writes into it: %s", path, remedy)

    @contextmanager
    def _counted(self, logger: Logger) -> Iterator[None]:
        """Context that counts the errors of a logger, and logs the first one."""
        try:
            yield
        except Exception as error:  # a foreign package may raise anything
            self.failures += 1
            if id(logger) not in self._warned:
                self._warned.add(id(logger))
                name = type(logger).__name__.strip("_")
                if isinstance(logger, _Tracker):
                    name = logger.name
                _log.warning("the logger %s failed, the run continues: %r", name, error)


def _plain_number(value: Any) -> float:
    """Return a number of NumPy, or a tensor of one element, as a number of Python, for JSON."""
    if getattr(value, "size", None) == 1:
        return value.item()
    if hasattr(value, "numel") and value.numel() == 1:
        return value.item()
    raise TypeError(f"{value!r:.200} cannot be logged: expected a number, or an array or a list of rows by name")


def _identity(path: Path | int) -> _Identity | None:
    """Return what tells a file or folder from a later one of the same name; None if it is missing.

    Args:
        path: the path, or a file descriptor.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lines_of_first_iterations(path: Path, num_iterations: int) -> list[str]:
    """Return the lines of a table's file that belong to the first iterations; none if the file is missing.

    The column ``iteration`` decides, not ``steps``: a sample has the steps before its rollout, which are also those at
    the end of the previous iteration.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [line for line in lines if _iteration_of(line) <= num_iterations]


def _iteration_of(line: str) -> float:
    """Return the iteration of a row of a table; infinity for a line that was cut off."""
    try:
        return float(parse_json(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _columns(table: Sequence[Mapping[str, object]]) -> tuple[list[str], list[list[object]]]:
    """Return names and rows of a table; missing values become None, nested ones JSON."""
    names = list(dict.fromkeys(name for row in table for name in row))
    rows = [[_cell(row.get(name)) for name in names] for row in table]
    return names, rows


def _cell(value: object) -> object:
    """Return a value of a table, as JSON if it is nested."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return value


def _markdown(table: Sequence[Mapping[str, object]]) -> str:
    """Return a table as Markdown."""
    names, rows = _columns(table)
    lines = []
    rows_of_cells: list[Sequence[object]] = [names, ["---"] * len(names), *rows]
    for row in rows_of_cells:
        cells = [str(value).replace("|", "\\|").replace("\n", "<br>") for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
