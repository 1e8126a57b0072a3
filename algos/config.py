"""Hyper-parameters of every algorithm; imports no torch, so that a command line can show them at once.

Fields that depend on the environment and the policy are None by default; the agent fills them in
(`algos.agent_setup.resolve`). Any other value stays.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tyro.conf import FlagConversionOff, arg

from textenv.names import NamedFields, check_call
from textenv.plain import plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class FieldRule(NamedTuple):
    """Rule for the values of a field, attached to its type by `Annotated`."""

    allows: Callable[[object], bool]
    """Whether the field may have a value."""
    expected: str
    """Allowed values in words, for the error."""

    def __repr__(self) -> str:
        """Return the allowed values, as the command line shows them with a type."""
        return self.expected


def _number(in_range: Callable[[float], bool], expected: str, *, integer: bool = False) -> FieldRule:
    """Rule of a finite number, or an integer, in a range; True and False are no numbers."""

    def allows(value: object) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        if integer and not isinstance(value, int):
            return False
        return abs(value) <= sys.float_info.max and in_range(value)

    return FieldRule(allows, expected)


def _function(literal: object) -> FieldRule:
    """Rule of a function, or the name of one; the names are those of a `Literal`."""
    names = get_args(literal)

    def allows(value: object) -> bool:
        return callable(value) or value in names

    return FieldRule(allows, f"a function, or one of {', '.join(map(repr, names))}")


def _one_of(values: Sequence[object]) -> FieldRule:
    """Rule of a value that is one of these."""

    def allows(value: object) -> bool:
        return any(type(value) is type(allowed) and value == allowed for allowed in values)

    return FieldRule(allows, " or ".join(map(repr, values)))


_COUNT_RULE = _number(lambda x: x >= 1, "an integer of at least 1", integer=True)
Count = Annotated[int, _COUNT_RULE]
Natural = Annotated[int, _number(lambda x: 0 <= x < 2**63, "an integer from 0 to below 2**63", integer=True)]
NotNegative = Annotated[float, _number(lambda x: x >= 0, "a number of at least 0")]
Positive = Annotated[float, _number(lambda x: x > 0, "a number above 0")]
UnitInterval = Annotated[float, _number(lambda x: 0 <= x <= 1, "a number from 0 to 1")]

_DECAY_RULE = _number(lambda x: 0 <= x < 1, "a number from 0 to below 1")


def _are_two_decays(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(_DECAY_RULE.allows(x) for x in value)


Decays = Annotated[tuple[float, float], FieldRule(_are_two_decays, "two numbers from 0 to below 1")]
Normalization = Annotated[
    Literal["rollout", "minibatch"] | bool,
    FieldRule(lambda x: x in (True, False, "rollout", "minibatch"), "'rollout', 'minibatch', True, False"),
]
TrueOrFalse = Annotated[bool, FieldRule(lambda x: isinstance(x, bool), "bool"), FlagConversionOff]
"""A bool whose flag takes a value (``--flag True``): in other algorithms the flag of this name has further values."""
_Function = Callable[..., Any]
PolicyLossName = Literal[
    "clipped_policy_loss", "dual_clipped_policy_loss", "gspo_policy_loss", "thresholded_policy_loss",
    "cispo_policy_loss", "opsm_policy_loss", "clip_cov_policy_loss", "kl_cov_policy_loss",
]  # fmt: skip
PolicyLossChoice = Annotated[PolicyLossName | _Function, _function(PolicyLossName), arg(constructor=PolicyLossName)]
AggregationName = Literal["token_mean", "sequence_mean"]
AggregationChoice = Annotated[AggregationName | _Function, _function(AggregationName), arg(constructor=AggregationName)]
ImportanceWeightsName = Literal[
    "token_truncate", "token_mask", "two_sided_token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate",
    "geometric_mask",
]  # fmt: skip
ImportanceWeightsChoice = Annotated[
    ImportanceWeightsName | _Function, _function(ImportanceWeightsName), arg(constructor=ImportanceWeightsName)
]
ValueLossName = Literal["mse_loss", "huber_loss", "smooth_l1_loss"]
ValueLossChoice = Annotated[ValueLossName | _Function, _function(ValueLossName), arg(constructor=ValueLossName)]
CONTROL_LEARNING_RATE = 2.5e-4
"""Learning rate of Adam in control, where a config has none."""
CONTROL_GAMMA = 0.99
"""Discount per step in control, where a config has none."""


def field_values(config: "DataclassInstance") -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying the values as `dataclasses.asdict` does."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def check_fields(config: "DataclassInstance") -> None:
    """Raise a ValueError that names the first field with a value that its type does not allow.

    NumPy scalars become Python numbers first.
    """
    for name, value in field_values(config).items():
        object.__setattr__(config, name, plain(value))
    types = get_type_hints(type(config), include_extras=True)
    for name, value in field_values(config).items():
        rule, optional = _rule_of(types[name])
        if rule is None or rule.allows(value) or (optional and value is None):
            continue
        expected = rule.expected
        if optional:
            expected += " or None"
        advice = ""
        if callable(value) and f"final_{name}" in types:
            advice = f": a schedule is linear, from {name} to final_{name}"
        elif callable(value):
            advice = ": it has no schedule"
        raise ValueError(f"{type(config).__name__}.{name} is {value!r}, expected {expected}{advice}")


def _rule_of(field_type: object) -> tuple[FieldRule | None, bool]:
    """Rule of a field's type, None if every value is allowed; and whether the type allows None."""
    parts: tuple[Any, ...] = (field_type,)
    if get_origin(field_type) in (Union, UnionType):
        parts = get_args(field_type)
    rules = [part.__metadata__[0] for part in parts if get_origin(part) is Annotated]
    choices = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
    if choices and all(get_origin(part) is Literal or part is NoneType for part in parts):
        rules.append(_one_of(choices))
    if bool in parts:
        rules.append(FieldRule(lambda x: isinstance(x, bool), "bool"))
    first_rule = rules[0] if rules else None
    return first_rule, NoneType in parts


