"""On-policy distillation: a small model writes, and a larger one scores each of its tokens.

    python examples/distil.py                            # a minute on one core
    python examples/distil.py --way sft                  # for comparison; docs/distillation.md has all ways
    python examples/distil.py --music 1 --kl-coef 0.1    # mixed with a reward of your own

The teacher is the embedded model, which PPO first trains to praise films. The student has the teacher's tokenizer, a
quarter of its parameters and random weights, and never sees that reward. Texts of random weights say nothing about
the teacher, so the student is first fine-tuned on 20,000 tokens of the teacher. Then it writes itself: the loss is the
KL(student‖teacher) at each of its tokens.
"""

import argparse
import json
from dataclasses import replace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from algos import PPO, LMPolicy, SFTConfig, evaluate, presets, sft
from textenv import KLPenalty, RewardModel, Rewards, TextVectorEnv
from textenv.tasks.builtin import Reviews

torch.set_num_threads(1)  # fastest for models of this size

STUDENT = {"n_embd": 64, "n_layer": 1, "n_head": 4, "initializer_range": 0.05}
CONFIG = replace(presets.TEXT, num_epochs=1, learning_rate=2e-3, final_learning_rate=2e-4)
WAYS = {
    "loss": "the exact KL of each token, in the loss",
    "token": "the log-ratio of each token, in the reward; gamma 0: a token pays for itself only",
    "answer": "the log-ratio of each token, in the reward; gamma 1: a token pays for those after it, too",
    "sft": "fine-tuning on as many tokens of the teacher",
}


def mentions_music(completions):
    """1 for an answer that mentions music or a song, else 0."""
    return [float("music" in text or "song" in text) for text in completions]


def make_env(tokenizer, *, praise=0.0, music=0.0, split="train"):
    """Continue a review; a reward of weight 0 is only logged."""
    classifier = RewardModel.load("embedded", label="positive")
    return TextVectorEnv(
        prompts=Reviews(split).prompts,
        reward=Rewards({"praise": (classifier, praise), "music": (mentions_music, music)}),
        tokenizer=tokenizer,
        num_envs=64,
        max_prompt_tokens=24,
        max_new_tokens=48,
    )


def train_teacher(total_steps):
    """The embedded model, which has learnt to praise films."""
    teacher = LMPolicy.load("embedded", seed=1)
    PPO(make_env(teacher.tokenizer, praise=1.0), teacher, presets.TEXT_EMBEDDED, kl_coef=0.1).learn(total_steps)
    return teacher


def make_student(tokenizer, seed):
    """A GPT-2 of one layer with random weights."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **STUDENT,
    )  # fmt: skip
    return LMPolicy(GPT2LMHeadModel(config), tokenizer, seed=seed)


def fine_tune(student, teacher, num_tokens, *, learning_rate, seed):
    """Teach the student, token by token, texts that the teacher writes."""
    env = make_env(teacher.tokenizer)
    examples = []
    written = 0
    while written < num_tokens:
        evaluate(env, teacher, num_episodes=128, seed=1_000 * seed + len(examples))
        for turn in env.scored_turns.turns:
            examples.append({"prompt": turn.prompt_text, "completion": turn.completion})
            written += len(turn.completion_ids)
    sft(student, examples, SFTConfig(num_epochs=1, batch_size=16, learning_rate=learning_rate, seed=seed))


def distil(student, teacher, way, total_steps, *, music=0.0, kl_coef=1.0, seed=1):
    """Train the student on its own texts, scored by the teacher; or, for comparison, on texts of the teacher."""
    if way == "sft":
        fine_tune(student, teacher, total_steps, learning_rate=2e-3, seed=seed + 100)
        return
    reference = teacher.reference()
    penalty = KLPenalty(reference, kl_coef)
    config = replace(CONFIG, seed=seed)
    if way == "loss":
        penalty = KLPenalty(reference, kl_coef, "exact", "loss")
    if way == "token":
        config = replace(config, gamma=0.0)
    PPO(make_env(student.tokenizer, music=music), student, config, penalty=penalty).learn(total_steps)


@torch.no_grad()
def measure(policy, teacher, num_episodes=288):
    """Figures of answers to prompts that no training has."""
    env = make_env(policy.tokenizer, split="test")
    _, rollout = evaluate(env, policy, num_episodes=num_episodes, seed=1)
    kl = policy.divergence(rollout, teacher)[rollout["mask"]]  # exact, at the tokens that this policy wrote
    turns = env.scored_turns.turns
    return {
        "KL, nats a token": kl.mean().item(),
        "KL, nats an answer": kl.sum().item() / num_episodes,
        "tokens an answer": len(kl) / num_episodes,
        "praise": env.metrics["reward_raw/praise"],
        "music": env.metrics["reward_raw/music"],
        "grammatical": sum(Reviews.accepts(turn) for turn in turns) / num_episodes,
    }


def main(way="loss", total_steps=100_000, *, music=0.0, kl_coef=1.0, seed=1, warm_up=20_000, teacher_steps=24_000):
    """Train teacher and student; return the figures of the teacher, and of the student before and after."""
    teacher = train_teacher(teacher_steps)
    student = make_student(teacher.tokenizer, seed)
    figures = {"teacher": measure(teacher, teacher)}
    if warm_up:
        fine_tune(student, teacher, warm_up, learning_rate=4e-3, seed=seed)
    figures["before"] = measure(student, teacher)
    distil(student, teacher, way, total_steps, music=music, kl_coef=kl_coef, seed=seed)
    figures["after"] = measure(student, teacher)

    print(f"{WAYS[way]}\n{'':20}" + "".join(f"{column:>10}" for column in figures))
    for name in figures["after"]:
        print(f"{name:20}" + "".join(f"{column[name]:10.3f}" for column in figures.values()))
    for text in student.generate(["the film", "this comedy", "her drama"], max_new_tokens=48, seed=1):
        print(text)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="loss", help="; ".join(f"{k}: {v}" for k, v in WAYS.items()))
    parser.add_argument("--total-steps", type=int, default=100_000, help="tokens that the student writes")
    parser.add_argument("--warm-up", type=int, default=20_000, help="tokens of the teacher that the student sees first")
    parser.add_argument("--music", type=float, default=0.0, help="weight of a reward for a mention of music")
    parser.add_argument("--kl-coef", type=float, default=1.0, help="weight of the KL to the teacher")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(main(**vars(options))))
