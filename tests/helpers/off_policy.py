"""What the tests of SAC and TD3 share: a small environment, a batch, and Stable-Baselines3's view of both."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from tensordict import TensorDict


class Reach(gym.Env):
    """Five steps, each with a new target in [-1, 1]; the first number of the action, scaled, is to be the target.

    Observations are the time and the target. The bounds of the actions are neither symmetrical nor equal.
    """

    observation_space = spaces.Box(-1, 10, (2,), np.float32)
    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([2, 0.5], np.float32))

    def _observation(self):
        self.target = self.np_random.uniform(-1, 1)
        return np.array([self.time, self.target], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        scaled = (action[0] - 0.5) / 1.5
        reward = -float((scaled - self.target) ** 2)
        return self._observation(), reward, False, self.time == 5, {}


class Walk(gym.Env):
    """A point that each action moves by up to .3; an episode ends outside of [-1, 1], or after 5 steps.

    Nothing in it is random: the starts come in turn. The bounds of the actions are neither symmetrical nor equal.
    """

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([2, 0.5], np.float32))
    starts = np.array([[0, 0], [0.5, -0.5], [-0.7, 0.2], [0.1, 0.8]], np.float32)

    def __init__(self):
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.place = self.starts[self.episodes % 4]
        self.episodes += 1
        return self.place, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        center = (self.action_space.low + self.action_space.high) / 2
        self.place = self.place + 0.3 * (action - center) / (self.action_space.high - center)
        reward = 1.0 - float((self.place**2).sum())
        return self.place, reward, bool((abs(self.place) > 1).any()), self.time == 5, {}


def reach(slots=2):
    return SyncVectorEnv([Reach] * slots)


def random_batch(agent, size, *, seed):
    """Stored steps with random numbers, without noise."""
    generator = torch.Generator().manual_seed(seed)
    numbers = agent.policy.distribution.bounds.size
    scaled_action = 2 * torch.rand(size, numbers, generator=generator) - 1
    return TensorDict(
        {
            "observation": torch.randn(size, 2, generator=generator),
            "action": agent.policy.distribution.bounds.unscale(scaled_action),
            "reward": 3 * torch.randn(size, generator=generator),
            "next_observation": torch.randn(size, 2, generator=generator),
            "terminated": torch.rand(size, generator=generator) < 0.3,
        },
        batch_size=[size],
    )


def peer_batch(agent, batch):
    """The same steps for Stable-Baselines3, which stores scaled actions."""
    return ReplayBufferSamples(
        observations=batch["observation"],
        actions=agent.policy.distribution.bounds.scale(batch["action"]),
        next_observations=batch["next_observation"],
        dones=batch["terminated"].float()[:, None],
        rewards=batch["reward"][:, None],
    )


def copy_critics(critics, peer):
    """Copy the weights of our stacked critics into Stable-Baselines3's."""
    with torch.no_grad():
        for number, network in enumerate(peer.q_networks):
            for layer, weight, bias in zip(network[::2], critics.weights, critics.biases, strict=True):
                layer.weight.copy_(weight[number].reshape(weight.shape[1], -1).T)
                layer.bias.copy_(bias[number].flatten())


STEPS = 300
"""Length of the trainings of both libraries."""
FIRST_UPDATE = 60
"""The step after which ours makes its first update; each step has one."""


class KeepsDraws:
    """Mixin of SAC and TD3 in one slot of `Walk`: keeps what is drawn at random, for `draw_the_same`.

    ``noise_of`` returns the noise behind a scaled action, given the actor's output; ``draw_noise`` the columns of noise
    of an update, from torch's global generator.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.actions = []
        self.noises = []
        self.chosen = []

    @torch.no_grad()
    def collect(self):
        rollout = super().collect()
        (action,) = rollout["action"]
        scaled_action = self.policy.distribution.bounds.scale(action)
        output = self.policy.actor(rollout["observation"][0])
        self.actions.append(action[0].numpy().copy())
        self.noises.append(self.noise_of(scaled_action, output)[0])
        return rollout

    def with_noise(self, batch):
        torch.manual_seed(len(self.chosen))
        batch.update(self.draw_noise(len(batch)))
        self.chosen.append(batch["index"].numpy())
        return batch


def make_recorded(agent_type, policy_type, **options):
    """Make an agent with `KeepsDraws`, whose buffer is written over in `STEPS` steps."""
    env = SyncVectorEnv([Walk], autoreset_mode=AutoresetMode.SAME_STEP)
    policy = policy_type(env.single_observation_space, env.single_action_space, hidden=(16, 16), seed=1)
    return agent_type(
        env, policy, num_steps=1, learning_starts=FIRST_UPDATE, buffer_size=120, batch_size=16, learning_rate=1e-3,
        adam_eps=1e-3, gamma=0.9, target_rate=0.02, seed=1, **options,
    )  # fmt: skip


def like_recorded():
    """Options of Stable-Baselines3's agent for the same training.

    It learns after more than ``learning_starts`` steps, so the action before its first update is of its policy.
    """
    return dict(env=Walk(), batch_size=16, buffer_size=120, learning_starts=FIRST_UPDATE - 1)


def draw_the_same(agent, peer):
    """Let Stable-Baselines3's agent draw the uniform actions and the batches that ours has drawn.

    Before the k-th batch the global generator is seeded with k, for the noise of the update.
    """
    next_action = iter(agent.actions)
    numbered = iter(enumerate(agent.chosen))

    def sample(batch_size, env):
        seed, chosen = next(numbered)
        torch.manual_seed(seed)
        return peer.replay_buffer._get_samples(chosen)

    peer.action_space.sample = lambda: next(next_action)
    peer.replay_buffer.sample = sample


def stored_actions(agent):
    """Actions in our buffer as the environment got them."""
    bounds = agent.policy.action_space
    return np.clip(agent.buffer[:]["action"].numpy(), bounds.low, bounds.high)


def assert_same_steps(agent, peer):
    """Both buffers hold the same steps, slot by slot, among them ends of both kinds."""
    stored = agent.buffer[:]
    theirs = peer.replay_buffer
    is_end = theirs.dones[:, 0] == 1
    is_timeout = theirs.timeouts[:, 0] == 1
    assert is_timeout.any() and (is_end & ~is_timeout).any()
    assert np.array_equal(stored["terminated"].numpy(), is_end & ~is_timeout)
    np.testing.assert_allclose(stored_actions(agent), peer.policy.unscale_action(theirs.actions[:, 0]), atol=1e-4)
    np.testing.assert_allclose(stored["reward"].numpy(), theirs.rewards[:, 0], atol=1e-4)
    np.testing.assert_allclose(stored["observation"].numpy(), theirs.observations[:, 0], atol=1e-4)
    np.testing.assert_allclose(stored["next_observation"].numpy(), theirs.next_observations[:, 0], atol=1e-4)
