"""Programs whose model calls tools of the environment before it answers."""

import numpy as np

from tests.helpers.tool_calls import PLAIN, QUESTION, SIX, byte_tokenizer, multiply
from textenv import ProgramVectorEnv


def tool_env(play, num_envs=1, **options):
    return ProgramVectorEnv(
        play, tokenizer=byte_tokenizer(PLAIN), tools=[multiply], max_length=3000, num_envs=num_envs, **options
    )


def write(env, *texts):
    """Play one episode with these turns."""
    for text in texts:
        ids = env.tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in [*ids, env.tokenizer.eos_token_id]:
            if env.running.any():
                env.advance(np.array([token]))


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
