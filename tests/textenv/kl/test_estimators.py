"""KL estimators by enumeration: their values, and which combinations warn."""

import warnings

import pytest
import torch

from tests.helpers.kl_cases import COMBINATIONS, RIGHT, Kl, ThreeTokens
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import KLPenalty, KLReward, LanguageModel, TextEnv
from textenv.kl.estimators import k1, k2, k3


def test_k1_and_k3_estimate_the_kl_and_k2_does_not():
    case = ThreeTokens()
    exact = Kl(case.own, case.other).item()
    log_ratio = case.own.logits - case.other.logits
    mean = {f: (case.own.probs * f(log_ratio)).sum().item() for f in (k1, k2, k3)}
    assert exact > 0.1
    assert mean[k1] == pytest.approx(exact, abs=1e-6) and mean[k3] == pytest.approx(exact, abs=1e-6)
    assert abs(mean[k2] - exact) > 0.01, "biased: equal only to second order"
    assert (k2(log_ratio) >= 0).all() and (k3(log_ratio) >= 0).all() and (k1(log_ratio) < 0).any()
    torch.testing.assert_close(k3(log_ratio.double() / 100), k2(log_ratio.double() / 100), rtol=0.02, atol=0)


@pytest.mark.parametrize(("name", "place"), COMBINATIONS)
def test_combinations_of_a_wrong_gradient_warn(name, place):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        KLPenalty(None, 0.1, name, place)
    assert len(seen) == ((name, place) not in RIGHT)
    words = {("k2", "reward"): "second order", ("k3", "reward"): "cancel", ("k3", "loss"): "KL(π_ref‖π)",
             ("exact", "reward"): "current state"}  # fmt: skip
    for warning in seen:
        assert words[name, place] in str(warning.message) and warning.filename == __file__


def test_a_function_of_ones_own_that_is_k1_in_the_loss_warns():
    """Its derivative is constant; others pass, and in the reward k1 is right."""

    def mine(log_ratio):
        return 2 * log_ratio + 1

    with pytest.warns(UserWarning, match="'mine' is linear in the log-ratio, as k1: .*drives the policy away"):
        KLPenalty(None, 0.1, mine, "loss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KLPenalty(None, 0.1, mine, "reward")
        KLPenalty(None, 0.1, lambda log_ratio: k2(log_ratio) + log_ratio, "loss")
        KLPenalty(None, 0.1, lambda log_ratio: log_ratio.clamp(-1, 1), "loss")
        KLPenalty(None, 0.1, lambda log_ratio: log_ratio[3, 4], "loss")


@pytest.mark.parametrize("estimator", ["k1", k1])
def test_k1_in_the_loss_is_refused(estimator):
    case = ThreeTokens()
    log_ratio = case.own.logits - case.other.logits
    assert case.gradient((case.own.probs.detach() * k1(log_ratio)).sum()).abs().max() < 1e-6
    with pytest.raises(ValueError, match="expected gradient is 0.*'k2' or 'exact'"):
        KLPenalty(case.reference, 0.1, estimator, "loss")


def test_unknown_estimators_are_refused():
    with pytest.raises(ValueError, match="'k4'.*k1, k2, k3, exact"):
        KLPenalty(None, 0.1, "k4")
    with pytest.raises(ValueError, match="'advantage'.*'reward' or 'loss'"):
        KLPenalty(None, 0.1, "k1", "advantage")
    tokenizer = make_tokenizer(WORDS)
    env = TextEnv(prompts=["a"], reward=lambda prompts, **_: [0.0] * len(prompts), tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="current state"), pytest.raises(ValueError, match="one action"):
        KLReward(env, LanguageModel(make_gpt2(), tokenizer), 0.1, "exact")
