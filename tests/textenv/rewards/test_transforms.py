"""Transforms of rewards against numpy: normalised, whitened, clipped."""

import json
import math

import numpy as np
import pytest

from tests.helpers.slow_rewards import sees_training
from textenv import Rewards, rewards
from textenv.rewards import Normalize, clip


def batches():
    rng = np.random.default_rng(0)
    return [rng.normal(1e3, 5, size=n).tolist() for n in (1, 7, 2, 30)]


def echo(x):
    return x


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_normalize_agrees_with_numpy(center, scale):
    normalize, seen = rewards.Normalize(echo, center=center, scale=scale), []
    assert normalize.__name__ == "echo"
    for batch in batches():
        seen += batch
        divisor = (np.std(seen) or 1) if scale else 1
        expected = (np.array(batch) - (np.mean(seen) if center else 0)) / divisor
        found = normalize(x=[None, *batch])
        assert found[0] is None
        np.testing.assert_allclose(found[1:], expected, rtol=1e-9, atol=1e-9)
    assert (normalize.count, normalize.mean) == (40, pytest.approx(np.mean(seen)))
    np.testing.assert_allclose(normalize.variance, np.var(seen), rtol=1e-9)


def test_normalize_goes_on_from_json():
    first, second = rewards.Normalize(echo), rewards.Normalize(echo)
    for batch in batches()[:3]:
        first(x=batch)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    before = first.state_dict()
    assert first(x=[None, None]) == [None, None] and first(x=[]) == [] and first.state_dict() == before
    assert first(x=batches()[3]) == second(x=batches()[3]) and first.state_dict() == second.state_dict() != before


def test_equal_scores_are_not_blown_up():
    assert rewards.Normalize(echo)(x=[0.1] * 7) == pytest.approx([0] * 7, abs=1e-12)
    assert rewards.Normalize(echo, center=False)(x=[0.1] * 7) == pytest.approx([0.1] * 7)
    assert rewards.whiten(echo)(x=[0.1] * 7) == pytest.approx([0] * 7, abs=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_agrees_with_numpy(shift_mean):
    for batch in batches()[1:]:
        x = np.array(batch)
        expected = (x - x.mean()) / x.std() + (0 if shift_mean else x.mean())
        found = rewards.whiten(echo, shift_mean=shift_mean)(x=[*batch, None])
        assert found[-1] is None
        np.testing.assert_allclose(found[:-1], expected, rtol=1e-9, atol=1e-9)
    assert rewards.whiten(echo)(x=[None]) == [None]


def test_transforms_compose_and_clip():
    def length(completions):
        return [None if text == "-" else len(text) for text in completions]

    both = rewards.clip(rewards.Normalize(length), -0.5, 0.5)
    given = dict(prompts=["?"] * 4, completions=["a", "-", "aaa", "aa"], answer=[1] * 4, terminated=[True] * 4)
    assert both.__name__ == "length" and both(**given) == [-0.5, None, 0.5, 0]
    assert rewards.clip(echo, -math.inf, 2)(x=[-1e9, 3, None]) == [-1e9, 2, None]


@pytest.mark.parametrize("transform", [rewards.Normalize, rewards.whiten])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_scores_never_enter_the_mean(transform, bad):
    function = transform(echo)
    with pytest.raises(ValueError, match="'echo' returned (nan|inf) for row 2"):
        function(x=[1.0, None, bad])
    assert function(x=[1.0, 3.0]) == [-1, 1]


def test_nested_whole_batch_functions_are_found():
    inner = clip(Rewards({"a": Normalize(sees_training)}), -1, 1)
    with pytest.raises(ValueError, match="reward 'outer' needs whole batches"):
        Rewards({"outer": Rewards({"inner": inner})}, workers=2)
