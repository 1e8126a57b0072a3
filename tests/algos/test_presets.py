"""The recipes fit their environments and algorithms; that they learn is measured outside the tests."""

import inspect
from dataclasses import replace

import pytest
import torch

from algos import presets
from algos.config import compares_groups
from algos.lab.comparison.summary import Case
from algos.make import find_algorithm, is_text, make_policy, make_vector_environment
from algos.policies.registry import CONTROL_POLICIES, find_policy

CONTROL = sorted(case for case in presets.RECIPES if not is_text(case[0]))
PACKAGES = {
    "LunarLander": "Box2D",
    "LunarLanderContinuous": "Box2D",
    "MiniGrid": "minigrid",
    **dict.fromkeys(presets.MUJOCO_GAMES, "mujoco"),
}


@pytest.mark.heavy
@pytest.mark.parametrize(("env_id", "algorithm"), CONTROL)
def test_a_recipe_makes_an_agent_that_trains(env_id, algorithm):
    package = PACKAGES.get(env_id.split("-")[0])
    if package is not None:
        pytest.importorskip(package)
    if package == "minigrid":
        env_id = f"minigrid:{env_id}"
    recipe = presets.recipe(env_id, algorithm)
    env = make_vector_environment(env_id, recipe.num_envs, seed_each=compares_groups(algorithm), **recipe.env_kwargs)
    policy = make_policy(env, policy=recipe.policy, **recipe.policy_kwargs)
    before = [p.detach().clone() for p in policy.parameters()]
    shorter = {"learning_starts": 16, "batch_size": 16} if algorithm in presets.VALUE_POLICIES else {}
    if algorithm == "ppo":
        shorter = {"num_epochs": 1, "num_steps": min(64, recipe.config.num_steps)}
    config = replace(recipe.config, **shorter)
    (metrics,) = find_algorithm(algorithm)(env, policy, config).learn(1)
    steps = metrics["steps"]
    if config.num_steps is not None:
        # CartPole's native vector environment spends steps on resets, which do not count.
        assert 0.8 * recipe.num_envs * config.num_steps <= steps <= recipe.num_envs * config.num_steps
        steps = recipe.num_envs * recipe.config.num_steps
    moved = [bool((one != two).any()) for one, two in zip(before, policy.parameters(), strict=True)]
    assert (
        any(moved) if algorithm in ("grpo", "reinforce", "reinforce_plus_plus", "rloo") else all(moved)
    )  # they train no critic
    assert all(bool(torch.isfinite(p).all()) for p in policy.parameters())
    # Schedules run along the iterations: with a few they would jump.
    assert recipe.total_steps >= 10 * steps


@pytest.mark.parametrize("algorithm", ["a2c", "grpo", "ppo", "reinforce", "reinforce_plus_plus", "rloo", "trpo"])
def test_without_a_recipe_the_algorithms_own_is_taken(algorithm):
    control, text = presets.recipe("Blackjack-v1", algorithm), presets.recipe("textenv/Copy-v0", algorithm)
    assert type(control.config) is type(text.config) and text.config.num_steps is None
    assert text.kl_coef == presets.recipe("textenv/Copy-v0").kl_coef and control.kl_coef is None
    with pytest.raises(ValueError, match="dqn is not for text"):
        presets.recipe("textenv/Copy-v0", "dqn")


@pytest.mark.parametrize(("env_id", "algorithm"), [*CONTROL, ("Blackjack-v1", "dqn"), ("gymnasium:Acrobot-v1", "ppo")])
def test_the_usual_policy_is_that_of_the_recipe(env_id, algorithm):
    assert presets.usual_policy(env_id, algorithm) == presets.recipe(env_id, algorithm).policy


def test_recipes_of_text_collect_whole_episodes():
    texts = {case: recipe.config for case, recipe in presets.RECIPES.items() if is_text(case[0])}
    assert len(texts) > 5 and {config.num_steps for config in texts.values()} == {None}


def test_wrappers_of_a_recipe_are_for_policies_that_read_vectors():
    wrapped = presets.recipe("minigrid:MiniGrid-Unlock-v0").env_kwargs
    assert wrapped == {"wrappers": ["minigrid.wrappers:FlatObsWrapper"]}
    assert presets.recipe("minigrid:MiniGrid-Unlock-v0", policy="mlp").env_kwargs == wrapped
    assert presets.recipe("minigrid:MiniGrid-Unlock-v0", policy="lstm").env_kwargs == wrapped
    assert presets.recipe("minigrid:MiniGrid-Unlock-v0", policy="cnn").env_kwargs == {}
    assert presets.recipe("minigrid:MiniGrid-Unlock-v0", policy="words").env_kwargs == {}


@pytest.mark.parametrize("policy", sorted(x for x in CONTROL_POLICIES if not find_policy(x).trained_by_values))
def test_a_recipe_gives_other_policies_only_what_they_take(policy):
    parameters = inspect.signature(find_policy(policy)).parameters
    for env_id, algorithm in CONTROL:
        arguments = presets.recipe(env_id, algorithm, policy=policy).policy_kwargs
        assert set(arguments) <= set(parameters), (env_id, algorithm)


def test_a_limit_of_steps_is_for_every_policy():
    for policy in ("auto", "mlp", "lstm", "words"):
        assert presets.recipe("CliffWalking-v1", policy=policy).env_kwargs == {"max_episode_steps": 200}


def test_a_case_adds_its_arguments_to_those_of_the_preset():
    limit = {"max_episode_steps": 200}
    slippery = {"is_slippery": True}
    assert Case("CliffWalking-v1", env_kwargs=slippery).recipe.env_kwargs == limit | slippery
    assert Case("CliffWalking-v1", env_kwargs={"max_episode_steps": 50}).recipe.env_kwargs == {"max_episode_steps": 50}
    assert Case("CliffWalking-v1").recipe == presets.recipe("CliffWalking-v1")


def test_a_policy_has_its_own_settings():
    plain = presets.recipe("Acrobot-v1")
    assert presets.recipe("Acrobot-v1", policy="mlp") == replace(plain, policy="mlp")
    assert presets.recipe("Acrobot-v1", policy="lstm") == replace(presets.RECURRENT, env="Acrobot-v1")
    assert presets.recipe("Acrobot-v1", "a2c", policy="lstm") == replace(
        presets.recipe("Acrobot-v1", "a2c"), policy="lstm"
    )
    words = presets.recipe("Acrobot-v1", policy="words")
    assert (words.policy, words.config, words.policy_kwargs) == ("words", presets.WORDS, {})
    assert presets.recipe("Acrobot-v1", model="smollm2", policy="words").config.learning_rate is None
    assert (words.total_steps, words.num_envs, words.env) == (plain.total_steps, plain.num_envs, "Acrobot-v1")
    # What only the noise of gSDE needs is no argument of another policy
    assert presets.recipe("MountainCarContinuous-v0", policy="mlp").policy_kwargs == {"normalize_observations": True}
