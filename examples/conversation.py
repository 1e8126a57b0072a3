"""Train a language model in a conversation of your own: a Gymnasium environment that reads and writes strings.

python examples/conversation.py
"""

import gymnasium
from gymnasium import spaces

from algos import PPO, LMPolicy, collect, presets
from textenv import TokenVectorEnv, render_rollout

TEXT = spaces.Text(400, charset="abcdefghijklmnopqrstuvwxyz ,.'?\n")


class Interview(gymnasium.Env):
    """Asks about three things in random order; an answer that names the right one gets reward 1."""

    observation_space = action_space = TEXT
    THINGS = ("music", "plot", "ending")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = [self.THINGS[i] for i in self.np_random.permutation(3)]
        return self.question(), {}

    def step(self, action):
        reward = float(self.left.pop(0) in action.split())
        return self.question() if self.left else "thanks", reward, not self.left, False, {}

    def question(self):
        return f"the {self.left[0]} ?"


def main(total_steps=120_000):
    policy = LMPolicy.load("embedded", seed=1)
    tokenizer = policy.tokenizer
    env = TokenVectorEnv(Interview, tokenizer=tokenizer, num_envs=64, max_new_tokens=12, max_length=96)
    agent = PPO(env, policy, presets.TEXT, kl_coef=0.01)
    history = agent.learn(total_steps)
    for metrics in history[:: max(1, len(history) // 20)]:
        print(f"{metrics['steps']:>6} steps  return {metrics['episode/return']:.2f} of 3")

    rollout = collect(env, policy, num_episodes=4)
    for row in range(4):  # tokens of the policy are underlined; redder means less likely
        print(render_rollout(rollout, row, tokenizer))
    return history


if __name__ == "__main__":
    main()
