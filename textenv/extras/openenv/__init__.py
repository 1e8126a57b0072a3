"""Environments on servers of the package ``openenv``."""
