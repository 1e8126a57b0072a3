"""An agent that knows nothing of text learns through the plain Gymnasium interface."""

import gymnasium
import numpy as np
import pytest
from conftest import WORDS, make_gpt2, make_tokenizer

import textenv  # noqa: F401 (registers the environments)

stable_baselines3 = pytest.importorskip("stable_baselines3", reason="install the extra: pip install '.[sb3]'")


@pytest.fixture
def model_folder(tmp_path):
    """A local model with nine tokens, one of which is the full stop."""
    make_gpt2().save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    return str(tmp_path)


def mean_return(model, env, episodes=100):
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1000 + episode)
        total, done = 0.0, False
        while not done:
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(int(action))
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


@pytest.mark.filterwarnings("ignore::UserWarning:stable_baselines3")
def test_ppo_of_stable_baselines3_learns_periods_unmodified(model_folder):
    # Its feature extractor wants at least one dimension, which Gymnasium's own wrapper gives the length.
    env = gymnasium.wrappers.FlattenObservation(
        gymnasium.make("textenv/Periods-v0", model=model_folder, k=3, max_new_tokens=3, max_prompt_tokens=32)
    )
    model = stable_baselines3.PPO(
        "MlpPolicy", env, n_steps=256, batch_size=64, n_epochs=10, learning_rate=3e-3, gamma=1.0, seed=0,
        device="cpu",
    )  # fmt: skip
    before = mean_return(model, env)
    model.learn(4096)
    assert before < 0.5
    assert mean_return(model, env) > 0.95
