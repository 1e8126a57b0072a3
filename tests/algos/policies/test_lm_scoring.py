"""Acting and scoring agree: ratio 1, dropout, temperature, top-k; the reference, and the value head."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from algos import PPO, LMPolicy, MLPPolicy, PPOConfig, collect
from algos.losses import clipped_policy_loss
from tests.helpers.chunks import limit_logits
from tests.helpers.models import ALL_MODELS, MODELS, WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import agent_of, cartpole, control_rollout, gradients, lm_policy, mlp_for
from tests.helpers.text_envs import Script, play, text_env
from textenv import KLPenalty, LanguageModel, TextVectorEnv
from textenv.errors import InvariantError
from textenv.lm.decoding import Decoder

NINE = len(WORDS)


class Gaps(list):
    """PPO's loss, which keeps the largest difference of new and old log-probabilities of every part of an update."""

    def __call__(self, *, log_ratio, **columns):
        self.append(log_ratio.detach().abs().max().item())
        return clipped_policy_loss(log_ratio=log_ratio, **columns)


@pytest.fixture
def gaps():
    return Gaps()


def parts(units, minibatch, micro):
    """Calls of evaluate in an epoch; a single row that is left over joins the minibatch before it."""
    sizes = [min(minibatch, units - start) for start in range(0, units, minibatch)]
    if minibatch > 1 and sizes[-1] == 1:
        sizes[-2:] = [minibatch + 1]
    return sum(-(-size // (micro or size)) for size in sizes)


# --- ratio 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("minibatch", "micro", "chunk"),
    [(16, None, None), (4, None, 3 * NINE), (5, 2, NINE), (1, 1, None), (16, 3, 7 * NINE)],
)
@pytest.mark.parametrize("name", MODELS)
def test_the_ratio_is_one_for_language_models(name, minibatch, micro, chunk, gaps, monkeypatch):
    if chunk is not None:
        limit_logits(monkeypatch, chunk)
    env, policy = text_env(), lm_policy(MODELS[name], seed=3)
    cut = dict(minibatch_size=minibatch, micro_batch_size=micro, normalize_advantage=minibatch > 1)
    agent = agent_of(env, policy, num_epochs=2, policy_loss=gaps, **cut)
    rollout = collect(env, policy, num_episodes=16)
    agent.update(rollout)
    assert len(gaps) == 2 * parts(16, minibatch, micro) and max(gaps) < 1e-5
    assert Decoder(policy.lm, num_slots=3, max_length=9).cached, "it acted by the padded path: no cache was tested"


@pytest.mark.parametrize("name", ALL_MODELS)
def test_the_ratio_is_one_for_every_family(name, gaps):
    """With forbidden tokens and a temperature."""
    env, policy = text_env(forbidden=[0, 4]), lm_policy(ALL_MODELS[name], temperature=0.7)
    agent_of(env, policy, minibatch_size=3, policy_loss=gaps).update(collect(env, policy, num_episodes=16))
    assert len(gaps) == parts(16, 3, None) and max(gaps) < 1e-5


@pytest.mark.heavy
@pytest.mark.parametrize(("minibatch", "micro"), [(10_000, None), (64, None), (50, 7), (1, 1)])
@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_the_ratio_is_one_for_perceptrons(kind, minibatch, micro, gaps):
    env, policy, rollout = control_rollout()
    if kind == "box":
        env, policy = pendulum()
        rollout = collect(env, policy, num_steps=10)
    cut = dict(minibatch_size=minibatch, micro_batch_size=micro, normalize_advantage=minibatch > 1)
    agent_of(env, policy, policy_loss=gaps, **cut).update(rollout)
    assert len(gaps) == parts(int(rollout["mask"].sum()), minibatch, micro) and max(gaps) < 1e-5


def pendulum():
    """Box actions that are often clipped at the bounds, and a standard deviation that is not 1."""
    import gymnasium as gym

    env = gym.make_vec("Pendulum-v1", num_envs=3, vectorization_mode="sync")
    policy = mlp_for(env)
    policy.log_std.data.fill_(1.2)
    return env, policy


def test_a_box_actions_log_prob_is_of_the_one_drawn():
    """Recorded before the bounds clip it: by `torch.distributions`."""
    env, policy = pendulum()
    rollout = collect(env, policy, num_steps=10)
    assert (rollout["action"].abs() > 2).any(), "no action beyond the bounds: the test guards nothing"
    mean = policy.actor(rollout["observation"]).detach()
    normal = torch.distributions.Normal(mean, policy.log_std.detach().exp())
    torch.testing.assert_close(rollout["log_prob"], normal.log_prob(rollout["action"]).sum(-1), atol=1e-5, rtol=0)
    expected = normal.entropy().sum(-1)
    torch.testing.assert_close(policy.evaluate(rollout).entropy.detach(), expected, atol=1e-5, rtol=0)


def test_a_two_dimensional_box_is_scored_as_sampled():
    policy = MLPPolicy(spaces.Box(-1, 1, (2, 3)), spaces.Box(-1, 1, (2, 2)), hidden=(8,))
    observation = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    step = policy.act(observation)
    mean = policy.actor(torch.from_numpy(observation).flatten(1)).view(5, 2, 2)
    expected = torch.distributions.Normal(mean, 1.0).log_prob(step.action).sum((1, 2))
    assert step.action.shape == (5, 2, 2)
    torch.testing.assert_close(step.log_prob, expected.detach(), atol=1e-5, rtol=0)
    batch = {"observation": torch.from_numpy(observation), "action": step.action}
    torch.testing.assert_close(policy.evaluate(batch).log_prob.detach(), step.log_prob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_no_update_or_former_text_leaves_a_stale_cache(name):
    """One slot, answers of one token: 2 1 0 4 seems to go on from 3 1, and every text from its last reading."""
    task = Script([(3, 1), (2, 1, 0, 4), (2, 1), (2, 1, 5)])
    env, policy = text_env(task, num_envs=1, max_new_tokens=1), lm_policy(MODELS[name])
    agent = agent_of(env, policy, learning_rate=1e-2)
    for _ in range(3):
        rollout = agent.collector.collect(num_episodes=16)
        before = policy.evaluate(rollout).log_prob.detach()
        torch.testing.assert_close(before, rollout["log_prob"], atol=1e-5, rtol=0)
        agent.update(rollout)
    assert (policy.evaluate(rollout).log_prob - before).abs().max() > 0.01


def dropout_gpt2():
    return make_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)


def force_dropout(policy, rollout):
    policy.lm.model.train()


def other_temperature(policy, rollout):
    policy.lm.temperature = 0.6


def shifted_by_one(policy, rollout):
    rollout["log_prob"] = rollout["log_prob"].roll(1, dims=1)


def not_a_number(policy, rollout):
    rollout["log_prob"][rollout["mask"]] = torch.nan


@pytest.mark.parametrize("broken", [force_dropout, other_temperature, shifted_by_one, not_a_number])
def test_the_check_fails_on_a_broken_language_model(broken):
    env, policy = text_env(), lm_policy(dropout_gpt2)
    agent, rollout = agent_of(env, policy), collect(env, policy, num_episodes=16)
    agent.update(rollout.clone())
    broken(policy, rollout)
    with pytest.raises(RuntimeError, match="log_prob: (before the first step of an update|not finite)"):
        agent.update(rollout)


# --- dropout, temperature ---------------------------------------------------------------------------------------------


def test_dropout_is_off_while_scoring_and_acting():
    env, policy = text_env(), lm_policy(dropout_gpt2).train()
    rollout = collect(env, policy.train(), num_episodes=16)
    first, second = policy.train().evaluate(rollout), policy.evaluate(rollout)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.testing.assert_close(first.log_prob.detach(), rollout["log_prob"], atol=1e-5, rtol=0)
    KLPenalty(policy.reference().train(), 0.3)(rollout, policy)
    assert rollout["kl"].abs().max() < 1e-5
    plain = make_gpt2()(rollout["observation"]).logits.log_softmax(-1)
    expected = plain.gather(-1, rollout["action"][..., None])[..., 0]
    mask = rollout["mask"]
    torch.testing.assert_close(first.log_prob[mask], expected[mask], atol=1e-5, rtol=0)


def test_a_loaded_policy_scores_without_its_dropout(tmp_path):
    lm_policy(dropout_gpt2).save(tmp_path)
    policy = LMPolicy.load(tmp_path).train()
    rollout = collect(text_env(), policy, num_episodes=8)
    torch.testing.assert_close(policy.evaluate(rollout).log_prob, rollout["log_prob"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("broken", [other_temperature, shifted_by_one, not_a_number])
def test_kl_at_step_0_to_equal_weights_must_be_zero(broken):
    env, policy = text_env(), lm_policy(dropout_gpt2)
    penalty, rollout = KLPenalty(policy.reference(), 0.1), collect(env, policy, num_episodes=16)
    broken(policy, rollout)
    with pytest.raises(InvariantError, match="same weights"):
        penalty(rollout, policy)


def test_a_policy_that_acts_with_dropout_is_refused():
    env, policy = text_env(), lm_policy(dropout_gpt2)
    force_dropout(policy, None)
    with pytest.raises(ValueError, match="switch dropout off"):
        collect(env, policy, num_episodes=16)


@pytest.mark.parametrize("who", ["policy", "reference"])
def test_kl_at_step_0_sees_dropout_in_one_of_the_two(who):
    env, policy = text_env(), lm_policy(dropout_gpt2)
    reference = policy.reference()
    collect(env, policy, num_episodes=16)  # a policy that begins to act with dropout on is refused
    (policy.lm if who == "policy" else reference).model.train()
    rollout = collect(env, policy, num_episodes=16)
    with pytest.raises(InvariantError, match="same weights"):
        KLPenalty(reference, 0.1)(rollout, policy)


def test_kl_at_step_0_is_checked_for_perceptrons():
    """To other weights it may differ from 0."""
    env, policy, rollout = control_rollout()
    KLPenalty(copy.deepcopy(policy), 0.1)(rollout.clone(), policy)
    KLPenalty(mlp_for(env, seed=9), 0.1)(rollout.clone(), policy)
    rollout["log_prob"] = rollout["log_prob"] + 0.01
    with pytest.raises(InvariantError, match="same weights"):
        KLPenalty(copy.deepcopy(policy), 0.1)(rollout, policy)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("name", MODELS)
def test_sampler_and_reference_share_temperature(name, temperature, gaps):
    env, policy = text_env(), lm_policy(MODELS[name], temperature=temperature)
    rollout = collect(env, policy, num_episodes=16)
    mask = rollout["mask"]
    with torch.no_grad():
        logits = MODELS[name]()(rollout["observation"]).logits
    every = (logits / temperature).log_softmax(-1)
    expected = every.gather(-1, rollout["action"][..., None])[..., 0]
    torch.testing.assert_close(rollout["log_prob"][mask], expected[mask], atol=1e-5, rtol=0)
    entropy = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(policy.evaluate(rollout).entropy[mask].detach(), entropy[mask], atol=1e-5, rtol=0)
    reference = LanguageModel(MODELS[name](), make_tokenizer(WORDS)).requires_grad_(False)
    KLPenalty(reference, 0.1)(rollout, policy)  # made at temperature 1, must follow the policy's
    torch.testing.assert_close(rollout["reference_log_prob"][mask], expected[mask], atol=1e-5, rtol=0)
    agent_of(env, policy, policy_loss=gaps).update(rollout)
    assert max(gaps) < 1e-5


# --- the reference ----------------------------------------------------------------------------------------------------


def text_and_language_model():
    policy = lm_policy()
    return text_env(), policy, policy.reference(), dict(num_episodes=4)


def text_and_copy_of_the_policy():
    """A reference is "a `LanguageModel` or a frozen copy of the policy", says KLPenalty."""
    policy = lm_policy()
    return text_env(), policy, copy.deepcopy(policy).requires_grad_(False), dict(num_episodes=4)


def control_and_copy_of_the_policy():
    env = cartpole()
    policy = mlp_for(env)
    return env, policy, copy.deepcopy(policy).requires_grad_(False), dict(num_steps=16)


@pytest.mark.heavy
@pytest.mark.parametrize("make", [text_and_language_model, text_and_copy_of_the_policy, control_and_copy_of_the_policy])
def test_the_reference_does_not_drift_in_20_updates(make):
    env, policy, reference, count = make()
    agent = agent_of(env, policy, penalty=KLPenalty(reference, 0.1), learning_rate=1e-2, **count)
    rollout = collect(env, policy, **count)
    before, own = (x.evaluate(rollout).log_prob.detach() for x in (reference, policy))
    history = [row for _ in range(20) for row in agent.learn(1)]
    assert torch.equal(reference.evaluate(rollout).log_prob, before)
    assert (policy.evaluate(rollout).log_prob - own)[rollout["mask"]].abs().max() > 0.01
    places = {p.data_ptr() for p in policy.parameters()}
    assert not places & {p.data_ptr() for p in reference.parameters()}
    assert len(history) == 20 and history[0]["reference/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(history[-1]["reference/kl"]) > 1e-3


# --- the value head ---------------------------------------------------------------------------------------------------


def test_a_fresh_value_head_gives_zero():
    policy, rollout = lm_policy(head=False), play(text_env(), [(5, 1, 7), (7,)])
    assert policy.evaluate(rollout).value.abs().max() == 0
    assert all(x.abs().max() == 0 for x in policy.values(rollout))


def test_a_detached_head_has_no_backbone_gradient():
    rollout = play(text_env(), [(5, 1, 7), (7,)])
    for detach in (True, False):
        policy = lm_policy(detach_value=detach)
        policy.evaluate(rollout).value.sum().backward()
        backbone = {name for name in gradients(policy) if name.startswith("lm.")}
        assert bool(backbone) is not detach
        assert policy.value_head.weight.grad.abs().sum() > 0


def test_a_fresh_value_heads_loss_moves_no_backbone():
    """Advantages 0 (reward 0, V 0, no entropy bonus): at the first step no weight of the model has a gradient."""
    env = TextVectorEnv(
        prompts=["a"], reward=lambda prompts, **_: [0.0] * len(prompts), tokenizer=make_tokenizer(WORDS)
    )
    policy = lm_policy(head=False)
    agent_of(env, policy).update(collect(env, policy, num_episodes=8))
    assert all(g.abs().max() == 0 for g in gradients(policy).values())


def test_the_value_head_computes_in_fp32_under_bf16():
    policy, rollout = lm_policy(lambda: make_gpt2().bfloat16()), play(text_env(), [(5, 1, 7), (7,)])
    value = policy.evaluate(rollout).value
    hidden = policy.lm.hidden(rollout["observation"])
    assert hidden.dtype == torch.bfloat16 and value.dtype == torch.float32
    expected = hidden.double() @ policy.value_head.weight.double()[0]
    mask = rollout["mask"]
    torch.testing.assert_close(value[mask].double(), expected[mask], atol=1e-5, rtol=1e-6)
    value[mask].sum().backward()
    assert policy.value_head.weight.grad.dtype == torch.float32


# --- top-k and top-p --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (None, 0.7), (5, 0.8), (1, None), (None, 1e-6), (50, 0.99)])
def test_top_k_and_top_p_are_those_of_transformers(top_k, top_p):
    from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

    from textenv.lm.sampling import sample, truncate

    logits = 3 * torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p else []
    expected = LogitsProcessorList(warpers)(torch.zeros(64, 1, dtype=torch.long), logits.clone())
    ours = truncate(logits, top_k=top_k, top_p=top_p)
    kept = ours > torch.finfo(torch.float32).min
    assert (kept == torch.isfinite(expected)).all()
    log_probs = expected.log_softmax(-1)
    torch.testing.assert_close(ours.log_softmax(-1)[kept].exp(), log_probs[kept].exp())
    action, log_prob = sample(ours)
    assert kept.gather(-1, action[:, None]).all()
    torch.testing.assert_close(log_prob, log_probs.gather(-1, action[:, None])[:, 0])


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8, "temperature": 0.7}])
def test_truncated_samples_are_scored_among_the_tokens_that_were_kept(options):
    """The log-probability of `transformers`' warped distribution, in acting, scoring, and of a reference.

    The environment forbids a token: it is kept nowhere.
    """
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), **options)
    reference = lm_policy(lambda: make_gpt2(seed=3), temperature=policy.temperature).reference()
    rollout = collect(text_env(forbidden=[4]), policy, num_episodes=16)
    mask = rollout["mask"]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(policy.temperature)])
    if policy.top_k is not None:
        warpers.append(TopKLogitsWarper(policy.top_k))
    if policy.top_p is not None:
        warpers.append(TopPLogitsWarper(policy.top_p))
    logits = policy.lm.model(rollout["observation"]).logits[mask].detach()
    logits[:, 4] = -torch.inf
    warped = warpers(None, logits)
    kept = warped.isfinite()
    assert kept.sum(1).min() < kept.shape[1] - 1
    actions = rollout["action"][mask][:, None]
    expected = warped.log_softmax(-1).gather(1, actions)[:, 0]
    torch.testing.assert_close(rollout["log_prob"][mask], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.evaluate(rollout).log_prob[mask].detach(), expected, atol=1e-5, rtol=0)

    reference_logits = reference.model(rollout["observation"]).logits[mask] / policy.temperature
    among_kept = reference_logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, actions)[:, 0]
    KLPenalty(reference, 0.1)(rollout, policy)
    torch.testing.assert_close(rollout["reference_log_prob"][mask], among_kept.detach(), atol=1e-5, rtol=0)


