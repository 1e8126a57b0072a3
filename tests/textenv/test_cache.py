"""The cache of the embedded models: built once, checked, and where it is."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from textenv.cache import cache_root, cached, fingerprint
from textenv.embedded import embedded_folder

ROOT = Path(__file__).parents[2]


def test_finding_the_models_loads_nothing_heavy(folder):
    program = (
        "from textenv.embedded import embedded_folder as f; import sys; print(f()); assert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == str(folder)


@pytest.fixture(scope="module")
def folder():
    """The only real build of these tests, and none if this version's is in the user's cache."""
    return embedded_folder()


class Builder:
    """Stands in for the build: counts its calls and writes two files."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        assert not list(folder.iterdir())
        self.calls += 1
        (folder / "lm").mkdir()
        (folder / "lm" / "weights").write_text("1 2 3")
        (folder / "config").write_text("{}")


def test_a_cached_folder_is_built_once_and_says_so(tmp_path, capsys):
    build, folder = Builder(), tmp_path / "new" / "embedded-0"
    assert cached(folder, build, what="a model") == cached(folder, build, what="nothing much") == folder
    assert build.calls == 1 and (folder / "lm" / "weights").read_text() == "1 2 3"
    assert capsys.readouterr().err == f"textenv: building a model in {folder}, once\n"


@pytest.mark.parametrize("damage", ["changed", "shortened", "file gone", "manifest gone", "manifest cut", "emptied"])
def test_a_damaged_folder_is_built_again(tmp_path, damage):
    build, folder = Builder(), tmp_path / "embedded-0"
    cached(folder, build, what="a model")
    weights, manifest = folder / "lm" / "weights", folder / "manifest.json"
    {
        "changed": lambda: weights.write_text("1 2 4"),
        "shortened": lambda: weights.write_text("1 2"),
        "file gone": weights.unlink,
        "manifest gone": manifest.unlink,
        "manifest cut": lambda: manifest.write_text(manifest.read_text()[:20]),
        "emptied": lambda: manifest.write_text("{}"),
    }[damage]()
    assert cached(folder, build, what="a model") == folder
    assert build.calls == 2 and weights.read_text() == "1 2 3"


def test_a_build_that_dies_leaves_nothing_to_be_found(tmp_path):
    folder = tmp_path / "embedded-0"

    def die(unfinished):
        (unfinished / "config").write_text("{}")
        assert not folder.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(folder, die, what="a model")
    assert not folder.exists()
    (tmp_path / "embedded-0.unfinished").mkdir()  # what a killed process leaves
    (tmp_path / "embedded-0.unfinished" / "config").write_text("half")
    assert (cached(folder, Builder(), what="a model") / "config").read_text() == "{}"


def test_of_two_at_once_one_builds_and_the_other_waits(tmp_path):
    build = Builder()
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: cached(tmp_path / "embedded-0", build, what="a model"), range(4)))
    assert build.calls == 1 and folders == {tmp_path / "embedded-0"}


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file/textenv/embedded-\w+: .*TEXTENV_CACHE"):
        embedded_folder()


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TEXTENV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home" / ".cache" / "textenv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "textenv"
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine" / "textenv"


def test_the_name_changes_with_data_and_versions(tmp_path, monkeypatch):
    data = ("1", {"the": ("a",)})
    names = [fingerprint(data, ["torch"]), fingerprint(data, ["numpy"]), fingerprint(("1", {"the": ("b",)}), ["torch"])]
    assert fingerprint(("1", {"the": ("a",)}), ["torch"]) == names[0]
    for version in ("1.0", "2.0"):
        folder = tmp_path / version / f"made_up-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: made_up\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / version)
        names.append(fingerprint(data, ["made_up"]))
    assert len(set(names)) == 5
