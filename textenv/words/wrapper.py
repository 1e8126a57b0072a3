"""`LanguageWrapper`: an environment whose observations and actions are words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from textenv.words.actions import ActionWords
from textenv.words.describing import (
    Description,
    description_of,
    known_description,
    name_of_function,
    takes_environment,
)
from textenv.words.reading import WordReader
from textenv.words.texts import AnyText, ListedText

MAX_CHARACTERS = 20_000
"""Maximum number of characters of an observation, and of an action in free text."""
MAX_TEXTS = 1000
"""Maximum number of different actions, if they are a closed set."""

Words = Sequence[str] | Sequence[Sequence[str]]
"""The words of one choice, or of each of several choices."""


class LanguageWrapper(gymnasium.Wrapper[str, str, Any, Any], RecordConstructorArgs):
    """Put the observations and actions of an environment into words (`gymnasium.spaces.Text`).

    The actions may be Discrete, MultiDiscrete, MultiBinary or a bounded Box, of which a few values have words
    (`ActionWords`). By default, the actions are a closed set: `step` takes exactly these texts. The words of several
    choices are joined by a space, as in ``left jump``. `textenv.TokenVectorEnv` allows a language model only the
    tokens of these texts; if the environment gives an ``info["action_mask"]``, those of the available ones.

    With ``actions="free"``, any text is an action: the last one of the words in it counts (`WordReader`). A text
    without any costs a turn: the environment is not stepped, the reward is 0, the observation says so, lists the words
    and repeats the last description, and ``info["unreadable"]`` is True. So does an action that the mask forbids. In a
    training, ``reward/log/unreadable`` is the fraction of such turns.

    Args:
        env: the environment. Rendering, seeds and its limits stay as they are.
        describe: function from an observation, or from an observation and ``env.unwrapped``, to a text; or a
            `Description`. None: the description of this environment in `textenv.words`, or that of its observation
            space.
        actions: words in the order of the actions; for several choices a list for each. None: those of the
            description, else the numbers. ``"free"``: the same words, in any text.
        instructions: what a player must know before the first observation. None: those of the description; with your
            own ``describe`` or words, a list of the words.

    Raises:
        TypeError: if ``describe`` cannot be called with one or two arguments; in `reset` and `step`, if it returns no
            text.
        ValueError: if the actions cannot be put into words, there are more than 1,000 of them in a closed set, or a
            text is longer than 20,000 characters.

    Example:
        >>> env = LanguageWrapper(gymnasium.make("CartPole-v1"), actions=["left", "right"])
        >>> env.words, env.action_space.contains("left")
        (('left', 'right'), True)

        The embedded model learns FrozenLake (4 x 4, without slipping):

        >>> def describe(cell):
        ...     return f"{cell // 4} {cell % 4}"
        >>> def make():
        ...     lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
        ...     return LanguageWrapper(lake, describe, ["left", "down", "right", "up"], instructions="")
        >>> policy = algos.LMPolicy.load("embedded")  # doctest: +SKIP
        >>> env = TokenVectorEnv(make, tokenizer=policy.tokenizer, num_envs=16, max_turns=100, max_length=128)
        ... # doctest: +SKIP
        >>> algos.PPO(env, policy, algos.presets.TEXT_WORDS).learn(24_000)  # doctest: +SKIP
    """

    def __init__(
        self,
        env: gymnasium.Env,
        describe: Description | Callable[..., str] | None = None,
        actions: Words | Literal["free"] | None = None,
        instructions: str | None = None,
    ) -> None:
        RecordConstructorArgs.__init__(self, describe=describe, actions=actions, instructions=instructions)
        gymnasium.Wrapper.__init__(self, env)

        # The description, and whether it also wants the environment
        self._describe: Callable[..., object] = description_of(env) if describe is None else describe
        self._with_env = takes_environment(self._describe)

        # Actions
        self._reader: WordReader | None = None
        """Reads actions in free text; None if they are a closed set."""
        words: Any = actions
        if actions is None or actions == "free":
            words = _words_of(self._describe, env)
        elif isinstance(actions, str) or not isinstance(actions, Sequence):
            raise ValueError(f"actions is {actions!r:.200}, expected a list of words, 'free', or None")
        self.action_words = ActionWords(env.action_space, words)
        """The words of each choice, and the action that they stand for."""
        self.words: tuple[str, ...] | None = None
        """All texts that are actions; None with ``actions="free"``, where any text is one."""
        if actions == "free":
            self._reader = WordReader(self.action_words.choices)
            self._action_space = AnyText(MAX_CHARACTERS)
        else:
            self._indices_of_text = _all_texts(self.action_words)
            self.words = tuple(self._indices_of_text)
            self._action_space = ListedText(self.words)
        self._observation_space = AnyText(MAX_CHARACTERS)

        # Instructions
        if instructions is None and actions in (None, "free"):
            instructions = getattr(self._describe, "instructions", None) or None  # a plain function has none
        if instructions is None:
            instructions = self.action_words.request
        self.instructions = _checked_text(instructions, "instructions")
        """What a player must know before the first observation; may be empty."""

        self._available_words: tuple[str, ...] | None = None
        self.available_actions: tuple[int, ...] | None = None
        """Indices of the actions that the mask allows now; None if it allows all, or there is none."""
        self._last_description = ""

    @property
    def available_words(self) -> tuple[str, ...] | None:
        """Texts of the actions that ``info["action_mask"]`` allows now; None if it allows all, or there is none.

        None, too, for free text, where an action that is not allowed is answered as one that cannot be read.
        """
        return self._available_words

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; return the description of its first observation."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._read_mask(info.get("action_mask"))
        self._last_description = self._text_of(observation)
        return self._last_description, info

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Do what a text says; return the description of the next observation.

        Raises:
            TypeError: if the action is no text.
            ValueError: if it is not one of the closed set; lists the words.
        """
        if not isinstance(action, str):
            raise TypeError(f"the action is {action!r:.200}, expected a text: {self.action_words.options}")
        indices = self._indices(action)
        if indices is None:
            reply = f"That is no action. Write {self.action_words.options}.\n{self._last_description}"
            return reply, 0.0, False, False, {"unreadable": True}
        if self._reader is not None and self.available_actions is not None and indices[0] not in self.available_actions:
            [choice] = self.action_words.choices
            words = ", ".join(choice[index].strip() for index in self.available_actions)
            reply = f"That is not available now. Write one of: {words}.\n{self._last_description}"
            return reply, 0.0, False, False, {"unreadable": True}

        observation, reward, terminated, truncated, info = self.env.step(self.action_words.action(indices))
        self._read_mask(info.get("action_mask"))
        if self._reader is not None:
            info = {**info, "unreadable": False}
        self._last_description = self._text_of(observation)
        return self._last_description, reward, terminated, truncated, info

    def _indices(self, action: str) -> list[int] | None:
        """Return the index of the word of each choice; None for free text without an action."""
        if self._reader is not None:
            return self._reader.indices(action)
        indices = self._indices_of_text.get(action.strip())
        if indices is None:
            raise ValueError(f"the action is {action!r:.200}, expected {self.action_words.options}")
        return indices

    def _read_mask(self, action_mask: object) -> None:
        """Note which actions a mask allows, which an environment may not give (None); it is of a single choice."""
        self.available_actions = None
        self._available_words = None
        if action_mask is None or len(self.action_words.choices) > 1:
            return
        mask = np.asarray(action_mask, dtype=bool).ravel()
        if len(mask) != len(self.action_words.choices[0]) or mask.all() or not mask.any():
            return
        self.available_actions = tuple(mask.nonzero()[0].tolist())
        if self.words is not None:
            self._available_words = tuple(self.words[index] for index in self.available_actions)

    def _text_of(self, observation: object) -> str:
        """Describe an observation."""
        if self._with_env:
            text = self._describe(observation, self.env.unwrapped)
        else:
            text = self._describe(observation)
        return _checked_text(text, f"describe ({name_of_function(self._describe)})", of=observation)


