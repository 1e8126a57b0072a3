"""Rewards by length, repetition and unfinished answers."""

import numpy as np
import pytest

from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.rating import rate
from textenv import TextVectorEnv, rewards
from textenv.prompts.prompts import PromptList

EOS, PAD = WORDS.index("<eos>"), WORDS.index("<pad>")


def test_a_length_window_falls_off_linearly():
    ids = [[0] * n for n in range(12)]
    soft = rewards.length_window(4, 6, edge=4)
    expected = [0, 0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rate(soft, *["x"] * 12, completion_ids=ids) == expected
    assert rate(rewards.length_window(4, 6), *["x"] * 12, completion_ids=ids) == [float(4 <= n <= 6) for n in range(12)]


def test_repetition_is_the_share_of_seen_n_grams():
    texts = ["a b a b a b", "a b c", "a a", "a", ""]
    assert rate(rewards.repetition(2), *texts) == pytest.approx([-3 / 5, 0, 0, 0, 0])
    assert rate(rewards.repetition(1), *texts) == pytest.approx([-4 / 6, 0, -1 / 2, 0, 0])


class PaysForAnEnd(PromptList):
    """A task that asks the function as an environment does, with `terminated`."""

    def score(self, turns):
        said = dict(prompts=["?"] * len(turns), completions=[turn.completion for turn in turns])
        return rewards.unfinished(2.0)(**said, terminated=[turn.terminated for turn in turns])


def test_unfinished_rows_pay_once():
    """trl#5338: the penalty looked at the wrong token."""
    stop = WORDS.index(".")
    env = TextVectorEnv(
        PaysForAnEnd(["a b"]), tokenizer=make_tokenizer(WORDS), num_envs=5, max_new_tokens=3, stop=[stop]
    )
    answers = [[0, stop], [0, EOS], [0, 1, 2], [0, 1, stop], [PAD, PAD, PAD]]
    env.reset(seed=0)
    paid, over = np.zeros(5), np.zeros(5, dtype=bool)
    for t in range(3):
        actions = [answer[t] if t < len(answer) and not over[row] else 0 for row, answer in enumerate(answers)]
        _, reward, terminated, truncated, _ = env.step(actions)
        paid += np.where(over, 0, reward)
        over |= terminated | truncated
    assert over.all() and paid.tolist() == [0, 0, -2, 0, -2]


@pytest.mark.parametrize(("limit", "buffer"), [(20, 4), (8, 8)])
def test_the_soft_punishment_is_trls(limit, buffer):
    trl_rewards = pytest.importorskip(
        "trl.rewards", reason="pip install --no-deps -c constraints.txt trl, as make does"
    )
    theirs = trl_rewards.get_soft_overlong_punishment(limit, buffer)
    completion_ids = [[5] * length for length in range(1, limit + 3)]
    expected = theirs(completion_ids=completion_ids)
    assert min(expected) == -1 and len(set(expected)) > 3
    found = rewards.overlong(limit, buffer)(
        prompts=["a"] * len(completion_ids), completions=["b"] * len(completion_ids), completion_ids=completion_ids
    )
    assert found == pytest.approx(expected)


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="limit is 4 and buffer 5, expected 0 < buffer <= limit"):
        rewards.overlong(4, 5)
