"""`CNNPolicy`: the network, what it learns, and the images that it refuses."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import algos
from algos import PPO, CNNPolicy, PPOConfig, collect, evaluate
from algos.make import make_policy
from tests.helpers.errors import refused


class Brighter(gym.Env):
    """Which half of the image is brighter? Four guesses an episode; channels first or last."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape):
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def observe(self):
        self.right = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 120, self.observation_space.shape, dtype=np.uint8)
        columns = np.moveaxis(image, 2 if image.shape[0] < image.shape[-1] else 1, 0)
        half = len(columns) // 2
        columns[half * self.right : half * (self.right + 1)] += 60
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.time = float(action == self.right), self.time + 1
        return self.observe(), reward, False, self.time == 4, {}


@pytest.mark.parametrize("shape", [(16, 16, 3), pytest.param((2, 16, 16), marks=pytest.mark.long)], ids=str)
def test_images_are_learnt_from_by_the_cnn(shape, tmp_path):
    """By the same PPO; the rollout keeps bytes, and a saved policy acts alike to the bit."""
    env = SyncVectorEnv([lambda: Brighter(shape)] * 8, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    assert isinstance(policy, CNNPolicy)
    agent = PPO(env, policy, PPOConfig(num_steps=32, minibatch_size=64, num_epochs=2, learning_rate=1e-3, gamma=0.5))
    agent.learn(2000)
    returns, rollout = evaluate(env, policy, num_episodes=40)
    assert rollout["observation"].dtype == rollout["next_observation"].dtype == torch.uint8
    assert np.mean(returns) > 3.6
    observation = rollout["observation"][:, 0].numpy()
    one, two = (p.act(observation, deterministic=True) for p in (policy, algos.load(agent.save(tmp_path))))
    assert torch.equal(one.action, two.action) and torch.equal(one.log_prob, two.log_prob)


def test_the_cnn_reads_stacked_and_colour_images():
    first, last = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Box(0, 255, (84, 84, 4), np.uint8)
    one, two = (CNNPolicy(space, spaces.Discrete(6), seed=3) for space in (first, last))
    assert [tuple(layer.weight.shape) for layer in one.trunk if hasattr(layer, "weight")] == [
        (32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136),
    ]  # fmt: skip
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    seen = ((one, images), (two, np.moveaxis(images, 1, -1)))
    found = [policy.output({"observation": torch.from_numpy(x)}) for policy, x in seen]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
    expected = one.actor(one.trunk(torch.from_numpy(images).float() / 255))
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("highest", [1, 5, 255])
def test_pixels_are_divided_by_the_largest_one_of_the_space(highest):
    """A board of 0 and 1 is no image of nearly black."""
    board = np.random.default_rng(0).integers(0, 2, (2, 8, 8), dtype=np.uint8)
    policy = CNNPolicy(spaces.Box(0, highest, (8, 8), np.uint8), spaces.Discrete(4), hidden=4, seed=3)
    output = policy.output({"observation": torch.from_numpy(board * np.uint8(highest))})
    expected = policy.actor(policy.trunk(torch.from_numpy(board)[:, None].float()))
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


def test_the_cnns_ratio_is_one_and_its_values_agree():
    """Values of the rollout's cut entries are those of the final observations; log-probabilities are as sampled."""
    env = SyncVectorEnv([lambda: Brighter((16, 16, 3))] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    rollout = collect(env, policy, num_steps=10)
    assert (policy.evaluate(rollout).log_prob - rollout["log_prob"]).abs().max() < 1e-5
    value, following = policy.values(rollout)
    ended = rollout["truncated"]
    direct = policy.evaluate(rollout.clone().set("observation", rollout["next_observation"])).value
    assert ended.sum() == 6
    torch.testing.assert_close(following, direct.detach(), atol=1e-5, rtol=0)
    assert torch.equal(following[:, :-1][~ended[:, :-1]], value[:, 1:][~ended[:, :-1]])


def test_images_that_cannot_be_read_are_refused():
    def box(shape, dtype=np.uint8):
        return spaces.Box(0, 1, shape, dtype)

    for space in (box((84, 84, 3), np.float32), box((4, 84, 84, 3)), box((128,)), spaces.Discrete(3)):
        with refused(ValueError, "uint8 Box of 2 or 3 dimensions", "MLPPolicy"):
            CNNPolicy(space, spaces.Discrete(2))
    with refused(ValueError, "\\(9, 9, 9\\)", "channels", "ReshapeObservation"):
        CNNPolicy(box((9, 9, 9)), spaces.Discrete(2))
    with refused(ValueError, "4 x 20", "at least 5"):
        CNNPolicy(box((4, 20, 3)), spaces.Discrete(2))
    env = SyncVectorEnv([lambda: Brighter((16, 16, 3))])
    with refused(ValueError, "normalize_observations", "CNNPolicy", "its arguments are"):
        make_policy(env, normalize_observations=True)
    with refused(ValueError, "'rnn'", "auto, mlp, cnn, multi_input, lstm, gsde, q"):
        make_policy(env, policy="rnn")
