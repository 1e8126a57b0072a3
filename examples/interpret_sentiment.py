"""What does praise change inside a language model? Runs for positive and for negative reviews, taken apart.

    python examples/interpret_sentiment.py --model embedded                       # 3 seeds x 3 cases
    python examples/interpret_sentiment.py --model smollm2 --total-steps 5000     # 3 seeds x 5 cases

PPO trains each case: rewarded for positive or negative reviews, with or without a KL penalty, and SmolLM2 with LoRA or
all weights. `algos interpret` then writes each run's tables, pictures and page; the tables here are over the seeds:
how far the difference of praise and blame moved, in how many heads, how much of it goes if heads or layers get their
old output back, and whether two cases changed the same places (correlation over the places, beside that of two seeds
of one case, which is as high as it can be expected). Finished runs in the folder are read, not trained again.
"""

import argparse
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import film_reviews
import numpy as np
import torch

from algos import PPO, LMPolicy, evaluate, load, presets
from algos.lab.comparison.report import write_findings
from algos.lab.insight.finding import Finding, draw_lines, draw_maps
from algos.lab.insight.language import interpret_language
from textenv import KLPenalty, LanguageModel, TextVectorEnv
from textenv.rewards import vader
from textenv.rewards.reward_model import RewardModel

TOKENS = {
    "embedded": (" superb| brilliant| charming| witty| warm| funny", " awful| dreadful| boring| clumsy| dull| cold"),
    "smollm2": (" good| great| wonderful| beautiful| fun", " bad| terrible| awful| boring| horrible"),
}
CASES = {  # positive or negative reviews, coefficient of the KL penalty (1: the usual one), LoRA
    "positive": (1, 1.0, True),
    "negative": (-1, 1.0, True),
    "positive, no penalty": (1, 0.0, True),
    "positive, all weights": (1, 1.0, False),
    "negative, all weights": (-1, 1.0, False),
}
ALL_WEIGHTS_RATE = 5e-5
EPISODES = 64


def environment(model, sign, tokenizer):
    """Reviews that are rewarded for being positive (sign 1) or negative (-1), and the coefficient of the KL penalty."""
    if model == "smollm2":
        return film_reviews.make_environment({"VADER": (vader(), sign)}, film_reviews.FILMS, tokenizer), 0.05
    classifier = RewardModel.load("embedded", label="positive" if sign > 0 else "negative")
    env = TextVectorEnv(
        prompts=prompts_of(model, ""), reward=classifier, tokenizer=tokenizer, num_envs=64, max_prompt_tokens=24,
        max_new_tokens=48,
    )  # fmt: skip
    return env, 0.1


def prompts_of(model, end):
    """Beginnings of reviews without sentiment, with an end after which a word of sentiment may follow."""
    if model == "smollm2":
        films = [*film_reviews.UNSEEN, *film_reviews.FILMS]
        return [f"{film[0].upper()}{film[1:]} {verb} really" for film in films for verb in ("was", "is")]
    from textenv.embedded.grammar import openings

    return [f"{opening}{end}" for opening in openings()[::4]]


def train(model, case, seed, total_steps, folder):
    """Train a case, and keep its run."""
    sign, penalized, lora = CASES[case]
    small = model == "embedded"
    policy = LMPolicy.load(model, lora=film_reviews.LORA if lora and not small else None, seed=seed)
    env, kl_coef = environment(model, sign, policy.tokenizer)
    config = presets.TEXT_EMBEDDED if small else film_reviews.SETTINGS["ppo"]
    config = config if lora else replace(config, learning_rate=ALL_WEIGHTS_RATE)
    agent = PPO(env, policy, replace(config, seed=seed), kl_coef=kl_coef * penalized)
    agent.learn(total_steps, run_dir=folder, overwrite=True)


def changes(finding):
    """Change of each row of a finding, by its labels."""
    column = finding.columns.index("change")
    return {row[: column - 2]: row[column] for row in finding.rows}  # before the change, the means of two models


