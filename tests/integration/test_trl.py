"""TRL's formulas, written out here, against what our configs and presets compute."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from algos import GRPO, PPO, GRPOConfig, collect, presets
from tests.helpers.errors import refused
from tests.helpers.small_agents import gradients, lm_policy
from tests.helpers.text_envs import EOS, good, text_env
from textenv import Rewards
from textenv.envs.task import FunctionTask
from textenv.kl.coefficients import as_coefficient
from textenv.rewards import unfinished

STILL = dict(learning_rate=1e-30, max_grad_norm=1e9, num_episodes=8, group_size=4, num_epochs=1)
"""An update that moves nothing: its gradient can be read afterwards."""


def sampled_elsewhere(policy, gap=0.4):
    """A rollout whose log-probabilities are up to a nat from the policy's, as another engine's are, but below 0."""
    rollout = collect(text_env(), policy, num_episodes=8, group_size=4, seed=0)
    noise = gap * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(0))
    rollout["log_prob"] = torch.where(rollout["mask"], (rollout["log_prob"] + noise).clamp(max=-1e-3), 0.0)
    rollout["reward"] = torch.where(rollout["mask"], torch.randn(rollout.shape, generator=torch.Generator()), 0.0)
    return rollout


# --- GRPO of TRL 1.16 ------------------------------------------------------------------------------------------------


def grpo_loss(log_prob, old, advantage, mask, *, level, low=0.2, high=0.2, weight=1.0):
    """``_compute_loss`` of its grpo_trainer.py for ``loss_type="grpo"``, without KL."""
    log_weight = log_prob - old
    if level == "sequence":
        log_weight = ((log_weight * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = log_weight.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    per_token = -torch.min(ratio * advantage, clipped * advantage) * weight
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


@pytest.mark.parametrize("ours", ["clipped_policy_loss", "gspo_policy_loss"])
@pytest.mark.parametrize("high", [None, 0.28])
@pytest.mark.parametrize("most", [None, 1.2])
def test_the_clipped_losses_of_a_config_are_trls(ours, high, most):
    """Epsilon_high, importance_sampling_level and, with ``most``, vllm_importance_sampling_mode="token_truncate"."""
    policy = lm_policy()
    rollout = sampled_elsewhere(policy)
    options = dict(policy_loss=ours, clip_higher=high, max_importance_weight=most, ratio_tolerance=10.0)
    metrics = GRPO(text_env(), policy, GRPOConfig(**STILL, **options)).update(rollout)
    found = gradients(policy)
    policy.zero_grad()
    log_prob, mask = policy.evaluate(rollout).log_prob, rollout["mask"]
    old, weight = rollout["log_prob"], 1.0
    if most is not None:
        weight = (log_prob.detach() - old).exp().clamp(max=most)
        assert (weight[mask] == most).any() and (weight[mask] < 1).any()
        assert metrics["policy/importance_weight"] == pytest.approx(weight[mask].mean().item())
        assert metrics["policy/sampler_gap"] == pytest.approx((log_prob - old)[mask].abs().mean().item(), rel=1e-4)
        old = log_prob.detach()
    level = "sequence" if ours == "gspo_policy_loss" else "token"
    advantage = rollout["advantage"].sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    loss = grpo_loss(log_prob, old, advantage, mask, level=level, high=high or 0.2, weight=weight)
    loss.backward()
    expected = gradients(policy)
    assert max(x.abs().max() for x in found.values()) > 1e-2
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def gdpo_advantages(rewards, weights, group_size):
    """``multi_objective_aggregation="normalize_then_sum"`` of its grpo_trainer.py; NaN is None of a reward function."""

    def nanstd(x, **options):
        centred = x - x.nanmean(keepdim=True, **options)
        return (
            centred.square().nansum(keepdim=True, **options) / ((~x.isnan()).sum(keepdim=True, **options) - 1)
        ).sqrt()

    grouped = rewards.view(-1, group_size, len(weights))
    each = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1) + 1e-4)
    total = (each.view(-1, len(weights)) * torch.tensor(weights)).nansum(1)
    return (total - total.mean()) / (total.std() + 1e-4)


RIGHT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
SHORT = [0.3, 0.25, None, 0.2, 0.1, None, 0.12, 0.4]


def several(right=RIGHT, short=SHORT, **options):
    """A rollout of 2 groups of 4 whose rewards these are, and GRPO that normalizes each of them."""
    functions = {"right": lambda completions: right, "short": (lambda completions: short, 0.5)}
    functions["logged"] = (lambda completions: [float(i) for i in range(8)], 0.0)
    env, policy = text_env(FunctionTask(["a b", "c"], Rewards(functions)), num_envs=8), lm_policy()
    agent = GRPO(env, policy, GRPOConfig(**STILL, normalize_each_reward=True), **options)
    return agent, collect(env, policy, num_episodes=8, group_size=4, seed=0)


def test_normalizing_each_reward_gives_trls_advantages():
    """Rewards of 1 and .5 of another size: the raw ones enter, None does not, and one of weight 0 adds nothing."""
    agent, rollout = several()
    agent.update(rollout)
    rewards = torch.tensor([[x, torch.nan if y is None else y, 9.0] for x, y in zip(RIGHT, SHORT, strict=True)])
    rewards[:, 2] = torch.arange(8)
    expected = gdpo_advantages(rewards, [1.0, 0.5, 0.0], 4)
    found = rollout["advantage"].sum(1) / rollout["mask"].sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_constant_reward_does_not_matter():
    """Two rewards of which one is constant: its weight is nothing's; β·KL is in deviations of a reward."""
    agent, rollout = several(short=[0.7] * 8, kl_coef=0.5)
    agent.penalty(rollout, agent.policy)
    rollout["kl"] = torch.where(rollout["mask"], torch.rand(rollout.shape, generator=torch.Generator()), 0.0)
    agent.update(rollout)
    each = torch.tensor(RIGHT).view(2, 4)
    kl = rollout["kl"].sum(1).view(2, 4)
    total = (each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4) - 0.5 * kl
    total = (total + 0.5 * kl.mean(1, keepdim=True)).flatten()
    expected = (total - total.mean()) / (total.std() + 1e-4)
    found = rollout["advantage"].sum(1) / rollout["mask"].sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_one_reward_is_not_normalized():
    agent = GRPO(text_env(), lm_policy(), GRPOConfig(**STILL, normalize_each_reward=True))
    with refused(ValueError, "normalize_each_reward is True", "single reward", "textenv.Rewards"):
        agent.learn(8)


