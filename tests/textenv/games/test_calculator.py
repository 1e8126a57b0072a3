"""The game with a calculator: its player, its words, and what it computes."""

import pytest

from tests.helpers.games import play, replies
from textenv.games import (
    Calculator,
    CalculatorPlayer,
    evaluate,
)

HELP = "Write 'calc: ' and an expression to have it computed, or 'answer: ' and a whole number to finish."


@pytest.mark.parametrize("size", [{}, {"terms": 2, "digits": 1}, {"terms": 8, "digits": 6, "max_turns": 2}])
def test_the_calculator_player_answers_every_question(size):
    env = Calculator(**size)
    assert [play(env, CalculatorPlayer(), seed=seed) for seed in range(200)] == [(env.best_return, 2)] * 200


def test_a_question_with_the_calculator_word_for_word():
    env = Calculator(max_turns=4)
    assert env.reset(options={"expression": "17 * 23 + 5"})[0] == f"What is 17 * 23 + 5? {HELP} You have 4 turns."
    assert replies(env, "hm", "First CALC : 17*(23 + 5)", "calc: 17 ** 2", "The answer: 400.") == [
        (HELP, 0.0, False),
        ("476", 0.0, False),
        ("I cannot compute that: use + - * between numbers only; there are no powers and no calls.", 0.0, False),
        ("Wrong, it is 396.", 0.0, True),
    ]
    env.reset(options={"expression": "17 * 23 + 5"})
    assert replies(env, "calc: 17*23+5\nanswer: 396") == [("Right.", 1.0, True)]
    env.reset(options={"expression": "2 - 5"})
    assert replies(env, "a", "b", "answer: three", "answer: 3\ncalc: 2 - 5")[2:] == [
        ("Write one whole number after 'answer:', as in 'answer: 42'.", 0.0, False),
        ("-3\nThat was your last turn; it is -3.", 0.0, True),
    ]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("17*23+5", 396), ("2*(3-10)", -14), ("--3", 3), ("2-3-4", -5), ("-2*-3", 6), ("((7))", 7), ("0*9+1", 1),
     ("9*" * 99 + "9", 9**100)],
)  # fmt: skip
def test_values_by_hand(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["", "2**3", "4/2", "abs(1)", "1,2", "(1", "1 2", "()", "a", "2(3)", "1" * 201])
def test_what_is_no_sum_is_refused(expression):
    with pytest.raises(ValueError, match=r"^(it has|use|that is not)"):
        evaluate(expression)
