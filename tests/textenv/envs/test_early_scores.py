"""`score_while_generating`: the same scores, computed while later episodes are generated."""

import threading

import numpy as np
import pytest
import torch

from tests.helpers.conversations import Parrot, chat_tokenizer
from tests.helpers.models import WORDS
from tests.helpers.text_envs import BAD, EOS, GOOD, Script, good, make_env, play, text_env
from textenv import HumanReward, Rewards, TextVectorEnv, check_text_env
from textenv.envs.string_env import StringGames
from textenv.envs.task import FunctionTask
from textenv.lm.ends import turn_ends
from textenv.rewards import Normalize, clip, whiten
from textenv.rewards.scores import RewardError, StopTraining

WAIT = 60
"""Seconds after which a handshake has failed."""


def answers(count, seed=0):
    """Answers of one to five tokens."""
    rng = np.random.default_rng(seed)
    return [(*rng.choice([GOOD, BAD], size=rng.integers(0, 4)), EOS) for _ in range(count)]


def parts(completions, completion_ids, log):
    """Named parts that do not apply everywhere, one of them per token; and logged numbers."""
    log("length", [len(ids) for ids in completion_ids])
    return [
        {"dense": [0.25] * len(ids)} | ({"good": float(text.count("good"))} if text else {})
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


def none(completions):
    return [None if "bad" in text else 1.0 for text in completions]


REWARDS = {
    "parts": lambda: parts,
    "none": lambda: none,
    "several": lambda: Rewards({"p": (parts, 0.5), "n": none}),
    "workers": lambda: Rewards(parts, workers=2),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rollouts_and_metrics_are_the_same_as_without(name):
    early, late = (make_env(REWARDS[name](), score_while_generating=flag) for flag in (True, False))
    for seed in range(3):
        one, other = (play(env, answers(10, seed), seed=seed) for env in (early, late))
        assert all(torch.equal(one[key], other[key]) for key in other.keys())
        assert early.metrics == late.metrics and early.samples(range(10)) == late.samples(range(10))


def games(**options):
    return TextVectorEnv(StringGames(Parrot, tokenizer=chat_tokenizer()), tokenizer=chat_tokenizer(), num_envs=2,
                         max_prompt_tokens=9, max_new_tokens=3, max_turns=3, **options)  # fmt: skip


def test_turns_are_scored_before_the_episode_ends():
    found, calls = [], []
    for flag in (True, False):
        env = games(score_while_generating=flag)
        score, counts = env.task.score, []
        env.task.score = lambda turns, score=score, counts=counts: counts.append(len(turns)) or score(turns)
        env.start_episodes(6, seed=0)
        rng = np.random.default_rng(0)
        while env.running.any():
            env.advance(rng.integers(0, 6, size=2))
        found.append(env.take_episodes())
        calls.append(counts)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1].keys())
    assert calls[1] == [18] and sum(calls[0]) == 18 and len(calls[0]) > 2 and min(calls[0][:-1]) >= 2


@pytest.mark.parametrize("flag", [False, True])
def test_the_environment_is_a_correct_one(flag):
    check_text_env(make_env(score_while_generating=flag))


# --- at the same time -----------------------------------------------------------------------------------------


def test_generation_goes_on_during_the_reward():
    """The reward of the first portion returns only after a later episode has ended."""
    ended, calls = threading.Event(), []

    def slow(completions):
        calls.append((len(completions), ended.wait(WAIT)))
        return [float(len(text)) for text in completions]

    env = make_env(slow, num_envs=2, score_while_generating=True)
    env.start_episodes(8, seed=0)
    finished = 0
    while env.running.any():
        before = env.running.sum()
        _, changed = env.advance(np.full(2, EOS))
        finished += int(changed[:before].sum())
        if finished > 4:
            ended.set()
    env.take_episodes()
    assert calls == [(2, True)] * 4


def test_portions_depend_on_episodes_not_on_time():
    """A quarter of the batch at least, in order; the last call has the rest."""
    calls = []

    def look(completions, completion_ids):
        calls.append([len(ids) for ids in completion_ids])
        return [1.0] * len(completions)

    env = make_env(look, num_envs=3, score_while_generating=True)
    play(env, [(EOS,), (GOOD,) * 5, (EOS,), (GOOD, EOS), (GOOD, EOS), (EOS,), (GOOD,) * 5, (EOS,)], seed=0)
    assert [len(call) >= 2 for call in calls[:-1]] == [True] * (len(calls) - 1) and len(calls) > 2
    assert sum(map(len, calls)) == 8
    again, calls[:] = list(calls), []
    play(env, [(EOS,), (GOOD,) * 5, (EOS,), (GOOD, EOS), (GOOD, EOS), (EOS,), (GOOD,) * 5, (EOS,)], seed=0)
    assert calls == again


