"""Load tokenizers and language models (built-in, a local folder, a GGUF file, a hub name); load, save, merge adapters.

Only data is loaded: weights come from safetensors, and a model's own code runs only inside `trust_remote_code`.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from textenv.embedded.folder import EMBEDDED
from textenv.embedded.gguf import SMOLLM2, gguf_folder, smollm2_folder
from textenv.json_files import read_json
from textenv.lm.adapter_config import ADAPTER_CONFIG, AdapterConfig, is_adapter, read_adapter_config
from textenv.lm.origin import (
    ORIGIN_FILE,
    Origin,
    has_other_weights,
    loads_unchanged,
    remember_origin,
    write_origin,
)
from textenv.names import nearest
from textenv.optional import package
from textenv.progress import no_progress_bars

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import TypeIs

    Model = PreTrainedModel | PeftModel

ModuleT = TypeVar("ModuleT", bound="nn.Module")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Weight files that can run code when loaded, so they are never loaded."""
SETTINGS_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Endings of the files of a model's folder that are read as a whole."""
MOST_BYTES_OF_SETTINGS = 2**28
"""Maximum size of such a file, in bytes; that of a tokenizer with 250,000 words has 35 million bytes."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base"
"""Subfolder, in an adapter's folder, for a base model that no name gives: built here, or changed since loading."""
_SOURCES: dict[str, str] = {}
"""Name or GGUF file from which a folder of the cache was made, by folder; only folders that this process loads from.
Adapters are saved with this name of their base."""
_CODE_TRUSTED: ContextVar[bool] = ContextVar("trust_remote_code", default=False)
"""True inside `trust_remote_code`."""


def model_folder(name: str | Path, part: str = "lm") -> str:
    """Return the path or hub name for ``from_pretrained``.

    ``"embedded"``, ``"smollm2"`` and ``"path/to/model.gguf"`` become folders in the cache, built at first use.

    Raises:
        ValueError: if the name is a misspelt name of a built-in model.
    """
    source = str(name)
    if source == EMBEDDED:
        from textenv.embedded import embedded_folder

        folder = embedded_folder() / part
    elif source == SMOLLM2:
        folder = smollm2_folder()
    elif source.lower().endswith(".gguf"):
        folder = gguf_folder(name)
        source = str(Path(name).expanduser().resolve())
    else:
        return _folder_or_hub_name(name)
    _SOURCES[str(folder)] = source
    return str(folder)


def _folder_or_hub_name(name: str | Path) -> str:
    """Return the absolute path of a folder, or a hub name as it is; raise a ValueError for a misspelt name of ours."""
    similar_name = nearest(str(name).lower(), (EMBEDDED, SMOLLM2))
    if similar_name and not Path(name).exists():
        raise ValueError(f"there is no model {str(name)!r}: did you mean {similar_name!r}?")  # before a hub is asked
    if Path(name).is_dir():
        return str(Path(name).resolve())  # adapters are saved with it, maybe after a change of the working folder
    return str(name)


@contextmanager
def trust_remote_code() -> Iterator[None]:
    """Context in which a model's own Python code may run: only for models that you trust like a program.

    Nothing else allows this code, not even a setting in a file. An environment loads its reference at the first
    rollout, so run the training in this context too.

    Example:
        >>> with trust_remote_code():  # doctest: +SKIP
        ...     policy = LMPolicy.load("an/unusual-model")
    """
    token = _CODE_TRUSTED.set(True)
    try:
        yield
    finally:
        _CODE_TRUSTED.reset(token)


