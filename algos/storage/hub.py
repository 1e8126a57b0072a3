"""Agents on the Hugging Face Hub: download, and errors in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
"""Advice by status of an answer."""


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Raise an OSError with one sentence, ``what`` could not be done and why, for any error of the hub's client."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except Exception as error:  # also of its HTTP client
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        status = 404 if isinstance(error, RepositoryNotFoundError) else status  # 401 without a token
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not status and isinstance(error, (HTTPError, LocalEntryNotFoundError)):
            reason = f"the hub cannot be reached, {reason}"
        raise OSError(f"{what}: {ADVICE.get(status, reason.rstrip('.'))}") from error


def download(repo_id: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Download an agent, as `algos.from_hub` says; files that could hold code are left out."""
    from huggingface_hub import snapshot_download

    with hub_errors(f"{repo_id} could not be loaded from the hub"):
        read: dict[str, Any] = {"allow_patterns": ["config.json", "policy/*"], "ignore_patterns": ["*.py", *PICKLES]}
        return Path(snapshot_download(repo_id, revision=revision, token=token, **read))


def agent_folder(name: str | Path) -> Path:
    """Return the folder of a saved agent; a text such as ``user/name`` is downloaded, unless ``user`` is a folder here.

    Of a run under way it is that of its newest checkpoint (`newest_agent`).

    Raises:
        FileNotFoundError: if it is neither a folder nor the name of an agent on the hub.
    """
    path = Path(name)
    if not isinstance(name, str) or path.exists() or path.parent.is_dir() or not re.fullmatch(HUB_NAME, name):
        return newest_agent(path)
    try:
        return download(name)
    except OSError as error:
        raise FileNotFoundError(
            f"there is no folder {name}, and {error}. Give a folder written by agent.save(folder) or by 'algos train "
            "--run-dir', or the name of an agent on the hub"
        ) from error
