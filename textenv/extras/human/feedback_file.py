"""File of human answers: one JSON object per line, each written before the next question is shown."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
from filelock import FileLock

from textenv.extras.human.annotator import SCORES, SKIP, Answer, Question, Remarks, Scale
from textenv.json_files import parse_json

CHOICES = ("first", "second")
"""Answers to a pair that choose a response: the one shown first, or second."""


class Record(Remarks, total=False):
    """One line of the file.

    Only the answer is read; ``score``, ``chosen`` and ``rejected`` are derived from it, and null for a tie or a skipped
    question.
    """

    prompt: object
    """A text, or the messages of a chat; so are the responses."""
    completion: object
    """The response, unless it is a pair."""
    score: float | None
    chosen: object
    """The better response of a pair."""
    rejected: object
    completions: list[object]
    """Both responses of a pair, in display order."""
    answer: str
    scale: Scale
    time: str
    """ISO, UTC."""
    annotator: str


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
        """Return the last answer to each question, by the question's `key`; raises as the class does."""
        last_answers = {}
        for question_key, records_by_name in self.by_person().items():
            records = list(records_by_name.values())
            last_answers[question_key] = records[-1]
        return last_answers

    def by_person(self) -> dict[str, dict[str, Record]]:
        """Return each person's last answer to each question.

        Returns:
            By the question's `key` and the person's name; for each question, the latest answer comes last.
        """
        with self._lock:
            lines = self._lines()
        answers: dict[str, dict[str, Record]] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = _parse(line)
            except ValueError as error:
                raise ValueError(
                    f"{self.path}, line {number}: {error}. Correct or delete this line; the others are not affected"
                ) from error

            # Replace the person's earlier answer, and put this one last
            responses = [response for response, _ in scores(record)]
            question_key = key(record["scale"], record["prompt"], responses)
            records_by_name = answers.setdefault(question_key, {})
            name = str(record.get("annotator"))
            records_by_name.pop(name, None)
            records_by_name[name] = record
        return answers

    def agreement(self) -> dict[str, float]:
        """Return Krippendorff's α of each scale on which people have answered the same questions: 1 is full agreement.

        Thumbs and pairs are compared by equality, marks by their squared difference; 0 is agreement by chance.
        """
        # Scores of each question: of its response or, in a pair, of the one whose text sorts first
        scores_by_scale: dict[Scale, list[list[float]]] = {}
        for records_by_name in self.by_person().values():
            question_scores = []
            for record in records_by_name.values():
                scale = record["scale"]  # the same in all records of a question
                _, score = min(scores(record), key=_text_of_response)
                if score is not None:
                    question_scores.append(score)
            scores_by_scale.setdefault(scale, []).append(question_scores)

        alphas: dict[str, float] = {}
        for scale, scores_of_questions in scores_by_scale.items():
            alpha = krippendorff_alpha(scores_of_questions, squared=scale == "0-5")
            if alpha is not None:
                alphas[scale] = alpha
        return alphas

    def append(self, question: Question, answer: str, *, annotator: str) -> Record:
        """Write an answer to the file, and return its record."""
        record = _record(question, answer, annotator)
        if isinstance(answer, Answer):
            record |= answer.more
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
            new_file = self.path.with_name(f"{self.path.name}.new")
            _write_synced(new_file, b"".join(lines), mode="wb")
            shutil.copymode(self.path, new_file)
            os.replace(new_file, self.path)

    def scored(self) -> list[dict[str, object]]:
        """Return ``prompt``, ``completion`` and ``score``, a row per person and question, without skipped ones."""
        rows: list[dict[str, object]] = []
        for record in self._records():
            if record["scale"] != "pairs":
                ((completion, score),) = scores(record)
                if score is not None:
                    rows.append({"prompt": record["prompt"], "completion": completion, "score": score})
        return rows

    def preferences(self) -> list[dict[str, object]]:
        """Return ``prompt``, ``chosen`` and ``rejected`` of each person's pairs, without ties and skipped ones."""
        rows: list[dict[str, object]] = []
        for record in self._records():
            if record["scale"] == "pairs" and record["answer"] in CHOICES:
                completions = record["completions"]
                chosen = CHOICES.index(record["answer"])
                rows.append(
                    {"prompt": record["prompt"], "chosen": completions[chosen], "rejected": completions[1 - chosen]}
                )
        return rows

    def _records(self) -> Iterator[Record]:
        """Yield the last record of each person on each question."""
        for records_by_name in self.by_person().values():
            yield from records_by_name.values()

    def _lines(self) -> list[bytes]:
        """Return all lines, after completing or moving away an incomplete last line; the caller holds the lock."""
        if not self.path.exists():
            return []
        lines = BytesIO(self.path.read_bytes()).readlines()
        if not lines or lines[-1].endswith(b"\n"):
            return lines

        # The last line lacks only its newline, or more
        last_line = lines.pop()
        try:
            _parse(last_line)
        except ValueError:
            self._move_away(last_line)
        else:
            _write_synced(self.path, b"\n", mode="ab")
            lines.append(last_line + b"\n")
        return lines

    def _move_away(self, incomplete_line: bytes) -> None:
        """Move the incomplete last line to another file, and warn."""
        half_file = self.path.with_name(f"{self.path.name}.half")
        _write_synced(half_file, incomplete_line + b"\n", mode="ab")  # first: the line is always in at least one file
        with self.path.open("r+b") as file:
            file.truncate(self.path.stat().st_size - len(incomplete_line))
            os.fsync(file.fileno())
        warnings.warn(
            f"{self.path} ended with an incomplete line of a killed process: the line is now in {half_file}, "
            "and its question is asked again",
            stacklevel=4,
        )


