"""`CNNPolicy`: actor and critic on a shared convolutional trunk, for images."""

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.policies.distributions import action_distribution
from algos.policies.layers import image_trunk, linear
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step

SMALLEST = 5
"""Minimum side of an image, pixels."""
CHUNK = 1024
"""Maximum number of images that `CNNPolicy.values` evaluates at a time, to bound its memory."""


class CNNPolicy(ControlPolicy):
    """Network of Mnih et al. (2015), "Human-level control": a shared trunk with a linear actor and a linear critic.

    Images are uint8, in the rollout too; the network divides them by 255. With three dimensions, the shorter of
    first and last has the channels: ``(4, 84, 84)`` is a stack of frames, ``(210, 160, 3)`` a colour image. Two
    dimensions are one grey image. Images with a side under 36 pixels get a trunk with smaller kernels.

    Args:
        observation_space: that of one environment, a uint8 Box of 2 or 3 dimensions.
        hidden: width of the layer between trunk and heads.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind.

    Example:
        >>> policy = CNNPolicy(spaces.Box(0, 255, (16, 16, 3), np.uint8), spaces.Discrete(2))
        >>> policy.act(np.zeros((5, 16, 16, 3), dtype=np.uint8)).action.shape
        torch.Size([5])
    """

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, *, hidden: int = 512, seed: int = 0
    ) -> None:
        _, channels_first = image_layout(observation_space)
        super().__init__(observation_space, action_space, normalize_observations=False, seed=seed)
        self.hidden, self._channels_first = hidden, channels_first
        self.distribution = action_distribution(action_space)
        channels, height, width = self._images(torch.zeros(1, *self._shape, device="cpu")).shape[1:]
        self.trunk = image_trunk(channels, height, width, hidden, self.generator)
        self.actor = linear(hidden, self.distribution.size, 0.01, self.generator)
        self.critic: nn.Linear = linear(hidden, 1, 1.0, self.generator)

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is uint8 ``[N, *]``."""
        features = self._features(torch.from_numpy(np.asarray(observation)))
        return self.choose(self.actor(features), action_mask, deterministic)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        features = self._features(rollout["observation"])
        return self.evaluation(rollout, self.actor(features), self.critic(features))

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[*, size]``."""
        return self.actor(self._features(rollout["observation"]))

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of images ``[*batch, *]``, computed in chunks."""
        before = observation.shape[: observation.ndim - len(self._shape)]
        parts = observation.reshape(-1, *self._shape).split(CHUNK)
        return torch.cat([self.critic(self._features(part)).squeeze(-1) for part in parts]).view(before)

    def _features(self, observation: Tensor) -> Tensor:
        """Trunk features ``[*, hidden]`` of images with any leading dimensions."""
        before = observation.shape[: observation.ndim - len(self._shape)]
        images = self._images(observation.reshape(-1, *self._shape).to(self.critic.weight.device))
        # Channels last in memory, which convolutions on a CPU are faster for.
        images = images.to(torch.float32, memory_format=torch.channels_last) / 255
        return self.trunk(images).view(*before, self.hidden)

    def _images(self, observation: Tensor) -> Tensor:
        """Images as ``[n, channels, height, width]``."""
        if len(self._shape) == 2:
            return observation.unsqueeze(1)
        return observation if self._channels_first else observation.movedim(-1, 1)


def is_image(space: spaces.Space) -> bool:
    """True if `CNNPolicy` can read this observation space."""
    try:
        image_layout(space)
    except ValueError:
        return False
    return True


def image_layout(space: spaces.Space) -> tuple[tuple[int, ...], bool]:
    """Shape of an image space, and True if its channels come first.

    Raises:
        ValueError: if the space is not an image, its channel dimension is ambiguous, or the image is too small.
    """
    shape = tuple(space.shape or ())
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(shape) not in (2, 3):
        raise ValueError(
            f"observation_space is {space}, expected a uint8 Box of 2 or 3 dimensions (3 with channels): do not "
            "rescale pixels, join stacked colour frames along the channels, or use MLPPolicy"
        )
    if len(shape) == 3 and shape[0] == shape[2]:
        raise ValueError(
            f"observations have shape {shape}, so the channels are ambiguous (the shorter one of first and last): "
            "reshape them with gymnasium.wrappers.vector.ReshapeObservation, or crop them"
        )
    channels_first = len(shape) == 3 and shape[0] < shape[2]
    sides = shape[1:] if channels_first else shape[:2]
    if min(sides) < SMALLEST:
        raise ValueError(
            f"images of {sides[0]} x {sides[1]} pixels in observations of shape {shape} are too small for "
            f"convolutions, expected at least {SMALLEST}: flatten them and use MLPPolicy"
        )
    return shape, channels_first
