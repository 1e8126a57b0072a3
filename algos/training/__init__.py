"""A training run: its loop, checkpoints, logs and checks."""
