"""A reward behind HTTP, in a real uvicorn server: what arrives, what is repeated, and what is never paid twice."""

import contextlib
import gzip
import http.client
import json
import logging
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))
import reward_load

from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.reward_models import make_model
from tests.helpers.tolerances import METRIC, METRIC_NEAR_0
from textenv import RewardModel, Rewards, RewardService, serve_reward
from textenv.extras.service import MOST_BYTES, ServiceError, reward_app
from textenv.rewards.scores import RewardError, StopTraining
from textenv.rewards.training import training
from textenv.rewards.transforms import Normalize, whiten
from textenv.rewards.workers import ChildError

TOKEN = "a-secret"


@contextlib.contextmanager
def serving(app, port=0):
    """Serve an ASGI application on a free port in a thread; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextlib.contextmanager
def served(function, *, workers=1, around=lambda app: app, **options):
    with serving(around(reward_app(function, token=TOKEN, workers=workers))) as url:
        yield RewardService(url, token=TOKEN, **options)


def lengths(completions):
    return [float(len(text)) for text in completions]


def texts(n, start=0):
    """Different completions, the i-th with the reward i of `number`."""
    return {"prompts": ["?"] * n, "completions": [str(start + i) for i in range(n)]}


class Number:
    """Reward that counts how often it is asked for each completion."""

    def __init__(self):
        self.asked = Counter()

    def __call__(self, completions):
        self.asked.update(completions)
        return [float(text) for text in completions]


def test_a_call_is_cut_into_ordered_requests():
    sizes = []

    def number(completions):
        sizes.append(len(completions))
        return [float(text) for text in completions]

    with served(number, batch_size=4) as service:
        scores = service(**texts(10))
        assert scores.score == [float(i) for i in range(10)] and sorted(sizes) == [2, 4, 4]
        assert service(prompts=[], completions=[]).score == [] and len(sizes) == 3


def test_columns_and_all_forms_of_scores_arrive():
    seen = []

    def judge(prompts, completions, completion_ids, step, progress, log, **columns):
        seen.append((prompts, completions, completion_ids, columns, step, progress))
        log("words", [3.0, None])
        return [{"style": 0.5, "dense": [1.0, 2.0]}, {"style": None}]

    chat = [{"role": "user", "content": "hi"}]
    given = dict(
        prompts=[chat, "text"], completions=[[{"role": "assistant", "content": "é\n\"🎬"}], "b"],
        completion_ids=[[5, 6], [7]], terminated=[True, False], answer=[np.float32(0.5), (1, {"a": None})],
        array=[np.arange(2), float("nan")],
    )  # fmt: skip
    with served(judge) as service, training(7, 0.25):
        found = Rewards({"judge": (service, 2.0)})(**given)
    prompts, completions, ids, columns, step, progress = seen[0]
    assert (prompts, completions, ids) == (given["prompts"], given["completions"], given["completion_ids"])
    assert (step, progress, columns["terminated"], columns["answer"]) == (
        7,
        0.25,
        [True, False],
        [0.5, [1, {"a": None}]],
    )
    assert columns["array"][0] == [0, 1] and np.isnan(columns["array"][1])
    assert (
        found.score[0].tolist() == [2.0, 5.0]
        and found.score[1] is None
        and list(found.logged.values()) == [[3.0, None]]
    )
    assert found.parts == {"judge/style": [1.0, None], "judge/dense": [6.0, None]}


def test_a_served_reward_gives_what_it_gives_here():
    """Of `Rewards` with weights, failures, raw values and logs; and of a reward model."""

    def odd(completions, log):
        log("n", [1.0, None, 2.0][: len(completions)])
        if "bad" in completions:
            raise RuntimeError("no")
        return [1.0, None, 3.0][: len(completions)]

    here = Rewards({"lengths": (lengths, 0.5), "odd": odd}, on_error="skip", max_failed=1)
    columns = dict(prompts=["a"] * 3, completions=["b", "bad", "ccc"], completion_ids=[[1], [2], [3]])
    model = RewardModel(make_model("llama"), make_tokenizer(WORDS))
    with served(here) as service, served(model) as rating:
        assert service(**columns) == here(**columns)
        assert Rewards({"judge": service})(**columns).score == Rewards({"judge": here})(**columns).score
        said = dict(prompts=["a b"] * 2, completions=["c a", "b"])
        assert rating(**said).score == pytest.approx(model(**said), rel=METRIC, abs=METRIC_NEAR_0)


def test_non_finite_numbers_are_refused():
    def bad(completions):
        return [1.0] * 5 + [float("nan")] + [float("inf")] * (len(completions) - 6)

    with served(bad, batch_size=100) as service:
        for function in (service, bad):
            with refused(
                RewardError,
                re.escape("returned nan for row 5 (prompt '?', completion '5')"),
                "expected a finite number",
            ):
                Rewards({"judge": function})(**texts(8))


def test_errors_keep_their_words_and_are_not_repeated():
    number = Number()

    def judge(completions):
        if "21" in completions:
            raise KeyError("no such word")
        return number(completions)

    with served(judge, batch_size=8, in_flight=1) as service:
        with refused(ChildError, "KeyError: 'no such word'"):
            service(**texts(32))
        said = "reward 'judge' raised KeyError: 'no such word' in row 21 (prompt '?', completion '21')"
        with refused(RewardError, re.escape(said)):
            Rewards({"judge": service})(**texts(32))
        assert not [text for text, count in number.asked.items() if count > 1]
        skipped = Rewards({"judge": service}, on_error="skip")(**texts(32))
        assert skipped.failed == {21} and skipped.score[20:23] == [20.0, None, 22.0]


@pytest.mark.parametrize("raised", [SystemExit("bye"), StopIteration("x"), StopTraining("enough")])
def test_no_exception_of_the_function_ends_the_server(raised):
    def judge(completions):
        if completions == ["0"]:
            raise raised
        return lengths(completions)

    with served(judge) as service:
        with refused(ChildError, *raised.args):
            service(**texts(1))
        assert service(**texts(1, start=5)).score == [1.0]


def test_equal_answers_are_scored_each():
    """Chance and state are the function's own: an answer that comes again is another answer."""
    state = iter(range(100))
    with served(lambda completions: [next(state) for _ in completions], batch_size=2) as service:
        for start in (0, 6):
            earned = service(prompts=["?"] * 6, completions=["a"] * 6).score
            assert sorted(earned) == list(range(start, start + 6))


