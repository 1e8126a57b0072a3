"""Run folders: a lock, protection from being overwritten, and the state of their run."""

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

from algos.storage.run_files import (
    AGENT,
    BESIDE_RESULTS,
    CHECKPOINTS,
    CONFIG,
    HOLDER,
    LOCK,
    MARK,
    METRICS,
    POLICY,
    RESULTS,
    RUN,
    UNFINISHED,
)
from textenv.cache import cache_root
from textenv.json_files import json_lines, read_bytes, read_json

logger = logging.getLogger(__name__)
FAILED = "failed"
"""Content of `UNFINISHED` after an error."""
STOPPED = "stopped"
"""Content of `UNFINISHED` after a signal, if the newest checkpoint is as far as the agent."""
BROKEN_OFF = "stopped in mid-iteration"
"""Content of `UNFINISHED` after a signal that ended an iteration at once."""
MOST_BYTES_OF_WORD = 100
"""Maximum size of `UNFINISHED` and `MARK`, in bytes."""


def holds_run(folder: str | Path) -> bool:
    """Return True if a folder holds results of a run."""
    return any(_size(Path(folder) / name) for name in RESULTS)


def refuse_tilde(name: str, path: str | os.PathLike[str] | None) -> None:
    """Raise a ValueError on a path that begins with ``~``, or ``~user``, which would become a folder of this name."""
    if path is not None and os.path.expanduser(path) != os.fspath(path):
        raise ValueError(
            f"{name} is {os.fspath(path)!r}, but only a shell reads ~ as the home folder: give the whole path, "
            f"pathlib.Path({os.fspath(path)!r}).expanduser()"
        )


def check_new(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise a FileExistsError, with advice, if a new run in this folder would replace the files of another one."""
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
        BlockingIOError: if another process holds the lock; names the process.
        FileExistsError: as `check_new`.
        OSError: if the folder cannot be written to.
    """
    if folder is None:
        yield
        return
    # Folder
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"{folder} cannot be the folder of a run, give another one: {error}") from error

    # Lock
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
            if overwrite:
                _remove_run(folder)
        _remove_drafts(folder)
        _write_holder(folder)
        yield
    finally:
        with suppress(OSError):  # must not hide the error of a folder that has become read-only
            (folder / HOLDER).unlink(missing_ok=True)
            names = [path.name for path in folder.iterdir()]
            if is_new and names == [LOCK]:  # nothing has begun
                remove(folder)
        with suppress(OSError):  # a reward may have closed the lock's descriptor, which releases it too
            lock.release()


def _remove_run(folder: Path) -> None:
    """Remove all files of the run in a folder; files of other origin stay."""
    for name in (*RESULTS, *BESIDE_RESULTS):
        remove(folder / name)


def _remove_drafts(folder: Path) -> None:
    """Remove drafts (see `replacing`) that killed processes left behind."""
    for draft in [*folder.glob(".draft-*"), *(folder / CHECKPOINTS).glob(".draft-*")]:
        remove(draft)


