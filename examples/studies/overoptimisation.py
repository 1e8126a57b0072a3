"""How far may a policy follow an imperfect reward model? Gold and proxy against the KL, for PPO and for best-of-n.

python examples/studies/overoptimisation.py                          # every run: about an hour of a core
python examples/studies/overoptimisation.py --seeds 1
python examples/studies/overoptimisation.py --table gold    # of the runs so far; also: coefficients, penalty, best-of-n
python examples/studies/overoptimisation.py --figure docs/figures/overoptimisation.svg    # from the page's data

After Gao, Schulman and Hilton 2022. The gold reward is a function of the text, so it costs nothing and has no error. It
labels pairs of answers of the untrained model; a reward model, the proxy, learns from them; and answers are optimised
for the proxy, by PPO or by taking the best of n. A run is a line of runs/overoptimisation.jsonl. A run that is there is
not repeated.
"""

import argparse
import dataclasses
import functools
import json
import math
import random
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from transformers import GPT2ForSequenceClassification

from algos import PPO, LMPolicy, RewardModelConfig, presets, train_reward_model
from textenv import RewardModel, Rewards, TextVectorEnv, split_prompts
from textenv.embedded import phrases
from textenv.embedded.grammar import openings
from textenv.embedded.training import gpt2_config

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from page import DATA, save_table_of_runs
from pictures import new_figure, save
from recorded_runs import RunFile, mean_and_range, print_table

RUNS = RunFile(Path("runs/overoptimisation.jsonl"), ("width", "pairs", "kl_coef", "slowdown", "seed"))
NEW_TOKENS = 48
LENGTH_LIMIT = 20
"""Words of an answer that cost nothing; each further one costs half a point of gold."""
BY_SIZE = [(4, 1000), (8, 1000), (16, 1000), (32, 1000), (64, 1000)]
BY_DATA = [(32, 100), (32, 300), (32, 1000), (32, 3000)]
"""Width of the reward model, and number of pairs that it is trained on."""
PENALISED = [(32, 300), (32, 1000)]
KL_COEFS = (0.02, 0.1)
"""Reward per nat, where the reward is the proxy, whose standard deviation is 1 before the training."""
SLOWER = [(32, 1000)]
"""Reward models for which PPO without a penalty is also run with a third of the learning rate, three times as long."""
POOL_PROMPTS = 16
POOL_ANSWERS = 4096
"""Number of answers to each of these prompts from which the best of n are drawn."""
N = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
HELD_OUT_PAIRS = 500
ITERATIONS = 30
PPO_CONFIG = dataclasses.replace(presets.TEXT_EMBEDDED, num_episodes=64, learning_rate=3e-4, final_learning_rate=None)
"""The recipe's rate, which does not fall here, and half its answers to an iteration: it goes far without a penalty."""
LARGEST_KL = 50
"""Nats. Iterations with a larger KL are in no fit and not in the figure: in a few runs gold falls to -8 there."""
BIN = 0.25
"""Width in √nat of the bins in which the figure shows the means of PPO's iterations."""


# --- gold ------------------------------------------------------------------------------------------------------------


def words_of(text):
    """The words of a text."""
    return re.findall(r"[a-z]+", text.lower())


@functools.cache
def taste():
    """What each word of the grammar is worth, by word: a normal number, drawn once and the same in every run."""
    tables = [*phrases.PREDICATES, *phrases.SENTENCES, *(text for texts in phrases.NEUTRAL.values() for text in texts)]
    for texts_by_label in phrases.POLAR.values():
        for texts in texts_by_label:
            tables += texts
    vocabulary = {word for text in tables for word in words_of(re.sub(r"\{\w+\}", " ", text))}
    generator = random.Random(0)
    return {word: generator.gauss(0, 1) for word in sorted(vocabulary)}


def raw_gold(answer):
    """Gold reward: the worth of the answer's words, less half a point for each repetition and each word too many."""
    words = words_of(answer)
    different = set(words)
    worth = math.fsum(taste().get(word, 0.0) for word in different)  # exact, so that it has no order
    num_repeated = len(words) - len(different)
    num_too_many = max(0, len(words) - LENGTH_LIMIT)
    return worth - 0.5 * (num_repeated + num_too_many)


