"""A promised number of episodes, and which slot plays which of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from textenv.envs.transcript import Transcript
from textenv.envs.turn import Turn

REFILLED = 1 / 8
"""Share of the slots that are free before they are filled again: one prompt takes as long to read as several."""


class EpisodeBatch:
    """Episodes that are played in slots, the next ones wherever slots are free.

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

    def release(self, rows: Sequence[int]) -> np.ndarray:
        """Leave the slots of these episodes idle, which are over; returns the slots (int64 indices)."""
        over = np.zeros(len(self.numbers) + 1, dtype=bool)  # one more, for slots that are idle: -1
        over[rows] = True
        slots = np.flatnonzero(over[self.episode])
        self.episode[slots] = -1
        return slots

    def refill(self) -> tuple[np.ndarray, np.ndarray]:
        """Give idle slots the next episodes, once enough of them are idle; returns the slots, and the rows to begin."""
        idle = np.flatnonzero(~self.running)
        few = len(idle) < REFILLED * len(self.episode) and len(idle) < len(self.episode)
        rows = np.arange(self._next, self._next if few else min(self._next + len(idle), len(self.numbers)))
        self._next += len(rows)
        slots = idle[: len(rows)]
        self.episode[slots] = rows
        return slots, rows

    def observe(self) -> dict[str, np.ndarray]:
        """Prefix of each slot; an idle one has length 0."""
        length = np.where(self.running, self.transcript.length[self.episode], 0)
        return {"tokens": self.transcript.tokens[self.episode], "length": length[:, None]}


def end_info(num_envs: int, over: Mapping[int, Turn], reasons: Sequence[str]) -> dict[str, Any]:
    """``end_reason``, ``prompt`` and ``completion`` of the slots whose episode is over, by its last turn."""
    if not over:
        return {}
    info = {name: np.full(num_envs, None, dtype=object) for name in ("end_reason", "prompt", "completion")}
    for slot, turn in over.items():
        info["end_reason"][slot] = reasons[slot]
        info["prompt"][slot], info["completion"][slot] = turn.prompt_text, turn.completion
    here = np.isin(np.arange(num_envs), list(over))
    return info | {f"_{name}": here.copy() for name in info}


def final_info(observation: Mapping[str, np.ndarray], done: np.ndarray, info: dict[str, Any]) -> dict[str, Any]:
    """What SAME_STEP mode says of the episodes that ended: as Gymnasium does, an object array with holes."""
    final = np.full(len(done), None, dtype=object)
    for slot in np.flatnonzero(done):
        final[slot] = {name: column[slot] for name, column in observation.items()}
    return {"final_obs": final, "_final_obs": done, "final_info": info, "_final_info": done.copy()}
