"""The ends of control episodes: autoreset, time limits, and what `collect` makes of them."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import PPO, Collector, MLPPolicy, collect, evaluate
from algos.make import make_policy
from tests.helpers.control_envs import Gate, Lean, replayed
from tests.helpers.errors import refused
from tests.helpers.small_agents import agent_of, cartpole, mlp_for

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
COLUMNS = ("observation", "next_observation", "action", "reward", "terminated", "truncated")


def episodes_of(rollout, slot):
    """The slot's True entries, cut after each end; the one under way is left out."""
    row = rollout[slot][rollout["mask"][slot]]
    ends = (row["terminated"] | row["truncated"]).nonzero()[:, 0].tolist()
    return [row[start:stop] for start, stop in zip([0, *(e + 1 for e in ends)], [e + 1 for e in ends], strict=False)]


@MODES
def test_a_time_limit_never_leaks_across_an_autoreset(mode):
    """Advantages of CartPole cut at 9 steps equal torchrl's, worked out for each episode alone."""
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    env = cartpole(mode=mode, max_episode_steps=9)
    policy = mlp_for(env)
    rollout = collect(env, policy, num_steps=60, seed=5)
    agent_of(env, policy, gamma=0.95, gae_lambda=0.9).update(rollout)
    episodes = [episode for slot in range(4) for episode in episodes_of(rollout, slot)]
    assert len(episodes) > 20 and any(e["truncated"].any() for e in episodes)
    for episode in episodes:
        wide = {k: episode[k][:, None] for k in ("reward", "terminated", "truncated")}
        states = torch.cat([episode["observation"], replayed(episode[-1])[None]])
        value, after = policy.critic(states).detach().unfold(0, 2, 1)[:, 0].unbind(1)
        expected, _ = generalized_advantage_estimate(
            0.95, 0.9, value[:, None], after[:, None], wide["reward"], wide["terminated"] | wide["truncated"],
            wide["terminated"],
        )  # fmt: skip
        torch.testing.assert_close(episode["advantage"], expected[:, 0], atol=1e-5, rtol=0)


