"""Kuhn poker against its known solution."""

import numpy as np
import pytest

from algos import collect
from tests.helpers.models import make_tokenizer
from tests.helpers.programs import program_env, reader_policy, turns_of, word_policy
from textenv.programs.kuhn_poker import (
    ACTIONS,
    CARDS,
    DEALS,
    GAMES,
    SITUATIONS,
    VALUE,
    expected_winnings,
    exploitability,
    kuhn_poker,
    winnings,
)


def equilibrium(bluffs):
    """Kuhn's equilibria: one for each frequency from 0 to 1/3 with which the first agent bets a jack."""
    bets = {
        (0, ()): (bluffs, 0, 3 * bluffs),
        (0, ("pass", "bet")): (0, bluffs + 1 / 3, 1),
        (1, ("pass",)): (1 / 3, 0, 1),
        (1, ("bet",)): (0, 1 / 3, 1),
    }
    return {(player, card, moves): bets[player, moves][card] for player, card, moves in SITUATIONS}


@pytest.mark.parametrize("bluffs", [0.0, 0.1, 1 / 3])
def test_the_known_equilibria_cannot_be_exploited(bluffs):
    assert expected_winnings(equilibrium(bluffs)) == pytest.approx(VALUE, abs=1e-12)
    assert exploitability(equilibrium(bluffs)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("bluffs", [0.5, 1.0])
def test_other_strategies_can_be_exploited(bluffs):
    """A first agent who bluffs too often."""
    assert exploitability(equilibrium(1 / 3) | {(0, 0, ()): bluffs}) > 0.02


def test_who_always_passes_loses_an_ante_in_both_seats():
    """By hand: the other one always bets, and is never called."""
    assert exploitability(dict.fromkeys(SITUATIONS, 0.0)) == pytest.approx(1.0)


def test_winnings_are_one_ante_or_two():
    assert winnings((2, 0), ("pass", "pass")) == 1 and winnings((0, 2), ("pass", "pass")) == -1
    assert winnings((0, 2), ("bet", "pass")) == 1 and winnings((2, 0), ("pass", "bet", "pass")) == -1
    assert winnings((2, 0), ("bet", "bet")) == 2 and winnings((0, 1), ("pass", "bet", "bet")) == -2


@pytest.mark.heavy
def test_the_program_plays_the_rules():
    """Cards, moves and rewards of every game, read back from the tokens."""
    words = [*CARDS, *ACTIONS, "you:", "other:", "<eos>", "<pad>"]
    tokenizer = make_tokenizer(words)
    env = program_env(kuhn_poker, 4, agents=2, tokenizer=tokenizer, allowed=ACTIONS)
    rollout = collect(env, reader_policy(tokenizer), num_episodes=1600, seed=1)
    rows = turns_of(rollout)
    games = set()
    for game in range(800):
        cards = []
        texts = []
        for row in (2 * game, 2 * game + 1):
            length = int(rollout["mask"][row].nonzero().max()) + 2
            ids = [rollout["observation"][row, 0].item(), *rollout["action"][row].tolist()][:length]
            texts.append([words[token] for token in ids])
            cards.append(CARDS.index(texts[-1][0]))
        longest = max(texts, key=len)[1:]
        moves = tuple(word for word in longest if word in ACTIONS)
        assert moves in GAMES and tuple(cards) in DEALS
        games.add((tuple(cards), moves))
        assert rollout["reward"][2 * game].sum() == winnings(cards, moves) == -rollout["reward"][2 * game + 1].sum()
        assert len(rows[2 * game]) == (len(moves) + 1) // 2 and len(rows[2 * game + 1]) == 1
    assert len(games) >= len(DEALS) * len(GAMES) - 2, "nearly all of the possible games"


@pytest.mark.heavy
def test_cards_are_dealt_evenly():
    dealt = []

    def play(first, second, rng):
        dealt.append(tuple(rng.permutation(3)[:2].tolist()))
        first("a")
        return 0, 0

    collect(program_env(play, 8, agents=2), word_policy(), num_episodes=1200, seed=1)
    counts = np.array([dealt.count(deal) for deal in DEALS])
    assert counts.sum() == 600 and ((counts - 100) ** 2 / 100).sum() < 20.5  # chi-squared, five degrees, p = .001
