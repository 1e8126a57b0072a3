"""Action distributions: sampling, log-probability, entropy and KL from a network's output, for each action space."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from algos.envs.spaces import BOX_DTYPES, INTEGER_DTYPES
from textenv.acceleration import accelerated

LOG_2PI = math.log(2 * math.pi)


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
        self.size, self.start = int(space.n), int(space.start)

    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions int64 ``[N]`` from logits ``[N, n]``; returns log-probabilities ``[N]`` too; no gradient."""
        action, log_prob = draw(_masked(output, action_mask), generator, deterministic)
        return (action + self.start if self.start else action), log_prob

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, nats; any batch shape."""
        return _log_prob_and_entropy(_masked(output, action_mask).log_softmax(-1), self.index(action))

    def index(self, action: Tensor) -> Tensor:
        """Index of an action's logit, from 0."""
        return action - self.start if self.start else action

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: Any, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats; any batch shape."""
        return _categorical_kl(_masked(output, action_mask), _masked(other_output, action_mask))


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
        # Not a buffer: the offset comes from the action space and is not saved with the weights.
        self.start = torch.from_numpy(np.asarray(space.start if isinstance(space, spaces.MultiDiscrete) else 0))
        options = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
        self.choices = options.flatten().tolist()
        self.size = sum(self.choices)

    def sample(
        self, output: Tensor, *, generator: torch.Generator, action_mask: Tensor | None, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        """Sample actions int64 ``[N, *]`` and log-probabilities ``[N]`` from concatenated logits ``[N, size]``."""
        _refuse_mask(action_mask)
        parts = [draw(logits, generator, deterministic) for logits in output.split(self.choices, dim=-1)]
        action = torch.stack([action for action, _ in parts], dim=-1)
        log_prob = torch.stack([log_prob for _, log_prob in parts], dim=-1).sum(-1)
        return action.reshape(*log_prob.shape, *self.shape) + self.start.to(action), log_prob

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, nats; any batch shape."""
        _refuse_mask(action_mask)
        chosen = (action - self.start.to(action)).reshape(*output.shape[:-1], len(self.choices)).unbind(-1)
        parts = [
            _log_prob_and_entropy(logits.log_softmax(-1), one)
            for logits, one in zip(output.split(self.choices, dim=-1), chosen, strict=True)
        ]
        log_prob, entropy = (torch.stack(x, dim=-1).sum(-1) for x in zip(*parts, strict=True))
        return log_prob, entropy

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: Any, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats, summed over the independent choices; any batch shape."""
        _refuse_mask(action_mask)
        both = zip(output.split(self.choices, dim=-1), other_output.split(self.choices, dim=-1), strict=True)
        return torch.stack([_categorical_kl(own, others) for own, others in both], dim=-1).sum(-1)


class Gaussian(nn.Module):
    """``Box`` of floats: the output is the mean; each dimension has one trainable log standard deviation.

    Samples are not squashed: if the box has bounds, `algos.collection` clips the action for the environment.

    Args:
        space: the action space.
        features: further dimensions of ``log_std``, for a standard deviation that depends on the state.

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
        action = output + self.log_std.exp() * noise
        return action.view(len(output), *self.shape), self.score(output, action)[0]

    def score(self, output: Tensor, action: Tensor, action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-density and differential entropy, nats; any batch shape."""
        _refuse_mask(action_mask)
        mean, log_std = self.parametrize(output)
        standard = (action.reshape(mean.shape) - mean) * (-log_std).exp()
        log_prob = -(0.5 * standard.square() + log_std + 0.5 * LOG_2PI).sum(-1)
        return log_prob, (log_std + 0.5 * (LOG_2PI + 1)).sum(-1).expand(log_prob.shape)

    def divergence(
        self, output: Tensor, other_output: Tensor, *, other: Any, action_mask: Tensor | None = None
    ) -> Tensor:
        """KL(self‖other) from both outputs, nats; any batch shape. No gradient to the other's standard deviation."""
        _refuse_mask(action_mask)
        (mean, log_std), (other_mean, other_log_std) = self.parametrize(output), other.parametrize(other_output)
        other_log_std = other_log_std.detach()
        ratio = (2 * (log_std - other_log_std)).exp()
        distance = ((mean - other_mean) * (-other_log_std).exp()).square()
        return 0.5 * (ratio + distance - 1 - ratio.log()).sum(-1)

    def parametrize(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the action, ``[*, size]`` or ``[size]``."""
        return output, self.log_std


ActionDistribution = Categorical | MultiCategorical | Gaussian


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
    dtypes = BOX_DTYPES if isinstance(space, spaces.Box) else INTEGER_DTYPES
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if isinstance(space, known) and str(space.dtype) not in dtypes:
        raise ValueError(f"action_space is {space} of dtype {space.dtype}, expected one of {', '.join(dtypes)}")
    largest = 0
    if isinstance(space, spaces.Discrete):
        largest = int(space.start) + int(space.n) - 1
    elif isinstance(space, spaces.MultiDiscrete):
        starts = space.start.ravel().tolist()
        largest = max(start + count - 1 for start, count in zip(starts, space.nvec.ravel().tolist(), strict=True))
    if largest >= 2**63:
        raise ValueError(f"action_space is {space} with the action {largest}, expected numbers below 2**63")


def _masked(logits: Tensor, action_mask: Tensor | None) -> Tensor:
    return logits if action_mask is None else logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)


@accelerated("algos.fast.sampling:draw", "19ac1d27e967")
@torch.no_grad()
def draw(logits: Tensor, generator: torch.Generator, deterministic: bool) -> tuple[Tensor, Tensor]:
    """Sample an action from logits ``[*, n]``; returns it and its log-probability, ``[*]`` each, no gradient.

    Gumbel-max: the argmax of logits plus Gumbel noise is a sample of their softmax.
    """
    chosen = log_probs = logits.log_softmax(-1)
    if not deterministic:
        noise = torch.empty_like(log_probs, device=generator.device).exponential_(generator=generator).log_()
        chosen = log_probs - noise.to(log_probs.device)
    best = chosen.argmax(-1, keepdim=True)
    return best.squeeze(-1), log_probs.gather(-1, best).squeeze(-1)


def _log_prob_and_entropy(log_probs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    # Below -1e3 the probability is 0; without the clamp, masked logits (`_masked`) would give NaN gradients.
    entropy = -(log_probs.exp() * log_probs.clamp(min=-1e3)).sum(-1)
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy


def _categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - other_logits.log_softmax(-1))).sum(-1)


def _refuse_mask(action_mask: Tensor | None) -> None:
    if action_mask is not None:
        raise ValueError("the environment gives an action_mask, which only Discrete actions support: leave it out")
