"""Running statistics of observations and rewards: against numpy and Stable-Baselines3, frozen, masked, saved."""

import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

import algos
from algos import PPO, Collector, LSTMPolicy, MLPPolicy, PPOConfig, collect
from algos.policies.normalizers import ObservationNormalizer, RewardNormalizer, RunningMoments
from algos.training.save import read_description

POLICIES = pytest.mark.parametrize("kind", [MLPPolicy, LSTMPolicy])


def pendulum(mode=AutoresetMode.NEXT_STEP, num_envs=3, limit=20):
    make = lambda: gym.make("Pendulum-v1", max_episode_steps=limit)  # noqa: E731
    return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)


def policy_for(env, kind, **options):
    return kind(env.single_observation_space, env.single_action_space, normalize_observations=True, **options)


def test_batches_of_any_size_give_the_moments_of_all():
    samples = np.random.default_rng(0).normal([3.0, -5e4], [0.1, 7.0], (1000, 2))
    moments, start = RunningMoments(2), 0
    for size in (1, 2, 500, 0, 497):
        moments.add(torch.from_numpy(samples[start : start + size]))
        start += size
    np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, samples.var(0), rtol=1e-9)
    assert moments.count == 1000


def test_observations_get_mean_0_and_variance_1():
    samples = torch.randn(5000, 3) * torch.tensor([1e-3, 1.0, 1e3]) + torch.tensor([5.0, 0.0, -9e3])
    normalizer = ObservationNormalizer(3)
    assert torch.equal(normalizer(samples[:, :2].new_tensor([[0.5, 1, -2]])), torch.tensor([[0.5, 1, -2]]))
    normalizer.add(samples)
    normal = normalizer(samples)
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal.mean(0), torch.zeros(3), atol=1e-2, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(3), atol=2e-2, rtol=0)
    assert normalizer(torch.tensor([[1e6, 0.0, 1e9]]))[0, [0, 2]].tolist() == [10, 10]


@POLICIES
def test_observation_statistics_rest_in_an_update(kind):
    """Every ratio of a first minibatch is 1 in every iteration, and the statistics are those of all True entries."""
    env = pendulum()
    policy = policy_for(env, kind)
    agent = PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=16, num_epochs=2))
    seen, counts, update = [], [], agent.update

    def watch(rollout):
        before = policy.normalizer.count.item()
        result = update(rollout)
        assert policy.normalizer.count.item() == before == sum(counts)
        assert result["policy/sampler_gap"] < 1e-5
        seen.append(rollout["observation"][rollout["mask"]])
        counts.append(len(seen[-1]))
        return result

    agent.update = watch
    agent.learn(200)
    raw = torch.cat(seen).double()
    assert len(counts) > 3 and min(counts) < 48, "no reset row: the mask is not tested"
    torch.testing.assert_close(policy.normalizer.mean, raw.mean(0))
    torch.testing.assert_close(policy.normalizer.variance, raw.var(0, correction=0))
    assert policy.normalizer.count == len(raw) and raw[:, 2].abs().max() > 1.5, "observations are raw in the rollout"


@POLICIES
def test_statistics_reach_critic_and_final_states(kind):
    """Scaled observations with scaled statistics change nothing that the policy says."""
    env = pendulum()
    policy, other = policy_for(env, kind, seed=2), policy_for(env, kind, seed=2)
    rollout = collect(env, policy, num_steps=30)
    policy.normalizer.add(rollout["observation"].flatten(0, 1))
    larger = rollout.clone()
    for name in ("observation", "next_observation"):
        larger[name] = 100 * larger[name] + 3
    other.normalizer.add(larger["observation"].flatten(0, 1))
    one = [*policy.evaluate(rollout)[::2], *policy.values(rollout)]
    two = [*other.evaluate(larger)[::2], *other.values(larger)]
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=0)


