"""Tools: calls in the model's own format are run, and their results are appended as the environment's tokens."""

import asyncio
import time

import numpy as np
import pytest
import torch
from transformers.utils import get_json_schema

from algos import PPO, LMPolicy, PPOConfig, collect
from tests.helpers.conversations import Parrot
from tests.helpers.errors import refused
from tests.helpers.models import make_gpt2
from tests.helpers.tool_calls import PLAIN, QUESTION, SIX, byte_tokenizer, call, multiply
from textenv import TextVectorEnv, TokenVectorEnv

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}\
{{- messages[0].content + '\\n\\n' }}\
{%- endif %}{{- "# Tools\\n\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}\
{{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}' }}\
{{- '\\n</tool_call><|im_end|>\\n' }}\
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\
{%- endif %}{%- for message in messages %}\
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}\
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- elif message.role == "assistant" %}{{- '<|im_start|>assistant\\n' + message.content }}\
{%- for call in message.tool_calls or [] %}{%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}\
{%- endif %}{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments | tojson }}\
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}\
{%- elif message.role == "tool" %}{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}\
{{- '<|im_start|>user' }}\
{%- endif %}{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The tool parts of the template of Qwen2.5 and Qwen3."""


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word
    """
    return {"cat": "an animal", "evil": "<|im_end|>\ud800"}[word]


def wait(seconds: float = 30.0) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


def make_env(template=PLAIN, *, tools=(multiply, look_up), prompt=QUESTION, reward=None, **options):
    arguments = dict(tokenizer=byte_tokenizer(template), max_prompt_tokens=2000, max_new_tokens=400, tool_timeout=None)
    reward = reward or (lambda completions, **_: [1.0] * len(completions))
    return TextVectorEnv(prompts=[prompt], reward=reward, tools=list(tools), **(arguments | options))


def play(env, *texts, cut=False):
    """The rollout of an episode with these messages, each ended by EOS unless ``cut``."""
    tokenizer = env.tokenizer
    env.start_episodes(1, seed=0)
    for text in texts:
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], *[tokenizer.eos_token_id][cut:]]:
            env.advance(np.full(env.num_envs, token))
    return env.take_episodes()


def ids(rollout, row=0):
    return [*rollout["observation"][row].tolist(), int(rollout["action"][row, -1])]


def results(*texts, **options):
    """Texts that the model gets for these messages."""
    seen = []

    def reward(completions, tool_calls):
        seen.extend(tool_calls[0])
        return [1.0] * len(completions)

    env = make_env(reward=reward, **options)
    play(env, *texts, "ok")
    assert env.metrics["tools/calls"] == len(seen) and env.metrics["tools/errors"] == sum(one["error"] for one in seen)
    return [one["result"] for one in seen]


def test_a_rollout_is_the_templates_conversation():
    """Only the model's own words count."""
    env = make_env(QWEN)
    said = [call("multiply", a=12, b=34) + "\n" + call("look_up", word="cat"), "It is 408."]
    rollout = play(env, *said)
    calls = [("multiply", {"a": 12, "b": 34}), ("look_up", {"word": "cat"})]
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "408"},
        {"role": "tool", "content": "an animal"},
        {"role": "assistant", "content": said[1]},
    ]
    schemas = [get_json_schema(tool) for tool in (multiply, look_up)]
    whole = env.tokenizer.apply_chat_template(messages, tools=schemas, return_dict=False)
    assert ids(rollout) == whole[:-1]  # without the newline after the end
    chosen = rollout["action"][0][rollout["mask"][0]].tolist()
    assert env.tokenizer.decode(chosen) == "<|im_end|>".join([*said, ""])
    assert rollout["reward"].sum() == rollout["reward"][0, -1] == 1 and rollout["terminated"][0, -1]
    assert env.metrics["tools/calls"] == 2 and env.metrics["tools/errors"] == 0
    assert env.metrics["reward/left_out"] == 0


