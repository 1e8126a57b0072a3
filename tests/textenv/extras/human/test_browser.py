"""Human feedback in a real browser: by mouse, by keys, two people at once, after a kill."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.browser import Browser, needs_chromium
from tests.helpers.feedback import call, lines
from textenv import HumanReward
from textenv.extras.human import BrowserAnnotator, FeedbackStopped
from textenv.extras.human.feedback_file import krippendorff_alpha

STATE = "document.querySelector('#state').textContent"


def showing(browser, number):
    ready = "!document.querySelector('main').hidden && !document.querySelector('#answers').inert"
    browser.wait(f"{STATE}.includes('question {number} of') && {ready}")


@pytest.mark.heavy
@needs_chromium
def test_a_person_clicks_goes_back_and_comments(tmp_path):
    human = HumanReward(tmp_path / "thumbs.jsonl", annotator=(ann := BrowserAnnotator("ann")))
    evil = "<img src=x onerror=alert(1)>\x1b[2J"
    with ThreadPoolExecutor(1) as pool, Browser() as browser:
        scores = pool.submit(call, human, ["good .", evil, "dull ."], "the film")
        browser.open(ann.url)
        showing(browser, 1)
        assert "the film" in browser.run("document.body.innerText")
        browser.click("[data-answer=up]")
        showing(browser, 2)
        assert browser.run("document.querySelector('#responses p').textContent") == evil.replace("\x1b", "\\x1b")
        browser.click("[data-answer=undo]")
        showing(browser, 1)
        browser.click("#comment")
        browser.type("quite dull, d or u?")
        browser.click("[data-answer=down]")
        showing(browser, 2)
        assert browser.run("document.querySelector('#comment').value") == ""
        browser.click("[data-answer=up]")
        showing(browser, 3)
        browser.click("[data-answer=skip]")
        assert scores.result(timeout=30) == [0.0, 1.0, None]
        browser.wait(f"{STATE}.includes('no question now')")
        again = pool.submit(call, human, ["new ."])
        showing(browser, 1)
        browser.type("u")
        assert again.result(timeout=30) == [1.0] and browser.problems == []
    first = lines(tmp_path / "thumbs.jsonl")[0]
    assert (first["answer"], first["comment"], first["annotator"]) == ("down", "quite dull, d or u?", "ann")


@pytest.mark.heavy
@needs_chromium
def test_a_pair_is_judged_by_keys_alone(tmp_path):
    human = HumanReward(tmp_path / "pairs.jsonl", scale="pairs", annotator=(ann := BrowserAnnotator("ann")))
    with ThreadPoolExecutor(1) as pool, Browser() as browser:
        scores = pool.submit(call, human, ["a", "b"])
        browser.open(ann.url)
        showing(browser, 1)
        shown = browser.run("[...document.querySelectorAll('#responses p')].map(x => x.textContent)")
        for key, code in (("Tab", 9), (" ", 32), ("ArrowRight", 39), ("Tab", 9)):
            browser.press(key, code)
        browser.type("4")
        browser.type("c")
        browser.type("better rhythm: 1")
        browser.press("Escape", 27)
        browser.type("2")
        result = scores.result(timeout=30)
        assert result == ([0.0, 1.0] if shown == ["a", "b"] else [1.0, 0.0]) and browser.problems == []
    (record,) = lines(tmp_path / "pairs.jsonl")
    assert record["answer"] == "second" and record["comment"] == "better rhythm: 1" and record["completions"] == shown
    assert record["ratings"] == [1, 4]


@pytest.mark.heavy
@needs_chromium
def test_one_of_two_people_may_quit_for_both(tmp_path):
    people = [BrowserAnnotator("ann"), BrowserAnnotator("bob")]
    human = HumanReward(tmp_path / "marks.jsonl", scale="0-5", annotator=people)
    with ThreadPoolExecutor(1) as pool, Browser() as ann, Browser() as bob:
        scores = pool.submit(call, human, ["a", "b"])
        for browser, person in zip((ann, bob), people, strict=True):
            browser.open(person.url)
            showing(browser, 1)
        ann.type("5")
        showing(ann, 2)
        ann.type("4")
        ann.wait(f"{STATE}.includes('no question now')")
        showing(bob, 1)
        bob.type("3")
        showing(bob, 2)
        bob.type("4")
        assert scores.result(timeout=30) == [0.8, 0.8]
        assert human.file.agreement() == {
            "0-5": pytest.approx(krippendorff_alpha([[1, 0.6], [0.8, 0.8]], squared=True))
        }
        scores = pool.submit(call, human, ["c", "d"])
        showing(ann, 1)
        ann.type("2")
        showing(ann, 2)
        showing(bob, 1)
        bob.click("[data-answer=quit]")
        with pytest.raises(FeedbackStopped, match="quit"):
            scores.result(timeout=30)
    assert len(lines(tmp_path / "marks.jsonl")) == 5, "what ann has answered is kept"


SLOW_REPLIES = """
const fetchNow = window.fetch;
window.replied = 0;
window.fetch = async (...request) => {
  const reply = await fetchNow(...request);
  if (!request[0].startsWith("/answer")) return reply;
  await new Promise(done => setTimeout(done, 1000));
  setTimeout(() => { window.replied += 1; }, 200);
  return reply;
};
"""


@pytest.mark.heavy
@needs_chromium
def test_a_question_that_comes_before_the_reply_to_the_last_answer_stays(tmp_path):
    human = HumanReward(tmp_path / "thumbs.jsonl", annotator=(ann := BrowserAnnotator("ann")))
    with ThreadPoolExecutor(1) as pool, Browser() as browser:
        scores = pool.submit(call, human, ["a", "b"])
        browser.open(ann.url)
        showing(browser, 1)
        browser.run(SLOW_REPLIES)
        browser.type("u")
        showing(browser, 2)
        browser.wait("window.replied === 1")
        try:
            assert "question 2 of 2" in browser.run(STATE)
        finally:
            browser.run("question.answers = ['up']; send('up')")
        assert scores.result(timeout=30) == [1.0, 1.0] and browser.problems == []


@pytest.mark.heavy
@needs_chromium
def test_held_keys_and_second_clicks_answer_nothing(tmp_path):
    human = HumanReward(tmp_path / "thumbs.jsonl", annotator=(ann := BrowserAnnotator("ann")))
    with ThreadPoolExecutor(1) as pool, Browser() as browser:
        scores = pool.submit(call, human, ["a", "b", "c", "d"])
        browser.open(ann.url)
        showing(browser, 1)
        held = "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'u', repeat: true}))"
        browser.run(f"for (let i = 0; i < 50; i++) {held}")
        assert browser.run(STATE).startswith("ann, question 1")
        browser.type("u")
        browser.wait(f"{STATE}.includes('question 2 of')")
        browser.run("document.querySelector('[data-answer=up]').click()")  # at once: within the time of a double click
        assert len(lines(tmp_path / "thumbs.jsonl")) == 1
        showing(browser, 2)
        browser.click("[data-answer=quit]")
        with pytest.raises(FeedbackStopped):
            scores.result(timeout=30)


PROGRAM = """
import sys
from textenv import HumanReward
from textenv.extras.human import BrowserAnnotator
person = BrowserAnnotator("ann")
print(person.url, flush=True)
human = HumanReward(sys.argv[1], annotator=person)
print(human(prompts=["p"] * 3, completions=["a", "b", "c"]), flush=True)
"""


@pytest.mark.heavy
@needs_chromium
def test_after_a_kill_only_the_rest_is_asked(tmp_path):
    path = tmp_path / "thumbs.jsonl"
    command = [sys.executable, "-c", PROGRAM, str(path)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with Browser() as browser:
        with subprocess.Popen(command, **options) as killed:
            browser.open(killed.stdout.readline())
            showing(browser, 1)
            browser.type("u")
            showing(browser, 2)
            killed.send_signal(signal.SIGKILL)
        browser.wait(f"{STATE}.includes('Not connected')")
        with subprocess.Popen(command, **options) as second:
            browser.open(second.stdout.readline())
            showing(browser, 1)
            assert "question 1 of 2" in browser.run(STATE)
            browser.type("d")
            showing(browser, 2)
            browser.type("u")
            assert second.stdout.readline() == "[1.0, 0.0, 1.0]\n"


def test_wrong_posts_are_refused_and_asked_again():
    import urllib.error
    import urllib.request

    from textenv.extras.human import Question

    person, given = BrowserAnnotator("ann"), []
    asking = threading.Thread(target=lambda: given.append(person.ask(Question("p", ("x", "y"), "pairs"))))
    asking.start()
    base, token = person.url.split("/?")
    with urllib.request.urlopen(f"{base}/question?{token}&seen=0", timeout=30) as shown:  # as the page waits for it
        assert json.load(shown)["number"] == 1
    right = {"number": 1, "answer": "tie", "ratings": [3, None], "comment": ""}
    for wrong, said in [
        ({"answer": "up"}, "expected one of first, second, tie"), ({"number": 7}, "answered already"),
        ({"ratings": [6, 1]}, "from 0 to 5"), ({"ratings": [1] * 5}, "one for each response"),
        ({"comment": "x" * 6_000}, "at most 5000"),
    ]:  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{base}/answer?{token}", json.dumps(right | wrong).encode(), timeout=10)
        assert error.value.code == 400 and said in error.value.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{base}/answer?token=x", json.dumps(right).encode(), timeout=10)
    assert urllib.request.urlopen(f"{base}/answer?{token}", json.dumps(right).encode(), timeout=10).status == 200
    asking.join(timeout=30)
    assert given == ["tie"] and given[0].more == {"ratings": [3, None]}
