"""Named hyper-parameters that differ from the defaults of `algos.config`, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from algos.config import (
    CONFIGS,
    A2CConfig,
    Config,
    DQNConfig,
    GRPOConfig,
    PPOConfig,
    REINFORCEConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    SACConfig,
    TD3Config,
    TRPOConfig,
    find_config,
)
from algos.make import ATARI, is_text
from algos.recipe import Recipe as Recipe
from textenv.kl.coefficients import AdaptiveCoefficient

if TYPE_CHECKING:
    from algos.agent import Agent

CARTPOLE = PPOConfig(
    num_steps=64, num_epochs=8, minibatch_size=256, learning_rate=3e-3, final_learning_rate=1.5e-4, gamma=0.98,
    gae_lambda=0.9, max_grad_norm=1.0,
)  # fmt: skip
"""CartPole-v1 with 16 environments; tuned here, see docs/results."""

CARTPOLE_LSTM = PPOConfig(
    num_steps=64, minibatch_size=8, learning_rate=2e-3, final_learning_rate=0.0, max_grad_norm=1.0,
    normalize_rewards=True,
)  # fmt: skip
"""CartPole-v1 with hidden velocities, in 150,000 steps with 32 environments; tuned here.

For `LSTMPolicy` with normalized observations; a minibatch is 8 rows. Without normalized rewards, the gradient of the
value dominates that of the policy in the shared layers, and nothing is learnt.
"""

CARTPOLE_ZOO = PPOConfig(
    num_steps=32, num_epochs=20, minibatch_size=256, learning_rate=1e-3, final_learning_rate=0.0, gamma=0.98,
    gae_lambda=0.8, final_clip_range=0.0, vf_coef=1.0,
)  # fmt: skip
"""CartPole-v1 in 100,000 steps with 8 environments; rl-baselines3-zoo, ``hyperparams/ppo.yml``.

The value coefficient is 1 instead of .5, because Stable-Baselines3's value loss is the whole squared error.
"""

ACROBOT = PPOConfig(
    num_epochs=10, minibatch_size=256, learning_rate=3e-3, final_learning_rate=1e-4, gae_lambda=0.94,
    normalize_rewards=True,
)  # fmt: skip
"""Acrobot-v1 with 16 environments and normalized observations; tuned here.

Discount and trace decay are those of rl-baselines3-zoo, the rest is tuned for a fifth of its million steps.
"""

PENDULUM = PPOConfig(
    num_epochs=10, minibatch_size=256, learning_rate=3e-3, final_learning_rate=0.0, gamma=0.95, normalize_rewards=True
)
"""Pendulum-v1 with 16 environments and exploration noise held for 4 steps; tuned here.

The noise is rl-baselines3-zoo's; its discount of .9 gave a return about 15 lower here.
"""

MOUNTAIN_CAR = PPOConfig(
    num_epochs=10, minibatch_size=1024, learning_rate=3e-3, final_learning_rate=0.0, gae_lambda=0.98, vf_coef=1.0,
    ent_coef=0.03, normalize_rewards=True,
)  # fmt: skip
"""MountainCar-v0 with 32 environments and normalized observations; tuned here.

Discount and trace decay are those of rl-baselines3-zoo; its rollouts of 256 steps and minibatches of 64 gave a return
about 20 lower here. With an entropy bonus of .01, one seed in five learnt one swing too many (return -143).
"""

MOUNTAIN_CAR_CONTINUOUS = PPOConfig(
    num_epochs=10, minibatch_size=256, learning_rate=1e-3, final_learning_rate=1e-4, normalize_rewards=True
)
"""MountainCarContinuous-v0 with 16 environments, normalized observations and noise held for 32 steps; tuned here.

The car's own swing has a period of about 72 steps: noise held for 32 steps rocks it up to the goal in the first
rollouts. With noise held for 8 steps, both runs failed and learnt to stand still.
With 8 environments, one seed in five failed.
"""

TOY_TEXT = PPOConfig(
    num_steps=64, minibatch_size=256, learning_rate=5e-3, final_learning_rate=0.0, gamma=0.98, gae_lambda=0.9,
    ent_coef=0.03, normalize_rewards=True, normalize_advantage=False,
)  # fmt: skip
"""Taxi-v4, CliffWalking-v1 and FrozenLake8x8-v1 (without slipping) with 16 environments; tuned here.

