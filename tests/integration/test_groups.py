"""Groups: the expected gradient by enumeration, and rows that are silent or left out."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from algos import collect
from algos.grpo import GRPO, GRPOConfig
from algos.policies.policy import Policy
from algos.reinforce import REINFORCE, REINFORCEConfig
from algos.rloo import RLOO, RLOOConfig
from algos.training.metrics import group_metrics, rollout_metrics
from tests.helpers.rollouts import ANSWERS
from tests.helpers.small_agents import cartpole, gradients, lm_policy, scored
from tests.helpers.text_envs import EOS, GOOD, Script, play, text_env
from textenv.envs.task import FunctionTask
from textenv.rollout import Evaluation

STILL = dict(learning_rate=1e-30, max_grad_norm=1e9)
"""An update that moves nothing: its gradient can be read afterwards."""


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
    made = agent(text_env(), policy, config(num_episodes=8, group_size=4, **(defaults | STILL | options)))
    metrics = made.update(rollout) | rollout_metrics(rollout) | group_metrics(rollout)
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
