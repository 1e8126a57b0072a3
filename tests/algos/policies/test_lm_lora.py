"""Adapters (LoRA): a reference without a second copy of the base, training, saving and loading."""

import copy
import json
import shutil

import pytest
import torch

import algos
from algos import LMPolicy, SFTConfig, collect, sft
from algos.cli import main
from algos.training.run import Run
from tests.helpers.chunks import limit_logits
from tests.helpers.lora import MAKERS, adapted, lora_policy, peft
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from tests.helpers.small_agents import agent_of, gradients
from tests.helpers.text_envs import play, text_env
from textenv import KLPenalty, KLReward, LanguageModel, TextEnv
from textenv.errors import InvariantError
from textenv.lm.decoding import Decoder
from textenv.lm.loading import load_causal_lm
from textenv.lm.model import FrozenLanguageModel
from textenv.prompts.prompts import PromptList


def train(policy, iterations=20, **options):
    options = dict(learning_rate=1e-2, num_episodes=8, minibatch_size=8) | options
    agent = agent_of(text_env(), policy, **options)
    return agent, [row for _ in range(iterations) for row in agent.learn(1)]


def base_weights(policy):
    return {name: p.detach().clone() for name, p in policy.lm.named_parameters() if not p.requires_grad}


def places(parameters):
    return {p.data_ptr() for p in parameters}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
        ("llama", {}),
        ("llama", {"modules_to_save": ["lm_head"]}),
    ],
)
def test_a_fresh_adapters_reference_stays_the_base(name, options):
    policy = lora_policy(name, temperature=0.7, **options)
    reference, frozen = policy.reference(), base_weights(policy)
    plain = LanguageModel(MAKERS[name][0](), make_tokenizer(WORDS), temperature=0.7)  # made anew, without adapter
    rollout = collect(text_env(), policy, num_episodes=8)
    before = reference.evaluate(rollout).log_prob
    torch.testing.assert_close(before, plain.evaluate(rollout).log_prob.detach(), atol=1e-5, rtol=0)
    _, history = train(policy, penalty=KLPenalty(reference, 0.1))
    assert torch.equal(reference.evaluate(rollout).log_prob, before)
    assert history[0]["reference/kl"] == pytest.approx(0, abs=1e-5) and abs(history[-1]["reference/kl"]) > 0.01
    assert (policy.evaluate(rollout).log_prob - before)[rollout["mask"]].abs().max() > 0.01
    assert frozen and all(torch.equal(p, frozen[key]) for key, p in base_weights(policy).items())


@pytest.mark.heavy
def test_a_loaded_adapters_first_kl_is_zero(tmp_path):
    first = lora_policy()
    agent, _ = train(first, 5)
    agent.save(tmp_path)
    policy = algos.load(tmp_path)
    reference, rollout = policy.reference(), collect(text_env(), policy, num_episodes=8)
    before = reference.evaluate(rollout).log_prob
    torch.testing.assert_close(before, policy.evaluate(rollout).log_prob.detach(), atol=1e-5, rtol=0)
    assert policy.divergence(rollout, reference).abs().max() < 1e-5
    charged = rollout.clone()
    KLPenalty(reference, 0.1)(charged, policy)
    assert charged["kl"].abs().max() < 1e-5  # the sampler's cache rounds otherwise than the scorer
    plain = LanguageModel(make_gpt2(), make_tokenizer(WORDS)).evaluate(rollout).log_prob
    assert (plain - before).abs().max() > 0.01, "the adapter says nothing: no test"
    train(policy, penalty=KLPenalty(reference, 0.1))
    assert torch.equal(reference.evaluate(rollout).log_prob, before)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}])
def test_the_reference_allocates_only_the_adapter(options):
    policy = lora_policy("llama", **options)
    trained = sum(p.numel() for p in policy.lm.parameters() if p.requires_grad)
    reference = policy.reference()
    assert isinstance(reference, FrozenLanguageModel)
    new = [p for p in reference.parameters() if p.data_ptr() not in places(policy.parameters())]
    assert sum(p.numel() for p in new) == trained < 0.2 * sum(p.numel() for p in policy.lm.parameters())
    weights = [p for p in reference.state_dict().values() if p.data_ptr() not in places(policy.lm.parameters())]
    assert sum(p.numel() for p in weights) == trained
    assert reference.model is policy.lm.model


