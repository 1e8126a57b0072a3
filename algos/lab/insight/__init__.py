"""Interpretation of what training changed: language models, control policies, and the training's own dynamics."""
