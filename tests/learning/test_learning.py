"""What the README claims to learn: a short check of each here, every seed in the slow suite (`make learning`)."""

import dataclasses

import gymnasium
import numpy as np
import pytest

import textenv  # noqa: F401 (registers the environments)
from algos import PPO, LMPolicy, MLPPolicy, evaluate, presets
from algos.config import compares_groups
from algos.make import find_algorithm, make_policy, make_vector_environment
from textenv import KLPenalty
from textenv.embedded.grammar import accepts
from textenv.rollout import sequences


def train_cartpole(config, *, num_envs, total_steps, seed):
    """Mean return of 20 evaluation episodes, deterministic and sampled."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=num_envs)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=seed)
    history = PPO(env, policy, dataclasses.replace(config, seed=seed)).learn(total_steps)
    test_env = gymnasium.make_vec("CartPole-v1", num_envs=20)
    found = [float(np.mean(evaluate(test_env, policy, deterministic=how, seed=seed)[0])) for how in (True, False)]
    print(f"CartPole-v1 seed {seed}: {found} (deterministic, sampled), {history[-1]['time/seconds']:.1f} s of training")
    return found


def own_preset(seed):
    recipe = presets.recipe("CartPole-v1")
    return train_cartpole(recipe.config, num_envs=recipe.num_envs, total_steps=recipe.total_steps, seed=seed)


@pytest.mark.heavy
def test_cartpole_is_solved_by_the_projects_own_preset():
    """By one seed of three: rounding alone makes another run of a seed, and about one run in eight still falls."""
    assert any(own_preset(seed) == [500, 500] for seed in (1, 2, 3))


@pytest.mark.slow
def test_cartpole_is_solved_by_the_preset():
    """On most of five seeds."""
    runs = [own_preset(seed) for seed in range(1, 6)]
    assert sum(run == [500, 500] for run in runs) >= 3 and min(map(min, runs)) > 150


@pytest.mark.slow
def test_cartpole_with_the_zoos_hyper_parameters():
    runs = [train_cartpole(presets.CARTPOLE_ZOO, num_envs=8, total_steps=100_000, seed=seed) for seed in range(1, 6)]
    assert sum(min(run) >= 475 for run in runs) >= 4 and min(map(min, runs)) > 150  # see the test above


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["a2c", "dqn", "grpo", "reinforce", "rloo", "trpo"])
def test_other_algorithms_solve_cartpole(algo):
    """Mean return of 20 episodes; the most probable action, or of DQN the best one."""
    assert sum(solved_by(algo, seed) >= 475 for seed in (1, 2, 3)) >= 2


def solved_by(algo, seed):
    recipe = presets.recipe("CartPole-v1", algo)
    env = make_vector_environment("CartPole-v1", recipe.num_envs, seed_each=compares_groups(algo))
    policy = make_policy(env, policy=recipe.policy, seed=seed, **recipe.policy_kwargs)
    history = find_algorithm(algo)(env, policy, dataclasses.replace(recipe.config, seed=seed)).learn(recipe.total_steps)
    test_env = gymnasium.make_vec("CartPole-v1", num_envs=20)
    found = [float(np.mean(evaluate(test_env, policy, deterministic=how, seed=seed)[0])) for how in (True, False)]
    print(f"{algo} seed {seed}: {found} (deterministic, sampled), {history[-1]['steps']} steps, "
          f"{history[-1]['time/seconds']:.1f} s")  # fmt: skip
    return found[0]


def judge(env, policy, reference, episodes=288):
    """Score, KL in nats a response, share that the grammar accepts, share of distinct responses; unseen prompts."""
    returns, rollout = evaluate(env, policy, num_episodes=episodes, seed=7)
    KLPenalty(reference, 0.0)(rollout, policy)
    responses, grammatical = set(), 0
    for tokens, mask, terminated in zip(
        sequences(rollout).tolist(), rollout["mask"], rollout["terminated"].any(1), strict=True
    ):
        end = int(mask.nonzero()[-1]) + 2
        grammatical += bool(terminated) and accepts(env.tokenizer.decode(tokens[:end], skip_special_tokens=True))
        responses.add(tuple(tokens[int(mask.int().argmax()) + 1 : end]))
    return {
        "score": float(np.mean(returns)),
        "kl": rollout["kl"].sum().item() / episodes,
        "grammatical": grammatical / episodes,
        "distinct": len(responses) / episodes,
    }


def train_text(env_id, *, seed, share=1.0):
    """Judgements before and after training with the recipe of the command line."""
    recipe = presets.recipe(env_id)
    options = {"kl_coef": recipe.kl_coef}
    env = gymnasium.make_vec(env_id, num_envs=recipe.num_envs, **options)
    test_env = gymnasium.make_vec(env_id, num_envs=96, split="test")
    policy = LMPolicy.load("embedded", seed=seed)
    reference = policy.reference()
    before = judge(test_env, policy, reference)
    history = PPO(env, policy, dataclasses.replace(recipe.config, seed=seed)).learn(int(share * recipe.total_steps))
    after = judge(test_env, policy, reference)
    print(f"{env_id} seed {seed}: {before} -> {after}, {history[-1]['time/seconds']:.1f} s of training")
    return before, after


@pytest.mark.long
def test_reviews_improve_in_a_third_of_the_training():
    before, after = train_text("textenv/Reviews-v0", seed=1, share=0.33)
    assert 0.4 <= before["score"] <= 0.6 and abs(before["kl"]) < 1e-2
    assert after["score"] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_reviews_become_positive_and_stay_various(seed):
    before, after = train_text("textenv/Reviews-v0", seed=seed)
    assert 0.4 <= before["score"] <= 0.6 and before["grammatical"] >= 0.9
    assert after["score"] >= 0.9
    assert after["kl"] <= 3
    assert after["grammatical"] >= before["grammatical"] - 0.08
    assert after["distinct"] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_periods_are_learnt(seed):
    assert train_text("textenv/Periods-v0", seed=seed)[1]["score"] >= 0.9
