"""A word game on a real OpenEnv server, by the package's documented API: ``python word_server.py PORT SESSIONS``."""

import os
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

WORDS = ["film", "plot", "story"]


class Say(Action):
    text: str


class Heard(Observation):
    reply: str


class WordGame(Environment):
    """Say the word that the server asks for; "die" kills the server, "raise" the step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.word, self.steps = WORDS[(seed or 0) % 3], 0
        return Heard(reply=f"say {self.word}")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        text = action.text.strip()
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise RuntimeError("no such word")
        right = text == self.word
        return Heard(reply="" if right else f"no, {self.word}", reward=float(right) - 0.25, done=right)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_app(WordGame, Say, Heard, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
