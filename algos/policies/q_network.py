"""`QPolicy`: a Q-network with an ε-greedy policy."""

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.images import warn_of_flat_pixels
from algos.policies.distributions import Categorical
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step
from algos.policies.towers import tower, widths
from algos.storage.onnx_export import NetworkStep


class QPolicy(ControlPolicy):
    """ReLU network for Q(s, a) of every action, trained by `algos.dqn.DQN`.

    The action distribution is ε-greedy: 1 - ε on the best action, plus ε spread over all (Sutton and Barto 2018, §2.2).
    The state value is the Q-value of the best action.

    Args:
        action_space: space of one environment, ``Discrete(n)``.
        hidden: width of each hidden layer.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind.

    Example:
        >>> policy = QPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> policy.action_values(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    trained_by_values = True
    distribution: Categorical

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (256, 256),
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=False, seed=seed)
        warn_of_flat_pixels(observation_space, "QPolicy")
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(
                f"action_space is {action_space}, but QPolicy needs a Discrete(n): use PPO, or SAC or TD3 for a Box"
            )
        self.distribution = Categorical(action_space)
        self.hidden = widths(hidden)
        self.network = tower(
            self.input_size, self.hidden, self.distribution.size, gain=1.0, generator=self.generator,
            activation=nn.ReLU,
        )  # fmt: skip
        self.exploration = 0.0
        """ε, the probability of drawing the action uniformly from all."""

    def action_values(self, observation: Tensor) -> Tensor:
        """Q(s, a) of every action: ``[*batch, *]`` to float32 ``[*batch, n]``."""
        return self.network(self.read(observation))

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        q_values = self.action_values(torch.from_numpy(self._flatten(observation)))
        log_probs = self._log_probs(q_values, action_mask)
        return self.choose(log_probs, action_mask, deterministic)

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`; the output are the Q-values."""
        q_values = self.action_values(observation)
        return NetworkStep(q_values, _best_value(q_values, None))

    def named_parts(self, output: Tensor) -> dict[str, Tensor]:
        """See `ControlPolicy.named_parts`: ``q_values`` ``[N, n]``."""
        return {"q_values": output}

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        action_mask = rollout.get("action_mask", None)
        q_values = self.action_values(rollout["observation"])
        log_probs = self._log_probs(q_values, action_mask)
        log_prob, entropy = self.distribution.score(log_probs, rollout["action"], action_mask)
        value = _best_value(q_values, action_mask)
        return Evaluation(log_prob, entropy, value)

    def output(self, rollout: TensorDict) -> Tensor:
        """Log-probabilities of all actions, ``[*, n]``."""
        q_values = self.action_values(rollout["observation"])
        return self._log_probs(q_values, rollout.get("action_mask", None))

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        q_values = self.action_values(rollout["observation"])
        next_q_values = self.action_values(rollout["next_observation"])
        value = _best_value(q_values, rollout.get("action_mask", None))
        next_value = _best_value(next_q_values, rollout.get("next_action_mask", None))
        return value, next_value

    def fork(self) -> Self:
        """See `Policy.fork`; the copy is greedy."""
        player = super().fork()
        player.exploration = 0.0
        return player

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """See `Policy.value_parameters`; empty, because the Q-values also determine the actions."""
        return iter(())

    def _log_probs(self, q_values: Tensor, action_mask: Tensor | None) -> Tensor:
        """Log-probabilities ``[*, n]`` of the ε-greedy distribution over the allowed actions."""
        if action_mask is None:
            allowed = torch.ones_like(q_values, dtype=torch.bool)
        else:
            allowed = action_mask.to(q_values.device)
        lowest = torch.finfo(q_values.dtype).min
        best_action = q_values.masked_fill(~allowed, lowest).argmax(-1, keepdim=True)

        # ε is spread over the allowed actions; the best one gets 1 - ε besides
        uniform = self.exploration * allowed / allowed.sum(-1, keepdim=True)
        greedy = torch.full_like(uniform, 1 - self.exploration)
        probability = uniform.scatter_add(-1, best_action, greedy)
        return probability.log().clamp(min=lowest)


def _best_value(q_values: Tensor, action_mask: Tensor | None) -> Tensor:
    """Q-value of the best allowed action, ``[*, n]`` to ``[*]``."""
    if action_mask is not None:
        q_values = q_values.masked_fill(~action_mask, -torch.inf)
    return q_values.max(-1).values
