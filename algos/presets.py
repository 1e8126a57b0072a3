"""Named hyper-parameters. Where they come from stands beside each."""

from __future__ import annotations

from dataclasses import dataclass

from algos.ppo import PPOConfig

CARTPOLE = PPOConfig(
    steps=64,
    epochs=8,
    minibatch_size=256,
    learning_rate=3e-3,
    final_learning_rate=1.5e-4,
    gamma=0.98,
    gae_lambda=0.9,
    value_coefficient=0.5,
    max_grad_norm=1.0,
)
"""CartPole-v1 with 16 environments; found here, see the README."""

CARTPOLE_LSTM = PPOConfig(
    steps=64,
    epochs=4,
    minibatch_size=8,
    learning_rate=2e-3,
    final_learning_rate=0.0,
    gamma=0.99,
    gae_lambda=0.95,
    value_coefficient=0.5,
    max_grad_norm=1.0,
    normalize_rewards=True,
)
"""CartPole-v1 with its velocities hidden, in 150,000 steps with 32 environments; found here.

For `LSTMPolicy` with normalised observations; a minibatch is 8 rows. Without normalised rewards the gradient
of the value drowns the policy's in the layers that they share, and nothing is learnt.
"""

CARTPOLE_ZOO = PPOConfig(
    steps=32,
    epochs=20,
    minibatch_size=256,
    learning_rate=1e-3,
    final_learning_rate=0.0,
    gamma=0.98,
    gae_lambda=0.8,
    clip_range=0.2,
    final_clip_range=0.0,
    value_coefficient=1.0,
    max_grad_norm=0.5,
)
"""CartPole-v1 in 100,000 steps with 8 environments; rl-baselines3-zoo, ``hyperparams/ppo.yml``.

Its value coefficient of .5 is 1 here, because Stable-Baselines3's value loss is the whole squared error.
"""

TEXT = PPOConfig(
    steps=None,
    episodes=128,
    epochs=2,
    minibatch_size=32,
    learning_rate=5e-4,
    final_learning_rate=1e-4,
    gamma=1.0,
    gae_lambda=0.95,
    value_coefficient=0.5,
    max_grad_norm=1.0,
    bootstrap_truncated=False,
)
"""Short texts by small models, with a KL penalty; found here, see the README."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the command line starts from: a preset and the choices around it."""

    config: PPOConfig = PPOConfig()
    num_envs: int = 8
    total_steps: int = 500_000
    kl_coefficient: float | None = None


RECIPES = {
    "CartPole-v1": Recipe(config=CARTPOLE, num_envs=16, total_steps=35_000),
    "textenv/Reviews-v0": Recipe(config=TEXT, num_envs=64, total_steps=48_000, kl_coefficient=0.1),
    "textenv/Periods-v0": Recipe(config=TEXT, num_envs=64, total_steps=90_000, kl_coefficient=0.001),
    "textenv/Copy-v0": Recipe(config=TEXT, num_envs=64, total_steps=200_000, kl_coefficient=0.0),
    "textenv/Sort-v0": Recipe(config=TEXT, num_envs=64, total_steps=200_000, kl_coefficient=0.0),
}


def recipe(env_id: str) -> Recipe:
    """The recipe of an environment; for one that has none, PPO's defaults or, for text, a general one."""
    other = Recipe(config=TEXT, num_envs=64, total_steps=100_000, kl_coefficient=0.01)
    return RECIPES.get(env_id, other if env_id.startswith("textenv/") else Recipe())
