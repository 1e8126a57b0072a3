"""Checks of what a saved agent says about its environment, because the agent may be somebody else's.

Names of our environments and plain data are used. Whatever would be imported, opened or connected to is used only if
the user names it again.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping

import gymnasium

from algos.storage.run_reader import DamagedRunError, EnvironmentRecord
from textenv.prompts.hub import is_hub_name
from textenv.registration import NAMES

MOST_TOKENS = 2**20
"""Largest size of a text environment, which allocates arrays of so many numbers per slot."""
MOST_CHARACTERS = 2**16
"""Characters that a text among the arguments may have."""


class UnnamedCodeError(ValueError):
    """A saved agent needs code that runs only if the user names it."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and _is_integer(value) and 0 <= value <= MOST_TOKENS


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w-]{1,64}", value) is not None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS


def _are_prompts(value: object) -> bool:
    return isinstance(value, list) or _is_text(value)


def _are_stops(value: object) -> bool:
    return _is_text(value) or _is_integer(value) or _are_texts_or_ids(value)


def _are_ids(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, list) and all(map(_is_integer, value)))


def _are_texts_or_ids(value: object) -> bool:
    return isinstance(value, list) and all(_is_text(item) or _is_integer(item) for item in value)


def _is_plain(value: object) -> bool:
    """Return True for numbers, switches, words, None, and lists and dictionaries of these."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_word(name) and _is_plain(item) for name, item in value.items())
    return value is None or _is_number(value) or _is_switch(value) or _is_word(value)


def _are_variables(value: object) -> bool:
    """Return True for variables of a chat template with their values, which are any data."""
    return isinstance(value, dict) and all(_is_word(name) and _is_data(item) for name, item in value.items())


def _is_data(value: object) -> bool:
    """Return True for numbers, switches, texts, None, and lists and dictionaries of these, whose names are texts."""
    if isinstance(value, list):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(_is_text(name) and _is_data(item) for name, item in value.items())
    return value is None or _is_number(value) or _is_switch(value) or _is_text(value)


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_word, value))


def _are_actions(value: object) -> bool:
    """Return True for words, or lists of words, as `textenv.words` takes them; also for ``"free"``."""
    if isinstance(value, list):
        return all(_are_actions(item) for item in value)
    return _is_text(value)


def _is_plain_object(arguments: object) -> bool:
    """Return True for a dictionary of plain data whose names are arguments of an environment itself."""
    if not isinstance(arguments, dict) or not _is_plain(arguments):
        return False
    set_arguments = {name for name, value in arguments.items() if value not in ((), [], None)}
    return not set_arguments & {*OF_MAKING, "task"}


NUMBER = "a number", _is_number
INTEGER = "an integer", _is_integer
SIZE = f"an integer from 0 to {MOST_TOKENS:,}", _is_size
SWITCH = "true or false", _is_switch
WORD = "a word", _is_word
TEXT = "a text", _is_text
PROMPTS = "a file's name or a list of prompts", _are_prompts
STOPS = "a text, a token id, or a list of these", _are_stops
IDS = "a token id, or a list of these", _are_ids
TEXTS_OR_IDS = "a list of texts or token ids", _are_texts_or_ids
ACTIONS = "a list of words", _are_actions
WORDS = "a list of names", _are_words
VARIABLES = "variables of a chat template", _are_variables
OBJECT = "arguments that are plain data", _is_plain_object
Kind = tuple[str, Callable[[object], bool]]
"""What an argument must be: in words, and as a function that returns True if it is."""
OF_TEXT: dict[str, Kind] = {
    "model": TEXT,
    "split": WORD,
    "kl_coef": NUMBER,
    "tool_timeout": NUMBER,
    "chat_template_kwargs": VARIABLES,
    "earlier_turns": WORD,
    "render_mode": WORD,
    "score_while_generating": SWITCH,
    "autoreset_mode": WORD,
    "stop": STOPS,
    "forbidden": IDS,
    "allowed": TEXTS_OR_IDS,
    "overlong": WORD,
    "max_prompt_tokens": SIZE,
    "max_new_tokens": SIZE,
    "min_new_tokens": SIZE,
    "max_turns": SIZE,
    "max_length": SIZE,
}
"""Arguments of every text environment that a saved agent may have."""
OF_GAME: dict[str, Kind] = {"pay_at": WORD, "history": SIZE}
"""Further arguments of a game."""
OF_TASK: dict[str, dict[str, Kind]] = {
    "Periods": {"k": SIZE},
    "Reviews": {"classifier": TEXT},
    "Copy": {"length": SIZE},
    "Sort": {"length": SIZE},
    "GuessNumber": OF_GAME | {"low": INTEGER, "high": INTEGER, "max_guesses": SIZE},
    "Calculator": OF_GAME | {"terms": SIZE, "digits": SIZE},
    "TwentyQuestions": OF_GAME | {"max_questions": SIZE},
    "TextWorld": {
        "games": SIZE,
        "seed": INTEGER,
        "admissible": SWITCH,
        "theme": WORD,
        "nb_rooms": SIZE,
        "nb_objects": SIZE,
        "quest_length": SIZE,
    },
    "Words": OF_GAME
    | {
        "env": TEXT,
        "env_kwargs": OBJECT,
        "max_episode_steps": SIZE,
        "actions": ACTIONS,
        "instructions": TEXT,
        "chat": SWITCH,
    },
    "Program": {"agents": SIZE, "timeout": NUMBER},  # the program itself is run only if it is named
    "KuhnPoker": {"opponents": WORDS, "timeout": NUMBER},
    "TicTacToe": {"opponents": WORDS, "timeout": NUMBER},
    "OpenEnv": {},  # an address is asked only if it is named
    "Prompts": {
        "prompts": PROMPTS,
        "eval_prompts": PROMPTS,
        "prompt_column": TEXT,
        "system_prompt": TEXT,
        "chat": SWITCH,
    },
}
"""Further arguments, by task. ReasoningGym takes any plain data: the settings of its data set."""
OF_MAKING = (
    "num_envs",
    "seed_each",
    "process_timeout",
    "wrappers",
    "vectorization_mode",
    "vector_kwargs",
    "env_id",
    "spec",
    "extract",
)
"""Arguments that decide how an environment is made; no environment has them itself."""


def saved_arguments(saved: EnvironmentRecord, *, replaced: Collection[str]) -> dict[str, object]:
    """Return the arguments of a saved agent's environment, if they are names of ours and plain data.

    Args:
        saved: the environment of a saved agent.
        replaced: names of arguments for which the user gives values of their own; they are left out.

    Raises:
        DamagedRunError: if an argument has the wrong type.
        ValueError: if an argument may import, open or connect to something; says the flag that names it again.
    """
    # Task and arguments
    task = saved["id"].removeprefix("textenv/").removesuffix("-v0")
    is_ours = saved["id"] == f"textenv/{task}-v0" and task in NAMES
    arguments = {name: value for name, value in saved["kwargs"].items() if name not in replaced}
    if is_ours and arguments.pop("task", task) != task:
        raise DamagedRunError(
            f"the environment {saved['id']} has the task {saved['kwargs']['task']!r:.100}, expected {task!r}"
        )

    # An argument in the tables above must be of its kind there. Others must be plain data, and only environments that
    # are not ours, and ReasoningGym, may have them
    kinds: dict[str, Kind] = {}
    if is_ours:
        kinds = OF_TEXT | OF_TASK.get(task, {})
    allows_plain = not is_ours or task == "ReasoningGym"
    refused = {}
    for name, value in arguments.items():
        if name in kinds:
            expected, fits = kinds[name]
            if value is not None and not fits(value):
                raise DamagedRunError(
                    f"the argument {name} of {saved['id']} is {value!r:.100}, expected {expected}: another value is "
                    f"used only if you name it, {_flag({name: value}):.300}"
                )
        elif name in OF_MAKING or not (allows_plain and _is_plain(value)):
            refused[name] = value
    if is_ours and task == "Words" and "env" in arguments:
        env_id = str(arguments["env"])
        if ":" in env_id or imported_module(env_id):
            refused["env"] = env_id
    hub_prompts = [str(arguments[name]) for name in ("prompts", "eval_prompts") if is_hub_name(arguments.get(name))]
    if hub_prompts:
        raise ValueError(
            f"this agent's prompts are of the Hugging Face Hub, which is asked only if you name them: --prompts "
            f"{shlex.quote(hub_prompts[-1]):.300}"
        )
    if refused:
        raise ValueError(
            f"this agent's environment {saved['id']} has arguments that are used only if you name them: "
            f"{_flag(refused):.500}"
        )
    return arguments


def _flag(arguments: Mapping[str, object]) -> str:
    """Return the flag of the command line that names arguments of an environment."""
    return f"--env-kwargs {shlex.quote(json.dumps(arguments))}"


def check_known_environment(env_id: str) -> None:
    """Raise a ValueError if making an environment would import a module that is neither ours nor Gymnasium's.

    A module that is imported already passes.
    """
    module = imported_module(env_id)
    if module:
        raise ValueError(
            f"this agent was trained on {env_id}, for which the module {module} would be imported: if you trust "
            f"it, name it yourself (--env {env_id})"
        )


def imported_module(env_id: str) -> str:
    """Return the module that making an environment would import; empty if it is ours, Gymnasium's or imported."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or env_id.startswith("textenv/"):
        return ""  # if there is none, making it raises an error
    for entry in (spec.entry_point, spec.vector_entry_point):
        if not isinstance(entry, str):
            continue
        module = entry.partition(":")[0]
        if module and not module.startswith("gymnasium.envs.") and module not in sys.modules:
            return module
    return ""


def runs_code(name: str, value: object) -> bool:
    """Return True if an option of a run would import, execute or connect to what it names.

    Args:
        name: name of the option of ``algos train``, such as ``env_kwargs``.
        value: its value, as in a file of options.
    """
    if name in ("prompts", "eval_prompts"):
        return is_hub_name(value)
    if name == "workers":  # a cluster that Ray connects to
        return "://" in str(value)
    if name in ("env_kwargs", "policy_kwargs"):
        return not _is_plain_object(value)
    return name in ("reward", "wrapper", "answer", "logger") and value not in ((), [], "", "None", None)