def from_pretrained(loader: Any, name: str | Path, part: str = "lm", **options: object) -> Any:
    """Call ``loader.from_pretrained``, with an error message that explains what to do.

    Raises:
        ValueError: if the name is neither ``"embedded"``, nor a folder with a model, nor a reachable hub name; if it
            has no weights in safetensors; or if it has its own code outside the context `trust_remote_code`.
        ImportError: if a package is missing that the model needs.
    """
    import torch

    # Refuse huge files, a model's own code, and an adapter on an unsafe base
    folder = model_folder(name, part)
    is_trusted = _CODE_TRUSTED.get()
    _refuse_large_files(Path(folder))
    if not is_trusted:
        _refuse_code(folder, name)
        if is_adapter(folder):  # `transformers` would load it with its base
            _adapter_settings(folder)

    progress = no_progress_bars() if Path(folder).is_dir() else nullcontext()
    try:
        with torch.device("cpu"), progress:
            return loader.from_pretrained(folder, trust_remote_code=is_trusted, **options)
    except ImportError:
        raise
    except BaseException as error:  # a file of somebody else may make it raise anything
        # A panic in the Rust code of `tokenizers` is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = _kind_of_folder(Path(folder), only_safetensors=bool(options.get("use_safetensors")))
        raise ValueError(
            f"cannot load {str(name)!r} with {loader.__name__}: it is {kind} ({str(error):.1000}). "
            f"Give {EMBEDDED!r}, {SMOLLM2!r}, the path of a GGUF file or of a folder written by save_pretrained, or a "
            "hub name like 'gpt2'."
        ) from error


def _kind_of_folder(folder: Path, *, only_safetensors: bool) -> str:
    """Say what is in a folder from which no model can be loaded, as far as one can tell."""
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles and only_safetensors:
        return f"a folder whose weights ({', '.join(pickles)}) are not .safetensors, and no others are loaded"
    gguf_files = sorted(map(str, folder.glob("*.gguf")))
    if gguf_files:
        return f"a folder that holds {gguf_files[0]}: give that file itself"
    if (folder / "policy").is_dir():
        return f"a run, whose model is in {folder / 'policy'}"
    if folder.is_dir():
        return "a folder without readable files"
    return "neither a folder nor a hub name"


def _refuse_large_files(folder: Path) -> None:
    """Raise a ValueError if a model's folder has a file, other than weights, that is too large to be read."""
    if not folder.is_dir():
        return
    for path in folder.glob("*"):
        if path.suffix in SETTINGS_SUFFIXES and path.is_file():
            size = path.stat().st_size
            if size > MOST_BYTES_OF_SETTINGS:
                raise ValueError(f"{path} has {size:,} bytes, expected at most {MOST_BYTES_OF_SETTINGS:,}")


def _adapter_settings(folder: str | Path) -> AdapterConfig:
    """Read the configuration of an adapter, and refuse code of its base model, unless code is trusted.

    Raises:
        ValueError: if the adapter is damaged, not in safetensors, more than plain data, or on top of another adapter;
            or if its base has code of its own.
    """
    if not (Path(folder) / ADAPTER_WEIGHTS).is_file():  # peft would unpickle another file
        raise ValueError(f"{folder} has an adapter without {ADAPTER_WEIGHTS}: weights are loaded from safetensors only")
    config = read_adapter_config(folder, trusted=_CODE_TRUSTED.get())
    base = config.get("base_model_name_or_path")
    if not base or (Path(folder) / BASE).is_dir():
        return config

    # The base that the configuration names
    if is_adapter(base):
        raise ValueError(f"{folder} holds an adapter whose base model {base!r} is an adapter itself: merge that first")
    is_missing = Path(base).is_absolute() and not Path(base).exists()  # `load_adapter` says so
    if not is_missing and not _CODE_TRUSTED.get():
        _refuse_code(model_folder(base), base)  # by its folder, because a hub is not asked for a name of ours
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

        # Settings that would fetch or run code
        kernel = _hub_kernel(settings)
        if kernel:
            reason = f"needs code from a hub ({kernel} in its {file})"
            alternative = "remove that line from the file"
        elif settings.get("auto_map"):
            reason = f"has its own Python code ('auto_map' in its {file})"
            alternative = "remove that line from the file if transformers supports the model itself"
        else:
            continue
        raise ValueError(
            f"{str(name)!r} {reason}, which is not run by default: pass --trust-remote-code if you trust it (in "
            f"Python: load it inside textenv.lm.loading.trust_remote_code()), or {alternative}"
        )


