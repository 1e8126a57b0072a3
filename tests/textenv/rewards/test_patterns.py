"""Rewards by tags, words and patterns."""

import pytest

from tests.helpers.rating import rate
from textenv import rewards


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
