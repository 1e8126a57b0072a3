"""Wrong input: the error names the value, what was expected and what to do."""

import gymnasium
import numpy as np
import pytest
import torch

import algos
from algos import PPO, LMPolicy, MLPPolicy, PPOConfig, collect, sft
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_t5, make_tokenizer
from textenv import KLPenalty, LanguageModel, RewardModel, TextVectorEnv
from textenv.tasks.builtin import make_task

EOS = WORDS.index("<eos>")


def make_env(**options):
    arguments = dict(prompts=["a b"], reward=lambda prompts, **_: [1.0] * len(prompts), tokenizer=make_tokenizer(WORDS))
    return TextVectorEnv(**(arguments | options))


def test_unknown_task():
    with refused(ValueError, "Poems", "Periods, Reviews, Copy, Sort"):
        make_task("Poems", tokenizer=make_tokenizer(WORDS))
    with refused(gymnasium.error.Error, "Poems", "textenv"):
        gymnasium.make("textenv/Poems-v0")


def test_unknown_split():
    with refused(ValueError, "'eval'", "'test', 'train'"):
        make_task("Periods", split="eval", tokenizer=make_tokenizer(WORDS))


def test_unknown_model(tmp_path):
    with refused(ValueError, "no-such-model", "save_pretrained", "embedded"):
        LMPolicy.load("no-such-model")
    with refused(ValueError, str(tmp_path), "folder without readable files"):
        LMPolicy.load(tmp_path)
    with refused(ValueError, "no-such-model"):
        RewardModel.load("no-such-model")


def test_tokenizer_id_beyond_the_vocabulary():
    with refused(ValueError, "up to 8", "ends at 6", "resize_token_embeddings"):
        LMPolicy(make_gpt2(7), make_tokenizer(WORDS))


def test_encoder_decoder_without_decoder_start():
    model = make_t5()
    model.generation_config.decoder_start_token_id = None
    with refused(ValueError, "generation_config.decoder_start_token_id"):
        LMPolicy(model, make_tokenizer(WORDS))


def test_plain_text_for_an_encoder_decoder_model():
    lm = LanguageModel(make_t5(), make_tokenizer(WORDS))
    for call in (lambda: lm.perplexity(["a b"]), lambda: sft(lm, ["a b"])):
        with refused(ValueError, "encoder-decoder", "prompts with answers", "packing=False"):
            call()


@pytest.mark.parametrize("prompts", [[], "a b", [""], [[]], [{"question": "a"}]])
def test_empty_or_malformed_prompts(prompts):
    with refused(ValueError, "expected|empty"):
        make_env(prompts=prompts)


def test_too_long_prompt_and_ids_out_of_range():
    """Known when the environment is made, not when the prompt is dealt."""
    with refused(ValueError, "'a b c d'", "4 tokens", "limit is 3", "max_prompt_tokens"):
        make_env(prompts=["a", "a b c d"], max_prompt_tokens=3)
    with refused(ValueError, "99", "0 to 8"):
        make_env(prompts=[[1, 99]])


def play_one_turn(reward):
    env = make_env(reward=reward)
    env.reset(seed=0)
    env.step(np.array([5]))
    env.step(np.array([EOS]))


def test_reward_returns_a_wrong_number_of_values():
    def forgetful(prompts, completions, **columns):
        return []

    with refused(ValueError, "forgetful", "0 values", "1 completions"):
        play_one_turn(forgetful)
    with refused(ValueError, "7.5", "1 completions"):
        play_one_turn(lambda **_: 7.5)


@pytest.mark.parametrize("action", [-1, len(WORDS)])
def test_action_outside_the_vocabulary(action):
    env = make_env()
    env.reset(seed=0)
    with refused(ValueError, str(action), "slot 0", "0 to 8"):
        env.step(np.array([action]))


def test_actions_of_the_wrong_shape_or_type():
    env = make_env(num_envs=2)
    env.reset(seed=0)
    for actions in (np.array([1]), np.array([1.0, 2.0])):
        with refused(ValueError, "shape", "integers"):
            env.step(actions)


def test_stepping_out_of_order():
    env = make_env(autoreset_mode="Disabled")
    with refused(ValueError, "reset before step"):
        env.step(np.array([1]))
    env.reset(seed=0)
    env.step(np.array([EOS]))
    with refused(ValueError, "over", "reset_mask"):
        env.step(np.array([1]))
    env.close()
    for call in (lambda: env.step(np.array([1])), env.reset, lambda: env.start_episodes(1)):
        with refused(ValueError, "closed"):
            call()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("gamma", 1.5, "0 to 1"),
        ("gae_lambda", -0.1, "0 to 1"),
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", float("nan"), "above 0"),
        ("num_epochs", 0, "at least 1"),
        ("minibatch_size", 2.5, "integer"),
        ("clip_range", -0.2, "above 0"),
        ("ent_coef", -1.0, "at least 0"),
        ("max_grad_norm", "big", "above 0"),
    ],
)
def test_config_value_out_of_range(field, value, expected):
    with refused(ValueError, f"PPOConfig.{field}", str(value), expected):
        PPOConfig(**{field: value})


