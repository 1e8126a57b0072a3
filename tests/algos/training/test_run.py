"""The history of a run, saved and read; what a run warns of at its start."""

import json
import logging

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv

from algos import A2C, DQN, PPO, TRPO, MLPPolicy
from algos.cli import main
from algos.losses import clipped_policy_loss
from algos.storage.serialization import from_json, to_json
from algos.training.run import History, Run
from tests.helpers.resumable_agents import mlp
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import make_env


def test_a_history_is_the_same_after_it_was_saved():
    rows = [{"steps": 1, "a": 0.5}, {"steps": 2, "a": float("nan"), "b": 3.0}, {"steps": 3, "a": -1e300}, {"steps": 4}]
    tensors = {}
    saved = json.loads(json.dumps(to_json(History(rows).state(), tensors)))
    again = History.from_state(from_json(saved, tensors))
    again.append({"steps": 5, "a": 1.0})
    assert str(list(again)) == str([*rows, {"steps": 5, "a": 1.0}])
    assert list(History.from_state(History([]).state())) == []


def of_all_slots():
    return gym.wrappers.vector.NormalizeObservation(gym.make_vec("CartPole-v1", num_envs=2))


def of_each_slot():
    return SyncVectorEnv([lambda: gym.wrappers.NormalizeReward(gym.make("CartPole-v1"))] * 2)


@pytest.mark.parametrize(
    ("make_env", "wrapper"),
    [(of_all_slots, "NormalizeObservation"), (of_each_slot, "NormalizeReward"), (lambda: of_all_slots().env, None)],
)
def test_wrappers_that_an_evaluation_would_lack_are_warned_of(make_env, wrapper, caplog):
    env = make_env()
    with caplog.at_level(logging.WARNING):
        Run(PPO(env, mlp(env), num_steps=4, minibatch_size=8))
    warnings = [record.getMessage() for record in caplog.records if "running statistics" in record.getMessage()]
    assert len(warnings) == (wrapper is not None)
    if wrapper is not None:
        assert f"the running statistics of {wrapper} stay" in warnings[0] and "normalize_rewards=True" in warnings[0]


def test_what_normalizes_nothing_gets_other_advice(caplog):
    Run(DQN(of_all_slots(), num_steps=4))
    assert "scale by fixed numbers" in caplog.text and "DQN normalizes nothing" in caplog.text


def cartpole_agent(**fields):
    return PPO(gym.make_vec("CartPole-v1", num_envs=2), num_steps=16, **fields)


def test_other_settings_are_told_at_a_resume(tmp_path, caplog):
    """A run went on with the default γ, without a word, if the program that resumed it did not repeat its own."""
    cartpole_agent(gamma=0.5, seed=1).learn(64, run_dir=tmp_path)
    cartpole_agent(gamma=0.5, seed=1).learn(96, run_dir=tmp_path, resume=tmp_path)
    assert "other settings" not in caplog.text
    cartpole_agent(num_epochs=2, seed=1).learn(128, run_dir=tmp_path, resume=tmp_path)
    assert "goes on with other settings: num_epochs 2 (before: 4), gamma 0.99 (before: 0.5)" in caplog.text


def of_length(completions):
    return [float(len(text)) for text in completions]


def of_brevity(completions):
    return [-float(len(text)) for text in completions]


def text_agent(prompts=("a", "b a"), reward=of_length, kl_coef=0.1, **options):
    env = make_env(reward, 2, prompts=list(prompts), **options)
    return PPO(env, lm_policy(), num_steps=None, num_episodes=4, minibatch_size=4, seed=1, kl_coef=kl_coef)


@pytest.mark.parametrize(("changed", "words"), [
    ({"prompts": ["a", "b b"]}, "prompts 2 with the checksum"),
    ({"prompts": [{"prompt": "a", "answers": ["c"]}, "b a"]}, "prompts 2 with the checksum"),
    ({"prompts": ["c"]}, "prompts 1 with the checksum"),
    ({"reward": of_brevity}, "rewards {'of_brevity': 1.0} (before: {'of_length': 1.0})"),
    ({"kl_coef": 0.5}, "kl_coef 0.5 (before: 0.1)"),
    ({"max_new_tokens": 3}, "max_new_tokens 3 (before:"),
], ids=["prompts", "columns", "fewer prompts", "reward", "KL", "limit"])  # fmt: skip
def test_another_text_environment_is_told_at_a_resume(changed, words, tmp_path, caplog):
    text_agent().learn(8, run_dir=tmp_path)
    text_agent().learn(24, run_dir=tmp_path, resume=tmp_path)
    assert "other settings" not in caplog.text
    text_agent(**changed).learn(48, run_dir=tmp_path, resume=tmp_path)
    assert f"goes on with other settings: {words}" in caplog.text


