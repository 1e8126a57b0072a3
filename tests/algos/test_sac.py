"""SAC: one update is Stable-Baselines3's, a bandit's policy is exp(Q/α)/Z, targets by hand, warm-up, wrong input."""

import copy
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.logger import Logger
from tensordict import TensorDict

import algos
from algos import SAC, SACConfig, SACPolicy, TD3Policy, evaluate
from algos.replay import buffer_state, restore_buffer, sample_batches, store
from algos.sac import soft_target
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
)
from tests.helpers.small_agents import cartpole

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


def make(env=None, **options):
    defaults = dict(num_steps=8, learning_starts=32, batch_size=16, seed=1)
    return SAC(reach() if env is None else env, small_policy(env), **(defaults | options))


def small_policy(env=None, seed=0):
    env = reach() if env is None else env
    return SACPolicy(env.single_observation_space, env.single_action_space, hidden=(16, 16), seed=seed)


# --- the update ------------------------------------------------------------------------------------------------------


def test_soft_target_by_hand():
    """γ = .5, α = .1, min Q' = 2, log π = -3: 1 + .5 (2 + .3) = 2.15; terminated: 1."""
    columns = dict(
        reward=torch.ones(2), terminated=torch.tensor([False, True]), next_log_prob=torch.tensor([-3.0, torch.nan]),
        next_values=torch.tensor([[2.0, 9.0], [5.0, torch.nan]]), temperature=torch.tensor(0.1), gamma=0.5,
    )  # fmt: skip
    assert soft_target(**columns).tolist() == pytest.approx([2.15, 1.0])


def peer_of(agent, env=None, **options):
    """Stable-Baselines3's agent with the weights of ours."""
    hidden = list(agent.policy.hidden)
    peer = stable_baselines3.SAC(
        "MlpPolicy", env or Reach(), gamma=agent.config.gamma, tau=agent.config.target_rate, device="cpu",
        learning_rate=agent.config.learning_rate, **options,
        policy_kwargs=dict(net_arch=hidden, optimizer_kwargs=dict(eps=agent.config.adam_eps)),
    )  # fmt: skip
    peer.set_logger(Logger(None, []))
    copy_critics(agent.policy.critic, peer.critic)
    copy_critics(agent.target_critic, peer.critic_target)
    for layer, theirs in zip(agent.policy.actor[:-1:2], peer.actor.latent_pi[::2], strict=True):
        theirs.load_state_dict(layer.state_dict())
    heads = (peer.actor.mu, peer.actor.log_std)
    with torch.no_grad():
        for weight, bias, head in zip(
            agent.policy.actor[-1].weight.chunk(2), agent.policy.actor[-1].bias.chunk(2), heads, strict=True
        ):
            head.weight.copy_(weight)
            head.bias.copy_(bias)
    return peer


