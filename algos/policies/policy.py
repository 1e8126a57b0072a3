"""`Policy`, the interface between algorithms and networks, and `ControlPolicy`, the base of policies for control."""

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable
from weakref import WeakSet

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike
from tensordict import TensorDict
from torch import Tensor, nn

from algos.config import CONTROL_LEARNING_RATE, Config
from algos.envs.batching import as_batch
from algos.envs.flatten import flat_shape, flatten, packed_size, unflatten as unflatten, unpack
from algos.envs.images import warn_of_raw_pixels
from algos.envs.spaces import acts_alike, describe_space, fit_actions, reads_alike, restore_space
from algos.policies.distributions import ActionDistribution
from algos.policies.normalizers import ObservationNormalizer
from algos.storage.onnx_export import NetworkStep, write_onnx
from algos.storage.serialization import write_weights
from textenv.acceleration import accelerated
from textenv.names import check_names
from textenv.rollout import Evaluation, Reference, is_episode_env
from textenv.state import is_our_code

logger = logging.getLogger(__name__)
OBSERVATIONS_AT_ONCE = 1024
"""Number of observations that are unpacked at a time for the statistics of a normalizer."""
COARSE_STEP = 0.1
"""Step of float32, in standard deviations of an observed number, from which on a warning is logged."""
SMALLEST_MEAN = 1_000.0
"""Smallest mean of such a number; a smaller one that hardly changes is a constant with noise."""
_CHECKED_FOR_DIGITS: WeakSet["ControlPolicy"] = WeakSet()
"""Policies whose first rollout was looked at for numbers that float32 cannot tell apart."""
Observation = np.ndarray | dict[str, np.ndarray]
"""Observations of all slots, the input of `Policy.act`.

Control: one array ``[N, *]``. Those of a Box are as the environment returns them; those of other spaces are flat,
float32 ``[N, size]``, or bytes if there are images among their parts (`algos.envs.flatten`). `unflatten` gives their
parts. Text: the dictionary of a `TextVectorEnv`.
"""


class Step(NamedTuple):
    """One action per slot."""

    action: Tensor
    """int64 ``[N]`` (Discrete) or ``[N, *]`` (MultiDiscrete, MultiBinary), or float32 ``[N, *]`` (Box)."""
    log_prob: Tensor
    """Log-probability under the distribution that the action was drawn from, float32 ``[N]``, nats."""
    state: Tensor | None = None
    """Recurrent state before this action, ``[N, *]``, detached; None if the policy records no state."""
    kept: Tensor | None = None
    """The actions that a truncated distribution could give, bool ``[N, n]``; None if it could give any."""


class LinearValue(NamedTuple):
    """A value that is linear in features: what `algos.policies.fitted_value.FittedValue` fits."""

    features: Callable[[TensorDict], list[Tensor]]
    """Function from a rollout ``[B, T]`` to features of every state and of the state after the last action, float32
    ``[B, T + 1, H]``. It returns one tensor for each kind of features, such as a network's output or embeddings."""
    weights: list[Tensor]
    """Weights of each kind of features, ``[H]``; a fit changes them in place."""
    bias: Tensor | None
    """``[1]``, changed in place; None for no intercept."""