def key(scale: str, prompt: object, responses: Sequence[object]) -> str:
    """Return the key of a question: equal for equal prompts and responses, in either order of a pair."""
    return canonical([scale, prompt, sorted(canonical(response) for response in responses)])


def canonical(content: object) -> str:
    """Return one text for equal contents (a text or a chat's messages); raise a TypeError if it is not JSON."""
    return json.dumps(content, sort_keys=True)


def scores(record: Record) -> list[tuple[object, float | None]]:
    """Return the responses of a record with their scores; None if the question was skipped."""
    score = SCORES[record["scale"]].get(record["answer"])
    if record["scale"] != "pairs":
        return [(record["completion"], score)]
    first, second = record["completions"]
    if score is None:
        return [(first, None), (second, None)]
    return [(first, score), (second, 1 - score)]


def _text_of_response(response_and_score: tuple[object, float | None]) -> str:
    response, _ = response_and_score
    return canonical(response)


def _record(question: Question, answer: str, annotator: str) -> Record:
    """Return the record of an answer, at this time; the order of its keys is that of the file."""
    record: Record = {"prompt": question.prompt}
    if question.scale == "pairs":
        first, second = question.responses
        record["chosen"] = None
        record["rejected"] = None
        if answer == "first":
            record |= {"chosen": first, "rejected": second}
        elif answer == "second":
            record |= {"chosen": second, "rejected": first}
        record["completions"] = [first, second]
    else:
        record["completion"] = question.responses[0]
        record["score"] = SCORES[question.scale].get(answer)
    record["answer"] = answer
    record["scale"] = question.scale
    record["time"] = datetime.now(UTC).isoformat()
    record["annotator"] = annotator
    return record


def _line(record: Record) -> bytes:
    """Return a record as a line of the file."""
    return json.dumps(record).encode("ascii") + b"\n"


def _parse(line: bytes) -> Record:
    """Return the record of a line; raise a ValueError if it is none."""
    record = parse_json(line)

    # Scale
    scale = None
    if isinstance(record, dict):
        scale = record.get("scale")
    if not isinstance(scale, str) or scale not in SCORES:
        raise ValueError(f"not a JSON object whose 'scale' is one of {', '.join(SCORES)}: {line[:60]!r}")

    # Prompt and responses
    is_pair = scale == "pairs"
    has_responses = "completion" in record
    if is_pair:
        has_responses = "completions" in record
    if "prompt" not in record or not has_responses:
        raise ValueError(f"the prompt or the completion is missing, found only {sorted(record)}")
    if is_pair and not (isinstance(record["completions"], list) and len(record["completions"]) == 2):
        raise ValueError(f"'completions' is {record['completions']!r:.200}, expected a list of 2")

    # Answer
    answers = (*SCORES[scale], SKIP)
    if record.get("answer") not in answers:
        raise ValueError(f"'answer' is {record.get('answer')!r}, expected {', '.join(answers)}")
    return record


def krippendorff_alpha(values: Sequence[Sequence[float]], *, squared: bool = False) -> float | None:
    """Compute Krippendorff's α (2011, "Computing Krippendorff's alpha-reliability").

    Args:
        values: for each question, the values that people gave.
        squared: take the square of their difference as the difference of two values, instead of 1 if they differ.

    Returns:
        1 for full agreement, 0 for agreement by chance; None if no question has two values, or all values are equal.

    Example:
        >>> krippendorff_alpha([[1, 1], [0, 0], [0, 1]])
        0.4444444444444444
    """
    pairable = [np.array(unit, dtype=float) for unit in values if len(unit) > 1]
    if not pairable:
        return None

    def difference(unit: np.ndarray) -> float:
        """Sum over all ordered pairs of values."""
        gaps = unit[:, None] - unit
        if squared:
            return float((gaps**2).sum())
        return float((gaps != 0).sum())

    all_values = np.concatenate(pairable)
    expected = difference(all_values) / (len(all_values) - 1)
    if not expected:
        return None
    observed = sum(difference(unit) / (len(unit) - 1) for unit in pairable)
    return 1 - observed / expected


def _write_synced(path: Path, data: bytes, *, mode: str) -> None:
    """Write to a file, and wait until the data are on the disk."""
    with path.open(mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
