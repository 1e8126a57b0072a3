"""`TextWorld`: text adventures of the package ``textworld``, made by its generator or by ``tw-make``."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from textenv.cache import cache_root, cached, fingerprint
from textenv.envs.action_masks import next_ids
from textenv.envs.string_env import StringGames
from textenv.envs.turn import Turn
from textenv.games.dialogue import text_space
from textenv.optional import package
from textenv.prompts.tokenize import prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTINGS = {"nb_rooms": 1, "nb_objects": 2, "quest_length": 1, "theme": "basic"}
"""Settings of the games that are made, and their defaults."""
# One command: "a. b" and "a then b" are two, and the interpreter hangs on unprintable characters.
_COMMAND = re.compile(r"(?!.*\bthen\b)[\w' -]{1,150}", re.ASCII | re.IGNORECASE)
# A line with a letter or digit: neither the status line, which begins with ">", nor the banner's drawing.
_TEXT_LINE = re.compile(r"^[ \t]*([^>\s].*[A-Za-z0-9].*?)\s*$", re.MULTILINE)


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
        settings: settings of the games that are made, see `SETTINGS`; ``theme="house"`` has longer texts.

    Raises:
        ValueError: if there are no games, or on settings that TextWorld does not know or cannot meet.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        tokenizer: "PreTrainedTokenizerBase",
        games: int | str | Path = 10,
        seed: int = 0,
        admissible: bool = False,
        **settings: object,
    ) -> None:
        folder = Path(str(games))
        unknown_settings = set(settings) - set(SETTINGS)

        # Make a pool, unless a folder is given; each pool has its own folder in the cache
        if isinstance(games, int) and games > 0 and not unknown_settings:
            seeds = [seed, split == "test"]
            build = partial(_build, games=games, seeds=seeds, settings=SETTINGS | settings)
            pool_id = fingerprint(sorted(build.keywords.items()), ["textworld"])
            folder = cache_root() / f"textworld-{pool_id}"
            cached(folder, build, what=f"{games} games of TextWorld (2 s each)")
        files = sorted(map(str, folder.glob("*.z8")))
        if not files:
            expected = f"a number or a folder of *.z8 files, and settings among {', '.join(SETTINGS)}"
            raise ValueError(f"games is {games!r} with the settings {settings}, expected {expected}")
        for file in files:
            if not Path(file).with_suffix(".json").is_file():
                raise ValueError(f"{file} lacks the .json file that TextWorld wrote beside it: copy that, too")
        super().__init__(partial(_Game, files, admissible), tokenizer=tokenizer)

        # Limits; the longest prompt is that of one of the games
        prompt_lengths = []
        for file in files:
            first_observation, _ = _Game([file]).reset()
            prompt_lengths.append(len(prompt_ids(self.prompt(first_observation), tokenizer)))
        self.limits: dict[str, object] = {"max_new_tokens": 32, "max_turns": 20}
        self.limits["max_prompt_tokens"] = max(prompt_lengths)
        self.limits["max_length"] = min(1024, tokenizer.model_max_length)
        if admissible:
            self.limits["allowed"] = _admissible_ids


def _admissible_ids(turn: Turn) -> list[int]:
    """Rule for ``allowed=``: the tokens that go on towards a command that the game accepts now."""
    return next_ids(turn, turn.prompt.state.env.commands)


class _Game(gymnasium.Env[str, str]):
    """A game drawn from these compiled games at each reset.

    Args:
        files: paths of the compiled games.
        admissible: have `commands` list the commands that the game accepts now.
    """

    def __init__(self, files: list[str], admissible: bool = False) -> None:
        self.observation_space = text_space(100_000)
        self.action_space = self.observation_space
        self._files = files
        self._admissible = admissible
        self._game: Any = None

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        super().reset(seed=seed)
        self.close()
        textworld = package("textworld", "textworld")
        infos = textworld.EnvInfos(feedback=True, score=True, verbs=True, admissible_commands=self._admissible)
        file = str(self.np_random.choice(self._files))
        self._game = textworld.start(file, infos)
        return self._observe(self._game.reset()), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        command = action.strip().partition("\n")[0].strip()
        if not _COMMAND.fullmatch(command) or command.split()[0].lower() not in self._state.verbs:
            return "That's not a verb I recognise.", 0.0, False, False, {}
        score_before = self._state.score
        state, score, done = self._game.step(command)
        return self._observe(state), score - score_before, done, False, {}

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
        self._game = None

    def _observe(self, state: Any) -> str:
        """Keep the state; return the game's text without banner, status line and empty lines."""
        self._state = state
        self.commands = state.admissible_commands
        return "\n".join(_TEXT_LINE.findall(state.feedback))


def _build(folder: Path, *, games: int, seeds: list[int], settings: dict[str, object]) -> None:
    """Make this number of games and compile them into a folder.

    Raises:
        ValueError: if TextWorld cannot make a game with these settings.
    """
    textworld = package("textworld", "textworld")
    rng = np.random.default_rng(seeds)
    for number in range(games):
        options = textworld.GameOptions()
        options.seeds = int(rng.integers(2**31))
        options.path = str(folder / f"{number:05}.z8")
        options.grammar.theme = settings["theme"]
        try:
            for name in ("nb_rooms", "nb_objects", "quest_length"):
                setattr(options, name, settings[name])
            game = textworld.generator.make_game(options)
            textworld.generator.compile_game(game, options)
        except Exception as error:  # of many kinds
            raise ValueError(f"TextWorld cannot make a game of {settings}: {error!r}") from error
