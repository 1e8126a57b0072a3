"""Load tokenizers and language models (built-in, a local folder, a GGUF file, a hub name); load, save, merge adapters.

Only data is loaded: weights from safetensors, and no code from a model's folder unless `trust_remote_code` allows it.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textenv.embedded.gguf import SMOLLM2, gguf_folder, smollm2_folder
from textenv.json_files import read_json
from textenv.lm.adapter_config import ADAPTER_CONFIG, is_adapter, read_adapter_config
from textenv.lm.origin import (
    ORIGIN_FILE,
    Origin,
    has_other_weights,
    is_what_its_name_gives,
    remember_origin,
    write_origin,
)
from textenv.names import nearest
from textenv.optional import package
from textenv.progress import no_progress_bars

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
"""Name of the model that the project builds itself, without any download."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Weight files that can run code when loaded, so they are never loaded."""
SETTINGS = (".json", ".jinja", ".txt", ".model")
"""Endings of the files of a model's folder that are read whole."""
MOST_BYTES_OF_SETTINGS = 2**28
"""Bytes that such a file may have; a tokenizer of 250,000 words has 35 million."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Subfolder, in an adapter's folder, for a base model that no name gives: built here, or changed since loading."""
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
        ImportError: if a package is missing that the model needs.
    """
    import torch

    folder, trusted = model_folder(name, part), _CODE_TRUSTED.get()
    _refuse_large_files(Path(folder))
    if not trusted:
        _refuse_code(folder, name)
        if is_adapter(folder):  # which `transformers` would load with its base
            _adapter_settings(folder)
    try:
        with torch.device("cpu"), no_progress_bars() if Path(folder).is_dir() else nullcontext():
            return loader.from_pretrained(folder, trust_remote_code=trusted, **options)
    except ImportError:
        raise
    except BaseException as error:  # a file of somebody else may make it raise anything
        # A panic in the Rust code of `tokenizers` is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
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
            f"cannot load {str(name)!r} with {loader.__name__}: it is {where} ({str(error):.1000}). "
            f"Give {EMBEDDED!r}, {SMOLLM2!r}, the path of a GGUF file or of a folder written by save_pretrained, or a "
            "hub name like 'gpt2'."
        ) from error


def _refuse_large_files(folder: Path) -> None:
    """Raise a ValueError if a model's folder has a file, other than weights, that is too large to be read whole."""
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.suffix in SETTINGS and path.is_file() and path.stat().st_size > MOST_BYTES_OF_SETTINGS:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes, expected at most {MOST_BYTES_OF_SETTINGS:,}")


def _adapter_settings(folder: str | Path) -> dict[str, Any]:
    """Read the configuration of an adapter, and refuse what its base model brings, unless code is trusted.

    Raises:
        ValueError: if the adapter is damaged, not in safetensors, more than plain data, or on top of another adapter;
            or if its base brings code.
    """
    if not (Path(folder) / ADAPTER_WEIGHTS).is_file():  # peft would unpickle another file
        raise ValueError(f"{folder} has an adapter without {ADAPTER_WEIGHTS}: weights are loaded from safetensors only")
    config = read_adapter_config(folder, trusted=_CODE_TRUSTED.get())
    base = config.get("base_model_name_or_path")
    if base and not (Path(folder) / BASE).is_dir():
        if is_adapter(base):
            raise ValueError(
                f"{folder} holds an adapter whose base model {base!r} is an adapter itself: merge that first"
            )
        is_missing = Path(base).is_absolute() and not Path(base).exists()  # `load_adapter` says so
        if not is_missing and not _CODE_TRUSTED.get():
            _refuse_code(model_folder(base), base)  # a name of ours is no name on a hub, which would be asked
    return config