def language_wrapper_of(env: gymnasium.Env) -> LanguageWrapper | None:
    """Return the `LanguageWrapper` around an environment, perhaps inside other wrappers; None if there is none."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, LanguageWrapper):
            return env
        env = env.env
    return None


def _words_of(describe: object, env: gymnasium.Env) -> Words | None:
    """Return a description's words for the actions; if ``describe`` is a function, those that are known for ``env``."""
    if isinstance(describe, Description):
        return describe.action_words
    description = known_description(env)
    if description is None:
        return None
    return description.action_words


def _all_texts(action_words: ActionWords) -> dict[str, list[int]]:
    """Return the text of each action, with the index of the word of each choice.

    Raises:
        ValueError: if there are too many, or two actions have the same text.
    """
    choices = action_words.choices
    count = math.prod(map(len, choices))
    if count > MAX_TEXTS:
        raise ValueError(
            f"the actions are {action_words.space}, with {count:,} combinations of words, expected at most "
            f"{MAX_TEXTS:,}: give actions='free', which allows any text, or a wrapper with fewer actions"
        )
    indices_of_text = {}
    for indices in itertools.product(*(range(len(words)) for words in choices)):
        text = " ".join(words[index].strip() for words, index in zip(choices, indices, strict=True))
        if text in indices_of_text:
            raise ValueError(f"two actions have the text {text!r}, when the words are joined: give other words")
        indices_of_text[text] = list(indices)
    return indices_of_text


def _checked_text(text: object, source: str, of: object = None) -> str:
    """Return a text; raise an error, which names its source, if it is none or too long."""
    where = "" if of is None else f" for the observation {of!r:.200}"
    if not isinstance(text, str):
        raise TypeError(f"{source} gave {text!r:.200}{where}, expected a text")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"{source} gave a text of {len(text):,} characters{where}, expected at most {MAX_CHARACTERS:,}: "
            f"{text!r:.100}"
        )
    return text
