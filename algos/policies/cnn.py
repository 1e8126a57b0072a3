"""`CNNPolicy`: actor and critic on a shared convolutional trunk, for images."""

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.images import brightest_pixel, image_layout
from algos.policies.distributions import action_distribution
from algos.policies.layers import channels_first, image_trunk, linear
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step
from algos.storage.onnx_export import NetworkStep

MAX_IMAGES_AT_ONCE = 1024
"""Maximum number of images whose values are computed at a time, to bound the memory."""


class CNNPolicy(ControlPolicy):
    """Network of Mnih et al. (2015), "Human-level control": a shared trunk with a linear actor and a linear critic.

    Images are uint8, in the rollout too; the network divides them by the space's largest pixel (255). Of three
    dimensions, the channels are the first or the last, whichever is shorter: ``(4, 84, 84)`` is a stack of frames,
    ``(210, 160, 3)`` a colour image. Two dimensions are one grey image. Images with a side under 36 pixels get a trunk
    with smaller kernels.

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
        image_layout(observation_space)  # raises unless it is an image
        assert isinstance(observation_space, spaces.Box)
        super().__init__(observation_space, action_space, normalize_observations=False, seed=seed)
        self.brightest = brightest_pixel(observation_space)
        self.hidden = hidden
        self.distribution = action_distribution(action_space)
        example = channels_first(torch.zeros(1, *self._shape, device="cpu"), observation_space)
        _, channels, height, width = example.shape
        self.trunk = image_trunk(channels, height, width, hidden, self.generator)
        self.actor = linear(hidden, self.distribution.size, 0.01, self.generator)
        self.critic: nn.Linear = linear(hidden, 1, 1.0, self.generator)

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is uint8 ``[N, *]``."""
        features = self._features(torch.from_numpy(np.asarray(observation)))
        return self.choose(self.actor(features), action_mask, deterministic)

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`."""
        features = self._features(observation)
        return NetworkStep(self.actor(features), self.critic(features).squeeze(-1))

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
        images = channels_first(flat_batch, self.observation_space)
        # Convolutions on a CPU are faster with channels last in memory.
        images = images.to(torch.float32, memory_format=torch.channels_last) / self.brightest
        return self.trunk(images).view(*batch_shape, self.hidden)
