"""`Critic`: values by weights of its own, from the language model or from a reward model."""

import copy

import pytest
import torch
import transformers as tr
from transformers import AutoModel

import algos
from algos import Critic, LMPolicy, collect
from tests.helpers.lora import adapted
from tests.helpers.models import MODELS, WORDS, make_gpt2, make_tokenizer
from tests.helpers.reward_models import make_model as make_reward_model
from tests.helpers.small_agents import agent_of, gradients, lm_policy, with_critic
from tests.helpers.text_envs import play, text_env
from tests.helpers.tolerances import output_through
from textenv import KLPenalty, LanguageModel, RewardModel
from textenv.rollout import sequences

ANSWERS = [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]


def reward_model(name="gpt2", *, tokenizer=None, **options):
    return RewardModel(make_reward_model(name, **options), make_tokenizer(WORDS) if tokenizer is None else tokenizer)


def random_ids(rows, length, seed=0):
    return torch.randint(0, len(WORDS), (rows, length), generator=torch.Generator().manual_seed(seed))


# --- where the values come from --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_value_of_a_text_is_its_reward_model_score(name):
    judge = reward_model(name)
    critic, ids = Critic.from_reward_model(judge), random_ids(4, 11)
    values = critic.values(ids)
    assert values.shape == (4, 11) and values.std() > 0.1
    assert all(p.requires_grad for p in critic.parameters())
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in judge.model.parameters()}
    for stop in (1, 5, 11):
        score = judge.score_ids(ids[:, :stop], torch.ones_like(ids[:, :stop]))
        torch.testing.assert_close(values[:, stop - 1], score, atol=output_through(2, terms=10), rtol=0)


def test_the_last_value_is_the_score_that_is_paid():
    judge = reward_model()
    policy, rollout = with_critic(critic=Critic.from_reward_model(judge)), play(text_env(), ANSWERS)
    last = (rollout["terminated"] | rollout["truncated"]).float().argmax(1)
    ids = [row[: stop + 2] for row, stop in zip(sequences(rollout), last, strict=True)]
    scores = torch.cat([judge.score_ids(row[None], torch.ones_like(row[None])) for row in ids])
    following = policy.values(rollout)[1].gather(1, last[:, None])[:, 0]
    torch.testing.assert_close(following, scores, atol=output_through(2, terms=10), rtol=0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_copied_critic_says_0_with_the_models_trunk(name):
    lm = LanguageModel(MODELS[name](), make_tokenizer(WORDS))
    critic, ids = Critic.from_language_model(lm), random_ids(2, 7)
    assert (critic.values(ids) == 0).all() and critic.values(ids).dtype == torch.float32
    torch.testing.assert_close(critic.trunk(ids).last_hidden_state, lm.hidden(ids), atol=1e-5, rtol=0)
    assert {p.dtype for p in critic.head.parameters()} == {torch.float32}
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in lm.parameters()}


def test_values_and_evaluate_are_the_critics():
    policy, rollout = with_critic(), play(text_env(), ANSWERS)
    hidden = policy.critic.trunk(sequences(rollout)).last_hidden_state
    expected = (hidden @ policy.critic.head.weight[0] + policy.critic.head.bias).detach()
    mask = rollout["mask"]
    assert expected.std() > 0.1
    rounding = output_through(2, terms=hidden.shape[-1])  # two layers, and a head of weights about 1
    torch.testing.assert_close(policy.values(rollout)[0][mask], expected[:, :-1][mask], atol=rounding, rtol=0)
    torch.testing.assert_close(policy.evaluate(rollout).value[mask], expected[:, :-1][mask], atol=rounding, rtol=0)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_encoder_is_refused(name):
    with pytest.raises(ValueError, match=r"not an encoder such as BERT"):
        Critic.from_reward_model(reward_model(name))


def test_a_classifier_is_refused():
    with pytest.raises(ValueError, match="2 labels"):
        Critic.from_reward_model(reward_model(labels=2))


def test_a_model_that_reads_ahead_is_refused():
    judge = reward_model("bert")
    judge.model.score = judge.model.classifier
    with pytest.raises(ValueError, match="not causal"):
        Critic.from_reward_model(judge)


def test_a_critic_of_another_tokenizer_is_refused():
    """One that knows more tokens isn't."""
    shuffled = make_tokenizer([*WORDS[1:-2], WORDS[0], "<eos>", "<pad>"])
    with pytest.raises(ValueError, match="7 tokens of the policy are missing"):
        with_critic(critic=Critic.from_reward_model(reward_model(tokenizer=shuffled)))
    more = reward_model(tokenizer=make_tokenizer([*WORDS, "more"]), vocab_size=len(WORDS) + 1)
    with_critic(critic=Critic.from_reward_model(more))


