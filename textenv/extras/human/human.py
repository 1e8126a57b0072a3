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
    response, undo the last answer of the batch, or quit. Responses without a human score, such as one left without a
    partner in pairs, are scored by ``fallback``. Without a ``fallback`` their score is None ("does not apply").

    Args:
        file: path of the answers, see `textenv.extras.human.feedback_file`.
        scale: scale of the answers.
        annotator: shows the questions; a `TerminalAnnotator` if None. With a list of `BrowserAnnotator`, each person is
            asked everything, all at once; the score is the mean of theirs, and `FeedbackFile.agreement` is logged.
        fallback: a reward function, such as a reward model, for responses without a human score.
        fraction: maximum fraction of the questions of a call (a batch) to ask, at random; rounded up. A batch that
            is repeated after a restart has the same questions.
        seed: seed of the choice of questions, and of the display order in a pair.

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

        # Who is asked, and where the answers are kept
        if annotator is None:
            annotator = TerminalAnnotator()
        self.annotators = _annotators(annotator)
        self.__name__ = "human"
        self.file = FeedbackFile(file)
        self.scale = scale
        self.fallback = fallback
        self.fraction = fraction
        self.seed = seed
        self.by_batch = scale == "pairs" or fraction < 1
        """True if the score of a row depends on other rows."""

    def __call__(
        self,
        /,
        prompts: Sequence[object],
        completions: Sequence[object],
        *,
        tokenizer: object = None,
        **columns: object,
    ) -> list[float | None]:
        """Return a score for each response, or None.

        Raises:
            FeedbackStopped: if the person quits.
            ValueError: on an invalid answer, or a wrong number of scores from ``fallback``.
        """
        questions = self._questions(prompts, completions)
        self._ask_everyone(self._chosen(questions))

        # Scores that people have given, by prompt and completion
        answers = self.file.by_person()
        human_scores: dict[tuple[str, str], list[float]] = {}
        for question_key, question in questions.items():
            for record in answers.get(question_key, {}).values():
                for completion, score in scores(record):
                    if score is not None:
                        response = (canonical(question.prompt), canonical(completion))
                        human_scores.setdefault(response, []).append(score)
        if len(self.annotators) > 1:
            alphas = self.file.agreement()
            if self.scale in alphas:
                log_again({"agreement": [alphas[self.scale]] * len(prompts)})

        # The mean score of each row
        means: list[float | None] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            scores_of_row = human_scores.get((canonical(prompt), canonical(completion)))
            mean = None
            if scores_of_row is not None:
                mean = sum(scores_of_row) / len(scores_of_row)
            means.append(mean)
        return self._complete(means, {"prompts": prompts, "completions": completions} | columns, tokenizer)

    def _questions(self, prompts: Sequence[object], completions: Sequence[object]) -> dict[str, Question]:
        """Return the questions about this batch, by key, without duplicates."""
        # Distinct responses to each distinct prompt, by their canonical texts
        prompt_of: dict[str, object] = {}
        responses_to: dict[str, dict[str, object]] = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt_text = canonical(prompt)
            prompt_of.setdefault(prompt_text, prompt)
            responses_to.setdefault(prompt_text, {})[canonical(completion)] = completion

        # A question for each response or, in random order, for each pair
        questions = {}
        for prompt_text, prompt in prompt_of.items():
            responses = list(responses_to[prompt_text].values())
            together: list[tuple[object, ...]] = [(response,) for response in responses]
            if self.scale == "pairs":
                together = list(zip(responses[::2], responses[1::2], strict=False))
            for shown in together:
                question_key = key(self.scale, prompt, shown)
                is_swapped = self._rng([question_key]).random() < 0.5
                if is_swapped:
                    shown = shown[::-1]
                questions[question_key] = Question(prompt, shown, self.scale)
        return questions

    def _chosen(self, questions: dict[str, Question]) -> dict[str, Question]:
        """Choose the questions to ask; depends on seed and batch only, not on earlier answers."""
        count = math.ceil(self.fraction * len(questions) - 1e-9)
        permutation = self._rng(list(questions)).permutation(len(questions))
        chosen_indices = set(permutation[:count].tolist())
        return {k: questions[k] for index, k in enumerate(questions) if index in chosen_indices}

    def _rng(self, keys: list[str]) -> np.random.Generator:
        """Return a random generator that depends on the seed and these keys only."""
        digest = sha256("\n".join(keys).encode()).digest()
        return np.random.default_rng([self.seed, int.from_bytes(digest)])

    def _ask_everyone(self, chosen: dict[str, Question]) -> None:
        """Ask each of several people what they have not answered, or a single person what nobody has answered."""
        answers = self.file.by_person()
        jobs: list[Callable[[], None]] = []
        for annotator in self.annotators:
            unanswered = []
            for question_key, question in chosen.items():
                names = set(answers.get(question_key, {}))
                if len(self.annotators) > 1:
                    names &= {annotator.name}
                if not names:
                    unanswered.append(question)
            jobs.append(partial(self._ask, unanswered, annotator))
        if len(jobs) == 1:
            return jobs[0]()

        # Several people at once
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [pool.submit(job) for job in jobs]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:  # if one quits, or Ctrl-C, the others stop too
                while wait(futures, timeout=0.1).not_done:
                    for annotator in self.annotators:
                        annotator.cancel()  # type: ignore[attr-defined]

    def _ask(self, questions: list[Question], annotator: Annotator) -> None:
        """Ask one person these questions, one after the other, and write each answer to the file.

        Raises:
            FeedbackStopped: if the person quits.
            ValueError: on an answer that the question does not have.
        """
        records: list[Record] = []
        while len(records) < len(questions):
            count = len(records)
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
                self.file.withdraw(records.pop())
            else:
                records.append(self.file.append(question, answer, annotator=annotator.name))

    def _complete(
        self, human_scores: list[float | None], columns: dict[str, object], tokenizer: object
    ) -> list[float | None]:
        """Fill in missing scores by ``fallback``, called with their rows only."""
        missing_rows = [row for row, score in enumerate(human_scores) if score is None]
        if self.fallback is None or not missing_rows:
            return human_scores

        # The columns of these rows
        missing_columns: dict[str, Any] = {"completion_ids": [[0]] * len(missing_rows)}
        for name, values in columns.items():
            missing_columns[name] = values
            if isinstance(values, Sequence) and len(values) == len(human_scores):  # not TRL's ``trainer_state``
                missing_columns[name] = [values[row] for row in missing_rows]

        # Their scores, and what the fallback logged, back in the rows of the batch
        returned, logged = call_logged(self.fallback, missing_columns, tokenizer, NOW.get())
        scores_of_missing = read_scores(returned, Rows(missing_columns), name="fallback")
        scores_of_missing = replace(scores_of_missing, logged={**scores_of_missing.logged, **logged})
        scores_of_all = merge(len(human_scores), [(missing_rows, scores_of_missing)])
        log_again(scores_of_all.logged)
        result = list(human_scores)
        for row in missing_rows:
            result[row] = total(scores_of_all.score[row])
        return result


def _annotators(annotator: Annotator | Sequence[Annotator]) -> list[Annotator]:
    """Return one annotator, or several who can be asked at once, as a list; raise an error on anything else."""
    people = [*annotator] if isinstance(annotator, Sequence) else [annotator]
    if not people or not all(isinstance(person, Annotator) for person in people):
        raise TypeError(
            f"annotator is {annotator!r}, expected an object with ask and name, or a list of them: see "
            "textenv.extras.human.Annotator"
        )
    if len(people) > 1 and not all(hasattr(person, "cancel") for person in people):
        raise TypeError(f"annotator is {annotator!r}: only several BrowserAnnotator can ask at once")
    if len({person.name for person in people}) < len(people):
        raise ValueError(f"annotators are named {', '.join(person.name for person in people)}: give each its own name")
    return people
