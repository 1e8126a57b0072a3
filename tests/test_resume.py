"""A training that stops and goes on in a new process is the one that never stopped, to the last bit."""

import json
import multiprocessing

import gymnasium as gym
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


def text(algorithm, config):
    tokenizer = make_tokenizer(WORDS)
    env = TextVectorEnv(
        prompts=["a b", "c", "d a b", "b b", "a d"], reward=lambda prompts, completions, **columns: [
            float(text.count("good")) for text in completions
        ], tokenizer=tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=5,
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(), tokenizer)
    penalty = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=2.0))
    return algorithm(env, policy, config, penalty=penalty)


def ppo_text():
    return text(PPO, PPOConfig(steps=None, episodes=8, minibatch_size=4, bootstrap_truncated=False, warmup=0.3))


def grpo_text():
    return text(GRPO, GRPOConfig(episodes=8, group_size=4))


AGENTS = {
    make.__name__: make
    for make in (ppo_cartpole, ppo_sync, ppo_sde, ppo_lstm, a2c, trpo, dqn, grpo_control, ppo_text, grpo_text)
}


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