def assert_equal_networks(agent, peer, *, tolerance=1e-5):
    """Critics, their targets and the actor."""
    after = peer_of(agent, ent_coef="auto")  # our weights in their modules
    for theirs, ours in (
        (peer.critic, after.critic),
        (peer.critic_target, after.critic_target),
        (peer.actor, after.actor),
    ):
        for (name, expected), weight in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(
                weight, expected, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("temperature", [None, 0.3], ids=["learned", "fixed"])
def test_an_update_equals_that_of_stable_baselines3(temperature):
    """Equal weights, batch and noise: critics, targets, actor and α after two steps, to 1e-5.

    Stable-Baselines3 adds 1e-6 in the log of tanh's slope. Adam's eps is 1e-3, so that a gradient of nothing but
    rounding makes no step.
    """
    agent = make(temperature=temperature, learning_rate=1e-2, adam_eps=1e-3, gamma=0.9, target_rate=0.1)
    with torch.no_grad():
        for weight in agent.target_critic.parameters():
            weight.mul_(1.1)
        # Narrow around 0, where the slopes of tanh are far above 1e-6
        agent.policy.actor[-1].bias.copy_(torch.tensor([0.0, 0.0, -1.0, -1.0]))
    peer = peer_of(agent, batch_size=32, ent_coef="auto" if temperature is None else temperature)
    assert peer.target_entropy == agent.target_entropy == -2
    for number in range(2):
        batch = random_batch(agent, 32, seed=number)
        peer.replay_buffer = SimpleNamespace(sample=lambda *_, batch=batch, **__: peer_batch(agent, batch))
        torch.manual_seed(number)
        batch["noise"] = torch.normal(torch.zeros(32, 2), torch.ones(32, 2))
        batch["next_noise"] = torch.normal(torch.zeros(32, 2), torch.ones(32, 2))
        agent.improve(batch)
        torch.manual_seed(number)
        peer.train(1, 32)

    assert_equal_networks(agent, peer)
    if temperature is None:
        assert agent.log_temperature.item() == pytest.approx(peer.log_ent_coef.item(), abs=1e-5)
        assert abs(agent.log_temperature.item()) > 0.015
    else:
        assert agent.log_temperature.item() == 0 and agent.temperature.item() == pytest.approx(0.3)


class RecordedSAC(KeepsDraws, SAC):
    """SAC that keeps its noise."""

    def noise_of(self, scaled_action, output):
        mean, log_std = self.policy.distribution.parametrize(output)
        gaussian = scaled_action.double().clamp(-1 + 1e-7, 1 - 1e-7).atanh()
        return ((gaussian - mean) / log_std.exp()).float()

    def draw_noise(self, count):
        noise = torch.normal(torch.zeros(count, 2), 1.0)
        next_noise = torch.normal(torch.zeros(count, 2), 1.0)
        return {"noise": noise, "next_noise": next_noise}


@pytest.mark.heavy
def test_a_training_is_that_of_stable_baselines3():
    """From the same random numbers: a learned temperature, a buffer that is written over, both kinds of ends."""
    agent = make_recorded(RecordedSAC, SACPolicy)
    peer = peer_of(agent, **like_recorded())
    agent.learn(STEPS)
    noises = iter(agent.noises[FIRST_UPDATE - 1 :])

    def predict(observation, *_, deterministic):
        mean, log_std, _ = peer.actor.get_action_dist_params(torch.from_numpy(observation))
        scaled_action = (mean + log_std.exp() * next(noises)).tanh()
        return peer.policy.unscale_action(scaled_action.detach().numpy()), None

    peer.predict = predict
    draw_the_same(agent, peer)
    peer.learn(STEPS)
    assert_same_steps(agent, peer)
    assert len(agent.chosen) == peer._n_updates == STEPS - FIRST_UPDATE + 1
    assert_equal_networks(agent, peer, tolerance=1e-4)
    # Adam's eps is 1e-8 for their α
    assert agent.log_temperature.item() == pytest.approx(peer.log_ent_coef.item(), abs=1e-3)
    assert agent.log_temperature.item() < -0.2


class Bandit(gym.Env):
    """One step that pays 2 + α log p(a), where p is a squashed Gaussian on [-1, 3]: ∫ exp(r/α) da = exp(2/α)."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 3, (1,), np.float32)
    temperature, mean, std = 0.5, 0.4, 0.6

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        scaled = np.clip((action[0] - 1) / 2, -0.999, 0.999)
        gaussian = math.atanh(scaled)
        log_density = -(((gaussian - self.mean) / self.std) ** 2) / 2 - math.log(self.std * math.sqrt(2 * math.pi))
        log_density -= math.log(1 - scaled**2) + math.log(2)
        return np.ones(1, np.float32), 2 + self.temperature * log_density, True, False, {}


@pytest.mark.parametrize(
    "steps, options, width, seed, tolerance",
    [
        pytest.param(16_000, {"updates_per_step": 1 / 16, "num_steps": 8}, 32, 1, 0.02, marks=pytest.mark.long),
        *(
            pytest.param(40_000, {"updates_per_step": 0.5, "num_steps": 4}, 64, seed, 0.01, marks=pytest.mark.slow)
            for seed in (1, 2, 3)
        ),
    ],
)
def test_a_bandits_policy_is_the_softmax_of_its_rewards(steps, options, width, seed, tolerance):
    """π = exp(Q/α)/Z: mean and standard deviation before squashing, entropy, and α log Z = 2."""
    env = SyncVectorEnv([Bandit] * 16, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = SACPolicy(Bandit.observation_space, Bandit.action_space, hidden=(width, width), seed=seed)
    # α of actions in [-1, 3] and in [-1, 1] is the same: their log-densities differ by a constant
    agent = SAC(
        env, policy, learning_starts=2_000, temperature=Bandit.temperature, learning_rate=3e-3,
        final_learning_rate=0.0, seed=seed, **options,
    )  # fmt: skip
    agent.learn(steps)
    one = torch.ones(1, 1)
    mean, log_std = policy.distribution.parametrize(policy.actor(one))
    assert mean.item() == pytest.approx(Bandit.mean, abs=0.01)
    assert log_std.exp().item() == pytest.approx(Bandit.std, rel=tolerance)

    rollout = TensorDict({"observation": one, "action": torch.ones(1, 1)}, batch_size=[1])
    expected = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(Bandit.mean, Bandit.std),
        [torch.distributions.transforms.TanhTransform(), torch.distributions.AffineTransform(1, 2)],
    )
    torch.manual_seed(0)
    entropy = -expected.log_prob(expected.sample((100_000,)).clamp(-0.99999, 2.99999)).mean()
    assert policy.evaluate(rollout).entropy.item() == pytest.approx(entropy.item(), abs=0.01)

    # Soft value E[Q - α log π], log-densities in [-1, 3]
    noise = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        action, log_prob = policy.distribution.scaled_sample(policy.actor(one.expand(20_000, 1)), noise)
        values = policy.critic(one.expand(20_000, 1), action).mean(0)
    soft_value = (values - Bandit.temperature * (log_prob - math.log(2))).mean()
    assert soft_value.item() == pytest.approx(2.0, rel=0.01)


def test_the_temperature_moves_the_entropy_to_its_target():
    """An entropy above the target of -2 lowers α, one below it raises α."""
    for log_std, sign in ((0.0, -1), (-4.0, 1)):
        agent = make(learning_rate=1e-2)
        with torch.no_grad():
            agent.policy.actor[-1].weight.zero_()
            agent.policy.actor[-1].bias.copy_(torch.tensor([0.0, 0.0, log_std, log_std]))
        metrics = agent.improve(agent.with_noise(random_batch(agent, 32, seed=0)))
        assert sign * agent.log_temperature.item() > 0
        assert sign * (metrics["policy/entropy"].item() + 2) < 0 and metrics["policy/temperature"].item() == 1


# --- what is collected -----------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_actions_are_uniform_until_learning_starts():
    agent = make(learning_starts=150, batch_size=16, num_steps=50)
    rollout = agent.collect()
    mask = rollout["mask"]
    assert rollout["log_prob"][mask].unique().tolist() == pytest.approx([-math.log(3 * 0.5)])
    low, high = Reach.action_space.low, Reach.action_space.high
    action = rollout["action"][mask].numpy()
    assert (low <= action).all() and (action <= high).all()
    quartiles = (action < low + (high - low) / 4).mean(0)
    assert quartiles == pytest.approx([0.25, 0.25], abs=0.1)
    torch.testing.assert_close(agent.policy.evaluate(rollout).log_prob, rollout["log_prob"])
    metrics = agent.update(rollout)
    assert metrics["update/remembered"] == mask.sum() and "value/loss" not in metrics

    agent.update(agent.collect())
    rollout = agent.collect()
    assert rollout["log_prob"][rollout["mask"]].unique().numel() > 50
    torch.testing.assert_close(agent.policy.evaluate(rollout).log_prob, rollout["log_prob"], atol=1e-3, rtol=1e-3)


@pytest.mark.heavy
@pytest.mark.parametrize(("ratio", "expected"), [(1.0, [16, 16, 16]), (0.1, [1, 2, 1]), (2.0, [32, 32, 32])])
def test_the_update_to_data_ratio_counts_stored_steps(ratio, expected):
    """2 slots x 8 steps; a tenth of 16 is 1.6, and the fraction is carried over."""
    env = SyncVectorEnv([Reach] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    agent = make(env, learning_starts=0, batch_size=8, updates_per_step=ratio)
    counts = []
    for _ in range(3):
        before = adam_steps(agent)
        agent.update(agent.collect())
        counts.append(adam_steps(agent) - before)
    assert counts == expected


def adam_steps(agent):
    return max((int(state["step"]) for state in agent.critic_optimizer.adam.state.values()), default=0)


def test_targets_follow_by_their_rate():
    agent = make(target_rate=0.25)
    before = [weight.clone() for weight in agent.target_critic.parameters()]
    agent.improve(agent.with_noise(random_batch(agent, 16, seed=0)))
    for old, new, trained in zip(
        before, agent.target_critic.parameters(), agent.policy.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * trained)


class Limited(Reach):
    """Reach with a limit of 3 steps, so that observations at an end have time 3, and those after a reset 0."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, self.time == 3, info


class Ending(Limited):
    """The same, but the end is one of the task."""

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, truncated, False, info


@pytest.mark.parametrize("kind", [Limited, Ending])
@MODES
def test_targets_bootstrap_from_the_true_successor_unless_terminated(mode, kind):
    """The critics' loss is that of r + γ V(s') at a limit, of r alone at a true end; s' is never a reset's."""
    agent = make(SyncVectorEnv([kind] * 2, autoreset_mode=mode), learning_starts=10_000, gamma=0.5, temperature=0.2)
    for _ in range(4):
        agent.update(agent.collect())
    memory = agent.buffer[:]
    assert torch.equal(memory["next_observation"][:, 0], memory["observation"][:, 0] + 1)
    last = agent.with_noise(memory[memory["next_observation"][:, 0] == 3])
    assert len(last) > 10 and bool(last["terminated"].all()) == (kind is Ending)

    distribution = agent.policy.distribution
    with torch.no_grad():
        output = agent.policy.actor(last["next_observation"])
        next_action, log_prob = distribution.scaled_sample(output, last["next_noise"])
        soft_value = agent.target_critic(last["next_observation"], next_action).amin(0) - 0.2 * log_prob
        target = last["reward"] + (0.5 * soft_value if kind is Limited else 0)
        values = agent.policy.critic(last["observation"], distribution.bounds.scale(last["action"]))
        expected = 0.5 * ((values - target) ** 2).mean(1).sum()
    assert agent.critic_loss(last)[0].item() == pytest.approx(expected.item(), rel=1e-5)


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
    assert isinstance(loaded, SACPolicy)
    observation = Reach.observation_space.sample()
    assert np.array_equal(
        loaded.predict(observation, deterministic=True)[0], agent.policy.predict(observation, deterministic=True)[0]
    )
    _, rollout = evaluate(reach(), loaded, num_episodes=4, deterministic=True)
    assert torch.equal(loaded.values(rollout)[0], agent.policy.values(rollout)[0])


@pytest.mark.heavy
def test_it_learns_to_reach():
    """The action that pays most is the observation's second number: chance earns about -1 in 5 steps."""
    agent = make(learning_rate=3e-3, gamma=0.1, batch_size=64, learning_starts=100)
    agent.learn(1_000)
    result = evaluate(reach(), agent.policy, num_episodes=20, deterministic=True)
    print(result)
    assert result.mean_return > -0.2


def test_observations_may_be_dictionaries():
    class Parts(Reach):
        observation_space = spaces.Dict({"state": Reach.observation_space, "phase": spaces.Discrete(3)})

        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            return {"state": observation, "phase": 1}, info

        def step(self, action):
            observation, *rest = super().step(action)
            return {"state": observation, "phase": 2}, *rest

    env = SyncVectorEnv([Parts] * 2)
    agent = make(env)
    agent.learn(100)
    assert agent.policy.input_size == 2 + 3 and agent.buffer[:]["observation"].shape[1] == 5


@pytest.mark.slow
def test_it_learns_pendulum():
    """A small network in 10,000 steps; some seconds of processor time."""
    env = gym.make_vec("Pendulum-v1", num_envs=1)
    policy = SACPolicy(env.single_observation_space, env.single_action_space, hidden=(64, 64), seed=1)
    agent = SAC(env, policy, learning_rate=1e-3, batch_size=128, seed=1)
    agent.learn(10_000)
    result = evaluate("Pendulum-v1", agent.policy, num_episodes=20, deterministic=True)
    print(result)
    assert result.mean_return > -250


# --- wrong input -----------------------------------------------------------------------------------------------------


def test_other_policies_and_spaces_are_refused():
    env = reach()
    peer = TD3Policy(env.single_observation_space, env.single_action_space, hidden=(4,))
    with pytest.raises(TypeError, match="TD3Policy, but SAC trains only a SACPolicy"):
        SAC(env, peer)
    with pytest.raises(TypeError, match="SACPolicy is trained by values of actions"):
        algos.PPO(env, small_policy())
    with pytest.raises(ValueError, match="expected a Box of floats with bounds: use PPO, or DQN for Discrete"):
        SAC(cartpole())
    unbounded = spaces.Box(np.array([-1, -np.inf], np.float32), np.ones(2, np.float32))
    with pytest.raises(ValueError, match="expected finite bounds, of which low is below high.*or use PPO"):
        SACPolicy(env.single_observation_space, unbounded)
    with pytest.raises(ValueError, match="expected finite bounds"):
        SACPolicy(env.single_observation_space, spaces.Box(1, 1, (2,)))


@pytest.mark.parametrize(
    ("low", "high"), [(1e7, 1e7 + 1), (-1e300, 1e300), (-1.7e308, 1.7e308), (-(2.0**30), 1 - 2.0**30), (0, 1e-300)]
)
@pytest.mark.parametrize("policy_type", [SACPolicy, TD3Policy])
def test_bounds_that_float32_does_not_hold_are_refused(policy_type, low, high):
    """Between 1e7 and 1e7 + 1 there was one action, which was played always."""
    with pytest.raises(ValueError, match="float32 cannot tell apart"):
        policy_type(spaces.Box(-1, 1, (2,)), spaces.Box(low, high, (1,), np.float64))
    policy_type(spaces.Box(-1, 1, (2,)), spaces.Box(1e4, 1e4 + 1, (1,), np.float64))
    policy_type(spaces.Box(-1, 1, (2,)), spaces.Box(1e-9, 2e-9, (1,), np.float64))
    policy_type(spaces.Box(-1, 1, (2,)), spaces.Box(2.0**20 - 7, 2.0**20 - 0.1, (1,), np.float64))


def test_small_bounds_of_another_environment_are_refused():
    """An absolute tolerance accepted ninefold bounds."""
    low, high, ninth = np.float32([0, 9e-9, 1e-9])
    env = SyncVectorEnv([lambda: gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), low, high)] * 2)
    policy = SACPolicy(env.single_observation_space, spaces.Box(low, ninth, (1,)))
    with pytest.raises(ValueError, match="scales its actions to the bounds of"):
        SAC(env, policy)
    SAC(env, SACPolicy(env.single_observation_space, env.single_action_space))
    in_float64 = spaces.Box(1000.1, 1001.3, (1,), np.float64)
    SACPolicy(env.single_observation_space, spaces.Box(1000.1, 1001.3, (1,))).check_environment(
        SimpleNamespace(single_action_space=in_float64)
    )