# --- PPO of TRL 0.7 and 0.17 -----------------------------------------------------------------------------------------


def test_a_recipe_is_no_config():
    """And a range needs a loss that takes it."""
    with refused(TypeError, "config is a Recipe, but PPO needs a PPOConfig", r"\.config", r"\.build\(seed\)"):
        PPO(text_env(), lm_policy(), presets.TRL_0_7)

    def cispo(*, log_ratio, advantage, mask, clip_range): ...

    with refused(ValueError, "clip_higher is 0.3", "cispo", "has no argument clip_higher"):
        GRPOConfig(policy_loss=cispo, clip_higher=0.3)


def whitened(x, mask):
    """``masked_whiten`` of both: the variance has Bessel's correction."""
    return (x - x[mask].mean()) / np.sqrt(x[mask].var(ddof=1) + 1e-8)


def ppo_targets(score, log_prob, reference, value, mask, *, beta):
    """KL rewards, raw advantages and returns, row by row, with γ = 1, λ = .95; the score is paid on the last token."""
    reward, advantage = np.zeros_like(value), np.zeros_like(value)
    for row, steps in enumerate(map(np.flatnonzero, mask)):
        reward[row, steps] = -beta * (log_prob - reference)[row, steps]
        reward[row, steps[-1]] += score[row]
        later, following = 0.0, 0.0
        for t in reversed(steps):
            later = reward[row, t] + following - value[row, t] + 0.95 * later
            advantage[row, t], following = later, value[row, t]
    return reward, advantage, np.where(mask, advantage + value, 0.0)


def ppo_losses(log_prob, old, value, old_value, advantage, returns, mask):
    """Policy and value loss of a minibatch, ranges .2; TRL 0.7's mean ratio stays below its threshold here."""
    ratio = np.exp(log_prob - old)
    policy = np.maximum(-advantage * ratio, -advantage * ratio.clip(0.8, 1.2))
    clipped = value.clip(old_value - 0.2, old_value + 0.2)
    error = 0.5 * np.maximum((value - returns) ** 2, (clipped - returns) ** 2)
    assert 0 < (np.abs(ratio - 1) > 0.2)[mask].mean() < 1 and 0 < (value != clipped)[mask].mean() < 1
    return policy[mask].mean(), error[mask].mean()


def evaluated(policy, rollout):
    with torch.no_grad():
        found = policy.evaluate(rollout)
    return found.log_prob.double().numpy(), found.value.double().numpy()


PRESETS = {"0.7": presets.TRL_0_7, "0.17": presets.TRL_0_17}
QUERIES = [(0, 1), (2,), (3, 0, 1), (2, 2)]
RESPONSES = {  # of TRL 0.17 only answers without end: it pays the score of others one token later (docs/from-trl.md)
    "0.7": [(5, EOS), (6, 5, 0, EOS), (3, 3, 3, 3, 3), (1, 6, EOS)],
    "0.17": [(5, 1, 2, 0, 6), (6, 5, 0, 2, 4), (3, 3, 3, 3, 3), (1, 6, 2, 5, 0)],
}
SCORES = [1.0, -0.5, 2.0, 0.25]


