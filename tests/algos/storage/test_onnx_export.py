"""Exported policies: onnxruntime computes what `act` does, from the environment's observations to its actions."""

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import (
    PPO,
    CNNPolicy,
    GSDEPolicy,
    LMPolicy,
    LSTMPolicy,
    MLPPolicy,
    MultiInputPolicy,
    QPolicy,
    SACGSDEPolicy,
    SACPolicy,
    TD3Policy,
    WordsPolicy,
)
from algos.cli import main
from algos.collection import collect
from algos.envs.flatten import flatten
from algos.policies import ControlPolicy
from tests.helpers.errors import refused
from tests.helpers.generated_spaces import Random
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.packages import lazy_import
from textenv import LanguageModel

onnxruntime = lazy_import("onnxruntime", reason="install the extra: pip install '.[onnx]'")
lazy_import("onnxscript", reason="install the extra: pip install '.[onnx]'")

pytestmark = pytest.mark.bits  # torch's exporter does not trace with the plugin of `make rounding`
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
VECTOR = spaces.Box(-2, 2, (3,), np.float32)
BOX = spaces.Box(np.array([-0.5, 0.0], np.float32), np.array([0.5, np.inf], np.float32))
BOUNDED = spaces.Box(np.array([[-0.5, 0.0]], np.float32), np.array([[0.5, 3.0]], np.float32))
FOUR = spaces.Discrete(4, start=2)
CAMERA = spaces.Box(0, 255, (9, 8, 3), np.uint8)
NUMBERS = spaces.Dict(
    {
        "place": spaces.Discrete(3, start=-1),
        "flags": spaces.MultiBinary(2),
        "hands": spaces.Tuple([spaces.MultiDiscrete([2, 3], start=[1, 0]), spaces.Box(-1, 1, (2, 2), np.float64)]),
    }
)
CAMERA_AND_NUMBERS = spaces.Dict({"camera": CAMERA, "counts": spaces.Box(0, 9, (2,), np.uint16), "speed": VECTOR})

CASES = {
    "mlp": (MLPPolicy, VECTOR, BOX, {"normalize_observations": True}),
    "mlp of parts": (MLPPolicy, NUMBERS, spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [2, 3]]), {}),
    "mlp, bits": (MLPPolicy, spaces.Discrete(5, start=3), spaces.MultiBinary(3), {}),
    "cnn": (CNNPolicy, CAMERA, FOUR, {"hidden": 8}),
    "cnn, frames": (CNNPolicy, spaces.Box(0, 255, (2, 36, 40), np.uint8), spaces.Box(-1, 1, (), np.float64), {}),
    "images and numbers": (MultiInputPolicy, CAMERA_AND_NUMBERS, BOX, {"normalize_observations": True}),
    "lstm": (LSTMPolicy, VECTOR, FOUR, {"normalize_observations": True, "hidden": 8}),
    "lstm of images": (LSTMPolicy, CAMERA_AND_NUMBERS, spaces.Box(-1, 1, (2, 1), np.float16), {"hidden": 8}),
    "gsde": (GSDEPolicy, VECTOR, BOX, {"normalize_observations": True}),
    "q": (QPolicy, VECTOR, spaces.Discrete(3, dtype=np.int32), {}),
    "sac": (SACPolicy, NUMBERS, BOUNDED, {"hidden": (8,)}),
    "sac, gsde": (SACGSDEPolicy, VECTOR, BOUNDED, {"hidden": (8,)}),
    "td3": (TD3Policy, VECTOR, BOUNDED, {"hidden": (8,)}),
}


def feeds(space, batch, name="observation"):
    """Inputs by name, from a batch of an environment's observations."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        names = list(space) if isinstance(space, spaces.Dict) else range(len(space))
        parts = [feeds(space[key], batch[key], f"{name}/{key}") for key in names]
        return {key: value for part in parts for key, value in part.items()}
    batch = np.asarray(batch)
    return {name: batch.astype(np.float32) if batch.dtype == np.uint16 else batch}


def batch_of(space, count):
    samples = [space.sample() for _ in range(count)]
    return gym.vector.utils.concatenate(space, samples, gym.vector.utils.create_empty_array(space, count))


def decisive(policy, observation_space):
    """Initial actors hardly depend on the observation, and a normalizer has seen nothing.

    The noise of a weight falls with the number of its layer's inputs, so that no output is a sum of large numbers that
    cancel out: these would differ by their rounding.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            deviation = 0.3
            if parameter.ndim > 1:
                deviation = parameter[0].numel() ** -0.5
            parameter.add_(deviation * torch.randn(parameter.shape, generator=generator))
    flat = torch.from_numpy(flatten(observation_space, batch_of(observation_space, 50)))
    policy.update_normalizer({"observation": flat, "mask": torch.ones(50, dtype=torch.bool)})
    return policy


