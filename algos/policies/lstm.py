"""`LSTMPolicy`: a recurrent policy for partially observed environments."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from algos.envs.images import has_images, warn_of_flat_pixels
from algos.envs.spaces import restore_space
from algos.policies.cnn import MAX_IMAGES_AT_ONCE
from algos.policies.distributions import action_distribution
from algos.policies.layers import SQRT_2, CombinedEncoder, linear, lstm
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Step, check_same_kind
from algos.storage.onnx_export import NetworkStep


class _Segments(NamedTuple):
    """Segments of a rollout's rows, split at episode starts: the LSTM reads a segment without a reset."""

    lengths: Tensor
    """int64 ``[S]``: length of each segment. Segments are consecutive in the rollout's True entries."""
    state: Tensor
    """``[S, 2, hidden]``: state before each segment, as recorded at the row's start, or 0 at an episode's start."""

    def entries(self) -> Tensor:
        """Bool ``[S, L]``: False on padding."""
        max_length = int(self.lengths.max())
        steps = torch.arange(max_length, device=self.lengths.device)
        return steps < self.lengths[:, None]


class LSTMPolicy(ControlPolicy):
    """Linear encoder with tanh and an LSTM, both shared by a linear actor and a linear critic.

    The state is one tensor ``[N, 2, hidden]``: the LSTM's output and its cell state. Minibatches consist of whole rows:
    `evaluate` starts from the state recorded at the start of a row and back-propagates through the row, or to the
    start of an episode within it. A `reference` does the same: in a row that starts mid-episode it, too, starts from
    the policy's recorded state. Weights are initialized as in `MLPPolicy`. Images, alone or in a Dict or Tuple, go
    through convolutions before the linear encoder, as in `MultiInputPolicy`.

    Args:
        hidden: width of encoder and LSTM.
        image_features: length of the features of each image; without images it has no effect. None flattens images, as
            version 0.11 and earlier did, whose agents are loaded so.
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
        image_features: int | None = 256,
        normalize_observations: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=normalize_observations, seed=seed)
        self.hidden: int = hidden
        self.distribution = action_distribution(action_space)

        # Images first
        self.images: CombinedEncoder | None = None
        encoder_inputs = self.input_size
        if has_images(observation_space) and image_features is not None:
            self.images = CombinedEncoder(observation_space, image_features=image_features, generator=self.generator)
            encoder_inputs = self.images.size
            if normalize_observations:
                self.normalizer = self.images.normalizer()
        elif image_features is None:
            warn_of_flat_pixels(observation_space, "LSTMPolicy with image_features=None")
        self.image_features = image_features

        self.encoder = nn.Sequential(linear(encoder_inputs, hidden, SQRT_2, self.generator), nn.Tanh())
        self.lstm = lstm(hidden, hidden, self.generator)
        self.actor = linear(hidden, self.distribution.size, 0.01, self.generator)
        self.critic: nn.Linear = linear(hidden, 1, 1.0, self.generator)

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        features = self._encode(torch.from_numpy(self._flatten(observation)))
        slots = len(features)

        # One step of the LSTM, from the state of the last call
        state = self.memory.get("state")
        if state is None:
            state = features.new_zeros(slots, 2, self.hidden)
        state = state.to(features)
        _check_slots(slots, len(state))
        next_state = self._advance(features, state)
        self.memory["state"] = next_state

        # The action follows from the LSTM's output
        step = self.choose(self.actor(next_state[:, 0]), action_mask, deterministic)
        return step._replace(state=state)

    @property
    def initial_state(self) -> Tensor:
        """See `ControlPolicy.initial_state`."""
        return torch.zeros(2, self.hidden, device="cpu")

    def forward(self, observation: Tensor, state: Tensor | None = None) -> NetworkStep:
        """See `ControlPolicy.forward`."""
        if state is None:
            raise ValueError(f"state is None, expected the LSTM's state [N, 2, {self.hidden}]; at the start it is 0")
        next_state = self._advance(self._features(observation), state)
        hidden = next_state[:, 0]
        return NetworkStep(self.actor(hidden), self.critic(hidden).squeeze(-1), next_state)

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Clear the state of these slots (bool ``[N]``), or of all."""
        super().reset(rows, seeds=seeds)
        if rows is None:
            self.memory.clear()
        elif self.memory:
            state = self.memory["state"]
            _check_slots(len(rows), len(state))
            cleared = torch.from_numpy(rows).to(state.device)[:, None, None]
            self.memory["state"] = torch.where(cleared, 0.0, state)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; rows ``[B, T]``. False entries (even NaN) are ignored and give 0."""
        mask = rollout["mask"]
        hidden = self._hidden(rollout)
        action_mask = rollout.get("action_mask", None)
        if action_mask is not None:
            action_mask = action_mask[mask]
        log_prob, entropy = self.distribution.score(self.actor(hidden), rollout["action"][mask], action_mask)
        value = self.critic(hidden).squeeze(-1)
        return Evaluation(_scatter(log_prob, mask), _scatter(entropy, mask), _scatter(value, mask))

    def output(self, rollout: TensorDict) -> Tensor:
        """Network output that parameterizes a rollout's action distributions, ``[B, T, size]``; 0 at False entries."""
        output = self.actor(self._hidden(rollout))
        mask = rollout["mask"]
        return _scatter(output, mask[..., None].expand(*mask.shape, output.shape[-1]))

    def divergence(self, rollout: TensorDict, other: Self) -> Tensor:
        """See `Policy.divergence`; rows ``[B, T]``, 0 at False entries."""
        check_same_kind(self, other)
        mask = rollout["mask"]
        action_mask = rollout.get("action_mask", None)
        if action_mask is not None:
            action_mask = action_mask[mask]
        with torch.no_grad():
            other_output = other.actor(other._hidden(rollout))
        output = self.actor(self._hidden(rollout))
        kl = self.distribution.divergence(output, other_output, other=other.distribution, action_mask=action_mask)
        return _scatter(kl, mask)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`; at the end of a segment the LSTM takes one more step, on the final observation."""
        mask = rollout["mask"]
        segments = _segments(rollout)
        if not mask.any():
            zeros = torch.zeros(mask.shape, device=mask.device)
            return zeros, zeros.clone()

        # Append the final observation to each segment
        features = self._encode(rollout["observation"][mask]).split(segments.lengths.tolist())
        last_entries = segments.lengths.cumsum(0) - 1
        final_features = self._encode(rollout["next_observation"][mask][last_entries])
        extended = [torch.cat([part, final[None]]) for part, final in zip(features, final_features, strict=True)]

        # The value of a successor is the one at the next position
        value = self.critic(self._unroll(extended, segments)).squeeze(-1)  # [S, L + 1]
        entries = segments.entries()
        return _scatter(value[:, :-1][entries], mask), _scatter(value[:, 1:][entries], mask)

    def arguments(self) -> dict[str, Any]:
        """See `ControlPolicy.arguments`."""
        if not has_images(self.observation_space):
            return super().arguments()
        return super().arguments() | {"image_features": self.image_features}

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> Self:
        """See `ControlPolicy.load`; agents of version 0.11 and earlier flatten images."""
        takes_features = "image_features" in inspect.signature(cls).parameters
        if takes_features and has_images(restore_space(saved["observation"])):
            saved = {"image_features": None} | saved
        return super().load(folder, saved)

    def _hidden(self, rollout: TensorDict) -> Tensor:
        """LSTM outputs ``[m, hidden]`` at the m True entries."""
        segments = _segments(rollout)
        features = self._encode(rollout["observation"][rollout["mask"]])
        hidden = self._unroll(features.split(segments.lengths.tolist()), segments)
        return hidden[segments.entries()]

    def _unroll(self, features: Sequence[Tensor], segments: _Segments) -> Tensor:
        """LSTM outputs ``[S, L, hidden]`` of the features ``[length, hidden]`` of S segments, padded on the right."""
        padded = pad_sequence(list(features), batch_first=True)
        output, _ = self.lstm(padded, _split_state(segments.state))
        return output

    def _encode(self, observation: Tensor) -> Tensor:
        """LSTM input ``[n, hidden]`` of observations ``[n, *]``: flat, float32, normalized, encoded."""
        if self.images is None:
            return self._features(observation)
        # In chunks, which bounds the memory of convolutions
        return torch.cat([self._features(chunk) for chunk in observation.split(MAX_IMAGES_AT_ONCE)])

    def _features(self, observation: Tensor) -> Tensor:
        """LSTM input of observations, computed at once; see `_encode`."""
        network_input = self.read(observation)
        if self.images is not None:
            network_input = self.images(network_input)
        return self.encoder(network_input)

    def _advance(self, features: Tensor, state: Tensor) -> Tensor:
        """State ``[N, 2, hidden]`` after one step of the LSTM with these features ``[N, hidden]``."""
        _, output_and_cell = self.lstm(features.unsqueeze(1), _split_state(state))
        return torch.cat(output_and_cell).transpose(0, 1)


def _check_slots(observed: int, remembered: int) -> None:
    """Raise a ValueError if the recurrent state is that of another number of slots."""
    if observed != remembered:
        raise ValueError(
            f"the observation has {observed} slots, but the state has {remembered}: call reset() before acting in "
            "another environment, or use algos.evaluate, which restores the state"
        )


def _segments(rollout: TensorDict) -> _Segments:
    """Split the rows of a rollout into segments."""
    mask = rollout["mask"]
    is_init = rollout["is_init"]
    # A segment begins at an episode's start or at the first True entry of a row
    begins = mask & (is_init | (mask.cumsum(1) == 1))
    first_entries = begins[mask].nonzero()[:, 0]
    lengths = first_entries.diff(append=mask.sum()[None])
    starts_episode = is_init[begins][:, None, None]
    state = torch.where(starts_episode, 0.0, rollout["state"][begins])
    return _Segments(lengths, state)


def _split_state(state: Tensor) -> tuple[Tensor, Tensor]:
    """Split a state ``[N, 2, hidden]`` for `torch.nn.LSTM`: output and cell state, ``[1, N, hidden]`` each."""
    output = state[None, :, 0].contiguous()
    cell = state[None, :, 1].contiguous()
    return output, cell


def _scatter(x: Tensor, mask: Tensor) -> Tensor:
    """Scatter values of the True entries to their positions in ``[B, T]``; 0 elsewhere."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)
