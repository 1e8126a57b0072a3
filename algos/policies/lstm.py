"""`LSTMPolicy`: a recurrent policy for partially observed environments."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from algos.policies.distributions import action_distribution
from algos.policies.layers import SQRT_2, linear, lstm
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step, check_same_kind


class _Segments(NamedTuple):
    """Segments of a rollout's rows, split at episode starts: the LSTM reads each one without a reset."""

    lengths: Tensor
    """int64 ``[S]``; the segments are consecutive in the rollout's True entries."""
    state: Tensor
    """``[S, 2, hidden]``: state before each segment, as recorded at the row's start, or 0 at an episode's start."""

    def entries(self) -> Tensor:
        """Bool ``[S, L]``: False on padding."""
        longest = int(self.lengths.max())
        return torch.arange(longest, device=self.lengths.device) < self.lengths[:, None]


class LSTMPolicy(ControlPolicy):
    """Linear encoder with tanh and an LSTM, both shared by a linear actor and a linear critic.

    The state is one tensor ``[N, 2, hidden]``: the LSTM's output and its cell state. Minibatches consist of whole rows:
    `evaluate` starts from the state recorded at the start of the row and back-propagates through the row, or to the
    start of an episode within it. A `reference` does the same, so in a row that starts mid-episode both start from the
    policy's recorded state. Initialization as in `MLPPolicy`.

    Args:
        hidden: width of encoder and LSTM.
        others: see `ControlPolicy`.

    Raises:
        ValueError: if a space is of an unsupported kind; when acting, if the number of slots changes without a reset.

    Example:
        >>> policy = LSTMPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), hidden=8)
        >>> policy.act(np.zeros((3, 4), dtype=np.float32)).state.shape
        torch.Size([3, 2, 8])
    """

    sequential = True

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: int = 64,
        normalize_observations: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=normalize_observations, seed=seed)
        self.hidden, size = hidden, self.input_size
        self.distribution = action_distribution(action_space)
        self.encoder = nn.Sequential(linear(size, hidden, SQRT_2, self.generator), nn.Tanh())
        self.lstm = lstm(hidden, hidden, self.generator)
        self.actor = linear(hidden, self.distribution.size, 0.01, self.generator)
        self.critic: nn.Linear = linear(hidden, 1, 1.0, self.generator)

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        features = self._encode(torch.from_numpy(self._flatten(observation)))
        before = self.memory.get("state", features.new_zeros(len(features), 2, self.hidden)).to(features)
        _check_slots(len(features), len(before))
        _, after = self.lstm(features.unsqueeze(1), _pair(before))
        self.memory["state"] = state = torch.cat(after).transpose(0, 1)
        return self.choose(self.actor(state[:, 0]), action_mask, deterministic)._replace(state=before)

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Clear the state of these slots (bool ``[N]``), or of all."""
        super().reset(rows, seeds=seeds)
        if rows is None:
            self.memory.clear()
        elif self.memory:
            state = self.memory["state"]
            _check_slots(len(rows), len(state))
            self.memory["state"] = torch.where(torch.from_numpy(rows).to(state.device)[:, None, None], 0.0, state)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; rows ``[B, T]``. False entries (even NaN) are ignored and give 0."""
        mask, hidden = rollout["mask"], self._remembered(rollout)
        action_mask = rollout.get("action_mask", None)
        log_prob, entropy = self.distribution.score(
            self.actor(hidden), rollout["action"][mask], None if action_mask is None else action_mask[mask]
        )
        return Evaluation(*(_scatter(x, mask) for x in (log_prob, entropy, self.critic(hidden).squeeze(-1))))

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[B, T, size]``; 0 at False entries."""
        output, mask = self.actor(self._remembered(rollout)), rollout["mask"]
        return _scatter(output, mask[..., None].expand(*mask.shape, output.shape[-1]))

    def divergence(self, rollout: TensorDict, other: Self) -> Tensor:
        """See `Policy.divergence`; rows ``[B, T]``, 0 at False entries."""
        check_same_kind(self, other)
        mask, action_mask = rollout["mask"], rollout.get("action_mask", None)
        with torch.no_grad():
            theirs = other.actor(other._remembered(rollout))
        kl = self.distribution.divergence(
            self.actor(self._remembered(rollout)),
            theirs,
            other=other.distribution,
            action_mask=None if action_mask is None else action_mask[mask],
        )
        return _scatter(kl, mask)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`; at the end of a segment the LSTM takes one more step, on the final observation."""
        mask, stretches = rollout["mask"], _stretches(rollout)
        if not mask.any():
            nothing = torch.zeros(mask.shape, device=mask.device)
            return nothing, nothing.clone()
        features = self._encode(rollout["observation"][mask]).split(stretches.lengths.tolist())
        final = self._encode(rollout["next_observation"][mask][stretches.lengths.cumsum(0) - 1])
        longer = [torch.cat([part, end[None]]) for part, end in zip(features, final, strict=True)]
        value = self.critic(self._unroll(longer, stretches)).squeeze(-1)
        entries = stretches.entries()
        return _scatter(value[:, :-1][entries], mask), _scatter(value[:, 1:][entries], mask)

    def _remembered(self, rollout: TensorDict) -> Tensor:
        """LSTM outputs ``[m, hidden]`` at the True entries."""
        stretches = _stretches(rollout)
        observation = rollout["observation"][rollout["mask"]]
        hidden = self._unroll(self._encode(observation).split(stretches.lengths.tolist()), stretches)
        return hidden[stretches.entries()]

    def _unroll(self, features: Sequence[Tensor], stretches: _Segments) -> Tensor:
        """LSTM outputs ``[S, L, hidden]`` of a batch of S segments, padded on the right."""
        return self.lstm(pad_sequence(list(features), batch_first=True), _pair(stretches.state))[0]

    def _encode(self, observation: Tensor) -> Tensor:
        """LSTM input: flat, float32, normalized, encoded."""
        return self.encoder(self.read(observation.to(self.critic.weight)))


def _check_slots(observed: int, remembered: int) -> None:
    """Raise a ValueError if the recurrent state is that of another number of slots."""
    if observed != remembered:
        raise ValueError(
            f"the observation has {observed} slots, but the state has {remembered}: call reset() before acting in "
            "another environment, or use algos.evaluate, which restores the state"
        )


def _stretches(rollout: TensorDict) -> _Segments:
    mask, is_init = rollout["mask"], rollout["is_init"]
    begins = mask & (is_init | (mask.cumsum(1) == 1))
    lengths = begins[mask].nonzero()[:, 0].diff(append=mask.sum()[None])
    return _Segments(lengths, torch.where(is_init[begins][:, None, None], 0.0, rollout["state"][begins]))


def _pair(state: Tensor) -> tuple[Tensor, Tensor]:
    """Split a state ``[N, 2, hidden]`` for `torch.nn.LSTM`: output and cell state, ``[1, N, hidden]`` each."""
    return state[None, :, 0].contiguous(), state[None, :, 1].contiguous()


def _scatter(x: Tensor, mask: Tensor) -> Tensor:
    """Scatter values of the True entries to their places in ``[B, T]``; 0 elsewhere."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)