def test_kl_at_step_0_is_checked_with_an_adapter_too():
    policy = lora_policy()
    rollout = collect(text_env(), policy, num_episodes=8)
    rollout["log_prob"] = rollout["log_prob"] + 0.01
    with pytest.raises(InvariantError, match="same weights"):
        KLPenalty(policy.reference(), 0.1)(rollout, policy)


@pytest.mark.parametrize(
    "share",
    [
        lambda policy: policy,
        lambda policy: policy.lm,
        lambda policy: LanguageModel(policy.lm.model.get_base_model(), policy.lm.tokenizer),
    ],
)
def test_a_reference_may_not_share_what_trains(share):
    policy = lora_policy()
    rollout = collect(text_env(), policy, num_episodes=2)
    with pytest.raises(ValueError, match="shares the policy's weights"):
        KLPenalty(share(policy), 0.1)(rollout, policy)


def test_a_reference_refuses_to_drift_later():
    policy = lora_policy()
    reference, rollout = policy.reference(), collect(text_env(), policy, num_episodes=2)
    policy.lm.model.get_output_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="would change"):
        reference.evaluate(rollout)


@pytest.mark.heavy
def test_layers_frozen_by_hand_are_shared_without_peft():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    policy.lm.model.transformer.requires_grad_(False)
    policy.lm.model.transformer.h[1].requires_grad_(True)
    reference = policy.reference()
    rollout = collect(text_env(), policy, num_episodes=8)
    before = reference.evaluate(rollout).log_prob
    copied = copy.deepcopy(policy.lm).evaluate(rollout).log_prob
    train(policy, 5, penalty=KLPenalty(reference, 0.1))
    torch.testing.assert_close(before, copied.detach(), atol=1e-5, rtol=0)
    assert torch.equal(reference.evaluate(rollout).log_prob, before)
    assert (policy.evaluate(rollout).log_prob - before).abs().max() > 0.01
    assert sum(p.numel() for p in reference.parameters()) < sum(p.numel() for p in policy.lm.parameters())


# --- the policy ------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("name", MAKERS)
def test_acting_with_a_cache_equals_scoring(name):
    policy = lora_policy(name)
    train(policy, 3)  # an adapter of effect
    rollout = collect(text_env(), policy.train(), num_episodes=16)
    mask = rollout["mask"]
    assert Decoder(policy.lm, num_slots=3, max_length=9).cached
    torch.testing.assert_close(policy.evaluate(rollout).log_prob, rollout["log_prob"], atol=1e-5, rtol=0)
    tokens = rollout["observation"]
    logits = policy.lm.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.log_softmax(-1)
    expected = logits.gather(-1, rollout["action"][..., None])[..., 0]
    torch.testing.assert_close(policy.evaluate(rollout).log_prob[mask], expected[mask], atol=1e-5, rtol=0)
    with policy.lm.model.disable_adapter():
        assert (policy.evaluate(rollout).log_prob - rollout["log_prob"])[mask].abs().max() > 0.01


def test_only_the_adapter_and_the_value_head_train():
    policy = lora_policy()
    frozen = base_weights(policy)
    agent, _ = train(policy, 1)
    optimised = {id(p) for group in agent.optimizer.adam.param_groups for p in group["params"]}
    names = {name for name, p in policy.named_parameters() if id(p) in optimised}
    assert names and all("lora_" in name or name.startswith("value_head") for name in names)
    assert any("lora_A" in name for name in names) and "value_head.weight" in names
    assert all(torch.equal(p, frozen[key]) for key, p in base_weights(policy).items())