def breaking(app, faults):
    """An application around another: the next request meets the next fault, "before" or "after" it is computed."""

    async def silence(message):
        pass

    async def around(scope, receive, send):
        fault = faults.popleft() if faults else ""
        if "after" in fault or not fault:
            await app(scope, receive, silence if fault else send)
        if fault:
            status = int(fault.split()[1])
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"broken"})

    return around


@pytest.mark.heavy
def test_a_repeated_request_is_not_computed_again():
    number, faults = Number(), deque(["before 429", "after 502", "", "after 503", "after 500"])
    with served(number, around=lambda app: breaking(app, faults), batch_size=5, in_flight=1) as service:
        assert service(**texts(10)).score == [float(i) for i in range(10)]
    assert set(number.asked.values()) == {1}


@pytest.mark.heavy
def test_a_late_score_is_computed_once():
    number, begun = Number(), []

    def slow(completions):
        begun.append(time.monotonic())
        time.sleep(0.6)
        return number(completions)

    with served(slow, timeout=0.25) as service:
        assert service(**texts(2)).score == [0.0, 1.0]
    assert len(begun) == 1


@pytest.mark.heavy
def test_an_outage_keeps_what_was_scored(caplog):
    """It is said once and ends in an error."""
    number, faults = Number(), deque(["", "", *["after 500"] * 3, *["before 500"] * 1000])
    with served(number, around=lambda app: breaking(app, faults), batch_size=2, in_flight=2, patience=2.0) as service:
        rewards = Rewards({"judge": service}, on_error="skip")
        with (
            caplog.at_level(logging.WARNING),
            refused(ServiceError, "no reply", "status 500", "4 answers are scored"),
        ):
            rewards(**texts(20))
        assert len([r for r in caplog.records if "trying for 2 s" in r.message]) == 1
        faults.clear()
        assert rewards(**texts(20)).score == [float(i) for i in range(20)]
        assert set(number.asked.values()) == {1}
        rewards(**texts(20))
        assert set(number.asked.values()) == {2}, "replies are kept for the next try of a call that failed, no longer"