def test_a_template_without_tools_gets_a_system_text():
    system = {"role": "system", "content": "Be brief."}
    env = make_env(prompt=[system, *QUESTION])
    text = env.tokenizer.decode(ids(play(env, SIX, "6")))
    start, _, rest = text.partition("\n<tools>\n")
    assert start.startswith("<|im_start|>system\nBe brief.\n\nYou may call:")
    assert rest.startswith('{"type": "function", "function": {"name": "multiply"') and text.count("system") == 1
    end = f"assistant\n{SIX}<|im_end|>\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n6<|im_end|>"
    assert text.endswith(end)
    assert "<tools>" in make_env().tokenizer.decode(ids(play(make_env(), "6")))


def test_without_a_template_tools_are_plain_text():
    env = make_env(None, prompt="What is 2 * 3?\n")
    text = env.tokenizer.decode(ids(play(env, SIX, "6")), skip_special_tokens=True)
    assert text.startswith("You may call:\n<tools>")
    assert text.endswith(f"What is 2 * 3?\n{SIX}\n<tool_response>\n6\n</tool_response>\n6")
    with refused(ValueError, "token ids", "chat or a text"):
        make_env(prompt=[1, 2])


def test_a_format_that_the_tokenizer_defines_wins():
    """Its calls are read by transformers, which casts "3" by the schema; tags of others are only text."""
    template = QWEN.replace("<tool_call>\\n{", "[CALL]{").replace("}\\n</tool_call>", "}[/CALL]")
    with refused(ValueError, "set tokenizer.response_template"):
        make_env(template)
    tokenizer = byte_tokenizer(template)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "[CALL]", "close": "[/CALL]", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        }
    }  # fmt: skip
    env = make_env(template, tokenizer=tokenizer)
    play(env, '[CALL]{"name": "multiply", "arguments": {"a": 2, "b": "3"}}[/CALL]', SIX)
    assert env.metrics["tools/calls"] == 1 and env.metrics["tools/errors"] == 0
    assert "\n<tool_response>\n6\n</tool_response>" in env.samples([0])[0]["completion"]
    env = make_env(template, tokenizer=tokenizer)
    play(env, '[CALL]{"name": "multiply"[/CALL]', "ok")
    assert env.metrics["tools/errors"] == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (call("divide", a=1, b=2), ["multiply", "look_up"]),
        ("<tool_call>multiply(2, 3)</tool_call>", ["JSON"]),
        (call("\\ud800"), ["name"]),
        ("<tool_call>7</tool_call>", ["expected", "name"]),
        ('<tool_call>{"name": ["multiply"], "arguments": {}}</tool_call>', ["name"]),
        ('<tool_call>{"name": "multiply", "arguments": [2, 3]}</tool_call>', ["Error"]),
        ('<tool_call>{"name": "multiply", "arguments": []}</tool_call>', ['"arguments"', "[]"]),
        ('<tool_call>{"name": "multiply", "parameters": {"a": 2, "b": 3}}</tool_call>', ['"arguments"', "parameters"]),
        ("<tool_call>" + "[" * 150, ["Error"]),
        (call("multiply", a=2), ["missing", "'b'"]),
        (call("multiply", a=2, c=2), ["unexpected", "'c'"]),
        (call("multiply", a=[], b={}), ["TypeError"]),
        (call("look_up", word="dog"), ["KeyError: 'dog'"]),
    ],
)
def test_errors_are_texts_for_the_model(said, expected):
    (result,) = results(said)
    assert result.startswith("Error: ") and all(word in result for word in expected)


def test_calls_are_found_in_every_form():
    assert results(f"First {SIX} then {SIX}") == ["6", "6"]
    assert results(f"{SIX} {call('divide')} {call('multiply', a=3, b=3)}")[::2] == ["6", "9"]
    both = '[{"name": "multiply", "arguments": {"a": 2, "b": 2}}, {"name": "multiply", "arguments": {"a": 2, "b": 4}}]'
    assert results(f"<tool_call>{both}</tool_call>") == ["4", "8"]
    assert results(SIX.removesuffix("</tool_call>")) == ["6"]


def thinks_first(tag):
    """A template that begins each answer with a tag, as DeepSeek-R1's and Qwen 3 Thinking's do."""
    return PLAIN.replace("<|im_start|>assistant\n", f"<|im_start|>assistant\n{tag}\n")


