"""`predict` does what a user of Stable-Baselines3 expects: NumPy actions that `env.step` takes, for one or many."""

from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings, strategies as st
from torch import nn

import algos
from algos import PPO, CNNPolicy, GSDEPolicy, LMPolicy, LSTMPolicy, MLPPolicy, Policy, QPolicy, evaluate
from algos.envs.flatten import flatten
from algos.policies import Step
from tests.helpers.errors import refused
from tests.helpers.generated_spaces import Random, action_spaces, observation_spaces
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer

few = settings(derandomize=True, deadline=None, database=None, max_examples=60)
VECTOR, TWO = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)


def as_tensors(observation):
    if isinstance(observation, dict):
        return {name: as_tensors(part) for name, part in observation.items()}
    if isinstance(observation, tuple):
        return tuple(map(as_tensors, observation))
    return torch.as_tensor(observation)


def with_lists(observation):
    """Lists in place of tuples, as JSON has them."""
    if isinstance(observation, dict):
        return {name: with_lists(part) for name, part in observation.items()}
    if isinstance(observation, tuple):
        return [with_lists(part) for part in observation]
    return observation


def check_in(space, action):
    assert space.contains(action) and action.dtype == space.dtype, f"{action!r} is not in {space}"
    assert isinstance(action, np.generic if isinstance(space, spaces.Discrete) else np.ndarray)


@pytest.mark.heavy
@few
@given(observation_spaces, action_spaces, st.sampled_from([MLPPolicy, LSTMPolicy]))
def test_an_action_fits_for_one_observation_and_many(observation_space, action_space, kind):
    policy = kind(observation_space, action_space, hidden=4 if kind is LSTMPolicy else (4,), seed=1)
    env = Random(observation_space, action_space)
    samples = [env.reset(seed=0)[0], *(env.observation_space.sample() for _ in range(2))]
    for observation in samples[:2]:
        for deterministic in (True, False):
            action, _ = policy.predict(observation, deterministic=deterministic)
            check_in(action_space, action)
            env.step(action)

    # A batch, as a vector environment gives it
    batch = concatenate(observation_space, samples, create_empty_array(observation_space, 3))
    actions, _ = policy.predict(batch, deterministic=True)
    assert actions.shape == (3, *action_space.shape) and actions.dtype == action_space.dtype
    if isinstance(action_space, spaces.Box):  # other actions may change by rounding
        for one, observation in zip(actions, samples, strict=True):
            alone, _ = policy.predict(observation, deterministic=True)
            np.testing.assert_allclose(np.float64(alone), np.float64(one), rtol=1e-2, atol=1e-3)

    # As tensors, with lists, and flattened
    for other in (as_tensors(batch), with_lists(batch), flatten(observation_space, batch)):
        np.testing.assert_array_equal(policy.predict(other, deterministic=True)[0], actions)


LIKE_SB3 = {
    "Box": VECTOR,
    "Box of two dimensions": spaces.Box(-1, 1, (2, 3)),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 3]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3)),
}
ACTIONS_LIKE_SB3 = {
    "Discrete": TWO,
    "Box": spaces.Box(0, 1, (2,)),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(3),
}


@pytest.mark.parametrize("chosen", ACTIONS_LIKE_SB3)
@pytest.mark.parametrize("observed", LIKE_SB3)
def test_shapes_are_those_of_stable_baselines3(observed, chosen):
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    observation_space, action_space = LIKE_SB3[observed], ACTIONS_LIKE_SB3[chosen]
    env = Random(observation_space, action_space)
    name = "MultiInputPolicy" if isinstance(observation_space, spaces.Dict) else "MlpPolicy"
    theirs = stable_baselines3.PPO(name, env, n_steps=8, batch_size=8, device="cpu")
    ours = MLPPolicy(observation_space, action_space)
    one = env.reset(seed=0)[0]
    many = concatenate(observation_space, [one, one, one], create_empty_array(observation_space, 3))
    for observation in (one, many):
        expected, no_state = theirs.predict(observation, deterministic=True)
        action, state = ours.predict(observation, deterministic=True)
        assert state is None and no_state is None
        assert action.shape == expected.shape
        assert isinstance(action, (np.ndarray, np.generic))


