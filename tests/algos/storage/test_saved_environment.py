"""What a text environment accepts in a training is accepted from the saved agent, too."""

import json

import pytest

from algos.cli import main
from algos.storage.saved_environment import saved_arguments
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_tokenizer
from textenv import TextVectorEnv

ENV_ID = "textenv/Copy-v0"
ACCEPTED = [
    {"stop": "."},
    {"stop": 5},
    {"stop": [".", "a b", 5]},
    {"stop": []},
    {"forbidden": 5},
    {"forbidden": [5, 6]},
    {"forbidden": []},
    {"allowed": ["a b", "good"]},
    {"allowed": [5, 6]},
    {"allowed": None},
    {"tool_timeout": None},
    {"tool_timeout": 3},
    {"tool_timeout": 0.5},
    {"earlier_turns": "transcript"},
    {"overlong": "skip"},
    {"max_prompt_tokens": 40, "max_new_tokens": 7, "min_new_tokens": 2, "max_turns": 3, "max_length": 60},
    {"max_turns": None, "max_length": None},
    {"autoreset_mode": "SameStep"},
    {"score_while_generating": True},
    {"chat_template_kwargs": None},
    {"chat_template_kwargs": {"pages_shown": [{"a title": "two words", "pages": 3.5}], "date": "1 May", "tag": None}},
    {"chat_template_kwargs": {"think": False}},
    {"render_mode": "rgb_array"},
    {"render_mode": None},
]  # fmt: skip
REFUSED = [
    ({"stop": [2.5]}, "stop has 2.5, expected texts and token ids"),
    ({"stop": [True]}, "stop has True"),
    ({"stop": {".": 1}}, "stop is {'.': 1}"),
    ({"stop": None}, "stop is None"),
    ({"stop": ""}, "stop has an empty text"),
    ({"forbidden": 2.5}, "forbidden is 2.5, expected a list of token ids"),
    ({"forbidden": ["5"]}, "forbidden is .'5'."),
    ({"forbidden": [True, False]}, "forbidden is .True, False."),
    ({"forbidden": [[5]]}, "forbidden is ..5.."),
    ({"tool_timeout": "9"}, "tool_timeout is '9', expected a number of seconds above 0"),
    ({"tool_timeout": True}, "tool_timeout is True"),
    ({"tool_timeout": float("inf")}, "tool_timeout is inf"),
    ({"score_while_generating": "no"}, "score_while_generating is 'no', expected True or False"),
]  # fmt: skip


def saved(arguments):
    """The environment of a saved agent with these arguments."""
    return {"id": ENV_ID, "kwargs": json.loads(json.dumps(arguments))}


def make_env(arguments):
    tokenizer = make_tokenizer(WORDS)
    tokenizer.chat_template = "{{ pages_shown }} {{ date }} {{ think }} {{ tag }}"
    return TextVectorEnv(prompts=["a"], reward=len, tokenizer=tokenizer, **arguments)


@pytest.mark.parametrize("arguments", ACCEPTED, ids=str)
def test_what_training_accepts_is_evaluated(arguments):
    env = make_env(arguments)
    again = saved_arguments(saved(arguments), replaced=())
    remade = make_env(again)
    assert again == arguments
    assert remade.limits == env.limits and list(remade.forbidden) == list(env.forbidden)


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=str)
def test_what_an_evaluation_would_refuse_is_not_trained(arguments, words):
    with refused((TypeError, ValueError), words):
        make_env(arguments)


def test_another_kind_of_value_is_used_if_it_is_named():
    environment = saved({"max_turns": 10**9, "max_length": 90})
    with refused(ValueError, "max_turns of textenv/Copy-v0 is 1000000000, expected an integer", "--env-kwargs"):
        saved_arguments(environment, replaced=())
    assert saved_arguments(environment, replaced=("max_turns",)) == {"max_length": 90}


@pytest.mark.heavy
def test_a_run_with_a_single_stop_is_evaluated(tmp_path, capsys):
    run = tmp_path / "run"
    short = ["--total-steps", "8", "--config.num-episodes", "4", "--num-episodes", "2", "--json"]
    main(["train", ENV_ID, "--run-dir", str(run), "--env-kwargs", '{"stop": ".", "forbidden": 5}', *short])
    capsys.readouterr()
    main(["evaluate", str(run), "--num-episodes", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2
