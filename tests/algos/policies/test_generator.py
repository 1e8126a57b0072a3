"""Rollouts by another engine: a fake one that is our own policy, and one that is wrong by a known amount."""

import math
import socket

import pytest
import torch

from algos import A2C, GRPO, PPO
from algos.collection import Collector
from algos.extras.vllm import VLLMServer
from algos.importance import with_importance_weights
from tests.helpers.conversations import Parrot
from tests.helpers.engines import FakeEngine
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_llama, make_tokenizer
from tests.helpers.small_agents import cartpole, lm_policy
from tests.helpers.text_envs import BAD, EOS, GOOD, Script, text_env
from textenv import TokenVectorEnv

ARGUMENTS = dict(tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, max_new_tokens=4, max_length=40)
SETTINGS = dict(num_steps=None, num_episodes=8, minibatch_size=3, num_epochs=2, learning_rate=1e-3)


class Twice(Script):
    """A conversation of two turns, or one if the first has no 'good'."""

    def reply(self, turns):
        return ["a b" if turn.index == 0 and GOOD in turn.completion_ids else None for turn in turns]


def rule(turn):
    """'good' and 'bad' in turn, or the end."""
    return [EOS, BAD if turn.completion_ids[-1:] == [GOOD] else GOOD]


def rollouts(engine, *, task=Script, episodes=8, group_size=1, **options):
    """Rollout of the policy itself and of an engine, from equal seeds, and the policy."""
    found = []
    for generator in (None, engine):
        policy = lm_policy(temperature=0.8, seed=4)
        collector = Collector(text_env(task(), **options), policy, seed=3, generator=generator)
        found.append(collector.collect(num_episodes=episodes, group_size=group_size))
    return *found, policy


def assert_equal(one, other):
    assert set(one.keys()) == set(other.keys())
    for name in one.keys():
        if name == "log_prob":
            assert torch.allclose(one[name], other[name], atol=1e-5)
        elif name == "allowed_sets":
            assert torch.equal(one.get_non_tensor(name), other.get_non_tensor(name))
        else:
            assert torch.equal(one[name], other[name]), name


LIMITS = {
    "ragged prompts": {},
    "groups": dict(group_size=2),
    "stop text": dict(stop=("good",)),
    "stop id": dict(stop=(BAD,)),
    "forbidden": dict(forbidden=[EOS, GOOD]),
    "minimum": dict(min_new_tokens=3),
    "minimum before a stop text": dict(min_new_tokens=2, stop=("good", "a")),
    "whole text": dict(max_length=6),
    "minimum beyond the whole text": dict(min_new_tokens=4, max_length=6),
}


@pytest.mark.heavy
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("options", LIMITS.values(), ids=LIMITS)
def test_an_engine_of_the_policy_gives_its_rollout(options, past):
    """Also if the engine goes on after the end: these tokens are dropped."""
    assert_equal(*rollouts(FakeEngine(ids_past_the_end=past), **options)[:2])


@pytest.mark.heavy
@pytest.mark.parametrize("make", [lm_policy, lambda **options: lm_policy(make_llama, **options)])
def test_log_probs_of_conversations_are_the_policys(make):
    """Also by an action rule, and with turns in pieces."""
    for options in (dict(task=Twice(), max_turns=2), dict(allowed=rule), dict(min_new_tokens=2, forbidden=[0])):
        policy, engine = make(), FakeEngine(piece=2)
        rollout = Collector(text_env(**options), policy, seed=1, generator=engine).collect(num_episodes=12)
        with torch.no_grad():
            expected = policy.evaluate(rollout).log_prob
        mask = rollout["mask"]
        assert torch.allclose(rollout["log_prob"][mask], expected[mask], atol=1e-5)
        assert engine.updates == 1 and mask.sum() > 20