@pytest.mark.parametrize("algorithm", [SAC, algos.TD3, algos.DQN])
def test_the_policy_explores_no_more_after_an_error(algorithm):
    """Whether a rollout, or what is done with it, has failed."""
    env = cartpole() if algorithm is algos.DQN else reach()
    agent = algorithm(env, num_steps=4, learning_starts=100, seed=1)
    policy = agent.policy
    with pytest.raises(ZeroDivisionError):
        agent.learn(100, callbacks=[DividesByZero()])
    assert not explores(policy)
    agent.collect()
    assert explores(policy)
    env.step = DividesByZero().on_rollout
    with pytest.raises(ZeroDivisionError):
        agent.collect()
    assert not explores(policy)


def explores(policy):
    if isinstance(policy, algos.QPolicy):
        return bool(policy.exploration)
    return policy.distribution.uniform or bool(getattr(policy.distribution, "noise", 0.0))


class DividesByZero(algos.Callback):
    def on_rollout(self, run, rollout=None):
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_steps=None, num_episodes=4), "SAC learns from steps"),
        (dict(updates_per_step=0), "updates_per_step is 0, expected a number above 0"),
        (dict(target_rate=2), "target_rate is 2, expected a number from 0 to 1"),
        (dict(temperature=0), "temperature is 0, expected a number above 0"),
        (dict(buffer_size=50), "SACConfig.buffer_size is 50.*learning_starts"),
    ],
)
def test_wrong_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SACConfig(**options)