def test_detach_value_is_refused_beside_a_critic():
    with pytest.raises(ValueError, match="detach_value"):
        with_critic(detach_value=True)


# --- what trains -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, adapted], ids=["full", "lora"])
def test_policy_and_critic_share_no_gradient(model):
    policy, rollout = with_critic(model=None if model is None else model()), play(text_env(), ANSWERS)
    log_prob, entropy, value = policy.evaluate(rollout)
    value.sum().backward()
    assert gradients(policy).keys() == {f"critic.{name}" for name, _ in policy.critic.named_parameters()}
    assert all(g.abs().sum() > 0 for name, g in gradients(policy).items() if "wte" in name or "head" in name)
    policy.zero_grad()
    (log_prob.sum() + entropy.sum()).backward()
    found = {name for name, g in gradients(policy).items() if g.abs().sum() > 0}
    assert found and all(name.startswith("lm.") for name in found)


@pytest.mark.heavy
def test_a_critic_replaces_the_value_head():
    policy = with_critic()
    assert not hasattr(policy, "value_head")
    before = copy.deepcopy(policy.state_dict())
    env = text_env()
    agent = agent_of(env, policy, learning_rate=1e-3, ent_coef=0.1)
    agent.learn(1)
    optimised = sum(p.numel() for group in agent.optimizer.adam.param_groups for p in group["params"])
    assert optimised == sum(p.numel() for p in policy.parameters())
    moved = {name for name, p in policy.state_dict().items() if not torch.equal(p, before[name])}
    assert moved.issuperset({"critic.head.weight", "critic.head.bias", "lm.model.transformer.wte.weight"})
    assert any(name.startswith("critic.trunk") for name in moved)


def test_an_adapter_is_merged_into_the_critic_alone():
    model = adapted()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(2), std=0.3)
    lm, ids = LanguageModel(model, make_tokenizer(WORDS)), random_ids(2, 7)
    critic = Critic.from_language_model(lm)
    hidden = lm.hidden(ids)
    torch.testing.assert_close(critic.trunk(ids).last_hidden_state, hidden, atol=1e-4, rtol=1e-4)
    with model.disable_adapter():
        assert (lm.hidden(ids) - hidden).abs().max() > 0.01, "the adapter says nothing: no test"
    assert all(p.requires_grad for p in critic.parameters())
    assert not [name for name, _ in critic.named_parameters() if "lora" in name]
    assert any("lora" in name for name, p in lm.named_parameters() if p.requires_grad)


@pytest.mark.heavy
def test_reference_and_divergence_ignore_the_critic():
    policy, plain = with_critic(), LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    rollout = play(text_env(), ANSWERS)
    reference = policy.reference()
    assert sum(p.numel() for p in reference.parameters()) == sum(p.numel() for p in policy.lm.parameters())
    other = LanguageModel(make_gpt2(seed=3), make_tokenizer(WORDS))
    torch.testing.assert_close(policy.divergence(rollout, other), plain.divergence(rollout, other), atol=1e-5, rtol=0)
    agent = agent_of(text_env(), policy, learning_rate=1e-3, penalty=KLPenalty(reference, 0.1))
    history = agent.learn(60)
    assert history[0]["reference/kl"] == pytest.approx(0, abs=1e-5)
    found, expected = (x.evaluate(rollout).log_prob for x in (reference, plain.reference()))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.heavy
def test_a_critic_learns_the_value_of_a_state():
    """Reward 1 for an answer that begins with "good", whatever follows: by regression, not by the policy's features."""
    policy, env = with_critic(), text_env()
    env.task.scores = lambda turns: [float(turn.completion_ids[0] == 5) for turn in turns]
    agent = agent_of(env, policy, learning_rate=3e-3, num_epochs=8, minibatch_size=8, num_episodes=32, gamma=1.0)
    history = [row for _ in range(4) for row in agent.learn(1)]
    assert history[-1]["value/loss"] < 0.5 * history[0]["value/loss"]


# --- scoring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODELS))
def test_values_do_not_change_with_padding(name):
    policy, ids = with_critic(name), random_ids(1, 6)
    alone = policy.critic.values(ids)
    for pads in range(1, 8):
        padded = torch.cat([ids, random_ids(1, pads, seed=pads)], dim=1)
        torch.testing.assert_close(policy.critic.values(padded)[:, :6], alone, atol=1e-5, rtol=1e-5)


def test_dropout_is_off_in_the_critic_too():
    model = make_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    policy, rollout = with_critic(model=model).train(), play(text_env(), ANSWERS)
    first, second = (policy.evaluate(rollout).value for _ in range(2))
    assert torch.equal(first, second) and first.std() > 0.1
    by_hand, ids = Critic(model.train().transformer, policy.critic.head, policy.lm.tokenizer), random_ids(2, 7)
    assert torch.equal(by_hand.values(ids), by_hand.values(ids))


