"""Train reward models from scratch on labels of people and checkers: thumbs, scores and preferences.

    python examples/reward_model.py --data ../shared/data

Three data sets: SST-2's sentences as thumbs up or down, solutions to grade-school maths (GSM8K) scored 1 or 0 by a
checker, and pairs of a right and a wrong solution to one question. Each model is then a reward function for PPO. The
printed figures are measured on held-out prompts; "chance" is the accuracy of a constant answer.
"""

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from algos import RewardModelConfig, train_reward_model
from textenv import RewardModel, load_prompts, split_prompts

CONTEXT = 384  # tokens that the models read; a longer text loses its beginning


def sst2(file):
    """Sentences of film reviews without a prompt; the score is 1 if the label is positive."""
    rows = [line.rsplit("\t", 1) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": "", "completion": text, "score": int(label)} for text, label in rows]


def gsm8k(file):
    """Questions with solutions, split by question."""
    rows = [row | {"prompt": row["prompt"] + "\n"} for row in load_prompts(file)]
    return split_prompts(rows, "train"), split_prompts(rows, "test")


def texts(rows):
    """All texts of the rows."""
    return [str(row[name]) for row in rows for name in ("prompt", "completion", "chosen", "rejected") if name in row]


def make_tokenizer(texts, size):
    """A byte-level BPE, which can encode every text; each text begins with <cls>, where BERT's output is read."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<cls>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, cls_token="<cls>", pad_token="<pad>", model_max_length=CONTEXT
    )


def make_reward_model(tokenizer):
    """A transformer of one layer, 96 wide, with one output: the reward."""
    return RewardModel(
        BertForSequenceClassification(
            BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=96,
                num_hidden_layers=1,
                num_attention_heads=4,
                intermediate_size=192,
                max_position_embeddings=CONTEXT,
                hidden_dropout_prob=0.3,
                pad_token_id=tokenizer.pad_token_id,
                num_labels=1,
            )
        ),
        tokenizer,
    )


def chance(rows):
    """Accuracy of the best constant answer."""
    if "score" not in rows[0]:
        return 0.5
    up = sum(row["score"] for row in rows) / len(rows)
    return max(up, 1 - up)


def shown(number):
    return f"{'-':>8}" if number is None else f"{number:8.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds sst2/ and gsm8k/")
    data = parser.parse_args().data
    for name in ("sst2/train.tsv", "sst2/dev.tsv", "gsm8k/scored.jsonl", "gsm8k/preferences.jsonl"):
        if not (data / name).is_file():
            parser.error(f"there is no {data / name}: docs/results/real-text.md says what the folder holds")
    torch.set_num_threads(1)  # fastest for networks of this size

    tasks = {
        "SST-2, thumbs": (4, sst2(data / "sst2" / "train.tsv"), sst2(data / "sst2" / "dev.tsv")),
        "GSM8K, scores": (2, *gsm8k(data / "gsm8k" / "scored.jsonl")),
        "GSM8K, pairs": (2, *gsm8k(data / "gsm8k" / "preferences.jsonl")),
    }
    columns = ("rows", "held out", "chance", "accuracy", "calib.", "Spearman", "seconds")
    print(f"{'':14}" + "".join(f"{column:>9}" for column in columns))
    for name, (epochs, train, held_out) in tasks.items():
        start = time.perf_counter()
        torch.manual_seed(1)
        model = make_reward_model(make_tokenizer(texts(train), size=4096))
        config = RewardModelConfig(num_epochs=epochs, learning_rate=1e-3)  # for small models from scratch
        report = train_reward_model(model, train, config, held_out=held_out)
        measured = (chance(held_out), report.accuracy, report.calibration_error, report.spearman)
        print(
            f"{name:14} {report.rows:>8} {report.held_out_rows:>8} {' '.join(map(shown, measured))} "
            f"{time.perf_counter() - start:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
