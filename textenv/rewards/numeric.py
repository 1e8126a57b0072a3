"""Exact parsing of numbers in texts, and a reward for the right number."""

import re
from fractions import Fraction

from textenv.rewards.answer import ColumnReward, by_any_reference, refuse_truth_value

MAX_DIGITS = 400
"""Maximum number of digits, and of the power of ten, of a number; ``1e999999999`` would exhaust the memory."""

MAX_CHARACTERS = 100_000
"""Maximum number of characters parsed, because a policy may write a megabyte of commas."""

# Digits in groups of three (1,234.5), plain ones (1234.5), or none before the point (.5); then a power of ten (e-3)
_DECIMAL = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][+-]?[0-9]+(?!\w))?"
)
# Sign, number, divisor, power of ten (× 1e3, as `_plain` writes it) and percent sign. A digit directly after a letter,
# `_` or `^` belongs to a name, a unit or a power (x2, H2O, m^2)
_NUMERAL = re.compile(
    rf"(?<![A-Za-z_^0-9])(?<![0-9]\.)((?<![)\]])[-+])?({_DECIMAL})(?: ?/ ?([-+]?{_DECIMAL}))?"
    r"(?: {0,2}[×·*x] ?(1e[-+]?[0-9]+(?!\w)))?(?: ?(%))?"
)
# Exponent of 10^{-3}, 10^(-3) or 10^-3; the 10 may follow an x directly, as in 6.02x10^23
_POWER_OF_TEN = re.compile(
    r"(?:(?<![A-Za-z_^0-9.])|(?<=[0-9]x))10 ?\^ ?"
    r"(?:\{ ?([-+]?[0-9]+) ?\}|\( ?([-+]?[0-9]+) ?\)|([-+]?[0-9]+)(?!\.?[0-9]))"
)
# An exponent that is a number or in parentheses (m^-2, m^(2), m ^ 2), and an exponent or index that is \frac{1}{2}
_SCRIPT = re.compile(
    r"(?<=[^\s^_]) ?\^ ?(?:[-+]?[0-9]+(?:\.[0-9]+)?|\([^()\n]*\))|(?<![_\\])[\^_] ?\\[dt]?frac ?\{[^{}]*\} ?\{[^{}]*\}"
)
# What comes before the brace of other exponents and indices: ^{2}, _ {10}, ^\text{2}; but a blank (___ {42}) does not
_BEFORE_SCRIPT = r"(?<![_\\])[\^_] ?(?:\\[A-Za-z]+ ?)?"
# Sign, numerator and denominator of \frac{1}{2}
_TEX_FRACTION = re.compile(rf"((?<![0-9])[-+])?\\[dt]?frac ?\{{ ?([-+]?{_DECIMAL}) ?\}} ?\{{ ?([-+]?{_DECIMAL}) ?\}}")
# A currency sign, and the sign of the number before or after it
_CURRENCY = re.compile(r"((?<![0-9])[-+])?\\?[$€£¥₹]([-+]?)")
# GSM8K's mark of the answer, before a number
_HASHES = re.compile(r"####[ \t]*(?=[-+.$]{0,3}[0-9])")


def numeric_answer(column: str = "answer") -> ColumnReward:
    """Reward 1 if the completion's number equals the column's exactly, else 0; None if the column has no number.

    The completion's number is that of its last complete ``\\boxed{}``, else the one after its last ``####`` (GSM8K),
    else its last number. Accepted are ``-7``, ``1,234.5``, ``$3``, ``1/2``, ``\\frac{1}{2}``, ``50%`` (one half),
    ``1.5e3`` and ``1.5 \\times 10^{3}``, with a decimal point; not mixed numbers (``1 1/2`` is one half), nor more than
    400 digits. Exponents and indices are not numbers: ``25 cm^{2}`` is 25, and ``1024_{10}`` is 1024. Only powers of
    ten are computed: ``10^{3}`` is 1000, and ``2^{10}`` is read as its base, 2. Only the last 100,000 characters of a
    text are parsed. Numbers are compared as fractions: 0.5 is 1/2, and 0.33 is not 1/3; ``60%`` also equals 60 if the
    column has no percent sign. The column holds numbers, or texts that are parsed in the same way; any number of a list
    is right (`exact_answer`), and True and False are refused.

    Example:
        >>> answers = ["So it is 1/2.", "#### 50%", "0.5 or \\\\boxed{3}", "none"]
        >>> numeric_answer()(prompts=["1-1/2="] * 4, completions=answers, answer=["0.5"] * 4)
        [1.0, 1.0, 0.0, 0.0]
    """

    def score(text: str, right: object) -> float | None:
        refuse_truth_value(right, column)
        right_number = as_fraction(right)
        if right_number is None:
            return None
        if number_of(text) == right_number:
            return 1.0
        if "%" in str(right):
            return 0.0
        # "60%" is also 60, as the data may omit the sign (GSM8K)
        return float(number_of(text.replace("%", "")) == right_number)

    return by_any_reference("numeric_answer", column, score)


