"""Environments of tools on a real OpenEnv server, in a process of its own, on the loopback."""

import pytest

from tests.helpers.openenv_servers import free_port
from tests.helpers.packages import lazy_import
from tests.helpers.programs import write
from tests.helpers.tool_calls import PLAIN, byte_tokenizer, call
from textenv.tasks.openenv import calls_tools_at, make_tool_env

lazy_import("openenv", reason="needs a server: pip install openenv")
lazy_import("fastmcp", reason="needs a server of tools: pip install fastmcp")
lazy_import("websockets", reason="install the extra: pip install '.[openenv]'")


@pytest.fixture(scope="module")
def url(servers):
    port = free_port()
    server = servers.start("tool_server.py", port, ports=[port])
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def tool_env(url, **options):
    arguments = {"tokenizer": byte_tokenizer(PLAIN), "num_envs": 1, "max_length": 4000, "max_new_tokens": 400}
    return make_tool_env(url=url, **(arguments | options))


def played_by_hand(env, *texts):
    """Rollout of one episode with these turns, and all that was read and written."""
    env.start_episodes(1, seed=0)
    write(env, *texts)
    rollout = env.take_episodes()
    row = rollout[0]
    read = env.tokenizer.decode([row["observation"][0].item(), *row["action"].tolist()], skip_special_tokens=False)
    return rollout, read.replace("<pad>", "")


@pytest.mark.heavy
def test_the_tools_of_the_server_are_called(url):
    """Its tool pays 1 for "film", which ends the episode."""
    env = tool_env(url)
    rollout, text = played_by_hand(env, call("echo_message", message="plot"), call("echo_message", message="film"))
    assert '"name": "echo_message", "description": "Return the message."' in text and "Use the tools." in text
    assert "<|im_start|>tool\nplot<|im_end|>" in text and env.metrics["programs/rows"] == 1
    assert rollout["reward"].sum() == 1 and env.metrics["programs/questions"] == 2


@pytest.mark.heavy
def test_an_answer_without_a_call_ends_the_episode(url):
    rollout, text = played_by_hand(tool_env(url), call("echo_message", message="plot"), "done")
    assert rollout["reward"].sum() == 0 and text.rstrip().endswith("done<|im_end|>")


def test_errors_of_a_call_are_texts_for_the_model(url):
    calls = [call("nope", x=1), call("echo_message", m="a"), "<tool_call>{</tool_call>"]
    _, text = played_by_hand(
        tool_env(url), *calls, call("echo_message", message="a") + call("echo_message", message="b"), "done"
    )
    assert "Error: Unknown tool: 'nope'" in text and "Missing required argument" in text
    assert "The call could not be read" in text
    assert "<|im_start|>tool\na<|im_end|>\n<|im_start|>tool\nb<|im_end|>" in text


@pytest.mark.heavy
def test_a_chat_template_is_needed(url):
    assert calls_tools_at(url)
    with pytest.raises(ValueError, match="no chat template: take a model of chats"):
        tool_env(url, tokenizer=byte_tokenizer())
