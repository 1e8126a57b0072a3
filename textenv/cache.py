"""Folders on disk that are built once, such as those of the embedded models and of models from GGUF files."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from textenv.json_files import read_json

MANIFEST = "manifest.json"
"""File that lists every other file of a cached folder with its SHA-256; written last."""


def cache_root() -> Path:
    """Return ``textenv`` inside ``TEXTENV_CACHE``, else inside ``XDG_CACHE_HOME``, else inside ``~/.cache``."""
    root = os.environ.get("TEXTENV_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser().absolute() / "textenv"


def fingerprint(data: object, packages: Iterable[str]) -> str:
    """Hash plain data (numbers, texts, tuples, dictionaries) and the versions of packages to 12 hexadecimal digits."""
    versions = [(package, version(package)) for package in packages]
    return hashlib.sha256(repr((data, versions)).encode()).hexdigest()[:12]


def cached(folder: Path, build: Callable[[Path], None], *, what: str) -> Path:
    """Return the folder; first build it if it is missing or damaged.

    If several processes call this, one builds and the others wait.

    Args:
        folder: the folder in the cache.
        build: fills an empty sibling folder, which then replaces this one.
        what: name of the contents, for the message that says what is built.

    Raises:
        OSError: if the cache cannot be written.
    """
    try:
        if _intact(folder):  # without the lock, so that a complete cache may be read-only
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _intact(folder):  # else another process built it while this one waited
                _replace(folder, build, what)
    except OSError as error:
        raise OSError(
            f"cannot write {folder}: {error}. "
            "Set the environment variable TEXTENV_CACHE to a folder that you can write to."
        ) from error
    return folder


def _replace(folder: Path, build: Callable[[Path], None], what: str) -> None:
    """Build a folder beside this one, with its manifest, and put it in the place of this one."""
    print(f"textenv: building {what} in {folder}, once", file=sys.stderr, flush=True)
    unfinished = Path(f"{folder}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed build: this process holds the lock
    unfinished.mkdir()
    try:
        build(unfinished)
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        hashes = {path.relative_to(unfinished).as_posix(): sha256(path) for path in files}
        (unfinished / MANIFEST).write_text(json.dumps(hashes, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """Return True if the manifest exists and every file matches its hash."""
    try:
        hashes = read_json(folder / MANIFEST, what="hashes by file", kind=dict)
        if not hashes:
            return False
        return all(sha256(folder / name) == digest for name, digest in hashes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
