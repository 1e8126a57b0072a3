"""Hyper-parameters of every algorithm; imports no torch, so that a command line can show them at once.

A field that depends on environment and policy is None by default and filled in by the agent (`algos.agent.resolve`);
a given value stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from textenv.names import NamedFields

LARGEST = sys.float_info.max
"""Largest number allowed in a config."""
PolicyLossName = Literal["clipped_policy_loss", "dual_clipped_policy_loss", "thresholded_policy_loss"]
AggregationName = Literal["token_mean", "sequence_mean"]
ValueLossName = Literal["mse_loss", "huber_loss", "smooth_l1_loss"]


def check_range(
    config: Any,
    *,
    at_least_one: Sequence[str] = (),
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    unit_interval: Sequence[str] = (),
) -> None:
    """Raise a ValueError that names the first config field outside its range; None passes for optional fields."""
    rules = [
        (at_least_one, lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        (positive, lambda x: x > 0, "a number above 0"),
        (not_negative, lambda x: x >= 0, "a number of at least 0"),
        (unit_interval, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    ]
    optional = {field.name for field in fields(config) if "None" in str(field.type)}
    for names, holds, expected in rules:
        for name in names:
            value = getattr(config, name)
            if value is None and name in optional:
                continue
            if not (isinstance(value, (int, float)) and abs(value) <= LARGEST and holds(value)):
                raise ValueError(f"{type(config).__name__}.{name} is {value!r}, expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Config(NamedFields):
    """Hyper-parameters that every algorithm has."""

    num_steps: int | None = 128
    """Steps per environment slot in a rollout (control); None with num_episodes."""
    num_episodes: int | None = None
    """Whole episodes per rollout (text); None with num_steps."""
    learning_rate: float = 2.5e-4
    """Initial learning rate of Adam."""
    final_learning_rate: float | None = None
    """Final learning rate, reached linearly; None keeps the rate constant."""
    warmup_ratio: float = 0.0
    """Fraction of the training in which the learning rate rises linearly from 0 to its initial value."""
    adam_eps: float | None = None
    """Added to the denominator of Adam's step. None: 1e-5 in control (Huang et al. 2022), 1e-8 for text, where the
    gradient of a single weight is far below 1e-5."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates per step, for the means of the gradient and of its square."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW, Loshchilov and Hutter 2019), multiplied by the learning rate at each step."""
    max_grad_norm: float = 0.5
    """Maximum global gradient norm (clipping)."""
    skip_nonfinite: bool = False
    """Skip a step whose loss or gradient is not finite, and count it in the log; False raises an error instead."""
    seed: int = 1
    """Seed of the environment, the sampled actions and the minibatch order."""

    @property
    def episodes_per_group(self) -> int:
        """Episodes with the same start that are compared with one another; 1 without groups."""
        return 1

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.num_episodes is None):
            given = f"num_steps is {self.num_steps} and num_episodes is {self.num_episodes}"
            raise ValueError(f"{given}: give one, and None for the other")
        check_range(self, at_least_one=["num_steps", "num_episodes"], positive=["learning_rate", "max_grad_norm"])
        check_range(self, not_negative=["final_learning_rate", "weight_decay", "seed"], unit_interval=["warmup_ratio"])
        check_range(self, positive=["adam_eps"])
        for field in fields(self):
            value = getattr(self, field.name)
            none = value is None and field.type == "bool | None"
            if field.type in ("bool", "bool | None") and not (none or isinstance(value, bool)):
                raise ValueError(f"{type(self).__name__}.{field.name} is {value!r}, expected {field.type}")
        betas = self.adam_betas
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not (pair and all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)):
            raise ValueError(f"{type(self).__name__}.adam_betas is {betas!r}, expected two numbers from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(Config):
    """Hyper-parameters of the policy-gradient algorithms."""

    micro_batch_size: int | None = None
    """Units (steps or rows) per backward pass, to save memory; the gradient is the same. None: the whole minibatch."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
    ratio_tolerance: float | None = None
    """Maximum difference, in nats, between log-probabilities when acting and when scoring, before the first step of an
    update. None: 1e-3 in float32 and float64, .1 in shorter dtypes. Low temperatures amplify rounding and need more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, at_least_one=["micro_batch_size"], not_negative=["ent_coef"])
        check_range(self, positive=["ratio_tolerance"])


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms that compute advantages by GAE from a learned value."""

    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Trace decay λ of generalized advantage estimation."""
    whiten_rewards: bool = False
    """Scale each rollout's rewards, penalty included, to variance 1; their mean stays (Ziegler et al. 2019)."""
    normalize_advantage: Literal["rollout", "minibatch"] | bool | None = None
    """Normalize advantages to mean 0 and variance 1: over the whole rollout (TRL), or in each minibatch
    (Stable-Baselines3, CleanRL). None and True: the rollout where whole episodes are collected, else the minibatch."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return; rollout and log keep the raw ones."""
    bootstrap_truncated: bool | None = None
    """Add the value of the last state when a time or length limit truncates an episode. None: yes in control, no for
    text, where the limit is part of the task and no entry trains that state's value."""
    value_learning_rate: float | None = None
    """Learning rate of parameters that only the value uses (head or critic), same schedule; None: the same rate."""
    value_max_grad_norm: float | None = None
    """Maximum gradient norm of these parameters, clipped separately; None clips all parameters together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, unit_interval=["gamma", "gae_lambda"])
        check_range(self, positive=["value_learning_rate", "value_max_grad_norm"])
        if self.normalize_advantage not in (None, True, False, "rollout", "minibatch"):
            raise ValueError(
                f"{type(self).__name__}.normalize_advantage is {self.normalize_advantage!r}, expected 'rollout', "
                "'minibatch', True, False or None"
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig):
    """Hyper-parameters of PPO."""

    num_epochs: int = 4
    """Passes over each rollout."""
    minibatch_size: int = 128
    """Steps per minibatch; rows if the policy is sequential (text)."""
    clip_range: float = 0.2
    """Clip range ε: the probability ratio is clipped to [1 - ε, 1 + ε]."""
    final_clip_range: float | None = None
    """Final clip range, reached linearly; None keeps it constant."""
    vf_coef: float = 0.5
    """Weight of the value loss (half the squared error)."""
    clip_range_vf: float | None = None
    """Maximum change of a value in an update, in units of the return; None does not clip."""
    target_kl: float | None = None
    """End an update as soon as a minibatch's approximate KL to the old policy exceeds this; None disables it."""
    policy_loss: PolicyLossName | Callable[..., Any] = "clipped_policy_loss"
    """Loss of `algos.losses`, by name or as `functools.partial(dual_clipped_policy_loss, limit=3.0)`."""
    aggregation: AggregationName | Callable[..., Any] = "token_mean"
    """Weighting of entries in the loss: one of `algos.losses`, such as ``"sequence_mean"``, or `fixed_length_mean`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, at_least_one=["num_epochs", "minibatch_size"], not_negative=["final_clip_range", "vf_coef"])
        check_range(self, positive=["clip_range", "target_kl", "clip_range_vf"])
        _check_choice(self, "policy_loss", PolicyLossName)
        _check_choice(self, "aggregation", AggregationName)


@dataclass(frozen=True, kw_only=True)
class A2CConfig(ActorCriticConfig):
    """Hyper-parameters of A2C; ``gae_lambda=1`` gives the paper's n-step advantages, with n = ``num_steps``."""

    gae_lambda: float = 1.0
    """Trace decay λ of generalized advantage estimation."""
    normalize_advantage: Literal["rollout", "minibatch"] | bool | None = False
    """Normalize the advantages of each rollout to mean 0 and variance 1."""
    vf_coef: float = 0.5
    """Weight of the value loss (half the squared error)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, not_negative=["vf_coef"])
        _refuse_minibatches(self)


@dataclass(frozen=True, kw_only=True)
class TRPOConfig(ActorCriticConfig):
    """Hyper-parameters of TRPO; the learning rate is the critic's."""

    max_kl: float = 0.01
    """Radius of the trust region: maximum mean KL(new‖old) of an update, nats per step."""
    conjugate_gradient_steps: int = 15
    """Conjugate-gradient iterations for the natural gradient."""
    damping: float = 0.1
    """Added to the diagonal of the KL's Hessian."""
    line_search_steps: int = 10
    """Step sizes to try until one improves the policy inside the trust region; if none does, no step is taken."""
    line_search_factor: float = 0.8
    """Ratio of each step size in the line search to the previous one."""
    critic_epochs: int = 10
    """Passes of the critic over each rollout."""
    minibatch_size: int = 128
    """Steps per minibatch of the critic; rows if the policy is sequential (text)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            self, at_least_one=["conjugate_gradient_steps", "line_search_steps", "critic_epochs", "minibatch_size"]
        )
        check_range(self, positive=["max_kl", "line_search_factor"], not_negative=["damping"])
        _refuse_minibatches(self)
        if self.line_search_factor >= 1:
            raise ValueError(f"TRPOConfig.line_search_factor is {self.line_search_factor}, expected less than 1")
        if self.ent_coef or self.micro_batch_size:
            raise ValueError("TRPO has no entropy bonus and no micro-batches: leave them at 0 and None")
        if self.value_learning_rate is not None or self.value_max_grad_norm is not None:
            raise ValueError(
                "TRPO's learning_rate and max_grad_norm are the critic's already: leave value_learning_rate and "
                "value_max_grad_norm at None"
            )


@dataclass(frozen=True, kw_only=True)
class WholeEpisodesConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms that use returns of whole episodes and no learned value."""

    num_steps: int | None = None
    """Not supported: a return needs the whole episode."""
    num_episodes: int | None = 32
    """Whole episodes per rollout; a multiple of the group size, where there are groups."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_episodes is None:
            raise ValueError(
                f"{type(self).__name__}.num_steps is {self.num_steps}, but returns of whole episodes are needed: set "
                "num_steps=None and num_episodes"
            )


@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig(WholeEpisodesConfig):
    """Hyper-parameters of REINFORCE."""

    gamma: float = 0.99
    """Discount per step; use 1 for text."""
    normalize_advantage: bool = True
    """Normalize the advantages of each rollout to mean 0 and variance 1; False only subtracts the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, unit_interval=["gamma"])


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(WholeEpisodesConfig):
    """Hyper-parameters of RLOO."""

    group_size: int = 4
    """Episodes with the same start (text: completions of one prompt); each one's baseline is the mean of the others."""
    aggregation: AggregationName | Callable[..., Any] = "token_mean"
    """Weighting of entries in the loss: one of `algos.losses`, such as ``"sequence_mean"``, or `fixed_length_mean`."""

    @property
    def episodes_per_group(self) -> int:
        """See `Config.episodes_per_group`."""
        return self.group_size

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_groups(self, self.group_size)
        _check_choice(self, "aggregation", AggregationName)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(WholeEpisodesConfig):
    """Hyper-parameters of GRPO.

    ``scale_by_std=False`` with `fixed_length_mean` or `token_mean` is "Dr. GRPO" (Liu et al. 2025), which favours
    neither short answers nor groups with a small standard deviation.
    """

    group_size: int = 8
    """Episodes with the same start (text: completions of one prompt), compared with one another."""
    num_epochs: int = 2
    """Passes over each rollout."""
    minibatch_size: int = 32
    """Steps per minibatch; rows if the policy is sequential (text)."""
    clip_range: float = 0.2
    """Clip range ε: the probability ratio is clipped to [1 - ε, 1 + ε]."""
    scale_by_std: bool = True
    """Divide by the group's standard deviation; False only subtracts its mean."""
    policy_loss: PolicyLossName | Callable[..., Any] = "clipped_policy_loss"
    """Loss of `algos.losses`, by name or as `functools.partial(clipped_policy_loss, clip_higher=0.28)`."""
    aggregation: AggregationName | Callable[..., Any] = "sequence_mean"
    """Weighting of entries in the loss: one of `algos.losses`, such as ``"token_mean"``, or `fixed_length_mean`."""

    @property
    def episodes_per_group(self) -> int:
        """See `Config.episodes_per_group`."""
        return self.group_size

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_groups(self, self.group_size)
        check_range(self, at_least_one=["num_epochs", "minibatch_size"], positive=["clip_range"])
        _check_choice(self, "policy_loss", PolicyLossName)
        _check_choice(self, "aggregation", AggregationName)