@POLICIES
def test_false_entries_do_not_count(kind):
    env = pendulum()
    policy, other = policy_for(env, kind), policy_for(env, kind)
    rollout = collect(env, policy, num_steps=45)
    spoilt = rollout.clone()
    spoilt["observation"][~rollout["mask"]] = torch.nan
    assert not rollout["mask"].all()
    policy.update_normalizer(rollout)
    other.update_normalizer(spoilt)
    assert torch.equal(policy.normalizer.mean, other.normalizer.mean)


@POLICIES
def test_a_loaded_policy_has_the_statistics_to_the_bit(kind, tmp_path):
    env = pendulum()
    policy = policy_for(env, kind)
    agent = PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=16))
    agent.learn(100)
    loaded = algos.load(agent.save(tmp_path))
    policy.reset()
    observation = env.reset(seed=9)[0]
    one, two = (p.act(observation, deterministic=True) for p in (policy, loaded))
    assert torch.equal(one.action, two.action) and torch.equal(one.log_prob, two.log_prob)
    assert torch.equal(policy.normalizer.variance, loaded.normalizer.variance) and loaded.normalizer.count > 50


# Rewards


def stable_baselines(rollouts, gamma):
    """VecNormalize's running returns and their statistics for the True entries of one slot after another."""
    from stable_baselines3.common.running_mean_std import RunningMeanStd

    statistics, samples = RunningMeanStd(epsilon=1e-12, shape=()), []
    for slot in range(len(rollouts[0])):
        running = 0.0
        for rollout in rollouts:
            for entry in rollout[slot][rollout["mask"][slot]]:
                running = running * gamma + entry["reward"].item()
                samples.append(running)
                if entry["terminated"] or entry["truncated"]:
                    running = 0.0
    statistics.update(np.array(samples))
    return statistics, samples


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_rewards_are_scaled_as_by_stable_baselines3(mode):
    env = pendulum(mode)
    policy, normalizer = policy_for(env, MLPPolicy), RewardNormalizer(0.9)
    collector = Collector(env, policy, seed=1)
    rollouts = []
    for steps in (13, 1, 30, 25):
        rollouts.append(collector.collect(num_steps=steps))
        raw = rollouts[-1]["reward"].clone()
        scaled = normalizer(rollouts[-1])
        statistics, samples = stable_baselines(rollouts, 0.9)
        assert torch.equal(rollouts[-1]["reward"], raw)
        np.testing.assert_allclose(normalizer.moments.variance.item(), np.var(samples), rtol=1e-5)
        np.testing.assert_allclose(normalizer.moments.variance.item(), statistics.var, rtol=1e-5)
        torch.testing.assert_close(scaled, raw / float(np.sqrt(statistics.var + 1e-8)), rtol=1e-5, atol=1e-6)


def test_false_entries_have_no_effect_on_the_scale():
    env = pendulum(limit=5)
    rollout = collect(env, policy_for(env, MLPPolicy), num_steps=20)
    spoilt = rollout.clone()
    spoilt["reward"][~rollout["mask"]] = torch.nan
    one, two = RewardNormalizer(0.9), RewardNormalizer(0.9)
    assert torch.equal(one(rollout)[rollout["mask"]], two(spoilt)[rollout["mask"]])
    assert one.state_dict() == two.state_dict()


def test_rewards_of_any_unit_train_the_same():
    """With rewards in another unit the updates are the same; without the option they are not."""

    class Unit(gym.vector.VectorWrapper):
        def __init__(self, env, unit):
            super().__init__(env)
            self.unit = unit

        def step(self, actions):
            observation, reward, *rest = self.env.step(actions)
            return observation, self.unit * reward, *rest

    def train(unit, **options):
        env = Unit(pendulum(), unit)
        policy = policy_for(env, MLPPolicy)
        history = PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=48, **options)).learn(150)
        returns = [m["episode/return"] for m in history if "episode/return" in m]
        return torch.cat([p.detach().flatten() for p in policy.parameters()]), returns

    one, two = train(1.0, normalize_rewards=True), train(64.0, normalize_rewards=True)
    torch.testing.assert_close(one[0], two[0], atol=1e-5, rtol=1e-4)
    assert one[1] and np.allclose(two[1], 64 * np.array(one[1]), rtol=1e-3)
    assert (train(1.0)[0] - train(64.0)[0]).abs().max() > 1e-3


