"""DQN: targets by hand and by torchrl, what is remembered in every autoreset mode, the target network, exploration."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.nn.functional import huber_loss, mse_loss

import algos
from algos import evaluate
from algos.dqn import DQN, DQNConfig, q_target
from algos.policies.q_network import QPolicy
from tests.helpers.control_envs import Gate, replayed, signals
from tests.helpers.small_agents import cartpole, mlp_for

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


def q_policy(env, **options):
    return QPolicy(env.single_observation_space, env.single_action_space, **(dict(hidden=(16,)) | options))


def make(env=None, *, seed=0, **options):
    env = cartpole() if env is None else env
    defaults = dict(num_steps=8, learning_starts=32, gradient_steps=3, batch_size=16, target_update_gradient_steps=4)
    return DQN(env, q_policy(env, seed=seed), DQNConfig(**(defaults | options)))


# --- targets ---------------------------------------------------------------------------------------------------------


def test_q_target_by_hand():
    """γ = .5, Q' = 1 2 3, Q = 9 4 5, so that the greedy action is 2 for Q' and 0 for Q.

    Plain: 1 + .5·3 = 2.5; double: 1 + .5·1 = 1.5. Terminated: 1, whatever comes next. A truncated step is like any
    other. With action 0 closed Q chooses 2: 2.5; with 0 and 2 closed 1: 1 + .5·2 = 2.
    """
    theirs = torch.tensor([[1.0, 2.0, 3.0]]).expand(2, 3)
    online = torch.tensor([[9.0, 4.0, 5.0]]).expand(2, 3)
    columns = dict(reward=torch.ones(2), terminated=torch.tensor([False, True]), next_target=theirs, gamma=0.5)
    assert q_target(**columns, next_online=theirs).tolist() == [2.5, 1.0]
    assert q_target(**columns, next_online=online).tolist() == [1.5, 1.0]
    for open_, expected in [((False, True, True), 2.5), ((False, True, False), 2.0)]:
        found = q_target(**columns, next_online=online, open_actions=torch.tensor([open_]).expand(2, 3))
        assert found.tolist() == [expected, 1.0]
    junk = torch.full((2, 3), torch.nan)
    columns["next_target"] = torch.where(columns["terminated"][:, None], junk, theirs)
    assert q_target(**columns, next_online=online).tolist() == [1.5, 1.0]


def batch_of(policy, n=200):
    generator = torch.Generator().manual_seed(0)
    terminated = torch.rand(n, generator=generator) < 0.3
    return TensorDict(
        {
            "observation": torch.randn(n, 4, generator=generator),
            "action": torch.randint(policy.num_actions, (n,), generator=generator),
            "reward": 3 * torch.randn(n, generator=generator),
            "next_observation": torch.randn(n, 4, generator=generator),
            "terminated": terminated,
        },
        batch_size=[n],
    )


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")  # one batch needs none
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("loss", "name"), [(mse_loss, "l2"), (huber_loss, "smooth_l1")], ids=["squared", "huber"])
def test_the_loss_and_its_gradient_agree_with_torchrl(double, loss, name):
    """Huber's loss with δ = 1 is torchrl's smooth_l1; online and target network differ."""
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    agent = make(double=double, gamma=0.9, loss=loss)
    with torch.no_grad():
        for number, network in enumerate((agent.policy, agent.target)):
            network.network[-1].bias.copy_(torch.tensor([[0.5, -0.5], [-0.7, 0.9]][number]))
            network.network[-1].weight.mul_(1 + 2 * number)
    batch = batch_of(agent.policy)
    loss, totals = agent.loss(batch)
    names, weights = zip(*agent.policy.network.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, weights)

    network = copy.deepcopy(agent.policy.network)
    actor = QValueActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["action_value"]), spec=None,
        action_space="categorical",
    )  # fmt: skip
    theirs = DQNLoss(actor, loss_function=name, double_dqn=double, delay_value=True, action_space="categorical")
    theirs.make_value_estimator(gamma=0.9)
    for name, x in agent.target.network.state_dict().items():
        theirs.target_value_network_params[("module", "0", "module", *name.split("."))].data.copy_(x)
    after = {
        "observation": batch["next_observation"], "reward": batch["reward"][:, None],
        "terminated": batch["terminated"][:, None], "done": batch["terminated"][:, None],
    }  # fmt: skip
    data = TensorDict({"observation": batch["observation"], "action": batch["action"], "next": after}, batch_size=[200])
    expected = theirs(data)["loss"]
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    weights = [theirs.value_network_params[("module", "0", "module", *name.split("."))] for name in names]
    for ours, other in zip(found, torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-6, rtol=1e-4)
    assert totals["value/loss"] == loss and len(names) == 4


def test_double_and_plain_targets_differ_on_that_batch():
    """What makes the test above able to tell them apart."""
    agent = make()
    agent.target.network[-1].weight.data.mul_(-3)
    batch = batch_of(agent.policy)
    assert agent.loss(batch)[0] != make_plain(agent).loss(batch)[0]


def make_plain(agent):
    other = make(double=False)
    other.policy.load_state_dict(agent.policy.state_dict())
    other.target.load_state_dict(agent.target.state_dict())
    return other


# --- what is remembered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 14])
@MODES
def test_the_memory_has_the_environments_transitions(mode, limit):
    """No reset rows, and the true successor where an episode ended; each is replayed in a single CartPole."""
    env = cartpole(3, mode, **({} if limit is None else dict(max_episode_steps=limit)))
    agent = make(env, learning_starts=1_000)
    steps, ends, cuts = 0, 0, 0
    for _ in range(12):
        rollout = agent.collect()
        agent.update(rollout)
        mask = rollout["mask"]
        steps, ends = steps + int(mask.sum()), ends + int(rollout["terminated"][mask].sum())
        cuts += int((rollout["truncated"] & ~rollout["terminated"])[mask].sum())
    memory = agent.buffer[:]
    assert len(memory) == steps and (steps < 12 * 24) == (mode is AutoresetMode.NEXT_STEP)
    assert memory["terminated"].sum() == ends > 2 and (cuts > 2) == (limit is not None)
    for entry in memory:
        torch.testing.assert_close(entry["next_observation"], replayed(entry), atol=1e-5, rtol=0)
        fallen = entry["next_observation"][2].abs() > 12 * 2 * np.pi / 360 or entry["next_observation"][0].abs() > 2.4
        assert bool(entry["terminated"]) == bool(fallen) and entry["reward"] == 1


@MODES
def test_the_memory_knows_actions_closed_next(mode):
    """Of `Gate` action t % 3 alone is open at time t; that holds at a rollout's last step too."""
    env = SyncVectorEnv([lambda n=n: Gate(n) for n in (2, 4, 5)], autoreset_mode=mode)
    agent = make(env, learning_starts=1_000, num_steps=7)
    for _ in range(3):
        agent.update(agent.collect())
    memory = agent.buffer[:]
    assert (memory["action"] == memory["observation"][:, 0].long() % 3).all()
    going_on = memory[~memory["terminated"]]
    expected = torch.nn.functional.one_hot(going_on["next_observation"][:, 0].long() % 3, 3).bool()
    assert len(going_on) > 20 and torch.equal(going_on["next_action_mask"], expected)


