"""Tic-tac-toe against what is known of it: numbers of games, and the value of perfect play."""

import functools

import numpy as np
import pytest

from algos import collect
from tests.helpers.models import make_tokenizer
from tests.helpers.programs import program_env, reader_policy
from textenv.programs.tic_tac_toe import (
    SQUARES,
    free_squares,
    mark_to_move,
    moved,
    perfect_player,
    random_player,
    tic_tac_toe,
    value,
    winner,
)

START = "." * 9


def results(board):
    """Results of all games from a board on."""
    result = winner(board)
    if result is not None:
        return [result]
    return [end for square in free_squares(board) for end in results(moved(board, int(square) - 1))]


@pytest.mark.heavy
def test_the_numbers_of_games_and_results_are_the_known_ones():
    """255,168 games: X wins 131,184, O 77,904, and 46,080 are drawn (On-Line Encyclopedia of Integer Sequences)."""
    ends = results(START)
    assert len(ends) == 255_168
    assert [ends.count(result) for result in ("X", "O", "")] == [131_184, 77_904, 46_080]


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (START, 0),  # perfect play is a draw
        ("X........", 0),  # a corner is answered by the centre
        ("X...O....", 0),
        (".X.O.....", 1),  # two marks on neighbouring edges: the corner between them, or the centre, wins
        ("XX.OO....", 1),  # X completes its line
        ("XX..O....", 0),  # O must block, and can
        ("XX..O.X.O", -1),  # two threats at once
    ],
)
def test_values_of_known_boards(board, expected):
    assert value(board) == expected


def playing(player, rng):
    """A player as the program asks it."""
    if player is perfect_player:
        return lambda content, allowed: perfect_player(content, rng=rng)
    return functools.partial(random_player, rng=rng)


def test_the_perfect_player_never_loses():
    rng = np.random.default_rng(0)
    perfect, other = playing(perfect_player, rng), playing(random_player, rng)
    as_x = [tic_tac_toe(perfect, other)[0] for _ in range(200)]
    as_o = [tic_tac_toe(other, perfect)[1] for _ in range(200)]
    assert min(as_x + as_o) == 0 and np.mean(as_x) > 0.9 and np.mean(as_o) > 0.6
    assert {tic_tac_toe(perfect, perfect) for _ in range(50)} == {(0.0, 0.0)}


@pytest.mark.heavy
def test_random_players_win_as_often_as_counted():
    """X wins 58.5 % of the games of two random players, O 28.8 %, by weights of all games; four standard errors."""

    def chances(board):
        result = winner(board)
        if result is not None:
            return np.array([result == "X", result == "O"], dtype=float)
        return np.mean([chances(moved(board, int(square) - 1)) for square in free_squares(board)], axis=0)

    expected = functools.cache(lambda: chances(START))()
    assert expected == pytest.approx([0.585, 0.288], abs=5e-4)
    player = playing(random_player, np.random.default_rng(1))
    games = [tic_tac_toe(player, player)[0] for _ in range(2000)]
    assert np.mean(np.array(games) == 1) == pytest.approx(expected[0], abs=0.044)
    assert np.mean(np.array(games) == -1) == pytest.approx(expected[1], abs=0.04)


@pytest.mark.heavy
def test_a_policy_plays_by_the_rules():
    """Only free squares, the marks in turn, and the rewards of the final board."""
    boards = []

    def watched(x, o):
        def ask_and_note(ask, content, allowed):
            answer = ask(content, allowed=allowed)
            assert answer in allowed and content[-2] == mark_to_move(content.replace("\n", "")[:9])
            boards.append(content)
            return answer

        result = tic_tac_toe(functools.partial(ask_and_note, x), functools.partial(ask_and_note, o))
        assert sum(result) == 0
        return result

    tokenizer = make_tokenizer([*SQUARES, "<eos>", "<pad>", "..."], eos="<eos>")
    env = program_env(watched, 4, agents=2, tokenizer=tokenizer, allowed=SQUARES, max_turns=9)
    rollout = collect(env, reader_policy(tokenizer), num_episodes=64, seed=1)
    assert env.metrics["programs/failed"] == 0 and len(boards) == rollout["mask"].sum()
    rewards = rollout["reward"].sum(1)
    assert set(rewards.tolist()) <= {-1.0, 0.0, 1.0}