@dataclasses.dataclass
class Pool:
    """Answers of the untrained model; both rewards have mean 0 and standard deviation 1 on it."""

    rows: list[list[int]]
    """Ids of prompt, answer and EOS, prompt by prompt."""
    raw_gold: np.ndarray
    """``[POOL_PROMPTS, POOL_ANSWERS]``."""

    def gold(self, answer):
        """Gold reward of an answer in standard deviations from the untrained model's mean."""
        return float((raw_gold(answer) - self.raw_gold.mean()) / self.raw_gold.std())


@functools.cache
def make_pool():
    """Sample the pool: the same in every run."""
    policy = LMPolicy.load("embedded", seed=0)
    train_prompts = [str(prompt) for prompt in split_prompts(openings(), "train")]
    prompts = random.Random(0).sample(train_prompts, POOL_PROMPTS)
    prompts = [prompt for prompt in prompts for _ in range(POOL_ANSWERS)]
    answers = policy.generate(prompts, max_new_tokens=NEW_TOKENS, seed=0)
    tokenizer = policy.tokenizer
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    golds = np.array([raw_gold(answer) for answer in answers])
    return Pool(rows, golds.reshape(POOL_PROMPTS, POOL_ANSWERS))


# --- reward models ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def sample_pairs(split, count, seed):
    """Pairs of answers of the untrained model to one prompt, of which the one with more gold is chosen."""
    prompts = [str(prompt) for prompt in split_prompts(openings(), split)]
    chosen_prompts = random.Random(seed).choices(prompts, k=count)
    policy = LMPolicy.load("embedded", seed=0)
    twice = [prompt for prompt in chosen_prompts for _ in range(2)]
    answers = policy.generate(twice, max_new_tokens=NEW_TOKENS, seed=1000 + seed)
    pairs = []
    for prompt, first, second in zip(chosen_prompts, answers[::2], answers[1::2], strict=True):
        rejected, chosen = sorted((first, second), key=raw_gold)
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs


class Proxy:
    """A reward model whose scores have mean 0 and standard deviation 1 on the pool."""

    def __init__(self, model, pool):
        self.model = model
        scores = model.score_rows(pool.rows).double().numpy()
        self.mean = scores.mean()
        self.deviation = scores.std()
        self.pool_scores = ((scores - self.mean) / self.deviation).reshape(pool.raw_gold.shape)

    def __call__(self, prompts, completions, prompt_ids, completion_ids, terminated, tokenizer):
        """Score answers, as a reward function."""
        scores = self.model(
            prompts,
            completions,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            terminated=terminated,
            tokenizer=tokenizer,
        )
        return [float((score - self.mean) / self.deviation) for score in scores]


def train_proxy(*, width, pairs, seed, pool):
    """Train a transformer of one layer from scratch on labelled pairs; return it, and its accuracy on held-out ones."""
    torch.manual_seed(seed)
    tokenizer = LMPolicy.load("embedded", seed=0).tokenizer
    config = gpt2_config(tokenizer, n_embd=width, n_layer=1, num_labels=1, initializer_range=0.1)
    classifier = GPT2ForSequenceClassification(config)
    # The last norm bounds the score: with it, the proxy soon stops to rise
    classifier.transformer.ln_f = torch.nn.Identity()
    model = RewardModel(classifier, tokenizer, batch_size=256)
    report = train_reward_model(
        model,
        sample_pairs("train", max(count for _, count in BY_DATA), seed)[:pairs],
        RewardModelConfig(num_epochs=4, learning_rate=3e-3 * math.sqrt(64 / width), batch_size=16, seed=seed),
        held_out=sample_pairs("test", HELD_OUT_PAIRS, 0),
    )
    return Proxy(model, pool), report.accuracy


# --- optimisation ----------------------------------------------------------------------------------------------------


def best_of_n_kl(n):
    """KL of the best of n answers to one answer, nats, if no two answers have the same score."""
    return math.log(n) - (n - 1) / n


def best_of_n(probability, score, value, n):
    """Exact KL and mean value of the best of n draws from a finite distribution; of equal scores, one is drawn.

    Args:
        probability: of each answer, ``[K]``.
        score: by which the best is chosen, ``[K]``.
        value: whose mean is returned, ``[K]``.
        n: number of draws.
    """
    # All answers of one score together: the best of n has at most this score if all n have
    _, group = np.unique(score, return_inverse=True)
    mass = np.bincount(group, weights=probability)
    at_most = np.minimum(np.cumsum(mass), 1.0)
    below = np.concatenate([[0.0], at_most[:-1]])
    growth = (at_most**n - below**n) / mass

    # By this factor the probability of each answer grows; 0 · log 0 = 0
    ratio = growth[group]
    log_ratio = np.log(ratio, where=ratio > 0, out=np.zeros_like(ratio))
    kl = np.sum(probability * ratio * log_ratio)
    return float(kl), float(np.sum(probability * ratio * value))


