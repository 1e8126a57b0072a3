"""Read and check what a vector environment returns: arrays of a step, and keys of ``info``. Knows no policy."""

import logging
from collections.abc import Mapping
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from algos.envs.flatten import flatten, flatten_one
from algos.envs.images import check_pixels

logger = logging.getLogger(__name__)
STEPS_WITHOUT_AN_END = 10_000
"""Steps per slot in which no episode has ended, after which the collection of rollouts warns."""
_WARNED: WeakSet[VectorEnv] = WeakSet()
"""Environments of whose masks a warning was logged."""
_WARNED_OF_OVERWRITTEN: WeakSet[VectorEnv] = WeakSet()
"""Environments of whose last observations a warning was logged."""
_NUM_EQUAL_ENDS: WeakKeyDictionary[VectorEnv, int | None] = WeakKeyDictionary()
"""Number of episodes so far whose last observation equals the first one of the next; None once one differs."""
ENOUGH_EQUAL_ENDS = 10
"""Number of such episodes after which a warning is logged."""


class EnvironmentAdvice:
    """Context that adds a hint at Gymnasium's checker to an exception that an environment raises.

    A class, because it is entered at every step and a generator takes longer.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Add the hint, unless there is no error, or it is an interruption."""
        if isinstance(error, Exception):
            error.add_note(
                "the environment raised this: for mistakes in its reset, step or spaces, run "
                "gymnasium.utils.env_checker.check_env on one environment"
            )


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """Return the environment's autoreset mode, one of Gymnasium's three.

    Raises:
        ValueError: if its metadata does not declare one.
    """
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"{type(env.unwrapped).__name__}.metadata['autoreset_mode'] is {mode!r}, expected a member of "
            "gymnasium.vector.AutoresetMode: set the mode that step() implements, for example "
            "metadata = {'autoreset_mode': AutoresetMode.NEXT_STEP}"
        )
    return mode


def reset_each(env: VectorEnv, seeds: list[int]) -> tuple[Any, dict[str, Any]]:
    """Reset every slot with its own seed.

    Raises:
        ValueError: if the environment does not support it; Gymnasium's own batched ones do not.
    """
    advice = (
        "group_size needs an environment that accepts one reset seed per slot: "
        'gymnasium.make_vec(id, num_envs=n, vectorization_mode="sync")'
    )
    try:
        observation, info = env.reset(seed=seeds)  # type: ignore[arg-type]  # SyncVectorEnv and AsyncVectorEnv do
    except (TypeError, gymnasium.error.Error) as error:
        raise ValueError(f"{type(env.unwrapped).__name__} accepts no list of seeds ({error}): {advice}") from error

    # Each slot starts as the first one with the same seed
    rows = flat_observations(observation, env, method="reset")
    first_slots: dict[int, int] = {}
    for slot, seed in enumerate(seeds):
        first_slot = first_slots.setdefault(seed, slot)
        if not np.array_equal(rows[slot], rows[first_slot]):
            raise ValueError(f"{type(env.unwrapped).__name__} starts differently with equal seeds: {advice}")
    return observation, info


def flat_observations(observation: Any, env: VectorEnv, *, method: str) -> np.ndarray:
    """Flatten a copy of the observations of all slots that ``reset`` or ``step`` returned: ``[N, ...]``.

    Args:
        observation: what it returned.
        env: the environment.
        method: name of the method, for error messages.

    Raises:
        ValueError: if Box observations are no array of the space's shape with a row for each slot, or floats where the
            space has pixels; or if `flatten` refuses them.
    """
    space = env.single_observation_space
    if isinstance(space, spaces.Box):
        if not isinstance(observation, np.ndarray) or observation.shape != (env.num_envs, *space.shape):
            raise ValueError(
                f"{type(env.unwrapped).__name__}.{method} returned a {type(observation).__name__} of shape "
                f"{tuple(np.shape(observation))} as observations, expected a NumPy array of shape "
                f"{(env.num_envs, *space.shape)}, a row for each slot: convert it there, or change the space"
            )
        check_pixels(space, observation)
    return flatten(space, observation).copy()


def by_slot(name: str, values: object, env: VectorEnv, *, slots: int, dtype: type | None = None) -> np.ndarray:
    """Copy what a step returned, one value per slot: ``[N]``. It keeps its dtype, unless ``dtype`` is given.

    Raises:
        ValueError: if the values have another shape, which would be broadcast.
    """
    array = np.asarray(values)
    if array.shape != (slots,):
        raise ValueError(
            f"{type(env.unwrapped).__name__}.step returned {name} of shape {array.shape}, expected one number for each "
            f"of {slots} slots, ({slots},)"
        )
    if dtype is None:
        return array.copy()
    return array.astype(dtype)


