"""TD3: updates are Stable-Baselines3's, targets by hand, noise while exploring, the delayed policy, wrong input."""

import itertools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.noise import ActionNoise, OrnsteinUhlenbeckActionNoise

import algos
from algos import TD3, SACPolicy, TD3Config, TD3Policy, evaluate
from algos.td3 import clipped_double_target
from tests.helpers.off_policy import (
    FIRST_UPDATE,
    STEPS,
    KeepsDraws,
    Reach,
    assert_same_steps,
    copy_critics,
    draw_the_same,
    like_recorded,
    make_recorded,
    peer_batch,
    random_batch,
    reach,
    stored_actions,
)
from tests.helpers.small_agents import cartpole


def make(env=None, **options):
    env = reach() if env is None else env
    policy = TD3Policy(env.single_observation_space, env.single_action_space, hidden=(16, 16))
    return TD3(env, policy, **(dict(num_steps=8, learning_starts=32, batch_size=16, seed=1) | options))


# --- the update ------------------------------------------------------------------------------------------------------


def test_clipped_double_target_by_hand():
    """γ = .5, the lower Q' is 2: 1 + .5 x 2 = 2; terminated: 1."""
    columns = dict(reward=torch.ones(2), terminated=torch.tensor([False, True]), gamma=0.5)
    values = torch.tensor([[2.0, 9.0], [5.0, torch.nan]])
    assert clipped_double_target(**columns, next_values=values).tolist() == [2.0, 1.0]


def peer_of(agent, env=None, **options):
    """Stable-Baselines3's agent with the weights of ours."""
    config = agent.config
    peer = stable_baselines3.TD3(
        "MlpPolicy", env or Reach(), gamma=config.gamma, tau=config.target_rate, device="cpu",
        learning_rate=config.learning_rate, policy_delay=config.policy_delay, target_policy_noise=config.target_noise,
        target_noise_clip=config.target_noise_clip, **options,
        policy_kwargs=dict(net_arch=list(agent.policy.hidden), optimizer_kwargs=dict(eps=config.adam_eps)),
    )  # fmt: skip
    peer.set_logger(Logger(None, []))
    pairs = ((agent.policy, peer.critic, peer.actor), (agent.target, peer.critic_target, peer.actor_target))
    for policy, critic, actor in pairs:
        copy_critics(policy.critic, critic)
        for layer, theirs in zip(policy.actor[::2], actor.mu[::2], strict=False):  # theirs ends with tanh
            theirs.load_state_dict(layer.state_dict())
    return peer


def assert_equal_networks(agent, peer, *, tolerance=1e-5):
    """Actor, critics and all targets."""
    after = peer_of(agent)  # our weights in their modules
    for kind in ("critic", "critic_target", "actor", "actor_target"):
        for (name, expected), weight in zip(
            getattr(peer, kind).named_parameters(), getattr(after, kind).parameters(), strict=True
        ):
            torch.testing.assert_close(
                weight, expected, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_updates_equal_those_of_stable_baselines3():
    """Equal weights, batches and noise: actor, critics and all targets after 2 steps of the policy, to 1e-5.

    Adam's eps is 1e-3, so that a gradient of nothing but rounding makes no step. Target noise is often clipped.
    """
    agent = make(learning_rate=1e-2, adam_eps=1e-3, gamma=0.9, target_rate=0.1, target_noise=0.4, target_noise_clip=0.3)
    with torch.no_grad():
        agent.target.actor[-1].weight.mul_(1.3)
    peer = peer_of(agent, batch_size=32)
    for number in range(4):
        batch = random_batch(agent, 32, seed=number)
        peer.replay_buffer = SimpleNamespace(sample=lambda *_, batch=batch, **__: peer_batch(agent, batch))
        torch.manual_seed(number)
        batch["next_noise"] = torch.empty(32, 2).normal_(0, 0.4) / 0.4
        before = agent.policy.actor[-1].weight.clone()
        agent.improve(batch)
        assert torch.equal(before, agent.policy.actor[-1].weight) == (number % 2 == 0)
        torch.manual_seed(number)
        peer.train(1, 32)

    assert_equal_networks(agent, peer)


class RecordedTD3(KeepsDraws, TD3):
    """TD3 that keeps its noise."""

    def noise_of(self, scaled_action, output):
        return (scaled_action - self.policy.distribution.mode(output)).numpy()

    def draw_noise(self, count):
        std = self.config.target_noise
        return {"next_noise": torch.empty(count, 2).normal_(0, std) / std}


class NoiseOf(ActionNoise):
    """The noise of an agent's steps, from the first one that Stable-Baselines3 takes by its policy."""

    def __init__(self, agent):
        self.steps = itertools.count()
        self.noises = agent.noises

    def __call__(self):
        number = next(self.steps)
        if number < FIRST_UPDATE - 1:
            return np.zeros(2, np.float32)
        return self.noises[number]


@pytest.mark.heavy
def test_a_training_is_that_of_stable_baselines3():
    """From the same random numbers: a buffer that is written over, both kinds of ends, actions out of bounds."""
    agent = make_recorded(RecordedTD3, TD3Policy, exploration_noise=0.4, target_noise=0.4, target_noise_clip=0.3)
    peer = peer_of(agent, **like_recorded())
    agent.learn(STEPS)

    peer.action_noise = NoiseOf(agent)
    draw_the_same(agent, peer)
    peer.learn(STEPS)
    assert_same_steps(agent, peer)
    assert (stored_actions(agent) != agent.buffer[:]["action"].numpy()).any()
    assert len(agent.chosen) == peer._n_updates == STEPS - FIRST_UPDATE + 1
    assert_equal_networks(agent, peer, tolerance=1e-4)


# --- what is collected -----------------------------------------------------------------------------------------------


def test_noise_explores_and_ends_with_the_update():
    """Noise of .1 of half the range, 1.5 and .25; actions out of bounds are stored as drawn."""
    agent = make(learning_starts=0, num_steps=200, exploration_noise=0.1, updates_per_step=1e-6)
    policy = agent.policy
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 5.0]))
    rollout = agent.collect()
    mask = rollout["mask"]
    action = rollout["action"][mask]
    assert action.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert action.std(0).tolist() == pytest.approx([0.15, 0.025], rel=0.15)
    evaluation = policy.evaluate(rollout)
    torch.testing.assert_close(evaluation.log_prob, rollout["log_prob"])
    expected = torch.distributions.Normal(torch.tensor([0.5, 0.49998]), torch.tensor([0.15, 0.025]))
    torch.testing.assert_close(rollout["log_prob"], expected.log_prob(rollout["action"]).sum(-1), atol=1e-2, rtol=0)
    assert evaluation.entropy[0, 0].item() == pytest.approx(expected.entropy().sum().item())

    agent.update(rollout)
    step = policy.act(np.zeros((3, 2), np.float32))
    torch.testing.assert_close(step.action, step.action[:1].expand(3, 2))
    assert (step.log_prob == 0).all()
    assert (policy.evaluate(rollout).log_prob == 0).all()


