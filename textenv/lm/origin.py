"""`Origin`: weights and settings of a model when it was loaded, to see later whether its name still gives the same."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from textenv.json_files import read_json

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel

ORIGIN_FILE = "base.json"
"""File beside an adapter with checksums of the base model's weights, so that another base is noticed."""
READ_FILES = ("*.safetensors", "config.json", "generation_config.json")
"""Files of a model's folder that decide what is loaded."""
WITHOUT_EFFECT = {
    "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "pad_token_id",
    "return_dict", "output_attentions", "output_hidden_states", "_attn_implementation_autoset", "_from_model_config",
}  # fmt: skip
"""Settings of a configuration that change neither a distribution nor where a turn ends."""


@dataclass(frozen=True)
class Origin:
    """Weights and settings of a loaded model."""

    checksums: dict[str, int]
    """CRC-32 of the bytes of each weight and saved buffer, by name."""
    settings: dict[str, object]
    """Settings of the model's configuration and of its generation, as JSON."""
    files: dict[str, tuple[int, int]]
    """Size in bytes and time of change of each file that was read; empty for a name on a hub."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Origin:
        """Read the weights and settings of a model without an adapter, and the files under its name."""
        return cls(_checksums(model), _settings(model), _files(str(model.name_or_path or "")))

    def same_model(self, other: Origin) -> bool:
        """Return True if both have the same weights and settings, from whichever files."""
        return self.checksums == other.checksums and self.settings == other.settings


def remember_origin(model: PreTrainedModel) -> None:
    """Store the origin of a model that has just been loaded, on the model itself; copies of the model keep it."""
    vars(model)["origin"] = Origin.of(model)


def loads_unchanged(model: PreTrainedModel, present: Origin, load: Callable[[str], PreTrainedModel]) -> bool:
    """Return True if loading the model by its name would give these same weights and settings.

    It is loaded again only if it has no stored origin, or if the files under its name have changed since.

    Args:
        model: a model without an adapter.
        present: what the model is now.
        load: loads a name, in the model's dtype.
    """
    name = str(model.name_or_path or "")
    if not name:
        return False
    remembered: Origin | None = vars(model).get("origin")
    if remembered is None or remembered.files != present.files:
        try:
            remembered = Origin.of(load(name))
        except (OSError, ValueError):  # the name gives nothing any more
            return False
    return present.same_model(remembered)


def write_origin(origin: Origin, model: PreTrainedModel, folder: Path) -> None:
    """Write what identifies the weights of a base model into an adapter's folder."""
    content = {"base": model.name_or_path} | _identity(origin, model)
    (folder / ORIGIN_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def has_other_weights(model: PreTrainedModel, folder: Path) -> bool:
    """Return True if an adapter's folder was written for other weights of the same names, shapes and dtype."""
    if not (folder / ORIGIN_FILE).is_file():  # of version 0.9 and before, or of another library
        return False
    saved = read_json(folder / ORIGIN_FILE, what="the weights of an adapter's base", kind=dict)
    origin: Origin | None = vars(model).get("origin")
    if origin is None:
        origin = Origin.of(model)
    present = _identity(origin, model)
    is_comparable = saved.get("dtype") == present["dtype"] and saved.get("names") == present["names"]
    return is_comparable and saved.get("weights") != present["weights"]


def _identity(origin: Origin, model: PreTrainedModel) -> dict[str, object]:
    """Dtype of a model, and checksums of the names of its weights and of the weights themselves."""
    names = sorted(origin.checksums)
    weights = sorted(origin.checksums.items())
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "names": zlib.crc32(json.dumps(names).encode()),
        "weights": zlib.crc32(json.dumps(weights).encode()),
    }


def _checksums(model: PreTrainedModel) -> dict[str, int]:
    """Return the checksum of each weight and saved buffer, by name."""
    by_memory: dict[tuple[int, object], int] = {}  # tied weights have several names
    checksums = {}
    for name, tensor in model.state_dict().items():
        memory = (tensor.data_ptr(), tensor.shape)
        if memory not in by_memory:
            by_memory[memory] = checksum(tensor)
        checksums[name] = by_memory[memory]
    return checksums


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's shape, dtype and bytes, on any device."""
    import torch

    header = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return zlib.crc32(content, zlib.crc32(header))


def _settings(model: PreTrainedModel) -> dict[str, object]:
    """Return the settings of a model's configuration and of its generation, as JSON."""
    parts: dict[str, dict[str, object]] = {"config": model.config.to_dict(), "generation": {}}
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    if generation is not None:
        parts["generation"] = generation.to_dict()
    parts["generation"].pop("eos_token_id", None)  # an adapter's folder has a list of its own (`load_adapter`)
    for settings in parts.values():
        for name in WITHOUT_EFFECT & settings.keys():
            del settings[name]
    return json.loads(json.dumps(parts, default=str, sort_keys=True))


def _files(name: str) -> dict[str, tuple[int, int]]:
    """Return size and time of change of each file that a model of this name is loaded from; none for a hub name."""
    folder = Path(name)
    if not name or not folder.is_dir():
        return {}
    states = {}
    for pattern in READ_FILES:
        for path in sorted(folder.glob(pattern)):
            state = path.stat()
            states[path.name] = (state.st_size, state.st_mtime_ns)
    return states
