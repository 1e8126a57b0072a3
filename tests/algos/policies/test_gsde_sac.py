"""SAC with state-dependent noise: Stable-Baselines3's actor, what is held between draws, what is trained."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.sac.policies import Actor
from torch import nn

import algos
from algos import SAC, SACGSDEPolicy, SACPolicy, collect
from algos.policies.gsde import SquashedStateDependentGaussian
from tests.helpers.off_policy import random_batch, reach

STATES = spaces.Box(-10, 10, (3,), np.float32)
ACTIONS = spaces.Box(np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32))


def make_policy(*, freq=4, seed=0):
    """A policy whose deviations differ from feature to feature, and whose means are not all small."""
    policy = SACGSDEPolicy(STATES, ACTIONS, hidden=(8, 5), sde_sample_freq=freq, seed=seed)
    policy.distribution.log_std.data.normal_(-1, 0.5, generator=torch.Generator().manual_seed(seed))
    policy.actor.head.weight.data.mul_(200)
    return policy


def states(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)


def peer_of(policy):
    """Stable-Baselines3's actor with the weights of ours."""
    peer = Actor(
        STATES,
        spaces.Box(-1, 1, (2,)),
        [8, 5],
        FlattenExtractor(STATES),
        features_dim=3,
        use_sde=True,
        full_std=True,
        clip_mean=2.0,
    )
    for layer, theirs in zip(policy.actor.hidden_layers[::2], peer.latent_pi[::2], strict=True):
        theirs.load_state_dict(layer.state_dict())
    peer.mu[0].load_state_dict(policy.actor.head.state_dict())
    peer.log_std.data.copy_(policy.distribution.log_std)
    return peer


def gaussian_noise(policy, observation):
    """What exploration adds before tanh in these states."""
    action = policy.act(observation).action
    mean, _ = policy.distribution.parametrize(policy.actor(torch.from_numpy(observation)))
    return (policy.distribution.bounds.scale(action).double().atanh() - mean).detach()


def test_actions_and_densities_are_those_of_stable_baselines3():
    """With the same noise matrix in all states; Stable-Baselines3 adds 1e-6 in the log of tanh's slope."""
    policy = make_policy()
    peer = peer_of(policy)
    observation = torch.from_numpy(states(40))
    matrix = torch.randn(1, *policy.log_std.shape, generator=torch.Generator().manual_seed(3))
    peer.action_dist.exploration_mat = policy.distribution.log_std.exp() * matrix[0]
    expected, expected_log_prob = peer.action_log_prob(observation)
    action, log_prob = policy.distribution.explore(policy.actor(observation), matrix)
    scaled = policy.distribution.bounds.scale(action)
    torch.testing.assert_close(scaled, expected.detach(), atol=1e-5, rtol=0)
    log_prob = log_prob + policy.distribution.bounds.log_scale
    torch.testing.assert_close(log_prob, expected_log_prob.detach(), atol=1e-3, rtol=1e-4)
    means = policy.distribution.parametrize(policy.actor(observation))[0]
    assert (means.abs() == 2).any() and (means.abs() < 2).any(), "some means are limited"


def test_an_action_is_scored_by_the_density_it_was_drawn_with():
    policy = make_policy()
    observation = states(40)
    step = policy.act(observation)
    output = policy.actor(torch.from_numpy(observation))
    log_prob, _ = policy.distribution.score(output, step.action)
    torch.testing.assert_close(log_prob.detach(), step.log_prob, atol=1e-3, rtol=1e-4)


def test_samples_have_the_density_that_sac_learns_with():
    """Over many matrices: mean and deviation before tanh."""
    policy = make_policy(freq=1)
    observation = states(1).repeat(40_000, axis=0)
    noise = gaussian_noise(policy, observation)
    _, log_std = policy.distribution.parametrize(policy.actor(torch.from_numpy(observation[:1])))
    torch.testing.assert_close(noise.std(0).float(), log_std[0].exp().detach(), atol=0, rtol=0.02)
    assert (noise.mean(0).abs() < 0.02 * log_std[0].exp()).all()


