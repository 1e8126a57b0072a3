"""What is read as a verdict, by hand and by generated replies."""

import pytest
from hypothesis import given, strategies as st

from textenv.rewards.verdicts import NUMBER_WORDS, Scale, without_thoughts

FIVE = Scale(1, 5)
READ = {
    # A number, however it is written
    "4": 4, " 4.\n": 4, "**4**": 4, "_4_": 4, "Score: 4!": 4, "4.5": 4.5, "4 stars": 4, "５": 5, "+4": 4,
    "four": 4, "I give it a Four.": 4, "Score — 4": 4, "4 - well done": 4,
    # The last one
    "It has 3 facts and 2 mistakes. 4": 4, "1, 2, 3": 3, "First 5, but on reflection: 2": 2,
    "There is one mistake. Score: 4": 4, "Score: 4. A good one.": 4, "one": 1, "I found 2 errors, so: four": 4,
    # Out of the highest
    "4/5": 4, "4 / 5 stars": 4, "4 out of 5": 4, "four out of five": 4, "5 of 5": 5,
    "**2** out of 5": 2, "**2**/5": 2, "`2` / **5**": 2, "2 (out of 5)": 2, "2 points out of 5": 2,
    "2 out of a possible 5": 2, "3 stars of five": 3, "2 points out of 10": None,
    # The scale itself is no verdict
    "4 (on a scale from 1 to 5)": 4, "4 (1-5)": 4, "4, between 1 and 5": 4, "4 on a scale of 5": 4, "1 to 5": None,
    "2 (1 = worst, 5 = best)": 2, "2 (from 1 (worst) to 5 (best))": 2, "2 (maximum 5)": 2, "2 on a 5-point scale": 2,
    "2, where 5 is the best": 2, "Better than 2.": None, "4. It says more than one would expect.": 4,
    # Marks
    "[[3]], though 2 would do": 3, r"\boxed{2} of the 5": 2, "[[good]] 4": None,
    # JSON, also in a fence, with a text as its value, or before the reasons
    '{"reasoning": "1 of 2", "verdict": 3}': 3, '{"score": 2, "reasoning": "it has 3 facts"}': 2,
    '```json\n{"Rating": "4/5"}\n```\nThe 2 facts are right.': 4, '{"score": 1} no: {"score": 5}': 5,
    '{"score": true}': None, '{"score": null} 4': None, '{"score": NaN}': None, '{"score": [4]}': None,
    '{"reasoning": "good"} 4': 4, '{"result": {"score": 4}, "confidence": 3}': 4, '{"a": {"b": {"score": "2/5"}}} 3': 2,
    '{"criteria": {"clarity": {"score": 2}, "depth": {"score": 5}}, "overall": 4}': 4,
    '{"criteria": [{"score": 2}, {"score": 5}], "final": 3}': 3,
    # Thoughts
    "<think>2? 3?</think>4": 4, "2? </think> 4": 4, "<think>4": None, "<think>a <think>1</think> 2</think> 3": 3,
    "4 <think>or 5?</think>": 4, "<THINK>1</THINK>\n5": 5,
    # Off the scale: not clipped
    "0": None, "6": None, "-4": None, "\N{MINUS SIGN}4": None, "100": None, "8/10": None, "80%": None, "1,000": None,
    "twenty-two": None,
    # Not to be read
    "": None, "very good": None, "4,5": None, "3-4": None, "3 or 4": None, "1.2.3": None, "GPT-4": None,
    "the 4th": None, "H2O": None, "four point five": None, "4 and a half": None,
    "**3** - **4**": None,
}  # fmt: skip


@pytest.mark.parametrize(("reply", "verdict"), READ.items())
def test_verdicts_by_hand(reply, verdict):
    assert FIVE.read(reply) == verdict


@pytest.mark.parametrize(
    ("scale", "reply", "verdict"),
    [
        (Scale(0, 1), "80%", 0.8), (Scale(0, 1), "4/5", 0.8), (Scale(0, 1), ".8", 0.8), (Scale(0, 1), "1/0", None),
        (Scale(0, 100), "85/100", 85), (Scale(0, 100), "80%", 80), (Scale(0, 100), "a hundred", 100),
        (Scale(-3, 3), "-2", -2), (Scale(0, 5000), "1,500", 1500), (Scale(0, 10), "ten", 10),
        (Scale(0, 2, is_whole=True), "1.5", None), (Scale(0, 2, is_whole=True), "1/2", None),
        (Scale(0, 2, is_whole=True), "Answer 1 is better than answer 2: 1", 1),
        (Scale(0, 2, is_whole=True), "Answer 1 is better than answer 2.", None),
        (Scale(0, 10), "4. This is the one best answer.", 4), (Scale(0, 1), "0.8 points out of 1", 0.8),
    ],
)  # fmt: skip
def test_verdicts_on_other_scales(scale, reply, verdict):
    assert scale.read(reply) == verdict


words = st.text(st.characters(blacklist_categories=("N", "C")), max_size=40)


@given(words, st.integers(1, 5), st.sampled_from(["{}", "{}.", "**{}**", "{}/5", "{} out of 5", "[[{}]]", "{} points"]))
def test_a_number_at_the_end_is_the_verdict(reason, number, form):
    """Whatever stands before it."""
    assert FIVE.read(f"{reason}\n\nThe score is: {form.format(number)}") == number


@given(st.text(max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_thoughts_change_no_verdict(thought, guess, number):
    thought = thought.replace("<", "")
    assert FIVE.read(f"<think>{thought} {guess}</think> I say: {number}") == number


@given(st.text() | st.from_regex(r"[-+.,/0-9 %a-e{}\[\]\":]{0,40}"), st.sampled_from([(1, 5), (0, 1), (-2, 2)]))
def test_any_text_is_on_the_scale_or_unreadable(reply, ends):
    verdict = Scale(*ends).read(reply)
    assert verdict is None or ends[0] <= verdict <= ends[1]


@given(st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not 1 <= number <= 5))
def test_a_number_off_the_scale_is_unreadable(number):
    assert FIVE.read(f"{number:f}") is None


@pytest.mark.parametrize(
    ("words", "number"),
    [("zero", 0), ("nine", 9), ("thirteen", 13), ("twenty", 20), ("forty-two", 42), ("ninety nine", 99)],
)
def test_number_words_up_to_a_hundred(words, number):
    assert Scale(0, 100).read(f"It gets {words}.") == number
    assert len(NUMBER_WORDS) == 103 and sorted(set(NUMBER_WORDS.values())) == list(range(101))


@pytest.mark.parametrize("text", ["1" * 10**5 + "a", "<think>" * 10**5, "{" * 10**5, "[[" * 10**5, "1 " * 10**5])
def test_no_reply_takes_long_to_read(text):
    """Each of these would take a backtracking pattern hours; the test's time limit is minutes."""
    assert FIVE.read(text) in (None, 1)


def test_thoughts_are_cut_out_where_they_stand():
    assert without_thoughts("a<think>b</think>c<reasoning>d</reasoning>e") == "ace"
