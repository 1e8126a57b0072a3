"""Checkpoints of a run: complete or absent, verified by checksums, with the last good one kept."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from algos.storage.run_folder import (
    AGENT,
    agent_steps,
    checkpoint_steps,
    checkpoints,
    force_to_disk,
    remove,
    replacing,
    run_folder_of,
    was_broken_off,
)
from algos.storage.serialization import from_json, to_json
from textenv.embedded.cache import sha256
from textenv.json_files import read_json

CHECKPOINT_FORMAT = 3
"""Format version of a checkpoint."""
KEPT = 2
"""Checkpoints to keep: the newest, and the previous one in case the newest is damaged."""
STATE, TENSORS, MANIFEST = "state.json", "state.safetensors", "manifest.json"


def write_checkpoint(
    run_dir: str | Path, state: Mapping[str, Any], *, steps: int, save: Callable[[Path], Any] | None = None
) -> Path:
    """Write a checkpoint beside the existing ones, verify it, and only then remove those that it replaces.

    It is written under a temporary name, flushed to disk, read back and renamed: a killed process leaves the others
    intact. Checkpoints of more steps are removed too, since the run was resumed from an earlier one.

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
    from safetensors.torch import save_file

    home = Path(run_dir) / "checkpoints"
    before = checkpoints(run_dir)
    folder = home / f"step-{steps:012d}"
    try:
        with replacing(folder) as new:  # it may exist with this number of steps, from before the run was resumed
            new.mkdir(parents=True)
            tensors: dict[str, Any] = {}
            (new / STATE).write_text(json.dumps(to_json(state, tensors)), encoding="utf-8")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / TENSORS)
            files = {name: sha256(new / name) for name in (STATE, TENSORS)}
            manifest = {"format": CHECKPOINT_FORMAT, "steps": steps, "files": files}
            (new / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            if save is not None:
                save(new / AGENT)
            for path in (new / STATE, new / TENSORS, new / MANIFEST, new):
                force_to_disk(path)
            _verify(new)
        force_to_disk(home)
    except (OSError, ValueError, SafetensorError) as failure:
        error = OSError(str(failure)) if isinstance(failure, SafetensorError) else failure
        kept = f"the last good one is {before[-1]}" if before else "there is no earlier one"
        error.add_note(f"the checkpoint after {steps} steps could not be written to {home}; {kept}")
        raise error from (failure if error is not failure else None)
    found = checkpoints(run_dir)
    here = found.index(folder) + 1
    for other in found[: max(here - KEPT, 0)] + found[here:]:
        remove(other)
    return folder


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Read a checkpoint from its own folder, or the newest one from a run's folder.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is damaged, or of another format; names the previous checkpoint.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    if folder.parent.name != "checkpoints":
        found = checkpoints(folder)
        if not found:
            raise FileNotFoundError(
                f"{folder} has no checkpoint: give the folder of a run that was written with checkpoints "
                "(algos train --run-dir, or agent.learn(run_dir=..., checkpoint_every=...))"
            )
        folder = found[-1]
    elif not folder.is_dir():
        there = ", ".join(path.name for path in checkpoints(folder.parent.parent)) or "none"
        raise FileNotFoundError(f"there is no checkpoint {folder}, this run has: {there}")
    try:
        _verify(folder)
    except ValueError as error:
        older = [path for path in checkpoints(folder.parent.parent) if path.name < folder.name]
        advice = f"resume from the one before it: --resume {older[-1]}" if older else "there is no earlier one"
        raise ValueError(f"{error}; {advice}") from error
    try:
        state = from_json(read_json(folder / STATE, what="the state of a run"), load_file(folder / TENSORS))
    except Exception as error:  # complete, but not written by `write_checkpoint`: anything may fail
        raise ValueError(f"the checkpoint {folder} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint {folder} holds a {type(state).__name__}, expected the state of a run")
    return state


def goes_back(resume: str | Path) -> str | None:
    """Return what a run's folder holds that was trained for longer than the checkpoint to resume; None if nothing.

    Args:
        resume: folder of the run, or of one of its checkpoints.
    """
    folder = run_folder_of(resume)
    present = checkpoints(folder)
    if not present:
        return None
    chosen = Path(resume).resolve()
    if chosen == folder:
        chosen = present[-1]
    steps = checkpoint_steps(chosen)
    trained = agent_steps(folder)
    if trained is not None and trained > steps and not was_broken_off(folder):
        return f"an agent that was trained for {trained} steps"
    for checkpoint in present[::-1]:
        if checkpoint_steps(checkpoint) > steps and _is_intact(checkpoint):
            return f"the checkpoint {checkpoint.name}"
    return None


def _is_intact(folder: Path) -> bool:
    try:
        _verify(folder)
    except ValueError:
        return False
    return True


def _verify(folder: Path) -> None:
    """Raise a ValueError unless a checkpoint is complete and of this format."""
    try:
        manifest = read_json(folder / MANIFEST, what="format and checksums", kind=dict)
        version, files = manifest["format"], dict(manifest["files"])
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
        if files.get(name) != sha256(folder / name):
            raise ValueError(f"the checkpoint {folder} is damaged: the checksum of {name} differs")
