"""The language-model runtime: loading, scoring, cached decoding, sampling."""
