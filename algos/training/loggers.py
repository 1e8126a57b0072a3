"""Loggers of a run: JSON lines always; TensorBoard, Weights & Biases, trackio and your own as you choose."""

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self, runtime_checkable

import numpy as np

from algos.storage.run_folder import replacing
from algos.storage.run_reader import METRICS, SAMPLES, TOKENS
from textenv.json_files import parse_json
from textenv.optional import package

SHADED = ("log_ratio", "advantage", "value", "entropy")
"""Columns in `TOKENS`, which shade the tokens of a report."""
Values = Mapping[str, Any]
"""Values to log, by name: numbers, arrays (histograms) and lists of dictionaries (tables)."""
PROJECT = "textenv"
"""Project name in Weights & Biases and trackio; WANDB_PROJECT and TRACKIO_PROJECT override it."""
_log = logging.getLogger(__name__)


@runtime_checkable
class Logger(Protocol):
    """Destination of a run's metrics. An error in one is logged and counted, and never ends the run."""

    def start(self, run_dir: Path | None, config: Mapping[str, Any], *, step: int) -> None:
        """Open the destination.

        Args:
            run_dir: folder of the run, if it has one.
            config: algorithm, environment, length and hyper-parameters of the run.
            step: steps so far: 0, or more if the run is resumed. Later values, from before the resume, are void.
        """

    def log(self, values: Values, *, step: int) -> None:
        """Log values after this number of steps; several calls may have the same step."""

    def close(self) -> None:
        """Write what is buffered, and close."""


