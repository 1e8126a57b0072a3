"""What a bare config does: defaults that depend on environment and policy, and the mistakes that they prevent."""

import dataclasses
import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import algos
from algos import (
    PPO,
    A2CConfig,
    GRPOConfig,
    LMPolicy,
    LSTMPolicy,
    PPOConfig,
    REINFORCEConfig,
    REINFORCEPlusPlusConfig,
    TRPOConfig,
    evaluate,
    presets,
)
from algos.advantages import whiten
from algos.agent_setup import resolve
from algos.losses import clipped_policy_loss
from algos.optimizer import Optimizer
from algos.training.invariants import InvariantError
from algos.training.save import read_description
from tests.helpers.architectures import make_family
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_t5, make_tokenizer
from tests.helpers.small_agents import agent_of, cartpole, control_rollout, lm_policy, mlp_for, scored
from tests.helpers.text_envs import EOS, GOOD, PAD, play, text_env
from textenv import TextVectorEnv
from textenv.lm.loading import add_lora
from textenv.prompts.prompts import PromptList

CONFIGS = {"ppo": PPOConfig, "a2c": A2CConfig, "trpo": TRPOConfig}


def word_env(length, num_envs=16):
    """Answers of exactly so many tokens; best return 1: the share of them that say "good"."""

    class Share(PromptList):
        def score(self, turns):
            return [turn.completion_ids.count(GOOD) / length for turn in turns]

    return TextVectorEnv(
        Share([[0], [1], [2], [3]]), tokenizer=make_tokenizer(WORDS), num_envs=num_envs, max_prompt_tokens=4,
        max_new_tokens=length, forbidden=[EOS, PAD],
    )  # fmt: skip


def test_an_environment_with_other_ids_is_refused():
    """As many tokens, in another order: rewards would read other texts than the policy writes."""
    policy = lm_policy()
    env = TextVectorEnv(
        prompts=["good"], reward=lambda completions: [1.0] * len(completions), tokenizer=make_tokenizer(WORDS[::-1]),
        num_envs=2, max_new_tokens=4,
    )  # fmt: skip
    for use in (lambda: PPO(env, policy, presets.TEXT), lambda: evaluate(env, policy)):
        with refused(ValueError, "have other ids in the environment's tokenizer .* tokenizer=policy.tokenizer"):
            use()


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_type", [PPOConfig, A2CConfig, TRPOConfig, REINFORCEConfig, REINFORCEPlusPlusConfig])
def test_a_reward_counts_alike_for_all_tokens_of_an_answer(config_type):
    """γ is 1 for text unless one is given, and .99 in control."""
    assert resolve(config_type(), text_env(), lm_policy()).gamma == 1
    assert resolve(config_type(gamma=0.9), text_env(), lm_policy()).gamma == 0.9
    assert resolve(config_type(), cartpole(), mlp_for(cartpole())).gamma == 0.99


@pytest.mark.parametrize("name", CONFIGS)
def test_limits_bootstrap_in_control_and_not_for_text(name, caplog):
    config, env, text = CONFIGS[name], cartpole(), text_env()
    with caplog.at_level(logging.INFO, logger="algos.agent_setup"):
        assert resolve(config(num_steps=8), env, mlp_for(env)).bootstrap_truncated is True
        assert resolve(config(num_steps=None, num_episodes=8), text, lm_policy()).bootstrap_truncated is False
    assert "bootstrap_truncated=False" in caplog.text and "adam_eps=1e-08" in caplog.text
    for given in (True, False):
        found = resolve(config(num_steps=8, bootstrap_truncated=given), env, mlp_for(env))
        assert found.bootstrap_truncated is given
        found = resolve(config(num_steps=None, num_episodes=8, bootstrap_truncated=given), text, lm_policy())
        assert found.bootstrap_truncated is given


