"""`Guided`: every text of an untrained model fits its grammar, and the mask is exact at every prefix."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from algos import PPO, LMPolicy, collect
from tests.helpers.chat_families import FAMILIES, tokenizer_of
from tests.helpers.errors import refused
from tests.helpers.models import make_gpt2, make_tokenizer
from tests.helpers.packages import lazy_import
from textenv import KLPenalty, Prompt, TextVectorEnv
from textenv.envs.turn import Turn
from textenv.extras.guidance import Guided
from textenv.lm.loading import from_pretrained

lazy_import("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["good", "bad"]}, "maxItems": 3},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["name", "tags", "stars"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [a-f]{2,9}(é|\d)\."
NESTED = 'start: "(" start ")" | "x" | start_two\nstart_two: "yy"'


@pytest.fixture(scope="module")
def tokenizer():
    return from_pretrained(AutoTokenizer, "embedded")


def untrained(tokenizer):
    return LMPolicy(make_gpt2(len(tokenizer), n_positions=128), tokenizer)


def make_env(tokenizer, rule, **options):
    settings = dict(prompts=["this film", "the plot"], num_envs=8, max_new_tokens=96, max_prompt_tokens=8) | options
    return TextVectorEnv(reward=lambda completions: [float(len(text)) for text in completions], tokenizer=tokenizer,
                         allowed=rule, **settings)  # fmt: skip


def is_valid(text):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_nested(text):
    depth = text.count("(")
    return text in (f"{'(' * depth}{core}{')' * depth}" for core in ("x", "yy"))


FORMS = {
    "json_schema": (SCHEMA, is_valid),
    "regex": (REGEX, lambda text: re.fullmatch(REGEX, text)),
    "lark": (NESTED, is_nested),
}


@pytest.mark.heavy
@pytest.mark.parametrize("form", FORMS)
def test_every_text_of_an_untrained_model_fits(tokenizer, form):
    grammar, fits = FORMS[form]
    env = make_env(tokenizer, Guided(form, grammar))
    rollout = collect(env, untrained(tokenizer), num_episodes=48)
    texts = [env.samples([row])[0]["completion"] for row in range(48)]
    ended = (rollout["terminated"] & rollout["mask"]).any(1)
    assert ended.all() and len(set(texts)) >= 5
    assert all(fits(text) for text in texts)


WORDS = ["the", "then", "there", "a good film", "a bad film", "x", "xx", "été"]


@pytest.mark.heavy
def test_the_mask_is_exact_at_every_prefix(tokenizer):
    """By brute force: every token is tried after every prefix of every text of a small language."""
    rule, eos = Guided("regex", "|".join(WORDS)), tokenizer.eos_token_id
    pieces = {i: bytes_of(tokenizer, i) for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids}
    language, todo, seen = [word.encode() for word in WORDS], [()], 0
    while todo:
        ids = todo.pop()
        so_far = b"".join(pieces[i] for i in ids)
        wanted = {i for i, piece in pieces.items() if any(word.startswith(so_far + piece) for word in language)}
        wanted |= {eos} if so_far in language else set()
        turn = Turn(Prompt("?"), [5], [5], list(ids), terminated=False, tokenizer=tokenizer)
        assert set(rule(turn).tolist()) == wanted, so_far
        todo += [(*ids, i) for i in wanted - {eos}]
        seen += 1
    assert seen > 50


def bytes_of(tokenizer, token):
    """Byte-level BPE writes each byte as a character: printable ones as themselves, others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[character] for character in tokenizer.convert_ids_to_tokens(token))


def test_a_complete_text_ends_as_turns_do():
    tokenizer = tokenizer_of(FAMILIES["gemma"])
    rule = Guided("regex", "ab?")
    prompt = Prompt("x")
    ends = {*tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])}
    for text, more in (("", False), ("a", True), ("ab", True)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        allowed = {*rule(Turn(prompt, [0], [0], ids, False, tokenizer)).tolist()}
        assert (ends <= allowed) is more and (ends.isdisjoint(allowed)) is not more


@pytest.mark.heavy
def test_policy_and_reference_share_the_mask(tokenizer):
    """Probabilities over it add up to 1."""
    policy = untrained(tokenizer)
    rollout = collect(make_env(tokenizer, Guided("json_schema", SCHEMA)), policy, num_episodes=16)
    mask, allowed = rollout["mask"], rollout.get_non_tensor("allowed_sets")[rollout["allowed"]]
    logits = policy.lm.model(rollout["observation"]).logits.detach()
    expected = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    assert torch.allclose((expected.exp() * allowed).sum(-1)[mask], torch.ones(int(mask.sum())), atol=1e-5)
    chosen = expected.gather(-1, rollout["action"][..., None])[..., 0]
    assert torch.allclose(rollout["log_prob"][mask], chosen[mask], atol=1e-4)
    forced = mask & (allowed.sum(-1) == 1)
    assert forced.any() and not rollout["log_prob"][forced].any()  # no choice, no surprise
    KLPenalty(policy.reference(), 0.1)(rollout, policy)
    assert rollout["kl"][mask].abs().max() < 1e-5
    assert policy.divergence(rollout, policy.reference())[mask].abs().max() < 1e-5


def test_ppo_trains_under_a_grammar(tokenizer):
    env = make_env(tokenizer, Guided("regex", "(good|bad|fine){1,4}"))
    agent = PPO(env, untrained(tokenizer), num_steps=None, num_episodes=16, minibatch_size=8, kl_coef=0.1)
    history = agent.learn(2 * 16, progress=False)
    assert history and all(np.isfinite(value) for row in history for value in row.values() if value is not None)


def test_each_turn_begins_the_grammar_anew(tokenizer):
    """Other tokenizers get a grammar of their own."""
    rule = Guided("regex", "ab")
    first, second = (Turn(Prompt("?"), [5], context, [], False, tokenizer) for context in ([5], [5, 6, 7]))
    assert rule(first).tolist() == rule(second).tolist() != []
    words = make_tokenizer(["<pad>", "<eos>", "a", "b", "c"])
    with refused(ValueError, "decoder type"):  # llguidance knows the bytes of BPE tokens only
        rule(Turn(Prompt("?"), [2], [2], [], False, words))
    assert rule(first).tolist() == rule(second).tolist()
    with refused(ValueError, "does not fit the grammar", "byte 'n' fails"):
        rule(Turn(Prompt("?"), [5], [5], tokenizer("no")["input_ids"], False, tokenizer))
    assert rule(first).tolist() == rule(second).tolist()


def test_unusable_grammars_are_refused():
    with refused(ValueError, "regex", "unclosed group"):
        Guided("regex", "(a")
    with refused(ValueError, "look-around"):
        Guided("regex", "a(?=b)")
    with refused(ValueError, "json_schema", "Invalid type: foo"):
        Guided("json_schema", {"type": "foo"})
    with refused(ValueError, "lark", "unknown name"):
        Guided("lark", "start: foo")
    for form, grammar in (("schema", SCHEMA), ("json_schema", json.dumps(SCHEMA)), ("regex", SCHEMA)):
        with refused(ValueError, form, "expected json_schema and a dict, or regex or lark and a text"):
            Guided(form, grammar)


def test_a_schema_may_ask_for_white_space(tokenizer):
    loose = Guided("json_schema", SCHEMA | {"x-guidance": {"whitespace_flexible": True}})
    for rule, spaces in ((loose, True), (Guided("json_schema", SCHEMA), False)):
        ids = rule(Turn(Prompt("?"), [5], [5], tokenizer("{")["input_ids"], False, tokenizer))
        assert any(tokenizer.decode([i]).isspace() for i in ids) == spaces
