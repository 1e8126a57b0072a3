"""`TokenEnv`: any Gymnasium environment with string observations and actions, stepped token by token."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import gymnasium
import numpy as np

from textenv.envs.action_masks import WordRule
from textenv.envs.limits import check_at_least, check_tokenizer
from textenv.envs.task import rows_of
from textenv.envs.text_env import TextEnv
from textenv.envs.turn import TRUNCATED, Cut, Turn
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.ends import turn_ends
from textenv.prompts.messages import Message
from textenv.prompts.prompts import Prompt
from textenv.prompts.tokenize import has_system_message
from textenv.rewards.scores import Scores, as_number, read_scores
from textenv.words.wrapper import language_wrapper_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAILED_KEY = "worker_failed"
"""Key of ``info`` in a step that failed, as in `algos.envs.subprocess_env`."""
UNREADABLE_KEY = "unreadable"
"""Key of ``info``: True if the text was no action, as `LanguageWrapper` writes it."""
MAX_TURNS = 20
"""Default maximum number of turns in an episode."""

StringEnv = gymnasium.Env[str, str]
"""Environment whose observations and actions are strings (`gymnasium.spaces.Text`)."""


@dataclass
class _Game:
    """One episode of a string environment, with its rewards so far."""

    env: StringEnv
    observations: list[str]
    """All observations so far."""
    actions: list[str] = field(default_factory=list)
    """All actions so far: the action at index i follows the observation at index i."""
    rewards: dict[int, float] = field(default_factory=dict)
    """By number of the turn; turns that call tools have none."""
    closed: bool = False
    failed: bool = False
    """True after an error of the environment: the episode is broken off, and left out of the update."""
    unreadable: dict[int, float] = field(default_factory=dict)
    """By number of the turn: 1 if its text was no action, 0 if it was; empty if the environment does not say so."""


class StringGames:
    """A string environment as a task: its first observation is the prompt, its later ones are the replies.

    With ``history=k`` the model sees only the last k observations, and the actions between them. So an episode may be
    longer than the model's context. Up to turn k the text grows, as without a limit; from then on every turn is a row
    of its own in the rollout (`textenv.rollout`).

    Args:
        make_env: function that makes a new environment for each episode; or a single environment for all episodes,
            which works with one slot only.
        tokenizer: the policy's tokenizer; with a chat template, observations become user messages, otherwise lines
            of text.
        pay_at: ``"turn"`` assigns each reward to the turn that earned it, ``"end"`` their sum to the last turn.
        history: number of observations that the model sees, at least 1; None: all of them.
        chat: use the tokenizer's chat template, if there is one; False writes lines of text, which are shorter.

    Raises:
        ValueError: on another ``pay_at``, or a ``history`` below 1.
        TypeError: unless ``make_env`` is or makes a Gymnasium environment.
    """

    def __init__(
        self,
        make_env: Callable[[], StringEnv] | StringEnv,
        *,
        tokenizer: PreTrainedTokenizerBase,
        pay_at: Literal["turn", "end"] = "turn",
        history: int | None = None,
        chat: bool = True,
    ) -> None:
        if history is not None:
            check_at_least("history", history, 1)
        if pay_at not in ("turn", "end"):
            raise ValueError(f"pay_at is {pay_at!r}, expected 'turn' or 'end'")

        # The environments
        self.single_env: StringEnv | None = None
        """The single environment of all episodes; None if each episode has a new one."""
        if isinstance(make_env, gymnasium.Env):
            self.single_env = make_env
        elif callable(make_env):
            self._make_env = make_env
        else:
            raise TypeError(f"make_env is {make_env!r}, expected a Gymnasium environment or a function that makes one")
        self._made: WeakSet[StringEnv] = WeakSet()
        self._waiting: list[StringEnv] = []  # made to look at, for the next episode

        # How they are shown and paid
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.chat = chat and bool(tokenizer.chat_template)
        self.pay_at = pay_at
        self.max_turns_per_row = history
        """Number of observations that the model sees, which is the maximum number of turns in a row; None: all."""
        self._answered: list[Turn] = []
        self._map: Callable[..., Iterable[Any]] = map

    @functools.cached_property
    def _has_system_message(self) -> bool:
        """True if the chat template writes system messages; asked late, because an environment may set variables."""
        return has_system_message(self.tokenizer)

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Start games; see `textenv.envs.task.Task.sample_prompts`. Equal numbers give equal games."""
        self._close(self._answered)  # before others begin: a server may run few at once
        self._answered = []
        return list(self._map(self._begin, numbers, itertools.repeat(seed)))

    def reply(self, turns: Sequence[Turn]) -> list[str | Prompt | Literal[Cut.TRUNCATED] | None]:
        """Step the games; see `textenv.envs.task.Conversation.reply`."""
        self._answered += turns
        return list(self._map(self._step, turns))

    def score(self, turns: Sequence[Turn]) -> Scores:
        """Return the rewards of the turns; see `textenv.envs.task.Task.score`."""
        self._close(turns)
        rewards = []
        failed_indices = []
        for index, turn in enumerate(turns):
            game: _Game = turn.prompt.state
            if self.pay_at == "turn":
                reward = game.rewards.get(turn.index, 0.0)
            elif turn.last:
                reward = sum(game.rewards.values())
            else:
                reward = 0.0
            rewards.append(reward)
            if game.failed:
                failed_indices.append(index)
        scores = read_scores(rewards, rows_of(turns), name=type(self).__name__)
        unreadable = _unreadable_column(turns)
        return replace(scores, failed=frozenset(failed_indices), logged=unreadable)

    def prompt(self, observation: str, state: _Game | None = None) -> Prompt:
        """Return the prompt for the first observation that the model sees, after a `LanguageWrapper`'s instructions."""
        instructions = "" if state is None else _instructions_of(state.env)
        if self.chat:
            return Prompt(self._first_messages(instructions, observation), state=state)
        if instructions:
            observation = f"{instructions}\n{observation}"
        return Prompt(f"{observation}\n", state=state)

    def _first_messages(self, instructions: str, observation: str) -> tuple[Message, ...]:
        """Return the chat before the first turn: the instructions as a system message, if the template has these."""
        if not instructions:
            return ({"role": "user", "content": observation},)
        if self._has_system_message:
            return ({"role": "system", "content": instructions}, {"role": "user", "content": observation})
        return ({"role": "user", "content": f"{instructions}\n{observation}"},)

    def look_at_env(self) -> StringEnv:
        """Return the environment of the next episode, before it begins."""
        if self.single_env is not None:
            return self.single_env
        if not self._waiting:
            self._waiting.append(self._make_env())
        return self._waiting[0]

    def close_waiting(self) -> None:
        """Close an environment that waits for an episode; environments call this when they are closed."""
        while self._waiting:
            self._waiting.pop().close()

    def _close(self, turns: Sequence[Turn]) -> None:
        """Close the environments of episodes that are over, each once."""
        for turn in turns:
            game: _Game = turn.prompt.state
            if turn.last and self.single_env is None and not game.closed:
                game.closed = True
                game.env.close()

    def _begin(self, number: int, seed: int) -> Prompt:
        """Begin an episode; the seed of its environment depends on seed and number only."""
        env: StringEnv
        if self.single_env is not None:
            env = self.single_env
        elif self._waiting:
            env = self._waiting.pop()
        else:
            env = self._make_env()
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"make_env returned {env!r}, expected a Gymnasium environment")
        if self.single_env is None and env in self._made:
            raise ValueError(f"make_env returned {env!r} a second time: make a new environment for each episode")
        self._made.add(env)

        env_seed = int(np.random.default_rng([seed, number]).integers(2**31))
        result = env.reset(seed=env_seed)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"{env!r}.reset returned {result!r:.200}, expected a tuple of 2: observation, info")
        observation, _ = result
        text = _checked_observation(env, observation)
        return self.prompt(text, _Game(env, [text]))

    def _step(self, turn: Turn) -> str | Prompt | Literal[Cut.TRUNCATED] | None:
        """Step a game with the text of a turn; return the reply."""
        # What the game's step returns
        game: _Game = turn.prompt.state
        result = game.env.step(turn.completion)
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            raise TypeError(
                f"{game.env!r}.step returned {result!r:.200}, expected a tuple of 5: observation, reward, terminated, "
                "truncated, info"
            )
        observation, reward, terminated, truncated, info = result
        if not isinstance(info, Mapping):
            raise TypeError(f"{game.env!r}.step returned the info {info!r:.200}, expected a dictionary")
        game.failed = bool(info.get(FAILED_KEY))
        if UNREADABLE_KEY in info:
            game.unreadable[turn.index] = float(info[UNREADABLE_KEY])
        paid = as_number(reward)
        if paid is None:
            raise TypeError(f"{game.env!r} gave the reward {reward!r:.200}, expected a number")
        game.rewards[turn.index] = paid
        for name, ends in (("terminated", terminated), ("truncated", truncated)):
            if isinstance(ends, (str, bytes)):
                raise TypeError(f"{game.env!r}.step returned {name} {ends!r:.200}, expected True or False")

        # The reply
        if terminated:
            return None
        if truncated:
            return TRUNCATED
        text = _checked_observation(game.env, observation)
        game.actions.append(turn.completion)
        game.observations.append(text)
        history = self.max_turns_per_row
        if history is not None and len(game.observations) > history:
            return self._context(game, history)
        return text if self.chat else f"\n{text}\n"

    def _context(self, game: _Game, history: int) -> Prompt:
        """Return what the model sees of a game whose first observation is too long ago.

        It reads like the text of a game that began with the first of the last ``history`` observations.
        """
        first = len(game.observations) - history
        content = self.prompt(game.observations[first], game).content
        for action, observation in zip(game.actions[first:], game.observations[first + 1 :], strict=True):
            if isinstance(content, str):
                content += f"{action}\n{observation}\n"
            else:
                answer: Message = {"role": "assistant", "content": action}
                reply: Message = {"role": "user", "content": observation}
                content = (*content, answer, reply)
        return Prompt(content, state=game)