def run(session, names, inputs):
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_acts_as_the_policy(case, tmp_path):
    """Actions as `predict` gives them, by the path of `act`; distributions and values as the updates see them."""
    kind, observation_space, action_space, arguments = CASES[case]
    observation_space.seed(1)
    policy = decisive(kind(observation_space, action_space, seed=1, **arguments), observation_space)
    path = policy.export(tmp_path / "policy.onnx", all_outputs=True)
    assert [file.name for file in tmp_path.iterdir()] == ["policy.onnx"]
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    assert {entry.shape[0] for entry in (*session.get_inputs(), *session.get_outputs())} == {"N"}

    # Several steps of an episode, in one slot and in five; a recurrent policy is given its state
    for slots in (1, 5):
        state, recurrent = None, {}
        if kind is LSTMPolicy:
            recurrent = {"state": np.zeros((slots, 2, 8), np.float32)}
        for step in range(3 if kind is LSTMPolicy else 1):
            batch = batch_of(observation_space, slots)
            outputs = run(session, names, feeds(observation_space, batch) | recurrent)
            expected, state = policy.predict(batch, state, deterministic=True)
            assert outputs["action"].dtype == action_space.dtype and outputs["action"].shape == expected.shape
            if isinstance(action_space, spaces.Box):
                np.testing.assert_allclose(outputs["action"], expected, **CLOSE)
            else:
                np.testing.assert_array_equal(outputs["action"], expected)
            assert all(np.asarray(action) in action_space for action in outputs["action"])
            if kind is LSTMPolicy:
                np.testing.assert_allclose(outputs["next_state"], state["state"], **CLOSE)
                recurrent = {"state": outputs["next_state"]}
                assert step == 0 or np.abs(recurrent["state"]).max() > 0.1

    # What the actions are drawn from, and values
    env = SyncVectorEnv([lambda: Random(observation_space, action_space)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    rollout = collect(env, policy, num_steps=2, seed=0)
    batch, _ = env.reset(seed=0)
    inputs = feeds(observation_space, batch)
    if kind is LSTMPolicy:
        inputs["state"] = np.zeros((2, 2, 8), np.float32)
    outputs = run(session, names, inputs)
    np.testing.assert_allclose(outputs["value"], policy.evaluate(rollout).value[:, 0].detach(), **CLOSE)
    output = policy.output(rollout)[:, 0].detach()
    if kind is QPolicy:
        q_values = policy.action_values(rollout["observation"][:, 0]).detach()
        np.testing.assert_allclose(outputs["q_values"], q_values, **CLOSE)
    elif kind is TD3Policy:
        np.testing.assert_allclose(outputs["mean"], outputs["action"], **CLOSE)
    elif issubclass(kind, SACPolicy):
        mean, log_std = policy.distribution.parametrize(output)
        np.testing.assert_allclose(outputs["mean"], mean.reshape(2, *action_space.shape), **CLOSE)
        np.testing.assert_allclose(outputs["log_std"], log_std.detach().reshape(2, *action_space.shape), **CLOSE)
    elif isinstance(action_space, spaces.Box):
        mean, log_std = policy.distribution.parametrize(output)
        np.testing.assert_allclose(outputs["mean"], mean.reshape(2, *action_space.shape), **CLOSE)
        expected = log_std.detach().expand(mean.shape).reshape(2, *action_space.shape)
        np.testing.assert_allclose(outputs["log_std"], expected, **CLOSE)
    else:
        np.testing.assert_allclose(outputs["logits"], output, **CLOSE)


@pytest.mark.heavy
def test_the_policy_is_as_before_and_alone_in_the_file(tmp_path, monkeypatch):
    """The exporter works on a copy; without all_outputs there is the action alone, also by the command line."""
    monkeypatch.chdir(tmp_path)
    env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    policy = LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=8)
    agent = PPO(env, policy, num_steps=8, minibatch_size=2, num_epochs=1)
    agent.learn(16, run_dir="run")
    observation, _ = env.reset(seed=0)
    before = policy.act(observation, deterministic=True)
    main(["export", "run", "policy.onnx", "--json"])
    session = onnxruntime.InferenceSession("policy.onnx")
    assert [output.name for output in session.get_outputs()] == ["action", "next_state"]
    assert [tensor.shape for tensor in session.get_inputs()] == [["N", 4], ["N", 2, 8]]
    actions, _ = session.run(None, {"observation": observation, "state": np.zeros((2, 2, 8), np.float32)})
    np.testing.assert_array_equal(actions, before.action)
    exported = Path("policy.onnx").read_bytes()
    assert agent.export("policy.onnx") == Path("policy.onnx")
    assert Path("policy.onnx").read_bytes() == exported
    agent.learn(32)  # the LSTM's weights are still parameters


def test_language_models_and_unknown_policies_are_refused(tmp_path):
    env = gym.make_vec("FrozenLake-v1", num_envs=2, vectorization_mode="sync")
    lm = LanguageModel(make_gpt2(), make_tokenizer(WORDS))
    words = WordsPolicy.of(env, lm, describe=lambda _: WORDS[0], actions=WORDS[:4])
    for policy in (LMPolicy(make_gpt2(), make_tokenizer(WORDS)), words):
        with refused(TypeError, type(policy).__name__, "ONNX", "MLPPolicy", "transformers"):
            policy.export(tmp_path / "policy.onnx")

    class Own(ControlPolicy):
        def __init__(self, observation_space, action_space):
            super().__init__(observation_space, action_space, normalize_observations=False, seed=0)

    with refused(NotImplementedError, "Own.forward is missing"):
        Own(VECTOR, BOX).export(tmp_path / "policy.onnx")
    with refused(FileNotFoundError, "missing"):
        MLPPolicy(VECTOR, BOX).export(tmp_path / "missing" / "policy.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_a_file_is_used_without_torch(tmp_path):
    MLPPolicy(VECTOR, BOX).export(tmp_path / "policy.onnx")
    program = (
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession('policy.onnx')\n"
        "print(session.run(['action'], {'observation': numpy.zeros((3, 3), numpy.float32)})[0].shape)\n"
        "assert not {'torch', 'gymnasium', 'algos'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "(3, 2)\n"
