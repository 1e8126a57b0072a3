"""The server of pages for this machine: who is refused, and that nothing is told to them."""

import http.client
import json

import pytest

from tests.helpers.errors import refused
from textenv.loopback import LoopbackServer


@pytest.fixture
def server():
    asked = []

    def respond(path, query, posted):
        asked.append((path, query, posted))
        if path == "/bad":
            raise ValueError("this is wrong")
        return {"said": posted} if posted is not None else "<p>page</p>"

    with LoopbackServer(respond) as found:
        found.asked = asked
        yield found.start()
        found.shutdown()


def ask(server, path="/", *, token=None, host=None, method="GET", body=None):
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    token = server.token if token is None else token
    connection.request(method, f"{path}?token={token}", body, {"Host": host or f"127.0.0.1:{port}"})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), dict(reply.getheaders())


def test_a_page_and_answers_are_served_with_the_token(server):
    status, body, headers = ask(server)
    assert (status, body) == (200, "<p>page</p>") and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    status, body, _ = ask(server, "/answer", method="POST", body='{"x": 1}')
    assert (status, json.loads(body)) == (200, {"said": {"x": 1}})
    assert server.url.startswith("http://127.0.0.1:") and server.token in server.url
    assert server.asked == [("/", {}, None), ("/answer", {}, {"x": 1})], "no token among the query"
    assert ask(server, host=f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.parametrize("host", ["evil.example:80", "127.0.0.1.evil.example:80", "evil.example", "0.0.0.0:80"])
def test_other_hosts_and_tokens_are_refused_unread(server, host):
    assert ask(server, host=host)[0] == 403
    assert {ask(server, token=wrong)[0] for wrong in ("wrong", "", "%00%C3%A4")} == {403}
    assert ask(server, method="POST", body="{}", token="x")[0] == 403
    assert server.asked == []


def test_wrong_requests_are_told_why(server):
    assert ask(server, "/answer", method="POST", body="{")[0] == 400
    status, body, _ = ask(server, "/bad")
    assert status == 400 and "this is wrong" in body
    assert ask(server)[0] == 200


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"
    with refused(OSError, "cannot listen on port", "0 for a free one"):
        LoopbackServer(lambda *given: "", port=server.server_address[1])
