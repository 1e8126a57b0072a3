"""`GSDEPolicy` and `SACGSDEPolicy`: exploration by a function of the state that is kept for several steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.images import warn_of_flat_pixels
from algos.policies.distributions import Gaussian, SquashedGaussian
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step
from algos.policies.towers import tower, value, widths
from algos.policies.twin_critics import SACPolicy, relu_tower
from algos.storage.onnx_export import NetworkStep

SDE_EPSILON = 1e-6
"""Added to the variance of state-dependent noise, as in Stable-Baselines3."""
MEAN_RANGE = (-2.0, 2.0)
"""Smallest and largest mean before tanh, as in Stable-Baselines3: beyond them noise hardly changes an action."""


class StateDependentGaussian(Gaussian):
    """``Box`` of floats with noise that is a linear function of the state: generalized state-dependent exploration.

    gSDE (Raffin et al. 2021, "Smooth exploration for robotic reinforcement learning") has the noise φ(s) E with a
    matrix E ~ N(0, σ²) that is held for several steps, so that equal states get equal noise. At each step the action is
    Gaussian with variance φ(s)² σ² + 1e-6. The network output is the mean and the features φ(s), concatenated; the
    features get no gradient from the noise. σ is trained, with an entry per feature and dimension. Samples are not
    squashed.

    Args:
        space: the action space.
        features: number of features.

    Raises:
        ValueError: if ``space`` is no Box of floats.

    Example:
        >>> StateDependentGaussian(spaces.Box(-1, 1, (2,)), features=3).log_std.shape
        torch.Size([3, 2])
    """

    def __init__(self, space: spaces.Space, *, features: int) -> None:
        if not isinstance(space, spaces.Box):
            raise ValueError(f"action_space is {space}, state-dependent noise (gSDE) needs a Box: use an MLPPolicy")
        super().__init__(space, features)
        self.features = features

    @torch.no_grad()
    def explore(
        self, output: Tensor, matrices: Tensor | None, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose actions float32 ``[N, *]`` with these noise matrices (None: the means); return log-densities too."""
        action, features = self._split(output)
        if matrices is not None:
            action = action + _noise(features, self.log_std, matrices)
        log_prob, _ = self.score(output, action, action_mask)
        return action.reshape(len(output), *self.shape), log_prob

    def parametrize(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the action with E integrated out, ``[*, size]`` each."""
        mean, features = self._split(output)
        return mean, _integrated_log_std(features, self.log_std)

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Split the network output into mean ``[*, size]`` and features ``[*, features]``, detached."""
        mean, features = output.split([self.size, self.features], dim=-1)
        return mean, features.detach()


class GSDEPolicy(ControlPolicy):
    """`MLPPolicy` for Box actions with generalized state-dependent exploration (`StateDependentGaussian`).

    The features are the actor's last hidden layer. Each slot's noise matrix is resampled after ``sde_sample_freq``
    steps and at the start of an episode. The matrices are standard normal and are multiplied by σ when they are used.
    So an action has the density by which it is scored, even if σ was updated after its matrix was drawn.

    Args:
        action_space: space of one environment, a Box of floats.
        hidden: width of each hidden layer.
        sde_sample_freq: steps after which a slot's matrix is resampled (Stable-Baselines3's name).
        log_std_init: initial log standard deviation of each element of the noise matrix.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind, or an argument out of range.

    Example:
        >>> policy = GSDEPolicy(spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)), sde_sample_freq=8)
        >>> policy.act(np.zeros((3, 4), dtype=np.float32)).action.shape
        torch.Size([3, 2])
    """

    distribution: StateDependentGaussian

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (64, 64),
        normalize_observations: bool = False,
        sde_sample_freq: int = 4,
        log_std_init: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=normalize_observations, seed=seed)
        warn_of_flat_pixels(observation_space, "GSDEPolicy")
        self.hidden = widths(hidden)
        self.sde_sample_freq = _checked_frequency(sde_sample_freq)
        layer_sizes = [self.input_size, *self.hidden]
        self.distribution = StateDependentGaussian(action_space, features=layer_sizes[-1])
        self.actor = tower(self.input_size, self.hidden, self.distribution.size, gain=0.01, generator=self.generator)
        self.critic = tower(self.input_size, self.hidden, 1, gain=1.0, generator=self.generator)
        self.log_std.data.fill_(log_std_init)

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        output = self._output(torch.from_numpy(self._flatten(observation)))
        matrices = None
        if not deterministic:
            matrices = held_matrices(self, len(output))
        action, log_prob = self.distribution.explore(output, matrices, action_mask)
        return Step(action, log_prob)

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`."""
        return NetworkStep(self._output(observation), self.critic(self.read(observation)).squeeze(-1))

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Let the next step resample the noise of these slots (bool ``[N]``), or of all; there is no other state."""
        super().reset(rows, seeds=seeds)
        release_matrices(self.memory, rows)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        output = self.output(rollout)
        value = self.critic(self.read(rollout["observation"]))
        return self.evaluation(rollout, output, value)

    def output(self, rollout: TensorDict) -> Tensor:
        """Mean and features of a rollout's action distributions, ``[*, size + features]``."""
        return self._output(rollout["observation"])

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of observations ``[*batch, *]``."""
        return value(self.read(observation), self.critic).squeeze(-1)

    def arguments(self) -> dict[str, Any]:
        """See `ControlPolicy.arguments`."""
        return super().arguments() | {"sde_sample_freq": self.sde_sample_freq}

    def _output(self, observation: Tensor) -> Tensor:
        """Mean and features of observations ``[*, *]``: ``[*, size + features]``."""
        features = self.actor[:-1](self.read(observation))
        mean = self.actor[-1](features)
        return torch.cat([mean, features], dim=-1)


class SquashedStateDependentGaussian(SquashedGaussian):
    """``Box`` of floats with bounds: tanh of a `StateDependentGaussian`, scaled to the bounds, for SAC.

    The output is the mean, limited to ±2, and the features φ(s). The noise, too, gives the features a gradient; in
    `StateDependentGaussian` it gives none. Only while the policy acts is one matrix kept for several steps: for
    learning, each action has noise of its own, with variance φ(s)² σ² + 1e-6.

    Args:
        space: the action space, a ``Box`` of floats with bounds.
        features: number of features.

    Example:
        >>> SquashedStateDependentGaussian(spaces.Box(-1, 1, (2,)), features=3).size
        5
    """

    def __init__(self, space: spaces.Space, *, features: int) -> None:
        super().__init__(space)
        self.features = features
        self.size = self.bounds.size + features
        self.log_std = nn.Parameter(torch.zeros(features, self.bounds.size, device="cpu"))

    @torch.no_grad()
    def explore(self, output: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Choose actions float32 ``[N, *]`` with these noise matrices; return log-densities ``[N]`` too."""
        mean, log_std = self.parametrize(output)
        noise = _noise(output[..., self.bounds.size :], self.log_std, matrices)
        scaled_action, log_prob = self.scaled_sample(output, noise * (-log_std).exp())
        return self.bounds.unscale(scaled_action), log_prob - self.bounds.log_scale

    def parametrize(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the Gaussian with the matrix integrated out, ``[*, numbers]`` each."""
        mean, features = output.split([self.bounds.size, self.features], dim=-1)
        return mean.clamp(*MEAN_RANGE), _integrated_log_std(features, self.log_std)


class MeanAndFeatures(nn.Module):
    """A network that returns its last hidden layer too: ``[*, inputs]`` to outputs and features, side by side."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.hidden_layers = network[:-1]
        self.head = network[-1]

    def forward(self, network_input: Tensor) -> Tensor:
        """Return ``[*, outputs + features]``."""
        features = self.hidden_layers(network_input)
        return torch.cat([self.head(features), features], dim=-1)


class SACGSDEPolicy(SACPolicy):
    """`SACPolicy` that explores with state-dependent noise (`SquashedStateDependentGaussian`).

    Each slot's noise matrix is resampled after ``sde_sample_freq`` steps and at the start of an episode.

    Args:
        sde_sample_freq: steps after which a slot's matrix is resampled (Stable-Baselines3's name).
        log_std_init: initial log standard deviation of each element of the noise matrix; the default is that of
            Stable-Baselines3's SAC.
        others: see `TwinCriticPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind, or an argument out of range.

    Example:
        >>> policy = SACGSDEPolicy(spaces.Box(-1, 1, (4,)), spaces.Box(0, 2, (3,)), sde_sample_freq=8)
        >>> policy.act(np.zeros((5, 4), dtype=np.float32)).action.shape
        torch.Size([5, 3])
    """

    distribution: SquashedStateDependentGaussian
    distribution_type: type[SquashedStateDependentGaussian] = SquashedStateDependentGaussian

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (256, 256),
        image_features: int = 256,
        sde_sample_freq: int = 32,
        log_std_init: float = -3.0,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, hidden=hidden, image_features=image_features, seed=seed)
        self.sde_sample_freq = _checked_frequency(sde_sample_freq)
        self.distribution.log_std.data.fill_(log_std_init)

    def _make_actor(self, num_features: int) -> nn.Module:
        """See `TwinCriticPolicy`."""
        layer_sizes = [num_features, *self.hidden]
        self.distribution = self.distribution_type(self.action_space, features=layer_sizes[-1])
        return MeanAndFeatures(relu_tower(num_features, self.hidden, self.distribution.bounds.size, self.generator))

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        output = self.actor(self.read(observation))
        if deterministic or self.distribution.uniform or action_mask is not None:
            return self.choose(output, action_mask, deterministic)
        matrices = held_matrices(self, len(output))
        return Step(*self.distribution.explore(output, matrices))

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Let the next step resample the noise of these slots (bool ``[N]``), or of all; there is no other state."""
        super().reset(rows, seeds=seeds)
        release_matrices(self.memory, rows)

    def arguments(self) -> dict[str, Any]:
        """See `ControlPolicy.arguments`."""
        return super().arguments() | {"sde_sample_freq": self.sde_sample_freq}