def test_a_saved_policy_keeps_top_k_and_top_p(tmp_path):
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), top_k=3, top_p=0.7)
    policy.save(tmp_path)
    restored = LMPolicy.load(tmp_path)
    assert (restored.top_k, restored.top_p) == (3, 0.7)
    assert LMPolicy.load(tmp_path, top_k=None, top_p=None).truncates is False


@pytest.mark.heavy
def test_a_policy_with_top_p_learns_and_only_known_samples_are_learnt_from():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), top_p=0.7)
    agent = PPO(text_env(), policy, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4), kl_coef=0.1)
    history = agent.learn(100)
    assert all(metrics["policy/sampler_gap"] < 1e-5 for metrics in history)
    with pytest.raises(ValueError, match="nobody knows which tokens were kept"):
        agent.step(["a b"] * 8, ["c"] * 8, [1.0] * 8)


def longer(policy, tokens, length):
    return policy.act({"tokens": tokens, "length": np.array([[length]])}, deterministic=True).log_prob.item()


@pytest.mark.parametrize("change", ["length", "first token", "a token in the middle"])
def test_a_policy_notices_another_text_in_its_slot(change):
    """One token longer, with the same last token that was read; what stands before it is another text."""
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    first, other = np.zeros((1, 8), dtype=np.int64), np.zeros((1, 8), dtype=np.int64)
    first[0, :4], other[0, :5] = [1, 2, 3, 4], [1, 2, 3, 4, 5]
    if change == "length":
        other[0, :6], length = [1, 2, 3, 4, 5, 6], 6
    else:
        length = 5
        other[0, 0 if change == "first token" else 1] = 0
    longer(policy, first, 4)
    found = longer(policy, other, length)
    policy.reset()
    assert found == pytest.approx(longer(policy, other, length), abs=1e-5)
    assert isinstance(policy, nn.Module)
