"""PPO on MuJoCo beside a program in the manner of CleanRL's ppo_continuous_action.py, in turn in one process.

    python examples/benchmarks/mujoco_speed.py
    python examples/benchmarks/mujoco_speed.py --env HalfCheetah-v5 Hopper-v5 --json docs/results/data/mujoco-speed.json

Both have the same settings: one environment, 2,048 steps, 10 epochs of 32 minibatches, two networks of 64 and 64 units,
normalized observations and rewards. A round is one iteration of each, on one thread. The figures are environment steps
per second of processor time, and the ratio is ours divided by theirs.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from alternation import row
from gymnasium import wrappers
from page import machine, print_and_save
from torch import nn

from algos import presets

STEPS = 2_048
EPOCHS = 10
MINIBATCH = 64
GAMMA = 0.99
LAMBDA = 0.95
CLIP = 0.2
ITERATIONS = 488
"""Of a million steps, over which the learning rate falls."""
EPISODES = 100
"""Episodes of the end of a training whose mean return CleanRL reports."""


def layer(inputs, outputs, gain=2**0.5):
    """A linear layer with orthogonal weights and zero bias."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def network(inputs, outputs, gain):
    """Two hidden layers of 64 units."""
    return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


class CleanRLStyle:
    """A single-file program: wrappers of Gymnasium, tensors allocated once, loops over steps and minibatches."""

    def __init__(self, env_id, seed=1):
        torch.manual_seed(seed)
        np.random.seed(seed)

        def make():
            env = wrappers.RecordEpisodeStatistics(gymnasium.make(env_id), buffer_length=EPISODES)
            env = wrappers.NormalizeObservation(wrappers.ClipAction(env))
            env = wrappers.TransformObservation(
                env, lambda observation: np.clip(observation, -10, 10), env.observation_space
            )
            env = wrappers.NormalizeReward(env, gamma=GAMMA)
            return wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))

        # The mode of Gymnasium 0.29, which CleanRL uses: no step is spent on a reset
        self.envs = gymnasium.vector.SyncVectorEnv([make], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        num_inputs = int(np.prod(self.envs.single_observation_space.shape))
        num_actions = int(np.prod(self.envs.single_action_space.shape))
        self.critic = network(num_inputs, 1, 1.0)
        self.actor = network(num_inputs, num_actions, 0.01)
        self.log_std = nn.Parameter(torch.zeros(1, num_actions))
        self.parameters = [*self.critic.parameters(), *self.actor.parameters(), self.log_std]
        self.optimizer = torch.optim.Adam(self.parameters, lr=3e-4, eps=1e-5)
        self.iteration = 0

        self.observations = torch.zeros(STEPS, 1, num_inputs)
        self.actions = torch.zeros(STEPS, 1, num_actions)
        self.log_probs = torch.zeros(STEPS, 1)
        self.rewards = torch.zeros(STEPS, 1)
        self.dones = torch.zeros(STEPS, 1)
        self.values = torch.zeros(STEPS, 1)
        first, _ = self.envs.reset(seed=seed)
        self.next_observation = torch.tensor(first, dtype=torch.float32)
        self.next_done = torch.zeros(1)

    def last_return(self):
        """Mean return of the last `EPISODES` episodes, as the game pays it."""
        return float(np.mean(self.envs.envs[0].get_wrapper_attr("return_queue")))

    def distribution(self, observation):
        """A Gaussian whose deviation does not depend on the observation."""
        mean = self.actor(observation)
        return torch.distributions.Normal(mean, self.log_std.expand_as(mean).exp())

    def train(self):
        """One iteration: collect and learn."""
        self.optimizer.param_groups[0]["lr"] = 3e-4 * (1 - self.iteration / ITERATIONS)
        self.iteration += 1
        self.collect()
        self.learn(*self.estimates())

    def collect(self):
        """Play the steps of a rollout."""
        for step in range(STEPS):
            self.observations[step] = self.next_observation
            self.dones[step] = self.next_done
            with torch.no_grad():
                distribution = self.distribution(self.next_observation)
                action = distribution.sample()
                self.values[step] = self.critic(self.next_observation).flatten()
            self.actions[step] = action
            self.log_probs[step] = distribution.log_prob(action).sum(1)
            observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            self.rewards[step] = torch.tensor(reward)
            self.next_observation = torch.tensor(observation, dtype=torch.float32)
            self.next_done = torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)

    @torch.no_grad()
    def estimates(self):
        """Advantages and returns, by generalized advantage estimation."""
        next_value = self.critic(self.next_observation).flatten()
        advantages = torch.zeros_like(self.rewards)
        following = torch.zeros(1)
        not_done = 1 - self.next_done
        for step in reversed(range(STEPS)):
            delta = self.rewards[step] + GAMMA * next_value * not_done - self.values[step]
            following = delta + GAMMA * LAMBDA * not_done * following
            advantages[step] = following
            next_value = self.values[step]
            not_done = 1 - self.dones[step]
        return advantages, advantages + self.values

    def learn(self, advantages, returns):
        """The epochs of minibatches."""
        columns = [self.observations, self.actions, self.log_probs, advantages, returns, self.values]
        columns = [column.flatten(0, 1) for column in columns]
        order = np.arange(STEPS)
        for _ in range(EPOCHS):
            np.random.shuffle(order)
            for start in range(0, STEPS, MINIBATCH):
                rows = order[start : start + MINIBATCH]
                observation, action, old_log_prob, advantage, target, old_value = (column[rows] for column in columns)

                # Policy
                distribution = self.distribution(observation)
                ratio = (distribution.log_prob(action).sum(1) - old_log_prob).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()

                # Value, clipped
                value = self.critic(observation).flatten()
                clipped_value = old_value + (value - old_value).clamp(-CLIP, CLIP)
                value_loss = 0.5 * torch.max((value - target) ** 2, (clipped_value - target) ** 2).mean()

                self.optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


def steps_per_second(train):
    """Environment steps per second of processor time of one iteration."""
    start = time.process_time()
    train()
    return STEPS / (time.process_time() - start)


def measure(env_id, *, rounds):
    """A row of the table: pairs of iterations on an environment."""
    agent = presets.recipe(env_id).build(seed=1)
    peer = CleanRLStyle(env_id)

    def train_ours():
        agent.learn(STEPS)

    train_ours()
    peer.train()
    pairs = [(steps_per_second(train_ours), steps_per_second(peer.train)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return row("mujoco", env_id, unit="steps/s", peer_name="CleanRL-style", ours=ours, peer=theirs, rate=True)


def main():
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["HalfCheetah-v5"])
    parser.add_argument("--rounds", type=int, default=10, help="pairs of iterations")
    parser.add_argument("--json", type=Path, help="write the table to this file of docs/results/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine("python " + " ".join(map(shlex.quote, sys.argv)))
    rows = [measure(env_id, rounds=options.rounds) for env_id in options.env]
    print_and_save(rows, about, options.json, kinds=["control"])


if __name__ == "__main__":
    main()
