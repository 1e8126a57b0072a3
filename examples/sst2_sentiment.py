"""Real text: PPO makes a small language model write positive phrases about films.

Everything is trained here, from the sentences of SST-2 alone: a language model, the classifier that pays the reward,
and a second classifier of another kind that only looks on. Then PPO raises the first one's mean probability of
"positive" for 12-token continuations of the first words of sentences that nothing was trained on.

python examples/sst2_sentiment.py --data ../shared/data/sst2
"""

import argparse
import copy
import dataclasses
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput

from algos import PPO, LMPolicy, evaluate, presets
from textenv import Classifier, KLPenalty, TextVectorEnv
from textenv.rollout import sequences

CONTEXT = 64  # tokens that every model here reads at most
HELD_OUT = 600  # last sentences of train.tsv: they choose the epoch whose weights are kept
NEW_TOKENS = 12
TEMPERATURE = 0.9  # of the policy and its reference
KL_COEFFICIENT = 0.01  # reward per nat
ITERATIONS = 60
CONFIG = dataclasses.replace(
    presets.TEXT, learning_rate=1e-3, final_learning_rate=5e-5, gae_lambda=1.0, value_coefficient=1.0
)

# --- three models ----------------------------------------------------------------------------------------------------


def make_tokenizer(texts, size):
    """A byte-level BPE: frequent words are one token, and no text is impossible."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    options = dict(special_tokens=["<eos>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    special = dict(eos_token="<eos>", pad_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=CONTEXT, **special)


def batches(rows, size=32):
    """Row numbers in random order, in batches of about equal length."""
    lengths = torch.tensor([len(row) for row in rows])
    chunks = torch.randperm(len(rows)).split(20 * size)
    cut = [batch for chunk in chunks for batch in chunk[lengths[chunk].argsort()].split(size)]
    return [cut[i] for i in torch.randperm(len(cut))]


def fit(model, loss_of, texts, tokenizer, *, epochs, learning_rate):
    """Train with AdamW; keep the weights of the epoch with the least loss on the last `HELD_OUT` texts.

    ``loss_of(ids, known, index)`` gets padded ids, which of them are no padding, and the row numbers of the texts.
    """
    rows = [torch.tensor(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
    train, held = rows[:-HELD_OUT], torch.arange(len(rows) - HELD_OUT, len(rows))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=epochs * len(batches(train)), pct_start=0.07, cycle_momentum=False
    )

    def loss(index):
        ids = pad_sequence([rows[i] for i in index], batch_first=True, padding_value=tokenizer.pad_token_id)
        return loss_of(ids, ids != tokenizer.pad_token_id, index)

    least = math.inf
    for _ in range(epochs):
        model.train()
        for index in batches(train):
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
    """A GPT-2 of two layers, 128 wide."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, n_inner=256,
        activation_function="gelu_pytorch_tanh", initializer_range=0.06, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip

    def loss_of(ids, known, index):
        # Logits at real tokens only. Padding is on the right, where causal attention does not look.
        inputs, scored = ids[:, :-1], known[:, 1:]
        hidden = model.transformer(input_ids=inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state
        return cross_entropy(model.lm_head(hidden[scored]), ids[:, 1:][scored])

    fit(model, loss_of, [text + tokenizer.eos_token for text in texts], tokenizer, epochs=4, learning_rate=4e-3)
    return model


def make_bert(tokenizer):
    """A transformer of one layer, 96 wide: it knows the order of words."""
    return BertForSequenceClassification(BertConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=1, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=CONTEXT, hidden_dropout_prob=0.3, pad_token_id=tokenizer.pad_token_id,
        id2label={0: "negative", 1: "positive"},
    ))  # fmt: skip