def by_hand(seed, steps, **options):
    """One slot played by `gymnasium.make`, reset and step, without any vector environment."""
    env, rows = gym.make("CartPole-v1", **options), []
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = int(Lean().act(observation[None]).action)
        after, reward, terminated, truncated, _ = env.step(action)
        rows.append((observation, after, action, reward, terminated, truncated))
        observation = env.reset()[0] if terminated or truncated else after
    return {name: torch.as_tensor(np.stack(x)) for name, x in zip(COLUMNS, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("limit", [None, 11])
@MODES
def test_true_entries_are_the_episodes_played_by_hand(mode, limit):
    options = {} if limit is None else dict(max_episode_steps=limit)
    env = cartpole(3, mode, **options)
    collector = Collector(env, Lean(), seed=7)
    rollouts = [collector.collect(num_steps=steps) for steps in (1, 70, 2, 70)]
    for slot in range(3):
        mine = torch.cat([rollout[slot][rollout["mask"][slot]] for rollout in rollouts])
        expected = by_hand(7 + slot, len(mine), **options)
        assert len(mine) >= 100 and (mine["terminated"] | mine["truncated"]).sum() > 1
        for name in COLUMNS:
            assert torch.equal(mine[name].double(), expected[name].double()), name
        assert torch.equal(mine["log_prob"], mine["observation"][:, 3])
        ended = mine["terminated"] | mine["truncated"]
        assert mine["is_init"].tolist() == [True, *ended[:-1].tolist()]


@MODES
def test_a_rollout_of_one_step_in_one_slot_is_not_a_mere_reset(mode):
    """Which follows each episode in NEXT_STEP mode."""
    collector = Collector(cartpole(1, mode, max_episode_steps=9), Lean(), seed=7)
    rollouts = [collector.collect(num_steps=1) for _ in range(60)]
    assert all(rollout["mask"].sum() == 1 for rollout in rollouts)
    mine = torch.cat([rollout[rollout["mask"]] for rollout in rollouts])
    expected = by_hand(7, 60, max_episode_steps=9)
    for name in COLUMNS:
        assert torch.equal(mine[name].double(), expected[name].double()), name


@MODES
def test_whole_episodes_are_the_first_of_each_slot(mode):
    env = cartpole(3, mode)
    rollout = collect(env, Lean(), num_episodes=5, seed=7)
    for slot, share in enumerate([2, 2, 1]):
        mine = rollout[slot][rollout["mask"][slot]]
        assert int((mine["terminated"] | mine["truncated"]).sum()) == share and mine["terminated"][-1]
        expected = by_hand(7 + slot, len(mine))
        assert all(torch.equal(mine[name].double(), expected[name].double()) for name in COLUMNS)


@MODES
def test_whole_episodes_start_from_a_reset(mode):
    env = cartpole(3, mode)
    collector = Collector(env, Lean(), seed=7)
    collector.collect(num_steps=6)
    for _ in range(2):
        rollout = collector.collect(num_episodes=3)
        assert rollout["is_init"][:, 0].all() and rollout["mask"][:, 0].all()
        assert rollout["observation"][:, 0].abs().max() <= 0.05


@pytest.mark.parametrize("episodes", [3, 4, 7])
@pytest.mark.parametrize("kind", [*(mode.name for mode in AutoresetMode), "native"])
def test_evaluation_has_exactly_the_episodes_asked_for(kind, episodes):
    """Slots that are done play on until the last is: those further episodes must not be counted."""
    env = gym.make_vec("CartPole-v1", num_envs=3) if kind == "native" else cartpole(3, AutoresetMode[kind])
    policy = mlp_for(env)
    policy.actor[-1].bias.data = torch.tensor([5.0, -5.0])  # falls at once, so that slots finish unequally
    for seed in range(5):
        returns, rollout = evaluate(env, policy, num_episodes=episodes, seed=seed)
        assert len(returns) == episodes
        assert sum(returns) == rollout["mask"].sum()


def test_the_native_cartpole_obeys_its_own_dynamics():
    """Each True entry is replayed in a single CartPole; each end is followed by one False entry, and no other is."""
    env, single = gym.make_vec("CartPole-v1", num_envs=3), gym.make("CartPole-v1").unwrapped
    assert not isinstance(env, SyncVectorEnv) and env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    collector = Collector(env, Lean(), seed=3)
    parts = [collector.collect(num_steps=steps) for steps in (50, 1, 100)]
    rollout = torch.cat(parts, dim=1)
    ended = rollout["terminated"] | rollout["truncated"]
    assert torch.equal(~rollout["mask"][:, 1:], ended[:, :-1]) and rollout["mask"][:, 0].all()
    assert torch.equal(rollout["is_init"][:, 1:], ~rollout["mask"][:, :-1]) and ended.sum() > 3
    single.reset(seed=0)
    for entry in rollout[rollout["mask"]]:
        single.state = entry["observation"].double().numpy()
        single.steps_beyond_terminated = None
        after, reward, terminated, _, _ = single.step(int(entry["action"]))
        np.testing.assert_allclose(entry["next_observation"], after, atol=1e-5)
        assert (reward, terminated) == (entry["reward"].item(), entry["terminated"].item())


@MODES
def test_an_action_mask_stays_with_its_slot(mode):
    env = SyncVectorEnv([lambda n=n: Gate(n) for n in (2, 4, 5)], autoreset_mode=mode)
    rollout = collect(env, MLPPolicy(env.single_observation_space, env.single_action_space), num_steps=20)
    mask = rollout["mask"]
    expected = rollout["observation"][mask][:, 0].long() % 3
    assert rollout["action"][mask].tolist() == expected.tolist()
    assert rollout["action_mask"][mask].sum(1).tolist() == [1] * int(mask.sum())


@MODES
def test_a_rollout_does_not_alias_a_buffer(mode):
    """``SyncVectorEnv(copy=False)`` hands out one array for ever: the rollout must hold what was seen."""
    make = functools.partial(gym.make, "CartPole-v1", max_episode_steps=4)
    env = SyncVectorEnv([make] * 2, copy=False, autoreset_mode=mode)
    rollout = collect(env, Lean(), num_steps=20, seed=7)
    for slot in range(2):
        mine = rollout[slot][rollout["mask"][slot]]
        expected = by_hand(7 + slot, len(mine), max_episode_steps=4)
        assert all(torch.equal(mine[name].double(), expected[name].double()) for name in COLUMNS)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
@MODES
def test_taxis_action_mask_comes_through_in_every_mode(mode, name):
    """Every action is open in the recorded mask, the masks are those of the states, and scoring obeys them."""
    make = lambda: gym.make("Taxi-v4", max_episode_steps=7)  # noqa: E731
    env = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    policy = make_policy(env, policy=name)
    rollout = collect(env, policy, num_steps=40, seed=3)
    gap = policy.evaluate(rollout).log_prob - rollout["log_prob"]
    assert gap[rollout["mask"]].abs().max() < 1e-5
    rollout = rollout[rollout["mask"]]
    taxi = gym.make("Taxi-v4").unwrapped
    for entry in rollout:
        expected = taxi.action_mask(int(entry["observation"].argmax()))
        np.testing.assert_array_equal(entry["action_mask"], expected.astype(bool))
        assert entry["action_mask"][entry["action"]]
    assert not rollout["action_mask"].all()


def test_an_environment_must_say_its_autoreset_mode():
    env = gym.make_vec("CartPole-v1", num_envs=2)
    policy = make_policy(env)
    env.unwrapped.metadata = {"autoreset_mode": "sometimes"}
    with refused(ValueError, "autoreset_mode", "sometimes", "AutoresetMode"):
        PPO(env, policy)
    with refused(ValueError, "autoreset_mode", "sometimes", "AutoresetMode"):
        collect(env, policy, num_steps=3)


class FirstTwo(gym.vector.VectorWrapper):
    """A wrapper that forgets the final observations."""

    def __init__(self, env):
        super().__init__(env)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,))

    def reset(self, **options):
        observation, info = self.env.reset(**options)
        return observation[:, :2], info

    def step(self, actions):
        observation, *rest = self.env.step(actions)
        return observation[:, :2], *rest


def test_a_wrapper_must_keep_the_final_observation():
    env = FirstTwo(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync",
                                vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}))  # fmt: skip
    policy = MLPPolicy(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    with refused(ValueError, "final_obs", "\\(2,\\)", "\\(4,\\)", "NEXT_STEP"):
        collect(env, policy, num_steps=100)
