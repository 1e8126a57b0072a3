"""Which correction bears samples of older policies? PPO on film reviews, whose answers are K updates old.

python examples/studies/staleness.py                                     # every run: about 2.5 hours of a core
python examples/studies/staleness.py --staleness 4 --corrections none,token_truncate --seeds 1
python examples/studies/staleness.py --enumerate                         # bias and variance on a small tree, exactly
python examples/studies/staleness.py --table                             # the runs so far

The answers of an update are sampled by the policy as it was K updates before, or at first by the untrained one. All
else is the recipe of textenv/Reviews-v0. A run is a line of runs/staleness.jsonl: the return of 512 answers of the last
policy, KL charged. A run that is there is not repeated.
"""

import argparse
import copy
import dataclasses
import itertools
import statistics
import sys
from collections import deque
from functools import partial
from pathlib import Path

import gymnasium
import torch

import textenv  # noqa: F401  registers the environments
from algos import PPO, Collector, LMPolicy, evaluate, importance
from algos.presets import recipe
from algos.training.loop import iterate
from algos.training.metrics import EpisodeMeter

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from page import DATA, save_table_of_runs
from pictures import new_figure, read_table, save
from recorded_runs import RunFile, mean_and_range, print_table

RUNS = RunFile(Path("runs/staleness.jsonl"), ("correction", "staleness", "seed"))
ITERATIONS = 24
CORRECTIONS = {
    "none": {},
    "opsm": {"policy_loss": "opsm_policy_loss"},
    **{name: {"importance_weights": name} for name in importance.NAMED},
}
"""Fields of the config, by the name of a correction. The first two take ratios to the policy that sampled."""


def train(*, correction, staleness, seed):
    """Train once; return the mean return of 512 answers of the last policy with the KL charged, and their KL, nats."""
    chosen = recipe("textenv/Reviews-v0")
    env = gymnasium.make_vec(chosen.env, num_envs=chosen.num_envs, kl_coef=chosen.kl_coef)
    policy = LMPolicy.load(chosen.model, seed=seed)
    config = dataclasses.replace(chosen.config, seed=seed, ratio_tolerance=1e9, **CORRECTIONS[correction])
    agent = PPO(env, policy, config)

    # The policy that samples has the weights of `staleness` updates before
    sampler = copy.deepcopy(policy.fork())
    collector = Collector(env, sampler, seed=seed)
    earlier_weights = deque(maxlen=staleness + 1)
    meters = (EpisodeMeter(), EpisodeMeter())
    dropped = []
    for iteration in range(ITERATIONS):
        earlier_weights.append([weight.detach().clone() for weight in policy.parameters()])
        for weight, earlier in zip(sampler.parameters(), earlier_weights[0], strict=True):
            weight.data.copy_(earlier)
        agent.progress = iteration / ITERATIONS
        metrics = iterate(agent, meters, rollout=collector.collect(num_episodes=config.num_episodes))
        dropped.append(metrics.get("policy/importance_dropped", 0.0))

    rollout = evaluate(env, policy, num_episodes=512, seed=1000).rollout
    agent.penalty(rollout, policy)
    return {
        "return": rollout["reward"].sum().item() / 512,
        "kl": rollout["kl"].sum().item() / 512,
        "dropped": statistics.mean(dropped),
    }


def table(runs):
    """Columns and rows of the table: the mean return of each correction and staleness, and the range of its seeds."""
    returns = {}
    for (correction, staleness, _), run in runs.items():
        returns.setdefault((correction, staleness), []).append(run["return"])
    staleness_of_column = sorted({staleness for _, staleness in returns})
    rows = []
    for correction in CORRECTIONS:
        cells = []
        for staleness in staleness_of_column:
            seeds = returns.get((correction, staleness))
            if not seeds:
                cells.append("–")
            elif len(seeds) == 1:
                cells.append(f"{seeds[0]:.2f}")
            else:
                cells.append(mean_and_range(seeds))
        rows.append([correction, *cells])
    return ["correction", *(f"K = {staleness}" for staleness in staleness_of_column)], rows