def test_config_needs_either_steps_or_episodes():
    for steps, episodes in ((8, 8), (None, None)):
        with refused(ValueError, "steps", "episodes", "give one"):
            PPOConfig(num_steps=steps, num_episodes=episodes)


def test_environment_that_does_not_fit_the_agent():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    with refused(ValueError, "whole episodes", "presets.TEXT"):
        PPO(make_env(), policy, PPOConfig(num_steps=8))
    with refused(TypeError, "make_vec"):
        PPO(gymnasium.make("CartPole-v1"), policy)
    with refused(ValueError, "exactly one"):
        collect(make_env(), policy)


def test_policy_and_environment_differ_in_tokenizer():
    policy = LMPolicy(make_gpt2(12), make_tokenizer([*WORDS, "x", "y", "z"]))
    with refused(ValueError, "12 actions", "has 9"):
        PPO(make_env(), policy, PPOConfig(num_steps=None, num_episodes=4))
    env = make_env()
    env.start_episodes(1)
    with refused(ValueError, "11", "0 to 8"):
        env.advance(np.array([11]))


def test_a_wrapper_that_hides_episodes():
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_env())
    with refused(ValueError, "RecordEpisodeStatistics", "pass the unwrapped one"):
        PPO(wrapped, LMPolicy(make_gpt2(), make_tokenizer(WORDS)), PPOConfig(num_steps=None, num_episodes=4))


@pytest.mark.parametrize("share", [lambda policy: policy, lambda policy: policy.lm])
def test_a_reference_that_shares_the_policys_weights(share):
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    rollout = collect(make_env(), policy, num_episodes=2)
    with refused(ValueError, "shares the policy's weights", "policy.reference()"):
        KLPenalty(share(policy), 0.1)(rollout, policy)


def test_a_partial_reset_before_a_whole_one():
    with refused(ValueError, "reset all slots first"):
        make_env(num_envs=2).reset(options={"reset_mask": np.array([True, False])})


def test_one_advantage_cannot_be_whitened():
    env = gymnasium.make_vec("CartPole-v1", num_envs=1)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    with refused(ValueError, "minibatch_size is 1", "normalize_advantage=False"):
        PPO(env, policy, PPOConfig(minibatch_size=1))


def test_an_unknown_render_mode():
    with refused(ValueError, "human", "ansi", "rgb_array"):
        make_env(render_mode="picture")


def test_spaces_that_the_perceptron_cannot_read():
    box, spaces = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces
    with refused(ValueError, "Text", "Box"):
        MLPPolicy(spaces.Text(4), spaces.Discrete(2))
    with refused(ValueError, "Tuple", "Discrete, Box, MultiDiscrete or MultiBinary"):
        MLPPolicy(box, spaces.Tuple([box]))


def test_text_longer_than_the_models_context():
    env = make_env(max_prompt_tokens=32, max_new_tokens=64)
    with refused(ValueError, "96 tokens", "64 positions"):
        collect(env, LMPolicy(make_gpt2(), make_tokenizer(WORDS)), num_episodes=1)


def test_numbers_out_of_range():
    for name in ("num_envs", "max_prompt_tokens", "max_new_tokens"):
        with refused(ValueError, name, "at least 1"):
            make_env(**{name: 0})
    with refused(ValueError, "12", "0 to 8"):
        make_env(forbidden=[12])
    with refused(ValueError, "-0.1"):
        KLPenalty(LanguageModel(make_gpt2(), make_tokenizer(WORDS)), -0.1)
    with refused(ValueError, "temperature", "0"):
        LMPolicy(make_gpt2(), make_tokenizer(WORDS), temperature=0.0)


def test_folder_without_an_agent(tmp_path):
    with refused(FileNotFoundError, str(tmp_path), "config.json", "run-dir"):
        algos.load(tmp_path)


def test_a_non_finite_gradient_changes_no_weight():
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    agent = PPO(env, policy, PPOConfig(num_steps=8, minibatch_size=16))
    rollout = collect(env, policy, num_steps=8)
    rollout["reward"][0, 0] = torch.inf
    before = [p.clone() for p in policy.parameters()]
    with refused(FloatingPointError, "reward: found .inf.", "[0, 0]"):
        agent.update(rollout)
    assert all(torch.equal(one, other) for one, other in zip(before, policy.parameters(), strict=True))
