"""Asking a model of a server, which fails in the ways in which servers do."""

import asyncio
import pickle
import re
import sqlite3
import threading

import pytest

from tests.helpers.judge_server import JudgeServer
from textenv.rewards.chat_replies import ChatReplies, JudgeError, Question, seconds_of
from textenv.rewards.scores import StopTraining

pytest.importorskip("tenacity", reason="install the extra: pip install '.[service]'")

GOOD = ("4", "", 1)
PASSING = ["busy", "busy until a date", "down", "hangs up", "breaks off", "hangs", "drips"]
WITHOUT_VERDICT = {
    "html": "no chat completion, but <html>Welcome",
    "no choices": "no chat completion",
    "refusal": "I cannot rate this",
    "cut": "raise max_tokens",
    "too long": "status 400: .*maximum context length",
}
LASTING = {
    "wrong key": "status 401: .*Incorrect API key.*OPENAI_API_KEY",
    "no such model": "status 404: .*does not exist.*/v1",
    "moved": "status 307.*redirects",
    "compressed": "compressed answer \\('gzip'",
    "endless": "more than 4,194,304 bytes",
}


def chat_of(server, **options):
    defaults = dict(api_key=None, options={"temperature": 0}, concurrency=4, timeout=0.3, patience=20.0,
                    max_calls=None, cache=None)  # fmt: skip
    return ChatReplies(server.url, "critic", **(defaults | options))


def question(text, sample=0):
    return Question([{"role": "user", "content": text}], {"type": "object"}, sample)


def ask(chat, *texts):
    return asyncio.run(chat.ask([question(text) for text in texts]))


@pytest.mark.heavy
@pytest.mark.parametrize("misdeed", PASSING)
def test_a_failure_that_passes_is_repeated(misdeed):
    with JudgeServer("4", [misdeed]) as server:
        assert ask(chat_of(server), "?") == [GOOD]
        assert len(server.requests) == 2


@pytest.mark.parametrize("cached", [False, True])
def test_half_a_surrogate_pair_is_sent_and_replied(tmp_path, cached):
    """JSON may spell it, as a reply that is cut inside an emoji does; neither UTF-8 nor SQLite can hold it."""
    with JudgeServer("4 \ud83d") as server:
        chat = chat_of(server, cache=tmp_path / "replies.sqlite" if cached else None)
        assert ask(chat, "\ud83d?") == [("4 ?", "", 1)]
        assert server.requests[0]["messages"][0]["content"] == "\ud83d?"
        assert ask(chat, "\ud83d?") == [("4 ?", "", 1 - cached)]


@pytest.mark.parametrize(("misdeed", "problem"), WITHOUT_VERDICT.items())
def test_one_answer_without_a_text_costs_one_question(misdeed, problem):
    with JudgeServer("4", [misdeed] * (1 + (misdeed == "too long"))) as server:
        first, second = ask(chat_of(server, concurrency=1), "a", "b")
        assert second == GOOD and first.reply_text is None
        assert re.search(problem, first.problem)


@pytest.mark.parametrize(("misdeed", "message"), LASTING.items())
def test_what_no_repetition_mends_ends_the_training(misdeed, message):
    with JudgeServer("4", [misdeed], always=True) as server:
        with pytest.raises(JudgeError, match=message):
            ask(chat_of(server, timeout=10.0), "a", "b")
        assert len(server.requests) <= 2


@pytest.mark.parametrize("misdeed", ["html", "too long", "cut"])
def test_a_server_that_never_replies_is_no_judge(misdeed):
    with JudgeServer("4", [misdeed], always=True) as server:
        with pytest.raises(JudgeError, match="replies to none of 2 questions"):
            ask(chat_of(server), "a", "b")
        server.misdeeds.clear()
        chat = chat_of(server)
        ask(chat, "c")
        server.misdeeds.append(misdeed)
        assert [reply.reply_text for reply in ask(chat, "a", "b")] == [None, None]


@pytest.mark.heavy
@pytest.mark.parametrize("misdeed", ["busy", "down", "hangs"])
def test_patience_ends(misdeed):
    with JudgeServer("4", [misdeed], always=True) as server:
        with pytest.raises(JudgeError, match="no reply from .* for patience=0.5 s .*resume"):
            ask(chat_of(server, patience=0.5), "a")
        assert issubclass(JudgeError, StopTraining)


def test_a_long_retry_after_is_not_waited_for():
    with JudgeServer("4", ["busy for an hour"], always=True) as server:
        with pytest.raises(JudgeError, match="status 429: .*come back later"):
            ask(chat_of(server), "a")
        assert len(server.requests) == 1


def test_nobody_listens():
    with JudgeServer() as server:
        chat = chat_of(server, patience=0.5)
    with pytest.raises(JudgeError, match="ConnectError"):
        ask(chat, "a")
    assert chat.calls == 0


def test_requests_run_at_the_same_time_within_the_bound():
    """Replies are given to three at a time, while at most three requests are answered."""
    three = threading.Barrier(3)
    lock = threading.Lock()
    running = []

    def reply(request):
        with lock:
            running.append(len(running) + 1)
        three.wait(60)
        with lock:
            most = len(running)
        three.wait(60)
        with lock:
            running.pop()
        three.wait(60)
        return f"{request['messages'][0]['content']} of {most}"

    with JudgeServer(reply) as server:
        texts = [str(i) for i in range(12)]
        replies = ask(chat_of(server, concurrency=3, timeout=100.0), *texts)
        assert [reply.reply_text for reply in replies] == [f"{text} of 3" for text in texts]


