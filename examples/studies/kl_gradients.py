"""Which KL estimator has the right gradient? k1, k2, k3 and exact, in the reward and in the loss, on a tree of answers.

python examples/studies/kl_gradients.py --enumerate       # every expected gradient, exactly: half a minute
python examples/studies/kl_gradients.py                   # every training: about 15 minutes of a core
python examples/studies/kl_gradients.py --updates 1       # the same with one step on each rollout
python examples/studies/kl_gradients.py --pairs "k3, loss" --betas 0.1 --seeds 1
python examples/studies/kl_gradients.py --table           # the trainings so far
python examples/studies/kl_gradients.py --json docs/results/data    # the page's data, from the trainings so far
python examples/studies/kl_gradients.py --figure docs/figures/kl-gradients.svg    # from the page's data

An answer has four tokens of four; all 256 are listed, so gradients are sums over all answers in float64, and the best
policy is π*(y) ∝ π_ref(y)·exp(r(y)/β). Trainings are `algos.PPO` with `textenv.KLPenalty`; a run is a line of
runs/kl_gradients.jsonl: the share of the possible gain that it misses. A run that is there is not repeated.
"""

import argparse
import itertools
import json
import statistics
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from matplotlib.axes import Axes
from torch import Tensor

from algos import PPO, MLPPolicy, PPOConfig
from textenv import KLPenalty
from textenv.kl.estimators import k1, k2, k3

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from page import DATA, save_table_of_runs
from pictures import COLOURS, new_figure, save
from recorded_runs import RunFile, print_table