def _hub_kernel(settings: object, implementation: str = "") -> str:
    """Find the first attention or experts implementation, at any depth, that is a hub name.

    Args:
        settings: settings of a model, or a part of them.
        implementation: name of the setting, around this part, that chooses an implementation; empty if there is none.

    Returns:
        Name and value of the setting; empty if there is none.
    """
    if isinstance(settings, str) and implementation and "/" in settings:
        return f"{implementation} {settings!r:.100}"
    if isinstance(settings, list):
        for item in settings:
            kernel = _hub_kernel(item, implementation)
            if kernel:
                return kernel
    if isinstance(settings, dict):
        for key, value in settings.items():
            is_choice = "implementation" in str(key)
            name = str(key) if is_choice else implementation
            kernel = _hub_kernel(value, name)
            if kernel:
                return kernel
    return ""


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
    if dtype is None:
        dtype = torch.float32
    model = from_pretrained(loader, name, use_safetensors=True, dtype=dtype).eval()
    remember_origin(model)
    return model


def setting(config: object, name: str) -> Any:
    """Return a setting of a model's configuration; None if it has no such setting."""
    return getattr(config, name, None)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of actions of a tokenizer: its largest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def misread_tokens(tokenizer: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens of a tokenizer that another one lacks, or has by other ids."""
    ids = reader.get_vocab()
    return [token for token, index in tokenizer.get_vocab().items() if ids.get(token) != index]


def check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a reference model reads the same tokens in the ids of a policy.

    Raises:
        ValueError: if an id is another token in the reference's tokenizer, or none; the message has the first one.
    """
    vocabulary = tokenizer.get_vocab()
    reference_vocabulary = reference_tokenizer.get_vocab()
    if vocabulary == reference_vocabulary:
        return
    token_of_id = {index: token for token, index in vocabulary.items()}
    reference_token_of_id = {index: token for token, index in reference_vocabulary.items()}
    differing_ids = [
        index
        for index in token_of_id.keys() | reference_token_of_id.keys()
        if token_of_id.get(index) != reference_token_of_id.get(index)
    ]
    first = min(differing_ids)
    token = token_of_id.get(first, "(none)")
    reference_token = reference_token_of_id.get(first, "(none)")
    raise ValueError(
        f"the reference (or teacher) has {len(reference_vocabulary)} tokens, the policy {len(vocabulary)}, and id "
        f"{first} is {reference_token!r} in the reference and {token!r} in the policy: it would score other texts than "
        "the policy wrote. Give a reference with the policy's tokenizer, or make the policy with the reference's"
    )


def plain_model(model: Model) -> PreTrainedModel:
    """Return the `transformers` model inside an adapted one, adapters included; return any other model itself."""
    if is_adapted(model):
        base: Any = model.get_base_model()
        return base
    return model


def trunk_of(model: Model, part: str = "") -> PreTrainedModel:
    """Return the plain model without its output layer (the trunk), or its part "encoder" or "decoder"."""
    plain: Any = plain_model(model)
    if part == "encoder":
        return plain.get_encoder()
    if part:
        return plain.get_decoder()
    if plain.base_model is plain:  # Llama 4
        return plain.model
    return plain.base_model


def check_adapter(model: Model) -> None:
    """Raise a ValueError if a model has an adapter that a saved policy could not hold.

    Raises:
        ValueError: on prompt tuning and related methods, which put virtual tokens before the text; on several adapters,
            side by side or one over the other; on an adapter that ties layers by itself.
    """
    if not is_adapted(model):
        return

    # Kinds of adapters that are not inside the layers, or that no copy would keep
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(model.active_peft_config).__name__} puts virtual tokens before the text, which positions and cache "
            "here do not support: use an adapter inside the layers, such as peft.LoraConfig"
        )
    if is_adapted(model.get_base_model()):
        raise ValueError(
            "the model has an adapter over another adapter, and only the outer one would be saved: merge the inner "
            "one into the weights first (model.merge_and_unload()), and give the result an adapter"
        )
    if getattr(model.active_peft_config, "target_modules_to_tie", None):
        raise ValueError(
            "the adapter has ensure_weight_tying=True for tied layers among its target_modules, whose weights peft "
            "keeps as two views of one memory: copies of the model would lose the tie. Leave ensure_weight_tying out, "
            "or name the layers in modules_to_save"
        )

    # Several adapters side by side
    if len(model.peft_config) > 1:
        names = ", ".join(model.peft_config)
        raise ValueError(
            f"the model has {len(model.peft_config)} adapters ({names}), and a saved policy holds one: remove the "
            "others (model.delete_adapter(name)), or merge them into the weights first (model.merge_and_unload())"
        )


