"""Other libraries' environments as ours, and ours as theirs."""