class TokenEnv(TextEnv):
    """String environment as a `TextEnv`: state = all token ids so far, action = next token.

    A turn ends with EOS, a stop sequence or a limit. The text of the turn is the string environment's action. The next
    observation is appended to the state: with the tokenizer's chat template if there is one, else between newlines.
    Observations are False in a rollout's mask, and no text is tokenized twice. With ``history=k`` only the last k
    observations and the actions between them are in the state, which then begins anew in each turn after the first k.

    A `LanguageWrapper` is taken as it is: its instructions come first, and only its words are allowed. A word that no
    other word continues ends its turn by itself; ``max_new_tokens`` follows from the longest word.

    Args:
        env: a `gymnasium.Env` whose observations and actions are strings, or a function that makes one.
        tokenizer: the policy's tokenizer.
        pay_at, history, chat: see `StringGames`.
        arguments: other arguments of `TextVectorEnv`: ``max_turns`` (20 here), ``max_new_tokens`` per turn,
            ``max_length`` per episode (with ``history``, of the state), ``tools``, ``stop``, ``forbidden``,
            ``allowed``, ``render_mode``, ….

    Raises:
        TypeError: if ``env`` is not a Gymnasium environment.
        ValueError: as `TextVectorEnv`.

    Example:
        >>> env = TokenEnv(GuessNumber(), tokenizer=tok, max_prompt_tokens=64)  # doctest: +SKIP
    """

    def __init__(
        self,
        env: StringEnv | Callable[[], StringEnv],
        *,
        tokenizer: PreTrainedTokenizerBase,
        pay_at: Literal["turn", "end"] = "turn",
        history: int | None = None,
        chat: bool = True,
        max_turns: int = MAX_TURNS,
        **arguments: Any,
    ) -> None:
        task = StringGames(env, tokenizer=tokenizer, pay_at=pay_at, history=history, chat=chat)
        arguments = words_as_rule(task, **arguments)
        super().__init__(task, tokenizer=tokenizer, max_turns=max_turns, **arguments)