@dataclass(frozen=True, kw_only=True)
class DQNConfig(Config):
    """Hyper-parameters of DQN."""

    num_steps: int | None = 16
    """Steps per environment slot between updates."""
    learning_rate: float = 1e-3
    """Initial learning rate of Adam."""
    max_grad_norm: float = 10.0
    """Maximum global gradient norm (clipping)."""
    gamma: float = 0.99
    """Discount per step."""
    buffer_size: int = 100_000
    """Capacity of the replay buffer, in steps."""
    learning_starts: int = 1_000
    """Stored steps before the first update."""
    gradient_steps: int = 8
    """Optimizer steps after each rollout."""
    batch_size: int = 64
    """Stored steps in the batch of an optimizer step."""
    target_update_gradient_steps: int = 250
    """Gradient steps between updates of the target network (Stable-Baselines3's interval counts environment steps)."""
    loss: ValueLossName | Callable[..., Any] = "mse_loss"
    """Loss of the values ``[b]`` against their targets: the name of one in `torch.nn.functional`, or a function.
    ``"huber_loss"`` bounds the gradient of each entry, as Mnih et al. do with rewards of at most 1. Of large values
    it learns the median, which the few episode ends do not move, so values can grow without limit (CartPole's do)."""
    double: bool = True
    """Double DQN: the online network chooses the next action, the target network evaluates it."""
    exploration_fraction: float = 0.2
    """Fraction of the training in which ε falls from 1 to its final value."""
    final_exploration: float = 0.05
    """Final ε, the probability of a random action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is None:
            raise ValueError("DQNConfig.num_steps is None: DQN learns from steps, so give a number of them")
        check_range(self, at_least_one=["buffer_size", "gradient_steps", "batch_size", "target_update_gradient_steps"])
        check_range(self, not_negative=["learning_starts"])
        _check_choice(self, "loss", ValueLossName)
        check_range(self, unit_interval=["gamma", "exploration_fraction", "final_exploration"])
        if self.buffer_size < max(self.learning_starts, self.batch_size):
            raise ValueError(
                f"DQNConfig.buffer_size is {self.buffer_size}, but learning waits for learning_starts "
                f"({self.learning_starts}) and batch_size ({self.batch_size}) remembered steps: remember as many"
            )


AlgorithmName = Literal["ppo", "a2c", "reinforce", "rloo", "grpo", "trpo", "dqn"]
"""Values of ``--algo``."""
CONFIGS: dict[str, type[Config]] = {
    "ppo": PPOConfig, "a2c": A2CConfig, "reinforce": REINFORCEConfig, "rloo": RLOOConfig, "grpo": GRPOConfig,
    "trpo": TRPOConfig, "dqn": DQNConfig,
}  # fmt: skip
"""Config of each algorithm."""
PolicyName = Literal["auto", "mlp", "cnn", "lstm", "gsde", "q"]
"""Values of ``--policy``; ``auto`` is a CNN for images and two MLPs (actor, critic) otherwise, ``q`` is DQN's."""
GROUPED = ("rloo", "grpo")
"""Algorithms that compare episodes with the same start: a control environment is then reset with one seed per slot."""


