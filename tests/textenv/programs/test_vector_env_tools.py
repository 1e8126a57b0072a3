"""Programs whose model calls tools of the environment before it answers."""

import numpy as np
import pytest
from transformers.utils import get_json_schema

from tests.helpers.programs import write
from tests.helpers.tool_calls import PLAIN, QUESTION, SIX, byte_tokenizer, multiply
from textenv import ProgramVectorEnv


def tool_env(play, num_envs=1, **options):
    return ProgramVectorEnv(
        play, tokenizer=byte_tokenizer(PLAIN), tools=[multiply], max_length=3000, num_envs=num_envs, **options
    )


def test_the_program_gets_the_answer_after_the_calls():
    """And its limits hold for that answer, too."""
    answers = []

    def play(ask):
        answers.append(ask(QUESTION, max_tokens=90, stop="."))
        return 1.0

    env = tool_env(play, max_new_tokens=400)
    env.start_episodes(1, seed=0)
    write(env, SIX, "It is 6. And more after the stop")
    rollout = env.take_episodes()
    assert answers == ["It is 6"] and rollout["reward"].sum() == 1
    assert env.metrics["tools/calls"] == 1 and env.metrics["programs/failed"] == 0


def test_a_conversation_goes_on_behind_the_result_of_a_tool():
    def play(ask):
        chat = list(QUESTION)
        answer = ask(chat)
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
        return float(ask(chat) == "yes")

    env = tool_env(play, max_new_tokens=400)
    env.start_episodes(1, seed=0)
    write(env, SIX, "It is 6", "yes")
    rollout = env.take_episodes()
    assert rollout["reward"].sum() == 1 and env.metrics["programs/rows"] == 1


def test_a_program_that_never_asks_is_left_out_beside_tools():
    def play(ask, rng):
        if rng.integers(2):
            return 1.0
        ask(QUESTION)
        return 1.0

    env = tool_env(play, 4, max_new_tokens=1)
    env.start_episodes(8, seed=0)
    while env.running.any():
        env.advance(np.full(4, env.tokenizer.eos_token_id))
    rollout = env.take_episodes()
    failed = env.metrics["programs/failed"]
    assert 0 < failed < 8 and rollout["mask"].any(1).sum() == 8 - failed


SCHEMA = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("kind", ["function", "async"])
def test_a_program_runs_the_calls_itself(kind):
    """The result is appended to the row, as a message of the role tool."""

    def results(message):
        for call in message["tool_calls"]:
            product = str(multiply(**call["function"]["arguments"]))
            yield {"role": "tool", "tool_call_id": call["id"], "content": product}

    def play(ask):
        message = ask.message(QUESTION, tools=[SCHEMA])
        last = ask.message([*QUESTION, message, *results(message)], tools=[SCHEMA])
        return float(last == {"role": "assistant", "content": "It is 6"})

    async def play_async(ask):
        message = await ask.message(QUESTION, tools=[SCHEMA])
        last = await ask.message([*QUESTION, message, *results(message)], tools=[SCHEMA])
        return float(last == {"role": "assistant", "content": "It is 6"})

    tokenizer = byte_tokenizer(PLAIN)
    env = ProgramVectorEnv(
        play if kind == "function" else play_async, tokenizer=tokenizer, num_envs=1, max_length=3000, max_new_tokens=400
    )
    env.start_episodes(1, seed=0)
    write(env, SIX, "It is 6")
    rollout = env.take_episodes()
    assert rollout["reward"].sum() == 1 and env.metrics["programs/rows"] == 1
    tokens = [rollout["observation"][0, 0].item(), *rollout["action"][0].tolist()]
    text = tokenizer.decode(tokens)
    assert '"name": "multiply"' in text and "<|im_start|>tool\n6<|im_end|>" in text


def test_other_tools_begin_another_row():
    def play(ask):
        ask.message(QUESTION, tools=[SCHEMA])
        ask.message(QUESTION + [{"role": "assistant", "content": "a"}, *QUESTION])
        return 1.0

    env = ProgramVectorEnv(play, tokenizer=byte_tokenizer(PLAIN), num_envs=1, max_length=3000, max_new_tokens=400)
    env.start_episodes(1, seed=0)
    write(env, "a", "b")
    env.take_episodes()
    assert env.metrics["programs/rows"] == 2


@pytest.mark.parametrize(
    ("tools", "words"),
    [("f", "expected a list of functions"), ([{"name": "f"}], "expected {'type': 'function'")],
)
def test_wrong_tools_are_refused_in_words(tools, words):
    told = []

    def play(ask):
        with pytest.raises(ValueError, match=words):
            ask.message(QUESTION, tools=tools)
        with pytest.raises(TypeError, match=r"ask.message\(messages, tools=...\)"):
            ask(QUESTION, tools=[SCHEMA])
        told.append(True)
        return float(len(ask(QUESTION)))

    env = ProgramVectorEnv(play, tokenizer=byte_tokenizer(PLAIN), num_envs=1, max_length=3000, max_new_tokens=400)
    env.start_episodes(1, seed=0)
    write(env, "a")
    assert told


def test_tools_of_environment_and_program_are_refused():
    def play(ask):
        with pytest.raises(ValueError, match="so has the environment"):
            ask.message(QUESTION, tools=[SCHEMA])
        return float(len(ask(QUESTION)))

    env = tool_env(play, max_new_tokens=400)
    env.start_episodes(1, seed=0)
    write(env, "a")
    assert env.take_episodes()["reward"].sum() == 1


class Mute:
    """Opponent that answers a batch."""

    def answer(self, questions):
        return ["hm"] * len(questions)


@pytest.mark.parametrize("opponent", [Mute(), lambda content: "hm"], ids=["batch", "function"])
@pytest.mark.parametrize("of_env", [True, False], ids=["of the environment", "of the question"])
def test_opponents_that_would_play_without_the_tools_are_refused(opponent, of_env):
    def play(first, second):
        schemas = [] if of_env else [get_json_schema(multiply)]
        for ask in (first, second):
            ask.message(QUESTION, tools=schemas)
        return 1.0, 0.0

    tools = [multiply] if of_env else None
    env = ProgramVectorEnv(
        play, agents=2, opponents={"old": opponent}, tokenizer=byte_tokenizer(PLAIN), tools=tools, max_length=3000,
        max_new_tokens=400, num_envs=2,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="the opponent 'old' cannot call functions: leave out tools="):
        env.start_episodes(2, seed=0)
        while env.running.any():
            env.advance(np.full(2, env.tokenizer.eos_token_id))
        env.take_episodes()
