"""What ends a turn: one set for environment, decoder, server and engine, compared with `generate` of `transformers`."""

import asyncio
import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from algos import PPO, LMPolicy, PPOConfig, evaluate, load
from algos.collection import Collector, agree_on_ends, collect
from algos.extras.serving import PolicyAnswerer
from algos.finetuning.packing import read_example
from tests.helpers.chat_families import FAMILIES, byte_tokenizer, scripted_model, tokenizer_of
from tests.helpers.engines import FakeEngine
from tests.helpers.models import WORDS, make_t5, make_tokenizer
from tests.helpers.text_envs import zero
from textenv import LanguageModel, RewardModel, TextEnv, TextVectorEnv, check_text_env
from textenv.envs.string_env import TokenEnv, TokenVectorEnv
from textenv.gateway.requests import read_request
from textenv.lm.ends import closing_ids, ids_after_end, turn_ends
from textenv.prompts.prompts import Prompt, as_prompt
from textenv.prompts.tokenize import prompt_ids, reply_ids
from textenv.rollout import EpisodeEnv

CHAT = [{"role": "user", "content": "Hi"}]
CASES = [(name, end) for name, family in FAMILIES.items() for end in family.ends]
LISTED = [(name, end) for name, family in FAMILIES.items() for end in family.listed]


def prompt_of(tokenizer):
    return CHAT if tokenizer.chat_template else "Hi"


def env_of(tokenizer, **options):
    arguments = dict(prompts=[prompt_of(tokenizer)], reward=zero, max_prompt_tokens=100, max_new_tokens=20)
    return TextVectorEnv(tokenizer=tokenizer, **(arguments | options))


def says_ab(tokenizer, *ends, listed=None):
    """A model whose answer is ``ab``, these tokens one after the other, and then line breaks."""
    last = prompt_ids(Prompt(tuple(CHAT) if tokenizer.chat_template else "Hi"), tokenizer)[-1]
    words = [last, *tokenizer("ab", add_special_tokens=False)["input_ids"], *tokenizer.convert_tokens_to_ids([*ends])]
    return scripted_model(tokenizer, *zip(words, words[1:], strict=False), listed=listed)


def policy_of(name, *ends):
    """Policy of a family, of the model that `says_ab`."""
    tokenizer = tokenizer_of(FAMILIES[name])
    return LMPolicy(says_ab(tokenizer, *ends, listed=FAMILIES[name].listed or None), tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_ends_are_eos_the_models_and_the_templates(name):
    family = FAMILIES[name]
    policy = policy_of(name)
    ends = policy.lm.turn_ends
    assert ends.ids[0] == policy.tokenizer.eos_token_id
    assert {*ends.ids} == {*policy.tokenizer.convert_tokens_to_ids(family.ends)}
    assert list(ends.texts) == family.texts
    env = env_of(policy.tokenizer)
    assert {*env.ends.ids} == {*ends.ids}
    assert env.ends.texts == ends.texts


def test_a_template_with_a_system_message_has_ends():
    family = FAMILIES["chatml, end not special"]
    refusal = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('need system') }}{% endif %}"
    tokenizer = tokenizer_of(family._replace(template=refusal + family.template))
    assert turn_ends(tokenizer).ids == turn_ends(tokenizer_of(family)).ids
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in turn_ends(tokenizer).ids


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "end"), CASES)
def test_all_end_a_turn_at_the_same_token(name, end):
    policy = policy_of(name, end)
    tokenizer = policy.tokenizer
    expected = tokenizer.convert_tokens_to_ids(["a", "b", end])
    assert policy.generate([prompt_of(tokenizer)], deterministic=True, max_new_tokens=20) == ["ab"]

    # An environment, stepped by the policy itself and by an engine that would go on
    env = env_of(tokenizer)
    engine = FakeEngine(ids_past_the_end=True)
    for rollout in (collect(env, policy, num_episodes=1, deterministic=True),
                    Collector(env, policy, seed=0, generator=engine).collect(num_episodes=1)):  # fmt: skip
        assert rollout["action"][rollout["mask"]].tolist() == expected
        assert rollout["terminated"].any() and not rollout["truncated"].any()
    env.reset(seed=0)
    for token in expected:
        _, _, _, _, info = env.step(np.array([token]))
    assert (info["end_reason"][0], str(info["completion"][0])) == ("eos", "ab")

    # A server
    name, content = ("messages", CHAT) if tokenizer.chat_template else ("prompt", "Hi")
    request = read_request({"model": "m", "temperature": 0, name: content}, chat=name == "messages")
    last = asyncio.run(last_piece(policy, request))
    assert (last.turn.completion_ids, last.turn.completion, last.finish) == (expected, "ab", "stop")


