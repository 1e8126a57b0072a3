"""PITFALLS rows about an update: junk outside the mask, padding, cuts, empty rows, orders, and that it learns."""

import copy
import math

import pytest
import torch

from algos import collect
from algos.training.metrics import EpisodeMeter, reference_metrics
from tests.algos.pitfalls.test_pitfalls_data import padded
from tests.algos.pitfalls.test_pitfalls_maths import junk
from tests.helpers.models import make_gpt2, make_llama
from tests.helpers.oracle import Problem, TabularPolicy
from tests.helpers.pitfall_tools import (
    EOS,
    GOOD,
    Script,
    agent_of,
    cartpole,
    close_gradients,
    control_rollout,
    gradients,
    lm_policy,
    mlp_for,
    play,
    scored,
    text_env,
)
from textenv import KLPenalty
from textenv.rollout import Evaluation

ANSWERS = [(5, 1, EOS), (EOS,), (3, 3, 3, 3, 3), (6, 5, 0, 2, EOS), (1, EOS), (2, 2, 2, EOS), (5, 5, 5, 5, EOS)]
BUSY = dict(num_epochs=2, minibatch_size=3, micro_batch_size=2, learning_rate=1e-2, clip_range_vf=0.1,
            ent_coef=0.01)  # fmt: skip


# --- row 13: NaN × 0 -------------------------------------------------------------------------------------------------


def make_lm():
    env, policy = text_env(), lm_policy()
    return env, policy, scored(play(env, ANSWERS), policy), BUSY


def make_tabular():
    problem = Problem(seed=0, beta=0.1)
    env, policy = problem.environment(), TabularPolicy(problem.reference)
    return env, policy, collect(env, policy, num_episodes=12, seed=0), BUSY


def make_mlp():
    env, policy, rollout = control_rollout()
    return env, policy, rollout, BUSY | dict(minibatch_size=50, micro_batch_size=20)


def spoil(rollout, seed):
    """Junk in every column outside the mask: NaN, infinities, and log-probabilities 200 nats away."""
    dirty, mask = rollout.clone(), rollout["mask"]
    for number, name in enumerate(sorted(rollout.keys())):
        x = rollout[name]
        outside = (~mask).view(*mask.shape, *[1] * (x.ndim - 2)).expand_as(x)
        if x.dtype == torch.float32:
            dirty[name] = torch.where(outside, junk(x.shape, seed + number), x)
        elif name in ("action", "observation"):
            dirty[name] = torch.where(outside & after_the_end(rollout), (x + 1) % 2, x)
    gap = ~mask & (junk(mask.shape, seed) == 3.0)
    dirty["log_prob"] = torch.where(gap, rollout["log_prob"] + 200, dirty["log_prob"])
    return dirty


def after_the_end(rollout):
    """True where the row's episode is over: what stands there is not even part of a text."""
    done = (rollout["terminated"] | rollout["truncated"]).int()
    return (done.cumsum(1) - done > 0) & ~rollout["mask"]


def spoil_policy(policy, seed):
    """Junk outside the mask in what the policy says, with a gradient: a sum, for `where` would stop it."""
    evaluate, values = policy.evaluate, policy.values

    def outside(mask):
        return torch.where(mask, 0.0, junk(mask.shape, seed))

    def dirty(rollout):
        return Evaluation(*(x + outside(rollout["mask"]) for x in evaluate(rollout)))

    policy.evaluate = dirty
    policy.values = lambda rollout: tuple(x + outside(rollout["mask"]) for x in values(rollout))
    return policy


