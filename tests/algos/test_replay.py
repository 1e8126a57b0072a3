"""The replay buffer that DQN, SAC and TD3 share, restored in a buffer of the same or another size."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

from algos import DQN, SAC, TD3, DQNConfig
from algos.replay import buffer_state, replay_buffer, restore_buffer

SPACE = spaces.Box(0, 1000, (1,))


def steps(start, count):
    """Steps whose columns are their number."""
    numbers = torch.arange(start, start + count, dtype=torch.float32)
    columns = dict.fromkeys(("observation", "next_observation"), numbers[:, None])
    return TensorDict(columns | {"action": numbers, "reward": numbers, "terminated": numbers > 1e9}, batch_size=[count])


def empty(size):
    return replay_buffer(DQNConfig(buffer_size=size, learning_starts=1, batch_size=1), torch.Generator())


def filled(size, count):
    """A buffer of this size that was given ``count`` steps, three at a time."""
    buffer = empty(size)
    for start in range(0, count, 3):
        buffer.extend(steps(start, min(3, count - start)))
    return buffer


@pytest.mark.parametrize("count", [0, 3, 10, 11, 12, 13, 25])
@pytest.mark.parametrize("sizes", [(12, 12), (12, 30), (12, 7), (12, 13), (12, 1)], ids=str)
def test_a_restored_buffer_goes_on_with_the_newest_steps(sizes, count, caplog):
    size, other_size = sizes
    restored = empty(other_size)
    before = filled(size, count)
    restore_buffer(restored, copy.deepcopy(buffer_state(before)), SPACE)
    kept = min(count, size, other_size)
    if kept:
        assert sorted(restored[:]["reward"].tolist()) == list(range(count - kept, count))
    if size == other_size and count:
        assert restored[:]["reward"].tolist() == before[:]["reward"].tolist()  # the same batches are drawn

    # And then one by one over the oldest
    for new in range(count, count + other_size):
        restored.extend(steps(new, 1))
        assert restored[:]["reward"].max() == new
        expected = min(new + 1, other_size, kept + new + 1 - count)
        assert sorted(restored[:]["reward"].tolist()) == list(range(new + 1 - expected, new + 1))
    assert ("the oldest are dropped" in caplog.text) == (other_size < min(count, size))


@pytest.mark.parametrize(("algorithm", "game"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
def test_a_step_for_each_update_in_one_environment(algorithm, game):
    """As Stable-Baselines3's ``train_freq=1``; in NEXT_STEP mode a reset follows each episode, which is no step."""
    env = gymnasium.make_vec(game, num_envs=1, vectorization_mode="sync", max_episode_steps=7)
    agent = algorithm(env, num_steps=1, learning_starts=10, batch_size=4, seed=1)
    history = agent.learn(40)
    assert [metrics["steps"] for metrics in history] == list(range(1, 41))
    remembered = agent.buffer[:]
    assert len(remembered) == 40
    assert (remembered["observation"] != remembered["next_observation"]).any(1).all()


class FailsLate(gymnasium.Wrapper):
    """Raises at its 100th step."""

    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == 100:
            raise RuntimeError("the cable is out")
        return super().step(action)


@pytest.mark.parametrize(("algorithm", "game"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
@pytest.mark.parametrize("learning_starts", [32, 5_000])
def test_after_an_error_the_policy_does_not_explore(algorithm, game, learning_starts):
    env = SyncVectorEnv([lambda: FailsLate(gymnasium.make(game))])
    agent = algorithm(env, learning_starts=learning_starts, batch_size=16, num_steps=16, seed=1)
    with pytest.raises(RuntimeError, match="the cable is out"):
        agent.learn(1_000)

    # TD3 and DQN act as they would deterministically; SAC samples around it, but not uniformly
    observation = torch.from_numpy(np.stack([env.single_observation_space.sample() for _ in range(64)]))
    step = agent.policy.act(observation)
    best = agent.policy.act(observation, deterministic=True)
    if algorithm is SAC:
        assert step.log_prob.unique().numel() > 1
    else:
        assert torch.equal(step.action, best.action)


@pytest.mark.parametrize(("algorithm", "game"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
def test_a_training_too_short_to_learn_from_says_so(algorithm, game, caplog):
    agent = algorithm(gymnasium.make_vec(game, num_envs=2), learning_starts=64, batch_size=16, num_steps=16)
    agent.learn(32)
    says = "nothing was learnt: learning begins after 64 steps (learning_starts), and this training had 32"
    assert says in caplog.text

    # The buffer stays for the next training
    caplog.clear()
    agent.learn(64)
    assert "nothing was learnt" not in caplog.text


@pytest.mark.parametrize(("algorithm", "game"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")])
@pytest.mark.parametrize("num_steps", [1, 16])
def test_stored_steps_are_those_of_the_game(algorithm, game, num_steps):
    """Played again, one after the other, across the ends of episodes and while the policy learns."""
    env = gymnasium.make_vec(game, num_envs=1)
    agent = algorithm(env, num_steps=num_steps, learning_starts=100, batch_size=8, buffer_size=1_000, seed=3)
    agent.learn(600)
    stored = agent.buffer[:]

    game_again = gymnasium.make(game)
    observation, _ = game_again.reset(seed=3)
    num_ends = 0
    for step in stored:
        np.testing.assert_allclose(step["observation"].numpy(), observation, atol=1e-5)
        action = step["action"].numpy()
        if isinstance(game_again.action_space, spaces.Discrete):
            action = int(action)
        else:
            action = action.clip(game_again.action_space.low, game_again.action_space.high)
        observation, reward, terminated, truncated, _ = game_again.step(action)
        np.testing.assert_allclose(step["next_observation"].numpy(), observation, atol=1e-5)
        assert step["reward"].item() == pytest.approx(reward, abs=1e-4)
        assert step["terminated"].item() == terminated
        if terminated or truncated:
            num_ends += 1
            observation, _ = game_again.reset()
    assert len(stored) >= 600 and num_ends >= 2


def test_a_buffer_smaller_than_a_rollout_has_the_newest_steps_of_all_slots():
    env = gymnasium.make_vec("MountainCar-v0", num_envs=8)
    agent = DQN(env, num_steps=10, buffer_size=24, learning_starts=8, batch_size=8)
    rollout = agent.collect()
    agent.update(rollout)
    newest = rollout["observation"][:, -3:].flatten(0, 1)
    held = agent.buffer[:]["observation"]
    assert sorted(held.tolist()) == sorted(newest.tolist())
