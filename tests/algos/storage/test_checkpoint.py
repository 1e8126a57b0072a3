"""A checkpoint is on the disk, whole, before it has its name."""

import os
from pathlib import Path

import pytest
import torch

from algos.storage.checkpoint import write_checkpoint


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    """`os.fsync` of each file, of their folder, and after the renaming of the folder of checkpoints."""
    forced, fsync = [], os.fsync

    def noted(handle):
        forced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    folder = write_checkpoint(tmp_path, {"a": torch.ones(3)}, steps=10)
    draft = Path(forced[0]).parent
    assert draft.name.startswith(".draft-") and str(os.getpid()) in draft.name
    names = ["state.json", "state.safetensors", "manifest.json"]
    assert forced == [*[str(draft / name) for name in names], str(draft), str(folder.parent)]


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_what_the_disk_corrupts_becomes_no_checkpoint(name, tmp_path, monkeypatch):
    """A disk that loses a bit when it is asked to keep one: the checkpoint is read back before it has its name."""
    good, fsync = write_checkpoint(tmp_path, {"a": torch.ones(3)}, steps=10), os.fsync

    def spoils(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)
        if path.name == name:
            flip(path)

    monkeypatch.setattr(os, "fsync", spoils)
    with pytest.raises(ValueError, match=f"the checksum of {name} differs") as caught:
        write_checkpoint(tmp_path, {"a": torch.ones(3)}, steps=20)
    assert f"the last good one is {good}" in caught.value.__notes__[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good.name]
