"""Games with different actions on real OpenEnv servers: ``python action_server.py GAME=PORT GAME=PORT …``.

A game asks for a number from 0 to 3; the right one is named in the observation, and ends the episode with reward 1.
"""

import sys
import threading
from enum import StrEnum
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

DIRECTIONS = ("UP", "DOWN", "LEFT", "RIGHT")


class Direction(StrEnum):
    UP = "UP"
    DOWN = "DOWN"
    LEFT = "LEFT"
    RIGHT = "RIGHT"


class Move(Action):
    direction: Direction


class Bounded(Action):
    number: int = Field(ge=0, le=3)


class Listed(Action):
    number: int
    game: str = "numbers"


class Pair(Action):
    number: int
    sure: bool


class Asked(Observation):
    wanted: str
    legal_actions: list[int] = []


class Numbers(Environment):
    """The number that the seed gives is the right one; in the game ``listed`` only it and a lower one are legal."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    game = "move"

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.steps = (seed or 0) % 4, 0
        return self.asked(list(range(4)))

    def asked(self, legal, **outcome):
        wanted = DIRECTIONS[self.number] if self.game == "move" else str(self.number)
        return Asked(wanted=wanted, legal_actions=legal if self.game == "listed" else [], **outcome)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        chosen = DIRECTIONS.index(action.direction.value) if self.game == "move" else action.number
        right = chosen == self.number and getattr(action, "sure", True)
        return self.asked(sorted({0, self.number}), reward=float(right), done=right or self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)


ACTIONS: dict[str, Any] = {"move": Move, "bounded": Bounded, "listed": Listed, "pair": Pair}


def serve(game, port):
    kind = type(game.title(), (Numbers,), {"game": game})
    app = create_app(kind, ACTIONS[game], Asked, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    threads = []
    for argument in sys.argv[1:]:
        game, _, port = argument.partition("=")
        threads.append(threading.Thread(target=serve, args=(game, int(port))))
        threads[-1].start()
    for thread in threads:  # a server needs the interpreter's main thread, too
        thread.join()
