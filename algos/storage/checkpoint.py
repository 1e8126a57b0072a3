"""Checkpoints of a run: complete or absent, verified by checksums; the last good one is kept."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from algos.storage.run_files import AGENT, CHECKPOINTS, MANIFEST, STATE, TENSORS
from algos.storage.run_folder import (
    agent_steps,
    checkpoint_steps,
    checkpoints,
    force_to_disk,
    remove,
    replacing,
    run_folder_of,
    was_broken_off,
)
from algos.storage.serialization import from_json, to_json, write_tensors
from textenv.cache import sha256
from textenv.json_files import read_json

CHECKPOINT_FORMAT = 3
"""Format version of a checkpoint."""
NUM_KEPT = 2
"""Number of checkpoints to keep: the newest, and the previous one in case the newest is damaged."""


def write_checkpoint(
    run_dir: str | Path, state: Mapping[str, object], *, steps: int, save: Callable[[Path], object] | None = None
) -> Path:
    """Write a checkpoint beside the existing ones, verify it, and only then remove those that it replaces.

    It is written under a temporary name, flushed to disk, read back and renamed: a killed process leaves the others
    intact. Checkpoints of more steps are removed too, because they are from before the run was resumed.

    Args:
        run_dir: the run's folder; the checkpoint goes into ``checkpoints/``.
        state: values that `algos.storage.serialization.to_json` accepts.
        steps: training steps so far.
        save: writes the agent into a folder, for ``algos.load``; None writes none.

    Returns:
        Folder of the checkpoint.

    Raises:
        OSError: if it cannot be written (a full disk, a read-only folder).
        ValueError: if the files read back differ from those written.

    Both messages name the last good checkpoint.
    """
    from safetensors import SafetensorError

    home = Path(run_dir) / CHECKPOINTS
    earlier = checkpoints(run_dir)
    folder = home / f"step-{steps:012d}"
    try:
        # A draft that is complete, on the disk and intact; the folder may exist, from before the run was resumed
        with replacing(folder) as draft:
            draft.mkdir(parents=True)
            _write_files(draft, state, steps=steps)
            if save is not None:
                save(draft / AGENT)
            for path in (draft / STATE, draft / TENSORS, draft / MANIFEST, draft):
                force_to_disk(path)
            _verify(draft)
        force_to_disk(home)
    except (OSError, ValueError, SafetensorError) as failure:
        advice = "there is no earlier one"
        if earlier:
            advice = f"the last good one is {earlier[-1]}"
        note = f"the checkpoint after {steps} steps could not be written to {home}; {advice}"
        if isinstance(failure, SafetensorError):
            error = OSError(str(failure))
            error.add_note(note)
            raise error from failure
        failure.add_note(note)
        raise failure from None
    _remove_replaced(run_dir, folder)
    return folder


def _write_files(folder: Path, state: Mapping[str, object], *, steps: int) -> None:
    """Write state, tensors and manifest of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    (folder / STATE).write_text(json.dumps(to_json(state, tensors)), encoding="utf-8")
    write_tensors(folder / TENSORS, tensors)
    checksums = {name: sha256(folder / name) for name in (STATE, TENSORS)}
    manifest = {"format": CHECKPOINT_FORMAT, "steps": steps, "files": checksums}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _remove_replaced(run_dir: str | Path, written: Path) -> None:
    """Keep the checkpoint that was just written and the one before it (`NUM_KEPT`); remove all others.

    Checkpoints of more steps are among those removed: they are from before the run was resumed.
    """
    all_checkpoints = checkpoints(run_dir)
    end = all_checkpoints.index(written) + 1
    start = max(end - NUM_KEPT, 0)
    for replaced in all_checkpoints[:start] + all_checkpoints[end:]:
        remove(replaced)


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Read a checkpoint from its own folder, or the newest one from a run's folder.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is damaged, or of another format; names the previous checkpoint.
    """
    from safetensors.torch import load_file

    # Which one
    folder = Path(folder)
    if folder.parent.name != CHECKPOINTS:
        all_checkpoints = checkpoints(folder)
        if not all_checkpoints:
            raise FileNotFoundError(
                f"{folder} has no checkpoint: give the folder of a run that was written with checkpoints "
                "(algos train --run-dir, or agent.learn(run_dir=..., checkpoint_every=...))"
            )
        folder = all_checkpoints[-1]
    elif not folder.is_dir():
        names = ", ".join(path.name for path in checkpoints(folder.parent.parent))
        raise FileNotFoundError(f"there is no checkpoint {folder}, this run has: {names or 'none'}")

    # Is it intact?
    try:
        _verify(folder)
    except ValueError as error:
        earlier = [path for path in checkpoints(folder.parent.parent) if path.name < folder.name]
        advice = "there is no earlier one"
        if earlier:
            advice = f"resume from the one before it: --resume {earlier[-1]}"
        raise ValueError(f"{error}; {advice}") from error

    # Its state
    try:
        saved = read_json(folder / STATE, what="the state of a run")
        state = from_json(saved, load_file(folder / TENSORS))
    except Exception as error:  # complete, but not written by `write_checkpoint`: anything may fail
        raise ValueError(f"the checkpoint {folder} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint {folder} holds a {type(state).__name__}, expected the state of a run")
    return state


def trained_longer_than(resume: str | Path) -> str | None:
    """Describe the agent or checkpoint in a run's folder that was trained for longer than the checkpoint to resume.

    Args:
        resume: folder of the run, or of one of its checkpoints.

    Returns:
        Words for an error message; None if nothing was trained for longer.
    """
    # Steps of the checkpoint to resume
    folder = run_folder_of(resume)
    all_checkpoints = checkpoints(folder)
    if not all_checkpoints:
        return None
    resumed = Path(resume).resolve()
    if resumed == folder:
        resumed = all_checkpoints[-1]
    steps = checkpoint_steps(resumed)

    # An agent, or another checkpoint
    trained_steps = agent_steps(folder)
    if trained_steps is not None and trained_steps > steps and not was_broken_off(folder):
        return f"an agent that was trained for {trained_steps} steps"
    for checkpoint in all_checkpoints[::-1]:
        if checkpoint_steps(checkpoint) > steps and _is_intact(checkpoint):
            return f"the checkpoint {checkpoint.name}"
    return None


def _is_intact(folder: Path) -> bool:
    """Return True if `_verify` finds nothing wrong with a checkpoint."""
    try:
        _verify(folder)
    except ValueError:
        return False
    return True


def _verify(folder: Path) -> None:
    """Raise a ValueError unless a checkpoint is complete and of this format."""
    try:
        manifest = read_json(folder / MANIFEST, what="format and checksums", kind=dict)
        version = manifest["format"]
        checksums = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read ({error})") from error
    if version != CHECKPOINT_FORMAT:
        raise ValueError(
            f"the checkpoint {folder} has format {version}, but this version of algos reads {CHECKPOINT_FORMAT}: "
            "resume with the version that wrote it"
        )
    for name in (STATE, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"the checkpoint {folder} is damaged: {name} is missing")
        if checksums.get(name) != sha256(folder / name):
            raise ValueError(f"the checkpoint {folder} is damaged: the checksum of {name} differs")