@runtime_checkable
class Policy(Protocol):
    """Interface of policies: act in slots and score rollouts. A class that inherits it gets these defaults.

    An update treats all policies alike, except that `sequential` decides whether it splits a rollout by rows or steps.
    """

    generator: torch.Generator
    """Random generator for action sampling."""
    memory: Mapping[str, object] = MappingProxyType({})
    """All other state that acting changes, such as recurrent state or held noise, by name. Checkpoints save it, `reset`
    clears it, and a `fork` starts without it. A policy with memory makes its own dict."""
    sequential: bool = False
    """Minibatch unit: True for whole rows, False for single steps."""
    trained_by_values: bool = False
    """True if values train the actions (DQN, SAC, TD3). An algorithm that needs their probabilities refuses them."""
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
        return CONTROL_LEARNING_RATE

    @property
    def linear_value(self) -> LinearValue | None:
        """Features and weights of a linear value head, for ``config.fit_value_head``; None if there is no such head."""
        return None

    @property
    def truncates(self) -> bool:
        """True if only some actions are drawn, which `act` returns (`Step.kept`); `evaluate` scores among these."""
        return False

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the computation; None means that of the weights."""
        return None

    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """Choose an action for each slot, and keep the recurrent state for the next call.

        Args:
            observation: observations of all slots; see `Observation`.
            action_mask: bool ``[N, n]``, the available actions, at least one per slot; None means all.
            deterministic: take the most probable action instead of a sample.

        Returns:
            A `Step` without gradient, which `check_step` checks.
        """
        raise _missing(self, "act")

    @torch.no_grad()
    def predict(
        self,
        observation: object,
        state: Mapping[str, object] | None = None,
        episode_start: ArrayLike | None = None,
        deterministic: bool = False,
        *,
        action_mask: ArrayLike | None = None,
    ) -> tuple[Any, dict[str, object] | None]:
        """Choose actions for ``env.step``, for one observation or several, as ``predict`` of Stable-Baselines3 does.

        The policy's own `memory` is neither read nor changed, so this may be called at any time, also in training.

        Args:
            observation: observation of one environment, or a batch of them: numbers, arrays, tensors, or a dictionary
                or tuple of these.
            state: recurrent state that the last call returned; None at the start.
            episode_start: bool, or bool ``[N]``: True where a new episode begins, to clear the state there.
            deterministic: take the most probable action instead of a sample by `generator`.
            action_mask: bool or int8 ``[n]`` or ``[N, n]`` of the available actions, as in ``info["action_mask"]``.

        Returns:
            The action, or for a batch the actions ``[N, *]``, as NumPy with the dtype and shape of the action space,
            within the bounds of a Box (agents saved before version 0.10 have no bounds). Second, the state to pass to
            the next call, arrays by name; None if the policy has no memory.

        Raises:
            TypeError: if the policy has no spaces, like a language model (see `LMPolicy.generate`).
            ValueError: if the observation or the mask does not fit the spaces.
        """
        observation_space = self.observation_space
        action_space = self.action_space
        if observation_space is None or action_space is None:
            raise TypeError(
                f"a {type(self).__name__} has no observation_space and action_space, which predict needs: set both in "
                "its constructor; a language model answers by generate(prompts)"
            )
        batch, is_single = as_batch(observation_space, observation)
        flat = flatten(observation_space, batch)
        slots = len(flat)

        # A copy of the policy with the memory of the last call
        player = self.fork()
        if state is not None:
            player.memory = {name: _array_to_tensor(value) for name, value in state.items()}
        if episode_start is not None:
            starts = np.broadcast_to(np.asarray(episode_start, dtype=bool), slots)
            player.reset(np.array(starts))

        # Act
        mask = None
        if action_mask is not None:
            mask = _mask_to_tensor(action_mask, slots, action_space)
        step = player.act(flat, action_mask=mask, deterministic=deterministic)
        check_step(step, self, slots=slots, action_shape=action_space.shape)

        # Convert to NumPy; one observation gets one action
        actions = fit_actions(action_space, step.action.cpu().numpy())
        next_state = {name: _tensor_to_array(value) for name, value in player.memory.items()} or None
        if not is_single:
            return actions, next_state
        action = actions[0]
        if isinstance(action_space, spaces.Discrete):
            return action, next_state  # a number, which can be a key of a dictionary
        return np.asarray(action), next_state

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        for parameter in self.parameters() or ():  # None unless a class defines them
            return parameter.device
        return torch.device("cpu")

    def to(self, device: torch.device | str | None) -> Self:
        """Move the weights to a device."""
        raise _missing(self, "to")

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Clear the recurrent state of these slots, or of all. By default there is none.

        Args:
            rows: slots, bool ``[N]``; None means all.
            seeds: for text, int64 ``[N]``: each of these slots then samples from a uniform stream of its own, so its
                samples do not depend on other slots. None returns to ``generator``.

        Raises:
            ValueError: if seeds are passed to a policy without such streams.
        """
        if seeds is not None:
            raise ValueError(
                f"a {type(self).__name__} draws the actions of all slots from policy.generator: leave seeds out, "
                "because only a language model has a stream for each episode"
            )

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """Score a rollout's actions: log-probability, entropy and state value; differentiable."""
        raise _missing(self, "evaluate")

    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """Values of each state and of its successor (`textenv.rollout`), ``[B, T]`` each; no gradient."""
        raise _missing(self, "values")

    def reference(self) -> Reference:
        """Frozen copy of the current policy: the reference model of a KL penalty."""
        return frozen_copy(self)

    def fork(self) -> Self:
        """Copy with the same weights and generator and an empty memory, to play other episodes meanwhile.

        It plays as a saved policy does: without noise that an algorithm adds while it collects.
        """
        player = copy.copy(self)
        player.memory = {}
        return player

    def divergence(self, rollout: TensorDict, other: Any) -> Tensor:
        """Exact KL(self‖other) at the rollout's True entries, nats, differentiable in self alone.

        ``other`` is a reference of the same kind. Masks and temperature apply as in `evaluate`.

        Raises:
            ValueError: unless the class defines this method.
        """
        raise ValueError(
            f"{type(self).__name__} has no divergence(rollout, other) -> [B, T], which the exact KL needs: "
            "implement it, or use another estimator ('k1' in the reward, 'k2' in the loss)"
        )

    def check_environment(self, env: VectorEnv) -> None:
        """Raise a ValueError if the policy reads an environment wrongly though its spaces fit; by default it does not.

        `check_spaces` calls this.
        """

    def update_normalizer(self, rollout: TensorDict) -> None:
        """Add a rollout's observations (True entries) to the running statistics, if there are any.

        This is called once after every update, so that all epochs normalize as `act` did.
        """

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters for the optimizer."""

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that affect only the value: a critic or a value head. None by default."""
        return iter(())

    def export(self, path: str | Path, *, all_outputs: bool = False) -> Path:
        """Write the policy as one file for programs without torch; see `ControlPolicy.export`.

        Raises:
            TypeError: unless the policy is a network for control.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be exported to ONNX, only networks for control can, such as MLPPolicy: "
            "a language model is saved as a folder of transformers, which other tools convert"
        )

    def save(self, folder: Path) -> dict[str, object]:
        """Write the weights into a folder; return the other data that `algos.load` needs, for JSON.

        `algos.load` reads both by the class's classmethod ``load(folder, saved)``, if the class is passed to it.
        """
        raise _missing(self, "save")


def _mask_to_tensor(action_mask: ArrayLike, slots: int, space: spaces.Space) -> Tensor:
    """Convert the mask ``[n]`` or ``[N, n]`` of `Policy.predict` to bool ``[N, n]``.

    Raises:
        ValueError: if the mask has another shape, or the actions are not Discrete.
    """
    mask = np.array(action_mask, dtype=bool)
    if mask.ndim == 1:
        mask = mask[None]
    if not isinstance(space, spaces.Discrete) or mask.shape != (slots, int(space.n)):
        raise ValueError(
            f"action_mask has shape {np.shape(action_mask)} for {slots} observations, expected one entry for each "
            f"action of a Discrete, but the actions are {space}"
        )
    return torch.from_numpy(mask)


def _array_to_tensor(value: object) -> object:
    """Convert an array of a policy's memory to a tensor; other values stay."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value