class Arm(gymnasium.Env):
    """The lowest action, 0, is best; others beyond the bounds are refused."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(0, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is outside"
        return np.zeros(1, np.float32), -float(action[0]), True, False, {}


def test_loaded_actions_are_within_the_bounds(tmp_path):
    agent = PPO(SyncVectorEnv([Arm] * 2), num_steps=4, minibatch_size=4)
    nn.init.constant_(agent.policy.actor[-1].bias, -2.0)  # as learnt: the lower, the better
    loaded = algos.load(agent.save(tmp_path))
    env = Arm()
    for policy in (agent.policy, loaded):
        observation, _ = env.reset()
        assert policy.act(observation[None], deterministic=True).action < -1, "the mean is beyond the bounds"
        action, _ = policy.predict(observation, deterministic=True)
        assert action.tolist() == [0.0]
        env.step(action)


@pytest.mark.parametrize("kind", [MLPPolicy, LSTMPolicy, QPolicy])
def test_a_loop_of_ones_own_plays_as_evaluate_does(kind):
    policy = kind(VECTOR, TWO, seed=3)
    env = gymnasium.make("CartPole-v1")
    expected = evaluate(env, policy, num_episodes=1, deterministic=True, seed=5).returns[0]
    observation, _ = env.reset(seed=5)
    state, total, over = None, 0.0, False
    while not over:
        action, state = policy.predict(observation, state, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    assert total == expected


def test_an_lstms_state_is_cleared_at_episode_starts():
    """As in sb3-contrib: ``predict(obs, state=state, episode_start=starts)``."""
    policy = LSTMPolicy(VECTOR, spaces.Box(-9, 9, (1,)), hidden=4, seed=1)
    nn.init.normal_(policy.actor.weight, generator=torch.Generator().manual_seed(0))
    seen = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    policy.reset()
    expected = [policy.act(seen[t], deterministic=True).action.numpy() for t in range(3)]
    before = policy.memory["state"].clone()

    state, starts = None, np.ones(2, dtype=bool)
    for t in range(3):
        actions, state = policy.predict(seen[t], state=state, episode_start=starts, deterministic=True)
        starts = np.zeros(2, dtype=bool)
        np.testing.assert_allclose(actions, expected[t], atol=1e-6)
    assert all(isinstance(value, np.ndarray) and len(value) == 2 for value in state.values())
    assert torch.equal(policy.memory["state"], before), "the policy's own state stays"

    # The second slot begins anew: it acts as without a state
    anew, _ = policy.predict(seen[1], deterministic=True)
    actions, _ = policy.predict(seen[1], state, np.array([False, True]), deterministic=True)
    assert abs(actions[0] - anew[0]) > 1e-3
    np.testing.assert_allclose(actions[1], anew[1], atol=1e-6)
    with refused(ValueError, "observation has 3 slots, but the state has 2"):
        policy.predict(np.zeros((3, 4), np.float32), state)
    with refused(ValueError, "observation has 3 slots, but the state has 2"):
        policy.predict(np.zeros((3, 4), np.float32), state, np.zeros(3, dtype=bool))


def test_the_noise_of_gsde_is_held_by_its_state():
    policy = GSDEPolicy(VECTOR, spaces.Box(-9, 9, (2,)), sde_sample_freq=3, seed=1)
    observation = np.ones(4, np.float32)
    first, state = policy.predict(observation)
    second, state = policy.predict(observation, state)
    third, _ = policy.predict(observation, state)
    other, _ = policy.predict(observation)
    np.testing.assert_array_equal(np.stack([second, third]), np.stack([first, first]))
    assert not np.array_equal(other, first) and not policy.memory


def test_images_are_read_one_by_one_and_in_batches():
    policy = CNNPolicy(spaces.Box(0, 255, (16, 16, 3), np.uint8), TWO, hidden=8)
    images = np.random.default_rng(0).integers(0, 255, (2, 16, 16, 3), dtype=np.uint8)
    actions, _ = policy.predict(images, deterministic=True)
    assert actions.tolist() == [policy.predict(image, deterministic=True)[0] for image in images]
    assert policy.predict(images.astype(np.int64), deterministic=True)[0].tolist() == actions.tolist()
    with refused(ValueError, "values that uint8 cannot hold"):
        policy.predict(images / 255)


def test_closed_actions_are_not_chosen():
    policy = MLPPolicy(VECTOR, spaces.Discrete(3, start=1))
    observations = np.random.default_rng(0).normal(size=(50, 4))
    for action in (1, 2, 3):
        mask = (np.arange(1, 4) == action).astype(np.int8)
        assert policy.predict(observations[0], action_mask=mask)[0] == action
        actions, _ = policy.predict(observations, action_mask=np.tile(mask, (50, 1)))
        assert actions.tolist() == [action] * 50
    for observation, mask in ((observations[0], [1, 0]), (observations[:2], [1, 0, 0]), (observations[:2], [[1, 0]])):
        with refused(ValueError, "action_mask has shape", "one entry for each action", "Discrete"):
            policy.predict(observation, action_mask=mask)
    with refused(ValueError, "action_mask has shape", "MultiBinary"):
        MLPPolicy(VECTOR, spaces.MultiBinary(2)).predict(observations[0], action_mask=[1, 0])
    with refused(ValueError, "allows no action"):
        policy.predict(observations[0], action_mask=[0, 0, 0])


class Wide(nn.Module, Policy):
    """A policy without `ControlPolicy`: it gets flat observations, as in training."""

    observation_space = spaces.Dict([("b", spaces.Discrete(3)), ("a", spaces.Box(-1, 1, (2,)))])
    action_space = spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def act(self, observation, *, action_mask=None, deterministic=False):
        assert observation.shape[1:] == (5,) and observation.dtype == np.float32
        return Step(5 * torch.from_numpy(observation[:, 3:]), torch.zeros(len(observation)))


def test_a_policy_of_ones_own_predicts_too():
    action, state = Wide().predict(OrderedDict(a=[0.1, -0.9], b=2), deterministic=True)
    assert state is None and action.dtype == np.float64
    assert action.tolist() == pytest.approx([0.5, -1.0])


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (VECTOR, np.zeros(3), [r"shape \(3,\)", r"expected \(4,\), or \('N', 4\)"]),
        (VECTOR, np.zeros((1, 2, 4)), [r"shape \(1, 2, 4\)"]),
        (VECTOR, (np.zeros(4), {}), [r"env.reset\(\)", "observation, info"]),
        (VECTOR, ["a"] * 4, ["array of <U1"]),
        (spaces.Discrete(3), 3, ["value 3", "not in Discrete"]),
        (spaces.Discrete(3), [0, -1], ["value -1", "not in Discrete"]),
        (spaces.Discrete(3, start=5), 4, ["value 4", "not in Discrete"]),
        (spaces.MultiDiscrete([2, 2]), [0, 2], ["value 2", "not in MultiDiscrete"]),
        (spaces.Discrete(3), 0.5, ["values that int64 cannot hold"]),
        (spaces.Dict(a=VECTOR, b=TWO), {"a": np.zeros(4)}, ["expected a dictionary with the parts a, b"]),
        (spaces.Dict(a=VECTOR, b=TWO), np.zeros(4), ["expected a dictionary with the parts a, b"]),
        (spaces.Dict(a=VECTOR, b=TWO), {"a": np.zeros((2, 4)), "b": 1}, ["different numbers", "'b'.: one"]),
        (spaces.Tuple([VECTOR, TWO]), (np.zeros(4),), ["expected a tuple of 2 parts"]),
        (VECTOR, [0, np.nan, 0, 0], ["observation has NaN"]),
        (VECTOR, torch.full((2, 4), torch.nan), ["observation has NaN"]),
        (spaces.Dict(a=VECTOR, b=TWO), {"a": np.full(4, np.nan), "b": 1}, [r"observation\['a'\] has NaN"]),
        (TWO, np.float32([0, np.nan]), ["observation has NaN"]),
    ],
)
def test_observations_that_do_not_fit_are_refused(space, observation, words):
    with refused(ValueError, *words):
        MLPPolicy(space, TWO).predict(observation)


def test_a_language_model_points_at_generate():
    with refused(TypeError, "LMPolicy has no observation_space", r"generate\(prompts\)"):
        LMPolicy(make_gpt2(), make_tokenizer(WORDS)).predict("a b")
