"""The number that an answer gives."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.rating import rate
from textenv import rewards
from textenv.rewards.numeric import as_fraction, last_boxed, number_of

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
    "\\boxed{25 \\text{ cm}^{2}}": 25,
    "64 m^{3}.": 64,
    "25 m^-2": 25,
    "25 m^{-2}": 25,
    "25 m^ {2}": 25,
    "25 m ^ 2": 25,
    "25 m^(-2)": 25,
    "25 m^{1/2}": 25,
    "25 m^\\frac{1}{2}": 25,
    "25 m^\\text{2}": 25,
    "25 m^{2^{3}}": 25,
    "90^{\\circ}": 90,
    "90^\\circ": 90,
    "the 4^{th}": 4,
    "\\boxed{1024_{10}}": 1024,
    "1024_10": 1024,
    "x_{12}": None,
    "3 of x_ {12}": 3,
    "a_{2} = 7": 7,
    "5\\,\\mathrm{kg}\\,\\mathrm{m}^{2}\\,\\mathrm{s}^{-2}": 5,
    "{}^{14}C": None,
    "it is ___ {42}": 42,
    "it is ___\\textbf{42}": 42,
    "x^{2 and 42": 42,
    "3^{2}/4": 4,
    "2^{10}": 2,
    "2^10": 2,
    "\\boxed{2 \\times 10^{3}}": 2000,
    "2 \\times 10^3": 2000,
    "2\\times10^3 m^{2}": 2000,
    "2 \\cdot 10^{-3}": Fraction(1, 500),
    "-2.5 * 10^-3": Fraction(-1, 400),
    "1,500 × 10^(+2)": 150_000,
    "6.02x10^{23}": 602 * 10**21,
    "1/2 × 10^3": 500,
    "\\frac{1}{2} \\times 10^{3}": 500,
    "10^{3}": 1000,
    "10^{-3}": Fraction(1, 1000),
    "-10^3": -1000,
    "5/10^{3}": Fraction(1, 200),
    "10^{3}/4": 250,
    "\\frac{1}{10^{3}}": Fraction(1, 1000),
    "10^{n}": 10,
    "10^{1.5}": 10,
    "110^{3}": 110,
    "3 × 10": 10,
    "3 × 10^{999999999}": None,
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


UNITS = ["m", " m", " cm", "\\text{ cm}", "\\,\\mathrm{kg}\\,\\mathrm{m}", " N/m", " kg \\cdot m"]
EXPONENTS = ["^%d", "^{%d}", "^ {%d}", "^{ %d }", "^(%d)", "^ %d", "_{%d}", "^{\\text{%d}}", "^{\\frac{%d}{2}}"]
TEXTS = ["\\boxed{%s}", "#### %s.", "So the answer is $%s$.", "%s"]


@settings(derandomize=True, deadline=None, database=None, max_examples=500)
@given(
    number=st.integers(-(10**6), 10**6),
    divisor=st.sampled_from([1, 10, 100]),
    unit=st.sampled_from(UNITS),
    exponent=st.sampled_from(EXPONENTS),
    power=st.integers(-12, 12),
    text=st.sampled_from(TEXTS),
)
def test_a_unit_with_an_exponent_changes_no_number(number, divisor, unit, exponent, power, text):
    decimal = str(Decimal(number) / divisor)
    assert number_of(text % (decimal + unit + exponent % power)) == Fraction(number, divisor)


def test_the_box_keeps_its_braces():
    assert last_boxed("a \\boxed{\\frac{1}{2}} b") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1 \\boxed{2}}") == "1 \\boxed{2}" and last_boxed("\\boxed{1 \\boxed{2}") == "2"
    assert last_boxed("boxed{1} \\boxed{") is None


def test_numeric_answers_are_compared_exactly():
    """The column's entries are read as the answers are."""
    given = ["0.1", 0.1, Decimal("0.1"), Fraction(1, 10), np.float64(0.1), "#### 0.1", "10%", 1, None, "none", math.nan]
    wanted = [1.0] * 7 + [0.0] + [None] * 3
    assert rate(rewards.numeric_answer(), *["it is 0.1"] * len(given), answer=given) == wanted
    assert rate(rewards.numeric_answer("gold"), "0.33", "1/3", "2/6", gold=["1/3"] * 3) == [0.0, 1.0, 1.0]
    assert as_fraction(10**5000) == 10**5000 and as_fraction(True) == 1
    with pytest.raises(ValueError, match="numeric_answer.*needs the column 'answer'.*'gold'"):
        rate(rewards.numeric_answer(), "1", gold=[1])


def test_a_percent_sign_may_be_left_out():
    """As in GSM8K: "What percentage ...", answer 60."""
    score = rewards.numeric_answer()
    answers = ["60%", "60 %", "60", "0.6", "6%"]
    assert score(prompts=["?"] * 5, completions=answers, answer=["60"] * 5) == [1, 1, 1, 0, 0]
    assert score(prompts=["?"] * 5, completions=answers, answer=["60%"] * 5) == [1, 1, 0, 1, 0]


@pytest.mark.heavy
def test_a_long_answer_is_read_from_its_end():
    long = "1," * 500_000
    said = long + " so it is 42", "42 " + long, long
    assert rate(rewards.numeric_answer(), *said, answer=["42", "42", "1"]) == [1.0, 0.0, 1.0]
