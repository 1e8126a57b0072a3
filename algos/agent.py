"""`Agent`: base class of the algorithms; each adds a config and `update(rollout) -> metrics`."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.collection import Collector, add_log_probs, agree_on_ends
from algos.config import (
    A2CConfig,
    ActorCriticConfig,
    ClippedConfig,
    Config,
    GroupsConfig,
    PolicyGradientConfig,
    PPOConfig,
)
from algos.envs.gymnasium_results import autoreset_mode
from algos.envs.spaces import check_readable
from algos.optimizer import Optimizer
from algos.policies.fitted_value import FittedValue
from algos.policies.generator import Generator, check_generator
from algos.policies.normalizers import RewardNormalizer
from algos.policies.policy import Policy, check_policy, check_spaces, refuse_strings
from algos.policies.random_streams import ACTIONS, MINIBATCHES, stream_seed
from algos.policies.registry import PolicyName, make_policy
from algos.ranks import collectives
from algos.ranks.sharding import Shards
from algos.refills import refill_groups
from algos.storage.serialization import restore_state, saved_state
from algos.storage.weights import load_weights, trained_weights
from algos.training.learner import ValueEstimator
from algos.training.loop import iterate, learn
from algos.training.metrics import EpisodeMeter, LeftOut, Metrics
from algos.training.save import save
from algos.vine import Vine
from textenv.device import find_device
from textenv.envs.branches import check_branches
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.coefficients import CoefficientLike
from textenv.kl.penalty import KLPenalty
from textenv.lm.model import language_model_of
from textenv.names import HintsAtMethods, check_names, no_attribute
from textenv.prompts.template_variables import template_defaults
from textenv.rollout import is_episode_env

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=Config)


class Agent(Generic[ConfigT], metaclass=HintsAtMethods):
    """An environment, a policy, and their random generators.

    `Agent` itself does not learn: an algorithm is one file with its own config and `update`.

    Args:
        env: a vector environment; see `algos.collection`.
        policy: the policy to train; see `algos.policies.policy`. None makes one with the config's seed.
        config: hyper-parameters; None takes the defaults.
        penalty: KL penalty to charge; by default the environment's own, if any.
        kl_coef: reward charged per nat of KL to the initial policy: a number, a function of the number of steps so far,
            or one of `textenv.kl.coefficients`.
        shard: under torchrun, split the weights among the processes during an update (FSDP2, `Shards`): less memory
            for gradients and Adam. In one process it changes nothing.
        device: where to move the policy and the environment's models (`textenv.device.find_device`); None leaves them
            where they are. A reference model follows the policy in either case.
        generator: engine that generates the policy's texts for its rollouts, such as `algos.extras.vllm.VLLM`;
            None: the policy itself.
        fields: config fields to replace, such as ``learning_rate=3e-4``.

    Raises:
        TypeError: on a config of another algorithm, a policy that this algorithm cannot train, or a ``kl_coef`` of
            another type.
        ValueError: if the config does not fit the environment, the KL would be charged twice, there is no such device,
            or the policy's weights are on several devices.
    """

    config_type: type[ConfigT] = Config  # type: ignore[assignment]  # for algorithms without further fields
    """Config class of the algorithm."""

    policy_name: PolicyName = "auto"
    """Policy to make if none is given."""

    several_processes = False
    """Whether several processes can train together (`algos.ranks`). They can if `update` takes its steps by
    `optimizer`, on minibatches of `algos.minibatches`, inside `sharded_weights`."""

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy | None = None,
        config: ConfigT | None = None,
        *,
        penalty: KLPenalty | None = None,
        kl_coef: CoefficientLike | None = None,
        shard: bool = False,
        device: str | torch.device | None = None,
        generator: Generator | None = None,
        **fields: Any,
    ) -> None:
        collectives.start()
        if collectives.world_size() > 1 and not self.several_processes:
            raise ValueError(f"{type(self).__name__} trains in one process, not in {collectives.world_size()}: use PPO")

        # Config and policy, and the checks that they fit the environment
        config = self._checked_config(config)
        if fields:
            config = dataclasses.replace(config, **fields)
        if policy is None and isinstance(env, VectorEnv):
            policy = make_policy(env, policy=self.policy_name, seed=config.seed)
        policy = check_environment(env, policy, config)
        place(policy, env, device)
        if generator is not None:
            config = check_generator(env, policy, config)

        self.env = env
        self.policy = policy
        self.config = resolve(config, env, policy)
        self.penalty = choose_penalty(env, policy, penalty=penalty, kl_coef=kl_coef)
        self.reward_normalizer: RewardNormalizer | None = None
        if isinstance(config, ActorCriticConfig) and config.normalize_rewards:
            self.reward_normalizer = RewardNormalizer(config.gamma)
        self.fitted_value: FittedValue | None = None
        """Fits the value head to each rollout, if ``config.fit_value_head``."""
        if isinstance(config, ActorCriticConfig) and config.fit_value_head:
            self.fitted_value = FittedValue()
        self.vine: ValueEstimator | None = None
        """Estimates values by completions, if ``config.vine_samples``."""
        if isinstance(config, ActorCriticConfig) and config.vine_samples is not None:
            self.vine = Vine(samples=config.vine_samples, interval=config.vine_interval)
        remember_template(env, policy)
        self.collector = Collector(env, policy, seed=collectives.local_seed(config.seed), generator=generator)
        remember_stops(env, policy)
        self.shards = Shards(policy) if shard and collectives.world_size() > 1 else None
        """Policy whose weights are split among the ranks; None if each rank has all of them."""
        self._optimizer: Optimizer | None = None
        self.progress = 0.0
        """Training progress from 0 to 1, read by the schedules."""
        self.steps = 0
        """Steps of the training so far, counted by `learn`."""
        self.left_out = LeftOut()
        """Episodes that `collect` left out of the last rollout, on all ranks."""

        # Two streams of random numbers: one for minibatch order, the same on all ranks, and one for actions, which
        # differs between ranks
        self.generator = torch.Generator().manual_seed(stream_seed(config.seed, MINIBATCHES))
        """Generator for minibatch order."""
        self.policy.generator.manual_seed(stream_seed(collectives.local_seed(config.seed), ACTIONS))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # Python also calls this if a property raises an AttributeError: let the property raise it again.
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            raise no_attribute(self, name)

    def _checked_config(self, config: ConfigT | None) -> ConfigT:
        """Return the config, or the default one; raise a TypeError if it is of another algorithm."""
        if config is None:
            return self.config_type()
        if isinstance(config, self.config_type):
            return config
        advice = ""
        if not isinstance(config, Config):
            advice = ": if it is a recipe, give its .config, or call its .build(seed)"
        raise TypeError(
            f"config is a {type(config).__name__}, but {type(self).__name__} needs a "
            f"{self.config_type.__name__}{advice}"
        )

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the policy's trainable parameters, created at first use."""
        if self._optimizer is None:
            policy = self.policy if self.shards is None else self.shards.policy
            self._optimizer = Optimizer(policy.parameters(), self.config, policy=policy, shards=self.shards)
        return self._optimizer

    def sharded_weights(self) -> AbstractContextManager[None]:
        """Context for the steps of an update: in it `policy` holds this rank's shards, if the weights are split."""
        return nullcontext() if self.shards is None else self.shards.used_by(self)

    def collect(self) -> TensorDict:
        """Run the policy in the environment and return the next rollout.

        If ``config.max_refills`` is not 0, groups without a learning signal are replaced (`algos.refills`).
        """
        config = self.config
        self.collector.env = self.env  # both may have been replaced
        self.collector.policy = self.policy
        agree_on_ends(self.env, self.policy)
        num_episodes = config.num_episodes
        if num_episodes is not None:
            num_episodes = collectives.local_count(num_episodes, "num_episodes")
        rollout = self.collector.collect(
            num_steps=config.num_steps, num_episodes=num_episodes, group_size=config.episodes_per_group
        )
        if isinstance(config, GroupsConfig) and config.max_refills:
            rollout, self.left_out = refill_groups(self.collector, rollout, config)
        return collectives.gather_rows(rollout)

    def step(
        self,
        queries: Sequence[object],
        responses: Sequence[object],
        scores: Any,
        *,
        log_probs: Sequence[object] | None = None,
    ) -> Metrics:
        """Run one iteration of `learn` on texts generated and scored elsewhere, and return its metrics.

        This is what ``PPOTrainer.step`` of TRL 0.7 does.

        Args:
            queries, responses, scores: prompts, completions and scores, as for `TextVectorEnv.given_episodes`.
            log_probs: for each response the log-probability of each token, nats, by the policy that generated it. If
                that was another policy, set ``max_importance_weight``, or raise ``ratio_tolerance``. None: the
                log-probabilities are computed with the current policy.

        Raises:
            TypeError: if the environment is no `TextVectorEnv`.
            ValueError: if queries, responses, scores and log_probs do not fit together.
        """
        # What can learn from texts of elsewhere
        if not isinstance(self.env, TextVectorEnv):
            raise TypeError(f"step is for text, not for a {type(self.env).__name__}: use a TextVectorEnv")
        if self.vine is not None:
            raise ValueError(
                "vine_samples needs the environment's reward for further completions, but the scores of step come from "
                "elsewhere: leave it at None"
            )
        if self.policy.truncates:
            raise ValueError(
                "the policy has top_k or top_p, but of texts that were generated elsewhere nobody knows which tokens "
                "were kept: set both to None"
            )

        # Their rollout
        rollout = self.env.given_episodes(queries, responses, scores)
        group = rollout["group"][:, 0]
        is_alone = (group.bincount() == 1)[group]
        if self.config.episodes_per_group > 1 and is_alone.any():
            raise ValueError(
                f"query {int(is_alone.int().argmax())} has a single response, but {type(self).__name__} compares the "
                "responses of one query: give each query at least twice, each time with another response"
            )
        rollout = rollout.to(self.policy.device)
        add_log_probs(rollout, policy=self.policy, log_probs=log_probs)
        meters = (EpisodeMeter(), EpisodeMeter())  # new ones, because no episode is carried over between calls
        return iterate(self, meters, rollout=collectives.gather_rows(rollout))

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout; return metrics."""
        raise NotImplementedError(f"{type(self).__name__}.update is missing: define how a rollout improves the policy")

    def state_dict(self) -> dict[str, object]:
        """Everything that changes during training, except the environment; see `algos.storage.serialization`."""
        return {
            "policy": trained_weights(self.policy),
            "policy_generator": self.policy.generator,
            "policy_memory": dict(self.policy.memory),
            "generator": self.generator,
            "collector": self.collector.state_dict(),
            "optimizer": saved_state(self._optimizer),
            "reward_normalizer": saved_state(self.reward_normalizer),
            "penalty": saved_state(self.penalty),
            "value_fit": saved_state(self.fitted_value) or {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, in an agent built the same way; the environment is restored separately.

        Raises:
            ValueError: if the policy is a different one.
        """
        load_weights(self.policy, state["policy"])
        self.policy.memory = dict(state["policy_memory"])
        self.policy.generator.set_state(state["policy_generator"].get_state())
        self.generator.set_state(state["generator"].get_state())
        self.collector.load_state_dict(state["collector"])
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        restore_state(self.reward_normalizer, state["reward_normalizer"])
        restore_state(self.penalty, state["penalty"])
        restore_state(self.fitted_value, state.get("value_fit", {}))

    learn = check_names(learn)

    def save(self, folder: str | Path) -> Path:
        """Write policy and config; `algos.load` reads the policy back."""
        return save(self, folder)

    def export(self, path: str | Path, *, all_outputs: bool = False) -> Path:
        """Write the policy as an ONNX file, for programs without torch.

        Arguments, result and errors are those of `algos.policies.policy.ControlPolicy.export`; a language model raises
        a TypeError.
        """
        return self.policy.export(path, all_outputs=all_outputs)


