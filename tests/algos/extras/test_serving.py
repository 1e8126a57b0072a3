"""The server of ``algos serve``, asked by OpenAI's own client."""

import contextlib
import http.client
import json
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from algos.extras.serving import PolicyAnswerer
from algos.policies.lm import LMPolicy
from tests.helpers.chat_templates import own_template_tokenizer
from tests.helpers.models import make_gpt2
from tests.helpers.packages import lazy_import
from tests.helpers.small_agents import lm_policy, table_model
from tests.helpers.tool_calls import PLAIN, QUESTION, SIX, byte_tokenizer
from textenv.gateway.requests import FIELDS
from textenv.gateway.server import CompletionServer
from textenv.prompts.template_variables import set_template_variables

openai = lazy_import("openai", reason="the client of OpenAI, which comes with verifiers")
CHAT = [{"role": "user", "content": "the film"}]


@contextlib.contextmanager
def serving(policy, model="critic", *, limit=40, **options):
    """Server of a policy, with the key ``key``."""
    answerer = PolicyAnswerer(policy, model, limit=limit)
    with CompletionServer(answerer, token="key", **options) as server:
        yield server
    answerer.close()


@pytest.fixture(scope="module")
def policy():
    policy = LMPolicy.load("embedded", temperature=0.8)
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return policy


@pytest.fixture(scope="module")
def server(policy):
    with serving(policy) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as client:
        yield client


def ask(client, **options):
    given = {"model": "critic", "messages": CHAT, "seed": 3, "logprobs": True, "extra_body": {"return_token_ids": True}}
    return client.chat.completions.create(**given | options)


