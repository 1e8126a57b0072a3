"""Action distributions: sampling, log-probability, entropy and KL from a network's output, for each action space."""

import functools
import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from algos.envs.spaces import BOX_DTYPES, INTEGER_DTYPES, has_numbers
from textenv.acceleration import accelerated

LOG_2PI = math.log(2 * math.pi)
LOG_STD_RANGE = (-20.0, 2.0)
"""Smallest and largest log standard deviation of a `SquashedGaussian` (Haarnoja et al. 2018b)."""
MIN_ACTIONS = 64
"""Smallest number of different values, in float32, that each number of an action with bounds must have."""
QUADRATURE_NODES = 64
"""Nodes of the integral in the entropy of a `SquashedGaussian`."""


class Categorical(nn.Module):
    """``Discrete(n)``: n logits; the only distribution that supports action masks.

    Args:
        space: the action space.

    Example:
        >>> Categorical(spaces.Discrete(3)).score(torch.zeros(3), torch.tensor(1))[0].exp()
        tensor(0.3333)
    """

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__()
        self.size = int(space.n)
        self.start = int(space.start)

    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions int64 ``[N]`` and log-probabilities ``[N]`` from logits ``[N, n]``; no gradient."""
        logits = _masked(output, action_mask)
        index, log_prob = draw(logits, generator, deterministic)
        if self.start:
            return index + self.start, log_prob
        return index, log_prob

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, nats; any batch shape."""
        log_probs = _masked(output, action_mask).log_softmax(-1)
        return _log_prob_and_entropy(log_probs, self.index(action))

    def most_probable(self, output: Tensor) -> Tensor:
        """Most probable actions int64 ``[N]`` from logits ``[N, n]``."""
        return output.argmax(-1) + self.start

    def parameters_of(self, output: Tensor) -> dict[str, Tensor]:
        """``logits`` ``[N, n]``."""
        return {"logits": output}

    def index(self, action: Tensor) -> Tensor:
        """Index of an action's logit, from 0."""
        if self.start:
            return action - self.start
        return action

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: nn.Module, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats; any batch shape."""
        logits = _masked(output, action_mask)
        other_logits = _masked(other_output, action_mask)
        return _categorical_kl(logits, other_logits)


class MultiCategorical(nn.Module):
    """``MultiDiscrete`` or ``MultiBinary``: independent categorical choices; a binary one has two options.

    Args:
        space: the action space.

    Example:
        >>> MultiCategorical(spaces.MultiBinary(2)).score(torch.zeros(4), torch.tensor([0, 1]))[0].exp()
        tensor(0.2500)
    """

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        super().__init__()
        self.shape = tuple(space.shape)
        if isinstance(space, spaces.MultiDiscrete):
            start = space.start
            num_options = space.nvec
        else:
            start = np.zeros((), dtype=np.int64)
            num_options = np.full(space.shape, 2)
        # A buffer, to be on the policy's device; the offset comes from the action space and is not saved
        self.start: Tensor
        self.register_buffer("start", torch.from_numpy(start), persistent=False)
        self.choices: list[int] = num_options.flatten().tolist()
        """Number of options of each choice."""
        self.size = sum(self.choices)

    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions int64 ``[N, *]`` and log-probabilities ``[N]`` from concatenated logits ``[N, size]``."""
        _refuse_mask(action_mask)
        indices = []
        log_probs = []
        for logits in output.split(self.choices, dim=-1):
            index, log_prob = draw(logits, generator, deterministic)
            indices.append(index)
            log_probs.append(log_prob)
        joint_index = torch.stack(indices, dim=-1)  # [N, choices]
        joint_log_prob = torch.stack(log_probs, dim=-1).sum(-1)  # [N]
        action = joint_index.reshape(*joint_log_prob.shape, *self.shape)
        return action + self.start.to(action), joint_log_prob

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, nats; any batch shape."""
        _refuse_mask(action_mask)
        joint_index = action - self.start.to(action)
        indices = joint_index.reshape(*output.shape[:-1], len(self.choices)).unbind(-1)
        log_probs = []
        entropies = []
        for logits, index in zip(output.split(self.choices, dim=-1), indices, strict=True):
            log_prob, entropy = _log_prob_and_entropy(logits.log_softmax(-1), index)
            log_probs.append(log_prob)
            entropies.append(entropy)
        return torch.stack(log_probs, dim=-1).sum(-1), torch.stack(entropies, dim=-1).sum(-1)

    def most_probable(self, output: Tensor) -> Tensor:
        """Most probable actions int64 ``[N, *]`` from concatenated logits ``[N, size]``."""
        indices = [logits.argmax(-1) for logits in output.split(self.choices, dim=-1)]
        joint_index = torch.stack(indices, dim=-1)
        return joint_index.reshape(-1, *self.shape) + self.start.to(joint_index)

    def parameters_of(self, output: Tensor) -> dict[str, Tensor]:
        """``logits`` ``[N, size]`` of all choices, side by side."""
        return {"logits": output}

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: nn.Module, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats, summed over the independent choices; any batch shape."""
        _refuse_mask(action_mask)
        parts = output.split(self.choices, dim=-1)
        other_parts = other_output.split(self.choices, dim=-1)
        kls = [_categorical_kl(logits, other_logits) for logits, other_logits in zip(parts, other_parts, strict=True)]
        return torch.stack(kls, dim=-1).sum(-1)


