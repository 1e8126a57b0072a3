"""What an agent checks and decides when it is made: that its parts fit one another, and settings left open."""

import dataclasses
import logging
from copy import copy
from typing import Any, TypeVar

import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from algos.config import (
    CONTROL_GAMMA,
    A2CConfig,
    ActorCriticConfig,
    ClippedConfig,
    Config,
    PolicyGradientConfig,
    PPOConfig,
    REINFORCEConfig,
    REINFORCEPlusPlusConfig,
)
from algos.envs.gymnasium_results import autoreset_mode
from algos.envs.spaces import check_readable
from algos.policies.policy import Policy, check_policy, check_spaces, refuse_strings
from algos.ranks import collectives
from textenv.device import find_device
from textenv.envs.branches import check_branches
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.coefficients import CoefficientLike
from textenv.kl.penalty import KLPenalty
from textenv.lm.model import language_model_of
from textenv.prompts.template_variables import template_defaults
from textenv.rollout import is_episode_env

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=Config)


def resolve(config: ConfigT, env: VectorEnv, policy: Policy) -> ConfigT:
    """Fill in the config fields that depend on environment and policy, and check those that these cannot have.

    Args:
        config: an algorithm's config; fields with a value keep it.
        env: its kind, text or control, decides most defaults: in text a length limit is part of the task.
        policy: the policy to train; it has a default learning rate.

    Raises:
        ValueError: if the policy or the environment cannot do what a field asks for, or if minibatches of a single
            advantage would be normalized.
    """
    is_text = is_episode_env(env)
    defaults = _adam_defaults(config, policy, is_text=is_text)
    if isinstance(config, (ActorCriticConfig, REINFORCEConfig, REINFORCEPlusPlusConfig)) and config.gamma is None:
        defaults["gamma"] = 1.0 if is_text else CONTROL_GAMMA
    _warn_of_single_minibatches(config, policy, is_text=is_text)
    if isinstance(config, ActorCriticConfig):
        _check_values(config, env, policy)
        defaults |= _advantage_defaults(config, is_text=is_text)
        _check_normalization(dataclasses.replace(config, **defaults), policy)
    if defaults:
        fields = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("%s: %s", type(config).__name__, fields)
    return dataclasses.replace(config, **defaults)


def _adam_defaults(config: Config, policy: Policy, *, is_text: bool) -> dict[str, Any]:
    """Return learning rates and epsilon where the config leaves them open; warn of a rate that rises."""
    defaults: dict[str, Any] = {}
    if config.learning_rate is None:
        defaults["learning_rate"] = policy.default_learning_rate
        if is_text and config.final_learning_rate is None:
            defaults["final_learning_rate"] = policy.default_learning_rate / 5
    if config.adam_eps is None:
        defaults["adam_eps"] = 1e-8 if is_text else 1e-5

    initial_rate = defaults.get("learning_rate", config.learning_rate)
    final_rate = defaults.get("final_learning_rate", config.final_learning_rate)
    if final_rate is not None and final_rate > initial_rate:
        advice = "change both, or set final_learning_rate to None"
        logger.warning("the learning rate rises from %g to its final %g: %s", initial_rate, final_rate, advice)
    return defaults


def _warn_of_single_minibatches(config: Config, policy: Policy, *, is_text: bool) -> None:
    """Log a warning if every optimizer step has one entry only."""
    if not isinstance(config, ClippedConfig) or config.minibatch_size != 1:
        return
    unit = "step"
    if policy.sequential:
        unit = "answer" if is_text else "row of steps"
    advice = "to save memory, keep minibatches large and set micro_batch_size=1, which leaves the gradient as it is"
    logger.warning("minibatch_size is 1: each %s is an optimizer step of its own; %s", unit, advice)


def _check_values(config: ActorCriticConfig, env: VectorEnv, policy: Policy) -> None:
    """Raise a ValueError unless the values of states can be estimated as the config asks."""
    if config.vine_samples is not None:
        check_branches(env)
        _check_vine(policy)
    if config.length_adaptive_lambda is not None and not is_episode_env(env):
        raise ValueError(
            f"length_adaptive_lambda is {config.length_adaptive_lambda}, but it is for text, where a row is one "
            "episode: leave it at None"
        )
    if config.fit_value_head and policy.linear_value is None:
        raise ValueError(
            f"fit_value_head is True, but a {type(policy).__name__} has no linear value head to fit: set "
            "fit_value_head=False"
        )


