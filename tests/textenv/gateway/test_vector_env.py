"""Programs in other processes that are trained by the address of their model."""

import asyncio
import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("starlette", reason="needs the extra service")

from algos import collect
from algos.cli import main
from tests.helpers.chat_templates import own_template_tokenizer
from tests.helpers.conversations import chat_tokenizer
from tests.helpers.http_player import Player
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.programs import program_env, reader_policy, turns_of, word_policy, write
from tests.helpers.small_agents import agent_of
from tests.helpers.tool_calls import PLAIN, QUESTION, SIX, byte_tokenizer
from textenv import Gateway
from textenv.gateway.sessions import GoneError, Session, Sessions

PLAYER = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "http_player.py")]
"""Command that plays an episode."""


@contextlib.contextmanager
def gateway(command=None, num_envs=3, **options):
    """Gateway for the nine-word model."""
    arguments = dict(tokenizer=make_tokenizer(WORDS), num_envs=num_envs, max_new_tokens=4, max_length=64, timeout=30.0)
    env = Gateway(command, **(arguments | options))
    yield env
    env.close()


@contextlib.contextmanager
def playing(env, play, num_clients):
    """Let clients play one episode each, in threads; yield their futures."""

    def run(number):
        return play(Player(f"{env.url}/sessions/client-{number}", env.token))

    with ThreadPoolExecutor(num_clients) as threads:
        yield [threads.submit(run, number) for number in range(num_clients)]


def play_with(env, play, *, policy=None, num_clients=1):
    """Rollout of an episode of each client; and what the clients return."""
    with playing(env, play, num_clients) as clients:
        rollout = collect(env, word_policy() if policy is None else policy, num_episodes=num_clients, seed=1)
    return rollout, [client.result() for client in clients]