@pytest.mark.heavy
def test_ppo_learns_by_the_adapter_alone():
    """Reward 1 for each 'good'."""
    env = text_env()
    env.task.scores = lambda turns: [float(turn.completion_ids.count(5)) for turn in turns]
    policy = lora_policy(r=4)
    agent = agent_of(env, policy, learning_rate=1e-2, num_epochs=4, minibatch_size=8, max_grad_norm=1.0, gamma=1.0)
    history = [row for _ in range(25) for row in agent.learn(1)]
    first, last = history[0]["episode/return"], history[-1]["episode/return"]
    print(f"mean count of 'good' {first:.2f} -> {last:.2f} of 5")
    assert first < 3 and last > 4


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
def test_a_shared_reference_has_the_gradient_of_a_copy(options, monkeypatch):
    """In chunks too, where logits of both are computed again in the backward pass, by the reference's own weights."""
    policy = lora_policy("llama", **options)
    reference, whole = policy.reference(), copy.deepcopy(policy.lm).requires_grad_(False)
    with torch.no_grad():
        for p in policy.lm.parameters():
            p.add_(0.1 * torch.randn(p.shape) if p.requires_grad else 0.0)
    rollout = play(text_env(), [(5, 1, 7), (1, 2, 3, 4, 7), (7,)])
    found = []
    for other, elements in ((whole, 2**24), (reference, 2**24), (reference, 2 * len(WORDS))):
        limit_logits(monkeypatch, elements)
        policy.zero_grad()
        kl = policy.divergence(rollout, other)
        kl.sum().backward()
        found.append((kl.detach(), gradients(policy)))
    assert found[0][0].max() > 1e-3
    for kl, gradient in found[1:]:
        torch.testing.assert_close(kl, found[0][0], atol=1e-6, rtol=1e-5)
        assert gradient.keys() == found[0][1].keys()
        for key, one in gradient.items():
            torch.testing.assert_close(one, found[0][1][key], atol=1e-5, rtol=1e-3)


@pytest.mark.heavy
def test_stepwise_penalties_take_adapter_references():
    policy = lora_policy()
    reference, tokenizer = policy.reference(), policy.lm.tokenizer
    train(policy, 5)
    rollout = collect(text_env(), policy, num_episodes=1)
    KLPenalty(reference, 0.3)(rollout, policy)
    mask = rollout["mask"][0]
    start = int(mask.int().argmax()) + 1
    deck = PromptList([rollout["observation"][0, :start].tolist()])
    deck.score = lambda turns: [0.0]
    env = TextEnv(deck, tokenizer=tokenizer, max_prompt_tokens=4, max_new_tokens=5)
    stepwise = KLReward(env, reference, 0.3)
    stepwise.reset(seed=0)
    for t in mask.nonzero()[:, 0].tolist():
        action = {"token": rollout["action"][0, t].item(), "log_prob": rollout["log_prob"][0, t].item()}
        info = stepwise.step(action)[-1]
        assert info["kl"] == pytest.approx(rollout["kl"][0, t].item(), abs=1e-5)
    assert rollout["kl"].abs().max() > 0.01


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_saved_adapter_is_a_peft_folder(tmp_path):
    base = tmp_path / "base model"
    make_gpt2().save_pretrained(base)
    make_tokenizer(WORDS).save_pretrained(base)
    model = adapted(base=LMPolicy.load(base).lm.model)
    policy = LMPolicy(model, make_tokenizer(WORDS), temperature=0.7)
    agent, _ = train(policy, 3)
    agent.save(tmp_path / "run")
    folder = tmp_path / "run" / "policy"
    assert not list(folder.rglob("model.safetensors")), "the base was written again"
    loaded, rollout = algos.load(tmp_path / "run"), collect(text_env(), policy, num_episodes=4)
    assert loaded.temperature == 0.7
    assert all(torch.equal(*pair) for pair in zip(policy.evaluate(rollout), loaded.evaluate(rollout), strict=True))
    trains = [{n for n, p in x.named_parameters() if p.requires_grad} for x in (policy, loaded)]
    assert trains[0] == trains[1] and len(trains[0]) > 2
    other = peft.AutoPeftModelForCausalLM.from_pretrained(folder)  # peft reads it without us
    theirs = LanguageModel(other, policy.lm.tokenizer, temperature=0.7).evaluate(rollout).log_prob
    torch.testing.assert_close(theirs, loaded.evaluate(rollout).log_prob, atol=1e-6, rtol=0)


