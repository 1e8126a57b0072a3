"""The embedded default: a grammar of reviews, and small models that are trained on it at first use.

Importing this loads neither torch nor transformers; `embedded_folder` imports them only to build.
"""

from textenv.embedded.folder import embedded_folder
from textenv.embedded.grammar import Review, accepts, label_of, openings, sample_review

__all__ = ["Review", "accepts", "embedded_folder", "openings", "sample_review", "label_of"]
