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
from textenv.prompts.messages import Message, prompt_and_answer
from textenv.prompts.prompts import Prompt, PromptList, by_position
from textenv.prompts.tokenize import text_ids
from textenv.rewards.answer import answer_text
from textenv.rewards.calling import call_reward
from textenv.rewards.scores import RewardError, Rows, read_scores, total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_ROWS = 16
"""Number of rows if no prompts, completions or columns are given."""
MIN_ROWS = 4
MAX_ROWS = 32
"""Maximum number of prompts used, if they come without completions and columns."""


@dataclass(frozen=True)
class Row:
    """One completion, with its prompt and columns."""

    prompt: str | list[Message]
    answer: str
    columns: Mapping[str, object]
    ended: bool = True
    source: str = ""
    """Column of which the answer is the entry, as there was no completion; else empty."""

    def saying(self, answer: str, *, ended: bool = True) -> Row:
        """Return the same row with another completion."""
        return replace(self, answer=answer, ended=ended, source="")


class Trial:
    """A reward function and its test rows.

    Args:
        function: the reward function.
        rows: ordinary rows.
        tokenizer: computes ``completion_ids``; without one they are the bytes of the text.
    """

    def __init__(
        self, function: Callable[..., object], rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.function = function
        self.rows = list(rows)
        self.tokenizer = tokenizer
        self.invalid = ""
        """Why the function's return value was not what a reward function returns."""
        self.margin = 0.0
        """Tolerance for rounding between scores."""

    def returned(self, rows: Sequence[Row]) -> Any:
        """Call the function with copies of these rows and return its result."""
        # Columns, as an environment makes them
        columns: dict[str, list[Any]] = {}
        names = {name for row in rows for name in row.columns}
        for name in names:
            columns[name] = [copy.deepcopy(row.columns.get(name)) for row in rows]
        columns["prompts"] = []
        columns["completions"] = []
        for row in rows:
            prompt, completion = _prompt_and_completion(row)
            columns["prompts"].append(prompt)
            columns["completions"].append(completion)
        columns["prompt_ids"] = [self.ids(_text_of(row.prompt)) for row in rows]
        columns["completion_ids"] = [self.ids(row.answer) for row in rows]
        columns["terminated"] = [row.ended for row in rows]
        columns["tool_calls"] = [[] for _ in rows]

        # Per-token and named rewards become their totals
        returned = call_reward(self.function, columns, self.tokenizer)
        try:
            scores = read_scores(returned, Rows(columns), name="", finite=False)
        except RewardError as error:
            self.invalid = str(error)
            return returned  # the checks report the problem
        return [total(score) for score in scores.score]

    def scores(self, rows: Sequence[Row]) -> list[float | None]:
        """Return the scores of these rows; raise if the function does, or unless it returns one per row."""
        returned = self.returned(rows)
        if len(returned) != len(rows):
            raise ValueError(f"{len(returned)} scores for {len(rows)} completions")
        return [None if score is None else float(score) for score in returned]

    def difference(self, first: Sequence[float | None], second: Sequence[float | None], where: str) -> str:
        """Return a sentence about the first row whose scores differ, or an empty text. NaN equals NaN.

        Args:
            first: scores of the rows.
            second: scores of the same rows, in other circumstances.
            where: both circumstances, for the sentence.
        """
        for row, (a, b) in enumerate(zip(first, second, strict=True)):
            is_close = a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=self.margin)
            if not is_close and repr(a) != repr(b):
                return f"the completion {self.rows[row].answer!r:.60} (row {row}) gets {a} and {b}: {where}"
        return ""

    def ids(self, answer: str) -> list[int]:
        """Return the token ids of a completion."""
        if self.tokenizer is None:
            return list(answer.encode("utf-8", "replace"))
        return text_ids(answer, self.tokenizer)


def _prompt_and_completion(row: Row) -> tuple[str, str] | tuple[list[Message], list[Message]]:
    """Return a row's prompt and completion as an environment gives them to a reward: texts, or messages of a chat."""
    if isinstance(row.prompt, str):
        return row.prompt, row.answer
    return prompt_and_answer(copy.deepcopy(row.prompt), row.answer)