class SeesNoise(TD3):
    """TD3 that keeps the noise of its actions, as the policy that the update is about to change would have drawn it."""

    def update(self, rollout):
        with torch.no_grad():
            mode = self.policy.distribution.mode(self.policy.actor(rollout["observation"]))
        scaled = self.policy.distribution.bounds.scale(rollout["action"])
        self.noise = getattr(self, "noise", [])
        if not self.policy.distribution.uniform:
            self.noise.append(((scaled - mode) / self.config.exploration_noise)[rollout["mask"]])
        return super().update(rollout)


def test_the_policy_that_acts_is_the_one_that_was_learnt():
    """Else its actions would have more noise than they should: the policy changes by far more than the noise of .01."""
    env = reach(4)
    policy = TD3Policy(env.single_observation_space, env.single_action_space, hidden=(16, 16))
    agent = SeesNoise(env, policy, num_steps=4, learning_starts=32, exploration_noise=0.01, learning_rate=1e-2, seed=1)
    agent.learn(2_000)
    noise = torch.cat(agent.noise)
    assert len(noise) > 1_500
    assert noise.mean(0).abs().max() < 0.1
    assert noise.std(0).tolist() == pytest.approx([1, 1], abs=0.06)
    assert noise.abs().max() < 5


def noise_of(agent, rollout):
    """Standard normal noise of each stored action, ``[B, T, 2]``, of an actor whose actions are all 0."""
    return agent.policy.distribution.bounds.scale(rollout["action"]) / agent.config.exploration_noise