def other_weights(policy):
    """A reference near the policy."""
    reference = copy.deepcopy(policy.lm if hasattr(policy, "lm") else policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in reference.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return reference


def update_with_penalty(env, policy, rollout, options, *, spoilt=None):
    """All figures of an update, the gradient of its last minibatch and the new weights."""
    reference = other_weights(policy)
    policy = policy if spoilt is None or not policy.sequential else spoil_policy(policy, spoilt)
    agent = agent_of(env, policy, penalty=KLPenalty(reference, 0.2), **options)
    agent.penalty(rollout, policy)
    metrics = reference_metrics(rollout, coefficient=0.2) | agent.update(rollout)
    return metrics, gradients(policy), {name: p.detach() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("make", [make_lm, make_tabular, make_mlp])
def test_row_13_what_stands_outside_the_mask_changes_no_bit(make):
    expected = update_with_penalty(*make())
    for seed in range(3):
        env, policy, rollout, options = make()
        found = update_with_penalty(env, policy, spoil(rollout, seed), options, spoilt=seed)
        assert found[0] == expected[0] and all(map(math.isfinite, found[0].values()))
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [make_lm, make_mlp])
def test_row_13_the_check_of_kl_0_does_not_look_outside_the_mask(make):
    _, policy, rollout, _ = make()
    KLPenalty(copy.deepcopy(policy).requires_grad_(False), 0.1)(spoil(rollout, 0), policy)


def test_row_13_returns_of_episodes_ignore_what_follows_their_end():
    _, _, rollout, _ = make_lm()
    expected = sorted(zip([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 4.0], map(len, ANSWERS), strict=True))
    assert sorted(zip(*EpisodeMeter().finished(rollout), strict=True)) == expected
    after = after_the_end(rollout)
    rollout["reward"] = rollout["reward"].masked_fill(after, torch.nan)
    rollout["terminated"] = rollout["terminated"] | after
    assert sorted(zip(*EpisodeMeter().finished(rollout), strict=True)) == expected


# --- row 12: padding inside metrics ----------------------------------------------------------------------------------


def test_row_12_ten_pad_columns_change_no_logged_figure():
    found = []
    for columns in (0, 10):
        env, policy, rollout, options = make_lm()
        rollout = padded(rollout, columns)
        returns, lengths = EpisodeMeter().finished(rollout)
        # By Adam's usual eps a step on a gradient that is nothing but rounding would be as long as any.
        metrics, _, weights = update_with_penalty(env, policy, rollout, options | dict(adam_eps=1e-5))
        moved = sum(weight.norm().item() for weight in weights.values())
        found.append(metrics | {"returns": sum(returns), "lengths": sum(lengths), "weights": moved})
    assert len(found[0]) > 12 and found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert found[0]["policy/entropy"] > 0


def test_row_12_logged_figures_equal_those_worked_out_from_the_model_itself():
    """Entropy, value and KL figures of unpadded rows by `transformers`, over the policy's own tokens."""
    env, policy, rollout, _ = make_lm()
    other = lm_policy(lambda: make_gpt2(seed=5)).lm.requires_grad_(False)
    penalty = KLPenalty(other, 0.5)
    penalty(rollout, policy)
    agent = agent_of(env, policy, penalty=penalty)
    metrics = reference_metrics(rollout, coefficient=0.5) | agent.update(rollout)
    rows = [unpadded(policy, rollout, row) for row in range(len(ANSWERS))]
    entropy, value = (torch.cat([row[k] for row in rows]).detach() for k in ("entropy", "value"))
    kl = torch.cat([row["log_prob"].detach() for row in rows]) - torch.cat(
        [unpadded(policy, rollout, row, model=other.model)["log_prob"] for row in range(len(ANSWERS))]
    )
    expected = {"policy/entropy": entropy.mean(), "value/mean": value.mean(), "reference/kl": kl.sum() / len(ANSWERS),
                "reference/kl_per_step": kl.mean(), "policy/approx_kl": 0, "policy/clip_frac": 0}  # fmt: skip
    for name, figure in expected.items():
        assert metrics[name] == pytest.approx(float(figure), abs=1e-5), name


def test_row_12_kl_an_episode_counts_only_the_episodes_that_were_collected():
    """In control, slots that are done play on outside the mask: those ends are no episodes of the rollout."""
    env = cartpole(3)
    policy, other = mlp_for(env), mlp_for(env, seed=4)
    rollout = collect(env, policy, num_episodes=4, seed=0)
    KLPenalty(other, 0.1)(rollout, policy)
    total = rollout["kl"][rollout["mask"]].sum().item()
    assert reference_metrics(rollout, coefficient=0.1)["reference/kl"] == pytest.approx(total / 4, rel=1e-4)


# --- row 18: how a batch is cut --------------------------------------------------------------------------------------


def unpadded(policy, rollout, row, model=None):
    """log_prob, entropy and value at one row's own tokens, by `transformers` on the bare sequence."""
    model, mask = policy.lm.model if model is None else model, rollout["mask"][row]
    stop = int(mask.nonzero().max()) + 1
    ids = rollout["observation"][row : row + 1, :stop]
    every = model(ids).logits[0].log_softmax(-1)[mask[:stop]]
    log_prob = every.gather(1, rollout["action"][row][mask][:, None])[:, 0]
    value = policy.value_head(model.base_model(ids).last_hidden_state[0, mask[:stop]])[:, 0]
    return {"log_prob": log_prob, "entropy": -(every.exp() * every).sum(-1), "value": value}


@pytest.mark.parametrize("micro", [1, 2, None])
@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_row_18_the_gradient_does_not_depend_on_how_the_minibatch_is_cut(make, micro):
    """Lengths 1, 3 and 5: by autograd on bare sequences, one mean over all nine tokens."""
    env, policy = text_env(Script(scores=[2.0, -1.0, 1.0])), lm_policy(make)
    rollout = scored(play(env, [(EOS,), (5, 1, EOS), (3, 3, 3, 3, 3)]), policy)
    options = dict(micro_batch_size=micro, normalize_advantage=False, ent_coef=0.03, vf_coef=0.4)
    agent_of(env, policy, **options).update(rollout)
    found, loss = gradients(policy), 0.0
    policy.zero_grad()
    for row in range(3):
        mask, own = rollout["mask"][row], unpadded(policy, rollout, row)
        error = (own["value"] - rollout["value_target"][row][mask]).square()
        gain = rollout["advantage"][row][mask] * own["log_prob"]
        loss = loss + (0.2 * error - gain - 0.03 * own["entropy"]).sum() / 9
    loss.backward()
    close_gradients(found, gradients(policy))


@pytest.mark.parametrize("micro", [1, 7, None])
def test_row_18_the_gradient_of_steps_does_not_depend_on_the_cut_either(micro):
    env, policy, rollout = control_rollout(24 * 2)
    agent_of(env, policy, micro_batch_size=micro, vf_coef=0.4).update(rollout)
    found = gradients(policy)
    policy.zero_grad()
    steps = rollout[rollout["mask"]]
    gain = (steps["advantage"] - steps["advantage"].mean()) / steps["advantage"].std(correction=0)
    chosen = torch.distributions.Categorical(logits=policy.actor(steps["observation"])).log_prob(steps["action"])
    error = (policy.critic(steps["observation"])[:, 0] - steps["value_target"]).square()
    (0.2 * error - gain * chosen).mean().backward()
    close_gradients(found, gradients(policy))


# --- row 25: empty and constant rows ---------------------------------------------------------------------------------


def with_empty_rows(rollout, count):
    """The rollout with rows on top in which the policy chose nothing, though the environment paid."""
    empty = rollout[:count].clone()
    empty["mask"] = torch.zeros_like(empty["mask"])
    empty["reward"] = empty["reward"] + 5
    return torch.cat([empty, rollout])


def test_row_25_empty_rows_move_nothing_and_are_counted():
    env, policy, rollout, options = make_lm()
    plain, *expected = update_with_penalty(env, policy, rollout, options)
    env, policy, rollout, options = make_lm()
    agent = agent_of(env, policy, penalty=KLPenalty(other_weights(policy), 0.2), **options)
    rollout = with_empty_rows(rollout, 2)
    agent.penalty(rollout, policy)
    metrics = agent.update(rollout)
    assert (metrics["rollout/empty_rows"], plain["rollout/empty_rows"]) == (2, 0)
    same = {name: plain[name] for name in metrics if name != "rollout/empty_rows"}
    assert {name: metrics[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-5)
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(weight, expected[1][name], atol=1e-5, rtol=0)


def test_row_25_a_rollout_without_any_step_of_the_policy_moves_nothing_and_is_counted():
    """NEXT_STEP slots that were all reset at once give such a rollout with ``steps=1``."""
    env, policy, rollout, options = make_lm()
    before = copy.deepcopy(policy.state_dict())
    rollout["mask"] = torch.zeros_like(rollout["mask"])
    metrics = agent_of(env, policy, **options).update(rollout)
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert metrics["rollout/empty_rows"] == len(ANSWERS)


@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3])
def test_row_25_a_constant_reward_gives_the_policy_no_gradient(reward):
    """γ = λ = 1 and a fresh head: every advantage is the same number, so none is better than another."""
    env, policy = text_env(Script(scores=[reward] * len(ANSWERS))), lm_policy(head=False)
    rollout = scored(play(env, ANSWERS), policy)
    metrics = agent_of(env, policy, gamma=1.0, gae_lambda=1.0, vf_coef=0.0).update(rollout)
    assert all(g.abs().max() == 0 for g in gradients(policy).values())
    assert metrics["advantage/mean"] == pytest.approx(reward)


