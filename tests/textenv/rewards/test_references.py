"""Answers that are compared with a reference."""

import pytest

from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.rating import rate
from textenv import TextVectorEnv, rewards
from textenv.envs.task import FunctionTask

EOS, PAD = WORDS.index("<eos>"), WORDS.index("<pad>")


def test_token_f1_and_exact_answers():
    f1 = rewards.token_f1()
    found = rate(f1, "The cat, the cat!", "b", "", "x", "y", reference=["the cat", "a", "", None, "Y y"])
    assert found == pytest.approx([2 * 2 / 6, 0, 1, None, 2 / 3])
    exact = rate(rewards.exact_answer("gold"), " 4\n", "four", "4", "4.0", gold=["4", "4", None, 4])
    assert exact == [1, 0, None, 0]


def test_ready_made_functions_pay_in_an_environment():
    prompts = [{"prompt": "a b", "answer": "good"}]
    task = FunctionTask(prompts, rewards.exact_answer())
    env = TextVectorEnv(task, tokenizer=make_tokenizer(WORDS), num_envs=2, max_new_tokens=3)
    env.reset(seed=0)
    env.step([5, 6])
    assert env.step([EOS, EOS])[1].tolist() == [1, 0]
