"""Load tokenizers and language models (built-in, a local folder, a GGUF file, a hub name); load, save, merge adapters.

Only data is loaded: weights from safetensors, and no code from a model's folder unless `trust_remote_code` allows it.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textenv.lm.gguf import SMOLLM2, gguf_folder, smollm2_folder
from textenv.names import nearest
from textenv.optional import package
from textenv.progress import no_progress_bars

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
"""Name of the model that the project builds itself, without any download."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Weight files that can run code when loaded, so they are never loaded."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that only a folder with an adapter has."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Subfolder, in an adapter's folder, for a base model that cannot be loaded by a name."""
_SOURCES: dict[str, str] = {}
"""Name or GGUF file of each folder of the cache that this process loads from, which adapters give as their base."""


def model_folder(name: str | Path, part: str = "lm") -> str:
    """Return the path or hub name for ``from_pretrained``.

    ``"embedded"``, ``"smollm2"`` and ``"path/to/model.gguf"`` become folders in the cache, built at first use.

    Raises:
        ValueError: if the name is a built-in model's, misspelt.
    """
    if str(name) == EMBEDDED:
        from textenv.embedded import embedded_folder

        folder = embedded_folder() / part
    elif str(name) == SMOLLM2:
        folder = smollm2_folder()
    elif str(name).lower().endswith(".gguf"):
        folder, name = gguf_folder(name), Path(name).expanduser().resolve()
    else:
        if (close := nearest(str(name).lower(), (EMBEDDED, SMOLLM2))) and not Path(name).exists():
            raise ValueError(f"there is no model {str(name)!r}: did you mean {close!r}?")  # before a hub is asked
        # An adapter is saved with this path, from a working folder that a reward may have changed.
        return str(Path(name).resolve()) if Path(name).is_dir() else str(name)
    _SOURCES[str(folder)] = str(name)
    return str(folder)


_CODE_TRUSTED: ContextVar[bool] = ContextVar("trust_remote_code", default=False)


@contextmanager
def trust_remote_code() -> Iterator[None]:
    """Context in which a model's own Python code may run: only for models that you trust like a program.

    Nothing else allows this code, not even a setting in a file. An environment loads its reference at the first
    rollout, so run the training in this context too.

    Example:
        >>> with trust_remote_code():  # doctest: +SKIP
        ...     policy = LMPolicy.load("an/unusual-model")
    """
    before = _CODE_TRUSTED.set(True)
    try:
        yield
    finally:
        _CODE_TRUSTED.reset(before)


def from_pretrained(loader: Any, name: str | Path, part: str = "lm", **options: Any) -> Any:
    """Call ``loader.from_pretrained``, with an error message that explains what to do.

    Raises:
        ValueError: if the name is neither ``"embedded"``, nor a folder with a model, nor a reachable hub name; if it
            has no weights in safetensors; or if it has its own code outside the context `trust_remote_code`.
    """
    import torch

    folder, trusted = model_folder(name, part), _CODE_TRUSTED.get()
    if not trusted:
        _refuse_code(folder, name)
    try:
        with torch.device("cpu"), no_progress_bars() if Path(folder).is_dir() else nullcontext():
            return loader.from_pretrained(folder, trust_remote_code=trusted, **options)
    except (OSError, ValueError, RecursionError) as error:
        where = "a folder without readable files" if Path(folder).is_dir() else "neither a folder nor a hub name"
        if (Path(folder) / "policy").is_dir():
            where = f"a run, whose model is in {Path(folder) / 'policy'}"
        weights = sorted(map(str, Path(folder).glob("*.gguf")))
        if weights:
            where = f"a folder that holds {weights[0]}: give that file itself"
        pickles = sorted(path.name for kind in PICKLES for path in Path(folder).glob(kind))
        if pickles and options.get("use_safetensors"):
            where = f"a folder whose weights ({', '.join(pickles)}) are not .safetensors, which only are loaded"
        raise ValueError(
            f"cannot load {str(name)!r} with {loader.__name__}: it is {where} ({error}). "
            f"Give {EMBEDDED!r}, {SMOLLM2!r}, the path of a GGUF file or of a folder written by save_pretrained, or a "
            "hub name like 'gpt2'."
        ) from error