# --- row 28: permutations --------------------------------------------------------------------------------------------


def orders(agent, rollout):
    """The serial numbers of an update's units in the order in which they are evaluated, one list an epoch."""
    seen, evaluate = [], agent.policy.evaluate

    def spy(batch):
        seen.extend(batch["serial"].flatten(1)[:, 0].tolist() if batch.ndim > 1 else batch["serial"].tolist())
        return evaluate(batch)

    agent.policy.evaluate = spy
    agent.update(rollout)
    size = len(seen) // agent.config.num_epochs
    return [seen[start : start + size] for start in range(0, len(seen), size)]


@pytest.mark.parametrize("kind", ["steps", "rows"])
def test_row_28_each_epoch_visits_every_sample_once_in_another_order(kind):
    if kind == "steps":
        env, policy, rollout = control_rollout()
        serial = torch.arange(rollout.numel()).view(rollout.shape)
        expected = serial[rollout["mask"]].tolist()
    else:
        env, policy = text_env(), lm_policy()
        rollout = with_empty_rows(collect(env, policy, num_episodes=20), 2)
        serial, expected = torch.arange(22)[:, None].expand(rollout.shape), list(range(2, 22))
    rollout["serial"] = serial
    found = orders(agent_of(env, policy, num_epochs=4, minibatch_size=7, micro_batch_size=3), rollout)
    assert all(sorted(epoch) == expected for epoch in found)
    assert len({tuple(epoch) for epoch in [*found, expected]}) == 5