def _tensor_to_array(value: object) -> object:
    """Convert a tensor of a policy's memory to an array; other values stay."""
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    return value


def _missing(policy: object, method: str) -> NotImplementedError:
    """Error for a method that a policy's class must define."""
    return NotImplementedError(f"{type(policy).__name__}.{method} is missing: define it as algos.Policy.{method} says")


AnyPolicy = TypeVar("AnyPolicy", bound=Any)


def frozen_copy(policy: AnyPolicy) -> AnyPolicy:
    """Copy with its own weights and random generator, no recurrent state and no gradients."""
    copied = copy.deepcopy(policy).requires_grad_(False)
    copied.reset()
    return copied


def check_same_kind(policy: object, other: object) -> None:
    """Raise a TypeError unless both policies are of one class, so that their exact KL can be computed."""
    if type(other) is not type(policy):
        raise TypeError(
            f"the exact KL of a {type(policy).__name__} needs a reference of its class, not {type(other).__name__}: "
            "pass policy.reference(), or use an estimator that only needs log-probabilities (k1, k2)"
        )


def check_policy(policy: object, *, call: str) -> None:
    """Raise a TypeError unless an argument is a policy; the message shows the right call."""
    if not isinstance(policy, Policy) and isinstance(getattr(policy, "policy", None), Policy):
        raise TypeError(f"policy is a {type(policy).__name__}, an agent: give its policy, agent.policy")

    # Frequent mistakes
    if isinstance(policy, Config):
        raise TypeError(
            f"policy is a {type(policy).__name__}: give a config by its name, as in PPO(env, config=config)"
        )
    if isinstance(policy, str):
        raise TypeError(
            f"policy is {policy!r:.100}, expected an algos.Policy: algos.make_policy(env) makes an MLPPolicy, "
            "or another one by its name (policy=...), and LMPolicy.load(name) loads a language model"
        )
    if type(policy).__module__.startswith(("transformers.", "peft.")):
        raise TypeError(f"policy is a {type(policy).__name__}, a model: give algos.LMPolicy(model, tokenizer)")

    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise TypeError(
            f"policy is {policy!r:.100}, expected an algos.Policy (your own must inherit it), such as "
            "MLPPolicy(env.single_observation_space, env.single_action_space), or LMPolicy.load(name) for text: call "
            f"{call}"
        )


