"""Encoder-decoder policies (T5, BART): acting, scoring, KL, training, LoRA, saving."""

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForSeq2SeqLM

import algos
from algos import PPO, Critic, LMPolicy, PPOConfig, SFTConfig, collect, sft
from algos.cli import main
from tests.helpers.models import SEQ2SEQ, WORDS, make_bart, make_t5, make_tokenizer
from tests.helpers.small_agents import agent_of, close_gradients, lm_policy, take_gradients
from tests.helpers.text_envs import EOS, make_env, text_env
from tests.helpers.tolerances import log_prob_through, output_through
from textenv import KLPenalty, KLReward, LanguageModel, TextEnv
from textenv.rollout import prompt_lengths

ENCODER_AND_DECODER = 4
"""Layers of the tiny models: two of each."""
VALUE = output_through(ENCODER_AND_DECODER, terms=32)
"""Difference of a value between two computations: a head of weights about 1 on 32 features."""
PROMPTS = ["a b", "c", "d a b good", "b"]


@pytest.fixture(params=SEQ2SEQ)
def make(request):
    return SEQ2SEQ[request.param]


T5_FIRST = pytest.mark.parametrize("make", [make_t5, pytest.param(make_bart, marks=pytest.mark.long)])


@pytest.mark.parametrize("forced", [None, 5])
@pytest.mark.parametrize("ends", [False, True])
def test_greedy_completions_are_those_of_transformers(make, ends, forced):
    tokenizer = make_tokenizer(WORDS, ends=ends)
    model, start = make(), 1 + (forced is not None)
    model.generation_config.forced_bos_token_id = forced  # the decoder's prefix here, and no action
    policy = LMPolicy(model, tokenizer)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    limits = {"max_new_tokens": 5 + start, "suppress_tokens": [9, 10, 11]}  # ids beyond the tokenizer's
    found = model.generate(**batch, do_sample=False, num_beams=1, **limits)
    expected = tokenizer.batch_decode(found[:, start:], skip_special_tokens=True)
    assert policy.generate(PROMPTS, max_new_tokens=6, deterministic=True) == expected
    assert len(set(expected)) > 1, "equal completions show nothing"


