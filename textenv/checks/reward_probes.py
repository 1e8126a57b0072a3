"""Completions that test a reward function: ordinary ones, and cheating ones, which should not score high."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from textenv.embedded.grammar import sample_review
from textenv.prompts.messages import asked_and_answered
from textenv.prompts.prompts import Prompt, PromptList, by_position
from textenv.prompts.tokenize import text_ids
from textenv.rewards.answer import answer_text
from textenv.rewards.calling import call_reward
from textenv.rewards.scores import RewardError, Rows, read_scores, total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 16
MIN_ROWS = 4
MAX_ROWS = 32
"""Number of prompts that are used of more, if they come alone."""


@dataclass(frozen=True)
class Row:
    """One completion, with its prompt and columns."""

    prompt: Any
    answer: str
    columns: Mapping[str, Any]
    ended: bool = True

    def saying(self, answer: str, *, ended: bool = True) -> Row:
        """Return the same row with another completion."""
        return replace(self, answer=answer, ended=ended)


class Trial:
    """A reward function and its test rows.

    Args:
        function: the reward function.
        rows: ordinary rows.
        tokenizer: computes ``completion_ids``; without one they are the bytes of the text.
    """

    def __init__(
        self, function: Callable[..., Any], rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.function, self.rows, self.tokenizer = function, list(rows), tokenizer
        self.invalid = ""
        """Why the function's return value was not what a reward function returns."""
        self.margin = 0.0
        """Tolerance for rounding between scores."""

    def returned(self, rows: Sequence[Row]) -> Any:
        """Call the function with copies of these rows and return its result."""
        names = {name for row in rows for name in row.columns}
        columns: dict[str, Any] = {name: [copy.deepcopy(row.columns.get(name)) for row in rows] for name in names}
        asked = [_asked(row) for row in rows]
        columns["prompts"] = [prompt for prompt, _ in asked]
        columns["completions"] = [completion for _, completion in asked]
        columns["prompt_ids"] = [self.ids(_text_of(row.prompt)) for row in rows]
        columns["completion_ids"] = [self.ids(row.answer) for row in rows]
        columns["terminated"] = [row.ended for row in rows]
        columns["tool_calls"] = [[] for _ in rows]
        returned = call_reward(self.function, columns, self.tokenizer)
        try:  # reduce per-token and named rewards to their totals
            return [total(earned) for earned in read_scores(returned, Rows(columns), name="", finite=False).earned]
        except RewardError as error:
            self.invalid = str(error)
            return returned  # the checks report the problem

    def scores(self, rows: Sequence[Row]) -> list[float | None]:
        """Return the scores of these rows; raise if the function does, or unless it returns one per row."""
        returned = self.returned(rows)
        if len(returned) != len(rows):
            raise ValueError(f"{len(returned)} scores for {len(rows)} completions")
        return [None if score is None else float(score) for score in returned]

    def difference(self, one: Sequence[float | None], other: Sequence[float | None], where: str) -> str:
        """Return a sentence about the first row whose scores differ, or an empty text. NaN equals NaN."""
        for row, (a, b) in enumerate(zip(one, other, strict=True)):
            close = None not in (a, b) and math.isclose(a, b, rel_tol=1e-9, abs_tol=self.margin)  # type: ignore[arg-type]
            if not close and repr(a) != repr(b):
                return f"the completion {self.rows[row].answer!r:.60} (row {row}) gets {a} and {b}: {where}"
        return ""

    def ids(self, answer: str) -> list[int]:
        """Return the token ids of a completion."""
        if self.tokenizer is None:
            return list(answer.encode("utf-8", "replace"))
        return text_ids(answer, self.tokenizer)


def _asked(row: Row) -> tuple[Any, Any]:
    """Return a row's prompt and completion as an environment gives them to a reward: texts, or messages of a chat."""
    if isinstance(row.prompt, str):
        return row.prompt, row.answer
    return asked_and_answered(copy.deepcopy(list(row.prompt)), row.answer)


