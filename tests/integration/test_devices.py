"""Devices: everything follows the policy. Without a GPU, on torch's meta device and on one written in Python."""

import os

import pytest
import torch

import algos
from algos.policies.mlp import MLPPolicy
from tests.helpers import device_runs, forks
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import cartpole
from textenv.device import find_device

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
PLACE = os.environ.get("TEXTENV_DEVICE", ACCELERATOR)
"""Device that `make gpu` names, or that there is."""
NO_ACCELERATOR = pytest.mark.skipif(ACCELERATOR is not None, reason="needs a machine without CUDA and MPS")


def run(kind, *names):
    """Runs of `tests.helpers.device_runs` in a process of their own."""
    done = forks.run(device_runs.main, kind, *names, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    assert done.stdout.count("passed") >= max(len(names), 1), done.stdout


@pytest.mark.heavy
def test_a_cpu_training_ignores_the_default_device():
    run("meta", "ppo", "text")


@pytest.mark.heavy
def test_no_tensor_stays_on_the_cpu():
    run("second", "ppo", "several devices")


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("meta", marks=pytest.mark.slow), "second"])
def test_all_parts_run_on_one_device(kind):
    run(kind)


@pytest.mark.skipif(PLACE is None, reason="needs CUDA or MPS, or the device in TEXTENV_DEVICE (make gpu DEVICE=cpu)")
def test_all_parts_run_on_the_accelerator():
    run(str(PLACE))


@NO_ACCELERATOR
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "tpu", "cpu:1", "", "CPU", 3, "meta"])
def test_an_absent_device_is_refused_with_a_list(name):
    with pytest.raises(ValueError, match=r"^device is .*, expected cpu \(of this machine\) or auto$"):
        find_device(name)


def test_a_wrong_device_is_refused_before_loading(tmp_path):
    """The folder has no model, so loading would fail with another message."""
    env = cartpole()
    for call in (
        lambda: algos.LMPolicy.load(tmp_path / "none", device="gpu"),
        lambda: algos.load(tmp_path / "none", device="gpu"),
        lambda: algos.PPO(env, device="gpu"),
        lambda: algos.DQN(env, device="gpu"),
        lambda: algos.Recipe(env="CartPole-v1", device="gpu").build(1, env=env),
    ):
        with pytest.raises(ValueError, match="device is 'gpu'"):
            call()


@NO_ACCELERATOR
def test_auto_is_the_cpu_where_there_is_nothing_else():
    assert algos.PPO(cartpole(), device="auto").policy.device == torch.device("cpu")


def test_no_device_moves_nothing():
    env = cartpole()
    policy = MLPPolicy(env.single_observation_space, env.single_action_space).to("meta")
    assert algos.PPO(env, policy).policy.device == torch.device("meta")


def test_the_generator_of_a_model_stays_on_the_cpu():
    """So a checkpoint of one device resumes on another."""
    policy = algos.LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=3).to("meta")
    assert policy.generator.device == torch.device("cpu")
