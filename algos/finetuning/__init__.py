"""Training besides PPO: supervised fine-tuning, reward models, and plain text as a term of PPO's loss."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
