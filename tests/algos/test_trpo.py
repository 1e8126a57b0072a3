"""TRPO against closed forms: the solver, the Fisher matrix, the natural step, and the trust region itself."""

import copy

import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict

import algos
from algos import LSTMPolicy, MLPPolicy, collect
from algos.advantages import whiten
from algos.trpo import TRPO, TRPOConfig, conjugate_gradient
from tests.helpers.models import make_gpt2, make_llama
from tests.helpers.rollouts import ANSWERS
from tests.helpers.small_agents import cartpole, lm_policy, scored
from tests.helpers.text_envs import Script, play, text_env

QUIET = dict(normalize_advantage=False, critic_epochs=1, minibatch_size=1000)


# --- the solver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_conjugate_gradients_solve_what_linalg_solves(seed):
    generator = torch.Generator().manual_seed(seed)
    half, target = (torch.randn(9, k, generator=generator, dtype=torch.float64) for k in (9, 1))
    matrix = half @ half.T + 0.1 * torch.eye(9)
    expected = torch.linalg.solve(matrix, target[:, 0])
    found = conjugate_gradient(lambda x: matrix @ x, target[:, 0], steps=30)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    # Each step comes nearer in the norm of the matrix (Hestenes and Stiefel 1952, theorem 6:3), the ninth arrives.
    errors = []
    for steps in range(1, 10):
        away = conjugate_gradient(lambda x: matrix @ x, target[:, 0], steps=steps) - expected
        errors.append((away @ matrix @ away).item())
    assert all(b < a for a, b in zip(errors, errors[1:], strict=False)) and errors[-1] < 1e-6 * errors[0]


def test_conjugate_gradients_stop_without_a_residual():
    """Of the unit matrix the first step is the solution, and a second would divide 0 by 0."""
    target, calls = torch.tensor([3.0, -1.0]), []
    found = conjugate_gradient(lambda x: calls.append(1) or x, target, steps=10)
    assert torch.equal(found, target) and len(calls) == 1


# --- the natural step ------------------------------------------------------------------------------------------------


def any_env(action_space):
    """What an agent looks at: spaces and a mode; nobody steps it here."""
    env = VectorEnv()
    env.num_envs, env.single_observation_space, env.single_action_space = 2, spaces.Box(-1, 1, (3,)), action_space
    env.observation_space = batch_space(env.single_observation_space, 2)
    env.action_space = batch_space(action_space, 2)
    env.metadata = cartpole().metadata
    return env


