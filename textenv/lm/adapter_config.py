"""Read the configuration of a saved adapter, which may be somebody else's: only fields that are plain data.

Some fields make `peft` import a module (``megatron_core``), load other models (X-LoRA's ``adapters``), or load
tokenizers with their code (``tokenizer_kwargs`` of prompt tuning). A configuration with such a field is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from textenv.json_files import read_json

ADAPTER_CONFIG = "adapter_config.json"
"""File that only a folder with an adapter has."""
MAX_CONFIG_BYTES = 2**22
"""Maximum size of the file, in bytes."""
TYPES = (
    "LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "LN_TUNING", "RANDLORA",
    "MISS", "BONE", "SHIRA", "C3A", "ROAD", "DELORA", "WAVEFT", "VBLORA", "GRALORA", "TRAINABLE_TOKENS",
)  # fmt: skip
"""Kinds of adapters that are inside a model's layers; the others are not supported here."""
FIELDS = {
    "peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode",
    "target_modules", "target_parameters", "exclude_modules", "modules_to_save", "layers_pattern",
    "layers_to_transform", "layer_replication", "feedforward_modules", "trainable_token_indices", "token_indices",
    "ensure_weight_tying", "r", "lora_alpha", "lora_dropout", "lora_bias", "bias", "fan_in_fan_out",
    "init_lora_weights", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens",
    "use_qalora", "qalora_group_size", "use_bdlora", "target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1",
    "beta2", "orth_reg_weight", "total_step", "init_weights", "init_ia3_weights", "alpha", "rank_dropout",
    "module_dropout", "use_effective_conv2d", "decompose_both", "decompose_factor", "rank_dropout_scale",
    "oft_block_size", "coft", "eps", "block_share", "use_cayley_neumann", "num_cayley_neumann_terms",
    "boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout", "block_size",
    "block_size_pattern", "projection_prng_key", "save_projection", "vera_dropout", "d_initial", "n_frequency",
    "scaling", "random_loc_seed", "n_frequency_pattern", "apply_GS", "sparse", "very_sparse", "randlora_dropout",
    "randlora_alpha", "miss_dropout", "mini_r", "mask_type", "random_seed", "variant", "group_size", "delora_lambda",
    "lambda_pattern", "wavelet_family", "use_idwt", "proportional_parameters", "num_vectors", "vector_length", "topk",
    "save_only_topk_weights", "vblora_dropout", "init_vector_bank_bound", "init_logits_std", "hybrid_r",
    "gralora_dropout", "gralora_k",
}  # fmt: skip
"""Fields that hold plain data: numbers, switches, and names of layers and methods."""
UNUSED: tuple[object, ...] = (None, False, {}, [], "megatron.core")
"""Values by which a field that is not in `FIELDS` is unused; ``megatron.core`` is the default of ``megatron_core``."""
MAX_NESTED_LEVELS = 4
"""How deep lists and objects in the file may be nested."""


class AdapterConfig(TypedDict, total=False):
    """Configuration of a saved adapter: the fields that are read here; `peft` reads others."""

    peft_type: str
    base_model_name_or_path: str | None
    auto_mapping: dict[str, object] | None


def is_adapter(folder: str | Path) -> bool:
    """Return True if a folder holds an adapter."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: str | Path, *, trusted: bool = False) -> AdapterConfig:
    """Read the configuration of a saved adapter.

    Args:
        folder: the adapter's folder.
        trusted: also accept fields that are more than plain data. Such a field can make `peft` run code.

    Raises:
        ValueError: if it is damaged, of a kind that is not supported, or has a field that is more than plain data.
    """
    path = Path(folder) / ADAPTER_CONFIG
    config: AdapterConfig = read_json(path, what="an adapter's configuration", kind=dict, most=MAX_CONFIG_BYTES)

    # Its kind and fields
    if config.get("peft_type") not in TYPES:
        raise ValueError(
            f"{path} has the peft_type {config.get('peft_type')!r:.100}, expected one of {', '.join(TYPES)}"
        )
    if not trusted:
        for name, value in config.items():
            _check_field(name, value, path)

    # Its base model
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path} has the base model {base!r:.100}, expected a name or null")
    auto_mapping = config.get("auto_mapping") or {}
    if not isinstance(auto_mapping, dict):
        raise ValueError(f"{path} has the auto_mapping {auto_mapping!r:.100}, expected an object or null")
    library = auto_mapping.get("parent_library", "transformers.models")
    if not trusted and not str(library).startswith("transformers.models"):
        raise ValueError(f"{path} says that its base model is of the library {library!r:.100}, expected transformers")
    return config


def _check_field(name: str, value: object, path: Path) -> None:
    """Raise a ValueError if a field of the configuration at ``path`` is more than plain data."""
    is_unused = any(value is unused or value == unused for unused in UNUSED)
    if name not in FIELDS and not is_unused:
        raise ValueError(
            f"{path} sets {name} to {json.dumps(value):.100}, by which peft could import or load something else: "
            "remove it, or pass --trust-remote-code if you trust the adapter (in Python: load it inside "
            "textenv.lm.loading.trust_remote_code())"
        )
    if not _is_plain(value):
        raise ValueError(f"{path} sets {name} to {json.dumps(value):.100}, expected plain data")


def _is_plain(value: object, levels: int = MAX_NESTED_LEVELS) -> bool:
    """Return True for numbers, texts and switches, and for lists and objects of these, a few levels deep."""
    if isinstance(value, dict):
        return levels > 0 and all(_is_plain(item, levels - 1) for item in value.values())
    if isinstance(value, list):
        return levels > 0 and all(_is_plain(item, levels - 1) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