class ClosesAtTwo(gym.Env):
    """Shows the time, 0 to 4. At time 2 only action 1 is open; at other times there is no mask."""

    observation_space, action_space = spaces.Box(0, 4, (1,), np.float32), spaces.Discrete(3)

    def _state(self):
        info = {"action_mask": np.array([0, 1, 0], dtype=np.int8)} if self.time == 2 else {}
        return np.array([self.time], dtype=np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._state()

    def step(self, action):
        self.time += 1
        observation, info = self._state()
        return observation, 0.0, False, self.time == 4, info


def masks_at(time):
    """Of `ClosesAtTwo`: bool ``[n, 3]``."""
    is_open = torch.ones(len(time), 3, dtype=torch.bool)
    is_open[time == 2] = torch.tensor([False, True, False])
    return is_open


@MODES
def test_a_step_without_a_mask_is_remembered_with_all_actions(mode):
    """Rollouts that have no mask at all come before, between and after others."""
    agent = make(SyncVectorEnv([ClosesAtTwo], autoreset_mode=mode), learning_starts=1_000, num_steps=1)
    has_masks = []
    for _ in range(12):
        rollout = agent.collect()
        has_masks.append("action_mask" in rollout.keys())
        agent.update(rollout)
    memory = agent.buffer[:]
    assert set(has_masks) == {True, False}
    time = memory["next_observation"][:, 0]
    assert set(time.tolist()) == {1, 2, 3, 4}
    assert torch.equal(memory["next_action_mask"], masks_at(time))


@pytest.mark.parametrize("has_column", [True, False])
def test_a_buffer_of_a_former_version_goes_on_with_all_actions(has_column):
    """It had no column of masks, or a mask of only False for a step without one."""
    agent = make(SyncVectorEnv([ClosesAtTwo] * 2), learning_starts=1_000)
    agent.update(agent.collect())
    state = copy.deepcopy(agent.state_dict())
    remembered = state["remembered"]
    time = remembered["next_observation"][:, 0]
    if has_column:
        remembered["next_action_mask"][time != 2] = False
        expected = masks_at(time)
    else:
        del remembered["next_action_mask"]
        expected = torch.ones(len(time), 3, dtype=torch.bool)
    resumed = make(SyncVectorEnv([ClosesAtTwo] * 2), learning_starts=1_000)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.buffer[:]["next_action_mask"], expected)


