"""Minibatches of single steps: none has one step alone."""

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from algos import PPO, LSTMPolicy, PPOConfig
from algos.minibatches import minibatches, shuffle_and_split


def rollout_of(steps, rows=1):
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(rows, steps, generator=generator)
    return TensorDict(
        {"mask": torch.ones(rows, steps, dtype=torch.bool), "advantage": advantage}, batch_size=[rows, steps]
    )


def sizes(steps, size, **options):
    arguments = dict(sequential=False, generator=torch.Generator().manual_seed(0)) | options
    return [len(batch) for batch in shuffle_and_split(rollout_of(steps), size=size, **arguments)]


@pytest.mark.parametrize(
    ("steps", "size", "expected"),
    [(9, 4, [4, 5]), (10, 4, [4, 4, 2]), (5, 4, [5]), (4, 4, [4]), (3, 2, [3]), (3, 1, [1, 1, 1]), (1, 4, [1])],
)
def test_a_step_left_over_joins_the_last_minibatch(steps, size, expected):
    assert sizes(steps, size) == expected
    assert sizes(steps, size, num_epochs=2) == 2 * expected


def test_a_row_left_over_joins_the_last_minibatch():
    """Alone, an answer would be a step of the optimizer of its own."""
    batches = shuffle_and_split(rollout_of(7, rows=5), size=2, sequential=True, generator=torch.Generator())
    assert [len(batch) for batch in batches] == [2, 3]


def test_no_advantage_is_lost_to_whitening():
    """Alone, a step's whitened advantage would be 0: the policy would learn nothing from it."""
    options = dict(sequential=False, generator=torch.Generator().manual_seed(0), normalize_advantage="minibatch")
    for batch in minibatches(rollout_of(129), size=64, **options):
        assert len(batch) > 1 and (batch["advantage"] != 0).all()


def test_every_update_on_129_steps_uses_all_of_them():
    env = gymnasium.make_vec("CartPole-v1", num_envs=1)
    config = PPOConfig(num_steps=129, minibatch_size=64, num_epochs=3)
    for policy in (None, LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=4)):
        agent = PPO(env, policy, config)
        metrics = agent.update(agent.collect())
        assert metrics["update/minibatches"] == (2 * 3 if policy is None else 3)
