"""Ready-made reward functions and their transforms."""

import json
import math
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tests.helpers.models import WORDS, make_tokenizer
from textenv import TextVectorEnv, rewards
from textenv.envs.task import FunctionTask
from textenv.prompts.prompts import PromptList
from textenv.rewards.calling import call_reward
from textenv.rewards.numeric import as_fraction, last_boxed, number_of

EOS, PAD = WORDS.index("<eos>"), WORDS.index("<pad>")


def rate(function, *answers, chat=False, **columns):
    n = len(answers)
    said = [[{"role": "assistant", "content": text}] if chat else text for text in answers]
    asked = [[{"role": "user", "content": "?"}]] * n if chat else ["?"] * n
    if "completion_ids" not in columns:
        columns["completion_ids"] = [list(text.encode(errors="replace")) for text in answers]
    return call_reward(function, {"prompts": asked, "completions": said, "terminated": [True] * n} | columns)


NUMBERS = {
    "the answer is 42.": 42,
    "-7": -7,
    "(-7)": -7,
    "10-7": 7,
    "10 - 7": 7,
    "(x)-7": 7,
    "[2]-7": 7,
    "x = -0.5": Fraction(-1, 2),
    "\N{MINUS SIGN}3": -3,
    "+3": 3,
    "1,234,567.89 in all": Fraction("1234567.89"),
    "1, 2, 3": 3,
    "1,2,3": 3,
    "12,3456": 3456,
    "1{,}234": 1234,
    "10\\,000": 10000,
    "$1,234.50": Fraction("1234.5"),
    "-$5": -5,
    "$-5": -5,
    "\\$5": 5,
    "$3-$5": 5,
    "US$5": 5,
    "€ 5": 5,
    "£.50": Fraction(1, 2),
    "50%": Fraction(1, 2),
    "12.5 %": Fraction(1, 8),
    "50\\%": Fraction(1, 2),
    "3/4": Fraction(3, 4),
    "-3/4": Fraction(-3, 4),
    "3/-4": Fraction(-3, 4),
    "\\frac{3}{4}": Fraction(3, 4),
    "$\\dfrac{3}{4}$": Fraction(3, 4),
    "-\\frac{3}{4}": Fraction(-3, 4),
    "\\frac{-3}{4}": Fraction(-3, 4),
    "5-\\frac{3}{4}": Fraction(3, 4),
    "\\frac{n}{2}": 2,
    "1/2%": Fraction(1, 200),
    "1.5e3": 1500,
    "2E-2": Fraction(1, 50),
    "1e5x": 1,
    "25 m^2": 25,
    "25 m2 of H2O": 25,
    "wait...42": 42,
    "v1.2": None,
    ".5": Fraction(1, 2),
    "5.": 5,
    "007": 7,
    "\\boxed{42}": 42,
    "\\boxed{x = 42} and 7": 42,
    "\\boxed{1} then \\boxed{2}, 3": 2,
    "\\boxed{\\frac{1}{2}}": Fraction(1, 2),
    "\\boxed{\\text{is } {{5}}} 6": 5,
    "\\boxed {9} 8": 9,
    "\\boxed{3} \\boxed{4": 3,
    "\\boxed{none} 5": None,
    "} \\boxed{5} {": 5,
    "work: 3\n#### 42\nSo 7": 42,
    "#### -1,000": -1000,
    "#### $18": 18,
    "#### 1\n#### 2": 2,
    "#### Step 4\nthe answer is 7": 7,
    "#### 5 but \\boxed{6}": 6,
    "": None,
    "none": None,
    "1/0": None,
    "7 or 1/0": None,
    "\u0664\u0662": None,
    "\u00b2\u00bd": None,
    "1e999999999": None,
    "1e-999999999": None,
    "1e" + "9" * 350: None,
    "9" * 5000: None,
    "inf nan": None,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_number_of_a_text(text):
    assert number_of(text) == NUMBERS[text]


def test_the_box_keeps_its_braces():
    assert last_boxed("a \\boxed{\\frac{1}{2}} b") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1 \\boxed{2}}") == "1 \\boxed{2}" and last_boxed("\\boxed{1 \\boxed{2}") == "2"
    assert last_boxed("boxed{1} \\boxed{") is None


def test_numeric_answers_are_compared_exactly_and_columns_are_read_alike():
    given = ["0.1", 0.1, Decimal("0.1"), Fraction(1, 10), np.float64(0.1), "#### 0.1", "10%", 1, None, "none", math.nan]
    wanted = [1.0] * 7 + [0.0] + [None] * 3
    assert rate(rewards.numeric_answer(), *["it is 0.1"] * len(given), answer=given) == wanted
    assert rate(rewards.numeric_answer("gold"), "0.33", "1/3", "2/6", gold=["1/3"] * 3) == [0.0, 1.0, 1.0]
    assert as_fraction(10**5000) == 10**5000 and as_fraction(True) == 1
    with pytest.raises(ValueError, match="numeric_answer.*needs the column 'answer'.*'gold'"):
        rate(rewards.numeric_answer(), "1", gold=[1])


HOSTILE = [
    "", "\x00", "\ud800", "9" * 100_000, "1," * 50_000, "1,111" * 20_000, "1/" * 50_000, "1e" * 50_000,
    "1e" + "9" * 99_000 + "x", "\\boxed{" * 14_000, "{" * 100_000, "}" * 100_000, "\\boxed{" + "{}" * 50_000,
    "\\frac{" * 16_000, "#" * 100_000, "####" + " " * 99_000, " " * 100_000, "1" + " " * 99_000 + "/", "-" * 100_000,
    "." * 100_000, "$" * 100_000, "<think>" * 14_000, "<think>" + "</think><answer>" * 6_000, "a" * 100_000,
    "good " * 20_000, "goo" * 33_000, "\u0661" * 100_000, "1/0", "1e999999999", "\u200d" * 100_000, "(" * 100_000,
]  # fmt: skip
READY = {
    "matches": rewards.matches("[0-9]$"),
    "format_tags": rewards.format_tags("think", "answer"),
    "forbidden_words": rewards.forbidden_words(["good", "goo bad", "c++"]),
    "keyword_count": rewards.keyword_count(["good", "goo bad"], most=3),
    "length_window": rewards.length_window(2, 9, edge=3),
    "repetition": rewards.repetition(3),
    "unfinished": rewards.unfinished(),
    "numeric_answer": rewards.numeric_answer(),
    "exact_answer": rewards.exact_answer(),
    "token_f1": rewards.token_f1("answer"),
}


@pytest.mark.parametrize("name", READY)
def test_hostile_answers_neither_hang_nor_raise(name):
    assert READY[name].__name__ == name
    start = time.process_time()
    for text in HOSTILE:
        begun = time.process_time()
        ids = [[1] * (len(text) if name in ("length_window", "unfinished") else 1)] * 2  # those that read them
        scores = rate(READY[name], text, text, chat=True, answer=["1", text], completion_ids=ids)
        assert len(scores) == 2 and all(x is None or math.isfinite(x) for x in scores)
        assert time.process_time() - begun < 3, text[:20]
    assert time.process_time() - start < 20


@pytest.mark.parametrize("name", READY)
def test_a_chat_is_scored_as_its_text(name):
    answers = ["4", "<think>good</think><answer>4</answer>", "good good good", "#### 4"]
    columns = dict(answer=["4"] * 4)
    assert rate(READY[name], *answers, **columns) == rate(READY[name], *answers, chat=True, **columns)


def test_messages_of_parts_and_without_content_have_a_text():
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Li"}, {"type": "text", "text": "ma"}]}]
    silent = [{"role": "assistant", "content": None}]
    found = rewards.exact_answer()(completions=[parts, silent], answer=["Lima", ""])
    assert found == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" \n<think>\na\n</think>\n\n<answer></answer>\n", 1),
        ("<think>1 < 2 <b></b></think><answer>b</answer>", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> so", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> and <answer>b</answer>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a<answer></think>b</answer>", 0),
        ("<think>a</think><answer>b</answer", 0),
        ("<think>a</think>", 0),
        ("<answer>b</answer>", 0),
        ("</think><think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_tags_stand_once_in_order_and_alone(text, score):
    assert rate(rewards.format_tags("think", "answer"), text) == [score] == rate(rewards.format_tags(), text)


def test_words_are_whole_and_in_any_case():
    forbidden = rewards.forbidden_words(["bad", "c++", "so what"])
    assert rate(forbidden, "Bad.", "badly", "C++!", "a so what", "so  what", "notbad") == [-1, 0, -1, -1, 0, 0]
    counted = rewards.keyword_count(["good", "good day"], most=3)
    assert rate(counted, "Good", "goods", "good day good", "good " * 9) == pytest.approx([1 / 3, 0, 2 / 3, 1])
    assert rate(rewards.keyword_count(["day", "good", "good day"], most=4), "good day") == [0.25]  # the longest counts


def test_a_length_window_falls_off_on_a_line_and_counts_ids():
    ids = [[0] * n for n in range(12)]
    soft = rewards.length_window(4, 6, edge=4)
    expected = [0, 0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rate(soft, *["x"] * 12, completion_ids=ids) == expected
    assert rate(rewards.length_window(4, 6), *["x"] * 12, completion_ids=ids) == [float(4 <= n <= 6) for n in range(12)]


def test_repetition_is_the_share_of_n_grams_seen_before():
    texts = ["a b a b a b", "a b c", "a a", "a", ""]
    assert rate(rewards.repetition(2), *texts) == pytest.approx([-3 / 5, 0, 0, 0, 0])
    assert rate(rewards.repetition(1), *texts) == pytest.approx([-4 / 6, 0, -1 / 2, 0, 0])


def test_token_f1_and_exact_answers():
    f1 = rewards.token_f1()
    found = rate(f1, "The cat, the cat!", "b", "", "x", "y", reference=["the cat", "a", "", None, "Y y"])
    assert found == pytest.approx([2 * 2 / 6, 0, 1, None, 2 / 3])
    exact = rate(rewards.exact_answer("gold"), " 4\n", "four", "4", "4.0", gold=["4", "4", None, 4])
    assert exact == [1, 0, None, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: rewards.matches("("),
        lambda: rewards.format_tags("<think>"),
        lambda: rewards.forbidden_words([]),
        lambda: rewards.keyword_count(["a", " "]),
        lambda: rewards.keyword_count(["a"], most=0),
        lambda: rewards.length_window(5, 4),
        lambda: rewards.length_window(1, 4, edge=-1),
        lambda: rewards.repetition(0),
        lambda: rewards.unfinished(-1.0),
        lambda: rewards.unfinished(math.nan),
        lambda: rewards.clip(len, 1, 0),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_given(make):
    with pytest.raises(ValueError, match="expected"):
        make()


class PaysForAnEnd(PromptList):
    """A task that asks the function as an environment does, with `terminated`."""

    def score(self, turns):
        said = dict(prompts=["?"] * len(turns), completions=[turn.completion for turn in turns])
        return rewards.unfinished(2.0)(**said, terminated=[turn.terminated for turn in turns])


def test_unfinished_rows_pay_once_and_finished_ones_never_with_a_stop_id_that_is_not_eos():
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


def test_ready_made_functions_pay_in_an_environment():
    prompts = [{"prompt": "a b", "answer": "good"}]
    task = FunctionTask(prompts, rewards.exact_answer())
    env = TextVectorEnv(task, tokenizer=make_tokenizer(WORDS), num_envs=2, max_new_tokens=3)
    env.reset(seed=0)
    env.step([5, 6])
    assert env.step([EOS, EOS])[1].tolist() == [1, 0]


def test_a_function_is_called_with_what_its_signature_takes():
    columns = dict(prompts=["a"], completions=["b"], answer=["c"])
    assert call_reward(lambda completions, prompts: [completions, prompts], columns) == [["b"], ["a"]]
    assert call_reward(lambda **given: sorted(given), columns) == ["answer", "completions", "prompts"]
    assert call_reward(lambda prompts, gold=None: gold, columns) is None
    with pytest.raises(ValueError, match="needs the column 'gold', 'other'.*'answer'"):
        call_reward(lambda prompts, gold, *, other: [], columns)


# --- transforms ------------------------------------------------------------------------------------------------------


def batches():
    rng = np.random.default_rng(0)
    return [rng.normal(1e3, 5, size=n).tolist() for n in (1, 7, 2, 30)]


def echo(x):
    return x


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_normalize_agrees_with_numpy_over_all_that_was_seen(center, scale):
    normalize, seen = rewards.Normalize(echo, center=center, scale=scale), []
    assert normalize.__name__ == "echo"
    for batch in batches():
        seen += batch
        divisor = (np.std(seen) or 1) if scale else 1
        expected = (np.array(batch) - (np.mean(seen) if center else 0)) / divisor
        found = normalize(x=[None, *batch])
        assert found[0] is None
        np.testing.assert_allclose(found[1:], expected, rtol=1e-9, atol=1e-9)
    assert (normalize.count, normalize.mean) == (40, pytest.approx(np.mean(seen)))
    np.testing.assert_allclose(normalize.variance, np.var(seen), rtol=1e-9)


def test_normalize_goes_on_from_json_and_none_changes_nothing():
    first, second = rewards.Normalize(echo), rewards.Normalize(echo)
    for batch in batches()[:3]:
        first(x=batch)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    before = first.state_dict()
    assert first(x=[None, None]) == [None, None] and first(x=[]) == [] and first.state_dict() == before
    assert first(x=batches()[3]) == second(x=batches()[3]) and first.state_dict() == second.state_dict() != before


def test_equal_scores_are_not_blown_up():
    assert rewards.Normalize(echo)(x=[0.1] * 7) == pytest.approx([0] * 7, abs=1e-12)
    assert rewards.Normalize(echo, center=False)(x=[0.1] * 7) == pytest.approx([0.1] * 7)
    assert rewards.whiten(echo)(x=[0.1] * 7) == pytest.approx([0] * 7, abs=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_agrees_with_numpy(shift_mean):
    for batch in batches()[1:]:
        x = np.array(batch)
        expected = (x - x.mean()) / x.std() + (0 if shift_mean else x.mean())
        found = rewards.whiten(echo, shift_mean=shift_mean)(x=[*batch, None])
        assert found[-1] is None
        np.testing.assert_allclose(found[:-1], expected, rtol=1e-9, atol=1e-9)
    assert rewards.whiten(echo)(x=[None]) == [None]


def test_transforms_compose_and_clip():
    def length(completions):
        return [None if text == "-" else len(text) for text in completions]

    both = rewards.clip(rewards.Normalize(length), -0.5, 0.5)
    given = dict(prompts=["?"] * 4, completions=["a", "-", "aaa", "aa"], answer=[1] * 4, terminated=[True] * 4)
    assert both.__name__ == "length" and both(**given) == [-0.5, None, 0.5, 0]
    assert rewards.clip(echo, -math.inf, 2)(x=[-1e9, 3, None]) == [-1e9, 2, None]


@pytest.mark.parametrize("transform", [rewards.Normalize, rewards.whiten])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_before_it_stays_in_the_mean(transform, bad):
    function = transform(echo)
    with pytest.raises(ValueError, match="'echo' returned (nan|inf) for row 2"):
        function(x=[1.0, None, bad])
    assert function(x=[1.0, 3.0]) == [-1, 1]


def test_a_percent_sign_that_the_data_leave_out_is_no_error():
    """As in GSM8K: "What percentage ...", answer 60."""
    score = rewards.numeric_answer()
    answers = ["60%", "60 %", "60", "0.6", "6%"]
    assert score(prompts=["?"] * 5, completions=answers, answer=["60"] * 5) == [1, 1, 1, 0, 0]
    assert score(prompts=["?"] * 5, completions=answers, answer=["60%"] * 5) == [1, 1, 0, 1, 0]


def test_of_a_very_long_answer_the_last_characters_are_read():
    long = "1," * 500_000
    said = long + " so it is 42", "42 " + long, long
    assert rate(rewards.numeric_answer(), *said, answer=["42", "42", "1"]) == [1.0, 0.0, 1.0]