def test_equal_states_are_perturbed_alike_until_a_matrix_expires_or_its_slot_is_reset():
    policy, observation = make_policy(freq=3), states(4)
    drawn = torch.stack([policy.act(observation).action for _ in range(7)])
    for start in (0, 3):
        assert torch.equal(drawn[start], drawn[start + 2])
        assert (drawn[start] != drawn[start + 3]).all()
    policy.reset(np.array([False, True, False, False]))
    action = policy.act(observation).action
    assert torch.equal(action[[0, 2, 3]], drawn[6][[0, 2, 3]])
    assert (action[1] != drawn[6][1]).all()


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_noise_is_drawn_anew_where_an_episode_begins(mode):
    """Every observation is the same, so an action changes only with its noise."""

    def make():
        env = gym.make("Pendulum-v1", max_episode_steps=7)
        return gym.wrappers.TransformObservation(env, lambda _: np.ones(3, np.float32), spaces.Box(-1, 1, (3,)))

    env = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    policy = SACGSDEPolicy(env.single_observation_space, env.single_action_space, hidden=(8,), sde_sample_freq=1000)
    rollout = collect(env, policy, num_steps=20)
    changed = rollout["action"][:, 1:, 0] != rollout["action"][:, :-1, 0]
    assert torch.equal(changed, rollout["is_init"][:, 1:]) and changed.sum() == 3 * 2


def test_deterministic_and_uniform_actions_need_no_matrix():
    policy, observation = make_policy(), states(4)
    policy.act(observation, deterministic=True)
    policy.distribution.uniform = True
    uniform = policy.act(observation)
    assert uniform.log_prob.tolist() == pytest.approx([-np.log(4 * 0.5)] * 4)
    assert not policy.memory


def test_an_update_trains_the_noise_and_the_features():
    env = reach()
    policy = SACGSDEPolicy(env.single_observation_space, env.single_action_space, hidden=(16, 16), seed=0)
    agent = SAC(env, policy, learning_starts=8, batch_size=16, temperature=0.3, learning_rate=1e-2)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    agent.improve(agent.with_noise(random_batch(agent, 16, seed=0)))
    unchanged = [name for name, weight in policy.named_parameters() if torch.equal(weight, before[name])]
    assert not unchanged
    assert (policy.distribution.log_std > before["distribution.log_std"]).float().mean() > 0.7, "α pays for entropy"


@pytest.mark.long
def test_it_learns_to_reach():
    env = reach(4)
    policy = SACGSDEPolicy(env.single_observation_space, env.single_action_space, hidden=(32, 32), seed=1)
    agent = SAC(
        env, policy, num_steps=8, learning_starts=200, batch_size=64, learning_rate=3e-3, gamma=0.5,
        updates_per_step=0.25, seed=1,
    )  # fmt: skip
    agent.learn(1_600)
    assert algos.evaluate(env, policy, num_episodes=40, deterministic=True, seed=2).mean_return > -0.25


def test_it_is_saved_with_its_noise(tmp_path):
    env = reach()
    policy = SACGSDEPolicy(env.single_observation_space, env.single_action_space, hidden=(8,), sde_sample_freq=9)
    agent = SAC(env, policy)
    agent.save(tmp_path / "agent")
    loaded = algos.load(tmp_path / "agent")
    assert type(loaded) is SACGSDEPolicy and loaded.sde_sample_freq == 9
    assert torch.equal(loaded.distribution.log_std, policy.distribution.log_std)
    observation = torch.zeros(2, 2)
    torch.testing.assert_close(loaded.actor(observation), policy.actor(observation))


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="sde_sample_freq is 0, expected an integer of at least 1"):
        SACGSDEPolicy(STATES, ACTIONS, sde_sample_freq=0)
    with pytest.raises(ValueError, match="Box"):
        SACGSDEPolicy(STATES, spaces.Discrete(3))


def test_the_actor_of_sac_policy_is_as_before():
    """Saved agents of version 0.11 have its weights by these names."""
    names = [name for name, _ in SACPolicy(STATES, ACTIONS, hidden=(4,)).named_parameters()]
    assert names[:4] == ["actor.0.weight", "actor.0.bias", "actor.2.weight", "actor.2.bias"]
    assert isinstance(SACPolicy(STATES, ACTIONS, hidden=(4,)).actor, nn.Sequential)


def test_its_log_std_is_that_of_the_noise_matrix():
    assert make_policy().log_std.shape == (5, 2)
    with pytest.raises(AttributeError, match="log_std"):
        _ = SACPolicy(STATES, ACTIONS, hidden=(4,)).log_std


def test_a_subclass_may_have_its_own_distribution():
    class Quiet(SquashedStateDependentGaussian):
        def parametrize(self, output):
            mean, log_std = super().parametrize(output)
            return mean, log_std - 5

    class QuietPolicy(SACGSDEPolicy):
        distribution_type = Quiet

    assert type(QuietPolicy(STATES, ACTIONS, hidden=(4,)).distribution) is Quiet