def held_matrices(policy: GSDEPolicy | SACGSDEPolicy, slots: int) -> Tensor:
    """Standard normal matrices of this step, float32 ``[N, features, numbers]``; E is σ times such a matrix.

    They are new where the former ones have expired, and in all slots if the number of slots changed. The policy's
    memory holds them as ``matrices``, and their ``steps_left``, int64 ``[N]``.

    Args:
        policy: the policy; its memory and its generator change.
        slots: number of slots, N.
    """
    memory = policy.memory
    steps_left = memory.get("steps_left")
    if steps_left is None or len(steps_left) != slots:
        steps_left = torch.zeros(slots, dtype=torch.int64, device="cpu")
    expired = steps_left == 0
    if expired.any():
        shape = (int(expired.sum()), *policy.distribution.log_std.shape)
        drawn = torch.randn(shape, generator=policy.generator, device=policy.generator.device)
        if not expired.all():  # a new tensor, because a saved state may hold the former one
            drawn = memory["matrices"].masked_scatter(expired[:, None, None], drawn)
        memory["matrices"] = drawn
        steps_left = torch.where(expired, policy.sde_sample_freq, steps_left)
    memory["steps_left"] = steps_left - 1
    matrices: Tensor = memory["matrices"]
    return matrices


def release_matrices(memory: dict[str, Any], rows: np.ndarray | None) -> None:
    """Let the next step draw the matrices of these slots (bool ``[N]``) anew, or of all."""
    if rows is None:
        memory.clear()
    elif memory:
        memory["steps_left"] = torch.where(torch.from_numpy(rows), 0, memory["steps_left"])


def _noise(features: Tensor, log_std: Tensor, matrices: Tensor) -> Tensor:
    """Noise φ(s) E, ``[N, numbers]``, with E = σ times a standard normal matrix."""
    scaled = log_std.exp() * matrices.to(features.device)  # [N, features, numbers]
    return (features.unsqueeze(-1) * scaled).sum(-2)


def _integrated_log_std(features: Tensor, log_std: Tensor) -> Tensor:
    """Log standard deviation of φ(s) E over all E, ``[*, numbers]``."""
    variance = features.square() @ (2 * log_std).exp() + SDE_EPSILON
    return 0.5 * variance.log()


def _checked_frequency(sde_sample_freq: int) -> int:
    """Return ``sde_sample_freq``; raise a ValueError unless it is an integer of at least 1."""
    if not isinstance(sde_sample_freq, int) or sde_sample_freq < 1:
        raise ValueError(
            f"sde_sample_freq is {sde_sample_freq!r}, expected an integer of at least 1: to resample the noise only at "
            "the start of an episode, give a number above the length of any"
        )
    return sde_sample_freq