@pytest.mark.heavy
def test_values_on_text_stay_where_returns_are():
    """No answer ends by itself, and no entry trains the value of the state after the last token: its own target."""
    policy = lm_policy(head=False)
    config = PPOConfig(num_steps=None, num_episodes=32, minibatch_size=8, learning_rate=5e-3, gamma=1.0)
    history = PPO(word_env(6), policy, config).learn(32 * 6 * 10)
    assert max(abs(metrics["value/mean"]) for metrics in history) <= 1.2


def test_what_was_filled_in_is_written_with_the_agent(tmp_path):
    agent = agent_of(text_env(), lm_policy(), bootstrap_truncated=None)
    agent.save(tmp_path)
    written = read_description(tmp_path)["config"]
    assert (written["bootstrap_truncated"], written["normalize_advantage"], written["adam_eps"]) == (
        False, "rollout", 1e-8,
    )  # fmt: skip


# --- what advantages are normalised over ------------------------------------------------------------------------------


def test_whitening_is_per_rollout_for_whole_episodes():
    """Else it is over minibatches."""
    env, text = cartpole(), text_env()
    lstm = LSTMPolicy(env.single_observation_space, env.single_action_space)
    episodes = dict(num_steps=None, num_episodes=8)
    for given in (None, True):
        for policy in (mlp_for(env), lstm):
            assert resolve(PPOConfig(normalize_advantage=given), env, policy).normalize_advantage == "minibatch"
        for where, policy in ((env, mlp_for(env)), (text, lm_policy())):
            found = resolve(PPOConfig(normalize_advantage=given, **episodes), where, policy)
            assert found.normalize_advantage == "rollout"
        assert resolve(TRPOConfig(normalize_advantage=given), env, mlp_for(env)).normalize_advantage == "rollout"
    assert resolve(A2CConfig(), env, mlp_for(env)).normalize_advantage is False
    for given in ("rollout", "minibatch", False):
        assert resolve(PPOConfig(normalize_advantage=given), env, lstm).normalize_advantage == given


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PPOConfig(normalize_advantage="batch"), "normalize_advantage is 'batch', expected 'rollout', 'minibatch'"),
    (lambda: A2CConfig(normalize_advantage="minibatch"), "the whole rollout: set it to 'rollout' or False"),
    (lambda: TRPOConfig(normalize_advantage="minibatch"), "the whole rollout: set it to 'rollout' or False"),
    (lambda: PPO(cartpole(), mlp_for(cartpole()), PPOConfig(minibatch_size=1)), "normalizing a single advantage"),
    (lambda: agent_of(text_env(), lm_policy(), minibatch_size=1, normalize_advantage="minibatch"), "single advantage"),
    (lambda: PPOConfig(adam_betas=(0.9, 1.0)), r"adam_betas is \(0.9, 1.0\), expected two numbers from 0 to below 1"),
    (lambda: PPOConfig(adam_eps=0.0), "PPOConfig.adam_eps is 0.0, expected a number above 0"),
    (lambda: TRPOConfig(value_learning_rate=1e-3), "learning_rate and max_grad_norm already apply to the critic"),
    (lambda: PPOConfig(aggregation="mean"), "aggregation is 'mean', expected a function, or one of 'token_mean'"),
    (lambda: GRPOConfig(policy_loss=3), "policy_loss is 3, expected a function, or one of 'clipped_policy_loss'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("episodes", "minibatch_size"), [(34, 32), (7, 1), (8, 3)])
def test_a_lone_responses_advantage_keeps_its_sign(episodes, minibatch_size):
    """Each row's one step: what the loss is given against the batch's own mean, also of a leftover of two rows."""
    given = []

    def noted(*, advantage, mask, **columns):
        given.append((columns["log_ratio"].shape[0], advantage[mask].clone()))
        return clipped_policy_loss(advantage=advantage, mask=mask, **columns)

    answers = [(GOOD,) if row % 3 else (0,) for row in range(episodes)]
    env, policy = text_env(max_new_tokens=1, forbidden=[EOS]), lm_policy(head=False)
    rollout = scored(play(env, answers), policy)
    options = dict(
        num_episodes=episodes, minibatch_size=minibatch_size, gamma=1.0, policy_loss=noted, max_grad_norm=0.5
    )
    agent_of(env, policy, learning_rate=1e-3, **options).update(rollout)
    (leftover,) = [each for size, each in given if size == (episodes % minibatch_size or minibatch_size)][-1:]
    assert leftover.abs().min() > 0.1
    everything = torch.cat([each for _, each in given])
    raw = rollout["advantage"][rollout["mask"]]
    assert everything.sort().values.tolist() == pytest.approx(
        ((raw - raw.mean()) / raw.std(correction=0)).sort().values.tolist(), abs=1e-5
    )


@pytest.mark.heavy
def test_minibatches_of_one_response_learn():
    """TRL 0.7's ``mini_batch_size=1`` with answers of one token: normalised one by one, every advantage was 0."""
    env, policy = word_env(1), lm_policy(head=False)
    before = np.mean(evaluate(word_env(1), policy, num_episodes=64)[0])
    config = PPOConfig(num_steps=None, num_episodes=32, minibatch_size=1, num_epochs=1, learning_rate=5e-4, gamma=1.0)
    PPO(env, policy, config).learn(32 * 8)
    assert np.mean(evaluate(word_env(1), policy, num_episodes=64)[0]) > before + 0.2


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_rounding_of_advantages_does_not_become_noise(size):
    x = torch.full((4, 50), size)
    x[:, ::2] = torch.nextafter(x[:, ::2], torch.tensor(torch.inf))
    assert x.std() > 0
    mask = torch.ones_like(x, dtype=torch.bool)
    assert whiten(x, mask=mask).abs().max() <= 1e-6 * size
    far = torch.tensor([[size, 2 * size, 3 * size]])
    assert whiten(far, mask=far > 0).tolist()[0] == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], abs=1e-4)


