"""`Policy`, the interface between algorithms and networks, and `ControlPolicy`, the base of policies for control."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn

from algos.config import CONTROL_RATE
from algos.envs.batching import as_batch
from algos.envs.flatten import flat_shape, flatten, unflatten as unflatten
from algos.envs.spaces import acts_alike, describe_space, fit_actions, reads_alike, restore_space
from algos.policies.distributions import Gaussian
from algos.policies.normalizers import ObservationNormalizer
from textenv.names import check_names
from textenv.rollout import Evaluation, Reference, is_episode_env

Observation = np.ndarray | dict[str, np.ndarray]
"""What `Policy.act` gets of all slots. For control one array ``[N, *]``: of a Box as the environment returns it, of
other spaces flat, float32 ``[N, size]`` (`unflatten` gives the parts). For text the dictionary of a `TextVectorEnv`."""


class Step(NamedTuple):
    """One action per slot."""

    action: Tensor
    """int64 ``[N]`` (Discrete) or ``[N, *]`` (MultiDiscrete, MultiBinary), or float32 ``[N, *]`` (Box)."""
    log_prob: Tensor
    """Log-probability under the distribution that the action was drawn from, float32 ``[N]``, nats."""
    state: Tensor | None = None
    """Recurrent state before this action, ``[N, *]``, detached; None if the policy records no state."""


@runtime_checkable
class Policy(Protocol):
    """Interface of policies: act in slots and score rollouts. A class that inherits it has the defaults given here.

    Update steps distinguish policies only by `sequential`.
    """

    generator: torch.Generator
    """Random generator for action sampling."""
    memory: Mapping[str, Any] = MappingProxyType({})
    """All other state that acting changes (recurrent state, held noise), by name: checkpoints save it, `reset` clears
    it, a `fork` starts without it. A policy with memory makes its own dict."""
    sequential: bool = False
    """Minibatch unit: True for whole rows, False for single steps."""
    trained_by_values: bool = False
    """True if the actions follow from values (DQN), so that their probabilities have no gradient."""
    observation_space: spaces.Space | None = None
    """Observation space of one environment; None for text."""
    action_space: spaces.Space | None = None
    """Action space of one environment; None for text."""

    @property
    def num_actions(self) -> int | None:
        """Number of actions or tokens to choose from; None unless Discrete or text."""
        return None

    @property
    def default_learning_rate(self) -> float:
        """Learning rate of a config without one (`algos.config.Config.learning_rate`)."""
        return CONTROL_RATE

    @property
    def sampling_only(self) -> bool:
        """True if actions are not drawn from the distribution that scores them: training is refused."""
        return False

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the computation; None means that of the weights."""
        return None

    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """Choose an action for each slot, and keep the recurrent state for the next call.

        Args:
            observation: of all slots; see `Observation`.
            action_mask: bool ``[N, n]``, the available actions, at least one in a slot; None: all.
            deterministic: take the most probable action instead of a sample.

        Returns:
            A `Step` without gradient, which `check_step` checks.
        """
        raise _missing(self, "act")

    @torch.no_grad()
    def predict(
        self,
        observation: Any,
        state: Mapping[str, Any] | None = None,
        episode_start: Any = None,
        deterministic: bool = False,
        *,
        action_mask: Any = None,
    ) -> tuple[Any, dict[str, Any] | None]:
        """Choose actions for ``env.step``, for one observation or several, as ``predict`` of Stable-Baselines3 does.

        The policy's own `memory` is neither read nor changed, so this may be called at any time, also in training.

        Args:
            observation: what one environment shows, or a batch of it: numbers, arrays, tensors, or a dictionary or
                tuple of these.
            state: recurrent state that the last call returned; None at the start.
            episode_start: bool, or bool ``[N]``: where a new episode begins, so that its state is cleared.
            deterministic: take the most probable action instead of a sample by `generator`.
            action_mask: bool or int8 ``[n]`` or ``[N, n]`` of the available actions, as in ``info["action_mask"]``.

        Returns:
            The action, or for a batch the actions ``[N, *]``: NumPy, of the dtype and shape of the action space, and
            within the bounds of a Box (agents saved before version 0.10 know none). And the state to pass to the next
            call: arrays by name; None if the policy has no memory.

        Raises:
            TypeError: if the policy has no spaces, as a language model (see `LMPolicy.generate`).
            ValueError: if the observation or the mask does not fit the spaces.
        """
        observed, chosen = self.observation_space, self.action_space
        if observed is None or chosen is None:
            raise TypeError(
                f"a {type(self).__name__} has no observation_space and action_space, which predict needs: set both in "
                "its constructor; a language model answers by generate(prompts)"
            )
        batch, is_single = as_batch(observed, observation)
        flat = flatten(observed, batch)
        slots = len(flat)

        # A copy with the memory of the last call
        player = self.fork()
        if state is not None:
            player.memory = {name: _tensor(value) for name, value in state.items()}
        if episode_start is not None:
            player.reset(np.array(np.broadcast_to(np.asarray(episode_start, dtype=bool), slots)))

        mask = None if action_mask is None else _mask_of(action_mask, slots, chosen)
        step = player.act(flat, action_mask=mask, deterministic=deterministic)
        check_step(step, self, slots=slots, action_shape=chosen.shape)

        # NumPy
        actions = fit_actions(chosen, step.action.cpu().numpy())
        state_after = {name: _array(value) for name, value in player.memory.items()} or None
        if not is_single:
            return actions, state_after
        action = actions[0]
        if isinstance(chosen, spaces.Discrete):
            return action, state_after  # a number, which can be a key of a dictionary
        return np.asarray(action), state_after

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next((p.device for p in self.parameters() or ()), torch.device("cpu"))

    def to(self, device: Any) -> Any:
        """Move the weights to a device."""
        raise _missing(self, "to")

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Clear the recurrent state of these slots, or of all. By default there is none.

        Args:
            rows: slots, bool ``[N]``; None means all.
            seeds: int64 ``[N]``, used for text: these slots then sample from one uniform stream per episode, so
                samples do not depend on the other slots. None returns to ``generator``.

        Raises:
            ValueError: on seeds, if the policy has no such streams.
        """
        if seeds is not None:
            raise ValueError(
                f"a {type(self).__name__} draws the actions of all slots from policy.generator: leave seeds out, "
                "because only a language model has a stream for each episode"
            )

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """Log-probability and entropy of the rollout's actions, and state values (never None here); differentiable."""
        raise _missing(self, "evaluate")

    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """Value of each state and of its successor (`textenv.rollout`), ``[B, T]`` each; no gradient."""
        raise _missing(self, "values")

    def fit_values(self, rollout: TensorDict, returns: Tensor, earlier: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Like `values`, by heads fitted to returns ``[B, T]`` of other rows and earlier rollouts (sums, updated)."""
        raise _missing(self, "fit_values")

    def reference(self) -> Reference:
        """Frozen copy of the current policy: the reference model of a KL penalty."""
        return frozen_copy(self)

    def fork(self) -> Self:
        """Copy with the same weights and generator and an empty memory, to play other episodes meanwhile."""
        other = copy.copy(self)
        other.memory = {}
        return other

    def divergence(self, rollout: TensorDict, other: Any) -> Tensor:
        """Exact KL(self‖other) at the rollout's True entries, nats, differentiable in self alone.

        ``other`` is a reference of the same kind; masks and temperature apply as in `evaluate`.

        Raises:
            ValueError: by default.
        """
        raise ValueError(
            f"{type(self).__name__} has no divergence(rollout, other) -> [B, T], which the exact KL needs: "
            "implement it, or use another estimator ('k1' in the reward, 'k2' in the loss)"
        )

    def update_normalizer(self, rollout: TensorDict) -> None:
        """Add a rollout's observations (True entries) to the running statistics, if there are any.

        Called once after every update, so that all epochs normalize as `act` did.
        """

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters for the optimizer."""

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that affect only the value: a critic or a value head. None by default."""
        return iter(())

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the weights into a folder; return the other data that `algos.load` needs, for JSON.

        `algos.load` reads both by a classmethod ``load(folder, saved)`` of the class, if it is given that class.
        """
        raise _missing(self, "save")


def _mask_of(action_mask: Any, slots: int, space: spaces.Space) -> Tensor:
    """Bool ``[N, n]`` of the available actions that `Policy.predict` was given, for one observation or many."""
    mask = np.array(action_mask, dtype=bool)
    if mask.ndim == 1:
        mask = mask[None]
    if not isinstance(space, spaces.Discrete) or mask.shape != (slots, int(space.n)):
        raise ValueError(
            f"action_mask has shape {np.shape(action_mask)} for {slots} observations, expected one entry for each "
            f"action of a Discrete, but the actions are {space}"
        )
    return torch.from_numpy(mask)


def _tensor(value: Any) -> Any:
    """Tensor of an array of a policy's memory; other values unchanged."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _array(value: Any) -> Any:
    """Array of a tensor of a policy's memory; other values unchanged."""
    return value.cpu().numpy() if isinstance(value, Tensor) else value


def _missing(policy: object, method: str) -> NotImplementedError:
    return NotImplementedError(f"{type(policy).__name__}.{method} is missing: define it as algos.Policy.{method} says")


AnyPolicy = TypeVar("AnyPolicy", bound=Any)


def frozen_copy(policy: AnyPolicy) -> AnyPolicy:
    """Copy with its own weights and random generator, no recurrent state and no gradients."""
    copied = copy.deepcopy(policy).requires_grad_(False)
    copied.reset()
    return copied


def check_same_kind(policy: Any, other: Any) -> None:
    """Raise a TypeError unless both policies are of one class, so that their exact KL can be computed."""
    if type(other) is not type(policy):
        raise TypeError(
            f"the exact KL of a {type(policy).__name__} needs a reference of its class, not {type(other).__name__}: "
            "pass policy.reference(), or use an estimator that only needs log-probabilities (k1, k2)"
        )


def check_policy(policy: Any, *, call: str) -> None:
    """Raise a TypeError unless an argument is a policy; the message shows the right call."""
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise TypeError(
            f"policy is {policy!r:.100}, expected an algos.Policy (your own must inherit it), such as "
            "MLPPolicy(env.single_observation_space, env.single_action_space), or LMPolicy.load(name) for text: call "
            f"{call}"
        )


def check_step(step: Any, policy: Any, *, slots: int, action_shape: tuple[int, ...] | None = ()) -> None:
    """Check what a policy's `act` returned, so that a mistake is found where it was made.

    Args:
        step: what it returned.
        policy: the policy, for the message.
        slots: number of slots, N.
        action_shape: shape of one action; None for a Dict or Tuple, which have none.

    Raises:
        TypeError: if it is no `Step` of tensors.
        ValueError: if an action or log-probability has another shape, or the latter a gradient.
    """
    # At every step of an environment, so that messages are made only for mistakes
    name = type(policy).__name__
    if not isinstance(step, Step):
        raise TypeError(
            f"{name}.act returned {step!r:.100}, expected algos.policies.Step(action, log_prob): return one, no tuple"
        )
    shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [("log_prob", step.log_prob, (slots,))]
    if action_shape is not None:
        shapes.append(("action", step.action, (slots, *action_shape)))
    for part, value, shape in shapes:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}.act returned a Step whose {part} is a {type(value).__name__}, expected a torch.Tensor {shape}"
            )
        if value.shape != shape:
            raise ValueError(
                f"{name}.act returned a Step whose {part} has shape {tuple(value.shape)}, expected {shape}, one for "
                f"each of {slots} slots"
            )
    if step.log_prob.requires_grad:
        raise ValueError(
            f"{name}.act returned a log_prob with a gradient, expected none: decorate it by @torch.no_grad()"
        )


