"""Real text: PPO makes a small language model write positive phrases about films.

All models are trained here, on the sentences of SST-2 only: a language model, a classifier that is the reward, and a
second classifier of another kind that is only measured. Then PPO raises the first one's mean probability of "positive"
for 12-token continuations. Their prompts are the first words of sentences on which no model was trained.

    python examples/sst2_sentiment.py --data ../shared/data/sst2
"""

import argparse
import copy
import dataclasses
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from algos import PPO, LMPolicy, evaluate, presets
from textenv import KLPenalty, RewardModel, TextVectorEnv
from textenv.rollout import sequences

CONTEXT = 64  # tokens that every model here reads at most
HELD_OUT = 600  # last sentences of train.tsv, on which the best epoch is chosen
PROMPT_WORDS = (3, 4, 5)
NEW_TOKENS = 12
TEMPERATURE = 0.9
ITERATIONS = 60
KL_COEFFICIENT = 0.015  # reward per nat
CONFIG = dataclasses.replace(presets.TEXT, learning_rate=1e-3, final_learning_rate=5e-5, gae_lambda=1.0)


def read(path):
    """Sentences and labels (1 is positive) of a file of SST-2."""
    rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [text for text, _ in rows], torch.tensor([int(label) for _, label in rows])


def make_tokenizer(texts, size):
    """A byte-level BPE: frequent words are one token, and every text can be encoded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<pad>"]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", model_max_length=CONTEXT
    )  # fmt: skip


# --- the three models ------------------------------------------------------------------------------------------------


def batches(rows, size=32):
    """Row numbers in random order, in batches of about equal length."""
    lengths = torch.tensor([len(row) for row in rows])
    chunks = torch.randperm(len(rows)).split(20 * size)
    cut = [batch for chunk in chunks for batch in chunk[lengths[chunk].argsort()].split(size)]
    return [cut[i] for i in torch.randperm(len(cut))]


def token_ids(texts, tokenizer):
    """Ids of each text, at most `CONTEXT`; a spelled-out special token is read as letters."""
    return tokenizer(texts, truncation=True, split_special_tokens=True)["input_ids"]


def sentence_ids(texts, tokenizer):
    """Ids of each sentence, and the id of EOS, whose spelling would be read as letters."""
    return [[*ids, tokenizer.eos_token_id][:CONTEXT] for ids in token_ids(texts, tokenizer)]


def fit(model, loss_of, rows, pad, *, num_epochs, learning_rate):
    """AdamW with a cosine schedule; keeps the epoch with the lowest loss on the last `HELD_OUT` rows of ids.

    ``loss_of(ids, known, index)`` gets padded ids, a mask that is False on padding, and the row numbers.
    """
    rows = [torch.tensor(ids) for ids in rows]
    held = torch.arange(len(rows) - HELD_OUT, len(rows))

    def loss(index):
        ids = pad_sequence([rows[i] for i in index], batch_first=True, padding_value=pad)
        return loss_of(ids, ids != pad, index)

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1, fused=True)
    steps = num_epochs * len(batches(rows[:-HELD_OUT]))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    least = math.inf
    for _ in range(num_epochs):
        model.train()
        for index in batches(rows[:-HELD_OUT]):
            optimizer.zero_grad()
            loss(index).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            held_loss = loss(held).item()
        if held_loss < least:
            least, best = held_loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(best)


def train_language_model(texts, tokenizer):
    """A GPT-2 of two layers, 128 wide, on sentences that end with the EOS id."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=2,
            n_head=4,
            n_inner=256,
            activation_function="gelu_pytorch_tanh",
            initializer_range=0.06,
            embd_pdrop=0.15,
            resid_pdrop=0.15,
            attn_pdrop=0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    )

    def loss_of(ids, known, index):
        # Logits at real tokens only; padding is on the right, which causal attention ignores.
        inputs, following = ids[:, :-1], known[:, 1:]
        hidden = model.transformer(input_ids=inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state
        return cross_entropy(model.lm_head(hidden[following]), ids[:, 1:][following])

    rows = sentence_ids(texts, tokenizer)
    fit(model, loss_of, rows, tokenizer.pad_token_id, num_epochs=4, learning_rate=4e-3)
    return model


class BagOfWords(nn.Module):
    """The mean of the token embeddings and one linear layer; ignores word order."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.embedding, self.output = nn.Embedding(len(tokenizer), 96), nn.Linear(96, 2)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, input_ids, attention_mask):
        """Logits of the two labels."""
        weight = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1)
        return SequenceClassifierOutput(logits=self.output(nn.functional.dropout(mean, 0.3, self.training)))

    @torch.no_grad()
    def scores(self, texts):
        """Probability of "positive" for each text."""
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, split_special_tokens=True)
        return self(batch["input_ids"], batch["attention_mask"]).logits.softmax(-1)[:, 1]


def make_bert(tokenizer):
    """A transformer of one layer, 96 wide, which reads word order."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=192,
            max_position_embeddings=CONTEXT,
            hidden_dropout_prob=0.3,
            pad_token_id=tokenizer.pad_token_id,
            id2label={0: "negative", 1: "positive"},
        )  # fmt: skip
    )