# --- Adam -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "eps"), [({}, None), ({"adam_eps": 1e-3}, 1e-3), ({"weight_decay": 0.1}, None)])
@pytest.mark.parametrize("kind", ["text", "control"])
def test_the_first_step_is_torchs_adam_with_our_eps(kind, options, eps):
    eps = (1e-8 if kind == "text" else 1e-5) if eps is None else eps
    if kind == "text":
        env, policy = text_env(), lm_policy()
        rollout = scored(play(env, [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]), policy)
    else:
        env, policy, rollout = control_rollout()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    agent = agent_of(env, policy, learning_rate=1e-3, max_grad_norm=1e-3, minibatch_size=10_000, **options)
    agent.update(rollout)
    moved = {name: p for name, p in policy.named_parameters() if p.grad is not None}
    copies = {name: nn.Parameter(before[name]) for name in moved}
    for name, p in moved.items():
        copies[name].grad = p.grad.clone()
    nn.utils.clip_grad_norm_(copies.values(), 1e-3)
    torch.optim.AdamW(copies.values(), lr=1e-3, eps=eps, weight_decay=options.get("weight_decay", 0.0)).step()
    for name, p in moved.items():
        torch.testing.assert_close(p.detach(), copies[name].detach(), atol=1e-6, rtol=0, msg=name)