async def last_piece(policy, request):
    """The whole answer of a server."""
    answerer = PolicyAnswerer(policy, "m")
    pieces = [piece async for piece in answerer.answer(request, None)]
    answerer.close()
    return pieces[-1]


@pytest.mark.parametrize(("name", "end"), LISTED)
def test_the_generate_of_transformers_ends_there_too(name, end):
    policy = policy_of(name, end)
    tokenizer = policy.tokenizer
    ids = prompt_ids(Prompt(tuple(CHAT) if tokenizer.chat_template else "Hi"), tokenizer)
    found = policy.lm.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, pad_token_id=0)
    assert found[0, len(ids) :].tolist() == tokenizer.convert_tokens_to_ids(["a", "b", end])
    rollout = collect(env_of(tokenizer), policy, num_episodes=1, deterministic=True)
    assert rollout["action"][rollout["mask"]].tolist() == found[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "r1"])
def test_fine_tuning_teaches_where_a_turn_ends(name):
    """Without R1, whose template asks for thoughts that it then leaves out of the message: such a row is refused."""
    tokenizer = tokenizer_of(FAMILIES[name])
    row = {"prompt": "Hi", "completion": "ab"}
    if tokenizer.chat_template:
        row = {"messages": [*CHAT, {"role": "assistant", "content": "ab"}]}
    ids, learnt = read_example(0, row, tokenizer)
    answer = [token for token, known in zip(ids, learnt, strict=True) if known]
    env = env_of(tokenizer)
    env.reset(seed=0)
    over = [bool(env.step(np.array([token]))[2][0]) for token in answer]
    assert over == [False] * (len(answer) - 1) + [True]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_checker_agrees_with_every_family(name):
    check_text_env(env_of(policy_of(name).tokenizer, max_new_tokens=6))


def test_the_checker_finds_a_missed_end():
    class OnlyEOS(TextVectorEnv):
        def __init__(self, **options):
            super().__init__(**options)
            self.ends.is_end[:] = False
            self.ends.is_end[self.tokenizer.eos_token_id] = True

    tokenizer = tokenizer_of(FAMILIES["gemma"])
    env = OnlyEOS(prompts=[CHAT], reward=zero, tokenizer=tokenizer, max_prompt_tokens=100, max_new_tokens=6)
    with pytest.raises(ValueError, match=r"EOS and pad: <end_of_turn> \(id \d+\) did not end the turn"):
        check_text_env(env)


def test_an_end_of_letters_is_a_stop_text():
    tokenizer = tokenizer_of(FAMILIES["chatml, end not a token"])
    env = env_of(tokenizer, max_new_tokens=40)
    env.reset(seed=0)
    for token in tokenizer("ab<|im_end|>")["input_ids"]:
        _, _, terminated, _, info = env.step(np.array([token]))
    assert terminated[0] and (info["completion"][0], info["end_reason"][0]) == ("ab", "stop")


@pytest.mark.parametrize("default", [2, 1])
def test_an_ordinary_token_of_a_default_ends_nothing(default):
    """Llama's class has the EOS 2, which is ``#`` in this tokenizer."""
    tokenizer = byte_tokenizer()
    model = scripted_model(tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = default
    assert LMPolicy(model, tokenizer).lm.turn_ends.ids == (tokenizer.eos_token_id,)
    model.config.eos_token_id = None  # now it was chosen
    assert LMPolicy(model, tokenizer).lm.turn_ends.ids == (tokenizer.eos_token_id, default)


@pytest.mark.parametrize("written", [None, 10**6, [10**6, -1], "eos", [None]])
def test_ids_that_no_token_has_are_left_out(written):
    tokenizer = byte_tokenizer()
    model = scripted_model(tokenizer)
    model.generation_config.eos_token_id = written
    assert LMPolicy(model, tokenizer).lm.turn_ends.ids == (tokenizer.eos_token_id,)


def test_stop_strings_of_a_model_end_a_turn():
    tokenizer = byte_tokenizer()
    model = says_ab(tokenizer)
    model.generation_config.stop_strings = ["b\n\n"]
    policy = LMPolicy(model, tokenizer)
    ids = tokenizer("Hi")["input_ids"]
    found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=9, pad_token_id=0, tokenizer=tokenizer)
    assert tokenizer.decode(found[0, len(ids) :]) == "ab\n\n"
    assert policy.generate(["Hi"], deterministic=True, max_new_tokens=9) == ["a"]
    assert env_of(tokenizer).ends.texts == ("b\n\n",)