def _check_vine(policy: Policy) -> None:
    """Raise a ValueError unless the texts of this policy can be completed from any token on, in this process."""
    language_model = language_model_of(policy)
    if language_model is not None and language_model.seq2seq is not None:
        raise ValueError(
            "vine_samples is for decoder-only models: an encoder-decoder model reads the beginning of an answer "
            "elsewhere than its prompt"
        )
    if collectives.world_size() > 1:
        raise ValueError(f"vine_samples is for one process, not for {collectives.world_size()}: leave it at None")


def resolve(config: ConfigT, env: VectorEnv, policy: Policy) -> ConfigT:
    """Fill in the config fields that depend on environment and policy.

    Args:
        config: an algorithm's config; fields with a value keep it.
        env: its kind, text or control, decides most defaults: in text a length limit is part of the task.
        policy: the policy to train; it has a default learning rate.

    Raises:
        ValueError: if minibatches of a single advantage would be normalized.
    """
    text = is_episode_env(env)
    resolved: dict[str, Any] = {}

    # Adam
    if config.learning_rate is None:
        resolved["learning_rate"] = policy.default_learning_rate
        if text and config.final_learning_rate is None:
            resolved["final_learning_rate"] = policy.default_learning_rate / 5
    if config.adam_eps is None:
        resolved["adam_eps"] = 1e-8 if text else 1e-5
    initial_rate = resolved.get("learning_rate", config.learning_rate)
    final_rate = resolved.get("final_learning_rate", config.final_learning_rate)
    if final_rate is not None and final_rate > initial_rate:
        advice = "change both, or set final_learning_rate to None"
        logger.warning("the learning rate rises from %g to its final %g: %s", initial_rate, final_rate, advice)

    # Minibatches
    if isinstance(config, ClippedConfig) and config.minibatch_size == 1:
        unit = "step"
        if policy.sequential:
            unit = "answer" if text else "row of steps"
        advice = "to save memory, keep minibatches large and set micro_batch_size=1, which leaves the gradient as it is"
        logger.warning("minibatch_size is 1: each %s is an optimizer step of its own; %s", unit, advice)

    # Advantages
    if isinstance(config, ActorCriticConfig):
        if config.vine_samples is not None:
            check_branches(env)
            _check_vine(policy)
            if isinstance(config, (PPOConfig, A2CConfig)):
                resolved["vf_coef"] = 0.0  # values are not learned
        if config.length_adaptive_lambda is not None and not text:
            raise ValueError(
                f"length_adaptive_lambda is {config.length_adaptive_lambda}, but it is for text, where a row is one "
                "episode: leave it at None"
            )
        if config.fit_value_head and policy.linear_value is None:
            raise ValueError(
                f"fit_value_head is True, but a {type(policy).__name__} has no linear value head to fit: set "
                "fit_value_head=False"
            )
        if config.bootstrap_truncated is None:
            resolved["bootstrap_truncated"] = not text
        if config.normalize_advantage in (None, True):
            ppo_collects_steps = isinstance(config, PPOConfig) and config.num_episodes is None
            resolved["normalize_advantage"] = "minibatch" if ppo_collects_steps else "rollout"
        normalize_advantage = resolved.get("normalize_advantage", config.normalize_advantage)
        # A row of a sequential policy has several steps, whose advantages vary.
        rows_of_steps = policy.sequential and config.num_episodes is None
        single_advantages = isinstance(config, PPOConfig) and config.minibatch_size == 1 and not rows_of_steps
        if single_advantages and normalize_advantage == "minibatch":
            raise ValueError(
                "minibatch_size is 1 and normalize_advantage is 'minibatch': normalizing a single advantage gives 0. "
                "Set normalize_advantage=False, or use larger minibatches"
            )

    if resolved:
        fields = ", ".join(f"{name}={value}" for name, value in resolved.items())
        logger.info("%s: %s", type(config).__name__, fields)
    return dataclasses.replace(config, **resolved)


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
    """Add the environment's stop texts and ids to those of the language model; log all that ends its turns."""
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


def check_environment(env: object, policy: object, config: Config) -> Policy:
    """Refuse environments that an agent cannot collect from, and policies and configs that do not fit.

    Returns:
        The policy.

    Raises:
        TypeError: if ``env`` is no vector environment, or the algorithm cannot train this kind of policy.
        ValueError: if ``env`` charges the KL itself or declares no autoreset mode, if policy and environment have
            different numbers of actions, or if the config collects steps where whole episodes are needed.
    """
    if not isinstance(env, VectorEnv):
        raise TypeError(
            f"env is {env!r:.100}, expected a vector environment: make one with gymnasium.make_vec(id, "
            "num_envs=8), or of a class with gymnasium.vector.SyncVectorEnv([MyEnv] * 8)"
        )
    check_policy(policy, call="PPO(env, policy)")
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
