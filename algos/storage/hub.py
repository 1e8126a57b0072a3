"""Agents on the Hugging Face Hub: downloads, and errors in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from algos.storage.run_files import CONFIG, POLICY
from algos.storage.run_folder import newest_agent
from textenv.lm.loading import PICKLES

HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"
"""Regular expression of ``user/name``."""
ADVICE = {
    401: "log in with 'hf auth login', or give a token (HF_TOKEN, in Python token=)",
    403: "this token may not do that: make one with write access, or give a repository of your own",
    404: "there is no such repository or revision, or your token cannot see it",
    409: "it exists already: give another name, or replace what it holds (--overwrite, in Python overwrite=True)",
}
"""Advice by HTTP status."""
DOWNLOADED = (CONFIG, f"{POLICY}/*")
"""Patterns of the files that are downloaded."""


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Context that turns any error of the hub's client into an OSError of one sentence.

    Args:
        what: what could not be done, the beginning of the sentence; the reason follows.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except Exception as error:  # also of its HTTP client
        status = 0
        if isinstance(error, RepositoryNotFoundError):
            status = 404  # the hub answers 401 without a token
        elif isinstance(error, HfHubHTTPError):
            status = error.response.status_code
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
        if not status and isinstance(error, (HTTPError, LocalEntryNotFoundError)):
            reason = f"the hub cannot be reached, {reason}"
        raise OSError(f"{what}: {ADVICE.get(status, reason.rstrip('.'))}") from error


def download(repo_id: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Download an agent (see `algos.from_hub`) and return its folder; files that could hold code are left out."""
    from huggingface_hub import snapshot_download

    with hub_errors(f"{repo_id} could not be loaded from the hub"):
        folder = snapshot_download(
            repo_id,
            revision=revision,
            token=token,
            allow_patterns=[*DOWNLOADED],
            ignore_patterns=["*.py", *PICKLES],
        )
        return Path(folder)


def agent_folder(name: str | Path) -> Path:
    """Return the folder of a saved agent; in a run, of its `newest_agent`.

    A text such as ``user/name`` is downloaded, unless ``user`` is a folder here.

    Raises:
        FileNotFoundError: if it is neither a folder nor the name of an agent on the hub.
    """
    path = Path(name)
    is_local = path.exists() or path.parent.is_dir()
    if is_local or not isinstance(name, str) or not re.fullmatch(HUB_NAME, name):
        return newest_agent(path)
    try:
        return download(name)
    except OSError as error:
        raise FileNotFoundError(
            f"there is no folder {name}, and {error}. Give a folder written by agent.save(folder) or by 'algos train "
            "--run-dir', or the name of an agent on the hub"
        ) from error