class _TensorBoard:
    """TensorBoard files in the run's folder ``tensorboard/``; tables become text."""

    def start(self, run_dir: Path | None, config: Mapping[str, Any], *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        where = "tensorboard" if run_dir is None else str(run_dir / "tensorboard")
        self._board = SummaryWriter(where, purge_step=step + 1 if step else None)

    def log(self, values: Values, *, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                self._board.add_histogram(name, value, step)
            elif isinstance(value, list):
                self._board.add_text(name, _markdown(value), step)
            else:
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class _Tracker:
    """Weights & Biases (in the run's folder if ``WANDB_MODE=offline``), or trackio, which has the same functions."""

    def __init__(self, name: str) -> None:
        self.name, self._module = name, package(name, name)

    def start(self, run_dir: Path | None, config: Mapping[str, Any], *, step: int) -> None:
        # A resumed run continues under its name, in Weights & Biases under its id.
        project = os.environ.get(f"{self.name.upper()}_PROJECT", PROJECT)
        options: dict[str, Any] = {"project": project, "config": dict(config), "resume": "allow" if step else "never"}
        if run_dir is not None:
            options["name"] = run_dir.name
        if run_dir is not None and self.name == "wandb":
            stored = run_dir / "wandb.id"
            if not (step and stored.is_file()):
                stored.write_text(secrets.token_hex(4), encoding="utf-8")
            options |= {"dir": str(run_dir), "id": stored.read_text(encoding="utf-8")}
        with redirect_stdout(sys.stderr):  # stdout is for results
            self._run = self._module.init(**options)

    def log(self, values: Values, *, step: int) -> None:
        self._run.log({name: self._shown(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._module.finish()

    def _shown(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._module.Histogram(value)
        if isinstance(value, list):
            columns, rows = _columns(value)
            return self._module.Table(columns=columns, data=rows)
        return value


NAMED: dict[str, Callable[[], Logger]] = {
    "tensorboard": _TensorBoard, "wandb": partial(_Tracker, "wandb"), "trackio": partial(_Tracker, "trackio"),
}  # fmt: skip
"""Loggers by name; each is an extra of the same name."""


def make_loggers(chosen: Sequence[str | Logger]) -> list[Logger]:
    """Return the loggers, made from their names where a name is given.

    Raises:
        ValueError: on an unknown name.
        ImportError: if the package of a named logger is not installed.
        TypeError: on an object without the methods of `Logger`.
    """
    found: list[Logger] = []
    if not isinstance(chosen, str) and len({str(each) for each in chosen}) < len(chosen):
        raise ValueError(f"loggers are {', '.join(map(str, chosen))}: give each of them once")
    for each in (chosen,) if isinstance(chosen, str) else chosen:
        if isinstance(each, str):
            if each not in NAMED:
                raise ValueError(f"logger is {each!r}, expected one of {', '.join(NAMED)}, or an algos.Logger")
            package(each, each)
            found.append(NAMED[each]())
        elif isinstance(each, Logger) and not isinstance(each, type):
            found.append(each)
        else:
            raise TypeError(f"logger is {each!r:.100}, expected a name or an object with start, log and close")
    return found


class Logs:
    """All loggers of a run. Only the JSON lines may raise (a full disk); errors of others are logged and counted.

    ``metrics.jsonl`` has a line per iteration, ``samples.jsonl`` one per row of a table. The table ``tokens`` is only
    for the page of `algos.lab.comparison.page`: its rows are in ``tokens.jsonl``, and no other logger has them.

    Args:
        run_dir: existing folder for the two files; None writes none.
        loggers: further loggers.
        config: as in `Logger.start`.
        before: metrics of the iterations so far; later ones in the files are removed. A file that disappears is
            written again from them, so they are to grow with the run.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        loggers: Sequence[Logger] = (),
        *,
        config: Mapping[str, Any],
        before: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self.failures = 0
        """Errors of loggers so far."""
        self._before = before
        self._loggers: list[Logger] = []
        self._warned: set[int] = set()
        self._files: dict[str, IO[str]] = {}
        self._opened: dict[str, tuple[int, int] | None] = {}
        """Identity of each file when it was opened."""
        self.folder = None if run_dir is None else Path(run_dir)
        self._identity: tuple[int, int] | None = None
        if self.folder is not None:
            for name in (METRICS, SAMPLES, TOKENS):
                self._open(name)
            self._identity = _identity(self.folder)
        for logger in loggers:
            with self._counted(logger):
                logger.start(self.folder, config, step=int(before[-1]["steps"]) if before else 0)
                self._loggers.append(logger)

    def _open(self, name: str) -> None:
        """Open a file to append to, with the lines of the iterations so far."""
        assert self.folder is not None
        path = self.folder / name
        lines = [json.dumps(row) for row in self._before] if name == METRICS else _kept(path, len(self._before))
        with replacing(path) as new:  # so that the old file is never lost
            new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._files[name] = path.open("a", encoding="utf-8")
        self._opened[name] = _identity(self._files[name].fileno())

    def __enter__(self) -> Self:
        return self

    def lost_folder(self) -> str | None:
        """Return where the folder is now, or that it is nowhere; None while it is in its place."""
        if self.folder is None or _identity(self.folder) == self._identity:
            return None
        with suppress(OSError):
            now = Path(os.readlink(f"/proc/self/fd/{self._files[METRICS].fileno()}"))  # of Linux
            if now.exists():
                return f"it is now {now.parent}"
        return "it does not exist any more"

    def write_again(self) -> None:
        """Make the folder in its place again, with the metrics of all iterations so far."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self._files:
            self._files[name].close()
            self._open(name)
        self._identity = _identity(self.folder)

    def write(self, values: Values, *, step: int, iteration: int) -> None:
        """Log values everywhere; rows of tables that have no ``steps`` or ``iteration`` get these."""
        for name, file in self._files.items():
            self._check_open(name, file)
        if self._files:
            self._replace_lost_files()
            for name, table in values.items():
                if isinstance(table, list):
                    file = self._files[TOKENS if name == "tokens" else SAMPLES]
                    rows = [{"steps": step, "iteration": iteration} | row for row in table]
                    file.writelines(json.dumps(row, ensure_ascii=False, default=_plain_number) + "\n" for row in rows)
            numbers = {name: x for name, x in values.items() if not isinstance(x, (list, np.ndarray))}
            self._files[METRICS].write(json.dumps(numbers, default=_plain_number) + "\n" if numbers else "")
            for file in self._files.values():
                file.flush()
        for logger in self._loggers if "tokens" not in values else ():
            with self._counted(logger):
                logger.log(values, step=step)

    def _check_open(self, name: str, file: IO[str]) -> None:
        """Raise an OSError if a file's descriptor is closed, or belongs to another file that was opened since."""
        if _identity(file.fileno()) != self._opened[name]:
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
                if name != METRICS and not Path(file.name).stat().st_size:
                    Path(file.name).unlink()  # a run of control has no texts

    def _replace_lost_files(self) -> None:
        """Write files again that were removed while the run has its folder."""
        if self.lost_folder() is not None:
            return
        for name, file in self._files.items():
            path = Path(file.name)
            if _identity(path) == _identity(file.fileno()):
                continue
            again = "it is written again from memory" if name == METRICS else "it begins anew"
            try:
                self._open(name)
            except FileNotFoundError:  # the folder is being removed, which is found at the end of the iteration
                return
            file.close()
            _log.warning("%s was removed or replaced while the training writes into it: %s", path, again)

    @contextmanager
    def _counted(self, logger: Logger) -> Iterator[None]:
        """Count an error, and log the first one of each logger."""
        try:
            yield
        except Exception as error:  # a foreign package may raise anything
            self.failures += 1
            if id(logger) not in self._warned:
                self._warned.add(id(logger))
                name = logger.name if isinstance(logger, _Tracker) else type(logger).__name__.strip("_")
                _log.warning("the logger %s failed, the run continues: %r", name, error)


def _plain_number(value: Any) -> Any:
    """Return a number of NumPy, or a tensor of one element, as a number of Python, for JSON."""
    if getattr(value, "size", None) == 1 or getattr(value, "numel", lambda: 0)() == 1:
        return value.item()
    raise TypeError(f"{value!r:.200} cannot be logged: expected a number, or an array or a list of rows by name")


def _identity(path: Path | int) -> tuple[int, int] | None:
    """Return what tells a file or folder from another one of the same name; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _kept(path: Path, iterations: int) -> list[str]:
    """Lines of a table's file from the first iterations; none if it is missing.

    The steps of a row do not tell: a rollout is recorded with those before it, which the last kept iteration ended at.
    """
    written = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in written.split("\n") if _iteration_of(line) <= iterations]


def _iteration_of(line: str) -> float:
    """Iteration of a row of a table; infinite in a line that was cut off."""
    try:
        return float(parse_json(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _columns(table: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Names and rows of a table whose rows may lack some columns; nested values become JSON."""
    names = list(dict.fromkeys(name for row in table for name in row))
    shown = lambda x: json.dumps(x, ensure_ascii=False) if isinstance(x, (dict, list)) else x  # noqa: E731
    return names, [[shown(row.get(name)) for name in names] for row in table]


def _markdown(table: Sequence[Mapping[str, Any]]) -> str:
    names, rows = _columns(table)
    cells = [
        [str(x).replace("|", "\\|").replace("\n", "<br>") for x in row] for row in (names, ["---"] * len(names), *rows)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