def make_rows(
    prompts: Sequence[Any] | None, completions: Sequence[Any] | None, columns: Mapping[str, Sequence[Any]] | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Row]:  # fmt: skip
    """Make rows; missing prompts and completions come from the grammar, half of the latter from columns if given.

    Args:
        prompts: a sequence as in `textenv.PromptList`; a column named ``completion`` has the completions.
        completions, columns: see `textenv.check_reward`.
        tokenizer: decodes prompts that are token ids.

    Raises:
        ValueError: if the arguments differ in length, or are shorter than `MIN_ROWS`; if a column is given twice; or as
            `textenv.PromptList`.
    """
    # Prompts may be mappings with columns of their own.
    asked: list[Any] | None = None
    held_columns = {name: by_position(column) for name, column in (columns or {}).items()}
    completions = None if completions is None else by_position(completions)
    if prompts is not None:
        read = _read_prompts(prompts, longest=None if completions is not None or columns else MAX_ROWS)
        asked = [_shown_prompt(prompt, tokenizer) for prompt in read]
        names = list(dict.fromkeys(name for prompt in read for name in prompt.columns))
        of_prompts = {name: [prompt.columns.get(name) for prompt in read] for name in names}
        if completions is None:
            completions = of_prompts.pop("completion", None)
        if twice := sorted(of_prompts.keys() & held_columns.keys()):
            raise ValueError(f"the columns {', '.join(twice)} are in the prompts and in columns: give each once")
        held_columns |= of_prompts

    # All have the same length.
    given = {"prompts": asked, "completions": completions} | held_columns
    counts = {name: len(each) for name, each in given.items() if each is not None}
    n = next(iter(counts.values()), ROWS)
    if len(set(counts.values())) > 1 or n < MIN_ROWS:
        raise ValueError(f"there are {counts} entries: give the same number of each, at least {MIN_ROWS}")

    # What is missing.
    openings, answers = _sample_reviews(n)
    if completions is not None:
        answers = [answer_text(each) for each in completions]
    elif held_columns:  # every second completion is a column's text, so that some are right
        texts = list(held_columns.values())
        answers[::2] = [str(texts[row // 2 % len(texts)][row]) for row in range(0, n, 2)]
    ended = [completions is not None or row % 4 != 3 for row in range(n)]
    of_rows = [{name: column[row] for name, column in held_columns.items()} for row in range(n)]
    return [Row(*each) for each in zip(asked or openings, answers, of_rows, ended, strict=True)]


def _read_prompts(prompts: Sequence[Any], *, longest: int | None) -> list[Prompt]:
    """Read the first prompts of a sequence, or all if ``longest`` is None."""
    source = PromptList(prompts)
    count = len(source.prompts) if longest is None else min(len(source.prompts), longest)
    return [source.prompt(index) for index in range(count)]


def _shown_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Return a prompt as a reward function receives it: a text, or a list of messages."""
    content = prompt.content
    if isinstance(content, str):
        return content
    if not isinstance(content[0], int):
        return [dict(message) for message in content]
    if tokenizer is None:
        raise ValueError("the prompts are token ids, and rewards receive their text: give their tokenizer")
    return str(tokenizer.decode(list(content)))


def _text_of(prompt: Any) -> str:
    """Return the text of a prompt, of a chat that of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(answer_text([message]) for message in prompt)


def _sample_reviews(n: int) -> tuple[list[str], list[str]]:
    """Sample openings and continuations of reviews of either sentiment; every fourth continuation is truncated."""
    rng = np.random.default_rng(0)
    reviews = [sample_review(rng) for _ in range(n)]
    answers = [review.text.removeprefix(review.opening) for review in reviews]
    answers[3::4] = [answer[: 2 * len(answer) // 3] for answer in answers[3::4]]
    return [review.opening for review in reviews], answers


REPEATS = 64
"""Number of tokens in the completion that repeats one token."""
MAX_TOKENS = 256
"""Assumed maximum length of a completion."""
VERY_LONG = 2_000
"""Number of words in a completion far longer than `MAX_TOKENS`."""
MAX_LISTED = 200
"""Maximum number of characters of a column's entry in the completion that lists all possible answers."""
MAX_LISTED_WORDS = 3
"""Maximum number of words of an ordinary completion in it, if there are no columns."""
PUNCTUATION = ". , ! ? ; : ... !!! --"


class Probe(NamedTuple):
    """Scores of one kind of completion, given to every prompt."""

    name: str
    answer: str
    """Completion of the first row."""
    mean: float | None
    """Mean of the finite scores; None if there are none, or if the function raised an error."""
    highest: float | None
    note: str
    """Warning that the scores exceed ordinary ones, or that the function raised an error; empty if neither."""


def run_probes(trial: Trial, ordinary: Sequence[float], *, margin: float) -> list[Probe]:
    """Score each kind of completion on every prompt.

    Args:
        trial: function and rows.
        ordinary: finite scores of the unchanged rows.
        margin: tolerance for rounding.
    """
    probes = {name: make(trial) for name, make in PROBES.items()}
    return [_probe(trial, name, rows, ordinary, margin) for name, rows in probes.items() if rows]


def _probe(trial: Trial, name: str, rows: list[Row], ordinary: Sequence[float], margin: float) -> Probe:
    answer = rows[0].answer
    try:
        scores = [score for score in trial.scores(rows) if score is not None and math.isfinite(score)]
    except Exception as error:  # a user's function may raise anything; report it
        return Probe(name, answer, None, None, f"raised {type(error).__name__}: {error}")
    note = ""
    varied = bool(ordinary) and max(ordinary) > min(ordinary)
    if scores and varied and name not in ORDINARY and fmean(scores) >= fmean(ordinary) - margin:
        note = "scores as much as ordinary completions on average"
    if scores and ordinary and fmean(scores) > fmean(ordinary) + margin:
        note = "scores above ordinary completions on average"
    if scores and ordinary and max(scores) > max(ordinary) + margin:
        note = "scores above the best ordinary completion"
    return Probe(name, answer, mean_of(scores), max(scores, default=None), note)


def mean_of(scores: Sequence[float]) -> float | None:
    """Return the mean, or None if there are no scores."""
    return fmean(scores) if scores else None


def long_answer(trial: Trial, words: int) -> str:
    """Repeat the words of the ordinary completions up to this number."""
    said = [word for row in trial.rows for word in row.answer.split()] or ["word"]
    return " ".join(itertools.islice(itertools.cycle(said), words))


def _longest_allowed(trial: Trial) -> str:
    text = long_answer(trial, MAX_TOKENS)
    if trial.tokenizer is None:
        return text
    return str(trial.tokenizer.decode(trial.ids(text)[:MAX_TOKENS]))


def _one_token(trial: Trial, row: Row) -> str:
    if trial.tokenizer is not None and (ids := trial.ids(row.answer)):
        return str(trial.tokenizer.decode(ids[:1] * REPEATS))
    return " ".join(row.answer.split()[:1] * REPEATS)


def _all_answers(trial: Trial) -> list[Row]:
    """List all entries of the columns, or all ordinary completions if they are words; no rows if neither is known."""
    entries = [str(value) for row in trial.rows for value in row.columns.values() if value is not None]
    short = [text for text in entries if len(text) <= MAX_LISTED]
    words = [row.answer.strip() for row in trial.rows if len(row.answer.split()) <= MAX_LISTED_WORDS]
    if not short and len(words) < len(trial.rows):
        return []
    listed = ", ".join(dict.fromkeys(short or words))
    return [row.saying(listed) for row in trial.rows]


ORDINARY = ("another row's answer",)
"""Probes that may earn as much as ordinary completions: where no reward depends on the prompt, they are these."""
PROBES: dict[str, Callable[[Trial], list[Row]]] = {
    "empty": lambda trial: [row.saying("") for row in trial.rows],
    "only punctuation": lambda trial: [row.saying(PUNCTUATION) for row in trial.rows],
    "the prompt repeated": lambda trial: [
        row.saying(row.prompt if isinstance(row.prompt, str) else answer_text(row.prompt[-1:])) for row in trial.rows
    ],
    "another row's answer": lambda trial: [
        row.saying(other.answer, ended=other.ended)
        for row, other in zip(trial.rows, [*trial.rows[1:], trial.rows[0]], strict=True)
    ],
    "one token repeated": lambda trial: [row.saying(_one_token(trial, row), ended=False) for row in trial.rows],
    "all possible answers": _all_answers,
    "the longest allowed": lambda trial: [row.saying(_longest_allowed(trial), ended=False) for row in trial.rows],
    "very long": lambda trial: [row.saying(long_answer(trial, VERY_LONG), ended=False) for row in trial.rows],
}
"""Kinds of completion by the name in the report."""
