"""Every faster way equals a slow and obvious one: values and gradients."""

import inspect
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from algos import MLPPolicy
from algos.advantages import gae
from algos.fast import adam, sampling, towers as fast
from algos.losses import clipped_policy_loss
from algos.policies import distributions, towers
from algos.training.metrics import EpisodeMeter, minibatch_means

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))
from control import compare, ratio


def make_towers(hidden, outputs=(3, 1), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = [towers.tower(5, hidden, size, gain=1.0, generator=generator).to(dtype) for size in outputs]
    for layer in (layer for one in made for layer in one if isinstance(layer, nn.Linear)):
        nn.init.normal_(layer.bias, generator=generator)
    return made


def draws(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# Towers


act = partial(fast.act, inspect.unwrap(towers.act))
value = partial(fast.value, inspect.unwrap(towers.value))
actor_and_critic = partial(fast.actor_and_critic, inspect.unwrap(towers.actor_and_critic))


@pytest.mark.parametrize("rows", [3, 100], ids=["few", "many"])
@pytest.mark.parametrize("hidden", [(), (32,), (32, 48, 16)], ids=str)
def test_twin_towers_equal_two_in_value_and_gradient(hidden, rows):
    """Few and many rows, for tanh is computed in two ways."""
    first, second = make_towers(hidden)
    x = draws(rows, 2, 5).requires_grad_()
    inputs = [x, *first.parameters(), *second.parameters()]
    found, expected = actor_and_critic(x, first, second), (first(x), second(x))
    weights = draws(rows, 2, 3, seed=2), draws(rows, 2, 1, seed=3)
    assert [y.shape for y in found] == [y.shape for y in expected]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    gradients = [torch.autograd.grad(outputs, inputs, weights) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(value(x, first), expected[0], atol=1e-10, rtol=0)


def test_twin_towers_agree_in_training_precision():
    first, second = make_towers((64, 64), dtype=torch.float32)
    x = draws(512, 5, dtype=torch.float32)
    inputs = [*first.parameters(), *second.parameters()]
    found, expected = actor_and_critic(x, first, second), (first(x), second(x))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad([y.mean() for y in outputs], inputs) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_tower_that_is_not_asked_for_has_no_gradient(asked):
    pair = make_towers((8, 8))
    x = draws(4, 5)
    output = actor_and_critic(x, *pair)[asked]
    found = [torch.autograd.grad(output.sum(), [*one.parameters()], retain_graph=True, allow_unused=True)
             for one in pair]  # fmt: skip
    expected = torch.autograd.grad(pair[asked](x).sum(), [*pair[asked].parameters()])
    torch.testing.assert_close(found[asked], expected, atol=1e-10, rtol=0)
    assert all(gradient is None for gradient in found[1 - asked])


def test_twin_towers_are_differentiable_twice():
    first, second = make_towers((6, 7))
    x = draws(4, 5).requires_grad_()
    weights = [p for pair in zip(first, second, strict=True) if isinstance(pair[0], nn.Linear)
               for p in (pair[0].weight, pair[1].weight, pair[0].bias, pair[1].bias)]  # fmt: skip
    outcomes = []
    for outputs in (actor_and_critic(x, first, second), (first(x), second(x))):
        slopes = torch.autograd.grad([y.square().sum() for y in outputs], [x, *weights], create_graph=True)
        outcomes.append(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), [x, *weights]))
    assert outcomes[0][0].abs().max() > 1e-3
    torch.testing.assert_close(*outcomes, atol=1e-8, rtol=0)


def test_modules_of_other_kinds_and_widths_are_called():
    first, second = make_towers((8, 8))
    x = draws(4, 5)
    others = [
        make_towers((8, 9))[1],
        make_towers((8,))[1],
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).double(),
        nn.Sequential(nn.Linear(5, 1), nn.Tanh()).double(),
        nn.Flatten(1),
        nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 1)).double(),
    ]
    for other in others:
        torch.testing.assert_close(actor_and_critic(x, first, other), (first(x), other(x)), atol=1e-10, rtol=0)
        torch.testing.assert_close(actor_and_critic(x, other, first), (other(x), first(x)), atol=1e-10, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(value(x, other), other(x), atol=1e-10, rtol=0)


def test_a_numpy_tower_follows_its_modules_weights():
    """Written in place, moved in memory, replaced, in another precision and back: the arrays are the weights."""
    tower = make_towers((48, 64), dtype=torch.float32)[0]
    other = make_towers((48, 64), dtype=torch.float32)[0]
    nn.init.normal_(other[2].weight)

    def moved(layer):
        layer.weight.data = 2 * layer.weight.data
        layer.bias = nn.Parameter(layer.bias.detach() - 1)

    def cut():  # of the same memory
        tower[4].weight.data, tower[4].bias.data = tower[4].weight.data[:2], tower[4].bias.data[:2]

    def turned():
        tower[2].weight = nn.Parameter(tower[2].weight.detach()[:, :48].T[:, :48])
        tower[2].bias.data, tower[4].weight.data = tower[2].bias.data[:48], tower[4].weight.data[:, :48]

    changes = [
        lambda: None,
        lambda: nn.init.normal_(tower[2].weight),
        lambda: moved(tower[0]),
        lambda: tower.load_state_dict(other.state_dict(), assign=True),
        lambda: tower.share_memory(),
        lambda: tower.double().float(),
        lambda: tower.__setitem__(4, other[4]),
        cut,
        turned,
        lambda: setattr(tower[0], "bias", None),
    ]
    most = fast.LARGEST_PRODUCT // (48 * 64)
    seen = []
    for change in changes:
        change()
        for rows in (0, 1, 7, most, most + 1):  # the last by torch
            x = draws(rows, 5, dtype=torch.float32)
            with torch.no_grad():
                seen.append(tower(x))
            torch.testing.assert_close(act(x.numpy(), tower), seen[-1], atol=1e-5, rtol=1e-5)
    assert (seen[2] - seen[7]).abs().min() > 0 and (seen[7] - seen[12]).abs().min() > 0


def test_a_tower_in_another_precision_is_torchs():
    tower = make_towers((8,))[0]
    with torch.no_grad():
        torch.testing.assert_close(act(draws(3, 5).numpy(), tower), tower(draws(3, 5)), atol=1e-12, rtol=0)


def test_values_are_computed_on_the_rollouts_device():
    policy = MLPPolicy(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)).to("meta")
    value = policy.value(torch.zeros(3, 5, 4, device="meta"))
    assert value.shape == (3, 5) and value.is_meta