# --- failures -------------------------------------------------------------------------------------------------


def test_a_failure_keeps_answers_and_can_be_repeated():
    calls = []

    def fails(completions, completion_ids):
        calls.append(completion_ids)
        raise KeyError("no such thing")

    env = make_env(Rewards({"mine": fails}), score_while_generating=True)
    texts = answers(8)
    with pytest.raises(RewardError, match="reward 'mine' raised KeyError: 'no such thing' in row 0") as caught:
        play(env, texts, seed=0)
    assert [answer["completion_ids"] for answer in caught.value.answers] == [list(answer) for answer in texts]
    assert len(calls[0]) < 8
    assert all(ids in calls[0] for call in calls for ids in call), "the portions after the one that failed are scored"
    env.task.rewards = Rewards(parts)
    later = make_env(parts)
    play(later, texts, seed=0)
    assert env.take_episodes()["mask"].any() and env.metrics == later.metrics


def test_a_request_to_stop_is_made_once():
    calls = []

    def stops(completions):
        calls.append(len(completions))
        raise StopTraining("the person quit")

    with pytest.raises(StopTraining, match="the person quit"):
        play(make_env(stops, score_while_generating=True), answers(8), seed=0)
    assert len(calls) == 1


def test_an_abandoned_batch_is_not_scored_further():
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slow(completions):
        calls.append(list(completions))
        begun.set()
        assert go_on.wait(WAIT)
        return [1.0] * len(completions)

    env = make_env(slow, num_envs=2, score_while_generating=True)
    env.start_episodes(8, seed=0)
    for _ in range(3):
        env.advance(np.full(2, EOS))
    assert begun.wait(WAIT)
    env.start_episodes(2, seed=0)
    go_on.set()
    while env.running.any():
        env.advance(np.full(2, GOOD))
    assert env.take_episodes()["reward"].sum() == 2
    assert [len(call) for call in calls] == [2, 2] and calls[0] == ["", ""] != calls[1]


WHOLE = {
    "normalize": lambda path: Normalize(parts),
    "inside": lambda path: Rewards({"a": none, "b": clip(whiten(none), -1, 1)}),
    "nested": lambda path: Rewards(Rewards(whiten(none))),
    "pairs": lambda path: HumanReward(path, scale="pairs"),
    "a fraction": lambda path: HumanReward(path, fallback=none, fraction=0.5),
}


@pytest.mark.parametrize("name", WHOLE)
def test_rewards_that_need_whole_batches_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="needs whole batches .* but score_while_generating passes parts: leave"):
        make_env(WHOLE[name](tmp_path / "answers.jsonl"), score_while_generating=True)


def test_a_function_can_ask_for_whole_batches():
    def ranks(completions):
        return [float(sum(len(text) >= len(other) for other in completions)) for text in completions]

    ranks.by_batch = True
    with pytest.raises(ValueError, match="reward 'ranks' needs whole batches"):
        make_env(ranks, score_while_generating=True)


def test_a_task_of_ones_own_is_scored_early_too():
    """Steps are scored at once."""
    env = text_env(Script(), score_while_generating=True)
    assert play(env, answers(6), seed=0)["reward"].sum() == sum(answer.count(GOOD) for answer in answers(6))
    env.reset(seed=0)
    env.step(np.full(3, GOOD))
    assert env.step(np.full(3, EOS))[1].tolist() == [1, 1, 1]


def test_a_task_with_state_whose_long_prompts_are_skipped_is_one_object():
    """The early scores called the user's object, while the environment saved the state of its own copy."""

    class Counting(FunctionTask):
        calls = 0

        def score(self, turns):
            self.calls += len(turns)
            return super().score(turns)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    task = Counting(["a b", "a b c d a b"], good)
    env = text_env(task, overlong="skip", score_while_generating=True)
    play(env, [(GOOD, EOS)] * 8, seed=0)
    assert env.task.calls == 8


def test_ends_that_leave_no_token_are_refused_each_time():
    env = make_env(forbidden=[GOOD], min_new_tokens=2)
    every_other = turn_ends(env.tokenizer)._replace(ids=tuple(set(range(len(WORDS))) - {GOOD}))
    for _ in range(2):  # the second call passed, and no token was left
        with pytest.raises(ValueError, match="leaves no token"):
            env.end_turns_like(every_other)
    assert env.reset(seed=0)[1]["action_mask"].any()
