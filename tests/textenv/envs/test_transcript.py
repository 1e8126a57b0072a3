"""`earlier_turns="template"`: each later turn reads the chat as its template writes it, against transformers' own."""

import copy

import numpy as np
import pytest
import torch
from transformers.utils import get_json_schema

from algos import Collector
from algos.advantages import discounted_returns
from tests.helpers.chat_templates import template_tokenizer
from tests.helpers.conversations import CHAT_WORDS, Parrot, chat_tokenizer
from tests.helpers.models import make_gpt2
from tests.helpers.programs import played, program_env, reader_policy, turns_of, write
from tests.helpers.small_agents import agent_of, lm_policy
from tests.helpers.text_envs import make_env
from tests.helpers.tool_calls import call, multiply
from textenv import TokenVectorEnv
from textenv.rollout import episode_of_row, join_episodes, number_in_episode

NAMES = ["qwen 3", "r1", "chatml"]
ANSWERS = ["<think>\nwell\n</think>\n\ngood good", "<think>\nagain", "good"]
UNREADABLE = [CHAT_WORDS.index(word) for word in ("<pad>", "<|im_start|>")]
"""Tokens that the text of an answer hides."""
ASKED = [{"role": "user", "content": "what is 2 * 3?"}]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def asked(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)


def games(name, **options):
    arguments = dict(tokenizer=template_tokenizer(name), num_envs=1, max_prompt_tokens=100, max_new_tokens=100)
    return TokenVectorEnv(Parrot, **arguments, earlier_turns="template", **options)


def played_game(name, **options):
    env = games(name, **options)
    env.start_episodes(1, seed=0)
    write(env, *ANSWERS)
    return env.take_episodes(), env


@pytest.mark.parametrize("name", NAMES)
def test_later_turns_are_rows_of_the_template(name):
    rollout, env = played_game(name)
    (first,) = [turn.prompt.messages for turn in env.scored_turns.turns if turn.index == 0]
    chat = list(first)
    contexts = []
    for answer, reply in zip(ANSWERS, ["a a", "b", ""], strict=True):
        contexts.append(asked(env.tokenizer, chat))
        chat += [assistant(answer), user(reply)]
    rows = turns_of(rollout)
    assert [context for ((context, _),) in rows] == contexts
    written = [env.tokenizer.decode(ids, skip_special_tokens=False) for ((_, ids),) in rows]
    assert written == [answer + env.tokenizer.eos_token for answer in ANSWERS]

    # One episode, of which each turn has earned its reward
    assert episode_of_row(rollout).tolist() == [0, 0, 0] and number_in_episode(rollout).tolist() == [0, 1, 2]
    assert rollout["reward"].sum(1).tolist() == [2, 0, 1]
    assert rollout["terminated"].any(1).tolist() == [False, False, True]
    episode = join_episodes(rollout)
    columns = {name: episode[name] for name in ("reward", "terminated", "truncated", "mask")}
    returns = discounted_returns(**columns, gamma=1.0)[episode["mask"]]
    assert [returns[0].item(), returns[-1].item()] == [3, 1]
    assert all(turn.prompt.messages == first for turn in env.scored_turns.turns)


def test_a_transcript_keeps_the_thoughts():
    """Without the option, and with the same answers."""
    env = TokenVectorEnv(
        Parrot, tokenizer=template_tokenizer("qwen 3"), num_envs=1, max_prompt_tokens=100, max_new_tokens=100
    )
    env.start_episodes(1, seed=0)
    write(env, *ANSWERS)
    ((*_, (context, _)),) = turns_of(env.take_episodes())
    assert "well" in env.tokenizer.decode(context)


@pytest.mark.parametrize("name", NAMES)
def test_steps_show_the_same_contexts(name):
    rollout, env = played_game(name)
    contexts = [context for ((context, _),) in turns_of(rollout)]
    env = games(name)
    state, _ = env.reset(seed=0)
    seen = [state]
    rewards = []
    for answer in ANSWERS:
        for token in [*env.tokenizer(answer, add_special_tokens=False)["input_ids"], env.tokenizer.eos_token_id]:
            state, reward, *_ = env.step(np.array([token]))
        seen.append(state)
        rewards.append(reward.item())
    observed = [state["tokens"][0, : state["length"][0, 0]].tolist() for state in seen[:3]]
    assert observed == contexts and rewards == [2, 0, 1]


def test_a_history_is_rendered_from_its_first_turn_on():
    rollout, env = played_game("qwen 3", history=2)
    (_, second, third) = [context for ((context, _),) in turns_of(rollout)]
    first = env.scored_turns.turns[0].prompt.messages
    assert second == asked(env.tokenizer, [*first, assistant(ANSWERS[0]), user("a a")])
    assert third == asked(env.tokenizer, [user("a a"), assistant(ANSWERS[1]), user("b")])


