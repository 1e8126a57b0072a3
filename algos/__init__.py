"""A modular RL kit: one interface that trains control policies and language models."""

import lazy_loader

# Public names are listed in __init__.pyi and imported at first use: a control run never loads transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
