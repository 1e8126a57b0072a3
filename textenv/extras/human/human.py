"""`HumanReward`: a reward function whose scores come from a person."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from textenv.extras.human.annotator import QUIT, SCORES, UNDO, Annotator, Question, Scale
from textenv.extras.human.feedback_file import FeedbackFile, Record, canonical, key, scores
from textenv.extras.human.terminal import TerminalAnnotator
from textenv.names import check_names
from textenv.rewards.calling import call_logged
from textenv.rewards.scores import Rows, StopTraining, merge, read_scores, total
from textenv.rewards.training import NOW, log_again


class FeedbackStopped(StopTraining):  # noqa: N818  (a request, not an error)
    """The person quit. All answers are in the file; a new run asks only the remaining questions."""


class HumanReward:
    """Reward function with scores from a person, for which training waits; ``fallback`` scores the rest.

    ============  =================================  =========================
    scale         asked                              score
    ============  =================================  =========================
    ``"thumbs"``  each response                      up 1, down 0
    ``"0-5"``     each response                      mark / 5
    ``"pairs"``   responses 1+2, 3+4, … to a prompt  better 1, worse 0, tie .5
    ============  =================================  =========================

    Equal responses to a prompt are shown once, and not at all if the file already has the answer. The person may skip a
    response, undo the last answer of the batch, or quit. Responses without a human score, such as one
    left without a partner in pairs, are scored by ``fallback``; if that is None, so is the score ("does not apply").

    Args:
        file: path of the answers, see `textenv.extras.human.feedback_file`.
        scale: scale of the answers.
        annotator: shows the questions; a `TerminalAnnotator` if None. Of a list of `BrowserAnnotator`, each person is
            asked everything, all at once; the score is their mean, and their `FeedbackFile.agreement` is logged.
        fallback: a reward function, such as a reward model, for responses without a human score.
        fraction: maximum fraction of the questions of a call (a batch) to ask, at random; rounded up. A batch that
            is repeated after a restart has the same questions.
        seed: seed of that choice, and of the display order in a pair.

    Raises:
        ValueError: on an unknown scale, a broken file, a fraction outside 0 to 1, or one below 1 without ``fallback``.
        TypeError: if the annotator has no ``ask`` and ``name``, or ``fallback`` is not callable.

    Example:
        >>> human = HumanReward("runs/thumbs.jsonl", fallback=reward_model, fraction=0.1)  # doctest: +SKIP
        >>> env = TextVectorEnv(prompts=prompts, reward=human, tokenizer=tokenizer)  # doctest: +SKIP
    """

    @check_names
    def __init__(
        self,
        file: str | Path,
        *,
        scale: Scale = "thumbs",
        annotator: Annotator | Sequence[Annotator] | None = None,
        fallback: Callable[..., Sequence[float | None]] | None = None,
        fraction: float = 1.0,
        seed: int = 0,
    ) -> None:
        if scale not in SCORES:
            raise ValueError(f"scale is {scale!r}, expected {', '.join(SCORES)}")
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction is {fraction!r}, expected a number from 0 (ask nobody) to 1 (ask about all)")
        if fraction < 1 and fallback is None:
            raise ValueError(
                f"fraction is {fraction!r}, but nothing scores the rest: give fallback=reward_model, or fraction=1"
            )
        if fallback is not None and not callable(fallback):
            raise TypeError(f"fallback is {fallback!r}, expected a function f(prompts, completions, **columns)")
        people = [TerminalAnnotator()] if annotator is None else annotator
        people = list(people) if isinstance(people, Sequence) else [people]
        if not people or not all(isinstance(each, Annotator) for each in people):
            raise TypeError(
                f"annotator is {annotator!r}, expected an object with ask and name, or a list of them: see "
                "textenv.extras.human.Annotator"
            )
        if len(people) > 1 and not all(hasattr(each, "cancel") for each in people):
            raise TypeError(f"annotator is {annotator!r}: only several BrowserAnnotator can ask at once")
        if len({each.name for each in people}) < len(people):
            raise ValueError(f"annotators are named {', '.join(each.name for each in people)}: give each its own name")
        self.__name__ = "human"
        self.file, self.scale, self.fallback = FeedbackFile(file), scale, fallback
        self.annotators: list[Annotator] = people
        self.fraction, self.seed = fraction, seed
        self.by_batch = scale == "pairs" or fraction < 1
        """True if the score of a row depends on other rows."""

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], *, tokenizer: Any = None, **columns: Any
    ) -> list[float | None]:
        """Return a score for each response, or None.

        Raises:
            FeedbackStopped: if the person quits.
            ValueError: on an invalid answer, or a wrong number of scores from ``fallback``.
        """
        questions = self._questions(prompts, completions)
        self._ask_everyone(self._chosen(questions))
        answers, found = self.file.by_person(), dict[tuple[str, str], list[float]]()
        for k, question in questions.items():
            for completion, score in [pair for record in answers.get(k, {}).values() for pair in scores(record)]:
                if score is not None:
                    found.setdefault((canonical(question.prompt), canonical(completion)), []).append(score)
        if len(self.annotators) > 1 and (alphas := self.file.agreement()):
            log_again({"agreement": [alphas[self.scale]] * len(prompts)} if self.scale in alphas else {})
        rows = zip(prompts, completions, strict=True)
        given = [found.get((canonical(prompt), canonical(completion))) for prompt, completion in rows]
        result = [None if marks is None else sum(marks) / len(marks) for marks in given]
        return self._complete(result, {"prompts": prompts, "completions": completions} | columns, tokenizer)

    def _questions(self, prompts: Sequence[Any], completions: Sequence[Any]) -> dict[str, Question]:
        """Return the questions about this batch, by key, without duplicates."""
        groups: dict[str, tuple[Any, dict[str, Any]]] = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            groups.setdefault(canonical(prompt), (prompt, {}))[1][canonical(completion)] = completion
        found = {}
        for prompt, distinct in groups.values():
            said = list(distinct.values())
            for responses in zip(said[::2], said[1::2], strict=False) if self.scale == "pairs" else zip(said):
                k = key(self.scale, prompt, responses)
                found[k] = Question(prompt, responses[:: -1 if self._rng([k]).random() < 0.5 else 1], self.scale)
        return found

    def _chosen(self, questions: dict[str, Question]) -> dict[str, Question]:
        """Choose the questions to ask; depends on seed and batch only, not on earlier answers."""
        count = math.ceil(self.fraction * len(questions) - 1e-9)
        picked = self._rng(list(questions)).permutation(len(questions))[:count]
        return {k: questions[k] for place, k in enumerate(questions) if place in picked}

    def _rng(self, keys: list[str]) -> np.random.Generator:
        digest = sha256("\n".join(keys).encode()).digest()
        return np.random.default_rng([self.seed, int.from_bytes(digest)])

    def _ask_everyone(self, chosen: dict[str, Question]) -> None:
        """Ask each person what they have not answered; one person alone only what nobody has."""
        answers, jobs = self.file.by_person(), list[Callable[[], None]]()
        for each in self.annotators:
            names = {each.name} if len(self.annotators) > 1 else None
            done = {k for k, found in answers.items() if names is None or names & found.keys()}
            jobs.append(partial(self._ask, [question for k, question in chosen.items() if k not in done], each))
        if len(jobs) == 1:
            return jobs[0]()
        with ThreadPoolExecutor(len(jobs)) as pool:
            asked = [pool.submit(each) for each in jobs]
            try:
                for job in as_completed(asked):
                    job.result()
            finally:  # if one quits, or Ctrl-C, the others stop too
                while wait(asked, timeout=0.1).not_done:
                    for each in self.annotators:
                        each.cancel()  # type: ignore[attr-defined]

    def _ask(self, questions: list[Question], annotator: Annotator) -> None:
        given: list[Record] = []
        while (count := len(given)) < len(questions):
            question = replace(questions[count], number=count + 1, total=len(questions), can_undo=count > 0)
            answer = annotator.ask(question)
            if answer not in question.answers:
                raise ValueError(
                    f"annotator {annotator.name!r} answered {answer!r}, expected one of {', '.join(question.answers)}"
                )
            if answer == QUIT:
                raise FeedbackStopped(
                    f"the person quit after {count} of {len(questions)} questions of this batch. All answers "
                    f"({len(self.file.answers())} with those of earlier batches) are saved in {self.file.path}: run "
                    "the same program again to answer only the rest"
                )
            if answer == UNDO:
                self.file.withdraw(given.pop())
            else:
                given.append(self.file.append(question, answer, annotator=annotator.name))

    def _complete(self, result: list[float | None], columns: dict[str, Any], tokenizer: Any) -> list[float | None]:
        """Fill in missing scores by ``fallback``, called with those rows only."""
        rows = [row for row, score in enumerate(result) if score is None]
        if self.fallback is None or not rows:
            return result
        given: dict[str, Any] = {"completion_ids": [[0]] * len(rows)}
        for name, values in columns.items():  # not all are columns: TRL's ``trainer_state``
            is_column = isinstance(values, Sequence) and len(values) == len(result)
            given[name] = [values[row] for row in rows] if is_column else values
        returned, logged = call_logged(self.fallback, given, tokenizer, NOW.get())
        scores = read_scores(returned, Rows(given), name="fallback")
        everywhere = merge(len(result), [(rows, replace(scores, logged={**scores.logged, **logged}))])
        log_again(everywhere.logged)
        return [total(everywhere.earned[row]) if score is None else score for row, score in enumerate(result)]
