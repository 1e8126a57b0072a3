"""An environment on a server of the package OpenEnv: two turns, a word of praise in each pays .5.

python examples/worlds/praise_server.py PORT SESSIONS
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

WORDS = ("great", "good", "wonderful", "brilliant", "charming")
THINGS = ("film", "movie", "comedy", "drama", "story", "plot", "cast", "music")


class Say(Action):
    """What the model says."""

    text: str


class Heard(Observation):
    """What it is asked."""

    reply: str


class Praise(Environment):
    """Two questions about a film."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        """Draw a thing by the seed."""
        self.steps = 0
        return Heard(reply=f"the {THINGS[(seed or 0) % len(THINGS)]} is")

    def step(self, action, timeout_s=None, **kwargs):
        """Pay praise; ask once more."""
        self.steps += 1
        paid = 0.5 * any(word in action.text for word in WORDS)
        return Heard(reply="and the end is", reward=paid, done=self.steps == 2)

    @property
    def state(self):
        """Number of turns so far."""
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_app(Praise, Say, Heard, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
