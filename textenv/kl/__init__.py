"""KL penalties towards a reference model: batched, with several estimators, and constant or changing coefficients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