@pytest.mark.parametrize("hidden", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (4,), (3, 2, 4)], ids=str)
def test_observations_of_any_batch_shape_are_acted_on(shape, hidden):
    policy = MLPPolicy(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3), hidden=hidden)
    seen = draws(*shape, dtype=torch.float32)
    step = policy.act(seen.numpy(), deterministic=True)
    with torch.no_grad():
        expected = policy.actor(seen).log_softmax(-1).max(-1)
    torch.testing.assert_close(step.log_prob, expected.values, atol=1e-6, rtol=0)
    assert torch.equal(step.action, expected.indices)


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "best"])
def test_numpy_draws_torchs_actions_from_its_noise(deterministic):
    logits, masked = 3 * draws(40, 5, dtype=torch.float32), draws(40, 5) > -0.5
    masked[:, 2] = True
    plain = inspect.unwrap(distributions.draw)
    for some in (logits, logits.masked_fill(~masked, torch.finfo(torch.float32).min)):
        one, other = (torch.Generator().manual_seed(5) for _ in range(2))
        for _ in range(20):
            action, log_prob = sampling.draw(plain, some, one, deterministic)
            expected, expected_log_prob = plain(some, other, deterministic)
            assert torch.equal(action, expected) and action.dtype == torch.int64
            torch.testing.assert_close(log_prob, expected_log_prob, atol=1e-5, rtol=0)
        assert torch.equal(one.get_state(), other.get_state())


def test_non_finite_logits_draw_as_torch_unwarned():
    """It is found, and named, where the rollout is checked."""
    policy = MLPPolicy(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3))
    for bad in (float("nan"), float("inf"), 3e38):
        policy.actor[0].weight.data.fill_(bad)
        step = policy.act(np.ones((2, 2), dtype=np.float32))
        assert step.action.shape == (2,)
    policy.actor[-1].bias.data[1] = float("inf")
    assert policy.act(np.ones((2, 2), dtype=np.float32)).log_prob.isnan().all()


