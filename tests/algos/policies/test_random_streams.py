"""Random streams: one for each episode, and one for each part of a training."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import PPO
from algos.policies.random_streams import NUMBERS_AT_ONCE, UniformStreams


def test_an_episode_is_a_function_of_its_seed_alone():
    streams = UniformStreams(np.array([5, 6, 7]))
    first = torch.stack([streams.next() for _ in range(NUMBERS_AT_ONCE + 3)])
    streams.begin(np.array([True, False, False]), np.array([7, 0, 0]))
    again = torch.stack([streams.next() for _ in range(NUMBERS_AT_ONCE + 3)])
    assert torch.equal(again[:, 0], first[:, 2])
    assert not torch.equal(again[:, 1], first[:, 1]), "the others go on"
    alone = UniformStreams(np.array([6]))
    whole = torch.cat([first[:, 1], again[:, 1]])
    assert torch.equal(torch.cat([alone.next() for _ in range(len(whole))]), whole)


def test_neighbouring_seeds_are_independent():
    streams = UniformStreams(np.arange(4000))
    numbers = torch.stack([streams.next() for _ in range(2)]).numpy()
    counts = np.histogram2d(*numbers, bins=5, range=[[0, 1], [0, 1]])[0]
    assert ((counts - 160) ** 2 / 160).sum() < 52  # chi-square, 24 degrees of freedom: once in a thousand
    assert numbers.min() >= 0 and numbers.max() < 1


@pytest.mark.parametrize("seed", [0, 3, 2**31])
def test_weights_actions_and_minibatches_have_streams_of_their_own(seed):
    """No number of one is among the first 2,000 of another, as all are where seeds differ only above the 32nd bit."""
    agent = PPO(gym.make_vec("CartPole-v1", num_envs=2), seed=seed)
    weights = torch.Generator().manual_seed(seed)
    generators = (weights, agent.policy.generator, agent.update_generator)
    streams = [torch.rand(2_000, generator=generator, dtype=torch.double) for generator in generators]
    assert len(torch.cat(streams).unique()) == 6_000


def test_torch_reads_only_the_low_half_of_a_seed():
    """Why `stream_seed` does not add a large number."""
    numbers = [torch.rand(3, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3 + 2**32)]
    assert torch.equal(*numbers)
