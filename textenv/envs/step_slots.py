"""Slots of `TextVectorEnv.step`, each with an episode of its own."""

import numpy as np
from gymnasium.core import RenderFrame
from gymnasium.vector import AutoresetMode

from textenv.envs.transcript import Transcript


class StepSlots:
    """Slots of `TextVectorEnv.step`: slot i is row i of the transcript.

    Args:
        transcript: an empty transcript with ``one_row``, and a row for each slot.
    """

    def __init__(self, transcript: Transcript) -> None:
        self.num_slots = len(transcript.length)
        self.transcript = transcript
        self.started = False
        """False before the first `reset`, and after whole episodes were started."""
        self.ended = np.zeros(self.num_slots, dtype=bool)
        """Bool ``[num_envs]``: slots whose episode is over and not reset yet."""
        self.returns = np.zeros(self.num_slots)
        """float64 ``[num_envs]``: sum of the rewards so far, of the episode in each slot."""

    @property
    def next_mask(self) -> np.ndarray:
        """int64 ``[num_envs]``: index of the mask for each slot's next token."""
        return self.transcript.next_mask

    def begin(self, slots: np.ndarray) -> None:
        """Note that the transcript has new episodes in these slots (int64 indices)."""
        self.ended[slots] = False
        self.returns[slots] = 0

    def give_up(self) -> None:
        """Give up all episodes; before the next step there must be a reset."""
        self.started = False
        self.ended[:] = False

    def check_actions(self, actions: np.ndarray, autoreset_mode: AutoresetMode) -> np.ndarray:
        """Return the actions as an array; raise a ValueError if they, or the step, are not allowed now."""
        if not self.started:
            raise ValueError("no episode is running: call reset before step")
        if self.transcript.unscored:
            raise ValueError("the reward of a finished turn failed: call reset before step")

        # Slots that this step only resets ignore their actions: mask 0 allows all tokens
        ended_slots = self.ended.nonzero()[0]
        mask_index = self.next_mask
        if len(ended_slots):
            mask_index = np.where(self.ended, 0, mask_index)
        actions = self.transcript.masks.check(actions, slice(None), mask_index)

        if autoreset_mode is AutoresetMode.DISABLED and len(ended_slots):
            raise ValueError(
                f"the episodes in slots {ended_slots.tolist()} are over: "
                'call reset(options={"reset_mask": mask}) for them first'
            )
        return actions

    def append(self, actions: np.ndarray) -> np.ndarray:
        """Append a token to each slot whose episode is not over; return the slots whose turn is over, int64 indices."""
        rows: np.ndarray | slice = slice(None)  # in most steps all slots; a slice is faster than indices
        if self.ended.any():
            rows = np.flatnonzero(~self.ended)
        return self.transcript.append(rows, actions[rows])

    def observe(self) -> dict[str, np.ndarray]:
        """Return a copy of the prefix of each slot."""
        return {"tokens": self.transcript.tokens.copy(), "length": self.transcript.length[:, None].copy()}

    def render(self, mode: str) -> tuple[RenderFrame, ...] | None:
        """See `TextVectorEnv.render`."""
        if mode == "rgb_array":
            return tuple(self.transcript.draw(row) for row in range(self.num_slots))
        frames = tuple(self.transcript.render(row) for row in range(self.num_slots))
        if mode == "ansi":
            return frames
        lines = list(frames)
        if self.num_slots > 1:
            lines = [f"[{slot}] {frame}" for slot, frame in enumerate(frames)]
        print("\n".join(lines), flush=True)
        return None
