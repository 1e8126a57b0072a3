"""Numbers that several results share: intervals over seeds or prompts, pass@k and maj@k."""
