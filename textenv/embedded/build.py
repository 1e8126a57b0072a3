"""Makes the embedded tokenizer, language model and classifier, and keeps them in the user's cache."""

from __future__ import annotations

from pathlib import Path

from textenv.embedded.cache import cache_root, cached, fingerprint

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages whose version changes what is built."""


def embedded_folder() -> Path:
    """The folder with ``lm/`` and ``classifier/``, both as by `save_pretrained`, tokenizer included.

    Built at the first call (about 40 s on one thread); afterwards found in the cache by a hash of this
    package's source and of the versions of `PACKAGES`. Raises OSError if the cache cannot be written.
    """
    name = f"embedded-{fingerprint(Path(__file__).parent.glob('*.py'), PACKAGES)}"
    return cached(cache_root() / name, build)


def build(folder: Path) -> None:
    """Train everything and write it into an existing folder."""
    # Imported here: whoever only asks for a folder that is already there waits for neither of the two.
    from textenv.embedded.classifier import train_classifier
    from textenv.embedded.language_model import train_language_model
    from textenv.embedded.tokenizer import train_tokenizer
    from textenv.progress import no_progress_bars

    tokenizer = train_tokenizer()
    with no_progress_bars():
        for name, train in (("lm", train_language_model), ("classifier", train_classifier)):
            train(tokenizer).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
