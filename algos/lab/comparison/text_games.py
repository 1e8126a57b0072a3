"""Which environments of text are the same game: those that pay the same for the same answers to the same prompts."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from algos.lab.comparison.fingerprint import fingerprint
from algos.make import absolute_paths
from algos.recipe import IMPORT, Recipe
from textenv.state import used_objects

NO_PART_OF_A_TEXT_GAME = frozenset({
    # The policy, and what it is charged
    "model", "tokenizer", "kl_coef", "penalty",
    # How episodes are generated, and which prompts a training draws
    "num_envs", "vectorization_mode", "vector_kwargs", "autoreset_mode", "render_mode", "score_while_generating",
    "sampler", "timeout", "tool_timeout",
    # What the policy may write, and how it is shown the prompts, as wrappers of actions and of observations do
    "allowed", "forbidden", "stop", "min_new_tokens", "max_new_tokens", "max_length", "tools",
    "system_prompt", "chat", "chat_template_kwargs", "earlier_turns", "history", "describe", "instructions",
    # When rewards are paid, whose sum is the same; the name of the task, which the id has; and wrappers, for `game_of`
    "pay_at", "task", "wrappers", "env_wrappers",
})  # fmt: skip
"""Arguments that change neither the prompts nor what is paid for an answer; all others make another game."""
MAX_PROMPT_TOKENS = "max_prompt_tokens"
"""Argument that makes another game only with ``overlong="skip"``, which leaves longer prompts out."""
MAX_SHOWN_CHARACTERS = 40
"""Maximum length of a value in the name of a game."""
DIGITS_OF_DIGEST = 6
"""Length of the digest in the name of a game."""


def parts_of_text_game(env_id: str, env_kwargs: Mapping[str, Any]) -> list[str]:
    """Return what makes an environment of text another game than the one of its id: the parts of its name.

    Files are named without their folders, long lists by their lengths, and objects by their classes. The last part is
    then a digest of the whole values, so that two files of one name in different folders are different games.

    Args:
        env_id: id of an environment of ``textenv``, without a module.
        env_kwargs: its arguments, as they are or in the plain form of a recipe.

    Example:
        >>> parts_of_text_game("textenv/Periods-v0", {"k": 4, "max_new_tokens": 8})
        ['k=4']
    """
    # Arguments that may make another game
    arguments = {}
    for name, value in sorted(env_kwargs.items()):
        is_part = name not in NO_PART_OF_A_TEXT_GAME and (name != MAX_PROMPT_TOKENS or _skips_prompts(env_kwargs))
        if is_part and value is not None:
            arguments[name] = value
    if not arguments:
        return []

    # Those that differ from the task's own
    defaults = _defaults(env_id)
    plain_arguments = {}
    for name, value in _plain(env_id, arguments).items():
        if name not in defaults or value != defaults[name]:
            plain_arguments[name] = value

    # What is shown of them, and a digest if that is not all
    parts = [f"{name}={_shown(value)}" for name, value in plain_arguments.items()]
    code = _code_without_a_name(env_id, {name: arguments[name] for name in plain_arguments})
    if code or any(_shown(value) != _json(value) for value in plain_arguments.values()):
        exact = json.dumps([plain_arguments, code], sort_keys=True)
        digest = hashlib.sha256(exact.encode()).hexdigest()
        parts.append(f"digest={digest[:DIGITS_OF_DIGEST]}")
    return parts


def _skips_prompts(env_kwargs: Mapping[str, Any]) -> bool:
    """Return True if prompts that are too long are left out."""
    return env_kwargs.get("overlong") == "skip"


def _defaults(env_id: str) -> dict[str, object]:
    """Return the default values of a task's arguments, by their names."""
    from textenv.extras.reasoning_gym import ReasoningGym
    from textenv.tasks.builtin import GAMES, TASKS  # loads torch

    task = env_id.removeprefix("textenv/").removesuffix("-v0")
    defaults: dict[str, object] = {"split": "train", "overlong": "error"}
    makers: dict[str, Any] = {**TASKS, "ReasoningGym": ReasoningGym}
    for name, (make_game, limits) in GAMES.items():
        makers[name] = make_game
        if name == task:
            defaults |= limits
    if task in makers:
        for parameter in inspect.signature(makers[task]).parameters.values():
            defaults[parameter.name] = parameter.default
    return defaults


def _plain(env_id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as plain data with absolute paths; one function in a list, or by itself, is its name."""
    plain: dict[str, Any] = {}
    for name, value in Recipe(env=env_id, env_kwargs=absolute_paths(arguments)).to_dict()["env_kwargs"].items():
        if name == "reward" and isinstance(value, list) and len(value) == 1:
            [value] = value
        if isinstance(value, dict) and value.keys() == {IMPORT}:
            value = value[IMPORT]
        plain[name] = value
    return plain


def _shown(value: object) -> str:
    """Return a short text for plain data: JSON, without the folders of a path and the attributes of an object."""
    # Objects and texts
    if isinstance(value, dict) and IMPORT in value:
        value = str(value[IMPORT]).rpartition(":")[2]
    if isinstance(value, str):
        text = value.rstrip("/").rpartition("/")[2]
        if len(text) > MAX_SHOWN_CHARACTERS:
            text = f"{text[:MAX_SHOWN_CHARACTERS]}…"
        return _json(text)

    # Lists and mappings, if they are short
    if isinstance(value, list):
        text = f"[{', '.join(map(_shown, value))}]"
    elif isinstance(value, dict):
        entries = [f"{_json(key)}: {_shown(part)}" for key, part in value.items()]
        text = f"{{{', '.join(entries)}}}"
    else:
        return _json(value)
    if len(text) > MAX_SHOWN_CHARACTERS:
        return f"{len(value)} entries"
    return text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _code_without_a_name(env_id: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the code of arguments with functions that their names do not lead to, such as lambdas."""
    if not any(map(_has_unnamed_function, arguments.values())):
        return {}
    digests = fingerprint(Recipe(env=env_id, env_kwargs=arguments))
    return {name: digest for name, digest in digests.items() if name.startswith("env_kwargs.")}


def _has_unnamed_function(value: object) -> bool:
    """Return True if a value uses a function that is not what its module has under its name."""
    for _, part in used_objects(value):
        if isinstance(part, FunctionType):
            named: object = sys.modules.get(part.__module__)
            for name in part.__qualname__.split("."):
                named = getattr(named, name, None)
            if named is not part:
                return True
    return False
