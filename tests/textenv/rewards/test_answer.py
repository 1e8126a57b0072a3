"""What all ready-made functions share: hostile answers, chats, and wrong arguments."""

import math
import time

import pytest

from tests.helpers.rating import rate
from textenv import rewards

HOSTILE = [
    "", "\x00", "\ud800", "9" * 100_000, "1," * 50_000, "1,111" * 20_000, "1/" * 50_000, "1e" * 50_000,
    "1e" + "9" * 99_000 + "x", "\\boxed{" * 14_000, "{" * 100_000, "}" * 100_000, "\\boxed{" + "{}" * 50_000,
    "\\frac{" * 16_000, "#" * 100_000, "####" + " " * 99_000, " " * 100_000, "1" + " " * 99_000 + "/", "-" * 100_000,
    "." * 100_000, "$" * 100_000, "<think>" * 14_000, "<think>" + "</think><answer>" * 6_000, "a" * 100_000,
    "good " * 20_000, "goo" * 33_000, "\u0661" * 100_000, "1/0", "1e999999999", "\u200d" * 100_000, "(" * 100_000,
    "^{" * 50_000, "a^{" * 33_000 + "}" * 33_000, "^" * 100_000, "a^(" * 33_000, "_\\a" * 33_000, "_\\" + "a" * 99_000,
    "^\\frac{" * 14_000, "10^" * 33_000, "10^{" * 25_000, "10^" + "9" * 99_000, "10^{" + "9" * 99_000,
    "1 x " * 25_000, "1 x 10^9" * 12_000, "1,111x10^9 " * 9_000, "1" + " " * 99_000 + "x", "a^" + "1" * 99_000,
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


@pytest.mark.heavy
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


def test_messages_of_parts_have_a_text():
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Li"}, {"type": "text", "text": "ma"}]}]
    silent = [{"role": "assistant", "content": None}]
    found = rewards.matches("^(Lima)?$")(completions=[parts, silent])
    assert found == [1.0, 1.0]


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
def test_wrong_arguments_are_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()
