"""The recipes of control fit their environments; that they learn is measured outside the tests."""

from dataclasses import replace

import pytest
import torch

from algos import PPO, presets
from algos.environments import is_text, make_policy, make_vector_environment

CONTROL = sorted(name for name in presets.RECIPES if not is_text(name))


@pytest.mark.parametrize("env_id", CONTROL)
def test_a_recipe_makes_environment_and_policy_and_takes_an_iteration(env_id):
    if env_id.startswith("LunarLander"):
        pytest.importorskip("Box2D")
    recipe = presets.recipe(env_id)
    assert recipe is presets.RECIPES[env_id]
    env = make_vector_environment(env_id, recipe.num_envs)
    policy = make_policy(
        env,
        normalize_observations=recipe.normalize_observations,
        sde_sample_freq=recipe.sde_sample_freq,
        log_std_init=recipe.log_std_init,
    )
    before = [p.detach().clone() for p in policy.parameters()]
    (metrics,) = PPO(env, policy, replace(recipe.config, epochs=1)).learn(1)
    # CartPole's native vector environment spends steps on resets, which do not count.
    assert 0.8 * recipe.num_envs * recipe.config.steps <= metrics["steps"] <= recipe.num_envs * recipe.config.steps
    assert all(bool((one != two).any()) for one, two in zip(before, policy.parameters(), strict=True))
    assert all(bool(torch.isfinite(p).all()) for p in policy.parameters())
    # Schedules run along the iterations: with a few they would jump.
    assert recipe.total_steps >= 10 * metrics["steps"]
