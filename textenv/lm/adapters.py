"""Models with adapters of `peft` (LoRA and its relatives): what is inside, saving, loading."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
"""What tells a folder with an adapter from one with a model."""
WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Folder beside an adapter that holds its base model, if that has no name to load it by."""


def plain_model(model: Any) -> PreTrainedModel:
    """The `transformers` model inside an adapted one, adapters included; any other model is its own."""
    return model.get_base_model() if _is_adapted(model) else model


def trunk_of(model: Any) -> PreTrainedModel:
    """The plain model without its output layer; Llama 4 does not keep it where it says."""
    plain: Any = plain_model(model)
    return plain.model if plain.base_model is plain else plain.base_model


def check_adapter(model: Any) -> None:
    """Refuse adapters that are not part of the trunk.

    Raises:
        ValueError: on prompt tuning and its relatives, which put virtual tokens before the text.
    """
    if _is_adapted(model) and model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(model.active_peft_config).__name__} puts virtual tokens before the text, which positions and cache "
            "here do not know: take an adapter inside the layers, such as peft.LoraConfig"
        )


def merged(model: Any) -> PreTrainedModel:
    """A copy of the model, with the adapters worked into its weights."""
    copied = copy.deepcopy(model)
    return copied.merge_and_unload() if _is_adapted(model) else copied


def merged_trunk(model: Any) -> PreTrainedModel:
    """As `merged`, without the output layer."""
    return trunk_of(merged(model)) if _is_adapted(model) else copy.deepcopy(trunk_of(model))


def save_model(model: Any, folder: Path) -> None:
    """Write a model, or only its adapter.

    An adapter's folder names the base model that it was made on: a hub name, or the absolute path of a folder. A base
    without a name (made from a configuration), and one that was such, is written to ``base/`` beside it. What the
    folder held before is not loaded with it.
    """
    model.save_pretrained(folder)
    if not _is_adapted(model):
        (folder / CONFIG).unlink(missing_ok=True)
        return
    name = plain_model(model).name_or_path
    if not name or (Path(name).name == BASE and is_adapter(Path(name).parent)):
        if not name or Path(name).resolve() != (folder / BASE).resolve():
            # A copy, for taking the adapter out changes the modules.
            copy.deepcopy(model).unload().save_pretrained(folder / BASE)
        return
    shutil.rmtree(folder / BASE, ignore_errors=True)
    if Path(name).is_dir():
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = str(Path(name).resolve())
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(folder) / CONFIG).is_file()


def load_adapter(folder: str | Path, *, dtype: torch.dtype | None) -> Any:
    """The base model with a saved adapter, which goes on training.

    Raises:
        ImportError: without `peft`.
        ValueError: if the base model cannot be found, or the adapter is not in safetensors.
    """
    from textenv.lm.loading import load_causal_lm

    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(f"{folder} holds an adapter, which needs peft: pip install 'textenv[lora]'") from error
    if not (Path(folder) / WEIGHTS).is_file():  # peft would unpickle another file
        raise ValueError(f"{folder} holds an adapter without {WEIGHTS}: its weights are read from safetensors alone")
    beside = Path(folder) / BASE
    name = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    base = str(beside) if beside.is_dir() else name
    if not base or (Path(base).is_absolute() and not Path(base).is_dir()):
        missing = f"its base model {name!r} is not there" if name else f"its {CONFIG} names no base model"
        raise ValueError(
            f"{folder} holds an adapter, but {missing}: put the base into {beside}, or its path or hub name into "
            f"base_model_name_or_path of {CONFIG}"
        )
    return PeftModel.from_pretrained(load_causal_lm(base, dtype=dtype), str(folder), is_trainable=True)


def _is_adapted(model: Any) -> bool:
    return hasattr(model, "get_base_model")  # without importing peft where there is no adapter