def with_final_observations(
    observation: np.ndarray, info: Mapping[str, Any], done: np.ndarray, env: VectorEnv
) -> np.ndarray:
    """Copy the flat observations ``[N, ...]`` of a step; done slots get their final ones, from ``info["final_obs"]``.

    Raises:
        ValueError: if there are no final ones, or a wrapper has transformed the observations but not them.
    """
    if "final_obs" not in info:
        raise ValueError(
            f"{type(env.unwrapped).__name__}.step ended an episode in autoreset mode SAME_STEP without "
            "info['final_obs'], expected there the last observation of each slot that is done: add it, or use "
            "AutoresetMode.NEXT_STEP, in which the step after the end resets"
        )

    # Each final observation in place of the next episode's first one
    space = env.single_observation_space
    shape = observation.shape[1:]
    with_final = observation.copy()
    for slot in np.flatnonzero(done):
        try:
            final = flatten_one(space, info["final_obs"][slot])
        except ValueError as error:
            error.add_note(f"the only row is that of info['final_obs'] of slot {slot}")
            raise
        if np.shape(final) != shape:
            raise ValueError(
                f"{env} returns observations of shape {shape}, but info['final_obs'] has {np.shape(final)}: a wrapper "
                "does not change final_obs. Use AutoresetMode.NEXT_STEP, or wrap each single environment: "
                "gymnasium.make_vec(id, wrappers=[...])"
            )
        with_final[slot] = final
    _warn_of_overwritten(info, done, env)
    _warn_of_equal_ends(done, observation, with_final, env)
    return with_final


def _warn_of_overwritten(info: Mapping[str, Any], done: np.ndarray, env: VectorEnv) -> None:
    """Log a warning, once, if a final observation is the array that the reset after it has returned.

    Gymnasium's ``SyncVectorEnv`` resets before it copies, and keeps what the reset has returned in ``_env_obs``.
    """
    unwrapped = env.unwrapped
    if not isinstance(unwrapped, SyncVectorEnv) or unwrapped in _WARNED_OF_OVERWRITTEN:
        return
    for slot in np.flatnonzero(done):
        if _are_one_array(info["final_obs"][slot], unwrapped._env_obs[slot]):
            _WARNED_OF_OVERWRITTEN.add(unwrapped)
            logger.warning(
                "the environment in slot %d returns the same array from step and reset: unless it is always the same "
                "observation, the reset has written over the last one of the episode, from which time limits are "
                "bootstrapped. Return a copy, or use AutoresetMode.NEXT_STEP instead of SAME_STEP",
                slot,
            )
            return


def _warn_of_equal_ends(done: np.ndarray, observation: np.ndarray, with_final: np.ndarray, env: VectorEnv) -> None:
    """Log a warning, once, if the last observations of the first episodes all equal the first ones of the next.

    The processes of Gymnasium's ``AsyncVectorEnv`` reset before they send what a step has returned, too, but their
    arrays cannot be seen from here.

    Args:
        done: bool ``[N]``.
        observation: flat observations ``[N, ...]``, those of done slots the first ones of the next episode.
        with_final: the same with the last ones.
        env: the environment.
    """
    unwrapped = env.unwrapped
    num_equal = _NUM_EQUAL_ENDS.get(unwrapped, 0)
    if not isinstance(unwrapped, AsyncVectorEnv) or num_equal is None:
        return
    if not np.array_equal(observation[done], with_final[done]):
        _NUM_EQUAL_ENDS[unwrapped] = None
        return
    num_equal += int(done.sum())
    _NUM_EQUAL_ENDS[unwrapped] = num_equal
    if num_equal >= ENOUGH_EQUAL_ENDS:
        _NUM_EQUAL_ENDS[unwrapped] = None
        logger.warning(
            "in %d episodes the last observation equals the first one of the next: if an environment returns the same "
            "array from step and reset, the reset has written over the last one, from which time limits are "
            "bootstrapped. Return a copy, or use AutoresetMode.NEXT_STEP instead of SAME_STEP",
            num_equal,
        )