class TokenVectorEnv(TextVectorEnv):
    """`TokenEnv` in ``num_envs`` slots, with its arguments; ``make_env`` makes a string environment for each episode.

    Raises:
        TypeError: if ``make_env`` is an environment instead of a function.
        ValueError: as `TextVectorEnv`.
    """

    def __init__(
        self,
        make_env: Callable[[], StringEnv],
        *,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: int | None = None,
        pay_at: Literal["turn", "end"] = "turn",
        history: int | None = None,
        chat: bool = True,
        max_turns: int = MAX_TURNS,
        **arguments: Any,
    ) -> None:
        task = StringGames(make_env, tokenizer=tokenizer, pay_at=pay_at, history=history, chat=chat)
        if task.single_env is not None:
            raise TypeError(
                f"make_env is the environment {make_env!r}, which cannot run several episodes at once: "
                "give a function that makes one, such as the class itself"
            )
        arguments = words_as_rule(task, **arguments)
        super().__init__(task, tokenizer=tokenizer, num_envs=num_envs, max_turns=max_turns, **arguments)


def words_as_rule(task: StringGames, **arguments: Any) -> dict[str, Any]:
    """Return arguments of `TextVectorEnv` that allow only the words of a `LanguageWrapper`.

    Args:
        task: the games. If they are not in a `LanguageWrapper`, or take any text, nothing is added.
        arguments: ``allowed`` stays if it is among them; ``max_new_tokens`` follows from the words if it is not.

    Raises:
        ValueError: as `WordRule`.
    """
    wrapper = language_wrapper_of(task.look_at_env())
    if arguments.get("allowed") is not None or wrapper is None or wrapper.words is None:
        return arguments
    rule = WordRule(wrapper.words, task.tokenizer, ends=turn_ends(task.tokenizer).ids, available=_available_words)
    return {"max_new_tokens": rule.num_tokens} | arguments | {"allowed": rule}


def _available_words(turn: Turn) -> tuple[str, ...] | None:
    """Return the words that the environment of a turn allows now; None if it allows all."""
    wrapper = language_wrapper_of(turn.prompt.state.env)
    return None if wrapper is None else wrapper.available_words


def _instructions_of(env: StringEnv) -> str:
    """Return the instructions of a `LanguageWrapper`; empty for another environment."""
    wrapper = language_wrapper_of(env)
    return "" if wrapper is None else wrapper.instructions


def _unreadable_column(turns: Sequence[Turn]) -> dict[str, list[float | None]]:
    """Return, as `Scores.logged`, which turns were no action; empty if no environment says so."""
    column = [turn.prompt.state.unreadable.get(turn.index) for turn in turns]
    if all(entry is None for entry in column):
        return {}
    return {UNREADABLE_KEY: column}


def _checked_observation(env: StringEnv, observation: object) -> str:
    """Return the observation; raise a TypeError unless it is a string."""
    if not isinstance(observation, str):
        raise TypeError(
            f"{env!r} gave the observation {observation!r:.200}, expected a string: TokenEnv needs Text spaces"
        )
    return observation
