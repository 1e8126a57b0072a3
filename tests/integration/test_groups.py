"""Groups: baselines by enumeration, silent and empty rows, and what `collect` deals to a group."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import nn

from algos import Collector, collect
from algos.advantages import discounted_returns, episode_returns, leave_one_out, standardize_in_group, subtract_mean
from algos.grpo import GRPO, GRPOConfig
from algos.policies.policy import Policy
from algos.reinforce import REINFORCE, REINFORCEConfig
from algos.rloo import RLOO, RLOOConfig
from algos.training.metrics import group_metrics
from tests.helpers.control_envs import Lean, replayed
from tests.helpers.rollouts import ANSWERS
from tests.helpers.small_agents import cartpole, gradients, lm_policy, mlp_for, scored
from tests.helpers.text_envs import EOS, GOOD, Script, play, text_env
from textenv.envs.task import FunctionTask
from textenv.rollout import Evaluation

STILL = dict(learning_rate=1e-30, max_grad_norm=1e9)
"""An update that moves nothing: its gradient can be read afterwards."""
ALL = {"counts": torch.ones(6, dtype=torch.bool)}
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_returns_and_the_mean_of_a_batch_by_hand():
    """γ = .5, rewards 1 2 4 to a limit and 8 to an end: 1 + .5 (2 + .5·4) = 3, 4, 4; 8; their mean is 19/4."""
    terminated = torch.tensor([[False, False, False], [True, False, False]])
    truncated = torch.tensor([[False, False, True], [False, False, False]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    reward = torch.tensor([[1.0, 2.0, 4.0], [8.0, torch.nan, 9.0]])
    found = discounted_returns(reward=reward, terminated=terminated, truncated=truncated, mask=mask, gamma=0.5)
    assert found.tolist() == [[3.0, 4.0, 4.0], [8.0, 0.0, 0.0]]
    junk = torch.where(mask, found, torch.nan)
    assert subtract_mean(junk, mask=mask).tolist() == [[-1.75, -0.75, -0.75], [3.25, 0.0, 0.0]]


def test_baselines_by_hand():
    """Group 7: 1, 2, 6; group -1: 4, 8; row 3 is alone in its group.

    The others' means are 4, 3.5, 1.5 and 8, 4. The mean of 3 is 3, the sum of squares 4 + 1 + 9 = 14, over n - 1 = 2.
    """
    score, group = torch.tensor([1.0, 4.0, 2.0, 5.0, 6.0, 8.0]), torch.tensor([7, -1, 7, 0, 7, -1])
    found = leave_one_out(score=score, group=group, **ALL)
    torch.testing.assert_close(found, torch.tensor([-3.0, -4.0, -1.5, 0.0, 4.5, 4.0]))
    found = standardize_in_group(score=score, group=group, scale=False, **ALL)
    torch.testing.assert_close(found, torch.tensor([-2.0, -2.0, -1.0, 0.0, 3.0, 2.0]))
    three, two = 7**0.5 + 1e-4, 8**0.5 + 1e-4
    expected = torch.tensor([-2 / three, -2 / two, -1 / three, 0.0, 3 / three, 2 / two])
    torch.testing.assert_close(standardize_in_group(score=score, group=group, **ALL), expected)


def test_standardised_groups_agree_with_torchrl():
    """Up to TRL's 1e-4 beside the deviation, which torchrl has not."""
    from torchrl.objectives.llm import MCAdvantage

    score = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    transform = MCAdvantage(grpo_size=8)
    for row in score:
        trajectories = [TensorDict({("next", "reward"): x.reshape(1, 1)}, batch_size=[1]) for x in row]
        expected = transform._trajectory_advantage(trajectories)["advantage"].reshape(-1)
        found = standardize_in_group(score=row, group=torch.zeros(8).long(), counts=torch.ones(8).bool())
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-3)


BASELINES = [
    leave_one_out,
    standardize_in_group,
    lambda **columns: standardize_in_group(**columns, scale=False),
]