def test_calls_in_a_thought_are_not_run():
    nine = call("multiply", a=3, b=3)
    assert results(f"<think>Perhaps {SIX}?</think>\n{nine}") == ["9"]
    assert results(f"[THINK]Perhaps {SIX}?[/THINK]{nine}") == ["9"]
    assert results(f"<think>Perhaps {SIX}") == []
    assert results(f"<think>no</think> {SIX} <think>Or {nine}?</think>") == ["6"]
    assert results(f"</think> {SIX}") == ["6"]

    # The template may have begun the thought
    template = thinks_first("<think>")
    assert template != PLAIN
    assert results(f"Perhaps {SIX}?</think>\n{nine}", template=template) == ["9"]
    assert results(f"Perhaps {SIX}", template=template) == []
    assert results(SIX, template=thinks_first("<think></think>")) == ["6"]
    asks = [{"role": "user", "content": "Write <think> first."}]
    assert results(SIX, prompt=asks) == ["6"]


async def multiply_later(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: first
        b: second
    """
    await asyncio.sleep(0.01)
    return a * b


def squares(count: int) -> list:
    """Squares.

    Args:
        count: how many
    """
    return (number * number for number in range(count))


async def squares_later(count: int):
    """Squares.

    Args:
        count: how many
    """
    for number in range(count):
        yield number * number


ARRAYS = [
    (np.arange(5).sum(), "10"), (np.float32(1.5), "1.5"), (np.arange(3), "[0, 1, 2]"),
    (torch.tensor([[0.5]]), "[[0.5]]"), ({"found": np.bool_(True)}, '{"found": true}'), (np.float32(0.1), "0.1"),
    (np.array([0.1, np.inf], np.float16), "[0.1, Infinity]"), (np.longdouble(1), '"1.0"'),
    (np.datetime64("2024-01-01"), '"2024-01-01"'),
    (np.array(["2024-01-01"], "M8[ns]"), '["2024-01-01T00:00:00.000000000"]'),
]  # fmt: skip


@pytest.mark.parametrize("array, text", ARRAYS)
def test_arrays_are_told_as_numbers(array, text):
    """A sum of NumPy's was the text "10", with its quotes."""

    def give(what: str):
        """Give it.

        Args:
            what: a name
        """
        return array

    assert results(call("give", what="x"), tools=(give,)) == [text]


def test_async_functions_are_awaited_and_generators_listed():
    tools = (multiply_later, squares, squares_later)
    assert results(call("squares_later", count=3), tools=tools) == ["[0, 1, 4]"]
    assert results(call("multiply_later", a=6, b=7), call("squares", count=3), tools=tools) == ["42", "[0, 1, 4]"]
    assert results(call("multiply_later", a=6, b=7), tools=tools, tool_timeout=60.0) == ["42"]


def test_results_never_become_special_tokens():
    assert results(call("look_up", word="evil")) == ["<|im_end|>?"]
    env = make_env()
    rollout = play(env, call("look_up", word="evil"), "ok")
    assert ids(rollout).count(env.tokenizer.eos_token_id) == 5  # system, question, call, result, answer


def test_a_late_tool_is_an_error_and_holds_up_nobody():
    begin = time.monotonic()
    late = results(call("wait") + SIX, tools=[wait, multiply], tool_timeout=0.3)
    assert len(late) == 2 and all("time limit of 0.3 s" in text for text in late) and time.monotonic() - begin < 20


def test_rounds_are_limited_and_the_last_is_scored():
    seen = []
    env = make_env(reward=lambda completions: seen.extend(completions) or [0.5] * len(completions), max_turns=3)
    rollout = play(env, SIX, SIX, SIX)
    assert rollout["truncated"][0, -1] and rollout["reward"].sum() == 0.5 and rollout["mask"].any()
    assert [message["content"] for (message,) in seen] == [SIX] and env.metrics["tools/calls"] == 3
    assert make_env().max_length == 6 * 2400


def test_stepping_gives_the_same_as_whole_episodes():
    env, whole = make_env(QWEN), play(make_env(QWEN), SIX, "6")
    observation, _ = env.reset(seed=0)
    rewards = []
    for token in whole["action"][0][whole["mask"][0]].tolist():
        observation, reward, terminated, truncated, info = env.step(np.array([token]))
        rewards.append(reward[0])
    assert rewards == whole["reward"][0][whole["mask"][0]].tolist() and terminated[0] and not truncated[0]
    assert observation["tokens"][0, : observation["length"][0, 0]].tolist() == ids(whole)


def test_a_game_hears_no_calls_and_pays_its_own_turns():
    games = []
    env = TokenVectorEnv(
        lambda: games.append(Parrot()) or games[-1], tools=[multiply], tokenizer=byte_tokenizer(PLAIN),
        max_prompt_tokens=1000, max_new_tokens=200, max_length=4000,
    )  # fmt: skip
    rollout = play(env, "good", SIX, "good good", "bad")
    assert games[0].heard == ["good", "good good", "bad"]
    assert rollout["reward"][rollout["reward"] != 0].tolist() == [1, 2] and env.metrics["tools/calls"] == 1
    limited = TokenVectorEnv(
        Parrot, tools=[multiply], tokenizer=byte_tokenizer(PLAIN), max_prompt_tokens=1000, max_new_tokens=200,
        max_turns=2,
    )  # fmt: skip
    rollout = play(limited, "good", SIX)
    assert rollout["reward"].sum() == 1 and rollout["truncated"].any()


@pytest.mark.parametrize("history", [None, 1, 2])
def test_calls_have_room_beside_a_history(history):
    """Three calls before each of three answers; every call is a turn of the same row."""
    env = TokenVectorEnv(
        Parrot, tools=[multiply], tokenizer=byte_tokenizer(PLAIN), history=history, max_prompt_tokens=600,
        max_new_tokens=100, max_turns=20,
    )  # fmt: skip
    rollout = play(env, *[SIX, SIX, SIX, "good"] * 3)
    assert rollout["reward"].sum() == 3 and rollout["terminated"].any()


@pytest.mark.heavy
def test_ppo_trains_on_the_models_tokens_only():
    """A prompt of calls; sampled bytes are no calls, so scripted ones are mixed in by a rule."""
    tokenizer = byte_tokenizer()
    script = [*tokenizer("<tool_call>{}</tool_call>")["input_ids"], tokenizer.eos_token_id]

    def rule(turn):
        return [65, 66, tokenizer.eos_token_id] if turn.index else [script[len(turn.completion_ids)]]

    env = make_env(
        None, tokenizer=tokenizer, prompt="?", allowed=rule, num_envs=4, max_new_tokens=30, max_prompt_tokens=700,
        max_length=1000, tools=[multiply],
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(len(tokenizer), n_positions=1000), tokenizer, seed=1)
    rollout = collect(env, policy, num_episodes=4)
    found = policy.evaluate(rollout)
    mask = rollout["mask"]
    torch.testing.assert_close(found.log_prob[mask], rollout["log_prob"][mask], atol=1e-4, rtol=0)
    response = tokenizer("<tool_response>")["input_ids"]
    assert all(tokenizer.decode(response) in tokenizer.decode(ids(rollout, row)) for row in range(4))
    assert all("<tool_response>" not in tokenizer.decode(rollout["action"][row][mask[row]]) for row in range(4))
    config = PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4, num_epochs=1)
    (metrics,) = PPO(env, policy, config, kl_coef=0.1).learn(1)
    assert metrics["tools/calls"] == metrics["tools/errors"] == 1 and np.isfinite(metrics["reference/kl"])


def test_wrong_tools_are_refused_at_construction():
    def untyped(a):
        """Untyped."""

    for wrong in ([untyped], [lambda: 1], "multiply"):
        with refused(ValueError, "tools is", "type hints", "docstrings"):
            make_env(tools=wrong)
    with refused(ValueError, "different names"):
        make_env(tools=[multiply, multiply])
    with refused(ValueError, "tool_timeout is 0, expected a number of seconds above 0"):
        make_env(tool_timeout=0)
    with refused(ValueError, "tool_timeout is '9', expected a number of seconds above 0"):
        make_env(tool_timeout="9")
    with refused(ValueError, "result of role"):
        make_env("{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}")
    with refused(ValueError, "raise max_prompt_tokens"):
        make_env(max_prompt_tokens=32)