def test_results_of_tools_are_rendered():
    seen = []

    def reward(prompts, completions, tool_calls):
        seen.append((prompts, completions, tool_calls))
        return [5.0] * len(prompts)

    env = make_env(
        reward, 1, prompts=[ASKED], tokenizer=template_tokenizer("qwen 3"), tools=[multiply], max_new_tokens=300,
        max_prompt_tokens=700, earlier_turns="template",
    )  # fmt: skip
    env.start_episodes(1, seed=0)
    thought = "<think>\nI ask\n</think>\n\n"
    write(env, thought + call("multiply", a=2, b=3) + call("multiply", a=0, b=1), "<tool_call>\n{", "six")
    rollout = env.take_episodes()

    calls = []
    for index, arguments in enumerate([{"a": 2, "b": 3}, {"a": 0, "b": 1}]):
        function = {"name": "multiply", "arguments": arguments}
        calls.append({"id": f"{index:09d}", "type": "function", "function": function})
    chat = [*ASKED, assistant(thought.strip(), tool_calls=calls)]
    chat += [{"role": "tool", "content": "6"}, {"role": "tool", "content": "0"}]
    contexts = [context for ((context, _),) in turns_of(rollout)]
    schemas = [get_json_schema(multiply)]
    assert contexts[:2] == [asked(env.tokenizer, messages, tools=schemas) for messages in (ASKED, chat)]
    assert contexts[2][: len(contexts[1]) - 30] == contexts[1][:-30] and "Error" in env.tokenizer.decode(contexts[2])

    # The reward is that of the episode, and knows its prompt
    ((prompts, completions, tool_calls),) = seen
    assert prompts == [ASKED] and completions == [[assistant("six")]] and len(tool_calls[0]) == 3
    assert rollout["reward"].sum(1).tolist() == [0, 0, 5] and episode_of_row(rollout).tolist() == [0, 0, 0]


def test_a_prompt_that_begins_an_answer_is_continued_first():
    begun = [*ASKED, assistant("it is ")]
    env = make_env(
        lambda completions, **_: [0.0] * len(completions), 1, prompts=[begun], tokenizer=template_tokenizer("chatml"),
        tools=[multiply], max_new_tokens=300, max_prompt_tokens=700, earlier_turns="template",
    )  # fmt: skip
    env.start_episodes(1, seed=0)
    write(env, "hard: " + call("multiply", a=2, b=3), "six")
    (_, ((second, _),)) = turns_of(env.take_episodes())
    text = env.tokenizer.decode(second)
    assert text.count("it is hard:") == 1 and text.count("<|im_start|>assistant") == 2


@pytest.mark.parametrize("name", NAMES)
def test_each_question_of_a_program_is_a_row(name):
    tokenizer = template_tokenizer(name)
    questions = []

    def play(ask):
        chat = list(ASKED)
        for reply in ("a", "b", "c"):
            questions.append(list(chat))
            chat += [assistant(ask(chat)), user(reply)]
        text = ask("a text")
        ask(text.join(["a text", "!"]))
        return 1.0

    env = program_env(play, 1, tokenizer=tokenizer, max_length=400, max_new_tokens=100, earlier_turns="template")
    env.start_episodes(1, seed=0)
    write(env, *ANSWERS, "four", "five")
    rollout = env.take_episodes()
    rows = turns_of(rollout)
    assert [len(turns) for turns in rows] == [1, 1, 1, 2]  # texts are continued
    contexts = [turns[0][0] for turns in rows]
    assert contexts[:3] == [asked(tokenizer, chat) for chat in questions]
    assert env.metrics["programs/rows"] == 4 and rollout["reward"].sum().item() == 1


@pytest.mark.heavy
def test_an_update_counts_each_turn_once():
    tokenizer = template_tokenizer("qwen 3")
    policy = lm_policy(lambda: make_gpt2(len(tokenizer), n_positions=400), tokenizer=tokenizer, seed=1)
    env = TokenVectorEnv(
        Parrot, tokenizer=tokenizer, num_envs=2, max_prompt_tokens=60, max_new_tokens=6, max_length=400,
        earlier_turns="template",
    )  # fmt: skip
    agent = agent_of(env, policy, num_episodes=4)
    rollout = agent.collector.collect(num_episodes=4)
    assert len(rollout) == 12 and torch.equal(rollout["mask"].sum(1) > 0, torch.ones(12, dtype=torch.bool))
    agent.learn(4)


@pytest.mark.heavy
def test_each_agent_of_a_game_has_its_rows():
    tokenizer = chat_tokenizer()

    def play(first, second):
        chat = [user("a")]
        for reply in ("b", "c"):
            contexts.append(list(chat))
            contexts.append([user("d"), *chat])
            chat += [assistant(first(chat)), user(reply)]
            second([user("d"), *contexts[-2]])
        return 1.0, -1.0

    contexts = []
    rollout, env = played(
        play, 1, policy=reader_policy(tokenizer), episodes=4, agents=2, tokenizer=tokenizer, max_length=200,
        forbidden=UNREADABLE, earlier_turns="template",
    )  # fmt: skip
    assert rollout["agent"][:, 0].tolist() == [0, 0, 1, 1] * 2 and env.metrics["programs/rows"] == 4
    rows = [context for ((context, _),) in turns_of(rollout)]
    by_agent = [contexts[i] for game in (0, 4) for i in (game, game + 2, game + 1, game + 3)]
    assert rows == [asked(tokenizer, chat) for chat in by_agent]
    assert rollout["reward"].sum(1).tolist() == [0, 1, 0, -1] * 2


@pytest.mark.heavy
def test_rows_do_not_depend_on_the_slots():
    tokenizer = template_tokenizer("qwen 3")
    policy = lm_policy(lambda: make_gpt2(len(tokenizer), n_positions=400), tokenizer=tokenizer, seed=1)

    def texts(num_envs, **options):
        env = TokenVectorEnv(
            Parrot, tokenizer=tokenizer, num_envs=num_envs, max_prompt_tokens=60, max_new_tokens=6, max_length=400,
            earlier_turns="template",
        )  # fmt: skip
        rollout = Collector(env, copy.deepcopy(policy), seed=1, **options).collect(num_episodes=6)
        return [(episode, turns_of(rollout[row : row + 1])) for row, episode in enumerate(episode_of_row(rollout))]

    expected = texts(1)
    assert len(expected) == 18 and texts(4) == expected