def _are_one_array(one: object, other: object) -> bool:
    """Whether two observations are one array that can be written into, also as parts of dictionaries or tuples."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_are_one_array(one[name], other[name]) for name in one.keys() & other.keys())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return any(map(_are_one_array, one, other))
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    has_same_place = one.__array_interface__["data"] == other.__array_interface__["data"]
    return has_same_place and one.shape == other.shape and one.strides == other.strides and one.flags.writeable


def flags(info: Mapping[str, Any], key: str, *, slots: int) -> np.ndarray:
    """Read a flag of all slots, bool ``[N]``, from an info dictionary; False where it has none.

    What is no bool for each slot is not read: an environment may mean something else by the key, such as how many wait.
    """
    if key not in info or np.shape(info[key]) != (slots,):
        return np.zeros(slots, dtype=bool)
    values = np.asarray(info[key])
    kinds = {type(value) for value in values.tolist()}
    if not kinds <= {bool, np.bool_, NoneType}:  # Gymnasium collects np.bool_ as objects, with None for no entry
        return np.zeros(slots, dtype=bool)
    return values.astype(bool)


def check_info(info: object, env: VectorEnv, *, method: str) -> None:
    """Raise a ValueError unless the info that ``reset`` or ``step`` returned is a dictionary, as masks are read by key.

    Args:
        info: what it returned.
        env: the environment.
        method: name of the method, for the error message.
    """
    if not isinstance(info, Mapping):
        raise ValueError(
            f"{env}.{method} returned a {type(info).__name__} as info, expected a dictionary whose values have an "
            "entry for each slot: leave out wrappers such as DictInfoToList"
        )


def warn_of_unread_masks(info: Mapping[str, Any], env: VectorEnv) -> None:
    """Log a warning, once, if an environment in this process has a method ``action_masks`` but no mask in its info.

    Args:
        info: of a reset.
        env: the environment.
    """
    if "action_mask" in info or env in _WARNED:
        return
    unwrapped = env.unwrapped
    has_method = hasattr(unwrapped, "action_masks")
    for single in getattr(unwrapped, "envs", ()):
        if isinstance(single, gymnasium.Env) and single.has_wrapper_attr("action_masks"):
            has_method = True
    if has_method:
        _WARNED.add(env)
        logger.warning(
            "%s has a method action_masks, which is not called, and its reset has returned no info['action_mask']: all "
            "actions are allowed. Return the mask there, in reset and in step: info = {'action_mask': "
            "self.action_masks()}",
            env,
        )


def read_action_mask(
    info: Mapping[str, Any], env: VectorEnv, *, no_action_follows: np.ndarray | None = None
) -> np.ndarray | None:
    """Read the mask of available actions, bool ``[N, A]``, from an info dictionary; None if it has none.

    Args:
        info: of a reset or a step.
        env: the environment.
        no_action_follows: bool ``[N]``. If no action is available in such a slot, as is usual at the end of a game, all
            count as available. None: an action follows in every slot.

    Raises:
        ValueError: if it is not a mask of the action space, or allows no action where one follows.
    """
    if "action_mask" not in info:
        return None
    space = env.single_action_space
    num_actions = space.n if isinstance(space, spaces.Discrete) else 1
    all_available = np.ones(num_actions, dtype=bool)

    # Gymnasium fills slots without a mask with zeros or None; all their actions are available.
    has_mask = np.asarray(info.get("_action_mask", np.ones(env.num_envs, dtype=bool)))
    rows = []
    for slot_mask, is_mask in zip(info["action_mask"], has_mask, strict=True):
        row = np.asarray(slot_mask) if is_mask else all_available
        rows.append(row)
    if any(row.shape != all_available.shape for row in rows):
        raise ValueError(
            f"info['action_mask'] has shape {rows[int(has_mask.argmax())].shape} in a slot, expected one entry for "
            f"each action of {space}"
        )
    mask = np.stack(rows).astype(bool)

    # Slots in which no action is available
    closed = ~mask.any(axis=1)
    stuck = closed
    if no_action_follows is not None:
        stuck = closed & ~no_action_follows
    if stuck.any():
        raise ValueError(
            f"info['action_mask'] allows no action in slot {int(stuck.argmax())}, whose episode goes on: allow at "
            "least one, or end the episode there (terminated)"
        )
    mask[closed] = True
    return mask


def merge_masks(masks: np.ndarray | None, done_masks: np.ndarray | None, done: np.ndarray) -> np.ndarray | None:
    """Take the action masks of done slots from ``done_masks``, the others from ``masks``; None allows all actions."""
    if masks is None:
        if done_masks is None:
            return None
        masks = np.ones_like(done_masks)
    elif done_masks is None:
        done_masks = np.ones_like(masks)
    return np.where(done[:, None], done_masks, masks)


def read_lives(info: Mapping[str, Any], earlier: np.ndarray | None) -> np.ndarray | None:
    """Read the lives of all slots, int ``[N]``, from an info dictionary; None if it has none and ``earlier`` is None.

    Args:
        info: of a reset or a step.
        earlier: lives after the step before, which slots without an entry keep.
    """
    if "lives" not in info:
        return earlier
    lives = np.array(info["lives"])
    if lives.dtype.kind not in "iu" or lives.ndim != 1:  # an environment may mean something else by it
        return earlier
    if earlier is not None and "_lives" in info:  # Gymnasium fills slots without an entry with zeros
        lives = np.where(info["_lives"], lives, earlier)
    return lives