# --- row 30: GAE learns ----------------------------------------------------------------------------------------------


def learning_curve(gae_lambda, seed):
    """Returns of 12 small updates: 8 tokens, score = share of the word "good" among them, paid at the end."""
    task = Script(scores=lambda turns: [turn.completion_ids.count(GOOD) / 8 for turn in turns])
    env = text_env(task, num_envs=32, max_new_tokens=8, forbidden=[EOS])
    policy = lm_policy(lambda: make_gpt2(seed=seed), head=False, seed=seed)
    options = dict(num_episodes=32, num_epochs=2, minibatch_size=16, learning_rate=2e-3, max_grad_norm=1.0, seed=seed)
    agent = agent_of(env, policy, gamma=1.0, gae_lambda=gae_lambda, vf_coef=0.1, **options)
    return [row["episode/return"] for row in agent.learn(12 * 32 * 8)]


def test_row_30_gae_with_gamma_1_learns_at_least_as_fast_as_one_step_advantages():
    """Area under the curve on every seed (with some slack), and clearly so on their mean."""
    curves = {lam: torch.tensor([learning_curve(lam, seed) for seed in range(3)]) for lam in (0.95, 0.0)}
    gae, one_step = (curves[lam].mean(1) for lam in (0.95, 0.0))
    assert (curves[0.95][:, -3:].mean(1) > 0.85).all() and curves[0.95][:, 0].mean() < 0.4
    assert (gae > one_step - 0.02).all() and gae.mean() > one_step.mean() + 0.1, (gae, one_step)
