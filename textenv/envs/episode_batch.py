"""A fixed number of episodes, and their assignment to slots."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from textenv.envs.action_masks import NOT_FORBIDDEN
from textenv.envs.transcript import Transcript
from textenv.envs.turn import Turn

Info = dict[str, Any]
"""Gymnasium's ``info``, with arrays ``[num_envs]``; `TextVectorEnv.step` lists its entries."""
MIN_IDLE_FRACTION = 1 / 8
"""Fraction of the slots that must be idle before a refill: reading several prompts takes as long as reading one."""


class OpenTurn(NamedTuple):
    """Turn to be generated as a whole, or continued to its end; see `TextVectorEnv.open_turns`."""

    row: int
    """Row in the next rollout."""
    episode: int
    """Index of its episode, the same in all rows of the episode."""
    prefix: list[int]
    """Token ids so far; the next token is chosen in column ``len(prefix) - 1``."""
    max_new_tokens: int
    """Maximum number of further tokens; 1 where a rule (``allowed``) decides about each token."""
    min_new_tokens: int
    """Number of further tokens before the turn may end."""
    allowed: list[int] | None
    """Ids that may be chosen; None if all may."""


class EpisodeBatch:
    """Fixed number of episodes, the first rows of the transcript, played in slots; idle slots get the next ones.

    Args:
        transcript: an empty transcript with a row for each episode.
        prompt_numbers: position of each episode's prompt in the prompt order.
        num_envs: number of slots.
    """

    def __init__(self, transcript: Transcript, prompt_numbers: Sequence[int], num_envs: int) -> None:
        self.transcript = transcript
        self.prompt_numbers = prompt_numbers
        self.row = np.full(num_envs, -1, dtype=np.int64)
        """int64 ``[num_envs]``: transcript row in which each slot's episode goes on, -1 in idle slots."""
        self._next_episode = 0

    @property
    def running(self) -> np.ndarray:
        """Bool ``[num_envs]``: slots that are not idle."""
        return self.row >= 0

    @property
    def next_mask(self) -> np.ndarray:
        """int64 ``[num_envs]``: index of the mask for each slot's next token; 0 (all allowed) in idle slots."""
        return np.where(self.running, self.transcript.next_mask[self.row], 0)

    @property
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column, in the next rollout, of each running slot's next action."""
        row = self.row[self.running]
        return row, self.transcript.length[row] - 1

    @property
    def running_episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Episode of each running slot, and how often this episode had gone to another row before."""
        row = self.row[self.running]
        return self.transcript.episode[row], self.transcript.stay[row]

    @property
    def open_turns(self) -> list[OpenTurn]:
        """Current turn of each running slot; several share one list of allowed ids."""
        transcript = self.transcript
        masks = transcript.masks
        open_turns = []
        allowed_ids: dict[int, list[int] | None] = {}  # by index of the mask
        for row in self.row[self.running].tolist():
            length = int(transcript.length[row])
            mask_index = int(transcript.next_mask[row])
            max_new_tokens = 1
            min_new_tokens = 0
            if masks.rule is None:
                # One mask for all further tokens. It allows ends; `min_new_tokens` says how long they are forbidden
                mask_index = min(mask_index, NOT_FORBIDDEN)
                max_new_tokens = int(transcript.turn_limit[row]) - length
                written = length - int(transcript.turn_start[row])
                missing = max(0, masks.min_new_tokens - written)
                min_new_tokens = min(max_new_tokens, missing)
            if mask_index not in allowed_ids:
                allowed_ids[mask_index] = _ids_or_none(masks.sets[mask_index])
            open_turn = OpenTurn(
                row=row,
                episode=int(transcript.episode[row]),
                prefix=transcript.tokens[row, :length].tolist(),
                max_new_tokens=max_new_tokens,
                min_new_tokens=min_new_tokens,
                allowed=allowed_ids[mask_index],
            )
            open_turns.append(open_turn)
        return open_turns

    def move(self, next_rows: Mapping[int, int]) -> np.ndarray:
        """Let slots go on in the next rows of their episodes, by present row; return the slots, int64 indices."""
        slots = np.flatnonzero(np.isin(self.row, list(next_rows)))
        for slot in slots:
            self.row[slot] = next_rows[int(self.row[slot])]
        return slots

    def release(self, rows: Sequence[int]) -> np.ndarray:
        """Set the slots idle whose episodes ended in these rows; return the slots, int64 indices."""
        over = np.zeros(len(self.transcript.length) + 1, dtype=bool)  # by row; the last entry is of idle slots, row -1
        over[rows] = True
        slots = np.flatnonzero(over[self.row])
        self.row[slots] = -1
        return slots

    def refill(self) -> tuple[np.ndarray, np.ndarray]:
        """Assign the next games to idle slots, once enough slots are idle; return these slots and their first rows."""
        idle = np.flatnonzero(~self.running)
        num_slots = len(self.row)
        agents = self.transcript.agents
        enough = len(idle) >= MIN_IDLE_FRACTION * num_slots or len(idle) == num_slots
        stop = self._next_episode
        if enough:
            stop = min(self._next_episode + agents * len(idle), len(self.prompt_numbers))
        rows = np.arange(self._next_episode, stop, agents)
        self._next_episode = stop
        slots = idle[: len(rows)]
        self.row[slots] = rows
        return slots, rows

    def observe(self) -> dict[str, np.ndarray]:
        """Return the prefix of each slot; idle slots have length 0."""
        length = np.where(self.running, self.transcript.length[self.row], 0)
        return {"tokens": self.transcript.tokens[self.row], "length": length[:, None]}


def _ids_or_none(mask: torch.Tensor) -> list[int] | None:
    """Return the token ids that a mask allows; None if it allows all."""
    if mask.all():
        return None
    return mask.nonzero().flatten().tolist()


def end_info(num_envs: int, over: Mapping[int, Turn], reasons: Sequence[str]) -> dict[str, np.ndarray]:
    """Return Gymnasium's ``info`` about episodes that are over.

    Args:
        num_envs: number of slots.
        over: by slot, the last turns of episodes that are over.
        reasons: why the episode of each slot ended.

    Returns:
        ``end_reason``, ``prompt`` and ``completion``, object arrays ``[num_envs]`` with None in the other slots, and
        for each the mask of the slots with an entry (``_end_reason``, …). Without such episodes it is empty.
    """
    if not over:
        return {}
    info = {name: np.full(num_envs, None, dtype=object) for name in ("end_reason", "prompt", "completion")}
    for slot, turn in over.items():
        info["end_reason"][slot] = reasons[slot]
        info["prompt"][slot] = turn.prompt_text
        info["completion"][slot] = turn.completion
    has_entry = np.isin(np.arange(num_envs), list(over))
    return info | {f"_{name}": has_entry.copy() for name in info}


def final_info(observation: Mapping[str, np.ndarray], done: np.ndarray, info: dict[str, np.ndarray]) -> Info:
    """Return ``info`` of SAME_STEP mode: as in Gymnasium, ``final_obs`` is an object array, None in other slots.

    Args:
        observation: observation before the reset.
        done: bool ``[num_envs]``: slots whose episode ended.
        info: info of these episodes, from `end_info`.
    """
    final = np.full(len(done), None, dtype=object)
    for slot in np.flatnonzero(done):
        final[slot] = {name: column[slot] for name, column in observation.items()}
    return {"final_obs": final, "_final_obs": done, "final_info": info, "_final_info": done.copy()}
