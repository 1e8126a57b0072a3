"""Loggers of a run: JSON lines always; TensorBoard, Weights & Biases, trackio and your own as you choose."""

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self, runtime_checkable

import numpy as np

from algos.training.run_folder import replacing
from textenv.json_files import parse_json
from textenv.optional import package

METRICS, SAMPLES, TOKENS = "metrics.jsonl", "samples.jsonl", "tokens.jsonl"
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
    for the page of `algos.comparison.page`: its rows are in ``tokens.jsonl``, and no other logger has them.

    Args:
        run_dir: existing folder for the two files; None writes none.
        loggers: further loggers.
        config: as in `Logger.start`.
        before: metrics of the iterations before a resume; later ones in the files are removed.
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
        self._loggers: list[Logger] = []
        self._warned: set[int] = set()
        self._files: dict[str, IO[str]] = {}
        self._opened: dict[str, os.stat_result] = {}
        folder, step = None if run_dir is None else Path(run_dir), int(before[-1]["steps"]) if before else 0
        if folder is not None:
            kept = {name: _kept(folder / name, step if before else -1) for name in (SAMPLES, TOKENS)}
            for name, lines in ({METRICS: map(json.dumps, before)} | kept).items():
                with replacing(folder / name) as new:  # so that the old file is never lost
                    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
                self._files[name] = (folder / name).open("a", encoding="utf-8")
                self._opened[name] = os.fstat(self._files[name].fileno())
        for logger in loggers:
            with self._counted(logger):
                logger.start(folder, config, step=step)
                self._loggers.append(logger)

    def __enter__(self) -> Self:
        return self

    def write(self, values: Values, *, step: int) -> None:
        """Log values everywhere."""
        for name, file in self._files.items():
            self._check_open(name, file)
        if self._files:
            for name, table in values.items():
                if isinstance(table, list):
                    file = self._files[TOKENS if name == "tokens" else SAMPLES]
                    file.writelines(json.dumps(row, ensure_ascii=False, default=_plain_number) + "\n" for row in table)
            numbers = {name: x for name, x in values.items() if not isinstance(x, (list, np.ndarray))}
            self._files[METRICS].write(json.dumps(numbers, default=_plain_number) + "\n" if numbers else "")
            for file in self._files.values():
                file.flush()
        for logger in self._loggers if "tokens" not in values else ():
            with self._counted(logger):
                logger.log(values, step=step)

    def _check_open(self, name: str, file: IO[str]) -> None:
        """Raise an OSError if a file's descriptor is closed, or belongs to another file that was opened since."""
        try:
            opened = os.fstat(file.fileno())
        except OSError:
            opened = None
        if opened is None or not os.path.samestat(opened, self._opened[name]):
            raise OSError(
                f"{name} was closed by other code in this process: does a reward, an environment or a callback close "
                "file descriptors that it has not opened (os.close, os.closerange)?"
            )

    def __exit__(self, *error: object) -> None:
        for logger in self._loggers:
            with self._counted(logger):
                logger.close()
        for name, file in self._files.items():
            try:
                file.close()
            except OSError:
                if error[0] is None:
                    raise
                continue  # the first error says more
            if name != METRICS and not Path(file.name).stat().st_size:
                Path(file.name).unlink()  # a run of control has no texts

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


def _kept(path: Path, step: float) -> list[str]:
    """Lines of a table's file up to a step; none if it is missing."""
    written = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in written.split("\n") if _step_of(line) <= step]


def _step_of(line: str) -> float:
    """Steps in a line of samples; infinite in a line that was cut off."""
    try:
        return float(parse_json(line)["steps"])
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