@pytest.mark.heavy
def test_a_nameless_base_is_saved_beside_its_adapter(tmp_path):
    """And the policy stays as it is."""
    policy = lora_policy("llama")
    agent, _ = train(policy, 3)
    rollout = collect(text_env(), policy, num_episodes=4)
    before = policy.evaluate(rollout).log_prob
    agent.save(tmp_path)
    assert torch.equal(policy.evaluate(rollout).log_prob, before)
    assert torch.equal(algos.load(tmp_path).evaluate(rollout).log_prob, before)
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy" / "base")
    assert all(torch.equal(*pair) for pair in zip(base.parameters(), make_llama().parameters(), strict=True))


@pytest.mark.heavy
def test_an_adapter_saved_over_a_policy_comes_back(tmp_path):
    base = tmp_path / "base model"
    make_gpt2(seed=5).save_pretrained(base)
    make_tokenizer(WORDS).save_pretrained(base)
    named = LMPolicy(adapted(base=LMPolicy.load(base).lm.model, seed=1), make_tokenizer(WORDS))
    nameless, whole = lora_policy("gpt2", seed=2), LMPolicy(make_gpt2(seed=7), make_tokenizer(WORDS))
    rollout = collect(text_env(), whole, num_episodes=4)
    for policy in (nameless, named, whole, nameless, whole):
        policy.save(tmp_path / "run")
        loaded = LMPolicy.load(tmp_path / "run")
        loaded.save(tmp_path / "run")  # over what it was read from
        for other in (loaded, LMPolicy.load(tmp_path / "run")):
            assert torch.equal(other.evaluate(rollout).log_prob, policy.evaluate(rollout).log_prob)


def test_a_missing_base_is_said_with_its_place(tmp_path):
    adapted().save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no base model"):
        LMPolicy.load(tmp_path)


def test_prompt_tuning_is_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(make_gpt2(), config)
    with pytest.raises(ValueError, match="PromptTuningConfig.*LoraConfig"):
        LMPolicy(model, make_tokenizer(WORDS))


def test_a_bfloat16_base_has_bfloat16s_tolerance():
    """With a float32 adapter."""
    policy = lora_policy(base=make_gpt2().to(torch.bfloat16))
    dtypes = {p.dtype for p in policy.lm.parameters() if p.requires_grad}
    assert dtypes == {torch.float32} and policy.lm.model.dtype is torch.bfloat16
    _, history = train(policy, 2, penalty=KLPenalty(policy.reference(), 0.1))
    assert history[0]["policy/sampler_gap"] < 0.1


# --- folders ----------------------------------------------------------------------------------------------------------


def log_probs(policy, rollout):
    return policy.evaluate(rollout).log_prob.detach()


@pytest.fixture
def trained_on_a_folder(tmp_path, monkeypatch):
    """A run in ``run`` whose base was loaded by a relative name, from where commands are typed."""
    monkeypatch.chdir(tmp_path)
    make_gpt2().save_pretrained("model")
    make_tokenizer(WORDS).save_pretrained("model")
    policy = LMPolicy(adapted(base=load_causal_lm("model")), make_tokenizer(WORDS))
    agent, _ = train(policy, 2)
    agent.save("run")
    rollout = collect(text_env(), policy, num_episodes=4)
    return tmp_path, policy, rollout


@pytest.mark.heavy
def test_a_run_on_a_relative_base_opens_anywhere(trained_on_a_folder, tmp_path_factory, monkeypatch):
    home, policy, rollout = trained_on_a_folder
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    loaded = algos.load(home / "run")
    torch.testing.assert_close(log_probs(loaded, rollout), log_probs(policy, rollout), atol=0, rtol=0)
    (home / "model").rename(home / "gone")
    with pytest.raises(ValueError, match=rf"its base model '{home / 'model'}' does not exist: save the base in .*base"):
        algos.load(home / "run")


