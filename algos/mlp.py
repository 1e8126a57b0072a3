"""`MLPPolicy`: actor and critic as two multilayer perceptrons, for Discrete and Box actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.policy import Observation, Step
from textenv.rollout import Evaluation

LOG_2PI = math.log(2 * math.pi)


class MLPPolicy(nn.Module):
    """Two towers with tanh: logits (Discrete) or a mean with a free log standard deviation (Box), and a value.

    Initialisation is orthogonal with gain √2, .01 for the actor's output and 1 for the critic's (Engstrom et al.
    2020, "Implementation matters in deep policy gradients"; Huang et al. 2022, "The 37 implementation details").

    Args:
        observation_space: of one environment, a Box.
        action_space: of one environment, Discrete (from 0) or Box.
        hidden: width of each hidden layer.
        seed: of the initial weights and of the sampled actions.

    Raises:
        ValueError: on another kind of space.

    Example:
        >>> policy = MLPPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> policy.act(np.zeros((3, 4), dtype=np.float32)).action.shape
        torch.Size([3])
    """

    sequential = False

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (64, 64),
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_spaces(observation_space, action_space)
        observation_shape: tuple[int, ...] = observation_space.shape or ()
        self.observation_space, self.action_space, self.hidden = observation_space, action_space, tuple(hidden)
        self.discrete = isinstance(action_space, spaces.Discrete)
        size = math.prod(observation_shape)
        outputs = (
            int(action_space.n) if isinstance(action_space, spaces.Discrete) else math.prod(action_space.shape or ())
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.actor = _tower(size, self.hidden, outputs, gain=0.01, generator=self.generator)
        self.critic = _tower(size, self.hidden, 1, gain=1.0, generator=self.generator)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(outputs))

    @property
    def num_actions(self) -> int | None:
        """Actions to choose from; None for a Box."""
        return int(self.action_space.n) if isinstance(self.action_space, spaces.Discrete) else None

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        output = self.actor(self._flat(torch.as_tensor(observation)))
        if not self.discrete:
            noise = torch.zeros_like(output) if deterministic else self._normal(output.shape)
            action = output + self.log_std.exp() * noise
            return Step(action.view(len(output), *self._action_shape), self._gaussian(output, action)[0])
        logits = output if action_mask is None else output.masked_fill(~action_mask, torch.finfo(output.dtype).min)
        log_probs = logits.log_softmax(-1)
        # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of their softmax.
        chosen = log_probs if deterministic else log_probs - self._exponential(log_probs.shape).log()
        action = chosen.argmax(-1)
        return Step(action, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1))

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Nothing is remembered."""

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        observation = self._flat(rollout["observation"])
        output, action = self.actor(observation), rollout["action"]
        value = self.critic(observation).squeeze(-1)
        if not self.discrete:
            log_prob, entropy = self._gaussian(output, action.reshape(output.shape))
            return Evaluation(log_prob, entropy.expand(log_prob.shape), value)
        if "action_mask" in rollout.keys():
            output = output.masked_fill(~rollout["action_mask"], torch.finfo(output.dtype).min)
        log_probs = output.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, value)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        value = self.critic(self._flat(rollout["observation"])).squeeze(-1)
        following = torch.cat([value[:, 1:], value[:, -1:]], dim=1)
        # The next row's observation is the successor, but where an episode was cut or the rollout ends.
        cut = rollout["truncated"] | rollout["terminated"]
        cut[:, -1] = True
        following[cut] = self.critic(self._flat(rollout["next_observation"][cut])).squeeze(-1)
        return value, following

    def save(self, folder: Path) -> dict[str, Any]:
        """See `Policy.save`."""
        from safetensors.torch import save_model

        save_model(self, str(folder / "policy.safetensors"))
        action = self.action_space
        kind = {"n": int(action.n)} if isinstance(action, spaces.Discrete) else {"shape": list(action.shape or ())}
        return {
            "observation_shape": list(self.observation_space.shape or ()),
            "action": kind,
            "hidden": list(self.hidden),
        }

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> MLPPolicy:
        """Rebuild what `save` wrote."""
        from safetensors.torch import load_model

        action = saved["action"]
        action_space = spaces.Discrete(action["n"]) if "n" in action else _unbounded(action["shape"])
        policy = cls(_unbounded(saved["observation_shape"]), action_space, hidden=saved["hidden"])
        load_model(policy, str(folder / "policy.safetensors"))
        return policy

    @property
    def _action_shape(self) -> tuple[int, ...]:
        return self.action_space.shape or ()

    def _flat(self, observation: Tensor) -> Tensor:
        """Flatten the observation's own dimensions, whatever stands before them."""
        shape = self.observation_space.shape or ()
        if len(shape) != 1:
            observation = observation.reshape(*observation.shape[: observation.ndim - len(shape)], -1)
        return observation.to(torch.float32)

    def _gaussian(self, mean: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        standard = (action - mean) * (-self.log_std).exp()
        log_prob = -(0.5 * standard.square() + self.log_std + 0.5 * LOG_2PI).sum(-1)
        return log_prob, (self.log_std + 0.5 * (LOG_2PI + 1)).sum()

    def _normal(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _exponential(self, shape: torch.Size) -> Tensor:
        return torch.empty(shape).exponential_(generator=self.generator)


def _tower(size: int, hidden: Sequence[int], outputs: int, *, gain: float, generator: torch.Generator) -> nn.Sequential:
    widths = [size, *hidden]
    layers: list[nn.Module] = []
    for before, after in zip(widths[:-1], widths[1:], strict=True):
        layers += [_linear(before, after, math.sqrt(2), generator), nn.Tanh()]
    return nn.Sequential(*layers, _linear(widths[-1], outputs, gain, generator))


def _linear(before: int, after: int, gain: float, generator: torch.Generator) -> nn.Linear:
    # Created without values: nn.Linear's own initialisation would draw from the global generator.
    layer = nn.utils.skip_init(nn.Linear, before, after)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _unbounded(shape: Sequence[int]) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, tuple(shape), np.float32)


def _check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> None:
    if not isinstance(observation_space, spaces.Box):
        raise ValueError(f"observation_space is {observation_space}, MLPPolicy reads a Box: wrap the environment")
    if isinstance(action_space, spaces.Discrete) and action_space.start != 0:
        raise ValueError(f"action_space starts at {action_space.start}, expected Discrete(n) from 0")
    if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
        raise ValueError(f"action_space is {action_space}, MLPPolicy chooses from Discrete or Box")