Advantages are not normalized: until the first goal they are noise, and noise that is scaled up ends the exploration
(one seed in five on FrozenLake, and a detour on CliffWalking).
"""

LUNAR_LANDER = PPOConfig(
    num_steps=512, num_epochs=6, minibatch_size=256, learning_rate=1e-3, final_learning_rate=1e-4, gamma=0.999,
    gae_lambda=0.98, vf_coef=1.0, ent_coef=0.01, normalize_rewards=True,
)  # fmt: skip
"""LunarLander-v3 with 16 environments; tuned here.

Discount, trace decay and entropy bonus are those of rl-baselines3-zoo. With γ = .995, λ = .95 and twice the learning
rate, one seed of three failed.
"""

MUJOCO = PPOConfig(
    num_steps=2048, num_epochs=10, minibatch_size=64, learning_rate=3e-4, final_learning_rate=0.0, clip_range_vf=0.2,
    normalize_rewards=True, bootstrap_truncated=False,
)  # fmt: skip
"""MuJoCo with one environment and normalized observations; CleanRL, ``ppo_continuous_action.py``.

As there, a time limit counts as an end. Differences: normalized rewards are not clipped to ±10, and observations and
rewards are normalized by statistics of whole rollouts, not step by step. Scores: docs/results/control.md.
"""

MINIGRID = PPOConfig(num_epochs=10, minibatch_size=64, learning_rate=2.5e-4, vf_coef=1.0, normalize_rewards=True)
"""MiniGrid with 8 environments and normalized observations; rl-baselines3-zoo, ``hyperparams/ppo.yml``.

The value coefficient is 1 instead of .5, because Stable-Baselines3's value loss is the whole squared error.
"""

ATARI_GAMES = PPOConfig(
    num_steps=128, num_epochs=4, minibatch_size=256, learning_rate=2.5e-4, final_learning_rate=0.0, gamma=0.99,
    gae_lambda=0.95, clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01, vf_coef=0.5, clip_rewards=1.0,
    end_with_life=True,
)  # fmt: skip
"""Atari games with 8 environments; CleanRL's ``ppo_atari.py`` (Huang et al. 2022, "The 37 implementation details").

Not run here for its 10 million steps. Two things differ from CleanRL: a game that is cut by the limit of frames is
bootstrapped, and rewards are clipped where advantages are computed, so that returns are the scores of whole games.
"""

TEXT = PPOConfig(
    num_steps=None, num_episodes=128, num_epochs=2, minibatch_size=32, gamma=1.0, max_grad_norm=1.0,
    fit_value_head=True,
)  # fmt: skip
"""Texts, with a KL penalty; tuned here on the embedded model, see docs/results.

The learning rate is that of the model (`algos.config.Config.learning_rate`), and falls to a fifth.
"""

TEXT_EMBEDDED = replace(TEXT, learning_rate=3e-4, final_learning_rate=1e-4)
"""`TEXT` for the embedded model, in the recipes: with 5e-4, some seeds of `Periods` fail (docs/results/learning.md)."""

TEXT_WORDS = PPOConfig(
    num_steps=None, num_episodes=64, num_epochs=2, minibatch_size=32, learning_rate=1e-3, final_learning_rate=1e-4,
    gamma=0.98, ent_coef=0.02,
)  # fmt: skip
"""FrozenLake-v1 in textenv/Words-v0 (4 x 4, without slipping) and the embedded model; tuned here.

Until the first goals, advantages are noise that is scaled up, and it may end the exploration; the entropy bonus works
against that. A higher learning rate ends the exploration sooner.
"""

CARTPOLE_A2C = A2CConfig(
    num_steps=32, learning_rate=2e-3, final_learning_rate=0.0, gae_lambda=0.95, normalize_advantage=True
)
"""CartPole-v1 with 16 environments; tuned here. The linear schedule and number of steps are rl-baselines3-zoo's."""

CARTPOLE_REINFORCE = REINFORCEConfig(num_episodes=16, learning_rate=5e-3, final_learning_rate=5e-4, gamma=0.98)
"""CartPole-v1 with 16 environments; tuned here."""

