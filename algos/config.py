"""What the configs of all algorithms have in common; the fields of one algorithm stand in its file."""

from __future__ import annotations

from dataclasses import dataclass

from algos.invariants import check_range


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hyper-parameters that every algorithm has."""

    steps: int | None = 128
    """Steps that each environment slot takes in a rollout (control); None with episodes."""
    episodes: int | None = None
    """Whole episodes in a rollout (text); None with steps."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    final_learning_rate: float | None = None
    """Step size at the end, reached linearly; None keeps it constant."""
    warmup: float = 0.0
    """Share of the training in which the step size rises linearly from 0 to where it starts."""
    max_grad_norm: float = 0.5
    """Longest gradient; a longer one is scaled down to it."""
    skip_nonfinite: bool = False
    """Leave out a step whose loss or gradient is not finite, and count it in the log; False ends the training there."""
    seed: int = 1
    """Of the environment, the sampled actions and the order of minibatches."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.episodes is None):
            raise ValueError(f"steps is {self.steps} and episodes is {self.episodes}: give one, and None for the other")
        check_range(self, at_least_one=["steps", "episodes"], positive=["learning_rate", "max_grad_norm"])
        check_range(self, not_negative=["final_learning_rate", "seed"], unit_interval=["warmup"])


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(Config):
    """Hyper-parameters of the algorithms that follow a policy gradient."""

    micro_batch_size: int | None = None
    """Units evaluated at a time, to save memory; the gradient is the same. None: the whole minibatch."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, per nat."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, at_least_one=["micro_batch_size"], not_negative=["entropy_coefficient"])


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms whose advantages come from a learned value, by GAE."""

    gamma: float = 0.99
    """Discount a step."""
    gae_lambda: float = 0.95
    """Trace decay of generalised advantage estimation."""
    whiten_rewards: bool = False
    """Scale the rewards of each rollout, penalty included, to variance 1 and keep their mean (Ziegler et al. 2019)."""
    whiten_advantages: bool = True
    """Scale the advantages of each minibatch to mean 0 and variance 1."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return; the rollout and the log keep them."""
    bootstrap_truncated: bool = True
    """Whether a time or length limit counts the value of the state it cuts at; text: no, the limit is the task's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, unit_interval=["gamma", "gae_lambda"])


def check_whole_episodes(config: Config) -> None:
    """Raise a ValueError unless a config collects whole episodes, whose returns need no value."""
    if config.episodes is None:
        raise ValueError(
            f"{type(config).__name__}.steps is {config.steps}, but returns of whole episodes are needed: "
            "set steps=None and episodes"
        )


def check_groups(config: Config, group_size: int) -> None:
    """Raise a ValueError unless whole episodes are collected in groups that have someone to compare with."""
    check_whole_episodes(config)
    assert config.episodes is not None
    if not isinstance(group_size, int) or group_size < 2 or config.episodes % group_size:
        raise ValueError(
            f"{type(config).__name__}.group_size is {group_size} and episodes is {config.episodes}: expected groups of "
            "at least 2, and a number of episodes that divides into them"
        )
