"""The warning when the score rises while the texts become alike."""

import numpy as np
import pytest

from algos.training.reward_hacking import RewardHackingMonitor


def history(scores, variety):
    return [{"episode/return": s, "text/distinct_2": v} for s, v in zip(scores, variety, strict=True)]


def test_a_rising_score_with_alike_texts_warns_once():
    watch = RewardHackingMonitor()
    rising, falling = np.linspace(1, 5, 30), np.linspace(0.8, 0.1, 30)
    with pytest.warns(UserWarning, match=r"score rises \(.*distinct 2-grams 0\.7\d to 0\.3\d\)") as caught:
        for metrics in history(rising, falling):
            watch.look(metrics)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("scores", "variety"),
    [
        (np.linspace(1, 5, 30), np.linspace(0.8, 0.6, 30)),
        (np.linspace(5, 5, 30), np.linspace(0.8, 0.1, 30)),
        (np.linspace(-1, -5, 30), np.linspace(0.8, 0.1, 30)),
    ],
)
def test_no_warning_otherwise(scores, variety):
    watch = RewardHackingMonitor()
    for metrics in history(scores, variety):
        watch.look(metrics)
    assert not watch.warned