@pytest.mark.parametrize("suffix", ["good", "good bad"])
def test_an_encoder_reads_what_a_tokenizer_without_eos_appends(make, suffix):
    """As the Chinese BART does, whose tokenizer is BERT's."""
    tokenizer = make_tokenizer(WORDS, eos=None, suffix=suffix)
    model = make()
    model.generation_config.eos_token_id = None
    policy = LMPolicy(model, tokenizer)
    prompts = ["a b", "c", "d a b .", "b"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    limits = {"max_new_tokens": 7, "suppress_tokens": [9, 10, 11]}  # ids beyond the tokenizer's
    answers = model.generate(**batch, do_sample=False, num_beams=1, **limits)
    expected = tokenizer.batch_decode(answers[:, 1:], skip_special_tokens=True)
    assert policy.generate(prompts, max_new_tokens=7, deterministic=True) == expected
    assert len(set(expected)) > 1, "equal completions show nothing"


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_ratio_is_1_and_kl_0_with_refilled_slots(make, temperature):
    env, policy = text_env(), lm_policy(make, temperature=temperature)
    rollout = collect(env, policy, num_episodes=16, seed=0)
    assert len(set(rollout["mask"].sum(1).tolist())) > 1, "answers of one length test no refill"
    log_prob = policy.evaluate(rollout).log_prob.detach()
    rounding = log_prob_through(ENCODER_AND_DECODER, temperature=temperature)
    torch.testing.assert_close(log_prob[rollout["mask"]], rollout["log_prob"][rollout["mask"]], atol=rounding, rtol=0)
    for estimator, place in (("k1", "reward"), ("exact", "loss")):
        found = rollout.clone()
        KLPenalty(policy.reference(), 0.1, estimator, place)(found, policy)
        assert found["kl"].abs().max() < rounding
    values, following = policy.values(rollout)
    evaluated = policy.evaluate(rollout).value.detach()
    torch.testing.assert_close(values[rollout["mask"]], evaluated[rollout["mask"]], atol=VALUE, rtol=0)
    again = rollout["mask"][:, 1:] & rollout["mask"][:, :-1]
    torch.testing.assert_close(following[:, :-1][again], values[:, 1:][again], atol=VALUE, rtol=0)


def test_the_kl_of_a_step_is_that_of_a_batch(make):
    policy, other = lm_policy(make), LanguageModel(make(seed=2), make_tokenizer(WORDS)).requires_grad_(False)
    env = TextEnv(prompts=["a b"], reward=lambda completions, **_: [0.0] * len(completions), tokenizer=policy.tokenizer,
                  max_new_tokens=5)  # fmt: skip
    stepwise, found, done = KLReward(env, other, 1.0), [], False
    observation, _ = stepwise.reset(seed=0)
    policy.reset()
    while not done:
        step = policy.act({name: column[None] for name, column in observation.items()})
        action = {"token": step.action.item(), "log_prob": step.log_prob.item()}
        observation, _, terminated, truncated, info = stepwise.step(action)
        found.append((action["token"], action["log_prob"], info["kl"]))
        done = terminated or truncated
    tokens = torch.tensor([[0, 1, *(token for token, *_ in found)]])
    mask = torch.tensor([[False] + [True] * len(found)])
    columns = {"observation": tokens[:, :-1], "action": tokens[:, 1:], "mask": mask}
    rollout = TensorDict(columns, batch_size=mask.shape)
    own, theirs = policy.evaluate(rollout).log_prob[0, 1:], other.evaluate(rollout).log_prob[0, 1:]
    torch.testing.assert_close(own.tolist(), [x for _, x, _ in found], atol=2e-5, rtol=0)
    torch.testing.assert_close((own - theirs).tolist(), [x for *_, x in found], atol=4e-5, rtol=0)
    assert max(abs(x) for *_, x in found) > 0.1


@pytest.mark.heavy
def test_ppo_learns_a_word_and_keeps_its_reference():
    env, policy = make_env(num_envs=16), LMPolicy(make_t5(), make_tokenizer(WORDS))
    reference = policy.reference()
    before = copy.deepcopy(reference.state_dict())
    config = PPOConfig(
        num_steps=None, num_episodes=32, minibatch_size=16, learning_rate=3e-3, bootstrap_truncated=False
    )
    agent = PPO(env, policy, config, penalty=KLPenalty(reference, 0.01))
    rewards = [metrics["episode/return"] for metrics in agent.learn(32 * 5 * 5)]
    assert rewards[0] < 1 and rewards[-1] > 3, rewards  # words of five
    assert all(torch.equal(x, before[name]) for name, x in reference.state_dict().items())


@pytest.mark.heavy
@T5_FIRST
def test_gradients_are_equal_recomputed_and_in_parts(make):
    env = text_env()
    found = []
    for options, config in (({}, {}), ({"gradient_checkpointing": True}, {}), ({}, {"micro_batch_size": 3})):
        policy = lm_policy(make, **options)
        rollout = collect(env, policy, num_episodes=16, seed=0)
        agent_of(env, policy, **config).update(rollout)
        found.append(take_gradients(policy))
    for other in found[1:]:
        close_gradients(other, found[0])


@pytest.mark.heavy
@T5_FIRST
def test_lora_trains_and_is_saved_with_its_base(make, tmp_path):
    pytest.importorskip("peft")
    make().save_pretrained(tmp_path / "base")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "base")
    policy, env = LMPolicy.load(tmp_path / "base", lora="r=2", seed=1), text_env()
    agent = agent_of(env, policy, penalty=KLPenalty(policy.reference(), 0.1), learning_rate=1e-2)
    assert policy.lm.model.active_peft_config.task_type == "SEQ_2_SEQ_LM"
    for _ in range(2):  # refuses a ratio other than 1, and at first a KL other than 0
        rollout = collect(env, policy, num_episodes=16)
        agent.penalty(rollout, policy)
        kl = rollout["kl"].abs().max()
        agent.update(rollout)
    assert kl > 1e-3
    agent.save(tmp_path / "saved")
    merged = LMPolicy.load(policy.merge(tmp_path / "merged"))
    expected = policy.evaluate(rollout)
    for one, two in zip(expected, algos.load(tmp_path / "saved").evaluate(rollout), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(expected, merged.evaluate(rollout), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


def test_a_saved_policy_is_a_transformers_folder(make, tmp_path):
    policy, env = lm_policy(make, temperature=0.7), text_env()
    agent_of(env, policy).save(tmp_path)
    rollout, loaded = collect(env, policy, num_episodes=4), algos.load(tmp_path)
    for one, two in zip(policy.evaluate(rollout), loaded.evaluate(rollout), strict=True):
        assert torch.equal(one, two)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "policy")
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), policy.lm.model.parameters(), strict=True))