@pytest.mark.parametrize("kind", [algos.SAC, algos.TD3])
def test_a_skipped_step_changes_no_weight(kind):
    """The loss of a reward that is not a number; the policy and the temperature wait, too."""
    env = gym.make_vec("Pendulum-v1", num_envs=1, vectorization_mode="sync")
    agent = kind(env, learning_starts=0, num_steps=4, batch_size=4, skip_nonfinite=True)
    rollout = agent.collect()
    rollout["reward"].fill_(float("nan"))
    weights = copy.deepcopy(agent.policy.state_dict())
    metrics = agent.update(rollout)
    assert metrics["update/skipped"] == 4
    assert all(torch.equal(weights[name], weight) for name, weight in agent.policy.state_dict().items())
    if kind is algos.TD3:
        assert agent.gradient_steps == 0
    else:
        assert agent.temperature == 1


def test_learning_starts_as_soon_as_it_says():
    """Before, with uniform actions; also if a batch is larger than what is stored."""
    env = gym.make_vec("Pendulum-v1", num_envs=1, vectorization_mode="sync")
    agent = algos.SAC(env, learning_starts=8, num_steps=4, batch_size=64)
    is_uniform = []
    has_learnt = []
    for _ in range(3):
        rollout = agent.collect()
        is_uniform.append(agent.policy.distribution.uniform)
        has_learnt.append("value/loss" in agent.update(rollout))
    assert is_uniform == [True, True, False] and has_learnt == [False, True, True]