def make_rows(
    prompts: Sequence[object] | None,
    completions: Sequence[object] | None,
    columns: Mapping[str, Sequence[object]] | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Row]:
    """Make rows of prompts, completions and columns, and invent what is missing.

    Missing prompts and completions come from the grammar. If there are columns, every second missing completion is an
    entry of one of them.

    Args:
        prompts: a sequence as in `PromptList`; a column named ``completion`` has the completions.
        completions, columns: see `textenv.check_reward`.
        tokenizer: decodes prompts that are token ids.

    Raises:
        ValueError: if the arguments differ in length, or are shorter than `MIN_ROWS`; if a column is given twice; or as
            `PromptList`.
    """
    all_columns = {name: by_position(column) for name, column in (columns or {}).items()}
    if completions is not None:
        completions = by_position(completions)

    # Prompts may be mappings with further columns, one of them the completions
    shown_prompts: Sequence[str | list[Message]] | None = None
    if prompts is not None:
        max_prompts = None
        if completions is None and not columns:
            max_prompts = MAX_ROWS
        read_prompts = _read_prompts(prompts, max_prompts=max_prompts)
        shown_prompts = [_shown_prompt(prompt, tokenizer) for prompt in read_prompts]
        prompt_columns = _columns_of(read_prompts)
        if completions is None:
            completions = prompt_columns.pop("completion", None)
        repeated_names = sorted(prompt_columns.keys() & all_columns.keys())
        if repeated_names:
            raise ValueError(
                f"the columns {', '.join(repeated_names)} are in the prompts and in columns: give each once"
            )
        all_columns |= prompt_columns

    # All have the same length
    counts = {}
    for name, entries in ({"prompts": shown_prompts, "completions": completions} | all_columns).items():
        if entries is not None:
            counts[name] = len(entries)
    num_rows = next(iter(counts.values()), DEFAULT_ROWS)
    if len(set(counts.values())) > 1 or num_rows < MIN_ROWS:
        raise ValueError(f"there are {counts} entries: give the same number of each, at least {MIN_ROWS}")

    # Invent what is missing; every fourth invented completion is cut
    openings, answers = _sample_reviews(num_rows)
    ended = [row % 4 != 3 for row in range(num_rows)]
    sources = [""] * num_rows
    if completions is not None:
        answers = [answer_text(completion) for completion in completions]
        ended = [True] * num_rows
    elif all_columns:
        # Every second completion is the entry of a column, each column in turn, so that some are right
        names = list(all_columns)
        for row in range(0, num_rows, 2):
            sources[row] = names[row // 2 % len(names)]
            answers[row] = str(all_columns[sources[row]][row])

    rows = []
    for row, prompt in enumerate(shown_prompts or openings):
        row_columns = {name: column[row] for name, column in all_columns.items()}
        rows.append(Row(prompt, answers[row], row_columns, ended[row], sources[row]))
    return rows


def _columns_of(prompts: Sequence[Prompt]) -> dict[str, list[object]]:
    """Return the further columns of prompts, with None where a prompt has no such column."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def _read_prompts(prompts: Sequence[object], *, max_prompts: int | None) -> list[Prompt]:
    """Read the first prompts of a sequence, or all if ``max_prompts`` is None."""
    source = PromptList(prompts)
    count = len(source.prompts)
    if max_prompts is not None:
        count = min(count, max_prompts)
    return [source.prompt(index) for index in range(count)]


def _shown_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> str | list[Message]:
    """Return a prompt as a reward function receives it: a text, or a list of messages."""
    content = prompt.content
    if isinstance(content, str):
        return content
    if prompt.messages:
        return [message.copy() for message in prompt.messages]
    if tokenizer is None:
        raise ValueError("the prompts are token ids, and rewards receive their text: give their tokenizer")
    ids = [token for token in content if isinstance(token, int)]
    return str(tokenizer.decode(ids))


def _text_of(prompt: str | list[Message]) -> str:
    """Return the text of a prompt; that of a chat is the text of its messages, one below the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(answer_text([message]) for message in prompt)


def _sample_reviews(n: int) -> tuple[list[str], list[str]]:
    """Sample openings and continuations of reviews, good and bad ones; every fourth continuation is truncated."""
    rng = np.random.default_rng(0)
    reviews = [sample_review(rng) for _ in range(n)]
    answers = [review.text.removeprefix(review.opening) for review in reviews]
    for row in range(3, n, 4):
        two_thirds = 2 * len(answers[row]) // 3
        answers[row] = answers[row][:two_thirds]
    return [review.opening for review in reviews], answers


NUM_REPEATED_TOKENS = 64
"""Number of tokens in the completion that repeats one token."""
MAX_TOKENS = 256
"""Assumed maximum length of a completion."""
VERY_LONG = 2_000
"""Number of words in a completion far longer than `MAX_TOKENS`."""
MAX_LISTED_CHARACTERS = 200
"""Maximum length of a column's entry in the completion that lists all possible answers; longer ones are left out."""
MAX_LISTED_WORDS = 3
"""Maximum number of words of an ordinary completion in that list, which has them if there are no columns."""
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
    rows_by_probe = {name: make_rows_of_probe(trial) for name, make_rows_of_probe in PROBES.items()}
    return [_probe(trial, name, rows, ordinary, margin) for name, rows in rows_by_probe.items() if rows]


def _probe(trial: Trial, name: str, rows: list[Row], ordinary: Sequence[float], margin: float) -> Probe:
    """Score one kind of completion, and compare its scores with the ordinary ones."""
    answer = rows[0].answer
    try:
        scores = [score for score in trial.scores(rows) if score is not None and math.isfinite(score)]
    except Exception as error:  # a user's function may raise anything; report it
        return Probe(name, answer, None, None, f"raised {type(error).__name__}: {error}")
    note = ""
    if scores and ordinary:
        is_varied = max(ordinary) > min(ordinary)
        if max(scores) > max(ordinary) + margin:
            note = "scores above the best ordinary completion"
        elif fmean(scores) > fmean(ordinary) + margin:
            note = "scores above ordinary completions on average"
        elif is_varied and name not in MAY_EQUAL_ORDINARY and fmean(scores) >= fmean(ordinary) - margin:
            note = "scores as much as ordinary completions on average"
    return Probe(name, answer, mean_of(scores), max(scores, default=None), note)


def mean_of(scores: Sequence[float]) -> float | None:
    """Return the mean, or None if there are no scores."""
    if not scores:
        return None
    return fmean(scores)


def long_answer(trial: Trial, words: int) -> str:
    """Repeat the words of the ordinary completions up to this number."""
    ordinary_words = [word for row in trial.rows for word in row.answer.split()]
    if not ordinary_words:
        ordinary_words = ["word"]
    return " ".join(itertools.islice(itertools.cycle(ordinary_words), words))


def _longest_allowed(trial: Trial) -> str:
    """Return a completion of `MAX_TOKENS` tokens; without a tokenizer, words."""
    text = long_answer(trial, MAX_TOKENS)
    if trial.tokenizer is None:
        return text
    return str(trial.tokenizer.decode(trial.ids(text)[:MAX_TOKENS]))


def _one_token(trial: Trial, row: Row) -> str:
    """Repeat the first token of a row's completion; without a tokenizer, its first word."""
    if trial.tokenizer is not None:
        ids = trial.ids(row.answer)
        if ids:
            return str(trial.tokenizer.decode(ids[:1] * NUM_REPEATED_TOKENS))
    return " ".join(row.answer.split()[:1] * NUM_REPEATED_TOKENS)


def _empty(trial: Trial) -> list[Row]:
    return [row.saying("") for row in trial.rows]


def _only_punctuation(trial: Trial) -> list[Row]:
    return [row.saying(PUNCTUATION) for row in trial.rows]


def _prompt_repeated(trial: Trial) -> list[Row]:
    """Repeat the prompt; of a chat, the last message."""
    rows = []
    for row in trial.rows:
        if isinstance(row.prompt, str):
            rows.append(row.saying(row.prompt))
        else:
            rows.append(row.saying(answer_text(row.prompt[-1:])))
    return rows


def _answer_of_another_row(trial: Trial) -> list[Row]:
    next_rows = [*trial.rows[1:], trial.rows[0]]
    rows = []
    for row, next_row in zip(trial.rows, next_rows, strict=True):
        rows.append(row.saying(next_row.answer, ended=next_row.ended))
    return rows


def _one_token_repeated(trial: Trial) -> list[Row]:
    return [row.saying(_one_token(trial, row), ended=False) for row in trial.rows]


def _all_answers(trial: Trial) -> list[Row]:
    """List all entries of the columns, or all ordinary completions if they are words; no rows if neither is known."""
    entries = [str(value) for row in trial.rows for value in row.columns.values() if value is not None]
    answers = [text for text in entries if len(text) <= MAX_LISTED_CHARACTERS]
    if not answers:
        answers = [row.answer.strip() for row in trial.rows if len(row.answer.split()) <= MAX_LISTED_WORDS]
        if len(answers) < len(trial.rows):
            return []
    all_answers = ", ".join(dict.fromkeys(answers))
    return [row.saying(all_answers) for row in trial.rows]


def _at_the_limit(trial: Trial) -> list[Row]:
    return [row.saying(_longest_allowed(trial), ended=False) for row in trial.rows]


def _far_beyond_the_limit(trial: Trial) -> list[Row]:
    return [row.saying(long_answer(trial, VERY_LONG), ended=False) for row in trial.rows]


MAY_EQUAL_ORDINARY = ("another row's answer",)
"""Probes that may score as much as ordinary completions: to a reward that ignores the prompt they are ordinary."""
PROBES: dict[str, Callable[[Trial], list[Row]]] = {
    "empty": _empty,
    "only punctuation": _only_punctuation,
    "the prompt repeated": _prompt_repeated,
    "another row's answer": _answer_of_another_row,
    "one token repeated": _one_token_repeated,
    "all possible answers": _all_answers,
    "the longest allowed": _at_the_limit,
    "very long": _far_beyond_the_limit,
}
"""Kinds of completion by the name in the report."""
