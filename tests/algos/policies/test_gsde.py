"""State-dependent exploration (gSDE): the formula, torch, Stable-Baselines3, and what is held between draws."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.distributions import Normal, kl_divergence

import algos
from algos import PPO, GSDEPolicy, MLPPolicy, PPOConfig, collect, evaluate, make as environments
from algos.policies.gsde import StateDependentGaussian
from tests.helpers.errors import refused

PLANE = spaces.Box(-1, 1, (3,), np.float32)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


def make_policy(*, seed=0, freq=4, action_space=ACTIONS, **options):
    """A policy whose deviations differ from feature to feature."""
    policy = GSDEPolicy(PLANE, action_space, hidden=(8, 5), sde_sample_freq=freq, seed=seed, **options)
    policy.log_std.data.normal_(generator=torch.Generator().manual_seed(seed))
    return policy


def states(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)


def normal(policy, observation):
    """The density by hand."""
    features = policy.actor[:-1](observation).detach()
    variance = torch.einsum("...f,fa->...a", features**2, policy.log_std.exp() ** 2) + 1e-6
    return Normal(policy.actor[-1](policy.actor[:-1](observation)), variance.sqrt())


def rollout_of(policy, shape=(5, 4)):
    observation = torch.randn(*shape, 3, generator=torch.Generator().manual_seed(0))
    return {"observation": observation, "action": torch.randn(*shape, *policy.action_space.shape)}


def test_density_entropy_and_divergence_are_torchs():
    policy, other = make_policy(seed=0), make_policy(seed=1)
    rollout = rollout_of(policy)
    expected, theirs = (normal(p, rollout["observation"]) for p in (policy, other))
    log_prob, entropy, _ = policy.evaluate(rollout)
    torch.testing.assert_close(log_prob, expected.log_prob(rollout["action"]).sum(-1))
    torch.testing.assert_close(entropy, expected.entropy().sum(-1))
    kl = policy.divergence(rollout, other)
    torch.testing.assert_close(kl, kl_divergence(expected, theirs).sum(-1))
    kl.sum().backward()
    assert policy.log_std.grad.abs().min() > 0 and all(p.grad is None for p in other.parameters())
    torch.testing.assert_close(policy.divergence(rollout, policy.reference()), torch.zeros(5, 4))


def test_without_exploration_deviation_is_a_thousandth():
    policy = make_policy()
    policy.log_std.data.fill_(-30)
    entropy = policy.evaluate(rollout_of(policy)).entropy
    torch.testing.assert_close(entropy, (2 * Normal(0.0, 1e-3).entropy()).expand(5, 4))


def test_the_features_are_not_trained_by_the_noise():
    policy = make_policy()
    policy.evaluate(rollout_of(policy)).entropy.sum().backward()
    assert policy.log_std.grad.abs().min() > 0
    assert all(p.grad is None or not p.grad.any() for p in policy.actor.parameters())


def test_log_densities_are_those_of_stable_baselines3():
    sb3 = pytest.importorskip("stable_baselines3.common.distributions")
    policy = make_policy()
    observation = torch.from_numpy(states(50))
    features = policy.actor[:-1](observation)
    theirs = sb3.StateDependentNoiseDistribution(2)
    theirs.proba_distribution_net(5, latent_sde_dim=5)
    theirs.proba_distribution(policy.actor[-1](features), policy.log_std, features)
    step = policy.act(observation.numpy())
    torch.testing.assert_close(step.log_prob, theirs.log_prob(step.action).detach())
    found = policy.evaluate({"observation": observation, "action": step.action})
    torch.testing.assert_close(found.log_prob, theirs.log_prob(step.action))
    torch.testing.assert_close(found.entropy, theirs.entropy())


def test_samples_have_the_formulas_mean_and_covariance():
    """Between two states as well: what the same matrix does to both is correlated."""
    policy, count = make_policy(), 40_000
    one, two = torch.from_numpy(states(2))
    draws = []
    for state in (one, two):
        policy.generator.manual_seed(5)
        policy.reset()
        draws.append(policy.act(state.expand(count, 3).numpy()).action)
    noise = torch.cat(draws, dim=-1)
    means = torch.cat([normal(policy, x).mean for x in (one, two)]).detach()
    a, b = (policy.actor[:-1](x).detach() for x in (one, two))
    variance = policy.log_std.detach().exp() ** 2
    # Of dimension i and state s with dimension i and state t: Σ_f φ_f(s) φ_f(t) σ_fi²; different dimensions: 0.
    blocks = [[torch.diag((x * y) @ variance) for y in (a, b)] for x in (a, b)]
    expected = torch.cat([torch.cat(row, dim=1) for row in blocks])
    torch.testing.assert_close(noise.mean(0), means, atol=0.05, rtol=0)
    torch.testing.assert_close(noise.T.cov(), expected, atol=0.05, rtol=0.03)


def noise(policy, observation):
    """What exploration adds in these states."""
    return policy.act(observation).action - policy.act(observation, deterministic=True).action


def test_equal_states_are_perturbed_alike_per_matrix():
    policy, observation = make_policy(freq=3), states(4)
    drawn = torch.stack([noise(policy, observation) for _ in range(9)])
    for start in (0, 3, 6):
        assert torch.equal(drawn[start], drawn[start + 1]) and torch.equal(drawn[start], drawn[start + 2])
    for start in (0, 3):
        assert (drawn[start] != drawn[start + 3]).all()
    assert (drawn[0, 0] != drawn[0, 1]).all(), "each slot has a matrix of its own"


def test_the_noise_is_linear_in_the_features():
    policy = make_policy(freq=100)
    observation = states(1).repeat(6, axis=0)
    policy.act(observation)
    many = [states(6, seed) for seed in range(20)]
    features = torch.stack([policy.actor[:-1](torch.from_numpy(x)).detach() for x in many])
    drawn = torch.stack([noise(policy, x) for x in many])
    for slot in range(6):
        matrix = torch.linalg.lstsq(features[:, slot], drawn[:, slot]).solution
        torch.testing.assert_close(features[:, slot] @ matrix, drawn[:, slot], atol=1e-4, rtol=0)


def test_a_reset_slot_alone_draws_anew():
    policy, observation = make_policy(freq=4), states(3)
    before = noise(policy, observation)
    policy.reset(np.array([False, True, False]))
    after = [noise(policy, observation) for _ in range(4)]
    assert torch.equal(after[0][[0, 2]], before[[0, 2]]) and (after[0][1] != before[1]).all()
    assert torch.equal(after[2][[0, 2]], before[[0, 2]]), "their four steps are not over"
    assert (after[3][[0, 2]] != before[[0, 2]]).all() and torch.equal(after[3][1], after[0][1])


def test_another_number_of_slots_draws_anew():
    policy = make_policy(freq=100)
    assert noise(policy, states(3)).shape == (3, 2)
    assert noise(policy, states(5)).shape == (5, 2)
    one = make_policy(action_space=spaces.Box(-1, 1, (), np.float32))
    assert one.act(states(3)).action.shape == (3,)


def test_a_deterministic_action_is_the_mean():
    policy, observation = make_policy(), states(3)
    policy.act(observation)
    twin, state = copy.deepcopy(policy), policy.generator.get_state()
    step = policy.act(observation, deterministic=True)
    torch.testing.assert_close(step.action, normal(policy, torch.from_numpy(observation)).mean.detach())
    assert torch.equal(policy.generator.get_state(), state)
    assert all(torch.equal(policy.act(observation).action, twin.act(observation).action) for _ in range(9))


def pendulum(mode=AutoresetMode.SAME_STEP):
    make = lambda: gym.make("Pendulum-v1", max_episode_steps=7)  # noqa: E731
    return SyncVectorEnv([make] * 3, autoreset_mode=mode)


def policy_for(env, freq=4):
    return GSDEPolicy(env.single_observation_space, env.single_action_space, sde_sample_freq=freq)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_ratio_is_one_with_state_dependent_noise(mode):
    env = pendulum(mode)
    policy = policy_for(env)
    agent = PPO(env, policy, PPOConfig(num_steps=20, minibatch_size=16, learning_rate=1e-2))
    agent.learn(200)
    rollout = collect(env, policy, num_steps=20)
    gap = policy.evaluate(rollout).log_prob - rollout["log_prob"]
    assert gap[rollout["mask"]].abs().max() < 1e-5


def test_noise_is_drawn_anew_where_an_episode_begins():
    """Every observation is the same, so that an action changes only with its noise."""
    space = spaces.Box(-1, 1, (3,))
    make = lambda: gym.wrappers.TransformObservation(  # noqa: E731
        gym.make("Pendulum-v1", max_episode_steps=7), lambda observation: np.ones(3, np.float32), space
    )
    env = SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    rollout = collect(env, policy_for(env, freq=1000), num_steps=20)
    action = rollout["action"][..., 0]
    changed = action[:, 1:] != action[:, :-1]
    assert torch.equal(changed, rollout["is_init"][:, 1:]) and changed.sum() == 3 * 2


def test_evaluating_leaves_the_trainees_matrices_alone():
    env = pendulum()
    policy = policy_for(env)
    collect(env, policy, num_steps=2)
    twins = [copy.deepcopy(policy) for _ in range(2)]
    evaluate(env, policy, num_episodes=5)
    policy.fork().reset()
    same = [policy, *twins]
    for _ in range(9):
        actions = [one.act(states(3)).action for one in same]
        assert torch.equal(actions[0], actions[1]) and torch.equal(actions[1], actions[2])


def test_a_saved_policy_acts_and_explores_alike(tmp_path):
    env = pendulum()
    policy = policy_for(env)
    agent = PPO(env, policy, PPOConfig(num_steps=20, minibatch_size=16))
    agent.learn(60)
    loaded = algos.load(agent.save(tmp_path))
    assert isinstance(loaded.distribution, StateDependentGaussian)
    for p in (policy, loaded):
        p.generator.manual_seed(3)
        p.reset()
    for _ in range(9):
        one, two = (p.act(states(3)) for p in (policy, loaded))
        assert torch.equal(one.action, two.action) and torch.equal(one.log_prob, two.log_prob)


def test_the_deviation_at_the_start():
    policy = GSDEPolicy(PLANE, ACTIONS, log_std_init=-2.0)
    assert (policy.log_std == -2).all() and policy.log_std.shape == (64, 2)
    assert (MLPPolicy(PLANE, ACTIONS, log_std_init=math.log(0.5)).log_std == torch.tensor(math.log(0.5))).all()


def test_noise_that_no_state_can_shape_is_refused():
    with refused(ValueError, "Discrete", "Box", "MLPPolicy"):
        GSDEPolicy(PLANE, spaces.Discrete(2))
    with refused(TypeError, "MLPPolicy has no 'sde_sample_freq'", "GSDEPolicy"):
        MLPPolicy(PLANE, ACTIONS, sde_sample_freq=4)
    with refused(ValueError, "int", "expected floats"):
        GSDEPolicy(PLANE, spaces.Box(0, 3, (2,), np.int64))
    with refused(ValueError, "Discrete", "Box", "log_std_init"):
        MLPPolicy(PLANE, spaces.Discrete(2), log_std_init=-1.0)
    for freq in (0, -1, 2.5):
        with refused(ValueError, "sde_sample_freq", str(freq), "at least 1"):
            GSDEPolicy(PLANE, ACTIONS, sde_sample_freq=freq)
    env = pendulum()
    assert environments.make_policy(env, policy="gsde", sde_sample_freq=4).arguments()["sde_sample_freq"] == 4
    for options in ({"sde_sample_freq": 4}, {"log_std_init": -1.0}):
        with refused(ValueError, "LSTMPolicy", "its arguments are", *options):
            environments.make_policy(env, policy="lstm", **options)
    with refused(ValueError, "action_mask", "Discrete"):
        make_policy().act(states(2), action_mask=torch.ones(2, 2, dtype=torch.bool))