def test_the_value_has_its_own_step_size_and_clipping():
    """Twelve steps against torch's AdamW with two groups, each cut by `clip_grad_norm_`."""
    env = cartpole()
    policy = mlp_for(env)
    config = PPOConfig(
        learning_rate=0.1, value_learning_rate=0.02, final_learning_rate=0.05, max_grad_norm=0.5,
        value_max_grad_norm=3.0, weight_decay=0.1, adam_betas=(0.8, 0.9),
    )  # fmt: skip
    descent = Optimizer(policy.parameters(), config, policy=policy)
    towers = policy.actor, policy.critic
    actor, critic = ([nn.Parameter(p.detach().clone()) for p in tower.parameters()] for tower in towers)
    groups = [{"params": actor, "lr": 0.1}, {"params": critic, "lr": 0.02}]
    theirs = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1)
    ours = [*policy.actor.parameters(), *policy.critic.parameters()]
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        slopes = [torch.randn(p.shape, generator=generator) for p in ours]
        descent.schedule(step / 12)

        def loss_of(part, slopes=slopes):
            return sum((p * g).sum() for p, g in zip(ours, slopes, strict=True)), {}

        totals = descent.step(loss_of, None)
        norm = sum(g.square().sum() for g in slopes).sqrt()
        torch.testing.assert_close(totals["update/grad_norm"], norm, atol=0, rtol=1e-5)
        for p, g in zip([*actor, *critic], slopes, strict=True):
            p.grad = g.clone()
        nn.utils.clip_grad_norm_(actor, 0.5)
        nn.utils.clip_grad_norm_(critic, 3.0)
        for group, start in zip(theirs.param_groups, (0.1, 0.02), strict=True):
            group["lr"] = start * (1 - 0.5 * step / 12)
        theirs.step()
    for p, q in zip(ours, [*actor, *critic], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [
    lambda: (lm_policy(), ["value_head."]),
    lambda: (mlp_for(cartpole()), ["critic."]),
    lambda: (LSTMPolicy(cartpole().single_observation_space, cartpole().single_action_space), ["critic."]),
])  # fmt: skip
def test_only_the_value_depends_on_its_parameters(make):
    policy, names = make()
    own = {id(p) for p in policy.value_parameters()}
    found = [name for name, p in policy.named_parameters() if id(p) in own]
    assert found and all(name.startswith(tuple(names)) for name in found)


# --- the ratio of acting and scoring ----------------------------------------------------------------------------------


def test_the_error_names_the_tolerance_of_the_ratio():
    def update(**options):
        env, policy = text_env(), lm_policy()
        rollout = scored(play(env, [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]), policy)
        rollout["log_prob"] += 5e-3 * rollout["mask"]  # as a low temperature makes of rounding
        agent_of(env, policy, **options).update(rollout)

    with pytest.raises(InvariantError, match=r"0.005 nats away .*tolerance 0.001.*raise ratio_tolerance"):
        update()
    update(ratio_tolerance=1e-2)
    with pytest.raises(InvariantError, match="tolerance 0.004"):
        update(ratio_tolerance=4e-3)


def update_in_bfloat16(*, moved):
    """An update of nine tokens, the first of which were sampled with other log-probabilities, in nats."""
    env, policy = text_env(), lm_policy(lambda: make_gpt2().bfloat16())
    rollout = scored(play(env, [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]), policy)
    rows, columns = rollout["mask"].nonzero(as_tuple=True)
    rollout["log_prob"][rows[: len(moved)], columns[: len(moved)]] += torch.tensor(moved)
    agent_of(env, policy).update(rollout)


def test_one_token_may_move_far_by_rounding_to_bfloat16():
    update_in_bfloat16(moved=[1.0])


@pytest.mark.parametrize("moved", [[1.0, 1.0], [3.0]], ids=["two far", "one very far"])
def test_more_than_rounding_to_bfloat16_is_an_error(moved):
    with pytest.raises(InvariantError, match=r"tolerance 0.5 for 99 % of them, 4 times as much for the others"):
        update_in_bfloat16(moved=moved)