SPACES = [spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3), spaces.MultiDiscrete([2, 3])]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_policy_evaluates_as_its_modules_do(space):
    policy = MLPPolicy(spaces.Box(-1, 1, (2, 2), np.float32), space, seed=3)
    observation = draws(6, 4, 2, 2, dtype=torch.float32)
    output, value = policy.actor(observation.flatten(2)), policy.critic(observation.flatten(2)).squeeze(-1)
    action = (
        policy.distribution.sample(
            output.detach().flatten(0, 1), generator=policy.generator, action_mask=None, deterministic=False
        )[0]
        .detach()
        .unflatten(0, (6, 4))
    )
    rollout = TensorDict({"observation": observation, "action": action}, [6, 4])
    expected = (*policy.distribution.score(output, action), value)
    found = policy.evaluate(rollout)
    torch.testing.assert_close(tuple(found), expected, atol=1e-5, rtol=0)
    gradients = [
        torch.autograd.grad(log_prob.mean() + 0.1 * entropy.mean() + value.square().mean(), [*policy.parameters()])
        for log_prob, entropy, value in (found, expected)
    ]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)


# Adam


def test_adam_equals_torch_with_its_own_clipping():
    """Long and short gradients, a parameter without one now and then, and two dtypes."""
    generator = torch.Generator().manual_seed(0)
    first = [nn.Parameter(draws(*shape, dtype=dtype)) for shape, dtype in
             [((4, 3), torch.float32), ((7,), torch.float32), ((2, 2), torch.float64)]]  # fmt: skip
    second = [nn.Parameter(p.detach().clone()) for p in first]
    ours = adam.Adam([{"params": first}], lr=0.1, eps=1e-5, weight_decay=0.0, fused=True)
    theirs = torch.optim.Adam(second, lr=0.1, eps=1e-5)
    for step in range(12):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.1 / (1 + step)
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            gradient = torch.randn(a.shape, generator=generator).to(a) * (2.0 if step % 3 else 0.01)
            a.grad, b.grad = (None, None) if step % 4 == place else (gradient, gradient.clone())
        norm = ours.clip_grad_norm_(0.5, [0])
        torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(second, 0.5).double(), atol=0, rtol=1e-5)
        ours.step()
        theirs.step()
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)
    assert ours.state[first[0]]["step"] == 9


# Metrics


def test_logged_means_are_sums_without_gradient():
    entries = {name: draws(4, 3, seed=seed).requires_grad_() for seed, name in enumerate("abc")}
    weight = draws(4, 3, seed=6)
    metrics = minibatch_means(TensorDict({"log_weight": weight}, batch_size=[4, 3]), entries)
    for name, x in entries.items():
        torch.testing.assert_close(metrics[name], (x.detach() * weight).sum(), atol=1e-10, rtol=0)
        assert not metrics[name].requires_grad


