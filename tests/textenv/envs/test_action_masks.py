"""Constrained decoding by a list: of texts, one of which is the answer, or of tokens."""

import numpy as np
import pytest
import torch

from algos import LMPolicy, collect
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import TextVectorEnv
from textenv.envs.action_masks import ActionMasks, next_ids

EOS = 0


def play(allowed, *, episodes=64, max_new_tokens=6, **options):
    tokenizer = make_tokenizer(WORDS)
    policy = LMPolicy(make_gpt2(), tokenizer, seed=1, temperature=4.0)
    env = TextVectorEnv(
        prompts=["a b"], reward=lambda completions: [1.0] * len(completions), tokenizer=tokenizer, num_envs=8,
        allowed=allowed, max_new_tokens=max_new_tokens, **options,
    )  # fmt: skip
    rollout = collect(env, policy, num_episodes=episodes, seed=1)
    return [sample["completion"] for sample in env.samples(range(episodes))], rollout


def test_a_turn_is_one_of_the_texts():
    texts = ["a", "a b", "c"]
    answers, rollout = play(texts)
    assert {answer.strip() for answer in answers} == set(texts)
    by_function, same = play(lambda turn: next_ids(turn, texts))
    assert answers == by_function
    for name in ("action", "log_prob", "terminated", "truncated"):
        assert torch.equal(rollout[name], same[name]), name
    assert rollout["terminated"].any(1).all()


def test_a_turn_has_only_the_tokens_of_a_list():
    ids = make_tokenizer(WORDS)("a b", add_special_tokens=False)["input_ids"]
    answers, rollout = play(np.array(ids))
    assert {word for answer in answers for word in answer.split()} == {"a", "b"} and all(answers)
    assert rollout["terminated"].any() and len(set(answers)) > 2
    single, _ = play(ids, max_new_tokens=1)
    assert {answer.strip() for answer in single} == {"a", "b"}


@pytest.mark.parametrize("allowed, kind, said", [
    ("yes", TypeError, "allowed is 'yes', expected a list of texts"),
    ({"a": 1}, TypeError, "expected a list of texts"),
    (3, TypeError, "expected a list of texts"),
    ([True, False], TypeError, "expected a list of texts"),
    ([1.5], TypeError, "expected a list of texts"),
    (["a", 3], TypeError, "expected a list of texts"),
    (str, TypeError, "expected a list of texts"),
    ([], ValueError, "allowed is empty"),
    ([""], ValueError, "0 tokens, expected 1 to max_new_tokens, 6"),
    (["a b c a b c a"], ValueError, "7 tokens, expected 1 to max_new_tokens, 6"),
    ([-1], ValueError, "expected ids from 0 to"),
    ([10_000], ValueError, "expected ids from 0 to"),
])  # fmt: skip
def test_a_wrong_list_is_refused_at_construction(allowed, kind, said):
    with refused(kind, said):
        play(allowed)


def test_masks_of_many_rows_are_those_of_each_row():
    masks = ActionMasks(5, forbidden=[0], ends=[4], min_new_tokens=2, rule=lambda turn: turn)
    turns = [[1, 2], None, [3], None]
    together = masks.index(lambda i: turns[i], np.array([0, 1, 2, 3]))
    each = [masks.index(lambda i, turn=turn: turn, np.array([n]))[0] for n, turn in enumerate(turns)]
    assert together.tolist() == each
    assert [masks.sets[i].nonzero().squeeze(-1).tolist() for i in together] == [[1, 2], [1, 2, 3], [3], [1, 2, 3, 4]]
