"""Beside the training: comparisons and reports, insight into networks, model cards, the memory plan."""
