"""`League`: earlier versions of the policy play against it, and a resumed run has the same ones."""

import pytest
import torch

from algos import PPO, PPOConfig
from algos.training.league import League, PolicyOpponent
from tests.helpers.programs import program_env, word_policy
from tests.helpers.small_agents import cartpole, mlp_for
from tests.helpers.text_envs import make_env
from textenv.programs.run import Question
from textenv.prompts.prompts import TurnLimits


def contest(first, second):
    """To say 'good'."""
    one = first("a", max_tokens=1).strip() == "good"
    other = second("b", max_tokens=1).strip() == "good"
    return float(one) - other, float(other) - one


def contest_env(num_envs=8, **options):
    return program_env(contest, num_envs, agents=2, **({"opponents": [None]} | options))


CONFIG = PPOConfig(num_episodes=64, num_steps=None, learning_rate=1e-2)


@pytest.mark.heavy
def test_the_policy_beats_its_earlier_versions():
    agent = PPO(contest_env(), word_policy(head=True), CONFIG, seed=1)
    league = League(every=5, size=2)
    history = agent.learn(2500, callbacks=[league])
    assert len(league.weights) == 2 and list(agent.env.task.opponents.by_name)[0] == "self"
    names = [name for name in history[-1] if name.startswith("opponents/after") and name.endswith("/return")]
    assert names and "opponents/after 5/return" in history[6]
    early = [row["opponents/after 5/return"] for row in history if "opponents/after 5/return" in row]
    assert early[-1] > 0.3


def test_a_version_answers_as_the_policy_did():
    """The same seed gives the same answer, whatever has become of the policy since."""
    policy = word_policy(head=True)
    env = contest_env()
    opponent = PolicyOpponent(policy, env)
    questions = [Question(0, "a b", TurnLimits(stop=("d",)), None, seed=seed) for seed in range(40)]
    answers = opponent.answer(questions)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_()
    assert opponent.answer(questions) == answers and len(set(answers)) > 5
    assert not any("d" in answer.split() for answer in answers)
    one_by_one = [opponent.answer([question])[0] for question in questions]
    assert one_by_one == answers


def test_answers_of_a_version_are_among_the_allowed_ones():
    env = contest_env(allowed=["good", "bad", "a"])
    questions = [Question(0, "b", TurnLimits(), ("bad", "a"), seed=seed) for seed in range(30)]
    answers = PolicyOpponent(word_policy(), env).answer(questions)
    assert {answer.strip() for answer in answers} == {"bad", "a"}


def train(folder, *, iterations, resume=None):
    agent = PPO(contest_env(), word_policy(head=True), CONFIG, seed=1)
    history = agent.learn(
        10**4, callbacks=[League(every=2, size=3)], run_dir=folder, checkpoint_every=1, resume=resume,
        on_iteration=lambda metrics: metrics["iteration"] >= iterations,
    )  # fmt: skip
    return history, agent.policy


@pytest.mark.heavy
@pytest.mark.bits
def test_a_resumed_run_has_the_same_opponents(tmp_path):
    expected, policy = train(tmp_path / "whole", iterations=12)
    train(tmp_path / "half", iterations=7)
    history, resumed_policy = train(tmp_path / "half", iterations=12, resume=tmp_path / "half")
    assert "opponents/after 10/games" in expected[-1] and "opponents/after 4/games" not in expected[-1]
    for row, expected_row in zip(history, expected, strict=True):
        for name, value in expected_row.items():
            assert "time" in name or row[name] == value, name
    pairs = zip(resumed_policy.parameters(), policy.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.heavy
def test_versions_answer_with_the_words_of_the_environment():
    """As the policy does, whatever spaces the tokenizer writes."""
    answers = set()

    def play(first, second):
        pair = first("a", allowed=["good", "bad"]), second("b", allowed=["good", "bad"])
        answers.update(pair)
        return 0.0, 0.0

    env = program_env(play, 4, agents=2, opponents=[None], allowed=["good", "bad"])
    agent = PPO(env, word_policy(head=True), PPOConfig(num_episodes=16, num_steps=None), seed=1)
    agent.learn(80, callbacks=[League(every=1, size=2)])
    assert answers == {"good", "bad"}


def opponents_after(agent, league, *, iterations, **options):
    """Names of the opponents at the end of a short training."""
    agent.learn(10**4, callbacks=[league], on_iteration=lambda row: row["iteration"] >= iterations, **options)
    return list(agent.env.task.opponents.by_name)


def test_a_training_does_not_play_the_versions_of_an_earlier_one():
    """In the same environment, and with the same object."""
    env = contest_env()
    config = PPOConfig(num_episodes=16, num_steps=None)
    first = PPO(env, word_policy(head=True), config, seed=1)
    league = League(every=1, size=2)
    assert opponents_after(first, league, iterations=3) == ["self", "after 2", "after 3"]
    second = PPO(env, word_policy(head=True), config, seed=2)
    assert opponents_after(second, League(every=2, size=2), iterations=3) == ["self", "after 2"]
    assert opponents_after(second, league, iterations=1) == ["self", "after 1"] and list(league.weights) == ["after 1"]


def test_a_resumed_league_may_be_smaller(tmp_path):
    config = PPOConfig(num_episodes=16, num_steps=None)

    def small():
        return PPO(contest_env(), word_policy(head=True), config, seed=1)

    opponents_after(small(), League(every=1, size=4), iterations=5, run_dir=tmp_path, checkpoint_every=1)
    names = opponents_after(small(), League(every=1, size=2), iterations=7, run_dir=tmp_path, resume=tmp_path)
    assert names == ["self", "after 6", "after 7"]


def test_several_processes_are_refused(monkeypatch):
    """Each has an environment, of which the callback sees that of the first."""
    agent = PPO(contest_env(), word_policy(head=True), CONFIG, seed=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="League works in one process, and 2 train together"):
        agent.learn(100, callbacks=[League()])


def test_environments_without_opponents_are_refused():
    env = make_env()
    with pytest.raises(ValueError, match="League is for games of programs, not for a TextVectorEnv"):
        PPO(env, word_policy(head=True), CONFIG).learn(100, callbacks=[League()])
    with pytest.raises(ValueError, match=r"give it opponents=\[None\]"):
        PPO(contest_env(opponents=None), word_policy(head=True), CONFIG).learn(100, callbacks=[League()])
    control = cartpole()
    with pytest.raises(ValueError, match="League is for games of programs, not for a"):
        PPO(control, mlp_for(control)).learn(100, callbacks=[League()])
    with pytest.raises(ValueError, match="every is 0 and size 5"):
        League(every=0)