def mean_of_best(score, value, n):
    """Unbiased estimate of the mean value of the best of n of a row, from all its subsets of n; mean over the rows.

    Args:
        score: ``[rows, answers]``.
        value: ``[rows, answers]``.
        n: size of the subsets.
    """
    count = score.shape[1]
    # The largest of N answers is in n/N of the subsets; the answer below the one of rank i is the best of
    # (i - n)/(i - 1) as many subsets as that one
    rank = np.arange(count, 1, -1)
    weight = n / count * np.cumprod([1.0, *(rank - n).clip(0) / (rank - 1)])
    order = np.argsort(-score, axis=1)
    ordered_value = np.take_along_axis(value, order, axis=1)
    return float((ordered_value @ weight).mean())


def train_policy(proxy, *, pool, seed, kl_coef, slowdown=1):
    """PPO for the proxy; return KL, proxy and gold of the answers of each iteration, ``[iterations, 3]``."""

    def gold(completions):
        return [pool.gold(completion) for completion in completions]

    # Gold is only measured: it has no weight in the reward
    policy = LMPolicy.load("embedded", seed=seed)
    env = TextVectorEnv(
        prompts=split_prompts(openings(), "train"),
        reward=Rewards({"proxy": proxy, "gold": (gold, 0.0)}),
        tokenizer=policy.tokenizer,
        num_envs=64,
        max_prompt_tokens=24,
        max_new_tokens=NEW_TOKENS,
    )
    config = dataclasses.replace(PPO_CONFIG, seed=seed, learning_rate=PPO_CONFIG.learning_rate / slowdown)
    agent = PPO(env, policy, config, kl_coef=kl_coef)

    # A point of each iteration; the number of iterations ends the training
    points = []

    def record(metrics):
        points.append([metrics["reference/kl"], metrics["reward_raw/proxy"], metrics["reward_raw/gold"]])
        return len(points) == slowdown * ITERATIONS

    agent.learn(10**9, on_iteration=record)
    return points


def run(*, width, pairs, seed, kl_coef, slowdown):
    """Train a reward model, and optimise for it; best-of-n only beside PPO without a penalty.

    Returns:
        ``parameters`` of the reward model; its ``accuracy`` on held-out pairs; its ``correlation`` with gold on the
        pool; ``best_of_n``: KL, proxy and gold for each of `N`; ``ppo``: the same of each iteration.
    """
    pool = make_pool()
    proxy, accuracy = train_proxy(width=width, pairs=pairs, seed=seed, pool=pool)

    # On the untrained model's answers
    gold = (pool.raw_gold - pool.raw_gold.mean()) / pool.raw_gold.std()
    result = {
        "parameters": sum(weight.numel() for weight in proxy.model.model.parameters()),
        "accuracy": accuracy,
        "correlation": float(np.corrcoef(proxy.pool_scores.ravel(), gold.ravel())[0, 1]),
    }
    if kl_coef == 0 and slowdown == 1:
        scores = proxy.pool_scores
        result["best_of_n"] = [
            [best_of_n_kl(n), mean_of_best(scores, scores, n), mean_of_best(scores, gold, n)] for n in N
        ]

    # PPO
    result["ppo"] = train_policy(proxy, pool=pool, seed=seed, kl_coef=kl_coef, slowdown=slowdown)
    return result


# --- fits and tables -------------------------------------------------------------------------------------------------


def fit(kl, gold, *, method):
    """Least squares for R(d) = d(α − β d), best-of-n, or d(α − β log d), PPO, with d = √KL; returns α, β and R².

    R² = 1 − Σ(gold − R)² / Σ(gold − mean)². The curve has no free height, so its residuals need not have mean 0.
    """
    kl = np.asarray(kl)
    used = (kl > 0.01) & (kl <= LARGEST_KL)  # at 0 both are 0, but for the noise of the samples
    gold = np.asarray(gold)[used]
    d = np.sqrt(kl[used])
    bend = d
    if method == "ppo":
        bend = np.log(d)
    columns = np.stack([d, -d * bend], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, gold, rcond=None)
    unexplained = np.square(gold - columns @ [alpha, beta]).mean()
    return float(alpha), float(beta), float(1 - unexplained / gold.var())