def test_a_server_without_schemas_is_asked_without_them():
    with JudgeServer("4", ["no schema"], always=True) as server:
        chat = chat_of(server)
        assert [reply.reply_text for reply in ask(chat, "a")] == ["4"]
        assert [reply.reply_text for reply in ask(chat, "b")] == ["4"]
        assert [("response_format" in request) for request in server.requests] == [True, False, False]
        assert chat.calls == 2


def test_what_is_sent():
    with JudgeServer() as server:
        chat = chat_of(server, api_key="secret", options={"max_tokens": 9, "seed": 3})
        asyncio.run(chat.ask([question("a"), question("a", sample=1)]))
        first, second = sorted(server.requests, key=lambda request: request["seed"])
        assert {key: first[key] for key in ("model", "messages", "max_tokens", "seed")} == {
            "model": "critic", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "seed": 3,
        }  # fmt: skip
        assert second["seed"] == 4 and second["messages"] == first["messages"]
        assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(chat)


def test_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    with JudgeServer() as server:
        ask(chat_of(server), "a")
        assert server.headers[0]["Authorization"] == "Bearer from-env"
        ask(chat_of(server, api_key=""), "a")
        monkeypatch.delenv("OPENAI_API_KEY")
        ask(chat_of(server), "a")
        assert all("Authorization" not in headers for headers in server.headers[1:]) and len(server.headers) == 3


def test_equal_questions_are_asked_once_if_there_is_a_cache(tmp_path):
    with JudgeServer() as server:
        assert ask(chat_of(server), "a", "b", "a") == [GOOD] * 3 and len(server.requests) == 3
        chat = chat_of(server, cache=tmp_path / "judge.sqlite")
        assert ask(chat, "a", "b", "a") == [GOOD, GOOD, ("4", "", 0)] and len(server.requests) == 5


def test_the_cache_asks_nothing_twice(tmp_path):
    path = tmp_path / "new" / "judge.sqlite"
    with JudgeServer(lambda request: request["messages"][0]["content"], ["cut"]) as server:
        first = ask(chat_of(server, cache=path, concurrency=1), "a", "b")
        assert first == [(None, first[0].problem, 1), ("b", "", 1)] and len(server.requests) == 2
        again = ask(chat_of(server, cache=path), "b", "a", "c")
        assert again == [("b", "", 0), (None, first[0].problem, 0), ("c", "", 1)]
        assert len(server.requests) == 3

        # Another model, other options or another sample are another question
        ask(chat_of(server, cache=path, options={"temperature": 1}), "a")
        asyncio.run(chat_of(server, cache=path).ask([question("a", sample=1)]))
        assert len(server.requests) == 5
    ask(chat_of(server, cache=path), "a", "b")  # without a server


def test_a_refused_question_is_asked_again(tmp_path):
    """The cache has what the model said, not what a server could not do."""
    with JudgeServer("4", ["too long", "too long"]) as server:
        chat = chat_of(server, cache=tmp_path / "judge.sqlite", concurrency=1)
        assert [reply.reply_text for reply in ask(chat, "a", "b")] == [None, "4"]
        assert [reply.reply_text for reply in ask(chat, "a")] == ["4"]


def test_a_batch_that_fails_keeps_the_replies_that_it_has(tmp_path):
    with JudgeServer("4") as server:
        chat = chat_of(server, cache=tmp_path / "judge.sqlite", concurrency=1, patience=0.4)
        server.misdeeds = [None, "wrong key"]  # the first reply is good
        with pytest.raises(JudgeError, match="status 401"):
            ask(chat, "a", "b")
        assert ask(chat, "a", "b") == [("4", "", 0), GOOD] and len(server.requests) == 3


@pytest.mark.heavy
def test_max_calls_is_never_exceeded():
    with JudgeServer("4", ["hangs", "down"]) as server:
        chat = chat_of(server, max_calls=4, concurrency=1)
        ask(chat, "a", "b")  # a timeout may have been charged, a refusal not
        assert chat.calls == 3
        with pytest.raises(JudgeError, match="made 3 of max_calls=4 calls, and needs 2 more.*larger max_calls"):
            ask(chat, "c", "d")
        ask(chat, "e")
        assert chat.calls == 4 and len(server.requests) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": {"n": 2}}, "options has n"), ({"options": {"temperature": object()}}, "expected fields of JSON"),
        ({"options": [1]}, "expected fields of JSON"), ({"options": {"temperature": float("nan")}}, "fields of JSON"),
        ({"timeout": "60"}, "timeout '60'"),
        ({"concurrency": 0}, "concurrency is 0"), ({"timeout": 0}, "timeout 0"), ({"max_calls": 0}, "max_calls is 0"),
        ({"api_key": "two words"}, "spaces"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with JudgeServer() as server, pytest.raises(ValueError, match=message):
        ask(chat_of(server, **options), "a")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///tmp", "", "http://[", "http://a:99999/v1", "http://a b/v1", "http://a:0"]
)
def test_a_wrong_address_is_refused(url):
    with JudgeServer() as server, pytest.raises(ValueError, match="base_url is"):
        server.url = url
        chat_of(server)


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("these are notes, and no data base" * 100)
    with JudgeServer() as server, pytest.raises(ValueError, match="cache is .*notes.txt.*SQLite"):
        chat_of(server, cache=tmp_path / "notes.txt")


def test_a_copy_in_another_process_asks_too(tmp_path):
    with JudgeServer() as server:
        chat = pickle.loads(pickle.dumps(chat_of(server, cache=tmp_path / "judge.sqlite")))
        assert ask(chat, "a") == [GOOD]
    with sqlite3.connect(tmp_path / "judge.sqlite") as connection:
        assert connection.execute("SELECT text FROM replies").fetchall() == [("4",)]
    connection.close()


@pytest.mark.parametrize("header", ["nan", "inf", "soon", ""])
def test_a_retry_after_that_says_no_time(header):
    assert seconds_of(header) is None