def refuse_strings(env: VectorEnv) -> None:
    """Raise a ValueError if an environment that is stepped reads or writes strings."""
    strings = isinstance(env.single_observation_space, spaces.Text) or isinstance(env.single_action_space, spaces.Text)
    if strings and not is_episode_env(env):
        raise ValueError(
            f"{type(env).__name__} steps environments that read and write strings, which no policy plays step by step: "
            "give the function that makes one of them to textenv.TokenVectorEnv(make_env, "
            "tokenizer=policy.tokenizer, num_envs=64), and train an LMPolicy on it"
        )


def check_spaces(env: VectorEnv, policy: Policy) -> None:
    """Check that a policy's spaces match the environment's.

    Raises:
        TypeError: if a control policy is used with a text environment, or a language model with another one.
        ValueError: if the policy has the batched spaces of all slots, or those of another environment; or if the
            environment reads and writes strings.
    """
    refuse_strings(env)
    read, chosen = policy.observation_space, policy.action_space
    if read is None or chosen is None:
        return
    name, single = type(policy).__name__, env.single_observation_space
    if is_episode_env(env):
        raise TypeError(f"a {name} cannot play a text environment: use an algos.LMPolicy")
    batched = (read, env.observation_space, single), (chosen, env.action_space, env.single_action_space)
    if any(own == of_all and own != of_one for own, of_all, of_one in batched):
        raise ValueError(
            f"the {name} was made from the spaces of all {env.num_envs} slots ({read}, {chosen}): make it from "
            "env.single_observation_space and env.single_action_space"
        )
    # Equal sizes suffice if a wrapper flattened the environment; else parts must have the same order too.
    parts = type(read) is type(single) and isinstance(read, (spaces.Dict, spaces.Tuple))
    same_parts = not parts or reads_alike(read, single)
    if flat_shape(read, name) != flat_shape(single, name) or not same_parts:
        order = ", whose parts are in the same order" if parts else ""
        raise ValueError(
            f"the {name} reads {read}, but the environment has {single}: make it from the same space{order}"
        )
    if not acts_alike(chosen, env.single_action_space):
        raise ValueError(
            f"the {name} chooses from {chosen}, but the environment takes {env.single_action_space}: make it from the "
            "same space"
        )


