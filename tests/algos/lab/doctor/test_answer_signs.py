"""What the signs say of answers whose figures are known by hand."""

import pytest

from algos.lab.doctor.answer_signs import answers_empty, answers_repeat, length_pays, one_answer, speaks_for_others
from algos.lab.doctor.evidence import Evidence

LOOP = " ".join(["one two three four five"] * 10)
PROSE = " ".join(f"word{number}" for number in range(50))


def rows(iteration, texts, *, scores=None, prompts=8, **columns):
    scores = scores or [0.0] * len(texts)
    pairs = enumerate(zip(texts, scores, strict=True))
    return [
        {"iteration": iteration, "prompt": f"Prompt {i % prompts}", "completion": text, "score": score} | columns
        for i, (text, score) in pairs
    ]


def evidence_of(first, late, *, learns=False, **columns):
    """A run whose first table has some texts, and the other four tables have others."""
    samples = rows(1, first)
    for iteration in (11, 21, 31, 41):
        samples += rows(iteration, late, **columns)
    metrics = [{"episode/return": float(i if learns else i % 2), "episode/length": 8.0 + i} for i in range(40)]
    return Evidence(metrics, samples=samples)


SEVEN = [f"Text {number}." for number in range(7)]
DIFFERENT = [*SEVEN, "The end."]


def test_one_answer_to_different_prompts():
    evidence = evidence_of(DIFFERENT, ["The end."] * 8)
    assert one_answer(evidence, 0.9) == {"fraction": 1, "count": 16, "first": 0.125, "example": '"The end."'}
    assert one_answer(evidence_of(DIFFERENT, DIFFERENT), 0.9) is None
    # Before the training as well, to few prompts, and to one that is always the same
    assert one_answer(evidence_of(["The end."] * 8, ["The end."] * 8), 0.9) is None
    assert one_answer(evidence_of(DIFFERENT, ["The end."] * 8, prompts=3), 0.9) is None


def test_phrases_that_stood_in_the_same_answer_before():
    # Of the 47 phrases of 50 words in a circle of five, 5 are new
    figures = answers_repeat(evidence_of([PROSE] * 8, [LOOP] * 8), 0.5)
    assert figures["last"] == pytest.approx(42 / 47) and figures["first"] == 0
    assert answers_repeat(evidence_of([LOOP] * 8, [PROSE] * 8), 0.5) is None
    assert answers_repeat(evidence_of(["one two"] * 8, ["one one one"] * 8), 0.5) is None
    # It was so before, and the score rises all the same; else it is told
    assert answers_repeat(evidence_of([LOOP] * 8, [LOOP] * 8, learns=True), 0.5) is None
    assert answers_repeat(evidence_of([LOOP] * 8, [LOOP] * 8), 0.5)["first"] == pytest.approx(42 / 47)
    # The replies of an environment are not the policy's
    assert answers_repeat(evidence_of([PROSE] * 8, [LOOP] * 8, turns=[]), 0.5) is None


def test_answers_that_say_nothing():
    figures = answers_empty(evidence_of(DIFFERENT, [" \n", ""] * 3 + SEVEN[:2]), 0.5)
    assert figures == {"last": 0.75, "count": 16, "first": 0}
    assert answers_empty(evidence_of(DIFFERENT, ["", *SEVEN]), 0.5) is None


@pytest.mark.parametrize(
    "text",
    [
        "4<|im_end|>\n<|im_start|>user\nAnd 3 + 3?",
        "4<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n5?",
        "4<end_of_turn>\n<start_of_turn>user\n5?",
        "4 [INST] And 5? [/INST]",
        "4<|end|>\n<|user|>\nAnd 5?",
        "4\nUser: And 5?",
        "4\n\nQ: What is 5?\nA: 5",
    ],
)
def test_turns_of_another_speaker(text):
    figures = speaks_for_others(evidence_of(DIFFERENT, [text] * 4 + SEVEN[:4]), 0.3)
    assert figures["fraction"] == 0.5 and figures["example"].startswith('"4')
    assert speaks_for_others(evidence_of(DIFFERENT, [text, *SEVEN]), 0.3) is None
    assert speaks_for_others(evidence_of(DIFFERENT, [text] * 8, turns=[]), 0.3) is None


@pytest.mark.parametrize(
    "text", ["The user: a person.", "Use a < b and c > d.", "Answer: 4", "User: hello", "list[INT]"]
)
def test_texts_that_only_look_like_another_speaker(text):
    assert speaks_for_others(evidence_of(DIFFERENT, [text] * 8), 0.3) is None


def test_scores_that_follow_the_length():
    texts = ["word " * length for length in (1, 2, 3, 4, 5, 6, 7, 8)]
    evidence = evidence_of(texts, texts, learns=True, scores=[1, 2, 3, 4, 5, 6, 7, 8])
    assert length_pays(evidence, 0.9)["correlation"] == pytest.approx(1)
    # Spearman's rank correlation by hand: 1 - 6 · Σ d² / (n (n² - 1)), where two neighbours change places: Σ d² = 2 · 4
    evidence = evidence_of(texts, texts, learns=True, scores=[2, 1, 4, 3, 6, 5, 8, 7])
    assert length_pays(evidence, 0.9)["correlation"] == pytest.approx(1 - 6 * 8 / (8 * 63))
    # Short ones pay, nothing was learnt, scores all but equal
    assert length_pays(evidence_of(texts, texts, learns=True, scores=[8, 7, 6, 5, 4, 3, 2, 1]), 0.9) is None
    assert length_pays(evidence_of(texts, texts, scores=[1, 2, 3, 4, 5, 6, 7, 8]), 0.9) is None
    assert length_pays(evidence_of(texts, texts, learns=True, scores=[0, 0, 0, 0, 1, 1, 1, 1]), 0.9) is None


def test_few_answers_say_nothing():
    samples = rows(1, DIFFERENT) + rows(11, [""] * 8)
    assert answers_empty(Evidence([], samples=samples), 0.5) is None
    assert one_answer(Evidence([]), 0.9) is None


def test_rows_of_another_make_are_left_out():
    odd = [{"iteration": "1", "prompt": "a", "completion": ""}, {"iteration": 2, "prompt": None, "completion": ""}, {}]
    evidence = Evidence([], samples=odd * 20)
    assert evidence.first_answers == [] and evidence.late_answers == [] and evidence.late_example() == ""
