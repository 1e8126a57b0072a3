"""Text as a Gymnasium environment: prefixes are states, tokens are actions."""

import lazy_loader

from textenv.names import missing_name
from textenv.registration import register_envs

# Public names are listed in __init__.pyi and imported at first use, so a control run never loads transformers.
_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name at its first use; any other name raises an error that says where it is."""
    if name in __all__:
        return _public_name(name)
    raise missing_name(__name__, name)


register_envs()