def train_classifier(model, texts, labels, tokenizer, *, num_epochs, learning_rate):
    """Train on whole sentences and on beginnings, because continuations of fixed length are fragments."""

    def loss_of(ids, known, index):
        if model.training:
            length = known.sum(1, keepdim=True)
            beginning = 6 + (torch.rand(length.shape) * (length - 5)).long()
            length = torch.where(torch.rand(length.shape) < 0.4, beginning, length)
            # Masked words, so that it does not depend on a single one.
            known = known & (torch.arange(ids.shape[1]) < length) & (torch.rand(ids.shape) > 0.15)
            known[:, 0] = True
        logits = model(input_ids=ids, attention_mask=known.long()).logits
        if model.training:
            return cross_entropy(logits, labels[index], weight)
        return (logits.argmax(-1) != labels[index]).float().mean()

    weight = len(labels) / labels.bincount()  # both labels count the same, whatever their frequency
    rows = token_ids(texts, tokenizer)
    fit(model, loss_of, rows, tokenizer.pad_token_id, num_epochs=num_epochs, learning_rate=learning_rate)


# --- prompts and figures ---------------------------------------------------------------------------------------------


def beginnings(texts):
    """The first 3, the first 4 and the first 5 words of each sentence that has more."""
    words = [text.split() for text in texts]
    return [[" ".join(each[:n]) for n in PROMPT_WORDS] for each in words if len(each) > max(PROMPT_WORDS)]


def distinct_2(texts):
    """Distinct pairs of adjacent words, as a fraction of all pairs."""
    pairs = [pair for text in texts for pair in zip(text.split(), text.split()[1:], strict=False)]
    return len(set(pairs)) / len(pairs)


def measure(env, policy, reference, second):
    """Metrics of one continuation of every prompt, and the texts."""
    episodes = len(env.task.prompts)
    scores, rollout = evaluate(env, policy, num_episodes=episodes)
    KLPenalty(reference, coef=0.0)(rollout, policy)
    mask, tokenizer = rollout["mask"], policy.tokenizer
    texts = tokenizer.batch_decode(sequences(rollout), skip_special_tokens=True)
    answers = [tokenizer.decode(action[own]) for action, own in zip(rollout["action"], mask, strict=True)]
    figures = {
        "score": sum(scores) / episodes,
        "second_classifier": second.scores(texts).mean().item(),
        "kl": rollout["kl"].sum().item() / episodes,
        "reference_perplexity": rollout["reference_log_prob"][mask].mean().neg().exp().item(),
        "distinct_2": distinct_2(answers),
        "distinct_samples": len(set(answers)) / episodes,
    }
    return figures, [f"{text.removesuffix(answer)} |{answer}" for text, answer in zip(texts, answers, strict=True)]