def test_one_request_has_all_open_turns():
    policy, engine = lm_policy(), FakeEngine(shift={GOOD: 2.0})
    env = text_env(Twice(), max_turns=2, num_envs=10)
    rollout = Collector(env, policy, seed=1, generator=engine).collect(num_episodes=10)
    first, second = engine.asked
    assert [turn.row for turn in first] == list(range(10))
    assert all(turn.min_new_tokens == 0 and turn.max_new_tokens == 5 for turn in first + second)
    second_rows = [turn.row for turn in second]
    assert 0 < len(second_rows) <= 10
    starts = (rollout["mask"].int().diff(dim=1) == 1).sum(1)  # turns after the first
    assert starts.nonzero().flatten().tolist() == second_rows
    tokens = torch.cat([rollout["observation"][:, :1], rollout["action"]], dim=1)
    for turn in second:
        assert tokens[turn.row, : len(turn.prefix)].tolist() == turn.prefix
        assert turn.prefix[-2:] == [0, 1]


@pytest.mark.heavy
def test_texts_without_replies_are_asked_all_at_once():
    """Games run in the environment's slots."""
    most = []
    for env in (TokenVectorEnv(Parrot, num_envs=4, **ARGUMENTS), text_env(num_envs=4)):
        engine, policy = FakeEngine(), lm_policy()
        rollout = Collector(env, policy, seed=1, generator=engine).collect(num_episodes=10)
        most.append(max(map(len, engine.asked)))
        with torch.no_grad():
            gap = (policy.evaluate(rollout).log_prob - rollout["log_prob"])[rollout["mask"]]
        assert gap.abs().max() < 1e-5 and len(rollout) == 10
    assert most == [4, 10]


@pytest.mark.heavy
def test_each_turn_has_a_stream_of_its_own_by_the_seed():
    def rollout():
        env = text_env(Twice(prompts=[(0,)]), max_turns=2, max_length=12, forbidden=[EOS])
        return Collector(env, lm_policy(seed=2), seed=1, generator=FakeEngine(shift={GOOD: 1.0})).collect(
            num_episodes=20
        )

    one = rollout()
    assert_equal(one, rollout())
    assert len({tuple(row) for row in one["action"].tolist()}) > 10


def test_a_minimum_counts_down_and_is_cut_to_fit():
    engine = FakeEngine(piece=2)
    Collector(text_env(min_new_tokens=4, max_length=6), lm_policy(), seed=1, generator=engine).collect(num_episodes=3)
    limits = [[(turn.max_new_tokens, turn.min_new_tokens) for turn in asked] for asked in engine.asked]
    assert limits == [[(4, 4), (5, 4), (3, 3)], [(2, 2), (3, 2), (1, 1)], [(1, 0)]]


class Broken(FakeEngine):
    """Returns this for every turn."""

    def __init__(self, given):
        super().__init__()
        self.given = given

    def generate(self, turns, *, seeds, sampling):
        return [self.given for _ in turns]


@pytest.mark.parametrize(
    "given",
    [([], []), ([GOOD], []), ([GOOD] * 6, [-1.0] * 6), ([GOOD], [math.nan]), ([GOOD, EOS], [-1.0, -math.inf])],
)
def test_an_answer_that_breaks_the_contract_is_refused(given):
    collector = Collector(text_env(), lm_policy(), seed=1, generator=Broken(given))
    with refused(ValueError, "Broken.generate returned .* expected 1 to 5 token ids"):
        collector.collect(num_episodes=4)


def test_a_forbidden_token_is_an_error():
    collector = Collector(text_env(forbidden=[BAD]), lm_policy(), seed=1, generator=Broken(([BAD, EOS], [-1.0, -1.0])))
    with refused(ValueError, "forbidden here"):
        collector.collect(num_episodes=4)


def test_greedy_tokens_come_from_the_policy_itself():
    engine, policy = FakeEngine(shift={BAD: 9.0}), lm_policy()
    found = [
        Collector(text_env(), policy, seed=1, generator=each).collect(num_episodes=4, deterministic=True)
        for each in (None, engine)
    ]
    assert_equal(*found)
    assert engine.updates == 0


