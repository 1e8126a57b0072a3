"""`check_reward`: checks for common bugs in reward functions, and the scores of cheating completions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from textenv.checks.env_checker import CheckResult, raise_if_broken
from textenv.checks.reward_probes import VERY_LONG, Probe, Trial, long_answer, make_rows, mean_of, run_probes
from textenv.extras.human import HumanReward
from textenv.rendering import printable
from textenv.rewards.calling import line_of_error, reward_name
from textenv.rewards.composite import Rewards
from textenv.rewards.scores import as_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOLERANCE = 1e-3
"""Tolerance for rounding, as a fraction of the spread of ordinary scores."""
REPORT_WIDTH = 88
"""Width of a printed report, in characters."""
SHOWN_CHARACTERS = 40
"""Number of characters of a completion in a report."""
ODD_COMPLETIONS = (
    # Empty
    "",
    " ",
    "\n\n",
    # Control characters, and other scripts
    "\x00\x1b[2J",
    "\u00e9\u6f22\U0001f642\u200d\u202e",
    "\u0663\u00b2\u00bd",
    # Input that breaks parsers
    "\\boxed{1/0} 1e999999999",
    "<answer><answer></think>",
    "(" * 5_000,
    # One long word
    "a" * 20_000,
)
"""Odd but possible completions.

