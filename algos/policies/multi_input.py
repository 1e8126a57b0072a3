"""`MultiInputPolicy`: actor and critic on features of several images and vectors at once."""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from algos.envs.images import has_images
from algos.policies.cnn import MAX_IMAGES_AT_ONCE
from algos.policies.distributions import action_distribution
from algos.policies.layers import CombinedEncoder
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step
from algos.policies.towers import tower, widths
from algos.storage.onnx_export import NetworkStep
from textenv.envs.limits import check_at_least


class MultiInputPolicy(ControlPolicy):
    """The network of Stable-Baselines3's policy of this name, for a Dict or Tuple with images in it.

    Each image goes through convolutions of its own. Their features and all other numbers, side by side, are the input
    of two tanh networks, actor and critic, as those of `MLPPolicy`. Images are uint8, in the rollout too
    (`algos.envs.flatten`), and are divided by the largest pixel of their space (255); their channels are the first or
    the last, see `CNNPolicy`.

    Args:
        observation_space: space of one environment, with at least one image.
        hidden: width of each hidden layer of actor and critic.
        image_features: length of the features of each image.
        normalize_observations: normalize all numbers but the pixels; see `ControlPolicy`.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind, or without images.

    Example:
        >>> camera = spaces.Box(0, 255, (16, 16, 3), "uint8")
        >>> space = spaces.Dict({"camera": camera, "joints": spaces.Box(-1, 1, (4,))})
        >>> policy = MultiInputPolicy(space, spaces.Discrete(2))
        >>> policy.act({"camera": camera.sample()[None], "joints": space["joints"].sample()[None]}).action.shape
        torch.Size([1])
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (64, 64),
        image_features: int = 256,
        normalize_observations: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=normalize_observations, seed=seed)
        if not has_images(observation_space):
            raise ValueError(
                f"observation_space is {observation_space}, in which MultiInputPolicy finds no image, expected a uint8 "
                "Box of 2 or 3 dimensions among its parts: do not rescale pixels, or use MLPPolicy"
            )
        self.hidden = widths(hidden)
        check_at_least("image_features", image_features, 1)
        self.image_features = image_features
        self.distribution = action_distribution(action_space)

        # The encoder's weights are drawn first, then the actor's
        self.encoder = CombinedEncoder(observation_space, image_features=image_features, generator=self.generator)
        if normalize_observations:
            self.normalizer = self.encoder.normalizer()
        num_outputs = self.distribution.size
        self.actor = tower(self.encoder.size, self.hidden, num_outputs, gain=0.01, generator=self.generator)
        self.critic = tower(self.encoder.size, self.hidden, 1, gain=1.0, generator=self.generator)

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observations of an environment, or flat ones ``[N, *]``."""
        features = self.features(torch.from_numpy(self._flatten(observation)))
        return self.choose(self.actor(features), action_mask, deterministic)

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`."""
        features = self.encoder(self.read(observation))  # all at once: the number of chunks would be fixed in a file
        return NetworkStep(self.actor(features), self.critic(features).squeeze(-1))

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        features = self.features(rollout["observation"])
        return self.evaluation(rollout, self.actor(features), self.critic(features))

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[*, size]``."""
        return self.actor(self.features(rollout["observation"]))

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of observations ``[*batch, *]``."""
        return self.critic(self.features(observation)).squeeze(-1)

    def arguments(self) -> dict[str, Any]:
        """See `ControlPolicy.arguments`."""
        return super().arguments() | {"image_features": self.image_features}

    def features(self, observation: Tensor) -> Tensor:
        """Features ``[*batch, size]`` of observations ``[*batch, *]``, computed in chunks."""
        batch_shape = observation.shape[: observation.ndim - len(self._shape)]
        rows = observation.reshape(-1, *observation.shape[len(batch_shape) :])
        features = []
        for chunk in rows.split(MAX_IMAGES_AT_ONCE):
            features.append(self.encoder(self.read(chunk)))
        return torch.cat(features).view(*batch_shape, self.encoder.size)
