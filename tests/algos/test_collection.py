"""What a vector environment and a policy hand to the collector: flags, rewards, action masks, steps."""

import gymnasium
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import nn

import algos
from algos import DQN, PPO, MLPPolicy, Policy, QPolicy, collect, evaluate
from algos.policies.policy import Step
from tests.helpers.errors import refused

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


# --- flags and rewards ---------------------------------------------------------------------------


class Counting(VectorEnv):
    """Episodes of 2 and 3 steps, in NEXT_STEP mode; what a step returns passes through ``convert``."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, convert):
        self.num_envs, self.convert = 2, convert
        self.single_observation_space, self.single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        self.observation_space, self.action_space = spaces.Box(0, 9, (2, 1)), spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed=None, options=None):
        self.time = np.zeros(2)
        return self.time.astype(np.float32)[:, None], {}

    def step(self, actions):
        over = self.time == [2, 3]
        self.time = np.where(over, 0, self.time + 1)
        reward, terminated = np.where(over, 0.0, self.time), self.time == [2, 3]
        flags = self.convert("terminated", terminated), self.convert("truncated", np.zeros(2, dtype=bool))
        return self.time.astype(np.float32)[:, None], self.convert("reward", reward), *flags, {}


def collected(convert):
    env = Counting(convert)
    return collect(env, MLPPolicy(env.single_observation_space, env.single_action_space), num_steps=9)


class Reused:
    """One array for each name, for ever, as in environments that write into shared memory."""

    def __init__(self):
        self.arrays = {}

    def __call__(self, name, values):
        array = self.arrays.setdefault(name, values.copy())
        array[:] = values
        return array


@pytest.mark.parametrize(
    "convert",
    [
        lambda name, values: values.astype(np.int8),
        lambda name, values: values.astype(np.float32),
        lambda name, values: values.tolist(),
        lambda name, values: torch.from_numpy(values.astype(np.uint8)),
        Reused(),
    ],
    ids=["int8", "float32", "list", "uint8 tensor", "reused array"],
)
def test_flags_of_any_dtype_are_read_as_bools(convert):
    expected, found = collected(lambda name, values: values), collected(convert)
    assert expected["mask"].logical_not().sum() > 3
    for name in ("mask", "is_init", "terminated", "truncated"):
        assert found[name].dtype is torch.bool
    for name in ("mask", "is_init", "terminated", "truncated", "reward", "observation"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("column", ["reward", "terminated", "truncated"])
def test_columns_of_another_shape_are_refused(column):
    def convert(name, values):
        return values[:, None] if name == column else values

    with refused(ValueError, rf"Counting.step returned {column} of shape \(2, 1\)", r"expected .*\(2,\)"):
        collected(convert)


class Queue(gymnasium.Env):
    """Ten steps an episode; ``info["waiting"]`` is a value that it is given, from the first step on."""

    observation_space, action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(2)

    def __init__(self, waiting):
        self.waiting = waiting

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        info = {} if self.waiting is None else {"waiting": self.waiting}
        return np.full(1, self.time, np.float32), 1.0, self.time == 10, False, info


@pytest.mark.parametrize("waiting", [3, 1, 2.5, "two", np.ones(4), np.ones(4, dtype=bool)], ids=repr)
def test_what_waiting_means_elsewhere_removes_no_step(waiting):
    env = SyncVectorEnv([lambda: Queue(waiting), lambda: Queue(None)], autoreset_mode=AutoresetMode.SAME_STEP)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    assert collect(env, policy, num_steps=20)["mask"].all()


@pytest.mark.parametrize("waiting", [True, np.True_], ids=repr)
def test_slots_that_wait_have_no_steps(waiting):
    env = SyncVectorEnv([lambda: Queue(waiting), lambda: Queue(None)], autoreset_mode=AutoresetMode.SAME_STEP)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    mask = collect(env, policy, num_steps=9)["mask"]
    assert not mask[0].any() and mask[1].all()


# --- observations --------------------------------------------------------------------------------


class Shows(VectorEnv):
    """Three slots with two numbers each, in SAME_STEP mode; episodes of five steps. Observations are converted."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, *, converts=("reset", "step"), convert=lambda rows: rows, has_final=True):
        self.num_envs, self.converts, self.convert, self.has_final = 3, converts, convert, has_final
        self.single_observation_space, self.single_action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(2)
        self.observation_space, self.action_space = spaces.Box(0, 1, (3, 2)), spaces.MultiDiscrete([2, 2, 2])

    def show(self, method):
        rows = np.zeros((3, 2), np.float32)
        return self.convert(rows) if method in self.converts else rows

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.show("reset"), {}

    def step(self, actions):
        self.time += 1
        terminated = np.full(3, self.time % 5 == 0)
        info = {"final_obs": np.ones((3, 2), np.float32)} if self.has_final else {}
        return self.show("step"), np.ones(3), terminated, np.zeros(3, dtype=bool), info