def steps_of(policy, seed=0, n=40):
    """A rollout of n single-step episodes with random states and rewards, ``[n, 1]``."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(n, 1, 3, generator=generator)
    step = policy.act(observation[:, 0].numpy())
    yes = torch.ones(n, 1, dtype=torch.bool)
    return TensorDict(
        {"observation": observation, "next_observation": observation, "action": step.action[:, None],
         "log_prob": step.log_prob[:, None], "reward": torch.randn(n, 1, generator=generator), "terminated": yes,
         "truncated": ~yes, "mask": yes, "is_init": yes}, batch_size=[n, 1],
    )  # fmt: skip


def linear_policy(action_space):
    """Without hidden layers, so that the derivatives of log π are known; weights large enough to matter."""
    policy = MLPPolicy(spaces.Box(-1, 1, (3,)), action_space, hidden=(), seed=1)
    policy.actor[-1].weight.data *= 80
    return policy


def softmax_figures(policy, rollout):
    """Gradients of log π(a|s) by weights and biases, ``[n, 4·3]``; Fisher matrix: mean of (diag p - pp')⊗xx'."""
    x = torch.cat([rollout["observation"][:, 0], torch.ones(len(rollout), 1)], -1).double()
    p = policy.actor(rollout["observation"][:, 0]).detach().double().softmax(-1)
    one_hot = torch.nn.functional.one_hot(rollout["action"][:, 0], 3)
    scores = ((one_hot - p)[:, :, None] * x[:, None]).flatten(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    fisher = torch.stack([torch.kron(a, torch.outer(b, b)) for a, b in zip(inner, x, strict=True)]).mean(0)
    return scores, fisher


def gaussian_figures(policy, rollout):
    """By weights and biases z/σ⊗x and by log σ z² - 1; the Fisher matrix is diag(1/σ²)⊗xx', and 2 for each log σ."""
    x = torch.cat([rollout["observation"][:, 0], torch.ones(len(rollout), 1)], -1).double()
    std = policy.log_std.detach().double().exp()
    z = (rollout["action"][:, 0] - policy.actor(rollout["observation"][:, 0])).detach().double() / std
    scores = torch.cat([((z / std)[:, :, None] * x[:, None]).flatten(1), z.square() - 1], 1)
    mean = torch.kron(torch.diag(std**-2), (x[:, :, None] * x[:, None]).mean(0))
    return scores, torch.block_diag(mean, 2 * torch.eye(2).double())


def weights_of(policy):
    """Of each output its weights and bias, then log σ: the order of the figures above."""
    layer = policy.actor[-1]
    flat = torch.cat([layer.weight, layer.bias[:, None]], 1).flatten().detach().clone().double()
    noise = [policy.log_std.detach().double()] if isinstance(policy.action_space, spaces.Box) else []
    return torch.cat([flat, *noise])


SPACES = {
    "softmax": (spaces.Discrete(3), softmax_figures),
    "gaussian": (spaces.Box(-1, 1, (2,)), gaussian_figures),
}


@pytest.mark.parametrize("damping", [0.1, 1e-3])
@pytest.mark.parametrize("kind", sorted(SPACES))
def test_the_step_is_the_exact_natural_gradient(kind, damping):
    """old + share · √(2δ / s'Hs) · s with s = H⁻¹g, H = Fisher + damping, by `torch.linalg.solve`."""
    space, figures = SPACES[kind]
    policy = linear_policy(space)
    if kind == "gaussian":
        policy.log_std.data = torch.tensor([-0.5, 0.3])
    rollout = steps_of(policy)
    agent = TRPO(any_env(space), policy, TRPOConfig(damping=damping, conjugate_gradient_steps=60, max_kl=1e-3, **QUIET))
    scores, fisher = figures(policy, rollout)
    before = weights_of(policy)
    metrics = agent.update(rollout)
    gradient = (rollout["advantage"].double() * scores).mean(0)
    curvature = fisher + damping * torch.eye(len(fisher))
    step = torch.linalg.solve(curvature, gradient)
    step = (2 * 1e-3 / (step @ curvature @ step)).sqrt() * step
    share = 0.8 ** (metrics["update/line_search_steps"] - 1)
    found = weights_of(policy) - before
    assert metrics["update/line_search_steps"] <= 3 and found.norm() > 1e-3
    torch.testing.assert_close(found, share * step, atol=2e-3 * found.abs().max().item(), rtol=0)


# --- the trust region, for every policy ------------------------------------------------------------------------------


def control_case(policy_class, action_space, **options):
    """A rollout of random states, 6 rows of 10 steps with an end inside; the reward prefers some actions."""
    policy = policy_class(spaces.Box(-1, 1, (3,)), action_space, seed=2, **options)
    generator = torch.Generator().manual_seed(0)
    observation = torch.randn(6, 11, 3, generator=generator)
    steps = [policy.act(observation[:, t].numpy()) for t in range(10)]
    ended = torch.zeros(6, 10, dtype=torch.bool)
    ended[:, -1] = True
    columns = {
        "observation": observation[:, :-1], "next_observation": observation[:, 1:],
        "action": torch.stack([step.action for step in steps], 1),
        "log_prob": torch.stack([step.log_prob for step in steps], 1),
        "reward": torch.randn(6, 10, generator=generator), "terminated": ended, "truncated": torch.zeros_like(ended),
        "mask": torch.ones_like(ended), "is_init": ended.roll(1, 1),
    }  # fmt: skip
    if steps[0].state is not None:
        columns["state"] = torch.stack([step.state for step in steps], 1)
    return any_env(action_space), policy, TensorDict(columns, batch_size=[6, 10]), {}


def text_case(make):
    env, policy = text_env(), lm_policy(make)
    rollout = scored(play(env, ANSWERS), policy)
    return env, policy, rollout, dict(num_steps=None, num_episodes=7, bootstrap_truncated=False)


CASES = {
    "mlp, discrete": lambda: control_case(MLPPolicy, spaces.Discrete(3), hidden=(8,)),
    "mlp, box": lambda: control_case(MLPPolicy, spaces.Box(-1, 1, (2,)), hidden=(8,)),
    "mlp, choices": lambda: control_case(MLPPolicy, spaces.MultiDiscrete([2, 3]), hidden=(8,)),
    "lstm, discrete": lambda: control_case(LSTMPolicy, spaces.Discrete(3), hidden=8),
    "lstm, box": lambda: control_case(LSTMPolicy, spaces.Box(-1, 1, (2,)), hidden=8),
    "gpt2": lambda: text_case(make_gpt2),
    "llama": lambda: text_case(make_llama),
}
EVERY = pytest.mark.parametrize("case", sorted(CASES))


def update(case, *, spoil=None, **options):
    """Policy before and after an update, the rollout, the metrics and the agent."""
    env, policy, rollout, more = CASES[case]()
    agent = TRPO(
        env, policy, TRPOConfig(**(dict(critic_epochs=3, learning_rate=1e-2, minibatch_size=4) | more | options))
    )
    old = copy.deepcopy(policy)
    if spoil is not None:
        spoil(policy)
    return old, policy, rollout, agent.update(rollout), agent


def surrogate_and_kl(old, policy, rollout):
    """Mean gain of ratio · A over 1 · A, and mean KL(new‖old), over the True entries; by the log-probabilities."""
    mask = rollout["mask"]
    with torch.no_grad():
        ratio = (policy.evaluate(rollout).log_prob - old.evaluate(rollout).log_prob).exp()
        kl = policy.divergence(rollout, old if hasattr(old, "lm") else old.reference())
    advantage = whiten(rollout["advantage"], mask=mask)
    return ((ratio - 1) * advantage)[mask].mean().item(), kl[mask].mean().item()


@pytest.mark.parametrize("max_kl", [1e-3, 0.1])
@EVERY
def test_an_update_improves_inside_the_trust_region(case, max_kl):
    """Measured after the critic has learnt: so it moved nothing that the policy's probabilities depend on."""
    old, policy, rollout, metrics, _ = update(case, max_kl=max_kl)
    gain, kl = surrogate_and_kl(old, policy, rollout)
    assert 0 < kl <= max_kl * (1 + 1e-3) and gain > 0
    assert kl == pytest.approx(metrics["policy/approx_kl"], rel=1e-3, abs=1e-6)
    assert gain == pytest.approx(metrics["policy/gain"], rel=1e-3, abs=1e-6)
    assert kl > 0.2 * max_kl, "a step far shorter than the region allows is no natural step"
    assert 1 <= metrics["update/line_search_steps"] <= 10


@pytest.mark.heavy
@EVERY
def test_a_rejected_step_leaves_the_actor_to_the_bit(case):
    """A KL that is 1 nat too large at every try; its derivatives are as they were."""

    def spoil(policy):
        divergence = policy.divergence
        policy.divergence = lambda rollout, other: divergence(rollout, other) + 1

    old, policy, rollout, metrics, _ = update(case, spoil=spoil, max_kl=0.01)
    assert metrics["update/line_search_steps"] == 10 and metrics["policy/approx_kl"] == metrics["policy/gain"] == 0
    one, two = old.evaluate(rollout), policy.evaluate(rollout)
    assert torch.equal(one.log_prob, two.log_prob) and not torch.equal(one.value, two.value)
    moved = [name for (name, p), q in zip(policy.named_parameters(), old.parameters(), strict=True) if (p != q).any()]
    assert moved and all(name.startswith(("critic", "value_head")) for name in moved)


@EVERY
def test_every_weight_is_trained_by_one_of_two_steps(case):
    """The critic's are those that move where the actor's step is given up (the test above)."""
    old, policy, _, _, _ = update(case)
    assert all((p != q).any() for p, q in zip(policy.parameters(), old.parameters(), strict=True))


@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3])
def test_constant_rewards_leave_the_actor_untouched(reward):
    """γ = λ = 1 and a fresh head: no answer is better than another; the head learns what they earn."""
    env, policy = text_env(Script(scores=[reward] * len(ANSWERS))), lm_policy(head=False)
    rollout = scored(play(env, ANSWERS), policy)
    before = copy.deepcopy(policy)
    config = TRPOConfig(num_steps=None, num_episodes=7, gamma=1.0, gae_lambda=1.0, bootstrap_truncated=False)
    metrics = TRPO(env, policy, config).update(rollout)
    assert metrics["update/line_search_steps"] == 0 and metrics["policy/approx_kl"] == 0
    moved = [n for (n, p), q in zip(policy.named_parameters(), before.parameters(), strict=True) if (p != q).any()]
    assert moved == ([] if reward == 0 else ["value_head.weight", "value_head.bias"])


