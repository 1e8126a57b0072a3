"""What a saved agent says about its environment, which may be somebody else's: names of ours, and plain data.

Anything else that would be looked up, imported, opened or asked is used only if who runs the command names it again.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium

from algos.storage.run_reader import DamagedRunError, EnvironmentRecord
from textenv.registration import NAMES

MOST_TOKENS = 2**20
"""Bound of sizes of a text environment, which allocates arrays of so many numbers per slot."""
LONGEST_TEXT = 2**16
"""Bound of a text among the arguments, in characters."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_integer(value) and 0 <= value <= MOST_TOKENS


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w-]{1,64}", value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _are_prompts(value: Any) -> bool:
    return isinstance(value, list) or _is_text(value)


def _are_stops(value: Any) -> bool:
    return isinstance(value, list) and all(_is_text(item) or _is_integer(item) for item in value)


def _is_plain(value: Any) -> bool:
    """Return True for numbers, switches, words, and lists and objects of these."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_word(name) and _is_plain(item) for name, item in value.items())
    return value is None or _is_number(value) or _is_switch(value) or _is_word(value)


NUMBER = "a number", _is_number
INTEGER = "an integer", _is_integer
SIZE = f"an integer from 0 to {MOST_TOKENS:,}", _is_size
SWITCH = "true or false", _is_switch
WORD = "a word", _is_word
TEXT = "a text", _is_text
PROMPTS = "a file's name or a list of prompts", _are_prompts
STOPS = "a list of texts and token ids", _are_stops
Kind = tuple[str, Callable[[Any], bool]]
"""What is expected, in words, and the function that finds out."""
OF_TEXT: dict[str, Kind] = {
    "model": TEXT, "split": WORD, "kl_coef": NUMBER, "tool_timeout": NUMBER, "render_mode": WORD,
    "score_while_generating": SWITCH, "autoreset_mode": WORD, "stop": STOPS, "forbidden": STOPS, "allowed": STOPS,
    "overlong": WORD,
    **dict.fromkeys(("max_prompt_tokens", "max_new_tokens", "min_new_tokens", "max_turns", "max_length"), SIZE),
}  # fmt: skip
"""Arguments of every text environment that a saved agent may have."""
OF_GAME: dict[str, Kind] = {"pay_at": WORD}
OF_TASK: dict[str, dict[str, Kind]] = {
    "Periods": {"k": SIZE},
    "Reviews": {"classifier": TEXT},
    "Copy": {"length": SIZE},
    "Sort": {"length": SIZE},
    "GuessNumber": OF_GAME | {"low": INTEGER, "high": INTEGER, "max_guesses": SIZE},
    "Calculator": OF_GAME | {"terms": SIZE, "digits": SIZE},
    "TwentyQuestions": OF_GAME | {"max_questions": SIZE},
    "TextWorld": {
        "games": SIZE, "seed": INTEGER, "admissible": SWITCH, "theme": WORD, "nb_rooms": SIZE, "nb_objects": SIZE,
        "quest_length": SIZE,
    },
    "OpenEnv": {},  # an address is asked only if it is named
    "Prompts": {"prompts": PROMPTS, "eval_prompts": PROMPTS, "prompt_column": TEXT, "system_prompt": TEXT,
                "chat": SWITCH},
}  # fmt: skip
"""Further arguments, by task. Those of ReasoningGym are the settings of its data set, as plain data."""


def saved_arguments(saved: EnvironmentRecord, *, renamed: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a saved agent's environment, if they are names of ours and plain data.

    Args:
        saved: the environment of a saved agent.
        renamed: arguments that are given anew, and so are not taken from the file.

    Raises:
        DamagedRunError: if an argument is of another type than it must be.
        ValueError: if an argument could do more than be a value; it says by which flag to name it again.
    """
    task = saved["id"].removeprefix("textenv/").removesuffix("-v0")
    is_ours = saved["id"] == f"textenv/{task}-v0" and task in NAMES
    arguments = {name: value for name, value in saved["kwargs"].items() if name not in renamed}
    if is_ours and arguments.pop("task", task) != task:
        raise DamagedRunError(
            f"the environment {saved['id']} has the task {saved['kwargs']['task']!r:.100}, expected {task!r}"
        )
    kinds = OF_TEXT | OF_TASK.get(task, {}) if is_ours else {}
    any_plain = not is_ours or task == "ReasoningGym"
    refused = {}
    for name, value in arguments.items():
        expected, fits = kinds.get(name, ("", _is_plain))
        if name in kinds and value is not None and not fits(value):
            raise DamagedRunError(f"the argument {name} of {saved['id']} is {value!r:.100}, expected {expected}")
        if name not in kinds and not (any_plain and _is_plain(value) and name not in OF_MAKING):
            refused[name] = value
    if refused:
        flag = f"--env-kwargs {shlex.quote(json.dumps(refused))}"
        raise ValueError(
            f"this agent's environment {saved['id']} has arguments that are used only if you name them: {flag:.500}"
        )
    return arguments


OF_MAKING = (
    "num_envs", "seed_each", "process_timeout", "wrappers", "vectorization_mode", "vector_kwargs", "env_id", "spec",
    "extract",
)  # fmt: skip
"""Arguments that decide how an environment is made, and are no environment's own."""


def check_known_environment(env_id: str) -> None:
    """Raise a ValueError unless an environment is one of ours or Gymnasium's, or its module is imported already."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or env_id.startswith("textenv/"):
        return  # making it says that there is none
    for entry in (spec.entry_point, spec.vector_entry_point):
        module = entry.partition(":")[0] if isinstance(entry, str) else ""
        if module and not module.startswith("gymnasium.envs.") and module not in sys.modules:
            raise ValueError(
                f"this agent was trained on {env_id}, for which the module {module} would be imported: if you trust "
                f"it, name it yourself (--env {env_id})"
            )


def names_that_run_code(options: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return those of a run's options, by name, that would import, execute or connect to what they name.

    Args:
        options: as `algos.cli.arguments.options` returns them: words of the command line, by name.
    """
    return {name: words for name, words in options.items() if _runs_code(name, words)}


def _runs_code(name: str, words: list[str]) -> bool:
    values = [word.partition("=")[2] for word in words]
    if name == "workers":  # a cluster that Ray connects to
        return any("://" in value for value in values)
    if name in ("env-kwargs", "policy-kwargs"):
        return not all(_is_plain_object(value) for value in values)
    if name == "logger":
        return any(value not in ("", "None") for value in values)
    return name in ("reward", "wrapper")


def _is_plain_object(text: str) -> bool:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict) and _is_plain(arguments) and not arguments.keys() & {*OF_MAKING, "task"}