@pytest.mark.parametrize("higher", [None, 0.4])
def test_the_clipped_loss_is_the_lesser_product(higher):
    log_ratio = (0.5 * draws(200)).requires_grad_()
    advantage, mask = draws(200, seed=2), draws(200, seed=3) > -1
    found = clipped_policy_loss(log_ratio=log_ratio, advantage=advantage, mask=mask, clip_range=0.2, clip_higher=higher)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(0.8, 1.2 if higher is None else 1 + higher)
    expected = -torch.where(mask, torch.minimum(ratio * advantage, clipped * advantage), 0.0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    gradients = [torch.autograd.grad(loss.sum(), log_ratio)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)
    assert (gradients[0] == 0).float().mean() > 0.2


# Columns of a rollout


def random_rollout(generator, rows, steps):
    flags = {"mask": 0.7, "is_init": 0.25, "terminated": 0.2, "truncated": 0.15}
    columns = {name: torch.rand(rows, steps, generator=generator) < share for name, share in flags.items()}
    columns["reward"] = torch.randn(rows, steps, generator=generator)
    return TensorDict(columns, [rows, steps])


def episodes_one_by_one(rollouts):
    """Entry by entry: what begins, counts and ends in each slot."""
    state, ended = {}, []
    for rollout in rollouts:
        found = []
        for t in range(rollout.shape[1]):
            for slot in range(len(rollout)):
                entry = rollout[slot, t]
                if entry["is_init"]:
                    state[slot] = [0.0, 0]
                if slot in state:
                    state[slot][0] += entry["reward"].item()
                    state[slot][1] += int(entry["mask"])
                    if entry["terminated"] or entry["truncated"]:
                        episode = state.pop(slot)
                        if not entry["is_init"] or entry["mask"]:  # else its environment failed: nothing was finished
                            found.append(episode)
        ended.append(found)
    return ended


def test_the_episode_meter_equals_counting_entries():
    generator = torch.Generator().manual_seed(0)
    for rows, steps in [(1, 1), (3, 12), (4, 5), (2, 1)]:
        rollouts = [random_rollout(generator, rows, steps) for _ in range(5)]
        meter = EpisodeMeter()
        for rollout, expected in zip(rollouts, episodes_one_by_one(rollouts), strict=True):
            returns, lengths = meter.finished(rollout)
            assert lengths == [length for _, length in expected]
            np.testing.assert_allclose(returns, [total for total, _ in expected], atol=1e-9)


def gae_one_by_one(rollout, value, next_value, gamma, decay):
    """Entry by entry: rewards and ends on False entries go to the last True entry of the episode; then eq. 16."""
    advantage = torch.zeros_like(value)
    for slot in range(len(value)):
        chain, target = [], None  # of True entries: [t, reward, terminated, truncated]
        for t in range(value.shape[1]):
            entry = rollout[slot, t]
            if entry["mask"]:
                target = [t, 0.0, False, False]
                chain.append(target)
            if target is not None:
                target[1] += entry["reward"].item()
                target[2] |= bool(entry["terminated"])
                target[3] |= bool(entry["truncated"])
                if entry["terminated"] or entry["truncated"]:
                    target = None
        trace = 0.0
        for t, reward, terminated, truncated in reversed(chain):
            delta = reward + gamma * next_value[slot, t].item() * (not terminated) - value[slot, t].item()
            trace = delta + (0.0 if terminated or truncated else gamma * decay * trace)
            advantage[slot, t] = trace
    return advantage


def test_gae_equals_the_recursion_entry_by_entry():
    """Junk on False entries after an episode's end has no effect, not even a warning."""
    generator = torch.Generator().manual_seed(0)
    for rows, steps in [(1, 1), (3, 14), (5, 6)] * 3:
        rollout = random_rollout(generator, rows, steps)
        value, next_value = torch.randn(2, rows, steps, generator=generator).unbind()
        columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
        expected = gae_one_by_one(rollout, value, next_value, 0.9, 0.8)
        junk = torch.where(rollout["mask"], value, torch.inf)
        advantage, target = gae(**columns, value=junk, next_value=next_value, gamma=0.9, gae_lambda=0.8)
        torch.testing.assert_close(advantage, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(target, torch.where(rollout["mask"], expected + value, 0.0), atol=1e-5, rtol=0)


# The benchmark's table


def test_a_ratio_above_one_means_that_ours_is_better():
    assert ratio([20.0, 30.0, 60.0], [10.0, 10.0, 10.0], more_is_better=True) == 3
    assert ratio([2.0, 2.0, 4.0], [4.0, 10.0, 4.0], more_is_better=False) == 2
    inf = float("inf")
    assert ratio([2.0], [inf], more_is_better=False) == inf and ratio([inf], [inf], more_is_better=False) == 1


def test_rows_hold_medians_of_pairs_and_failures():
    def runs(*speeds):
        return [{"error": "not installed: python is missing"} if x is None else {"sps": x, "rss_mb": 100.0}
                for x in speeds]  # fmt: skip

    speed, memory = compare(
        "fast", "train", ours=runs(40, 60, 50), theirs=runs(20, 10, None), peer="sb3", floor={"train": 100.0}
    )
    assert (speed["suite"], speed["case"], speed["unit"], speed["peer_name"]) == (
        "control",
        "fast train",
        "steps/s",
        "sb3",
    )
    assert (speed["ours"], speed["peer"], speed["ratio"], speed["pairs"]) == (50, 15, 4, 2)
    assert speed["floor_share"] == 0.5 and speed["note"].startswith("not installed")
    assert memory["case"] == "fast train memory" and memory["ratio"] == 1 and memory["floor_share"] is None
    absent = compare("zoo", "solve", ours=[{"solve_s": None}], theirs=runs(None), peer="skrl", floor=None)[0]
    assert absent["ratio"] is absent["ours"] is None and absent["note"]
