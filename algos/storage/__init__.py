"""Files of runs, checkpoints and agents: written, read safely, and shared on the Hugging Face Hub."""
