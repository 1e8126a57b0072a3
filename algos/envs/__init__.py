"""Environments in separate processes, what environments return, and observations flattened to one Box.

Imports neither torch nor textenv.
"""
