"""The folder of the embedded tokenizer and models, which is built at first use."""

from pathlib import Path

from textenv.cache import cache_root, cached, fingerprint
from textenv.embedded import phrases

EMBEDDED = "embedded"
"""Name of the model that the project builds itself, without any download."""
VERSION = 1
"""Version of the built files: raise it when tokenizer, models or training change (not when the grammar's tables do)."""
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages whose version affects the built files."""


def embedded_folder() -> Path:
    """Return the folder with ``lm/`` and ``classifier/``, each written by `save_pretrained`, tokenizer included.

    The first call builds the folder (about 40 s on one thread); later ones find it in the cache. The cache key is
    `VERSION`, the grammar's tables and the versions of `PACKAGES`.

    Raises:
        OSError: if the cache cannot be written.
    """
    tables = {name: table for name, table in vars(phrases).items() if name.isupper()}
    key = fingerprint((VERSION, tables), PACKAGES)
    return cached(cache_root() / f"embedded-{key}", build, what="the embedded model (about 40 s)")


def build(folder: Path) -> None:
    """Train the models and write them into an existing folder."""
    # Imported here, so that a call with a cached folder does not import torch and transformers
    from textenv.embedded.training import train_classifier, train_language_model, train_tokenizer
    from textenv.progress import no_progress_bars

    tokenizer = train_tokenizer()
    with no_progress_bars():
        for name, train in (("lm", train_language_model), ("classifier", train_classifier)):
            train(tokenizer).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
