"""Signs of a fault in what the policy writes: in the answers that a run recorded before any update, and late in it.

As in `algos.lab.doctor.signs`, each function gets the `Evidence` and its rule's threshold.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from algos.lab.doctor.evidence import EXAMPLE_LENGTH, Evidence, RecordedAnswer, quoted
from algos.lab.doctor.signs import Figures
from algos.training.reward_hacking import SCORE

MIN_ANSWERS = 16
"""Fewest late answers of which a rule says anything."""
MIN_PROMPTS = 4
"""Fewest different prompts for which one answer is too few."""
LONG_ANSWER = 20
"""Fewest words of an answer in which repetition is looked for."""
WORDS_OF_A_PHRASE = 4
"""Words of the phrases whose repetition is counted."""
GROWTH = 1.5
"""Factor by which answers have become longer if the reward may pay for length."""
MIN_VALUES = 3
"""Fewest different lengths, and scores, of which a correlation says anything."""

OTHER_SPEAKER = re.compile(
    r"<\|(?:im_start|im_end|user|assistant|system|end|eot_id|start_header_id|end_of_turn)\|>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]"
    r"|\n\s*(?:User|Human|Question|Q)\s*:"
)
"""Marks of a turn in the chat templates of ChatML, Llama, Phi, Gemma and Mistral, and in plain dialogues."""


def one_answer(evidence: Evidence, threshold: float) -> Figures | None:
    """Nearly all late answers are one and the same text, to different prompts."""
    late = evidence.late_answers
    if len(late) < MIN_ANSWERS:
        return None
    text, count = Counter(answer.completion for answer in late).most_common(1)[0]
    prompts = {answer.prompt for answer in late if answer.completion == text}
    if len(prompts) < MIN_PROMPTS or count / len(late) < threshold:
        return None
    first = _share(evidence.first_answers, lambda answer: answer.completion == text)
    if first > 0.5 * threshold:  # it was so before the training
        return None
    return {"fraction": count / len(late), "count": len(late), "first": first, "example": quoted(text)}


def answers_repeat(evidence: Evidence, threshold: float) -> Figures | None:
    """Long answers go round in circles: most of their phrases stood in the same answer before."""
    late = [answer.completion for answer in _single_turns(evidence.late_answers) if _is_long(answer)]
    if len(late) < MIN_ANSWERS:
        return None
    last = float(np.mean([_repetition(text) for text in late]))
    early = [_repetition(answer.completion) for answer in evidence.first_answers if _is_long(answer)]
    first = float(np.mean(early)) if early else 0.0
    if last < threshold or _was_so_and_learns(evidence, first, last):
        return None
    return {"last": last, "first": first, "example": quoted(max(late, key=_repetition))}


def _is_long(answer: RecordedAnswer) -> bool:
    return len(answer.completion.split()) >= LONG_ANSWER


def _repetition(text: str) -> float:
    """Return the fraction of a text's phrases of `WORDS_OF_A_PHRASE` words that stood in it before."""
    words = text.split()
    phrases = [tuple(words[start : start + WORDS_OF_A_PHRASE]) for start in range(len(words) - WORDS_OF_A_PHRASE + 1)]
    return 1 - len(set(phrases)) / len(phrases)


def answers_empty(evidence: Evidence, threshold: float) -> Figures | None:
    """Most late answers are empty."""
    late = _single_turns(evidence.late_answers)
    if len(late) < MIN_ANSWERS:
        return None
    last = _share(late, _is_empty)
    first = _share(evidence.first_answers, _is_empty)
    if last < threshold or _was_so_and_learns(evidence, first, last):
        return None
    return {"last": last, "count": len(late), "first": first}


def _is_empty(answer: RecordedAnswer) -> bool:
    return not answer.completion.strip()


def speaks_for_others(evidence: Evidence, threshold: float) -> Figures | None:
    """After its answer the policy goes on with the next turn of the other speaker, or writes the marks of a turn."""
    late = _single_turns(evidence.late_answers)
    if len(late) < MIN_ANSWERS:
        return None
    fraction = _share(late, _has_another_speaker)
    if fraction < threshold:
        return None
    answer = next(filter(_has_another_speaker, late)).completion
    mark = OTHER_SPEAKER.search(answer)
    assert mark is not None
    start = max(0, mark.start() - EXAMPLE_LENGTH // 2)
    return {"fraction": fraction, "count": len(late), "example": quoted(answer[start:])}


def _has_another_speaker(answer: RecordedAnswer) -> bool:
    return OTHER_SPEAKER.search(answer.completion) is not None


def length_pays(evidence: Evidence, threshold: float) -> Figures | None:
    """The score has risen with the length of the answers, and late in the run longer answers have higher scores."""
    trend = evidence.trend(SCORE)
    first = evidence.early("episode/length")
    last = evidence.late("episode/length")
    if trend is None or not trend.has_risen or not first or last is None or last < GROWTH * first:
        return None
    lengths = []
    scores = []
    for answer in _single_turns(evidence.late_answers):
        if answer.score is not None:
            lengths.append(len(answer.completion.split()))
            scores.append(answer.score)
    if len(scores) < MIN_ANSWERS or min(len(set(lengths)), len(set(scores))) < MIN_VALUES:
        return None
    correlation = float(np.corrcoef(_ranks(lengths), _ranks(scores))[0, 1])
    if correlation < threshold:
        return None
    return {"correlation": correlation, "first": first, "last": last}


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return the rank of each value, float64 ``[N]``; equal values share the mean of their ranks."""
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2
    return mean_rank[indices]


def _single_turns(answers: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    """Return the answers without replies of the environment between their turns."""
    return [answer for answer in answers if not answer.has_replies]


def _share(answers: Sequence[RecordedAnswer], has_sign: Callable[[RecordedAnswer], bool]) -> float:
    """Return the fraction of answers that have a sign; 0 if there are none."""
    if not answers:
        return 0.0
    return sum(map(has_sign, answers)) / len(answers)


def _was_so_and_learns(evidence: Evidence, first: float, last: float) -> bool:
    """Return whether a sign was there before the training, which has made the score better all the same."""
    return evidence.has_learnt() and first > 0.5 * last