def as_fraction(number: object) -> Fraction | None:
    """Return the exact value of a number or a number's text; a float means the decimal number it prints as."""
    if isinstance(number, (int, Fraction)):
        return Fraction(number)
    if number is None:
        return None
    return number_of(str(number))


def number_of(text: str) -> Fraction | None:
    """Return the number that a text gives as its answer, or None if none can be parsed. See `numeric_answer`.

    >>> number_of(r"2 + 2 = \\boxed{\\frac{8}{2}}, not 5")
    Fraction(4, 1)
    """
    text = text[-MAX_CHARACTERS:]

    # The last number in the last \boxed{}, or the first one after the last ####
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    else:
        hashes = _last(_HASHES, text)
        if hashes is not None:
            first_numeral = _NUMERAL.search(_plain(text[hashes.end() :]))
            if first_numeral is not None:
                return _value(first_numeral)

    # Else the last number
    last_numeral = _last(_NUMERAL, _plain(text))
    if last_numeral is None:
        return None
    return _value(last_numeral)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``, inner braces included; None if there is none."""
    boxes = _complete_braces(text, r"\\boxed ?")
    if not boxes:
        return None
    opening, closing = boxes[-1]
    return text[opening.end() : closing.start()]


def _complete_braces(text: str, before: str) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Return the opening (``before`` and its brace) and the closing brace of each pair of braces after ``before``.

    They come in the order of the closing braces.
    """
    open_braces = []
    pairs = []
    for brace in re.finditer(rf"({before})?\{{|\}}", text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:  # else the brace closes nothing
            opening = open_braces.pop()
            if opening[1]:
                pairs.append((opening, brace))
    return pairs


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern in a text, without keeping the others."""
    last_match = None
    for match in pattern.finditer(text):
        last_match = match
    return last_match


def _plain(text: str) -> str:
    """Remove currency signs, exponents and indices, and replace what TeX and typography write otherwise.

    These are fractions, powers of ten, thin spaces, and signs of minus and multiplication.
    """
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = text.replace("\\times", "×").replace("\\cdot", "×")
    text = _POWER_OF_TEN.sub(r"1e\1\2\3 ", text)
    text = _without_scripts(text)
    text = _TEX_FRACTION.sub(r" \1\2/\3 ", text.replace("\\%", "%"))
    return _CURRENCY.sub(r" \1\2", text)


def _without_scripts(text: str) -> str:
    """Replace exponents and indices by ``^`` and a space; with ``^``, ``3^{2}/4`` is not read as 3/4."""
    text = _SCRIPT.sub("^ ", text)

    # Those in braces, from left to right; one inside another goes with it
    spans = [(opening.start(), closing.end()) for opening, closing in _complete_braces(text, _BEFORE_SCRIPT)]
    kept_parts = []
    position = 0
    for start, stop in sorted(spans):
        if start >= position:
            kept_parts.append(text[position:start])
            position = stop
    kept_parts.append(text[position:])
    return "^ ".join(kept_parts)


def _value(numeral: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMERAL`; None if it is too long, or divides by zero."""
    sign, numerator, denominator, power_of_ten, percent = numeral.groups()
    value = _decimal(numerator)
    divisor = _decimal(denominator or "1")
    factor = _decimal(power_of_ten or "1")
    if value is None or not divisor or factor is None:
        return None
    value = value / divisor * factor
    if percent:
        value = value / 100
    if sign == "-":
        value = -value
    return value


def _decimal(digits: str) -> Fraction | None:
    """Return the value of a match of `_DECIMAL`; None if it is too long, or has too large a power of ten."""
    _, _, power = digits.lower().partition("e")
    if len(digits) > MAX_DIGITS or abs(int(power or "0")) > MAX_DIGITS:
        return None
    return Fraction(digits.replace(",", ""))