RUNS = RunFile(Path("runs/kl_gradients.jsonl"), ("pair", "beta", "updates", "seed"))
COMMAND = "python examples/studies/kl_gradients.py"
TOKENS = 4
STEPS = 4
ANSWERS = torch.cartesian_prod(*[torch.arange(TOKENS)] * STEPS)
"""Every answer, int64 ``[256, 4]``."""
FIRST_STATE = [(TOKENS**step - 1) // (TOKENS - 1) for step in range(STEPS + 1)]
"""Number of the first state of each step. A state is the tokens so far: 1 + 4 + 16 + 64 of them."""
STATES = FIRST_STATE[STEPS]
CODES = torch.arange(len(ANSWERS))
"""Each answer as a number to the base 4, its first token in front; the codes of its beginnings number the states."""
STATE_OF_STEP = torch.stack([FIRST_STATE[t] + CODES // TOKENS ** (STEPS - t) for t in range(STEPS)], dim=1)
"""State in which each token of each answer is chosen, int64 ``[256, 4]``."""
TREES = range(1, 10)
"""Seeds of the enumerated trees; a figure is the median over them."""
DISTANCES = (0.1, 1.0, 3.0)
"""Deviation of the normal noise by which the policy's logits differ from the reference's."""
AGES = (0.1, 0.5)
"""Deviation of the noise by which the sampler's logits differ from the policy's, at distance 1 from the reference."""
CLAMP = 10.0
"""verl clamps k3 in the loss here."""
PAIRS = (
    "k1, reward", "k2, reward", "k3, reward", "exact, reward",
    "k1, loss", "k2, loss", "k3, loss", "k3 up to 10, loss", "exact, loss", "ratio · k1, loss", "ratio · k3, loss",
    "k2 of the answer, loss", "k3 of the answer, loss", "exact, both",
)  # fmt: skip
"""Estimator and place, as enumerated."""
LOOKS = ((COLOURS[0], "o", 0.25), (COLOURS[4], "s", 0.0), (COLOURS[2], "^", -0.25))
"""Colour, marker and height above the line of its pair, of three points of a figure."""
Figures = dict[str, dict[str, float]]
"""Figures of each pair by name."""


# ---------------------------------------------------------------------------------------------------------------------
# Expected gradients, by enumeration
# ---------------------------------------------------------------------------------------------------------------------


def token_log_probs(logits: Tensor) -> Tensor:
    """Log-probability of each token of each answer, ``[256, 4]``."""
    return logits.log_softmax(-1)[STATE_OF_STEP, ANSWERS]


def answer_log_probs(logits: Tensor) -> Tensor:
    """Log-probability of each answer, ``[256]``."""
    return token_log_probs(logits).sum(1)


def divergence(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """KL of two distributions, over the last dimension of their log-probabilities."""
    return (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)


def state_divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(π‖π_ref) of the next token in the state of each token, ``[256, 4]``."""
    return divergence(logits.log_softmax(-1), reference.log_softmax(-1))[STATE_OF_STEP]


def advantages_of(charges: Tensor, chance: Tensor) -> Tensor:
    """Charges of this and later tokens, less their mean in the state (the values of a perfect critic), ``[256, 4]``.

    Args:
        charges: of each token of each answer, ``[256, 4]``.
        chance: probability of each answer, ``[256]``.
    """
    to_go = charges.flip(1).cumsum(1).flip(1)
    weights = chance[:, None].expand_as(to_go)
    sums = torch.zeros(STATES, dtype=to_go.dtype).index_put((STATE_OF_STEP,), weights * to_go, accumulate=True)
    chances = torch.zeros(STATES, dtype=to_go.dtype).index_put((STATE_OF_STEP,), weights, accumulate=True)
    return to_go - (sums / chances)[STATE_OF_STEP]


def surrogates(logits: Tensor, sampler: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """What is differentiated for each answer, by pair of estimator and place: ``[256]`` each.

    All tables are of logits, ``[85, 4]``: of the policy π, of π_old that sampled the answers, and of π_ref.
    """
    pairs = charged_in_reward(logits, sampler, reference) | charged_in_loss(logits, sampler, reference)
    return pairs | {"exact, both": pairs["exact, reward"] + pairs["exact, loss"]}


def charged_in_reward(logits: Tensor, sampler: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """`surrogates` of charges in the reward: constants of the sampler that weigh π/π_old (PPO without its clip)."""
    sampler_log_prob = token_log_probs(sampler)
    log_ratio = sampler_log_prob - token_log_probs(reference)
    charges = {
        "k1": k1(log_ratio),
        "k2": k2(log_ratio),
        "k3": k3(log_ratio),
        "exact": state_divergence(sampler, reference),
    }
    chance = sampler_log_prob.sum(1).exp()
    ratio = (token_log_probs(logits) - sampler_log_prob).exp()
    return {f"{name}, reward": (ratio * advantages_of(charge, chance)).sum(1) for name, charge in charges.items()}


def charged_in_loss(logits: Tensor, sampler: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """`surrogates` of charges in the loss: of each token, or by the log-ratio of the whole answer."""
    log_prob = token_log_probs(logits)
    log_ratio = log_prob - token_log_probs(reference)
    ratio = (log_prob - token_log_probs(sampler)).exp()
    return {
        "k1, loss": k1(log_ratio).sum(1),
        "k2, loss": k2(log_ratio).sum(1),
        "k3, loss": k3(log_ratio).sum(1),
        "k3 up to 10, loss": k3(log_ratio).clamp(max=CLAMP).sum(1),
        "exact, loss": state_divergence(logits, reference).sum(1),
        "ratio · k1, loss": (ratio * k1(log_ratio)).sum(1),
        "ratio · k3, loss": (ratio * k3(log_ratio)).sum(1),
        "k2 of the answer, loss": k2(log_ratio.sum(1)),
        "k3 of the answer, loss": k3(log_ratio.sum(1)),
    }


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    """Gradient of a number by the logits, as a vector."""
    return torch.autograd.grad(value, logits, retain_graph=True)[0].flatten()


def answer_gradients(values: Tensor, logits: Tensor) -> Tensor:
    """Gradient of each answer's number by the logits: ``[256, 340]``."""
    each_answer = torch.eye(len(values), dtype=values.dtype)
    gradients = torch.autograd.grad(values, logits, each_answer, is_grads_batched=True, retain_graph=True)
    return gradients[0].flatten(1)


def moments_of(gradients: Tensor, chance: Tensor) -> tuple[Tensor, float]:
    """Mean of the answers' gradients, and the trace of their covariance."""
    mean = chance @ gradients
    return mean, (chance @ (gradients - mean).square().sum(1)).item()


def expected_gradients(
    logits: Tensor, sampler: Tensor, reference: Tensor
) -> tuple[dict[str, tuple[Tensor, float]], Tensor, Tensor]:
    """Mean and variance of the gradient of each pair, over answers of the sampler; and the two gradients to compare.

    Returns:
        By pair, the expected gradient and the trace of its covariance; the gradient of KL(π‖π_ref) of whole answers;
        and that of the sum of the KL in each state, at the states that the sampler visits.
    """
    logits = logits.clone().requires_grad_()
    chance = answer_log_probs(sampler).exp()

    # The two true gradients
    kl_of_answers = divergence(answer_log_probs(logits), answer_log_probs(reference))
    kl_of_states = chance @ state_divergence(logits, reference).sum(1)
    answer_gradient = gradient(kl_of_answers, logits)
    state_gradient = gradient(kl_of_states, logits)

    # A gradient for each answer and pair
    moments = {}
    for name, values in surrogates(logits, sampler, reference).items():
        moments[name] = moments_of(answer_gradients(values, logits), chance)
    return moments, answer_gradient, state_gradient


def normal_logits(seed: int) -> list[Tensor]:
    """Three independent tables of normal numbers: float64 ``[85, 4]``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(STATES, TOKENS, generator=generator, dtype=torch.float64) for _ in range(3)]


def enumerate_tree(*, seed: int, distance: float, age: float = 0.0) -> Figures:
    """Return the figures of each pair on one random tree, and under ``KL`` the whole answer's KL(π‖π_ref) in nats.

    ``cosine`` and ``whole``, the relative error, are to the gradient of whole answers; ``visited`` is the relative
    error to that of visited states; ``variance`` is relative to the squared gradient of whole answers.

    Args:
        seed: of the tree.
        distance: deviation of the noise between the reference's logits and the policy's.
        age: deviation of the noise between the policy's logits and the sampler's; 0: the policy samples.
    """
    reference, noise, drift = normal_logits(seed)
    logits = reference + distance * noise
    sampler = logits + age * drift
    moments, answer_gradient, state_gradient = expected_gradients(logits, sampler, reference)
    figures = {}
    for name, (mean, variance) in moments.items():
        cosine = torch.cosine_similarity(mean, answer_gradient, dim=0).item()
        # The mean of k1 in the loss is a rounding error, without a direction
        if mean.norm() < 1e-12 * answer_gradient.norm():
            cosine = 0.0
        figures[name] = {
            "cosine": cosine,
            "whole": _relative_error(mean, answer_gradient),
            "visited": _relative_error(mean, state_gradient),
            "variance": variance / answer_gradient.square().sum().item(),
        }
    figures["KL"] = {"nats": divergence(answer_log_probs(logits), answer_log_probs(reference)).item()}
    return figures


def _relative_error(mean: Tensor, expected: Tensor) -> float:
    return ((mean - expected).norm() / expected.norm()).item()


def median_figures(*, distance: float, age: float = 0.0) -> Figures:
    """Medians over all `TREES` of what `enumerate_tree` returns."""
    trees = [enumerate_tree(seed=seed, distance=distance, age=age) for seed in TREES]
    return {
        pair: {key: statistics.median(tree[pair][key] for tree in trees) for key in figures}
        for pair, figures in trees[0].items()
    }


def figures_by_distance() -> dict[float, Figures]:
    """Figures when the policy samples, by its distance from the reference."""
    return {distance: median_figures(distance=distance) for distance in DISTANCES}


def figures_by_age() -> dict[float, Figures]:
    """Figures at distance 1 from the reference, by the age of the sampler; 0: the policy samples."""
    return {age: median_figures(distance=1.0, age=age) for age in (0.0, *AGES)}


def enumerated_table(by_distance: dict[float, Figures]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, when the policy samples: the figures of each pair by distance from the reference."""
    nats = [f"{figures['KL']['nats']:.2g} nats" for figures in by_distance.values()]
    header = ["estimator, place"]
    header += [f"cosine, error at {distance}" for distance in nats]
    header += [f"error at visited states, {nats[-1]}"]
    header += [f"variance, {distance}" for distance in nats]
    rows = []
    for pair in PAIRS:
        figures_of_pair = [figures[pair] for figures in by_distance.values()]
        row = [pair]
        row += [f"{figures['cosine']:.2f}, {_number(figures['whole'])}" for figures in figures_of_pair]
        row += [_number(figures_of_pair[-1]["visited"])]
        row += [_variance(figures["variance"]) for figures in figures_of_pair]
        rows.append(row)
    return header, rows


def old_samples_table(by_age: dict[float, Figures]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, when an older policy has sampled: errors and variance of each pair by the sampler's age."""
    header = ["estimator, place"]
    for label in ("error", "error at visited states", "variance"):
        header += [f"{label}, noise {age:g}" for age in by_age]
    rows = []
    for pair in PAIRS:
        figures_of_pair = [figures[pair] for figures in by_age.values()]
        row = [pair]
        row += [_number(figures["whole"]) for figures in figures_of_pair]
        row += [_number(figures["visited"]) for figures in figures_of_pair]
        row += [_variance(figures["variance"]) for figures in figures_of_pair]
        rows.append(row)
    return header, rows


def _number(value: float) -> str:
    """A relative error, with two decimals; rounding errors are 0."""
    return "0" if value < 1e-9 else f"{value:.2f}"


def _variance(value: float) -> str:
    """A variance with two digits."""
    if value < 10:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"


# ---------------------------------------------------------------------------------------------------------------------
# Trainings
# ---------------------------------------------------------------------------------------------------------------------


class TreeEnv(VectorEnv):
    """Answers token by token: the observation is the state, one-hot; the last token earns the answer's reward."""

    def __init__(self, rewards: Tensor, num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = spaces.Box(0.0, 1.0, (STATES,), np.float32)
        self.single_action_space = spaces.Discrete(TOKENS)
        self.observation_space = spaces.Box(0.0, 1.0, (num_envs, STATES), np.float32)
        self.action_space = spaces.MultiDiscrete([TOKENS] * num_envs)
        self.rewards = rewards.numpy()
        self.one_hot = np.eye(STATES, dtype=np.float32)
        self.code = np.zeros(num_envs, dtype=np.int64)
        self.step_number = 0

    def reset(self, *, seed=None, options=None):
        """Begin all answers anew."""
        self.code[:] = 0
        self.step_number = 0
        return self.one_hot[self.code], {}

    def step(self, actions):
        """Append a token to every answer; all end together."""
        self.code = self.code * TOKENS + actions
        self.step_number += 1
        is_last = self.step_number == STEPS
        terminated = np.full(self.num_envs, is_last)
        truncated = np.zeros(self.num_envs, dtype=bool)
        if not is_last:
            state = FIRST_STATE[self.step_number] + self.code
            return self.one_hot[state], np.zeros(self.num_envs), terminated, truncated, {}
        reward = self.rewards[self.code]
        observation, _ = self.reset()
        info = {"final_obs": np.zeros_like(observation), "_final_obs": terminated}
        return observation, reward, terminated, truncated, info


class RatioPenalty(KLPenalty):
    """An estimator in the loss times π/π_old (DeepSeek-V3.2, eq. 7): the ratio has a gradient too."""

    def loss(self, part, *, log_prob, policy):
        """See `KLPenalty.loss`."""
        log_ratio = torch.where(part["mask"], log_prob - part["log_prob"], 0.0)
        return log_ratio.exp() * super().loss(part, log_prob=log_prob, policy=policy)


class BothPenalty(KLPenalty):
    """The exact KL in the loss, and in the reward too, where it carries the KL of later states back."""

    def __call__(self, rollout, policy, **options):
        """See `KLPenalty.__call__`."""
        super().__call__(rollout, policy, **options)
        rollout["reward"] = rollout["reward"] - self.coef * rollout["kl"]


def unchecked_k1(log_ratio: Tensor) -> Tensor:
    """k1 as a function of one's own, which the library does not refuse in the loss."""
    return log_ratio


PENALTIES = {
    "no penalty": lambda reference, beta: KLPenalty(reference, 0.0),
    "k1, reward": lambda reference, beta: KLPenalty(reference, beta, "k1", "reward"),
    "k2, reward": lambda reference, beta: KLPenalty(reference, beta, "k2", "reward"),
    "k3, reward": lambda reference, beta: KLPenalty(reference, beta, "k3", "reward"),
    "exact, reward": lambda reference, beta: KLPenalty(reference, beta, "exact", "reward"),
    "k1, loss": lambda reference, beta: KLPenalty(reference, beta, unchecked_k1, "loss"),
    "k2, loss": lambda reference, beta: KLPenalty(reference, beta, "k2", "loss"),
    "k3, loss": lambda reference, beta: KLPenalty(reference, beta, "k3", "loss"),
    "exact, loss": lambda reference, beta: KLPenalty(reference, beta, "exact", "loss"),
    "ratio · k3, loss": lambda reference, beta: RatioPenalty(reference, beta, "k3", "loss"),
    "exact, both": lambda reference, beta: BothPenalty(reference, beta, "exact", "loss"),
}
"""Penalties to train with, by pair."""
WITH_FIXED_POINT = ("k1, reward", "exact, both", "k2, loss", "ratio · k3, loss", "exact, loss", "k3, loss")
"""Pairs with a formula for the policy at which their trainings end (`fixed_point`)."""
BETAS = (0.1, 0.3, 1.0)
NUM_ENVS = 512
CONFIG = PPOConfig(
    num_steps=STEPS,
    final_learning_rate=0.0,
    gamma=1.0,
    gae_lambda=1.0,
    max_grad_norm=10.0,
    bootstrap_truncated=False,
    normalize_advantage=False,
)
UPDATES = {
    1: {"num_epochs": 1, "minibatch_size": NUM_ENVS * STEPS, "learning_rate": 0.1},
    16: {"num_epochs": 4, "minibatch_size": NUM_ENVS * STEPS // 4, "learning_rate": 0.05},
}
"""Fields of the config, by the number of optimizer steps on each rollout; the rates were chosen on seed 101."""
ITERATIONS = {1: 500, 16: 150}
"""Rollouts of a training, by the number of optimizer steps on each."""


def problem(seed: int) -> tuple[Tensor, Tensor]:
    """The reference's logits, normal, and the rewards of all answers, uniform between 0 and 1; float64."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(STATES, TOKENS, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(ANSWERS), generator=generator, dtype=torch.float64)
    return reference, rewards


def optimum(*, reference: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Log-probability of each answer under π*(y) ∝ π_ref(y)·exp(r(y)/β), ``[256]``."""
    return (answer_log_probs(reference) + rewards / beta).log_softmax(0)


def missed_share(logits: Tensor, *, reference: Tensor, rewards: Tensor, beta: float) -> float:
    """(J* - J) / (J* - J of the reference) of a policy's table of logits.

    J = E[r] - β·KL(π‖π_ref), so this is KL(π‖π*) / KL(π_ref‖π*): 0 is the optimum, 1 the untrained policy.
    """
    best = optimum(reference=reference, rewards=rewards, beta=beta)
    missed = divergence(answer_log_probs(logits), best)
    return (missed / divergence(answer_log_probs(reference), best)).item()


def kl_of_optimum(beta: float, *, seed: int) -> float:
    """KL(π*‖π_ref) of whole answers, nats."""
    reference, rewards = problem(seed)
    best = optimum(reference=reference, rewards=rewards, beta=beta)
    return divergence(best, answer_log_probs(reference)).item()


def fixed_point(pair: str, *, reference: Tensor, rewards: Tensor, beta: float) -> Tensor | None:
    """Log-probabilities ``[85, 4]`` at which the expected gradients of score and pair cancel; None without a formula.

    Token by token from the last: a state's policy π maximises Σ_a π(a)·Q(a) - β·KL(π‖π_ref), or with k3 in the loss
    - β·KL(π_ref‖π), where Q(a) is the value of the state that a token leads to.
    """
    if pair not in WITH_FIXED_POINT:
        return None
    log_reference = reference.log_softmax(-1)
    log_probs = torch.zeros_like(reference)
    values = rewards
    for step in reversed(range(STEPS)):
        states = slice(FIRST_STATE[step], FIRST_STATE[step + 1])
        q_values = values.view(-1, TOKENS)
        prior = log_reference[states]

        # The best policy of each state, by what is charged there
        if pair == "k3, loss":
            log_prob = _reversed_kl_policy(q_values, prior, beta)
        else:
            log_prob = (prior + q_values / beta).log_softmax(-1)
        log_probs[states] = log_prob

        # The value of each state; only charges in the reward reach earlier tokens
        values = (log_prob.exp() * q_values).sum(-1)
        if pair in ("k1, reward", "exact, both"):
            values = values - beta * divergence(log_prob, prior)
    return log_probs


def _reversed_kl_policy(q_values: Tensor, log_prior: Tensor, beta: float) -> Tensor:
    """The best policy of E[Q] - β·KL(π_ref‖π): π = β·π_ref / (λ - Q), with the λ that makes it sum to 1 (bisection).

    With λ = max(Q + β·π_ref) one token alone has probability 1, and with λ = max Q + β the sum is at most 1.
    """
    low = (q_values + beta * log_prior.exp()).max(-1, keepdim=True).values
    high = q_values.max(-1, keepdim=True).values + beta
    for _ in range(100):
        middle = (low + high) / 2
        is_too_low = (beta * log_prior.exp() / (middle - q_values)).sum(-1, keepdim=True) > 1
        low = torch.where(is_too_low, middle, low)
        high = torch.where(is_too_low, high, middle)
    return (beta * log_prior.exp() / (high - q_values)).log()


def train(*, pair: str, beta: float, updates: int, seed: int) -> dict[str, float]:
    """Train once; return the missed share, and the KL of whole answers to the reference in nats."""
    reference, rewards = problem(seed)
    env = TreeEnv(rewards, NUM_ENVS)

    # A linear actor of one-hot states is a table of logits (and a bias, which all states share)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(), seed=seed)
    with torch.no_grad():
        policy.actor[0].weight.copy_(reference.T)
        policy.actor[0].bias.zero_()
        policy.critic[0].weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most pairs warn that they are wrong
        penalty = PENALTIES[pair](policy.reference(), beta)
    agent = PPO(env, policy, CONFIG, penalty=penalty, seed=seed, **UPDATES[updates])
    agent.learn(ITERATIONS[updates] * NUM_ENVS * STEPS)

    # The policy that it ends with
    with torch.no_grad():
        logits = policy.actor(torch.eye(STATES)).double()
    return {
        "missed": missed_share(logits, reference=reference, rewards=rewards, beta=beta),
        "kl": divergence(answer_log_probs(logits), answer_log_probs(reference)).item(),
    }


def trained_table(runs: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the missed share of each pair in percent, mean [least, largest seed], and what formulas say."""
    by_setting = {}
    for run in runs:
        by_setting.setdefault((run["updates"], run["beta"], run["pair"]), []).append(run)
    settings = {(run["updates"], run["beta"]) for run in runs}
    settings = sorted(settings, key=lambda setting: (-setting[0], setting[1]))
    header = ["estimator, place"]
    for updates, beta in settings:
        steps = "1 step" if updates == 1 else f"{updates} steps"
        header.append(f"β = {beta:g}, {steps}")
    first_beta = settings[0][1]
    header.append(f"KL in nats, β = {first_beta:g}")

    # The optimum, and each pair
    seeds = sorted({run["seed"] for run in runs})
    kl = statistics.mean(kl_of_optimum(first_beta, seed=seed) for seed in seeds)
    rows = [["the optimum π*", *["0"] * len(settings), f"{kl:.2f}"]]
    for pair in PENALTIES:
        row = [pair]
        for setting in settings:
            chosen = by_setting.get((*setting, pair), [])
            row.append(_in_words([run["missed"] for run in chosen], [run["formula"] for run in chosen]))
        nats = [run["kl"] for run in by_setting.get((*settings[0], pair), [])]
        row.append(f"{statistics.mean(nats):.2f}" if nats else "–")
        rows.append(row)
    return header, rows


def _in_words(missed: list[float], formulas: list[float | None]) -> str:
    """Mean [least, largest] in percent, and the mean of the formula where there is one; a dash without runs."""
    if not missed:
        return "–"
    cell = f"{_percent(statistics.mean(missed))} [{_percent(min(missed))}, {_percent(max(missed))}]"
    if None in formulas:
        return cell
    return f"{cell}; {_percent(statistics.mean(formulas))}"


def noise_at_fixed_point(pair: str, *, seed: int, beta: float) -> float:
    """Variance of the gradient of score and penalty together, relative to that of the score's alone.

    Both at the pair's fixed point, where the mean of the two together is 0; with the values of a perfect critic.
    """
    reference, rewards = problem(seed)
    sampler = fixed_point(pair, reference=reference, rewards=rewards, beta=beta)
    logits = sampler.clone().requires_grad_()
    log_prob = token_log_probs(logits)
    chance = log_prob.detach().sum(1).exp()

    # The score is paid with the last token
    scores = torch.zeros(len(ANSWERS), STEPS, dtype=rewards.dtype)
    scores[:, -1] = rewards
    score_values = (log_prob * advantages_of(scores, chance)).sum(1)
    _, variance_of_score = moments_of(answer_gradients(score_values, logits), chance)

    # And the penalty with it
    penalty_values = surrogates(logits, sampler, reference)[pair]
    _, variance = moments_of(answer_gradients(score_values - beta * penalty_values, logits), chance)
    return variance / variance_of_score


def noise_table() -> tuple[list[str], list[list[str]]]:
    """Columns and rows: `noise_at_fixed_point` by pair and β, mean over the seeds that are trained."""
    rows = []
    for pair in WITH_FIXED_POINT:
        row = [pair]
        for beta in BETAS:
            noise = statistics.mean(noise_at_fixed_point(pair, seed=seed, beta=beta) for seed in range(1, 6))
            row.append(_number(noise))
        rows.append(row)
    return ["estimator, place", *(f"β = {beta:g}" for beta in BETAS)], rows


def _percent(share: float) -> str:
    """A share in percent, with two digits, or without decimals from 10 on."""
    percent = max(100 * share, 0.0)
    return f"{percent:,.0f}" if percent >= 10 else f"{percent:.1f}"


def with_formula(run: dict) -> dict:
    """A run, and what `fixed_point` says that its pair misses; None if there is no formula."""
    reference, rewards = problem(run["seed"])
    arguments = {"reference": reference, "rewards": rewards, "beta": run["beta"]}
    log_probs = fixed_point(run["pair"], **arguments)
    formula = None
    if log_probs is not None:
        formula = missed_share(log_probs, **arguments)
    return run | {"formula": formula}


def write_data(runs: list[dict], folder: Path) -> None:
    """Write the page's tables, and the figures and runs that they are made from."""
    by_distance = figures_by_distance()
    by_age = figures_by_age()
    tables = {
        "kl-gradients": (COMMAND, trained_table(runs), {"runs": runs}),
        "kl-gradients-exact": (f"{COMMAND} --enumerate", enumerated_table(by_distance), {"figures": by_distance}),
        "kl-gradients-old": (f"{COMMAND} --enumerate", old_samples_table(by_age), {"figures": by_age}),
        "kl-gradients-noise": (f"{COMMAND} --enumerate", noise_table(), {}),
    }
    for name, (command, (columns, rows), raw) in tables.items():
        save_table_of_runs(folder / f"{name}.json", columns, rows, command, kinds=["penalties"], raw=raw)


def draw(path: Path, folder: Path = DATA) -> None:
    """Draw the relative error of each pair's gradient, and what its trainings miss, from the page's data."""
    by_distance = json.loads((folder / "kl-gradients-exact.json").read_text())["figures"]
    runs = json.loads((folder / "kl-gradients.json").read_text())["runs"]
    pairs = [pair for pair in (*PAIRS, "no penalty") if pair not in ("k3 up to 10, loss", "ratio · k1, loss")]
    figure, (left, right) = new_figure("kl-gradients", columns=2, size=(11, 6), sharey=True)
    draw_errors(left, by_distance, pairs)
    draw_trainings(right, runs, pairs)

    # A line for each pair, the first at the top
    for axes in (left, right):
        axes.set_yticks([-row for row in range(len(pairs))], pairs)
        axes.grid(axis="y", color="0.9")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, handletextpad=0.1)
        axes.set_axisbelow(True)
    save(figure, path)


def draw_errors(axes: Axes, by_distance: dict[str, Figures], pairs: list[str]) -> None:
    """Draw the error of each pair's expected gradient, by the distance of the policy."""
    for (colour, marker, shift), figures in zip(LOOKS, by_distance.values(), strict=True):
        heights = [shift - row for row, pair in enumerate(pairs) if pair in figures]
        errors = [figures[pair]["whole"] for pair in pairs if pair in figures]
        axes.plot(errors, heights, marker, color=colour, ms=6, label=f"π at {figures['KL']['nats']:.2g} nats")
    axes.set_xlabel("error of the expected gradient, relative to\nthat of KL(π‖π_ref) of whole answers")


def draw_trainings(axes: Axes, runs: list[dict], pairs: list[str]) -> None:
    """Draw the share that each training of 16 steps a rollout misses, by β; a bar for the mean of the closed forms."""
    least = 1e-4
    for (colour, marker, shift), beta in zip(LOOKS, BETAS, strict=True):
        for row, pair in enumerate(pairs):
            chosen = [run for run in runs if (run["pair"], run["beta"], run["updates"]) == (pair, beta, 16)]
            shares = [max(run["missed"], least) for run in chosen]
            label = f"β = {beta:g}" if row == 0 else None
            axes.plot(shares, [shift - row] * len(shares), marker, color=colour, ms=6, alpha=0.7, mew=0, label=label)
            formulas = [run["formula"] for run in chosen if run["formula"] is not None]
            if formulas and statistics.mean(formulas) > least:
                axes.plot(statistics.mean(formulas), shift - row, "|", color="black", ms=10, mew=2)
    axes.set_xscale("log")
    axes.set_xlabel("share of the possible gain that a training misses\n(bars: closed forms; 1: the untrained policy)")
    axes.axvline(1.0, color="0.6", lw=1, ls=":")


def print_enumerated() -> None:
    """Print the three tables of what is enumerated."""
    print_table(*enumerated_table(figures_by_distance()))
    print()
    print_table(*old_samples_table(figures_by_age()))
    print()
    print_table(*noise_table())


def main() -> None:
    """Run what is missing, or print or write what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=";".join(PENALTIES), help="separated by semicolons")
    parser.add_argument("--betas", default=",".join(map(str, BETAS)))
    parser.add_argument("--updates", type=int, choices=UPDATES, default=16, help="optimizer steps on each rollout")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--enumerate", action="store_true", help="print the expected gradients, train nothing")
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the page's data to this folder")
    parser.add_argument("--figure", type=Path, help="draw the data of docs/results, or of --json, into this SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)

    # What there is
    runs = [with_formula(run) for run in RUNS.read().values()]
    if (options.json or options.table) and not runs:
        parser.exit(2, f"{RUNS.path} has no runs: run the study first\n")
    if options.json:
        write_data(runs, options.json)
    if options.figure:
        draw(options.figure, options.json or DATA)
    if options.table:
        print_table(*trained_table(runs))
    if options.enumerate:
        print_enumerated()
    if options.json or options.figure or options.table or options.enumerate:
        return

    # What is missing
    pairs = options.pairs.split(";")
    unknown = [pair for pair in pairs if pair not in PENALTIES]
    if unknown:
        parser.error(f"--pairs has {', '.join(map(repr, unknown))}, expected some of {', '.join(map(repr, PENALTIES))}")
    seeds = map(int, options.seeds.split(","))
    betas = map(float, options.betas.split(","))
    settings = [
        {"pair": pair, "beta": beta, "updates": options.updates, "seed": seed}
        for seed, beta, pair in itertools.product(seeds, betas, pairs)
    ]
    for run in RUNS.run_missing(settings, train):
        print(run, flush=True)


if __name__ == "__main__":
    main()
