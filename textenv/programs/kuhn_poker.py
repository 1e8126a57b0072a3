"""Kuhn poker (Kuhn 1950), as a program of two agents: one of three cards each, one bet, and a known solution."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from textenv.programs.run import Ask

CARDS = ("jack", "queen", "king")
"""The cards, from the lowest to the highest."""
ACTIONS = ("pass", "bet")
"""Words of a move: ``bet`` after a bet calls it, ``pass`` after a bet folds."""
GAMES = (("pass", "pass"), ("pass", "bet", "pass"), ("pass", "bet", "bet"), ("bet", "pass"), ("bet", "bet"))
"""Moves of a whole game: all that are possible."""
VALUE = -1 / 18
"""What the first agent wins on average if both play perfectly, in antes (Kuhn 1950)."""


def kuhn_poker(first: Ask, second: Ask, *, rng: np.random.Generator) -> tuple[float, float]:
    """Play a game, and return what each agent wins, in antes: ±1 or ±2.

    An agent reads its card and then, line by line, its own moves and those of the other one. The environment needs
    ``allowed=ACTIONS``.

    Example:
        >>> env = ProgramVectorEnv(kuhn_poker, agents=2, allowed=ACTIONS, tokenizer=tok)  # doctest: +SKIP
    """
    cards = rng.permutation(len(CARDS))[:2].tolist()
    texts = [f"{CARDS[card]}\n" for card in cards]
    moves: tuple[str, ...] = ()
    while moves not in GAMES:
        player = len(moves) % 2
        ask = (first, second)[player]
        texts[player] += "you:"
        answer = ask(texts[player])
        move = answer.strip()
        texts[player] += f"{answer}\n"
        texts[1 - player] += f"other: {move}\n"
        moves = (*moves, move)
    won = winnings(cards, moves)
    return won, -won


def winnings(cards: Sequence[int], moves: tuple[str, ...]) -> float:
    """Return what the first agent wins in a game, in antes.

    Args:
        cards: the cards of both agents, as indices of `CARDS`.
        moves: one of `GAMES`.
    """
    if moves == ("bet", "pass"):
        return 1.0
    if moves == ("pass", "bet", "pass"):
        return -1.0
    stake = 2.0 if "bet" in moves else 1.0
    return stake if cards[0] > cards[1] else -stake


Situation = tuple[int, int, tuple[str, ...]]
"""What an agent knows when it moves: which agent it is, its card, and the moves so far."""
DEALS = tuple(itertools.permutations(range(len(CARDS)), 2))
"""The cards of both agents, all that are possible; each has the same probability."""
SITUATIONS = tuple(
    (len(moves) % 2, card, moves) for moves in ((), ("pass",), ("bet",), ("pass", "bet")) for card in range(len(CARDS))
)
"""All situations, six for each agent."""


def expected_winnings(bets: Mapping[Situation, float]) -> float:
    """Return what the first agent wins on average, in antes, over all deals and moves.

    Args:
        bets: the probability of ``bet`` in each of `SITUATIONS`.
    """

    def winnings_from(cards: tuple[int, int], moves: tuple[str, ...]) -> float:
        if moves in GAMES:
            return winnings(cards, moves)
        player = len(moves) % 2
        bet = bets[player, cards[player], moves]
        after_pass = winnings_from(cards, (*moves, "pass"))
        after_bet = winnings_from(cards, (*moves, "bet"))
        return (1 - bet) * after_pass + bet * after_bet

    return sum(winnings_from(cards, ()) for cards in DEALS) / len(DEALS)


def exploitability(bets: Mapping[Situation, float]) -> float:
    """Return how much a perfect opponent would win, in antes a game, averaged over both seats.

    It is NashConv / 2, and 0 if and only if the strategies are an equilibrium. The best response to each agent is found
    among all 64 deterministic strategies.

    Args:
        bets: the probability of ``bet`` in each of `SITUATIONS`.
    """
    gains = 0.0
    for player, sign in ((0, 1.0), (1, -1.0)):
        situations = [situation for situation in SITUATIONS if situation[0] == player]
        best = -math.inf
        for answers in itertools.product((0.0, 1.0), repeat=len(situations)):
            value = expected_winnings({**bets, **dict(zip(situations, answers, strict=True))})
            best = max(best, sign * value)
        gains += best
    return gains / 2
