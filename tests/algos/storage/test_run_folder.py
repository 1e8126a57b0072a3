"""The lock of a run's folder."""

import pytest

from algos.storage.run_folder import lock_run_folder


def test_an_unwritable_folder_hides_no_error(tmp_path):
    with pytest.raises(RuntimeError, match="the real one"), lock_run_folder(tmp_path):
        (tmp_path / ".holder.json").unlink()
        (tmp_path / ".holder.json").mkdir()  # which unlink refuses, as it does in a folder that is read-only
        raise RuntimeError("the real one")
    with lock_run_folder(tmp_path / "again"), lock_run_folder(tmp_path / "beside"):
        pass
