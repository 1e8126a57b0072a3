"""Adapters between the environments of other libraries and those of this package."""