CARTPOLE_RLOO = RLOOConfig(
    num_episodes=16, group_size=8, learning_rate=5e-3, final_learning_rate=5e-4, aggregation="sequence_mean"
)
"""CartPole-v1 with 16 environments; tuned here. Aggregated by sequence, since good episodes are long."""

CARTPOLE_GRPO = GRPOConfig(num_episodes=16, learning_rate=2e-3, final_learning_rate=0.0, minibatch_size=512)
"""CartPole-v1 with 16 environments; tuned here."""

CARTPOLE_TRPO = TRPOConfig(
    num_steps=512, learning_rate=1e-3, max_kl=0.04, conjugate_gradient_steps=25, critic_epochs=20
)
"""CartPole-v1 with 2 environments; tuned here, from rl-baselines3-zoo's ``hyperparams/trpo.yml``.

Other than there are the trust region, ``gae_lambda`` (.98 there), the damping (.001), the critic's minibatches (512),
the steps of the conjugate gradient, and the length of the training (100,000 steps).
"""

CARTPOLE_DQN = DQNConfig(
    learning_rate=2.3e-3, final_learning_rate=0.0, gradient_steps=128, target_update_gradient_steps=128,
    exploration_fraction=0.16, final_exploration=0.04,
)  # fmt: skip
"""CartPole-v1 with 16 environments; as in rl-baselines3-zoo, but with squared error and a falling learning rate."""

PENDULUM_SAC = SACConfig(learning_rate=1e-3)
"""Pendulum-v1 in 20,000 steps; rl-baselines3-zoo, ``hyperparams/sac.yml``.

As in the other presets of SAC and TD3 without ``num_steps``, a rollout of 16 steps is followed by 16 updates, where the
zoo alternates single ones.
"""

MOUNTAIN_CAR_CONTINUOUS_SAC = SACConfig(
    num_steps=32, learning_rate=3e-4, buffer_size=50_000, batch_size=512, gamma=0.9999, target_rate=0.01,
    learning_starts=0, temperature=0.1,
)  # fmt: skip
"""MountainCarContinuous-v0 in 50,000 steps, for `SACGSDEPolicy`; rl-baselines3-zoo, ``hyperparams/sac.yml``.

Without state-dependent noise, the run with seed 1 never found the goal and learnt to stand still (return 0).
"""

LUNAR_LANDER_SAC = SACConfig(learning_rate=7.3e-4, final_learning_rate=0.0, target_rate=0.01, learning_starts=10_000)
"""LunarLanderContinuous-v3 in 500,000 steps, ``hidden=(400, 300)``; rl-baselines3-zoo (there v2).

Not run here to the end.
"""

MUJOCO_SAC = SACConfig(learning_starts=10_000)
"""MuJoCo in a million steps; rl-baselines3-zoo, ``hyperparams/sac.yml`` (there v4), with γ .999 on Swimmer.

The zoo has Ant, HalfCheetah, Hopper, Humanoid (for two million steps), Swimmer and Walker2d; the other games get the
same settings here.

Run here for 100,000 steps of HalfCheetah: docs/results/control.md.
"""

PENDULUM_TD3 = TD3Config(gamma=0.98, buffer_size=200_000, learning_starts=10_000)
"""Pendulum-v1 in 20,000 steps, for ``hidden=(400, 300)``; rl-baselines3-zoo, ``hyperparams/td3.yml``."""

MOUNTAIN_CAR_CONTINUOUS_TD3 = TD3Config(exploration_noise=0.9, noise_correlation=0.95)
"""MountainCarContinuous-v0 in 60,000 steps, for ``hidden=(64, 64)``; tuned here on other seeds than 1 to 5.

The zoo takes 300,000 steps, a noise that is correlated for longer (ρ = .9985) and layers of 400 and 300. Alone, without
a policy, its noise reached the goal in 3 of 40 episodes, this one in all, and independent noise in none. After 30,000
steps two of seeds 1 to 5 are below the zoo's run, after 60,000 none: docs/results/control.md.
"""

LUNAR_LANDER_TD3 = PENDULUM_TD3
"""LunarLanderContinuous-v3 in 300,000 steps, ``hidden=(400, 300)``; rl-baselines3-zoo (there v2).

Two runs here ended below the zoo's, which updates after each episode: docs/results/control.md.
"""