def test_without_eos_the_template_ends_turns():
    tokenizer = tokenizer_of(FAMILIES["gemma"])
    tokenizer.eos_token = None
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert turn_ends(tokenizer).ids == (end,)
    env = env_of(tokenizer, max_new_tokens=6)
    check_text_env(env)
    assert LMPolicy(says_ab(tokenizer, "<end_of_turn>"), tokenizer).generate([CHAT], deterministic=True) == ["ab"]


def test_no_end_comes_before_the_minimum_length():
    policy = policy_of("llama 3", "<|eom_id|>")
    env = env_of(policy.tokenizer, min_new_tokens=4)
    rollout = collect(env, policy, num_episodes=4)
    assert rollout["mask"].sum(1).min() >= 4
    env.reset(seed=0)
    with pytest.raises(ValueError, match="forbidden"):
        env.step(np.array([policy.tokenizer.convert_tokens_to_ids("<|eom_id|>")]))


# --- how they come to agree ---------------------------------------------------------------------------------------


def test_a_tokenizers_folder_tells_the_models_ends(tmp_path):
    policy = policy_of("llama 3")
    policy.lm.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert {*env_of(tokenizer).ends.ids} == {*policy.lm.turn_ends.ids}
    env = gymnasium.make_vec("textenv/Prompts-v0", model=str(tmp_path), prompts=[CHAT] * 2, reward=zero)
    assert {*env.ends.ids} == {*policy.lm.turn_ends.ids}


def test_an_agent_tells_its_environment_the_ends(caplog):
    caplog.set_level("INFO")
    policy = policy_of("llama 3", "<|eom_id|>")
    env = env_of(tokenizer_of(FAMILIES["llama 3"]), num_envs=2)  # another tokenizer, of which no model is known
    end = policy.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert end not in env.ends.ids
    agent = PPO(env, policy, PPOConfig(num_steps=None, num_episodes=2, minibatch_size=2))
    assert end in env.ends.ids
    assert f"turns end with '<|eot_id|>' ({policy.tokenizer.eos_token_id}), " in caplog.text
    assert f"'<|eom_id|>' ({end})" in caplog.text
    assert agent.collect()["terminated"].any(1).all()
    other = env_of(tokenizer_of(FAMILIES["llama 3"]), num_envs=2)
    assert evaluate(other, policy, num_episodes=2).rollout["terminated"].any(1).all()


def test_another_tokenizers_environment_is_refused():
    other = byte_tokenizer()
    with pytest.raises(ValueError, match="make the environment with tokenizer=policy.tokenizer"):
        evaluate(env_of(other, prompts=["Hi"]), policy_of("llama 3"), num_episodes=1)


def test_log_and_description_show_the_ends(tmp_path, capsys):
    env = env_of(tokenizer_of(FAMILIES["gemma"]), stop=["\n\n"], num_envs=2)
    policy = policy_of("gemma", "<end_of_turn>")
    agent = PPO(env, policy, PPOConfig(num_steps=None, num_episodes=2, minibatch_size=2))
    agent.learn(1, run_dir=tmp_path / "run", progress=True)
    eos, end = policy.tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    expected = rf"'<eos>' ({eos}), '<end_of_turn>' ({end}), the text '\n\n'"
    assert f"turns end with {expected}\n" in capsys.readouterr().err.replace("\n\n", "\n")
    assert json.loads((tmp_path / "run/config.json").read_text())["turns_end_with"] == expected


STOPS = {"text": "b", "id": byte_tokenizer()("b", add_special_tokens=False)["input_ids"][0]}


