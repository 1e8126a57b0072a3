"""`judge`: a language model behind OpenAI's protocol scores the answers by a rubric."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textenv.rewards.answer import answer_text, is_empty
from textenv.rewards.chat_replies import ChatReplies, Question, Reply
from textenv.rewards.judge_questions import Messages, fill, prompt_as_text, read_question, reply_schema
from textenv.rewards.scores import Score, Scores, as_number
from textenv.rewards.verdicts import Scale

Rubric = str | Mapping[str, str | tuple[str, float]]
"""What makes an answer good; or several criteria by name, each with a weight if it is not 1."""
PAIR_SCALE = Scale(0, 2, is_whole=True)
"""The number of the better answer; 0 for none."""
DEFAULT_SCALE = (1, 5)
_log = logging.getLogger(__name__)


def judge(
    rubric: Rubric,
    *,
    base_url: str,
    model: str,
    scale: tuple[float, float] = DEFAULT_SCALE,
    against: str | None = None,
    samples: int = 1,
    question: str | Messages | None = None,
    api_key: str | None = None,
    options: Mapping[str, object] | None = None,
    cache: str | Path | None = None,
    max_calls: int | None = None,
    concurrency: int = 16,
    timeout: float = 60.0,
    patience: float = 300.0,
) -> Judge:
    """Return a reward function that asks a language model for a score (Zheng et al. 2023, "LLM-as-a-Judge").

    The model is asked in one message with the criterion, the prompt and the answer, once for each criterion (Liu et al.
    2023, G-Eval). It says why, and ends with a number. A server that can write by a JSON schema is asked to; the
    replies of others are read as `textenv.rewards.verdicts.Scale.read` says. A reply that has no number of the scale is
    unreadable. If all samples of a criterion (or of a pair) are, the answer gets None: it is left out of the update.

    Args:
        rubric: what makes an answer good, in words; or several criteria as ``{"name": "words"}`` or ``{"name":
            ("words", weight)}``. Their weighted sum is paid, and each is logged by its name. One of weight 0 is only
            logged.
        base_url: address of a server with OpenAI's protocol, up to ``/v1``.
        model: the name of its model.
        scale: worst and best number that the model may give. It is paid as it is.
        against: name of a column with another answer to each prompt, with which the model compares the completion
            instead of rating it. Models prefer the answer in the first place or in the last, so both orders are asked
            (Zheng et al. 2023, section 3.4). If the completion is better in both, 1 is paid; if the other one is, 0; in
            all other cases, also if the two verdicts contradict each other, 0.5, a tie. None where the column is empty
            (None, a text of white space, or NaN).
        samples: how often each question is asked; the mean over the readable verdicts is paid (G-Eval), which tells
            answers apart that have the same most probable verdict. With a scale of (0, 1) it is the share of votes.
        question: what the model is asked instead of `textenv.rewards.judge_questions.RATE` or ``COMPARE``: a text, or a
            chat, which may begin with examples of questions and replies. ``{criterion}``, ``{prompt}``, ``{answer}``
            (with ``against``, ``{answer_1}`` and ``{answer_2}``), ``{low}`` and ``{high}`` are replaced, and so is
            ``{texts}``: prompt and answer between tags that they do not contain, so that no answer can end its part.
        api_key: key of the server; by default the environment variable ``OPENAI_API_KEY``, if there is one. The empty
            text sends none.
        options: further fields of each request, such as ``{"max_tokens": 300}``. By default ``temperature`` is 0 for
            one sample, and the server's own for several. A ``seed`` is that of the first sample; others get the
            following numbers.
        cache: SQLite file of all replies, by model, messages, options and number of the sample: what is in it is not
            asked again, in this run or another. Without it, equal answers are judged apart.
        max_calls: maximum number of calls in a training, evaluations with this object included. A batch that needs more
            raises an error that ends the training, so that the agent is saved and can be resumed with a larger bound.
        concurrency: maximum number of requests at the same time.
        timeout: seconds until a whole reply must have come.
        patience: seconds for which a request is repeated if the server is down or busy.

    Returns:
        An ``async`` reward function; to try it, ``Rewards(judge(...))(prompts=[...], completions=[...])``. For
        each answer it logs ``calls``, ``unreadable_verdicts`` and, with ``against``, ``orders_agree``.

    Raises:
        ValueError: if an argument is not as described, or by a call without the column ``against``.
        JudgeError: by a call, if the server does not reply within the patience, refuses the key, the model or all
            questions; or if ``max_calls`` does not suffice.
    """
    # What is asked, and what is a verdict
    criteria = _read_rubric(rubric)
    low, high = _read_scale(scale)
    if against is not None and tuple(scale) != DEFAULT_SCALE:
        raise ValueError(
            f"scale is {scale} with against={against!r}: a win pays 1, a tie 0.5, a loss 0; leave out scale"
        )
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples is {samples!r}, expected a whole number of at least 1")
    answers = ["answer"]
    if against is not None:
        answers = ["answer_1", "answer_2"]
    messages = read_question(question, answers=answers)

    # Who is asked
    if options is None:
        options = {"temperature": 0}
        if samples > 1:
            options = {}
    chat = ChatReplies(
        base_url, model, api_key=api_key, options=options, concurrency=concurrency, timeout=timeout, patience=patience,
        max_calls=max_calls, cache=cache,
    )  # fmt: skip
    return Judge(criteria, chat, scale=Scale(low, high), against=against, samples=samples, question=messages)


class Judge:
    """Reward function that `judge` makes.

    Args:
        criteria: words and weight of each criterion, by name; one without a name has the name "".
        chat: asks the model.
        scale: numbers that it may give.
        against: column with answers to compare with, or None.
        samples: number of verdicts to each question.
        question: the chat that is sent, with placeholders.
    """

    def __init__(
        self,
        criteria: Mapping[str, tuple[str, float]],
        chat: ChatReplies,
        *,
        scale: Scale,
        against: str | None,
        samples: int,
        question: Messages,
    ) -> None:
        self.criteria = criteria
        self.chat = chat
        self.scale = scale
        self.against = against
        self.samples = samples
        self.question = question
        self.unreadable = 0
        """Number of unreadable verdicts so far."""
        self.__name__ = "judge"

    async def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[object], **columns: Sequence[object]
    ) -> Scores:
        """Return the scores of a batch, with the verdicts by criterion."""
        references: Sequence[object] = [None] * len(completions)
        if self.against is not None:
            if self.against not in columns:
                raise ValueError(
                    f"a judge compares with the column {self.against!r}, but got {sorted(columns)}: give prompts as "
                    f"mappings with 'prompt' and {self.against!r}, or another name as against="
                )
            references = columns[self.against]

        # The questions of each row and criterion, together
        asked: list[tuple[int, str]] = []
        questions: list[Question] = []
        for row, (prompt, completion, reference) in enumerate(zip(prompts, completions, references, strict=True)):
            if self.against is not None and is_empty(reference):
                continue
            for name, (criterion, _) in self.criteria.items():
                asked.append((row, name))
                questions += self._questions(criterion, prompt, completion, reference)
        replies = await self.chat.ask(questions)

        # The verdict on each row by each criterion
        num_replies = self._num_orders * self.samples
        verdicts: dict[str, list[float | None]] = {name: [None] * len(completions) for name in self.criteria}
        calls: list[float | None] = [0.0] * len(completions)
        unreadable: list[float | None] = [None] * len(completions)
        agreements: dict[int, list[float]] = {}
        for index, (row, name) in enumerate(asked):
            replies_here = replies[index * num_replies : (index + 1) * num_replies]
            calls[row] = (calls[row] or 0) + sum(reply.calls for reply in replies_here)
            numbers = [self._read(reply) for reply in replies_here]
            unreadable[row] = (unreadable[row] or 0) + numbers.count(None)
            if self.against is None:
                verdicts[name][row] = _mean(numbers)
                continue
            pairs = list(zip(numbers[0::2], numbers[1::2], strict=True))
            verdicts[name][row] = _mean([pair_verdict(*pair) for pair in pairs])
            agreements.setdefault(row, []).extend(orders_agree(*pair) for pair in pairs if None not in pair)
        self._count_unreadable(replies)

        # Numbers for the log
        logged = {"calls": calls, "unreadable_verdicts": unreadable}
        if self.against is not None:
            logged["orders_agree"] = [_mean(agreements.get(row, [])) for row in range(len(completions))]
        return self._scores(verdicts, logged)

    def state_dict(self) -> dict[str, int]:
        """Return the numbers of calls and of unreadable verdicts."""
        return {"calls": self.chat.calls, "unreadable": self.unreadable}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; neither number falls, because calls of an evaluation cost money, too."""
        self.chat.calls = max(self.chat.calls, int(state["calls"]))
        self.unreadable = max(self.unreadable, int(state["unreadable"]))

    @property
    def _num_orders(self) -> int:
        """Number of orders in which answers are shown."""
        if self.against is None:
            return 1
        return 2

    def _questions(self, criterion: str, prompt: object, completion: object, reference: object) -> list[Question]:
        """Return the questions about an answer: for each sample one, or one for each order of the two answers."""
        prompt_text = prompt_as_text(prompt)
        answer = answer_text(completion)
        if self.against is None:
            messages = self._messages(criterion, prompt=prompt_text, answer=answer)
            schema = reply_schema({"type": "number", "description": f"from {self.scale.low:g} to {self.scale.high:g}"})
            return [Question(messages, schema, sample) for sample in range(self.samples)]

        # The completion first, then second
        questions = []
        other_answer = answer_text(reference)
        schema = reply_schema({"type": "integer", "enum": [0, 1, 2]})
        for sample in range(self.samples):
            for first, second in ((answer, other_answer), (other_answer, answer)):
                messages = self._messages(criterion, prompt=prompt_text, answer_1=first, answer_2=second)
                questions.append(Question(messages, schema, sample))
        return questions

    def _messages(self, criterion: str, **texts: str) -> list[dict[str, str]]:
        """Return the chat of a question about these texts."""
        return fill(self.question, criterion=criterion, texts=texts, scale=self.scale)

    def _read(self, reply: Reply) -> float | None:
        """Return the verdict of a reply; None if it is unreadable."""
        if reply.reply_text is None:
            return None
        if self.against is None:
            return self.scale.read(reply.reply_text)
        return PAIR_SCALE.read(reply.reply_text)

    def _count_unreadable(self, replies: Sequence[Reply]) -> None:
        """Count the unreadable verdicts; warn if they are more than half of a batch."""
        unreadable_replies = [reply for reply in replies if self._read(reply) is None]
        self.unreadable += len(unreadable_replies)
        if 2 * len(unreadable_replies) > len(replies):
            first = unreadable_replies[0]
            _log.warning(
                "%d of %d verdicts are unreadable, such as %.300r: these answers are left out",
                len(unreadable_replies), len(replies), first.reply_text or first.problem,
            )  # fmt: skip

    def _scores(self, verdicts: Mapping[str, Sequence[float | None]], logged: dict[str, list[float | None]]) -> Scores:
        """Return the weighted sums of the verdicts; None for a row without a verdict that has a weight."""
        weights = {name: weight for name, (_, weight) in self.criteria.items()}
        sums: list[Score] = []
        for row in range(len(logged["calls"])):
            weighted: list[float | None] = []
            for name, weight in weights.items():
                verdict = verdicts[name][row]
                if weight:
                    weighted.append(_times(verdict, weight))
            if None in weighted:
                sums.append(None)
            else:
                sums.append(math.fsum(number for number in weighted if number is not None))
        if list(weights) == [""]:
            return Scores(score=sums, logged=logged)

        # By criterion; a row that is left out has no parts
        raw: dict[str, list[float | None]] = {}
        for name, column in verdicts.items():
            raw[name] = [None if score is None else verdict for verdict, score in zip(column, sums, strict=True)]
        parts = {name: [_times(verdict, weights[name]) for verdict in column] for name, column in raw.items()}
        return Scores(score=sums, parts=parts, raw=raw, logged=logged)


