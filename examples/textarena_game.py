"""Train a language model on a game of the package textarena, as a Gymnasium environment of strings.

Guess a number from 1 to 9 in three turns: the mean reward rises from 0.25 to 0.57; binary search wins 7 of 9 games.

pip install textarena
python examples/textarena_game.py
"""

import gymnasium
import textarena
from gymnasium import spaces

from algos import PPO, LMPolicy, presets
from textenv import TokenVectorEnv


class TextArena(gymnasium.Env[str, str]):
    """A game of textarena for one player; the player's own messages are left out, as they are already in the text."""

    def __init__(self, name, *, rules=None, **settings):
        self.game = textarena.make(f"{name}-raw", **settings)
        self.rules = rules  # replace the game's own rules, which are too long for a tiny model
        self.observation_space = self.action_space = spaces.Text(100_000, min_length=0)

    def reset(self, *, seed=None, options=None):
        """Start a game; the observation is its rules."""
        super().reset(seed=seed)
        self.game.reset(num_players=1, seed=int(self.np_random.integers(2**31)))
        return self._said(), {}

    def step(self, action):
        """Pass the action to the game; textarena gives the reward at the end of the game."""
        done, info = self.game.step(action)
        if not done:
            return self._said(), 0.0, False, False, info
        rewards, games = self.game.close()
        return games[0]["reason"], float(rewards[0]), True, False, info

    def _said(self):
        _, messages = self.game.get_observation()
        kinds = textarena.ObservationType
        return "\n".join(
            self.rules if self.rules and kind is kinds.PROMPT else text
            for _, text, kind in messages
            if kind is not kinds.PLAYER_ACTION
        )


class Bracketed(gymnasium.ActionWrapper):
    """Puts actions in brackets, as the game expects them."""

    def action(self, action):
        """Put the action in brackets."""
        return f"[{action.strip()}]"


def make_game(most=9):
    rules = f"guess a number from 1 to {most}"
    return Bracketed(TextArena("GuessTheNumber-v0", rules=rules, min_number=1, max_number=most, max_turns=20))


def main(total_steps=12_000, most=9):
    policy = LMPolicy.load("embedded")  # or a folder, or a hub name
    tokenizer = policy.tokenizer
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "123456789"]
    env = TokenVectorEnv(
        lambda: make_game(most), tokenizer=tokenizer, num_envs=8, max_prompt_tokens=24, max_new_tokens=1, max_turns=3,
        max_length=112, allowed=lambda turn: digits,
    )  # fmt: skip
    agent = PPO(env, policy, presets.TEXT)
    for metrics in agent.learn(total_steps):
        print(f"{metrics['steps']:>6} steps  reward {metrics['episode/return']:.2f}")


if __name__ == "__main__":
    main()
