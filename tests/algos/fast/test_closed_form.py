"""PPO's update with a gradient by hand equals the one by autograd, and leaves to it what it does not cover."""

import copy
from functools import partial

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from torch import nn

from algos import PPO, GSDEPolicy, MLPPolicy, PPOConfig
from algos.advantages import add_advantages
from algos.fast import closed_form
from algos.losses import dual_clipped_policy_loss
from algos.policies.towers import tower
from tests.helpers.small_agents import cartpole
from textenv.errors import InvariantError

SEED = {"num_steps": 32, "learning_rate": 1e-2, "seed": 1}


class FromOne(gym.ActionWrapper):
    """CartPole whose actions are 1 and 2, in an environment that skips a step at each reset."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = spaces.Discrete(2, start=1)

    def action(self, action):
        return action - 1


def relu(policy):
    for network in (policy.actor, policy.critic):
        for place in range(1, len(network), 2):
            network[place] = nn.ReLU()


ENVIRONMENTS = {
    "native": lambda: gym.make_vec("CartPole-v1", num_envs=4),
    "start": lambda: gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync", wrappers=[FromOne]),
    "taxi": lambda: gym.make_vec("Taxi-v4", num_envs=4, vectorization_mode="sync"),
    "box": lambda: gym.make_vec("Pendulum-v1", num_envs=4, max_episode_steps=20),
}
CONFIGS = {
    "ragged": {"minibatch_size": 48, "num_epochs": 3},
    "whole": {"minibatch_size": 1_000, "num_epochs": 3, "ent_coef": 0.02},
    "rollout": {"minibatch_size": 30, "normalize_advantage": "rollout", "clip_range_vf": 0.05, "vf_coef": 0.8},
    "raw": {"minibatch_size": 64, "normalize_advantage": False, "clip_range": 0.02, "clip_higher": 0.05},
    "scheduled": {"minibatch_size": 64, "final_clip_range": 0.05, "final_learning_rate": 0.0, "max_grad_norm": 1e-3},
    "decay": {"minibatch_size": 64, "weight_decay": 0.1, "adam_betas": (0.8, 0.9), "adam_eps": 1e-3},
    "target": {"minibatch_size": 16, "num_epochs": 4, "target_kl": 1e-3, "normalize_rewards": True},
}


def agent_of(kind="native", *, hidden=(16, 8), change=lambda policy: None, **config):
    env = ENVIRONMENTS[kind]()
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=hidden, seed=3)
    change(policy)
    return fast(PPO(env, policy, PPOConfig(**SEED | config)))


def fast(agent):
    """The agent, whether or not fast paths are on."""
    agent.in_closed_form = True
    return agent


def plain(agent):
    agent.in_closed_form = False
    return agent


@pytest.fixture
def taken(monkeypatch):
    """What each computation of the closed form found."""
    found = []
    train = closed_form._train
    monkeypatch.setattr(closed_form, "_train", lambda *a, **k: found.append(train(*a, **k)) or found[-1])
    return found


def both(make, rollouts):
    """Two agents after the same updates, in closed form and plain, and the metrics of both."""
    agent, other = make(), plain(make())
    logs = [], []
    for _ in range(rollouts):
        rollout = agent.collect()
        logs[0].append(agent.update(rollout.clone()))
        logs[1].append(other.update(rollout.clone()))
        difference = max((a - b).abs().max().item() for a, b in zip(*map(weights, (agent, other)), strict=True))
        assert difference < 1e-4
        other.load_state_dict(copy.deepcopy(agent.state_dict()))  # the next rollout is that of one policy
    return agent, other, *logs


def weights(agent):
    return [p.detach() for p in agent.policy.parameters()]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", ["native", "start", "box"])
def test_an_update_equals_the_plain_one(kind, config, taken):
    _, _, ours, plain = both(lambda: agent_of(kind, **config), 3)
    assert len(taken) == 3 and None not in taken
    for own, other in zip(ours, plain, strict=True):
        assert own.pop("update/path") == 2  # of the closed form
        assert own.keys() == other.keys() and own["update/minibatches"] == other["update/minibatches"]
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    if "target_kl" in config:
        assert ours[0]["update/minibatches"] < 30  # ended early


@pytest.mark.parametrize("kind", ["native", "box"])
@pytest.mark.parametrize("hidden", [(), (16,), (8, 24, 16)], ids=str)
@pytest.mark.parametrize("change", [lambda policy: None, relu], ids=["tanh", "relu"])
def test_a_first_gradient_equals_autograds(kind, hidden, change, taken):
    """By the plain gradient that Adam's average holds after a single step: (1 - β₁) of it."""
    options = {"minibatch_size": 10_000, "num_epochs": 1, "ent_coef": 0.1}
    *agents, _, _ = both(lambda: agent_of(kind, hidden=hidden, change=change, **options), 1)
    assert len(taken) == 1 and taken[0] is not None
    states = [agent.optimizer.adam.state for agent in agents]
    averages = [
        [state[p]["exp_avg"] for p in one.policy.parameters()] for state, one in zip(states, agents, strict=True)
    ]
    assert max(x.abs().max() for x in averages[1]) > 1e-3
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["native", "box"])
def test_weights_after_100_steps_are_the_same(kind, taken):
    options = {"minibatch_size": 16, "num_epochs": 15, "learning_rate": 1e-3}
    _, _, ours, _ = both(lambda: agent_of(kind, **options), 1)
    assert ours[0]["update/minibatches"] >= 100 and None not in taken


