"""Settings of several samples a prompt are checked, and pass rates have limits over the prompts."""

import numpy as np
import pytest

from algos.statistics.intervals import bootstrap_interval
from algos.statistics.pass_rates import PASS_RATE, PromptSamples, pass_rates, read_sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=0), "k is 0, expected distinct integers of at least 1"),
        (dict(k=()), "k is ()"),
        (dict(k=(1, 8, 8)), "k is (1, 8, 8), expected distinct"),
        (dict(k="8"), "k is '8'"),
        (dict(k=True), "k is True"),
        (dict(k=2.0), "k is 2.0"),
        (dict(k=(1, 8), num_samples=4), "k is 8, but num_samples is 4: pass@8 needs at least 8"),
        (dict(k=1, num_samples=0), "num_samples is 0"),
        (dict(k=1, num_prompts=-1), "num_prompts is -1"),
        (dict(k=1, success="yes"), "success is 'yes'"),
        (dict(k=1, success=float("nan")), "success is nan"),
        (dict(k=1, by=3), "by is 3, expected the name of a column"),
        (dict(k=1, answer="rewards.py:f"), "answer is 'rewards.py:f', expected a function"),
        (dict(k=None, by="level"), "by is 'level', but k is None"),
        (dict(k=None, num_samples=8), "num_samples is 8, but k is None"),
        (dict(k=None, success=0.5), "success is 0.5, but k is None"),
    ],
)
def test_wrong_settings_say_what_is_expected(options, message):
    with pytest.raises((ValueError, TypeError)) as error:
        read_sampling(**options)
    assert message in str(error.value)


def test_samples_are_as_many_as_the_largest_k():
    assert read_sampling(None) is None
    sampling = read_sampling([8, np.int64(1)])
    assert (sampling.k, sampling.num_samples) == ((1, 8), 8)
    assert read_sampling(4).k == (4,)


def prompts(count=12, n=4):
    rng = np.random.default_rng(0)
    for index in range(count):
        returns = (rng.random(n) < index / count).astype(np.float64)
        yield PromptSamples(returns, float(index > 5), [str(x) for x in returns], group=index % 2 * 10)


def test_limits_are_over_prompts_not_samples():
    """With fewer than five prompts of a value there are none."""
    samples = list(prompts())
    rates = pass_rates(samples, read_sampling((1, 4), by="level"))
    means = np.array([prompt.returns.mean() for prompt in samples])
    assert rates.pass_at[1].mean == pytest.approx(means.mean())
    assert rates.pass_at[1][1:3] == pytest.approx(bootstrap_interval(means))
    assert rates.greedy.mean == 0.5 and sorted(rates.majority_at) == [4]
    assert [*rates.by] == [0, 10] and rates.by[10].num_prompts == 6
    assert rates.by[10].pass_at[1].mean == pytest.approx(means[1::2].mean())
    assert pass_rates(samples[:4], read_sampling(1)).pass_at[1].low is None


def test_values_of_the_same_name_are_one():
    """Missing numbers are NaN, which equals nothing, and files have 1 beside "1"."""
    levels = [float("nan"), 2, "1", float("nan"), 1, "10", "hard"]
    samples = [PromptSamples(np.array([index >= 3]), 0.0, None, level) for index, level in enumerate(levels)]
    rates = pass_rates(samples, read_sampling(1, by="level"))
    assert {str(value): of_value.num_prompts for value, of_value in rates.by.items()} == {
        "1": 2, "2": 1, "10": 1, "hard": 1, "nan": 2,
    }  # fmt: skip
    assert rates.numbers()["level=nan/pass@1"] == 0.5 and rates.numbers()["level=1/pass@1"] == 0.5
    assert [*rates.to_dict()["by"]] == [row[0] for row in rates.table()[1][1:]] == ["1", "2", "10", "hard", "nan"]


def test_values_with_control_characters_are_written_with_escapes():
    samples = [PromptSamples(np.array([True]), 0.0, None, level) for level in ("a\x1b[2J", "b\u202e", "a\x1b[2J")]
    rates = pass_rates(samples, read_sampling(1, by="level"))
    assert {value: of_value.num_prompts for value, of_value in rates.by.items()} == {"a\\x1b[2J": 2, "b\\u202e": 1}


def test_a_sum_of_weighted_rewards_passes_despite_rounding():
    paid = float(np.nextafter(np.float32(1), np.float32(0)))
    rates = pass_rates([PromptSamples(np.array([paid]), 0.99, None)], read_sampling(1))
    assert rates.pass_at[1].mean == 1 and rates.greedy.mean == 0
    assert pass_rates([PromptSamples(np.array([0.5]), 0.5, None)], read_sampling(1, success=0.5)).greedy.mean == 1


def test_names_in_logs_tables_and_json_agree():
    rates = pass_rates(list(prompts()), read_sampling((1, 4), by="level"))
    assert {"greedy", "pass@1", "pass@4", "maj@4", "level=10/maj@4"} <= rates.numbers().keys()
    assert all(PASS_RATE.fullmatch(name) for name in rates.numbers())
    assert not PASS_RATE.fullmatch("eval/mean_return")
    header, rows = rates.table()
    assert header == ["level", "prompts", "greedy", "pass@1", "pass@4", "maj@4"]
    assert [row[:2] for row in rows] == [["all", "12"], ["0", "6"], ["10", "6"]]
    assert str(rates).splitlines()[0].split() == header
    data = rates.to_dict()
    assert data["pass@4"]["mean"] == rates.numbers()["pass@4"]
    assert data["by"]["10"]["maj@4"]["mean"] == rates.numbers()["level=10/maj@4"]
