"""Insight: what training changed inside a policy."""