def _refuse_code(folder: str, name: str | Path) -> None:
    """Raise a ValueError if a model refers to its own code, even if `transformers` could load it without that code."""
    from transformers.utils import cached_file

    for file in ("config.json", "tokenizer_config.json"):
        try:
            settings = json.loads(Path(str(cached_file(folder, file))).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # missing or unreadable: the loader raises
        if not isinstance(settings, dict):
            continue
        found, instead = "", "remove that line from the file"
        if kernel := _hub_kernel(settings):
            found = f"needs code from a hub ({kernel} in its {file})"
        elif settings.get("auto_map"):
            found = f"has its own Python code ('auto_map' in its {file})"
            instead += " if transformers supports the model itself"
        if found:
            raise ValueError(
                f"{str(name)!r} {found}, which is not run by default: pass --trust-remote-code if you trust it (in "
                f"Python: load it inside textenv.lm.loading.trust_remote_code()), or {instead}"
            )


def _hub_kernel(settings: Any, implementation: str = "") -> str:
    """First attention or experts implementation, at any depth, that is a hub name; empty if there is none."""
    if isinstance(settings, str):
        return f"{implementation} {settings!r:.100}" if implementation and "/" in settings else ""
    if isinstance(settings, list):
        return next(filter(None, (_hub_kernel(item, implementation) for item in settings)), "")
    if not isinstance(settings, dict):
        return ""
    names = {key: str(key) if "implementation" in str(key) else implementation for key in settings}
    return next(filter(None, (_hub_kernel(settings[key], name) for key, name in names.items())), "")


def load_tokenizer(name: str | Path = EMBEDDED) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; see `model_folder` for the names."""
    from transformers import AutoTokenizer

    return from_pretrained(AutoTokenizer, name)


def load_causal_lm(name: str | Path = EMBEDDED, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a decoder-only or encoder-decoder language model in evaluation mode; see `model_folder` for the names.

    A folder written by `peft` gives the base model that the folder names, with the adapter. If dtype is None, the
    weights become float32, even those saved in bfloat16: most optimizer steps are too small to change bfloat16 weights.

    Raises:
        ValueError: if the model cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if is_adapter(model_folder(name)):
        return load_adapter(model_folder(name), dtype=dtype).eval()
    config = from_pretrained(AutoConfig, name)
    loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return from_pretrained(loader, name, use_safetensors=True, dtype=torch.float32 if dtype is None else dtype).eval()


def setting(config: Any, name: str) -> Any:
    """Return a setting of a model's configuration; None if it has no such setting."""
    return getattr(config, name, None)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of actions of a tokenizer: its largest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def plain_model(model: Any) -> PreTrainedModel:
    """Return the `transformers` model inside an adapted one, adapters included; return any other model itself."""
    return model.get_base_model() if is_adapted(model) else model


def trunk_of(model: Any, part: str = "") -> PreTrainedModel:
    """Return the plain model without its output layer (the trunk), or its part "encoder" or "decoder"."""
    plain: Any = plain_model(model)
    if part:
        return plain.get_encoder() if part == "encoder" else plain.get_decoder()
    return plain.model if plain.base_model is plain else plain.base_model  # the former in Llama 4


def check_adapter(model: Any) -> None:
    """Raise if the adapter is not part of the trunk.

    Raises:
        ValueError: on prompt tuning and related methods, which put virtual tokens before the text.
    """
    if is_adapted(model) and model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(model.active_peft_config).__name__} puts virtual tokens before the text, which positions and cache "
            "here do not support: use an adapter inside the layers, such as peft.LoraConfig"
        )


def merged(model: Any) -> PreTrainedModel:
    """Return a copy of the model, with the adapters merged into its weights."""
    copied = copy.deepcopy(model)
    return copied.merge_and_unload() if is_adapted(model) else copied


def merged_trunk(model: Any) -> PreTrainedModel:
    """Return a copy as `merged` does, without the output layer."""
    return trunk_of(merged(model)) if is_adapted(model) else copy.deepcopy(trunk_of(model))