def test_a_checkpoint_goes_on_under_both_paths(taken):
    """State of the same names and shapes; each path continues what the other has begun."""
    agents = [agent_of(minibatch_size=32) for _ in range(2)]
    rollouts = [agents[0].collect() for _ in range(3)]
    for turn, rollout in enumerate(rollouts):
        for number, agent in enumerate(agents):
            agent.in_closed_form = (turn + number) % 2 == 0
            own = rollout.clone()
            own["log_prob"] = agent.policy.evaluate(own).log_prob.detach().masked_fill(~own["mask"], 0)
            agent.update(own)
    assert len(taken) == 3 and None not in taken
    one, two = (agent.optimizer.state_dict() for agent in agents)
    assert one["state"].keys() == two["state"].keys()
    for place, state in one["state"].items():
        torch.testing.assert_close(state, two["state"][place], rtol=1e-3, atol=1e-5)
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values())  # a file holds nothing else
    torch.testing.assert_close(weights(agents[0]), weights(agents[1]), rtol=0, atol=1e-4)


class OtherLoss(PPO):
    def loss(self, batch, **options):
        return super().loss(batch, **options)


class OtherPolicy(MLPPolicy):
    def evaluate(self, rollout):
        return super().evaluate(rollout)


def frozen(policy):
    policy.actor[0].weight.requires_grad_(False)


def shared(policy):
    policy.critic[0] = policy.actor[0]


def wider(policy):
    policy.critic = tower(4, (64, 65), 1, gain=1.0, generator=policy.generator)


def hooked(policy):
    policy.actor[0].weight.register_hook(lambda gradient: 2 * gradient)


def make(policy_type=MLPPolicy, agent_type=PPO, kind="native", change=lambda policy: None, config=None, **more):
    env = ENVIRONMENTS[kind]()
    policy = policy_type(env.single_observation_space, env.single_action_space, seed=3)
    change(policy)
    return fast(agent_type(env, policy, PPOConfig(**SEED, minibatch_size=64, **(config or {})), **more))


UNCOVERED = {
    "loss": lambda: make(agent_type=OtherLoss),
    "policy": lambda: make(OtherPolicy),
    "gsde": lambda: make(GSDEPolicy, kind="box"),
    "frozen": lambda: make(change=frozen),
    "shared": lambda: make(change=shared),
    "hooked": lambda: make(change=hooked),
    "widths": lambda: make(change=wider),
    "masks": lambda: make(kind="taxi"),
    "dual": lambda: make(config={"policy_loss": "dual_clipped_policy_loss"}),
    "partial": lambda: make(config={"policy_loss": partial(dual_clipped_policy_loss, limit=2.0)}),
    "rows": lambda: make(config={"aggregation": "sequence_mean"}),
    "weights": lambda: make(config={"max_importance_weight": 2.0}),
    "parts": lambda: make(config={"micro_batch_size": 16}),
    "rates": lambda: make(config={"value_learning_rate": 1e-3}),
    "penalty": lambda: make(kl_coef=0.1),
    "auxiliary": lambda: make(auxiliary=lambda policy: policy.actor[0].weight.square().sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCOVERED)
def test_other_updates_are_plain_to_the_bit(name, taken):
    agents = [UNCOVERED[name](), plain(UNCOVERED[name]())]
    found = [agent.update(agent.collect()) for agent in agents]
    assert taken == [] and found[0] == found[1]
    assert all(map(torch.equal, weights(agents[0]), weights(agents[1])))
    assert any(not torch.equal(a, b) for a, b in zip(weights(agents[0]), weights(UNCOVERED[name]()), strict=True))


@pytest.mark.parametrize(
    ("column", "bad", "said"),
    [
        ("advantage", float("nan"), "advantage"),
        ("value_target", float("inf"), "value_target"),
        ("log_prob", -9.0, "scores its own actions"),
        ("observation", float("nan"), "observation"),
    ],
)
def test_what_is_wrong_is_explained_as_by_the_plain_update(column, bad, said, taken, monkeypatch):
    """The same words, and the same steps before it."""
    monkeypatch.setattr("algos.ppo.add_advantages", lambda agent, rollout: None)
    agents = [agent_of(minibatch_size=16), plain(agent_of(minibatch_size=16))]
    words = []
    for agent in agents:
        rollout = agent.collect()
        add_advantages(agent, rollout)
        rollout[column][:] = torch.where(rollout["mask"], bad, 0.0) if column == "log_prob" else rollout[column]
        rollout[column][0, 3] = bad
        with pytest.raises(InvariantError, match=said) as raised:
            agent.update(rollout)
        words.append(str(raised.value))
    assert taken == [None] and words[0] == words[1]
    assert all(map(torch.equal, *map(weights, agents)))
    assert torch.equal(*(agent.generator.get_state() for agent in agents))


def test_equal_advantages_are_not_scaled(taken, monkeypatch):
    agent = agent_of(minibatch_size=32)
    rollout = agent.collect()
    monkeypatch.setattr("algos.ppo.add_advantages", lambda agent, rollout: None)
    add_advantages(agent, rollout)
    rollout["advantage"] = rollout["mask"].float()
    agent.update(rollout)
    assert taken == [None]  # the plain update takes it


def test_cartpole_is_learned_by_it(taken):
    env = cartpole(8)
    agent = fast(PPO(env, None, PPOConfig(num_steps=64, minibatch_size=128, learning_rate=3e-3, seed=1)))
    history = agent.learn(12_000)
    assert None not in taken and len(taken) > 10
    assert history[-1]["episode/return"] > 60


@pytest.mark.long
def test_a_compiled_policy_updates_as_before():
    agents = [plain(agent_of(minibatch_size=32)) for _ in range(2)]
    agents[0].policy.evaluate = torch.compile(agents[0].policy.evaluate, dynamic=True)
    own, other = (agent.update(agent.collect()) for agent in agents)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*map(weights, agents), rtol=0, atol=1e-5)