def check_step(step: object, policy: object, *, slots: int, action_shape: tuple[int, ...] | None = ()) -> None:
    """Check the result of a policy's `act`, so that a mistake is reported where it was made.

    Args:
        step: the result.
        policy: the policy, for the message.
        slots: number of slots, N.
        action_shape: shape of one action; None for a Dict or Tuple, which have none.

    Raises:
        TypeError: if the result is no `Step` of tensors.
        ValueError: if an action or a log-probability has another shape, or a log-probability has a gradient.
    """
    # This runs at every step of an environment, so messages are formatted only for mistakes.
    name = type(policy).__name__
    if not isinstance(step, Step):
        raise TypeError(
            f"{name}.act returned {step!r:.100}, expected algos.policies.Step(action, log_prob): return a Step, "
            "not a plain tuple"
        )

    # Types and shapes
    expected: list[tuple[str, Tensor, tuple[int, ...]]] = [("log_prob", step.log_prob, (slots,))]
    if action_shape is not None:
        expected.append(("action", step.action, (slots, *action_shape)))
    for part, value, shape in expected:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}.act returned a Step whose {part} is a {type(value).__name__}, expected a torch.Tensor {shape}"
            )
        if value.shape != shape:
            raise ValueError(
                f"{name}.act returned a Step whose {part} has shape {tuple(value.shape)}, expected {shape}, one for "
                f"each of {slots} slots"
            )

    # Gradient
    if step.log_prob.requires_grad:
        raise ValueError(
            f"{name}.act returned a log_prob with a gradient, expected none: decorate it by @torch.no_grad()"
        )


