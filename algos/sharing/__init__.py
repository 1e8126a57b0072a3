"""Runs for others: summaries, model cards, and the Hugging Face Hub."""
