"""The folder of a run: held by one run at a time, and never emptied by a second start."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

PRODUCED = ("metrics.jsonl", "checkpoints", "config.json", "policy")
"""What a run leaves in its folder that would be missed."""
FAILED = ".failed"
"""Says that an error ended the run before its first checkpoint: it may be started again in its folder."""
OTHERS = (
    FAILED,
    "arguments.json",
    "tensorboard",
    "frontier.png",
    "unscored.jsonl",
    "violation.safetensors",
    "violation.json",
)
"""What else a run writes."""
LOCK, HOLDER = ".lock", ".holder.json"


def holds_run(folder: str | Path) -> bool:
    """Whether a run has left anything in a folder that would be missed."""
    return any(_size(Path(folder) / name) for name in PRODUCED)


def check_new(folder: str | Path, *, overwrite: bool = False) -> None:
    """Refuse a folder in which a run would replace another one's files.

    Raises:
        FileExistsError: says what to do.
    """
    if holds_run(folder) and not overwrite:
        raise FileExistsError(
            f"{folder} holds a run already: go on with it (--resume {folder}, in Python resume=...), give another "
            "folder, or remove what is there (--overwrite, in Python overwrite=True)"
        )


@contextmanager
def hold(folder: str | Path | None, *, goes_on: bool = False, overwrite: bool = False) -> Iterator[None]:
    """Hold a folder for a run, so that no other one writes into it meanwhile.

    Args:
        folder: is made if it is not there; None holds nothing.
        goes_on: with the run that is there; else it must be a new one.
        overwrite: remove the files of the run that is there; whatever else is in the folder stays.

    Raises:
        BlockingIOError: if another process holds it; says which.
        FileExistsError: as `check_new`.
        OSError: if it cannot be made or written to.
    """
    if folder is None:
        yield
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(
            f"{folder} is in use by {_holder(folder)}: wait until it has ended, end it, or give another folder"
        ) from error
    try:
        if not goes_on:
            check_new(folder, overwrite=overwrite)
            for name in (*PRODUCED, *OTHERS) if overwrite else ():
                remove(folder / name)
        for draft in [*folder.glob(".draft-*"), *folder.glob("checkpoints/.draft-*")]:  # of processes that were killed
            remove(draft)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"process": os.getpid(), "host": platform.node(), "since": since}
        (folder / HOLDER).write_text(json.dumps(holder) + "\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # nor may it hide the error of a folder that has become read-only
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def checkpoints(run_dir: str | Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted(Path(run_dir).glob("checkpoints/step-*"))


def run_of(folder: str | Path) -> Path:
    """Absolute folder of the run that a checkpoint belongs to; a run's folder is its own."""
    folder = Path(folder).resolve()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def starts_again(resume: str | Path) -> bool:
    """Whether a run's own folder has nothing to go on from because its training has not come that far.

    Raises:
        FileExistsError: if it holds an agent whose training has ended without a checkpoint.
    """
    folder = Path(resume).resolve()
    if folder != run_of(resume) or checkpoints(folder):
        return False
    left = [name for name in ("config.json", "policy") if (folder / name).exists()]
    if left and not (folder / FAILED).exists():
        raise FileExistsError(
            f"{folder} holds a trained agent ({', '.join(left)}) and no checkpoint to go on from: starting again would "
            "replace it. Give another folder, or remove what is there (--overwrite, in Python overwrite=True)"
        )
    return True


def draft(path: Path) -> Path:
    """Where to write what is to be renamed to a path once it is whole."""
    return path.with_name(f".draft-{os.getpid()}-{path.name}")


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _size(path: Path) -> int:
    """Bytes of a file, or entries of a folder; 0 if it is not there."""
    if path.is_dir():
        return sum(not entry.name.startswith(".") for entry in path.iterdir())
    return path.stat().st_size if path.is_file() else 0


def _holder(folder: Path) -> str:
    try:
        found = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is just being written, or by an older version
        return "another process"
