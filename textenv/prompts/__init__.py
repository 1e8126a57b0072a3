"""Prompts: their order and splits, files of them, and the way from words to token ids."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
