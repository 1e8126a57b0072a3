"""Saving and loading of language models, and of agents that earlier versions saved."""

import copy
import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import algos
from algos import PPO, LMPolicy, MultiInputPolicy, PPOConfig, collect
from algos.cli import main
from algos.make import make_vector_environment
from tests.helpers.generated_spaces import Random
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from textenv import TextVectorEnv


@pytest.mark.heavy
@pytest.mark.parametrize("make_model", [make_gpt2, make_llama])
def test_a_saved_lm_is_a_transformers_folder(tmp_path, make_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = LMPolicy(make_model(), make_tokenizer(WORDS), temperature=0.7)
    env = TextVectorEnv(
        prompts=["a b"], reward=lambda prompts, **_: [1.0] * len(prompts), tokenizer=policy.lm.tokenizer, num_envs=4
    )
    agent = PPO(env, policy, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, learning_rate=1e-3))
    agent.learn(10)
    agent.save(tmp_path)
    loaded = algos.load(tmp_path)
    assert loaded.temperature == 0.7
    rollout = algos.collect(env, policy, num_episodes=4)
    for one, two in zip(policy.evaluate(rollout), loaded.evaluate(rollout), strict=True):
        assert torch.equal(one, two)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), policy.lm.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").get_vocab() == policy.lm.tokenizer.get_vocab()


def test_a_bfloat16_checkpoint_is_trained_in_float32(tmp_path):
    make_gpt2().to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    assert LMPolicy.load(tmp_path).lm.model.dtype is torch.float32
    assert LMPolicy.load(tmp_path, dtype=torch.bfloat16).lm.model.dtype is torch.bfloat16


@pytest.mark.heavy
def test_train_on_text_from_a_local_folder(tmp_path, capsys):
    """An unknown model of the user's own: folder in, folder out, KL and score in the JSON."""
    model = tmp_path / "model"
    make_gpt2().save_pretrained(model)
    make_tokenizer(WORDS).save_pretrained(model)
    arguments = ["textenv/Periods-v0", "--model", str(model), "--total-steps", "600", "--config.num-episodes", "32"]
    main(["train", *arguments, "--run-dir", str(tmp_path / "run"), "--json"])
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert trained["score"] == trained["mean_return"] and trained["kl"] >= -0.5
    assert trained["penalised_return"] == pytest.approx(trained["score"] - 0.001 * trained["kl"])
    main(["evaluate", str(tmp_path / "run"), "--num-episodes", "8", "--json"])
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"mean_return", "steps", "seconds", "score", "kl"} <= evaluated.keys()


@pytest.mark.parametrize(
    ("file", "content"),
    [("value_head.safetensors", b"cut off"), ("config.json", b"{"), ("tokenizer_config.json", b"[" * 100_000)],
)
def test_a_broken_language_model_is_refused_in_words(tmp_path, file, content):
    env = TextVectorEnv(prompts=[[0]], reward=lambda prompts, completions, **_: [0.0], tokenizer=make_tokenizer(WORDS))
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    PPO(env, policy, PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4)).save(tmp_path)
    assert (tmp_path / "policy" / file).is_file()
    (tmp_path / "policy" / file).write_bytes(content)
    with pytest.raises(ValueError, match=r"does not match the LMPolicy|cannot load"):
        algos.load(tmp_path)


def test_agents_of_earlier_versions_divide_pixels_by_255(tmp_path):
    """As they did there, also where the space has smaller ones; later agents divide by the largest of the space."""

    def space_up_to(highest):
        return spaces.Dict(board=spaces.Box(0, highest, (8, 8), np.uint8), speed=spaces.Box(-1, 1, (2,)))

    env = SyncVectorEnv([lambda: Random(space_up_to(1), spaces.Discrete(2))])
    agent = PPO(env, num_steps=16, minibatch_size=16)
    agent.save(tmp_path)
    observation, _ = env.reset(seed=3)
    expected = agent.policy.act(observation, deterministic=True).log_prob
    assert torch.equal(algos.load(tmp_path).act(observation, deterministic=True).log_prob, expected)

    config = tmp_path / "config.json"
    description = json.loads(config.read_text())
    description["format"] = 4
    config.write_text(json.dumps(description))
    former = MultiInputPolicy(space_up_to(255), spaces.Discrete(2), seed=5)
    former.load_state_dict(agent.policy.state_dict())
    expected_formerly = former.act(observation, deterministic=True).log_prob
    assert not torch.equal(expected_formerly, expected)
    loaded = algos.load(tmp_path)
    assert torch.equal(loaded.act(observation, deterministic=True).log_prob, expected_formerly)
    assert algos.evaluate(env, loaded, num_episodes=1).returns


@pytest.mark.parametrize("make", [
    lambda: gymnasium.make_vec("CartPole-v1", num_envs=2, max_episode_steps=7),
    lambda: gymnasium.make_vec(gymnasium.make("CartPole-v1", max_episode_steps=7).spec, num_envs=2),
    lambda: gymnasium.make_vec(
        gymnasium.make("CartPole-v1", max_episode_steps=7).spec, num_envs=2, vectorization_mode="sync"
    ),
    lambda: make_vector_environment("CartPole-v1", 2, max_episode_steps=7),
], ids=["argument", "specification", "of each slot", "ours"])  # fmt: skip
def test_evaluations_of_a_saved_agent_have_its_limit_of_steps(make, tmp_path, capsys):
    """No pole falls within seven steps, so each step's reward of 1 adds up to the limit."""
    agent = PPO(make(), num_steps=16)
    assert max(row["episode/return"] for row in agent.learn(64)) == 7
    agent.save(tmp_path)
    main(["evaluate", str(tmp_path), "--num-episodes", "3", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mean_return"] == 7


def pendulum_without_a_limit():
    spec = copy.deepcopy(gymnasium.spec("Pendulum-v1"))
    spec.max_episode_steps = None
    return gymnasium.make_vec(spec, num_envs=2)


@pytest.mark.parametrize("make", [
    lambda: gymnasium.make_vec("Pendulum-v1", num_envs=2, max_episode_steps=-1),
    lambda: make_vector_environment("Pendulum-v1", 2, max_episode_steps=-1),
    pendulum_without_a_limit,
], ids=["argument", "ours", "specification"])  # fmt: skip
def test_an_environment_trained_without_a_limit_of_steps_is_made_without_one(make, tmp_path):
    """Pendulum ends after 200 steps only by its registered limit."""
    env = make()
    PPO(env, num_steps=16).save(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["environment"]
    for again in (env, make_vector_environment(saved["id"], 2, **saved["kwargs"])):
        again.reset(seed=1)
        assert not any(again.step(np.zeros((2, 1), np.float32))[3].any() for _ in range(210))


def test_without_a_limit_a_native_environment_is_not_asked():
    """Gymnasium's own CartPole of many slots takes -1 for a number of steps that is already reached."""
    env = make_vector_environment("CartPole-v1", 2, max_episode_steps=-1)
    env.reset(seed=1)
    assert not env.step(np.array([0, 1]))[3].any()
    with pytest.raises(ValueError, match="max_episode_steps is -2, expected an integer of at least 1, None"):
        make_vector_environment("CartPole-v1", 2, max_episode_steps=-2)
    with pytest.raises(ValueError, match="max_episode_steps is -1"):
        make_vector_environment("textenv/Words-v0", 2, env="CartPole-v1", max_episode_steps=-1)


def test_a_limit_of_none_is_the_default():
    env = make_vector_environment("CartPole-v1", 2, max_episode_steps=None)
    assert len(collect(env, PPO(env).policy, num_steps=3)) == 2
