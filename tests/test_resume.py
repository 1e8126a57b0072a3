"""A training that stops and goes on in a new process is the one that never stopped, to the last bit."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import WORDS, make_gpt2, make_tokenizer

import textenv  # noqa: F401 (registers the environments)
from algos import (
    A2C,
    DQN,
    GRPO,
    PPO,
    TRPO,
    A2CConfig,
    DQNConfig,
    GRPOConfig,
    LMPolicy,
    LSTMPolicy,
    MLPPolicy,
    PPOConfig,
    QPolicy,
    TRPOConfig,
)
from algos.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from algos.cli import main
from algos.env_state import env_state, set_env_state
from algos.environments import make_vector_environment
from algos.interruption import Interrupted
from algos.state import from_json, to_json
from algos.text_stream import TextLoss
from textenv import KLPenalty, TextVectorEnv
from textenv.kl_coefficients import AdaptiveCoefficient

TIMES = ("time/",)


def control(env_id, **options):
    return gym.make_vec(env_id, num_envs=4, **options)


def mlp(env, **options):
    return MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 8), **options)


def ppo_cartpole():
    env = control("CartPole-v1")
    config = PPOConfig(steps=16, minibatch_size=32, normalize_rewards=True, final_learning_rate=0.0)
    return PPO(env, mlp(env, normalize_observations=True), config)


def ppo_sync():
    env = control("CartPole-v1", vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"})
    return PPO(env, mlp(env), PPOConfig(steps=16, minibatch_size=32))


def ppo_wrapped():
    """Gymnasium's own normalisers keep their statistics in objects."""
    env = gym.wrappers.vector.NormalizeReward(gym.wrappers.vector.NormalizeObservation(control("CartPole-v1")))
    return PPO(env, mlp(env), PPOConfig(steps=16, minibatch_size=32))


def ppo_sde():
    env = control("Pendulum-v1")
    return PPO(env, mlp(env, sde_sample_freq=5), PPOConfig(steps=16, minibatch_size=32))


def ppo_lstm():
    env = control("CartPole-v1")
    policy = LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=8)
    return PPO(env, policy, PPOConfig(steps=16, minibatch_size=2))


def a2c():
    env = control("Acrobot-v1")
    return A2C(env, mlp(env), A2CConfig(steps=16))


def trpo():
    env = control("CartPole-v1")
    return TRPO(env, mlp(env), TRPOConfig(steps=16, critic_epochs=2, minibatch_size=32))


def dqn():
    env = control("CartPole-v1")
    policy = QPolicy(env.single_observation_space, env.single_action_space, hidden=(8,))
    return DQN(env, policy, DQNConfig(steps=16, buffer_size=150, learning_starts=60, batch_size=16, target_every=10))


def grpo_control():
    env = control("CartPole-v1", vectorization_mode="sync")
    return GRPO(env, mlp(env), GRPOConfig(episodes=8, group_size=4))


def text(algorithm, config, **options):
    tokenizer = make_tokenizer(WORDS)
    env = TextVectorEnv(
        prompts=["a b", "c", "d a b", "b b", "a d"], reward=lambda prompts, completions, **columns: [
            float(text.count("good")) for text in completions
        ], tokenizer=tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=5,
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(), tokenizer)
    penalty = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=2.0))
    return algorithm(env, policy, config, penalty=penalty, **options)


def ppo_text():
    stream = TextLoss(["a b", "c d good", "bad a b", "d"], coefficient=0.1, batch_size=2, max_length=4)
    config = PPOConfig(steps=None, episodes=8, minibatch_size=4, bootstrap_truncated=False, warmup=0.3)
    return text(PPO, config, auxiliary=stream)


def grpo_text():
    return text(GRPO, GRPOConfig(episodes=8, group_size=4))


MAKERS = (
    ppo_cartpole, ppo_sync, ppo_wrapped, ppo_sde, ppo_lstm, a2c, trpo, dqn, grpo_control, ppo_text, grpo_text,
)  # fmt: skip
AGENTS = {make.__name__: make for make in MAKERS}


def train(name, folder, *, iterations, total, resume=None):
    """The agent's weights and the log after so many iterations of a training of ``total`` steps."""
    torch.set_num_threads(1)
    agent = AGENTS[name]()
    agent.learn(
        total, run_dir=folder, checkpoint_every=1, resume=resume,
        on_iteration=lambda metrics: metrics["iteration"] >= iterations,
    )  # fmt: skip
    torch.save(agent.policy.state_dict(), folder / "weights.pt")


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: x for key, x in line.items() if not key.startswith(TIMES)} for line in lines]


ITERATIONS, TOTAL = 3, 10**4


