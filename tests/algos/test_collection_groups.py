"""Groups of equal starts: what `collect` deals to them, and what it refuses."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import Collector, collect
from algos.advantages import episode_returns
from tests.helpers.control_envs import Lean, replayed
from tests.helpers.small_agents import cartpole, lm_policy, mlp_for
from tests.helpers.text_envs import text_env
from textenv.envs.task import FunctionTask

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


@pytest.mark.parametrize(("episodes", "size"), [(6, 2), (6, 3), (10, 5), (2, 2), (8, 4)])
@MODES
def test_episodes_of_a_control_group_begin_alike(mode, episodes, size):
    """4 slots: more episodes than slots, no multiple of them, groups that reach over two turns, and fewer."""
    env = cartpole(4, mode, max_episode_steps=30)
    rollout = collect(env, mlp_for(env), num_episodes=episodes, group_size=size, seed=3)
    mask, ended = rollout["mask"], rollout["terminated"] | rollout["truncated"]
    assert len(rollout) == episodes and ended[mask].sum() == ended.sum() == episodes
    assert torch.equal(mask.int(), mask.int().cummin(1).values) and mask[:, 0].all()
    lengths = mask.sum(1)
    assert ended.int().argmax(1).tolist() == (lengths - 1).tolist() and lengths.max() == rollout.shape[1]
    assert rollout["is_init"].sum() == episodes and rollout["is_init"][:, 0].all()
    assert (rollout["reward"] == mask).all()
    assert torch.equal(episode_returns(rollout), lengths.float())
    start = rollout["observation"][:, 0].view(episodes // size, size, -1)
    assert (start == start[:, :1]).all() and len(start[:, 0].unique(dim=0)) == episodes // size
    expected = torch.arange(episodes // size).repeat_interleave(size)
    assert torch.equal(rollout["group"], expected[:, None].expand(mask.shape))
    for entry in rollout[:, :-1][mask[:, :-1]][:: max(int(mask.sum()) // 20, 1)]:
        torch.testing.assert_close(replayed(entry), entry["next_observation"], atol=1e-5, rtol=0)
    inside = mask[:, 1:]
    assert torch.equal(rollout["next_observation"][:, :-1][inside], rollout["observation"][:, 1:][inside])


@MODES
def test_ends_of_slots_that_play_on_are_not_counted(mode):
    """The second slot has one episode to play, and meets the limit again while the first plays its second."""
    env = cartpole(2, mode, max_episode_steps=9)
    rollout = collect(env, mlp_for(env), num_episodes=3, seed=0)
    assert (rollout["terminated"].sum() + rollout["truncated"].sum()) == 3 and not rollout["mask"].all()
    assert (rollout["reward"] == rollout["mask"]).all()


@MODES
def test_a_policy_without_chance_plays_a_group_alike(mode):
    """Equal starts and equal actions: the rows of a group are one episode, also where it is played in two turns."""
    env = cartpole(4, mode)
    rollout = collect(env, Lean(), num_episodes=6, group_size=3, seed=3)
    for rows in (slice(0, 3), slice(3, 6)):
        for name in ("observation", "reward", "terminated", "truncated", "mask"):
            group = torch.where(
                rollout["mask"][rows].view(3, -1, *[1] * (rollout[name].ndim - 2)), rollout[name][rows], 0
            )
            assert (group == group[:1]).all(), name
    assert not torch.equal(rollout["observation"][0, 0], rollout["observation"][3, 0])


class Rare(gym.Env):
    """Two steps an episode. After an odd seed the start has a mask that closes action 0, and a life is lost."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.is_odd = seed is not None and seed % 2 == 1
        info = {"action_mask": np.array([0, 1], np.int8), "lives": 2} if self.is_odd else {}
        return np.array([self.is_odd], np.float32), info

    def step(self, action):
        self.time += 1
        info = {"lives": 1} if self.is_odd else {}
        return np.array([self.is_odd], np.float32), 1.0, False, self.time == 2, info