def make_environment(prompts, classifier, tokenizer, num_envs):
    """Continue a prompt by 12 tokens (EOS is forbidden); the reward is the probability that the whole is positive."""
    return TextVectorEnv(
        prompts=prompts, reward=classifier, tokenizer=tokenizer, num_envs=num_envs, max_new_tokens=NEW_TOKENS,
        forbidden=[tokenizer.eos_token_id, tokenizer.pad_token_id],
    )  # fmt: skip


def train_policy(model, tokenizer, classifier, second, train_prompts, unseen_prompts, seed):
    """One run of PPO from the language model; metrics and samples before and after."""
    policy = LMPolicy(copy.deepcopy(model), tokenizer, temperature=TEMPERATURE)
    reference = policy.reference()
    env, unseen = (make_environment(each, classifier, tokenizer, 128) for each in (train_prompts, unseen_prompts))
    before = measure(unseen, policy, reference, second)
    agent = PPO(env, policy, dataclasses.replace(CONFIG, seed=seed), penalty=KLPenalty(reference, KL_COEFFICIENT))
    agent.learn(ITERATIONS * CONFIG.num_episodes * NEW_TOKENS)
    return before, measure(unseen, policy, reference, second)


def report(rows, before, after):
    """Print a table of the runs, and ten samples before and after."""
    print(f"\n{'':22}" + "".join(f"   seed {seed:<12}" for seed in range(1, len(rows) + 1)))
    for name in rows[0][0]:
        print(f"{name:22}" + "".join(f"   {one[name]:7.3f} -> {two[name]:7.3f}" for one, two in rows))
    print("\nTen samples of the last seed, before (-) and after (+):")
    for one, two in list(zip(before, after, strict=True))[:10]:
        print(f"- {one}\n+ {two}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with SST-2's train.tsv and dev.tsv")
    parser.add_argument("--seeds", type=int, default=3, help="runs of PPO")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    for name in ("train.tsv", "dev.tsv"):
        if not (options.data / name).is_file():
            parser.error(f"{options.data} has no {name}: docs/results/real-text.md says what the folder holds")
    torch.set_num_threads(1)  # fastest for networks of this size
    start = time.perf_counter()

    texts, labels = read(options.data / "train.tsv")
    dev_texts, dev_labels = read(options.data / "dev.tsv")
    tokenizer = make_tokenizer(texts, size=4096)
    model = train_language_model(texts, tokenizer)
    print(f"{time.perf_counter() - start:4.0f} s: language model trained", flush=True)
    torch.manual_seed(1)
    bert, second = make_bert(tokenizer), BagOfWords(tokenizer)
    train_classifier(bert, texts, labels, tokenizer, num_epochs=4, learning_rate=1e-3)
    train_classifier(second, texts, labels, tokenizer, num_epochs=6, learning_rate=2e-3)
    classifier = RewardModel(bert, tokenizer)
    accuracy = {
        name: ((judge.scores(dev_texts) > 0.5) == dev_labels.bool()).float().mean().item()
        for name, judge in (("reward", classifier), ("second", second))
    }
    print(f"{time.perf_counter() - start:4.0f} s: classifiers trained, accuracy on dev.tsv {accuracy}", flush=True)

    train_prompts = sorted({prompt for each in beginnings(texts) for prompt in each})
    # One beginning of each sentence, of 3, 4 and 5 words in turn, without those of the training set.
    unseen_prompts = [each[i % len(PROMPT_WORDS)] for i, each in enumerate(beginnings(dev_texts))]
    unseen_prompts = sorted(set(unseen_prompts) - set(train_prompts))
    rows = []
    for seed in range(1, options.seeds + 1):
        (before, old), (after, new) = train_policy(
            model, tokenizer, classifier, second, train_prompts, unseen_prompts, seed
        )
        rows.append((before, after))
        print(
            f"{time.perf_counter() - start:4.0f} s: seed {seed}: score {before['score']:.3f} -> {after['score']:.3f}",
            flush=True,
        )
    report(rows, old, new)
    if options.json:
        runs = [{"before": before, "after": after} for before, after in rows]
        print(json.dumps({"dev_accuracy": accuracy, "runs": runs, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
