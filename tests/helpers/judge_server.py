"""A judge behind OpenAI's protocol that replies as it is told, and misbehaves as real servers do."""

import contextlib
import gzip
import json
import re
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(text, finish_reason="stop", **message):
    """The body of an answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | message, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion", "model": "critic", "choices": [choice]}


def text_of(request):
    return request["messages"][-1]["content"]


def answer_in(request, name="answer"):
    """The answer that a judge is shown."""
    (answer,) = re.findall(rf"<{name}((?:-\d+)?)>\n(.*)\n</{name}\1>", text_of(request), re.DOTALL)
    return answer[1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        """Write nothing."""

    def do_POST(self):  # noqa: N802
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        misdeed = None
        with server.lock:
            server.requests.append(body)
            server.headers.append(dict(self.headers))
            if server.misdeeds and (server.misdeeds[0] != "no schema" or "response_format" in body):
                misdeed = server.misdeeds[0] if server.always else server.misdeeds.pop(0)
        if misdeed is not None:
            getattr(self, misdeed.replace(" ", "_"))()
            return
        try:
            answer = completion(server.reply(body))
        except Exception as error:  # a mistake of the test, which its client shows
            self.send(418, {"error": repr(error), "request": body})
        else:
            self.send(200, answer)

    def send(self, status, body, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content_Length": len(content)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    # --- failures that pass --------------------------------------------------------------------------------------

    def busy(self):
        self.send(429, {"error": "slow down"}, Retry_After="0.05")

    def busy_for_an_hour(self):
        self.send(429, {"error": "come back later"}, Retry_After="3600")

    def busy_until_a_date(self):
        self.send(429, {"error": "slow down"}, Retry_After=formatdate(0, usegmt=True))

    def down(self):
        self.send(503, b"<html>down</html>")

    def hangs_up(self):
        self.close_connection = True

    def breaks_off(self):
        self.send(200, b'{"choices": [{"mess', Content_Length=1000)
        self.close_connection = True

    def hangs(self):
        self.close_connection = True
        self.server.closing.wait(30)

    def drips(self):
        self.send(200, b"{", Content_Length=100_000)
        with contextlib.suppress(OSError):
            while not self.server.closing.wait(0.02):
                self.wfile.write(b" ")
        self.close_connection = True

    # --- answers that are no verdict ------------------------------------------------------------------------------

    def html(self):
        self.send(200, b"<html>Welcome</html>")

    def no_choices(self):
        self.send(200, {"choices": []})

    def refusal(self):
        self.send(200, completion(None, "content_filter", refusal="I cannot rate this"))

    def cut(self):
        self.send(200, completion("There are 2 mistakes, and", "length"))

    def too_long(self):
        self.send(400, {"error": {"message": "this model's maximum context length is 100 tokens"}})

    # --- what no repetition mends ---------------------------------------------------------------------------------

    def no_schema(self):
        self.send(400, {"error": "response_format is not supported"})

    def wrong_key(self):
        self.send(401, {"error": "Incorrect API key"})

    def no_such_model(self):
        self.send(404, {"error": "The model does not exist"})

    def moved(self):
        self.send(307, b"", Location="http://127.0.0.1:9/v1")

    def compressed(self):
        self.send(200, gzip.compress(json.dumps(completion("4")).encode()), Content_Encoding="gzip")

    def endless(self):
        self.send(200, b"[", Content_Length=2**30)
        with contextlib.suppress(OSError):
            while not self.server.closing.is_set():
                self.wfile.write(b"0," * 2**15)
        self.close_connection = True


class JudgeServer(ThreadingHTTPServer):
    """Server on 127.0.0.1 in a thread.

    Args:
        reply: the reply's text, or a function of the request that returns it.
        misdeeds: what the first requests meet instead, in their order.
        always: whether all requests meet the first misdeed.
    """

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, reply="4", misdeeds=(), *, always=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply if callable(reply) else lambda request: reply
        self.misdeeds = list(misdeeds)
        self.always = always
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.requests, self.headers = [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        """Write nothing: clients hang up."""

    def __enter__(self):
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
