"""Mixtures of experts, whose outputs jump where rounding turns the choice of an expert, train with a KL penalty."""

import pytest
import torch

from algos import PPO, InvariantError, LMPolicy, PPOConfig, collect
from tests.helpers.architectures import make_family
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import text_env
from textenv import KLPenalty
from textenv.lm.decoding import Decoder

UPDATE = dict(num_steps=None, num_episodes=64, minibatch_size=64, num_epochs=1)
NEARLY = 2e-6
"""Difference of the weights of two experts' scores: these scores are equal but for rounding in a few places."""
ROUNDING = 3e-7
"""Relative error of a router's input, which depends on its shape as that of another kernel does."""


def expert_policy(family, nearly=NEARLY):
    """Policy whose routers score the first two experts nearly equally, and above the others."""
    model = make_family(family)
    generator = torch.Generator().manual_seed(1)

    def round_otherwise(router, arguments):
        (hidden,) = arguments
        by_shape = torch.Generator().manual_seed(hidden.numel())
        return hidden * (1 + ROUNDING * torch.randn(hidden.shape, generator=by_shape))

    for layer in model.model.layers:
        router = layer.mlp.gate
        first = 3 * router.weight[0].detach()
        second = first + nearly * torch.randn(first.shape, generator=generator)
        with torch.no_grad():
            router.weight[:2] = torch.stack([first, second])
        router.register_forward_pre_hook(round_otherwise)
    return LMPolicy(model, make_tokenizer(WORDS))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_turned_choice_of_experts_does_not_end_the_training(family, micro_batch_size):
    policy = expert_policy(family)
    env = text_env(num_envs=8, max_new_tokens=8)
    agent = PPO(env, policy, PPOConfig(**UPDATE, micro_batch_size=micro_batch_size), kl_coef=0.1)
    rollout = agent.collect()
    with torch.no_grad():
        gap = torch.where(rollout["mask"], policy.evaluate(rollout).log_prob - rollout["log_prob"], 0.0).abs()
    assert gap.max() > 0.01, "no choice was turned: the test guards nothing"
    agent.penalty(rollout, policy)
    metrics = agent.update(rollout)
    assert metrics["policy/sampler_gap"] > 0


def jump(rollout, entries, nats=0.3):
    """The sampled log-probabilities of the first entries of each row are moved, of this fraction of all rows."""
    rows = range(int(len(rollout) * entries))
    for row in rows:
        rollout["log_prob"][row] += nats * rollout["mask"][row]


@pytest.mark.parametrize(
    ("family", "choice"), [("mixtral", "experts"), ("doge", r"the keys of attention \(keep_window")]
)
def test_a_fault_moves_most_places_and_is_found(family, choice):
    policy = LMPolicy(make_family(family), make_tokenizer(WORDS))
    rollout = collect(text_env(), policy, num_episodes=16)
    few, most = rollout.clone(), rollout.clone()
    jump(few, 0.25)
    jump(most, 1.0)
    KLPenalty(policy.reference(), 0.1)(few, policy)
    with pytest.raises(InvariantError, match=f"same weights.*tolerance 0.1 of the median, as the model takes {choice}"):
        KLPenalty(policy.reference(), 0.1)(most, policy)


def test_a_dense_model_is_held_to_its_largest_gap():
    policy = lm_policy()
    rollout = collect(text_env(), policy, num_episodes=16)
    jump(rollout, 0.1)
    with pytest.raises(InvariantError, match=r"same weights.*tolerance 0.001\).*raise ratio_tolerance"):
        KLPenalty(policy.reference(), 0.1)(rollout, policy)


class Shifted(PPO):
    """Its sampler states every log-probability .05 nats too high."""

    def collect(self):
        rollout = super().collect()
        rollout["log_prob"] = rollout["log_prob"] + 0.05 * rollout["mask"]
        return rollout


@pytest.mark.parametrize("options", [{"ratio_tolerance": 0.1}, {"max_importance_weight": 2.0}])
def test_the_penalty_asks_the_config_what_may_differ(options):
    agent = Shifted(text_env(), lm_policy(), PPOConfig(**UPDATE, **options), kl_coef=0.1)
    agent.learn(1)
    with pytest.raises(InvariantError, match="same weights"):
        Shifted(text_env(), lm_policy(), PPOConfig(**UPDATE), kl_coef=0.1).learn(1)


def test_another_sampler_excuses_no_other_reference():
    policy = lm_policy()
    rollout = collect(text_env(), policy, num_episodes=16)
    rollout["log_prob"] = rollout["log_prob"] + 0.05 * rollout["mask"]
    reference = policy.reference()
    KLPenalty(reference, 0.1)(rollout.clone(), policy, other_sampler=True)
    reference.model.transformer.drop.p = 0.5
    reference.model.train()
    with pytest.raises(InvariantError, match="same weights"):
        KLPenalty(reference, 0.1)(rollout, policy, other_sampler=True)


def test_a_turned_choice_leaves_the_cache_in_use(caplog):
    """A choice that turns in one of the prefixes that are compared is no fault of the cache."""
    lm = expert_policy("mixtral", nearly=NEARLY / 4).lm
    for length in range(32, 50):
        assert Decoder(lm, num_slots=2, max_length=length).cached
    assert not caplog.records


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("gpt2", ()),
        ("llama", ()),
        ("jetmoe", ("experts",)),
        ("qwen3_moe", ("experts",)),
        ("doge", ("the keys of attention (keep_window_size)",)),
        ("deepseek_v32", ("experts", "the keys of attention (index_topk)")),
    ],
)
def test_a_model_names_what_it_takes_by_scores(family, choices):
    policy = LMPolicy(make_family(family), make_tokenizer(WORDS))
    assert policy.lm.hard_choices == policy.reference().hard_choices == choices
