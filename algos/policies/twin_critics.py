"""`SACPolicy` and `TD3Policy`: an actor for Box actions with bounds, and two critics; the lower Q(s, a) counts."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.images import has_images
from algos.policies.distributions import NoisyAction, SquashedGaussian
from algos.policies.layers import CombinedEncoder, draw_uniformly
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step
from algos.policies.towers import tower, widths
from algos.storage.onnx_export import NetworkStep
from textenv.acceleration import accelerated
from textenv.envs.limits import check_at_least

RELATIVE_TOLERANCE = 1e-5
"""Largest difference of bounds of actions that counts as rounding beside that to float32, as a part of their range."""


class TwinCritics(nn.Module):
    """Two ReLU networks for Q(s, a) with weights of their own, computed together: each layer is one batched product.

    Args:
        observation_size: length of an observation.
        action_size: length of an action.
        hidden: width of each hidden layer.
        generator: generator of the initial weights.
        encoder: reads the observations first, for both critics, and returns ``observation_size`` features.

    Example:
        >>> critics = TwinCritics(3, 1, (8,), torch.Generator())
        >>> critics(torch.zeros(5, 3), torch.zeros(5, 1)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        hidden: Sequence[int],
        generator: torch.Generator,
        encoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        input_size = observation_size + action_size
        towers = [relu_tower(input_size, hidden, 1, generator) for _ in range(2)]
        first, second = ([layer for layer in layers if isinstance(layer, nn.Linear)] for layers in towers)
        self.weights = nn.ParameterList()
        """For each hidden layer ``[2, inputs, outputs]``, and for the output ``[2, inputs]``."""
        self.biases = nn.ParameterList()
        """For each hidden layer ``[2, 1, outputs]``, and for the output ``[2, 1]``."""
        for one, other_one in zip(first[:-1], second[:-1], strict=True):
            self.weights.append(nn.Parameter(torch.stack([one.weight.T, other_one.weight.T]).detach()))
            self.biases.append(nn.Parameter(torch.stack([one.bias, other_one.bias]).unsqueeze(1).detach()))
        self.weights.append(nn.Parameter(torch.cat([first[-1].weight, second[-1].weight]).detach()))
        self.biases.append(nn.Parameter(torch.stack([first[-1].bias, second[-1].bias]).detach()))

    def forward(self, observation: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Values of both critics: observations ``[*, s]`` and scaled actions ``[*, a]`` to ``[2, *]``.

        With ``frozen``, the gradient is that of the action alone, which saves computing that of the weights.
        """
        inputs = self._inputs(observation, action, frozen=frozen)
        batch_shape = inputs.shape[:-1]
        weights: list[Tensor] = list(self.weights)
        biases: list[Tensor] = list(self.biases)
        if frozen:
            weights = [weight.detach() for weight in weights]
            biases = [bias.detach() for bias in biases]
        return twin_values(inputs.reshape(-1, inputs.shape[-1]), weights, biases).reshape(2, *batch_shape)

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """Values of the first critic alone: ``[*, s]`` and ``[*, a]`` to ``[*]``; the encoder gets no gradient."""
        x = self._inputs(observation, action, frozen=True)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = (x @ weight[0] + bias[0]).relu_()
        return x @ self.weights[-1][0] + self.biases[-1][0]

    def _inputs(self, observation: Tensor, action: Tensor, *, frozen: bool) -> Tensor:
        """Features and actions side by side; with ``frozen``, the encoder gets no gradient."""
        if self.encoder is not None:
            needs_gradient = torch.is_grad_enabled() and not frozen
            with torch.set_grad_enabled(needs_gradient):
                observation = self.encoder(observation)
        return torch.cat([observation, action], dim=-1)


@accelerated("algos.fast.critics:twin_values", "f09ef4e00eaa")
def twin_values(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Values ``[2, n]`` of both critics.

    Args:
        rows: observations with actions, ``[n, inputs]``.
        weights, biases: see `TwinCritics`.
    """
    x = rows.expand(2, *rows.shape)
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = torch.baddbmm(bias, x, weight).relu_()  # in place: no gradient needs the sum before it
    # A product with a single column is faster as a sum
    return (x * weights[-1].unsqueeze(1)).sum(-1) + biases[-1]


def relu_tower(size: int, hidden: Sequence[int], outputs: int, generator: torch.Generator) -> nn.Sequential:
    """Make an MLP with ReLU and `draw_uniformly`'s weights, ``[*, size]`` to ``[*, outputs]``."""
    network = tower(size, hidden, outputs, gain=1.0, generator=generator, activation=nn.ReLU)
    draw_uniformly(network, generator)
    return network


class TwinCriticPolicy(ControlPolicy):
    """ReLU actor for bounded Box actions, and twin critics; `SACPolicy` and `TD3Policy` differ in the distribution.

    The state value is the lower Q-value of the deterministic action. Images, alone or among other observations, go
    through convolutions (`algos.policies.layers.CombinedEncoder`): those of the actor, and others for both critics.
    Weights begin uniform (`algos.policies.layers.draw_uniformly`).

    Args:
        action_space: space of one environment, a ``Box`` of floats with bounds.
        hidden: width of each hidden layer.
        image_features: length of the features of each image; ignored without images.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind.
    """

    trained_by_values = True
    distribution: SquashedGaussian | NoisyAction
    distribution_type: type[SquashedGaussian] | type[NoisyAction]
    """Class of the action distribution."""
    critic: TwinCritics
    hidden: tuple[int, ...]

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (256, 256),
        image_features: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=False, seed=seed)
        self.hidden = widths(hidden)
        self.image_features = image_features

        # Actor, then critics
        encoder = self._make_encoder()
        if encoder is None:
            num_features = self.input_size
            self.actor: nn.Module = self._make_actor(num_features)
        else:
            num_features = encoder.size
            self.actor = nn.Sequential(encoder, self._make_actor(num_features))
        num_actions = self.distribution.bounds.size
        self.critic = TwinCritics(num_features, num_actions, self.hidden, self.generator, self._make_encoder())

    def _make_encoder(self) -> CombinedEncoder | None:
        """Make an encoder of observations; None if there are no images among them."""
        if not has_images(self.observation_space):
            return None
        check_at_least("image_features", self.image_features, 1)
        encoder = CombinedEncoder(self.observation_space, image_features=self.image_features, generator=self.generator)
        draw_uniformly(encoder, self.generator)
        return encoder

    def _make_actor(self, num_features: int) -> nn.Module:
        """Make the actor, whose input has ``num_features`` numbers, and the distribution that its outputs describe."""
        self.distribution = self.distribution_type(self.action_space)
        return relu_tower(num_features, self.hidden, self.distribution.size, self.generator)

    def check_environment(self, env: VectorEnv) -> None:
        """See `Policy.check_environment`: the bounds of actions must be those that the policy scales its actions to."""
        policy_space = self.action_space
        env_space = env.single_action_space
        assert isinstance(policy_space, spaces.Box)
        assert isinstance(env_space, spaces.Box)
        as_given = np.stack([env_space.low, env_space.high])
        as_trained = np.stack([policy_space.low, policy_space.high])
        in_float32 = np.spacing(np.abs(as_trained).max(0).astype(np.float32))
        tolerance = RELATIVE_TOLERANCE * (policy_space.high - policy_space.low) + in_float32
        if (np.abs(as_given - as_trained) > tolerance).any():
            raise ValueError(
                f"the {type(self).__name__} scales its actions to the bounds of {policy_space}, but the environment "
                f"takes {env_space}: make it from env.single_action_space, or wrap the environment as in its training "
                "(gymnasium.wrappers.vector.RescaleAction)"
            )

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        output = self.actor(self.read(observation))
        return self.choose(output, action_mask, deterministic)

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`."""
        network_input = self.read(observation)
        output = self.actor(network_input)
        return NetworkStep(output, self._value(network_input, output))

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        observation = self.read(rollout["observation"])
        output = self.actor(observation)
        value = self._value(observation, output)
        return self.evaluation(rollout, output, value.unsqueeze(-1))

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[*, size]``."""
        return self.actor(self.read(rollout["observation"]))

    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of observations ``[*batch, *]``."""
        network_input = self.read(observation)
        return self._value(network_input, self.actor(network_input))

    def arguments(self) -> dict[str, Any]:
        """See `ControlPolicy.arguments`."""
        arguments = super().arguments()
        if has_images(self.observation_space):
            arguments["image_features"] = self.image_features
        return arguments

    def fork(self) -> Self:
        """See `Policy.fork`; the copy does not explore."""
        player = super().fork()
        player.__dict__["_modules"] = dict(self._modules)  # of its own, so that this policy keeps its distribution
        player.distribution = copy.copy(self.distribution)
        player.distribution.uniform = False
        if isinstance(player.distribution, NoisyAction):
            player.distribution.noise = 0.0
        return player

    def _value(self, network_input: Tensor, output: Tensor) -> Tensor:
        """Lower Q-value of the deterministic action, ``[*]``, from what `read` and the actor return."""
        return self.critic(network_input, self.distribution.mode(output)).amin(0)


class SACPolicy(TwinCriticPolicy):
    """Policy of `algos.sac.SAC`: the action distribution is a squashed Gaussian. Arguments: see `TwinCriticPolicy`.

    Example:
        >>> policy = SACPolicy(spaces.Box(-1, 1, (4,)), spaces.Box(0, 2, (3,)))
        >>> policy.critic(torch.zeros(5, 4), torch.zeros(5, 3)).shape
        torch.Size([2, 5])
    """

    distribution: SquashedGaussian
    distribution_type = SquashedGaussian


class TD3Policy(TwinCriticPolicy):
    """Policy of `algos.td3.TD3`: deterministic, with noise while it explores. Arguments: see `TwinCriticPolicy`.

    Example:
        >>> policy = TD3Policy(spaces.Box(-1, 1, (4,)), spaces.Box(0, 2, (3,)))
        >>> policy.critic(torch.zeros(5, 4), torch.zeros(5, 3)).shape
        torch.Size([2, 5])
    """

    distribution: NoisyAction
    distribution_type = NoisyAction
    noise_correlation = 0.0
    """Correlation of the noise of a step with that of the next, see `algos.config.TD3Config`."""

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        distribution = self.distribution
        is_independent = not (distribution.noise and self.noise_correlation)
        if deterministic or is_independent or distribution.uniform or action_mask is not None:
            return super().act(observation, action_mask=action_mask, deterministic=deterministic)
        output = self.actor(self.read(observation))
        return Step(*distribution.explore(output, self._next_noise(len(output))))

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Let the noise of these slots (bool ``[N]``), or of all, begin anew; there is no other state."""
        super().reset(rows, seeds=seeds)
        if rows is None:
            self.memory.clear()
        elif self.memory:
            self.memory["begins"] = self.memory["begins"] | torch.from_numpy(rows)

    def _next_noise(self, slots: int) -> Tensor:
        """Standard normal noise of this step, ``[N, size]``, correlated with that of the step before.

        The policy's memory has it as ``noise``, and whether an episode ``begins``, bool ``[N]``.
        """
        generator = self.generator
        drawn = torch.randn(slots, self.distribution.size, generator=generator, device=generator.device)
        noise = drawn
        former = self.memory.get("noise")
        if former is not None and len(former) == slots:
            correlation = self.noise_correlation
            continued = correlation * former + math.sqrt(1 - correlation**2) * drawn
            noise = torch.where(self.memory["begins"].unsqueeze(-1), drawn, continued)
        self.memory["noise"] = noise
        self.memory["begins"] = torch.zeros(slots, dtype=torch.bool, device="cpu")
        return noise
