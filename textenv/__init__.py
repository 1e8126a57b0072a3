"""Text as a Gymnasium environment: prefixes are states, tokens are actions."""

import lazy_loader

from textenv.registration import register_envs

# Public names are listed in __init__.pyi and imported at first use, so a control run never loads transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_envs()