def test_many_batches_are_those_of_one_draw():
    """The stream of random numbers does not depend on how many are drawn at a time."""
    env = gym.make_vec("Pendulum-v1", num_envs=1, vectorization_mode="sync")
    agent = algos.SAC(env, learning_starts=0, num_steps=32, batch_size=3)
    store(agent.collect(), agent.buffer)
    state = agent.update_generator.get_state()
    expected = agent.buffer.sample(3 * 150)["observation"]
    agent.update_generator.set_state(state)
    batches = [batch["observation"] for batch in sample_batches(agent.buffer, agent.config, 150)]
    assert len(batches) == 150 and torch.equal(torch.cat(batches), expected)


def test_a_buffer_of_float64_goes_on():
    """DQN stored the observations of its environment as they were."""
    env = gym.make_vec("Pendulum-v1", num_envs=1, vectorization_mode="sync")
    agent = algos.SAC(env, num_steps=8, learning_starts=0)
    store(agent.collect(), agent.buffer)
    state = buffer_state(agent.buffer)
    state["remembered"] |= {name: state["remembered"][name].double() for name in ("observation", "next_observation")}
    other = algos.SAC(env, num_steps=8, learning_starts=0)
    restore_buffer(other.buffer, state, env.single_observation_space)
    store(other.collect(), other.buffer)
    assert len(other.buffer) == 16 and other.buffer[:]["observation"].dtype == torch.float32
