"""`EnvDriver`: uniform access for the checker to slot 0 of any text environment, single or vector."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from textenv.envs.text_env import TextEnv
from textenv.envs.vector_env import Conversation, TextVectorEnv
from textenv.lm.ends import turn_ends

MAX_STEPS = 4000
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


@runtime_checkable
class _HasTokenizer(Protocol):
    tokenizer: Any


class EnvDriver:
    """Slot 0 of an environment; the other slots, if any, take other tokens, which do not end their turns.

    Args:
        env: a single or vector environment with the spaces of `TextEnv` and `TextVectorEnv`.

    Raises:
        ValueError: if the spaces are different.
    """

    def __init__(self, env: Any) -> None:
        own = env.unwrapped
        if isinstance(env, VectorEnv):
            self.vector: Any = own
        elif isinstance(own, TextEnv):
            self.vector = own.vector
        else:  # DISABLED keeps the final state, so that a single environment is checked without autoreset.
            self.vector = SyncVectorEnv([lambda: env], autoreset_mode="Disabled")
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        if not isinstance(self.observation_space, spaces.Dict) or set(self.observation_space) != {"tokens", "length"}:
            raise ValueError(f"observation_space is {self.observation_space}, expected Dict(tokens=..., length=...)")
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"action_space is {self.action_space}, expected Discrete(size of the vocabulary)")
        self.ours = self.vector if isinstance(self.vector, TextVectorEnv) else None
        """The environment if it is a `TextVectorEnv`."""
        holder = self.ours or own
        self.tokenizer: Any = holder.tokenizer if isinstance(holder, _HasTokenizer) else None
        self.turn_ends = _turn_ends(self.ours, self.tokenizer)
        """Token ids each of which ends a turn; empty if they are unknown."""
        self.eos: int | None = next(iter(self.turn_ends), None)
        """Token that ends the script's turns: EOS, or without it another of `turn_ends`."""
        self.pad: int | None = None if self.tokenizer is None else self.tokenizer.pad_token_id
        self.ends = {*self.turn_ends, self.pad}
        """Tokens that the script avoids: sure and possible ends of a turn, and padding."""
        if self.ours is not None:
            self.ends |= {*self.ours.ends.ids, *np.flatnonzero(self.ours.ends.may_complete)}
        self.conversation = self.ours is not None and isinstance(self.ours.task, Conversation)
        """True if the environment replies: then the end of a turn need not end the episode."""
        self.mode = AutoresetMode(self.vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.observation: dict[str, np.ndarray] = {}
        self._masks: list[np.ndarray | None] = []
        """Bool ``[n]`` each: the tokens allowed now in each slot; None if all are."""
        self._ended = np.zeros(self.vector.num_envs, dtype=bool)

    def reset(self, seed: int | None) -> list[int]:
        """Reset all slots; return the ids of slot 0."""
        self.observation, info = self.vector.reset(seed=seed)
        self._ended[:] = False
        self._note(info)
        return self.ids

    @property
    def ids(self) -> list[int]:
        """State of slot 0."""
        return ids_of(next(self.observations()))

    @property
    def dealt(self) -> int | None:
        """Number of prompts sampled in all slots since seeding; None if the environment does not report it."""
        order = None if self.ours is None else self.ours.prompt_order
        return None if order is None else int(order["position"])

    def observations(self) -> Iterator[dict[str, np.ndarray]]:
        """Iterate over the observation of each slot."""
        for slot in range(self.vector.num_envs):
            yield {name: np.asarray(column[slot]) for name, column in self.observation.items()}

    def may(self, token: int | None) -> TypeGuard[int]:
        """Return True if the token is not None and slot 0 may choose it now."""
        return token is not None and (self._masks[0] is None or bool(self._masks[0][token]))

    def word(self, number: int, *, words: float = math.inf) -> int:
        """Return token ``number`` of `scripted` for slot 0; by default one that does not end the turn."""
        self._revive()
        return self.scripted(0, number, self._masks[0], words=words)

    def scripted(self, row: int, number: int, mask: np.ndarray | None, *, words: float) -> int:
        """Token ``number`` of episode ``row`` in a fixed script: ``words`` words, then EOS, if the mask allows."""
        if number >= words and self.eos is not None and (mask is None or mask[self.eos]):
            return int(self.eos)
        ends, n = self.ends, int(self.action_space.n)
        open_now = range(n) if mask is None else np.flatnonzero(mask).tolist()
        plain = [token for token in open_now if token not in ends] if len(open_now) < n or len(ends) > n // 2 else None
        if plain is None:
            return next(t for t in ((7 * number + 3 * row + i + n // 2) % n for i in range(n)) if t not in ends)
        return int((plain or open_now)[(number + row) % len(plain or open_now)])

    def answer(self, words: int) -> Seen | None:
        """Reset with seed 0, then step with this many words and EOS; None if the mask or a limit prevents it."""
        self.reset(0)
        if any(self.step(self.word(step)).done for step in range(words)) or not self.may(self.eos):
            return None
        return self.step(self.eos)

    def step(self, token: int) -> Seen:
        """Step with a token in slot 0."""
        self._revive()
        others = [self.scripted(slot, 0, mask, words=math.inf) for slot, mask in enumerate(self._masks)][1:]
        return self._step([token, *others])[0]

    def _step(self, actions: list[int]) -> list[Seen]:
        self.observation, reward, terminated, truncated, info = self.vector.step(np.array(actions))
        self._ended = terminated | truncated
        self._note(info)
        found = []
        for slot, observation in enumerate(self.observations()):
            said = _of_slot(info, slot)
            if self._ended[slot] and self.mode is AutoresetMode.SAME_STEP:
                observation = said.get("final_obs") or {"tokens": np.zeros(0, dtype=np.int64), "length": 0}
                said |= _of_slot(info.get("final_info", {}), slot)
            found.append(
                Seen(ids_of(observation), float(reward[slot]), bool(terminated[slot]), bool(truncated[slot]), said)
            )
        return found

    def play(self, seed: int, episodes: int) -> Iterator[tuple[int, int, list[int], np.ndarray | None, Seen]]:
        """Play the script of `scripted`: ``episodes`` episodes if there is one slot, else one in each slot.

        Yields:
            Episode, index of the step, ids and action mask (bool ``[n]`` or None) before the step, and result.
        """
        slots = self.vector.num_envs
        self.reset(seed)
        for first in range(episodes if slots == 1 else 1):
            yield from self._play_round(range(first, first + slots))
            self.next_episode()

    def _play_round(self, rows: range) -> Iterator[tuple[int, int, list[int], np.ndarray | None, Seen]]:
        """Play one episode in each slot; ``rows`` are their numbers in the script."""
        playing = np.ones(len(rows), dtype=bool)
        for number in range(MAX_STEPS):
            self._revive()
            before = [ids_of(observation) for observation in self.observations()]
            masks = self._masks
            actions = [self.scripted(row, number, mask, words=2 + row) for row, mask in zip(rows, masks, strict=True)]
            for slot, seen in enumerate(self._step(actions)):
                if playing[slot]:
                    yield rows[slot], number, before[slot], masks[slot], seen
                    playing[slot] = not seen.done
            if not playing.any():
                return

    def next_episode(self) -> list[int]:
        """After an episode, proceed to slot 0's next one, as the autoreset mode requires; return the new ids."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self.step(self.word(0))
        self._revive()
        return self.ids

    def _revive(self) -> None:
        """Reset the slots whose episode is over, in DISABLED mode."""
        if self.mode is AutoresetMode.DISABLED and self._ended.any():
            self.observation, info = self.vector.reset(options={"reset_mask": self._ended.copy()})
            self._ended[:] = False
            self._note(info)

    def _note(self, info: dict[str, Any]) -> None:
        self._masks = [None] * self.vector.num_envs
        if "action_mask" in info:
            self._masks = list(np.asarray(info["action_mask"]).astype(bool))


def _turn_ends(ours: TextVectorEnv | None, tokenizer: Any) -> list[int]:
    from transformers import PreTrainedTokenizerBase

    if ours is not None:
        return list(ours.ends.own.ids)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return list(turn_ends(tokenizer).ids)
    eos = None if tokenizer is None else tokenizer.eos_token_id  # of a tokenizer of another library
    return [] if eos is None else [eos]


def _of_slot(info: dict[str, Any], slot: int) -> dict[str, Any]:
    return {
        name: column[slot]
        for name, column in info.items()
        if isinstance(column, np.ndarray) and not name.startswith("_")
    }


def ids_of(observation: dict[str, Any]) -> list[int]:
    """Return the ids of one slot's observation, without padding; its ``length`` may have any shape."""
    return observation["tokens"][: np.ravel(observation["length"])[0]].tolist()