def check_total_steps(total_steps: object) -> None:
    """Raise a ValueError unless the length of a training is a whole number of at least 1; it may be a float (1e6)."""
    number = plain(total_steps)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not _COUNT_RULE.allows(number):
        raise ValueError(f"total_steps is {total_steps!r:.200}, expected {_COUNT_RULE.expected}")


def discount(gamma: float | None) -> float:
    """Return the discount per step; that of control where a config that no agent has resolved leaves it open."""
    return CONTROL_GAMMA if gamma is None else gamma


def scheduled(start: float, end: float | None, progress: float) -> float:
    """Interpolate linearly from start to end, as progress goes from 0 to 1; constant if there is no end."""
    return start if end is None else start + progress * (end - start)


@dataclass(frozen=True, kw_only=True)
class Config(NamedFields):
    """Hyper-parameters that every algorithm has."""

    num_steps: Count | None = 128
    """Steps per environment slot in a rollout (control); None with num_episodes."""
    num_episodes: Count | None = None
    """Whole episodes per rollout (text); None with num_steps."""
    learning_rate: Positive | None = None
    """Initial learning rate of Adam. None: 2.5e-4 in control (Huang et al. 2022); 5e-4 for language models of less than
    10 million parameters; 1.41e-5 for larger ones (TRL's gpt2-sentiment), and 1.4e-4 with LoRA, ten times as much
    ("LoRA Without Regret", Schulman et al. 2025)."""
    final_learning_rate: NotNegative | None = None
    """Final learning rate, reached linearly. None: the rate is constant; on text it falls to a fifth if
    ``learning_rate`` is None as well."""
    warmup_ratio: UnitInterval = 0.0
    """Fraction of the training in which the learning rate rises linearly from near 0 to its initial value."""
    adam_eps: Positive | None = None
    """Number added to the denominator of Adam's step. None: 1e-5 in control (Huang et al. 2022); 1e-8 for text, where
    the gradient of a single weight is far below 1e-5."""
    adam_betas: Decays = (0.9, 0.999)
    """Adam's decay rates per step: of the mean of the gradient, and of the mean of its square."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay (AdamW, Loshchilov and Hutter 2019), multiplied by the learning rate at each step."""
    max_grad_norm: Positive = 0.5
    """Maximum global gradient norm (clipping)."""
    skip_nonfinite: bool = False
    """Skip a step whose loss or gradient is not finite, and count it in the log; False raises an error instead."""
    seed: Annotated[Natural, arg(name="seed", prefix_name=False)] = 1
    """Seed of environment resets, sampled actions, minibatch order, and the weights of a policy made by name."""

    @property
    def episodes_per_group(self) -> int:
        """Episodes with the same start that are compared with one another; 1 without groups."""
        return 1

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.num_episodes is None):
            raise ValueError(
                f"num_steps is {self.num_steps} and num_episodes is {self.num_episodes}: give one of them, and set the "
                "other to None"
            )
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(Config):
    """Hyper-parameters of the policy-gradient algorithms."""

    micro_batch_size: Count | None = None
    """Units (steps or rows) per backward pass, to save memory; the gradient is the same. None takes the whole
    minibatch."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy bonus, per nat."""
    ratio_tolerance: Positive | None = None
    """Maximum difference, in nats, between the log-probability of an action when acting and when scoring, before the
    first step of an update; also the maximum KL that is measured to a reference of equal weights. None: 1e-3 in float32
    and float64, .5 in shorter dtypes, where a hundredth of the actions may differ by four times as much. Low
    temperatures amplify rounding and need more. For mixtures of experts the limit is on the median difference, and the
    default is at least .1."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms that compute advantages by GAE from a learned value."""

    gamma: UnitInterval | None = None
    """Discount per step. None: .99 in control; 1 for text, where a reward counts alike for all tokens of an answer."""
    gae_lambda: UnitInterval = 0.95
    """Trace decay λ of generalized advantage estimation."""
    value_gae_lambda: UnitInterval | None = None
    """λ of the targets that the value learns, if it differs from that of the advantages: with 1 they are returns, and
    carry a reward at the end of a long answer to its beginning (Yuan et al. 2025, VC-PPO). None: that of the
    advantages."""
    length_adaptive_lambda: Positive | None = None
    """α of VAPO (Yue et al. 2025, eq. 9), there .05: λ of the advantages is 1 - 1/(α l) in an episode of l steps, at
    least 0, in place of ``gae_lambda``. For text. None: the same λ for each length."""
    whiten_rewards: bool = False
    """Scale the rewards of each rollout, KL penalty included, to variance 1 and keep their mean (Ziegler et al.
    2019)."""
    normalize_advantage: Normalization | None = None
    """Normalize advantages to mean 0 and variance 1: over the whole rollout (TRL), or in each minibatch
    (Stable-Baselines3, CleanRL). None and True: in each minibatch in PPO with num_steps, else over the rollout."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return. Rollout and log keep the rewards as
    they were."""
    clip_rewards: Positive | None = None
    """Clip each reward to ± this, such as 1 for Atari games (Mnih et al. 2015). Rollout and log keep the rewards as
    they were. None: no clipping."""
    end_with_life: bool = False
    """Let a lost life end the episode in the advantages, if the environment reports ``info["lives"]``, as Atari games
    do. The episode itself goes on, so returns are those of whole games."""
    bootstrap_truncated: bool | None = None
    """Add the value of the last state when a time or length limit truncates an episode. None: True in control; False
    for text, where the limit is part of the task, and the value of that state is never trained."""
    value_learning_rate: Positive | None = None
    """Learning rate of the parameters that only the value uses (head or critic), with the same schedule. None:
    ``learning_rate``."""
    value_max_grad_norm: Positive | None = None
    """Maximum gradient norm of the parameters that only the value uses, clipped separately. None: all parameters are
    clipped together."""
    vine_samples: Count | None = None
    """Values of states from this many completions of each, in place of learned ones (Kazemnejad et al. 2024, VinePPO;
    `algos.vine`): text of single turns. What they sample counts as steps, and no value is learned (``vf_coef`` becomes
    0; TRPO still fits its critic). The paper has 9, and `gae_lambda` 0."""
    vine_interval: Count = 8
    """Tokens between the states that are completed, with ``vine_samples``; the tokens between have one advantage."""
    fit_value_head: bool = False
    """Fit the linear value head to the returns of each rollout, in closed form, before advantages are computed. Values
    come from heads fitted to other episodes and earlier rollouts (docs/results/critic.md). Language models only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vine_samples is not None:
            excluded = (
                "fit_value_head", "length_adaptive_lambda", "value_gae_lambda", "bootstrap_truncated",
                "normalize_rewards", "whiten_rewards", "clip_rewards", "clip_range_vf", "value_pretraining",
            )  # fmt: skip
            for name in excluded:
                if getattr(self, name, None):
                    raise ValueError(
                        f"vine_samples is {self.vine_samples}, and values are then returns of completions, but {name} "
                        f"is {getattr(self, name)}: set {name}=False or None (the preset of text has fit_value_head; "
                        "typed: --config.no-fit-value-head)"
                    )
            if self.gamma not in (None, 1):
                raise ValueError(f"vine_samples is {self.vine_samples}, but gamma is {self.gamma}, expected 1")
        if self.length_adaptive_lambda is not None and self.num_episodes is None:
            raise ValueError(
                f"length_adaptive_lambda is {self.length_adaptive_lambda}, but in rollouts of steps the length of an "
                "episode is not known: set num_steps=None and num_episodes, or leave it at None"
            )


@dataclass(frozen=True, kw_only=True)
class ClippedConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms that take several steps on each rollout, with clipped probability ratios."""

    num_epochs: Count = 4
    """Passes over each rollout."""
    minibatch_size: Count = 128
    """Steps per minibatch; rows if the policy is sequential (text)."""
    clip_range: Positive = 0.2
    """Clip range ε: the probability ratio is clipped to [1 - ε, 1 + ε]."""
    clip_higher: Positive | None = None
    """ε of the upper bound of the ratio, such as .28 (Yu et al. 2025, DAPO); None: ``clip_range``."""
    importance_weights: ImportanceWeightsChoice | None = None
    """For samples of another engine, precision or older policy μ: score each rollout again before its update, take
    ratios to these probabilities π_old, and multiply the policy loss of each step by a weight of π_old / μ. The name of
    a function of `algos.importance`, or a function, also your own (`algos.importance.ImportanceWeights`). None: take
    ratios to the probabilities when sampled, unless there is a ``max_importance_weight``."""
    max_importance_weight: Positive | None = None
    """Bound of these weights or ratios, see the functions of `algos.importance`. None: the default of each function. A
    number without ``importance_weights`` means ``"token_truncate"`` (TIS, Yao et al. 2025), for which 2 or 3 is
    usual."""
    policy_loss: PolicyLossChoice = "clipped_policy_loss"
    """Name of a loss of `algos.losses`, or a function, also your own (`algos.losses.PolicyLoss`):
    ``functools.partial(dual_clipped_policy_loss, limit=3.0)``."""
    aggregation: AggregationChoice = "token_mean"
    """Weight of each entry in the loss: the name of a function of `algos.losses`, such as ``"sequence_mean"``, or a
    function, such as ``functools.partial(fixed_length_mean, length=48)``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("policy_loss", "importance_weights"):
            choice = getattr(self, name)
            if isinstance(choice, type):
                raise ValueError(
                    f"{name} is the class {choice.__name__}, expected an object of it: {choice.__name__}()"
                )
        if self.clip_higher is not None:
            _check_takes(self.policy_loss, "clip_higher", value=f"clip_higher is {self.clip_higher}")
            if self.policy_loss == "kl_cov_policy_loss":
                raise ValueError(
                    f"clip_higher is {self.clip_higher}, but kl_cov_policy_loss clips nothing: leave it at None"
                )

        # The policy loss, with what `algos.losses.weighted_policy_loss` gives it
        keywords = ["log_ratio", "advantage", "mask", "clip_range"]
        if self.clip_higher is not None:
            keywords.append("clip_higher")
        if hasattr(self.policy_loss, "select"):
            keywords.append("selected")
        if callable(self.policy_loss):
            check_call(self.policy_loss, keywords=keywords, name="policy_loss")

        if self.max_importance_weight is not None and self.importance_weights is not None:
            _check_takes(
                self.importance_weights, "limit", value=f"max_importance_weight is {self.max_importance_weight}"
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(ActorCriticConfig, ClippedConfig):
    """Hyper-parameters of PPO."""

    final_clip_range: NotNegative | None = None
    """Final clip range, reached linearly; None keeps it constant."""
    vf_coef: NotNegative = 0.5
    """Weight of the value loss (half the squared error)."""
    clip_range_vf: Positive | None = None
    """Maximum change of a value in an update, in units of the return; None does not clip."""
    target_kl: Positive | None = None
    """End an update as soon as the approximate KL of a minibatch to the old policy exceeds this. None: no limit."""
    value_pretraining: UnitInterval = 0.0
    """Fraction of the training, from its beginning, in which only the parameters that nothing but the value uses are
    trained, and the policy stays as it is (Yuan et al. 2025, VC-PPO; Yue et al. 2025, VAPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_pretraining and self.fit_value_head:
            raise ValueError(
                f"value_pretraining is {self.value_pretraining}, but fit_value_head fits the value to each rollout: "
                "set fit_value_head=False, which the preset of text has (typed: --config.no-fit-value-head)"
            )


@dataclass(frozen=True, kw_only=True)
class A2CConfig(ActorCriticConfig):
    """Hyper-parameters of A2C; ``gae_lambda=1`` gives the paper's n-step advantages, with n = ``num_steps``."""

    gae_lambda: UnitInterval = 1.0
    normalize_advantage: Normalization | None = False
    """Normalize the advantages of each rollout to mean 0 and variance 1."""
    vf_coef: NotNegative = 0.5
    """Weight of the value loss (half the squared error)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_minibatches(self)


@dataclass(frozen=True, kw_only=True)
class TRPOConfig(ActorCriticConfig):
    """Hyper-parameters of TRPO; the learning rate is the critic's."""

    learning_rate: Positive | None = CONTROL_LEARNING_RATE

    max_kl: Positive = 0.01
    """Radius of the trust region: maximum mean KL(new‖old) of an update, nats per step."""
    conjugate_gradient_steps: Count = 15
    """Conjugate-gradient iterations for the natural gradient."""
    damping: NotNegative = 0.1
    """Added to the diagonal of the KL's Hessian."""
    line_search_steps: Count = 10
    """Maximum number of step sizes to try. If none improves the policy inside the trust region, no step is taken."""
    line_search_factor: Positive = 0.8
    """Ratio of each step size in the line search to the previous one."""
    critic_epochs: Count = 10
    """Passes of the critic over each rollout."""
    minibatch_size: Count = 128
    """Steps per minibatch of the critic; rows if the policy is sequential (text)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_minibatches(self)
        if self.line_search_factor >= 1:
            raise ValueError(f"TRPOConfig.line_search_factor is {self.line_search_factor}, expected less than 1")
        if self.ent_coef or self.micro_batch_size:
            raise ValueError("TRPO does not use ent_coef and micro_batch_size: leave them at 0 and None")
        if self.value_learning_rate is not None or self.value_max_grad_norm is not None:
            raise ValueError(
                "TRPO's learning_rate and max_grad_norm already apply to the critic: leave value_learning_rate and "
                "value_max_grad_norm at None"
            )


@dataclass(frozen=True, kw_only=True)
class WholeEpisodesConfig(PolicyGradientConfig):
    """Hyper-parameters of the algorithms that use returns of whole episodes and no learned value."""

    num_steps: Count | None = None
    """Not supported: a return needs the whole episode."""
    num_episodes: Count | None = 32
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

    gamma: UnitInterval | None = None
    """Discount per step. None: .99 in control; 1 for text."""
    baseline: Literal["rollout", "agent"] = "rollout"
    """What is subtracted from the returns: ``"rollout"``: their mean over the rollout; ``"agent"``: a running mean of
    each agent's returns in games of several agents (`algos.agent_baseline.AgentBaseline`)."""
    normalize_advantage: TrueOrFalse = True
    """Normalize the advantages of each rollout to mean 0 and variance 1."""


@dataclass(frozen=True, kw_only=True)
class REINFORCEPlusPlusConfig(WholeEpisodesConfig, ClippedConfig):
    """Hyper-parameters of REINFORCE++; the advantages of each rollout always have mean 0 and variance 1."""

    gamma: UnitInterval | None = None
    """Discount per step. None: .99 in control; 1 for text."""


@dataclass(frozen=True, kw_only=True)
class GroupsConfig(WholeEpisodesConfig):
    """Hyper-parameters of the algorithms that compare episodes with the same start."""

    group_size: int = 4
    """Episodes with the same start (text: completions of one prompt), compared with one another."""
    max_refills: Natural = 0
    """Dynamic sampling (Yu et al. 2025, DAPO): groups whose returns are all equal teach nothing, so as many new groups
    are collected in their place, up to this number of times for each rollout. All that is generated counts as steps."""

    @property
    def episodes_per_group(self) -> int:
        """See `Config.episodes_per_group`."""
        return self.group_size

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.num_episodes is not None
        if not isinstance(self.group_size, int) or self.group_size < 2 or self.num_episodes % self.group_size:
            raise ValueError(
                f"{type(self).__name__}.group_size is {self.group_size} and num_episodes is {self.num_episodes}: "
                "expected a group_size of at least 2 that divides num_episodes"
            )


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(GroupsConfig):
    """Hyper-parameters of RLOO; the baseline of an episode is the mean return of the others in its group."""

    aggregation: AggregationChoice = "token_mean"
    """Weight of each entry in the loss: the name of a function of `algos.losses`, such as ``"sequence_mean"``, or a
    function, such as ``functools.partial(fixed_length_mean, length=48)``."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(GroupsConfig, ClippedConfig):
    """Hyper-parameters of GRPO.

    ``scale_by_std=False`` with `fixed_length_mean` or `token_mean` is "Dr. GRPO" (Liu et al. 2025), which favours
    neither short answers nor groups with a small standard deviation.
    """

    group_size: int = 8
    num_epochs: Count = 2
    minibatch_size: Count = 32
    aggregation: AggregationChoice = "sequence_mean"
    scale_by_std: bool = True
    """Divide by the group's standard deviation; False only subtracts its mean."""
    normalize_each_reward: bool = False
    """Standardize each of several rewards in its group, add them by weight, and standardize the sum over the rollout
    (Liu et al. 2026, GDPO). A reward of little spread then counts as well. Needs `Rewards` of several functions."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Config):
    """Hyper-parameters of the algorithms that learn from a replay buffer."""

    num_steps: Count | None = 16
    """Steps per environment slot between updates."""
    gamma: UnitInterval = 0.99
    """Discount per step."""
    buffer_size: Count = 1_000_000
    """Capacity of the replay buffer, in steps."""
    learning_starts: Natural = 100
    """Stored steps before the first update."""
    batch_size: Count = 256
    """Stored steps in the batch of an optimizer step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.num_steps is None:
            algorithm = name.removesuffix("Config")
            raise ValueError(f"{name}.num_steps is None, expected a number of steps: {algorithm} learns from steps")
        if self.buffer_size < max(self.learning_starts, self.batch_size):
            raise ValueError(
                f"{name}.buffer_size is {self.buffer_size}, expected at least learning_starts "
                f"({self.learning_starts}) and batch_size ({self.batch_size}), or learning would never start"
            )


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ReplayConfig):
    """Hyper-parameters of DQN."""

    learning_rate: Positive | None = 1e-3
    max_grad_norm: Positive = 10.0
    buffer_size: Count = 100_000
    learning_starts: Natural = 1_000
    gradient_steps: Count = 8
    """Optimizer steps after each rollout."""
    batch_size: Count = 64
    target_update_gradient_steps: Count = 250
    """Gradient steps between updates of the target network (Stable-Baselines3's interval counts environment steps)."""
    loss: ValueLossChoice = "mse_loss"
    """Loss of the values ``[b]`` against their targets: a name from `torch.nn.functional`, or a function.
    ``"huber_loss"`` bounds the gradient of each entry, as in Mnih et al., who clip rewards to ±1. For large errors
    it fits the targets' median, which rare terminations do not change: values can grow without limit (CartPole)."""
    double: bool = True
    """Double DQN: the online network chooses the next action, the target network evaluates it."""
    exploration_fraction: UnitInterval = 0.2
    """Fraction of the training in which ε falls from 1 to its final value."""
    final_exploration: UnitInterval = 0.05
    """Final ε, the probability of a random action."""