def own_scores(policy, prompt, ids, temperature=None):
    """Log-probabilities of the answer in one plain pass over the text, by transformers."""
    tokens = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = policy.lm.model(input_ids=tokens).logits[0, :, : policy.lm.num_tokens].float()
    scores = (logits / (temperature or policy.temperature)).log_softmax(-1)
    return scores[range(len(prompt) - 1, tokens.shape[1] - 1), ids]


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [None, 1.5])
def test_log_probs_are_those_of_the_sampler(policy, client, temperature):
    answer = ask(client, n=3, **({} if temperature is None else {"temperature": temperature}))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        scores = torch.tensor([each.logprob for each in choice.logprobs.content])
        torch.testing.assert_close(
            scores, own_scores(policy, answer.prompt_token_ids, choice.token_ids, temperature), atol=1e-4, rtol=0
        )
        text = policy.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert choice.message.content == text
        assert (choice.finish_reason == "stop") == (choice.token_ids[-1] == policy.tokenizer.eos_token_id)
    assert policy.temperature == 0.8
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_a_stream_says_the_same_as_the_whole_answer(client):
    whole = ask(client, n=2)
    parts = list(ask(client, n=2, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage == whole.usage
    for choice in whole.choices:
        own = [each.choices[0] for each in parts if each.choices and each.choices[0].index == choice.index]
        assert "".join(each.delta.content for each in own) == choice.message.content
        assert [token for each in own for token in each.token_ids] == choice.token_ids
        scores = [token.logprob for each in own for token in each.logprobs.content]
        assert scores == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-5)
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert [each.delta.role for each in own] == ["assistant"] + [None] * (len(own) - 1)


def test_it_is_the_policy_that_answers(policy, client):
    (text,) = policy.generate(["the film"], max_new_tokens=40, seed=3)
    assert client.completions.create(model="critic", prompt="the film", seed=3).choices[0].text == text
    (text,) = policy.generate(["the film"], max_new_tokens=9, deterministic=True)
    most = client.completions.create(model="critic", prompt="the film", temperature=0, max_tokens=9, logprobs=0)
    assert most.choices[0].text == text
    assert len(most.choices[0].logprobs.tokens) == most.usage.completion_tokens
    ids = policy.tokenizer("the film")["input_ids"]
    assert client.completions.create(model="critic", prompt=ids, temperature=0, max_tokens=9).choices[0].text == text


def test_parts_of_a_message_are_one_text(client):
    parts = [{"type": "text", "text": CHAT[-1]["content"][:3]}, {"type": "text", "text": CHAT[-1]["content"][3:]}]
    whole, joined = ask(client), ask(client, messages=[*CHAT[:-1], CHAT[-1] | {"content": parts}])
    assert joined.prompt_token_ids == whole.prompt_token_ids
    assert joined.choices[0].message.content == whole.choices[0].message.content


def test_an_answer_that_was_begun_is_continued(policy, client):
    begun = [*CHAT, {"role": "assistant", "content": "a"}]
    expected = policy.tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    answer = ask(client, messages=begun)
    assert answer.prompt_token_ids == expected
    (text,) = policy.generate([begun], max_new_tokens=9, deterministic=True)
    assert ask(client, messages=begun, temperature=0, max_tokens=9).choices[0].message.content == text


def test_variables_of_a_request_come_before_the_template_s_defaults():
    tokenizer = own_template_tokenizer("qwen 3")
    policy = lm_policy(lambda: make_gpt2(len(tokenizer), n_positions=256), tokenizer=tokenizer)
    options = dict(add_generation_prompt=True, return_dict=False)
    thinking, other = (tokenizer.apply_chat_template(CHAT, enable_thinking=on, **options) for on in (True, False))
    set_template_variables(tokenizer, {"enable_thinking": False})
    with serving(policy) as server, openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as client:

        def prompt_of(**body):
            answer = ask(client, max_tokens=1, extra_body={"return_token_ids": True, **body})
            return answer.prompt_token_ids

        assert prompt_of() == prompt_of(chat_template_kwargs={}) == other != thinking
        assert prompt_of(chat_template_kwargs={"enable_thinking": True}) == thinking
        for variables, words in [
            ({"enable_thinkng": True}, "has enable_thinkng, which the chat template never reads"),
            ({"add_generation_prompt": False}, "expected variables of the template only"),
            ({"enable_thinking": ["<|im_end|>"]}, "spells the special token"),
            ("none", "expected an object such as"),
        ]:
            with pytest.raises(openai.BadRequestError, match=re.escape(words)):
                prompt_of(chat_template_kwargs=variables)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_unseen(client, stream):
    whole = client.completions.create(model="critic", prompt="the film", seed=3).choices[0].text
    stop = whole[len(whole) // 2 :][:5]
    answer = client.completions.create(model="critic", prompt="the film", seed=3, stop=[stop, "@"], stream=stream)
    choices = [each.choices[0] for each in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_long_stop_text_at_the_start_is_not_streamed(client):
    whole = client.completions.create(model="critic", prompt="the film", seed=3).choices[0].text
    stop = whole[: len(whole) // 2]
    answer = client.completions.create(model="critic", prompt="the film", seed=3, stop=[stop], stream=True)
    assert [text for part in answer if (text := part.choices[0].text)] == []


@pytest.mark.heavy
def test_parallel_requests_keep_their_own_temperatures(server, client):
    def ask_for(temperature):
        answer = ask(client, temperature=temperature)
        return [token.logprob for token in answer.choices[0].logprobs.content]

    temperatures = [None, 5.0, 0.1, 0, 1.0] * 8
    alone = {temperature: ask_for(temperature) for temperature in set(temperatures)}
    with ThreadPoolExecutor(40) as threads:
        together = list(threads.map(ask_for, temperatures))
    for temperature, log_probs in zip(temperatures, together, strict=True):
        assert log_probs == pytest.approx(alone[temperature], abs=1e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 41}, "max_tokens is 41, expected a number from 1 to 40"),
        ({"temperature": -1}, "temperature is -1"),
        ({"n": True}, "n is True"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"top_p": 0.5}, "does not support top_p"),
        ({"response_format": {"type": "json_object"}}, "does not support response_format"),
        ({"tools": [{"name": "f"}]}, "tools has {'name': 'f'}, expected {'type': 'function'"),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "does not support tool_choice"),
        ({"messages": []}, "messages is"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "images"),
        ({"messages": [{"role": "user"}]}, "expected {'role': ..., 'content': ...}"),
        ({"messages": ["a"]}, "messages with texts"),
        ({"messages": [{"role": "user", "content": "film " * 2000}]}, "positions"),
    ],
)
def test_a_wrong_request_is_answered_with_a_sentence(client, given, words):
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
        ask(client, **given)
    assert caught.value.body["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        list(ask(client, stream=True, **given))


def test_the_server_survives_what_it_is_sent(server, client):
    key = {"Authorization": "Bearer key"}
    for body in (b"", b"[", b"[]", b"7", b'{"messages": {}}', b'{"model": "critic", "prompt": [-1]}'):
        for path in ("chat/completions", "completions"):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
                connection.request("POST", f"/v1/{path}", body, key)
                response = connection.getresponse()
                assert response.status == 400 and json.loads(response.read())["error"]["message"]
    stream = ask(client, stream=True)
    next(iter(stream))
    stream.close()  # in the middle: the next one is not kept waiting
    assert ask(client, max_tokens=1).usage.completion_tokens == 1


def post(server, body, path="chat/completions", headers=None):
    """Status and content of an answer to these bytes, or to this object as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    key = {"Authorization": "Bearer key"} | (headers or {})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("POST", f"/v1/{path}", content, key)
        response = connection.getresponse()
        return response.status, response.read()


ODD = [True, 0, -1, 7, 2**70, 0.5, -0.0, 1e-38, 1e300, float("nan"), float("inf"), "", "x", "\ud800", "x" * 2000, [],
       [1], [[1]], [None], ["a"], [True], {}, {"a": 1}, [{}], [{"role": 5, "content": "a"}], [{"role": "user"}],
       [{"role": "user", "content": 5}], {"include_usage": "yes"}, {"prompt": "a"}]  # fmt: skip
"""Values of JSON, right ones for some fields among them."""


@pytest.mark.heavy
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_field_is_refused_before_answering(server, path, stream):
    base = {"model": "critic", "max_tokens": 1, "stream": stream}
    base |= {"messages": CHAT} if "chat" in path else {"prompt": "the film"}
    fields = sorted(FIELDS | {"top_p", "tools", "response_format"})
    for name in fields:
        for value in ODD:
            status, content = post(server, base | {name: value}, path)
            case = f"{name}={value!r:.60}: {status} {content!r:.200}"
            if status != 200:
                assert status in (400, 404) and json.loads(content)["error"]["message"], case
            elif content.startswith(b"data: "):
                assert content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content, case
            else:
                assert json.loads(content)["choices"], case


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"stream_options": "usage"}, "stream_options is 'usage', expected an object"),
        ({"stream_options": {"include_usage": 1}}, "include_usage 1, expected true or false"),
        ({"stream": "yes"}, "stream is 'yes', expected true or false"),
        ({"logprobs": 2}, "logprobs is 2, expected true or false"),
        ({"messages": [{"role": 1, "content": "a"}]}, "expected a role"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "the role 'usr', expected system, user, assistant or tool"),
        ({"temperature": 1e-38}, "temperature is 1e-38, expected 0 (the most probable token) or at least 0.001"),
        ({"stop": ["a"] * 65}, "stop has 65 texts of up to 1 characters, expected at most 64"),
        ({"enable_thinking": False}, "does not support enable_thinking"),
        ({"prompt_logprobs": 0}, "does not support prompt_logprobs"),
        ({"add_generation_prompt": False}, "does not support add_generation_prompt"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options has 'continuous_usage_stats'"),
    ],
)
def test_a_refused_field_is_named(server, field, words):
    status, content = post(server, {"model": "critic", "messages": CHAT} | field)
    assert status == 400 and words in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("temperature", [1e-3, 100])
def test_the_extremes_of_the_temperature_are_answered(server, temperature):
    status, _ = post(server, {"model": "critic", "messages": CHAT, "temperature": temperature, "max_tokens": 5})
    assert status == 200


def test_an_overlong_prompt_is_refused_untokenized(server, client):
    long = "film " * 100_000
    status, content = post(server, {"model": "critic", "messages": [{"role": "user", "content": long}]})
    assert status == 400 and "500,000 characters, and the model has 128 positions" in content.decode()
    status, content = post(server, {"model": "critic", "prompt": long}, "completions")
    assert status == 400 and "500,000 characters" in content.decode()
    status, content = post(server, b" " * 2**21)
    assert status == 413 and "2,097,152 bytes, expected at most 1,048,576" in content.decode()
    for length in ("-1", "many"):
        status, content = post(server, b"{}", headers={"Content-Length": length})
        assert status == 400


@pytest.mark.heavy
def test_many_clients_at_once_are_all_answered(policy):
    """All connect before one of them is accepted."""
    answerer = PolicyAnswerer(policy, "critic", limit=2)
    waiting = CompletionServer(answerer, token="key")
    clients = [socket.create_connection(("127.0.0.1", waiting.port), timeout=2) for _ in range(64)]
    body = json.dumps({"model": "critic", "prompt": "the film"}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost:1\r\nAuthorization: Bearer key\r\n"
    for connection in clients:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.settimeout(60)
    answers = []
    with waiting:
        for connection in clients:
            with connection, connection.makefile("rb") as stream:
                answers.append(stream.read())
    answerer.close()
    assert all(re.match(rb"HTTP/1.\d 200", answer) and b'"choices"' in answer for answer in answers)


def test_a_client_that_leaves_leaves_no_traceback(server, client, capfd):
    """Before its request is whole, before its answer, and in the middle of it; each resets the connection."""
    body = json.dumps({"model": "critic", "prompt": "the film", "stream": True, "n": 8}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost:1\r\nAuthorization: Bearer key\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    wrong = whole.replace(b"critic", b"gritic")
    for sent, received in ((b"", 0), (whole[:9], 0), (whole[:-5], 0), (whole, 0), (whole, 20), (wrong, 0)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(sent)
            if received:
                connection.recv(received)
    assert ask(client, max_tokens=1).usage.completion_tokens == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_needs_the_key_and_a_local_host(server, client):
    assert [model.id for model in client.models.list()] == ["critic"]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        ask(client, model="gpt")
    for key in ("", "kei", "key2"):
        with pytest.raises((openai.AuthenticationError, openai.OpenAIError), match="key"):
            openai.OpenAI(base_url=server.url, api_key=key, max_retries=0).models.list()
    for host, status in (("localhost:1", 200), ("attacker.example:1", 401), ("", 401)):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            connection.request("GET", "/v1/models", headers={"Host": host, "Authorization": "Bearer key"})
            assert connection.getresponse().status == status
    assert server.url.startswith("http://127.0.0.1:")


def test_without_a_chat_template_texts_are_completed():
    with serving(LMPolicy.load("embedded")) as server:
        client = openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="chat template"):
            ask(client)
        answer = client.completions.create(model="critic", prompt="the film", max_tokens=2)
        assert answer.usage.completion_tokens <= 2


def test_a_server_needs_a_port_a_key_and_a_length(server, policy):
    for port in (server.port, 70_000):
        with pytest.raises(OSError, match=f"cannot listen on port {port} .*choose another port"):
            CompletionServer(server.answerer, port=port)
    for token in ("", "a:b"):
        with pytest.raises(ValueError, match="the token is"):
            CompletionServer(server.answerer, token=token)
    with pytest.raises(ValueError, match="--max-new-tokens is 0"):
        PolicyAnswerer(policy, "m", limit=0)


def test_a_request_that_the_model_cannot_answer_ends_no_others():
    """The model fails at long texts, as it does for want of memory."""
    policy = LMPolicy.load("embedded")

    def refuse_long_texts(module, arguments):
        if arguments[0].shape[-1] > 64:
            raise RuntimeError("out of memory")

    policy.lm.model.get_input_embeddings().register_forward_pre_hook(refuse_long_texts)
    with serving(policy) as server:
        client = openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)
        for _ in range(2):
            assert client.completions.create(model="critic", prompt="the film", max_tokens=2).choices
            with pytest.raises(openai.APIStatusError, match="out of memory"):
                client.completions.create(model="critic", prompt="this film " * 40, max_tokens=20)


def calling_policy():
    """It answers with the call `SIX`, which is one token of its tokenizer, whatever it has read."""
    tokenizer = byte_tokenizer(PLAIN)
    tokenizer.add_tokens([SIX])
    table = torch.full((len(tokenizer), len(tokenizer)), -50.0)
    call = tokenizer.convert_tokens_to_ids(SIX)
    table[:, call] = 0.0
    table[call] = -50.0
    table[call, tokenizer.eos_token_id] = 0.0
    return LMPolicy(table_model(table), tokenizer)


def test_calls_of_tools_have_names_of_their_own():
    policy = calling_policy()
    schema = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
    with serving(policy, limit=100) as server:
        client = openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)
        answer = client.chat.completions.create(model="critic", messages=QUESTION, tools=[schema], n=4)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert [call.function.arguments for call in calls] == ['{"a": 2, "b": 3}'] * 4
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert len({call.id for call in calls}) == 4


def read_by(policy, messages, **options):
    """What the model reads of a chat, as a text; or what the server says of it."""
    with serving(policy, limit=1) as server:
        body = {"model": "critic", "messages": messages, "return_token_ids": True} | options
        status, content = post(server, body)
    if status != 200:
        return json.loads(content)["error"]["message"]
    return policy.tokenizer.decode(json.loads(content)["prompt_token_ids"])


@pytest.mark.heavy
def test_a_model_reads_all_that_a_client_writes():
    """Instructions of a developer, earlier calls without the tools of now; or an error says what it does not read."""
    policy = calling_policy()
    instruction = {"role": "developer", "content": "Answer in French."}
    french = "<|im_start|>system\nAnswer in French.<|im_end|>\n"
    assert read_by(policy, [instruction, *QUESTION]).startswith(french + "<|im_start|>user\n")

    function = {"name": "multiply", "arguments": '{"a": 2}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    chat = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "6"}]
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n6<|im_end|>" in read_by(policy, chat)

    policy.tokenizer.chat_template = PLAIN.replace("messages", "messages if m.role != 'system'", 1)
    assert "does not write system messages" in read_by(policy, [instruction, *QUESTION])
    assert "French" not in read_by(policy, QUESTION)


def test_a_text_with_special_tokens_is_refused(client, policy):
    """They would be read as letters; ids and a BOS at the beginning are read."""
    end = policy.tokenizer.eos_token
    with pytest.raises(openai.BadRequestError, match="which would be read as ordinary letters"):
        client.completions.create(model="critic", prompt=f"the film{end} the plot", max_tokens=1)
    ids = [*policy.tokenizer("the film")["input_ids"], policy.tokenizer.eos_token_id]
    assert client.completions.create(model="critic", prompt=ids, max_tokens=1).usage.prompt_tokens == len(ids)
