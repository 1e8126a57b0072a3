"""Environments in processes of their own, and observations as one Box. Imports neither torch nor textenv."""
