"""`TextWorld`: text adventures of the package ``textworld``, made by its generator or by ``tw-make``."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from textenv.embedded.cache import cache_root, cached, fingerprint
from textenv.envs.action_masks import next_ids
from textenv.envs.string_env import StringGames
from textenv.games.dialogue import text_space
from textenv.optional import package
from textenv.prompts.tokenize import prompt_ids

SETTINGS = {"nb_rooms": 1, "nb_objects": 2, "quest_length": 1, "theme": "basic"}
# One command: "a. b" and "a then b" are two, and the interpreter hangs on unprintable characters.
_COMMAND = re.compile(r"(?!.*\bthen\b)[\w' -]{1,150}", re.ASCII | re.IGNORECASE)


class TextWorld(StringGames):
    """Reach the goal of a text adventure of TextWorld by commands.

    Prompt: the goal and the first room. Actions: a command such as ``take coin`` in the first line, with a verb of the
    game (not ``save`` or ``quit``). Score: the points gained in the turn; winning and losing terminate. Each episode
    draws a game from a pool, which is made once, into the cache; each split has its own.

    Args:
        split: ``"train"`` or ``"test"``.
        tokenizer: the policy's tokenizer.
        games: size of the pool, or a folder with games by ``tw-make`` (``*.z8``), whatever the split.
        seed: seed of the pool.
        admissible: allow only commands that the game accepts now (a rule for ``allowed=``).
        settings: of the games that are made: those of `SETTINGS`; ``theme="house"`` has longer texts.
    """

    def __init__(
        self, split: str = "train", *, tokenizer: Any, games: int | str | Path = 10, seed: int = 0,
        admissible: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        folder, unknown = Path(str(games)), sorted(set(settings) - set(SETTINGS))
        if isinstance(games, int) and games > 0 and not unknown:
            build = partial(_build, games=games, seeds=[seed, split == "test"], settings=SETTINGS | settings)
            folder = cache_root() / f"textworld-{fingerprint(sorted(build.keywords.items()), ['textworld'])}"
            cached(folder, build, what=f"{games} games of TextWorld (2 s each)")
        files = sorted(map(str, folder.glob("*.z8")))
        if not files:
            expected = f"a number or a folder of *.z8 files, and settings among {', '.join(SETTINGS)}"
            raise ValueError(f"games is {games!r} with the settings {settings}, expected {expected}")
        super().__init__(partial(_Game, files, admissible), tokenizer=tokenizer)
        starts = [self.prompt(_Game([file]).reset()[0]) for file in files]
        self.limits: dict[str, Any] = {"max_new_tokens": 32, "max_turns": 20}
        self.limits["max_prompt_tokens"] = max(len(prompt_ids(prompt, tokenizer)) for prompt in starts)
        self.limits["max_length"] = min(1024, tokenizer.model_max_length)
        self.limits |= {"allowed": lambda turn: next_ids(turn, turn.prompt.state.env.commands)} if admissible else {}


class _Game(gymnasium.Env[str, str]):
    """One of these compiled games, drawn at reset."""

    def __init__(self, files: list[str], admissible: bool = False) -> None:
        self.observation_space = self.action_space = text_space(100_000)
        self._files, self._admissible = files, admissible
        self._game: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        textworld = package("textworld", "textworld")
        wanted = textworld.EnvInfos(feedback=True, score=True, verbs=True, admissible_commands=self._admissible)
        self._game = textworld.start(str(self.np_random.choice(self._files)), wanted)
        return self._observe(self._game.reset()), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        command = action.strip().partition("\n")[0].strip()
        if not _COMMAND.fullmatch(command) or command.split()[0].lower() not in self._state.verbs:
            return "That's not a verb I recognise.", 0.0, False, False, {}
        before, (state, score, done) = self._state.score, self._game.step(command)
        return self._observe(state), score - before, done, False, {}

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
        self._game = None

    def _observe(self, state: Any) -> str:
        """Keep the state; return the game's text without banner, status line and empty lines."""
        self._state, self.commands = state, state.admissible_commands
        return "\n".join(re.findall(r"^[ \t]*([^>\s].*[A-Za-z0-9].*?)\s*$", state.feedback, re.MULTILINE))


def _build(folder: Path, *, games: int, seeds: list[int], settings: dict[str, Any]) -> None:
    """Make and compile games."""
    textworld, rng = package("textworld", "textworld"), np.random.default_rng(seeds)
    for number in range(games):
        options = textworld.GameOptions()
        options.seeds, options.path = int(rng.integers(2**31)), str(folder / f"{number:05}.z8")
        options.grammar.theme = settings["theme"]
        try:
            for name in ("nb_rooms", "nb_objects", "quest_length"):
                setattr(options, name, settings[name])
            textworld.generator.compile_game(textworld.generator.make_game(options), options)
        except Exception as error:  # of many kinds
            raise ValueError(f"TextWorld cannot make a game of {settings}: {error!r}") from error
