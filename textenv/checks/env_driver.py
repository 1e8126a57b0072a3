"""`EnvDriver`: uniform access for the checker to slot 0 of any text environment, single or vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from textenv.envs.episode_batch import Info
from textenv.envs.text_env import TextEnv
from textenv.envs.vector_env import Conversation, TextVectorEnv
from textenv.lm.ends import turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STEPS = 4000
"""Number of steps after which an episode counts as endless."""


class StepResult(NamedTuple):
    """Result of a step in slot 0."""

    ids: list[int]
    """The state; at the end of an episode, the final one."""
    reward: float
    terminated: bool
    truncated: bool
    info: Info
    is_new_context: bool
    """True if the state is a new context of the episode, which has replaced the former state."""

    @property
    def done(self) -> bool:
        """True if the episode is over."""
        return self.terminated or self.truncated


class ScriptedStep(NamedTuple):
    """A step of `EnvDriver.play`."""

    episode: int
    """Number of the episode."""
    number: int
    """Index of the step in the episode."""
    state: list[int]
    """Ids before the step."""
    mask: np.ndarray | None
    """Tokens allowed before the step, bool ``[n]``; None if all were."""
    result: StepResult


class EnvDriver:
    """Slot 0 of an environment; the other slots, if any, take other tokens, which do not end their turns.

    Args:
        env: a single or vector environment with the spaces of `TextEnv` and `TextVectorEnv`.

    Raises:
        ValueError: if the spaces are different.
    """

    def __init__(self, env: gymnasium.Env | VectorEnv) -> None:
        # The vector environment, with the expected spaces
        self.vector: VectorEnv
        if isinstance(env, VectorEnv):
            self.vector = env.unwrapped
        elif isinstance(env.unwrapped, TextEnv):
            self.vector = env.unwrapped.vector
        else:  # DISABLED keeps the final state, so that a single environment is checked without autoreset
            self.vector = SyncVectorEnv([lambda: env], autoreset_mode="Disabled")
        self.observation_space = self.vector.single_observation_space
        action_space = self.vector.single_action_space
        if not isinstance(self.observation_space, spaces.Dict) or set(self.observation_space) != {"tokens", "length"}:
            raise ValueError(f"observation_space is {self.observation_space}, expected Dict(tokens=..., length=...)")
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"action_space is {action_space}, expected Discrete(size of the vocabulary)")
        self.action_space = action_space

        # What is known of an environment of this library
        self.text_env: TextVectorEnv | None = None
        """The environment if it is a `TextVectorEnv`."""
        if isinstance(self.vector, TextVectorEnv):
            self.text_env = self.vector
        self.conversation = self.text_env is not None and isinstance(self.text_env.task, Conversation)
        """True if the environment replies: then the end of a turn need not end the episode."""

        # Tokens with a meaning
        holder = self.text_env or env.unwrapped
        self.tokenizer: PreTrainedTokenizerBase | None = getattr(holder, "tokenizer", None)
        """The environment's tokenizer, maybe one of another library with the same methods."""
        self.turn_ends = _turn_ends(self.text_env, self.tokenizer)
        """Ids of the tokens that end a turn; empty if they are unknown."""
        self.eos: int | None = next(iter(self.turn_ends), None)
        """Token that ends the script's turns: EOS, or without it another of `turn_ends`."""
        self.pad: int | None = None
        if self.tokenizer is not None:
            self.pad = self.tokenizer.pad_token_id
        self.avoided_tokens = {*self.turn_ends, self.pad}
        """Tokens that the script avoids: sure and possible ends of a turn, and padding."""
        if self.text_env is not None:
            ends = self.text_env.ends
            self.avoided_tokens |= {*ends.ids, *np.flatnonzero(ends.may_complete)}

        # The present state of all slots
        self.mode = AutoresetMode(self.vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.observation: dict[str, np.ndarray] = {}
        self._masks: list[np.ndarray | None] = []
        """For each slot the tokens allowed now, bool ``[n]``; None if all are."""
        self._ended = np.zeros(self.vector.num_envs, dtype=bool)
        """True in slots whose episode was over after the last step."""

    def reset(self, seed: int | None) -> list[int]:
        """Reset all slots; return the ids of slot 0."""
        self.observation, info = self.vector.reset(seed=seed)
        self._ended[:] = False
        self._store_masks(info)
        return self.ids

    @property
    def ids(self) -> list[int]:
        """State of slot 0."""
        return ids_of(next(self.observations()))

    @property
    def num_sampled_prompts(self) -> int | None:
        """Number of prompts sampled in all slots since seeding; None if the environment does not report it."""
        if self.text_env is None:
            return None
        order = self.text_env.prompt_order
        if order is None:
            return None
        return int(order["position"])

    def observations(self) -> Iterator[dict[str, np.ndarray]]:
        """Iterate over the observation of each slot."""
        for slot in range(self.vector.num_envs):
            yield {name: np.asarray(column[slot]) for name, column in self.observation.items()}

    def has_replied(self, ids: list[int], result: StepResult) -> bool:
        """Return True if the state after a step has more than the ids before it and the action, or is a new context."""
        return result.is_new_context or len(result.ids) > len(ids) + 1

    def may_choose(self, token: int | None) -> TypeGuard[int]:
        """Return True if the token is not None and slot 0 may choose it now."""
        return token is not None and (self._masks[0] is None or bool(self._masks[0][token]))

    def word(self, number: int, *, words: float = math.inf) -> int:
        """Return token ``number`` of `scripted` for slot 0; by default one that does not end the turn."""
        self._reset_ended()
        return self.scripted(0, number, self._masks[0], words=words)

    def scripted(self, row: int, number: int, mask: np.ndarray | None, *, words: float) -> int:
        """Return a token of a fixed script, which has for each episode ``words`` words, then EOS if the mask allows it.

        Args:
            row: number of the episode.
            number: index of the token in the episode.
            mask: the allowed tokens, bool ``[n]``; None if all are.
            words: number of words before EOS; they are tokens that end no turn, unless the mask allows no others.
        """
        if number >= words and self.eos is not None and (mask is None or mask[self.eos]):
            return int(self.eos)
        num_tokens = int(self.action_space.n)
        allowed_tokens: Sequence[int] = range(num_tokens)
        if mask is not None:
            allowed_tokens = np.flatnonzero(mask).tolist()

        # All tokens are allowed, and most are words: search for one without a list of all
        if len(allowed_tokens) == num_tokens and len(self.avoided_tokens) <= num_tokens // 2:
            token = (7 * number + 3 * row + num_tokens // 2) % num_tokens
            while token in self.avoided_tokens:
                token = (token + 1) % num_tokens
            return token

        allowed_words = [token for token in allowed_tokens if token not in self.avoided_tokens]
        choices = allowed_words or allowed_tokens
        return int(choices[(number + row) % len(choices)])

    def answer(self, words: int) -> StepResult | None:
        """Reset with seed 0, then step with this many words and EOS; None if the mask or a limit prevents it."""
        self.reset(0)
        for number in range(words):
            if self.step(self.word(number)).done:
                return None
        if not self.may_choose(self.eos):
            return None
        return self.step(self.eos)

    def step(self, token: int) -> StepResult:
        """Step with a token in slot 0."""
        self._reset_ended()
        actions = [token]
        for slot in range(1, len(self._masks)):
            actions.append(self.scripted(slot, 0, self._masks[slot], words=math.inf))
        return self._step(actions)[0]

    def _step(self, actions: list[int]) -> list[StepResult]:
        """Step with a token in each slot; return each slot's result."""
        contexts_before = self._context_number()
        self.observation, reward, terminated, truncated, info = self.vector.step(np.array(actions))
        is_new_context = self._context_number() > contexts_before
        self._ended = terminated | truncated
        self._store_masks(info)
        results = []
        for slot, observation in enumerate(self.observations()):
            slot_info = _of_slot(info, slot)
            # In SAME_STEP mode the observation is already that of the next episode
            if self._ended[slot] and self.mode is AutoresetMode.SAME_STEP:
                no_tokens = {"tokens": np.zeros(0, dtype=np.int64), "length": np.zeros(1, dtype=np.int64)}
                observation = slot_info.get("final_obs") or no_tokens
                slot_info |= _of_slot(info.get("final_info", {}), slot)
            results.append(
                StepResult(
                    ids=ids_of(observation),
                    reward=float(reward[slot]),
                    terminated=bool(terminated[slot]),
                    truncated=bool(truncated[slot]),
                    info=slot_info,
                    is_new_context=bool(is_new_context[slot]),
                )
            )
        return results

    def _context_number(self) -> np.ndarray:
        """Return `TextVectorEnv.context_number`; zeros for other environments, which give no new contexts."""
        if self.text_env is None:
            return np.zeros(self.vector.num_envs, dtype=np.int64)
        return self.text_env.context_number

    def play(self, seed: int, episodes: int) -> Iterator[ScriptedStep]:
        """Play the script of `scripted`: ``episodes`` episodes if there is one slot, else one in each slot."""
        num_slots = self.vector.num_envs
        self.reset(seed)
        num_rounds = 1
        if num_slots == 1:
            num_rounds = episodes
        for first in range(num_rounds):
            yield from self._play_round(range(first, first + num_slots))
            self.next_episode()

    def _play_round(self, rows: range) -> Iterator[ScriptedStep]:
        """Play one episode in each slot; ``rows`` are their numbers in the script."""
        playing = np.ones(len(rows), dtype=bool)
        for number in range(MAX_STEPS):
            self._reset_ended()
            states = [ids_of(observation) for observation in self.observations()]
            masks = self._masks
            actions = []
            for row, mask in zip(rows, masks, strict=True):
                actions.append(self.scripted(row, number, mask, words=2 + row))
            for slot, result in enumerate(self._step(actions)):
                if playing[slot]:
                    yield ScriptedStep(rows[slot], number, states[slot], masks[slot], result)
                    playing[slot] = not result.done
            if not playing.any():
                return

    def next_episode(self) -> list[int]:
        """After an episode, proceed to slot 0's next one, as the autoreset mode requires; return the new ids."""
        if self.mode is AutoresetMode.NEXT_STEP:
            self.step(self.word(0))
        self._reset_ended()
        return self.ids

    def _reset_ended(self) -> None:
        """Reset the slots whose episode is over, in DISABLED mode."""
        if self.mode is AutoresetMode.DISABLED and self._ended.any():
            self.observation, info = self.vector.reset(options={"reset_mask": self._ended.copy()})
            self._ended[:] = False
            self._store_masks(info)

    def _store_masks(self, info: Info) -> None:
        """Keep the action masks of a reset or step."""
        self._masks = [None] * self.vector.num_envs
        if "action_mask" in info:
            self._masks = list(np.asarray(info["action_mask"]).astype(bool))


def _turn_ends(text_env: TextVectorEnv | None, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the ids of the tokens that end the model's turns; empty if they are unknown."""
    from transformers import PreTrainedTokenizerBase

    if text_env is not None:
        return list(text_env.ends.model_ends.ids)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return list(turn_ends(tokenizer).ids)
    if tokenizer is None or tokenizer.eos_token_id is None:  # of a tokenizer of another library
        return []
    return [tokenizer.eos_token_id]


def _of_slot(info: Info, slot: int) -> Info:
    """Return one slot's entries of a vector environment's info."""
    entries = {}
    for name, column in info.items():
        if isinstance(column, np.ndarray) and not name.startswith("_"):
            entries[name] = column[slot]
    return entries


def ids_of(observation: Mapping[str, np.ndarray]) -> list[int]:
    """Return the ids of one slot's observation, without padding; its ``length`` may have any shape."""
    length = np.ravel(observation["length"])[0]
    return observation["tokens"][:length].tolist()
