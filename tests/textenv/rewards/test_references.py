"""Answers that are compared with a reference."""

import math
from decimal import Decimal

import numpy as np
import pytest

from tests.helpers.errors import refused
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


def rate_all(reward, *answers, gold):
    """The scores of answers that have the same reference."""
    return rate(reward("gold"), *answers, gold=[gold] * len(answers))


SEVERAL = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "array": np.array,
    "array of objects": lambda references: np.array(references, dtype=object),
    "squad": lambda references: {"text": list(references), "answer_start": [0] * len(references)},
    "squad in parquet": lambda references: {"text": np.array(references), "answer_start": np.zeros(len(references))},
    "squad of json": lambda references: [{"text": text, "answer_start": 0} for text in references],
}
"""How data sets write several references of a row."""


@pytest.mark.parametrize("kind", SEVERAL)
def test_any_of_several_references_is_right(kind):
    several = SEVERAL[kind]
    words = several(["Lima", "lima"])
    assert rate_all(rewards.exact_answer, "Lima", " lima\n", "LIMA", str(words), gold=words) == [1, 1, 0, 0]
    assert rate_all(rewards.numeric_answer, "3", "#### 4", "5", gold=several(["3", "it is 4"])) == [1, 1, 0]
    assert rate_all(rewards.numeric_answer, "3", "4.0", "5", "0", gold=several([3, 4])) == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", SEVERAL)
def test_token_f1_is_the_largest_one(kind):
    """As in SQuAD's evaluation: the maximum over the answers of people, not their mean."""
    places = SEVERAL[kind](["the park", "a big green park"])
    found = rate_all(rewards.token_f1, "the park", "a green park", "text answer_start", "big", gold=places)
    assert found == pytest.approx([1, 6 / 7, 0, 2 / 5])


@pytest.mark.parametrize("make", [rewards.exact_answer, rewards.token_f1, rewards.numeric_answer])
def test_one_reference_in_a_list_is_that_reference(make):
    for reference in ("4", 4, 4.0, np.float32(4), "4 5"):
        bare = rate_all(make, "4", "4.0", "5", "", gold=reference)
        for several in ([reference], (reference, None), [math.nan, reference, " "], {"text": reference}):
            assert rate_all(make, "4", "4.0", "5", "", gold=several) == bare


def test_a_list_of_texts_without_a_number_is_none():
    assert rate_all(rewards.numeric_answer, "4", gold=["none", "few"]) == [None]
    assert rate_all(rewards.numeric_answer, "4", "5", gold=["none", "4"]) == [1, 0]


def test_references_may_be_tensors():
    torch = pytest.importorskip("torch")
    assert rate_all(rewards.numeric_answer, "3", "0.1", "4", gold=torch.tensor([3, 0.1])) == [1, 1, 0]
    assert rate_all(rewards.exact_answer, "4", "5", gold=torch.tensor(4)) == [1, 0]


@pytest.mark.parametrize("true", [True, np.bool_(True), [True], np.array([True])])
def test_true_of_json_is_true_in_any_case(true):
    answers = ["true", " True\n", "TRUE", "yes", "1", "false"]
    assert rate_all(rewards.exact_answer, *answers, gold=true) == [1, 1, 1, 0, 0, 0]
    assert rate_all(rewards.token_f1, "true", "False", gold=true) == [1, 0]
    assert rate_all(rewards.exact_answer, "false", "true", gold=False) == [1, 0]
    with refused(TypeError, "'gold'", "bool", "expected a number", "exact_answer"):
        rate_all(rewards.numeric_answer, "1", gold=true)


@pytest.mark.parametrize("make", [rewards.exact_answer, rewards.token_f1, rewards.numeric_answer])
@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"value": "4", "aliases": ["four"]}, "dict"),
        ({"text": ["4"], "score": [1.0]}, "dict"),
        ({}, "dict"),
        ([{"role": "assistant", "content": "4"}], "dict"),
        ([["4"], ["5"]], "list"),
        (np.array([[4, 5]]), "ndarray"),
        (b"4", "bytes"),
        ([b"4"], "bytes"),
    ],
)
def test_what_holds_no_text_is_refused(make, entry, kind):
    with refused(TypeError, "column 'gold'", f"the {kind}", "expected a text, a number", "write what is right"):
        rate_all(make, "4", gold=entry)


@pytest.mark.parametrize("make", [rewards.exact_answer, rewards.token_f1, rewards.numeric_answer])
@pytest.mark.parametrize("entry", [[], (), np.array([]), {"text": [], "answer_start": []}, [None], ["", math.nan]])
def test_a_list_without_a_reference_is_refused(make, entry):
    """SQuAD 2.0 has such rows, which only the user can judge."""
    with refused(ValueError, "column 'gold'", "no reference", "give None"):
        rate_all(make, "4", gold=entry)


def test_lists_of_a_parquet_file_are_references(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    squad = {"text": ["the park", "at the park"], "answer_start": [12, 9]}
    rows = [{"prompt": "where?", "answers": squad, "gold": ["3", "4"]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "prompts.parquet")
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    (row,) = load_prompts(tmp_path / "prompts.parquet")
    for read_row in (row, pandas.read_parquet(tmp_path / "prompts.parquet").iloc[0]):
        assert rate(rewards.token_f1("answers"), "the park", answers=[read_row["answers"]]) == [1]
        assert rate(rewards.numeric_answer("gold"), "3", gold=[read_row["gold"]]) == [1]


@pytest.mark.parametrize("answer", ["good", ["fine", "good"], {"text": ["good"], "answer_start": [0]}])
def test_ready_made_functions_pay_in_an_environment(answer):
    prompts = [{"prompt": "a b", "answer": answer}]
    task = FunctionTask(prompts, rewards.exact_answer())
    env = TextVectorEnv(task, tokenizer=make_tokenizer(WORDS), num_envs=2, max_new_tokens=3)
    env.reset(seed=0)
    env.step([5, 6])
    assert env.step([EOS, EOS])[1].tolist() == [1, 0]
