"""Tiny trainings, into a folder, of which a test spoils one thing."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from algos import PPO, TRPO, LMPolicy
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import cartpole, mlp_for
from tests.helpers.text_envs import good, make_env
from textenv import KLPenalty

SLOTS = 4


class Bandit(gym.Env):
    """Steps that pay what a function says of the number of steps so far, the action and the random numbers.

    Observations are what another function says of the number of steps so far, and a random number.
    """

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, pay, *, observe=lambda steps: 0.0, length=4):
        self.pay, self.observe, self.length, self.steps = pay, observe, length, 0

    def observation(self):
        return np.array([self.observe(self.steps), self.np_random.normal()], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        self.left -= 1
        reward = float(self.pay(self.steps, action, self.np_random))
        return self.observation(), reward, self.left == 0, False, {}


def first_action(steps, action, rng):
    """Pays for the first action."""
    return action == 0


def bandit(pay=first_action, **options):
    return SyncVectorEnv([lambda: Bandit(pay, **options) for _ in range(SLOTS)])


def train_control(folder, env=None, *, algorithm=PPO, iterations=14, normalize_observations=False, diagnose=None,
                  loggers=(), **options):  # fmt: skip
    """About so many iterations of PPO on CartPole, or of what else is given."""
    env = cartpole(SLOTS) if env is None else env
    policy = None
    if algorithm in (PPO, TRPO):
        policy = mlp_for(env, normalize_observations=normalize_observations)
        options = dict(num_steps=32, learning_rate=3e-3) | options
    if algorithm is PPO:
        options = dict(minibatch_size=32, num_epochs=4) | options
    agent = algorithm(env, policy, **options)
    total_steps = iterations * env.num_envs * agent.config.num_steps
    agent.learn(total_steps, run_dir=folder, diagnose=diagnose, loggers=loggers)
    env.close()


def train_text(folder, env=None, *, algorithm=PPO, iterations=11, reward=good, kl_coef=None, generator=None,
               callbacks=(), policy=None, **options):  # fmt: skip
    """So many iterations of PPO on answers of nine words, or of what else is given."""
    env = make_env(reward, num_envs=16) if env is None else env
    policy = policy or LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    penalty = None if kl_coef is None else KLPenalty(policy.reference(), coef=kl_coef)
    options = dict(num_steps=None, num_episodes=16, learning_rate=3e-3) | options
    if algorithm is PPO:
        options = dict(minibatch_size=8, num_epochs=2) | options
    agent = algorithm(env, policy, penalty=penalty, generator=generator, **options)

    def is_over(metrics):
        return metrics["iteration"] >= iterations

    agent.learn(10**6, run_dir=folder, callbacks=callbacks, on_iteration=is_over, checkpoint_every=10**6)
