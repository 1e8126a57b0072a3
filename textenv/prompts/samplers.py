"""Samplers: which prompt comes next, by what the policy has earned so far.

Without a sampler every prompt is used once before one repeats (`textenv.prompts.prompts.PromptList`). A sampler gives
each prompt a probability, which changes as episodes end:

- `ByPassRate` prefers prompts that the policy sometimes solves.
- `Curriculum` begins with the easiest level of a column, and opens the next one when the policy is good at it.

A prompt is drawn with replacement, by the seed and the number of the draw. So the prompts of a rollout depend on the
sampler's state at its beginning, which a checkpoint holds, and on nothing else.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np

from textenv.names import check_names
from textenv.prompts.prompts import Prompt, PromptList, content_hash

SUM_TOLERANCE = 1e-6
"""Largest distance of the sum of all probabilities from 1."""
PRIOR = 0.5
"""Episodes passed, and episodes failed, that each prompt has before its first one: Jeffreys' prior of a rate."""
HASHED_PROMPTS = 256
"""Maximum number of prompts in the checksum of a sampler's state."""


@runtime_checkable
class PromptSampler(Protocol):
    """Chooses prompts by their probabilities; a sampler of your own has these methods.

    Instead of calling it, an environment works with a copy, so that one sampler can be given to several environments.
    """

    def start(self, prompts: PromptList) -> None:
        """Take the prompts to choose from; called once, before all other methods."""

    def probabilities(self) -> np.ndarray:
        """Return the probability of each prompt to be drawn next, float64 ``[prompts]``, with the sum 1."""

    def learn(self, indices: np.ndarray, returns: np.ndarray) -> None:
        """Take note of finished episodes: the prompt of each, int64 ``[n]``, and its return, float64 ``[n]``."""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the log, by name."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the state: numbers, text, arrays, and containers of these."""

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned; raise a ValueError if it is that of other prompts."""


class PassRateState(TypedDict):
    """State of a `ByPassRate`."""

    passed: np.ndarray
    """float64 ``[prompts]``, episodes of each prompt that passed, among those that are remembered."""
    played: np.ndarray
    """float64 ``[prompts]``, episodes of each prompt that are remembered."""
    checksum: int
    """Of the prompts, see `_checksum_of_prompts`; absent before version 1.0."""


class ByPassRate:
    """Prefers prompts that the policy sometimes solves, and sometimes does not.

    A prompt is drawn in proportion to p (1 − p), where p is its estimated pass rate: the variance of a reward of 0 or
    1, which is what groups and baselines learn from ("learnability", Rutherford et al. 2024; for language models
    Foster and Foerster 2025). p counts the last episodes of the prompt, and half an episode of each kind before its
    first one (`PRIOR`). So a prompt without episodes has p = .5 and the largest weight. A part of the draws is uniform:
    prompts that were too hard come back.

    Args:
        success: an episode passes if its return is at least this.
        memory: number of a prompt's episodes that are remembered. Older ones fade: when there are more, both counts are
            scaled down to this number.
        floor: fraction of the draws that are uniform.

    Raises:
        ValueError: if a number is out of its range.

    Example:
        >>> sampler = ByPassRate(floor=0.0)
        >>> sampler.start(PromptList(["new", "solved"]))
        >>> sampler.learn(np.array([1, 1]), np.array([1.0, 1.0]))
        >>> sampler.probabilities().round(3).tolist()  # .25 and 5/6 · 1/6
        [0.643, 0.357]
    """

    @check_names
    def __init__(self, *, success: float = 0.5, memory: float = 16, floor: float = 0.1) -> None:
        _check_number("success", success, -np.inf, np.inf)
        _check_number("memory", memory, 1, np.inf)
        _check_number("floor", floor, 0, 1)
        self.success = success
        self.memory = memory
        self.floor = floor
        self.passed = np.zeros(0)
        """See `PassRateState`."""
        self.played = np.zeros(0)
        """See `PassRateState`."""
        self.checksum = 0
        """See `PassRateState`."""

    def start(self, prompts: PromptList) -> None:
        """See `PromptSampler.start`."""
        self.passed = np.zeros(len(prompts.prompts))
        self.played = np.zeros(len(prompts.prompts))
        self.checksum = _checksum_of_prompts(prompts)

    @property
    def pass_rates(self) -> np.ndarray:
        """Estimated pass rate of each prompt, float64 ``[prompts]``, between 0 and 1."""
        return (self.passed + PRIOR) / (self.played + 2 * PRIOR)

    def probabilities(self) -> np.ndarray:
        """See `PromptSampler.probabilities`."""
        rates = self.pass_rates
        weights = rates * (1 - rates)
        return self.floor / len(rates) + (1 - self.floor) * weights / weights.sum()

    def learn(self, indices: np.ndarray, returns: np.ndarray) -> None:
        """See `PromptSampler.learn`."""
        has_passed = returns >= self.success
        np.add.at(self.played, indices, 1)
        np.add.at(self.passed, indices[has_passed], 1)
        scale = np.minimum(1, self.memory / np.maximum(self.played, 1))
        self.played *= scale
        self.passed *= scale

    def metrics(self) -> dict[str, float]:
        """Return the mean estimated pass rate of the prompts that come next, and the fraction that was ever played."""
        return {
            "sampler/pass_rate": float(self.probabilities() @ self.pass_rates),
            "sampler/played": float((self.played > 0).mean()),
        }

    def state_dict(self) -> PassRateState:
        """See `PromptSampler.state_dict`."""
        return {"passed": self.passed.copy(), "played": self.played.copy(), "checksum": self.checksum}

    def load_state_dict(self, state: PassRateState) -> None:
        """See `PromptSampler.load_state_dict`."""
        _check_same_prompts(len(state["played"]), len(self.played))
        _check_same_checksum(state, self.checksum, "other prompts, or the same in another order")
        self.passed = state["passed"].copy()
        self.played = state["played"].copy()


class CurriculumState(TypedDict):
    """State of a `Curriculum`."""

    level: int
    """Number of the newest level that is open, from 0."""
    recent: list[float]
    """Returns of the last episodes of this level."""
    prompts: int
    """Number of prompts."""
    checksum: int
    """Of the levels of all prompts; absent before version 1.0."""


class Curriculum:
    """Opens the levels of a column one after another, the easiest first, as the policy becomes good at them.

    The next level is opened when the last ``window`` episodes of the newest one have a mean return of at least
    ``threshold``, as automatic domain randomization widens its ranges (Akkaya et al. 2019, algorithm 1). Levels stay
    open ("baby steps", Spitkovsky et al. 2010), so that easy prompts are not forgotten.

    Args:
        column: name of a column of the prompts: numbers, the smallest are the easiest; or texts with an ``order``.
        order: values of the column, the easiest first; None: it holds numbers.
        threshold: mean return that opens the next level.
        window: number of episodes of that mean.
        newest: fraction of the draws that are of the newest level; the others are of all prompts that are open.
        max_levels: a column with more different values is cut into this many levels, of about as many prompts each.

    Raises:
        ValueError: if a number is out of its range; when prompts are given, if one has no value that can be ordered.

    Example:
        >>> sampler = Curriculum(column="digits", window=2)
        >>> sampler.start(PromptList([{"prompt": "17 + 5 =", "digits": 2}, {"prompt": "1 + 1 =", "digits": 1}]))
        >>> sampler.probabilities().tolist()
        [0.0, 1.0]
        >>> sampler.learn(np.array([1, 1]), np.array([1.0, 1.0]))
        >>> sampler.probabilities().tolist()  # half of the draws of the new level, the others of both
        [0.75, 0.25]
    """

    @check_names
    def __init__(
        self,
        *,
        column: str,
        order: Sequence[object] | None = None,
        threshold: float = 0.8,
        window: int = 64,
        newest: float = 0.5,
        max_levels: int = 10,
    ) -> None:
        if not isinstance(column, str):
            raise ValueError(f"column is {column!r:.100}, expected the name of a column of the prompts")
        if isinstance(order, str):
            raise ValueError(f"order is {order!r:.100}, expected a list of values, the easiest first")
        _check_number("threshold", threshold, -np.inf, np.inf)
        _check_number("window", window, 1, np.inf)
        _check_number("newest", newest, 0, 1)
        _check_number("max_levels", max_levels, 1, np.inf)
        self.column = column
        self.order = order
        self.threshold = threshold
        self.window = int(window)
        self.newest = newest
        self.max_levels = int(max_levels)
        self.level = 0
        """See `CurriculumState`."""
        self.recent: list[float] = []
        """See `CurriculumState`."""
        self.level_of_prompt = np.zeros(0, dtype=np.int64)
        """int64 ``[prompts]``, from 0, the easiest."""

    def start(self, prompts: PromptList) -> None:
        """See `PromptSampler.start`."""
        values = np.empty(len(prompts.prompts))
        for index in range(len(values)):
            values[index] = self._rank(prompts.prompt(index))
        distinct, level_of_prompt = np.unique(values, return_inverse=True)
        if len(distinct) > self.max_levels:
            level_of_prompt = _merged(level_of_prompt, self.max_levels)
        self.level_of_prompt = level_of_prompt
        self.level = 0
        self.recent = []

    def _rank(self, prompt: Prompt) -> float:
        """Return the number by which a prompt is ordered; raise a ValueError if it has none."""
        if self.column not in prompt.columns:
            raise ValueError(
                f"prompt {prompt.row} has the columns {sorted(prompt.columns)}, expected one named {self.column!r}, "
                "which is the column of the curriculum"
            )
        value = prompt.columns[self.column]
        where = f"prompt {prompt.row} has {value!r:.100} in the column {self.column!r}"
        if self.order is not None:
            names = [str(name) for name in self.order]
            if str(value) not in names:
                raise ValueError(f"{where}, expected one of order: {', '.join(map(repr, self.order)):.200}")
            return names.index(str(value))
        if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and np.isfinite(value):
            return float(value)
        raise ValueError(f"{where}, expected a finite number; give other values as order=[...], the easiest first")

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        return int(self.level_of_prompt.max()) + 1

    def probabilities(self) -> np.ndarray:
        """See `PromptSampler.probabilities`."""
        is_newest = self.level_of_prompt == self.level
        is_open = self.level_of_prompt <= self.level
        return self.newest * is_newest / is_newest.sum() + (1 - self.newest) * is_open / is_open.sum()

    def learn(self, indices: np.ndarray, returns: np.ndarray) -> None:
        """See `PromptSampler.learn`."""
        for index, episode_return in zip(indices.tolist(), returns.tolist(), strict=True):
            if self.level_of_prompt[index] != self.level:
                continue
            self.recent = [*self.recent, episode_return][-self.window :]
            is_full = len(self.recent) == self.window
            is_last = self.level == self.num_levels - 1
            if is_full and not is_last and np.mean(self.recent) >= self.threshold:
                self.level += 1
                self.recent = []

    def metrics(self) -> dict[str, float]:
        """Return the number of open levels, and the mean return of the last episodes of the newest one, if any."""
        metrics: dict[str, float] = {"sampler/open_levels": self.level + 1}
        if self.recent:
            metrics["sampler/newest_return"] = float(np.mean(self.recent))
        return metrics

    def state_dict(self) -> CurriculumState:
        """See `PromptSampler.state_dict`."""
        return {
            "level": self.level,
            "recent": list(self.recent),
            "prompts": len(self.level_of_prompt),
            "checksum": zlib.crc32(self.level_of_prompt.tobytes()),
        }

    def load_state_dict(self, state: CurriculumState) -> None:
        """See `PromptSampler.load_state_dict`."""
        _check_same_prompts(state["prompts"], len(self.level_of_prompt))
        _check_same_checksum(state, zlib.crc32(self.level_of_prompt.tobytes()), "prompts with other levels")
        self.level = int(state["level"])
        self.recent = list(state["recent"])


def _merged(level_of_prompt: np.ndarray, count: int) -> np.ndarray:
    """Merge neighbouring levels into at most ``count`` levels of about as many prompts; int64 ``[prompts]``."""
    prompts_up_to = np.bincount(level_of_prompt).cumsum()
    middle = prompts_up_to - np.bincount(level_of_prompt) / 2
    part_of_level = (middle * count / len(level_of_prompt)).astype(np.int64)
    _, number_of_part = np.unique(part_of_level, return_inverse=True)  # some parts may have no level
    return number_of_part[level_of_prompt]


def _check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise a ValueError unless an argument is a finite number from ``low`` to ``high``."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if is_number and np.isfinite(value) and low <= value <= high:  # type: ignore[operator, call-overload]
        return
    limits = "a finite number"
    if np.isfinite(low):
        limits = f"a number of at least {low}" if np.isinf(high) else f"a number from {low} to {high}"
    raise ValueError(f"{name} is {value!r:.100}, expected {limits}")


def _check_same_prompts(saved: int, present: int) -> None:
    """Raise a ValueError if a state is that of another number of prompts."""
    if saved != present:
        raise ValueError(
            f"the sampler's state is of {saved} prompts, but the environment has {present}: give the same prompts as "
            "for the run"
        )


def _check_same_checksum(state: Mapping[str, Any], present: int, others: str) -> None:
    """Raise a ValueError if a state has another checksum; ``others`` says what it is then of."""
    if state.get("checksum", present) != present:
        raise ValueError(
            f"the sampler's state is of {others}: give the same prompts, and the same arguments, as for the run"
        )


def _checksum_of_prompts(prompts: PromptList) -> int:
    """Return a 32-bit checksum of the contents of prompts; of many, of `HASHED_PROMPTS` at equal distances."""
    count = len(prompts.prompts)
    indices = np.unique(np.linspace(0, count - 1, min(count, HASHED_PROMPTS)).astype(np.int64))
    hashes = [content_hash(prompts.prompt(int(index))) for index in indices]
    return zlib.crc32(repr(hashes).encode())


SAMPLERS: dict[str, type[ByPassRate] | type[Curriculum]] = {"pass_rate": ByPassRate, "curriculum": Curriculum}
"""Samplers by name."""


def as_sampler(sampler: PromptSampler | str) -> PromptSampler:
    """Return a copy of a sampler, or one that is made from a text.

    Args:
        sampler: the sampler; or the name of one of `SAMPLERS`, with arguments behind a colon, such as
            ``"pass_rate:success=1,floor=.2"`` or ``"curriculum:column=level,order=easy+medium+hard"``.

    Raises:
        TypeError: if it is neither.
        ValueError: if there is no such sampler, or an argument does not fit.
    """
    if not isinstance(sampler, str):
        if isinstance(sampler, type) or not isinstance(sampler, PromptSampler):
            raise TypeError(
                f"sampler is {sampler!r:.200}, expected textenv.ByPassRate(...), textenv.Curriculum(column=...), or an "
                "object with the methods of textenv.prompts.samplers.PromptSampler"
            )
        return copy.deepcopy(sampler)

    # A text: the name, and name=value for each argument
    name, _, text = sampler.partition(":")
    if name not in SAMPLERS:
        raise ValueError(f"sampler is {sampler!r:.200}, expected one of {', '.join(SAMPLERS)}")
    accepted = list(inspect.signature(SAMPLERS[name]).parameters)
    arguments: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        argument, equals, value = part.partition("=")
        if not equals or argument not in accepted:
            raise ValueError(
                f"sampler is {sampler!r:.200}, and {part!r} is no argument of {name}: expected name=value, with one of "
                f"{', '.join(accepted)}"
            )
        arguments[argument] = _read_value(argument, value)
    if name == "curriculum" and "column" not in arguments:
        raise ValueError(f"sampler is {sampler!r:.200}, without a column: give curriculum:column=NAME")
    return SAMPLERS[name](**arguments)


def _read_value(argument: str, text: str) -> object:
    """Return the value of an argument from its text; one that should be a number stays a text if it is none."""
    if argument == "column":
        return text
    if argument == "order":
        return text.split("+")
    try:
        return float(text)
    except ValueError:
        return text


class PromptDraws:
    """Draws the prompts of an environment by a sampler, and tells the sampler the returns of their episodes.

    Args:
        sampler: is started with the prompts.
        prompts: the prompts to choose from.

    Raises:
        ValueError: if the sampler refuses the prompts.
    """

    def __init__(self, sampler: PromptSampler, prompts: PromptList) -> None:
        if type(prompts).sample_prompts is not PromptList.sample_prompts:
            raise ValueError(
                f"sampler is given, but {type(prompts).__name__} has a sample_prompts of its own: leave one of the two "
                "out"
            )
        self.sampler = sampler
        self._prompts = prompts
        self._index_of_number: dict[int, int] = {}
        """Prompts of the draws whose episodes have not ended, by number."""
        sampler.start(prompts)
        self._check(sampler.probabilities())

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Return the prompts of these draws; a number that is repeated, as in a group, has the same prompt.

        Raises:
            ValueError: if the sampler's probabilities are none.
        """
        new_numbers = [number for number in dict.fromkeys(numbers) if number not in self._index_of_number]
        if new_numbers:
            probabilities = self.sampler.probabilities()
            self._check(probabilities)
            bounds = probabilities.cumsum()
            for number in new_numbers:
                uniform = np.random.default_rng([seed, number]).random() * bounds[-1]
                index = np.searchsorted(bounds, uniform, side="right")
                self._index_of_number[number] = min(int(index), len(bounds) - 1)
        return [self._prompts.prompt(self._index_of_number[number]) for number in numbers]

    def learn(self, numbers: Sequence[int], returns: Sequence[float]) -> None:
        """Tell the sampler the returns of finished episodes, by the numbers of their draws."""
        if not len(numbers):
            return
        indices = np.array([self._index_of_number[number] for number in numbers], dtype=np.int64)
        self.sampler.learn(indices, np.array(returns, dtype=np.float64))

    def forget(self, numbers: Sequence[int] | None = None) -> None:
        """Forget draws whose episodes have ended or are given up; None: all."""
        if numbers is None:
            self._index_of_number.clear()
            return
        for number in numbers:
            self._index_of_number.pop(number, None)

    def _check(self, probabilities: object) -> None:
        """Raise a ValueError unless these are probabilities of all prompts."""
        count = len(self._prompts.prompts)
        name = type(self.sampler).__name__
        if not isinstance(probabilities, np.ndarray) or probabilities.shape != (count,):
            shape = getattr(probabilities, "shape", None)
            raise ValueError(
                f"{name}.probabilities returned {type(probabilities).__name__} {shape}, expected ({count},)"
            )
        if not (probabilities >= 0).all() or not abs(probabilities.sum() - 1) <= SUM_TOLERANCE:
            raise ValueError(
                f"{name}.probabilities returned numbers from {probabilities.min()} with the sum {probabilities.sum()}, "
                "expected at least 0, with the sum 1"
            )
