"""What rules look at: courses of metrics by hand, and weights of checkpoints."""

import math
from collections import Counter

import numpy as np
import pytest

from algos.lab.doctor.evidence import MIN_ITERATIONS, Evidence, read_evidence
from tests.helpers.planted_runs import train_control

SCORE = "episode/return"


def evidence_of(values, name=SCORE):
    return Evidence([{"steps": 10 * (i + 1), name: value} for i, value in enumerate(values)])


def test_a_course_by_hand():
    """12 iterations are 4 parts of 3: means 1, 2, 5 and 3, variance 1 inside each."""
    trend = evidence_of([0, 1, 2, 1, 2, 3, 4, 5, 6, 2, 3, 4]).trend(SCORE)
    assert (trend.first, trend.highest, trend.last) == (1, 5, 3)
    assert trend.error == pytest.approx(math.sqrt(2 * 1 / 3))
    assert trend.has_risen and not trend.has_fallen_back  # by 4.9 and 2.4 standard errors


def test_early_late_and_typical_values_by_hand():
    evidence = evidence_of(range(30))
    assert evidence.early(SCORE) == 1  # of 0, 1, 2
    assert evidence.late(SCORE) == 24.5  # of 20 to 29
    assert evidence.typical(SCORE) == 14.5
    swinging = evidence_of([0.0, 300.0, -400.0] * 10)
    assert (swinging.late(SCORE), swinging.late_size(SCORE)) == (0, 300)


def test_too_few_iterations_say_nothing():
    evidence = evidence_of(range(MIN_ITERATIONS - 1))
    assert evidence.trend(SCORE) is None and evidence.late(SCORE) is None and not evidence.has_learnt()
    assert evidence.late_size(SCORE) is None
    assert evidence_of(range(MIN_ITERATIONS)).has_learnt()


def test_iterations_without_a_finite_value_are_left_out():
    assert evidence_of([1.0, math.nan, 2.0, math.inf]).curve(SCORE).tolist() == [1, 2]
    assert evidence_of([1.0], "policy/loss").curve(SCORE).tolist() == []


def test_what_is_learnt_at_once_counts_as_learnt():
    assert evidence_of([1.9, 5.0, 5.0, 4.9, 5.0, 4.9, 5.0, 5.0, 5.0, 5.0, 4.9, 5.0]).has_learnt()


@pytest.mark.heavy
def test_noise_is_no_rise_and_no_fall():
    """Of 2,000 runs of pure noise, of any length, about one in 1,000 is taken for a rise."""
    random = np.random.default_rng(0)
    counts = Counter()
    for _ in range(2000):
        trend = evidence_of(random.normal(size=random.integers(20, 300))).trend(SCORE)
        counts["risen"] += trend.has_risen
        counts["fallen"] += trend.has_risen and trend.has_fallen_back
    assert counts["risen"] <= 6 and counts["fallen"] <= 6


def test_the_newest_checkpoints_are_read_without_torch(tmp_path):
    train_control(tmp_path, iterations=2, normalize_observations=True)
    older, newer = read_evidence(tmp_path).newest_weights
    assert older.keys() == newer.keys() and newer["normalizer.count"] > older["normalizer.count"]
    assert any((older[name] != newer[name]).any() for name in older if name.startswith("actor"))


def test_without_two_checkpoints_there_are_no_weights(tmp_path):
    assert Evidence([]).newest_weights == []
    assert Evidence([], folder=tmp_path).newest_weights == []