def test_the_oldest_steps_are_forgotten():
    agent = make(buffer_size=40, learning_starts=16)
    for _ in range(4):
        rollout = agent.collect()
        metrics = agent.update(rollout)
    assert metrics["update/remembered"] == 40
    newest = rollout["observation"][rollout["mask"]]
    assert all((agent.buffer[:]["observation"] == x).all(1).any() for x in newest)


# --- the update ------------------------------------------------------------------------------------------------------


def test_the_target_network_is_renewed_on_schedule():
    """3 steps an update, a new target every 4: before steps 0, 4, 8 ... of the optimiser, and never else."""
    agent, renewed = make(), []
    renew = agent.target.load_state_dict

    def spy(weights):
        renewed.append(agent.gradient_steps)
        return renew(weights)

    agent.target.load_state_dict = spy
    for _ in range(9):
        held = [p.clone() for p in agent.target.parameters()]
        before, steps = len(renewed), agent.gradient_steps
        metrics = agent.update(agent.collect())
        same = all(torch.equal(p, q) for p, q in zip(agent.target.parameters(), held, strict=True))
        assert same == (len(renewed) == before or renewed[-1] == 0)
        assert agent.gradient_steps in (steps, steps + 3) and ("value/loss" in metrics) == (
            agent.gradient_steps > steps
        )
    assert agent.gradient_steps >= 24 and renewed == list(range(0, agent.gradient_steps, 4))
    assert not any(p.requires_grad for p in agent.target.parameters())


def test_nothing_is_learnt_before_it_starts():
    agent = make(learning_starts=10_000)
    before = [p.clone() for p in agent.policy.parameters()]
    metrics = agent.update(agent.collect())
    assert all(torch.equal(p, q) for p, q in zip(agent.policy.parameters(), before, strict=True))
    assert "value/loss" not in metrics and metrics["update/remembered"] == 32


def test_exploration_falls_linearly_to_its_end():
    """Share .5 of the training from 1 to .1: at a quarter .55, from a half on .1."""
    agent = make(exploration_fraction=0.5, final_exploration=0.1, learning_starts=1_000)
    for progress, expected in [(0.0, 1.0), (0.25, 0.55), (0.5, 0.1), (0.9, 0.1)]:
        agent.progress = progress
        rollout = agent.collect()
        assert agent.policy.exploration == pytest.approx(expected)
        found = agent.policy.evaluate(rollout).log_prob[rollout["mask"]]
        torch.testing.assert_close(found, rollout["log_prob"][rollout["mask"]])
        assert agent.update(rollout)["policy/exploration"] == pytest.approx(expected)
        assert agent.policy.exploration == 0.0
    agent = make(exploration_fraction=0.0, final_exploration=0.1)
    agent.collect()
    assert agent.policy.exploration == pytest.approx(0.1)


def test_it_is_epsilon_greedy_over_open_actions():
    """ε = .3, Q = 3 1 2: the best has .7 + .3/3, the others .1; with the best closed .7 + .15 and .15."""
    policy = QPolicy(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), hidden=())
    policy.network[-1].weight.data.zero_()
    policy.network[-1].bias.data = torch.tensor([3.0, 1.0, 2.0])
    policy.exploration = 0.3
    rollout = TensorDict({"observation": torch.zeros(1, 2)}, batch_size=[1])
    torch.testing.assert_close(policy.output(rollout).exp(), torch.tensor([[0.8, 0.1, 0.1]]))
    rollout["action_mask"] = torch.tensor([[False, True, True]])
    torch.testing.assert_close(policy.output(rollout).exp(), torch.tensor([[0.0, 0.15, 0.85]]))
    observation = np.zeros((2000, 2), np.float32)
    counts = torch.bincount(policy.act(observation).action, minlength=3) / 2000
    torch.testing.assert_close(counts, torch.tensor([0.8, 0.1, 0.1]), atol=0.04, rtol=0)
    assert (policy.act(observation, deterministic=True).action == 0).all()
    policy.exploration = 0.0
    step = policy.act(observation)
    assert (step.action == 0).all() and (step.log_prob == 0).all()


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_saved_agent_is_greedy_and_comes_back(tmp_path):
    def run(seed):
        agent = make(signals(), seed=seed, learning_rate=1e-2, gamma=0.5, gradient_steps=8)
        history = [{k: x for k, x in row.items() if not k.startswith("time/")} for row in agent.learn(1_500)]
        return agent, history

    (agent, one), (_, two), (_, other) = run(0), run(0), run(1)
    assert one == two and one[-1] != other[-1]
    assert agent.policy.exploration == 0
    returns, rollout = evaluate(signals(), agent.policy, num_episodes=40, seed=3)
    assert np.mean(returns) == 4
    agent.save(tmp_path)
    loaded = algos.load(tmp_path)
    assert isinstance(loaded, QPolicy) and loaded.exploration == 0
    assert torch.equal(loaded.action_values(rollout["observation"]), agent.policy.action_values(rollout["observation"]))


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_steps=None, num_episodes=4), "DQN learns from steps"),
        (dict(batch_size=0), "batch_size is 0, expected an integer of at least 1"),
        (dict(target_update_gradient_steps=0), "target_update_gradient_steps is 0"),
        (dict(exploration_fraction=1.5), "exploration_fraction is 1.5, expected a number from 0 to 1"),
        (dict(gamma=-0.1), "gamma is -0.1"),
        (dict(buffer_size=500), "buffer_size is 500.*learning_starts"),
        (dict(buffer_size=50, learning_starts=10), "buffer_size is 50.*batch_size"),
    ],
)
def test_wrong_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DQNConfig(**options)


