"""Twenty questions: the best player against brute force, and its words."""

import functools
from fractions import Fraction

import numpy as np
import pytest

from tests.helpers.games import play, replies
from textenv.games import (
    BestQuestions,
    TwentyQuestions,
)
from textenv.games.twenty_questions import ANIMALS, ATTRIBUTES


def test_the_best_questions_earn_the_optimum():
    env, player = TwentyQuestions(), BestQuestions()
    results = [play(env, player, options={"secret": secret}) for secret in ANIMALS]
    assert np.mean([total for total, _ in results]) == pytest.approx(env.best_return, abs=1e-12)
    # By hand: three halvings leave 2; naming one of them hits at once or, as often, after 1 more question.
    assert np.mean([turns - 1 for _, turns in results]) == 3.5
    assert env.best_return == 1 - 3.5 / 20


HAVE = [sum(1 << bit for bit, have in enumerate(ANIMALS.values()) if attribute in have) for attribute in ATTRIBUTES]


@functools.cache
def questions(left):
    """Questions before the right name, summed over the animals left, by trying everything; sets are bits."""
    count = left.bit_count()
    names = [1 << bit for bit in range(16) if left >> bit & 1]
    options = [count - 1 + questions(left & ~name) for name in names if count > 1]
    splits = [left & have for have in HAVE if 0 < left & have < left]
    options += [count + questions(yes) + questions(left & ~yes) for yes in splits]
    return min(options, default=0)


@pytest.mark.heavy
def test_the_dynamic_program_equals_a_full_one():
    animals, player, rng = list(ANIMALS), BestQuestions(), np.random.default_rng(0)
    for size in [*range(1, 17)] * 30:
        chosen = rng.choice(16, size=size, replace=False).tolist()
        mean = Fraction(questions(sum(1 << bit for bit in chosen)), size)
        assert player.value(frozenset(animals[bit] for bit in chosen)) == 1 - mean / 20
    assert questions(2**16 - 1) == 16 * 3.5


@functools.cache
def earned(left, asked, limit):
    """Best return times ``limit``, summed over the animals left, by trying everything."""
    if asked == limit or not left:
        return 0
    names = [1 << bit for bit in range(16) if left >> bit & 1]
    options = [limit - asked + earned(left & ~name, asked + 1, limit) for name in names]
    splits = [left & have for have in HAVE if 0 < left & have < left]
    return max(options + [earned(yes, asked + 1, limit) + earned(left & ~yes, asked + 1, limit) for yes in splits])


@pytest.mark.parametrize("limit", [2, 5])
def test_the_dynamic_program_knows_the_limit(limit):
    animals, player, rng = list(ANIMALS), BestQuestions(max_questions=limit), np.random.default_rng(1)
    for size in [*range(1, 13)] * 12:
        chosen = rng.choice(16, size=size, replace=False).tolist()
        best = Fraction(earned(sum(1 << bit for bit in chosen), 0, limit), limit * size)
        assert player.value(frozenset(animals[bit] for bit in chosen)) == best


@pytest.mark.parametrize("limit", [1, 3, 4, 8])
def test_the_best_questions_know_the_limit(limit):
    env, player = TwentyQuestions(max_questions=limit), BestQuestions(max_questions=limit)
    mean = np.mean([play(env, player, options={"secret": secret})[0] for secret in ANIMALS])
    assert mean == pytest.approx(env.best_return, abs=1e-12)
    by_hand = {1: 1 / 16, 3: 1 / 8, 8: 1 - 3.5 / 8}  # 3: two questions and 4 left, or one of 8, or just names
    assert limit not in by_hand or env.best_return == by_hand[limit]


def test_the_table_of_animals_can_be_halved_four_times():
    halves = list(ATTRIBUTES)[:4]
    assert all(sum(half in attributes for attributes in ANIMALS.values()) == 8 for half in halves)
    assert len({attributes & frozenset(halves) for attributes in ANIMALS.values()}) == len(ANIMALS) == 16


def test_twenty_questions_word_for_word():
    env = TwentyQuestions(max_questions=8)
    rules, _ = env.reset(options={"secret": "owl"})
    assert rules.startswith("I think of one of these animals: seal, wolf, ") and rules.endswith("; you have 8.")
    unclear = "I cannot say. Ask about mammal, carnivore, large, aquatic, bird, fly, or name one of the animals."
    assert replies(env, "Is it a mammal?", "CAN IT FLY", "owl", "is it green?", "Is it a swan? Is it a bird?") == [
        ("no", 0.0, False),
        ("yes", 0.0, False),
        ("Ask one question, such as 'is it a mammal?' or 'is it an owl?'.", 0.0, False),
        (unclear, 0.0, False),
        ("yes", 0.0, False),
    ]
    assert replies(env, "is it a bird or a fish", "is it the owl?") == [
        ("yes", 0.0, False),  # a fish is not among the words it knows
        ("Yes, it is an owl.", 1 - 6 / 8, True),
    ]
    env = TwentyQuestions(max_questions=2)
    env.reset(options={"secret": "owl"})
    assert replies(env, "is it a wolf or a seal?", "is it a butterfly?") == [
        ("Ask about one thing at a time, and without 'not'.", 0.0, False),
        ("no\nThat was your last question; it is an owl.", 0.0, True),
    ]
    env.reset(options={"secret": "owl"})
    assert replies(env, "is it not a bird?") == [("Ask about one thing at a time, and without 'not'.", 0.0, False)]