def stops_at_b(end, **options):
    """A policy that would write ``ab`` and line breaks, but stops at the ``b``; and an environment."""
    tokenizer = byte_tokenizer()
    return LMPolicy(says_ab(tokenizer), tokenizer, stop=[end]), env_of(tokenizer, num_envs=2, **options)


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_policys_stop_ends_turns_wherever_it_plays(stop, caplog, tmp_path):
    caplog.set_level("INFO")
    policy, env = stops_at_b(stop)
    assert policy.generate(["Hi"], deterministic=True, max_new_tokens=20) in (["a"], ["ab"])
    evaluation = evaluate(env, policy, num_episodes=2, deterministic=True)
    assert evaluation.rollout["mask"].sum(1).tolist() == [2, 2] and evaluation.rollout["terminated"].any(1).all()
    assert [turn.completion for turn in env.scored_turns.turns] == policy.generate(["Hi"] * 2, deterministic=True)
    rollout = collect(env_of(policy.tokenizer), policy, num_episodes=2, deterministic=True)
    assert rollout["mask"].sum(1).tolist() == [2, 2]

    # In training, and with the policy that it saves
    env = env_of(policy.tokenizer, num_envs=2)
    agent = PPO(env, policy, PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4))
    assert any(line.endswith(str(env.ends)) for line in caplog.messages) and str(env.ends) == str(policy.ends)
    assert agent.collector.collect(num_episodes=4, deterministic=True)["mask"].sum(1).tolist() == [2] * 4
    agent.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["turns_end_with"] == str(policy.ends)
    loaded = load(tmp_path)
    assert loaded.lm.stop == (stop,)
    evaluation = evaluate(env_of(loaded.tokenizer), loaded, num_episodes=2, deterministic=True)
    assert evaluation.rollout["mask"].sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_policys_stop_is_not_that_of_the_next_one(stop):
    policy, env = stops_at_b(stop, stop=["\n\n"])
    other = LMPolicy(policy.lm.model, policy.tokenizer)
    first = Collector(env, policy)
    second = Collector(env, other)
    lengths = []
    for collector in (first, second, first):
        rollout = collector.collect(num_episodes=2, deterministic=True)
        lengths += rollout["mask"].sum(1).tolist()
    assert lengths == [2, 2, 4, 4, 2, 2], "the second one goes on to the environment's stop"
    PPO(env, other, PPOConfig(num_steps=None, num_episodes=2, minibatch_size=2))
    assert other.lm.stop == ("\n\n",)
    PPO(env, policy, PPOConfig(num_steps=None, num_episodes=2, minibatch_size=2))
    assert policy.lm.stop == (stop, "\n\n")


def test_ids_of_a_policys_stop_end_no_turn_below_its_minimum():
    policy, env = stops_at_b(STOPS["id"], min_new_tokens=4)
    rollout = collect(env, policy, num_episodes=4)
    assert rollout["mask"].sum(1).min() >= 4
    assert not env.reset(seed=0)[1]["action_mask"][:, STOPS["id"]].any()
    collect(env, LMPolicy(policy.lm.model, policy.tokenizer), num_episodes=1)
    assert env.reset(seed=0)[1]["action_mask"][:, STOPS["id"]].all(), "it was the first policy's only"


class ThreeTurns(gymnasium.Env):
    """A conversation of three turns, which keeps the model's answers."""

    def reset(self, *, seed=None, options=None):
        self.turns = []
        return "Hi", {}

    def step(self, action):
        self.turns.append(action)
        return "more", 0.0, len(self.turns) == 3, False, {}


def test_a_policys_stop_ends_each_turn_of_a_conversation():
    game = ThreeTurns()
    tokenizer = byte_tokenizer()
    line_break, a, b = tokenizer("\nab", add_special_tokens=False)["input_ids"]
    policy = LMPolicy(scripted_model(tokenizer, (line_break, a), (a, b)), tokenizer, stop=["b"])
    limits = {"max_prompt_tokens": 20, "max_new_tokens": 10, "max_turns": 3}
    env = TokenVectorEnv(lambda: game, tokenizer=tokenizer, num_envs=1, **limits)
    collect(env, policy, num_episodes=1, deterministic=True)
    assert game.turns == ["a"] * 3


def test_an_environment_that_cannot_be_told_a_policys_stop_is_named(caplog):
    class OwnEpisodes(VectorEnv, EpisodeEnv):
        pass

    policy, _ = stops_at_b("b")
    agree_on_ends(OwnEpisodes(), policy)
    assert "OwnEpisodes ends turns by its own rules, not by the policy's stop ('b',)" in caplog.text