def test_a_value_never_sees_what_comes_after_it():
    critic, ids = Critic.from_reward_model(reward_model("llama")), random_ids(1, 8)
    other = ids.clone()
    other[:, 5:] = (other[:, 5:] + 1) % len(WORDS)
    one, two = critic.values(ids), critic.values(other)
    torch.testing.assert_close(one[:, :5], two[:, :5], atol=1e-5, rtol=0)
    assert (one[:, 5:] - two[:, 5:]).abs().min() > 1e-3


def test_the_value_head_computes_in_fp32_under_bf16():
    policy, ids = with_critic(model=make_gpt2().bfloat16()), random_ids(2, 7)
    hidden, value = policy.critic.trunk(ids).last_hidden_state, policy.critic.values(ids)
    assert hidden.dtype == torch.bfloat16 and value.dtype == torch.float32
    expected = hidden.double() @ policy.critic.head.weight.double()[0]
    torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-6)


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("model", [None, adapted], ids=["full", "lora"])
def test_a_saved_critic_comes_back_to_the_bit(tmp_path, model):
    policy, env = with_critic(model=None if model is None else model(), temperature=0.7), text_env()
    agent = agent_of(env, policy, learning_rate=1e-3)
    agent.learn(1)
    agent.save(tmp_path)
    loaded, rollout = algos.load(tmp_path), collect(env, policy, num_episodes=6)
    assert isinstance(loaded.critic, Critic) and loaded.temperature == 0.7
    for one, two in zip(policy.evaluate(rollout), loaded.evaluate(rollout), strict=True):
        assert torch.equal(one, two)
    trained, again = ({n for n, p in x.named_parameters() if p.requires_grad} for x in (policy, loaded))
    assert trained == again
    folder = tmp_path / "policy" / "critic"
    assert not (folder.parent / "value_head.safetensors").exists()
    plain = AutoModel.from_pretrained(folder).state_dict()  # transformers reads it without us
    assert plain.keys() == policy.critic.trunk.state_dict().keys()
    assert all(torch.equal(weight, plain[name]) for name, weight in policy.critic.trunk.state_dict().items())


def test_saving_over_another_policy_leaves_none_of_it(tmp_path):
    shared, own = lm_policy(), with_critic()
    for policy in (own, shared, own):
        policy.save(tmp_path)
        assert (LMPolicy.load(tmp_path).critic is None) == (policy is shared)
        assert (tmp_path / "value_head.safetensors").exists() == (policy is shared)


def test_a_critic_from_a_reward_model_comes_back_too(tmp_path):
    policy = with_critic(critic=Critic.from_reward_model(reward_model()))
    folder = tmp_path / "critic"  # a policy's own folder may be called so
    folder.mkdir()
    policy.save(folder)
    ids = random_ids(2, 7)
    assert torch.equal(LMPolicy.load(folder).critic.values(ids), policy.critic.values(ids))
    shared = LMPolicy(make_gpt2(), make_tokenizer(WORDS), temperature=0.6)
    folder = tmp_path / "other" / "critic"
    folder.mkdir(parents=True)
    shared.save(folder)
    assert LMPolicy.load(folder).critic is None and LMPolicy.load(folder).temperature == 0.6


def test_load_makes_a_critic_and_keeps_saved_options(tmp_path):
    LMPolicy(make_gpt2(), make_tokenizer(WORDS), temperature=0.6).save(tmp_path)
    copied = LMPolicy.load(tmp_path, critic="copy")
    assert (copied.critic.values(random_ids(1, 4)) == 0).all() and copied.temperature == 0.6
    judge = reward_model()
    judge.model.save_pretrained(tmp_path / "judge")
    judge.tokenizer.save_pretrained(tmp_path / "judge")
    policy, ids = LMPolicy.load(tmp_path, critic=tmp_path / "judge"), random_ids(2, 5)
    score = judge.score_ids(ids, torch.ones_like(ids))
    torch.testing.assert_close(policy.critic.values(ids)[:, -1], score, atol=1e-5, rtol=0)


def test_a_bfloat16_reward_model_is_a_float32_critic():
    judge = RewardModel(make_reward_model("llama").bfloat16(), make_tokenizer(WORDS))
    critic, ids = Critic.from_reward_model(judge), random_ids(2, 5)
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    assert judge.model.dtype == torch.bfloat16
    score = judge.score_ids(ids, torch.ones_like(ids))
    torch.testing.assert_close(critic.values(ids)[:, -1], score, atol=0.1, rtol=0.05)
    assert isinstance(judge.model, tr.LlamaForSequenceClassification)