@pytest.mark.heavy
def test_a_server_that_is_not_there_yet_is_waited_for():
    with serving(reward_app(lengths, token=TOKEN)) as url:
        port = int(url.rpartition(":")[2])
    service = RewardService(url, token=TOKEN)
    with contextlib.ExitStack() as stack:
        later = threading.Timer(0.5, lambda: stack.enter_context(serving(reward_app(lengths, token=TOKEN), port)))
        later.start()
        assert service(prompts=["?"], completions=["abc"]).score == [3.0]
        later.join()


def test_a_refusal_ends_the_call_and_says_why():
    with served(lengths) as service:
        with refused(ServiceError, "wrong token", "each start of serve_reward makes and prints a new one"):
            RewardService(service.url, token="another")(**texts(1))
        with refused(ServiceError, "answers 404: Not Found"):
            RewardService(service.url + "/other", token=TOKEN)(**texts(1))


@contextlib.contextmanager
def raw_server(answer):
    """A server that reads a request and gives its connection to ``answer``; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    closing = threading.Event()

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request or len(request) < length_of(request):
                request += connection.recv(65536)
            answer(connection, closing)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        closing.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def length_of(request):
    head, _, _ = request.partition(b"\r\n\r\n")
    return len(head) + 4 + int(re.search(rb"content-length: (\d+)", head.lower())[1])


HEAD = b"HTTP/1.1 200 OK\r\n"
ENDLESS = HEAD + b"Content-Length: 1000000000\r\n\r\n"


def sent(*pieces, pause=0.0):
    """Answer by these pieces, the last one again and again until the test ends."""

    def answer(connection, closing):
        for piece in pieces[:-1]:
            connection.sendall(piece)
        while not closing.wait(pause):
            connection.sendall(pieces[-1])

    return answer


SLOW = {
    "a slow body": sent(ENDLESS, b" ", pause=0.05),
    "slow headers": sent(HEAD, b"X: y\r\n", pause=0.05),
    "a slow first line": sent(b"HTTP/1.1 ", b"2", pause=0.05),
    "interim answers": sent(b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.01),
    "slow chunks": sent(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", pause=0.05),
    "nothing": sent(b"", pause=0.05),
}


@pytest.mark.heavy
@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
def test_an_answer_that_comes_too_slowly_is_given_up(answer):
    with raw_server(answer) as url:
        service = RewardService(url, token=TOKEN, timeout=0.2, patience=0.5)
        with refused(ServiceError, "no reply from", "for 0.5 s"):
            service(**texts(2))


BOMB = gzip.compress(b" " * 10**7)
LARGE = {
    "an endless body": sent(ENDLESS, b" " * 65536),
    "endless chunks": sent(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "an endless body without a length": sent(HEAD + b"\r\n", b" " * 65536),
    "an endless refusal": sent(b"HTTP/1.1 422 No\r\n\r\n", b" " * 65536),
    "a bomb": sent(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, b""),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", LARGE.values(), ids=LARGE)
def test_an_answer_that_is_too_large_is_refused(answer):
    with raw_server(answer) as url:
        service = RewardService(url, token=TOKEN, timeout=20.0, patience=20.0)
        with refused(ServiceError, "gives no scores: the answer (has more than 1,|is compressed)"):
            service(**texts(2))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", HEAD, HEAD + b"X" * 200_000, b"HTTP/1.1 999999 ?\r\n\r\n"])
def test_what_is_no_answer_of_http_is_given_up(answer):
    with raw_server(lambda connection, closing: connection.sendall(answer)) as url:
        service = RewardService(url, token=TOKEN, timeout=2.0, patience=0.4)
        with refused(ServiceError, "no reply from"):
            service(**texts(2))


REPLY = dict(version=1, earned=[1.0, 2.0], parts={"a": [1.0, 2.0]}, raw={}, logged={}, failed=[])
MALFORMED = [
    b"", b"null", b"[]", b"7", b'"a"', b"{", b"{}", b"\xff", b"[" * 100_000, b'{"earned":' * 10_000, b"NaN",
    {"version": 2}, {"more": 1}, {"earned": None}, {"earned": "ab"}, {"earned": [1.0]}, {"earned": [1.0] * 3},
    {"earned": [1.0, "x"]}, {"earned": [1.0, {}]}, {"earned": [1.0, [1.0, 2.0]]}, {"earned": [1.0, []]},
    {"earned": {"0": 1.0, "1": 2.0}}, {"parts": []}, {"parts": {"a": [1.0]}}, {"parts": {"a": 1.0}},
    {"parts": {"a": [1.0, float("nan")]}}, {"raw": {"a": [1.0, 2.0, 3.0]}}, {"raw": {"a": [float("inf"), 1.0]}},
    {"logged": {"a": []}}, {"logged": {"a": [[1.0], [2.0]]}}, {"failed": [999]}, {"failed": [-1]}, {"failed": [2]},
    {"failed": ["x"]}, {"failed": 1}, {"failed": {"a": 1}}, {"failed": [10**400]},
]  # fmt: skip


@pytest.mark.parametrize("content", MALFORMED, ids=lambda content: f"{content!r:.40}")
def test_a_reply_without_these_scores_is_one_error(content):
    body = content if isinstance(content, bytes) else json.dumps(REPLY | content).encode()
    answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with raw_server(lambda connection, closing: connection.sendall(answer)) as url:
        service = RewardService(url, token=TOKEN, timeout=5.0, patience=5.0)
        for function in (service, Rewards({"judge": service}, on_error="skip")):
            with refused(ServiceError, "gives no scores of 2 answers", "is it a serve_reward"):
                function(**texts(2))


def test_the_model_reply_of_the_malformed_is_right():
    body = json.dumps(REPLY).encode()
    answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with raw_server(lambda connection, closing: connection.sendall(answer)) as url:
        assert RewardService(url, token=TOKEN)(**texts(2)).score == [1.0, 2.0]


def test_words_of_a_server_are_escaped():
    words = "\x1b[2J" + "x" * 10_000
    for status, error in ((418, ServiceError), (422, ChildError)):
        answer = f"HTTP/1.1 {status} No\r\n\r\n{words}".encode()
        server = raw_server(lambda connection, closing, answer=answer: connection.sendall(answer))
        with server as url, pytest.raises(error) as caught:
            RewardService(url, token=TOKEN)(**texts(2))
        assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 3000


def test_only_valid_requests_with_a_token_are_computed():
    good = dict(version=1, step=0, progress=0.0, prompts=["?"], completions=["abc"], completion_ids=[[0]], columns={})
    seen = []

    def spy(completions):
        seen.extend(completions)
        return lengths(completions)

    with served(spy) as service, httpx.Client(base_url=service.url, trust_env=False) as client:

        def post(body, authorization=f"Bearer {TOKEN}"):
            content = json.dumps(body) if isinstance(body, dict) else body
            return client.post("v1/score", content=content, headers={"Authorization": authorization})

        wrong = [{"version": 2}, {"more": 1}, {"prompts": "?"}, {"completions": [1]}, {"completion_ids": [["a"]]}]
        for body in (*[good | each for each in wrong], {}, b"[]", b"no JSON", b"\xff"):
            answer = post(body)
            assert answer.status_code == 400 and "is its textenv another version?" in answer.text, body
        for header in ("", "Bearer", f"bearer {TOKEN}", f"Bearer {TOKEN}x", "Bearer \u00fc".encode("latin-1")):
            assert post(good, header).status_code == 401
        assert client.get("v1/score").status_code == 405 and client.get("docs").status_code == 404
        assert post(iter([json.dumps(good).encode()])).status_code == 413  # chunked, of unknown size
        sent = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
        with contextlib.closing(sent):
            sent.putrequest("POST", "/v1/score")
            sent.putheader("Authorization", f"Bearer {TOKEN}")
            sent.putheader("Content-Length", str(MOST_BYTES + 1))
            sent.endheaders()
            assert (refusal := sent.getresponse()).status == 413 and b"batch_size=" in refusal.read()
        assert not seen
        # Without a key, no request is taken for a repetition.
        assert [post(good | {"completions": [text]}).json()["earned"] for text in ("abc", "abcd")] == [[3.0], [4.0]]


def test_a_column_json_cannot_hold_is_named():
    service = RewardService("http://127.0.0.1:1", token=TOKEN)
    for wrong, said in ((object(), "has no attribute 'tolist'"), ("\ud800", "surrogates"), (b"\xff", "utf-8")):
        with refused(ValueError, "columns that are JSON", said):
            service(prompts=["?"], completions=["b"], extra=[wrong])


def test_a_pickled_service_has_no_connection():
    """And does not show its token."""
    with served(lengths, batch_size=3, patience=5.0) as service:
        again = pickle.loads(pickle.dumps(service))
        assert (again.url, again.token, again.batch_size, again.patience) == (service.url, TOKEN, 3, 5.0)
        assert again(prompts=["?"], completions=["ab"]).score == [2.0] and again.__name__ == "reward_service"
        assert TOKEN not in repr(again)
        assert Normalize(service)(prompts=["?"] * 2, completions=["a", "abc"]) == [-1.0, 1.0]


@pytest.mark.parametrize(
    "options", [{"url": "127.0.0.1:8000"}, {"url": "http://"}, {"batch_size": 0}, {"timeout": 0}, {"in_flight": -1}]
)
def test_a_client_of_no_address_or_number_is_refused(options):
    with refused(ValueError, "expected http://host:port, a token and numbers above 0"):
        RewardService(**{"url": "http://127.0.0.1:8000", "token": TOKEN} | options)


def test_a_public_server_needs_a_token():
    """And a function that scores rows apart."""
    for host in ("0.0.0.0", "::", "example.org", "127.0.0.1.example.org"):
        with refused(ValueError, f"host is '{host}', port 8000", "give token="):
            serve_reward(lengths, host=host)
    with refused(ValueError, "normalize in the client"):
        serve_reward(whiten(lengths))
    with refused(ValueError, "function is 'embedded'"):
        serve_reward("embedded")


@pytest.mark.heavy
def test_under_load_nothing_is_lost_or_scored_twice():
    """The documented one (docs/rewards.md) has 10,000 answers; here one request in six fails or hangs."""
    options = dict(workers=4, batch_size=5, failures=0.1, hangs=0.06, timeout=0.5)
    found = reward_load.measure(answers=300, **options)
    assert found["requests"] > found["answered"] >= 60
    assert found["lost"] == found["in wrong place"] == found["scored again"] == 0


SERVER = """
import sys, time
from textenv import serve_reward

def number(completions):
    time.sleep(0.1)
    with open(sys.argv[2], "a") as file:
        file.writelines(f"{text}\\n" for text in completions)
    return [float(text) for text in completions]

serve_reward(number, port=int(sys.argv[1]), token="a-secret")
"""


@pytest.mark.long
def test_a_restarted_server_costs_only_open_requests(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    seen, found = tmp_path / "seen.txt", []
    command = [sys.executable, "-c", SERVER, str(port), str(seen)]
    service = RewardService(f"http://127.0.0.1:{port}", token=TOKEN, batch_size=5, in_flight=2)
    call = threading.Thread(target=lambda: found.append(service(**texts(200)).score))
    with subprocess.Popen(command) as first:
        call.start()
        while not seen.exists() or seen.read_text().count("\n") < 50:
            time.sleep(0.02)
        first.kill()
    with subprocess.Popen(command) as second:
        call.join()
        second.terminate()
    assert found == [[float(i) for i in range(200)]]
    counts = Counter(seen.read_text().split())
    assert len(counts) == 200 and sum(counts.values()) <= 210  # two requests of five
