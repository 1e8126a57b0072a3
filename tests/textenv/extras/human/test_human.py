"""Human feedback: what is asked, what it scores, what the file holds after a kill, and what the terminal shows."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from textenv import FeedbackFile, FeedbackStopped, HumanReward, Question, TerminalAnnotator

ROOT = Path(__file__).parents[4]


class Scripted:
    """Answers by a list in order, or by a function of the question; keeps what it was asked."""

    name = "script"

    def __init__(self, answers):
        self.answers, self.questions = answers, []

    def ask(self, question):
        self.questions.append(question)
        return self.answers(question) if callable(self.answers) else self.answers[len(self.questions) - 1]

    @property
    def shown(self):
        return [question.responses for question in self.questions]


def call(human, completions, prompt="p", **columns):
    return human(prompts=[prompt] * len(completions), completions=completions, **columns)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "answers.jsonl"


# --- scores ---------------------------------------------------------------------------------------------------


def test_thumbs_are_one_and_zero_and_a_skip_is_none(path):
    human = HumanReward(path, annotator=Scripted(["up", "down", "skip"]))
    assert call(human, ["a", "b", "c"]) == [1.0, 0.0, None]


def test_marks_are_mapped_to_zero_to_one(path):
    assert call(HumanReward(path, scale="0-5", annotator=Scripted(["0", "4", "5"])), ["a", "b", "c"]) == [0.0, 0.8, 1.0]


def better(question):
    """Prefers the later letter; `=` ties with everything."""
    first, second = question.responses
    return "tie" if "=" in (first, second) else "first" if first > second else "second"


def test_neighbours_of_a_prompt_are_compared(path):
    """One that is left over gets no score."""
    annotator = Scripted(better)
    human = HumanReward(path, scale="pairs", annotator=annotator)
    scores = human(prompts=["p", "q", "p", "q", "p", "p", "p"], completions=["a", "x", "b", "=", "d", "c", "e"])
    assert scores == [0.0, 0.5, 1.0, 0.5, 1.0, 0.0, None]
    assert {question.prompt: set(question.responses) for question in annotator.questions[2:]} == {"q": {"x", "="}}
    assert [set(shown) for shown in annotator.shown[:2]] == [{"a", "b"}, {"d", "c"}]


def test_the_order_of_a_pair_is_drawn_by_the_seed(tmp_path):
    def firsts(seed):
        annotator = Scripted(better)
        human = HumanReward(
            tmp_path / f"{seed}-{os.urandom(4).hex()}.jsonl", scale="pairs", annotator=annotator, seed=seed
        )
        scores = human(prompts=[i // 2 for i in range(40)], completions=["a", "b"] * 20)
        assert scores == [0.0, 1.0] * 20
        return [first for first, _ in annotator.shown]

    assert 4 < firsts(0).count("a") < 16
    assert firsts(0) == firsts(0) != firsts(1)


def test_equal_questions_are_asked_once(path):
    """Equal pairs in either order."""
    annotator = Scripted(["up", "down"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "a"]) == [1.0, 0.0, 1.0]
    annotator = Scripted(better)
    human = HumanReward(path, scale="pairs", annotator=annotator)
    assert call(human, ["a", "b", "a"]) == [0.0, 1.0, 0.0]
    assert call(human, ["b", "a"]) == [1.0, 0.0]
    assert len(annotator.questions) == 1


def test_chats_are_asked_kept_and_found_as_messages(path):
    chat, said = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "ho"}]
    human = HumanReward(path, annotator=Scripted(["up"]))
    assert human(prompts=[chat], completions=[said]) == human(prompts=[chat], completions=[said]) == [1.0]
    assert human.file.scored() == [{"prompt": chat, "completion": said, "score": 1.0}]


# --- going on with another reward -----------------------------------------------------------------------------


def length(prompts, completions, weight, trainer_state=None, **columns):
    assert len(prompts) == len(completions) == len(weight)
    return [len(text) * w for text, w in zip(completions, weight, strict=True)]


def test_a_fallback_scores_what_nobody_did(path):
    """It gets the columns of those rows."""
    human = HumanReward(path, annotator=Scripted(["up", "skip", "down"]), fallback=length)
    assert call(human, ["a", "bb", "c"], weight=[7, 10, 7], trainer_state=None) == [1.0, 20, 0.0]


def test_at_most_a_share_is_asked(tmp_path):
    said = [str(i) for i in range(30)]

    def asked(name, *, share=0.1, seed=0, batch=said):
        annotator = Scripted(lambda question: "up")
        human = HumanReward(tmp_path / f"{name}.jsonl", annotator=annotator, fallback=length, fraction=share, seed=seed)
        call(human, batch, weight=[1] * len(batch))
        return [shown[0] for shown in annotator.shown]

    assert len(asked("a")) == 3
    assert asked("b") == asked("c")  # the same ones again
    assert asked("a") == []  # so that a restart asks only what is missing of them
    assert asked("d") != asked("e", seed=1)
    assert asked("f") != asked("g", batch=[*said[:-1], "x"])
    assert asked("h", share=0) == [] and len(asked("i", share=0.01)) == 1 and len(asked("j", share=1)) == 30


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scale": "stars"}, ValueError, "thumbs, 0-5, pairs"),
        ({"fraction": 1.5}, ValueError, "from 0"),
        ({"fraction": 0.5}, ValueError, "fallback=reward_model"),
        ({"fallback": 3}, TypeError, "fallback is 3"),
        ({"annotator": object()}, TypeError, "textenv.extras.human.Annotator"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(path, options, error, says):
    with pytest.raises(error, match=says):
        HumanReward(path, **options)


def test_wrong_answers_and_counts_are_named(path):
    with pytest.raises(ValueError, match=r"'script' answered 'undo', expected one of up, down, skip, quit"):
        call(HumanReward(path, annotator=Scripted(["undo"])), ["a"])
    with pytest.raises(ValueError, match="'fallback' returned 1 values for 2"):
        call(HumanReward(path, annotator=Scripted(["skip"] * 2), fallback=lambda **_: [1.0]), ["a", "b"])


# --- undo and quit --------------------------------------------------------------------------------------------


def test_undo_asks_the_last_question_again(path):
    annotator = Scripted(["up", "up", "undo", "undo", "down", "down", "up"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "c"]) == [0.0, 0.0, 1.0]
    assert [(q.responses[0], q.number, q.total, q.can_undo) for q in annotator.questions] == [
        ("a", 1, 3, False), ("b", 2, 3, True), ("c", 3, 3, True), ("b", 2, 3, True), ("a", 1, 3, False),
        ("b", 2, 3, True), ("c", 3, 3, True),
    ]  # fmt: skip
    assert [line["answer"] for line in lines(path)] == ["down", "down", "up"]


def test_a_removed_answer_cannot_be_undone(path):
    def answer(question):
        if question.number == 1:
            return "up"
        path.write_text("")
        return "undo"

    with pytest.raises(ValueError, match="no longer has the answer to undo"):
        call(HumanReward(path, annotator=Scripted(answer)), ["a", "b"])


def test_who_quits_goes_on_where_he_stopped(path):
    with pytest.raises(
        FeedbackStopped, match=rf"after 2 of 4 .*\(2 with .* saved in {path}: run the same program again"
    ):
        call(HumanReward(path, annotator=Scripted(["up", "skip", "quit"])), ["a", "b", "c", "d"])
    annotator = Scripted(["down", "up"])
    assert call(HumanReward(path, annotator=annotator), ["a", "b", "c", "d"]) == [1.0, None, 0.0, 1.0]
    assert annotator.shown == [("c",), ("d",)]


# --- the file -------------------------------------------------------------------------------------------------


def test_a_line_reads_as_triples_and_preferences(path):
    """It says who answered what, and when."""
    call(HumanReward(path, scale="0-5", annotator=Scripted(["4", "skip"])), ["a", "b"])
    call(HumanReward(path, scale="pairs", annotator=Scripted(better)), ["a", "b", "=", "c"])
    score, skipped, pair, tie = lines(path)
    assert score | {"time": 0} == {
        "prompt": "p", "completion": "a", "score": 0.8, "answer": "4", "scale": "0-5", "time": 0, "annotator": "script",
    }  # fmt: skip
    assert abs(datetime.fromisoformat(score["time"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert skipped["score"] is None and tie["chosen"] is None and set(tie["completions"]) == {"=", "c"}
    assert (pair["chosen"], pair["rejected"], pair["answer"]) == (
        "b",
        "a",
        better(Question("p", pair["completions"], "pairs")),
    )
    assert FeedbackFile(path).scored() == [{"prompt": "p", "completion": "a", "score": 0.8}]
    assert FeedbackFile(path).preferences() == [{"prompt": "p", "chosen": "b", "rejected": "a"}]


def test_each_answer_is_synced_before_the_next(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))

    def answer(question):
        written = path.read_bytes() if path.exists() else b""
        assert written.count(b"\n") == question.number - 1
        assert synced == [] or synced[-1] == len(written)
        return "up"

    call(HumanReward(path, annotator=Scripted(answer)), ["a", "b", "c"])
    assert len(synced) == 3


def test_half_a_line_is_put_aside_and_asked_again(path):
    call(HumanReward(path, annotator=Scripted(["up", "up"])), ["a", "\u00e9\U0001f600\ud800"])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first + 1, first + 30, len(whole) - 2):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match=r"answers.jsonl ended with an incomplete .*now in .*answers.jsonl.half"):
            human = HumanReward(path, annotator=(annotator := Scripted(["down"])))
        assert path.read_bytes() == whole[:first]
        assert path.with_name("answers.jsonl.half").read_bytes().endswith(whole[first:cut] + b"\n")
        assert call(human, ["a", "\u00e9\U0001f600\ud800"]) == [1.0, 0.0] and len(annotator.questions) == 1


def test_a_last_line_without_its_end_is_kept(path):
    call(HumanReward(path, annotator=Scripted(["up", "down"])), ["a", "b"])
    path.write_bytes(path.read_bytes()[:-1])
    assert call(HumanReward(path, annotator=Scripted([])), ["a", "b"]) == [1.0, 0.0]
    assert path.read_bytes().endswith(b"}\n")


def test_anothers_half_line_swallows_no_answer(path):
    def answer(question):
        if question.number == 2:
            with path.open("ab") as file:
                file.write(b'{"prompt": "ha')
        return "up"

    human = HumanReward(path, annotator=Scripted(answer))
    with pytest.warns(UserWarning, match="incomplete line"):
        call(human, ["a", "b"])
    assert [line["completion"] for line in lines(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ('{"prompt": "p', "not JSON in UTF-8"),
        ("[1]", "'scale' is one of thumbs"),
        ('{"prompt": "p", "completion": "c", "score": 1}', "'scale' is one of thumbs"),
        ('{"prompt": "p", "scale": "thumbs", "answer": "up"}', "the completion is missing"),
        ('{"prompt": "p", "completion": "c", "scale": "thumbs", "answer": "4"}', "'answer' is '4', expected up, down"),
        ('{"prompt": "p", "completions": "ab", "scale": "pairs", "answer": "tie"}', "expected a list of 2"),
        ("[" * 100_000, "not JSON in UTF-8"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(path, broken, says):
    call(HumanReward(path, annotator=Scripted(["up", "down"])), ["a", "b"])
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n\n{broken}\n{second}\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"answers.jsonl, line 3: .*{says}.*Correct or delete this line"):
        HumanReward(path)
    assert path.read_bytes() == before


def test_a_writer_waits_for_the_lock(path):
    human = HumanReward(path, annotator=Scripted(["up"]))
    with FileLock(f"{path}.lock"):
        thread = threading.Thread(target=call, args=(human, ["a"]))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not path.exists()
    thread.join(10)
    assert len(lines(path)) == 1


WRITER = """
import sys
from textenv import HumanReward

