"""Both contracts: text environments are torchrl environments, and torchrl environments train through our agents."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import CatTensors, EnvBase, GymEnv, PendulumEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import UnsqueezeTransform

from algos import PPO, MLPPolicy, PPOConfig
from tests.helpers.text_envs import DISABLED, EOS, text_vector_env
from textenv.extras.torchrl import from_torchrl, to_torchrl


class Countdown(EnvBase):
    """A batch-locked torchrl environment: slot i ends after i + 1 steps: 0 terminated, 1 both, 2 truncated."""

    def __init__(self, batch_size=(3,), *, action=None, reward_shape=(1,), ends=("done", "terminated", "truncated")):
        super().__init__(batch_size=batch_size, device="cpu")
        shape = torch.Size(batch_size)
        self.observation_spec = Composite(
            left=Unbounded((*shape, 1), dtype=torch.int64), lamp=Binary(2, shape=(*shape, 2)), shape=shape
        )
        action = action or {"action": Categorical(4, shape=shape, dtype=torch.int32)}
        self.full_action_spec = Composite(action, shape=shape)
        self.reward_spec = Unbounded((*shape, *reward_shape), dtype=torch.float64)
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        self.full_done_spec = Composite({name: flag.clone() for name in ends}, shape=shape)
        self.age = torch.zeros(shape, dtype=torch.int64)
        self.seeded, self.ends = [], ends

    def _entries(self):
        left = torch.arange(1, self.age.numel() + 1).reshape(self.age.shape) - self.age
        return {"left": left.unsqueeze(-1), "lamp": torch.stack([left % 2 == 0, left % 2 == 1], -1).to(torch.int8)}

    def _reset(self, tensordict=None, **options):
        begun = torch.ones_like(self.age, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            begun = tensordict["_reset"].reshape(self.age.shape)
        self.age[begun] = 0
        return Composite(shape=self.batch_size).zero().update(self._entries())

    def _step(self, tensordict):
        self.age += 1
        entries = self._entries()
        done = entries["left"] <= 0
        slot = torch.arange(self.age.numel()).reshape(done.shape)
        flags = {"done": done, "terminated": done & (slot < 2), "truncated": done & (slot > 0)}
        entries |= {name: flags[name] for name in self.ends}
        reward = tensordict["action"].to(torch.float64).unsqueeze(-1)
        return Composite(shape=self.batch_size).zero().update(entries | {"reward": reward})

    def _set_seed(self, seed):
        self.seeded.append(seed)


# --- torchrl environments as vector environments ----------------------------------------------------------------------


def cartpole():
    return GymEnv("CartPole-v1")


def pendulum():
    """torchrl's own, which keeps its state in the entries it is given, with a time limit of 5 steps."""
    env = TransformedEnv(PendulumEnv(), StepCounter(5))
    env.append_transform(UnsqueezeTransform(-1, in_keys=["th", "thdot"], out_keys=["angle", "speed"]))
    return env.append_transform(CatTensors(["angle", "speed"], "observation"))


CASES = {  # environment, entry to show, slots, observation space, action space
    "one-hot": (cartpole, None, 1, spaces.Box, spaces.Discrete(2)),
    "categorical": (lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), None, 1, spaces.Box,
                    spaces.Discrete(2)),
    "box": (lambda: GymEnv("Pendulum-v1"), None, 1, spaces.Box, spaces.Box(-2, 2, (1,))),
    "one-hot observation": (lambda: GymEnv("FrozenLake-v1"), None, 1, spaces.Discrete, spaces.Discrete(4)),
    "torchrl's own": (pendulum, "observation", 1, spaces.Box, spaces.Box(-2, 2, (1,))),
    "nested": (pendulum, None, 1, spaces.Dict, spaces.Box(-2, 2, (1,))),
    "serial": (lambda: SerialEnv(4, cartpole), None, 4, spaces.Box, spaces.Discrete(2)),
    "batch-locked": (Countdown, "left", 3, spaces.Box, spaces.Discrete(4)),
    "two entries": (Countdown, None, 3, spaces.Dict, spaces.Discrete(4)),
}  # fmt: skip
TRAINABLE = sorted(CASES.keys() - {"one-hot observation", "nested", "two entries"})


@pytest.mark.parametrize("case", CASES)
def test_specs_become_spaces_that_hold_the_data(case):
    make, shown, slots, observation_kind, action_space = CASES[case]
    env = from_torchrl(make(), shown)
    assert env.num_envs == slots and env.metadata["autoreset_mode"] is DISABLED
    assert isinstance(env.single_observation_space, observation_kind) and env.single_action_space == action_space
    env.action_space.seed(0)
    observation, info = env.reset(seed=1)
    ended = 0
    for _ in range(30):
        assert env.observation_space.contains(observation) and info == {}
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, bool, bool)
        assert reward.shape == terminated.shape == truncated.shape == (slots,)
        if (done := terminated | truncated).any():
            observation, info = env.reset(options={"reset_mask": done})
            ended += done.sum()
    assert ended or case == "box"
    env.close()
    assert env.env.is_closed