:meta hide-value:
"""


@dataclass(frozen=True)
class RewardCheckReport(JupyterMixin):
    """Results of the checks of a reward function; ``print(report)`` and a notebook show them as tables."""

    name: str
    results: list[CheckResult]
    """Results of the checks that ran: only the first one if the return value is invalid; without `COMPARISONS` if the
    function is not deterministic."""
    probes: list[Probe]
    mean: float | None
    """Mean score of ordinary completions; None if none has a finite score."""
    highest: float | None
    seconds_per_row: float
    ordinary: str = ""
    """First of the ordinary completions."""
    columns: list[str] = field(default_factory=list)
    """Columns from which some of the ordinary completions are, as there were no others."""

    @property
    def broken(self) -> list[CheckResult]:
        """Checks that fail."""
        return [result for result in self.results if result.problem]

    def raise_if_broken(self) -> None:
        """Raise a ValueError that lists all failed checks, if there are any."""
        raise_if_broken(self.results, owner=f"reward {self.name!r}: ")

    def __rich__(self) -> Group:
        """Checks, scores of cheating and ordinary completions, and time per row, for `rich`; all text is escaped."""
        checks = Table("check", "result", title=Text(f"reward {printable(self.name)}"), title_justify="left")
        for result in self.results:
            if result.problem:
                verdict = Text(printable(result.problem), style="red")
            else:
                verdict = Text("holds", style="green")
            checks.add_row(result.name, verdict)
        parts: list[Table | Text] = [checks]
        if self.probes:
            parts.append(_probe_table(self))
        if self.columns:
            names = printable(", ".join(self.columns))
            parts.append(Text(f"Some ordinary completions are entries of the columns: {names}."))
        names_with_note = [probe.name for probe in self.probes if probe.note]
        if names_with_note:
            parts.append(Text(f"Read these, for a policy will find them: {', '.join(names_with_note)}."))
        parts.append(Text(f"{self.seconds_per_row * 1e3:.3g} ms per row"))
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(width=REPORT_WIDTH, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()


def check_reward(
    function: Callable[..., object],
    prompts: Sequence[object] | None = None,
    completions: Sequence[object] | None = None,
    columns: Mapping[str, Sequence[object]] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> RewardCheckReport:
    """Check a reward function for common bugs.

    The function is called about 30 times, mostly with all rows. By default, prompts are openings of movie reviews and
    completions continue them. The time and the scores of cheating completions are reported, but not judged.

    Args:
        function: a reward function, ``async`` or not, or any callable such as `textenv.RewardModel`.
        prompts: texts, token ids, chats, or mappings with a ``"prompt"`` and further columns, as for
            `textenv.TextVectorEnv`; a column ``"completion"`` has the completions. Without completions and columns
            only the first 32 are used.
        completions: varied completions, good and bad, one per prompt; all count as terminated.
        columns: further columns by name, one entry per row.
        tokenizer: computes ``prompt_ids`` and ``completion_ids``; without one they are the bytes of the text.
        tolerance: for rounding, as a fraction of the scores' spread; raise it for bfloat16, whose rounding
            depends on the batch.

    Raises:
        ValueError: if a check fails (lists the failed checks and their problems), or if the function raises on ordinary
            completions, for example because a column is missing.
        TypeError: if the function is not callable.

    Example:
        >>> report = check_reward(lambda completions: [float(len(text)) for text in completions])
        >>> [probe.name for probe in report.probes if probe.note]
        ['one token repeated', 'the longest allowed', 'very long']
    """
    report = run_reward_checks(function, prompts, completions, columns, tokenizer, tolerance=tolerance)
    report.raise_if_broken()
    return report


def run_reward_checks(
    function: Callable[..., object],
    prompts: Sequence[object] | None = None,
    completions: Sequence[object] | None = None,
    columns: Mapping[str, Sequence[object]] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> RewardCheckReport:
    """Run the checks of `check_reward` and return the report, without an error if a check fails."""
    # A function that can be called with invented completions
    functions = [function]
    if isinstance(function, Rewards):
        functions = [component for component, _ in function.functions.values()]
    if any(isinstance(component, HumanReward) for component in functions):
        raise TypeError("the reward asks people, who would be shown invented answers: check its fallback instead")
    if not callable(function):
        raise TypeError(f"the reward is {function!r}, expected a function f(prompts, completions, **columns)")

    # Its scores of ordinary completions
    rows = make_rows(prompts, completions, columns, tokenizer)
    trial = Trial(function, rows, tokenizer)
    name = reward_name(function)
    returned, seconds = _first_calls(trial, name)
    problem = _type_problem(returned, len(trial.rows)) or trial.invalid
    if problem:
        return RewardCheckReport(
            name=name,
            results=[CheckResult(TYPE, problem)],
            probes=[],
            mean=None,
            highest=None,
            seconds_per_row=seconds,
        )
    scores = [float(score) for score in returned if score is not None]
    ordinary = [score for score in scores if math.isfinite(score)]
    trial.margin = tolerance * _spread(ordinary)

    # The other checks; comparisons say nothing of a function that differs from call to call
    results = [CheckResult(TYPE, "")]
    is_deterministic = True
    for check_name, check in REWARD_CHECKS.items():
        if check_name in COMPARISONS and not is_deterministic:
            continue
        problem = _problem_of(check, trial)
        if check_name == DETERMINISTIC and problem:
            is_deterministic = False
        results.append(CheckResult(check_name, problem))

    return RewardCheckReport(
        name=name,
        results=results,
        probes=run_probes(trial, ordinary, margin=trial.margin),
        mean=mean_of(ordinary),
        highest=max(ordinary, default=None),
        seconds_per_row=seconds,
        ordinary=trial.rows[0].answer,
        columns=list(dict.fromkeys(row.source for row in trial.rows if row.source)),
    )


def _spread(scores: Sequence[float]) -> float:
    """Return the difference of highest and lowest score; if they are equal, their absolute value."""
    if not scores:
        return 0.0
    spread = max(scores) - min(scores)
    if spread:
        return spread
    return max(map(abs, scores))


def _first_calls(trial: Trial, name: str) -> tuple[Any, float]:
    """Return the values for ordinary completions, and seconds per row; a first, untimed call may load a model."""
    try:
        trial.returned(trial.rows)
        start = time.perf_counter()
        returned = trial.returned(trial.rows)
    except Exception as error:
        raise ValueError(
            f"reward {name!r} raised {type(error).__name__} on ordinary completions, {line_of_error(error)}: {error}. "
            "Columns of its own come from --prompts FILE, in Python prompts=rows or columns={name: list}"
        ) from error
    seconds = time.perf_counter() - start
    return returned, seconds / len(trial.rows)


def _problem_of(check: Callable[[Trial], str], trial: Trial) -> str:
    """Run a check; return the problem, or an empty text."""
    try:
        return check(trial)
    except Exception as error:  # a user's function may raise anything; report it
        return f"the function raised {type(error).__name__}: {error}"


TYPE = "count and type"
"""Name of the first check, without which no other one runs."""
DETERMINISTIC = "deterministic"
"""Name of the check without which `COMPARISONS` do not run."""


def _type_problem(returned: Any, rows: int) -> str:
    """The return value is a list with one number or None per completion."""
    has_length = isinstance(returned, Sized) and not isinstance(returned, (str, dict))
    if not has_length:
        return f"it returned {returned!r:.80} for {rows} completions: return a list with one number for each"
    if len(returned) != rows:
        return f"it returned {len(returned)} scores for {rows} completions: return one for each"
    for row, score in enumerate(returned):
        if score is not None and as_number(score) is None:
            return f"the score of row {row} is {score!r:.80}: return a number, or None where the reward does not apply"
    return ""


def _check_finite(trial: Trial) -> str:
    """No score is NaN or infinite."""
    for row, score in zip(trial.rows, trial.scores(trial.rows), strict=True):
        if score is not None and not math.isfinite(score):
            return f"the completion {row.answer!r:.60} gets the score {score}: return a finite number, or None"
    return ""


def _compared(score_again: Callable[[Trial], list[float | None]], where: str) -> Callable[[Trial], str]:
    """Return a check that the rows get the same scores when they are scored in another way."""

    def check(trial: Trial) -> str:
        return trial.difference(trial.scores(trial.rows), score_again(trial), where)

    return check


def _a_second_time(trial: Trial) -> list[float | None]:
    return trial.scores(trial.rows)


def _in_halves(trial: Trial) -> list[float | None]:
    half = len(trial.rows) // 2
    return trial.scores(trial.rows[:half]) + trial.scores(trial.rows[half:])


def _reversed(trial: Trial) -> list[float | None]:
    reversed_scores = trial.scores(trial.rows[::-1])
    return reversed_scores[::-1]


def _beside_a_long_one(trial: Trial) -> list[float | None]:
    *rows, last = trial.rows
    long_row = last.saying(long_answer(trial, VERY_LONG))
    *scores, _ = trial.scores([*rows, long_row])
    last_score = trial.scores(trial.rows)[-1]  # the long completion took its place
    return [*scores, last_score]


def _check_varied(trial: Trial) -> str:
    """Different completions do not all get the same score."""
    scores = [score for score in trial.scores(trial.rows) if score is not None]
    if not scores:
        return f"it returned None for all {len(trial.rows)} rows: expected numbers"
    distinct_answers = {row.answer for row in trial.rows}
    distinct_scores = {repr(score) for score in scores}  # by `repr`, because NaN does not equal NaN
    if len(distinct_answers) > 1 and len(distinct_scores) == 1:
        return (
            f"all {len(scores)} completions get {scores[0]}: nothing to learn. If they lack what the reward looks for, "
            "give at least 4 of which some have it: check_reward(f, prompts, completions), or --prompts FILE with both"
        )
    return ""


def _check_odd(trial: Trial) -> str:
    """Empty and odd completions are scored without an error."""
    first_row, *rows = trial.rows
    for odd in ODD_COMPLETIONS:
        try:
            score, *_ = trial.scores([first_row.saying(odd), *rows])
        except Exception as error:  # a user's function may raise anything; report it
            return f"on the completion {odd!r:.40} it raised {type(error).__name__}: {error}"
        if score is not None and not math.isfinite(score):
            return f"the completion {odd!r:.40} gets the score {score}: return a finite number, or None"
    return ""


COMPARISONS: dict[str, Callable[[Trial], str]] = {
    "batch invariant": _compared(_in_halves, "in the whole batch and in half of it"),
    "order invariant": _compared(_reversed, "in order and with the rows reversed"),
    "padding invariant": _compared(
        _beside_a_long_one, "with ordinary completions and with a very long one (does it read padding?)"
    ),
}
"""Checks that presuppose a deterministic function."""
REWARD_CHECKS: dict[str, Callable[[Trial], str]] = {
    "finite": _check_finite,
    DETERMINISTIC: _compared(_a_second_time, "in a first call and in a second"),
    **COMPARISONS,
    "varied": _check_varied,
    "odd answers": _check_odd,
}
"""Checks of the scores by the name in the report; each returns the problem, or an empty text."""


def _probe_table(report: RewardCheckReport) -> Table:
    """Return a table with the scores of ordinary completions, and of each kind of completion that cheats."""
    title = "Scores of completions that cheat"
    table = Table("completion", "beginning with", "mean", "highest", "note", title=title, title_justify="left")
    table.add_row(
        "ordinary completions",
        _beginning(report.ordinary),
        _score_text(report.mean),
        _score_text(report.highest),
        "",
        end_section=True,
    )
    for probe in report.probes:
        beginning = Text("")
        if probe.answer:
            beginning = _beginning(probe.answer)
        note = Text(printable(probe.note), style="yellow")
        table.add_row(probe.name, beginning, _score_text(probe.mean), _score_text(probe.highest), note)
    return table


def _beginning(completion: str) -> Text:
    """Return the beginning of a completion, quoted and escaped."""
    return Text(printable(repr(completion[:SHOWN_CHARACTERS])))


def _score_text(score: float | None) -> str:
    if score is None:
        return "-"
    return f"{score:.4g}"
