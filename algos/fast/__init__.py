"""Faster implementations for control; each has a plain equivalent."""