def test_entries_keep_their_names_bounds_and_values():
    space = from_torchrl(Countdown()).single_observation_space
    assert set(space) == {"left", "lamp"} and space["lamp"] == spaces.MultiBinary((2,))
    params = from_torchrl(pendulum()).single_observation_space["params"]
    assert space["left"].dtype == np.int64 and not params["g"].is_bounded()
    assert from_torchrl(GymEnv("FrozenLake-v1")).reset(seed=0)[0].tolist() == [0]


def test_slots_end_apart_and_are_reset_alone():
    env = from_torchrl(Countdown(), "left")
    first, _ = env.reset(seed=7)
    assert env.env.seeded == [7] and first.tolist() == [[1], [2], [3]]
    actions = np.array([3, 0, 1])
    observation, reward, terminated, truncated, _ = env.step(actions)
    assert observation.tolist() == [[0], [1], [2]] and reward.tolist() == [3, 0, 1]
    assert (terminated.tolist(), truncated.tolist()) == ([True, False, False], [False] * 3)
    with pytest.raises(ValueError, match=r"slots \[0\] have no running episode.*reset_mask"):
        env.step(actions)
    assert env.reset(options={"reset_mask": np.array([True, False, False])})[0].tolist() == [[1], [1], [2]]
    env.step(actions)
    env.reset(options={"reset_mask": np.array([True, True, False])})
    observation, _, terminated, truncated, _ = env.step(actions)
    assert (terminated.tolist(), truncated.tolist()) == ([True, False, False], [False, False, True])
    assert first.tolist() == [[1], [2], [3]] and observation.tolist() == [[0], [1], [0]]


@pytest.mark.parametrize("ends, terminated, truncated", [
    (("done", "terminated", "truncated"), [True, True, False], [False, True, True]),
    (("done", "terminated"), [True, True, False], [False, False, True]),
    (("done",), [True, True, True], [False, False, False]),
])  # fmt: skip
def test_how_an_episode_ended_is_read_from_entries(ends, terminated, truncated):
    env = from_torchrl(Countdown(ends=ends))
    env.reset()
    env.env.age[:] = torch.tensor([0, 1, 2])
    *_, given_terminated, given_truncated, _ = env.step(np.zeros(3, dtype=int))
    assert (given_terminated.tolist(), given_truncated.tolist()) == (terminated, truncated)


def test_writing_into_observations_is_harmless():
    def play(write):
        env, angles = from_torchrl(pendulum(), "th"), []
        observation, _ = env.reset(seed=1)
        for _ in range(4):
            angles.append(observation.tolist())
            observation += write
            observation, *_ = env.step(np.zeros((1, 1)))
        return angles

    assert play(1.0) == play(0.0)


def test_a_partial_reset_leaves_other_state():
    """What an environment keeps in its entries stays as it is."""
    env = from_torchrl(SerialEnv(2, pendulum), "th")
    env.reset(seed=1)
    before, *_ = env.step(np.zeros((2, 1)))
    after, _ = env.reset(options={"reset_mask": np.array([True, False])})
    assert after[0] != before[0] and after[1] == before[1]


@pytest.mark.parametrize("mask", [[True] * 3, np.ones(2, dtype=bool), np.ones(3), np.zeros(3, dtype=bool)])
def test_a_wrong_reset_mask_is_refused(mask):
    env = from_torchrl(Countdown())
    with pytest.raises(ValueError, match=r"reset_mask is .*expected a bool array of shape \(3,\)"):
        env.reset(options={"reset_mask": mask})


def test_steps_that_make_no_sense_are_refused():
    env = from_torchrl(Countdown())
    with pytest.raises(ValueError, match=r"slots \[0, 1, 2\] have no running episode: call reset\(\)"):
        env.step(np.zeros(3, dtype=int))
    env.reset(options={"reset_mask": np.array([True, False, False])})
    with pytest.raises(ValueError, match=r"slots \[1, 2\] have no running episode"):
        env.step(np.zeros(3, dtype=int))
    env.reset()
    with pytest.raises(ValueError, match=r"shape \(3, 1\), expected \(3,\)"):
        env.step(np.zeros((3, 1), dtype=int))
    with pytest.raises(ValueError, match=r"\[0, 4, 0\], expected integers from 0 to 3"):
        env.step(np.array([0, 4, 0]))
    with pytest.raises(ValueError, match="seed is 1 and reset_mask is .*all slots at once"):
        env.reset(seed=1, options={"reset_mask": np.array([True, False, False])})


