"""Reinforcement learning from human feedback, complete: language model, SFT, preferences, reward model, PPO.

    python examples/rlhf.py --data ../shared/data --model smollm2    # a model that knows English
    python examples/rlhf.py --data ../shared/data                    # everything from scratch

The data are the 6,920 sentences of film reviews in SST-2; their labels are the human preference. SFT teaches the style
of these sentences, with LoRA if there is a model; without ``--model``, a tiny language model learns English from them
first. ``--critic model`` is PPO with four models, as in Ouyang et al. 2022: policy, reference, reward model, and
a critic that starts as the reward model. ``--critic head`` has three: the value is a head on the policy's trunk
(Ziegler et al. 2019). The figures at the end are measured on beginnings of sentences of dev.tsv, on which no model was
trained. The judge counts words; it was trained on labels that the reward model has not seen.

What to expect: SFT teaches the model to end its answers. PPO raises the score, until the judge rates the answers like
the positive sentences of people (.75) or higher. The other rows and the texts show the cost: answers are less varied,
praise even after a negative beginning ("a bloated gasbag, a profound and inspiring story"), repeat a few words, and the
model predicts the sentences of people less well. With smollm2 it takes 35 to 40 minutes on two cores, and answers are
English; the model from scratch (5 minutes) does not write good English, before PPO or after it.
"""

import argparse
import copy
import json
import math
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from algos import (
    PPO,
    Critic,
    LMPolicy,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    evaluate,
    presets,
    sft,
    train_reward_model,
)
from textenv import KLPenalty, LanguageModel, RewardModel, Rewards, TextVectorEnv
from textenv.lm.loading import add_lora, merged, trunk_of
from textenv.rewards import unfinished
from textenv.rewards.metrics import distinct
from textenv.rollout import sequences

CONTEXT = 256  # tokens that every model here reads at most
HELD_OUT = 12  # the last 1/12 of train.tsv is not trained on: settings were chosen on it
PARAGRAPH = 4  # sentences in a plain text
PROMPT_WORDS = (3, 4, 5)
MOST_WORDS = 20  # longest sentence to imitate, so that answers are short
UNFINISHED = 1.0  # penalty for an answer without EOS


@dataclass(frozen=True)
class Settings:
    """What depends on the size of the model."""

    fine_tuning: SFTConfig
    reward: RewardModelConfig
    ppo: PPOConfig
    kl_coef: float  # reward per nat
    total_steps: int
    new_tokens: int = 24
    temperature: float = 1.0  # of the answers
    lora: str | None = None  # of SFT and PPO; the reward model and the critic are trained whole
    examples: int | None = None  # most examples of SFT
    pairs: int | None = None  # most pairs of the reward model
    held_out: int | None = None  # most sentences, of held-out rows and of dev.tsv, to measure on


LANGUAGE = SFTConfig(num_epochs=4, batch_size=4, max_length=CONTEXT, learning_rate=4e-3, weight_decay=0.1)
SCRATCH = Settings(
    fine_tuning=SFTConfig(num_epochs=2, max_length=CONTEXT, learning_rate=1e-3),
    reward=RewardModelConfig(num_epochs=2, learning_rate=2e-3),
    ppo=replace(presets.TEXT, learning_rate=1e-3, final_learning_rate=1e-4, gae_lambda=1.0, vf_coef=0.1),
    kl_coef=0.2,
    total_steps=40_000,
)
REAL = Settings(
    fine_tuning=SFTConfig(num_epochs=1, max_length=CONTEXT, learning_rate=5e-4),
    reward=RewardModelConfig(num_epochs=1, learning_rate=2e-5),
    ppo=replace(presets.TEXT, num_episodes=32, minibatch_size=16, learning_rate=3e-4, value_learning_rate=2e-5),
    kl_coef=0.1,
    total_steps=16_000,
    temperature=0.7,
    lora="r=8,alpha=16,targets=q_proj+v_proj",
    examples=2400,
    pairs=900,
    held_out=200,
)


