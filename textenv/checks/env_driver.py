"""`Probe`: uniform access for the checker to slot 0 of any text environment, single or vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

LONGEST = 4000
"""Steps after which an episode counts as endless."""


class Seen(NamedTuple):
    """Result of a step in slot 0."""

    ids: list[int]
    """The state; at the end of an episode, the final one."""
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def done(self) -> bool:
        """True if the episode is over."""
        return self.terminated or self.truncated


class Probe:
    """Slot 0 of an environment; other slots, if any, step with other tokens that do not end their turns.

    Args:
        env: a single or vector environment with the spaces of `TextEnv` and `TextVectorEnv`.

    Raises:
        ValueError: if the spaces are different.
    """

    def __init__(self, env: Any) -> None:
        inner = own = env.unwrapped
        if not isinstance(env, VectorEnv):
            # DISABLED keeps the final state, so that a single environment is checked without autoreset.
            inner = getattr(inner, "vector", None) or SyncVectorEnv([lambda: env], autoreset_mode="Disabled")
        self.vector: Any = inner
        self.observation_space, self.action_space = inner.single_observation_space, inner.single_action_space
        if not isinstance(self.observation_space, spaces.Dict) or set(self.observation_space) != {"tokens", "length"}:
            raise ValueError(f"observation_space is {self.observation_space}, expected Dict(tokens=..., length=...)")
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"action_space is {self.action_space}, expected Discrete(size of the vocabulary)")
        self.tokenizer = getattr(inner, "tokenizer", None) or getattr(own, "tokenizer", None)
        self.eos, self.pad = (getattr(self.tokenizer, f"{name}_token_id", None) for name in ("eos", "pad"))
        ends = getattr(inner, "ends", None)
        self.ends = (
            {self.eos, self.pad}
            if ends is None
            else {self.eos, self.pad, *ends.ids, *np.flatnonzero(ends.may_complete)}
        )
        """Tokens that end a turn, or may end one, or are never chosen (padding)."""
        self.conversation = hasattr(getattr(inner, "task", None), "reply")
        """True if the environment replies: then the end of a turn need not end the episode."""
        self.mode = AutoresetMode(inner.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.observation: dict[str, np.ndarray] = {}
        self._mask: np.ndarray | None = None
        self.mask_before: np.ndarray | None = None
        """Bool ``[num_envs, n]``: the action mask before the last step."""
        self._words: list[int] = []
        self._ended = np.zeros(inner.num_envs, dtype=bool)

    def reset(self, seed: int | None) -> list[int]:
        """Reset all slots; return the ids of slot 0."""
        self.observation, info = self.vector.reset(seed=seed)
        self._ended[:] = False
        self._note(info)
        return self.ids

    @property
    def ids(self) -> list[int]:
        """State of slot 0."""
        return self.observation["tokens"][0, : length_of(self.observation["length"][0])].tolist()

    @property
    def mask(self) -> np.ndarray | None:
        """Bool ``[n]``: the tokens allowed in slot 0; None if all are."""
        return None if self._mask is None else self._mask[0]

    @property
    def dealt(self) -> int | None:
        """Number of prompts sampled in all slots since the seed; None if the environment does not report it."""
        order = getattr(self.vector, "prompt_order", None)
        return None if order is None else int(order["position"])

    def observations(self) -> Iterator[dict[str, np.ndarray]]:
        """Iterate over the observation of each slot."""
        for slot in range(self.vector.num_envs):
            yield {name: np.asarray(column[slot]) for name, column in self.observation.items()}

    def may(self, token: int) -> bool:
        """Return True if slot 0 may choose this token now."""
        return self.mask is None or bool(self.mask[token])

    def word(self, number: int) -> int:
        """Return a token for slot 0 that ends nothing, if the mask allows one; varies with ``number``."""
        self._revive()
        return self.scripted(0, number, self.mask, words=True)

    def scripted(self, row: int, number: int, mask: np.ndarray | None, *, words: bool = False) -> int:
        """Token ``number`` of episode ``row`` in a fixed script: some words, then EOS, as far as the mask allows."""
        if not words and number >= 2 + row and self.eos is not None and (mask is None or mask[self.eos]):
            return int(self.eos)
        ends, n = self.ends, int(self.action_space.n)
        open_now = range(n) if mask is None else np.flatnonzero(mask).tolist()
        plain = [token for token in open_now if token not in ends] if len(open_now) < n or len(ends) > n // 2 else None
        if plain is None:
            return next(t for t in ((7 * number + 3 * row + i + n // 2) % n for i in range(n)) if t not in ends)
        return int((plain or open_now)[(number + row) % len(plain or open_now)])

    def longest(self, most: int) -> int:
        """Count the words that fit into the episode from here, up to ``most``."""
        for count in range(1, most):
            if self.step(self.word(count)).done:
                return count
        return most

    def step(self, token: int) -> Seen:
        """Step with a token in slot 0."""
        self._revive()
        actions = np.full(self.vector.num_envs, token, dtype=np.int64)
        for slot in range(1, self.vector.num_envs):
            actions[slot] = self.scripted(slot, 0, None if self._mask is None else self._mask[slot], words=True)
        return self._step(actions)[0]

    def _step(self, actions: np.ndarray) -> list[Seen]:
        self.mask_before = self._mask
        self.observation, reward, terminated, truncated, info = self.vector.step(actions)
        self._ended = terminated | truncated
        self._note(info)
        found = []
        for slot, observation in enumerate(self.observations()):
            said = _of_slot(info, slot)
            if self._ended[slot] and self.mode is AutoresetMode.SAME_STEP:
                observation = said.get("final_obs") or {"tokens": np.zeros(0, dtype=np.int64), "length": 0}
                said |= _of_slot(info.get("final_info", {}), slot)
            ids = observation["tokens"][: length_of(observation["length"])].tolist()
            found.append(Seen(ids, float(reward[slot]), bool(terminated[slot]), bool(truncated[slot]), said))
        return found

    def play(self, seed: int, episodes: int) -> Iterator[tuple[int, int, list[int], Seen]]:
        """Play the script of `scripted`: that many episodes if there is one slot, else the first episode of each slot.

        Yields:
            Episode, index of the step, the ids before the step, and its result.
        """
        slots = self.vector.num_envs
        self.reset(seed)
        if slots == 1:
            for row in range(episodes):
                yield from self._play_one(row)
                self.next_episode()
            return
        playing, number = np.ones(slots, dtype=bool), 0
        while playing.any():
            self._revive()
            before = list(self.observations())
            masks = [None] * slots if self._mask is None else list(self._mask)
            actions = np.array([self.scripted(slot, number, masks[slot]) for slot in range(slots)])
            for slot, seen in enumerate(self._step(actions)):
                if playing[slot]:
                    tokens, length = before[slot]["tokens"], length_of(before[slot]["length"])
                    yield slot, number, tokens[:length].tolist(), seen
                    playing[slot] = not seen.done
            number += 1

    def _play_one(self, row: int) -> Iterator[tuple[int, int, list[int], Seen]]:
        for number in range(LONGEST):
            before = self.ids
            seen = self.step(self.scripted(row, number, self.mask))
            yield row, number, before, seen
            if seen.done:
                return

    def next_episode(self) -> list[int]:
        """Proceed from the end of an episode to slot 0's next one, as the autoreset mode requires; return its ids."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self.step(self.word(0))
        self._revive()
        return self.ids

    def _revive(self) -> None:
        """Reset the slots whose episode is over, which in DISABLED mode is up to the user."""
        if self.mode is AutoresetMode.DISABLED and self._ended.any():
            self.observation, info = self.vector.reset(options={"reset_mask": self._ended.copy()})
            self._ended[:] = False
            self._note(info)

    def _note(self, info: dict[str, Any]) -> None:
        self._mask = np.asarray(info["action_mask"]).astype(bool) if "action_mask" in info else None


def _of_slot(info: dict[str, Any], slot: int) -> dict[str, Any]:
    columns = {name: column for name, column in info.items() if isinstance(column, np.ndarray)}
    return {name: column[slot] for name, column in columns.items() if not name.startswith("_")}


def length_of(length: Any) -> int:
    """Return an observation's ``length`` as an integer, whatever its shape."""
    return int(np.ravel(length)[0])