@MODES
def test_rounds_with_and_without_masks_and_lives_make_one_rollout(mode):
    """One slot, so that a round is one episode; masks and lives by the start that the row shows."""
    env = SyncVectorEnv([Rare], autoreset_mode=mode)
    rollout = collect(env, mlp_for(env), num_episodes=16, group_size=2, seed=0)
    is_odd = rollout["observation"][:, 0, 0] == 1
    assert 0 < is_odd.sum() < 16 and rollout.shape == (16, 2) and rollout["mask"].all()
    assert torch.equal(rollout["action_mask"][:, 0, 0], ~is_odd)
    assert rollout["action_mask"][:, 1].all() and rollout["action_mask"][:, :, 1].all()
    assert rollout["next_action_mask"].all()
    assert torch.equal(rollout["life_lost"], torch.stack([is_odd, torch.zeros(16, dtype=torch.bool)], dim=1))


def test_rows_of_a_group_explore_by_themselves():
    env = cartpole(4)
    rollout = collect(env, mlp_for(env), num_episodes=4, group_size=4, seed=0)
    assert len(torch.where(rollout["mask"], rollout["action"], -1).unique(dim=0)) == 4


def test_groups_are_reproducible_but_calls_differ():
    def starts(seed, calls):
        env = cartpole(4)
        collector = Collector(env, mlp_for(env, seed=1), seed=seed)
        return [collector.collect(num_episodes=4, group_size=2) for _ in range(calls)]

    one, two = starts(5, 3), starts(5, 3)
    for a, b in zip(one, two, strict=True):
        assert (a == b).all()
    first = torch.cat([rollout["observation"][::2, 0] for rollout in one + starts(6, 1)])
    assert len(first.unique(dim=0)) == 8


def test_steps_and_groups_take_turns_on_one_cursor():
    """After groups the slots are in mid-episode: steps begin by a reset."""
    env = cartpole(3)
    collector = Collector(env, mlp_for(env), seed=0)
    for _ in range(2):
        assert len(collector.collect(num_episodes=4, group_size=2)) == 4
        rollout = collector.collect(num_steps=5)
        assert rollout["is_init"][:, 0].all() and rollout["observation"][:, 0].abs().max() <= 0.05


def test_the_native_cartpole_is_refused_with_advice():
    env = gym.make_vec("CartPole-v1", num_envs=4)
    with pytest.raises(ValueError, match=r"CartPoleVectorEnv accepts no list of seeds.*vectorization_mode=.sync"):
        collect(env, mlp_for(env), num_episodes=4, group_size=2)


class Moody(gym.Env):
    """Starts by a number that no seed decides."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.random.default_rng().random(1).astype(np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, True, False, {}


def test_an_environment_that_heeds_no_seed_is_refused():
    env = SyncVectorEnv([Moody] * 2)
    with pytest.raises(ValueError, match="starts differently with equal seeds"):
        collect(env, mlp_for(env), num_episodes=2, group_size=2)


@pytest.mark.parametrize("asked", [dict(num_steps=4), dict(num_episodes=5), dict(num_episodes=4, num_steps=4)])
def test_groups_need_whole_episodes_that_divide(asked):
    env = cartpole(2)
    with pytest.raises(ValueError, match="group_size is 2|give exactly one"):
        collect(env, mlp_for(env), group_size=2, **asked)


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_of_no_episodes_is_refused(size):
    env = cartpole(2)
    with pytest.raises(ValueError, match=f"group_size is {size}"):
        collect(env, mlp_for(env), num_episodes=4, group_size=size)


def test_neighbours_of_a_text_group_share_a_prompt():
    task = FunctionTask(["a", "b", "c", "d", "good"], lambda completions, **_: [0.0] * len(completions))
    env, policy = text_env(task), lm_policy()
    seen = []
    collector = Collector(env, policy, seed=0)
    for _ in range(2):
        rollout = collector.collect(num_episodes=6, group_size=3)
        prompt = rollout["observation"][:, 0].view(2, 3)
        assert (prompt == prompt[:, :1]).all()
        group = rollout["group"].view(2, 3, -1)
        assert (group == group[:, :1, :1]).all() and group[0, 0, 0] != group[1, 0, 0]
        seen += prompt[:, 0].tolist()
    assert len(set(seen)) == 4
    assert len(torch.where(rollout["mask"], rollout["action"], -1)[:3].unique(dim=0)) > 1
