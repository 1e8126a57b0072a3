"""The grammar of film reviews, and the recogniser that knows its sentences."""

import numpy as np
import pytest

from textenv.embedded import accepts, label_of, openings, sample_review
from textenv.embedded.grammar import expansions
from textenv.embedded.phrases import PREDICATES, SENTENCES

REVIEW = (
    "this quiet film from last year was a real joy from start to finish. "
    "every scene shines and the plot was superb. catch it tonight."
)


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    return [sample_review(rng) for _ in range(n)]


def test_the_recogniser_accepts_every_sample():
    reviews = draw(3000)
    assert all(label_of(review.text) == review.label for review in reviews)
    assert all(review.text.startswith(review.opening + " ") for review in reviews)
    assert {review.text.count(".") for review in reviews} == {1, 2, 3}
    assert 0.45 < np.mean([review.label for review in reviews]) < 0.55
    assert draw(5) == draw(5) != draw(5, seed=1)


@pytest.mark.heavy
def test_there_are_thousands_of_reviews():
    assert len({review.text for review in draw(5000)}) > 4800
    assert len({review.text.removeprefix(review.opening) for review in draw(5000)}) > 3000
    assert len(openings()) == len(set(openings())) >= 400
    assert {len(opening.split()) for opening in openings()} <= set(range(2, 9))
    assert 100 <= len({word.strip(".") for review in draw(5000) for word in review.text.split()}) <= 150


def test_no_opening_begins_another():
    """So a response never prolongs its prompt."""
    known = set(openings())
    for opening in openings():
        words = opening.split()
        assert not known & {" ".join(words[:count]) for count in range(1, len(words))}


@pytest.mark.parametrize("patterns", [PREDICATES, SENTENCES])
def test_no_clause_belongs_to_both_sentiments(patterns):
    negative, positive = ({text for pattern in patterns for text in expansions(pattern, label)} for label in (0, 1))
    assert not negative & positive and len(negative) > 200


@pytest.mark.parametrize(
    "change",
    [
        ("was a real joy", "a real joy"),
        ("a real joy", "real joy"),
        ("quiet film", "film quiet"),
        ("real joy", "joy real"),
        ("real joy", "real mess"),
        ("superb", "dull"),
        ("catch", "skip"),
        ("superb", "superb and brilliant"),
        ("superb", "splendid"),
        ("tonight.", "tonight"),
        ("finish. ", "finish "),
        (". ", "."),
        (". ", ".. "),
        ("catch it tonight.", "catch it tonight. catch it tonight."),
        ("this quiet", "This quiet"),
        ("this quiet film from last year ", ""),
        ("this quiet", " this quiet"),
        ("tonight.", "tonight. "),
        ("tonight.", "tonight.\n"),
        ("tonight.", "tonight. the end"),
    ],
)
def test_a_changed_review_is_refused(change):
    assert label_of(REVIEW) == 1
    assert change[0] in REVIEW and not accepts(REVIEW.replace(*change))


def test_mixed_or_unfinished_reviews_are_refused():
    positive, negative = (next(r for r in draw(99) if r.label == label and r.text.count(".") == 1) for label in (1, 0))
    assert accepts(positive.text + " catch it tonight.") and not accepts(positive.text + " skip it tonight.")
    assert accepts(negative.text + " skip it tonight.") and not accepts(negative.text + " catch it tonight.")
    for review in draw(50):
        tails = (review.text[:cut] for cut in range(len(review.text)))
        assert all(tail.endswith(".") for tail in tails if accepts(tail)), review
