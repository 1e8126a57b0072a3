"""`Agent`: base class of the algorithms; each adds a config and `update(rollout) -> metrics`."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.agent_setup import check_environment, choose_penalty, place, remember_stops, remember_template, resolve
from algos.collection import Collector, add_log_probs, agree_on_ends
from algos.config import (
    ActorCriticConfig,
    Config,
    GroupsConfig,
    PolicyGradientConfig,
    discount,
    field_values,
)
from algos.optimizer import Optimizer
from algos.policies.fitted_value import FittedValue
from algos.policies.generator import Generator, check_generator
from algos.policies.normalizers import RewardNormalizer
from algos.policies.policy import Policy
from algos.policies.random_streams import ACTIONS, MINIBATCHES, stream_seed
from algos.policies.registry import PolicyName, make_policy
from algos.ranks import collectives
from algos.ranks.sharding import Shards
from algos.refills import refill_groups
from algos.storage.run_folder import warn_of_longer_run
from algos.storage.serialization import restore_state, saved_state
from algos.storage.weights import load_weights, trained_weights
from algos.training.learner import ValueEstimator
from algos.training.loop import iterate, learn
from algos.training.metrics import EpisodeMeter, LeftOut, Metrics
from algos.training.save import save
from algos.vine import Vine
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.coefficients import CoefficientLike
from textenv.kl.penalty import KLPenalty
from textenv.names import HintsAtMethods, check_names, no_attribute, refuse_unknown

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=Config)
KEYWORDS = ("penalty", "kl_coef", "shard", "device", "generator")
"""Keywords of the agents that train by policy gradients, besides the fields of their configs."""
READ_ONCE = (
    # by the optimizers
    "learning_rate", "final_learning_rate", "warmup_ratio", "adam_eps", "adam_betas", "weight_decay", "max_grad_norm",
    "micro_batch_size", "skip_nonfinite", "value_learning_rate", "value_max_grad_norm", "value_pretraining",
    # by other parts of an agent
    "seed", "normalize_rewards", "fit_value_head", "vine_samples", "vine_interval", "buffer_size", "baseline",
)  # fmt: skip
"""Hyper-parameters that are read when the agent or its optimizer is made: a later value would have no effect."""


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
            if isinstance(config, PolicyGradientConfig):
                names = [field.name for field in dataclasses.fields(config)]
                refuse_unknown(fields, [*names, *KEYWORDS], owner=type(config).__name__)
            config = dataclasses.replace(config, **fields)
        if policy is None and isinstance(env, VectorEnv):
            policy = make_policy(env, policy=self.policy_name, seed=config.seed)
        policy = check_environment(env, policy, config)
        place(policy, env, device)
        if generator is not None:
            config = check_generator(env, policy, config)

        self.env = env
        self.policy = policy
        self._config = resolve(config, env, policy)
        self.penalty = choose_penalty(env, policy, penalty=penalty, kl_coef=kl_coef)

        # Parts for rewards and values, None unless the config asks for them
        self.reward_normalizer: RewardNormalizer | None = None
        self.fitted_value: FittedValue | None = None
        """Fits the value head to each rollout, if ``config.fit_value_head``."""
        self.vine: ValueEstimator | None = None
        """Estimates values by completions, if ``config.vine_samples``."""
        if isinstance(config, ActorCriticConfig):
            if config.normalize_rewards:
                self.reward_normalizer = RewardNormalizer(discount(config.gamma))
            if config.fit_value_head:
                self.fitted_value = FittedValue()
            if config.vine_samples is not None:
                self.vine = Vine(samples=config.vine_samples, interval=config.vine_interval)

        # The model gets the environment's template before the collector makes both agree on the ends of turns, and
        # remembers these afterwards
        remember_template(env, policy)
        self.collector = Collector(env, policy, seed=collectives.local_seed(config.seed), generator=generator)
        remember_stops(env, policy)

        # The update, and what is counted
        self.shards = Shards(policy) if shard and collectives.world_size() > 1 else None
        """Policy whose weights are split among the ranks; None if each rank has all of them."""
        self._optimizer: Optimizer | None = None
        self.progress = 0.0
        """Training progress from 0 to 1, read by the schedules."""
        self.steps = 0
        """Steps of the training so far, counted by `learn`."""
        self.left_out = LeftOut()
        """Episodes that `collect` left out of the last rollout, on all ranks."""

        # Two streams of random numbers: one for updates, the same on all ranks, and one for actions, which differs
        # between ranks
        self.update_generator = torch.Generator().manual_seed(stream_seed(config.seed, MINIBATCHES))
        """Random numbers of an update, such as the order of minibatches; what writes texts is `collector.generator`."""
        self.policy.generator.manual_seed(stream_seed(collectives.local_seed(config.seed), ACTIONS))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # Python also calls this if a property raises an AttributeError: let the property raise it again.
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            raise no_attribute(self, name)

    @property
    def config(self) -> ConfigT:
        """Hyper-parameters of the next update.

        They may be replaced between updates, such as ``agent.config = dataclasses.replace(agent.config, ent_coef=0)``.

        Raises:
            TypeError: on a config of another algorithm.
            ValueError: if a hyper-parameter changes that only a new agent reads, such as the learning rate.
        """
        return self._config

    @config.setter
    def config(self, config: ConfigT) -> None:
        config = resolve(self._checked_config(config), self.env, self.policy)
        former_values = field_values(self._config)
        for name, value in field_values(config).items():
            former = former_values[name]
            if name in READ_ONCE and value != former:
                raise ValueError(
                    f"agent.config: {name} is {value}, expected {former}, which the agent was made with and keeps: "
                    f"make a new agent of the same policy, {type(self).__name__}(agent.env, agent.policy, config)"
                )
        self._config = config
        if self.reward_normalizer is not None and isinstance(config, ActorCriticConfig):
            self.reward_normalizer.gamma = discount(config.gamma)

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
        if self.collector.env is not self.env or self.collector.policy is not self.policy:  # one was replaced
            check_environment(self.env, self.policy, config)
            self.collector.env = self.env
            self.collector.policy = self.policy
        agree_on_ends(self.env, self.policy)
        num_episodes = config.num_episodes
        if num_episodes is not None:
            num_episodes = collectives.local_count(num_episodes, "num_episodes")
        try:
            rollout = self.collector.collect(
                num_steps=config.num_steps, num_episodes=num_episodes, group_size=config.episodes_per_group
            )
        except BaseException:
            self.stop_exploring()
            raise
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
        # Refuse what cannot learn from texts that were generated elsewhere
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

        # Rollout of these texts
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

    def stop_exploring(self) -> None:
        """Let the policy act as evaluation and saving use it; called after an update, and after an error before it.

        Here it does nothing: a stochastic policy explores by itself.
        """

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout; return metrics."""
        raise NotImplementedError(f"{type(self).__name__}.update is missing: define how a rollout improves the policy")

    def state_dict(self) -> dict[str, object]:
        """Everything that changes during training, except the environment; see `algos.storage.serialization`."""
        return {
            "policy": trained_weights(self.policy),
            "policy_generator": self.policy.generator,
            "policy_memory": dict(self.policy.memory),
            "generator": self.update_generator,
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
        self.update_generator.set_state(state["generator"].get_state())
        self.collector.load_state_dict(state["collector"])
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        restore_state(self.reward_normalizer, state["reward_normalizer"])
        restore_state(self.penalty, state["penalty"])
        restore_state(self.fitted_value, state.get("value_fit", {}))

    def __repr__(self) -> str:
        """Return algorithm, policy and environment."""
        env = getattr(self, "env", None)  # absent, as the policy, while the agent is made
        policy = getattr(self, "policy", None)
        spec = getattr(env, "spec", None)
        env_name = type(env).__name__ if spec is None else spec.id
        return f"<{type(self).__name__} of a {type(policy).__name__} on {env_name}>"

    learn = check_names(learn)

    def save(self, folder: str | Path) -> Path:
        """Write policy and config; `algos.load` reads the policy back.

        Raises:
            OSError: if they cannot be written (a full disk, a read-only folder).
            ValueError: if the path begins with ``~``.
        """
        warn_of_longer_run(folder, steps=self.steps)
        return save(self, folder)

    def export(self, path: str | Path, *, all_outputs: bool = False) -> Path:
        """Write the policy as an ONNX file, for programs without torch.

        Arguments, result and errors are those of `algos.policies.policy.ControlPolicy.export`; a language model raises
        a TypeError.
        """
        return self.policy.export(path, all_outputs=all_outputs)
