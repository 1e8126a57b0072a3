"""A modular RL kit: one interface that trains control policies and language models."""

import lazy_loader

# Public names are listed in __init__.pyi and imported at first use: a control run never loads transformers.
_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name at its first use; any other name raises an error that says where it is."""
    if name in __all__:
        return _public_name(name)
    from textenv.names import missing_name  # imports Gymnasium, which `import algos` does without

    raise missing_name(__name__, name)