def test_a_stop_of_one_text_is_not_its_letters():
    tokenizer = byte_tokenizer()
    policy = LMPolicy(says_ab(tokenizer), tokenizer, stop="ab\n")
    assert policy.lm.stop == ("ab\n",) and policy.generate(["Hi"], deterministic=True) == [""]
    with pytest.raises(ValueError, match="stop has an empty text"):
        evaluate(env_of(tokenizer), LMPolicy(policy.lm.model, tokenizer, stop=[""]), num_episodes=1)
    assert LanguageModel(policy.lm.model, tokenizer, stop="ab\n").stop == ("ab\n",)
    with pytest.raises(TypeError, match="stop is None, expected texts and token ids"):
        LanguageModel(policy.lm.model, tokenizer, stop=None)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_saved_agent_keeps_the_set(tmp_path, adapter):
    policy = policy_of("llama 3", "<|eom_id|>")
    if adapter:
        policy.lm.model.save_pretrained(tmp_path / "base")
        policy.tokenizer.save_pretrained(tmp_path / "base")
        policy = LMPolicy.load(tmp_path / "base", lora="r=2")
        assert "<|eom_id|>" in str(policy.ends)
        policy.lm.model.get_base_model().generation_config.eos_token_id = policy.tokenizer.convert_tokens_to_ids(
            ["<|eot_id|>", "<|eom_id|>"]
        )
    header = policy.tokenizer.convert_tokens_to_ids("<|start_header_id|>")
    env = env_of(policy.tokenizer, num_envs=2, stop=["b\n", "<|end_header_id|>", np.int64(header)])
    PPO(env, policy, PPOConfig(num_steps=None, num_episodes=2, minibatch_size=2)).save(tmp_path / "run")
    loaded = load(tmp_path / "run")
    assert str(loaded.ends) == str(policy.ends) == str(env.ends)
    ids = loaded.ends.ids
    assert {*ids} == {*env.ends.ids} and loaded.ends.texts == ("b\n",)
    assert ("<|end_of_text|>" in str(loaded.ends)) is not adapter
    assert loaded.generate([CHAT], deterministic=True) == ["ab"]
    fresh = env_of(AutoTokenizer.from_pretrained(tmp_path / "run" / "policy"))
    assert {*fresh.ends.ids} == {*loaded.ends.ids}


# --- what other programs find in a saved folder -------------------------------------------------------------------


def continued(folder, ids, kind=AutoModelForCausalLM):
    """The ids with which `generate` of transformers, given a folder alone, goes on."""
    model = kind.from_pretrained(folder)
    found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, pad_token_id=0)[0].tolist()
    return found[1:] if model.config.is_encoder_decoder else found[len(ids) :]


def listed_ends(folder):
    return json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")


@pytest.mark.parametrize(("name", "end"), CASES)
def test_a_saved_folder_ends_turns_as_the_policy_does(name, end, tmp_path):
    policy = policy_of(name, end)
    tokenizer = policy.tokenizer
    policy.save(tmp_path)
    ids = prompt_ids(as_prompt(0, prompt_of(tokenizer)), tokenizer)
    assert continued(tmp_path, ids) == tokenizer.convert_tokens_to_ids(["a", "b", end])
    assert str(LMPolicy.load(tmp_path).ends) == str(policy.ends)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if {*family.listed} == {*family.ends}])
