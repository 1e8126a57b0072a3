"""Read a judge's verdict from its reply: a number on a scale, wherever and however the judge wrote it."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CHARACTERS = 10_000
"""Characters that are read, from the end of a reply."""
VERDICT_FIELDS = ("verdict", "score", "rating")
"""Fields of a JSON object that hold a verdict."""
_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def _number_words() -> dict[str, int]:
    """Return the numbers from 0 to 100 by their English words, with a space between tens and units."""
    words = {word: value for value, word in enumerate(_UNITS)}
    for index, tens_word in enumerate(_TENS):
        tens = 10 * (index + 2)
        words[tens_word] = tens
        for unit in range(1, 10):
            words[f"{tens_word} {_UNITS[unit]}"] = tens + unit
    return words | {"hundred": 100, "one hundred": 100, "a hundred": 100}


NUMBER_WORDS = _number_words()
_WORD = "|".join(word.replace(" ", "[ -]") for word in sorted(NUMBER_WORDS, key=len, reverse=True))
# Digits, also with points and commas between them; a digit beside a letter belongs to a name (GPT-4, 4th)
_DIGITS = r"(?<![^\W_])(?<![^\W\d_]-)(?<![.,\d])(?:\d++(?:[.,]\d++)*+|\.\d++)(?![^\W_])"
_SIGN = "(?:(?<![\\w)\\]])[-+\N{MINUS SIGN}])?"
_NUMBER = rf"(?:{_SIGN}{_DIGITS}|(?<![^\W_])(?:{_WORD})(?![^\W_]))"
_RANGE = "(?P<range>-|\N{EN DASH}|\N{EM DASH}|\\.\\.+|to\\b|through\\b|and\\b|or\\b)"
# Spaces, and the marks of bold type and of code: **4** out of 5
_GAP = r"[\s*_`]{0,6}"
_OUT_OF = r"(?:out )?of\b(?: (?:a|an|the) (?:possible|total|maximum)(?: of)?\b)?"
_NUMERAL = re.compile(
    rf"(?:(?P<mention>\b(?:scale of|maximum(?: of|:)?|max\.?:?)\s+)|(?P<than>\bthan\s+(?:(?:answer|response)[ _])?))?"
    rf"(?P<first>{_NUMBER})(?:"
    rf"{_GAP}(?:\([a-z ]{{1,20}}\)\s)?{_RANGE}{_GAP}(?P<last>{_NUMBER})"
    rf"|{_GAP}(?:(?:points?|stars?|marks?)\s)?\(?(?:/|\N{{FRACTION SLASH}}|{_OUT_OF}){_GAP}(?P<denominator>{_NUMBER})"
    r"|\s?(?P<percent>%)"
    r"|(?P<half> point \S+| and a half\b)"
    r"|(?P<end>[- ](?:point|star) scale\b| max(?:imum)?\b|\s?(?:=|is|being)? (?:the )?(?:best|worst|highest|lowest)\b)"
    r")?",
    re.IGNORECASE,
)
"""A number of a reply, with what makes a range, a fraction or a percentage of it."""
_MARKED = re.compile(r"\[\[([^\[\]\n]{1,40})\]\]|\\boxed\{([^{}\n]{1,40})\}")
"""A verdict in double brackets (Zheng et al. 2023) or in TeX's box."""
_THOUGHT_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@dataclass(frozen=True)
class Scale:
    """Numbers that a judge may give."""

    low: float
    high: float
    is_whole: bool = False
    """True if only whole numbers are verdicts, and no fractions."""

    def read(self, reply: str) -> float | None:
        """Return the verdict of a reply; None if it cannot be read, or is not on the scale.

        Thoughts between tags are left out. The verdict is that of the last JSON object with a field of
        `VERDICT_FIELDS`, else the last one in ``[[…]]`` or ``\\boxed{…}``, else the last number of the reply. Mentions
        of the scale itself ("from 1 to 5") are no verdicts. A fraction is a number out of the scale's highest, as 4/5
        on a scale to 5; on a scale from 0 to 1 every fraction and percentage is a number. Words up to a hundred are
        numbers; "one" is only if there is no other. A range ("3-4"), a comparison ("better than 2") as the last number
        and a decimal comma cannot be read. A number outside the scale is not clipped: whoever gives it has not
        understood the question.

        Example:
            >>> scale = Scale(1, 5)
            >>> scale.read("<think>2?</think> Of 3 facts, all are right: 4/5"), scale.read("9"), scale.read("good")
            (4.0, None, None)
        """
        text = without_thoughts(reply)[-MAX_CHARACTERS:]
        verdict = self._last_number(text)
        marked = list(_MARKED.finditer(text))
        if marked:
            verdict = self._last_number(marked[-1][1] or marked[-1][2])
        fields = list(_verdict_fields(text))
        if fields:
            verdict = self._value_of_field(fields[-1])
        if verdict is None or not self.low <= verdict <= self.high:
            return None
        if self.is_whole and verdict != int(verdict):
            return None
        return verdict

    def _value_of_field(self, value: object) -> float | None:
        """Return the number of a field of JSON: a number, or a text with one."""
        if isinstance(value, str):
            return self._last_number(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value)

    def _last_number(self, text: str) -> float | None:
        """Return the last number of a text that is no mention of the scale; None if there is none, or a range."""
        numerals = [numeral for numeral in _NUMERAL.finditer(text) if not self._is_mention(numeral)]
        # "A good one" is no verdict
        others = [numeral for numeral in numerals if numeral["first"].lower() != "one" or _is_compound(numeral)]
        numerals = others or numerals
        if not numerals:
            return None
        return self._value(numerals[-1])

    def _is_mention(self, numeral: re.Match[str]) -> bool:
        """Return True for the scale itself: "1 to 5", "scale of 5", "1 = worst"."""
        ends = {self.low, self.high}
        if numeral["range"]:
            return {_value_of(numeral["first"]), _value_of(numeral["last"])} == ends
        if numeral["end"]:
            return _value_of(numeral["first"]) in ends
        return bool(numeral["mention"]) and not numeral["denominator"] and _value_of(numeral["first"]) == self.high

    def _value(self, numeral: re.Match[str]) -> float | None:
        """Return the value of a match of `_NUMERAL`; None if it is a range, out of another number, or "than" it."""
        value = _value_of(numeral["first"])
        if value is None or numeral["range"] or numeral["half"] or numeral["than"]:
            return None
        if not numeral["denominator"] and not numeral["percent"]:
            return value

        # A fraction
        denominator: float | None = 100.0
        if numeral["denominator"]:
            denominator = _value_of(numeral["denominator"])
        if self.is_whole or not denominator:
            return None
        if denominator == self.high:
            return value
        if (self.low, self.high) == (0, 1):
            return value / denominator
        return None