def curve(alpha, beta, d, *, method):
    """The fitted gold at these d."""
    if method == "ppo":
        return d * (alpha - beta * np.log(d))
    return d * (alpha - beta * d)


def peak(alpha, beta, *, method):
    """The d at which the fitted gold is largest; infinite if it always rises."""
    if beta <= 0:
        return math.inf
    if method == "ppo":
        return math.exp(alpha / beta - 1)
    return alpha / (2 * beta)


def by_seed(runs, width, pairs, kl_coef=0.0, slowdown=1):
    """Runs of a reward model by seed, in the order of the seeds."""
    settings = (width, pairs, kl_coef, slowdown)
    return {entry["seed"]: entry for key, entry in sorted(runs.items()) if key[:4] == settings}


def each_seed(differences):
    """Mean of a difference, and each seed's; a dash if there is none."""
    if not differences:
        return "–"
    return f"{statistics.mean(differences):+.2f} ({', '.join(f'{value:+.2f}' for value in differences)})"


def root(kl):
    """√KL of an estimate, which may be a little below 0."""
    return math.sqrt(max(0.0, kl))


def smoothed(points, width=5):
    """Means over this many iterations."""
    columns = np.asarray(points).T
    return np.stack([np.convolve(column, np.ones(width) / width, mode="valid") for column in columns], axis=1)


def models(runs):
    """Width, pairs and runs of each reward model that has runs without a penalty."""
    with_runs = []
    for width, pairs in sorted({*BY_SIZE, *BY_DATA}):
        entries = list(by_seed(runs, width, pairs).values())
        if entries:
            with_runs.append((width, pairs, entries))
    return with_runs


def gold_table(runs):
    """Columns and rows: each reward model, its quality, and the gold that both methods reach with it."""
    columns = ["width", "pairs", "weights", "accuracy", "correlation", "gold, best of 1,024", "best gold, PPO",
               "√KL there", "last gold, PPO", "last proxy, PPO", "last √KL, PPO"]  # fmt: skip
    rows = []
    for width, pairs, entries in models(runs):
        figures = [gold_figures(entry) for entry in entries]
        cells = [mean_and_range(values) for values in zip(*figures, strict=True)]
        rows.append([str(width), f"{pairs:,}", f"{entries[0]['parameters']:,}", *cells])
    return columns, rows


def gold_figures(entry):
    """Figures of one run in the order of the columns of `gold_table`, from the accuracy on."""
    gold_of_n = entry["best_of_n"][-1][2]
    means = smoothed(entry["ppo"])
    best_kl, _, best_gold = means[means[:, 2].argmax()]
    last_kl, last_proxy, last_gold = means[-1]
    quality = [entry["accuracy"], entry["correlation"]]
    return [*quality, gold_of_n, best_gold, root(best_kl), last_gold, last_proxy, root(last_kl)]


def coefficient_table(runs):
    """Columns and rows: the coefficients of both fits for each reward model, R² and the fitted peak."""
    columns = ["width", "pairs"]
    for name in ("best of n", "PPO"):
        columns += [f"α, {name}", f"β, {name}", f"R², {name}", f"fitted peak √KL, {name}"]
    columns.append("R² of d(α − β d), PPO")
    rows = []
    for width, pairs, entries in models(runs):
        figures = [coefficients(entry) for entry in entries]
        cells = [mean_and_range(values) for values in zip(*figures, strict=True)]
        rows.append([str(width), f"{pairs:,}", *cells])
    return columns, rows


def coefficients(entry):
    """Figures of one run in the order of the columns of `coefficient_table`."""
    figures = []
    for method in ("best_of_n", "ppo"):
        kl, _, gold = zip(*entry[method], strict=True)
        alpha, beta, explained = fit(kl, gold, method=method)
        figures += [alpha, beta, explained, peak(alpha, beta, method=method)]

    # PPO's points by the formula of best-of-n
    kl, _, gold = zip(*entry["ppo"], strict=True)
    _, _, explained = fit(kl, gold, method="best_of_n")
    return [*figures, explained]


