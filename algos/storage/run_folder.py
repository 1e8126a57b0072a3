"""Run folders: locked by one run at a time, and protected from being overwritten by another."""

import hmac
import json
import logging
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from textenv.embedded.cache import cache_root
from textenv.json_files import json_lines, read_bytes, read_json

logger = logging.getLogger(__name__)
PRODUCED = ("metrics.jsonl", "checkpoints", "config.json", "policy", "best")
"""Results of a run in its folder, which a new run must not replace."""
UNFINISHED = ".failed"
"""File of a run that did not end by itself, with `FAILED`, `STOPPED` or `BROKEN_OFF`."""
FAILED, STOPPED, BROKEN_OFF = "failed", "stopped", "stopped in mid-iteration"
RUN = "run.yaml"
"""File of options of ``algos train`` that repeat the run, and resume it."""
OBJECTS = "objects.safetensors"
"""File with the states of rewards and of other objects that the environment calls, beside a saved agent."""
COMPARISON = "comparison.json"
"""File of a run of `compare`: the settings that it was trained with and, once it has finished, the result."""
OTHERS = (
    UNFINISHED, RUN, OBJECTS, COMPARISON, ".made-here", "samples.jsonl", "tokens.jsonl", "tensorboard", "wandb",
    "wandb.id", "frontier.png",
    "unscored.jsonl", "violation.safetensors", "violation.json",
)  # fmt: skip
"""Other files that a run writes."""
AGENT = "agent"
"""Folder of the agent in that of a checkpoint."""
LOCK, HOLDER = ".lock", ".holder.json"
MARK = ".made-here"
"""File of a run that says, by a key that only this user has, that `RUN` was written by this user's own command."""
MOST_BYTES_OF_WORD = 100
"""Bytes that `UNFINISHED` may have."""


def holds_run(folder: str | Path) -> bool:
    """True if a folder holds results of a run."""
    return any(_size(Path(folder) / name) for name in PRODUCED)