def _refuse_code(folder: str, name: str | Path) -> None:
    """Raise a ValueError if a model refers to its own code, even if `transformers` could load it without that code."""
    from transformers.utils import cached_file

    for file in ("config.json", "tokenizer_config.json"):
        try:
            path = Path(str(cached_file(folder, file)))
            settings = read_json(path, what="settings of a model", kind=dict, most=MOST_BYTES_OF_SETTINGS)
        except (OSError, ValueError):
            continue  # missing or unreadable: the loader raises
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
    dtype = torch.float32 if dtype is None else dtype
    model: PreTrainedModel = from_pretrained(loader, name, use_safetensors=True, dtype=dtype).eval()
    remember_origin(model)
    return model


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
    """Raise if a model has another adapter than one inside its trunk, which is all that a saved policy holds.

    Raises:
        ValueError: on prompt tuning and related methods, which put virtual tokens before the text; on several adapters,
            side by side or one over the other.
    """
    if not is_adapted(model):
        return
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(model.active_peft_config).__name__} puts virtual tokens before the text, which positions and cache "
            "here do not support: use an adapter inside the layers, such as peft.LoraConfig"
        )
    if is_adapted(model.get_base_model()):
        raise ValueError(
            "the model has an adapter over another adapter, of which only the outer one would be saved: merge the "
            "inner one into the weights first (model.merge_and_unload()), and give its result an adapter"
        )
    if getattr(model.active_peft_config, "target_modules_to_tie", None):
        raise ValueError(
            "the adapter has ensure_weight_tying=True for tied layers among its target_modules, whose weights peft "
            "keeps as two views of one memory: copies of the model would lose the tie. Leave ensure_weight_tying out, "
            "or name the layers in modules_to_save"
        )
    if len(model.peft_config) > 1:
        names = ", ".join(model.peft_config)
        raise ValueError(
            f"the model has {len(model.peft_config)} adapters ({names}), of which a saved policy holds one: remove the "
            "others (model.delete_adapter(name)), or merge them into the weights first (model.merge_and_unload())"
        )


def merged(model: Any) -> PreTrainedModel:
    """Return a copy of the model, with the adapters merged into its weights.

    Where the adapter changes one of two tied weights, such as the output layer and not the embedding, the copy has both
    weights apart, and its configuration says so.

    Raises:
        ValueError: if the merged model has other logits than the adapted one.
    """
    copied = copy.deepcopy(model)
    if not is_adapted(model):
        return copied
    if model.device.type == "meta":  # `algos plan` has shapes alone, so there are no logits to compare
        return _without_layers_of_peft(copied.merge_and_unload)
    expected = trial_logits(copied.eval())
    config = plain_model(copied).config
    is_tied = bool(setting(config, "tie_word_embeddings") or setting(config.get_text_config(), "tie_word_embeddings"))
    try:
        if is_tied:
            _untie(copied)
            _set_tied(plain_model(copied), False)  # before merging, as peft warns otherwise
        plain = _without_layers_of_peft(copied.merge_and_unload)
    except Exception as error:  # an adapter of a kind that peft cannot merge may raise anything
        raise ValueError(
            f"peft cannot merge this adapter ({type(error).__name__}: {error}): keep it as it is"
        ) from error
    if is_tied:
        plain = _tied_if_equal(plain)
    check_same_logits(expected, trial_logits(plain), dtype=model.dtype, what="the model with its adapter merged")
    return plain


def _untie(model: Any) -> None:
    """Give every module weights of its own."""
    from torch import nn

    seen: set[int] = set()
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if id(weight) in seen:
                setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
            seen.add(id(weight))


