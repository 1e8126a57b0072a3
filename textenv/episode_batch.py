"""A promised number of episodes, and which slot plays which of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from textenv.transcript import Transcript


class EpisodeBatch:
    """Episodes that are played in slots, the next one wherever a slot is free.

    Args:
        transcript: a row for each episode.
        numbers: place of each episode's prompt in the order of prompts.
        num_envs: slots.
    """

    def __init__(self, transcript: Transcript, numbers: Sequence[int], num_envs: int) -> None:
        self.transcript, self.numbers = transcript, numbers
        self.episode = np.full(num_envs, -1, dtype=np.int64)
        """Row of the transcript that each slot plays, -1 where it is idle."""
        self._next = 0

    @property
    def running(self) -> np.ndarray:
        """Bool ``[num_envs]``: slots that are not idle."""
        return self.episode >= 0

    @property
    def open(self) -> np.ndarray:
        """int64 ``[num_envs]``: the set of tokens allowed next in each slot; 0 (all) in idle ones."""
        return np.where(self.running, self.transcript.open[self.episode], 0)

    @property
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column in the coming rollout of the next action of each running slot."""
        episode = self.episode[self.running]
        return episode, self.transcript.length[episode] - 1

    def assign(self, slots: np.ndarray) -> np.ndarray:
        """Give these slots the next episodes, as long as there are any; returns the rows to begin."""
        rows = np.arange(self._next, min(self._next + len(slots), len(self.numbers)))
        self._next += len(rows)
        self.episode[slots] = -1
        self.episode[slots[: len(rows)]] = rows
        return rows

    def observe(self) -> dict[str, np.ndarray]:
        """Prefix of each slot; an idle one has length 0."""
        length = np.where(self.running, self.transcript.length[self.episode], 0)
        return {"tokens": self.transcript.tokens[self.episode], "length": length}