def check_new(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise a FileExistsError, with advice, for a folder in which a new run would replace another one's files."""
    if holds_run(folder) and not overwrite:
        raise FileExistsError(
            f"{folder} holds a run already: resume it (--resume {folder}, in Python resume=...), give another "
            "folder, or remove what is there (--overwrite, in Python overwrite=True)"
        )


@contextmanager
def lock_run_folder(folder: str | Path | None, *, resumed: bool = False, overwrite: bool = False) -> Iterator[None]:
    """Lock a folder for a run, so that no other process writes into it.

    Args:
        folder: created if missing; None locks nothing.
        resumed: continue the run in the folder; otherwise the folder must hold none.
        overwrite: remove the files of the run in the folder; other files stay.

    Raises:
        BlockingIOError: if another process (named) holds the lock.
        FileExistsError: as `check_new`.
        OSError: if the folder cannot be written to.
    """
    if folder is None:
        yield
        return
    folder = Path(folder)
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"{folder} cannot be the folder of a run, give another one: {error}") from error
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(
            f"{folder} is in use by {_holder(folder)}: wait until it has ended, end it, or give another folder"
        ) from error
    try:
        if not resumed:
            check_new(folder, overwrite=overwrite)
            for name in (*PRODUCED, *OTHERS) if overwrite else ():
                remove(folder / name)
        for draft in [*folder.glob(".draft-*"), *folder.glob("checkpoints/.draft-*")]:  # left by killed processes
            remove(draft)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"process": os.getpid(), "host": platform.node(), "since": since}
        (folder / HOLDER).write_text(json.dumps(holder) + "\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # must not hide the error of a folder that has become read-only
            (folder / HOLDER).unlink(missing_ok=True)
            if created and [path.name for path in folder.iterdir()] == [LOCK]:  # nothing has begun
                remove(folder)
        with suppress(OSError):  # a reward may have closed the lock's descriptor, which releases it too
            lock.release()


def status(folder: Path) -> str:
    """State of a run: running, stopped (by a signal, or killed), failed, finished, or ended (without an agent)."""
    if (folder / HOLDER).exists():  # also left by a process that was killed
        try:
            with FileLock(folder / LOCK).acquire(timeout=0):
                return "stopped"
        except OSError:  # Timeout is one; so is the lock of another user
            return "running"
    if (folder / UNFINISHED).exists():
        try:
            word = read_bytes(folder / UNFINISHED, most=MOST_BYTES_OF_WORD)
        except (OSError, ValueError):  # not what this library writes
            return "failed"
        return "stopped" if word.startswith(b"stopped") else "failed"
    return "finished" if (folder / "config.json").exists() else "ended"


def mark_as_own(folder: Path) -> None:
    """Mark the options of a run, in `RUN`, as written by this user: `is_own` is then true until the file changes.

    Without a place for the key (a read-only home) nothing is marked.
    """
    with suppress(OSError):
        mark = _mark_of(folder / RUN)
        (folder / MARK).write_text(mark + "\n", encoding="ascii")


def is_own(folder: Path) -> bool:
    """Return True if the options of a run were written by a command of this user, and not changed since."""
    try:
        mark = read_bytes(folder / MARK, most=MOST_BYTES_OF_WORD).decode("ascii").strip()
        return hmac.compare_digest(mark, _mark_of(folder / RUN))
    except (OSError, ValueError):
        return False


def _mark_of(path: Path) -> str:
    """Keyed hash of a file, 64 hexadecimal digits; the key is made once, in the cache, readable by this user alone."""
    key = cache_root() / "key-of-runs"
    if not key.is_file():
        key.parent.mkdir(parents=True, exist_ok=True)
        draft = key.with_name(f"{key.name}-{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(32))
        draft.replace(key)
    return hmac.new(key.read_bytes(), read_bytes(path), "sha256").hexdigest()


def is_in_checkpoint(agent: Path) -> bool:
    """True for the folder of an agent that a checkpoint holds."""
    return agent.name == AGENT and agent.parent.parent.name == "checkpoints"


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(Path(run_dir).glob("checkpoints/step-*"))


def newest_agent(folder: str | Path) -> Path:
    """Return the folder of a run's newest agent: its own or, while it trains, that of its newest checkpoint.

    Also of a run that was killed before it saved an agent, and of a checkpoint's own folder.
    """
    folder = Path(folder)
    if (folder / AGENT / "config.json").is_file():
        return folder / AGENT
    saved = [path / AGENT for path in checkpoints(folder) if (path / AGENT / "config.json").is_file()]
    if saved and (not (folder / "config.json").is_file() or status(folder) == "running"):
        return saved[-1]
    return folder


def run_folder_of(folder: str | Path) -> Path:
    """Absolute path of the run folder that contains a checkpoint; a run folder is its own."""
    folder = Path(folder).resolve()
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def checkpoint_steps(checkpoint: Path) -> int:
    """Return the steps in the name of a checkpoint; 0 if it has another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def has_nothing_to_resume(resume: str | Path) -> bool:
    """True if a run's own folder has no checkpoint yet, so that training starts from the beginning; the log says so.

    Raises:
        FileExistsError: if it holds an agent whose training ended without a checkpoint, unless it failed in its first
            iteration, after which one would have been written.
    """
    folder = Path(resume).resolve()
    if folder != run_folder_of(resume) or checkpoints(folder):
        return False
    left = [name for name in ("config.json", "policy") if (folder / name).exists()]
    steps = agent_steps(folder)
    ended_early = was_broken_off(folder) and len(json_lines(folder / "metrics.jsonl")) <= 1
    if left and steps != 0 and not ended_early:
        trained = "a trained agent" if steps is None else f"an agent trained for {steps} steps"
        raise FileExistsError(
            f"{folder} holds {trained} ({', '.join(left)}) but no checkpoint to resume: a new run would replace it. "
            "To train this agent on, load its policy (algos.load) and give another folder; to begin again, remove "
            "what is there (--overwrite, in Python overwrite=True)"
        )
    if holds_run(folder):
        logger.warning("%s has no checkpoint yet: its training starts again, from step 0", folder)
    return True


def agent_steps(folder: Path) -> int | None:
    """Return the steps for which the agent in a folder was trained, 0 without one; None if they are not known."""
    if not (folder / "config.json").is_file():
        return None if (folder / "policy").exists() else 0
    try:
        steps = read_json(folder / "config.json", what="the description of an agent", kind=dict).get("steps")
        if steps is None and not (folder / HOLDER).exists():  # written before version 0.10, and not by a killed run
            rows = json_lines(folder / "metrics.jsonl")
            steps = rows[-1]["steps"] if rows else 0
        return None if steps is None else int(steps)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def was_broken_off(folder: Path) -> bool:
    """True if the agent in a folder is from the middle of an iteration, whose training goes on from a checkpoint."""
    path = folder / UNFINISHED
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") != STOPPED


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; what is written there replaces ``path``, unless an error is raised."""
    new = path.with_name(f".draft-{os.getpid()}-{path.name}")
    remove(new)
    try:
        yield new
        if path.is_dir():
            remove(path)
        new.replace(path)
    finally:
        remove(new)


def force_to_disk(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _size(path: Path) -> int:
    """Bytes of a file, or number of visible entries of a folder; 0 if it is missing."""
    if path.is_dir():
        return sum(not entry.name.startswith(".") for entry in path.iterdir())
    return path.stat().st_size if path.is_file() else 0


def _holder(folder: Path) -> str:
    try:
        found = read_json(folder / HOLDER, what="the process that holds the folder")
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # incomplete, or written by an older version
        return "another process"