def test_a_model_that_lists_all_ends_is_saved_as_it_is(name, tmp_path):
    policy = policy_of(name)
    policy.lm.model.save_pretrained(tmp_path / "model")
    policy.save(tmp_path / "policy")
    file = "generation_config.json"
    assert (tmp_path / "policy" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


def test_ids_of_stop_are_saved_for_others_and_texts_are_not(tmp_path):
    """With stop strings in the folder, `generate` would raise an error for everyone who gives it no tokenizer."""
    tokenizer = tokenizer_of(FAMILIES["gemma, only the template knows"])
    eos, end, b = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>", "b"])
    policy = LMPolicy(says_ab(tokenizer), tokenizer, stop=[b, "\n\n", "<eos>"])
    policy.save(tmp_path / "policy")
    assert listed_ends(tmp_path / "policy") == [eos, end, b]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").generation_config.stop_strings is None
    ids = prompt_ids(as_prompt(0, CHAT), tokenizer)
    assert tokenizer.decode(continued(tmp_path / "policy", ids)) == "ab"
    assert policy.lm.model.generation_config.eos_token_id == eos, "saving leaves the model as it was"

    # A policy reads its own folder as before: what `stop` added is not the model's own
    loaded = LMPolicy.load(tmp_path / "policy")
    assert (str(loaded.ends), loaded.lm.turn_ends) == (str(policy.ends), policy.lm.turn_ends)
    assert loaded.ends.stop_texts == policy.ends.stop_texts
    assert loaded.generate([CHAT], deterministic=True) == policy.generate([CHAT], deterministic=True) == ["ab"]
    assert LMPolicy.load(tmp_path / "policy", stop=()).ends.ids == [eos, end]
    loaded.save(tmp_path / "again")
    assert listed_ends(tmp_path / "again") == [eos, end, b]


def test_an_ordinary_token_of_a_default_is_no_end_in_a_saved_folder(tmp_path):
    tokenizer = byte_tokenizer()
    model = says_ab(tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("a")
    LMPolicy(model, tokenizer, stop=[tokenizer.convert_tokens_to_ids("b")]).save(tmp_path)
    assert tokenizer.decode(continued(tmp_path, tokenizer("Hi")["input_ids"])) == "ab"


def test_adapters_and_merged_folders_have_all_ends(tmp_path):
    tokenizer = tokenizer_of(FAMILIES["gemma, only the template knows"])
    eos, end, b = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>", "b"])
    base = LMPolicy(says_ab(tokenizer, "<end_of_turn>"), tokenizer)
    base.lm.model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy = LMPolicy.load(tmp_path / "base", lora="r=2", stop=[b])
    policy.save(tmp_path / "adapter")
    loaded = LMPolicy.load(tmp_path / "adapter")
    loaded.merge(tmp_path / "merged")
    ids = prompt_ids(as_prompt(0, CHAT), tokenizer)
    assert tokenizer.decode(continued(tmp_path / "merged", ids)) == "ab"
    for name in ("adapter", "merged"):
        assert listed_ends(tmp_path / name) == [eos, end, b]
        assert str(LMPolicy.load(tmp_path / name).ends) == str(policy.ends)
        assert LMPolicy.load(tmp_path / name).lm.turn_ends == policy.lm.turn_ends


def test_an_encoder_decoders_folder_has_all_ends(tmp_path):
    tokenizer = make_tokenizer(WORDS, ends=True)
    model = make_t5()
    policy = LMPolicy(model, tokenizer)
    policy.save(tmp_path / "plain")
    ids = tokenizer("a b")["input_ids"]
    answer = continued(tmp_path / "plain", ids, AutoModelForSeq2SeqLM)
    assert len(answer) > 3
    LMPolicy(model, tokenizer, stop=[answer[2]]).save(tmp_path / "stopped")
    stop_at = answer.index(answer[2]) + 1
    assert continued(tmp_path / "stopped", ids, AutoModelForSeq2SeqLM) == answer[:stop_at]
    assert LMPolicy.load(tmp_path / "stopped").lm.turn_ends == policy.lm.turn_ends


def test_environment_stops_hold_for_trained_policies():
    tokenizer = byte_tokenizer()
    policy = LMPolicy(says_ab(tokenizer), tokenizer)
    PPO(env_of(tokenizer, stop=["b"]), policy, PPOConfig(num_steps=None, num_episodes=2, minibatch_size=2))
    assert policy.generate(["Hi"], deterministic=True) == ["a"]
    assert evaluate(env_of(tokenizer, stop=["a"]), policy, num_episodes=1).rollout["mask"].sum() == 1
    assert policy.generate(["Hi"], deterministic=True) == ["a"], "an evaluation leaves the policy as it was"


# --- texts and replies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_completion_is_closed_by_the_template(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    end = closing_ids(tokenizer, chat=family.template is not None)
    spelled = "ab" + tokenizer.decode(end)
    rollout = env_of(tokenizer).given_episodes([prompt_of(tokenizer)] * 2, ["ab", spelled], [1.0, 2.0])
    for row in range(2):
        ids = rollout["action"][row][rollout["mask"][row]].tolist()
        assert ids == [*tokenizer("ab", add_special_tokens=False)["input_ids"], *end]
    assert rollout["terminated"].any(1).all()

    # Compared with the template itself, where it writes an end
    if family.template is not None and "glm" not in name and name != "plain":
        whole = [*CHAT, {"role": "assistant", "content": "ab"}]
        rendered = tokenizer.apply_chat_template(whole, tokenize=False)
        assert rendered.rpartition("ab")[2].lstrip().startswith(tokenizer.decode(end))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.template is not None])
