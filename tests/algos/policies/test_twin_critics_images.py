"""SAC and TD3 on images: which weights read them, which loss trains them, what is saved, and that they learn."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torch import nn

import algos
from algos import SAC, TD3, SACGSDEPolicy, SACPolicy, TD3Policy
from algos.envs.flatten import flatten
from algos.replay import BYTES_AT_ONCE, sample_batches, store

CAMERA = spaces.Box(0, 255, (8, 8), np.uint8)
WITH_SPEED = spaces.Dict({"camera": CAMERA, "speed": spaces.Box(-1, 1, (2,), np.float32)})
KINDS = pytest.mark.parametrize(
    ("algorithm", "kind"), [(SAC, SACPolicy), (SAC, SACGSDEPolicy), (TD3, TD3Policy)], ids=lambda x: x.__name__
)


class Column(gym.Env):
    """One step: a bright column in an image; the action is to be its place, from -1 to 1."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def observation(self):
        image = np.zeros((8, 8), np.uint8)
        image[:, self.column] = 255
        if isinstance(self.observation_space, spaces.Box):
            return image
        return {"camera": image, "speed": np.zeros(2, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.column = int(self.np_random.integers(8))
        return self.observation(), {}

    def step(self, action):
        return self.observation(), -float((action[0] - (self.column / 3.5 - 1)) ** 2), True, False, {}


class RandomImage(Column):
    def observation(self):
        return self.np_random.integers(256, size=self.observation_space.shape, dtype=np.uint8)


def columns(space, slots=4):
    return SyncVectorEnv([lambda: Column(space)] * slots)


def make(algorithm, kind, space=WITH_SPEED, *, hidden=(16,), **options):
    env = columns(space)
    policy = kind(space, env.single_action_space, hidden=hidden, image_features=12, seed=1)
    defaults = dict(num_steps=8, learning_starts=16, batch_size=16, seed=1)
    return algorithm(env, policy, **(defaults | options))


@KINDS
@pytest.mark.parametrize("space", [CAMERA, WITH_SPEED], ids=["image", "image and numbers"])
def test_values_are_those_of_separate_networks(algorithm, kind, space):
    """An encoder of the critics, then two networks; pixels are divided by 255, numbers stand beside the features."""
    policy = kind(space, spaces.Box(-1, 1, (1,), np.float32), hidden=(16,), image_features=12, seed=1)
    space.seed(0)
    observations = [space.sample() for _ in range(5)]
    batch = gym.vector.utils.concatenate(space, observations, gym.vector.utils.create_empty_array(space, 5))
    camera = batch if space is CAMERA else batch["camera"]
    (trunk,) = policy.critic.encoder.trunks
    features = trunk(torch.from_numpy(camera)[:, None].float() / 255)
    if space is WITH_SPEED:
        features = torch.cat([features, torch.from_numpy(batch["speed"])], dim=1)
    action = policy.act(batch, deterministic=True).action
    values = []
    for number in range(2):
        x = torch.cat([features, action], dim=1)
        x = (x @ policy.critic.weights[0][number] + policy.critic.biases[0][number]).relu()
        values.append(x @ policy.critic.weights[1][number] + policy.critic.biases[1][number])
    observation = torch.from_numpy(flatten(space, batch))
    torch.testing.assert_close(policy.value(observation), torch.stack(values).amin(0))
    torch.testing.assert_close(policy.value(observation[:, None])[:, 0], policy.value(observation))
    first = policy.critic.first(policy.read(observation), action)
    torch.testing.assert_close(first, values[0])


@pytest.mark.heavy
@KINDS
def test_each_loss_trains_its_own_encoder(algorithm, kind):
    agent = make(algorithm, kind)
    agent.learn(64)
    policy = agent.policy
    (batch,) = sample_batches(agent.buffer, agent.config, 1)
    agent.with_noise(batch)

    def trained_by(loss):
        policy.zero_grad()
        loss(batch)[0].backward()
        return {name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()}

    by_critics = trained_by(agent.critic_loss)
    by_policy = trained_by(agent.policy_loss)
    assert by_critics and all(name.startswith("critic.") for name in by_critics)
    assert any(name.startswith("critic.encoder.") for name in by_critics)
    assert any(name.startswith("actor.0.trunks.") for name in by_policy)
    assert not any(name.startswith("critic.encoder.") for name in by_policy)


@pytest.mark.heavy
@KINDS
def test_the_targets_encoder_follows(algorithm, kind):
    agent = make(algorithm, kind, target_rate=0.5, learning_rate=1e-2)
    target = agent.target_critic if algorithm is SAC else agent.target.critic
    weight = agent.policy.critic.encoder.trunks[0][0].weight
    of_target = target.encoder.trunks[0][0].weight
    first = weight.detach().clone()
    assert torch.equal(of_target, first)
    agent.learn(200)
    assert not torch.equal(weight, first) and not torch.equal(of_target, first)
    assert (of_target - weight).abs().max() < (of_target - first).abs().max()


@KINDS
def test_it_is_saved_and_loaded(algorithm, kind, tmp_path):
    agent = make(algorithm, kind)
    agent.save(tmp_path / "agent")
    loaded = algos.load(tmp_path / "agent")
    assert loaded.image_features == 12
    observation = torch.from_numpy(flatten(WITH_SPEED, agent.env.reset(seed=0)[0]))
    torch.testing.assert_close(loaded.value(observation), agent.policy.value(observation))
    without_images = kind(WITH_SPEED["speed"], agent.env.single_action_space)
    assert "image_features" not in without_images.arguments()


@pytest.mark.heavy
def test_large_steps_are_copied_a_few_at_a_time():
    """The same batches, whatever the number that is copied at once: here ten of twenty."""
    space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    env = SyncVectorEnv([lambda: RandomImage(space)])
    agent = SAC(env, num_steps=32, learning_starts=0, batch_size=256)
    store(agent.collect(), agent.buffer)
    state = agent.update_generator.get_state()
    expected = agent.buffer.sample(20 * 256)["observation"]
    assert expected.dtype == torch.uint8 and expected.nbytes > 3 * BYTES_AT_ONCE // 4
    agent.update_generator.set_state(state)
    batches = [batch["observation"] for batch in sample_batches(agent.buffer, agent.config, 20)]
    assert len(batches) == 20 and torch.equal(torch.cat(batches), expected)
    assert batches[0].untyped_storage().nbytes() < 0.6 * BYTES_AT_ONCE


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        pytest.param(SAC, SACPolicy, marks=pytest.mark.long),
        pytest.param(SAC, SACGSDEPolicy, marks=pytest.mark.slow),
        pytest.param(TD3, TD3Policy, marks=pytest.mark.slow),
    ],
)
def test_it_learns_from_pixels(algorithm, kind):
    """Standing still gives -.43."""
    steps = 3_000
    options = {"batch_size": 64, "learning_rate": 1e-3}
    if kind is SACPolicy:
        steps = 900
        options = {"batch_size": 32, "learning_rate": 3e-3}
    elif kind is SACGSDEPolicy:
        options["temperature"] = 0.01
    agent = make(algorithm, kind, hidden=(64,), learning_starts=200, updates_per_step=0.5, **options)
    assert isinstance(agent.policy.actor, nn.Sequential)
    agent.learn(steps)
    result = algos.evaluate(agent.env, agent.policy, num_episodes=64, deterministic=True, seed=2)
    assert result.mean_return > -0.1


def test_a_buffer_that_exceeds_the_memory_is_named_at_the_first_step(caplog):
    """A step has two images of 12 kB."""
    env = SyncVectorEnv([lambda: RandomImage(spaces.Box(0, 255, (64, 64, 3), np.uint8))])
    agent = SAC(env, num_steps=4, buffer_size=10**12)
    with pytest.raises(RuntimeError, match="memory"):  # of torch, which cannot reserve so much
        agent.learn(4)
    (record,) = [record for record in caplog.records if record.name == "algos.replay"]
    assert "a full replay buffer of 1,000,000,000,000 steps takes 22,896," in record.getMessage()
    assert "give a smaller buffer_size" in record.getMessage()


def test_no_observation_gives_no_value():
    policy = make(SAC, SACPolicy).policy
    assert policy.value(torch.zeros(0, 72, dtype=torch.uint8)).shape == (0,)


@pytest.mark.parametrize("wrong", [0, True, 2.5])
def test_a_wrong_number_of_features_is_refused(wrong):
    with pytest.raises(ValueError, match=f"image_features is {wrong}"):
        SACPolicy(WITH_SPEED, Column.action_space, image_features=wrong)
