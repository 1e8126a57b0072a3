"""pass@k and maj@k are the means over all subsets, by enumeration."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from algos.statistics.pass_at_k import majority_at_k, pass_at_k


def majority_of(subset, answers, passes):
    """Whether the most frequent answer of these samples passes; a mean over ties, and over samples of one answer."""
    votes = Counter(answers[i] for i in subset if answers[i] is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    rates = [np.mean([passes[i] for i in subset if answers[i] == winner]) for winner in winners]
    return np.mean(rates) if rates else 0.0


def cases():
    rng = np.random.default_rng(1)
    for _ in range(120):
        n = int(rng.integers(1, 9))
        numbers = rng.integers(0, rng.integers(2, 6), size=n)
        answers = [None if number == 0 else f"answer {number}" for number in numbers]
        yield answers, rng.random(n) < 0.5


def test_both_are_means_over_all_subsets():
    for answers, passes in cases():
        for k in range(1, len(answers) + 1):
            subsets = list(itertools.combinations(range(len(answers)), k))
            expected = np.mean([majority_of(subset, answers, passes) for subset in subsets])
            assert majority_at_k(answers, passes, k) == pytest.approx(expected, abs=1e-12), (answers, passes, k)
            expected = np.mean([any(passes[i] for i in subset) for subset in subsets])
            assert pass_at_k(passes, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("passed", [0, 1, 7, 150, 999, 1000])
def test_many_samples_neither_overflow_nor_lose_digits(passed):
    """Binomials of a thousand have 300 digits; here they are exact integers."""
    passes = np.arange(1000) < passed
    for k in (1, 10, 500, 1000):
        expected = 1 - math.comb(1000 - passed, k) / math.comb(1000, k)
        assert pass_at_k(passes, k) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_a_vote_of_many_samples_is_what_resampling_says():
    """And with one sample it is the pass rate, whatever the answers."""
    rng = np.random.default_rng(2)
    answers = [int(x) for x in rng.integers(0, 12, size=64)]
    passes = [answer in (3, 7) for answer in answers]
    subsets = [rng.choice(64, size=16, replace=False) for _ in range(4000)]
    values = [majority_of(subset, answers, passes) for subset in subsets]
    deviation = np.std(values) / math.sqrt(len(values))
    assert abs(majority_at_k(answers, passes, 16) - np.mean(values)) < 4 * deviation
    assert majority_at_k(answers, passes, 1) == pytest.approx(np.mean(passes))


def test_ties_abstentions_and_rewards_of_more_than_the_answer():
    assert majority_at_k(["a", "b"], [True, False], 2) == 0.5
    assert majority_at_k([None, None, "b"], [True, True, False], 3) == 0, "one vote decides over two abstentions"
    assert majority_at_k([None, None], [True, True], 2) == 0, "without a vote there is no answer"
    assert majority_at_k(["a", "a", "b"], [True, False, False], 3) == 0.5, "one of the two is chosen"