def test_other_policies_and_spaces_are_refused():
    env = cartpole()
    with pytest.raises(TypeError, match="MLPPolicy, but DQN trains only a QPolicy"):
        DQN(env, mlp_for(env))
    with pytest.raises(ValueError, match=r"Discrete\(n\): use PPO"):
        QPolicy(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,)))


def test_it_learns_from_any_rollout_of_the_schema():
    """`update` takes any rollout of the schema, as every algorithm does."""
    agent = make()
    rollout = algos.collect(agent.env, agent.policy, num_steps=20, seed=0)
    assert "value/loss" in agent.update(rollout)


class Closed(gym.Env):
    """One state and no reward; action 1 is never open, and every third step is cut by a limit."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)

    def _state(self):
        return np.ones(1, dtype=np.float32), {"action_mask": np.array([1, 0], dtype=np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._state()

    def step(self, action):
        assert action == 0
        self.time += 1
        observation, info = self._state()
        return observation, 0.0, False, self.time == 3, info


@MODES
def test_a_time_limit_opens_no_closed_action(mode):
    """The closed action is worth 5 by the network as it begins: every target that looks at it would be 4.95."""
    env = SyncVectorEnv([Closed] * 2, autoreset_mode=mode)
    agent = make(env, learning_starts=16, batch_size=16, gradient_steps=20)
    with torch.no_grad():
        agent.policy.network[-1].weight.zero_()
        agent.policy.network[-1].bias.copy_(torch.tensor([0.0, 5.0]))
    rollouts = []
    for _ in range(5):
        rollouts.append(agent.collect())
        agent.update(rollouts[-1])
    steps = torch.cat([rollout[rollout["mask"]] for rollout in rollouts])
    assert steps["truncated"].sum() >= 8
    assert (steps["next_action_mask"] == torch.tensor([True, False])).all()
    worth = agent.policy.action_values(torch.ones(1, 1))[0]
    assert worth[0].item() == 0.0


def test_values_of_a_policy_are_those_of_open_actions():
    env = SyncVectorEnv([Closed] * 2)
    policy = q_policy(env)
    with torch.no_grad():
        policy.network[-1].bias.copy_(torch.tensor([0.0, 5.0]))
    rollout = algos.collect(env, policy, num_steps=8)
    open_action = policy.action_values(torch.ones(1))[0].item()
    value, following = policy.values(rollout)
    for found in (value, following, policy.evaluate(rollout).value):
        assert found[rollout["mask"]].tolist() == pytest.approx([open_action] * int(rollout["mask"].sum()))


@pytest.mark.parametrize("start", [0, 5, -3])
def test_actions_may_begin_elsewhere_than_at_0(start):
    """Two actions, of which the second pays 1 and ends the episode."""

    class Paid(Closed):
        action_space = spaces.Discrete(2, start=start)

        def step(self, action):
            assert self.action_space.contains(action)
            return self._state()[0], float(action - start), True, False, {}

        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {}

    agent = make(SyncVectorEnv([Paid] * 4), learning_rate=1e-2)
    agent.learn(400)
    assert set(agent.buffer[:]["action"].tolist()) == {start, start + 1}
    worth = agent.policy.action_values(torch.ones(1, 1))[0]
    assert worth.tolist() == pytest.approx([0.0, 1.0], abs=0.1)
    assert agent.policy.act(np.ones((3, 1), dtype=np.float32), deterministic=True).action.tolist() == [start + 1] * 3