@no_progress_bars()
def save_model(model: Any, folder: Path) -> None:
    """Write a model; if adapted, only its adapter.

    An adapter's folder names its base model: a name, or the absolute path of a folder or GGUF file. A base without
    a name (built from a configuration, or loaded from a ``base/``) is saved in the subfolder ``base/``. Earlier
    contents of the folder do not affect loading.
    """
    model.save_pretrained(folder)
    if not is_adapted(model):
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
        return
    name = plain_model(model).name_or_path
    if not name or (Path(name).name == BASE and is_adapter(Path(name).parent)):
        if not name or Path(name).resolve() != (folder / BASE).resolve():
            # A copy, because unloading the adapter changes the modules.
            copy.deepcopy(model).unload().save_pretrained(folder / BASE)
        return
    shutil.rmtree(folder / BASE, ignore_errors=True)
    if Path(name).is_dir():
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = _SOURCES.get(name, str(Path(name).resolve()))
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def is_adapter(folder: str | Path) -> bool:
    """Return True if a folder holds an adapter."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def load_adapter(folder: str | Path, *, dtype: torch.dtype | None) -> Any:
    """Load the base model with a saved adapter, which can be trained further.

    Raises:
        ImportError: if `peft` is not installed.
        ValueError: if the base model cannot be found, or the adapter is not in safetensors.
    """
    import torch

    peft = package("peft", "lora")
    if not (Path(folder) / ADAPTER_WEIGHTS).is_file():  # peft would unpickle another file
        raise ValueError(f"{folder} has an adapter without {ADAPTER_WEIGHTS}: weights are loaded from safetensors only")
    beside = Path(folder) / BASE
    name = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    base = str(beside) if beside.is_dir() else name
    if not base or (Path(base).is_absolute() and not Path(base).exists()):
        missing = f"its base model {name!r} does not exist" if name else f"its {ADAPTER_CONFIG} names no base model"
        raise ValueError(
            f"{folder} holds an adapter, but {missing}: save the base in {beside}, or put its path or hub name in "
            f"base_model_name_or_path of {ADAPTER_CONFIG}"
        )
    with torch.device("cpu"), warnings.catch_warnings(action="ignore", category=FutureWarning):
        return peft.PeftModel.from_pretrained(load_causal_lm(base, dtype=dtype), str(folder), is_trainable=True)


def add_lora(model: Any, lora: Any, *, seed: int) -> Any:
    """Freeze a model, and put trainable adapters (LoRA) on its linear layers.

    Args:
        model: a `transformers` model without an adapter.
        lora: a `peft.LoraConfig`, or settings such as ``"r=16,alpha=32,targets=q_proj+v_proj"``. Without them r is 16,
            alpha 32, and the targets all linear layers but the output ("LoRA Without Regret", Schulman et al. 2025).
        seed: seed of the initial weights.

    Raises:
        ImportError: if `peft` is not installed.
        ValueError: if a setting is unknown or not valid, or the model has an adapter already.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    peft = package("peft", "lora")
    if is_adapted(model):
        raise ValueError(f"lora is {lora!r}, but the model has an adapter already, which is trained further: omit lora")
    chosen = lora
    try:
        if isinstance(lora, str):
            own = dict(part.partition("=")[::2] for part in lora.split(","))
            targets = own.pop("targets", "all-linear")
            chosen = peft.LoraConfig(
                task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
                r=int(own.pop("r", "16")),
                lora_alpha=int(own.pop("alpha", "32")),
                target_modules=targets if targets == "all-linear" else targets.split("+"),
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            )
            if own:
                raise ValueError(f"no setting is named {', '.join(own)} (dropout is always off in training here)")
        # peft asks transformers by an old name.
        with torch.random.fork_rng(), warnings.catch_warnings(action="ignore", category=FutureWarning):
            torch.manual_seed(seed)
            return peft.get_peft_model(model, chosen)
    except ValueError as error:  # of peft too
        raise ValueError(f"lora is {lora!r:.100}, expected r=16,alpha=32,targets=q_proj+v_proj: {error}") from error


def is_adapted(model: Any) -> bool:
    """Return True for a model of `peft`, without importing `peft`: if it is not imported, there are none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