@pytest.mark.heavy
def test_a_critic_reads_prompts_apart_and_is_saved(make, tmp_path):
    """Of a copy: its values are the head's of the model, and no later token changes them."""
    policy, env = lm_policy(make), text_env()
    policy = LMPolicy(policy.lm.model, policy.tokenizer, critic=Critic.from_language_model(policy.lm))
    with torch.no_grad():
        policy.critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    rollout = collect(env, policy, num_episodes=8, seed=0)
    values, mask = policy.evaluate(rollout).value.detach(), rollout["mask"]
    expected = policy.critic.head(policy.lm.hidden(rollout["observation"], prompt_lengths(rollout)))[..., 0]
    torch.testing.assert_close(values[mask], expected[mask], atol=VALUE, rtol=0)
    first = torch.arange(8), mask.int().argmax(1)
    changed = rollout.clone()
    changed["observation"] = torch.where(torch.cumsum(mask, 1) > 1, 3, rollout["observation"])
    torch.testing.assert_close(policy.evaluate(changed).value[first].detach(), values[first], atol=VALUE, rtol=0)
    agent = agent_of(env, policy, learning_rate=1e-2, gae_lambda=0.9)
    agent.update(rollout)
    agent.save(tmp_path)
    for one, two in zip(policy.evaluate(rollout), algos.load(tmp_path).evaluate(rollout), strict=True):
        assert torch.equal(one, two)


def test_sft_starts_at_the_loss_of_transformers(make):
    tokenizer = make_tokenizer(WORDS, ends=True)
    off = {"dropout_rate": 0.0} if make is make_t5 else {"dropout": 0.0}
    lm, pairs = LanguageModel(make(**off), tokenizer), [("a b c", "good"), ("d", "bad bad a")]
    losses = []
    for prompt, answer in pairs:
        ids, labels = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (prompt, answer))
        with torch.no_grad():
            logits = lm.model(input_ids=ids, labels=labels).logits[0, :, : len(WORDS)]
        losses += torch.nn.functional.cross_entropy(logits, labels[0], reduction="none").tolist()
    examples = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    config = SFTConfig(packing=False, num_epochs=1, batch_size=2)
    assert sft(lm, examples, config)[0]["sft/loss"] == pytest.approx(np.mean(losses), abs=1e-4)


@pytest.mark.heavy
def test_the_command_line_trains_with_a_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_bart().save_pretrained("bart")
    make_tokenizer(WORDS, ends=True).save_pretrained("bart")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c"}\n')
    (tmp_path / "rewards.py").write_text(
        "def good(completions):\n    return [float('good' in x) for x in completions]\n"
    )
    command = (
        "train --model bart --prompts prompts.jsonl --reward rewards.py:good --kl-coef 0.1 --max-prompt-tokens 4 "
        "--max-new-tokens 4 --total-steps 40 --num-envs 4 --config.num-episodes 8 --config.minibatch-size 8 "
        "--num-episodes 2 --json --run-dir run"
    )
    assert main(command.split()) in (0, None)
    assert isinstance(algos.load("run").lm.model, type(make_bart()))
    assert algos.load("run").lm.seq2seq.prompt_end == (EOS,)