@pytest.mark.parametrize("baseline", BASELINES)
def test_names_of_groups_and_order_do_not_matter(baseline):
    generator = torch.Generator().manual_seed(0)
    score, counts = torch.randn(24, generator=generator), torch.rand(24, generator=generator) < 0.8
    group = torch.arange(6).repeat_interleave(4)
    expected = baseline(score=score, group=group, counts=counts)
    order = torch.randperm(24, generator=generator)
    found = baseline(score=score[order], group=(10 - 7 * group)[order], counts=counts[order])
    torch.testing.assert_close(found, expected[order])
    assert expected.count_nonzero() == counts.sum()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("baseline", BASELINES)
def test_rows_that_do_not_count_move_no_baseline(baseline, junk):
    counts = torch.tensor([True, False, True, True, False, True])
    score, group = torch.tensor([1.0, junk, 2.0, 4.0, junk, 8.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    found = baseline(score=score, group=group, counts=counts)
    assert (found[~counts] == 0).all()
    expected = baseline(score=score[counts], group=group[counts], counts=counts[counts])
    assert torch.equal(found[counts], expected) and (expected != 0).all()


@pytest.mark.parametrize("size", [2, 3, 7, 64])
@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_scores_give_exactly_nothing(baseline, reward, size):
    """The rounding of their mean is no signal, though a deviation of 0 would make one of it."""
    score, group = torch.full((size + 2,), reward), torch.zeros(size + 2).long()
    score[-1], group[-2:] = reward + 1, 1
    found = baseline(score=score, group=group, counts=torch.ones(size + 2).bool())
    assert (found[:-2] == 0).all() and (found[-2:] != 0).all()


# --- the expected gradient, by enumeration ---------------------------------------------------------------------------


class Tree(nn.Module, Policy):
    """A free logit for every state and action of a tree; a state's number is in its observation."""

    def __init__(self, states, actions=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = nn.Parameter(torch.randn(states, actions, generator=generator))
        self.generator = generator

    def evaluate(self, rollout):
        log_probs = self.logits.log_softmax(-1)[rollout["observation"].long()[..., 0]]
        log_prob = log_probs.gather(-1, rollout["action"][..., None])[..., 0]
        return Evaluation(log_prob, -(log_probs.exp() * log_probs).sum(-1), torch.zeros_like(log_prob))


def trajectories(steps):
    """Every episode of 3 actions a step: states, actions, rewards, ``[3^steps, steps]``."""
    actions = torch.cartesian_prod(*[torch.arange(3)] * steps).view(-1, steps)
    states = torch.zeros_like(actions)
    states[:, 1:] = 1 + actions[:, :-1]
    return states, actions, torch.randn(actions.shape, generator=torch.Generator().manual_seed(1))


def exact(policy, states, actions, rewards):
    """Probability of each episode, and the gradient of the expected return."""
    log_probs = policy.logits.double().log_softmax(-1)
    chance = log_probs[states, actions].sum(1).exp()
    (gradient,) = torch.autograd.grad(chance @ rewards.double().sum(1), policy.logits)
    return chance.detach(), gradient


def expected_gradient(make, policy, steps, size):
    """Mean of the update's gradient over every possible group, each as likely as the policy makes it."""
    states, actions, rewards = trajectories(steps)
    chance, gradient = exact(policy, states, actions, rewards)
    agent, total = make(policy, size), 0.0
    ends = torch.zeros(size, steps, dtype=torch.bool)
    ends[:, -1] = True
    for rows in torch.cartesian_prod(*[torch.arange(len(states))] * size):
        rollout = TensorDict(
            {"observation": states[rows, :, None].float(), "action": actions[rows], "reward": rewards[rows],
             "terminated": ends, "truncated": torch.zeros_like(ends), "mask": torch.ones_like(ends),
             "is_init": ends.roll(1, 1), "group": torch.zeros_like(actions[rows])}, batch_size=[size, steps],
        )  # fmt: skip
        agent.update(scored(rollout, policy))
        total = total + chance[rows].prod() * policy.logits.grad
    return -total, gradient / steps  # losses are minimised, and means over the steps


def rloo(policy, size):
    return RLOO(cartpole(), policy, RLOOConfig(num_episodes=size, group_size=size, **STILL))


def dr_grpo(policy, size):
    config = GRPOConfig(
        num_episodes=size, group_size=size, num_epochs=1, minibatch_size=99, scale_by_std=False, **STILL
    )
    return GRPO(cartpole(), policy, config)


def reinforce(policy, size):
    config = REINFORCEConfig(num_episodes=size, gamma=1.0, normalize_advantage=False, **STILL)
    return REINFORCE(cartpole(), policy, config)


@pytest.mark.parametrize(("steps", "size"), [(1, 2), (1, 4), (2, 2)])
def test_rloo_follows_the_exact_policy_gradient(steps, size):
    found, gradient = expected_gradient(rloo, Tree(4), steps, size)
    torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-4, check_dtype=False)
    assert gradient.abs().max() > 0.05


@pytest.mark.parametrize(("steps", "size"), [(1, 2), (1, 4), (2, 2)])
def test_dr_grpo_follows_it_times_n_minus_1_over_n(steps, size):
    """r_i - (r_1 + .. + r_n) / n = (n-1)/n · (r_i - mean of the others), so the mean gradient shrinks as much."""
    found, gradient = expected_gradient(dr_grpo, Tree(4), steps, size)
    torch.testing.assert_close(found, gradient * (size - 1) / size, atol=1e-6, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("size", [2, 3])
def test_reinforce_follows_it_as_dr_grpo_does(size):
    """One step: the same baseline as above, without a group."""
    found, gradient = expected_gradient(reinforce, Tree(4), 1, size)
    torch.testing.assert_close(found, gradient * (size - 1) / size, atol=1e-6, rtol=1e-4, check_dtype=False)


# --- silent and empty rows -------------------------------------------------------------------------------------------

EIGHT = [*ANSWERS, (GOOD, EOS)]
ROWS = {"rloo": (RLOO, RLOOConfig, {}), "grpo": (GRPO, GRPOConfig, dict(num_epochs=1, minibatch_size=99))}
KINDS = pytest.mark.parametrize("kind", sorted(ROWS))


def grouped(scores, policy):
    """The rollout of eight answers in two groups of four, earning these scores."""
    rollout = scored(play(text_env(Script(scores=scores)), EIGHT), policy)
    rollout["group"] = torch.tensor([3, 3, 3, 3, 5, 5, 5, 5])[:, None].expand(rollout.shape)
    return rollout


def update(kind, rollout, policy, **options):
    agent, config, defaults = ROWS[kind]
    metrics = agent(text_env(), policy, config(num_episodes=8, group_size=4, **(defaults | STILL | options))).update(
        rollout
    )
    return metrics, gradients(policy)


@KINDS
@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3])
def test_constant_groups_give_no_gradient_and_count(kind, reward):
    policy = lm_policy()
    rollout = grouped([reward] * 4 + [reward + 2] * 4, policy)
    metrics, found = update(kind, rollout, policy)
    assert found and all((x == 0).all() for x in found.values())
    assert (rollout["advantage"] == 0).all()
    assert (metrics["rollout/silent_rows"], metrics["rollout/empty_rows"]) == (8, 0)


@KINDS
def test_a_constant_group_adds_nothing_to_the_others(kind):
    """The gradient is the other group's own, at its share of the entries (RLOO) or of the rows (GRPO)."""
    scores, policy = [0.7] * 4 + [0.0, 2.0, 1.0, 5.0], lm_policy()
    rollout = grouped(scores, policy)
    metrics, found = update(kind, rollout, policy)
    assert metrics["rollout/silent_rows"] == 4
    other = grouped(scores, policy)[4:]
    share = 0.5 if kind == "grpo" else int(other["mask"].sum()) / int(rollout["mask"].sum())
    metrics, expected = update(kind, other, policy)
    assert metrics["rollout/silent_rows"] == 0
    assert torch.equal(rollout["advantage"][4:], other["advantage"])
    for name, x in expected.items():
        torch.testing.assert_close(found[name], share * x, atol=1e-6, rtol=1e-4, msg=name)
    assert max(x.abs().max() for x in found.values()) > 1e-3


@KINDS
def test_a_row_that_earned_just_the_mean_is_not_silent(kind):
    """0, 1, 2: the second row's advantage is 0, but its group's episodes did not all earn the same."""
    policy = lm_policy()
    metrics, _ = update(kind, grouped([0.0, 1.0, 2.0, 1.0] + [3.0] * 4, policy), policy)
    assert metrics["rollout/silent_rows"] == 4


@KINDS
def test_answers_without_a_score_count_for_nothing(kind):
    """The reward says None of the second answer of each group: three are compared with one another."""

    def reward(prompts, completions, **columns):
        return [None if row % 4 == 1 else float(row**2) for row in range(len(completions))]

    env = text_env(FunctionTask(["a b", "c"], reward))
    policy = lm_policy()
    rollout = collect(env, policy, num_episodes=8, group_size=4, seed=0)
    assert rollout["mask"].any(1).tolist() == [True, False, True, True] * 2
    metrics, _ = update(kind, rollout, policy)
    assert (metrics["rollout/empty_rows"], metrics["rollout/silent_rows"]) == (2, 0)
    first = torch.stack([row["advantage"][row["mask"]][0] for row in rollout[rollout["mask"].any(1)]]).view(2, 3)
    earned = torch.tensor([[0.0, 4.0, 9.0], [16.0, 36.0, 49.0]])
    if kind == "rloo":
        expected = 1.5 * (earned - earned.mean(1, keepdim=True))
    else:
        expected = (earned - earned.mean(1, keepdim=True)) / (earned.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(first, expected)


def test_silent_rows_do_not_count_rows_without_a_step():
    rollout = TensorDict(
        {"mask": torch.tensor([[True], [True], [False]]), "advantage": torch.zeros(3, 1), "group": torch.zeros(3, 1)},
        batch_size=[3, 1],
    )
    assert group_metrics(rollout) == {"rollout/silent_rows": 2}


# --- collect ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("episodes", "size"), [(6, 2), (6, 3), (10, 5), (2, 2), (8, 4)])
@MODES
def test_episodes_of_a_control_group_begin_alike(mode, episodes, size):
    """4 slots: more episodes than slots, no multiple of them, groups that reach over two turns, and fewer."""
    env = cartpole(4, mode, max_episode_steps=30)
    rollout = collect(env, mlp_for(env), num_episodes=episodes, group_size=size, seed=3)
    mask, ended = rollout["mask"], rollout["terminated"] | rollout["truncated"]
    assert len(rollout) == episodes and ended[mask].sum() == ended.sum() == episodes
    assert torch.equal(mask.int(), mask.int().cummin(1).values) and mask[:, 0].all()
    lengths = mask.sum(1)
    assert ended.int().argmax(1).tolist() == (lengths - 1).tolist() and lengths.max() == rollout.shape[1]
    assert rollout["is_init"].sum() == episodes and rollout["is_init"][:, 0].all()
    assert (rollout["reward"] == mask).all()
    assert torch.equal(episode_returns(rollout), lengths.float())
    start = rollout["observation"][:, 0].view(episodes // size, size, -1)
    assert (start == start[:, :1]).all() and len(start[:, 0].unique(dim=0)) == episodes // size
    expected = torch.arange(episodes // size).repeat_interleave(size)
    assert torch.equal(rollout["group"], expected[:, None].expand(mask.shape))
    for entry in rollout[:, :-1][mask[:, :-1]][:: max(int(mask.sum()) // 20, 1)]:
        torch.testing.assert_close(replayed(entry), entry["next_observation"], atol=1e-5, rtol=0)
    inside = mask[:, 1:]
    assert torch.equal(rollout["next_observation"][:, :-1][inside], rollout["observation"][:, 1:][inside])


@MODES
def test_ends_of_slots_that_play_on_are_not_counted(mode):
    """The second slot has one episode to play, and meets the limit again while the first plays its second."""
    env = cartpole(2, mode, max_episode_steps=9)
    rollout = collect(env, mlp_for(env), num_episodes=3, seed=0)
    assert (rollout["terminated"].sum() + rollout["truncated"].sum()) == 3 and not rollout["mask"].all()
    assert (rollout["reward"] == rollout["mask"]).all()


@MODES
def test_a_policy_without_chance_plays_a_group_alike(mode):
    """Equal starts and equal actions: the rows of a group are one episode, also where it is played in two turns."""
    env = cartpole(4, mode)
    rollout = collect(env, Lean(), num_episodes=6, group_size=3, seed=3)
    for rows in (slice(0, 3), slice(3, 6)):
        for name in ("observation", "reward", "terminated", "truncated", "mask"):
            group = torch.where(
                rollout["mask"][rows].view(3, -1, *[1] * (rollout[name].ndim - 2)), rollout[name][rows], 0
            )
            assert (group == group[:1]).all(), name
    assert not torch.equal(rollout["observation"][0, 0], rollout["observation"][3, 0])


def test_rows_of_a_group_explore_by_themselves():
    env = cartpole(4)
    rollout = collect(env, mlp_for(env), num_episodes=4, group_size=4, seed=0)
    assert len(torch.where(rollout["mask"], rollout["action"], -1).unique(dim=0)) == 4


def test_groups_are_reproducible_but_calls_differ():
    def starts(seed, calls):
        env = cartpole(4)
        collector = Collector(env, mlp_for(env, seed=1), seed=seed)
        return [collector.collect(num_episodes=4, group_size=2) for _ in range(calls)]

    one, two = starts(5, 3), starts(5, 3)
    for a, b in zip(one, two, strict=True):
        assert (a == b).all()
    first = torch.cat([rollout["observation"][::2, 0] for rollout in one + starts(6, 1)])
    assert len(first.unique(dim=0)) == 8


def test_steps_and_groups_take_turns_on_one_cursor():
    """After groups the slots are in mid-episode: steps begin by a reset."""
    env = cartpole(3)
    collector = Collector(env, mlp_for(env), seed=0)
    for _ in range(2):
        assert len(collector.collect(num_episodes=4, group_size=2)) == 4
        rollout = collector.collect(num_steps=5)
        assert rollout["is_init"][:, 0].all() and rollout["observation"][:, 0].abs().max() <= 0.05


def test_the_native_cartpole_is_refused_with_advice():
    env = gym.make_vec("CartPole-v1", num_envs=4)
    with pytest.raises(ValueError, match=r"CartPoleVectorEnv accepts no list of seeds.*vectorization_mode=.sync"):
        collect(env, mlp_for(env), num_episodes=4, group_size=2)


class Moody(gym.Env):
    """Starts by a number that no seed decides."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.random.default_rng().random(1).astype(np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, True, False, {}


def test_an_environment_that_heeds_no_seed_is_refused():
    env = SyncVectorEnv([Moody] * 2)
    with pytest.raises(ValueError, match="starts differently with equal seeds"):
        collect(env, mlp_for(env), num_episodes=2, group_size=2)


@pytest.mark.parametrize("asked", [dict(num_steps=4), dict(num_episodes=5), dict(num_episodes=4, num_steps=4)])
def test_groups_need_whole_episodes_that_divide(asked):
    env = cartpole(2)
    with pytest.raises(ValueError, match="group_size is 2|give exactly one"):
        collect(env, mlp_for(env), group_size=2, **asked)


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_of_no_episodes_is_refused(size):
    env = cartpole(2)
    with pytest.raises(ValueError, match=f"group_size is {size}"):
        collect(env, mlp_for(env), num_episodes=4, group_size=size)


def test_neighbours_of_a_text_group_share_a_prompt():
    task = FunctionTask(["a", "b", "c", "d", "good"], lambda completions, **_: [0.0] * len(completions))
    env, policy = text_env(task), lm_policy()
    seen = []
    collector = Collector(env, policy, seed=0)
    for _ in range(2):
        rollout = collector.collect(num_episodes=6, group_size=3)
        prompt = rollout["observation"][:, 0].view(2, 3)
        assert (prompt == prompt[:, :1]).all()
        group = rollout["group"].view(2, 3, -1)
        assert (group == group[:, :1, :1]).all() and group[0, 0, 0] != group[1, 0, 0]
        seen += prompt[:, 0].tolist()
    assert len(set(seen)) == 4
    assert len(torch.where(rollout["mask"], rollout["action"], -1)[:3].unique(dim=0)) > 1