class BagOfWords(nn.Module):
    """The mean of the words' embeddings and one linear layer: blind to the order of words."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.embedding, self.output = nn.Embedding(len(tokenizer), 96), nn.Linear(96, 2)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, input_ids, attention_mask):
        """Logits ``[B, 2]`` of ids ``[B, L]``."""
        weight = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1)
        return SequenceClassifierOutput(logits=self.output(dropout(mean, 0.3, self.training)))

    @torch.no_grad()
    def probability(self, texts):
        """Probability of "positive" for each text."""
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        return self(batch["input_ids"], batch["attention_mask"]).logits.softmax(-1)[:, 1]


def train_classifier(make, texts, labels, tokenizer, *, seed, epochs, learning_rate):
    """Train on whole sentences and on beginnings, since continuations of fixed length are fragments."""
    torch.manual_seed(seed)
    model = make(tokenizer)
    weight = len(labels) / labels.bincount()  # both labels count the same, whatever their share

    def loss_of(ids, known, index):
        if not model.training:
            wrong = model(input_ids=ids, attention_mask=known.long()).logits.argmax(-1) != labels[index]
            return wrong.float().mean()
        length = known.sum(1, keepdim=True)
        beginning = 6 + (torch.rand(length.shape) * (length - 5)).long()
        length = torch.where(torch.rand(length.shape) < 0.4, beginning, length)
        # Some words are hidden, so that it does not rest on any single one.
        known = known & (torch.arange(ids.shape[1]) < length) & (torch.rand(ids.shape) > 0.15)
        known[:, 0] = True
        return cross_entropy(model(input_ids=ids, attention_mask=known.long()).logits, labels[index], weight)

    fit(model, loss_of, texts, tokenizer, epochs=epochs, learning_rate=learning_rate)
    return model


# --- PPO and what it changes -----------------------------------------------------------------------------------------


def make_environment(prompts, classifier, tokenizer):
    """A prompt, 12 tokens (the end of the text is forbidden), and the probability that the whole is positive."""

    def reward(prompts, completions, **columns):
        return classifier.probability([a + b for a, b in zip(prompts, completions, strict=True)]).tolist()

    return TextVectorEnv(
        prompts=prompts, reward=reward, tokenizer=tokenizer, num_envs=128, max_new_tokens=NEW_TOKENS,
        forbidden=[tokenizer.eos_token_id, tokenizer.pad_token_id],
    )  # fmt: skip


def measure(env, policy, reference, second):
    """One continuation of every prompt: figures, and the texts."""
    episodes = len(env.task.prompts)
    scores, rollout = evaluate(env, policy, episodes=episodes)
    KLPenalty(reference, coefficient=0.0)(rollout, policy)
    mask = rollout["mask"]
    texts = env.tokenizer.batch_decode(sequences(rollout), skip_special_tokens=True)
    answers = [env.tokenizer.decode(action[own]) for action, own in zip(rollout["action"], mask, strict=True)]
    pairs = [pair for words in map(str.split, answers) for pair in zip(words, words[1:], strict=False)]
    figures = {
        "score": sum(scores) / episodes,
        "second classifier": second.probability(texts).mean().item(),
        "KL, nats": rollout["kl"].sum().item() / episodes,
        "perplexity": rollout["reference_log_prob"][mask].mean().neg().exp().item(),
        "distinct-2": len(set(pairs)) / len(pairs),
        "distinct samples": len(set(answers)) / episodes,
    }
    return figures, [f"{text.removesuffix(answer)} |{answer}" for text, answer in zip(texts, answers, strict=True)]


def improve(model, env, unseen, second, seed):
    """One run of PPO from the language model; figures and texts before and after."""
    policy = LMPolicy(copy.deepcopy(model), env.tokenizer, temperature=TEMPERATURE)
    reference = policy.reference()
    before = measure(unseen, policy, reference, second)
    agent = PPO(env, policy, dataclasses.replace(CONFIG, seed=seed), penalty=KLPenalty(reference, KL_COEFFICIENT))
    agent.learn(ITERATIONS * CONFIG.episodes * NEW_TOKENS)
    return before, measure(unseen, policy, reference, second)


def read(path):
    """Sentences and labels (1 is positive) of a file of SST-2."""
    rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [text for text, _ in rows], torch.tensor([int(label) for _, label in rows])


def first_words(texts, rng):
    """The first 3 to 5 words of each sentence that has more; each prompt once."""
    words = [text.split() for text in texts]
    return sorted({" ".join(each[: rng.randint(3, 5)]) for each in words if len(each) > 5})


def main(data, seeds=3):
    start = time.perf_counter()

    def log(message):
        print(f"{time.perf_counter() - start:5.0f} s  {message}", flush=True)

    (train, labels), (dev, dev_labels) = read(data / "train.tsv"), read(data / "dev.tsv")
    tokenizer, words = make_tokenizer(train, 4096), make_tokenizer(train, 8192)
    model = train_language_model(train, tokenizer)
    log("language model trained")
    bert = train_classifier(make_bert, train, labels, words, seed=1, epochs=5, learning_rate=1e-3)
    bag = train_classifier(BagOfWords, train, labels, words, seed=2, epochs=6, learning_rate=2e-3)
    classifier, accuracy = Classifier(bert, words), {}
    for name, each in (("reward", classifier), ("second", bag)):
        accuracy[name] = ((each.probability(dev) > 0.5) == dev_labels.bool()).float().mean().item()
        log(f"{name} classifier trained, accuracy on dev.tsv {accuracy[name]:.3f}")

    rng = random.Random(0)
    prompts, fresh = first_words(train, rng), first_words(dev, rng)
    fresh = [prompt for prompt in fresh if not any(text.startswith(prompt) for text in train)]
    env, unseen = make_environment(prompts, classifier, tokenizer), make_environment(fresh, classifier, tokenizer)
    runs = []
    for seed in range(1, seeds + 1):
        (before, old_texts), (after, new_texts) = improve(model, env, unseen, bag, seed)
        runs.append({"seed": seed, "before": before, "after": after})
        log(f"seed {seed}: " + ", ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in before))
    print(f"\nTen of the {len(fresh)} prompts with the continuation before (-) and after (+) the last run:")
    for old, new in list(zip(old_texts, new_texts, strict=True))[:10]:
        print(f"- {old}\n+ {new}")
    return {"dev_accuracy": accuracy, "runs": runs, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of SST-2, with train.tsv and dev.tsv")
    parser.add_argument("--seeds", type=int, default=3, help="PPO runs, all from the same language model (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    for name in ("train.tsv", "dev.tsv"):
        if not (options.data / name).is_file():
            parser.error(f"--data is {options.data}, which has no {name}: give the folder with train.tsv and dev.tsv")
    torch.set_num_threads(1)  # fastest for networks of this size
    result = main(options.data, options.seeds)
    if options.json:
        print(json.dumps(result))
