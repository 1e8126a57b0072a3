"""Processes in which code that a model wrote is tested: without files, network, other processes or our variables."""
