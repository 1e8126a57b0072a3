"""Classic control swaps in: every kind of space, environments by name, images."""

import itertools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

import algos
from algos import PPO, CNNPolicy, LSTMPolicy, MLPPolicy, PPOConfig, collect, evaluate
from algos.cli import main
from algos.envs.flatten import flatten, flatten_one
from algos.envs.spaces import describe_space, restore_space
from algos.make import make_policy
from algos.policies.distributions import action_distribution
from tests.helpers.errors import refused

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
PLANE = spaces.Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "MountainCarContinuous-v0", "LunarLander-v3",
     "FrozenLake-v1", "Taxi-v4"],
)  # fmt: skip
def test_control_and_its_saved_agent_run_by_name(env_id, tmp_path, capsys):
    if env_id.startswith("LunarLander"):
        pytest.importorskip("Box2D")
    main(["train", env_id, "--total-steps", "1024", "--run-dir", str(tmp_path), "--num-episodes", "2", "--json",
          "--num-envs", "8", "--config.num-steps", "128", "--config.num-epochs", "2"])  # fmt: skip
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert trained["steps"] >= 1024 and np.isfinite(trained["mean_return"])
    main(["evaluate", str(tmp_path), "--num-episodes", "3", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 3


def test_an_outdated_version_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", "Taxi-v3"])
    assert "Taxi-v4" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num-envs", "--num-episodes"])
def test_no_slots_and_no_episodes_are_refused_at_once(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", option, "0", "--total-steps", "100", "--run-dir", str(tmp_path / "run")])
    assert "expected at least 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [["--policy", "lstm"], ["--policy", "mlp"]])
def test_the_command_chooses_policy_and_normalisation(options, tmp_path, capsys):
    normalized = ["--policy-kwargs", '{"normalize_observations": true}', "--config.normalize-rewards"]
    main(["train", "CartPole-v1", "--total-steps", "300", "--run-dir", str(tmp_path), "--num-episodes", "2", "--json",
          "--config.num-steps", "16", *normalized, *options])  # fmt: skip
    policy = algos.load(tmp_path)
    assert type(policy) is {"lstm": LSTMPolicy, "mlp": MLPPolicy}[options[1]]
    assert policy.normalizer.count > 200
    with pytest.raises(SystemExit):
        main(["train", "textenv/Copy-v0", *options])
    assert "language model" in capsys.readouterr().err


# Observation spaces


class Counter(gym.Env):
    """Shows its clock in any space: observation number t of a list; ends at ``length``."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, shown, length=5):
        self.observation_space, self.shown, self.length = space, shown, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.shown[0], {}

    def step(self, action):
        self.time += 1
        return self.shown[self.time], 1.0, self.time == self.length, False, {}


def counter(space, mode, length=5, num_envs=2):
    space.seed(0)
    shown = [space.sample() for _ in range(length + 1)]
    lengths = [length - n for n in range(num_envs)]
    env = SyncVectorEnv([lambda n=n: Counter(space, shown, n) for n in lengths], autoreset_mode=mode)
    return env, np.stack([spaces.flatten(space, x) for x in shown])


OBSERVATIONS = {
    "Discrete": spaces.Discrete(7, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(6),
    "Dict": spaces.Dict({"place": spaces.Box(-1, 1, (2, 2)), "door": spaces.Discrete(3)}),
    "Tuple": spaces.Tuple([spaces.Discrete(5), spaces.Dict({"flags": spaces.MultiBinary(3)}), PLANE]),
}


@MODES
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_arrives_flat(name, mode):
    env, flat = counter(OBSERVATIONS[name], mode)
    policy = make_policy(env)
    rollout = collect(env, policy, num_steps=23, seed=0)
    for slot, length in enumerate([5, 4]):
        row = rollout[slot][rollout["mask"][slot]]
        time = torch.arange(len(row)) % length
        assert int(row["terminated"].sum()) >= 3
        np.testing.assert_array_equal(row["observation"], flat[time])
        np.testing.assert_array_equal(row["next_observation"], flat[time + 1])
    PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=16, num_epochs=1)).learn(64)
    assert len(evaluate(env, policy, num_episodes=3)[0]) == 3


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_batch_is_flattened_as_by_gymnasium(name):
    space = OBSERVATIONS[name]
    space.seed(0)
    samples = [space.sample() for _ in range(7)]
    batch = concatenate(space, samples, create_empty_array(space, 7))
    expected = np.stack([np.asarray(spaces.flatten(space, sample), dtype=np.float32) for sample in samples])
    found = flatten(space, batch)
    if isinstance(space, spaces.Box):
        assert found is batch
    else:
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.float32 and flatten(space, found) is found
        np.testing.assert_array_equal(flatten_one(space, samples[0]), expected[0])


def test_observations_without_a_fixed_size_are_refused():
    for space in (spaces.Text(5), spaces.Sequence(PLANE), spaces.Dict({"a": PLANE, "b": spaces.Text(3)})):
        for policy in (MLPPolicy, LSTMPolicy):
            with refused(ValueError, "observation_space is", "cannot read", "expected Box", "--wrapper"):
                policy(space, spaces.Discrete(2))


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


# Action spaces

PRODUCTS = [
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 1], [3, 2]])),
    spaces.MultiBinary(3),
    spaces.MultiDiscrete([2, 3], start=[7, -1]),
]
ACTIONS = [
    spaces.Discrete(4),
    spaces.Discrete(4, start=3),
    *PRODUCTS,
    spaces.Box(-1, 1, (2, 2), np.float32),
    spaces.Box(-1, 1, (), np.float32),
]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_samples_are_scored_as_they_were_drawn(space):
    distribution, generator = action_distribution(space), torch.Generator().manual_seed(0)
    output = torch.randn(50, distribution.size, generator=generator)
    options = dict(generator=generator, action_mask=None)
    action, log_prob = distribution.sample(output.clone().requires_grad_(), deterministic=False, **options)
    assert action.shape == (50, *space.shape) and log_prob.shape == (50,)
    assert not action.requires_grad and not log_prob.requires_grad
    if not isinstance(space, spaces.Box):
        assert action.dtype == torch.int64
        assert all(space.contains(one.astype(space.dtype)) or space.contains(int(one)) for one in action.numpy())
    scored, entropy = distribution.score(output, action)
    torch.testing.assert_close(scored, log_prob, atol=1e-5, rtol=0)
    best, best_log_prob = distribution.sample(output, deterministic=True, **options)
    assert (best_log_prob >= log_prob - 1e-6).all() and entropy.shape == (50,)
    # As part of a rollout, [B, T] in front, and after saving.
    again = action_distribution(restore_space(json.loads(json.dumps(describe_space(space)))))
    wide = again.score(output.view(5, 10, -1), action.view(5, 10, *space.shape))
    torch.testing.assert_close(wide[0].flatten(), log_prob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("space", PRODUCTS, ids=str)
def test_a_product_of_choices_sums_to_one(space):
    distribution = action_distribution(space)
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(distribution.size, generator=generator)
    every = torch.tensor(list(itertools.product(*[range(n) for n in distribution.choices])))
    if isinstance(space, spaces.MultiDiscrete):
        every = every + torch.as_tensor(space.start).flatten()
    log_prob, entropy = distribution.score(output.expand(len(every), -1), every.view(-1, *space.shape))
    assert log_prob.exp().sum().item() == pytest.approx(1)
    assert entropy[0].item() == pytest.approx(-(log_prob.exp() * log_prob).sum().item(), abs=1e-5)
    drawn, _ = distribution.sample(
        output.expand(20_000, -1), generator=generator, action_mask=None, deterministic=False
    )
    found = (drawn.view(20_000, 1, -1) == every).all(-1).float().mean(0)
    torch.testing.assert_close(found, log_prob.exp(), atol=0.015, rtol=0)


def test_action_spaces_of_no_policy_are_refused():
    for space in (spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple([PLANE]), spaces.Text(3)):
        with refused(ValueError, "action_space is", "Discrete, Box, MultiDiscrete or MultiBinary", "TransformAction"):
            MLPPolicy(PLANE, space)
    with refused(ValueError, "int", "expected floats"):
        MLPPolicy(PLANE, spaces.Box(0, 3, (2,), np.int64))
    with refused(ValueError, "action_mask", "Discrete"):
        MLPPolicy(PLANE, PRODUCTS[0]).act(np.zeros((2, 3)), action_mask=torch.ones(2, 5, dtype=torch.bool))


class Match(gym.Env):
    """Pays 1 for each part of the action that equals a hidden pattern; one step long."""

    observation_space = PLANE

    def __init__(self, space, pattern):
        self.action_space, self.pattern = space, pattern

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, dtype=self.action_space.dtype))
        return np.ones(3, np.float32), float((action == self.pattern).mean()), True, False, {}


@pytest.mark.parametrize(
    "space, pattern", [(spaces.MultiDiscrete([3, 2]), [2, 1]), (spaces.MultiBinary(4), [0, 1, 1, 0])], ids=str
)
def test_products_of_choices_learn(space, pattern):
    env = SyncVectorEnv([lambda: Match(space, pattern)] * 8, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=64, learning_rate=3e-3)).learn(4000)
    assert np.mean(evaluate(env, policy, num_episodes=50)[0]) > 0.95


# Images


class Brighter(gym.Env):
    """Which half of the image is brighter? Four guesses an episode; channels first or last."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape):
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def observe(self):
        self.right = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 120, self.observation_space.shape, dtype=np.uint8)
        columns = np.moveaxis(image, 2 if image.shape[0] < image.shape[-1] else 1, 0)
        half = len(columns) // 2
        columns[half * self.right : half * (self.right + 1)] += 60
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.time = float(action == self.right), self.time + 1
        return self.observe(), reward, False, self.time == 4, {}


@pytest.mark.parametrize("shape", [(16, 16, 3), pytest.param((2, 16, 16), marks=pytest.mark.long)], ids=str)
def test_images_are_learnt_from_by_the_cnn(shape, tmp_path):
    """By the same PPO; the rollout keeps bytes, and a saved policy acts alike to the bit."""
    env = SyncVectorEnv([lambda: Brighter(shape)] * 8, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    assert isinstance(policy, CNNPolicy)
    agent = PPO(env, policy, PPOConfig(num_steps=32, minibatch_size=64, num_epochs=2, learning_rate=1e-3, gamma=0.5))
    agent.learn(2000)
    returns, rollout = evaluate(env, policy, num_episodes=40)
    assert rollout["observation"].dtype == rollout["next_observation"].dtype == torch.uint8
    assert np.mean(returns) > 3.6
    observation = rollout["observation"][:, 0].numpy()
    one, two = (p.act(observation, deterministic=True) for p in (policy, algos.load(agent.save(tmp_path))))
    assert torch.equal(one.action, two.action) and torch.equal(one.log_prob, two.log_prob)


def test_the_cnn_reads_stacked_and_colour_images():
    first, last = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Box(0, 255, (84, 84, 4), np.uint8)
    one, two = (CNNPolicy(space, spaces.Discrete(6), seed=3) for space in (first, last))
    assert [tuple(layer.weight.shape) for layer in one.trunk if hasattr(layer, "weight")] == [
        (32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136),
    ]  # fmt: skip
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    seen = ((one, images), (two, np.moveaxis(images, 1, -1)))
    found = [policy.output({"observation": torch.from_numpy(x)}) for policy, x in seen]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
    expected = one.actor(one.trunk(torch.from_numpy(images).float() / 255))
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


def test_the_cnns_ratio_is_one_and_its_values_agree():
    """Values of the rollout's cut entries are those of the final observations; log-probabilities are as sampled."""
    env = SyncVectorEnv([lambda: Brighter((16, 16, 3))] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    rollout = collect(env, policy, num_steps=10)
    assert (policy.evaluate(rollout).log_prob - rollout["log_prob"]).abs().max() < 1e-5
    value, following = policy.values(rollout)
    ended = rollout["truncated"]
    direct = policy.evaluate(rollout.clone().set("observation", rollout["next_observation"])).value
    assert ended.sum() == 6
    torch.testing.assert_close(following, direct.detach(), atol=1e-5, rtol=0)
    assert torch.equal(following[:, :-1][~ended[:, :-1]], value[:, 1:][~ended[:, :-1]])


def test_images_that_cannot_be_read_are_refused():
    def box(shape, dtype=np.uint8):
        return spaces.Box(0, 1, shape, dtype)

    for space in (box((84, 84, 3), np.float32), box((4, 84, 84, 3)), box((128,)), spaces.Discrete(3)):
        with refused(ValueError, "uint8 Box of 2 or 3 dimensions", "MLPPolicy"):
            CNNPolicy(space, spaces.Discrete(2))
    with refused(ValueError, "\\(9, 9, 9\\)", "channels", "ReshapeObservation"):
        CNNPolicy(box((9, 9, 9)), spaces.Discrete(2))
    with refused(ValueError, "4 x 20", "at least 5"):
        CNNPolicy(box((4, 20, 3)), spaces.Discrete(2))
    env = SyncVectorEnv([lambda: Brighter((16, 16, 3))])
    with refused(ValueError, "normalize_observations", "CNNPolicy", "its arguments are"):
        make_policy(env, normalize_observations=True)
    with refused(ValueError, "'rnn'", "auto, mlp, cnn, lstm, gsde, q"):
        make_policy(env, policy="rnn")


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
