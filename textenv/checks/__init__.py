"""Checkers: what text environments and reward functions keep doing wrong."""
