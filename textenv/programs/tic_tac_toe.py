"""Tic-tac-toe as a program of two agents, and a perfect player as their opponent."""

import functools
from collections.abc import Sequence

import numpy as np

from textenv.programs.run import Ask
from textenv.prompts.messages import Message

SQUARES = tuple("123456789")
"""Words of a move: the squares, row by row."""
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_EMPTY = "........."


def tic_tac_toe(x: Ask, o: Ask) -> tuple[float, float]:
    """Play a game, and return 1 for the winner and -1 for the loser, or 0 for both.

    An agent reads the board and which mark it sets, and answers with a free square. Every move begins a new text. The
    environment needs ``allowed=SQUARES``.

    Example:
        >>> env = ProgramVectorEnv(tic_tac_toe, agents=2, allowed=SQUARES, tokenizer=tok)  # doctest: +SKIP
    """
    board = _EMPTY
    while winner(board) is None:
        mark = mark_to_move(board)
        ask = x if mark == "X" else o
        answer = ask(in_words(board), allowed=free_squares(board))
        board = moved(board, int(answer) - 1)
    result = winner(board)
    if result == "X":
        return 1.0, -1.0
    if result == "O":
        return -1.0, 1.0
    return 0.0, 0.0


def in_words(board: str) -> str:
    """Return what an agent reads of a board of nine characters: three lines, and its mark."""
    return f"{board[:3]}\n{board[3:6]}\n{board[6:]}\n{mark_to_move(board)}:"


def free_squares(board: str) -> list[str]:
    """Return the free squares of a board, as words."""
    return [word for word, mark in zip(SQUARES, board, strict=True) if mark == "."]


def mark_to_move(board: str) -> str:
    """Return the mark that is set next, ``X`` or ``O``."""
    return "X" if board.count("X") == board.count("O") else "O"


def moved(board: str, square: int) -> str:
    """Return the board after the next mark is set at an index from 0 to 8."""
    return board[:square] + mark_to_move(board) + board[square + 1 :]


def winner(board: str) -> str | None:
    """Return ``X``, ``O``, or an empty text for a draw; None if the game goes on."""
    for first, second, third in _LINES:
        if board[first] != "." and board[first] == board[second] == board[third]:
            return board[first]
    return None if "." in board else ""


@functools.cache
def value(board: str) -> int:
    """Return the result of perfect play for the mark that is set next: 1, 0 or -1."""
    result = winner(board)
    if result == "":
        return 0
    if result is not None:
        return 1 if result == mark_to_move(board) else -1
    return max(-value(moved(board, square)) for square in _free(board))


def perfect_player(content: str | Sequence[Message], *, rng: np.random.Generator) -> str:
    """Answer a question of `tic_tac_toe` with one of the best squares, each with the same probability."""
    assert isinstance(content, str)
    board = content.replace("\n", "")[:9]
    best_squares = [square for square in _free(board) if -value(moved(board, square)) == value(board)]
    return SQUARES[int(rng.choice(best_squares))]


def random_player(content: str | Sequence[Message], *, allowed: Sequence[str], rng: np.random.Generator) -> str:
    """Answer any question with one of the words that it allows, each with the same probability."""
    return str(rng.choice(list(allowed)))


def _free(board: str) -> list[int]:
    """Return the indices of the free squares."""
    return [square for square, mark in enumerate(board) if mark == "."]
