"""Descriptions of Gymnasium's toy text environments: FrozenLake, CliffWalking, Taxi, Blackjack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import gymnasium
from gymnasium import spaces

from textenv.words.describing import KnownDescription

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Rows and columns that a word moves by."""


@dataclass(frozen=True, kw_only=True)
class FrozenLake(KnownDescription):
    """FrozenLake with any map: the row and column, the way to the nearest goal, and the holes beside it.

    Args:
        rows: the map, a text for each row, with S (start), F (frozen), H (hole) and G (goal).
        is_slippery: whether a step may go to a side.

    Raises:
        ValueError: if the rows of the map are not texts of one length.

    Example:
        >>> FrozenLake(rows=("SFF", "FHF", "FFG"))(5)
        'Row 1, column 2. Goal 1 down. Hole left.'
    """

    AIM = "Walk to the goal, not into a hole."
    WORDS = ("left", "down", "right", "up")

    rows: tuple[str, ...]
    is_slippery: bool = False

    def __post_init__(self) -> None:
        if not self.rows or not all(isinstance(row, str) and len(row) == len(self.rows[0]) > 0 for row in self.rows):
            raise ValueError(f"rows is {self.rows!r:.100}, expected texts of one length")

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self:
        """Read the map."""
        lake: Any = env.unwrapped
        rows = tuple("".join(letter.decode() for letter in row) for row in lake.desc)
        is_slippery = any(len(outcomes) > 1 for by_action in lake.P.values() for outcomes in by_action.values())
        return cls(rows=rows, is_slippery=is_slippery)

    @classmethod
    def restored(cls, arguments: Mapping[str, Any]) -> Self:
        """Rebuild the description from the saved arguments."""
        return cls(**{**arguments, "rows": tuple(arguments.get("rows", ()))})

    @property
    def aim(self) -> str:
        """What to do in this environment."""
        return f"{self.AIM} Ice is slippery." if self.is_slippery else self.AIM

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the cells of the map."""
        return observation_space == spaces.Discrete(len(self.rows) * len(self.rows[0]))

    def __call__(self, observation: Any) -> str:
        """Describe the cell with this number."""
        row, column = divmod(int(observation), len(self.rows[0]))
        sentences = [f"Row {row}, column {column}."]

        # The nearest goal
        ways = [(goal_row - row, goal_column - column) for goal_row, goal_column in self._cells("G")]
        if ways:
            down, right = min(ways, key=lambda way: abs(way[0]) + abs(way[1]))
            sentences.append(f"Goal {_way(down, right)}.")

        # Holes
        holes = self._cells("H")
        near = [word for word, (down, right) in STEPS.items() if (row + down, column + right) in holes]
        if (row, column) in holes:
            sentences.append("In a hole.")
        elif near:
            sentences.append(f"Hole {', '.join(near)}.")
        return " ".join(sentences)

    def _cells(self, letter: str) -> list[tuple[int, int]]:
        """Return the rows and columns of the cells with a letter."""
        return [
            (row, column)
            for row, letters in enumerate(self.rows)
            for column, cell in enumerate(letters)
            if cell == letter
        ]


def _way(down: int, right: int) -> str:
    """Write a way in steps, such as ``2 down, 1 left``."""
    parts = []
    if down:
        parts.append(f"{abs(down)} {'down' if down > 0 else 'up'}")
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(parts) or "here"