WEIGHTS = "policy.safetensors"
"""File name of a control policy's weights."""


class ControlPolicy(nn.Module, Policy):
    """Base of policies for control; a subclass adds ``distribution`` and ``critic``, and the methods that raise here.

    `act`, `evaluate`, `output` and `value` get flat observations (`algos.envs.flatten`), `act` also those of an
    environment. `read` makes the network's input of both, and `algos.envs.flatten.unflatten` gives the parts of a Dict
    back. `choose` and `evaluation` are the last lines of `act` and `evaluate`. `arguments` names what `load` hands to
    the constructor besides the spaces. `algos.policies.registry` names the policies of ``--policy``.

    Args:
        observation_space: that of one environment; spaces other than Box are flattened (`algos.envs.flatten`).
        action_space: that of one environment; see `algos.policies.distributions`.
        normalize_observations: normalize them by their running mean and variance; see `update_normalizer`.
        seed: seed of the initial weights and of action sampling.

    Raises:
        ValueError: if the observation space has no fixed size.
    """

    observation_space: spaces.Space
    action_space: spaces.Space
    distribution: Any
    """Action distribution, of `algos.policies.distributions` or with the same methods."""
    critic: nn.Module
    hidden: Any
    """Width of the hidden layer, or of each; needed only by `arguments`."""

    def __init_subclass__(cls) -> None:
        """Check the names of constructor arguments."""
        super().__init_subclass__()
        cls.__init__ = check_names(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, *, normalize_observations: bool, seed: int
    ) -> None:
        super().__init__()
        self._shape = flat_shape(observation_space, type(self).__name__)
        self.input_size = math.prod(self._shape)
        """Length of what `read` returns for one observation."""
        self.observation_space, self.action_space = observation_space, action_space
        self.generator = torch.Generator().manual_seed(seed)
        self.memory: dict[str, Any] = {}
        self.normalizer = ObservationNormalizer(self.input_size) if normalize_observations else None

    @property
    def num_actions(self) -> int | None:
        """Number of actions; None unless the action space is Discrete."""
        return int(self.action_space.n) if isinstance(self.action_space, spaces.Discrete) else None

    @property
    def log_std(self) -> nn.Parameter:
        """Log standard deviation of each action dimension (gSDE: element of the noise matrix); only for a Box."""
        if not isinstance(self.distribution, Gaussian):
            raise AttributeError(f"actions are {self.action_space}: only a Box has a standard deviation")
        return self.distribution.log_std

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[*, size]``."""
        raise NotImplementedError

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of observations ``[*batch, *]``."""
        raise NotImplementedError

    def divergence(self, rollout: TensorDict, other: Any) -> Tensor:
        """See `Policy.divergence`; any batch shape."""
        check_same_kind(self, other)
        with torch.no_grad():
            theirs = other.output(rollout)
        return self.distribution.divergence(
            self.output(rollout), theirs, other=other.distribution, action_mask=rollout.get("action_mask", None)
        )

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        return step_values(self.value, rollout)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """See `Policy.value_parameters`."""
        return self.critic.parameters()

    def update_normalizer(self, rollout: TensorDict) -> None:
        """See `Policy.update_normalizer`."""
        if self.normalizer is not None:
            self.normalizer.add(self._flat(rollout["observation"][rollout["mask"]]))

    def arguments(self) -> dict[str, Any]:
        """Constructor arguments other than the spaces, for JSON, without those that only set the initial weights."""
        return {"hidden": self.hidden} | ({} if self.normalizer is None else {"normalize_observations": True})

    def save(self, folder: Path) -> dict[str, Any]:
        """See `Policy.save`."""
        from safetensors.torch import save_model

        save_model(self, str(folder / WEIGHTS))
        observation, action = (describe_space(space) for space in (self.observation_space, self.action_space))
        return {"observation": observation, "action": action} | self.arguments()

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> Self:
        """Load a policy written by `save`, without recurrent state."""
        from safetensors.torch import load_model

        arguments = {name: x for name, x in saved.items() if name not in ("observation", "action")}
        policy = cls(restore_space(saved["observation"]), restore_space(saved["action"]), **arguments)
        load_model(policy, str(folder / WEIGHTS))
        return policy

    def choose(self, output: Tensor, action_mask: Tensor | None, deterministic: bool) -> Step:
        """Sample from the action distributions that a network's output ``[N, size]`` parameterizes: the end of `act`.

        Raises:
            ValueError: if the mask allows no action in a slot.
        """
        if action_mask is not None and not action_mask.any(-1).all():
            slot = int((~action_mask.any(-1)).nonzero()[0, 0])
            raise ValueError(f"action_mask allows no action in slot {slot}: allow at least one")
        mask = None if action_mask is None else action_mask.to(output.device)
        return Step(
            *self.distribution.sample(output, generator=self.generator, action_mask=mask, deterministic=deterministic)
        )

    def evaluation(self, rollout: TensorDict, output: Tensor, value: Tensor) -> Evaluation:
        """Score a rollout's actions by a network's output ``[*, size]`` and values ``[*, 1]``; ends `evaluate`."""
        log_prob, entropy = self.distribution.score(output, rollout["action"], rollout.get("action_mask", None))
        return Evaluation(log_prob, entropy, value.squeeze(-1))

    def read(self, observation: Observation | Tensor) -> Tensor:
        """Network input of observations: flat, float32, normalized, on the policy's device, ``[*, input_size]``.

        Args:
            observation: ``[*, *]`` of a rollout, or what `act` gets.
        """
        if not isinstance(observation, Tensor):
            observation = torch.from_numpy(self._flatten(observation))
        flat = self._flat(observation)
        return flat if self.normalizer is None else self.normalizer(flat)

    def _flatten(self, observation: Observation) -> np.ndarray:
        """Observations of an environment as one array ``[N, *]`` (`algos.envs.flatten`)."""
        return np.asarray(flatten(self.observation_space, observation))

    def _flat(self, observation: Tensor) -> Tensor:
        """Flatten the observation's own dimensions and keep the leading ones; float32, on the policy's device."""
        if len(self._shape) != 1:
            observation = observation.reshape(*observation.shape[: observation.ndim - len(self._shape)], -1)
        return observation.to(self.device, torch.float32)


def step_values(value_of: Callable[[Tensor], Tensor], rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """Value of each observation and of its successor, ``[B, T]`` each; see `Policy.values`.

    Args:
        value_of: function from observations ``[*batch, *]`` to values ``[*batch]``.
        rollout: ``[B, T]``.
    """
    value = value_of(rollout["observation"])
    following = torch.cat([value[:, 1:], value[:, -1:]], dim=1)
    # The successor is the next step's observation, except where an episode or the rollout ends.
    cut = rollout["truncated"] | rollout["terminated"]
    cut[:, -1] = True
    following[cut] = value_of(rollout["next_observation"][cut])
    return value, following
