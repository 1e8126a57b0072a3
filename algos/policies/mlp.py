"""`MLPPolicy`: actor and critic as two multilayer perceptrons."""

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from algos.envs.images import warn_of_flat_pixels
from algos.policies import towers
from algos.policies.distributions import action_distribution
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step, read_array
from algos.storage.onnx_export import NetworkStep


class MLPPolicy(ControlPolicy):
    """Two tanh networks: an actor for the action distribution (logits or mean), and a critic for the value.

    Initialization is orthogonal with gain √2, 0.01 for the actor's output layer and 1 for the critic's (Engstrom et al.
    2020, "Implementation matters in deep policy gradients"; Huang et al. 2022, "The 37 implementation details").

    Args:
        hidden: width of each hidden layer.
        log_std_init: for Box actions, the initial log standard deviation.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind.

    Example:
        >>> policy = MLPPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> policy.act(np.zeros((3, 4), dtype=np.float32)).action.shape
        torch.Size([3])
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (64, 64),
        normalize_observations: bool = False,
        log_std_init: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=normalize_observations, seed=seed)
        warn_of_flat_pixels(observation_space, "MLPPolicy")
        self.hidden = towers.widths(hidden)
        self.distribution = action_distribution(action_space)

        # The actor's weights are drawn first
        num_outputs = self.distribution.size
        self.actor = towers.tower(self.input_size, self.hidden, num_outputs, gain=0.01, generator=self.generator)
        self.critic = towers.tower(self.input_size, self.hidden, 1, gain=1.0, generator=self.generator)
        if log_std_init != 0:
            if not isinstance(action_space, spaces.Box):
                raise ValueError(f"action_space is {action_space}, but only a Box has a log_std: omit log_std_init")
            self.log_std.data.fill_(log_std_init)

    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        # Most observations need no conversion, unless a subclass or an object reads them in its own way
        network_input = self._flatten(observation)
        is_ready = network_input.dtype == np.float32 and len(self._shape) == 1 and self.normalizer is None
        if not is_ready or getattr(self.read, "__func__", None) is not ControlPolicy.read:
            network_input = read_array(self, network_input)
        output = towers.act(network_input, self.actor)
        return self.choose(output, action_mask, deterministic)

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`."""
        network_input = self.read(observation)
        return NetworkStep(self.actor(network_input), self.critic(network_input).squeeze(-1))

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        observation = self.read(rollout["observation"])
        output, value = towers.actor_and_critic(observation, self.actor, self.critic)
        return self.evaluation(rollout, output, value)

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[*, size]``."""
        return self.actor(self.read(rollout["observation"]))

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of observations ``[*batch, *]``."""
        return towers.value(self.read(observation), self.critic).squeeze(-1)
