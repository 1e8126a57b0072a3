"""Text environments: one prompt and one completion, conversations, and string environments played token by token."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
