"""A fixed number of episodes, and their assignment to slots."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from textenv.envs.transcript import Transcript
from textenv.envs.turn import Turn

REFILLED = 1 / 8
"""Fraction of slots that must be idle before a refill: reading several prompts takes as long as reading one."""


class OpenTurn(NamedTuple):
    """A turn to generate as a whole, or what is left of it; see `TextVectorEnv.open_turns`."""

    row: int
    """Row of its episode in the next rollout."""
    prefix: list[int]
    """Token ids so far; the next token is chosen in column ``len(prefix) - 1``."""
    max_new_tokens: int
    """Maximum number of further tokens; 1 where a rule (``allowed``) decides about each token."""
    min_new_tokens: int
    """Number of further tokens before the turn may end."""
    allowed: list[int] | None
    """Ids that may be chosen; None: all."""


class EpisodeBatch:
    """Fixed number of episodes, one per row of the transcript, played in slots; idle slots get the next ones.

    ``numbers`` are the positions of the episodes' prompts in the prompt order.
    """

    def __init__(self, transcript: Transcript, numbers: Sequence[int], num_envs: int) -> None:
        self.transcript, self.numbers = transcript, numbers
        self.episode = np.full(num_envs, -1, dtype=np.int64)
        """int64 ``[num_envs]``: transcript row of each slot's episode, -1 in idle slots."""
        self._next = 0

    @property
    def running(self) -> np.ndarray:
        """Bool ``[num_envs]``: slots that are not idle."""
        return self.episode >= 0

    @property
    def open(self) -> np.ndarray:
        """int64 ``[num_envs]``: index of the mask for each slot's next token; 0 (all allowed) in idle slots."""
        return np.where(self.running, self.transcript.open[self.episode], 0)

    @property
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column, in the next rollout, of each running slot's next action."""
        episode = self.episode[self.running]
        return episode, self.transcript.length[episode] - 1

    @property
    def open_turns(self) -> list[OpenTurn]:
        """Current turn of each running slot; several share one list of allowed ids."""
        text, masks, found, allowed = self.transcript, self.transcript.masks, list[OpenTurn](), dict[int, Any]()
        for row in self.episode[self.running].tolist():
            at, mask, most, least = int(text.length[row]), int(text.open[row]), 1, 0
            if masks.rule is None:
                mask, most = min(mask, 1), int(text.turn_limit[row]) - at
                least = min(most, max(0, masks.min_new_tokens - at + int(text.turn_start[row])))
            if mask not in allowed:
                ids = masks.sets[mask]
                allowed[mask] = None if ids.all() else ids.nonzero().flatten().tolist()
            found.append(OpenTurn(row, text.tokens[row, :at].tolist(), most, least, allowed[mask]))
        return found

    def release(self, rows: Sequence[int]) -> np.ndarray:
        """Set the slots of these finished episodes idle; return the slots (int64 indices)."""
        over = np.zeros(len(self.numbers) + 1, dtype=bool)  # one extra entry, for idle slots (-1)
        over[rows] = True
        slots = np.flatnonzero(over[self.episode])
        self.episode[slots] = -1
        return slots

    def refill(self) -> tuple[np.ndarray, np.ndarray]:
        """Give idle slots the next episodes once enough slots are idle; return the slots and the rows to begin."""
        idle = np.flatnonzero(~self.running)
        few = len(idle) < REFILLED * len(self.episode) and len(idle) < len(self.episode)
        rows = np.arange(self._next, self._next if few else min(self._next + len(idle), len(self.numbers)))
        self._next += len(rows)
        slots = idle[: len(rows)]
        self.episode[slots] = rows
        return slots, rows

    def observe(self) -> dict[str, np.ndarray]:
        """Prefix of each slot; idle slots have length 0."""
        length = np.where(self.running, self.transcript.length[self.episode], 0)
        return {"tokens": self.transcript.tokens[self.episode], "length": length[:, None]}


def end_info(num_envs: int, over: Mapping[int, Turn], reasons: Sequence[str]) -> dict[str, Any]:
    """``end_reason``, ``prompt`` and ``completion`` of the slots whose episode ended, from its last turn."""
    if not over:
        return {}
    info = {name: np.full(num_envs, None, dtype=object) for name in ("end_reason", "prompt", "completion")}
    for slot, turn in over.items():
        info["end_reason"][slot] = reasons[slot]
        info["prompt"][slot], info["completion"][slot] = turn.prompt_text, turn.completion
    here = np.isin(np.arange(num_envs), list(over))
    return info | {f"_{name}": here.copy() for name in info}


def final_info(observation: Mapping[str, np.ndarray], done: np.ndarray, info: dict[str, Any]) -> dict[str, Any]:
    """Info of SAME_STEP mode: as in Gymnasium, ``final_obs`` is an object array, None where no episode ended."""
    final = np.full(len(done), None, dtype=object)
    for slot in np.flatnonzero(done):
        final[slot] = {name: column[slot] for name, column in observation.items()}
    return {"final_obs": final, "_final_obs": done, "final_info": info, "_final_info": done.copy()}
