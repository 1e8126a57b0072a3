"""Environments in separate processes, and observations flattened to one Box. Imports neither torch nor textenv."""
