"""A conversation partner whose replies are known, and a tokenizer with a chat template."""

import gymnasium
from gymnasium import spaces

from tests.helpers.models import WORDS, make_tokenizer

TEXT = spaces.Text(100, charset="".join(map(chr, range(32, 127))))


class Parrot(gymnasium.Env):
    """Pays the number of 'good' in each answer, says 'a a' after the first, 'b' after the second, ends at the third."""

    observation_space = action_space = TEXT

    def __init__(self, *, end="terminated"):
        self.end, self.heard = end, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return str(self.np_random.choice(["c d", "d"])), {}

    def step(self, action):
        self.heard.append(action)
        self.turn += 1
        over = self.turn == 3
        reward = float(action.split().count("good"))
        return (
            ("a a", "b", "done")[self.turn - 1],
            reward,
            over and self.end == "terminated",
            over and self.end != ("terminated"),
            {},
        )


LETTERS = ["a", "b", "c", "d"]


class Walk(gymnasium.Env):
    """Says letters and dots, of one to three words; pays for 'good' by what it has just said. Ends after some steps."""

    observation_space = action_space = TEXT

    def __init__(self, turns=6):
        self.turns = turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        self.last = int(self.np_random.integers(4))
        return self.text(), {}

    def text(self):
        return " ".join([LETTERS[self.last], *"." * (self.turn % 3)])

    def step(self, action):
        reward = (self.last + 1.0) * action.split().count("good")
        self.last = (self.last + len(action.split())) % 4
        self.turn += 1
        return self.text(), reward, self.turn == self.turns, False, {}


CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


CHAT_WORDS = [*WORDS[:-2], "<|im_end|>", "<pad>", "<|im_start|>", "user", "assistant", "THE-ANSWER"]


def chat_tokenizer():
    tokenizer = make_tokenizer(CHAT_WORDS, eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer
