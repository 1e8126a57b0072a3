"""Logits in chunks of a few rows: only half a million rows of nine words would fill one of the real size."""


def limit_logits(monkeypatch, elements):
    """Let a language model compute at most so many logits at once."""
    monkeypatch.setattr("textenv.lm.model.CHUNK_ELEMENTS", elements)
