"""Comparisons: several training runs, their metrics, and the report."""