def policy_for(env):
    return MLPPolicy(env.single_observation_space, env.single_action_space)


def test_final_observations_may_be_one_array():
    env = Shows()
    rollout = collect(env, policy_for(env), num_steps=10)
    assert torch.equal(rollout["next_observation"][:, :, 0] == 1, rollout["terminated"])


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (np.ndarray.tolist, r"a list of shape \(3, 2\)"),
        (torch.from_numpy, r"a Tensor of shape \(3, 2\)"),
        (np.ravel, r"a ndarray of shape \(6,\)"),
        (lambda rows: rows[:2], r"a ndarray of shape \(2, 2\)"),
        (lambda rows: rows[None], r"a ndarray of shape \(1, 3, 2\)"),
        (lambda rows: np.hstack([rows, rows]), r"a ndarray of shape \(3, 4\)"),
    ],
    ids=["list", "tensor", "flat", "too few", "too deep", "too long"],
)
def test_observations_that_are_no_rows_of_an_array_are_refused(convert, words, method):
    env = Shows(converts=[method], convert=convert)
    with refused(ValueError, f"Shows.{method} returned {words}", r"expected a NumPy array of shape \(3, 2\)"):
        collect(env, policy_for(env), num_steps=3)


def test_an_end_without_the_final_observation_is_refused():
    env = Shows(has_final=False)
    assert collect(env, policy_for(env), num_steps=4).shape == (3, 4)
    with refused(ValueError, r"Shows.step ended .* SAME_STEP without info\['final_obs'\]", "NEXT_STEP"):
        collect(env, policy_for(env), num_steps=5)


# --- action masks --------------------------------------------------------------------------------