def interpret(model, case, folder, tokens):
    """Write the page of a run; return figures, and the change by table and place."""
    policy, reference = load(folder), LanguageModel.load(model)
    prompts = prompts_of(model, " was really")[:32]
    found = {x.name: x for x in interpret_language({"base": reference, "tuned": policy.lm}, prompts, tokens)}
    write_findings(folder / "interpret", f"{model}, {case}", [*found.values()])
    env, _ = environment(model, CASES[case][0], policy.tokenizer)
    played = evaluate(env, policy, num_episodes=EPISODES, seed=1)
    KLPenalty(reference, coef=0.0)(played.rollout, policy)
    maps = {name: changes(found[name]) for name in ("parts", "heads", "logit_lens")}
    maps["heads"] = {(layer, head): x for (layer, head), x in maps["heads"].items() if head != "bias"}
    change = changes(found["logit_difference"])[()]
    heads = np.sort(np.abs([*maps["heads"].values()]))[::-1]
    patched = [(row[0], row[2]) for row in found["patching"].rows]  # five heads, five other parts, all those heads
    figures = {
        "reward": played.mean_return,
        "KL, nats a review": played.rollout["kl"].sum().item() / EPISODES,
        "change of the difference": change,
        **{f"share of {kind}, direct": sum(x for (place,), x in maps["parts"].items() if kind in place) / change
           for kind in ("attention", "mlp", "embedding")},
        "heads with half of the heads' change": int((heads.cumsum() < heads.sum() / 2).sum()) + 1,
        "share gone: first head patched": patched[0][1],
        "share gone: five heads patched": patched[-1][1],
        "share gone: first part patched": patched[5][1],
    }  # fmt: skip
    return {"figures": figures, "maps": maps, "first": f"{patched[0][0]}; {patched[5][0]}"}


def agreement(found, name, first, second):
    """Correlations, over the places of a table, of the changes of two cases' runs with different seeds."""
    return [
        float(np.corrcoef([runs[place] for place in other], [*other.values()])[0, 1])
        for one, runs in ((seed, run["maps"][name]) for seed, run in found[first].items())
        for two, other in ((seed, run["maps"][name]) for seed, run in found[second].items())
        if (one < two if first == second else one != two)
    ]


def shown(values):
    """Mean [smallest, largest]."""
    return f"{np.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if len(values) else ""


def tables(model, found):
    """Tables over the seeds, with a picture of the heads and one of the layers."""
    runs = {case: [run for _, run in sorted(by_seed.items())] for case, by_seed in found.items()}
    names = [*runs[next(iter(runs))][0]["figures"]]
    rows = [(name, *(shown([run["figures"][name] for run in each]) for each in runs.values())) for name in names]
    rows.append(("first head; first other part", *(" / ".join(run["first"] for run in each) for each in runs.values())))
    title = f"{model}: before and after, mean [smallest, largest] of the seeds"
    findings = [Finding("figures", title, ("figure", *runs), rows)]

    def mean(case, name):
        places = sorted(runs[case][0]["maps"][name])
        return np.mean([[run["maps"][name][place] for place in places] for run in runs[case]], axis=0)

    layers = 1 + max(layer for layer, _ in runs[next(iter(runs))][0]["maps"]["heads"])
    pictures = {
        "heads": partial(draw_maps, rows=[{case: mean(case, "heads").reshape(layers, -1)} for case in runs],
                         signed=True, xlabel="head", ylabel="layer"),
        "parts": partial(draw_lines, panels={"change of the lens": {case: mean(case, "logit_lens") for case in runs}},
                         xlabel="layer"),
    }  # fmt: skip
    for name, draw in pictures.items():
        rows = [(one, *(shown(agreement(found, name, one, other)) for other in runs)) for one in runs]
        title = f"{model}: correlation of the changes of {name}, between runs with different seeds"
        findings.append(Finding(name, title, ("case", *runs), rows, draw))
    return findings


def main(model, seeds, total_steps, out):
    found = {}
    for seed, case in itertools.product(seeds, CASES):
        if model == "embedded" and not CASES[case][2]:
            continue  # all its weights are trained anyway
        folder = out / model / f"{case.replace(', ', '-').replace(' ', '-')}-{seed}"
        if not (folder / "policy").exists():
            train(model, case, seed, total_steps, folder)
        found.setdefault(case, {})[seed] = interpret(model, case, folder, TOKENS[model])
        print(f"seed {seed}, {case}: {json.dumps(found[case][seed]['figures'])}", flush=True)
    findings = tables(model, found)
    for finding in findings:
        print(f"\n{finding.title}\n\n| {' | '.join(finding.columns)} |\n{'| --- ' * len(finding.columns)}|")
        print("\n".join(f"| {' | '.join(map(str, row))} |" for row in finding.rows))
    print(f"\nPictures: {write_findings(out / f'{model}-study', f'Sentiment in {model}', findings)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TOKENS, default="embedded")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--total-steps", type=int, default=48_000, help="tokens of a run")
    parser.add_argument("--out", type=Path, default=Path("runs/interpret-sentiment"), help="folder of runs and pages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.model, options.seeds, options.total_steps, options.out)