def test_a_run_that_has_ended_stays_as_it_is(tmp_path, caplog):
    """Its agent was saved again by a shorter training, with that one's settings."""
    first_history = cartpole_agent(gamma=0.5, seed=1).learn(64, run_dir=tmp_path)
    steps = first_history[-1]["steps"]
    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert "nothing is trained" not in caplog.text
    history = cartpole_agent(gamma=0.9, seed=1).learn(32, run_dir=tmp_path, resume=tmp_path)
    assert history == first_history
    sentence = f"nothing is trained: the run has {steps} steps already, and 32 are asked for, so its folder stays"
    assert sentence in caplog.text
    assert "other settings" not in caplog.text
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == files


def test_a_run_that_ended_without_its_agent_gets_it(tmp_path, caplog):
    """As after a kill between the last checkpoint and the agent."""
    steps = cartpole_agent(seed=1).learn(64, run_dir=tmp_path)[-1]["steps"]
    (tmp_path / "config.json").unlink()
    cartpole_agent(seed=1).learn(64, run_dir=tmp_path, resume=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == steps
    assert f"{steps} steps already, and 64 are asked for\n" in caplog.text


def test_an_agent_that_replaces_that_of_a_longer_run_is_warned_of(tmp_path, caplog):
    trained = cartpole_agent(seed=1)
    trained.learn(64, run_dir=tmp_path)
    trained.save(tmp_path)
    assert "is replaced" not in caplog.text
    cartpole_agent(seed=2).save(tmp_path)
    assert "whose agent is replaced by one that was last trained for 0 steps" in caplog.text
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "agent" / "config.json").read_text())["steps"] == trained.steps > 0


@pytest.mark.parametrize("argument", ["run_dir", "resume"])
def test_a_tilde_is_no_folder(argument, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    agent = cartpole_agent()
    with pytest.raises(ValueError, match=rf"{argument} is '~/runs', but only a shell reads ~ as the home folder"):
        agent.learn(64, **{argument: "~/runs"})
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", "--run-dir=~/runs"])
    assert "--run-dir is '~/runs'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="folder is '~/runs'"):
        agent.save("~/runs")
    assert not list(tmp_path.iterdir())


class OwnLoss:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, **columns):
        return self.scale * clipped_policy_loss(**columns)


def test_an_object_as_a_loss_is_trained_and_saved(tmp_path):
    """It could not be described, so saving failed after the whole training."""
    agent = cartpole_agent(policy_loss=OwnLoss(0.5))
    agent.learn(64, run_dir=tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["policy_loss"].endswith("test_run.OwnLoss")


class WithoutValues(MLPPolicy):
    def evaluate(self, rollout):
        return super().evaluate(rollout)._replace(value=None)


@pytest.mark.parametrize("algorithm", [PPO, A2C, TRPO])
def test_a_policy_without_values_is_refused_where_they_are_learnt(algorithm):
    env = gym.make_vec("CartPole-v1", num_envs=2)
    policy = WithoutValues(env.single_observation_space, env.single_action_space)
    with pytest.raises(TypeError, match="evaluate returned the value None, expected a tensor of the states' values"):
        algorithm(env, policy, num_steps=16).learn(64)


@pytest.mark.parametrize("argument, expected", [
    ({"resume": True}, "resume is True, expected the folder of the run to continue"),
    ({"resume": False}, "resume is False"), ({"run_dir": 3}, "run_dir is 3, expected a folder"),
    ({"checkpoint_every": "ten"}, "checkpoint_every is 'ten', expected a number of steps"),
])  # fmt: skip
def test_wrong_kinds_of_arguments_are_named(argument, expected):
    with pytest.raises(TypeError, match=expected):
        cartpole_agent().learn(64, **argument)