class Gaussian(nn.Module):
    """``Box`` of floats: the output is the mean; each dimension has one trainable log standard deviation.

    Samples are not squashed: if the box has bounds, `algos.collection` clips the action for the environment.

    Args:
        space: the action space.
        features: leading dimensions of ``log_std``, for a standard deviation that depends on the state.

    Raises:
        ValueError: if the box has an integer dtype.

    Example:
        >>> Gaussian(spaces.Box(-1, 1, (2,))).log_std
        Parameter containing:
        tensor([0., 0.], requires_grad=True)
    """

    def __init__(self, space: spaces.Box, *features: int) -> None:
        super().__init__()
        if not np.issubdtype(space.dtype, np.floating):
            raise ValueError(f"action_space is {space} of dtype {space.dtype}, expected floats or a (Multi)Discrete")
        self.shape = tuple(space.shape)
        self.size = math.prod(self.shape)
        self.log_std = nn.Parameter(torch.zeros(*features, self.size, device="cpu"))

    @torch.no_grad()
    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions float32 ``[N, *]`` and log-densities ``[N]`` from means ``[N, size]``; no gradient."""
        _refuse_mask(action_mask)
        if deterministic:
            noise = torch.zeros_like(output)
        else:
            noise = torch.randn(output.shape, generator=generator, device=generator.device).to(output.device)
        action, log_prob = draw_gaussian(self, output, noise)
        return action.view(len(output), *self.shape), log_prob

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-density and differential entropy, nats; any batch shape."""
        _refuse_mask(action_mask)
        mean, log_std = self.parametrize(output)
        standard = (action.reshape(mean.shape) - mean) * (-log_std).exp()
        log_prob = -(0.5 * standard.square() + log_std + 0.5 * LOG_2PI).sum(-1)
        entropy = (log_std + 0.5 * (LOG_2PI + 1)).sum(-1)
        return log_prob, entropy.expand(log_prob.shape)

    def most_probable(self, output: Tensor) -> Tensor:
        """Most probable actions, the means, float32 ``[N, *]``."""
        return self.parameters_of(output)["mean"]

    def parameters_of(self, output: Tensor) -> dict[str, Tensor]:
        """``mean`` and ``log_std`` of the actions, ``[N, *]`` each."""
        mean, log_std = self.parametrize(output)
        return {
            "mean": mean.reshape(-1, *self.shape),
            "log_std": log_std.expand(mean.shape).reshape(-1, *self.shape),
        }

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: nn.Module, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats; any batch shape. ``other``'s standard deviation gets no gradient."""
        _refuse_mask(action_mask)
        assert isinstance(other, Gaussian), "policies of one class have one kind of distribution"
        mean, log_std = self.parametrize(output)
        other_mean, other_log_std = other.parametrize(other_output)
        return _gaussian_kl((mean, log_std), (other_mean, other_log_std.detach()))

    def parametrize(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the action, ``[*, size]`` or ``[size]``."""
        return output, self.log_std


class BoxBounds(nn.Module):
    """Bounds of a ``Box``: scales its actions to [-1, 1] and back, and draws them uniformly.

    Args:
        space: the action space.

    Raises:
        ValueError: if the dtype is no float, if a number has no finite bounds, or equal ones, or if float32 has fewer
            than `MIN_ACTIONS` numbers between them.

    Example:
        >>> bounds = BoxBounds(spaces.Box(0, 4, (1,)))
        >>> bounds.scale(torch.tensor([[1.0]]))
        tensor([[-0.5000]])
        >>> bounds.unscale(torch.tensor([[-0.5]]))
        tensor([[1.]])
    """

    center: Tensor
    half_range: Tensor

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        box = _bounded_box(space)
        self.shape = tuple(box.shape)
        self.size = math.prod(self.shape)
        low = torch.from_numpy(box.low.astype(np.float64)).flatten()
        high = torch.from_numpy(box.high.astype(np.float64)).flatten()
        # Buffers follow the weights to their device; they come from the action space and are not saved
        self.register_buffer("center", ((low + high) / 2).float(), persistent=False)
        self.register_buffer("half_range", ((high - low) / 2).float(), persistent=False)
        self.log_scale = ((high - low) / 2).log().sum().item()
        """Log-density of a scaled action minus that of the action, nats."""
        self.uniform_log_prob = -self.log_scale - self.size * math.log(2)
        """Log-density of the uniform distribution of actions, nats."""

    def scale(self, action: Tensor) -> Tensor:
        """Actions ``[*, *shape]`` to numbers in [-1, 1], ``[*, size]``."""
        batch_shape = action.shape[: action.ndim - len(self.shape)]
        return (action.reshape(*batch_shape, self.size) - self.center) / self.half_range

    def unscale(self, scaled_action: Tensor) -> Tensor:
        """Inverse of `scale`: ``[*, size]`` to ``[*, *shape]``."""
        action = self.center + self.half_range * scaled_action
        return action.reshape(*scaled_action.shape[:-1], *self.shape)

    def sample_uniformly(self, output: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw one action for each row of ``output``; return actions ``[N, *shape]`` and log-densities ``[N]``."""
        slots = len(output)
        fraction = torch.rand((slots, self.size), generator=generator, device=generator.device).to(output.device)
        log_prob = torch.full((slots,), self.uniform_log_prob, device=output.device)
        return self.unscale(2 * fraction - 1), log_prob

    def score_uniformly(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy of the uniform distribution, for each row of ``output``."""
        log_prob = torch.full(output.shape[:-1], self.uniform_log_prob, device=output.device)
        return log_prob, -log_prob


class SquashedGaussian(nn.Module):
    """``Box`` of floats with bounds: tanh of a Gaussian, scaled to the bounds (Haarnoja et al. 2018b, appendix C).

    The output is the mean, then the log standard deviation, of the Gaussian for each number of the action.

    Args:
        space: the action space; see `BoxBounds`.

    Example:
        >>> distribution = SquashedGaussian(spaces.Box(0, 4, (1,)))
        >>> distribution.score(torch.zeros(1, 2), torch.tensor([[2.0]]))[0].exp()  # 1 / √(2π), divided by 2
        tensor([0.1995])
    """

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.bounds = BoxBounds(space)
        self.size = 2 * self.bounds.size
        self.uniform = False
        """Whether actions are drawn uniformly instead, as they are before learning starts."""

    @torch.no_grad()
    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions float32 ``[N, *]`` and log-densities ``[N]`` from outputs ``[N, size]``; no gradient.

        The deterministic action is tanh of the mean.
        """
        _refuse_mask(action_mask)
        if self.uniform and not deterministic:
            return self.bounds.sample_uniformly(output, generator)
        shape = (len(output), self.bounds.size)
        if deterministic:
            noise = output.new_zeros(shape)
        else:
            noise = torch.randn(shape, generator=generator, device=generator.device).to(output.device)
        scaled_action, log_prob = self.scaled_sample(output, noise)
        return self.bounds.unscale(scaled_action), log_prob - self.bounds.log_scale

    def scaled_sample(self, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample differentiably: actions scaled to [-1, 1] and their log-densities, nats, in that scale.

        Args:
            output: network output, ``[*, size]``.
            noise: standard normal, ``[*, numbers]``.

        Returns:
            ``[*, numbers]`` and ``[*]``.
        """
        mean, log_std = self.parametrize(output)
        gaussian = mean + log_std.exp() * noise
        log_prob = -(0.5 * noise.square() + log_std + 0.5 * LOG_2PI + _log_tanh_slope(gaussian)).sum(-1)
        return gaussian.tanh(), log_prob

    def mode(self, output: Tensor) -> Tensor:
        """Deterministic action, scaled to [-1, 1]: ``[*, size]`` to ``[*, numbers]``."""
        mean, _ = self.parametrize(output)
        return mean.tanh()

    def most_probable(self, output: Tensor) -> Tensor:
        """Deterministic actions float32 ``[N, *]`` from outputs ``[N, size]``."""
        return self.bounds.unscale(self.mode(output))

    def parameters_of(self, output: Tensor) -> dict[str, Tensor]:
        """``mean`` and ``log_std`` of the Gaussian before tanh and scaling, ``[N, *]`` each."""
        mean, log_std = self.parametrize(output)
        shape = (-1, *self.bounds.shape)
        return {"mean": mean.reshape(shape), "log_std": log_std.reshape(shape)}

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-density and differential entropy, nats; any batch shape.

        An action at a bound counts as the nearest one inside. The entropy is an integral by Gauss-Hermite quadrature.
        """
        _refuse_mask(action_mask)
        if self.uniform:
            return self.bounds.score_uniformly(output)
        mean, log_std = self.parametrize(output)

        # Log-density of the Gaussian before tanh, and the change of volume by tanh and scaling
        largest = 1 - torch.finfo(mean.dtype).eps / 2
        gaussian = self.bounds.scale(action).clamp(-largest, largest).atanh()
        standard = (gaussian - mean) * (-log_std).exp()
        log_prob = -(0.5 * standard.square() + log_std + 0.5 * LOG_2PI + _log_tanh_slope(gaussian)).sum(-1)

        # Entropy of the Gaussian, plus the mean change of volume
        nodes, weights = _quadrature()
        node = torch.tensor(nodes, dtype=mean.dtype, device=mean.device)
        weight = torch.tensor(weights, dtype=mean.dtype, device=mean.device)
        gaussian_at_nodes = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * node
        mean_slope = (_log_tanh_slope(gaussian_at_nodes) * weight).sum(-1)
        entropy = (log_std + 0.5 * (LOG_2PI + 1) + mean_slope).sum(-1)
        return log_prob - self.bounds.log_scale, entropy + self.bounds.log_scale

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: nn.Module, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats: that of the Gaussians, which tanh does not change."""
        _refuse_mask(action_mask)
        return _gaussian_kl(self.parametrize(output), self.parametrize(other_output))

    def parametrize(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the Gaussian, ``[*, numbers]`` each."""
        mean, log_std = output.chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD_RANGE)


@functools.cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a mean over a standard normal number (Gauss-Hermite), `QUADRATURE_NODES` each."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
    return nodes, weights / weights.sum()


class NoisyAction(nn.Module):
    """``Box`` of floats with bounds: tanh of the output, scaled to the bounds, plus Gaussian noise (TD3).

    Actions with noise are not clipped here: `algos.collection` does it for the environment.

    Args:
        space: the action space; see `BoxBounds`.

    Example:
        >>> distribution = NoisyAction(spaces.Box(0, 4, (1,)))
        >>> distribution.bounds.unscale(distribution.mode(torch.zeros(1, 1)))
        tensor([[2.]])
    """

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.bounds = BoxBounds(space)
        self.size = self.bounds.size
        self.noise = 0.0
        """Standard deviation of the noise, as a fraction of half the range of each number."""
        self.uniform = False
        """Whether actions are drawn uniformly instead, as they are before learning starts."""

    @torch.no_grad()
    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions float32 ``[N, *]`` and log-densities ``[N]`` from outputs ``[N, size]``; no gradient."""
        _refuse_mask(action_mask)
        if self.uniform and not deterministic:
            return self.bounds.sample_uniformly(output, generator)
        if self.noise and not deterministic:
            noise = torch.randn(output.shape, generator=generator, device=generator.device)
        else:
            noise = torch.zeros_like(output)
        return self.explore(output, noise)

    @torch.no_grad()
    def explore(self, output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Choose actions float32 ``[N, *]`` with standard normal noise ``[N, size]``; return log-densities too."""
        scaled_action = self.mode(output) + self.noise * noise.to(output.device)
        action = self.bounds.unscale(scaled_action)
        log_prob, _ = self.score(output, action)
        return action, log_prob

    def mode(self, output: Tensor) -> Tensor:
        """Action without noise, scaled to [-1, 1]: ``[*, size]`` to ``[*, size]``."""
        return output.tanh()

    def most_probable(self, output: Tensor) -> Tensor:
        """Actions without noise, float32 ``[N, *]`` from outputs ``[N, size]``."""
        return self.bounds.unscale(self.mode(output))

    def parameters_of(self, output: Tensor) -> dict[str, Tensor]:
        """``mean``: the action without noise, ``[N, *]``."""
        return {"mean": self.most_probable(output)}

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-density and differential entropy, nats; any batch shape. Both are 0 without noise, as for one action."""
        _refuse_mask(action_mask)
        if self.uniform:
            return self.bounds.score_uniformly(output)
        if not self.noise:
            zeros = output.new_zeros(output.shape[:-1])
            return zeros, zeros
        standard = (self.bounds.scale(action) - self.mode(output)) / self.noise
        log_std = math.log(self.noise)
        log_prob = -(0.5 * standard.square() + log_std + 0.5 * LOG_2PI).sum(-1) - self.bounds.log_scale
        entropy = self.size * (log_std + 0.5 * (LOG_2PI + 1)) + self.bounds.log_scale
        return log_prob, torch.full_like(log_prob, entropy)

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: nn.Module, action_mask: Tensor | None = None
    ) -> Tensor:
        """Raise a ValueError: deterministic actions have no KL."""
        raise ValueError("the policy is deterministic (TD3), so it has no KL to another one: train with SAC or PPO")


class Binned(nn.Module):
    """``Box`` of floats in which each number is one of a few values: independent categorical choices.

    Args:
        space: the action space.
        values: values of each number, float ``[numbers, n]``.

    Example:
        >>> distribution = Binned(spaces.Box(-1, 1, (1,)), torch.tensor([[-1.0, 0.0, 1.0]]))
        >>> distribution.score(torch.zeros(3), torch.tensor([0.9]))[0].exp()
        tensor(0.3333)
    """

    def __init__(self, space: spaces.Box, values: Tensor) -> None:
        super().__init__()
        self.shape = tuple(space.shape)
        numbers, num_values = values.shape
        self.values = values.float()  # not a buffer: it comes from the action space and is not saved with the weights
        self.choices = MultiCategorical(spaces.MultiDiscrete([num_values] * numbers))
        self.size = self.choices.size

    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions float32 ``[N, *]`` and log-probabilities ``[N]`` from logits ``[N, size]``; no gradient."""
        index, log_prob = self.choices.sample(
            output, generator=generator, action_mask=action_mask, deterministic=deterministic
        )
        action = self.values.to(index.device).expand(len(index), -1, -1).gather(-1, index[..., None])
        return action.reshape(len(index), *self.shape), log_prob

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability of the nearest values, and entropy, nats; any batch shape."""
        numbers = action.reshape(*output.shape[:-1], len(self.values), 1)
        index = (numbers - self.values.to(numbers)).abs().argmin(-1)
        return self.choices.score(output, index, action_mask)

    def most_probable(self, output: Tensor) -> Tensor:
        """Most probable actions float32 ``[N, *]`` from logits ``[N, size]``."""
        index = self.choices.most_probable(output)
        action = self.values.to(index.device).expand(len(index), -1, -1).gather(-1, index[..., None])
        return action.reshape(-1, *self.shape)

    def parameters_of(self, output: Tensor) -> dict[str, Tensor]:
        """``logits`` ``[N, size]`` of the values of each number, side by side."""
        return {"logits": output}

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: nn.Module, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats, summed over the numbers; any batch shape."""
        return self.choices.divergence(output, other_output, other=other, action_mask=action_mask)


ActionDistribution = Categorical | MultiCategorical | Gaussian | SquashedGaussian | NoisyAction | Binned


def action_distribution(space: spaces.Space) -> ActionDistribution:
    """Make the default distribution for an action space.

    Raises:
        ValueError: if the space is not supported.
    """
    _check_numbers(space)
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return MultiCategorical(space)
    if isinstance(space, spaces.Box):
        return Gaussian(space)
    raise ValueError(
        f"action_space is {space}, expected Discrete, Box, MultiDiscrete or MultiBinary: "
        "convert it with gymnasium.wrappers.TransformAction"
    )


def _check_numbers(space: spaces.Space) -> None:
    """Raise a ValueError if torch cannot compute with the actions of a space."""
    # Dtype
    dtypes: tuple[str, ...] = INTEGER_DTYPES
    if isinstance(space, spaces.Box):
        dtypes = BOX_DTYPES
    supported_spaces = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if isinstance(space, supported_spaces) and str(space.dtype) not in dtypes:
        raise ValueError(f"action_space is {space} of dtype {space.dtype}, expected one of {', '.join(dtypes)}")
    if isinstance(space, supported_spaces) and not has_numbers(space):
        raise ValueError(f"action_space is {space}, in which there is nothing to choose, expected at least one number")

    # Largest action, which must fit int64
    largest_action = 0
    if isinstance(space, spaces.Discrete):
        largest_action = int(space.start) + int(space.n) - 1
    elif isinstance(space, spaces.MultiDiscrete):
        starts = space.start.ravel().tolist()
        counts = space.nvec.ravel().tolist()
        largest_action = max(start + count - 1 for start, count in zip(starts, counts, strict=True))
    if largest_action >= 2**63:
        raise ValueError(f"action_space is {space} with the action {largest_action}, expected numbers below 2**63")


def _masked(logits: Tensor, action_mask: Tensor | None) -> Tensor:
    """Set the logits of unavailable actions to the lowest finite number, so that their probability is 0."""
    if action_mask is None:
        return logits
    lowest = torch.finfo(logits.dtype).min
    return logits.masked_fill(~action_mask, lowest)


@accelerated("algos.fast.sampling:draw", "0ebd6f31ebcd")
@torch.no_grad()
def draw(logits: Tensor, generator: torch.Generator, deterministic: bool) -> tuple[Tensor, Tensor]:
    """Sample an action from logits ``[*, n]``; return it and its log-probability, ``[*]`` each, no gradient.

    Gumbel-max: the argmax of logits plus Gumbel noise is a sample from their softmax.
    """
    log_probs = logits.log_softmax(-1)
    perturbed = log_probs
    if not deterministic:
        # Gumbel noise is -log of exponential noise
        noise = torch.empty_like(log_probs, device=generator.device)
        noise.exponential_(generator=generator).log_()
        perturbed = log_probs - noise.to(log_probs.device)
    action = perturbed.argmax(-1, keepdim=True)
    log_prob = log_probs.gather(-1, action)
    return action.squeeze(-1), log_prob.squeeze(-1)


def _log_prob_and_entropy(log_probs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of an action ``[*]``, and entropy ``[*]``, from the log-probabilities ``[*, n]`` of all."""
    # Below -1e3 the probability is 0; without the clamp, masked logits (`_masked`) would give NaN gradients.
    entropy = -(log_probs.exp() * log_probs.clamp(min=-1e3)).sum(-1)
    log_prob = log_probs.gather(-1, action.unsqueeze(-1))
    return log_prob.squeeze(-1), entropy


def _categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """KL divergence ``[*]`` of two categorical distributions from their logits ``[*, n]``."""
    log_probs = logits.log_softmax(-1)
    other_log_probs = other_logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)


@accelerated("algos.fast.sampling:draw_gaussian", "78861dac6ce0")
@torch.no_grad()
def draw_gaussian(distribution: Gaussian, mean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Add noise to means, ``[N, size]`` each; return actions ``[N, size]`` and log-densities ``[N]``, no gradient.

    Args:
        distribution: has the standard deviations, and scores the actions.
        mean: means.
        noise: standard normal.
    """
    action = mean + distribution.log_std.exp() * noise
    log_prob, _ = distribution.score(mean, action)
    return action, log_prob


def _gaussian_kl(parameters: tuple[Tensor, Tensor], other_parameters: tuple[Tensor, Tensor]) -> Tensor:
    """KL divergence ``[*]`` of two diagonal Gaussians from their means and log standard deviations, ``[*, n]``."""
    mean, log_std = parameters
    other_mean, other_log_std = other_parameters
    variance_ratio = (2 * (log_std - other_log_std)).exp()
    squared_distance = ((mean - other_mean) * (-other_log_std).exp()).square()
    return 0.5 * (variance_ratio + squared_distance - 1 - variance_ratio.log()).sum(-1)


def _log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh² x), without the cancellation of 1 - tanh² x where tanh x is near ±1."""
    return 2 * (math.log(2) - x - functional.softplus(-2 * x))


def _bounded_box(space: spaces.Space) -> spaces.Box:
    """Return the space; raise a ValueError unless it is a ``Box`` of floats with finite bounds that differ."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ValueError(f"action_space is {space}, expected a Box of floats with bounds: use PPO, or DQN for Discrete")
    has_bounds = np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)
    if not has_bounds.all():
        raise ValueError(
            f"action_space is {space}, expected finite bounds, of which low is below high, for every number: give the "
            "Box bounds (gymnasium.wrappers.TransformAction), or use PPO, which needs none"
        )

    # Actions are computed in float32
    low = space.low.astype(np.float64)
    high = space.high.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.maximum(np.abs(low), np.abs(high)).astype(np.float32)
        is_held = np.spacing(largest) * MIN_ACTIONS <= high - low  # False for infinity
    if not is_held.all():
        raise ValueError(
            f"action_space is {space}, whose actions float32 cannot tell apart between these bounds, or not hold at "
            "all: let the environment take numbers around 0 (gymnasium.wrappers.RescaleAction, with -1 and 1)"
        )
    return space


def _refuse_mask(action_mask: Tensor | None) -> None:
    """Raise a ValueError if there is an action mask."""
    if action_mask is not None:
        raise ValueError("the environment gives an action_mask, which only Discrete actions support: leave it out")