def test_a_reply_closes_only_a_cut_turn(name):
    tokenizer = tokenizer_of(FAMILIES[name])
    end = closing_ids(tokenizer, chat=True)
    cut = tokenizer("ab", add_special_tokens=False)["input_ids"]
    after_cut, after_end = (
        tokenizer.decode(reply_ids("more", Prompt(tuple(CHAT)), said, tokenizer)) for said in (cut, [*cut, *end])
    )
    inside_a_chat = {"harmony": "<|end|>", "plain": ""}.get(name, tokenizer.decode(end))
    assert after_cut.lstrip(" ") == inside_a_chat + after_end
    chat = [*CHAT, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "more"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("ab" + after_cut)


def test_text_after_the_end_is_no_part_of_a_turn():
    tokenizer = tokenizer_of(FAMILIES["gemma"])
    assert tokenizer.decode(ids_after_end(tokenizer)) == "\n"
    assert ids_after_end(tokenizer_of(FAMILIES["llama 3"])) == []
    assert ids_after_end(byte_tokenizer()) == []


@pytest.mark.parametrize("name", ["gemma", "llama 3", "qwen", "llama 2"])
def test_a_reward_model_reads_the_templates_ids(name):
    """A line break after the end of a turn is read in training, so that it must not be missing here."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = tokenizer_of(FAMILIES[name])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    rate = RewardModel(LlamaForSequenceClassification(config), tokenizer)
    asked = prompt_ids(Prompt(tuple(CHAT)), tokenizer)
    end = closing_ids(tokenizer, chat=True)
    whole = [*CHAT, {"role": "assistant", "content": "ab"}]
    rendered = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
    said = rendered[len(asked) : rendered.index(end[0], len(asked)) + 1]
    assert rendered[: len(asked)] == asked and tokenizer.decode(said).strip().startswith("ab")
    answer = [{"role": "assistant", "content": "ab"}]
    by_ids = rate([CHAT], [answer], prompt_ids=[asked], completion_ids=[said], tokenizer=tokenizer)
    assert by_ids == pytest.approx(rate([CHAT], [answer]), abs=1e-5)
    assert by_ids == pytest.approx(rate.score_rows([rendered]).tolist(), abs=1e-5)


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_a_call_of_a_tool_is_read_whatever_ends_it(end):
    def double(x: int) -> int:
        """Double a number.

        Args:
            x: number
        """
        calls.append(x)
        return 2 * x

    calls = []
    policy = policy_of("llama 3")  # its generation_config has all three
    tokenizer = policy.tokenizer
    env = env_of(tokenizer, tools=[double], max_prompt_tokens=2000, max_new_tokens=200)
    env.reset(seed=0)
    text = f'<tool_call>\n{{"name": "double", "arguments": {{"x": 21}}}}{end}'
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        _, _, terminated, _, _ = env.step(np.array([token]))
    assert calls == [21] and not terminated[0]


def test_a_conversation_goes_on_after_any_end():
    tokenizer = tokenizer_of(FAMILIES["llama 3"])
    game = ThreeTurns()
    env = TokenEnv(game, tokenizer=tokenizer, max_prompt_tokens=100, max_new_tokens=10, max_length=400)
    env.reset(seed=0)
    end_of_text = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    env.vector.end_turns_like(turn_ends(tokenizer)._replace(ids=(end_of_text,)))
    for end in (tokenizer.eos_token_id, end_of_text, tokenizer.eos_token_id):
        for token in [*tokenizer("ab", add_special_tokens=False)["input_ids"], end]:
            _, _, terminated, _, _ = env.step(token)
    assert game.turns == ["ab"] * 3 and terminated


def test_a_single_environment_knows_them_too():
    tokenizer = tokenizer_of(FAMILIES["gemma"])
    env = TextEnv(prompts=[CHAT], reward=zero, tokenizer=tokenizer, max_prompt_tokens=100, max_new_tokens=6)
    env.reset(seed=0)
    _, _, terminated, truncated, _ = env.step(tokenizer.convert_tokens_to_ids("<end_of_turn>"))
    assert terminated and not truncated
