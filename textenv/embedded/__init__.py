"""The embedded default: a review grammar, and the small models that the project makes from it by itself.

Importing this loads neither torch nor transformers; `embedded_folder` does, and only to build.
"""

from textenv.embedded.cache import embedded_folder
from textenv.embedded.grammar import Review, accepts, openings, sample_review, sentiment

__all__ = ["Review", "accepts", "embedded_folder", "openings", "sample_review", "sentiment"]