class Moves(gymnasium.Env):
    """At time t only action t % 3 is open; after ``length`` steps the game is over, by end or limit."""

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(3)

    def __init__(self, length, *, truncates=False, final=None):
        self.length, self.truncates, self.final = length, truncates, final

    def seen(self):
        mask = np.arange(3) == self.time % 3
        if self.time == self.length and self.final is not None:
            mask = np.array(self.final)
        return np.array([self.time], np.float32), {"action_mask": mask.astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.seen()

    def step(self, action):
        assert action == self.time % 3, f"action {action} is closed at time {self.time}"
        self.time += 1
        over = self.time == self.length
        observation, info = self.seen()
        return observation, 1.0, over and not self.truncates, over and self.truncates, info


def moves(mode, lengths=(2, 4), **options):
    return SyncVectorEnv([lambda n=n: Moves(n, **options) for n in lengths], autoreset_mode=mode)


@MODES
def test_a_truncated_state_has_its_own_next_mask(mode):
    """After 2 steps action 2 is open, after 4 steps action 1; the next episode would begin with action 0."""
    env = moves(mode, truncates=True)
    steps = collect(env, MLPPolicy(env.single_observation_space, env.single_action_space), num_steps=12)
    steps = steps[steps["mask"]]
    truncated = steps[steps["truncated"]]
    assert len(truncated) > 5
    final_time = truncated["next_observation"][:, 0].long()
    assert set(final_time.tolist()) == {2, 4}
    expected = nn.functional.one_hot(steps["next_observation"][:, 0].long() % 3, 3).bool()
    torch.testing.assert_close(steps["next_action_mask"], expected)


@MODES
def test_dqn_bootstraps_over_the_states_own_actions(mode):
    """Q-values 0, 10 and 20 of the three actions; after 2 steps only action 2 is open: target 1 + .5·20."""
    env = moves(mode, lengths=(2, 2), truncates=True)
    policy = QPolicy(env.single_observation_space, env.single_action_space, hidden=(4,))
    agent = DQN(env, policy, num_steps=4, gamma=0.5, learning_starts=100, buffer_size=200)
    for network in (agent.policy.network, agent.target.network):
        nn.init.zeros_(network[-1].weight)
        network[-1].bias.data = torch.tensor([0.0, 10.0, 20.0])
    rollout = agent.collect()
    agent.update(rollout)
    batch = agent.buffer[:]
    last = batch[batch["next_observation"][:, 0] == 2]
    assert len(last) >= 2
    target = 1 + 0.5 * 20
    expected = (torch.tensor([0.0, 10.0, 20.0])[last["action"]] - target).square().mean()
    assert agent.loss(last)[0].item() == pytest.approx(expected.item())


@MODES
@pytest.mark.parametrize("truncates", [False, True])
def test_a_finished_game_may_allow_no_action(mode, truncates):
    env = moves(mode, final=[0, 0, 0], truncates=truncates)
    for policy in (MLPPolicy(env.single_observation_space, env.single_action_space),
                   QPolicy(env.single_observation_space, env.single_action_space, hidden=(4,))):  # fmt: skip
        rollout = collect(env, policy, num_steps=12)
        assert (rollout["terminated"] | rollout["truncated"]).sum() > 5
        assert rollout["action_mask"].any(-1).all() and rollout["next_action_mask"].any(-1).all()
        assert rollout["log_prob"].isfinite().all()
    agent = PPO(env, num_steps=12, minibatch_size=12, seed=1)
    assert np.isfinite(agent.update(agent.collect())["policy/loss"])
    assert evaluate(env, agent.policy, num_episodes=2).mean_return == 3


class Stuck(Moves):
    """No action is open at time 1, but the episode goes on."""

    def seen(self):
        observation, info = super().seen()
        return observation, info if self.time != self.length - 1 else {"action_mask": np.zeros(3, dtype=np.int8)}


@MODES
@pytest.mark.parametrize("length", [1, 2])
def test_an_ongoing_episode_without_actions_is_refused(mode, length):
    """At the first observation, or after a step; a forbidden action would be taken without a word."""
    env = SyncVectorEnv([lambda: Moves(5), lambda: Stuck(length)], autoreset_mode=mode)
    with refused(ValueError, r"info\['action_mask'\] allows no action in slot 1", "terminated"):
        collect(env, MLPPolicy(env.single_observation_space, env.single_action_space), num_steps=9)


@pytest.mark.parametrize("kind", [MLPPolicy, QPolicy, algos.LSTMPolicy])
def test_a_policy_does_not_choose_among_no_actions(kind):
    policy = kind(spaces.Box(-1, 1, (4,)), spaces.Discrete(3))
    mask = torch.tensor([[True, False, False], [False, False, False]])
    with refused(ValueError, "action_mask allows no action in slot 1"):
        policy.act(np.zeros((2, 4), np.float32), action_mask=mask)


# --- what `act` returns --------------------------------------------------------------------------


class Own(nn.Module, Policy):
    """Acts as it is told."""

    def __init__(self, step):
        super().__init__()
        self.generator, self.layer, self.step = torch.Generator(), nn.Linear(4, 2), step

    def act(self, observation, *, action_mask=None, deterministic=False):
        return self.step(torch.from_numpy(observation), self.layer)


ACTION, LOG_PROB = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
WRONG = {
    "a tuple": (lambda x, net: (ACTION, LOG_PROB), TypeError, ["Own.act returned", "algos.policies.Step"]),
    "a column": (lambda x, net: Step(ACTION, LOG_PROB[:, None]), ValueError, [r"log_prob has shape \(2, 1\)", "slots"]),
    "a mean": (lambda x, net: Step(ACTION, LOG_PROB.mean()), ValueError, [r"log_prob has shape \(\)", r"\(2,\)"]),
    "one-hot": (lambda x, net: Step(torch.eye(2), LOG_PROB), ValueError, [r"has shape \(2, 2\)", r"expected \(2,\)"]),
    "numpy": (lambda x, net: Step(ACTION.numpy(), LOG_PROB), TypeError, ["action is a ndarray", "torch.Tensor"]),
    "gradient": (lambda x, net: Step(ACTION, net(x).sum(1)), ValueError, ["log_prob with a gradient", "no_grad"]),
}  # fmt: skip


class Words(gymnasium.Env):
    observation_space, action_space = spaces.Dict(a=spaces.Box(0, 1, (4,)), b=spaces.Text(3)), spaces.Discrete(2)


def test_observations_unlike_the_policys_are_refused():
    with refused(ValueError, "Own cannot read Text", "--wrapper"):
        PPO(SyncVectorEnv([Words]), Own(lambda x, net: Step(ACTION, LOG_PROB)))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_found_at_act(name):
    step, error, words = WRONG[name]
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with refused(error, *words):
        collect(env, Own(step), num_steps=3)
    with refused(error, *words):
        evaluate(env, Own(step), num_episodes=2)


class Noting(gym.Env):
    """Notes every action that it is given."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Box(-0.5, 0.25, (2,), np.float32)

    def __init__(self):
        self.given = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action):
        self.given.append(np.array(action))
        return np.zeros(1, dtype=np.float32), 0.0, False, False, {}


def test_actions_are_clipped_only_for_the_environment():
    single = Noting()
    policy = MLPPolicy(single.observation_space, single.action_space)
    rollout = collect(SyncVectorEnv([lambda: single]), policy, num_steps=50, seed=0)
    drawn, given = rollout["action"][0], torch.from_numpy(np.stack(single.given))
    assert (drawn.abs() > 0.5).any()
    torch.testing.assert_close(given, drawn.clamp(torch.tensor(-0.5), torch.tensor(0.25)))


class SaysSometimes(gym.Env):
    """Three actions; a slot may say at every second step that only the last is open, or never say anything."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(3)

    def __init__(self, *, says, size=3):
        self.says, self.size = says, size

    def info(self):
        return {"action_mask": [0] * (self.size - 1) + [1]} if self.says and self.steps % 2 == 0 else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), self.info()

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 0.0, False, self.steps == 5, self.info()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_slot_without_a_mask_leaves_all_actions_open(mode):
    env = SyncVectorEnv([lambda: SaysSometimes(says=True), lambda: SaysSometimes(says=False)], autoreset_mode=mode)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    rollout = collect(env, policy, num_steps=40)
    closed = ~rollout["action_mask"].all(-1)
    assert closed[0].any() and not closed[0].all() and not closed[1].any()
    assert (rollout["action"][0][closed[0] & rollout["mask"][0]] == 2).all()
    assert set(rollout["action"][1].tolist()) == {0, 1, 2}