def test_weights_are_renewed_before_each_rollout():
    """And the gap is logged."""
    engine = FakeEngine()
    agent = PPO(text_env(), lm_policy(), generator=engine, **SETTINGS)
    assert agent.config.max_importance_weight == 2.0
    history = agent.learn(60)
    assert engine.updates == len(history) > 1
    assert all(metrics["policy/sampler_gap"] < 1e-5 for metrics in history)
    assert all(abs(metrics["policy/importance_weight"] - 1) < 1e-5 for metrics in history)


def test_what_cannot_be_corrected_is_refused():
    with refused(TypeError, "MLPPolicy in a .*: it generates text"):
        PPO(cartpole(), generator=FakeEngine())
    with refused(TypeError, "A2CConfig, which has no importance weights .* use PPO or GRPO"):
        A2C(text_env(), lm_policy(), num_steps=None, num_episodes=4, generator=FakeEngine())
    assert (
        GRPO(text_env(), lm_policy(), generator=FakeEngine(), max_importance_weight=3.0).config.max_importance_weight
        == 3
    )


SHIFT, BEST = 1.0, 1.5


def bandit(limit):
    """An agent for answers of one word, 'good' pays 1.5, others 1; an engine prefers 'bad' by a factor e.

    Without a baseline a step follows Σ_k w_k μ_k r_k ∇log π_k. With w = π/μ that is the gradient of the mean reward,
    which is greatest at 'good'. With equal weights it is 0 only where each π_k is in proportion to μ_k r_k, that is to
    π_k exp(s_k) r_k: the word with the greatest exp(s) r takes all, which is 'bad', with e to 1.5.
    """

    def score(turns):
        return [BEST if turn.completion_ids[0] == GOOD else 1.0 for turn in turns]

    forbidden = [token for token in range(9) if token not in (0, GOOD, BAD)]
    env = text_env(Script([(1,)], score), forbidden=forbidden, max_new_tokens=1, num_envs=8)
    return PPO(
        env, lm_policy(head=False), generator=FakeEngine(shift={BAD: SHIFT}), num_steps=None, num_episodes=64,
        minibatch_size=64, num_epochs=1, learning_rate=5e-3, vf_coef=1e-9, gamma=1.0, gae_lambda=1.0,
        normalize_advantage=False, max_importance_weight=limit,
    )  # fmt: skip


def chances(agent):
    """Probability of each word under the policy, by id."""
    logits = agent.policy.lm.model(torch.tensor([[1]])).logits[0, -1].detach()
    kept = torch.full_like(logits, -torch.inf)
    kept[[0, GOOD, BAD]] = logits[[0, GOOD, BAD]]
    return kept.softmax(0)


def test_gap_and_weights_of_a_wrong_engine_are_exact():
    """π/μ is Z exp(-s) for the preferred word and Z for the others, with Z = Σ π exp(s)."""
    agent = bandit(2.0)
    chance, rollout = chances(agent), agent.collect()
    scale = 1 + chance[BAD] * (math.exp(SHIFT) - 1)
    ratio = torch.where(rollout["action"] == BAD, scale * math.exp(-SHIFT), scale).clamp(max=2.0)
    found, metrics = with_importance_weights(rollout, policy=agent.policy, config=agent.config)
    assert torch.allclose(found["importance_weight"], ratio, atol=1e-5)
    assert metrics["policy/importance_weight"] == pytest.approx(ratio.mean().item(), abs=1e-5)
    assert metrics["policy/sampler_gap"] == pytest.approx(ratio.log().abs().mean().item(), abs=1e-5)
    assert torch.allclose(found["log_prob"].exp(), chance[rollout["action"]], atol=1e-5)


@pytest.mark.heavy
def test_only_corrected_training_bears_a_wrong_engine():
    """A limit so low that it makes all weights equal leaves the update uncorrected, up to its scale."""
    corrected, uncorrected = bandit(3.0), bandit(1e-3)
    for agent in (corrected, uncorrected):
        agent.learn(64 * 60)
    assert chances(corrected)[GOOD] > 0.9
    assert chances(uncorrected)[BAD] > 0.9


def test_an_absent_server_is_said_with_its_address():
    """The port was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=f"no vLLM answers at {url}"):
        VLLMServer(url, "weights")
