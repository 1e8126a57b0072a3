"""Train a language model on your thumbs up or down for a few of its responses; a reward model scores the others.

python examples/human_feedback.py              # in the terminal
python examples/human_feedback.py --browser    # on a page, whose address is printed

Each of your answers is saved to runs/thumbs.jsonl at once. You can quit: the same command asks only for the others.
"""

import sys

from algos import PPO, LMPolicy, presets
from textenv import HumanReward, RewardModel, TextVectorEnv
from textenv.extras.human import BrowserAnnotator, FeedbackStopped, TerminalAnnotator

PER_BATCH = 4 / presets.TEXT.num_episodes  # you score 4 of the 128 responses between two updates


def main(total_steps=6_000, annotator=None, file="runs/thumbs.jsonl"):
    policy = LMPolicy.load("embedded", seed=1)
    model = RewardModel.load("embedded", label="positive")
    human = HumanReward(
        file, scale="thumbs", annotator=annotator or TerminalAnnotator(), fallback=model, fraction=PER_BATCH
    )
    env = TextVectorEnv(
        prompts=["this film", "the new comedy", "her second drama"],
        reward=human,
        tokenizer=policy.tokenizer,
        num_envs=64,
    )
    agent = PPO(env, policy, presets.TEXT, kl_coef=0.05)
    for metrics in agent.learn(total_steps):
        print(f"{metrics['steps']:>6} steps  reward {metrics['episode/return']:.2f}  KL {metrics['reference/kl']:.2f}")
    print(f"{len(human.file.scored())} thumbs in {human.file.path}")


if __name__ == "__main__":
    try:
        main(annotator=BrowserAnnotator() if "--browser" in sys.argv else None)
    except FeedbackStopped as stopped:
        print(stopped)
