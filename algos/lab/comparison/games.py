"""Which cases play the same game: an environment in words is the game that it describes, its turns are the steps."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from algos.envs.wrapping import NO_LIMIT, VECTOR_ONLY
from algos.lab.comparison.text_games import parts_of_text_game
from algos.make import WORDS
from algos.recipe import IMPORT
from textenv.words.describing import KNOWN_PACKAGES

LIMIT = "max_episode_steps"
"""Argument with a limit of steps; None is the registered one."""
NO_PART_OF_A_GAME = (*VECTOR_ONLY, "env_wrappers", "render_mode")
"""Arguments of a control environment that do not make another game of it; but see `game_of` for wrappers."""
TEXT = "textenv/"
"""How the ids of this kit's environments of text begin."""
PAY_AT_MOST_1 = tuple(f"{TEXT}{task}-v0" for task in ("Periods", "Reviews", "Copy", "Sort", "ReasoningGym"))
"""Environments of text whose best return is 1 with all arguments."""
NATS_A_STEP = ("policy/entropy", "policy/approx_kl", "update/kl", "reference/kl_per_step")
"""Metrics that are means over the policy's steps; those of a turn are the sums over its tokens."""
STEPS_THAT_KEEP_REWARDS = (
    gymnasium.ObservationWrapper.step,
    gymnasium.ActionWrapper.step,
    gymnasium.vector.VectorObservationWrapper.step,
    gymnasium.vector.VectorActionWrapper.step,
)
"""The `step` of wrappers that change nothing but observations or actions."""


def game_of(env_id: str, env_kwargs: Mapping[str, Any]) -> str:
    """Return the name of the game that an environment is: its id, with the arguments that differ from its own.

    Returns of one game are on one scale. So the name has a limit of steps that is not the registered one, and the
    wrappers, but for those of which it is known that they change observations or actions only. Of text it has what
    the policy is asked and paid for (`parts_of_text_game`), but not, for instance, its model or ``max_new_tokens``.

    Args:
        env_id: id without a module, or name of a function.
        env_kwargs: arguments of the environment. ``textenv/Words-v0`` has the id of the game under ``env`` and the
            game's arguments under ``env_kwargs``; a limit of its own, of steps or turns, is one of the game's steps.

    Example:
        >>> game_of("FrozenLake-v1", {"is_slippery": False, "map_name": "4x4"})
        'FrozenLake-v1 (is_slippery=false)'
        >>> game_of("textenv/Words-v0", {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}})
        'FrozenLake-v1 (is_slippery=false)'
        >>> game_of("CartPole-v1", {"wrappers": ["gymnasium.wrappers:FlattenObservation", "shaped.py:Halved"]})
        'CartPole-v1 (wrappers="Halved")'
        >>> game_of("textenv/Periods-v0", {"k": 4, "model": "smollm2"})
        'textenv/Periods-v0 (k=4)'
    """
    if _is_described(env_id, env_kwargs):
        return game_of(_game_id(env_kwargs), {**_arguments_of_game(env_kwargs), "wrappers": _wrappers(env_kwargs)})

    # Arguments that make another game
    if env_id.startswith(TEXT):
        parts = parts_of_text_game(env_id, env_kwargs)
    else:
        parts = _parts_of_control(env_id, env_kwargs)

    # Wrappers that may change rewards
    names_of_wrappers = [_name_of_wrapper(wrapper) for wrapper in _wrappers(env_kwargs) if not _keeps_rewards(wrapper)]
    if names_of_wrappers:
        parts.append(f"wrappers={json.dumps(', '.join(names_of_wrappers))}")
    if not parts:
        return env_id
    return f"{env_id} ({', '.join(parts)})"