# --- the learning rate ------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_that_of_what_is_trained(tmp_path, caplog):
    """5e-4, which suits the embedded model, destroyed a pretrained one."""
    env, text = cartpole(), text_env()
    assert resolve(PPOConfig(), env, mlp_for(env)).learning_rate == 2.5e-4
    assert resolve(PPOConfig(), env, mlp_for(env)).final_learning_rate is None, "constant, as it was"
    assert (algos.DQNConfig().learning_rate, TRPOConfig().learning_rate) == (1e-3, 2.5e-4)
    big = LMPolicy(make_gpt2(n_embd=512, n_layer=4), make_tokenizer(WORDS))
    assert sum(p.numel() for p in big.lm.parameters()) > 10**7
    for policy, rate in ((lm_policy(), 5e-4), (big, 1.41e-5)):
        with caplog.at_level(logging.INFO, logger="algos.agent_setup"):
            found = resolve(presets.TEXT, text, policy)
        assert (found.learning_rate, found.final_learning_rate) == (rate, rate / 5)
        assert f"learning_rate={rate}" in caplog.text
        given = resolve(dataclasses.replace(presets.TEXT, learning_rate=1e-6), text, policy)
        assert (given.learning_rate, given.final_learning_rate) == (1e-6, None)
    agent = PPO(text, big, presets.TEXT)
    assert agent.optimizer.adam.param_groups[0]["lr"] == 1.41e-5
    agent.save(tmp_path)
    assert read_description(tmp_path)["config"]["learning_rate"] == 1.41e-5


@pytest.mark.heavy
def test_an_adapter_has_ten_times_the_learning_rate(tmp_path):
    pytest.importorskip("peft")
    make_gpt2(n_embd=512, n_layer=4).save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    policy = LMPolicy.load(tmp_path, lora="r=2")
    assert resolve(presets.TEXT, text_env(), policy).learning_rate == 1.4e-4
    trained = [name for name, p in policy.lm.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    with refused(ValueError, "lora is 'r=x', expected settings such as r=16"):
        LMPolicy.load(tmp_path, lora="r=x")


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # of peft, for experts
def test_last_layers_are_counted_from_the_outside():
    """Zamba's layers are inside others, T5's stack has two parts; experts that peft adapts everywhere are refused."""
    pytest.importorskip("peft")

    def adapted_layers(model, lora):
        names = [name for name, p in add_lora(model, lora, seed=0).named_parameters() if p.requires_grad]
        return {re.search(r"((?:encoder|decoder)\.)?(?:layers|block)\.\d+", name)[0] for name in names}

    assert adapted_layers(make_family("zamba"), "r=2,layers=2") == {"layers.2", "layers.3"}
    assert adapted_layers(make_t5(num_decoder_layers=3), "r=2,layers=2") == {"decoder.block.1", "decoder.block.2"}
    with refused(ValueError, "layers is 4, expected 1 to 3"):
        add_lora(make_t5(num_decoder_layers=3), "r=2,layers=4", seed=0)
    with refused(ValueError, "layers is not supported for CTRL"):
        add_lora(make_family("ctrl"), "r=2,layers=1", seed=0)
    with refused(ValueError, "peft adapts"):
        add_lora(make_family("qwen3_next"), "r=2,layers=1", seed=0)
    assert adapted_layers(make_family("qwen3_next"), "r=2,layers=1,targets=q_proj+v_proj") == {"layers.1"}


@pytest.mark.parametrize("targets", ["", ",targets=c_fc"])
def test_an_adapter_may_be_on_the_last_layers_only(targets, tmp_path):
    """With the same linear modules of those layers as the adapter of all layers has, which `peft` chooses."""
    pytest.importorskip("peft")
    make_gpt2(n_layer=4).save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)

    def adapter_names(lora):
        policy = LMPolicy.load(tmp_path, lora=lora)
        return {name for name, p in policy.lm.named_parameters() if p.requires_grad}

    last_layers = adapter_names(f"r=2,layers=2{targets}")
    assert last_layers == {name for name in adapter_names(f"r=2{targets}") if ".h.2." in name or ".h.3." in name}
    assert last_layers


def test_a_recipes_rate_is_the_embedded_models_alone():
    assert presets.recipe("textenv/Reviews-v0").config.learning_rate == 3e-4
    assert presets.recipe("textenv/Reviews-v0", model="gpt2").config.learning_rate is None
    assert presets.recipe("textenv/Reviews-v0", model="gpt2").kl_coef == 0.1


def test_lambda_by_length_is_for_text():
    with refused(ValueError, "length_adaptive_lambda is 0.05, but it is for text"):
        PPO(cartpole(), num_steps=None, num_episodes=8, length_adaptive_lambda=0.05)
