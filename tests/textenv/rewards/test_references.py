"""Answers that are compared with a reference."""

import math
from decimal import Decimal

import numpy as np
import pytest

from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.rating import rate
from textenv import TextVectorEnv, load_prompts, rewards
from textenv.envs.task import FunctionTask

EOS, PAD = WORDS.index("<eos>"), WORDS.index("<pad>")


def test_token_f1_and_exact_answers():
    f1 = rewards.token_f1()
    found = rate(f1, "The cat, the cat!", "b", "?", "x", "y", reference=["the cat", "a", "!", None, "Y y"])
    assert found == pytest.approx([2 * 2 / 6, 0, 1, None, 2 / 3])
    exact = rate(rewards.exact_answer("gold"), " 4\n", "four", "4", "4.0", gold=["4", "4", None, 4])
    assert exact == [1, 0, None, 0]


@pytest.mark.parametrize("make", [rewards.exact_answer, rewards.token_f1, rewards.numeric_answer])
def test_an_empty_cell_is_no_reference(make):
    """Not even for the answer that repeats it."""
    empty = [None, "", " \n", math.nan, np.float32("nan"), np.float64("nan")]
    for answer in ("4", "", "nan"):
        assert rate(make("gold"), *[answer] * len(empty), gold=empty) == [None] * len(empty)


def test_a_text_that_says_nan_is_a_reference():
    assert rate(rewards.exact_answer("gold"), "nan", "NA", "none", gold=["nan", "NA", "None"]) == [1, 1, 0]


@pytest.mark.parametrize("make", [rewards.exact_answer, rewards.token_f1, rewards.numeric_answer])
def test_a_whole_float_is_the_whole_number_too(make):
    answers = ["4", "4.0", " 4\n", "-3", "0", "5"]
    for kind in (float, np.float32, np.float64):
        column = [kind(number) for number in (4, 4, 4, -3, -0.0, 4)]
        assert rate(make("gold"), *answers, gold=column) == [1, 1, 1, 1, 1, 0]


def test_other_numbers_are_equal_to_their_text_alone():
    gold = [4, "4.0", 2.5, 2.5, 2.5, Decimal("4.0"), True, math.inf]
    answers = ["4.0", "4", "2.5", "2", "2.50", "4.0", "True", "inf"]
    assert rate(rewards.exact_answer("gold"), *answers, gold=gold) == [0, 0, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("make", [rewards.exact_answer, rewards.token_f1, rewards.numeric_answer])
def test_a_data_frame_with_an_empty_cell_is_read_as_the_list_is(make):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    rows = [{"prompt": "2 + 2", "answer": 4}, {"prompt": "a cat", "answer": None}, {"prompt": "6 - 1", "answer": 5}]
    for frame in (pandas.DataFrame(rows), pandas.DataFrame(rows).convert_dtypes()):
        assert rate(make("answer"), "4", "nan", "4", answer=frame["answer"].tolist()) == [1, None, 0]
        assert rate(make("answer"), "<NA>", "<NA>", "5", answer=frame["answer"].tolist()) == [0, None, 1]


def test_an_empty_cell_of_csv_is_no_reference(tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,answer\n2 + 2,4\na cat,\n")
    answers = [row["answer"] for row in load_prompts(tmp_path / "prompts.csv")]
    assert rate(rewards.exact_answer(), "4", "", answer=answers) == [1, None]


def test_ready_made_functions_pay_in_an_environment():
    prompts = [{"prompt": "a b", "answer": "good"}]
    task = FunctionTask(prompts, rewards.exact_answer())
    env = TextVectorEnv(task, tokenizer=make_tokenizer(WORDS), num_envs=2, max_new_tokens=3)
    env.reset(seed=0)
    env.step([5, 6])
    assert env.step([EOS, EOS])[1].tolist() == [1, 0]