def _parts_of_control(env_id: str, env_kwargs: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a control environment that differ from the registered ones, as texts."""
    spec = gymnasium.registry.get(env_id)
    defaults: dict[str, Any] = {}
    if spec is not None:
        defaults = {LIMIT: spec.max_episode_steps, **spec.kwargs}
    limit = env_kwargs.get(LIMIT, 0)
    if limit is None or (limit == NO_LIMIT and defaults.get(LIMIT) is None):
        env_kwargs = {name: value for name, value in env_kwargs.items() if name != LIMIT}
    parts = []
    for name, value in sorted(env_kwargs.items()):
        if name not in NO_PART_OF_A_GAME and (name not in defaults or value != defaults[name]):
            parts.append(f"{name}={json.dumps(value, default=_name)}")
    return parts


def solved_return(spec: EnvSpec | None) -> float | None:
    """Return the return at which the game of an environment with this specification counts as solved, or None.

    It is Gymnasium's ``reward_threshold``; that of FrozenLake is for slippery ice, and without slipping 1 is. If a
    wrapper may change the rewards, or the limit of steps is not the registered one, it is None; and for text if another
    game than the registered one is played, unless it is one of `PAY_AT_MOST_1`.
    """
    if spec is None or not all(map(_keeps_rewards, _wrappers(spec.kwargs))):
        return None
    game_spec: EnvSpec | None = spec
    game_kwargs: Mapping[str, Any] = spec.kwargs
    if describes_a_game(spec):
        game_spec = gymnasium.registry.get(_game_id(spec.kwargs))
        game_kwargs = _arguments_of_game(spec.kwargs)
    if game_spec is None:
        return None
    is_text = game_spec.id.startswith(TEXT)
    if is_text and game_spec.id not in PAY_AT_MOST_1 and parts_of_text_game(game_spec.id, game_kwargs):
        return None
    limit = game_kwargs.get(LIMIT)
    if limit not in (None, game_spec.max_episode_steps or NO_LIMIT):
        return None
    if game_spec.id.startswith("FrozenLake") and not game_kwargs.get("is_slippery", True):
        return 1.0
    return game_spec.reward_threshold


def describes_a_game(spec: EnvSpec | None) -> bool:
    """Return True if an environment with this specification is another one in words."""
    return spec is not None and _is_described(spec.id, spec.kwargs)


def in_steps_of_the_game(
    history: Iterable[dict[str, float]], *, env_id: str, env_kwargs: Mapping[str, Any]
) -> list[dict[str, float]]:
    """Return the metrics of a run's iterations with counts, lengths and `NATS_A_STEP` by steps of the game.

    In ``textenv/Words-v0`` the policy's steps are tokens, and one turn is one step of the game. ``tokens`` then has
    the former ``steps``. Fractions, such as that of clipped ratios, stay those of tokens, and other environments'
    metrics as they are.
    """
    rows = [*history]
    if not _is_described(env_id, env_kwargs) or not all("rollout/turns" in row for row in rows):
        return rows
    turns = 0
    converted = []
    for row in rows:
        # Counts
        turns += int(row["rollout/turns"])
        new_row = row | {"steps": turns, "tokens": row["steps"], "rollout/steps": row["rollout/turns"]}
        if "time/steps_per_second" in row and row["steps"]:
            new_row["time/steps_per_second"] = row["time/steps_per_second"] * turns / row["steps"]

        # Lengths and sums, by the tokens of a turn without those that an update samples (VinePPO)
        tokens_a_turn = 1.0  # if there was none to learn from
        if row["rollout/turns"]:
            tokens_a_turn = (row["rollout/steps"] - row.get("update/steps", 0)) / row["rollout/turns"]
        if "episode/length" in row:
            new_row["episode/length"] = row["episode/length"] / tokens_a_turn
        for name in NATS_A_STEP:
            if name in row:
                new_row[name] = row[name] * tokens_a_turn
        converted.append(new_row)
    return converted


def _wrappers(env_kwargs: Mapping[str, Any]) -> list[object]:
    """Return what wraps each environment, the innermost first."""
    return [*(env_kwargs.get("env_wrappers") or ()), *(env_kwargs.get("wrappers") or ())]


def _keeps_rewards(wrapper: object) -> bool:
    """Return True if a wrapper is a class that changes observations or actions only.

    Names are looked up in the packages of known environments alone: a module that a saved run names is not imported.
    """
    if isinstance(wrapper, Mapping):  # in the plain form of a recipe
        wrapper = wrapper.get(IMPORT)
    if isinstance(wrapper, str):
        module_name, _, name = wrapper.partition(":")
        package, _, _ = module_name.partition(".")
        if package not in KNOWN_PACKAGES:
            return False
        try:
            wrapper = getattr(importlib.import_module(module_name), name, None)
        except ImportError:
            return False
    return isinstance(wrapper, type) and getattr(wrapper, "step", None) in STEPS_THAT_KEEP_REWARDS


def _name_of_wrapper(wrapper: object) -> str:
    """Return the name of a wrapper without its module or file."""
    if isinstance(wrapper, Mapping):  # in the plain form of a recipe
        wrapper = wrapper.get(IMPORT)
    if isinstance(wrapper, str):
        return wrapper.rpartition(":")[2]
    return _name(wrapper)


def _name(value: object) -> str:
    """Return the name of a function or class, or that of an object's class."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _is_described(env_id: str, env_kwargs: Mapping[str, Any]) -> bool:
    """Return True for ``textenv/Words-v0`` with the id of a game."""
    return env_id == WORDS and isinstance(env_kwargs.get("env"), str)


def _game_id(env_kwargs: Mapping[str, Any]) -> str:
    """Return the id, without a module, of the game that ``textenv/Words-v0`` describes."""
    return env_kwargs["env"].rpartition(":")[2]


def _arguments_of_game(env_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the game that ``textenv/Words-v0`` describes, with the limit that its own arguments set.

    A turn is a step of the game, so ``max_turns`` below the game's limit is one, too.
    """
    arguments = dict(env_kwargs.get("env_kwargs") or {})
    if env_kwargs.get(LIMIT) is not None:
        arguments[LIMIT] = env_kwargs[LIMIT]

    # The game's limit, given or registered
    limit = arguments.get(LIMIT)
    spec = gymnasium.registry.get(_game_id(env_kwargs))
    if limit is None and spec is not None:
        limit = spec.max_episode_steps

    max_turns = env_kwargs.get("max_turns")
    if isinstance(max_turns, int) and (limit in (None, NO_LIMIT) or max_turns < limit):
        arguments[LIMIT] = max_turns
    return arguments