# --- data ------------------------------------------------------------------------------------------------------------


def read(path):
    """Sentences and labels (1 is positive) of a file of SST-2."""
    rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(text, int(label)) for text, label in rows]


def readable(text):
    """The text as people write it: SST-2 has spaces around its marks."""
    text = text.replace("`` ", '"').replace(" ''", '"').replace("-lrb- ", "(").replace(" -rrb-", ")")
    return re.sub(r" (n't|[.,:;!?]|'\w+)", r"\1", text)


def paragraphs(rows):
    """Plain texts: paragraphs of a few sentences, one per line."""
    texts = [text for text, _ in rows]
    return ["\n".join(texts[i : i + PARAGRAPH]) + "\n" for i in range(0, len(texts), PARAGRAPH)]


def beginnings(rows):
    """Split each sentence of more than 5 words after the first 3, 4 or 5, in turn."""
    split = [text.split(" ") for text, _ in rows]
    cut = [
        (words, PROMPT_WORDS[i % 3]) for i, words in enumerate(split) if max(PROMPT_WORDS) < len(words) <= MOST_WORDS
    ]
    return [{"prompt": " ".join(words[:n]), "completion": " " + " ".join(words[n:])} for words, n in cut]


def preferences(rows):
    """Pairs of a liked and a disliked sentence with the same first word, the prompt; every such sentence is used."""
    rest = {0: {}, 1: {}}
    for text, label in rows:
        first, _, after = text.partition(" ")
        rest[label].setdefault(first, []).append(" " + after)
    pairs = []
    for prompt in sorted(rest[0].keys() & rest[1].keys()):
        liked, disliked = rest[1][prompt], rest[0][prompt]
        chosen, rejected = (liked, cycle(disliked)) if len(liked) >= len(disliked) else (cycle(liked), disliked)
        pairs += [{"prompt": prompt, "chosen": a, "rejected": b} for a, b in zip(chosen, rejected, strict=False)]
    return pairs


