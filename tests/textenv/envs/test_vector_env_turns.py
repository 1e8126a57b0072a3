"""Turns of a text vector environment: their ends, and rewards that fail."""

import numpy as np
import pytest

from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.text_envs import EOS, text_env
from textenv import TextVectorEnv


def test_a_failed_reward_is_not_asked_after_a_reset():
    scored_now = []

    def fails_first(completions):
        scored_now.append(list(completions))
        if len(scored_now) == 1:
            raise RuntimeError("down")
        return [1.0] * len(completions)

    tokenizer = make_tokenizer(WORDS)
    env = TextVectorEnv(prompts=["a b"], reward=fails_first, tokenizer=tokenizer, num_envs=1)
    env.reset(seed=0)
    env.step(np.array([5]))
    with pytest.raises(ValueError, match="down"):
        env.step(np.array([EOS]))
    before = len(scored_now)
    env.reset()
    env.step(np.array([6]))
    reward = env.step(np.array([EOS]))[1]
    assert [text.split() for batch in scored_now[before:] for text in batch] == [["bad"]] and reward.tolist() == [1.0]


def test_a_stop_text_may_end_a_turn_after_the_minimum():
    """`min_new_tokens` tokens are enough: the second of two may complete "good"."""
    env = text_env(num_envs=1, stop=["good"], min_new_tokens=2)
    env.reset(seed=0)
    assert not env.step(np.array([5]))[2][0], "too early"
    env.reset(seed=0)
    env.step(np.array([0]))
    assert env.step(np.array([5]))[2][0]
