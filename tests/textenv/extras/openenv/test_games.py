"""textenv/OpenEnv-v0 against a real server of the package openenv, in a process of its own, on the loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gymnasium
import numpy as np
import pytest

from algos import LMPolicy, collect
from tests.helpers.models import make_tokenizer
from tests.helpers.openenv_servers import free_port
from tests.helpers.packages import lazy_import
from textenv import TextVectorEnv
from textenv.tasks.builtin import make_task

lazy_import("openenv", reason="needs a server: pip install openenv")
lazy_import("websockets", reason="install the extra: pip install '.[openenv]'")
TOKENIZER = make_tokenizer(["?", "say", "film", "plot", "story", "no,", "die", "raise", "<eos>", "<pad>"])


@pytest.fixture
def serve(servers):
    """Start a server on a port, and wait until it listens."""
    running = []

    def start(port, sessions=4, program="word_server.py"):
        running.append(servers.start(program, port, sessions, ports=[port]))
        return running[-1]

    yield start
    for server in running:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def games(servers):
    """Addresses of the games of `tests.helpers.action_server`, in one process."""
    ports = {game: free_port() for game in ("move", "bounded", "listed", "pair")}
    arguments = [f"{game}={port}" for game, port in ports.items()]
    server = servers.start("action_server.py", *arguments, ports=ports.values())
    yield {game: f"http://127.0.0.1:{port}" for game, port in ports.items()}
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


@pytest.mark.heavy
def test_more_episodes_than_sessions_are_played(serve, caplog):
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
    session = env.task.sample_prompts([0], seed=1)[0].state.env
    session.step("?")
    assert session.session.state()["step_count"] == 1
    session.close()


@pytest.mark.heavy
def test_a_dying_server_breaks_its_episodes_off(serve, caplog):
    """The next episodes wait for it."""
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


def test_a_missing_server_gives_a_sentence():
    with pytest.raises(ConnectionError, match="is no running OpenEnv server .* start it first"):
        make_env(free_port())
    for url in ("", "localhost:8000", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="expected the address of an OpenEnv server"):
            make_task("OpenEnv", tokenizer=TOKENIZER, url=url)


@pytest.mark.heavy
def test_an_environment_of_tools_is_no_single_game(serve):
    pytest.importorskip("fastmcp")
    port = free_port()
    serve(port, program="tool_server.py")
    with pytest.raises(ValueError, match="played as a vector environment only"):
        gymnasium.make("textenv/OpenEnv-v0", url=f"http://127.0.0.1:{port}", model="embedded")


@pytest.fixture
def answer_schema():
    """Start a server whose /schema is the given bytes; returns its port."""
    servers = []

    def start(content):
        class Schema(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Schema)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def turns_of(sample):
    return sample.get("turns") or [{"role": "assistant", "content": sample["completion"]}]


def wanted_in(prompt):
    """The right answer, which the prompt names."""
    first = prompt.splitlines()[0]
    return json.loads(first)["wanted"] if first.startswith("{") else first


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("game", "answers"),
    [
        ("move", ["UP", "DOWN", "LEFT", "RIGHT"]),
        ("bounded", ["0", "1", "2", "3"]),
        ("listed", ["0", "1", "2", "3"]),
    ],
)
def test_the_model_writes_one_of_the_listed_values(games, game, answers, caplog):
    policy = LMPolicy.load("embedded", seed=1)
    env = gymnasium.make_vec("textenv/OpenEnv-v0", num_envs=8, url=games[game], max_length=128, history=1)
    rollout = collect(env, policy, num_episodes=32, seed=1)
    samples = env.samples(range(32))
    assert f"Answer with one of: {', '.join(answers)}" in samples[0]["prompt"]
    written = [[turn["content"] for turn in turns_of(sample) if turn["role"] == "assistant"] for sample in samples]
    assert {answer for turns in written for answer in turns} == {*answers}
    wanted = [wanted_in(sample["prompt"]) for sample in samples]
    right = [turns[-1] == word for turns, word in zip(written, wanted, strict=True)]
    assert [sample["score"] for sample in samples] == right and 0 < sum(right) < 32
    assert not env.metrics["reward/failed"] and rollout["reward"].sum() == sum(right)
    if game == "listed":
        assert "the answer is the action's field number; game keep" in caplog.text


@pytest.mark.heavy
def test_after_the_first_step_only_legal_values_are_written(games):
    policy = LMPolicy.load("embedded", seed=1)
    env = gymnasium.make_vec("textenv/OpenEnv-v0", num_envs=8, url=games["listed"], max_length=128)
    collect(env, policy, num_episodes=32, seed=1)
    later = []
    for sample in env.samples(range(32)):
        answers = [turn["content"] for turn in turns_of(sample) if turn["role"] == "assistant"]
        later += [answer in ("0", wanted_in(sample["prompt"])) for answer in answers[1:]]
    assert len(later) > 10 and all(later)


def test_several_fields_are_written_as_json(games):
    task, _, _ = make_task("OpenEnv", tokenizer=TOKENIZER, url=games["pair"])
    env = task.sample_prompts([0], seed=1)[0].state.env
    text, _ = env.reset(seed=2)
    assert text.startswith("2\nAnswer with a JSON object: ")
    shown = json.loads(text.partition("JSON object: ")[2])
    assert shown["required"] == ["number", "sure"] and shown["properties"]["sure"]["type"] == "boolean"
    assert env.step("no")[0].startswith("expected JSON: ") and env.step("no")[1:4] == (0.0, False, False)
    assert env.step("[1]")[0] == "expected a JSON object"
    assert "Field required" in env.step('{"number": 2}')[0]
    assert env.step('{"number": 2, "sure": true}')[1:3] == (1.0, True)
    env.close()


def test_observations_are_described_by_a_function(games):
    options = {"describe": lambda fields: f"say {fields['wanted']}", "actions": [1, 2]}
    task, _, _ = make_task(
        "OpenEnv", tokenizer=make_tokenizer(["1", "2", "<eos>", "<pad>"]), url=games["bounded"], **options
    )
    (prompt,) = task.sample_prompts([0], seed=1)
    assert prompt.content.startswith("say ") and prompt.content.endswith("\nAnswer with one of: 1, 2\n")


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"action": 1', b"\xff\xfe"])
def test_a_server_of_something_else_is_named(content, answer_schema):
    with pytest.raises(ConnectionError, match="is no running OpenEnv server"):
        make_env(answer_schema(content))


@pytest.mark.heavy
def test_a_server_that_stays_away_ends_the_run(serve):
    port = free_port()
    server = serve(port)
    env = make_env(port, timeout=0.5)
    server.kill()
    server.wait()
    with pytest.raises(ConnectionError, match="began no episode .* start it again"):
        env.start_episodes(2, seed=1)