def test_an_empty_rollout_keeps_actor_and_critic_apart():
    env, policy, rollout, options = text_case(make_gpt2)
    agent = TRPO(env, policy, TRPOConfig(**options, learning_rate=1e-2))
    empty = rollout.clone()
    empty["mask"] = torch.zeros_like(empty["mask"])
    old = copy.deepcopy(policy)
    assert agent.update(empty) == {}
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), old.parameters(), strict=True))
    metrics = agent.update(rollout)
    assert surrogate_and_kl(old, policy, rollout)[1] == pytest.approx(metrics["policy/approx_kl"], rel=1e-3)


@pytest.mark.heavy
def test_weights_set_by_the_line_search_are_saved(tmp_path):
    """They are views of one vector then, which is what file formats stumble over."""
    for number, case in enumerate(("gpt2", "mlp, box")):
        _, policy, rollout, _, agent = update(case)
        agent.env.spec = None
        agent.save(tmp_path / str(number))
        loaded = algos.load(tmp_path / str(number))
        assert torch.equal(loaded.evaluate(rollout).log_prob, policy.evaluate(rollout).log_prob)


def test_a_rollout_with_reset_rows_is_improved():
    env = cartpole(4)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(16,))
    rollout, old = collect(env, policy, num_steps=60, seed=0), copy.deepcopy(policy)
    assert not rollout["mask"].all()
    metrics = TRPO(env, policy, TRPOConfig()).update(rollout)
    gain, kl = surrogate_and_kl(old, policy, rollout)
    assert gain > 0 and 0.003 < kl <= 0.01 and kl == pytest.approx(metrics["policy/approx_kl"], rel=1e-3)
