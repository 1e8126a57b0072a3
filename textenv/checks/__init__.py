"""Checkers for common bugs in text environments and reward functions."""
