"""Reward functions: several with weights, and ready-made ones."""
