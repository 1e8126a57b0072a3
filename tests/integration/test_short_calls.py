"""The three quickstarts of the README: short calls that mean the same as the long ones."""

import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from algos import DQN, PPO, Case, LMPolicy, MLPPolicy, PPOConfig, compare, evaluate
from algos.make import make_policy
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import KLPenalty, TextVectorEnv

SHORT = dict(num_steps=16, minibatch_size=32, learning_rate=3e-3)


def cartpole(num_envs=4):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


def test_short_and_long_calls_are_equal_bit_for_bit():
    short = PPO(cartpole(), seed=3, **SHORT)
    env = cartpole()
    long = PPO(env, make_policy(env, seed=3), PPOConfig(seed=3, **SHORT))
    assert short.config == long.config
    short.learn(128)
    long.learn(128)
    for one, other in zip(short.policy.parameters(), long.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert PPO(cartpole(), config=PPOConfig(num_steps=8), num_epochs=2).config.num_epochs == 2
    assert type(DQN(cartpole(), buffer_size=5000).policy).__name__ == "QPolicy"


def test_unknown_fields_are_refused_with_ours():
    with refused(TypeError, "PPOConfig has no 'lr'", "learning_rate"):
        PPO(cartpole(), lr=1e-3)
    with refused(TypeError, "DQNConfig has no 'kl_coef'"):
        DQN(cartpole(), kl_coef=0.1)
    with refused(TypeError, "expected a vector environment"):
        PPO(gymnasium.make("CartPole-v1"))


def test_former_names_are_answered_with_ours():
    with refused(TypeError, "has no 'kl_coefficient'", "did you mean 'kl_coef'"):
        gymnasium.make_vec("textenv/Copy-v0", num_envs=2, kl_coefficient=0.1)
    with refused(TypeError, "KLPenalty has no 'coefficient'", "did you mean 'coef'"):
        KLPenalty(None, coefficient=0.1)


def text_env(**options):
    tokenizer = make_tokenizer(WORDS)
    return TextVectorEnv(
        prompts=["a b"], reward=lambda completions: [1.0] * len(completions), tokenizer=tokenizer, num_envs=4, **options
    )


def test_kl_coef_is_one_penalty_to_the_first_policy():
    settings = dict(num_steps=None, num_episodes=8, minibatch_size=4)
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    assert policy.tokenizer is policy.lm.tokenizer
    agent = PPO(text_env(), policy, kl_coef=0.25, **settings)
    assert agent.penalty.coef == 0.25 and agent.learn(8)[0]["reference/kl"] == pytest.approx(0.0, abs=1e-5)
    penalty = KLPenalty(policy.reference(), 0.1)
    with refused(ValueError, "kl_coef is 0.25", "penalty= is given", "give one of them"):
        PPO(text_env(), policy, penalty=penalty, kl_coef=0.25, **settings)
    with refused(ValueError, "kl_coef is 0.25", "penalty= is given", "give one of them"):
        gymnasium.make_vec("textenv/Copy-v0", num_envs=2, kl_coef=0.25, penalty=penalty)
    with refused(ValueError, "kl_coef is 0.25", "the environment carries a KL penalty"):
        PPO(text_env(penalty=penalty), policy, kl_coef=0.25, **settings)


def test_an_evaluation_is_a_tuple_with_a_mean():
    """Of returns and rollout, as before."""
    policy = make_policy(cartpole())
    found = evaluate("CartPole-v1", policy, num_episodes=5)
    returns, rollout = found
    assert len(returns) == 5 and rollout["mask"].sum() == sum(returns)
    assert found.mean_return == pytest.approx(sum(returns) / 5) and found.std_return >= 0


def short_cartpole(num_envs):
    """An environment of one's own, by a function."""
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=20)] * num_envs)


def small(env, seed):
    """A policy of one's own."""
    return MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(8,), seed=seed)


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.long)])
def test_cases_take_functions_configs_and_budgets(processes, tmp_path):
    own = Case(short_cartpole, policy=small, config=PPOConfig(num_steps=16), total_steps=200, num_envs=4, name="own")
    options = dict(seeds=1, run_dir=tmp_path, processes=processes, quiet=True)
    result = compare(["CartPole-v1:a2c", own], total_steps=128, **options)
    assert set(result) >= {"CartPole-v1:a2c", "own"} and result["own"]["mean_return"] <= 20
    assert (tmp_path / "short_cartpole-own-1" / "config.json").is_file()
    with refused(ValueError, "give each once", "name="):
        compare([own, own], **options)