def check_available(step: Step, policy: object, *, action_mask: Tensor, space: spaces.Discrete) -> None:
    """Check that a policy of the user's own takes no action that the mask forbids.

    Args:
        step: what its `act` returned.
        policy: the policy; those of this library are not checked.
        action_mask: bool ``[N, A]``.
        space: space of the actions.

    Raises:
        ValueError: names a forbidden action.
    """
    if is_our_code(type(policy)):
        return
    num_actions = int(space.n)
    index = step.action.cpu().long() - int(space.start)
    is_action = (index >= 0) & (index < num_actions)
    is_available = action_mask.gather(1, index.clamp(0, num_actions - 1)[:, None]).squeeze(1)
    allowed = is_action & is_available
    if not allowed.all():
        slot = int(allowed.int().argmin())
        raise ValueError(
            f"{type(policy).__name__}.act took action {step.action[slot].item()} in slot {slot}, which action_mask "
            "forbids: give forbidden actions probability 0, here and in evaluate (rollout['action_mask'])"
        )


def refuse_strings(env: VectorEnv) -> None:
    """Raise a ValueError if an environment reads or writes strings step by step."""
    reads_strings = isinstance(env.single_action_space, spaces.Text)
    writes_strings = isinstance(env.single_observation_space, spaces.Text)
    if (reads_strings or writes_strings) and not is_episode_env(env):
        raise ValueError(
            f"{type(env).__name__} steps environments that read and write strings, which no policy plays step by step: "
            "give the function that makes one of them to textenv.TokenVectorEnv(make_env, "
            "tokenizer=policy.tokenizer, num_envs=64), or the id of a registered one to "
            "gymnasium.make_vec('textenv/Words-v0', env=ID, num_envs=64, model=MODEL), and train an LMPolicy on it"
        )


def check_spaces(env: VectorEnv, policy: Policy) -> None:
    """Check that a policy's spaces match the environment's.

    Raises:
        TypeError: if a control policy is used with a text environment, or a language model with another one.
        ValueError: if the policy has the batched spaces of all slots, or those of another environment; if the
            environment reads and writes strings; or as `Policy.check_environment`.
    """
    refuse_strings(env)
    observation_space = policy.observation_space
    action_space = policy.action_space
    if observation_space is None or action_space is None:
        return
    name = type(policy).__name__
    if is_episode_env(env):
        raise TypeError(f"a {name} cannot play a text environment: use an algos.LMPolicy")
    env_observations = env.single_observation_space
    env_actions = env.single_action_space

    # A policy's spaces are those of one slot
    reads_all_slots = observation_space == env.observation_space and observation_space != env_observations
    acts_in_all_slots = action_space == env.action_space and action_space != env_actions
    if reads_all_slots or acts_in_all_slots:
        raise ValueError(
            f"the {name} was made from the spaces of all {env.num_envs} slots ({observation_space}, {action_space}): "
            "make it from env.single_observation_space and env.single_action_space"
        )

    # Observations
    same_size = flat_shape(observation_space, name) == flat_shape(env_observations, name)
    if not same_size or not reads_alike(observation_space, env_observations):
        advice = "make it from the same space"
        if type(observation_space) is type(env_observations) and isinstance(
            env_observations, (spaces.Dict, spaces.Tuple)
        ):
            advice += ", whose parts are in the same order"
        raise ValueError(
            f"the {name} reads {observation_space}, but the environment has {env_observations}: {advice}, or wrap the "
            "environment so that it shows what the policy reads"
        )

    # Actions
    if not acts_alike(action_space, env_actions):
        raise ValueError(
            f"the {name} chooses from {action_space}, but the environment takes {env_actions}: make it from the "
            "same space"
        )
    policy.check_environment(env)


WEIGHTS = "policy.safetensors"
"""File name of a control policy's weights."""


