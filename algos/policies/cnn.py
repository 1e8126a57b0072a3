"""`CNNPolicy`: actor and critic on a shared convolutional trunk, for images."""

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.policies.distributions import action_distribution
from algos.policies.layers import image_trunk, linear
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step

MIN_SIDE_PIXELS = 5
"""Minimum height and width of an image, pixels."""
MAX_IMAGES_AT_ONCE = 1024
"""Maximum number of images that `CNNPolicy.values` evaluates at a time, to bound its memory."""


class CNNPolicy(ControlPolicy):
    """Network of Mnih et al. (2015), "Human-level control": a shared trunk with a linear actor and a linear critic.

    Images are uint8, in the rollout too; the network divides them by 255. Of three dimensions, the channels are the
    first or the last, whichever is shorter: ``(4, 84, 84)`` is a stack of frames, ``(210, 160, 3)`` a colour image. Two
    dimensions are one grey image. Images with a side under 36 pixels get a trunk with smaller kernels.

    Args:
        observation_space: space of one environment, a uint8 Box of 2 or 3 dimensions.
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
        self.hidden = hidden
        self._channels_first = channels_first
        self.distribution = action_distribution(action_space)
        example = self._images(torch.zeros(1, *self._shape, device="cpu"))
        _, channels, height, width = example.shape
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
        output = self.actor(features)
        value = self.critic(features)
        return self.evaluation(rollout, output, value)

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[*, size]``."""
        return self.actor(self._features(rollout["observation"]))

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of images ``[*batch, *]``, computed in chunks."""
        batch_shape = observation.shape[: observation.ndim - len(self._shape)]
        values = []
        for chunk in observation.reshape(-1, *self._shape).split(MAX_IMAGES_AT_ONCE):
            features = self._features(chunk)
            values.append(self.critic(features).squeeze(-1))
        return torch.cat(values).view(batch_shape)

    def _features(self, observation: Tensor) -> Tensor:
        """Trunk features ``[*batch, hidden]`` of images ``[*batch, *]``."""
        batch_shape = observation.shape[: observation.ndim - len(self._shape)]
        flat_batch = observation.reshape(-1, *self._shape).to(self.critic.weight.device)
        images = self._images(flat_batch)
        # Convolutions on a CPU are faster with channels last in memory.
        images = images.to(torch.float32, memory_format=torch.channels_last) / 255
        return self.trunk(images).view(*batch_shape, self.hidden)

    def _images(self, observation: Tensor) -> Tensor:
        """Arrange images ``[n, *]`` as ``[n, channels, height, width]``."""
        if len(self._shape) == 2:
            return observation.unsqueeze(1)
        if self._channels_first:
            return observation
        return observation.movedim(-1, 1)


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

    # Pixels
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(shape) not in (2, 3):
        raise ValueError(
            f"observation_space is {space}, expected a uint8 Box of 2 or 3 dimensions (3 with channels): do not "
            "rescale pixels, join stacked colour frames along the channels, or use MLPPolicy"
        )

    # Channels
    if len(shape) == 3 and shape[0] == shape[2]:
        raise ValueError(
            f"observations have shape {shape}, so the channels are ambiguous (the shorter one of first and last): "
            "reshape them with gymnasium.wrappers.vector.ReshapeObservation, or crop them"
        )
    channels_first = len(shape) == 3 and shape[0] < shape[2]

    # Height and width
    sides = shape[:2]
    if channels_first:
        sides = shape[1:]
    if min(sides) < MIN_SIDE_PIXELS:
        raise ValueError(
            f"images of {sides[0]} x {sides[1]} pixels in observations of shape {shape} are too small for "
            f"convolutions, expected at least {MIN_SIDE_PIXELS}: flatten them and use MLPPolicy"
        )
    return shape, channels_first