def merged(model: Model) -> PreTrainedModel:
    """Return a copy of the model, with the adapters merged into its weights.

    An adapter may change one of two tied weights, such as the output layer and not the embedding. Then the copy has two
    separate weights, and its configuration says so.

    Raises:
        ValueError: if the merged model has other logits than the adapted one.
    """
    copied: Any = copy.deepcopy(model)
    if not is_adapted(model):
        return copied
    if model.device.type == "meta":  # `algos plan` has shapes alone, so there are no logits to compare
        return _without_layers_of_peft(copied.merge_and_unload)
    expected = trial_logits(copied.eval())
    config = plain_model(copied).config
    tied_settings = [setting(part, "tie_word_embeddings") for part in (config, config.get_text_config())]
    is_tied = any(tied_settings)

    # Merge with weights apart, and tie them again where they are still equal
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


def _untie(model: nn.Module) -> None:
    """Give every module weights of its own."""
    from torch import nn

    seen: set[int] = set()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) in seen:
                copied = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
                setattr(module, name, copied)
            seen.add(id(weight))


def _tied_if_equal(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its embeddings tied again, if that changes no weight; else the model as it is."""
    tied = _sharing_copy(model)
    _set_tied(tied, True)
    tied.tie_weights()
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in tied.named_parameters(remove_duplicate=False):
        if not weight.equal(weights[name]):
            return model
    return tied


def _set_tied(model: PreTrainedModel, tied: bool) -> None:
    """Write into a model's configurations whether its output layer is its embedding."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied


def trial_logits(model: Model) -> Tensor:
    """Return a model's logits for some tokens of its vocabulary, float32 on the CPU, to compare two models."""
    import torch

    config = model.config.get_text_config()
    count = min(16, setting(config, "max_position_embeddings") or 16)
    tokens = torch.linspace(0, config.vocab_size - 1, count, device=model.device).long()[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits.float().cpu()


def check_same_logits(expected: Tensor, logits: Tensor, *, dtype: torch.dtype, what: str) -> None:
    """Raise a ValueError if two results of `trial_logits` differ by more than rounding in a dtype explains.

    Args:
        expected: logits of the model with its adapter.
        logits: logits to compare.
        dtype: dtype of the weights.
        what: description of the model that has ``logits``, for the message.
    """
    from textenv.rollout import rounding_tolerance

    scale = max(1.0, expected.abs().max().item())
    gap = (logits - expected).abs().max().item()
    if not gap <= rounding_tolerance(dtype) * scale:
        raise ValueError(
            f"{what} has other logits than the model with its adapter beside the weights (they differ by {gap:.3g}), "
            "so it is not used: train an adapter that leaves embedding and output layer alone (targets=all-linear), or "
            "keep the adapter as it is"
        )


def merged_trunk(model: Model) -> PreTrainedModel:
    """Return a copy as `merged` does, without the output layer."""
    if is_adapted(model):
        return trunk_of(merged(model))
    return copy.deepcopy(trunk_of(model))


@no_progress_bars()
def save_model(model: Model, folder: Path) -> None:
    """Write a model; if adapted, only its adapter, and the base model where no name gives it.

    An adapter's folder names its base model: a name, or the absolute path of a folder or GGUF file. The base is saved
    in the subfolder ``base/`` if it has no name (built from a configuration, or loaded from a ``base/``), and if it is
    no longer what its name gives: fine-tuned, with tokens added, changed by the start of the adapter (PiSSA, OLoRA).
    Earlier contents of the folder do not affect loading.

    Raises:
        ValueError: if the adapter is merged into the weights at present.
    """
    has_adapter = is_adapted(model)
    if has_adapter and any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError("the adapter is merged into the weights of its base: call model.unmerge_adapter() to save it")

    # The model, or only its adapter
    with warnings.catch_warnings():  # of peft, about embeddings that it saves with the adapter
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`|Could not find a config file")
        model.save_pretrained(str(folder))
    if not has_adapter:
        (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
        (folder / ORIGIN_FILE).unlink(missing_ok=True)
        return
    generation_config = plain_model(model).generation_config
    if generation_config is not None:  # what ends the model's turns may differ from the base's
        generation_config.save_pretrained(folder)

    # The base model by its name, if the name still gives it; else in a subfolder
    base = _base_of(model)
    base_name = str(base.name_or_path or "")
    origin = Origin.of(base)
    is_unchanged = loads_unchanged(base, origin, partial(load_causal_lm, dtype=base.dtype))
    is_beside_adapter = bool(base_name) and Path(base_name).name == BASE and is_adapter(Path(base_name).parent)
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if is_unchanged and not is_beside_adapter:
        shutil.rmtree(folder / BASE, ignore_errors=True)
        if Path(base_name).is_dir():
            config["base_model_name_or_path"] = _SOURCES.get(base_name, str(Path(base_name).resolve()))
    else:
        is_in_this_folder = is_beside_adapter and Path(base_name).resolve() == (folder / BASE).resolve()
        if not (is_unchanged and is_in_this_folder):
            base.save_pretrained(folder / BASE)
        config["base_model_name_or_path"] = None  # another reader would take the base of that name
        if isinstance(config.get("init_lora_weights"), str):
            config["init_lora_weights"] = True  # otherwise the start of the adapter would change this base once more

    write_origin(origin, base, folder)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _base_of(model: Model) -> PreTrainedModel:
    """Return the model under an adapter: copies of its modules, which share all weights with the model."""
    adapted: Any = _sharing_copy(model)
    return _without_layers_of_peft(adapted.unload)


def _sharing_copy(model: ModuleT) -> ModuleT:
    """Return a copy of a model's modules that shares all weights with the model."""
    tensors = [*model.parameters(), *model.buffers()]
    shared = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, shared)


def _without_layers_of_peft(unload: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Unload an adapter. Repeat it while a layer is left that was adapted in two ways, one inside the other."""
    plain = unload()
    while any(hasattr(module, "unload_and_optionally_merge_module") for module in plain.modules()):
        plain = unload()
    return plain


def load_adapter(folder: str | Path, *, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load the base model with a saved adapter, which can be trained further.

    Raises:
        ImportError: if `peft` is not installed.
        ValueError: if the base model cannot be found, or the adapter is not in safetensors.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    peft = package("peft", "lora")

    # The base model
    base_folder = Path(folder) / BASE
    base_name = _adapter_settings(folder).get("base_model_name_or_path")
    base = str(base_folder) if base_folder.is_dir() else base_name
    if not base or (Path(base).is_absolute() and not Path(base).exists()):
        reason = f"its {ADAPTER_CONFIG} names no base model"
        if base_name:
            reason = f"its base model {base_name!r} does not exist"
        raise ValueError(
            f"{folder} holds an adapter, but {reason}: save the base in {base_folder}, or put its path or hub name in "
            f"base_model_name_or_path of {ADAPTER_CONFIG}"
        )
    base_model = load_causal_lm(base, dtype=dtype)
    if has_other_weights(base_model, Path(folder)):
        logging.getLogger(__name__).warning(
            "the adapter in %s was trained on other weights of its base model %r than those that are there now, so it "
            "will not do what it did: give it the former model",
            folder, base,
        )  # fmt: skip

    # The adapter
    try:
        with torch.device("cpu"), warnings.catch_warnings(action="ignore", category=FutureWarning):
            model = peft.PeftModel.from_pretrained(base_model, str(folder), is_trainable=True)
    except ImportError:
        raise
    except Exception as error:  # a file of somebody else may make it raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the adapter in {folder} does not fit its base model {base!r}: {reason:.1000}") from error
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        generation_config = from_pretrained(GenerationConfig, folder)
        vars(generation_config).pop("trust_remote_code", None)  # an option of loading, which became a setting
        plain_model(model).generation_config = generation_config
    return model


def add_lora(model: PreTrainedModel, lora: str | PeftConfig, *, seed: int) -> PreTrainedModel:
    """Freeze a model, and put trainable adapters (LoRA) on its linear layers.

    Args:
        model: a `transformers` model without an adapter.
        lora: a `peft.LoraConfig`, or settings such as ``"r=16,alpha=32,targets=q_proj+v_proj,layers=10"``. By default r
            is 16, alpha is 32, and the targets are all linear layers but the output ("LoRA Without Regret", Schulman et
            al. 2025). With ``layers`` only the last so many layers have adapters (of an encoder-decoder: of the
            decoder), and training computes no gradient below.
        seed: seed of the initial weights.

    Raises:
        ImportError: if `peft` is not installed.
        ValueError: if a setting is unknown or not valid, or the model has an adapter already.
    """
    import torch

    peft = package("peft", "lora")
    if is_adapted(model):
        raise ValueError(f"lora is {lora!r}, but the model has an adapter already, which is trained further: omit lora")
    try:
        config = lora
        names: list[str] = []
        if isinstance(lora, str):
            config, names = _lora_config(lora, model)
        # peft still uses an old name in transformers, which warns of it
        with torch.random.fork_rng(), warnings.catch_warnings(action="ignore", category=FutureWarning):
            torch.manual_seed(seed)
            adapted = peft.get_peft_model(model, config)
        if names:
            _check_last_layers(adapted, names)
        return adapted
    except ValueError as error:  # of peft too
        expected = "r=16,alpha=32,targets=q_proj+v_proj,layers=10"
        raise ValueError(f"lora is {lora!r:.100}, expected settings such as {expected}: {error}") from error


def _check_last_layers(adapted: PreTrainedModel, names: Collection[str]) -> None:
    """Raise a ValueError if weights of other modules than those with these names have got an adapter.

    `peft` adapts a mixture of experts in all layers if its weights have the names of these modules.
    """
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and not any(f".{module_name}." in name for module_name in names):
            raise ValueError(
                f"layers does not suit this model, because peft adapts {name}, too: leave layers out, or give targets "
                "such as q_proj+v_proj"
            )


def _lora_config(text: str, model: PreTrainedModel) -> tuple[PeftConfig, list[str]]:
    """Return the `peft.LoraConfig` for settings as `add_lora` takes them; raise a ValueError for unknown ones.

    With ``layers`` also the names of the only modules that may have an adapter, else no names.
    """
    from transformers.pytorch_utils import Conv1D

    # Settings, such as {"r": "16", "targets": "q_proj+v_proj"}
    settings = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        settings[name] = value
    targets = settings.pop("targets", "all-linear")
    target_modules: str | list[str] = targets
    if targets != "all-linear":
        target_modules = targets.split("+")

    rank = int(settings.pop("r", "16"))
    alpha = int(settings.pop("alpha", "32"))
    names: list[str] = []
    if "layers" in settings:
        names = _linear_names(int(settings.pop("layers")), target_modules, model)
        target_modules = names
    task_type = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    config = package("peft", "lora").LoraConfig(
        task_type=task_type,
        r=rank,
        lora_alpha=alpha,
        target_modules=target_modules,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    if settings:
        raise ValueError(f"no setting is named {', '.join(settings)} (dropout is always off in training here)")
    return config, names


def _linear_names(count: int, targets: str | list[str], model: PreTrainedModel) -> list[str]:
    """Return the full names of the linear modules in a model's last layers: of all, or of those with these last names.

    `peft` itself has `layers_to_transform`, but not for ``all-linear``.

    Raises:
        ValueError: if the model has fewer layers, they are not known, or they have no such modules.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from textenv.lm.memory import layers_of

    # The last layers
    part = "decoder" if model.config.is_encoder_decoder else ""
    layers = layers_of(trunk_of(model, part))
    if not layers:
        raise ValueError(
            f"layers is not supported for {type(model).__name__}, whose layers are not known: leave it out"
        )
    if not 1 <= count <= len(layers):
        raise ValueError(f"layers is {count}, expected 1 to {len(layers)}, the number of the model's layers")

    # Their linear modules
    in_last_layers = {module for layer in layers[-count:] for module in layer.modules()}
    names = []
    for name, module in model.named_modules():
        is_target = targets == "all-linear" or name.rpartition(".")[2] in targets
        if module in in_last_layers and is_target and isinstance(module, (nn.Linear, Conv1D)):
            names.append(name)
    if not names:
        raise ValueError(f"targets is {targets}, but the last layers have no linear modules with such names")
    return names


def is_adapted(model: object) -> TypeIs[PeftModel]:
    """Return True for a model of `peft`, without importing `peft`: if it is not imported, there are none."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)
