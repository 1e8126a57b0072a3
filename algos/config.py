"""Hyper-parameters of every algorithm. Nothing here imports torch, so that a command line can show them at once.

A field whose right value depends on environment and policy is None by default and filled in where the agent is made
(`algos.agent.resolve`); a value that is given stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from textenv.names import NamedFields

LARGEST = sys.float_info.max
"""Greatest number of a config."""
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
    """Raise a ValueError that names the first field of a config outside its range; None passes where it may stand."""
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
    """Steps that each environment slot takes in a rollout (control); None with num_episodes."""
    num_episodes: int | None = None
    """Whole episodes in a rollout (text); None with num_steps."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    final_learning_rate: float | None = None
    """Step size at the end, reached linearly; None keeps it constant."""
    warmup_ratio: float = 0.0
    """Share of the training in which the step size rises linearly from 0 to where it starts."""
    adam_eps: float | None = None
    """Added to the square root in Adam's step. None: 1e-5 in control (Huang et al. 2022), 1e-8 for text, where the
    gradient of a single weight is far below 1e-5."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay a step of Adam's means of the gradient and of its square."""
    weight_decay: float = 0.0
    """Decoupled (AdamW, Loshchilov and Hutter 2019): a share of each weight, times the step size, taken off a step."""
    max_grad_norm: float = 0.5
    """Longest gradient; a longer one is scaled down to it."""
    skip_nonfinite: bool = False
    """Leave out a step whose loss or gradient is not finite, and count it in the log; False ends the training there."""
    seed: int = 1
    """Of the environment, the sampled actions and the order of minibatches."""

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
    """Hyper-parameters of the algorithms that follow a policy gradient."""

    micro_batch_size: int | None = None
    """Units evaluated at a time, to save memory; the gradient is the same. None: the whole minibatch."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus, per nat."""
    ratio_tolerance: float | None = None
    """Most nats by which the log-probabilities of acting and of scoring may differ before the first step of an update.
    None: 1e-3 in float32 and float64, .1 in shorter dtypes. Low temperatures need more: they multiply rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, at_least_one=["micro_batch_size"], not_negative=["ent_coef"])
        check_range(self, positive=["ratio_tolerance"])


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms whose advantages come from a learned value, by GAE."""

    gamma: float = 0.99
    """Discount a step."""
    gae_lambda: float = 0.95
    """Trace decay of generalised advantage estimation."""
    whiten_rewards: bool = False
    """Scale the rewards of each rollout, penalty included, to variance 1 and keep their mean (Ziegler et al. 2019)."""
    normalize_advantage: Literal["rollout", "minibatch"] | bool | None = None
    """Scale advantages to mean 0 and variance 1: over the whole rollout before it is cut (TRL), or in each minibatch
    (Stable-Baselines3, CleanRL). None and True: the rollout where whole episodes are collected, else the minibatch."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return; the rollout and the log keep them."""
    bootstrap_truncated: bool | None = None
    """Add the value of the state at which a time or length limit cuts an episode. None: in control yes, for text no,
    where the limit is part of the task and no entry trains that state's value."""
    value_learning_rate: float | None = None
    """Step size of what only the value is made of (value head or critic), with the same schedule; None: the same."""
    value_max_grad_norm: float | None = None
    """Longest gradient of these parameters, cut by itself; None cuts the norm of all together."""

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
    """Steps in a minibatch, or rows where the policy is sequential (text)."""
    clip_range: float = 0.2
    """The probability ratio counts between 1 - clip_range and 1 + clip_range."""
    final_clip_range: float | None = None
    """Clip range at the end, reached linearly; None keeps it constant."""
    vf_coef: float = 0.5
    """Weight of the value loss (half the squared error)."""
    clip_range_vf: float | None = None
    """Most that a value may move in an update, in units of the return; None does not clip."""
    target_kl: float | None = None
    """End an update as soon as a minibatch's approximate KL to the old policy exceeds this; None never does."""
    policy_loss: PolicyLossName | Callable[..., Any] = "clipped_policy_loss"
    """One of `algos.losses`, by name or as `functools.partial(dual_clipped_policy_loss, limit=3.0)`."""
    aggregation: AggregationName | Callable[..., Any] = "token_mean"
    """How entries make one loss: one of `algos.losses`, such as ``"sequence_mean"``, or `fixed_length_mean`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, at_least_one=["num_epochs", "minibatch_size"], not_negative=["final_clip_range", "vf_coef"])
        check_range(self, positive=["clip_range", "target_kl", "clip_range_vf"])
        _check_choice(self, "policy_loss", PolicyLossName)
        _check_choice(self, "aggregation", AggregationName)


@dataclass(frozen=True, kw_only=True)
class A2CConfig(ActorCriticConfig):
    """Hyper-parameters of A2C; ``gae_lambda=1`` are the n-step advantages of the paper, n being ``num_steps``."""

    gae_lambda: float = 1.0
    """Trace decay of generalised advantage estimation."""
    normalize_advantage: Literal["rollout", "minibatch"] | bool | None = False
    """Scale the advantages of each rollout to mean 0 and variance 1."""
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
    """Radius of the trust region: mean KL(new‖old) of an update, nats a step."""
    conjugate_gradient_steps: int = 15
    """Steps that solve for the natural gradient."""
    damping: float = 0.1
    """Added to the diagonal of the KL's second derivative."""
    line_search_steps: int = 10
    """How often the step is shortened until it improves the policy inside the trust region; then it is given up."""
    line_search_factor: float = 0.8
    """Length of each step of the line search, as a share of the one before."""
    critic_epochs: int = 10
    """Passes over each rollout that fit the value."""
    minibatch_size: int = 128
    """Steps in a minibatch of the critic, or rows where the policy is sequential (text)."""

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
    """Hyper-parameters of the algorithms that need the return of a whole episode, and no value."""

    num_steps: int | None = None
    """Not for this algorithm: a return needs the whole episode."""
    num_episodes: int | None = 32
    """Whole episodes in a rollout; a multiple of the group's size, where there are groups."""

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
    """Discount a step; 1 for text."""
    normalize_advantage: bool = True
    """Scale the advantages of each rollout to mean 0 and variance 1; False only subtracts the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, unit_interval=["gamma"])


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(WholeEpisodesConfig):
    """Hyper-parameters of RLOO."""

    group_size: int = 4
    """Episodes that start alike (text: responses to one prompt): each one's baseline is the mean of the others."""
    aggregation: AggregationName | Callable[..., Any] = "token_mean"
    """How entries make one loss: one of `algos.losses`, such as ``"sequence_mean"``, or `fixed_length_mean`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_groups(self, self.group_size)
        _check_choice(self, "aggregation", AggregationName)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(WholeEpisodesConfig):
    """Hyper-parameters of GRPO.

    ``scale_by_std=False`` with `fixed_length_mean` or `token_mean` is "Dr. GRPO" (Liu et al. 2025), which favours
    neither short answers nor groups of little spread.
    """

    group_size: int = 8
    """Episodes that start alike (text: responses to one prompt), which are compared with one another."""
    num_epochs: int = 2
    """Passes over each rollout."""
    minibatch_size: int = 32
    """Steps in a minibatch, or rows where the policy is sequential (text)."""
    clip_range: float = 0.2
    """The probability ratio counts between 1 - clip_range and 1 + clip_range."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the group; False only subtracts its mean."""
    policy_loss: PolicyLossName | Callable[..., Any] = "clipped_policy_loss"
    """One of `algos.losses`, by name or as `functools.partial(clipped_policy_loss, clip_higher=0.28)`."""
    aggregation: AggregationName | Callable[..., Any] = "sequence_mean"
    """How entries make one loss: one of `algos.losses`, such as ``"token_mean"``, or `fixed_length_mean`."""

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
    """Steps that each environment slot takes between updates."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    max_grad_norm: float = 10.0
    """Longest gradient; a longer one is scaled down to it."""
    gamma: float = 0.99
    """Discount a step."""
    buffer_size: int = 100_000
    """Steps that are remembered."""
    learning_starts: int = 1_000
    """Steps before the first update."""
    gradient_steps: int = 8
    """Steps of the optimiser after each rollout."""
    batch_size: int = 64
    """Remembered steps in each of them."""
    target_update_gradient_steps: int = 250
    """Gradient steps after which the target network becomes the present one."""
    loss: ValueLossName | Callable[..., Any] = "mse_loss"
    """Of the values ``[b]`` and what they should be: one of `torch.nn.functional` by name, or a function of the two.
    ``"huber_loss"`` bounds the pull of each, as Mnih et al. do with rewards of at most 1: where values are large it
    learns their median, which the few ends of episodes do not move, and they can grow without limit (CartPole's do)."""
    double: bool = True
    """The present network chooses the next action and the target network says what it is worth."""
    exploration_fraction: float = 0.2
    """Share of the training in which ε falls from 1 to its end."""
    final_exploration: float = 0.05
    """ε afterwards: the probability of a random action."""

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
"""What ``--algo`` takes."""
CONFIGS: dict[str, type[Config]] = {
    "ppo": PPOConfig, "a2c": A2CConfig, "reinforce": REINFORCEConfig, "rloo": RLOOConfig, "grpo": GRPOConfig,
    "trpo": TRPOConfig, "dqn": DQNConfig,
}  # fmt: skip
"""Config of each algorithm."""
PolicyName = Literal["auto", "mlp", "cnn", "lstm", "q"]
"""What ``--policy`` takes; ``auto`` is a CNN for images and two perceptrons for other control, ``q`` is DQN's."""
GROUPED = ("rloo", "grpo")
"""Those that compare episodes with one start, so that a control environment is reset by a seed for each slot."""


def find_config(name: str) -> type[Config]:
    """The config class of an algorithm.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in CONFIGS:
        raise ValueError(f"algorithm is {name!r}, expected one of {', '.join(CONFIGS)}")
    return CONFIGS[name]


def _check_choice(config: Config, name: str, choices: Any) -> None:
    """Raise a ValueError if a field that names a function names one that there is not."""
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
    """Raise a ValueError unless the episodes are collected in groups that have someone to compare with."""
    assert config.num_episodes is not None
    if not isinstance(group_size, int) or group_size < 2 or config.num_episodes % group_size:
        raise ValueError(
            f"{type(config).__name__}.group_size is {group_size} and num_episodes is {config.num_episodes}: "
            "expected groups of at least 2, and a number of episodes that divides into them"
        )