def pair_verdict(completion_first: float | None, completion_second: float | None) -> float | None:
    """Return 1 if the completion wins in both orders, 0 if it loses in both, else 0.5; None without both verdicts.

    Args:
        completion_first: the better answer (1, 2, or 0 for none) where the completion is answer 1.
        completion_second: the same where the completion is answer 2.

    Example:
        >>> pair_verdict(1, 2), pair_verdict(2, 1), pair_verdict(1, 1), pair_verdict(1, 0), pair_verdict(1, None)
        (1.0, 0.0, 0.5, 0.5, None)
    """
    if completion_first is None or completion_second is None:
        return None
    if (completion_first, completion_second) == (1, 2):
        return 1.0
    if (completion_first, completion_second) == (2, 1):
        return 0.0
    return 0.5


def orders_agree(completion_first: float | None, completion_second: float | None) -> bool:
    """Return True if both orders have the same winner, or none. Arguments are those of `pair_verdict`.

    Example:
        >>> orders_agree(1, 2), orders_agree(0, 0), orders_agree(1, 1), orders_agree(1, 0)
        (True, True, False, False)
    """
    return (completion_first, completion_second) in ((1, 2), (2, 1), (0, 0))


def _times(verdict: float | None, weight: float) -> float | None:
    """Return a verdict times a weight; None stays None."""
    if verdict is None:
        return None
    return verdict * weight


