"""The lock of a run's folder, and files that are written into a folder."""

import pytest

from algos.storage.run_folder import check_new_file, lock_run_folder, replacing


def test_an_unwritable_folder_hides_no_error(tmp_path):
    with pytest.raises(RuntimeError, match="the real one"), lock_run_folder(tmp_path):
        (tmp_path / ".holder.json").unlink()
        (tmp_path / ".holder.json").mkdir()  # which unlink refuses, as it does in a folder that is read-only
        raise RuntimeError("the real one")
    with lock_run_folder(tmp_path / "again"), lock_run_folder(tmp_path / "beside"):
        pass


def test_a_file_does_not_replace_a_folder(tmp_path):
    """``algos report --out runs`` removed all runs, without a word."""
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(IsADirectoryError, match="runs is a folder"), replacing(folder) as draft:
        draft.write_text("a page")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "thesis.txt"]
    with replacing(folder) as draft:  # a folder does
        draft.mkdir()
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path):
    with pytest.raises(IsADirectoryError, match="out is .*, which is a folder: name a file in it"):
        check_new_file("out", tmp_path)
    with pytest.raises(FileNotFoundError, match="but the folder .*nowhere does not exist: make it first"):
        check_new_file("out", tmp_path / "nowhere" / "page.html")
    check_new_file("out", tmp_path / "page.html")
    (tmp_path / "page.html").write_text("an older one")
    check_new_file("out", str(tmp_path / "page.html"))
