"""Comparisons: several trainings, their quantities, and the page about them."""
