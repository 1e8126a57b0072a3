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


class Turn:
    """While it is on, the router of a model's first layer gives one token in the middle of each pass another expert."""

    def __init__(self, model):
        self.on = False
        model.model.layers[0].mlp.gate.register_forward_hook(self.turn)

    def turn(self, router, arguments, output):
        if not self.on:
            return output
        logits, weights, experts = output
        experts = experts.clone()
        middle = len(experts) // 2
        others = [expert for expert in range(router.num_experts) if expert not in experts[middle].tolist()]
        experts[middle, 0] = others[0]
        return logits, weights, experts


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_turned_choice_of_experts_does_not_end_it(family):
    """One expert of one token is another in scoring than it was in sampling."""
    model = make_family(family)
    turn = Turn(model)
    policy = LMPolicy(model, make_tokenizer(WORDS))
    agent = PPO(text_env(num_envs=8, max_new_tokens=8), policy, PPOConfig(**UPDATE), kl_coef=0.1)
    rollout = agent.collect()
    with torch.no_grad():
        rollout["log_prob"] = policy.evaluate(rollout).log_prob
    turn.on = True
    with torch.no_grad():
        gap = (policy.evaluate(rollout).log_prob - rollout["log_prob"]).abs()[rollout["mask"]]
    assert gap.max() > 0.01, "no choice was turned: the test guards nothing"
    agent.penalty(rollout, policy)
    assert agent.update(rollout)["policy/sampler_gap"] > 0


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
    few, little, most = rollout.clone(), rollout.clone(), rollout.clone()
    jump(few, 0.25)
    jump(little, 1.0, nats=0.05)  # as in a single row behind a turned choice
    jump(most, 1.0)
    for turned in (few, little):
        KLPenalty(policy.reference(), 0.1)(turned, policy)
    with pytest.raises(
        InvariantError, match=f"same weights.*tolerance 0.1 for the median, because the model selects {choice}"
    ):
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


@pytest.mark.heavy
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
    """A choice that turns in one of the passes that are compared is no fault of the cache."""
    model = make_family("mixtral")
    turn = Turn(model)
    lm = LMPolicy(model, make_tokenizer(WORDS)).lm
    shapes = []

    def turn_the_second_slot(module, arguments, options):
        shapes.append(tuple(options["input_ids"].shape))
        turn.on = shapes[-1] == (2, 1)  # the last token of the text, and a second slot that is behind

    model.model.register_forward_pre_hook(turn_the_second_slot, with_kwargs=True)
    assert Decoder(lm, num_slots=2, max_length=48).cached and not caplog.records
    assert (2, 1) in shapes, "no choice was turned: the test guards nothing"


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