MUJOCO_TD3 = TD3Config(learning_starts=10_000)
"""MuJoCo in a million steps, ``hidden=(400, 300)``; rl-baselines3-zoo, ``hyperparams/td3.yml`` (v4), with γ .9999 on
Swimmer. Which games it has: see `MUJOCO_SAC`.

Run here for 100,000 steps of HalfCheetah: docs/results/control.md.
"""

WORDS = PPOConfig(
    num_steps=64, num_epochs=4, minibatch_size=256, learning_rate=1e-3, final_learning_rate=1e-4, gamma=0.98,
    gae_lambda=0.9, ent_coef=0.01, normalize_rewards=True, normalize_advantage=False,
)  # fmt: skip
"""Control by `WordsPolicy` with the embedded model and 16 environments; tuned here, on FrozenLake-v1.

Advantages are not normalized, for the reason given at `TOY_TEXT`.
"""

TEXT_A2C = A2CConfig(
    num_steps=None, num_episodes=32, gamma=1.0, gae_lambda=0.95, normalize_advantage=True, max_grad_norm=1.0
)
"""Like `TEXT`; tuned here."""

TEXT_REINFORCE = REINFORCEConfig(gamma=1.0, max_grad_norm=1.0)
"""Like `TEXT`; tuned here."""

TEXT_REINFORCE_PLUS_PLUS = REINFORCEPlusPlusConfig(
    num_episodes=128, num_epochs=2, minibatch_size=32, gamma=1.0, max_grad_norm=1.0
)
"""Like `TEXT`, whose minibatches and passes it has."""

TEXT_RLOO = RLOOConfig(max_grad_norm=1.0)
"""Like `TEXT`; tuned here."""

TEXT_GRPO = GRPOConfig(num_episodes=128, max_grad_norm=1.0)
"""Like `TEXT`; tuned here."""

TEXT_TRPO = TRPOConfig(
    num_steps=None, num_episodes=64, gamma=1.0, conjugate_gradient_steps=10, critic_epochs=2, minibatch_size=32
)
"""Like `TEXT`, but with few and costly steps; tuned here."""