def make_tokenizer(texts, size=2048):
    """A byte-level BPE: frequent words are one token, and every text can be encoded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>", "<pad>"]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", model_max_length=CONTEXT
    )


# --- models ----------------------------------------------------------------------------------------------------------


def train_language_model(rows, tokenizer, held_out):
    """A GPT-2 of two layers, 64 wide, on plain text: it does not learn when to stop."""
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_embd=64, n_head=2, n_inner=128, n_positions=CONTEXT, vocab_size=len(tokenizer))
    dropout = dict(embd_pdrop=0.15, resid_pdrop=0.15, attn_pdrop=0.0)
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    model = GPT2LMHeadModel(
        GPT2Config(**shape, **dropout, **ends, initializer_range=0.06, activation_function="gelu_pytorch_tanh")
    )
    lm = LanguageModel(model, tokenizer)
    return lm, sft(lm, paragraphs(rows), LANGUAGE, held_out=paragraphs(held_out))


def fine_tune(lm, rows, held_out, settings):
    """A copy that completes a beginning to one sentence, and ends."""
    model = copy.deepcopy(lm.model)
    tuned = LanguageModel(add_lora(model, settings.lora, seed=0) if settings.lora else model, lm.tokenizer)
    history = sft(tuned, beginnings(rows)[: settings.examples], settings.fine_tuning, held_out=beginnings(held_out))
    return LanguageModel(merged(tuned.model), lm.tokenizer, temperature=settings.temperature), history


def make_reward_model(lm):
    """The fine-tuned model with one score, read at the last token, in place of its logits."""
    torch.manual_seed(1)
    config = copy.deepcopy(lm.model.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.base_model.load_state_dict(trunk_of(lm.model).state_dict())
    return RewardModel(model, lm.tokenizer)


def pair_accuracy(reward_model, pairs):
    """Fraction of pairs in which the better sentence has the higher score."""
    chosen, rejected = (
        reward_model.scores([pair["prompt"] + pair[name] for pair in pairs]) for name in ("chosen", "rejected")
    )
    return (chosen > rejected).float().mean().item()


class WordCounts:
    """The judge: naive Bayes (Manning, Raghavan and Schütze 2008, ch. 13) on the words that a text contains."""

    def __init__(self, rows):
        counts = [Counter(word for text, said in rows if said == label for word in text.split()) for label in (0, 1)]
        words = counts[0] | counts[1]
        totals = [count.total() + len(words) for count in counts]
        self.log_odds = {
            word: math.log((counts[1][word] + 1) / totals[1]) - math.log((counts[0][word] + 1) / totals[0])
            for word in words
        }

    def scores(self, texts):
        """Probability of "positive" for each text, float32 ``[len(texts)]``."""
        return torch.tensor([sum(self.log_odds.get(word, 0.0) for word in text.split()) for text in texts]).sigmoid()

    def accuracy(self, rows):
        """Fraction of labels that it predicts."""
        likely = self.scores([text for text, _ in rows]) > 0.5
        return (likely == torch.tensor([label == 1 for _, label in rows])).float().mean().item()


# --- PPO and figures -------------------------------------------------------------------------------------------------


def make_environment(prompts, reward_model, tokenizer, new_tokens):
    """Complete a beginning; an answer gets the score of the reward model, minus a penalty if it has no EOS."""
    reward = Rewards({"score": reward_model, "unfinished": unfinished(UNFINISHED)})
    return TextVectorEnv(
        prompts=prompts, reward=reward, tokenizer=tokenizer, num_envs=128, max_new_tokens=new_tokens,
        max_prompt_tokens=CONTEXT - new_tokens, forbidden=sorted({tokenizer.pad_token_id} - {tokenizer.eos_token_id}),
    )  # fmt: skip


def train_policy(tuned, reward_model, prompts, critic, seed, settings):
    """PPO from the fine-tuned model, with a KL penalty to it; the value is a separate model or a head."""
    value_model = Critic.from_reward_model(reward_model) if critic == "model" else None
    model = copy.deepcopy(tuned.model)
    model = add_lora(model, settings.lora, seed=seed) if settings.lora else model
    policy = LMPolicy(model, tuned.tokenizer, critic=value_model, temperature=tuned.temperature)
    env = make_environment(prompts, reward_model, tuned.tokenizer, settings.new_tokens)
    PPO(env, policy, replace(settings.ppo, seed=seed), kl_coef=settings.kl_coef).learn(settings.total_steps)
    return policy.lm


def measure(lm, reference, reward_model, judge, prompts, sentences, new_tokens):
    """Metrics of one answer to every prompt, and the texts with a bar where the answer begins."""
    tokenizer, count = lm.tokenizer, len(prompts)
    policy = LMPolicy(lm.model, tokenizer, temperature=reference.temperature)
    _, rollout = evaluate(make_environment(prompts, reward_model, tokenizer, new_tokens), policy, num_episodes=count)
    KLPenalty(reference, coef=0.0)(rollout, policy)
    ids = [action[own].tolist() for action, own in zip(rollout["action"], rollout["mask"], strict=True)]
    texts = tokenizer.batch_decode(sequences(rollout), skip_special_tokens=True)
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    figures = {
        "reward model's score": reward_model.scores(texts).mean().item(),
        "judge: positive": judge.scores(texts).mean().item(),
        "KL to SFT, nats": rollout["kl"].sum().item() / count,
        "perplexity of dev.tsv": LanguageModel(lm.model, tokenizer).perplexity(sentences),
        "distinct-2": distinct(ids),
        "ended by itself": rollout["terminated"].any(1).float().mean().item(),
        "tokens an answer": sum(map(len, ids)) / count,
    }
    return figures, [f"{text.removesuffix(answer)} |{answer}" for text, answer in zip(texts, answers, strict=True)]


def report(columns):
    """A table with a column for each stage, and some answers side by side."""
    print(f"\n{'':22}" + "".join(f"{name:>12}" for name in columns))
    for name in next(iter(columns.values()))[0]:
        print(f"{name:22}" + "".join(f"{figures[name]:12.3f}" for figures, _ in columns.values()))
    for place in range(8):
        print("\n" + "\n".join(f"{name:>11}: {texts[place]!r}" for name, (_, texts) in columns.items()))


def run(rows, dev, critic, seeds, model=None, settings=SCRATCH):
    """Run all stages; returns metrics of the classifiers, and metrics and answers of every stage."""
    start = time.perf_counter()

    def say(text):
        print(f"{time.perf_counter() - start:4.0f} s: {text}", flush=True)

    rows, held_out = rows[: -len(rows) // HELD_OUT], rows[-len(rows) // HELD_OUT :][: settings.held_out]
    dev = dev[: settings.held_out]
    people, others = rows[: len(rows) * 7 // 10], rows[len(rows) * 7 // 10 :]
    if model:
        lm = LanguageModel.load(model)
    else:
        lm, _ = train_language_model(rows, make_tokenizer([text for text, _ in rows]), held_out)
    say(f"language model: perplexity {lm.perplexity(paragraphs(held_out)):.0f} of held-out text")
    tuned, history = fine_tune(lm, rows, held_out, settings)
    say(f"SFT: perplexity {history[-1]['held_out/perplexity']:.0f} of held-out answers")
    reward_model = make_reward_model(tuned)
    learnt = train_reward_model(reward_model, preferences(people)[: settings.pairs], settings.reward)
    judge = WordCounts(others)
    made = {
        "held-out accuracy": learnt.accuracy,
        "calibration error": learnt.calibration_error,
        "dev.tsv, accuracy on pairs": pair_accuracy(reward_model, preferences(dev)),
        "judge, accuracy on dev.tsv": judge.accuracy(dev),
    }
    say(f"reward model: {learnt.rows} pairs, " + ", ".join(f"{name} {figure:.3f}" for name, figure in made.items()))

    prompts = sorted({row["prompt"] for row in beginnings(rows)})
    unseen = sorted({row["prompt"] for row in beginnings(dev)} - set(prompts))
    measured = partial(
        measure, reference=tuned.frozen_copy(), reward_model=reward_model, judge=judge, prompts=unseen,
        sentences=[text for text, _ in dev], new_tokens=settings.new_tokens,
    )  # fmt: skip
    columns = {"LM": measured(lm), "SFT": measured(tuned)}
    for seed in range(1, seeds + 1):
        columns[f"PPO seed {seed}"] = measured(train_policy(tuned, reward_model, prompts, critic, seed, settings))
        say(f"PPO, seed {seed}")
    return made, columns


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds sst2/train.tsv and sst2/dev.tsv")
    parser.add_argument("--model", help="such as smollm2; without it, a tiny model is trained from scratch")
    parser.add_argument("--critic", choices=["head", "model"], default="model", help="value head or model; see above")
    parser.add_argument("--seeds", type=int, default=1, help="runs of PPO")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    files = [options.data / "sst2" / name for name in ("train.tsv", "dev.tsv")]
    for file in files:
        if not file.is_file():
            parser.error(f"there is no {file}: docs/results/real-text.md says what the folder holds")
    torch.set_num_threads(2 if options.model else 1)  # one is fastest for tiny networks
    start = time.perf_counter()
    rows, dev = map(read, files)
    if options.model:
        rows, dev = ([(readable(text), label) for text, label in part] for part in (rows, dev))
    settings = REAL if options.model else SCRATCH
    made, columns = run(rows, dev, options.critic, options.seeds, options.model, settings)
    report(columns)
    if options.json:
        stages = {name: figures for name, (figures, _) in columns.items()}
        seconds = time.perf_counter() - start
        print(json.dumps({"critic": options.critic, "classifiers": made, "stages": stages, "seconds": seconds}))


if __name__ == "__main__":
    main()
