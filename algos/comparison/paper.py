"""Figure and table of a comparison for a paper: interquartile means, performance profiles, probability of improvement.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice": scores of all runs of
an algorithm over all environments, with limits by a bootstrap that resamples the seeds of each environment separately.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from algos.comparison.summary import MIN_SEEDS, RESAMPLES, RunResult, by_case, interquartile_mean, normalise

Scores = dict[str, np.ndarray]
"""By environment, the normalised score of each seed after training, ``[seeds]``."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
"""Okabe and Ito's colours, which colour-blind people tell apart."""
TAUS = np.linspace(0, 1.2, 121)
"""Scores at which profiles are drawn."""


def scores_by_algorithm(runs: Sequence[RunResult]) -> dict[str, Scores]:
    """Return the scores of each algorithm (or named case); environments without a scale are left out."""
    found: dict[str, Scores] = {}
    for case, own in by_case(runs).items():
        run, score = own[0], normalise(own, study=runs)
        name = run.algorithm if case == f"{run.env}:{run.algorithm}" else case
        if score is not None:
            column = np.array([score(each.after["mean_return"]) for each in own])
            found.setdefault(name, {})[run.env] = column
    return found


def everywhere(scores: Scores) -> np.ndarray:
    """Return the interquartile mean over all runs, of ``[*, seeds]`` by environment: ``[*]``."""
    return interquartile_mean(np.concatenate([*scores.values()], axis=-1))


def profile(scores: Scores) -> np.ndarray:
    """Return the fraction of runs whose score is above each of `TAUS`: ``[*, len(TAUS)]`` (run-score distribution)."""
    whole = np.concatenate([*scores.values()], axis=-1)
    return (whole[..., None] > TAUS).mean(axis=-2)


def probability_of_improvement(x: Scores, y: Scores) -> np.ndarray:
    """Return the probability that a run of x beats one of y on a random shared environment (eq. 2): ``[*]``."""
    pairs = [(x[env][..., :, None], y[env][..., None, :]) for env in x if env in y]
    return np.mean([((a > b) + 0.5 * (a == b)).mean(axis=(-2, -1)) for a, b in pairs], axis=0)


def interval(statistic: Callable[..., np.ndarray], *scores: Scores, seed: int = 0) -> np.ndarray | None:
    """95 % limits ``[2, *]`` by the stratified bootstrap; None with fewer than `MIN_SEEDS` seeds somewhere."""
    if min(len(column) for each in scores for column in each.values()) < MIN_SEEDS:
        return None
    generator = np.random.default_rng(seed)
    drawn = [
        {env: x[generator.integers(len(x), size=(RESAMPLES, len(x)))] for env, x in each.items()} for each in scores
    ]
    return np.quantile(statistic(*drawn), [0.025, 0.975], axis=0)


def write_paper(run_dir: Path, runs: Sequence[RunResult]) -> None:
    """Write ``paper.pdf``, ``paper.svg``, ``paper.tex`` and ``paper.csv``; nothing if no environment has a scale."""
    found = scores_by_algorithm(runs)
    if not found:
        return
    if len({frozenset(own) for own in found.values()}) > 1:  # means over different tasks are no comparison: say which
        found = {f"{name} ({', '.join(own)})": own for name, own in found.items()}
    rows = [("interquartile mean", name, "", everywhere(own), interval(everywhere, own)) for name, own in found.items()]
    for (first, x), (second, y) in itertools.combinations(found.items(), 2):
        if x.keys() & y.keys():
            limits = interval(probability_of_improvement, x, y)
            rows.append(("probability of improvement", first, second, probability_of_improvement(x, y), limits))
    with (run_dir / "paper.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["quantity", "algorithm", "over", "value", "low", "high"])
        writer.writerows([*row[:3], float(row[3]), *map(float, row[4] if row[4] is not None else [])] for row in rows)
    (run_dir / "paper.tex").write_text(_latex(rows), encoding="utf-8")
    _draw(run_dir, found, rows)


def _latex(rows: Sequence[tuple]) -> str:
    """A ``tabular`` for booktabs."""
    about = (
        "% Normalised score: 0 untrained, 1 solved (reward_threshold, else the best here). CI: stratified bootstrap."
    )
    lines = [about, r"\begin{tabular}{lll}", r"\toprule", r"quantity & algorithm & value (95\% CI) \\", r"\midrule"]
    for quantity, name, over, value, limits in rows:
        label = re.sub(r"([_%&#$])", r"\\\1", " over ".join(filter(None, (name, over))))
        spread = "" if limits is None else f" ({limits[0]:.2f} to {limits[1]:.2f})"
        lines.append(rf"{quantity} & {label} & {value:.2f}{spread} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _draw(run_dir: Path, found: dict[str, Scores], rows: Sequence[tuple]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = 2 + (len(found) > 1)
    figure, axes = pyplot.subplots(
        1, panels, figsize=(4 * panels, 1.5 + 0.35 * max(4, len(rows))), layout="constrained"
    )
    colours = dict(zip(found, itertools.cycle(PALETTE), strict=False))
    for axis, title in zip(axes[::2], ("interquartile mean", "probability of improvement"), strict=False):
        chosen = [row for row in rows if row[0] == title][::-1]
        for place, (_, name, _, value, limits) in enumerate(chosen):
            if limits is not None:
                axis.plot(limits, [place, place], color=colours[name], lw=6, alpha=0.4, solid_capstyle="butt")
            elif title == "interquartile mean":
                seeds = np.concatenate([*found[name].values()])
                axis.plot(seeds, [place] * len(seeds), ".", color=colours[name], alpha=0.4)
            axis.plot(value, place, "|", color=colours[name], ms=14, mew=2)
        axis.set_ylim(-0.6, len(chosen) - 0.4)
        axis.set_yticks(range(len(chosen)), [f"{row[1]} over {row[2]}" if row[2] else row[1] for row in chosen])
        axis.set(xlabel=f"{title}, {'normalised score' if title == 'interquartile mean' else 'P(X > Y)'}")
    for axis in axes[2:]:
        axis.axvline(0.5, color="grey", lw=1, ls=":")
        axis.set_xlim(-0.02, 1.02)
    for name, own in found.items():
        axes[1].plot(TAUS, profile(own), color=colours[name], label=name)
        if (band := interval(profile, own)) is not None:
            axes[1].fill_between(TAUS, *band, color=colours[name], alpha=0.2, lw=0)
    axes[1].set(xlabel="normalised score τ", ylabel="fraction of runs with score > τ", ylim=(0, 1.02))
    axes[1].legend(frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType, which journals ask for
        figure.savefig(run_dir / "paper.pdf")
    figure.savefig(run_dir / "paper.svg")
    pyplot.close(figure)
