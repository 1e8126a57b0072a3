"""A policy behind OpenAI's protocol: only to answer, or to be trained on what it answers."""
