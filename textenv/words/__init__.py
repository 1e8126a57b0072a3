"""Environments in words: descriptions of observations, words for actions, and the wrapper with Text spaces."""
