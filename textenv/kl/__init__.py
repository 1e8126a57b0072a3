"""KL penalties towards a reference model: in batches, by several estimators, with constant or moving coefficients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
