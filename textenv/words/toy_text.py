"""Descriptions of Gymnasium's toy text environments: FrozenLake, CliffWalking, Taxi, Blackjack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import gymnasium
from gymnasium import spaces

from textenv.words.describing import KnownDescription
from textenv.words.phrases import sided, way

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
        is_map = isinstance(self.rows, tuple) and all(isinstance(row, str) for row in self.rows)
        if is_map:
            widths = {len(row) for row in self.rows}
            is_map = len(widths) == 1 and 0 not in widths
        if not is_map:
            raise ValueError(f"rows is {self.rows!r:.100}, expected texts of one length")

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self:
        """Read the map."""
        lake: Any = env.unwrapped
        rows = tuple(b"".join(letters).decode() for letters in lake.desc)

        # On slippery ice, some action has several outcomes
        is_slippery = False
        for outcomes_of_action in lake.P.values():
            for outcomes in outcomes_of_action.values():
                is_slippery = is_slippery or len(outcomes) > 1
        return cls(rows=rows, is_slippery=is_slippery)

    @classmethod
    def restored(cls, arguments: Mapping[str, Any]) -> Self:
        """Rebuild the description from the saved arguments."""
        rows = arguments.get("rows")
        if isinstance(rows, list):
            rows = tuple(rows)
        return cls(**{**arguments, "rows": rows})

    @property
    def aim(self) -> str:
        """What to do in this environment."""
        if self.is_slippery:
            return f"{self.AIM} Ice is slippery."
        return self.AIM

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the cells of the map."""
        return observation_space == spaces.Discrete(len(self.rows) * len(self.rows[0]))

    def __call__(self, observation: Any) -> str:
        """Describe the cell with this number."""
        return _cell_in_words(self.rows, int(observation), "H", "Hole")


@dataclass(frozen=True, kw_only=True)
class CliffWalking(KnownDescription):
    """CliffWalking: the row and column, the way to the goal, and where the cliff is beside it.

    Args:
        is_slippery: whether a step may go to a side.

    Example:
        >>> CliffWalking()(36)
        'Row 3, column 0. Goal 11 right. Cliff right.'
    """

    AIM = "Walk to the goal, not into the cliff."
    WORDS = ("up", "right", "down", "left")
    ROWS: ClassVar[tuple[str, ...]] = ("............", "............", "............", "SCCCCCCCCCCG")
    """The map: S (start), C (cliff), G (goal)."""

    is_slippery: bool = False

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self:
        """Read whether a step may go to a side."""
        cliff: Any = env.unwrapped
        return cls(is_slippery=cliff.is_slippery)

    @property
    def aim(self) -> str:
        """What to do in this environment."""
        if self.is_slippery:
            return f"{self.AIM} It is slippery."
        return self.AIM

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the 48 cells."""
        return observation_space == spaces.Discrete(48)

    def __call__(self, observation: Any) -> str:
        """Describe the cell with this number."""
        return _cell_in_words(self.ROWS, int(observation), "C", "Cliff")


@dataclass(frozen=True, kw_only=True)
class Taxi(KnownDescription):
    """Taxi: who waits where, the way to the next place, and the walls beside the taxi.

    The way leads to the passenger, or to the goal if the passenger is in the taxi. Borders of the map are no walls.

    Example:
        >>> Taxi()(((3 * 5 + 1) * 5 + 0) * 4 + 2)
        'Passenger at red, 3 north, 1 west. Goal yellow. Wall west.'
    """

    AIM = "Bring the passenger to the goal."
    WORDS = ("south", "north", "east", "west", "pickup", "dropoff")
    PLACES: ClassVar[dict[str, tuple[int, int]]] = {"red": (0, 0), "green": (0, 4), "yellow": (4, 0), "blue": (4, 3)}
    """Rows and columns of the places."""
    WALLS: ClassVar[frozenset[tuple[int, int]]] = frozenset({(0, 1), (1, 1), (3, 0), (4, 0), (3, 2), (4, 2)})
    """Cells with a wall in the east."""

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the 500 states."""
        return observation_space == spaces.Discrete(500)

    def __call__(self, observation: Any) -> str:
        """Describe the state with this number."""
        # Row, column, place of the passenger (4: the taxi), place of the goal
        state, goal = divmod(int(observation), 4)
        state, passenger = divmod(state, 5)
        row, column = divmod(state, 5)
        names = list(self.PLACES)
        goal_name = names[goal]

        # The next place, with the way to it
        is_inside = passenger == len(names)
        next_name = goal_name
        if not is_inside:
            next_name = names[passenger]
        next_row, next_column = self.PLACES[next_name]
        steps_south = sided(next_row - row, "north", "south")
        steps_east = sided(next_column - column, "west", "east")
        way_to_next = way(steps_south, steps_east)
        if is_inside:
            sentences = ["Passenger in taxi.", f"Goal {goal_name}, {way_to_next}."]
        else:
            sentences = [f"Passenger at {next_name}, {way_to_next}.", f"Goal {goal_name}."]

        # Walls
        walls = []
        if (row, column) in self.WALLS:
            walls.append("east")
        if (row, column - 1) in self.WALLS:
            walls.append("west")
        if walls:
            sentences.append(f"Wall {', '.join(walls)}.")
        return " ".join(sentences)


@dataclass(frozen=True, kw_only=True)
class Blackjack(KnownDescription):
    """Blackjack: the sum of my cards, the dealer's card, and whether an ace of mine counts 11.

    Example:
        >>> Blackjack()((15, 1, 1))
        'I have 15 with a usable ace. Dealer shows ace.'
    """

    AIM = "Get near 21, not above."
    WORDS = ("stick", "hit")

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the sum, the dealer's card and the ace."""
        return observation_space == spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)))

    def __call__(self, observation: Any) -> str:
        """Describe the cards."""
        total, dealer_card, has_ace = map(int, observation)
        hand = str(total)
        if has_ace:
            hand += " with a usable ace"
        card_name = str(dealer_card)
        if dealer_card == 1:
            card_name = "ace"
        return f"I have {hand}. Dealer shows {card_name}."


def _cell_in_words(rows: Sequence[str], state: int, danger: str, danger_name: str) -> str:
    """Describe a cell of a map: its row and column, the way to the nearest goal, and the dangers one step away.

    Args:
        rows: the map, a text for each row; G is a goal.
        state: number of the cell, row by row.
        danger: the letter of cells to avoid.
        danger_name: what such a cell is called.
    """
    row, column = divmod(state, len(rows[0]))
    sentences = [f"Row {row}, column {column}."]

    # The nearest goal
    goals = _cells(rows, "G")
    if goals:
        goal_row, goal_column = min(goals, key=lambda goal: abs(goal[0] - row) + abs(goal[1] - column))
        steps_down = sided(goal_row - row, "up", "down")
        steps_right = sided(goal_column - column)
        sentences.append(f"Goal {way(steps_down, steps_right)}.")

    # Dangers
    dangers = _cells(rows, danger)
    words_into_danger = []
    for word, (down, right) in STEPS.items():
        if (row + down, column + right) in dangers:
            words_into_danger.append(word)
    if (row, column) in dangers:
        sentences.append(f"{danger_name} here.")
    elif words_into_danger:
        sentences.append(f"{danger_name} {', '.join(words_into_danger)}.")
    return " ".join(sentences)


def _cells(rows: Sequence[str], letter: str) -> list[tuple[int, int]]:
    """Return the rows and columns of the cells with a letter."""
    cells = []
    for row, letters in enumerate(rows):
        for column, cell_letter in enumerate(letters):
            if cell_letter == letter:
                cells.append((row, column))
    return cells
