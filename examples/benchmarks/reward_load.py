"""Load test of a reward service: 10,000 answers through 4 workers, with failures and hangs injected into a real server.

python examples/benchmarks/reward_load.py

Each request to the uvicorn server (in this process, in a thread) fails with status 500 in 5 % of cases, and hangs
beyond the client's time limit in 2 %; half of each before the reward is computed, half after, so that its scores are
lost on the way. Promised is that each answer has its own score, in order, and that the reward function saw each answer
once. Exit status 1 if not. The seconds are those of the time limits and back-offs: the function itself takes no time.
"""

import argparse
import asyncio
import json
import random
import threading
import time
from collections import Counter

import uvicorn

from textenv import RewardService
from textenv.extras.service import reward_app

TOKEN = "load-test"


class Number:
    """Reward that is the number in the text, and that counts how often it sees each text."""

    def __init__(self):
        self.seen = Counter()

    def __call__(self, completions):
        self.seen.update(completions)
        return [float(text) for text in completions]


def faulty(app, *, failures, hangs, seconds, seed=0):
    """Wrap an ASGI application so that it fails or hangs at random; return it, and the counts of what happened."""
    rng, counts = random.Random(seed), Counter()

    async def lost(message):
        pass

    async def around(scope, receive, send):
        draw, late = rng.random(), rng.random() < 0.5
        kind = "failed" if draw < failures else "hung" if draw < failures + hangs else "answered"
        counts[kind if kind == "answered" else f"{kind} {'after' if late else 'before'} scoring"] += 1
        if kind == "answered" or late:
            await app(scope, receive, send if kind == "answered" else lost)
        if kind == "hung":
            await asyncio.sleep(seconds)
        if kind != "answered":
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    return around, counts


def measure(*, answers, workers, batch_size, failures, hangs, timeout):
    """Score the answers; return counts, seconds and whether the promises hold."""
    number = Number()
    inner = reward_app(number, token=TOKEN, workers=workers)
    app, counts = faulty(inner, failures=failures, hangs=hangs, seconds=2 * timeout)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    options = dict(token=TOKEN, batch_size=batch_size, in_flight=workers, timeout=timeout)
    begun = time.perf_counter()
    try:
        service = RewardService(f"http://127.0.0.1:{port}", **options)
        earned = service(prompts=["?"] * answers, completions=[str(i) for i in range(answers)]).score
        seconds = time.perf_counter() - begun
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
    lost = sum(score is None for score in earned)
    again = sum(count - 1 for count in number.seen.values())
    wrong = sum(score != i for i, score in enumerate(earned)) + abs(len(earned) - answers)
    return {
        "answers": answers, "requests": sum(counts.values()), **dict(sorted(counts.items())), "lost": lost,
        "in wrong place": wrong, "scored again": again, "seconds": round(seconds, 1),
    }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4, help="requests in flight, and calls at a time in the server")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--failures", type=float, default=0.05)
    parser.add_argument("--hangs", type=float, default=0.02)
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds of a request; a hang takes twice as long")
    found = measure(**vars(parser.parse_args(arguments)))
    print(json.dumps(found, indent=2))
    return int(bool(found["lost"] or found["in wrong place"] or found["scored again"]))


if __name__ == "__main__":
    raise SystemExit(main())
