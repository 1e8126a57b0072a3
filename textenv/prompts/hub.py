"""Data sets of the Hugging Face Hub by name, ``hf:owner/name:config/split``, through the package `datasets`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from textenv.importing import HUB_PREFIX
from textenv.optional import package

if TYPE_CHECKING:
    from types import ModuleType

    from datasets import Dataset

DEFAULT = "default"
"""Name of the configuration of a data set that says nothing of configurations."""
HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
"""Name on the hub: owner/name, or name alone for a few old ones."""
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""How files of prompts end, and no name of a data set does."""
FORM = "hf:owner/name, hf:owner/name:config or hf:owner/name:config/split"


class HubName(NamedTuple):
    """Parts of ``hf:owner/name@revision:config/split``."""

    name: str
    """owner/name, or the path of a folder in the hub's format."""
    revision: str | None
    """Branch, tag or commit; None: the newest commit."""
    config: str | None
    """Configuration; None: the data set's default."""
    split: str | None
    """Split, which may be sliced as `datasets` does: ``train[:100]``; None: ``train``, or the only one."""


def is_hub_name(name: object) -> bool:
    """Whether this is the name of a data set of the hub, not of a file."""
    return isinstance(name, (str, Path)) and str(name).startswith(HUB_PREFIX)


def parse_hub_name(text: str) -> HubName:
    """Return the parts of a name.

    Raises:
        FileNotFoundError: if it names a folder or a file that does not exist.
        ValueError: if it has another form, or a revision of a folder.

    Example:
        >>> parse_hub_name("hf:openai/gsm8k:main/test")
        HubName(name='openai/gsm8k', revision=None, config='main', split='test')
    """
    name, _, config_and_split = text.removeprefix(HUB_PREFIX).partition(":")
    config, slash, split = config_and_split.partition("/")
    if (text.count(":") > 1 and not config) or (slash and not split):
        raise ValueError(f"{text!r:.200} is no name of a data set, expected {FORM}")
    configuration = None if config in ("", DEFAULT) else config
    if name and Path(name).expanduser().is_dir():
        return HubName(str(Path(name).expanduser()), None, configuration, split or None)

    # A name on the hub; paths are not asked for there
    hub_name, at, revision = name.partition("@")
    if Path(name).suffix.lower() in FILE_SUFFIXES or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"{text!r:.200} names a file or a folder that does not exist in {Path.cwd()}: a file is named without hf:, "
            f"and a data set of the hub as {FORM}"
        )
    if not HUB_NAME.fullmatch(hub_name) or (at and not revision):
        raise ValueError(f"{text!r:.200} is no name of a data set, expected {FORM}")
    if at and Path(hub_name).is_dir():  # `datasets` would read the folder, whatever the revision
        raise ValueError(
            f"{text!r:.200} has the revision {revision!r}, but {hub_name} is a folder in {Path.cwd()}, which has none: "
            "leave it out, or start elsewhere if you mean the data set of the hub"
        )
    return HubName(hub_name, revision or None, configuration, split or None)


def load_hub_dataset(text: str) -> Dataset:
    """Load one split of a data set, memory-mapped; what the hub has is downloaded once, and then read from the cache.

    Args:
        text: its name: ``hf:owner/name``, with ``:config``, ``:config/split`` and before them ``@revision``, if the
            data set has several. A folder in the hub's format (data files, and a README.md that names them) may stand
            for ``owner/name``.

    Raises:
        ImportError: if the package is not installed.
        OSError: if the hub cannot be reached, or has no such data set, or the folder does not exist.
        ValueError: if the name has another form, or the data set has no such configuration or split.
    """
    hub_name = parse_hub_name(text)
    datasets = package("datasets", "data")
    cache = None
    if Path(hub_name.name).is_dir():
        cache = str(_cache_of_folder(Path(hub_name.name), Path(datasets.config.HF_DATASETS_CACHE)))
    try:
        loaded = datasets.load_dataset(
            hub_name.name, hub_name.config, split=hub_name.split, revision=hub_name.revision, cache_dir=cache
        )
    except OSError as error:  # also of a data set that does not exist, or may not be read
        raise OSError(
            f"{text!r:.200} could not be loaded ({error}): is the name right, and can the hub be reached?"
        ) from error
    except Exception as error:  # datasets and pyarrow raise errors of many types
        raise ValueError(f"{text!r:.200} could not be loaded: {_advice(hub_name, datasets, error)}") from error
    if hub_name.split is not None:
        return loaded

    # All splits: take the one to train on, or the only one
    splits = list(loaded)
    if "train" in splits:
        return loaded["train"]
    if len(splits) == 1:
        return loaded[splits[0]]
    raise ValueError(
        f"{text!r:.200} has the splits {', '.join(splits)}: name one, such as {_spelt(hub_name, split=splits[0])}"
    )


def _cache_of_folder(folder: Path, cache: Path) -> Path:
    """Return a cache for the present files of a folder.

    `datasets` 5 knows a folder by its last name and its configuration alone. So it would give the rows of another
    folder of this name, or those from before a file was changed.
    """
    digest = hashlib.sha256(str(folder.resolve()).encode())
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(f"\n{path} {status.st_size} {status.st_mtime_ns}".encode())
    return cache / "folders" / digest.hexdigest()[:16]


def _advice(hub_name: HubName, datasets: ModuleType, error: Exception) -> str:
    """Return what is wrong with configuration or split, with those that there are; else the error's own words."""
    reason = str(error) or f"{type(error).__name__}, are its files empty?"
    if error.__cause__ is not None:  # datasets hides what is wrong with a file behind a sentence
        reason += f" ({error.__cause__})"
    try:
        # A wrong configuration
        configs = datasets.get_dataset_config_names(hub_name.name, revision=hub_name.revision)
        is_unknown = hub_name.config not in (None, *configs)
        if is_unknown and len(configs) == 1:
            splits = datasets.get_dataset_split_names(hub_name.name, configs[0], revision=hub_name.revision)
            if hub_name.config in splits:
                example = _spelt(hub_name._replace(config=configs[0]), split=hub_name.config)
                return f"{hub_name.config!r:.100} is a split of it, which follows the configuration: {example}"
        if is_unknown or (hub_name.config is None and len(configs) > 1):
            example = _spelt(hub_name._replace(config=configs[0]), split=hub_name.split)
            return f"it has the configurations {', '.join(configs):.300}: name one, such as {example}"
        # A wrong split
        splits = datasets.get_dataset_split_names(hub_name.name, hub_name.config, revision=hub_name.revision)
    except Exception:  # of a data set that cannot be read at all
        return reason
    split_name = (hub_name.split or "").partition("[")[0]
    if split_name not in ("", *splits):
        example = _spelt(hub_name, split=splits[0])
        return f"it has no split {split_name!r:.100}, but {', '.join(splits):.300}: name one, such as {example}"
    return reason


def _spelt(hub_name: HubName, *, split: str | None) -> str:
    """Return the name with a configuration and a split."""
    text = HUB_PREFIX + hub_name.name
    if hub_name.revision is not None:
        text += f"@{hub_name.revision}"
    text += f":{hub_name.config or DEFAULT}"
    if split is not None:
        text += f"/{split}"
    return text
