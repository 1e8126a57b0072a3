"""`QPolicy`: a Q-network with an ε-greedy policy."""

from collections.abc import Iterator, Sequence

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.policies.distributions import Categorical
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step
from algos.policies.towers import tower, widths


class QPolicy(ControlPolicy):
    """ReLU network for Q(s, a) of every action, trained by `algos.dqn.DQN`.

    Its distribution is ε-greedy: 1 - ε on the best action, plus ε spread over all (Sutton and Barto 2018, §2.2).
    Its value is the Q-value of the best action.

    Args:
        action_space: that of one environment, ``Discrete(n)``.
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
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"action_space is {action_space}, but QPolicy needs a Discrete(n): use PPO")
        self.distribution, self.hidden = Categorical(action_space), widths(hidden)
        self.network = tower(
            self.input_size, self.hidden, self.distribution.size, gain=1.0, generator=self.generator,
            activation=nn.ReLU,
        )  # fmt: skip
        self.exploration = 0.0
        """ε, the probability of an action drawn uniformly from all."""

    def action_values(self, observation: Tensor) -> Tensor:
        """Q(s, a) of every action: ``[*batch, *]`` to float32 ``[*batch, n]``."""
        return self.network(self.read(observation))

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        seen = torch.from_numpy(self._flatten(observation))
        log_probs = self._log_probs(self.action_values(seen), action_mask)
        return self.choose(log_probs, action_mask, deterministic)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        action_mask = rollout.get("action_mask", None)
        worth = self.action_values(rollout["observation"])
        log_prob, entropy = self.distribution.score(self._log_probs(worth, action_mask), rollout["action"], action_mask)
        return Evaluation(log_prob, entropy, _best(worth, action_mask))

    def output(self, rollout: TensorDict) -> Tensor:
        """Log-probabilities of all actions, ``[*, n]``."""
        return self._log_probs(self.action_values(rollout["observation"]), rollout.get("action_mask", None))

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        masks = (rollout.get(name, None) for name in ("action_mask", "next_action_mask"))
        worths = (self.action_values(rollout[name]) for name in ("observation", "next_observation"))
        value, following = (_best(worth, mask) for worth, mask in zip(worths, masks, strict=True))
        return value, following

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """See `Policy.value_parameters`; empty, because the Q-values also determine the actions."""
        return iter(())

    def _log_probs(self, worth: Tensor, action_mask: Tensor | None) -> Tensor:
        """Log-probabilities of the ε-greedy distribution over the allowed actions."""
        open_actions = torch.ones_like(worth, dtype=torch.bool) if action_mask is None else action_mask.to(worth.device)
        lowest = torch.finfo(worth.dtype).min
        best = worth.masked_fill(~open_actions, lowest).argmax(-1, keepdim=True)
        spread = self.exploration * open_actions / open_actions.sum(-1, keepdim=True)
        return spread.scatter_add(-1, best, torch.full_like(spread, 1 - self.exploration)).log().clamp(min=lowest)


def _best(worth: Tensor, action_mask: Tensor | None) -> Tensor:
    """Q-value of the best allowed action, ``[*, n]`` to ``[*]``."""
    return (worth if action_mask is None else worth.masked_fill(~action_mask, -torch.inf)).max(-1).values
