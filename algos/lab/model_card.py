"""Publication of an agent on the Hugging Face Hub, with a model card made of its run."""

import json
import re
from pathlib import Path

from algos.lab.run_summary import read_run
from algos.storage.hub import HUB_NAME, hub_errors
from algos.storage.run_files import CONFIG, METRICS, POLICY
from algos.training.save import read_description
from textenv.lm.adapter_config import ADAPTER_CONFIG, is_adapter, read_adapter_config
from textenv.lm.loading import BASE
from textenv.rendering import sparkline

PRIVATE_PROVENANCE = ("command", "folder", "machine")
"""Parts of a run's record that are not published."""


def push_to_hub(
    folder: str | Path, repo_id: str, *, private: bool | None = None, token: str | None = None, overwrite: bool = False
) -> str:
    """Upload a saved agent with a model card; `algos.load` and `algos.from_hub` load it by its name.

    Args:
        folder: of a run, or of a saved agent. Not uploaded: checkpoints, samples, host, folder and command of the run.
        repo_id: ``user/name``.
        private: visible only to you; None is the default of your account.
        token: access token with write access; None is the one of ``hf auth login`` or ``HF_TOKEN``.
        overwrite: replace what the repository holds, in a new commit; otherwise an existing one is refused.

    Returns:
        Address of the commit.

    Raises:
        OSError: with one sentence: no access, no network, or the repository exists.
        ValueError: on another kind of name, or if the agent is an adapter of a model that is only on this machine.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    if not re.fullmatch(HUB_NAME, repo_id):
        raise ValueError(f"repo_id is {repo_id!r:.100}, expected a name on the hub: user/name")
    folder = Path(folder)
    description = read_description(folder)
    _check_base(folder, repo_id)

    # Files by their names in the repository: bytes, or paths to read
    made_by = description.get("made_by") or {}
    public = {name: value for name, value in made_by.items() if name not in PRIVATE_PROVENANCE}
    config = json.dumps(description | {"made_by": public}, indent=2) + "\n"
    files: dict[str, bytes | Path] = {CONFIG: config.encode(), "README.md": model_card(folder, repo_id).encode()}
    for path in (folder / METRICS, *(folder / POLICY).rglob("*")):
        _check_inside(path, folder)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path

    # One commit, which also deletes what the repository held
    api = HfApi(token=token, library_name="textenv")
    with hub_errors(f"{folder} could not be pushed to {repo_id}"):
        api.create_repo(repo_id, private=private, exist_ok=overwrite)
        changes: list[CommitOperationAdd | CommitOperationDelete] = []
        changes += [CommitOperationAdd(name, content) for name, content in files.items()]
        old_files = set(api.list_repo_files(repo_id)) - {*files, ".gitattributes"}
        changes += [CommitOperationDelete(name) for name in old_files]
        return api.create_commit(repo_id, changes, commit_message="Upload an agent").commit_url


def model_card(folder: Path, repo_id: str) -> str:
    """Return the README of a saved agent: environment, results, curves, how to load it, hyper-parameters."""
    from huggingface_hub import EvalResult, ModelCardData

    # The folder of a run, or its folder ``best``
    is_best = (folder.parent / METRICS).is_file()
    if is_best:
        run = read_run(folder.parent)
        score = run["best_score"]
    else:
        run = read_run(folder)
        score = run["last_score"]
    env = run["environment"] or "an environment of its own"
    algorithm = run["algorithm"] or "?"

    # Metadata
    task = "reinforcement-learning"
    results: list[EvalResult] | None = None
    if score is not None:
        results = [EvalResult(task, env, env, "mean_reward", round(score, 4))]
    metadata = ModelCardData(
        library_name="textenv",
        tags=[task, "textenv", algorithm.lower(), env],
        model_name=repo_id.rpartition("/")[2],
        eval_results=results,
    )

    lines = ["---", metadata.to_yaml(), "---", "", f"# {algorithm} on {env}", ""]
    lines += [f"A policy trained for {run['steps']:,} steps with the library `textenv`.", ""]
    if run["curves"]:
        lines += ["| metric | training | first | last |", "| --- | --- | --- | --- |"]
        for name, values in run["curves"].items():
            lines.append(f"| `{name}` | {sparkline(values, 40)} | {values[0]:.4g} | {values[-1]:.4g} |")
        lines.append("")
    lines += ["```python", "import algos", "", f'policy = algos.load("{repo_id}")', "```", ""]
    lines += [f"`algos evaluate {repo_id}` plays episodes. Hyper-parameters other than {algorithm}'s defaults:", ""]
    lines += ["| field | value |", "| --- | --- |"]
    lines += [f"| `{name}` | `{value}` |" for name, value in run["config"].items()]
    return "\n".join(lines) + "\n"


def _check_inside(path: Path, folder: Path) -> None:
    """Raise a ValueError if a file of an agent is a link out of its folder, such as to a key of yours."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to {path.resolve()}, which would be published: put the file itself there")


def _check_base(folder: Path, repo_id: str) -> None:
    """Raise a ValueError if the policy is an adapter of a model that is only on this machine."""
    policy = folder / POLICY
    if not is_adapter(policy) or (policy / BASE).is_dir():
        return
    name = read_adapter_config(policy).get("base_model_name_or_path")
    if name is not None and Path(name).is_absolute():
        raise ValueError(
            f"{folder} is an adapter of {name}, which another machine does not have: write a plain model ('algos "
            f"merge {folder} MERGED') and upload it ('hf upload {repo_id} MERGED'), or put the hub name of the base "
            f"model into {policy / ADAPTER_CONFIG}"
        )