def _mean(numbers: Sequence[float | None]) -> float | None:
    """Return the mean of the numbers; None if there is none."""
    present = [number for number in numbers if number is not None]
    if not present:
        return None
    return sum(present) / len(present)


def _read_rubric(rubric: Rubric) -> dict[str, tuple[str, float]]:
    """Return words and weight of each criterion by name; a single one has the name ""."""
    expected = "expected words, or {'name': 'words'} or {'name': ('words', weight)}"
    if isinstance(rubric, str):
        rubric = {"": rubric}
    if not isinstance(rubric, Mapping) or not rubric:
        raise ValueError(f"rubric is {rubric!r:.200}, {expected}")

    # Words and weight of each
    criteria = {}
    for name, entry in rubric.items():
        if isinstance(entry, str):
            entry = (entry, 1.0)
        try:
            words, weight = entry
            is_criterion = isinstance(words, str) and words.strip() and math.isfinite(weight)
        except (TypeError, ValueError):
            is_criterion = False
        if not is_criterion or not isinstance(name, str):
            raise ValueError(f"rubric has {name!r}: {entry!r:.200}, {expected}, with words and a finite weight")
        criteria[name] = (words, float(weight))

    if not any(weight for _, weight in criteria.values()):
        raise ValueError(
            "all weights of the rubric are 0: give one of the criteria a weight. To log a judge and not pay it, use "
            "Rewards({'judge': (judge(...), 0)})"
        )
    return criteria


def _read_scale(scale: object) -> tuple[float, float]:
    """Return the ends of a scale; a ValueError unless they are two numbers in order."""
    expected = f"scale is {scale!r:.100}, expected the worst and the best number, such as (1, 5)"
    if not isinstance(scale, Sequence) or len(scale) != 2:
        raise ValueError(expected)
    low = as_number(scale[0])
    high = as_number(scale[1])
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise ValueError(expected)
    return low, high