class ControlPolicy(nn.Module, Policy):
    """Base of policies for control; a subclass adds ``distribution`` and ``critic``, and the methods that raise here.

    `act`, `evaluate`, `output` and `value` get flat observations (`algos.envs.flatten`); `act` also accepts those of an
    environment. `read` converts either to the network's input, and `algos.envs.flatten.unflatten` recovers the parts of
    a Dict. A subclass's `act` returns ``self.choose(...)``, and its `evaluate` returns ``self.evaluation(...)``.
    `arguments` names the constructor arguments that `load` needs besides the spaces. `algos.policies.registry` names
    the policies of ``--policy``.

    Args:
        observation_space: space of one environment; spaces other than Box are flattened (`algos.envs.flatten`).
        action_space: space of one environment; see `algos.policies.distributions`.
        normalize_observations: normalize them by their running mean and variance; see `update_normalizer`.
        seed: seed of the initial weights and of action sampling.

    Raises:
        ValueError: if the observation space has no fixed size.
    """

    observation_space: spaces.Space
    action_space: spaces.Space
    distribution: ActionDistribution
    """Action distribution, of `algos.policies.distributions` or with the same methods."""
    critic: nn.Module
    hidden: int | tuple[int, ...]
    """Width of the hidden layer, or a tuple with the width of each layer; needed only by `arguments`."""
    _layers_made: dict[str, str]

    def __init_subclass__(cls) -> None:
        """Let the subclass's constructor check the names of its arguments, and note the layers that it made."""
        super().__init_subclass__()
        cls.__init__ = _noting_layers(check_names(cls.__init__))  # type: ignore[method-assign]

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, *, normalize_observations: bool, seed: int
    ) -> None:
        super().__init__()
        self._shape = flat_shape(observation_space, type(self).__name__)
        self.input_size = math.prod(self._shape)
        """Length of what `read` returns for one observation."""
        self._has_packed_form = packed_size(observation_space) > 0
        self.observation_space = observation_space
        self.action_space = action_space
        self.generator = torch.Generator().manual_seed(seed)
        self.memory: dict[str, Any] = {}
        self.normalizer: ObservationNormalizer | None = None
        if normalize_observations:
            self.normalizer = ObservationNormalizer(self.input_size)
        else:
            warn_of_raw_pixels(observation_space, type(self).__name__)

    @property
    def num_actions(self) -> int | None:
        """Number of actions; None unless the action space is Discrete."""
        if not isinstance(self.action_space, spaces.Discrete):
            return None
        return int(self.action_space.n)

    @property
    def log_std(self) -> nn.Parameter:
        """Log standard deviation of each action dimension (gSDE: element of the noise matrix); only for a Box."""
        log_std = getattr(self.distribution, "log_std", None)
        if not isinstance(log_std, nn.Parameter):
            raise AttributeError("log_std")  # torch writes the message
        return log_std

    @property
    def initial_state(self) -> Tensor | None:
        """Recurrent state of one slot at the start of an episode, ``[*]``; None if there is none."""
        return None

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """Compute one step as a pure function, which neither reads nor changes `memory`; `export` needs it.

        Args:
            observation: ``[N, *]``; those of a Box as the environment gives them, others flat, float32.
            state: recurrent state before the action, ``[N, *]``; None for a policy without one.
        """
        raise _missing(self, "forward")

    def named_parts(self, output: Tensor) -> dict[str, Tensor]:
        """What an output of the network consists of, by name, ``[N, *]`` each: parameters of the distribution."""
        return self.distribution.parameters_of(output)

    def export(self, path: str | Path, *, all_outputs: bool = False) -> Path:
        """Write the policy as an ONNX file, from the environment's observations to its actions.

        Normalization, one-hot encoding and the bounds of a Box are inside. The first dimension of all inputs and
        outputs is the number of observations, N. The input is ``observation``, of the space's shape and dtype; of a
        Dict or Tuple there is one for each part, such as ``observation/camera``. A recurrent policy also has ``state``,
        float32, 0 at the start of an episode, and the output ``next_state``. The output ``action`` is the most probable
        action, without a mask, as the environment takes it.

        Args:
            path: the file, such as ``policy.onnx``; an earlier one is replaced.
            all_outputs: also give the value, ``value`` float32 ``[N]``, and what the action is drawn from: ``logits``
                ``[N, n]`` (of several choices side by side), or ``mean`` and ``log_std`` before clipping, ``[N, *]``;
                of a `QPolicy` ``q_values`` ``[N, n]``.

        Returns:
            The path.

        Raises:
            ImportError: if the extra ``onnx`` is not installed.
            NotImplementedError: if the class of a policy of your own has no `forward`.
        """
        return write_onnx(self, path, all_outputs=all_outputs)

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
            other_output = other.output(rollout)
        return self.distribution.divergence(
            self.output(rollout), other_output, other=other.distribution, action_mask=rollout.get("action_mask", None)
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
        if self not in _CHECKED_FOR_DIGITS:
            _CHECKED_FOR_DIGITS.add(self)
            _warn_of_lost_digits(rollout["observation"][rollout["mask"]])
        if self.normalizer is not None:
            # In chunks, because pixels among the observations take four times their memory here
            samples = []
            for observation in rollout["observation"][rollout["mask"]].split(OBSERVATIONS_AT_ONCE):
                samples.append(self.normalizer.selected(self._flat(observation)))
            self.normalizer.add(torch.cat(samples))

    def arguments(self) -> dict[str, Any]:
        """Constructor arguments other than the spaces, for JSON, without those that only set the initial weights."""
        arguments: dict[str, Any] = {"hidden": self.hidden}
        if self.normalizer is not None:
            arguments["normalize_observations"] = True
        return arguments

    def save(self, folder: Path) -> dict[str, object]:
        """See `Policy.save`; logs a warning if layers were replaced since the policy was made."""
        self._warn_of_replaced_layers()
        write_weights(folder / WEIGHTS, self)
        return self.saved_spaces() | self.arguments()

    def _warn_of_replaced_layers(self) -> None:
        """Log a warning, once, of layers that are not those that the constructor made, which `load` will make again."""
        layers = _layers(self)
        names = sorted(layers.keys() | self._layers_made.keys())
        replaced = [name for name in names if layers.get(name) != self._layers_made.get(name)]
        if replaced:
            logger.warning(
                "the %s has other layers than its constructor makes (%s), and a saved agent keeps their weights only: "
                "loaded, it acts differently or is refused. Write a class that makes them (docs/algorithms.md, "
                "'A policy of your own')",
                type(self).__name__,
                ", ".join(replaced),
            )
            self._layers_made = layers

    def saved_spaces(self) -> dict[str, object]:
        """Description of both spaces for JSON; `restored_spaces` reads it."""
        return {"observation": describe_space(self.observation_space), "action": describe_space(self.action_space)}

    @staticmethod
    def restored_spaces(saved: dict[str, Any]) -> tuple[spaces.Space, spaces.Space]:
        """Take what `saved_spaces` returned out of a dictionary; return the space of observations and of actions."""
        return restore_space(saved.pop("observation")), restore_space(saved.pop("action"))

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> Self:
        """Load a policy written by `save`, without recurrent state."""
        from safetensors.torch import load_model

        arguments = dict(saved)
        observation_space, action_space = cls.restored_spaces(arguments)
        policy = cls(observation_space, action_space, **arguments)
        load_model(policy, str(folder / WEIGHTS))
        return policy

    def choose(self, output: Tensor, action_mask: Tensor | None, deterministic: bool) -> Step:
        """Sample actions from the distributions that a network's output ``[N, size]`` parameterizes.

        A subclass calls this at the end of its `act`.

        Raises:
            ValueError: if the mask allows no action in a slot.
        """
        if action_mask is not None:
            has_action = action_mask.any(-1)
            if not has_action.all():
                slot = int((~has_action).nonzero()[0, 0])
                raise ValueError(f"action_mask allows no action in slot {slot}: allow at least one")
            action_mask = action_mask.to(output.device)
        action, log_prob = self.distribution.sample(
            output, generator=self.generator, action_mask=action_mask, deterministic=deterministic
        )
        return Step(action, log_prob)

    def evaluation(self, rollout: TensorDict, output: Tensor, value: Tensor) -> Evaluation:
        """Score a rollout's actions from the network's output ``[*, size]`` and values ``[*, 1]``.

        A subclass calls this at the end of its `evaluate`.
        """
        log_prob, entropy = self.distribution.score(output, rollout["action"], rollout.get("action_mask", None))
        return Evaluation(log_prob, entropy, value.squeeze(-1))

    def read(self, observation: Observation | Tensor) -> Tensor:
        """Convert observations to the network's input: flat, float32, normalized, on the policy's device.

        Args:
            observation: the column ``[*, *]`` of a rollout, or the observations of `act`.

        Returns:
            ``[*, input_size]``.
        """
        if not isinstance(observation, Tensor):
            observation = torch.from_numpy(self._flatten(observation))
        flat = self._flat(observation)
        if self.normalizer is None:
            return flat
        return self.normalizer(flat)

    def _flatten(self, observation: Observation) -> np.ndarray:
        """Observations of an environment as one array ``[N, *]`` (`algos.envs.flatten`)."""
        return np.asarray(flatten(self.observation_space, observation))

    def _flat(self, observation: Tensor) -> Tensor:
        """Flatten each observation and keep the batch dimensions; float32, on the policy's device."""
        if self._has_packed_form:
            observation = unpack(self.observation_space, observation)
        if len(self._shape) != 1:
            batch_shape = observation.shape[: observation.ndim - len(self._shape)]
            observation = observation.reshape(*batch_shape, -1)
        return observation.to(self.device, torch.float32)


def _warn_of_lost_digits(observations: Tensor) -> None:
    """Log a warning if a number of these observations, ``[n, *]``, changes by little more than float32 can hold."""
    if observations.dtype not in (torch.float64, torch.int64, torch.int32) or len(observations) < 2:
        return
    numbers = observations.reshape(len(observations), -1).double()
    deviation, mean = torch.std_mean(numbers, dim=0)
    steps = mean.abs() * torch.finfo(torch.float32).eps
    is_coarse = (steps > COARSE_STEP * deviation) & (deviation > 0) & (mean.abs() > SMALLEST_MEAN)
    if is_coarse.any():
        index = int(is_coarse.int().argmax())
        logger.warning(
            "number %d of the observations is about %.4g ± %.2g, of which float32, in which networks read it, keeps "
            "steps of %.2g: subtract a constant in the environment, such as its first value",
            index,
            mean[index],
            deviation[index],
            steps[index],
        )


def _layers(policy: ControlPolicy) -> dict[str, str]:
    """Printed form of each layer of a policy, by its name: kind and sizes, without the weights."""
    return {name: repr(layer) for name, layer in policy.named_modules() if not list(layer.children())}


def _noting_layers(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that notes the layers that were made; of inherited ones the last counts."""

    @functools.wraps(initialize)
    def initialize_and_note(self: ControlPolicy, *args: object, **options: object) -> None:
        initialize(self, *args, **options)
        self._layers_made = _layers(self)

    return initialize_and_note


@accelerated("algos.fast.reading:read_array", "ab8341ba3cc7")
@torch.no_grad()
def read_array(policy: ControlPolicy, observation: np.ndarray) -> np.ndarray:
    """Convert observations ``[N, *]`` by a policy's `read`; return the network's input ``[N, input_size]``."""
    return policy.read(torch.from_numpy(observation)).cpu().numpy()


def step_values(value_of: Callable[[Tensor], Tensor], rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """Values of each observation and of its successor, ``[B, T]`` each; see `Policy.values`.

    Args:
        value_of: function from observations ``[*batch, *]`` to values ``[*batch]``.
        rollout: ``[B, T]``.
    """
    value = value_of(rollout["observation"])
    next_value = torch.cat([value[:, 1:], value[:, -1:]], dim=1)
    # The successor is the next step's observation, except where an episode or the rollout ends.
    last = rollout["truncated"] | rollout["terminated"]
    last[:, -1] = True
    next_value[last] = value_of(rollout["next_observation"][last])
    return value, next_value