def _advantage_defaults(config: ActorCriticConfig, *, is_text: bool) -> dict[str, Any]:
    """Return fields of values and advantages where the config leaves them open."""
    defaults: dict[str, Any] = {}
    if config.vine_samples is not None and isinstance(config, (PPOConfig, A2CConfig)):
        defaults["vf_coef"] = 0.0  # values are not learned
    if config.bootstrap_truncated is None:
        defaults["bootstrap_truncated"] = not is_text
    if config.normalize_advantage in (None, True):
        ppo_collects_steps = isinstance(config, PPOConfig) and config.num_episodes is None
        defaults["normalize_advantage"] = "minibatch" if ppo_collects_steps else "rollout"
    return defaults


def _check_normalization(config: ActorCriticConfig, policy: Policy) -> None:
    """Raise a ValueError if minibatches of a single advantage would be normalized."""
    # A row of a sequential policy has several steps, whose advantages vary
    rows_of_steps = policy.sequential and config.num_episodes is None
    single_advantages = isinstance(config, PPOConfig) and config.minibatch_size == 1 and not rows_of_steps
    if single_advantages and config.normalize_advantage == "minibatch":
        raise ValueError(
            "minibatch_size is 1 and normalize_advantage is 'minibatch': normalizing a single advantage gives 0. "
            "Set normalize_advantage=False, or use larger minibatches"
        )


def _check_vine(policy: Policy) -> None:
    """Raise a ValueError unless the texts of this policy can be completed from any token on, in this process."""
    language_model = language_model_of(policy)
    if language_model is not None and any(isinstance(stop, str) for stop in language_model.stop):
        raise ValueError(
            f"the policy's stop is {language_model.stop}, but with vine_samples a text that begins before and ends "
            "after a token from which a turn is completed again would be missed: give token ids"
        )
    if language_model is not None and language_model.seq2seq is not None:
        raise ValueError(
            "vine_samples is for decoder-only models: an encoder-decoder model reads the beginning of an answer "
            "elsewhere than its prompt"
        )
    if collectives.world_size() > 1:
        raise ValueError(f"vine_samples is for one process, not for {collectives.world_size()}: leave it at None")


