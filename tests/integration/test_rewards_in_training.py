"""What the learning loop tells reward functions, and rewards that are computed while others are generated."""

import json
import threading

import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, evaluate
from algos.cli import main
from algos.evaluation import EvaluateEvery
from tests.helpers.models import make_gpt2
from tests.helpers.text_envs import make_env
from textenv import Rewards
from textenv.rewards.scores import StopTraining

TOTAL = 120


class Curriculum:
    """Pays the progress, and keeps what it was called with."""

    def __init__(self):
        self.seen = []

    def __call__(self, completions, step, progress, log):
        self.seen.append((step, progress))
        log("length", [len(text) for text in completions])
        return [progress + len(text) for text in completions]


def agent_with(reward, **options):
    env = make_env(reward, num_envs=4, **options)
    return PPO(env, LMPolicy(make_gpt2(), env.tokenizer), PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4))


@pytest.mark.heavy
def test_rewards_see_the_steps_before_the_iteration(tmp_path):
    """Evaluations see those of the moment."""
    reward, held_out = Curriculum(), Curriculum()
    agent = agent_with(reward)
    calls = []

    def look(metrics):
        evaluate(agent.env, agent.policy, num_episodes=2)
        calls.append(reward.seen.pop())

    watch = EvaluateEvery(make_env(held_out), every=1, num_episodes=2)
    history = agent.learn(TOTAL, on_iteration=look, callbacks=[watch], run_dir=tmp_path)
    steps = [0, *(metrics["steps"] for metrics in history[:-1])]
    assert len(steps) > 2
    assert reward.seen == [(step, step / TOTAL) for step in steps]
    assert calls == reward.seen and held_out.seen == reward.seen
    evaluate(agent.env, agent.policy, num_episodes=2)
    assert reward.seen[-1] == (0, 0.0), "after the training"
    assert all(metrics["reward/log/length"] >= 0 for metrics in history)
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(row["logged"]["length"] == len(row["completion"]) for row in written)


def without_times(history):
    return [{name: x for name, x in metrics.items() if not name.startswith("time/")} for metrics in history]


@pytest.mark.heavy
def test_a_resume_continues_the_curriculum_to_the_bit(tmp_path):
    """With early scores too."""
    whole = agent_with(Curriculum()).learn(TOTAL)
    reward = Curriculum()
    agent = agent_with(reward, score_while_generating=True)
    agent.learn(TOTAL, run_dir=tmp_path, checkpoint_every=1, on_iteration=lambda metrics: metrics["iteration"] >= 2)
    agent = agent_with(reward, score_while_generating=True)
    resumed = agent.learn(TOTAL, run_dir=tmp_path, resume=tmp_path)
    assert without_times(resumed) == without_times(whole) and len(whole) > 2
    assert len(reward.seen) > len(whole), "some rollouts were scored in several calls"
    assert [step for step, _ in reward.seen] == sorted(step for step, _ in reward.seen)


@pytest.mark.parametrize("error", [ValueError("no"), StopTraining("enough")], ids=["error", "stop"])
def test_answers_whose_early_scores_fail_are_saved(error, tmp_path):
    def fails(completions):
        raise error

    with pytest.raises((ValueError, StopTraining), match="no|enough"):
        agent_with(fails, score_while_generating=True).learn(TOTAL, run_dir=tmp_path)
    assert len((tmp_path / "unscored.jsonl").read_text().splitlines()) == 8


def test_early_scores_run_in_another_thread():
    seen = set()

    def look(completions):
        seen.add((torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()))
        return [1.0] * len(completions)

    agent_with(Rewards(look), score_while_generating=True).learn(1)
    assert seen == {(False, False)}


@pytest.mark.heavy
def test_commands_end_with_the_curriculum_at_its_end(tmp_path, capsys):
    (tmp_path / "curriculum.py").write_text(
        "def at(completions, step, progress): return [step + progress] * len(completions)"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "this film"}\n{"prompt": "the comedy"}\n')
    reward = ["--reward", f"{tmp_path}/curriculum.py:at"]
    run = [
        "--run-dir",
        str(tmp_path / "run"),
        "--total-steps",
        "50",
        "--config.num-episodes",
        "8",
        "--max-new-tokens",
        "4",
    ]
    few = ["--json", "--num-episodes", "2"]
    main(["train", "--prompts", str(tmp_path / "prompts.jsonl"), *reward, *run, "--config.minibatch-size", "8", *few])
    main(["evaluate", str(tmp_path / "run"), *reward, *few])
    trained, evaluated = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert trained["mean_return"] == evaluated["mean_return"] == trained["steps"] + 1
