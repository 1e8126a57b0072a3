"""Opponents: who plays whom, what they read, and what the log says of the games."""

import gymnasium
import numpy as np
import pytest
import torch

import textenv  # noqa: F401 (registers the environments)
from algos import LMPolicy, collect, evaluate
from tests.helpers.programs import played, program_env, turns_of, word_policy
from textenv.programs.tic_tac_toe import perfect_player, random_player


def higher(first, second):
    """Each says a word, and the longer one wins."""
    one = first("a", max_tokens=1).strip()
    other = second("b", max_tokens=1).strip()
    difference = float(len(one) - len(other))
    return np.sign(difference), -np.sign(difference)


def says_bad(content):
    return "bad"


def says_nothing(content, rng):
    return rng.choice(["", "x" * 9])


def test_the_policy_plays_one_agent_against_an_opponent():
    rollout, env = played(higher, 4, agents=2, opponents=[says_bad], episodes=64)
    asked = rollout["mask"].any(1).reshape(32, 2)
    assert asked.sum(1).tolist() == [1] * 32 and 6 < asked[:, 0].sum() < 26
    for row, turns in enumerate(turns_of(rollout)):
        assert len(turns) == asked.flatten()[row]
    rewards = rollout["reward"].sum(1).reshape(32, 2)
    assert not rewards[~asked].any()
    returns = rewards[asked]
    assert env.metrics["opponents/says_bad/games"] == 32
    assert env.metrics["opponents/says_bad/return"] == pytest.approx(returns.mean().item())
    assert env.metrics["opponents/says_bad/won"] == pytest.approx((returns > 0).float().mean().item())
    assert env.metrics["opponents/says_bad/drawn"] == pytest.approx((returns == 0).float().mean().item())


def test_none_is_the_policy_itself():
    rollout, env = played(higher, 4, agents=2, opponents={"me": None, "bad": says_bad}, episodes=256)
    per_game = rollout["mask"].any(1).reshape(128, 2).sum(1)
    assert env.metrics["opponents/bad/games"] == (per_game == 1).sum() and 40 < (per_game == 2).sum() < 88
    assert "opponents/me/games" not in env.metrics


def test_opponents_and_seats_are_those_of_the_seed_in_any_number_of_slots():
    options = dict(agents=2, opponents=[says_bad, says_nothing, None], episodes=24)
    expected, _ = played(higher, 5, **options)
    for num_envs in (1, 12):
        rollout, _ = played(higher, num_envs, **options)
        for column in expected.keys():
            assert torch.equal(rollout[column], expected[column]), column


def test_games_of_one_group_have_the_same_opponent_and_seat():
    env = program_env(higher, 3, agents=2, opponents=[says_bad, None])
    rollout = collect(env, word_policy(), num_episodes=64, group_size=8, seed=1)
    asked = rollout["mask"].any(1)
    group = rollout["group"][:, 0]
    for number in group.unique():
        assert len(asked[group == number].unique()) == 1


class Batch:
    """Answers many questions at once, each by its seed."""

    def __init__(self):
        self.sizes, self.seeds = [], []

    def answer(self, questions):
        self.sizes.append(len(questions))
        self.seeds += [question.seed for question in questions]
        return ["bad" for _ in questions]


def test_questions_to_a_batch_opponent_are_answered_together():
    batch = Batch()
    played(higher, 16, agents=2, opponents=[batch], episodes=32)
    assert sum(batch.sizes) == 16 and len(batch.sizes) <= 2 and len(set(batch.seeds)) == 16


class Answers:
    """Answers all questions as it was told to."""

    def __init__(self, answers):
        self.answers = answers

    def answer(self, questions):
        return self.answers(questions)


def test_answers_of_a_batch_opponent_are_checked_as_those_of_a_function(caplog):
    options = dict(agents=2, allowed=["good", "bad"], episodes=16)
    with pytest.raises(RuntimeError, match="the opponent 'Answers' answered 'much', expected one of"):
        played(higher, opponents=[Answers(lambda questions: ["much" for _ in questions])], **options)
    with pytest.raises(RuntimeError, match="the opponent 'Answers' returned None, expected a text"):
        played(higher, opponents=[Answers(lambda questions: [None for _ in questions])], **options)
    for wrong in (lambda questions: ["good"] * (len(questions) + 1), lambda questions: "good", lambda questions: None):
        with pytest.raises(TypeError, match="'Answers' returned .* questions, expected a list with an answer to each"):
            played(higher, opponents=[Answers(wrong)], **options)


