"""`TextWorld`: text adventures made by the generator of the package ``textworld``."""

import re
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from textenv.embedded.cache import cache_root, cached, fingerprint
from textenv.envs.action_masks import next_ids
from textenv.envs.string_env import StringGames
from textenv.games.dialogue import text_space
from textenv.prompts.tokenize import prompt_ids

CUSTOM = {"nb_rooms": 1, "nb_objects": 2, "quest_length": 1, "theme": "basic"}
# One command: "a. b" and "a then b" are two, and the interpreter hangs on unprintable characters.
_COMMAND = re.compile(r"(?!.*\bthen\b)[\w' -]{1,150}", re.ASCII | re.IGNORECASE)


class TextWorld(StringGames):
    """Reach the goal of a text adventure of TextWorld by commands.

    Prompt: the goal and the first room. Actions: a command such as ``take coin`` in the first line, with a verb of the
    game (not ``save`` or ``quit``). Score: the points gained in the turn; winning and losing terminate. Each episode
    draws a game from a pool of ``games``, which are compiled once, into the cache; each split has its own.

    Args:
        split: ``"train"`` or ``"test"``.
        tokenizer: the policy's tokenizer.
        challenge: ``"custom"``, or a challenge of ``tw-make``: ``"tw-coin_collector"``.
        games: size of the pool.
        seed: seed of the pool.
        admissible: allow only commands that the game accepts now (a rule for ``allowed=``).
        settings: the challenge's, such as ``level=3``, or those of `CUSTOM`; ``theme="house"`` has longer texts.
    """

    def __init__(
        self, split: str = "train", *, tokenizer: Any, challenge: str = "custom", games: int = 10, seed: int = 0,
        admissible: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        of_game = _settings(challenge, settings, split)
        build = partial(_build, challenge=challenge, settings=of_game, games=games, seeds=[seed, split == "test"])
        pool = cache_root() / f"textworld-{fingerprint(sorted(build.keywords.items()), ['textworld'])}"
        cached(pool, build, what=f"{games} games of TextWorld (2 s each)")
        super().__init__(partial(_Game, sorted(map(str, pool.glob("*.z8"))), admissible), tokenizer=tokenizer)
        longest = max(len(prompt_ids(self.prompt(path.read_text()), tokenizer)) for path in pool.glob("*.txt"))
        self.limits: dict[str, Any] = {"max_prompt_tokens": longest, "max_new_tokens": 32, "max_turns": 20}
        self.limits |= {"max_length": min(1024, tokenizer.model_max_length)}
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
        wanted = _package().EnvInfos(feedback=True, score=True, verbs=True, admissible_commands=self._admissible)
        self._game = _package().start(str(self.np_random.choice(self._files)), wanted)
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


def _package() -> Any:
    try:
        import textworld.challenges
    except ImportError as error:
        raise ImportError("the package textworld is not installed: pip install 'textenv[textworld]'") from error
    return textworld


def _settings(challenge: str, given: dict[str, Any], split: str) -> dict[str, Any]:
    """Return all settings of a challenge, with TextWorld's defaults."""
    challenges, known = _package().challenges.CHALLENGES, CUSTOM
    if challenge in challenges:
        challenges[challenge][2](parser := ArgumentParser(add_help=False))
        known = {action.dest: action.default for action in parser._actions} | {"theme": "house"}
    if challenge not in ("custom", *challenges) or set(given) - set(known):
        raise ValueError(
            f"challenge is {challenge!r} with the settings {given}, expected one of custom, {', '.join(challenges)}, "
            f"and settings among {', '.join(known)}"
        )
    return known | given | {name: x for name, x in {"split": split, "test": split == "test"}.items() if name in known}


def _build(folder: Path, *, challenge: str, settings: dict[str, Any], games: int, seeds: list[int]) -> None:
    """Make and compile games, and store the text that each begins with."""
    textworld, rng = _package(), np.random.default_rng(seeds)
    for number in range(games):
        options, path = textworld.GameOptions(), folder / f"{number:05}.z8"
        options.seeds, options.path, options.grammar.theme = int(rng.integers(2**31)), str(path), settings["theme"]
        try:
            if challenge == "custom":
                for name in ("nb_rooms", "nb_objects", "quest_length"):
                    setattr(options, name, settings[name])
                game = textworld.generator.make_game(options)
            else:
                game = textworld.challenges.CHALLENGES[challenge][1](settings, options)
            textworld.generator.compile_game(game, options)
        except Exception as error:  # of many kinds
            raise ValueError(f"TextWorld cannot make {challenge} of {settings}: {error!r}") from error
        path.with_suffix(".txt").write_text(_Game([str(path)]).reset()[0])