class Undoing:
    name, asked = sys.argv[2], 0
    def ask(self, question):
        self.asked += 1
        return "undo" if question.can_undo and self.asked % 3 == 0 else "up"

HumanReward(sys.argv[1], annotator=Undoing())(prompts=[sys.argv[2]] * 60, completions=[str(i) for i in range(60)])
"""


def test_two_processes_in_one_file_lose_nothing(path):
    children = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], cwd=ROOT) for name in ("one", "two")]
    assert [child.wait(60) for child in children] == [0, 0]
    given = sorted((line["prompt"], int(line["completion"])) for line in lines(path))
    assert given == [(name, i) for name in ("one", "two") for i in range(60)]


# --- the terminal ---------------------------------------------------------------------------------------------


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


def test_without_a_terminal_it_says_what_to_do():
    program = (
        "from textenv import Question, TerminalAnnotator; TerminalAnnotator().ask(Question('p', ('r',), 'thumbs'))"
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


# --- training -------------------------------------------------------------------------------------------------


def test_who_quits_in_training_is_not_asked_again(tmp_path):
    from algos import PPO, LMPolicy, PPOConfig
    from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
    from textenv import TextVectorEnv

    class Quits:
        name, asked = "tester", 0

        def ask(self, question):
            self.asked += 1
            return "quit"

    annotator, tokenizer = Quits(), make_tokenizer(WORDS)
    human = HumanReward(tmp_path / "t.jsonl", annotator=annotator)
    env = TextVectorEnv(prompts=["a"], reward=human, tokenizer=tokenizer, num_envs=4, max_new_tokens=4)
    agent = PPO(env, LMPolicy(make_gpt2(), tokenizer), PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8))
    with pytest.raises(FeedbackStopped, match="run the same program again"):
        agent.learn(100)
    assert annotator.asked == 1