def test_an_opponent_that_fails_fails_the_program(caplog):
    def fails(content, rng):
        if rng.random() < 0.5:
            raise KeyError("lost")
        return "bad"

    _, env = played(higher, 8, agents=2, opponents=[fails], episodes=32)
    assert 0 < env.metrics["programs/failed"] < 16 and "KeyError: 'lost'" in caplog.text
    assert env.metrics["opponents/fails/games"] == 16

    _, env = played(higher, 8, agents=2, opponents=[says_bad, lambda content: 3], episodes=32)
    assert "the opponent '<lambda>' returned 3, expected a text" in caplog.text


def test_an_agent_who_is_not_asked_gets_nothing():
    """The opponent's question is the only one: no row has its reward, and nothing is trained on."""

    def play(first, second):
        first("a")
        return 1.0, -1.0

    rollout, env = played(play, agents=2, opponents=[says_bad], episodes=32)
    asked = rollout["mask"].any(1).reshape(16, 2)
    assert not asked[:, 1].any() and 0 < asked[:, 0].sum() < 16
    assert rollout["reward"].sum() == asked[:, 0].sum() and env.metrics["programs/failed"] == 0


def test_none_leaves_out_all_agents():
    def play(first, second, rng):
        first("a")
        second("b")
        return None if rng.integers(2) else (1.0, -1.0)

    rollout, env = played(play, agents=2, opponents=[says_bad], episodes=32)
    left_out = env.metrics["reward/left_out"]
    assert 0 < left_out < 16 and rollout["mask"].any(1).sum() == 16 - left_out
    assert env.metrics["opponents/says_bad/games"] == 16


def test_answers_of_opponents_are_the_words_of_the_environment():
    """Without spaces around them, and none that is not allowed."""
    answers = []

    def play(first, second):
        answers.append((first("a", allowed=["good"]), second("b")))
        return 0.0, 0.0

    options = dict(agents=2, allowed=["good", "bad"], episodes=16)
    played(play, opponents=[lambda content, allowed: f" {allowed[0]} "], **options)
    assert {word for pair in answers for word in pair} <= {"good", "bad"}
    played(play, opponents=[random_player], **options)
    with pytest.raises(RuntimeError, match="the opponent 'says_much' answered 'much', expected one of"):
        played(play, opponents=[says_much], **options)


def says_much(content):
    return "much"


def test_opponents_of_one_name_get_numbers():
    env = program_env(higher, agents=2, opponents=[lambda content: "a", lambda content: "b", None, None])
    assert list(env.task.opponents.by_name) == ["<lambda>", "<lambda> 2", "self", "self 4"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(opponents=says_bad), TypeError, "expected a list of opponents, or a mapping"),
        (dict(opponents=[]), ValueError, "opponents is empty"),
        (dict(opponents=["perfect"]), TypeError, "opponent 'perfect' is 'perfect', expected a function"),
        (
            dict(agents=1, play=lambda ask: 1.0, opponents=[says_bad]),
            ValueError,
            "opponents need a program of several agents",
        ),
    ],
)
def test_wrong_opponents_are_refused(arguments, error, message):
    options = dict(play=higher, agents=2) | arguments
    with pytest.raises(error, match=message):
        program_env(options.pop("play"), **options)


def test_registered_games_have_opponents_by_name():
    env = gymnasium.make_vec("textenv/TicTacToe-v0", num_envs=16, opponents=["perfect", "random"])
    assert env.task.opponents.by_name["perfect"] is perfect_player
    result = evaluate(env, LMPolicy.load("embedded"), num_episodes=64)
    assert len(result.returns) == 32 and env.metrics["opponents/perfect/won"] == 0
    with pytest.raises(
        ValueError, match=r"opponents has 'best', expected functions, 'file.py:function', or names among \['perfect'"
    ):
        gymnasium.make_vec("textenv/TicTacToe-v0", opponents=["best"])
    with pytest.raises(ValueError, match="textenv/KuhnPoker-v0 is a program, for which there is no single environment"):
        gymnasium.make("textenv/KuhnPoker-v0")
