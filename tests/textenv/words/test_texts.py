"""Spaces of texts, by Gymnasium's own functions of spaces."""

import pickle
from collections import Counter

import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from textenv.words.texts import AnyText, ListedText


def test_samples_of_a_list_are_its_texts_equally_often():
    space = ListedText(["left", "turn left", "up"])
    space.seed(0)
    counts = Counter(space.sample() for _ in range(3000))
    assert set(counts) == {"left", "turn left", "up"}
    assert all(900 < count < 1100 for count in counts.values())


def test_a_list_contains_its_texts_only():
    space = ListedText(["left", "turn left"])
    assert "left" in space and "turn left" in space
    assert not any(other in space for other in ("Left", "eft", "turn", "", 3))
    assert (space.min_length, space.max_length, space.character_set) == (4, 9, frozenset("left urn"))


def test_any_text_has_any_character_up_to_its_length():
    space = AnyText(4)
    assert "é→🟦\n" in space and "" in space
    assert "12345" not in space and 1234 not in space
    assert all(space.sample() in space for _ in range(50))


@pytest.mark.parametrize("space", [ListedText(["left", "up"]), AnyText(7)], ids=["ListedText", "AnyText"])
def test_a_copy_and_a_batch_have_the_same_texts(space):
    assert isinstance(space, spaces.Text)
    assert pickle.loads(pickle.dumps(space)) == space
    assert all(part == space for part in batch_space(space, 3))


def test_lists_are_equal_if_their_texts_are():
    assert ListedText(["a", "b"]) == ListedText(["a", "b"])
    assert ListedText(["a", "b"]) != ListedText(["b", "a"])
    assert ListedText(["ab", "ba"]) != spaces.Text(2, min_length=2, charset="ab")


def test_masks_of_characters_are_refused():
    with pytest.raises(ValueError, match="leave out mask"):
        ListedText(["a"]).sample(mask=(None, None))
