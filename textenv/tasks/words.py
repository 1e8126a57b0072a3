"""``textenv/Words-v0``: any Gymnasium environment, put into words and played by a language model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from textenv.envs.limits import check_at_least
from textenv.envs.string_env import MAX_TURNS, StringGames, words_as_rule
from textenv.envs.turn import Turn
from textenv.importing import load_function, read_module
from textenv.prompts.tokenize import prompt_ids, reply_ids, separate_ids
from textenv.words.wrapper import LanguageWrapper, Words, language_wrapper_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.prompts.prompts import Prompt

logger = logging.getLogger(__name__)
MAX_LENGTH = 1024
"""Default maximum number of tokens of an episode; less if the model reads less."""
FREE_TOKENS = 32
"""Default ``max_new_tokens`` of free text."""
TURNS_WITHOUT_LIMIT = 200
"""Default ``max_turns`` for an environment in words that has no time limit."""
MEASURED_EPISODES = 4
"""Number of episodes from which lengths are estimated."""
MEASURED_TURNS = 50
"""Maximum number of turns of each of them."""


def make_words(
    tokenizer: PreTrainedTokenizerBase,
    limits: Mapping[str, Any],
    *,
    env: str = "",
    env_kwargs: Mapping[str, Any] | None = None,
    env_wrappers: Sequence[str | Callable[[gymnasium.Env], gymnasium.Env]] = (),
    max_episode_steps: int | None = None,
    describe: str | Callable[..., str] | None = None,
    actions: Words | Literal["free"] | None = None,
    instructions: str | None = None,
    pay_at: Literal["turn", "end"] = "turn",
    history: int | None = None,
    chat: bool = True,
) -> tuple[StringGames, dict[str, Any]]:
    """Make the task that plays an environment in words.

    An environment with Text spaces is played as it is. An episode of the environment is an episode of text. If its text
    does not fit into ``max_length``, it is truncated, which a warning says in advance: the embedded model reads 128
    tokens. With ``history=1`` the model sees one observation at a time, which makes room for any number of turns.

    Args:
        tokenizer: the policy's tokenizer.
        limits: arguments of the user for `TextVectorEnv`, from which the other limits follow.
        env: Gymnasium id; ``module:id`` first imports the module that registers it.
        env_kwargs: arguments for ``gymnasium.make(env)``.
        env_wrappers: functions that wrap each environment before it is put into words, the innermost first, or their
            names, ``package.module:function`` or ``file.py:function``.
        max_episode_steps: time limit of the environment, in its steps; None: its own. (`gymnasium.make` takes this
            argument for itself and counts tokens: give it in ``env_kwargs`` there.)
        describe: see `LanguageWrapper`; or the function's name, ``file.py:function``.
        actions: see `LanguageWrapper`. Without a chat template, free text needs ``stop=["\\n"]``, because a model that
            only continues text does not end its turns.
        instructions: see `LanguageWrapper`.
        pay_at, history, chat: see `StringGames`.

    Returns:
        The task, and arguments of `TextVectorEnv`: the allowed words, and the limits that the user did not set.

    Raises:
        ValueError: if there is no such environment, its actions or observations cannot be put into words, or the first
            observation is too long for the model.
    """
    # The environment
    if history is not None:
        check_at_least("history", history, 1)
    if not isinstance(env, str):
        raise TypeError(f"env is {env!r:.200}, expected the id of an environment, such as 'FrozenLake-v1'")
    if not env:
        raise ValueError("textenv/Words-v0 needs env=, the id of the environment to play, such as env='FrozenLake-v1'")
    module, _, env_id = env.rpartition(":")
    if module:
        read_module(module)
    make_kwargs = dict(env_kwargs or {})
    if max_episode_steps is not None:
        make_kwargs["max_episode_steps"] = max_episode_steps
    wrapper_functions: list[Any] = []
    for wrapper in env_wrappers:
        if isinstance(wrapper, str):
            wrapper_functions.append(load_function(wrapper))
        else:
            wrapper_functions.append(wrapper)
    description: Any = describe
    if isinstance(describe, str):
        description = load_function(describe)
    in_words = {"describe": description, "actions": actions, "instructions": instructions}
    try:
        make_env = partial(make_in_words, gymnasium.spec(env_id), make_kwargs, wrapper_functions, in_words)
        single_env = make_env()
    except gymnasium.error.Error as error:
        raise ValueError(
            f"env is {env!r}, which cannot be made: {error} Name an environment of Gymnasium, such as FrozenLake-v1, "
            "or one of your own as module:id"
        ) from error

    # The allowed words, and the limits
    arguments = words_as_rule(StringGames(single_env, tokenizer=tokenizer), **limits)
    arguments |= _limits(make_env, single_env, tokenizer, arguments, chat=chat, history=history)
    single_env.close()
    games = StringGames(make_env, tokenizer=tokenizer, pay_at=pay_at, history=history, chat=chat)
    return games, {name: value for name, value in arguments.items() if name not in limits}


def make_in_words(
    spec: EnvSpec,
    make_kwargs: Mapping[str, Any],
    wrappers: Sequence[Callable[[gymnasium.Env], gymnasium.Env]],
    in_words: Mapping[str, Any],
) -> gymnasium.Env:
    """Make an environment, wrap it, and put it into words; one with Text spaces stays as it is.

    Raises:
        ValueError: if it has Text spaces, but arguments of `LanguageWrapper` are given.
    """
    env = gymnasium.make(spec, **make_kwargs)
    for wrap in wrappers:
        env = wrap(env)
    if not (isinstance(env.observation_space, spaces.Text) and isinstance(env.action_space, spaces.Text)):
        return LanguageWrapper(env, **in_words)
    names = [name for name, value in in_words.items() if value is not None]
    if names:
        raise ValueError(f"{spec.id} reads and writes texts already: leave out {', '.join(names)}")
    return env


def _limits(
    make_env: Callable[[], gymnasium.Env],
    env: gymnasium.Env,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any],
    *,
    chat: bool,
    history: int | None,
) -> dict[str, int]:
    """Return all limits of `TextVectorEnv`: those among the arguments, and others that follow from some episodes.

    Args:
        make_env: makes an environment for each of these episodes.
        env: such an environment, for its time limit and its words.
        tokenizer: the policy's tokenizer.
        arguments: limits that are set already.
        chat: see `StringGames`.
        history: see `StringGames`.
    """
    # Turns
    wrapper = language_wrapper_of(env)
    default_turns = MAX_TURNS
    if wrapper is not None:
        default_turns = TURNS_WITHOUT_LIMIT
    if env.spec is not None and env.spec.max_episode_steps is not None:
        default_turns = env.spec.max_episode_steps
    max_turns = arguments.get("max_turns", default_turns)
    max_new_tokens = arguments.get("max_new_tokens", FREE_TOKENS)

    # Lengths of prompts and replies, with room for longer ones
    games = StringGames(make_env, tokenizer=tokenizer, chat=chat)
    first_length, later_length, reply_length = _observed_lengths(games, tokenizer)
    prompt_length = first_length
    if history is not None:  # then later observations begin a text, too
        prompt_length = max(first_length, later_length)
    max_prompt_tokens = arguments.get("max_prompt_tokens", _with_room(prompt_length))

    # All that the model sees at once: the whole episode, or its last turns
    num_turns = max_turns
    if history is not None:
        num_turns = min(max_turns, history)
    max_length = arguments.get("max_length")
    if max_length is None:
        max_length = min(MAX_LENGTH, tokenizer.model_max_length)
        if reply_length:
            max_reply_tokens = _with_room(reply_length)
            tokens_with_room = max_prompt_tokens + num_turns * max_new_tokens + (num_turns - 1) * max_reply_tokens
            max_length = min(max_length, tokens_with_room)
    num_needed = prompt_length + num_turns * max_new_tokens + (num_turns - 1) * reply_length
    if num_needed > max_length:
        turns_after_first = (max_length - prompt_length) // max(1, reply_length + max_new_tokens)
        logger.warning(
            "%d turns may have %d tokens, but max_length is %d: longer episodes are truncated, after about %d turns. "
            "history=1 shows the model one observation at a time; shorter descriptions (describe=) need less",
            num_turns,
            num_needed,
            max_length,
            turns_after_first + 1,
        )
    if prompt_length + max_new_tokens > max_length:
        raise ValueError(
            f"the first observation has {prompt_length} tokens and an action up to {max_new_tokens}, but max_length is "
            f"{max_length}, and the model reads at most {tokenizer.model_max_length}: describe it in fewer words "
            "(describe=, instructions=), or take a model that reads more"
        )
    return {
        "max_turns": max_turns,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": min(max_prompt_tokens, max_length - max_new_tokens),
        "max_length": max_length,
    }


def _with_room(length: int) -> int:
    """Return a limit for texts of which the longest seen has this length."""
    return length + length // 2 + 8


def _observed_lengths(games: StringGames, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    """Play some episodes with random words; return the tokens of the longest texts.

    Without a `LanguageWrapper` there are no words, so nothing is played, and there is no later text.

    Returns:
        Of the longest prompt, of the longest prompt that shows a later observation, and of the longest reply.
    """
    rng = np.random.default_rng(0)
    first_length = 0
    later_length = 0
    reply_length = 0
    prompts = games.sample_prompts(range(MEASURED_EPISODES), seed=0)
    for prompt in prompts:
        ids = prompt_ids(prompt, tokenizer)
        first_length = max(first_length, len(ids))
        env_in_words = language_wrapper_of(prompt.state.env)

        # Play some turns
        for index in range(MEASURED_TURNS):
            if env_in_words is None:
                break
            word_ids = separate_ids(_random_text(env_in_words, rng), tokenizer)
            turn = Turn(prompt, ids, ids, word_ids, terminated=True, tokenizer=tokenizer, index=index)
            (reply,) = games.reply([turn])
            if not isinstance(reply, str):  # the episode is over
                break
            reply_length = max(reply_length, len(reply_ids(reply, prompt, [*ids, *word_ids], tokenizer)))
            later_prompt = games.prompt(prompt.state.observations[-1], prompt.state)
            later_length = max(later_length, len(prompt_ids(later_prompt, tokenizer)))
        _close(games, prompt, tokenizer)
    return first_length, later_length, reply_length


def _random_text(wrapper: LanguageWrapper, rng: np.random.Generator) -> str:
    """Draw the text of an action that is available."""
    if wrapper.available_actions is not None:
        [choice] = wrapper.action_words.choices
        return choice[int(rng.choice(wrapper.available_actions))]
    words = [str(rng.choice(choice)) for choice in wrapper.action_words.choices]
    return " ".join(words)


def _close(games: StringGames, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """End an episode, which closes its environment."""
    games.score([Turn(prompt, [], [], [], terminated=True, tokenizer=tokenizer)])
