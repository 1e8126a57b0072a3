"""Agents that know nothing of text learn through the plain interface: Stable-Baselines3, CleanRL's manner, torchrl."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical

import textenv  # noqa: F401 (registers the environments)
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer

PERIODS = "tests/Periods-v0"


@pytest.fixture
def model_folder(tmp_path):
    """A local model with nine tokens, one of which is the full stop."""
    make_gpt2().save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def periods(model_folder):
    """An id, and nothing else: three full stops of three tokens earn 1."""
    entry = {
        "entry_point": "textenv.registration:make_env",
        "vector_entry_point": "textenv.registration:make_vector_env",
    }
    arguments = {"task": "Periods", "model": model_folder, "k": 3, "max_new_tokens": 3, "max_prompt_tokens": 32}
    gymnasium.register(PERIODS, **entry, kwargs=arguments)
    yield PERIODS
    gymnasium.registry.pop(PERIODS)


def mean_return(act, env, episodes=100):
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1000 + episode)
        total, done = 0.0, False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(int(act(observation)))
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


@pytest.mark.filterwarnings("ignore::UserWarning:stable_baselines3")
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("MultiInputPolicy", marks=pytest.mark.slow),
        pytest.param("MlpPolicy", marks=pytest.mark.long),
    ],
)
def test_stable_baselines3_learns_periods(policy, periods):
    """By id alone; its perceptron reads what Gymnasium's own wrapper flattens."""
    stable_baselines3 = pytest.importorskip("stable_baselines3", reason="install the extra: pip install '.[sb3]'")
    env = gymnasium.make(periods)
    env = env if policy == "MultiInputPolicy" else gymnasium.wrappers.FlattenObservation(env)
    model = stable_baselines3.PPO(
        policy, periods if policy == "MultiInputPolicy" else env, n_steps=256, batch_size=64, n_epochs=10,
        learning_rate=3e-3, gamma=1.0, seed=0, device="cpu",
    )  # fmt: skip

    def act(observation):
        return model.predict(observation, deterministic=True)[0]

    before = mean_return(act, env)
    model.learn(4096)
    assert before < 0.5
    assert mean_return(act, env) > 0.95


@pytest.mark.filterwarnings("ignore::UserWarning:stable_baselines3")
def test_a_ready_made_task_is_taken_by_its_id():
    stable_baselines3 = pytest.importorskip("stable_baselines3", reason="install the extra: pip install '.[sb3]'")
    model = stable_baselines3.PPO("MultiInputPolicy", "textenv/Copy-v0", n_steps=32, batch_size=32, n_epochs=1)
    model.learn(32)
    assert model.num_timesteps == 32


@pytest.mark.heavy
def test_a_loop_in_cleanrls_manner_learns_periods(periods):
    """A vector environment, arrays of steps, GAE and clipped PPO in one page; nothing of `algos`."""
    torch.manual_seed(1)
    envs = gymnasium.make_vec(periods, num_envs=8, vectorization_mode="vector_entry_point")
    n, width = envs.single_action_space.n, envs.single_observation_space["tokens"].shape[0]
    body = nn.Sequential(nn.Linear(width + 1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    actor, critic = nn.Linear(64, n), nn.Linear(64, 1)
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3, eps=1e-5)

    def flat(observation):
        return torch.tensor(np.concatenate([observation["tokens"], observation["length"]], axis=1), dtype=torch.float32)

    def act(observation):
        return actor(body(flat({name: x[None] for name, x in observation.items()}))).argmax().item()

    single = gymnasium.make(periods)
    before, steps = mean_return(act, single), 32
    state, ended = flat(envs.reset(seed=1)[0]), torch.zeros(8)
    for _ in range(16):
        rows = []
        for _ in range(steps):
            with torch.no_grad():
                hidden = body(state)
                chosen = Categorical(logits=actor(hidden))
                action = chosen.sample()
                value = critic(hidden)[:, 0]
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            rows.append((state, action, chosen.log_prob(action), value, torch.tensor(reward), ended))
            state, ended = flat(observation), torch.tensor(terminated | truncated, dtype=torch.float32)
        states, actions, log_probs, values, rewards, ends = (torch.stack(column) for column in zip(*rows, strict=True))
        with torch.no_grad():
            following = torch.cat([values[1:], critic(body(state))[:, 0][None]])
        advantages, last = torch.zeros_like(rewards), torch.zeros(8)
        for t in reversed(range(steps)):
            going = 1 - (ends[t + 1] if t + 1 < steps else ended)
            last = rewards[t] + following[t] * going - values[t] + 0.95 * going * last
            advantages[t] = last
        returns = advantages + values
        data = [x.flatten(0, 1) for x in (states, actions, log_probs, advantages, returns, 1 - ends)]
        for _ in range(10):
            for index in torch.randperm(8 * steps).split(64):
                s, a, old, advantage, target, real = (x[index] for x in data)
                hidden = body(s)
                chosen = Categorical(logits=actor(hidden))
                ratio = (chosen.log_prob(a) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = (real * (0.5 * (critic(hidden)[:, 0] - target).square() - gain)).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
    assert before < 0.5
    assert mean_return(act, single) > 0.95
