"""Numbers and ways in words."""

import pytest

from textenv.words.phrases import number_in_words, sided, way


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (-0.12345, "-0.123"),
        (99999.0, "100000"),
        (1234567.0, "1230000"),
        (3.4e38, "3.4e38"),
        (-1.256e-9, "-1.26e-9"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (-float("inf"), "-inf"),
    ],
)
def test_a_number_has_three_digits(value, text):
    assert number_in_words(value) == text


def test_a_side_stands_for_the_sign():
    assert [sided(value) for value in (-1.6, 0.4, -0.4, 12)] == ["2 left", "0", "0", "12 right"]
    assert sided(-3, "up", "down") == "3 up"
    assert sided(float("-inf")) == "inf left"


def test_a_way_names_the_steps_that_it_needs():
    assert way("2 up", "1 left") == "2 up, 1 left"
    assert way("0", "1 left") == "1 left"
    assert way("0", "0") == "here"