def find_config(name: str) -> type[Config]:
    """Find the config class of an algorithm.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in CONFIGS:
        raise ValueError(f"algorithm is {name!r}, expected one of {', '.join(CONFIGS)}")
    return CONFIGS[name]


def _check_choice(config: Config, name: str, choices: Any) -> None:
    """Raise a ValueError if a field holds the name of an unknown function."""
    named = getattr(config, name)
    if not callable(named) and named not in get_args(choices):
        known = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"{type(config).__name__}.{name} is {named!r}, expected a function, or one of {known}")


def _refuse_minibatches(config: ActorCriticConfig) -> None:
    if config.normalize_advantage == "minibatch":
        raise ValueError(
            f"{type(config).__name__}.normalize_advantage is 'minibatch', but the policy takes one step on the whole "
            "rollout: give 'rollout' or False"
        )


def _check_groups(config: Config, group_size: int) -> None:
    """Raise a ValueError unless the episodes divide into groups of at least 2."""
    assert config.num_episodes is not None
    if not isinstance(group_size, int) or group_size < 2 or config.num_episodes % group_size:
        raise ValueError(
            f"{type(config).__name__}.group_size is {group_size} and num_episodes is {config.num_episodes}: "
            "expected groups of at least 2, and a number of episodes that divides into them"
        )