def refusal(function, *arguments, **options):
    """Status and words of the error with which the server answers."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        function(*arguments, **options)
    with caught.value as error:
        return error.code, error.read().decode()


# --- programs that the gateway starts ---------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_started_program_gives_the_rollout_of_the_same_function():
    """To the bit; its tasks and rewards included."""

    def play(ask, task):
        ask("a")
        text = task
        total = 0
        for _ in range(2):
            answer = ask(text)
            total += len(answer.split())
            text += answer + " a"
        return {"words": float(total), "bonus": 0.5}

    tasks = ["a b", "c", "d c a"]
    expected = collect(program_env(play, tasks=tasks), word_policy(), num_episodes=8, seed=1)
    with gateway(PLAYER, tasks=tasks) as env:
        rollout = collect(env, word_policy(), num_episodes=8, seed=1)
        assert env.metrics["programs/failed"] == 0 and env.metrics["programs/rows"] == 2
        assert env.samples(range(1))[0]["parts"]["bonus"] == 0.5
    assert set(rollout.keys()) == set(expected.keys()) and rollout["reward"].sum() > 4
    for column in expected.keys():
        assert torch.equal(rollout[column], expected[column]), column


@pytest.mark.heavy
def test_a_resumed_training_of_a_started_program_gives_the_same_bits(tmp_path):
    def trained(folder, **options):
        with gateway(PLAYER, tasks=["a b", "c", "d"]) as env:
            agent = agent_of(env, word_policy(), learning_rate=1e-3, num_episodes=4)
            agent.learn(100, run_dir=folder, checkpoint_every=1, **options)
        return torch.cat([weight.detach().flatten() for weight in agent.policy.parameters()])

    expected = trained(tmp_path / "whole")
    trained(tmp_path / "part", on_iteration=lambda metrics: metrics["iteration"] == 2)
    assert torch.equal(trained(tmp_path / "part", resume=tmp_path / "part"), expected)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("crash", "ended with status 3 and sent no reward.*the last words"),
        ("silent", r"ended with status 0 and sent no reward.*\(none\)"),
    ],
)
def test_a_program_that_fails_is_left_out_and_its_output_logged(task, words, caplog):
    with gateway(PLAYER, tasks=["a", task], num_envs=2) as env:
        collect(env, word_policy(), num_episodes=4, seed=1)
        assert env.metrics["programs/failed"] == 2
    assert re.search(f"(?s){words}", caplog.text)


def test_programs_that_all_fail_end_the_training():
    with gateway(PLAYER, tasks=["crash"]) as env, pytest.raises(RuntimeError, match="(?s)all 3 programs.*status 3"):
        collect(env, word_policy(), num_episodes=3, seed=1)


@pytest.mark.heavy
def test_a_program_that_hangs_is_killed(caplog):
    with gateway([*PLAYER, "the-hanging-one"], tasks=["hang", "a"], num_envs=2, timeout=3.0) as env:
        collect(env, word_policy(), num_episodes=2, seed=1)
        assert env.metrics["programs/timeouts"] == 1
        deadline = time.monotonic() + 20
        while processes("the-hanging-one") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes("the-hanging-one")
    assert "within 3 seconds: end it earlier, or raise timeout=" in caplog.text


def test_what_a_program_does_after_its_reward_keeps_nobody_waiting():
    start = time.monotonic()
    with gateway([*PLAYER, "the-staying-one"], tasks=["stay"]) as env:
        rollout = collect(env, word_policy(), num_episodes=2, seed=1)
        assert rollout["reward"].sum() == 2
        assert len(processes("the-staying-one")) == 2
    assert not processes("the-staying-one")  # the gateway is closed
    assert time.monotonic() - start < 40


def processes(word):
    """Process numbers of the programs that have a word in their command line."""
    lines = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if word in line.split() and "ps" not in line.split()[1]]


@pytest.mark.heavy
def test_what_a_program_has_started_ends_with_it(tmp_path):
    """Also what ignores a polite signal."""
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    program = tmp_path / "parent.py"
    program.write_text(
        "import runpy, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, 'the-child'])\n"
        f"runpy.run_path({PLAYER[1]!r}, run_name='__main__')\n"
    )
    with gateway([sys.executable, str(program)], tasks=["a"]) as env:
        collect(env, word_policy(), num_episodes=2, seed=1)
        deadline = time.monotonic() + 20
        while processes("the-child") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes("the-child")


@pytest.mark.heavy
def test_programs_that_ignore_signals_are_killed_together(tmp_path):
    program = tmp_path / "stubborn.py"
    program.write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"import runpy\nrunpy.run_path({PLAYER[1]!r}, run_name='__main__')\n"
    )
    with gateway([sys.executable, str(program), "the-stubborn-one"], tasks=["stay"], num_envs=6) as env:
        collect(env, word_policy(), num_episodes=6, seed=1)
        assert len(processes("the-stubborn-one")) == 6
    deadline = time.monotonic() + 20
    while processes("the-stubborn-one") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes("the-stubborn-one")


@pytest.mark.heavy
def test_a_run_does_not_warn_of_the_server_s_state(tmp_path, caplog):
    with gateway(PLAYER, tasks=["a"]) as env:
        agent_of(env, word_policy(), num_episodes=4).learn(50, run_dir=tmp_path)
    assert "no checkpoint has" not in caplog.text


@pytest.mark.heavy
def test_a_reward_of_null_leaves_an_episode_out():
    with gateway(PLAYER, tasks=["leave out", "a"], num_envs=2) as env:
        collect(env, word_policy(), num_episodes=4, seed=1)
        assert env.metrics["reward/left_out"] == 2 and env.metrics["programs/failed"] == 0


@pytest.mark.heavy
def test_it_is_trained_on_the_command_line(tmp_path, monkeypatch):
    lines = [json.dumps({"text": text}) for text in ("the film", "the actor", "a story", "the plot")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    kwargs = f'{{"command": "{PLAYER[0]} {PLAYER[1]}", "tasks": "tasks.jsonl", "max_length": 64, "max_new_tokens": 4}}'
    sizes = ["--total-steps", "20", "--config.num-episodes", "4", "--config.minibatch-size", "4", "--num-episodes", "2"]
    main(["train", "textenv/Program-v0", "--env-kwargs", kwargs, *sizes, "--run-dir", "run", "--quiet"])
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("programs/questions") > 0


# --- programs that connect --------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_nothing_of_64_parallel_clients_is_lost_or_mixed():
    """Each asks for a text of its own, several times at once, and gets a reward of its own."""
    policy = reader_policy(make_tokenizer(WORDS))
    words = [word for word in WORDS if not word.startswith("<")]

    def play(player):
        number = int(player.session.rpartition("-")[2])
        text = " ".join(words[number // len(words) ** power % len(words)] for power in range(3))
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda ending: player.complete(f"{text} {ending}"), words[:3]))
        player.reward(number)
        return text, answers

    with gateway(num_envs=64) as env:
        rollout, played = play_with(env, play, policy=policy, num_clients=64)
        assert env.metrics["programs/questions"] == 3 and env.metrics["programs/rows"] == 3
        tokenizer = env.tokenizer
    rows = {}
    for turns in turns_of(rollout):
        for context, answer in turns:
            rows.setdefault(tokenizer.decode(context), []).append(tokenizer.decode(answer, skip_special_tokens=True))
    for text, answers in played:
        for ending, answer in zip(words[:3], answers, strict=True):
            assert answer.strip() in [written.strip() for written in rows[f"{text} {ending}"]]
    assert rollout["reward"].sum() == sum(range(64))
    assert sorted(rollout["reward"].sum(1)[rollout["reward"].any(1)].tolist()) == list(range(1, 64))


@pytest.mark.parametrize("how", ["path", "key", "header"])
def test_a_client_names_its_session_in_three_ways(how):
    def play(player):
        headers = {"Authorization": f"Bearer {player.key}", "Content-Type": "application/json"}
        path = "/v1/completions"
        if how == "path":
            path = f"/sessions/mine{path}"
        elif how == "key":
            headers["Authorization"] += ":mine"
        else:
            headers["X-Session-ID"] = "mine"
        host = player.session.split("/")[2]
        with contextlib.closing(http.client.HTTPConnection(host)) as connection:
            connection.request("POST", path, '{"prompt": "a", "max_tokens": 2}', headers)
            status = connection.getresponse().status
        Player(f"http://{host}/sessions/mine", player.key).reward(2.0)
        return status

    with gateway() as env:
        rollout, statuses = play_with(env, play)
    assert statuses == [200] and rollout["reward"].sum() == 2


def test_several_answers_are_rows_of_the_same_episode():
    def play(player):
        body = {"prompt": "a b", "n": 3, "return_token_ids": True, "max_tokens": 3}
        reply = player.send("/v1/completions", body)
        player.reward(1.0)
        return reply

    with gateway() as env:
        rollout, (reply,) = play_with(env, play)
    rows = turns_of(rollout)
    assert len(rows) == 3
    for choice, ((context, answer),) in zip(reply["choices"], rows, strict=True):
        assert (reply["prompt_token_ids"], choice["token_ids"]) == (context, answer)
        assert choice["finish_reason"] == ("stop" if answer[-1] == WORDS.index("<eos>") else "length")
    assert reply["usage"]["completion_tokens"] == sum(len(answer) for ((_, answer),) in rows)


@pytest.mark.heavy
def test_openai_s_client_streams_and_continues_a_chat():
    openai = pytest.importorskip("openai", reason="the client of OpenAI, which comes with verifiers")
    tokenizer = chat_tokenizer()

    def play(player):
        client = openai.OpenAI(base_url=f"{player.session}/v1", api_key=player.key, max_retries=0)
        chat = [{"role": "user", "content": "a b"}]
        for _ in range(2):
            stream = client.chat.completions.create(model="gpt", messages=chat, stream=True, max_tokens=3)
            text = "".join(part.choices[0].delta.content for part in stream)
            chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "c"}]
        player.reward(1.0)

    with gateway(tokenizer=tokenizer) as env:
        rollout, _ = play_with(env, play, policy=reader_policy(tokenizer))
        assert env.metrics["programs/rows"] == 1 and env.metrics["programs/questions"] == 2
    assert len(turns_of(rollout)[0]) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": 0.7}, "temperature is 0.7, but the answers must be samples of the policy as it is"),
        ({"temperature": 0}, "temperature is 0"),
        ({"top_p": 0.9}, "does not support top_p"),
        ({"frequency_penalty": 0.5}, "does not support frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "does not support logit_bias"),
        ({"logprobs": 0}, "logprobs are not known while the policy is trained"),
        ({"prompt": [1, 2]}, "prompt is a list of token ids"),
        ({"messages": QUESTION}, "does not support messages"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_would_be_another_distribution_is_refused(body, words):
    def play(player):
        refused = refusal(player.complete, **{"prompt": "a"} | body)
        neutral = {"temperature": 1.0, "top_p": 1, "presence_penalty": 0, "seed": 3, "user": "me"}
        player.complete("a", **neutral)
        player.reward(1.0)
        return refused

    with gateway() as env:
        _, ((status, text),) = play_with(env, play)
        assert env.metrics["programs/questions"] == 1
    assert status == 400 and words in text


def test_variables_of_the_template_are_those_of_the_environment():
    tokenizer = own_template_tokenizer("qwen 3")
    chat = [{"role": "user", "content": "what is the time?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False, return_dict=False)

    def play(player):
        player.chat(chat, chat_template_kwargs={"enable_thinking": False})
        refused = refusal(player.chat, chat, chat_template_kwargs={"enable_thinking": True})
        player.reward(1.0)
        return refused

    options = dict(tokenizer=tokenizer, max_length=200, chat_template_kwargs={"enable_thinking": False})
    with gateway(**options) as env:
        rollout, ((status, text),) = play_with(env, play, policy=reader_policy(tokenizer))
    (((context, _),),) = turns_of(rollout)
    assert context == expected and status == 400
    assert "trained with the variables {'enable_thinking': False}" in text


def test_a_task_that_json_cannot_hold_is_told():
    with pytest.raises(TypeError, match="what JSON can hold"), gateway(tasks=[{1, 2}]):
        pass
    with pytest.raises(ValueError, match="which JSON cannot hold"), gateway(tasks=[float("nan")]):
        pass


def test_a_limit_is_told_and_the_reward_still_taken():
    def play(player):
        player.complete("a")
        refused = refusal(player.complete, "a b")
        player.reward(3.0)
        return refused

    with gateway(max_turns=1) as env:
        rollout, ((status, text),) = play_with(env, play)
    assert status == 400 and "max_turns=1" in text and json.loads(text)["error"]["type"] == "limit_reached"
    assert rollout["reward"].sum() == 3


def test_a_session_that_has_ended_is_gone():
    def play(player):
        player.complete("a")
        player.reward(1.0)
        return [refusal(player.complete, "a"), refusal(player.reward, 1.0), refusal(player.task)]

    with gateway() as env:
        _, (refusals,) = play_with(env, play)
    assert [status for status, _ in refusals] == [410] * 3 and "has ended" in refusals[0][1]


def test_a_session_ends_with_its_reward_and_not_when_it_is_removed():
    """Between the two, the thread of the episode has to be woken, which takes time on a busy machine."""
    sessions = Sessions(may_join=True)
    sessions.begin(Session(SimpleNamespace(is_present=False), task=None, seed=0))
    session = asyncio.run(sessions.find("a"))
    assert sessions.running("a") is session
    session.set_reward(1.0)
    with pytest.raises(GoneError, match="session a has ended"):
        sessions.running("a")
    with pytest.raises(GoneError, match="session a has ended"):
        asyncio.run(sessions.find("a"))
    with pytest.raises(GoneError):
        session.set_reward(1.0)


@pytest.mark.parametrize(
    "reward", ["1", True, [1.0], float("nan"), 1e308, 10**300, {"a": "b"}, {"a": float("inf")}, {"\ud800": 1}]
)
def test_a_wrong_reward_is_refused_and_another_taken(reward):
    def play(player):
        player.complete("a")
        refused = refusal(player.reward, reward)
        player.reward(1.0)
        return refused

    with gateway() as env:
        rollout, ((status, text),) = play_with(env, play)
    assert status == 400 and rollout["reward"].sum() == 1


def test_a_client_that_goes_away_does_not_end_the_episode():
    def play(player):
        host = player.session.split("/")[2]
        leaving = http.client.HTTPConnection(host)
        headers = {"Authorization": f"Bearer {player.key}"}
        leaving.request("POST", "/sessions/client-0/v1/completions", '{"prompt": "a"}', headers)
        leaving.close()
        answer = player.complete("a b")
        player.reward(1.0)
        return answer

    with gateway() as env:
        rollout, _ = play_with(env, play)
        assert env.metrics["programs/failed"] == 0
        assert env.metrics["programs/abandoned"] == env.metrics["programs/questions"] - 1
    assert rollout["reward"].sum() == 1


@pytest.mark.heavy
@pytest.mark.parametrize("request_line", ["GET ", "POST /v1/completions"])
def test_a_client_that_leaves_before_its_episode_does_not_take_it(request_line):
    """Whether it asks for its task, or for a stream."""

    def play(player):
        player.complete("a b")
        player.reward(1.0)

    with gateway(num_envs=1) as env:
        method, _, path = request_line.partition(" ")
        leaving = http.client.HTTPConnection(env.url.removeprefix("http://"))
        headers = {"Authorization": f"Bearer {env.token}"}
        body = '{"prompt": "a", "stream": true}' if path else None
        leaving.request(method, f"/sessions/leaving{path}", body, headers)
        time.sleep(0.3)
        leaving.close()
        time.sleep(0.3)
        rollout, _ = play_with(env, play)
    assert rollout["reward"].sum() == 1


def test_a_reward_without_a_question_takes_no_episode():
    def play(player):
        refused = refusal(Player(f"{player.session}-other", player.key).reward, 1.0)
        player.complete("a")
        player.reward(2.0)
        return refused

    with gateway() as env:
        rollout, ((status, _),) = play_with(env, play)
    assert status == 404 and rollout["reward"].sum() == 2


@pytest.mark.heavy
def test_the_time_of_a_program_begins_when_it_connects():
    """With fewer programs than slots nothing goes on, and nothing fails."""

    def play(player):
        if player.session.endswith("1"):
            time.sleep(2.5)
        player.complete("a")
        player.reward(1.0)

    with gateway(num_envs=2, timeout=1.0) as env:
        rollout, _ = play_with(env, play, num_clients=2)
        assert env.metrics["programs/timeouts"] == 0
    assert rollout["reward"].sum() == 2


@pytest.mark.heavy
def test_a_closed_environment_leaves_no_thread_behind():
    def play(player):
        return refusal(player.complete, "a b")[0]

    def start():
        env.start_episodes(3, seed=1)

    with gateway(num_envs=3) as env, playing(env, play, 1) as (client,):
        starting = threading.Thread(target=start)
        starting.start()
        time.sleep(0.5)
        env.close()
        assert client.result() == 410
        starting.join(20)
        assert not starting.is_alive()


def test_a_long_session_name_or_one_with_a_slash_is_refused():
    with gateway() as env:
        for name in ("na/me", "n" * 201, "n me"):
            client = Player(env.url, f"{env.token}:{name}")
            status, text = refusal(client.complete, "a")
            assert status == 400 and "the session is named" in text


def test_words_that_continue_a_text_stay_in_its_row():
    """The tokenizer writes a space before a word, which the program does not see."""

    def play(player):
        text = "a"
        for _ in range(3):
            text += " " + player.complete(text)
        player.reward(1.0)
        return text

    with gateway(num_envs=1, allowed=["good", "bad"]) as env:
        _, (text,) = play_with(env, play)
        assert set(text.split()[1:]) <= {"good", "bad"} and env.metrics["programs/questions"] == 3


@pytest.mark.parametrize(
    "fields", [{"tool_calls": []}, {"annotations": []}, {"refusal": ""}, {"reasoning_content": None}]
)
def test_empty_fields_of_an_answer_do_not_begin_a_row(fields):
    tokenizer = chat_tokenizer()

    def play(player):
        chat = [{"role": "user", "content": "a b"}]
        for _ in range(2):
            chat += [player.chat(chat, max_tokens=3) | fields, {"role": "user", "content": "c"}]
        player.reward(1.0)

    with gateway(tokenizer=tokenizer) as env:
        play_with(env, play, policy=reader_policy(tokenizer))
        assert env.metrics["programs/rows"] == 1


@pytest.mark.heavy
def test_clients_wait_until_an_episode_begins():
    def play(player):
        player.complete("a")
        player.reward(1.0)

    with gateway(num_envs=1) as env:
        with playing(env, play, 5) as clients:
            time.sleep(0.5)
            assert not any(client.done() for client in clients)
            for seed in range(5):
                collect(env, word_policy(), num_episodes=1, seed=seed)
        assert all(client.exception() is None for client in clients)


def test_clients_are_told_when_no_more_episodes_begin():
    def play(player):
        return refusal(player.complete, "a")

    with gateway() as env, playing(env, play, 4) as clients:
        time.sleep(0.3)
        env.close()
        for client in clients:
            status, text = client.result()
            assert status == 410 and "the training has ended" in text


def test_another_address_is_told_those_that_there_are():
    with gateway() as env:
        status, text = refusal(Player(env.url, env.token).send, "/reward", {"reward": 1})
    assert status == 404 and "POST /sessions/{session}/reward" in text


def test_a_stranger_gets_no_session():
    with gateway(PLAYER, tasks=["a"]) as env:
        assert refusal(Player(f"{env.url}/sessions/mine", env.token).task)[0] == 404
        for key in ("", "wrong", f"{env.token}x"):
            assert refusal(Player(f"{env.url}/sessions/mine", key).task)[0] == 401
        request = urllib.request.Request(f"{env.url}/v1/models", headers={"Host": "attacker.example:1"})
        request.add_header("Authorization", f"Bearer {env.token}")
        assert refusal(urllib.request.urlopen, request)[0] == 401
    with gateway() as env:
        client = Player(f"{env.url}", env.token)
        assert "names no session" in refusal(client.complete, "a")[1]


def test_an_environment_is_closed_with_its_port():
    with gateway() as env:
        url = env.url
        assert Player(url, env.token).send("/v1/models")["data"][0]["id"] == "policy"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"command": ""}, ValueError, "expected a program with its arguments"),
        ({"command": "no-such-program"}, FileNotFoundError, "no program 'no-such-program': for a line of a shell"),
        ({"command": __file__}, FileNotFoundError, "the file is not executable, chmod"),
        ({"max_token": 5}, TypeError, "Gateway has no 'max_token': did you mean 'max_new_tokens'"),
        ({"tokenizer": word_policy()}, TypeError, "tokenizer is a LMPolicy, expected its tokenizer"),
        ({"agents": 2}, TypeError, "Gateway has no agents"),
        ({"play": print}, TypeError, "use a ProgramVectorEnv"),
        ({"reward": print}, TypeError, "send their rewards to their session"),
        ({"tasks": []}, ValueError, "tasks is empty"),
        ({"port": 70_000}, OSError, "cannot listen on port 70000"),
        ({"token": "a:b"}, ValueError, "without a colon"),
        ({"max_turns": 0}, ValueError, "max_turns is 0"),
    ],
)
def test_wrong_arguments_are_told(options, error, words):
    with pytest.raises(error, match=words), gateway(**options):
        pass


# --- tools ------------------------------------------------------------------------------------------------------------

MULTIPLY = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}


def played_by_hand(env, *texts):
    """Rollout of one episode with these turns."""
    env.start_episodes(1, seed=0)
    write(env, *texts)
    return env.take_episodes()


@pytest.mark.parametrize("sends_back", ["all", "without ids and with an empty text"])
def test_calls_of_tools_are_answered_in_the_same_row(sends_back):
    def play(player):
        chat = list(QUESTION)
        message = player.chat(chat, tools=[MULTIPLY])
        (call,) = message["tool_calls"]
        if sends_back != "all":
            message = {"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]}
        chat += [message, {"role": "tool", "tool_call_id": call["id"], "content": "6"}]
        last = player.chat(chat, tools=[MULTIPLY])
        player.reward(float(last["content"] == "It is 6"))
        return call

    env_options = dict(tokenizer=byte_tokenizer(PLAIN), num_envs=1, max_new_tokens=400, max_length=3000)
    with gateway(**env_options) as env, playing(env, play, 1) as (client,):
        rollout = played_by_hand(env, SIX, "It is 6")
        assert env.metrics["programs/rows"] == 1 and rollout["reward"].sum() == 1
    assert client.result()["function"] == {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}


def test_a_call_that_is_no_unicode_is_answered():
    def play(player):
        message = player.chat(QUESTION, tools=[MULTIPLY])
        player.reward(1.0)
        return message["tool_calls"][0]["function"]

    env_options = dict(tokenizer=byte_tokenizer(PLAIN), num_envs=1, max_new_tokens=400, max_length=3000)
    with gateway(**env_options) as env, playing(env, play, 1) as (client,):
        played_by_hand(env, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>')
    assert client.result() == {"name": "f", "arguments": '{"a": "?"}'}


def test_calls_are_streamed_whole():
    openai = pytest.importorskip("openai", reason="the client of OpenAI, which comes with verifiers")

    def play(player):
        client = openai.OpenAI(base_url=f"{player.session}/v1", api_key=player.key, max_retries=0)
        stream = client.chat.completions.create(model="m", messages=QUESTION, tools=[MULTIPLY], stream=True)
        choices = [part.choices[0] for part in stream]
        player.reward(1.0)
        return choices

    env_options = dict(tokenizer=byte_tokenizer(PLAIN), num_envs=1, max_new_tokens=400, max_length=3000)
    with gateway(**env_options) as env, playing(env, play, 1) as (client,):
        played_by_hand(env, f"So: {SIX}")
    (choice,) = client.result()
    assert choice.finish_reason == "tool_calls" and choice.delta.content == "So:"
    (call,) = choice.delta.tool_calls
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "multiply", {"a": 2, "b": 3})


NAN = '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", '<tool_call>["a"]</tool_call>', NAN, "no call", ""])
def test_an_answer_without_a_readable_call_is_its_text(text):
    def play(player):
        message = player.chat(QUESTION, tools=[MULTIPLY])
        player.reward(1.0)
        return message

    env_options = dict(tokenizer=byte_tokenizer(PLAIN), num_envs=1, max_new_tokens=400, max_length=3000)
    with gateway(**env_options) as env, playing(env, play, 1) as (client,):
        played_by_hand(env, text)
    assert client.result() == {"role": "assistant", "content": text}