@dataclass(frozen=True, kw_only=True)
class ContinuousReplayConfig(ReplayConfig):
    """Hyper-parameters of SAC and TD3."""

    adam_eps: Positive | None = 1e-8
    max_grad_norm: Positive = 1e9
    """Maximum global gradient norm (clipping), of actor and critics each. The default is no limit, as in the papers."""
    learning_starts: Natural = 100
    """Stored steps before the first update; until then actions are drawn uniformly from the Box."""
    updates_per_step: Positive = 1.0
    """Update-to-data ratio: optimizer steps for each step that was stored. They follow the rollout."""
    target_rate: UnitInterval = 0.005
    """Fraction τ by which the target networks move towards the trained ones at each update (Polyak averaging)."""


@dataclass(frozen=True, kw_only=True)
class SACConfig(ContinuousReplayConfig):
    """Hyper-parameters of SAC (Haarnoja et al. 2018b)."""

    learning_rate: Positive | None = 3e-4
    temperature: Positive | None = None
    """Reward α for each nat of entropy, of actions that are scaled to [-1, 1]. None: α begins at 1, and is learned so
    that the mean entropy is minus the number of action dimensions."""


@dataclass(frozen=True, kw_only=True)
class TD3Config(ContinuousReplayConfig):
    """Hyper-parameters of TD3 (Fujimoto et al. 2018)."""

    learning_rate: Positive | None = 1e-3
    exploration_noise: NotNegative = 0.1
    """Standard deviation of the noise that is added to actions, as a fraction of half the range of each number."""
    noise_correlation: UnitInterval = 0.0
    """Correlation ρ of this noise with that of the next step of the episode, an Ornstein-Uhlenbeck process (Lillicrap
    et al. 2016) with θ dt = 1 - ρ. 0: each step has noise of its own; 1: it stays the same for the episode."""
    target_noise: NotNegative = 0.2
    """Standard deviation of the noise on the next action in the critics' target (target policy smoothing)."""
    target_noise_clip: Positive = 0.5
    """Largest size of that noise."""
    policy_delay: Count = 2
    """Steps of the critics for each step of the policy and of the target networks."""