def _is_compound(numeral: re.Match[str]) -> bool:
    """Return True for a range, a fraction or a percentage."""
    return any(numeral[group] for group in ("range", "denominator", "percent", "half"))


def without_thoughts(reply: str) -> str:
    """Return a reply without what stands between ``<think>`` and ``</think>``, or a tag of that kind.

    A closing tag alone ends thoughts that the chat template has opened; an opening tag alone is never closed.

    Example:
        >>> without_thoughts("<think>3?</think> 4"), without_thoughts("3? </think> 4"), without_thoughts("<think> 4")
        (' 4', ' 4', '')
    """
    kept = ""
    depth = 0
    position = 0
    for tag in _THOUGHT_TAG.finditer(reply):
        if depth == 0:
            kept += reply[position : tag.start()]
        position = tag.end()
        if not tag[1]:
            depth += 1
        elif depth:
            depth -= 1
        else:
            kept = ""
    if depth == 0:
        kept += reply[position:]
    return kept


def _verdict_fields(text: str) -> Iterator[object]:
    """Yield the verdict of each JSON object in a text that has one, or inside of which a single object has one."""
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            end = position + 1
        else:
            verdicts = _verdicts_in(value)
            if len(verdicts) == 1:  # several parts of a verdict are none
                yield verdicts[0]
        position = text.find("{", end)


def _verdicts_in(value: object) -> list[object]:
    """Return the verdict of a JSON object; if it has none, those of all objects inside of it."""
    if isinstance(value, list):
        return [verdict for item in value for verdict in _verdicts_in(item)]
    if not isinstance(value, dict):
        return []
    by_name = {name.lower(): entry for name, entry in value.items()}
    for name in VERDICT_FIELDS:
        if name in by_name:
            return [by_name[name]]
    return _verdicts_in(list(value.values()))


def _value_of(number: str) -> float | None:
    """Return the value of a match of `_NUMBER`; None for a decimal comma and for several points."""
    word = number.lower().replace("-", " ")
    if word in NUMBER_WORDS:
        return float(NUMBER_WORDS[word])
    digits = number.replace("\N{MINUS SIGN}", "-")
    if _THOUSANDS.fullmatch(digits.lstrip("+-")):
        digits = digits.replace(",", "")
    try:
        return float(digits)
    except ValueError:
        return None
