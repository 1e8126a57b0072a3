"""What a reward function may return: any kind of number, in the order of the completions."""

import decimal
import fractions
import json

import numpy as np
import pandas as pd
import pytest
import torch

from algos import PPO, Callback, LMPolicy, PPOConfig
from tests.helpers.errors import refused
from tests.helpers.models import make_gpt2
from tests.helpers.text_envs import make_env
from textenv import Rewards, check_reward
from textenv.rewards.scores import RewardError, Scores

NUMBERS = [1.0, 0.0, 2.0, 0.5]
ROWS = {"prompts": ["?"] * 4, "completions": ["a", "b", "c", "d"], "completion_ids": [[1, 2]] * 4}


def scores_of(returned):
    return Rewards(lambda completions: returned)(**ROWS)


@pytest.mark.parametrize(
    "returned",
    [
        *([kind(x) for x in NUMBERS] for kind in (np.float32, np.float16, np.longdouble, fractions.Fraction)),
        [decimal.Decimal(str(x)) for x in NUMBERS],
        [torch.tensor(x, dtype=torch.bfloat16) for x in NUMBERS],
        np.array(NUMBERS, dtype=np.float32),
        np.array(NUMBERS, dtype=object),
        torch.tensor(NUMBERS, requires_grad=True),
        pd.Series(NUMBERS, dtype="float32"),
        pd.Series(NUMBERS, index=[3, 7, 10, 11]),
        Scores(score=[np.float32(x) for x in NUMBERS]),
        Scores(score=np.array(NUMBERS, dtype=np.float32)),  # type: ignore[arg-type]
        {"part": np.array(NUMBERS, dtype=np.float32)},
        [{"part": np.float32(x)} for x in NUMBERS],
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_numbers_of_every_kind_are_scores(returned):
    earned = scores_of(returned).score
    assert earned == NUMBERS and {type(score) for score in earned} == {float}


@pytest.mark.parametrize("kind", [bool, np.bool_, np.int64, torch.tensor])
def test_true_pays_1_and_false_0(kind):
    assert scores_of([kind(True), kind(False), kind(1), kind(0)]).score == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "tokens",
    [
        [decimal.Decimal("0.5"), decimal.Decimal(2)],
        [np.float32(0.5), np.float32(2)],
        [torch.tensor(0.5), torch.tensor(2.0)],
        pd.Series([0.5, 2.0], index=[8, 3]),
        np.array([0.5, 2.0], dtype=object),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_numbers_of_every_kind_are_scores_of_tokens(tokens):
    for score in scores_of([tokens] * 4).score:
        assert score.dtype == np.float32 and score.tolist() == [0.5, 2.0]


OUT_OF_ORDER = {
    "set": ({3.0, 1.0, 2.0, 0.5}, "a set, which has no order"),
    "sorted": (pd.Series(NUMBERS).sort_values(), r"a Series with the index \[1, 3, 0, 2\].*sort_index"),
    "by its answer": (
        pd.Series(NUMBERS, index=[*"badc"]).sort_index(),
        r"index \['a', 'b', 'c', 'd'\], which does not",
    ),
    "filtered": (pd.Series(NUMBERS, index=[3, 9, 7, 5]), r"index \[3, 9, 7, 5\], which does not show its order"),
    "named": ({"part": pd.Series(NUMBERS).sort_values()}, r"a Series with the index \[1, 3, 0, 2\]"),
    "frame": (pd.DataFrame({"a": NUMBERS, "b": NUMBERS, "c": NUMBERS}), "a DataFrame, whose entries are names"),
    "bytes": (b"1234", "returned b'1234' for 4 completions"),
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_unordered_scores_are_refused(name):
    returned, words = OUT_OF_ORDER[name]
    with pytest.raises(RewardError, match=words):
        scores_of(returned)
    if name != "named":
        with pytest.raises(ValueError, match="count and type"):
            check_reward(lambda completions: returned, **{key: ROWS[key] for key in ("prompts", "completions")})


def test_logged_values_are_in_order_too():
    def logs(completions, log):
        log("length", pd.Series([3, 1, 2, 4]).sort_values())
        return [0.0] * 4

    with pytest.raises(RewardError, match=r"log\('length', ...\) was given"):
        Rewards(logs)(**ROWS)


def test_parts_of_scores_are_numbers():
    scores = scores_of(Scores(score=NUMBERS, parts={"a": np.array(NUMBERS, np.float32)}, raw={"a": [None, 1, 2, 3]}))
    assert json.loads(json.dumps([scores.parts, scores.raw]))[0] == {"a": NUMBERS}
    with refused(RewardError, "has 'much' for row 1"):
        scores_of(Scores(score=NUMBERS, parts={"a": [1.0, "much", 2.0, 3.0]}))
    with refused(RewardError, "returned nan for row 2"):
        scores_of(Scores(score=[1.0, 2.0, float("nan"), 3.0]))


def test_numpy_and_torch_numbers_are_written_to_runs(tmp_path):
    def reward(completions):
        return Scores(score=[np.float32(len(text)) for text in completions])

    class Adds(Callback):
        def on_iteration(self, run, metrics):
            metrics |= {"half": np.float32(0.5), "count": np.int64(3), "flag": np.bool_(True), "two": torch.tensor(2.0)}

    env = make_env(reward, num_envs=4)
    agent = PPO(env, LMPolicy(make_gpt2(), env.tokenizer), PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4))
    agent.learn(20, run_dir=tmp_path, callbacks=[Adds()], sample_every=1)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows and all(row["score"] == len(row["completion"]) for row in rows)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert [first[name] for name in ("half", "count", "flag", "two")] == [0.5, 3, True, 2.0]