AlgorithmName = Literal["ppo", "a2c", "reinforce", "reinforce_plus_plus", "rloo", "grpo", "trpo", "dqn", "sac", "td3"]
"""Values of ``--algo``."""
CONFIGS: dict[str, type[Config]] = {
    "ppo": PPOConfig, "a2c": A2CConfig, "reinforce": REINFORCEConfig, "reinforce_plus_plus": REINFORCEPlusPlusConfig,
    "rloo": RLOOConfig, "grpo": GRPOConfig, "trpo": TRPOConfig, "dqn": DQNConfig, "sac": SACConfig, "td3": TD3Config,
}  # fmt: skip
"""Config of each algorithm."""


def find_config(algorithm: object) -> type[Config]:
    """Find the config class of an algorithm, which is given by name or as a class that inherits `algos.Agent`.

    Raises:
        TypeError: if it is neither a text nor such a class.
        ValueError: if the name is unknown.
    """
    names = ", ".join(CONFIGS)
    if isinstance(algorithm, str):
        if algorithm not in CONFIGS:
            raise ValueError(f"algorithm is {algorithm!r}, expected one of {names}")
        return CONFIGS[algorithm]
    config_type = getattr(algorithm, "config_type", None)
    if not isinstance(algorithm, type) or not isinstance(config_type, type) or not issubclass(config_type, Config):
        raise TypeError(
            f"algorithm is {algorithm!r:.200}, expected one of {names}, or a class that inherits algos.Agent"
        )
    return config_type