def test_a_mask_of_another_size_is_refused():
    env = SyncVectorEnv([lambda: SaysSometimes(says=True, size=4)], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=r"shape \(4,\) in a slot"):
        collect(env, MLPPolicy(env.single_observation_space, env.single_action_space), num_steps=2)


class HasMethod(gym.Env):
    """Has the method that MaskablePPO calls; its info may have the same mask."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(3)

    def __init__(self, has_mask):
        self.has_mask = has_mask

    def action_masks(self):
        return np.array([True, False, True])

    def info(self):
        return {"action_mask": self.action_masks()} if self.has_mask else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), self.info()

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, self.info()


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_method_with_masks_that_nothing_calls_is_warned_of_once(has_mask, caplog):
    env = SyncVectorEnv([lambda: gym.wrappers.TimeLimit(HasMethod(has_mask), 5)] * 2)
    policy = policy_for(env)
    for _ in range(2):
        rollout = collect(env, policy, num_steps=20)
    plays_closed_action = bool((rollout["action"] == 1).any())
    assert plays_closed_action == (not has_mask)
    assert caplog.text.count("has a method action_masks") == int(not has_mask)


def test_environments_without_that_method_are_not_warned_of(caplog):
    env = SyncVectorEnv([lambda: SaysSometimes(says=False)])
    collect(env, policy_for(env), num_steps=3)
    assert not caplog.records


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
def test_an_info_that_is_a_list_is_refused(mode):
    env = gym.wrappers.vector.DictInfoToList(moves(mode))
    with refused(ValueError, "reset returned a list as info", "DictInfoToList"):
        collect(env, policy_for(env), num_steps=3)


class StepsInLists(Shows):
    def step(self, actions):
        *values, _ = super().step(actions)
        return *values, [{}, {}, {}]


def test_an_info_of_a_step_that_is_a_list_is_refused():
    env = StepsInLists()
    with refused(ValueError, "step returned a list as info", "expected a dictionary"):
        collect(env, policy_for(env), num_steps=3)


def test_an_environment_stepped_by_others_is_reset():
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    collector = algos.Collector(env, policy, seed=1)
    collector.collect(num_steps=20)
    algos.evaluate(env, policy, num_episodes=2)
    rollout = collector.collect(num_steps=5)
    assert rollout["is_init"][:, 0].all() and rollout["mask"][:, 0].all()
    step = (rollout["next_observation"] - rollout["observation"])[:, 0].abs().max()
    assert step < 0.5  # CartPole moves by .4 a step at the most here


@pytest.mark.parametrize("length", [{"num_steps": 0}, {"num_steps": -1}, {"num_episodes": 0}])
def test_lengths_below_one_are_refused(length):
    env = gym.make_vec("CartPole-v1", num_envs=2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    (name,) = length
    with refused(ValueError, f"{name} is {length[name]}, expected at least 1"):
        collect(env, policy, **length)


def test_a_seed_below_zero_is_refused():
    env = gym.make_vec("CartPole-v1", num_envs=2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    for call in (collect, evaluate):
        with refused(ValueError, "seed is -1, expected an integer of at least 0"):
            call(env, policy, num_episodes=2, seed=-1)
    assert len(collect(env, policy, num_episodes=2, seed=np.int64(3))) == 2
