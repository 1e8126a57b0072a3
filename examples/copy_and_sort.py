"""Copy or sort digits: PPO begins with a language model that was shown a part of the answers.

The embedded model has never seen a list of digits, so none of its answers earns anything, and PPO alone stays at 0.
SFT on 300 of 2,423 pairs teaches the form of an answer (a score of about .1, as for guessed digits), and PPO teaches
copying. For sorting SFT has 800, which teach most of it already; with 300, PPO is at .64 when the steps end.

python examples/copy_and_sort.py Copy
python examples/copy_and_sort.py Sort
"""

import sys

import gymnasium
import torch

from algos import PPO, LMPolicy, SFTConfig, evaluate, presets, sft
from textenv.tasks.builtin import TASKS

torch.set_num_threads(1)  # fastest for a model of this size


PAIRS = {"Copy": 300, "Sort": 800}


def main(task="Copy", total_steps=150_000, seed=1):
    teacher = TASKS[task]("train")
    shown = teacher.prompts[:: len(teacher.prompts) // PAIRS[task]]
    answers = [" " + " ".join(teacher.answer(prompt.split()[1:-1])) for prompt in shown]
    env, test = (gymnasium.make_vec(f"textenv/{task}-v0", num_envs=64, split=split) for split in ("train", "test"))
    policy = LMPolicy.load("embedded", seed=seed)
    scores = [evaluate(test, policy, num_episodes=288).mean_return]
    examples = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(shown, answers, strict=True)]
    sft(policy, examples, SFTConfig(num_epochs=8, learning_rate=2e-3, seed=seed))
    scores.append(evaluate(test, policy, num_episodes=288).mean_return)
    PPO(env, policy, presets.TEXT_EMBEDDED, seed=seed).learn(total_steps)
    scores.append(evaluate(test, policy, num_episodes=288).mean_return)
    print(
        f"{task}: score on unseen prompts {scores[0]:.2f} before, {scores[1]:.2f} after SFT, {scores[2]:.2f} after PPO"
    )
    return scores


if __name__ == "__main__":
    main(*sys.argv[1:2])
