"""Feedback in a terminal: keys, what is shown, and a person at a real one."""

import os
import pty
import select
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.feedback import Scripted, call
from textenv import HumanReward
from textenv.extras.human import FeedbackStopped, Question, TerminalAnnotator

ROOT = Path(__file__).parents[4]


def terminal(*typed, width=60):
    """A `TerminalAnnotator` that is typed these lines, and the paper it prints on."""
    paper, keys = StringIO(), iter([f"{line}\n" for line in typed])
    return TerminalAnnotator(console=Console(file=paper, width=width), read=lambda: next(keys, "")), paper


@pytest.mark.parametrize(
    ("scale", "typed", "answer"),
    [("thumbs", "u", "up"), ("thumbs", " DOWN ", "down"), ("0-5", "3", "3"), ("pairs", "1", "first"),
     ("pairs", "t", "tie"), ("thumbs", "s", "skip"), ("thumbs", "b", "undo"), ("thumbs", "q", "quit")],
)  # fmt: skip
def test_keys_and_words_are_answers(scale, typed, answer):
    annotator, _ = terminal(typed)
    responses = ("x", "y") if scale == "pairs" else ("x",)
    assert annotator.ask(Question("p", responses, scale, can_undo=True)) == answer


def test_wrong_keys_are_explained_and_asked_again():
    annotator, paper = terminal("\x1b[2J", "", "b", "1", "d", width=200)
    assert annotator.ask(Question("p", ("x",), "thumbs")) == "down"
    said = paper.getvalue()
    assert said.count("is not an answer to this question") == 3 and '"\\x1b[2j" is not an answer' in said
    assert '"b" is not possible: there is nothing to undo' in said
    assert said.count("u = up   d = down   s = skip this one   q = quit") == 5


def test_the_end_of_the_input_is_quit(path):
    annotator, _ = terminal("u")
    with pytest.raises(FeedbackStopped, match="after 1 of 2"):
        call(HumanReward(path, annotator=annotator), ["a", "b"])


def test_a_response_cannot_leave_its_frame():
    """Nor command the terminal, nor use markup."""
    evil = "\x1b[2J\x1b]0;mine\x07[bold]loud[/bold] :smile: \r\x08\x9b\u202egpj [/nothing]\nIs this response good?"
    annotator, paper = terminal("u", width=100)
    annotator.ask(Question([{"role": evil, "content": evil}], (evil,), "thumbs"))
    said = paper.getvalue()
    assert not set(said) & set("\x1b\x07\r\x08\x9b\u202e\U0001f604")
    assert said.count("\\x1b[2J\\x1b]0;mine\\x07[bold]loud[/bold] :smile: \\r\\x08\\x9b\\u202egpj [/nothing]") >= 2
    assert [line[0] for line in said.splitlines() if "Is this response good?" in line] == ["\u2502", "\u2502", "I"]


def test_long_texts_are_shown_whole_and_wrapped():
    text = " ".join(f"word{i}" for i in range(300)) + " " + "".join(f"<{i}>" for i in range(100))
    annotator, paper = terminal("1", width=60)
    annotator.ask(Question("p", (text, "short"), "pairs"))
    said = paper.getvalue().splitlines()
    assert max(map(len, said)) <= 60
    inside = "".join(line.strip("\u2502 ") for line in said)
    assert "".join(text.split()) in "".join(inside.split())


@pytest.mark.heavy
def test_without_a_terminal_it_says_what_to_do():
    program = (
        "from textenv.extras.human import Question, TerminalAnnotator\n"
        "TerminalAnnotator().ask(Question('p', ('r',), 'thumbs'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="u\n", capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert "RuntimeError" in done.stderr and "no terminal at stdin and stderr" in done.stderr
    assert "fallback=reward_model, fraction=0" in done.stderr


PERSON = """
import sys
from textenv import HumanReward
print(HumanReward(sys.argv[1])(prompts=["p"] * 4, completions=["a", "b", "c", "d"]))
"""


class Pty:
    """A child at a terminal of its own."""

    def __init__(self, *arguments):
        self.end, inner = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-c", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(inner)

    def until(self, text):
        """What the screen gets up to this text."""
        said = ""
        while not said.endswith(text):
            assert select.select([self.end], [], [], 30)[0], f"no {text!r} in {said!r}"
            said += os.read(self.end, 1).decode(errors="replace")
        return said

    def close(self, sign=None):
        if sign is not None:
            self.child.send_signal(sign)
        code = self.child.wait(60)
        os.close(self.end)
        return code


def test_a_kill_in_a_question_loses_nothing(path):
    """Only what is missing is asked again."""
    screen = Pty(PERSON, str(path))
    for key in (b"u\n", b"\xff\nd\n"):  # a broken byte is a wrong key and no crash
        screen.until("> ")
        os.write(screen.end, key)
    screen.until("question 3 of 4")
    screen.until("> ")
    assert screen.close(signal.SIGKILL) == -signal.SIGKILL
    annotator = Scripted(["up", "skip"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "c", "d"]) == [1.0, 0.0, 1.0, None]
    assert annotator.shown == [("c",), ("d",)]


def test_keys_typed_early_answer_nothing(path):
    slow = "import sys, time; print('busy', flush=True); sys.stdin.readline(); print('ready', flush=True)\n" + PERSON
    screen = Pty(slow, str(path))
    screen.until("busy")
    os.write(screen.end, b"start\nu\nu\n")
    screen.until("> ")
    os.write(screen.end, b"q\n")
    assert "after 0 of 4 questions" in screen.until("of 4 questions")
    assert screen.close() == 1 and not path.exists()
