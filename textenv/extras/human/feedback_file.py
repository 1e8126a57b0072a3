"""File of human answers: one JSON object per line, each written before the next question is shown."""

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from textenv.extras.human.annotator import SCORES, SKIP, Question
from textenv.json_files import parse_json

Record = dict[str, Any]
"""One line: ``prompt``, ``completion`` and ``score`` (for a pair ``prompt``, ``chosen``, ``rejected`` and both
``completions`` in display order), then ``answer``, ``scale``, ``time`` (ISO, UTC) and ``annotator``. The
answer is authoritative; ``score``, ``chosen``, ``rejected`` are derived, null for a tie or a skipped question. A person
in a browser may add ``ratings`` (0 to 5, of both completions of a pair) and a ``comment``."""


class FeedbackFile:
    """Human answers, saved at once and looked up by question; several processes may share a file.

    Args:
        path: a ``.jsonl`` file, created with its folder if missing. Next to the file are ``.lock``, and ``.half`` with
            incomplete lines of killed processes.

    Raises:
        ValueError: if a line is not a valid record; the message names file and line.

    Example:
        >>> FeedbackFile("runs/thumbs.jsonl").scored()  # doctest: +SKIP
        [{'prompt': 'the film', 'completion': 'is good .', 'score': 1.0}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{self.path}.lock")
        self.answers()

    def answers(self) -> dict[str, Record]:
        """Return the last answer by the `key` of its question; raises as the class does."""
        return {k: list(found.values())[-1] for k, found in self.by_person().items()}

    def by_person(self) -> dict[str, dict[str, Record]]:
        """Return the last answer of each person by the `key` of its question and their names; the latest one last."""
        with self._lock:
            lines = self._lines()
        found: dict[str, dict[str, Record]] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = _parse(line)
            except ValueError as error:
                raise ValueError(
                    f"{self.path}, line {number}: {error}. Correct or delete this line; the others are not affected"
                ) from error
            of = found.setdefault(key(record["scale"], record["prompt"], [x for x, _ in scores(record)]), {})
            person = str(record.get("annotator"))
            of.pop(person, None)
            of[person] = record
        return found

    def agreement(self) -> dict[str, float]:
        """Return Krippendorff's α of each scale on which people have answered the same questions: 1 is full agreement.

        Thumbs and pairs are compared by equality, marks by their squared difference; 0 is agreement by chance.
        """
        values: dict[str, list[list[float]]] = {}
        for found in self.by_person().values():
            rated = [min(scores(record), key=lambda each: canonical(each[0]))[1] for record in found.values()]
            scale = next(iter(found.values()))["scale"]
            values.setdefault(scale, []).append([x for x in rated if x is not None])
        alphas = {scale: krippendorff_alpha(rated, squared=scale == "0-5") for scale, rated in values.items()}
        return {scale: alpha for scale, alpha in alphas.items() if alpha is not None}

    def append(self, question: Question, answer: str, *, annotator: str) -> Record:
        """Write an answer to the file, and return its record."""
        record = _record(question, answer, annotator) | getattr(answer, "more", {})
        with self._lock:
            self._lines()  # another process may have been killed in the middle of its line
            _write_synced(self.path, _line(record), mode="ab")
        return record

    def withdraw(self, record: Record) -> None:
        """Remove an answer from the file.

        Raises:
            ValueError: if the record is not in the file.
        """
        with self._lock:
            lines = self._lines()
            if _line(record) not in lines:
                raise ValueError(f"{self.path} no longer has the answer to undo: {record}")
            lines.remove(_line(record))
            fresh = self.path.with_name(f"{self.path.name}.new")
            _write_synced(fresh, b"".join(lines), mode="wb")
            shutil.copymode(self.path, fresh)
            os.replace(fresh, self.path)

    def scored(self) -> list[Record]:
        """Return the scores as ``prompt``, ``completion``, ``score``, one of each person; without skipped questions."""
        return _select(self.by_person(), "prompt", "completion", "score")

    def preferences(self) -> list[Record]:
        """Return the pairs as ``prompt``, ``chosen``, ``rejected``, one of each person; no ties, none skipped."""
        return _select(self.by_person(), "prompt", "chosen", "rejected")

    def _lines(self) -> list[bytes]:
        """Return all lines, after completing or moving away an incomplete last line; the caller holds the lock."""
        lines = BytesIO(self.path.read_bytes()).readlines() if self.path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            half = lines.pop()
            try:
                _parse(half)
            except ValueError:
                self._put_aside(half)
            else:
                _write_synced(self.path, b"\n", mode="ab")
                lines.append(half + b"\n")
        return lines

    def _put_aside(self, half: bytes) -> None:
        aside = self.path.with_name(f"{self.path.name}.half")
        _write_synced(aside, half + b"\n", mode="ab")  # first, so that the line is always in at least one file
        with self.path.open("r+b") as file:
            file.truncate(self.path.stat().st_size - len(half))
            os.fsync(file.fileno())
        warnings.warn(
            f"{self.path} ended with an incomplete line of a killed process: the line is now in {aside}, "
            "and its question is asked again",
            stacklevel=4,
        )


def key(scale: str, prompt: Any, responses: Sequence[Any]) -> str:
    """Return the key of a question: equal for equal prompts and responses, in either order of a pair."""
    return canonical([scale, prompt, sorted(canonical(response) for response in responses)])


def canonical(content: Any) -> str:
    """Return one text for equal contents (a text or a chat's messages); raise a TypeError if it is not JSON."""
    return json.dumps(content, sort_keys=True)


def scores(record: Record) -> list[tuple[Any, float | None]]:
    """Return the responses of a record with their scores; None if the question was skipped."""
    score = SCORES[record["scale"]].get(record["answer"])
    if record["scale"] != "pairs":
        return [(record["completion"], score)]
    first, second = record["completions"]
    return [(first, score), (second, None if score is None else 1 - score)]


def _record(question: Question, answer: str, annotator: str) -> Record:
    record: Record = {"prompt": question.prompt}
    if question.scale == "pairs":
        first, second = question.responses
        chosen, rejected = {"first": (first, second), "second": (second, first)}.get(answer, (None, None))
        record |= {"chosen": chosen, "rejected": rejected, "completions": [first, second]}
    else:
        record |= {"completion": question.responses[0], "score": SCORES[question.scale].get(answer)}
    time = datetime.now(UTC).isoformat()
    return record | {"answer": answer, "scale": question.scale, "time": time, "annotator": annotator}


def _line(record: Record) -> bytes:
    return json.dumps(record).encode("ascii") + b"\n"


def _parse(line: bytes) -> Record:
    record = parse_json(line)
    scale = record.get("scale") if isinstance(record, dict) else None
    if not isinstance(scale, str) or scale not in SCORES:
        raise ValueError(f"not a JSON object whose 'scale' is one of {', '.join(SCORES)}: {line[:60]!r}")
    if "prompt" not in record or ("completions" if scale == "pairs" else "completion") not in record:
        raise ValueError(f"the prompt or the completion is missing, found only {sorted(record)}")
    if scale == "pairs" and not (isinstance(record["completions"], list) and len(record["completions"]) == 2):
        raise ValueError(f"'completions' is {record['completions']!r:.200}, expected a list of 2")
    if record.get("answer") not in (*SCORES[scale], SKIP):
        raise ValueError(f"'answer' is {record.get('answer')!r}, expected {', '.join((*SCORES[scale], SKIP))}")
    return dict(record)


def krippendorff_alpha(values: Sequence[Sequence[float]], *, squared: bool = False) -> float | None:
    """Krippendorff's α (2011, "Computing Krippendorff's alpha-reliability") of the values that each question was given.

    The difference of two values is 1 if they differ or, if ``squared``, the square of their difference. None without
    two values of a question, or if all values are equal.

    Example:
        >>> krippendorff_alpha([[1, 1], [0, 0], [0, 1]])
        0.4444444444444444
    """
    pairable = [np.array(unit, dtype=float) for unit in values if len(unit) > 1]
    if not pairable:
        return None

    def difference(x: np.ndarray) -> float:
        gaps = x[:, None] - x
        return float((gaps**2 if squared else gaps != 0).sum())

    everything = np.concatenate(pairable)
    expected = difference(everything) / (len(everything) - 1)
    return 1 - sum(difference(unit) / (len(unit) - 1) for unit in pairable) / expected if expected else None


def _select(answers: dict[str, dict[str, Record]], *names: str) -> list[Record]:
    rows = [{name: record.get(name) for name in names} for found in answers.values() for record in found.values()]
    return [row for row in rows if row[names[-1]] is not None]


def _write_synced(path: Path, data: bytes, *, mode: str) -> None:
    with path.open(mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