def _tied_if_equal(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its embeddings tied again, if that changes no weight; else the model as it is."""
    tied = _sharing_copy(model)
    _set_tied(tied, True)
    tied.tie_weights()
    weights = dict(model.named_parameters(remove_duplicate=False))
    same = all(weight.equal(weights[name]) for name, weight in tied.named_parameters(remove_duplicate=False))
    return tied if same else model


def _set_tied(model: PreTrainedModel, tied: bool) -> None:
    """Say in a model's configurations whether its output layer is its embedding."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied


def trial_logits(model: Any) -> Tensor:
    """Logits of a model for some tokens of its vocabulary, float32 on the CPU, to compare it with another one."""
    import torch

    config = model.config.get_text_config()
    count = min(16, setting(config, "max_position_embeddings") or 16)
    tokens = torch.linspace(0, config.vocab_size - 1, count, device=model.device).long()[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits.float().cpu()


def check_same_logits(expected: Tensor, found: Tensor, *, dtype: torch.dtype, what: str) -> None:
    """Raise a ValueError if logits of `trial_logits` differ by more than rounding in a dtype explains."""
    from textenv.rollout import rounding_tolerance

    scale = max(1.0, expected.abs().max().item())
    gap = (found - expected).abs().max().item()
    if not gap <= rounding_tolerance(dtype) * scale:
        raise ValueError(
            f"{what} has other logits than the model with its adapter beside the weights (they differ by {gap:.3g}), "
            "so it is not used: train an adapter that leaves embedding and output layer alone (targets=all-linear), or "
            "keep the adapter as it is"
        )


def merged_trunk(model: Any) -> PreTrainedModel:
    """Return a copy as `merged` does, without the output layer."""
    return trunk_of(merged(model)) if is_adapted(model) else copy.deepcopy(trunk_of(model))


@no_progress_bars()
def save_model(model: Any, folder: Path) -> None:
    """Write a model; if adapted, only its adapter, and the base model where no name gives it.

    An adapter's folder names its base model: a name, or the absolute path of a folder or GGUF file. The base is saved
    in the subfolder ``base/`` if it has no name (built from a configuration, or loaded from a ``base/``), and if it is
    no longer what its name gives: fine-tuned, with tokens added, changed by the start of the adapter (PiSSA, OLoRA).
    Earlier contents of the folder do not affect loading.

    Raises:
        ValueError: if the adapter is merged into the weights at present.
    """
    adapter = is_adapted(model)
    if adapter and any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError("the adapter is merged into the weights of its base: call model.unmerge_adapter() to save it")
    with warnings.catch_warnings():  # of peft, about embeddings that it saves with the adapter
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`|Could not find a config file")
        model.save_pretrained(folder)
    if not adapter:
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
        (folder / ORIGIN_FILE).unlink(missing_ok=True)
        return
    if plain_model(model).generation_config is not None:  # what ends the model's turns may differ from the base's
        plain_model(model).generation_config.save_pretrained(folder)
    base = _base_of(model)
    name = str(base.name_or_path or "")
    present = Origin.of(base)
    unchanged = is_what_its_name_gives(base, present, partial(load_causal_lm, dtype=base.dtype))
    of_an_adapter = bool(name) and Path(name).name == BASE and is_adapter(Path(name).parent)
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if unchanged and not of_an_adapter:
        shutil.rmtree(folder / BASE, ignore_errors=True)
        if Path(name).is_dir():
            config["base_model_name_or_path"] = _SOURCES.get(name, str(Path(name).resolve()))
    else:
        in_its_place = of_an_adapter and Path(name).resolve() == (folder / BASE).resolve()
        if not (unchanged and in_its_place):
            base.save_pretrained(folder / BASE)
        config["base_model_name_or_path"] = None  # another reader would take the base of that name
        if isinstance(config.get("init_lora_weights"), str):
            config["init_lora_weights"] = True  # otherwise the start of the adapter would change this base once more
    write_origin(present, base, folder)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _base_of(model: Any) -> PreTrainedModel:
    """Return the model under an adapter: copies of its modules, which share all weights with the model."""
    return _without_layers_of_peft(_sharing_copy(model).unload)


def _sharing_copy(model: Any) -> Any:
    """Return a copy of a model's modules that shares all weights with the model."""
    tensors = [*model.parameters(), *model.buffers()]
    shared = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, shared)


def _without_layers_of_peft(unload: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Unload an adapter; again where a layer was adapted in two ways, one inside the other."""
    plain = unload()
    while any(hasattr(module, "unload_and_optionally_merge_module") for module in plain.modules()):
        plain = unload()
    return plain


def load_adapter(folder: str | Path, *, dtype: torch.dtype | None) -> Any:
    """Load the base model with a saved adapter, which can be trained further.

    Raises:
        ImportError: if `peft` is not installed.
        ValueError: if the base model cannot be found, or the adapter is not in safetensors.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    peft = package("peft", "lora")
    beside = Path(folder) / BASE
    name = _adapter_settings(folder).get("base_model_name_or_path")
    base = str(beside) if beside.is_dir() else name
    if not base or (Path(base).is_absolute() and not Path(base).exists()):
        missing = f"its base model {name!r} does not exist" if name else f"its {ADAPTER_CONFIG} names no base model"
        raise ValueError(
            f"{folder} holds an adapter, but {missing}: save the base in {beside}, or put its path or hub name in "
            f"base_model_name_or_path of {ADAPTER_CONFIG}"
        )
    base_model = load_causal_lm(base, dtype=dtype)
    if has_other_weights(base_model, Path(folder)):
        logging.getLogger(__name__).warning(
            "the adapter in %s was trained on other weights of its base model %r than those that are there now, so it "
            "will not do what it did: give it the former model",
            folder, base,
        )  # fmt: skip
    try:
        with torch.device("cpu"), warnings.catch_warnings(action="ignore", category=FutureWarning):
            model = peft.PeftModel.from_pretrained(base_model, str(folder), is_trainable=True)
    except ImportError:
        raise
    except Exception as error:  # a file of somebody else may make it raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the adapter in {folder} does not fit its base model {base!r}: {reason:.1000}") from error
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        plain_model(model).generation_config = from_pretrained(GenerationConfig, folder)
    return model


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
