"""Environments of the package verifiers: in process, and evaluated by its own command against ``algos serve``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from algos import LMPolicy, collect
from algos.extras.serving import PolicyAnswerer
from tests.helpers.packages import lazy_import
from textenv import TokenVectorEnv, Verifiers
from textenv.extras.verifiers import UnplayableError
from textenv.gateway.server import CompletionServer

lazy_import("verifiers", reason="needs the extra verifiers")

HELPERS = str(Path(__file__).parents[2] / "helpers")


BEGUN = []
"""Environments of the present test."""


@pytest.fixture(autouse=True)
def tasksets(monkeypatch):
    monkeypatch.syspath_prepend(HELPERS)
    yield
    while BEGUN:
        BEGUN.pop().close()


def begin(source, seed=0):
    env = source()
    BEGUN.append(env)
    return env, env.reset(seed=seed)[0]


def answer_to(observation):
    left, _, right = observation.removeprefix("Add.\n\n").removesuffix("=").partition("+")
    return str(int(left) + int(right))


@pytest.mark.heavy
def test_a_task_is_paid_by_its_weighted_rewards():
    source = Verifiers("adding_up")
    env, asked = begin(source)
    assert asked.startswith("Add.\n\n") and asked.endswith("=")
    assert env.step(f" {answer_to(asked)}\n") == ("", 2.25, True, False, {})
    env, asked = begin(source)
    assert env.step("I don't know") == ("", 0.0, True, False, {})
    assert begin(source, 1)[1] == begin(source, 1)[1]
    assert len({begin(source, seed)[1] for seed in range(8)}) > 3


def test_another_reset_and_closing_end_the_episode_before():
    env, _ = begin(Verifiers("adding_up"))
    first = env.playing
    env.reset(seed=1)
    second = env.playing
    env.close()
    env.close()
    assert first.cancelled() and second.cancelled()
    Verifiers("adding_up")().close()  # nothing was begun


def test_every_task_is_in_one_split():
    parts = [Verifiers("adding_up", split, config={"taskset": {"most": 6}}).tasks for split in ("train", "test")]
    prompts = [{task.data.prompt for task in part} for part in parts]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 24


def test_a_game_plays_the_user():
    source = Verifiers("guessing")
    env, asked = begin(source)
    assert asked == "guess a number"
    assert env.step("3") == ("higher", 0.0, False, False, {})
    assert env.step(" 8 ") == ("lower", 0.0, False, False, {})
    text, reward, terminated, truncated, _ = env.step("5")
    assert (text, reward, terminated, truncated) == ("", pytest.approx(1 + 0.1 * 2 + 0.01), True, False)


@pytest.mark.heavy
def test_the_turn_limit_ends_the_game_with_rewards():
    env, _ = begin(Verifiers("guessing", config={"player": {"max_turns": 2}}))
    assert env.step("3")[0] == "higher"
    text, reward, terminated, truncated, _ = env.step("3")
    assert (text, reward, terminated, truncated) == ("", pytest.approx(0.1 * 3 + 0.01), True, False)


@pytest.mark.parametrize(("said", "reason"), [("boom", "the judge is gone"), ("slow", "TimeoutError")])
def test_a_failed_or_slow_episode_is_truncated(said, reason, caplog):
    """The next one is sound."""
    source = Verifiers("adding_up", seconds=3.0 if said == "boom" else 0.3)
    env, _ = begin(source)
    assert env.step(said) == ("", 0.0, False, True, {})
    assert reason in caplog.text
    source.seconds = 30.0
    env, asked = begin(source)
    assert env.step(answer_to(asked))[1] == 2.25


def test_an_unreadable_answer_ends_its_own_episode(caplog):
    source = Verifiers("guessing")
    (bad, _), (good, _) = begin(source), begin(source)
    assert bad.step("seven")[1:4] == (0.0, False, True)
    assert "seven" in caplog.text
    assert good.step("5")[1] > 1


def test_a_policy_plays_it_token_by_token():
    policy = LMPolicy.load("embedded")
    digits = policy.tokenizer.convert_tokens_to_ids(list("0123456789"))
    options = {"max_prompt_tokens": 32, "max_new_tokens": 1, "max_turns": 1, "num_envs": 4}
    source = Verifiers("adding_up", config={"taskset": {"most": 4}})
    env = TokenVectorEnv(source, tokenizer=policy.tokenizer, allowed=lambda turn: digits, **options)
    rollout, paid = collect(env, policy, num_episodes=24, seed=1), []
    for row, sample in enumerate(env.samples(range(24))):
        asked, said = sample["prompt"].strip(), sample["completion"].strip()
        paid.append(2.0 * (said == answer_to(asked)) + 0.25)
        text = policy.tokenizer.decode([*rollout["observation"][row][:1], *rollout["action"][row]])
        assert text.startswith(f"{sample['prompt']}{sample['completion']}")
    assert rollout["reward"].sum(1).tolist() == paid and len(set(paid)) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": {"id": "user-sim"}}, "several agents.*algos serve"),
        ({"config": {"taskset": {"trouble": "file"}}}, "algos serve"),
        ({"config": {"taskset": {"trouble": "last file"}}}, "algos serve"),
        ({"seconds": 0}, "seconds is 0, expected a number above 0"),
        ({"split": "validation"}, "none of them in the split 'validation'"),
        ({"config": {"taskset": {"level": 1}}}, "taskset.level"),
    ],
)
def test_what_cannot_be_played_is_refused_at_once(arguments, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        Verifiers("adding_up", **arguments)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"id": "best-of-n", "n": 3}, "BestOfNEnv asks its agent for several answers at the same time"),
        ({"id": "isolated-verifier"}, "IsolatedVerifierEnv asks its agent for collect_artifacts"),
    ],
)
def test_environments_that_are_no_conversation_are_refused(config, words):
    """Of three attempts, only the last one was scored, for all three."""
    with pytest.raises(UnplayableError, match=f"{words}.*vf-eval"):
        begin(Verifiers("adding_up", config=config))
    env, asked = begin(Verifiers("adding_up", config={"id": "best-of-n", "n": 1}))
    assert env.step(answer_to(asked))[1:3] == (2.25, True)


def test_refusals_that_the_environment_hides_are_raised():
    """Of an environment that collects the errors of its attempts."""
    begun = Verifiers("adding_up", config={"id": "attempts", "at_once": True})()
    BEGUN.append(begun)
    for seed in range(2):
        with pytest.raises(UnplayableError, match="several answers at the same time"):
            begun.reset(seed=seed)


def test_an_attempt_after_a_failed_one_is_played():
    """The judge fails on "boom"; the next answer is scored."""
    env, asked = begin(Verifiers("adding_up", config={"id": "attempts"}))
    assert env.step("boom") == (asked, 0.0, False, False, {})
    assert env.step(answer_to(asked))[1:3] == (2.25, True)


def test_a_step_needs_a_reset():
    with pytest.raises(gymnasium.error.ResetNeeded):
        Verifiers("adding_up")().step("3")


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ImportError, match=r"extra verifiers"):
        Verifiers("adding_up")


@pytest.mark.long
def test_its_own_evaluation_runs_against_algos_serve(tmp_path):
    policy = LMPolicy.load("embedded")
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    answerer = PolicyAnswerer(policy, "critic", limit=40)
    with CompletionServer(answerer, token="secret") as server:
        words = ["adding_up", "--model", "critic", "--client.base-url", server.url, "--client.api-key-var", "MY_KEY",
                 "--env.agent.runtime.type", "subprocess", "--no-push", "--no-rich", "-n", "3",
                 "--sampling.max-tokens", "8", "--output-dir", str(tmp_path)]  # fmt: skip
        code = "from verifiers.v1.cli.eval.main import main; main()"
        places = os.pathsep.join([HELPERS, *sys.path])
        env = os.environ | {"MY_KEY": "secret", "PYTHONPATH": places}
        run = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True)
    answerer.close()
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.rglob("traces.jsonl")
    traces = [trace for line in path.read_text().splitlines() for trace in json.loads(line).get("traces", [])]
    assert len(traces) == 3 and all(trace["ok"] for trace in traces)
    for trace in traces:
        assert trace["calls"][0]["usage"]["completion_tokens"] <= 8
        said = trace["nodes"][-1]["message"]["content"].strip()
        right = float(said == trace["task"]["data"]["answer"])
        assert trace["rewards"]["right"] == {"score": right, "weight": 2.0}
