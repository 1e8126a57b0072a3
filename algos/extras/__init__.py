"""What not all users need: generation by vLLM, rollouts by Ray's workers."""
