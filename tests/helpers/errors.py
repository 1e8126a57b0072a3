"""Errors by the words that they must say."""

import pytest


def refused(kind, *words):
    """The error must mention each of these words."""
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{word})" for word in words))