def go_on(home):
    """What the new process does."""
    for name in AGENTS:
        train(name, home / name, iterations=2 * ITERATIONS, total=TOTAL, resume=home / name)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder for each agent, whose training was stopped halfway and gone on with in another process."""
    home = tmp_path_factory.mktemp("interrupted")
    for name in AGENTS:
        train(name, home / name, iterations=ITERATIONS, total=TOTAL)
    process = multiprocessing.get_context("spawn").Process(target=go_on, args=(home,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return home


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_twice_k_steps_are_k_a_new_process_and_k(name, interrupted, tmp_path):
    """Weights, and every logged value but the time; optimiser, schedules and random numbers are what they come from."""
    train(name, tmp_path, iterations=2 * ITERATIONS, total=TOTAL)
    found, expected = logged(interrupted / name), logged(tmp_path)
    assert len(expected) == 2 * ITERATIONS and found == expected
    one, other = (torch.load(folder / "weights.pt") for folder in (interrupted / name, tmp_path))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "MountainCar-v0", "Pendulum-v1"])
def test_an_environment_goes_on_from_its_state(env_id):
    """Two environments, one put into the state of the other in mid-episode, give the same ever after."""
    one, other = (make_vector_environment(env_id, 2, seed_each=True) for _ in range(2))
    one.reset(seed=3)
    one.action_space.seed(0)
    actions = [one.action_space.sample() for _ in range(60)]
    for action in actions[:7]:
        one.step(action)
    tensors = {}
    saved = json.loads(json.dumps(to_json(env_state(one), tensors)))
    set_env_state(other, from_json(saved, tensors))
    for action in actions[7:]:
        for x, y in zip(one.step(action)[:4], other.step(action)[:4], strict=True):
            assert np.array_equal(x, y)


# --- what is damaged, missing or full --------------------------------------------------------------------------------


def short_run(folder, **options):
    agent = ppo_sync()
    return agent.learn(64 * 6, run_dir=folder, checkpoint_every=64, **options)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "state.safetensors").unlink(), "state.safetensors is missing"),
        (lambda folder: flip(folder / "state.safetensors"), "state.safetensors is not what was written"),
        (lambda folder: flip(folder / "state.json"), "state.json is not what was written"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda folder: newer(folder / "manifest.json"), "has format 99"),
    ],
    ids=["missing", "tensors", "json", "manifest", "version"],
)
def test_a_damaged_checkpoint_says_what_is_wrong_and_offers_the_one_before(damage, said, tmp_path):
    short_run(tmp_path)
    older, newest = checkpoints(tmp_path)
    damage(newest)
    with pytest.raises(ValueError, match=said) as caught:
        ppo_sync().learn(64 * 8, run_dir=tmp_path, resume=tmp_path)
    assert f"--resume {older}" in str(caught.value)
    history = ppo_sync().learn(64 * 8, run_dir=tmp_path, resume=older)
    assert [metrics["iteration"] for metrics in history] == list(range(1, 9))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newer(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_which_it_is(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, {"a": 1}, steps=10)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_checkpoint(tmp_path, {"a": 2}, steps=20)
    assert str(folder) in caught.value.__notes__[0]
    assert checkpoints(tmp_path) == [folder] and read_checkpoint(tmp_path) == {"a": 1}
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [folder.name]


def test_a_run_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        short_run(tmp_path / "file" / "run")


def test_two_checkpoints_are_kept(tmp_path):
    short_run(tmp_path)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-000000000320", "step-000000000384"]
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        read_checkpoint(tmp_path / "policy")
    with pytest.raises(FileNotFoundError, match="in this run are: step-000000000320, step-000000000384"):
        read_checkpoint(tmp_path / "checkpoints" / "step-000000000001")


def test_another_training_in_the_same_folder_is_the_one_that_goes_on(tmp_path):
    """Checkpoints of more steps, of a training that was given up, do not stand in its way."""
    short_run(tmp_path)
    older, newest = checkpoints(tmp_path)
    flip(newest / "state.json")
    (tmp_path / "checkpoints" / ".writing").mkdir()  # a kill has left it
    ppo_sync().learn(64 * 2, run_dir=tmp_path, checkpoint_every=64)
    assert read_checkpoint(tmp_path)["steps"] == 128 and not older.exists() and not newest.exists()
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000000000064", "step-000000000128"]


def test_a_wrapper_that_keeps_what_cannot_be_saved_is_reset_and_named(tmp_path, caplog):
    def make():
        agent = ppo_wrapped()
        agent.env.secret = object()
        return agent

    make().learn(64, run_dir=tmp_path, checkpoint_every=64)
    assert "NormalizeReward cannot be saved in mid-episode: its secret is a object" in caplog.text


def test_an_environment_that_cannot_be_saved_is_reset_and_said_so(tmp_path, caplog):
    class Foreign(gym.Wrapper):
        pass

    def make():
        env = gym.vector.SyncVectorEnv([lambda: Foreign(gym.make("CartPole-v1"))] * 4)
        return PPO(env, mlp(env), PPOConfig(steps=16, minibatch_size=32))

    make().learn(64 * 2, run_dir=tmp_path, checkpoint_every=64)
    assert caplog.text.count("Foreign cannot be saved in mid-episode") == 1
    history = make().learn(64 * 4, run_dir=tmp_path, resume=tmp_path)
    assert [metrics["iteration"] for metrics in history] == list(range(1, len(history) + 1)) and len(history) > 3


def test_another_agent_policy_or_environment_is_refused(tmp_path):
    short_run(tmp_path)
    with pytest.raises(ValueError, match="a training by PPO, this agent is A2C"):
        a2c().learn(1, resume=tmp_path)
    with pytest.raises(ValueError, match="make it as the run made it"):
        ppo_cartpole().learn(1, resume=tmp_path)
    env = ppo_sync().env
    wide = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 9))
    with pytest.raises(ValueError, match="the policy is not the one that was saved"):
        PPO(env, wide, PPOConfig(steps=16, minibatch_size=32)).learn(1, resume=tmp_path)


@pytest.mark.parametrize("options", [dict(checkpoint_every=0), dict(checkpoint_every=10, run_dir=None)])
def test_checkpoints_need_an_interval_and_a_folder(options, tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every"):
        ppo_sync().learn(64, **({"run_dir": tmp_path} | options))


# --- signals and kills -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_finishes_the_iteration_and_writes_a_checkpoint(name, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def ask(metrics):
        if metrics["iteration"] == 2:
            os.kill(os.getpid(), getattr(signal, name))

    with pytest.raises(Interrupted, match=f"stopped by {name} after 128 steps") as caught:
        short_run(tmp_path, on_iteration=ask)
    assert caught.value.status == 128 + getattr(signal, name)
    assert len(logged(tmp_path)) == 2 and read_checkpoint(tmp_path)["steps"] == 128
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert len(short_run(tmp_path, resume=tmp_path)) == 6


TRAIN = ["train", "CartPole-v1", "--config.steps", "16", "--num-envs", "4", "--checkpoint-every", "128",
         "--episodes", "1", "--json"]  # fmt: skip


def killed_and_resumed(tmp_path, kills):
    """Kill a training at random moments, its writing of checkpoints included; returns steps after each start."""
    rng, found = np.random.default_rng(0), []
    run = tmp_path / "run"
    command = [sys.executable, "-m", "algos", *TRAIN, "--total-steps", "100000000", "--run-dir", str(run)]
    for _ in range(kills):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            limit, before = time.time() + 120, found[-1] if found else 0
            while newest(run) <= before and time.time() < limit and process.poll() is None:
                time.sleep(0.02)
            assert process.poll() is None and newest(run) > before
            time.sleep(rng.uniform(0, 0.5))
            process.send_signal(signal.SIGKILL)
        reached = last_step(run)
        saved = read_checkpoint(run)["steps"]
        assert reached - saved < 128 + 2 * 64  # the interval, and the iteration under way
        found.append(saved)
        command = [sys.executable, "-m", "algos", "train", "--resume", str(run), "--json"]
    return found


def newest(run):
    """Steps of the newest checkpoint, 0 without one."""
    return max((int(folder.name.removeprefix("step-")) for folder in checkpoints(run)), default=0)


def last_step(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["steps"] if whole else 0


def test_three_kills_lose_at_most_the_interval(tmp_path):
    found = killed_and_resumed(tmp_path, 3)
    assert found == sorted(found) and len(set(found)) == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_at_most_the_interval(tmp_path):
    found = killed_and_resumed(tmp_path, 50)
    print(f"50 kills: {found[-1]} steps saved, each start went on from its checkpoint")
    assert found == sorted(found)


def test_a_run_goes_on_by_its_folder_alone(tmp_path, capsys):
    run = str(tmp_path / "run")
    main([*TRAIN, "--total-steps", "256", "--run-dir", run, "--seed", "3"])
    main(["train", "--resume", run, "--total-steps", "512"])
    out = capsys.readouterr().out.strip().splitlines()
    steps = [json.loads(line)["steps"] for line in out]
    assert 256 <= steps[0] < 512 <= steps[1] and last_step(tmp_path / "run") == steps[1]
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", str(tmp_path)])
    assert stop.value.code == 2 and "holds no run that can go on" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["train", "CartPole-v1", "--resume", run])
    assert stop.value.code == 2 and "leave CartPole-v1 out" in capsys.readouterr().err