def weighs_samples(config: Config) -> bool:
    """Return whether the steps of a rollout get importance weights."""
    if not isinstance(config, ClippedConfig):
        return False
    return config.importance_weights is not None or config.max_importance_weight is not None


def compares_groups(algorithm: object) -> bool:
    """Return True for algorithms that compare episodes with the same start; raises as `find_config`.

    They reset a control environment with one seed per slot.
    """
    return issubclass(find_config(algorithm), GroupsConfig)


def _refuse_minibatches(config: ActorCriticConfig) -> None:
    """Raise a ValueError if advantages are to be normalized by minibatch: the policy takes one step on all of them."""
    if config.normalize_advantage == "minibatch":
        raise ValueError(
            f"{type(config).__name__}.normalize_advantage is 'minibatch', but the policy takes one step on the whole "
            "rollout: set it to 'rollout' or False"
        )


def _check_takes(function: object, argument: str, *, value: str) -> None:
    """Raise a ValueError if a function has no argument of this name; a name in place of a function passes."""
    if not callable(function):
        return
    parameters = signature(function).parameters.values()
    takes_all = any(x.kind is Parameter.VAR_KEYWORD for x in parameters)
    if not takes_all and not any(x.name == argument for x in parameters):
        raise ValueError(
            f"{value}, but {function!r:.100} has no argument {argument}: leave it at None, or add the argument"
        )