MUJOCO_GAMES = (
    "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum",
    "Pusher", "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip
"""MuJoCo environments of Gymnasium, without their version."""
MINIGRID_STEPS = {
    "DoorKey-5x5": 100_000,
    "Empty-Random-5x5": 100_000,
    "Unlock": 100_000,
    "KeyCorridorS3R1": 500_000,
}
"""Steps of rl-baselines3-zoo's agents."""
_NORMALIZED = {"normalize_observations": True}
_WIDE = {"hidden": [400, 300]}
VALUE_POLICIES = {"dqn": "q", "sac": "sac", "td3": "td3"}
"""Policy of each algorithm that trains only one class."""
_OF_MINIGRID: dict[str, Any] = {
    "policy_kwargs": _NORMALIZED,
    "env_kwargs": {"wrappers": ["minigrid.wrappers:FlatObsWrapper"]},
}
_ROWS: tuple[tuple[str, str, Config, int, int, dict[str, Any]], ...] = (
    ("CartPole-v1", "ppo", CARTPOLE, 16, 35_000, {}),
    ("CartPole-v1", "a2c", CARTPOLE_A2C, 16, 500_000, {}),
    ("CartPole-v1", "reinforce", CARTPOLE_REINFORCE, 16, 300_000, {}),
    ("CartPole-v1", "rloo", CARTPOLE_RLOO, 16, 300_000, {}),
    ("CartPole-v1", "grpo", CARTPOLE_GRPO, 16, 500_000, {}),
    ("CartPole-v1", "trpo", CARTPOLE_TRPO, 2, 60_000, {}),
    ("CartPole-v1", "dqn", CARTPOLE_DQN, 16, 50_000, {"policy": "q"}),
    ("Pendulum-v1", "sac", PENDULUM_SAC, 1, 20_000, {"policy": "sac"}),
    ("Pendulum-v1", "td3", PENDULUM_TD3, 1, 20_000, {"policy": "td3", "policy_kwargs": _WIDE}),
    ("MountainCarContinuous-v0", "sac", MOUNTAIN_CAR_CONTINUOUS_SAC, 1, 50_000,
     {"policy": "sac_gsde", "policy_kwargs": {"hidden": [64, 64], "log_std_init": -3.67}}),
    ("MountainCarContinuous-v0", "td3", MOUNTAIN_CAR_CONTINUOUS_TD3, 1, 60_000,
     {"policy": "td3", "policy_kwargs": {"hidden": [64, 64]}}),
    ("LunarLander-v3", "sac", LUNAR_LANDER_SAC, 1, 500_000,
     {"policy": "sac", "policy_kwargs": _WIDE, "env_kwargs": {"continuous": True}}),
    ("LunarLander-v3", "td3", LUNAR_LANDER_TD3, 1, 300_000,
     {"policy": "td3", "policy_kwargs": _WIDE, "env_kwargs": {"continuous": True}}),
    ("LunarLanderContinuous-v3", "sac", LUNAR_LANDER_SAC, 1, 500_000, {"policy": "sac", "policy_kwargs": _WIDE}),
    ("LunarLanderContinuous-v3", "td3", LUNAR_LANDER_TD3, 1, 300_000, {"policy": "td3", "policy_kwargs": _WIDE}),
    *((f"{game}-v5", "sac", MUJOCO_SAC, 1, 1_000_000, {"policy": "sac"}) for game in MUJOCO_GAMES),
    *((f"{game}-v5", "td3", MUJOCO_TD3, 1, 1_000_000, {"policy": "td3", "policy_kwargs": _WIDE})
      for game in MUJOCO_GAMES),
    ("Swimmer-v5", "sac", replace(MUJOCO_SAC, gamma=0.999), 1, 1_000_000, {"policy": "sac"}),
    ("Swimmer-v5", "td3", replace(MUJOCO_TD3, gamma=0.9999), 1, 1_000_000,
     {"policy": "td3", "policy_kwargs": _WIDE}),
    ("Acrobot-v1", "ppo", ACROBOT, 16, 200_000, {"policy_kwargs": _NORMALIZED}),
    ("Pendulum-v1", "ppo", PENDULUM, 16, 60_000,
      {"policy": "gsde", "policy_kwargs": {"sde_sample_freq": 4, "log_std_init": -1.0}}),
    ("MountainCar-v0", "ppo", MOUNTAIN_CAR, 32, 300_000, {"policy_kwargs": _NORMALIZED}),
    ("MountainCarContinuous-v0", "ppo", MOUNTAIN_CAR_CONTINUOUS, 16, 40_000,
     {"policy": "gsde", "policy_kwargs": _NORMALIZED | {"sde_sample_freq": 32, "log_std_init": -0.5}}),
    ("LunarLander-v3", "ppo", LUNAR_LANDER, 16, 400_000, {}),
    ("Taxi-v4", "ppo", TOY_TEXT, 16, 150_000, {}),
    ("CliffWalking-v1", "ppo", TOY_TEXT, 16, 150_000, {"env_kwargs": {"max_episode_steps": 200}}),
    ("FrozenLake8x8-v1", "ppo", TOY_TEXT, 16, 80_000, {}),
    *((f"{game}-v5", "ppo", MUJOCO, 1, 1_000_000, {"policy_kwargs": _NORMALIZED}) for game in MUJOCO_GAMES),
    *((f"MiniGrid-{name}-v0", "ppo", MINIGRID, 8, total_steps, _OF_MINIGRID)
      for name, total_steps in MINIGRID_STEPS.items()),
    ("textenv/Reviews-v0", "ppo", TEXT_EMBEDDED, 64, 48_000, {"kl_coef": 0.1}),
    ("textenv/Reviews-v0", "trpo", TEXT_TRPO, 64, 12_000, {"kl_coef": 0.1}),
    ("textenv/Periods-v0", "ppo", TEXT_EMBEDDED, 64, 90_000, {"kl_coef": 0.001}),
    ("textenv/Copy-v0", "ppo", TEXT_EMBEDDED, 64, 200_000, {"kl_coef": 0.0}),
    ("textenv/Sort-v0", "ppo", TEXT_EMBEDDED, 64, 200_000, {"kl_coef": 0.0}),
    ("textenv/Words-v0", "ppo", TEXT_WORDS, 16, 24_000, {}),
    ("textenv/Prompts-v0", "ppo", TEXT, 64, 100_000, {"kl_coef": 0.05}),
)  # fmt: skip
"""Environment, algorithm, settings, number of slots and of steps, and further fields of the recipe."""
RECIPES = {
    (env, algorithm): Recipe(config=config, num_envs=num_envs, total_steps=total_steps, **options)
    for env, algorithm, config, num_envs, total_steps, options in _ROWS
}
"""Recipes by environment and algorithm."""

ATARI_RECIPE = Recipe(config=ATARI_GAMES, num_envs=8, total_steps=10_000_000)
"""Recipe of all Atari games (ids ``ALE/…``) with PPO.

ale_py's vector environment does the rest by default: up to 30 no-ops at the start, FIRE after it, each action for 4
frames, the maximum of the last two, grey images of 84 × 84 pixels, and stacks of 4.
"""

RECURRENT = Recipe(config=CARTPOLE_LSTM, num_envs=32, total_steps=150_000, policy="lstm", policy_kwargs=_NORMALIZED)
"""Default recipe of ``--policy lstm``."""

_TRL = PPOConfig(  # TRL clips no gradients
    num_steps=None, num_episodes=128, num_epochs=4, minibatch_size=128, learning_rate=1.41e-5, gamma=1.0,
    gae_lambda=0.95, clip_range=0.2, clip_range_vf=0.2, vf_coef=0.1, normalize_advantage="rollout",
    bootstrap_truncated=False, adam_eps=1e-8, max_grad_norm=1e9, policy_loss="thresholded_policy_loss",
)  # fmt: skip
TRL_0_7 = Recipe(
    env="textenv/Prompts-v0",
    config=_TRL,
    num_envs=64,
    kl_coef=AdaptiveCoefficient(0.2, target=6.0, gain=128 / 10_000),  # batch_size / horizon
)
"""Defaults of PPO in TRL 0.7 (docs/from-trl.md): add ``model`` and ``env_kwargs``, or use its config for `PPO.step`."""

TRL_0_17 = Recipe(
    env="textenv/Prompts-v0",
    config=replace(
        _TRL, num_episodes=8, minibatch_size=8, learning_rate=5e-5, final_learning_rate=0.0,
        policy_loss="clipped_policy_loss",
    ),
    num_envs=8,
    policy_kwargs={"temperature": 0.7, "critic": "copy"},
    env_kwargs={"max_new_tokens": 53},
    kl_coef=0.05,
)  # fmt: skip
"""Defaults of PPO in TRL 0.17; its critic begins as the reward model (``critic="FOLDER"``)."""

_TEXT_CONFIGS: dict[str, Config] = {
    "ppo": TEXT,
    "a2c": TEXT_A2C,
    "reinforce": TEXT_REINFORCE,
    "reinforce_plus_plus": TEXT_REINFORCE_PLUS_PLUS,
    "rloo": TEXT_RLOO,
    "grpo": TEXT_GRPO,
    "trpo": TEXT_TRPO,
}


def recipe(
    env_id: str,
    algorithm: str | type[Agent[Any]] = "ppo",
    model: str = "embedded",
    *,
    policy: str = "auto",
    env_kwargs: Mapping[str, Any] | None = None,
) -> Recipe:
    """Find the recipe of an environment and an algorithm, for text of a model, in control of a policy.

    Without an entry in `RECIPES`, a control environment gets the algorithm's defaults. Text gets the algorithm's text
    preset, with the steps and the KL coefficient of PPO's recipe. Models other than the embedded one get the learning
    rate of their size.

    A class of your own with the config of one of our algorithms gets the recipe of that algorithm; with another config
    it gets the defaults of that config.

    Args:
        env_id: Gymnasium id, or ``module:id``.
        algorithm: name of an algorithm, or a class of your own.
        model: name or folder of the language model.
        policy: name of a policy (`algos.policies.registry`). ``"auto"`` is the recipe's own. ``"lstm"`` gets
            `RECURRENT` with PPO. ``"words"`` gets `WORDS` with PPO, and models other than the embedded one get the
            learning rate of their size. Other policies get the settings of ``"auto"``.
        env_kwargs: arguments without which the environment cannot be made, to see whether it is one of text; they are
            not put into the recipe.

    Raises:
        ValueError: if the algorithm is unknown or not for text, or a policy is named for text.
    """
    bare_id = env_id.rpartition(":")[2]
    is_control = not is_text(bare_id, env_kwargs)
    if not isinstance(algorithm, str):
        settings = _settings_of_class(bare_id, algorithm, model, is_control=is_control)
    else:
        settings = _settings(bare_id, algorithm, model, is_control=is_control)
    # A language model that is named plays control; text is played by no other policy
    if not is_control and policy != "auto":
        raise ValueError(f"policy is {policy!r}, but {env_id} is text, which a language model plays: leave policy out")
    if is_control and policy == "auto" and settings.policy == "auto" and model != "embedded":
        policy = "words"
    if policy != "auto":
        settings = _with_policy(settings, policy, model)
    return replace(settings, env=env_id, algorithm=algorithm, model=model)


def usual_policy(env_id: str, algorithm: str) -> str:
    """Return the policy in the recipe of a control environment and an algorithm, without a look at the environment.

    Args:
        env_id: Gymnasium id, or ``module:id``.
        algorithm: name of an algorithm.
    """
    entry = RECIPES.get((env_id.rpartition(":")[2], algorithm))
    if entry is not None:
        return str(entry.policy)
    return VALUE_POLICIES.get(algorithm, "auto")


def _with_policy(settings: Recipe, policy: str, model: str) -> Recipe:
    """Return the settings for a policy other than the recipe's own."""
    is_ppo = type(settings.config) is PPOConfig
    if policy == "lstm" and is_ppo:
        return replace(RECURRENT, env_kwargs=settings.env_kwargs)
    # A recipe's wrappers make vectors of observations, which these policies do not read
    env_kwargs = dict(settings.env_kwargs)
    if policy in ("cnn", "words"):
        env_kwargs.pop("wrappers", None)
    if policy == "words":
        if is_ppo:
            config: Config = WORDS
        else:
            config = replace(settings.config, learning_rate=None, final_learning_rate=None)
        if model != "embedded":
            config = replace(config, learning_rate=None, final_learning_rate=None)
        return replace(
            settings,
            policy=policy,
            policy_kwargs={},
            env_kwargs=env_kwargs,
            config=config,
            num_envs=max(16, settings.num_envs),
        )

    # Arguments of the recipe's own policy are not those of another class. All of PPO's but CNNPolicy can normalize
    # observations
    policy_kwargs = dict(settings.policy_kwargs)
    if policy == "cnn":
        policy_kwargs = {}
    elif policy != settings.policy:
        policy_kwargs = {name: value for name, value in policy_kwargs.items() if name in _NORMALIZED}
    return replace(settings, policy=policy, policy_kwargs=policy_kwargs, env_kwargs=env_kwargs)


def _settings(env_id: str, algorithm: str, model: str, *, is_control: bool) -> Recipe:
    """Find what `recipe` returns, but for its env, algorithm and model; ``env_id`` has no module."""
    # An entry of the table; PPO's for text are for the embedded model
    if (env_id, algorithm) in RECIPES and (algorithm != "ppo" or model == "embedded"):
        return RECIPES[env_id, algorithm]

    # Control
    config_type = find_config(algorithm)
    if env_id.startswith(ATARI) and algorithm == "ppo":
        return ATARI_RECIPE
    if is_control:
        return Recipe(config=config_type(), policy=usual_policy(env_id, algorithm))

    # Text
    if algorithm not in _TEXT_CONFIGS:
        raise ValueError(f"{algorithm} is not for text: expected one of {', '.join(_TEXT_CONFIGS)}")
    default_recipe = Recipe(num_envs=64, total_steps=100_000, kl_coef=0.01)
    ppo_recipe = RECIPES.get((env_id, "ppo"), default_recipe)
    return replace(ppo_recipe, config=_TEXT_CONFIGS[algorithm])


def _settings_of_class(env_id: str, algorithm: type[Agent[Any]], model: str, *, is_control: bool) -> Recipe:
    """Find the settings of an algorithm that is given as a class, see `_settings`."""
    config_type = find_config(algorithm)
    for name, known_type in CONFIGS.items():
        if config_type is known_type:
            return _settings(env_id, name, model, is_control=is_control)
    num_envs = 8 if is_control else 64
    return Recipe(config=config_type(), policy=algorithm.policy_name, num_envs=num_envs)