def penalty_table(runs):
    """Columns and rows: gold at the end with a KL penalty, beside PPO without one at the same KL, and at its best."""
    columns = ["width", "pairs", "KL coefficient", "last √KL", "last gold", "less: no penalty, same KL",
               "less: no penalty, slower, same KL", "less: no penalty, best gold",
               "proxy, less: no penalty, same KL"]  # fmt: skip
    rows = []
    for width, pairs in PENALISED:
        free_runs = by_seed(runs, width, pairs)
        slow_runs = by_seed(runs, width, pairs, slowdown=3)
        for kl_coef in KL_COEFS:
            penalised_runs = by_seed(runs, width, pairs, kl_coef)
            seeds = [seed for seed in penalised_runs if seed in free_runs]
            if not seeds:
                continue
            ends = []
            differences = []
            for seed in seeds:
                kl, _, gold = smoothed(penalised_runs[seed]["ppo"])[-1]
                ends.append([root(kl), gold])
                differences.append(less_without_penalty(penalised_runs[seed], free_runs[seed], slow_runs.get(seed)))

            # A dash where there is no slower run
            cells = [mean_and_range(values) for values in zip(*ends, strict=True)]
            for values in zip(*differences, strict=True):
                cells.append(each_seed([value for value in values if value is not None]))
            rows.append([str(width), f"{pairs:,}", str(kl_coef), *cells])
    return columns, rows


def less_without_penalty(penalised, free, slow):
    """By how much a penalised run ends above those of its reward model and seed that have no penalty.

    Args:
        penalised: run with a penalty.
        free: run without one.
        slow: the same with a lower learning rate, or None.

    Returns:
        Gold less that of ``free`` at the same KL, that of ``slow`` there (None without it) and the best of ``free``;
        proxy less that of ``free`` at the same KL.
    """
    kl, proxy, gold = smoothed(penalised["ppo"])[-1]
    _, free_proxy, free_gold = at_kl(free["ppo"], kl)
    best_gold = smoothed(free["ppo"])[:, 2].max()
    above_slow = None
    if slow is not None:
        _, _, slow_gold = at_kl(slow["ppo"], kl)
        above_slow = gold - slow_gold
    return gold - free_gold, above_slow, gold - best_gold, proxy - free_proxy


def at_kl(points, kl):
    """Mean of the three points whose √KL is nearest to that of a KL."""
    points = np.asarray(points)
    distance = np.abs(np.sqrt(points[:, 0].clip(0)) - root(kl))
    return points[distance.argsort(kind="stable")[:3]].mean(0)


