"""Actions in free text: the last word counts, and a word stands alone."""

import pytest

from tests.helpers.errors import refused
from textenv.words.reading import WordReader

MOVES = WordReader([["left", "right", "turn left", "up"]])
NUMBERS = WordReader([["-1", "0", "1", "10", "0.5"]])


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("left", 0), ("LEFT", 0), (" Right!\n", 1), ("**right**", 1), ("left or right? right", 1),
        ("right, not left", 0), ("I turn left", 2), ("turn\nLeft.", 2), ("turn left, then left", 0),
        ("up: upper", 3), ("'left'", 0),
    ],
)  # fmt: skip
def test_the_last_word_of_a_text_counts(text, index):
    assert MOVES.indices(text) == [index]


@pytest.mark.parametrize("text", ["", "leftover", "bright", "upper", "l e f t", "lef", "rechts", "left_1"])
def test_a_part_of_a_longer_word_is_no_word(text):
    assert MOVES.indices(text) is None


@pytest.mark.parametrize(
    ("text", "index"),
    [("-1", 0), ("I say 1.", 2), ("10", 3), ("0.5", 4), ("x=0", 1), ("5", None), ("100", None), ("1.5", None),
     ("-10", None), ("0.55", None), ("3.1", None)],
)  # fmt: skip
def test_a_number_is_read_whole_and_with_its_sign(text, index):
    assert NUMBERS.indices(text) == (None if index is None else [index])


@pytest.mark.parametrize(
    ("text", "indices"),
    [("left jump", [0, 1]), ("Left, JUMP!", [0, 1]), ("right;stay left jump", [0, 1]), ("left", None),
     ("jump left", None), ("left and jump", None)],
)  # fmt: skip
def test_words_of_several_choices_follow_each_other(text, indices):
    assert WordReader([["left", "right"], ["stay", "jump"]]).indices(text) == indices


def test_words_that_differ_only_in_capitals_are_refused():
    with refused(ValueError, "'go', 'Go'", "capital"):
        WordReader([["go", "Go"]])