def place(policy: Policy, env: VectorEnv, device: str | torch.device | None) -> None:
    """Move a policy and the models of a text environment to a device, unless it is None.

    Raises:
        ValueError: if there is no such device, or if the weights stay on several devices.
    """
    target = find_device(device)
    if target is not None:
        policy.to(target)
        if is_episode_env(env):
            env.to(target)
    devices = sorted({str(p.device) for p in policy.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"the policy has weights on {' and '.join(devices)}, expected one device: give device={devices[-1]!r}, "
            "which moves all of them"
        )


def remember_stops(env: VectorEnv, policy: Policy) -> None:
    """Add the environment's stop texts and ids to those of the language model; log all that ends its turns.

    The language model's own ones are the environment's already (`algos.collection.agree_on_ends`).
    """
    lm = language_model_of(policy)
    if lm is None or not isinstance(env, TextVectorEnv):
        return
    lm.stop = tuple(dict.fromkeys([*lm.stop, *env.ends.stop]))
    logger.info("turns end with %s", env.ends)


def remember_template(env: VectorEnv, policy: Policy) -> None:
    """Give the language model's tokenizer the environment's chat template, so that it is asked and saved as trained.

    Environments that are made by name have a tokenizer of their own.
    """
    lm = language_model_of(policy)
    if lm is None or not isinstance(env, TextVectorEnv):
        return
    template = env.tokenizer.chat_template
    if not template or lm.tokenizer.chat_template == template:
        return
    lm.tokenizer.chat_template = template
    variables = template_defaults(env.tokenizer)
    logger.info("the policy's tokenizer gets the environment's chat template, with the variables %s", variables)


def choose_penalty(
    env: VectorEnv, policy: Policy, *, penalty: KLPenalty | None = None, kl_coef: CoefficientLike | None = None
) -> KLPenalty | None:
    """Return ``penalty``, or a penalty with ``kl_coef``, or that of the environment, or None if there is none.

    Raises:
        TypeError: if one of them is of another type.
        ValueError: if ``kl_coef`` is given together with another penalty.
    """
    env_penalty = env.penalty if is_episode_env(env) else None
    for candidate in (penalty, env_penalty):
        _check_penalty(candidate)
    if kl_coef is None:
        return env_penalty if penalty is None else penalty
    if penalty is not None or env_penalty is not None:
        conflict = "the environment carries a KL penalty" if penalty is None else "penalty= is given"
        raise ValueError(f"kl_coef is {kl_coef}, but {conflict}: give one of them, or the KL would be charged twice")
    # A copy, because the same coefficient may be given to another agent
    return KLPenalty(policy.reference(), copy(kl_coef))


def _check_penalty(penalty: object) -> None:
    """Raise a TypeError unless this is None, a `KLPenalty`, or an own penalty with what algorithms use of one."""
    if penalty is None:
        return
    missing = [name for name in ("coef", "place", "update") if not hasattr(penalty, name)]
    if not callable(penalty):
        missing.append("__call__")
    if getattr(penalty, "place", None) == "loss" and not hasattr(penalty, "loss"):
        missing.append("loss")
    if missing:
        raise TypeError(
            f"penalty is {penalty!r:.99}, expected a textenv.KLPenalty; for a number (reward per nat) there is "
            f"kl_coef=. An own penalty also needs {', '.join(missing)}"
        )


def _warn_of_clipped_rewards(env: VectorEnv) -> None:
    """Log a warning if an Atari environment clips its rewards because nobody has said otherwise.

    The environment itself does not say whether it does; its specification has the arguments that were given.
    """
    spec = env.spec
    if not isinstance(spec, EnvSpec) or type(env.unwrapped).__name__ != "AtariVectorEnv":
        return
    if "reward_clipping" not in spec.kwargs:
        logger.warning(
            "%s clips its rewards to -1, 0 and 1 unless you say reward_clipping=False, so episode/return counts them "
            "instead of points, and an evaluation of the saved agent has points: give reward_clipping=False to "
            "make_vec, and clip_rewards=1 to the algorithm (presets.ATARI_GAMES has it)",
            spec.id,
        )


def check_environment(env: object, policy: object, config: Config) -> Policy:
    """Refuse environments that an agent cannot collect from, and policies and configs that do not fit.

    Returns:
        The policy.

    Raises:
        TypeError: if ``env`` is no vector environment, or the algorithm cannot train this kind of policy.
        ValueError: if ``env`` charges the KL itself or declares no autoreset mode, if policy and environment have
            different numbers of actions, or if the config collects steps where whole episodes are needed.
    """
    if isinstance(env, Policy) or isinstance(policy, VectorEnv):
        raise TypeError(
            f"env is a {type(env).__name__} and policy a {type(policy).__name__}: give the environment first and then "
            "the policy, as in PPO(env, policy)"
        )
    if not isinstance(env, VectorEnv):
        raise TypeError(
            f"env is {env!r:.100}, expected a vector environment: make one with gymnasium.make_vec(id, "
            "num_envs=8), or of a class with gymnasium.vector.SyncVectorEnv([MyEnv] * 8)"
        )
    check_policy(policy, call="PPO(env, policy), in this order")
    assert isinstance(policy, Policy)

    # The environment: who charges the KL, whole episodes, autoreset
    space = env.single_action_space
    whole_episodes = is_episode_env(env)
    if isinstance(space, spaces.Dict) and "log_prob" in space.spaces:
        raise ValueError(
            "this environment charges the KL at every step (KLReward), and our agents charge it in batches, so it "
            "would be charged twice: use TextVectorEnv with KLPenalty"
        )
    if is_episode_env(env.unwrapped) and not whole_episodes:
        raise ValueError(
            f"{type(env).__name__} wraps a text environment and hides its whole episodes: pass the unwrapped one"
        )
    if not whole_episodes:
        autoreset_mode(env)
        _warn_of_clipped_rewards(env)
    observed = env.single_observation_space
    if isinstance(observed, spaces.Dict) and set(observed) == {"tokens", "length"} and not whole_episodes:
        raise ValueError(
            f"{type(env).__name__} steps text environments one by one: use a TextVectorEnv, or gymnasium.make_vec(id)"
        )

    # Environment and policy
    refuse_strings(env)
    if not whole_episodes:
        check_readable(observed, type(policy).__name__)
    check_spaces(env, policy)
    lm = language_model_of(policy)
    if lm is not None and isinstance(observed, spaces.Box):
        raise TypeError(
            f"a {type(policy).__name__} writes text, but the environment observes {observed}: leave the policy out "
            "(PPO(env) makes one for its spaces), or give a text environment"
        )
    if lm is not None and isinstance(env.unwrapped, TextVectorEnv):
        lm.check_length(env.unwrapped.max_length)
    actions = policy.num_actions
    if isinstance(space, spaces.Discrete) and actions is not None and actions != space.n:
        raise ValueError(
            f"the policy chooses from {actions} actions, but the environment has {space.n}: "
            "make both from the same tokenizer or space"
        )

    # Algorithm and policy
    if policy.trained_by_values and isinstance(config, PolicyGradientConfig):
        raise TypeError(
            f"a {type(policy).__name__} is trained by values of actions, not by a policy gradient: train it with the "
            "algorithm that it is for (QPolicy with DQN, SACPolicy with SAC, TD3Policy with TD3), or use an MLPPolicy"
        )

    # Algorithm and environment
    if whole_episodes and config.num_episodes is None:
        raise ValueError(
            f"config.num_steps is {config.num_steps}, but a text environment is collected in whole episodes: "
            "set num_steps=None and num_episodes, or use algos.presets.TEXT"
        )
    return policy