@pytest.mark.heavy
def test_a_relative_base_survives_a_change_of_folder(trained_on_a_folder, tmp_path_factory, monkeypatch):
    home, _, rollout = trained_on_a_folder
    policy = LMPolicy(adapted(base=load_causal_lm("model")), make_tokenizer(WORDS))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))  # as a reward may do
    train(policy, 2)[0].save(home / "later")
    torch.testing.assert_close(log_probs(algos.load(home / "later"), rollout), log_probs(policy, rollout))


@pytest.mark.heavy
@pytest.mark.parametrize("again", [True, False], ids=["same folder", "another folder"])
def test_a_nameless_base_stays_with_its_adapter(again, tmp_path):
    policy = lora_policy()
    agent, _ = train(policy, 2)
    agent.save(tmp_path / "run")
    rollout = collect(text_env(), policy, num_episodes=4)
    loaded = algos.load(tmp_path / "run")
    place = tmp_path / ("run" if again else "other")
    agent_of(text_env(), loaded).save(place)
    if not again:
        shutil.rmtree(tmp_path / "run")
    torch.testing.assert_close(log_probs(algos.load(place), rollout), log_probs(policy, rollout), atol=0, rtol=0)


@pytest.mark.heavy
def test_merging_writes_a_folder_transformers_reads(trained_on_a_folder, capsys):
    from transformers import AutoModelForCausalLM

    home, policy, rollout = trained_on_a_folder
    main(["merge", "run", "plain", "--json"])
    assert json.loads(capsys.readouterr().out) == {"merged": "plain"}
    (home / "model").rename(home / "gone")  # nothing of it is needed any more
    merged = LMPolicy.load("plain")
    torch.testing.assert_close(log_probs(merged, rollout), log_probs(policy, rollout), atol=1e-5, rtol=0)
    assert all(p.requires_grad for p in merged.parameters()) and not (home / "plain" / "adapter_config.json").exists()
    value = merged.evaluate(rollout).value
    torch.testing.assert_close(value, policy.evaluate(rollout).value, atol=1e-5, rtol=0)
    plain = AutoModelForCausalLM.from_pretrained("plain")
    assert type(plain).__name__ == "GPT2LMHeadModel"
    for folder, to, said in (("run", "plain", "exists already"), ("nowhere", "x", "no saved agent")):
        with pytest.raises(SystemExit) as stop:
            main(["merge", folder, to])
        assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.heavy
def test_an_adapter_on_an_unsaved_base_comes_back(tmp_path):
    make_llama().save_pretrained(tmp_path / "model")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "model")
    first = LMPolicy.load(tmp_path / "model")
    sft(first, ["a good b ."] * 8, SFTConfig(num_epochs=3, learning_rate=1e-2))
    policy = LMPolicy(adapted("llama", base=first.lm.model), first.tokenizer)
    agent, _ = train(policy, 3)
    agent.save(tmp_path / "run")
    rollout = collect(text_env(), policy, num_episodes=4)
    assert torch.equal(log_probs(algos.load(tmp_path / "run"), rollout), log_probs(policy, rollout))


def test_a_run_that_goes_on_over_another_base_is_told(tmp_path, caplog):
    agent, _ = train(lora_policy("llama"), 1)
    agent.learn(1, run_dir=tmp_path, checkpoint_every=1)
    for seed, said in ((0, False), (5, True)):
        caplog.clear()
        other = agent_of(text_env(), lora_policy("llama", base=make_llama(seed=seed)), num_episodes=8, minibatch_size=8)
        Run(other).restore(tmp_path)
        assert ("frozen weights differ from those in the run" in caplog.text) is said


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of adapters on tied layers
@pytest.mark.parametrize("target", ["lm_head", "wte"])
def test_merging_on_tied_layers_keeps_the_policy(target, tmp_path, capsys):
    agent, _ = train(lora_policy(target_modules=["c_attn", target]), 3)
    agent.save(tmp_path / "run")
    rollout = collect(text_env(), agent.policy, num_episodes=4)
    main(["merge", str(tmp_path / "run"), str(tmp_path / "plain")])
    merged = LMPolicy.load(tmp_path / "plain")
    torch.testing.assert_close(log_probs(merged, rollout), log_probs(agent.policy, rollout), atol=1e-4, rtol=0)
