"""Values of configs: numbers of NumPy are taken wherever numbers are."""

import dataclasses
import json
import typing

import gymnasium
import numpy as np
import pytest

import algos
from algos.config import CONFIGS
from algos.training.save import read_description
from textenv import AdaptiveCoefficient, Rewards, TextVectorEnv

EVERY = [*CONFIGS.values(), algos.SFTConfig, algos.RewardModelConfig]


def numpy_scalar(value, wide):
    """The same value as NumPy has it; None and texts stay."""
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return (np.int64 if wide else np.int32)(value)
    if isinstance(value, float):
        return np.float64(value) if wide else np.array(value)
    if isinstance(value, tuple):
        return tuple(numpy_scalar(item, wide) for item in value)
    return value


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kind", EVERY)
def test_fields_take_numpy_numbers_and_keep_plain_ones(kind, wide):
    own = kind()
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    same = kind(**{name: numpy_scalar(value, wide) for name, value in fields.items()})
    assert same == own and hash(str(same)) == hash(str(own))
    for name, value in fields.items():
        assert type(getattr(same, name)) is type(value), name


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_steps", True, "an integer of at least 1"),
        ("learning_rate", True, "a number above 0"),
        ("seed", 1.5, "an integer from 0 to below 2"),
        ("seed", 2**63, "an integer from 0 to below 2"),
        ("seed", True, "an integer from 0 to below 2"),
    ],
)
def test_a_number_of_another_kind_is_refused(field, value, expected):
    with pytest.raises(ValueError, match=f"PPOConfig.{field} is {value!r}, expected {expected}"):
        algos.PPOConfig(**{field: value})


def test_numpy_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="PPOConfig.num_steps is 0, expected an integer of at least 1"):
        algos.PPOConfig(num_steps=np.int64(0))
    with pytest.raises(ValueError, match="gamma is nan, expected a number from 0 to 1"):
        algos.PPOConfig(gamma=np.float32("nan"))


def test_training_by_numpy_numbers_is_the_same(tmp_path):
    def trained(number, real, folder):
        env = gymnasium.make_vec("CartPole-v1", num_envs=number(2), max_episode_steps=number(30))
        hidden = (number(8), number(8))
        policy = algos.MLPPolicy(env.single_observation_space, env.single_action_space, hidden=hidden, seed=number(1))
        settings = dict(num_steps=number(16), minibatch_size=number(32), seed=number(2), learning_rate=real(0.5**10))
        agent = algos.PPO(env, policy, **settings)
        agent.learn(number(64), run_dir=folder, checkpoint_every=number(32), sample_every=number(2))
        return algos.evaluate("CartPole-v1", algos.load(folder), num_episodes=number(3), seed=number(3)).returns

    assert trained(np.int64, np.float32, tmp_path / "a") == trained(int, float, tmp_path / "b")
    one, other = (read_description(tmp_path / name) for name in "ab")
    assert one["environment"] == other["environment"] == {
        "id": "CartPole-v1", "kwargs": {"max_episode_steps": 30}, "module": None
    }  # fmt: skip
    assert one["policy_arguments"] == other["policy_arguments"]


@pytest.mark.heavy
def test_text_takes_numbers_of_numpy(tmp_path):
    policy = algos.LMPolicy.load("embedded", seed=np.int64(1), temperature=np.float32(1))
    limits = dict(num_envs=np.int64(2), max_new_tokens=np.int64(4), max_prompt_tokens=np.int16(8), stop=[np.int64(5)])
    reward = Rewards(lambda completions: [np.float32(len(text)) for text in completions], workers=np.int64(0))
    env = TextVectorEnv(prompts=["the film", "a"], reward=reward, tokenizer=policy.tokenizer, **limits)
    settings = dict(num_steps=None, num_episodes=np.int64(4), minibatch_size=np.int64(2))
    agent = algos.PPO(env, policy, **settings, kl_coef=AdaptiveCoefficient(np.float32(0.5), target=np.int64(6)))
    agent.learn(np.int64(8), run_dir=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["penalty"]["coefficient"]["value"] > 0
    assert len(algos.load(tmp_path).generate(["the"], max_new_tokens=np.int64(3), seed=np.int64(3))) == 1
    made = gymnasium.make_vec(
        "textenv/Reviews-v0", num_envs=np.int64(2), kl_coef=np.float32(0.5), max_new_tokens=np.int64(4)
    )
    algos.PPO(made, policy, **settings).save(tmp_path / "made")
    kwargs = read_description(tmp_path / "made")["environment"]["kwargs"]
    assert kwargs == {"task": "Reviews", "kl_coef": 0.5, "max_new_tokens": 4}


class Chooses:
    """A policy loss that chooses steps, as `KLCovLoss` does, and takes nothing else than what it is given."""

    def select(self, *, log_prob, advantage, mask, generator):
        return mask

    def __call__(self, *, log_ratio, advantage, mask, clip_range, selected):
        return -log_ratio * advantage


def test_a_policy_loss_may_take_just_what_it_is_called_with():
    """By a training, too: see `algos.losses.weighted_policy_loss`."""
    algos.PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=8, policy_loss=Chooses()).learn(16)

    def higher(*, log_ratio, advantage, mask, clip_range, clip_higher):
        return -log_ratio * advantage

    algos.PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=8, policy_loss=higher, clip_higher=0.3).learn(16)
    with pytest.raises(TypeError, match="policy_loss is called with .*clip_range=...: missing .*'clip_higher'"):
        algos.PPOConfig(policy_loss=higher)


def choices():
    """Each field of a config that is one of several names, or a function."""
    for kind in EVERY:
        for name, hint in typing.get_type_hints(kind).items():
            if "Literal" in str(hint):
                yield kind, name


@pytest.mark.parametrize("kind, name", list(choices()))
@pytest.mark.parametrize("wrong", ["no such name", 0.5])
def test_a_choice_by_name_takes_no_other_name(kind, name, wrong):
    """``baseline="agents"`` was the rollout's mean."""
    with pytest.raises(ValueError, match=f"{name} is {wrong!r}, expected"):
        dataclasses.replace(kind(), **{name: wrong})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(algos.PPOConfig):
    level: typing.Literal[1, 2] = 1
    mode: typing.Literal["auto", True, None] = None
    size: typing.Literal["auto"] | float = 0.5


def test_choices_of_an_own_config():
    for values in ({"level": 2}, {"mode": True}, {"mode": "auto"}, {"size": "auto"}, {"size": 2.0}):
        OwnConfig(**values)
    for values in ({"level": 3}, {"level": True}, {"mode": 1}, {"mode": "no"}):
        with pytest.raises(ValueError, match="expected"):
            OwnConfig(**values)


@pytest.mark.parametrize("baseline", [None, "agents", "", 0.0, ["agent"]])
def test_an_unknown_baseline_is_refused(baseline):
    with pytest.raises(ValueError, match="expected 'rollout' or 'agent'"):
        algos.REINFORCEConfig(baseline=baseline)