def enumerate_tree(*, steps=4, actions=3, distance=0.7):
    """Bias and variance of the weighted policy gradient, by every sequence of actions; a dict by correction.

    The policy π and the sampler μ have a free logit for each prefix and action; those of μ differ from π's by normal
    noise of this deviation. Both figures are relative to the squared length of π's exact gradient.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = torch.cartesian_prod(*[torch.arange(actions)] * steps)  # [N, T]
    returns = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    powers = actions ** torch.arange(steps)
    prefixes = [(sequences[:, :t] @ powers[:t]) + (actions**t - 1) // (actions - 1) for t in range(steps)]
    prefix = torch.stack(prefixes, dim=1)  # a number for each prefix
    logits = torch.randn(int(prefix.max()) + 1, actions, generator=generator, dtype=torch.float64)
    noise = distance * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    log_prob = logits.log_softmax(-1)[prefix, sequences]
    sampler_log_prob = (logits + noise).log_softmax(-1)[prefix, sequences]
    advantages = returns - (log_prob.sum(1).exp() @ returns)

    # Gradient of log π of each step by the logits, [N, T, prefixes, actions]
    gradients = torch.zeros(*sequences.shape, *logits.shape, dtype=torch.float64)
    rows = torch.arange(len(sequences))[:, None]
    columns = torch.arange(steps)[None]
    gradients[rows, columns, prefix] = -logits.softmax(-1)[prefix]
    gradients[rows, columns, prefix, sequences] += 1
    gradients = gradients.flatten(2) * advantages[:, None, None]
    exact = log_prob.sum(1).exp() @ gradients.sum(1)

    figures = {}
    mask = torch.ones(sequences.shape, dtype=torch.bool)
    functions = {
        "none": lambda log_ratio, mask: torch.ones_like(log_ratio),
        "product, no limit": partial(importance.sequence_truncate, limit=float("inf")),
        "ratio, no limit": partial(importance.token_truncate, limit=float("inf")),
        **importance.NAMED,
    }
    for name, function in functions.items():
        weight = function(log_ratio=log_prob - sampler_log_prob, mask=mask)
        estimates = (weight[..., None] * gradients).sum(1)  # one for each sequence
        chance = sampler_log_prob.sum(1).exp()
        mean = chance @ estimates
        scale = exact.square().sum()
        figures[name] = {
            "bias": ((mean - exact).square().sum() / scale).sqrt().item(),
            "variance": (chance @ (estimates - mean).square().sum(1) / scale).item(),
        }
    return figures


def draw(path):
    """Draw the page's table: the mean return by the number of updates, with the smallest and largest seed."""
    columns, rows = read_table(DATA / "staleness.json")
    ages = [int(column.removeprefix("K = ")) for column in columns]
    figure, axes = new_figure("staleness", size=(8, 4.5))
    for name, cells in rows.items():
        points = [(age, *numbers) for age, numbers in zip(ages, cells, strict=True) if numbers]
        width = 1.2
        if name in ("none", "opsm"):  # whose ratios are to the policy that sampled
            width = 3
        (line,) = axes.plot([point[0] for point in points], [point[1] for point in points], lw=width, label=name)
        for age, _, *limits in points:
            axes.plot([age] * len(limits), limits, color=line.get_color(), lw=width)
    axes.set(
        xscale="symlog", ylim=(0, 1), xlabel="updates since the answers were sampled", ylabel="return after training"
    )
    axes.set_xticks(ages, ages)
    axes.legend(ncols=2, fontsize=9, frameon=False, loc="lower left")
    save(figure, path)


def print_enumerated():
    """Print bias and variance of each correction on the tree, for a near sampler and a far one."""
    for distance in (0.1, 0.7):
        print(f"sampler's logits differ by {distance}")
        for name, figures in enumerate_tree(distance=distance).items():
            print(f"{name:22} bias {figures['bias']:.3f}  variance {figures['variance']:.2f}")


def settings_of(*, corrections, ages, seeds):
    """Settings of the runs, seed by seed. Without a gap all weights are 1, so only ``none`` is run there."""
    return [
        {"correction": correction, "staleness": age, "seed": seed}
        for seed, age, correction in itertools.product(seeds, ages, corrections)
        if age > 0 or correction == "none"
    ]


def main():
    """Run what is missing, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="0,1,4,16", help="numbers of updates")
    parser.add_argument("--corrections", default=",".join(CORRECTIONS))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the runs so far to this file of docs/results/data")
    parser.add_argument("--figure", type=Path, help="draw the table of docs/results into this SVG")
    parser.add_argument("--enumerate", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)

    # What there is
    if options.table:
        print_table(*table(RUNS.read()))
    elif options.json is not None:
        save_table_of_runs(options.json, *table(RUNS.read()), "python examples/studies/staleness.py", kinds=["text"])
    elif options.figure is not None:
        draw(options.figure)
    elif options.enumerate:
        print_enumerated()

    # What is missing
    else:
        corrections = options.corrections.split(",")
        unknown = [name for name in corrections if name not in CORRECTIONS]
        if unknown:
            parser.error(f"--corrections has {unknown[0]!r}, expected some of {', '.join(CORRECTIONS)}")
        settings = settings_of(
            corrections=corrections,
            ages=[int(age) for age in options.staleness.split(",")],
            seeds=[int(seed) for seed in options.seeds.split(",")],
        )
        for run in RUNS.run_missing(settings, train):
            print(run, flush=True)


if __name__ == "__main__":
    main()
