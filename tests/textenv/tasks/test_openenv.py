"""textenv/OpenEnv-v0 against a real server of the package openenv, in a process of its own, on the loopback."""

import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.models import make_tokenizer
from textenv import TextVectorEnv, make_task

pytest.importorskip("openenv", reason="needs a server: pip install openenv")
pytest.importorskip("websockets", reason="install the extra: pip install '.[openenv]'")
TOKENIZER = make_tokenizer(["?", "say", "film", "plot", "story", "no,", "die", "raise", "<eos>", "<pad>"])
SERVER = Path(__file__).parents[2] / "helpers" / "word_server.py"


def free_port():
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def serve():
    """Start a server on a port, and wait until it listens."""
    running = []

    def start(port, sessions=4):
        running.append(subprocess.Popen([sys.executable, str(SERVER), str(port), str(sessions)]))
        for _ in range(600):
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return running[-1]
            time.sleep(0.1)
        raise AssertionError("the server did not start")

    yield start
    for server in running:
        server.kill()
        server.wait()


def make_env(port, num_envs=2, **options):
    task, limits, _ = make_task("OpenEnv", tokenizer=TOKENIZER, url=f"http://127.0.0.1:{port}", **options)
    return TextVectorEnv(task, tokenizer=TOKENIZER, num_envs=num_envs, **limits)


def play(env, episodes, answer):
    """Play episodes of one-word turns, ``answer(text so far, episode)``; return the rollout."""
    observation, spoken = env.start_episodes(episodes, seed=3), {}
    while env.running.any():
        actions = np.zeros(env.num_envs, dtype=np.int64)
        for slot, row in zip(np.flatnonzero(env.running), env.cursor[0].tolist(), strict=True):
            text = TOKENIZER.decode(observation["tokens"][slot, : observation["length"][slot, 0]])
            spoken[row] = not spoken.get(row, False)
            actions[slot] = TOKENIZER.convert_tokens_to_ids(answer(text, row)) if spoken[row] else 8  # EOS
        observation, _ = env.advance(actions)
    return env.take_episodes()


def right(text, row):
    return text.split()[1]


def test_more_episodes_than_sessions_with_rewards_of_each_turn(serve, caplog):
    port = free_port()
    serve(port, sessions=2)
    env = make_env(port)
    rollout = play(env, 6, lambda text, row: right(text, row) if "no," in text or row % 2 else "say")
    assert rollout["reward"].sum(-1).tolist() == [0.5, 0.75] * 3 and rollout["terminated"].any(-1).all()
    first = rollout[0]
    assert first["action"][first["mask"]].tolist()[:2] == [1, 8] and first["reward"][first["mask"]][1] == -0.25
    again = play(make_env(port), 6, lambda text, row: right(text, row) if "no," in text or row % 2 else "say")
    assert (again["observation"] == rollout["observation"]).all() and not caplog.records
    with pytest.raises(ValueError, match="action_field is 'words'.*fields text"):
        make_env(port, action_field="words")
    session = env.task._make_env()
    session.reset(seed=1)
    session.step("?")
    assert session.state()["step_count"] == 1
    session.close()


def test_a_server_that_dies_breaks_its_episodes_off_and_the_next_ones_wait_for_it(serve, caplog):
    port = free_port()
    server = serve(port)
    env = make_env(port)
    rollout = play(env, 2, lambda text, row: "raise" if row else right(text, row))  # the environment fails
    assert rollout["mask"].any(-1).tolist() == [True, False] and "no such word" in caplog.text
    rollout = play(env, 2, lambda text, row: "die")
    assert not rollout["mask"].any() and "the episode is broken off" in caplog.text
    assert env.metrics["reward/failed"] == 2 and server.wait() == 3
    serve(port)
    assert play(env, 2, right)["reward"].sum(-1).tolist() == [0.75, 0.75]


def test_a_missing_server_and_a_wrong_address_give_a_sentence():
    with pytest.raises(ConnectionError, match="is no running OpenEnv server .* start it first"):
        make_env(free_port())
    for url in ("", "localhost:8000", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="expected the address of an OpenEnv server"):
            make_task("OpenEnv", tokenizer=TOKENIZER, url=url)


def test_a_server_that_does_not_return_ends_the_run_with_a_sentence(serve):
    port = free_port()
    server = serve(port)
    env = make_env(port, timeout=0.5)
    server.kill()
    server.wait()
    with pytest.raises(ConnectionError, match="began no episode .* start it again"):
        env.start_episodes(2, seed=1)