@pytest.mark.parametrize("version", PRESETS)
def test_a_preset_computes_what_trl_computes(version):
    """Temperature, KL rewards, advantages, returns, both losses of a second epoch, the whitening, the adaptive β."""
    recipe, agents = PRESETS[version], []
    for epochs in (1, 2):
        policy = lm_policy(temperature=recipe.policy_kwargs.get("temperature", 1.0))
        options = dict(num_epochs=epochs, learning_rate=5e-4, kl_coef=copy(recipe.kl_coef))
        agent = PPO(text_env(), policy, recipe.config, **options)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            policy.value_head.weight *= 0.3  # some values change by more than the range, others by less
            for weight in policy.lm.parameters():  # a KL to the reference
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        agents.append(agent)
    rollout = agents[0].env.given_episodes(QUERIES, RESPONSES[version], SCORES)
    mask, penalty = rollout["mask"].numpy(), agents[0].penalty
    old, old_value = evaluated(agents[0].policy, rollout)
    with torch.no_grad():
        logits = penalty.reference.model(rollout["observation"]).logits.double()
    logits = logits / (0.7 if version == "0.17" else 1.0)
    reference = logits.log_softmax(-1).gather(-1, rollout["action"][..., None])[..., 0].numpy()
    beta = {"0.7": 0.2, "0.17": 0.05}[version]
    reward, advantage, returns = ppo_targets(SCORES, old, reference, old_value, mask, beta=beta)
    rollout["log_prob"] = torch.from_numpy(old).float()
    penalty(rollout, agents[0].policy)
    np.testing.assert_allclose(rollout["reward"][rollout["mask"]], reward[mask], atol=1e-5)
    first, second = (agent.step(QUERIES, RESPONSES[version], SCORES) for agent in agents)
    kl = (old - reference)[mask].sum() / len(SCORES)
    assert first["reference/kl"] == pytest.approx(kl, rel=1e-3) and first["reference/coefficient"] == beta
    moved = beta * (1 + np.clip(kl / 6 - 1, -0.2, 0.2) * 128 / 10_000) if version == "0.7" else beta
    assert penalty.coef == pytest.approx(moved)
    log_prob, value = evaluated(agents[0].policy, rollout)  # after the first epoch
    white, count = whitened(advantage, mask), mask.sum()
    policy_loss, value_loss = ppo_losses(log_prob, old, value, old_value, white, returns, mask)
    assert first["value/loss"] == pytest.approx(0.5 * ((old_value - returns)[mask] ** 2).mean(), rel=1e-4)
    assert 2 * second["value/loss"] - first["value/loss"] == pytest.approx(value_loss, rel=1e-4)
    bessel = np.sqrt(count / (count - 1))  # ours whitens without it
    assert 2 * second["policy/loss"] - first["policy/loss"] == pytest.approx(policy_loss * bessel, rel=1e-3)


def test_the_presets_have_the_defaults_of_trls_configs():
    """Read off ppo_config.py of both, and utils.py (OnPolicyConfig) and TrainingArguments of 0.17."""
    both = dict(num_epochs=4, gamma=1.0, gae_lambda=0.95, clip_range=0.2, clip_range_vf=0.2, vf_coef=0.1, adam_eps=1e-8,
                weight_decay=0.0, whiten_rewards=False, target_kl=None, ent_coef=0.0)  # fmt: skip
    own = {
        "0.7": dict(num_episodes=128, minibatch_size=128, learning_rate=1.41e-5, final_learning_rate=None),
        "0.17": dict(num_episodes=8, minibatch_size=8, learning_rate=5e-5, final_learning_rate=0.0),
    }
    for version, recipe in PRESETS.items():
        for name, value in (both | own[version]).items():
            assert getattr(recipe.config, name) == value, name
    adaptive = presets.TRL_0_7.kl_coef
    assert (adaptive.value, adaptive.target, adaptive.gain) == (0.2, 6.0, 0.0128)
    assert (presets.TRL_0_17.kl_coef, presets.TRL_0_17.env_kwargs["max_new_tokens"]) == (0.05, 53)


@pytest.mark.parametrize("version", PRESETS)
def test_an_agent_of_a_preset_learns_and_changes_none(version, tmp_path):
    lm_policy().save(tmp_path)
    rewards = Rewards({"good": good, "unfinished": unfinished(1.0)})
    preset = PRESETS[version]
    kwargs = dict(preset.env_kwargs) | dict(prompts=["a b", "c", "d a b", "b"], reward=rewards, max_new_tokens=6)
    recipe = replace(preset, model=str(tmp_path), env_kwargs=kwargs, config=replace(preset.config, num_episodes=8))
    agents = [recipe.build(seed=1) for _ in range(2)]
    first = agents[0].learn(1)[0]
    assert first["reference/kl"] == pytest.approx(0.0, abs=1e-5) and first["reward_applied/unfinished"] == 1.0
    assert agents[0].policy.temperature == (0.7 if version == "0.17" else 1.0)
    assert (agents[0].policy.critic is not None) == (version == "0.17")
    assert agents[1].penalty.coef == (0.05 if version == "0.17" else 0.2) == as_coefficient(preset.kl_coef).value
    assert (agents[0].penalty.coef < 0.2) and agents[0].env.penalty is None
    assert agents[0].env.spec.kwargs["kl_coef"] in (0.2, 0.05)  # a number, which is saved with the agent
