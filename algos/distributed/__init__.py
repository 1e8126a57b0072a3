"""Workers and engines: what collects rollouts elsewhere than in this process."""