def best_of_n_table(runs):
    """Columns and rows: KL of the best of n, by the formula, and exactly for distributions of K answers."""
    golds = make_pool().raw_gold.round(9)
    columns = ["n", "log n − (n−1)/n", "10,000 distinct scores", "4,096 distinct scores", "the pool's 4,096 answers",
               "100 distinct scores", "100 answers, 10 scores"]  # fmt: skip
    rows = []
    for n in (4, 16, 64, 256, 1024):
        cells = [str(n), f"{best_of_n_kl(n):.3f}"]
        for scores in ([np.arange(10_000)], [np.arange(4_096)], golds, [np.arange(100)], [np.arange(100) // 10]):
            kls = [best_of_n(np.full(len(row), 1 / len(row)), row, row, n)[0] for row in scores]
            cells.append(f"{statistics.mean(kls):.3f}")
        rows.append(cells)
    return columns, rows


def binned(points):
    """Mean KL, proxy and gold of the iterations in each bin of √KL that has at least 3 of them."""
    points = np.asarray(points)
    index = np.round(np.sqrt(points[:, 0].clip(0)) / BIN).astype(int)
    return [points[index == i].mean(0).round(4).tolist() for i in np.unique(index) if (index == i).sum() >= 3]


def curves(runs):
    """What the figure shows of each reward model, over its seeds."""
    shown = []
    for width, pairs, entries in models(runs):
        best = np.mean([entry["best_of_n"] for entry in entries], axis=0)
        ppo = np.concatenate([entry["ppo"] for entry in entries])
        shown.append(
            {
                "width": width,
                "pairs": pairs,
                "best_of_n": best.round(4).tolist(),
                "ppo": binned(ppo),
                "fit of best_of_n": fit(best[:, 0], best[:, 2], method="best_of_n"),
                "fit of ppo": fit(ppo[:, 0], ppo[:, 2], method="ppo"),
            }
        )
    return shown


def draw(path, data=DATA / "overoptimisation.json"):
    """Draw gold and proxy against √KL: by amount of data above, by width below; best-of-n left, PPO right."""
    entries = {(entry["width"], entry["pairs"]): entry for entry in json.loads(data.read_text())["curves"]}
    figure, grid = new_figure("overoptimisation", rows=2, columns=2, size=(9, 7), sharey=True, sharex="col")
    by_data = {f"{pairs:,} pairs": entries.get((width, pairs)) for width, pairs in BY_DATA}
    by_width = {f"width {width}": entries.get((width, pairs)) for width, pairs in BY_SIZE}
    for axes_of_row, row_entries in zip(grid, (by_data, by_width), strict=True):
        for axes, method in zip(axes_of_row, ("best_of_n", "ppo"), strict=True):
            draw_panel(axes, row_entries, method)

    # Points beyond the KL of the fits are not shown
    grid[0, 0].set_ylim(-2.5, 4)
    grid[0, 1].set_xlim(-0.3, math.sqrt(LARGEST_KL) + 0.2)

    # Words
    grid[0, 0].set_title("best of n")
    grid[0, 1].set_title("PPO, no KL penalty")
    for axes in grid[1]:
        axes.set_xlabel("√KL to the untrained model, √nat")
    grid[0, 0].set_ylabel("reward, width 32, by data")
    grid[1, 0].set_ylabel("reward, 1,000 pairs, by width")
    for axes in grid[:, 0]:
        axes.legend(frameon=False, fontsize=9, title="dots: gold; line: its fit; dashed: proxy", title_fontsize=8)
    save(figure, path)


def draw_panel(axes, entries, method):
    """Draw gold, its fit and the proxy of some reward models, by label; the colour of the last is the darkest."""
    for rank, (label, entry) in enumerate(entries.items()):
        if entry is None:
            continue
        colour = colormaps["viridis"](0.9 * (1 - rank / (len(entries) - 1)))
        kl, proxy, gold = np.array(entry[method]).T
        d = np.sqrt(kl.clip(0))
        axes.plot(d, proxy, "--", color=colour, linewidth=1)
        axes.plot(d, gold, "o", color=colour, markersize=4, label=label)
        alpha, beta, _ = entry[f"fit of {method}"]
        line = np.linspace(0.02, d.max().clip(0.02, math.sqrt(LARGEST_KL)), 100)
        axes.plot(line, curve(alpha, beta, line, method=method), color=colour, linewidth=1.5)
    axes.axhline(0, color="#999999", linewidth=0.5)


TABLES = {"gold": gold_table, "coefficients": coefficient_table, "penalty": penalty_table, "best-of-n": best_of_n_table}
"""Function of each table, which gets the runs."""


def settings_of(seeds):
    """Settings of all runs, seed by seed: every reward model without a penalty, some with one, some slower."""
    chosen = [(width, pairs, 0.0, 1) for width, pairs in dict.fromkeys([*BY_DATA, *BY_SIZE])]
    chosen += [(width, pairs, kl_coef, 1) for width, pairs in PENALISED for kl_coef in KL_COEFS]
    chosen += [(width, pairs, 0.0, 3) for width, pairs in SLOWER]
    return [dict(zip(RUNS.settings, (*settings, seed), strict=True)) for seed in seeds for settings in chosen]


def write_table(name, path, runs):
    """Print a table of these runs, or write it to a file, the first one with the curves of the figure."""
    columns, rows = TABLES[name](runs)
    if path is None:
        print_table(columns, rows)
        return
    raw = {}
    if name == "gold":
        raw = {"curves": curves(runs)}
    command = f"python examples/studies/overoptimisation.py --table {name}"
    save_table_of_runs(path, columns, rows, command, kinds=["text", "reward models"], raw=raw)


def main():
    """Run what is missing, or print or draw what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5", help="to run, or for --table to show")
    parser.add_argument("--table", choices=TABLES, help="print this table")
    parser.add_argument("--json", type=Path, help="with --table: write it to this file of docs/results/data instead")
    parser.add_argument("--figure", type=Path, help="draw the data of the page")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    torch.set_num_threads(1)
    if options.figure is not None:
        draw(options.figure, DATA / "overoptimisation.json")
    elif options.table is not None:
        runs = {key: entry for key, entry in RUNS.read().items() if entry["seed"] in seeds}
        if not runs and options.table != "best-of-n":
            parser.exit(2, f"{RUNS.path} has no runs of these seeds: run them first\n")
        write_table(options.table, options.json, runs)
    elif options.json is not None:
        parser.error("--json needs --table")
    else:
        for entry in RUNS.run_missing(settings_of(seeds), run):
            names = [entry[name] for name in RUNS.settings]
            last = [round(figure, 2) for figure in entry["ppo"][-1]]
            print(*names, "last KL, proxy, gold:", last, entry["seconds"], flush=True)


if __name__ == "__main__":
    main()
