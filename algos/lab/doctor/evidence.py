"""`Evidence`: what the rules of the doctor look at, read from the folder of a run."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from algos.lab.run_summary import describe_run
from algos.storage.run_files import AGENT, POLICY
from algos.storage.run_folder import checkpoints, status
from algos.storage.run_reader import read_metrics, read_samples

MIN_ITERATIONS = 10
"""Fewest iterations of which a rule says anything about the course of a run."""
MAX_BLOCKS = 10
"""Number of parts into which a long run is cut."""
MIN_BLOCK = 3
"""Fewest iterations of a part."""
CLEAR_CHANGE = 4.0
"""Standard errors by which the mean of a part must differ from that of the first one to count as a change.

The largest of nine differences is compared. Without any change it exceeds 4 standard errors in less than one of 1,000
runs (normal noise), and 3 in one of 50.
"""
MAX_WEIGHT_BYTES = 2**25
"""Largest file of weights that is read, in bytes: larger models would take seconds."""
EXAMPLE_LENGTH = 80
"""Characters of an answer that are shown."""


@dataclass(frozen=True)
class RecordedAnswer:
    """An episode of text that the run recorded in ``samples.jsonl``."""

    prompt: str
    completion: str
    """What the policy wrote; of several turns, the replies between them too."""
    score: float | None
    has_replies: bool
    """Whether the episode has several turns."""


@dataclass(frozen=True)
class Trend:
    """Course of a metric, cut into parts of equal numbers of iterations: means of some parts."""

    first: float
    """Mean of the first part."""
    highest: float
    """Largest mean of a later part."""
    last: float
    """Mean of the last part."""
    error: float
    """Standard error of the difference of two of these means, from the spread inside the parts."""
    has_jumped: bool
    """Whether the second half is clearly above the first iteration: what is learnt at once raises the first part."""

    @property
    def has_risen(self) -> bool:
        """Whether a later part is clearly above the first, or the second half above the first iteration."""
        return self.has_jumped or self.highest - self.first > CLEAR_CHANGE * self.error

    @property
    def has_fallen_back(self) -> bool:
        """Whether the last part is clearly below the highest one, and more than half of the rise is lost."""
        fall = max(self.highest, self.first) - self.last
        return fall > CLEAR_CHANGE * self.error and fall > 0.5 * (self.highest - self.first)


class Evidence:
    """Metrics of a run, and what else is known of it.

    Args:
        metrics: metrics of each iteration, as `read_metrics` returns them.
        description: what `describe_run` returns: environment, algorithm, policy, hyper-parameters.
        samples: rows of the tables of what the policy wrote, as `read_samples` returns them.
        state: state of the run, as `algos.storage.run_folder.status` returns it.
        folder: folder of the run, for weights of its checkpoints; None: there are none.

    Example:
        >>> evidence = Evidence([{"steps": 64, "episode/return": 1.0}, {"steps": 128}])
        >>> evidence.curve("episode/return")
        array([1.])
    """

    def __init__(
        self,
        metrics: Sequence[Mapping[str, float]],
        description: Mapping[str, Any] | None = None,
        *,
        samples: Sequence[Mapping[str, Any]] = (),
        state: str = "finished",
        folder: Path | None = None,
    ) -> None:
        self.metrics = metrics
        self.description = description or {}
        self.samples = samples
        self.state = state
        self.folder = folder
        self._curves: dict[str, np.ndarray] = {}
        self._trends: dict[str, Trend | None] = {}

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in small letters; empty if it is not known."""
        return str(self.description.get("algorithm") or "").lower()

    @property
    def environment(self) -> str:
        """Id of the environment; empty if it is not known."""
        environment = self.description.get("environment") or {}
        return str(environment.get("id") or "")

    @property
    def policy(self) -> str:
        """Name of the policy's class; empty if it is not known."""
        return str(self.description.get("policy") or "")

    def option(self, name: str) -> Any:
        """Return a hyper-parameter; None if it is not known."""
        return (self.description.get("config") or {}).get(name)

    def curve(self, name: str) -> np.ndarray:
        """Return the finite values of a metric, of the iterations that have it, float64."""
        if name not in self._curves:
            values = [row[name] for row in self.metrics if name in row]
            self._curves[name] = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
        return self._curves[name]

    def total(self, name: str) -> float:
        """Return the sum of a metric over the iterations; 0 if none has it."""
        return float(self.curve(name).sum())

    def early(self, name: str) -> float | None:
        """Return the mean of a metric over the first tenth of its values; None without `MIN_ITERATIONS` values."""
        values = self.curve(name)
        if len(values) < MIN_ITERATIONS:
            return None
        return float(values[: max(1, len(values) // 10)].mean())

    def late(self, name: str) -> float | None:
        """Return the median of a metric over the last third of its values; None without `MIN_ITERATIONS` values."""
        return _late_median(self.curve(name))

    def late_size(self, name: str) -> float | None:
        """Return the same of absolute values, which do not cancel where a metric swings about 0."""
        return _late_median(np.abs(self.curve(name)))

    def typical(self, name: str) -> float | None:
        """Return the median of a metric; None without `MIN_ITERATIONS` values."""
        values = self.curve(name)
        if len(values) < MIN_ITERATIONS:
            return None
        return float(np.median(values))

    def trend(self, name: str) -> Trend | None:
        """Return the course of a metric; None without `MIN_ITERATIONS` values."""
        if name not in self._trends:
            self._trends[name] = self._trend(name)
        return self._trends[name]

    def _trend(self, name: str) -> Trend | None:
        values = self.curve(name)
        if len(values) < MIN_ITERATIONS:
            return None
        blocks = np.array_split(values, min(MAX_BLOCKS, len(values) // MIN_BLOCK))
        means = [block.mean() for block in blocks]
        variance = np.mean([block.var(ddof=1) for block in blocks])
        error = math.sqrt(2 * variance / len(blocks[-1]))
        second_half = values[len(values) // 2 :]
        has_jumped = bool(second_half.mean() - values[0] > CLEAR_CHANGE * second_half.std(ddof=1))
        return Trend(float(means[0]), float(max(means[1:])), float(means[-1]), error, has_jumped)

    def has_learnt(self) -> bool:
        """Return whether the mean return has clearly risen at some time; False also if nobody can say."""
        trend = self.trend("episode/return")
        return trend is not None and trend.has_risen

    @cached_property
    def first_answers(self) -> list[RecordedAnswer]:
        """The answers of the first table of samples, which is from before any update."""
        tables = self._tables
        return tables[0] if tables else []

    @cached_property
    def late_answers(self) -> list[RecordedAnswer]:
        """The answers of the last half of the tables of samples, without the first table."""
        later_tables = self._tables[1:]
        late_tables = later_tables[len(later_tables) // 2 :]
        return list(itertools.chain.from_iterable(late_tables))

    def late_example(self) -> str:
        """Return a sentence that quotes one of the last answers, after a blank; empty if none was recorded."""
        if not self.late_answers:
            return ""
        return f" One of the last answers: {quoted(self.late_answers[-1].completion)}."

    @cached_property
    def _tables(self) -> list[list[RecordedAnswer]]:
        """Answers of each table of samples, older first; rows that lack a text are left out."""
        tables: dict[int, list[RecordedAnswer]] = {}
        for row in self.samples:
            iteration = row.get("iteration")
            prompt = row.get("prompt")
            completion = row.get("completion")
            if not isinstance(iteration, int) or not isinstance(prompt, str) or not isinstance(completion, str):
                continue
            score = row.get("score")
            if not isinstance(score, int | float) or not math.isfinite(score):
                score = None
            answer = RecordedAnswer(prompt, completion, score, has_replies="turns" in row)
            tables.setdefault(iteration, []).append(answer)
        return [tables[iteration] for iteration in sorted(tables)]

    @cached_property
    def newest_weights(self) -> list[dict[str, np.ndarray]]:
        """The policy's weights and statistics in the two newest checkpoints, older first; else an empty list.

        They are also missing if a file is larger than `MAX_WEIGHT_BYTES`, or is not one of safetensors.
        """
        if self.folder is None:
            return []
        paths = [path / AGENT / POLICY for path in checkpoints(self.folder)[-2:]]
        files = [sorted(path.glob("*.safetensors")) for path in paths]
        if len(files) < 2 or not all(len(names) == 1 and names[0].is_file() for names in files):
            return []
        if any(names[0].stat().st_size > MAX_WEIGHT_BYTES for names in files):
            return []
        weights = []
        for names in files:
            try:
                with safe_open(names[0], "np") as file:
                    weights.append({name: file.get_tensor(name) for name in file.keys()})
            except (OSError, SafetensorError, TypeError):  # NumPy has no bfloat16
                return []
        return weights


def quoted(text: str) -> str:
    """Return the beginning of a text in quotation marks, in one line."""
    line = " ".join(text.split())
    if len(line) > EXAMPLE_LENGTH:
        line = f"{line[:EXAMPLE_LENGTH]}…"
    return f'"{line}"'


def read_evidence(folder: Path, metrics: Sequence[Mapping[str, float]] | None = None) -> Evidence:
    """Read the evidence from the folder of a run.

    Args:
        folder: folder of the run.
        metrics: metrics of the iterations, if they are known already.

    Raises:
        DamagedRunError: if a file of the run is damaged.
    """
    if metrics is None:
        metrics = read_metrics(folder)
    return Evidence(metrics, describe_run(folder), samples=read_samples(folder), state=status(folder), folder=folder)


def _late_median(values: np.ndarray) -> float | None:
    """Return the median of the last third of the values; None if there are fewer than `MIN_ITERATIONS`."""
    if len(values) < MIN_ITERATIONS:
        return None
    return float(np.median(values[-(len(values) // 3) :]))