def correlated(correlation, num_envs, **options):
    """An agent with correlated noise whose actor answers 0, in the middle of the bounds."""
    agent = make(
        reach(num_envs), learning_starts=0, exploration_noise=0.3, noise_correlation=correlation,
        updates_per_step=1e-6, **options,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in agent.policy.actor[-1].parameters():
            parameter.zero_()
    return agent


@pytest.mark.parametrize("correlation", [0.0, 0.8, 1.0])
def test_noise_is_correlated_within_an_episode(correlation):
    """Variance 1 at each step, correlation ρ^k after k steps, and 0 with the next episode. Episodes have 5 steps."""
    agent = correlated(correlation, 400, num_steps=12)
    rollout = agent.collect()
    rows = noise_of(agent, rollout)
    starts = rollout["is_init"][0].nonzero().flatten().tolist()
    first, second = starts[:2]
    noise = torch.cat([rows[:, first : first + 5], rows[:, second : second + 5]], dim=1)
    covariance = torch.einsum("bsi,bti->st", noise, noise) / (2 * len(noise))
    steps = torch.arange(5)
    expected = torch.block_diag(*[correlation ** (steps[:, None] - steps).abs()] * 2)
    torch.testing.assert_close(covariance, expected.float(), atol=0.15, rtol=0)
    torch.testing.assert_close(agent.policy.evaluate(rollout).log_prob, rollout["log_prob"])


def test_noise_is_that_of_stable_baselines3(monkeypatch):
    """σ .5, θ .15 and dt .1, from the first noise of an episode on, with the same normal numbers."""
    sigma, theta, dt = 0.5, 0.15, 0.1
    correlation = 1 - theta * dt
    size = sigma * dt**0.5 / (1 - correlation**2) ** 0.5
    agent = correlated(correlation, 1, num_steps=5)
    draws = agent.policy.generator.clone_state()
    rollout = agent.collect()
    noise = size * noise_of(agent, rollout)[0].double()

    drawn = [torch.randn(1, 2, generator=draws)[0].double().numpy() for _ in range(5)]
    first = size * drawn[0]
    np.testing.assert_allclose(noise[0], first, rtol=1e-5)
    peer = OrnsteinUhlenbeckActionNoise(np.zeros(2), np.full(2, sigma), theta, dt, initial_noise=first)
    normal = iter(drawn[1:])
    monkeypatch.setattr(np.random, "normal", lambda size: next(normal))
    for step in range(1, 5):
        np.testing.assert_allclose(noise[step], peer(), rtol=1e-4, atol=1e-6)


def test_stored_actions_are_clipped_for_the_critics():
    """Two batches that differ only in how far an action is out of bounds have one loss."""
    agent = make()
    batch = agent.with_noise(random_batch(agent, 8, seed=0))
    losses = []
    for outside in (2.0, 7.0):
        batch["action"][:, 0] = outside
        losses.append(agent.critic_loss(batch)[0].item())
    assert losses[0] == losses[1]


def test_actions_are_uniform_until_learning_starts():
    agent = make(learning_starts=150, num_steps=50)
    rollout = agent.collect()
    assert rollout["log_prob"].unique().tolist() == pytest.approx([-np.log(1.5)])
    assert "value/loss" not in agent.update(rollout)
    agent.update(agent.collect())
    assert agent.collect()["log_prob"].unique().numel() > 50


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_equal_seeds_give_equal_runs_and_agents_are_loaded(tmp_path):
    def run(seed):
        agent = make(learning_rate=1e-2, gamma=0.5, seed=seed)
        return agent, [{k: x for k, x in row.items() if not k.startswith("time/")} for row in agent.learn(200)]

    (agent, one), (_, two), (_, third) = run(1), run(1), run(2)
    assert one == two and one[-1] != third[-1]
    agent.save(tmp_path)
    loaded = algos.load(tmp_path)
    assert isinstance(loaded, TD3Policy)
    observation = Reach.observation_space.sample()
    assert np.array_equal(loaded.predict(observation)[0], agent.policy.predict(observation, deterministic=True)[0])


@pytest.mark.heavy
def test_it_learns_to_reach():
    """The action that pays most is the observation's second number: chance earns about -3 in 5 steps."""
    agent = make(learning_rate=3e-3, gamma=0.1, batch_size=64, learning_starts=200, exploration_noise=0.3)
    agent.learn(2_000)
    result = evaluate(reach(), agent.policy, num_episodes=20, deterministic=True)
    print(result)
    assert result.mean_return > -0.3


@pytest.mark.slow
def test_it_learns_pendulum():
    """A small network in 8,000 steps; some seconds of processor time."""
    env = gym.make_vec("Pendulum-v1", num_envs=1)
    policy = TD3Policy(env.single_observation_space, env.single_action_space, hidden=(64, 64), seed=1)
    agent = TD3(env, policy, gamma=0.98, learning_starts=1_000, batch_size=128, seed=1)
    agent.learn(8_000)
    result = evaluate("Pendulum-v1", agent.policy, num_episodes=20, deterministic=True)
    print(result)
    assert result.mean_return > -250


# --- wrong input -----------------------------------------------------------------------------------------------------


def test_other_policies_and_spaces_are_refused():
    env = reach()
    with pytest.raises(TypeError, match="SACPolicy, but TD3 trains only a TD3Policy"):
        TD3(env, SACPolicy(env.single_observation_space, env.single_action_space, hidden=(4,)))
    with pytest.raises(ValueError, match="expected a Box of floats with bounds: use PPO, or DQN for Discrete"):
        TD3(cartpole())
    policy = make().policy
    with pytest.raises(ValueError, match="the policy is deterministic"):
        policy.divergence(make().collect(), policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_steps=None, num_episodes=4), "TD3 learns from steps"),
        (dict(policy_delay=0), "policy_delay is 0, expected an integer of at least 1"),
        (dict(target_noise_clip=0), "target_noise_clip is 0, expected a number above 0"),
        (dict(exploration_noise=-1), "exploration_noise is -1, expected a number of at least 0"),
    ],
)
def test_wrong_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TD3Config(**options)