def _write_holder(folder: Path) -> None:
    """Write which process holds the lock, for messages of other processes."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"process": os.getpid(), "host": platform.node(), "since": since}
    (folder / HOLDER).write_text(json.dumps(holder) + "\n", encoding="utf-8")


def _holder(folder: Path) -> str:
    """Return which process holds the lock of a folder, in words."""
    try:
        holder = read_json(folder / HOLDER, what="the process that holds the folder")
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # incomplete, or written by an older version
        return "another process"


def status(folder: Path) -> str:
    """Return the state of a run: running, stopped (by a signal, or killed), failed, finished, or ended (no agent)."""
    if (folder / HOLDER).exists():  # also left by a process that was killed
        try:
            with FileLock(folder / LOCK).acquire(timeout=0):
                return "stopped"
        except OSError:  # a Timeout is an OSError, as is the error about a lock of another user
            return "running"
    if (folder / UNFINISHED).exists():
        try:
            word = read_bytes(folder / UNFINISHED, most=MOST_BYTES_OF_WORD)
        except (OSError, ValueError):  # not what this library writes
            return "failed"
        return "stopped" if word.startswith(STOPPED.encode()) else "failed"
    return "finished" if (folder / CONFIG).exists() else "ended"


def mark_as_own(folder: Path) -> None:
    """Mark the options of a run as written by this user: `is_own` is then True until `RUN` changes.

    Where the key cannot be kept (a read-only home), nothing is marked.
    """
    with suppress(OSError):
        mark = _mark_of(folder / RUN)
        (folder / MARK).write_text(mark + "\n", encoding="ascii")


def is_own(folder: Path) -> bool:
    """Return True if a command of this user wrote the options of a run, and they have not changed since."""
    try:
        mark = read_bytes(folder / MARK, most=MOST_BYTES_OF_WORD).decode("ascii").strip()
        return hmac.compare_digest(mark, _mark_of(folder / RUN))
    except (OSError, ValueError):
        return False


def _mark_of(path: Path) -> str:
    """Return a keyed hash of a file, 64 hexadecimal digits.

    The key is made once, in the cache; only this user can read it.
    """
    key = cache_root() / "key-of-runs"
    if not key.is_file():
        key.parent.mkdir(parents=True, exist_ok=True)
        draft = key.with_name(f"{key.name}-{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(32))
        draft.replace(key)
    return hmac.new(key.read_bytes(), read_bytes(path), "sha256").hexdigest()


def is_in_checkpoint(agent: Path) -> bool:
    """Return True if the folder of an agent is inside a checkpoint."""
    return agent.name == AGENT and agent.parent.parent.name == CHECKPOINTS


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((Path(run_dir) / CHECKPOINTS).glob("step-*"))


def newest_agent(folder: str | Path) -> Path:
    """Return the folder of the newest agent in a run or a checkpoint.

    It is the run's own folder. While the run trains, or if it was killed before it saved an agent, it is the folder of
    the agent in the newest checkpoint.
    """
    folder = Path(folder)

    # A checkpoint
    if (folder / AGENT / CONFIG).is_file():
        return folder / AGENT

    # A run
    agents = [path / AGENT for path in checkpoints(folder)]
    complete = [agent for agent in agents if (agent / CONFIG).is_file()]
    if complete and (not (folder / CONFIG).is_file() or status(folder) == "running"):
        return complete[-1]
    return folder


def run_folder_of(folder: str | Path) -> Path:
    """Return the absolute path of the run folder that contains a checkpoint; a run folder is returned itself."""
    folder = Path(folder).resolve()
    if folder.parent.name == CHECKPOINTS:
        return folder.parent.parent
    return folder


def checkpoint_steps(checkpoint: Path) -> int:
    """Return the steps in the name of a checkpoint; 0 if it has another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def has_nothing_to_resume(resume: str | Path) -> bool:
    """Return True if a run folder has no checkpoint yet, so that training starts from the beginning; the log says so.

    Raises:
        FileExistsError: if it holds an agent whose training ended without a checkpoint. An agent that was saved
            because the first iteration failed or was broken off does not count. It has completed no iteration, because
            the first one ends with a checkpoint.
    """
    folder = Path(resume).resolve()
    if folder != run_folder_of(resume) or checkpoints(folder):
        return False

    # An agent that a new run would replace
    agent_files = [name for name in (CONFIG, POLICY) if (folder / name).exists()]
    steps = agent_steps(folder)
    ended_early = was_broken_off(folder) and len(json_lines(folder / METRICS)) <= 1
    if agent_files and steps != 0 and not ended_early:
        agent = "a trained agent"
        if steps is not None:
            agent = f"an agent trained for {steps} steps"
        raise FileExistsError(
            f"{folder} holds {agent} ({', '.join(agent_files)}) but no checkpoint to resume: a new run would replace "
            "it. To train this agent on, load its policy (algos.load) and give another folder; to begin again, remove "
            "what is there (--overwrite, in Python overwrite=True)"
        )
    if holds_run(folder):
        logger.warning("%s has no checkpoint yet: its training starts again, from step 0", folder)
    return True


def agent_steps(folder: Path) -> int | None:
    """Return the steps for which the agent in a folder was trained; 0 without an agent; None if nothing says it."""
    path = folder / CONFIG
    if not path.is_file():
        return None if (folder / POLICY).exists() else 0
    try:
        steps = read_json(path, what="the description of an agent", kind=dict).get("steps")
        if steps is None and not (folder / HOLDER).exists():  # written before version 0.10, and not by a killed run
            steps = 0
            rows = json_lines(folder / METRICS)
            if rows:
                steps = rows[-1]["steps"]
        if steps is None:
            return None
        return int(steps)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def warn_of_longer_run(folder: str | Path, *, steps: int) -> None:
    """Log a warning if a folder holds a run whose agent was trained for longer than ``steps``, and is now replaced.

    A run that is going on, or was killed, is passed over.
    """
    folder = Path(folder)
    if not (folder / METRICS).is_file() or (folder / HOLDER).is_file():  # the training itself saves its agents
        return
    trained_steps = agent_steps(folder)
    if trained_steps is not None and trained_steps > steps:
        logger.warning(
            "%s holds a run of %s steps, whose agent is replaced by one that was last trained for %s steps; the run's "
            "own is in its newest checkpoint",
            folder,
            f"{trained_steps:,}",
            f"{steps:,}",
        )


def was_broken_off(folder: Path) -> bool:
    """Return True if a run failed or was stopped in mid-iteration: it goes on from a checkpoint, not from its agent."""
    path = folder / UNFINISHED
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") != STOPPED


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file or folder written there replaces ``path``, unless an error is raised.

    Raises:
        IsADirectoryError: if a file would replace a folder.
    """
    draft = path.with_name(f".draft-{os.getpid()}-{path.name}")
    remove(draft)
    try:
        yield draft
        if path.is_dir():
            if not draft.is_dir():
                raise IsADirectoryError(f"{path} is a folder, and a file would replace it: name a file in it")
            remove(path)
        draft.replace(path)
    finally:
        remove(draft)


def check_new_file(name: str, path: str | Path) -> None:
    """Raise an OSError if no file can be written at a path, before the work for it begins.

    Args:
        name: name of the argument or option, for the message.
        path: the path.

    Raises:
        IsADirectoryError: if the path is that of a folder.
        FileNotFoundError: if the folder of the file does not exist.
        PermissionError: if there is no such file yet, and its folder is read-only.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{name} is {path}, which is a folder: name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name} is {path}, but the folder {path.parent} does not exist: make it first")
    if not path.is_file() and not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{name} is {path}, but {path.parent} is read-only: name a file in a writable folder")


def force_to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
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
    """Return the bytes of a file, or the number of visible entries of a folder; 0 if it is missing."""
    if path.is_dir():
        return sum(not entry.name.startswith(".") for entry in path.iterdir())
    return path.stat().st_size if path.is_file() else 0