def test_reward_statistics_are_saved_and_continued(tmp_path):
    env = pendulum()
    agent = PPO(env, policy_for(env, MLPPolicy), PPOConfig(num_steps=16, minibatch_size=16, normalize_rewards=True))
    agent.learn(100)
    saved = read_description(agent.save(tmp_path))["reward_normalizer"]
    assert saved == json.loads(json.dumps(agent.reward_normalizer.state_dict())) and saved["count"] > 50
    restored = RewardNormalizer(agent.config.gamma)
    restored.load_state_dict(saved)
    rollout = agent.collector.collect(num_steps=16)
    assert torch.equal(restored(rollout), agent.reward_normalizer(rollout))
    assert restored.state_dict() == agent.reward_normalizer.state_dict()
    plain = PPO(env, policy_for(env, MLPPolicy), PPOConfig(num_steps=16, minibatch_size=16))
    assert plain.reward_normalizer is None
    assert read_description(plain.save(tmp_path))["reward_normalizer"] is None


def test_a_new_discount_reaches_the_reward_statistics():
    """With γ = 0 the running return is the last reward."""
    env = pendulum()
    agent = PPO(env, policy_for(env, MLPPolicy), PPOConfig(num_steps=16, minibatch_size=16, normalize_rewards=True))
    agent.config = dataclasses.replace(agent.config, gamma=0.0)
    rollout = agent.collector.collect(num_steps=16)
    agent.reward_normalizer(rollout)
    assert torch.equal(agent.reward_normalizer.running, rollout["reward"][:, -1].double())


def test_each_row_of_a_text_rollout_has_its_own_return():
    """Rows of whole episodes, in another number than before: nothing is carried from one to the next."""
    normalizer = RewardNormalizer(1.0)
    for rows in (2, 3):
        mask = torch.tensor([[False, True, True, False]]).expand(rows, 4)
        is_init = torch.tensor([[True, False, False, False]]).expand(rows, 4)
        reward = torch.zeros(rows, 4)
        reward[:, 2] = 4.0
        normalizer(TensorDict({"reward": reward, "mask": mask, "is_init": is_init}, batch_size=[rows, 4]))
    # Returns 0 and 4, five times each.
    assert (normalizer.moments.mean.item(), normalizer.moments.variance.item()) == (2.0, 4.0)


# --- numbers that float32 cannot tell apart --------------------------------------------------------------------------


class Clock(gym.Env):
    """Shows the time in seconds, from a start on."""

    action_space = spaces.Discrete(2)

    def __init__(self, start, dtype=np.float64):
        self.observation_space = spaces.Box(0, 10**10, (2,), dtype)
        self.start = start

    def observe(self):
        return np.array([1, self.start + self.time], self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, self.time == 100, False, {}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("start", "dtype", "count"), [
    (1_700_000_000, np.float64, 1), (1_700_000_000, np.int64, 1), (10_000, np.float64, 0), (10_000, np.int64, 0),
    (0, np.float64, 0),
])  # fmt: skip
def test_numbers_of_which_float32_keeps_too_few_digits_are_told(start, dtype, count, normalize, caplog):
    """In float32, times of 1.7e9 are multiples of 128, and 100 seconds have one or two values."""
    env = SyncVectorEnv([lambda: Clock(start, dtype)] * 2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, normalize_observations=normalize)
    PPO(env, policy, num_steps=64).learn(400)
    assert caplog.text.count("number 1 of the observations is about 1.7e+09") == count
    assert caplog.text.count("of which float32") == count