@pytest.mark.parametrize("make, error, message", [
    (lambda: [gymnasium.make("CartPole-v1")], TypeError, "expected a torchrl EnvBase: make it with"),
    (lambda: [Countdown((2, 2))], ValueError, r"batch_size is \[2, 2\], expected \[\] or \[N\]"),
    (lambda: [Countdown(action={"agents": Composite(action=Categorical(2, shape=(3,)), shape=(3,))})], ValueError,
     r"the action entries are \[\('agents', 'action'\)\].*one agent.*RenameTransform"),
    (lambda: [Countdown(reward_shape=(2,))], ValueError, r"the reward has shape \[3, 2\].*one number per slot"),
    (lambda: [Countdown(action={"action": OneHot(2, shape=(3, 5, 2))})], TypeError, "'action' is OneHot of shape"),
    (lambda: [Countdown(action={"action": Bounded(-1, torch.arange(1.0, 4.0), shape=(3,))})], ValueError,
     "'action' has different bounds in different slots"),
    (lambda: [Countdown(), "pixels"], ValueError, "observation is 'pixels', expected one of .*left"),
])  # fmt: skip
def test_what_has_no_gymnasium_form_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        from_torchrl(*make())


class SecondEpisode(gymnasium.Wrapper):
    """What torchrl's seed means: the episode after the seeded one."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.env.reset(seed=seed)
        return self.env.reset(options=options)


def ppo(env, **options):
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=2)
    return PPO(env, policy, PPOConfig(**(dict(num_steps=64, minibatch_size=32, seed=5) | options)))


@pytest.mark.heavy
def test_ppo_learns_as_on_gymnasiums_environment():
    plain = SyncVectorEnv([lambda: SecondEpisode(gymnasium.make("CartPole-v1"))], autoreset_mode=DISABLED)
    agents = [ppo(from_torchrl(cartpole())), ppo(plain)]
    for agent in agents:
        agent.learn(256)
    ours, theirs = (agent.collector.collect(num_steps=100) for agent in agents)
    assert theirs["terminated"].any() and set(ours.keys()) == set(theirs.keys())
    for name in ours.keys():
        assert torch.equal(ours[name], theirs[name]), name
    for one, other in zip(agents[0].policy.parameters(), agents[1].policy.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", TRAINABLE)
def test_ppo_trains_on_every_torchrl_environment(case):
    make, shown, slots, *_ = CASES[case]
    agent = ppo(from_torchrl(make(), shown))
    before = [parameter.clone() for parameter in agent.policy.parameters()]
    history = agent.learn(64 * slots)
    assert history[-1]["rollout/steps"] == 64 * slots
    pairs = list(zip(before, agent.policy.parameters(), strict=True))
    assert all(p.isfinite().all() for _, p in pairs) and not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.long
def test_ppo_learns_cartpole_in_two_of_torchrls():
    agent = ppo(from_torchrl(SerialEnv(2, cartpole)), num_steps=128, num_epochs=8, minibatch_size=64,
                learning_rate=1e-3, gamma=0.98, gae_lambda=0.9)  # fmt: skip
    returns = [metrics["episode/return"] for metrics in agent.learn(5120) if "episode/return" in metrics]
    assert np.mean(returns[:2]) < 50
    assert np.mean(returns[-5:]) > 100


def test_text_comes_back_through_torchrl_as_it_was():
    env, plain = from_torchrl(to_torchrl(text_vector_env(forbidden=(2,)))), text_vector_env(forbidden=(2,))
    assert set(env.single_observation_space) == {"tokens", "length"}
    plain.reset(seed=4)
    pairs, rng, ended = [env.reset(seed=4), plain.reset()], np.random.default_rng(0), 0
    for _ in range(40):
        for (observation, info), (expected, said) in [pairs]:
            assert all((observation[name].reshape(x.shape) == x).all() for name, x in expected.items())
            assert info["action_mask"].dtype == np.int8 and (info["action_mask"] == said["action_mask"]).all()
        actions = rng.choice([0, 1, 3, 5, EOS], 3)
        ours, theirs = env.step(actions), plain.step(actions)
        assert all((a == b).all() for a, b in zip(ours[1:4], theirs[1:4], strict=True))
        pairs, done = [(step[0], step[4]) for step in (ours, theirs)], theirs[2] | theirs[3]
        ended += done.sum()
        if done.any():
            pairs = [each.reset(options={"reset_mask": done.copy()}) for each in (env, plain)]
    assert ended > 10
