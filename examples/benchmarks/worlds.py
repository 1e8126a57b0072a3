"""Steps a second of PPO on other worlds than CartPole, ours or Stable-Baselines3's: one line ``RESULT {"ours": ...}``.

Both have the same environments, networks, steps, minibatches and epochs. Run by ``control.py`` with either interpreter:

    python examples/benchmarks/worlds.py pendulum --library ours

pendulum  8 environments of 256 steps, 10 epochs of minibatches of 256, two networks of 64 x 64
lstm      CartPole, 8 environments of 128 steps, 4 epochs of 2 rows, an LSTM of 64 (ours has a layer of 64 before it)
cnn       8 environments of 32 images 4 x 84 x 84, 4 epochs of 64, the network of Mnih et al. (2015)
"""

import argparse
import json
import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

WORLDS = {"pendulum": (8, 256, 10, 256), "lstm": (8, 128, 4, 256), "cnn": (8, 32, 4, 64)}
"""Environments, steps, epochs, and steps of a minibatch."""


class Images(gymnasium.Env):
    """Images of one random grey each, episodes of 100 steps."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._image(), {}

    def step(self, action):
        self.steps += 1
        return self._image(), float(action == 0), False, self.steps >= 100, {}

    def _image(self):
        return np.full((4, 84, 84), self.np_random.integers(256), dtype=np.uint8)


def make(world):
    """One environment."""
    return Images() if world == "cnn" else gymnasium.make("Pendulum-v1" if world == "pendulum" else "CartPole-v1")


def ours(world, slots, steps, epochs, size):
    """A function that trains for one rollout and update."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    from algos import PPO, PPOConfig
    from algos.policies.registry import make_policy

    # As Stable-Baselines3's: a step that ends an episode returns the first observation of the next.
    env = SyncVectorEnv([lambda: make(world)] * slots, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env, policy={"pendulum": "mlp"}.get(world, world))
    size = size // steps if world == "lstm" else size  # rows
    agent = PPO(env, policy, PPOConfig(num_steps=steps, num_epochs=epochs, minibatch_size=size, learning_rate=3e-4))
    return lambda: agent.update(agent.collect())


def theirs(world, slots, steps, epochs, size):
    """The same of Stable-Baselines3, or its contributed recurrent PPO."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([lambda: make(world)] * slots)
    kind, name, more = PPO, {"pendulum": "MlpPolicy", "cnn": "CnnPolicy"}.get(world, "MlpLstmPolicy"), {}
    if world == "lstm":
        from sb3_contrib import RecurrentPPO

        kind = RecurrentPPO
        more = dict(lstm_hidden_size=64, shared_lstm=True, enable_critic_lstm=False, net_arch=[])
    agent = kind(name, env, n_steps=steps, batch_size=size, n_epochs=epochs, policy_kwargs=more, device="cpu")
    agent.set_logger(Logger(None, []))
    _, callback = agent._setup_learn(10**9)

    def iterate():
        agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, n_rollout_steps=steps)
        agent._update_current_progress_remaining(agent.num_timesteps, 10**9)
        agent.train()

    return iterate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--library", choices=["ours", "sb3"], default="ours")
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    iterate = {"ours": ours, "sb3": theirs}[options.library](options.world, *WORLDS[options.world])
    iterate()  # warms up
    start = time.process_time()
    for _ in range(options.iterations):
        iterate()
    slots, steps, *_ = WORLDS[options.world]
    speed = slots * steps * options.iterations / (time.process_time() - start)
    print("RESULT " + json.dumps({"ours": speed}), flush=True)


if __name__ == "__main__":
    main()
