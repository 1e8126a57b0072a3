"""Action masks over tokens: forbidden tokens, minimum length of a turn, and a user's rule."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from textenv.lm.ends import turn_ends
from textenv.plain import plain
from textenv.prompts.tokenize import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.envs.turn import Turn

Rule = Callable[["Turn"], "Collection[int] | None"]
"""Function from the turn so far to the ids allowed next (None allows all). It must depend on the turn alone."""

_ALL, _BASE, _GO_ON = 0, 1, 2


class ActionMasks:
    """Interned allowed-token masks, and which one applies at each position.

    Args:
        num_tokens: size of the vocabulary.
        forbidden: ids that are never allowed.
        ends: ids that end a turn.
        min_new_tokens: minimum tokens of a turn before ``ends`` are allowed.
        rule: the user's rule, applied in addition.

    Raises:
        ValueError: on ids outside the vocabulary, or if no token remains allowed.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        forbidden: Sequence[int] = (),
        ends: Sequence[int] = (),
        min_new_tokens: int = 0,
        rule: Rule | None = None,
    ) -> None:
        if len(forbidden) and not (min(forbidden) >= 0 and max(forbidden) < num_tokens):
            raise ValueError(f"forbidden is {sorted(forbidden)}, expected ids from 0 to {num_tokens - 1}")
        self.min_new_tokens, self.rule = min_new_tokens, rule
        self.active = bool(len(forbidden) or min_new_tokens or rule)
        """False if every token is allowed everywhere."""
        sets = np.ones((3, num_tokens), dtype=bool)
        sets[_BASE:, list(forbidden)] = False
        self._sets, self._count = sets, len(sets)
        self._places: dict[bytes, int] = {}
        self._forbidden = sorted(forbidden)
        self.forbid_before_minimum(ends)

    def forbid_before_minimum(self, ends: Sequence[int]) -> None:
        """Forbid these ids too before a turn has its minimum length; a ValueError if that leaves no token."""
        base, go_on = self._sets[_BASE], self._sets[_GO_ON]
        go_on[list(ends)] = False
        if not base.any() or (self.min_new_tokens and not go_on.any()):
            count = len(base)
            raise ValueError(f"forbidden is {self._forbidden}, which leaves no token of {count}: forbid fewer")

    @property
    def sets(self) -> torch.Tensor:
        """Bool ``[S, num_tokens]``: the distinct masks; row 0 allows every token."""
        return torch.from_numpy(self._sets[: self._count])

    def index(self, turns: Callable[[int], Turn], new_tokens: np.ndarray) -> np.ndarray:
        """Row of `sets` that applies to the next token of each turn, int64 ``[k]``.

        Args:
            turns: function from i to the i-th turn so far.
            new_tokens: int64 ``[k]``, number of tokens in each turn.

        Raises:
            ValueError: if the user's rule returns an id outside the vocabulary, or leaves no token allowed.
        """
        if not self.active:
            return np.full(len(new_tokens), _ALL)
        base = np.where(new_tokens < self.min_new_tokens, _GO_ON, _BASE)
        if self.rule is not None:
            for i in range(len(base)):
                so_far = turns(i)
                ids = self.rule(so_far)
                if ids is not None:
                    base[i] = self._intern(ids, int(base[i]), so_far)
        return base

    def forget(self) -> None:
        """Drop the masks of the user's rule; call only when no position refers to them any more."""
        self._sets, self._count, self._places = self._sets[:3].copy(), 3, {}

    def check(self, actions: Any, slots: np.ndarray | slice, allowed: np.ndarray) -> np.ndarray:
        """Return the actions as an array, checked in the given slots only.

        Raises:
            ValueError: unless they are integers, one per slot, allowed by the masks with indices ``allowed``.
        """
        n, actions = self._sets.shape[1], _array(actions, "actions are")
        if actions.shape != allowed.shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions are {actions.dtype} of shape {actions.shape}, expected integers of shape {allowed.shape}"
            )
        chosen = actions[slots]
        outside = (chosen < 0) | (chosen >= n)
        if np.count_nonzero(outside):  # faster than outside.any()
            slot = np.arange(len(actions))[slots][outside][0]
            raise ValueError(f"action {actions[slot]} in slot {slot} is outside the vocabulary, expected 0 to {n - 1}")
        if not self.active:
            return actions
        forbidden = ~self._sets[allowed[slots], chosen]
        if forbidden.any():
            slot = np.arange(len(actions))[slots][forbidden][0]
            raise ValueError(
                f"action {actions[slot]} in slot {slot} is forbidden here: choose one where info['action_mask'] is 1"
            )
        return actions

    def _intern(self, ids: Collection[int], base: int, turn: Turn) -> int:
        chosen = _array(list(ids) if isinstance(ids, (set, frozenset)) else ids, "allowed returned")
        if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
            raise TypeError(
                f"allowed returned {ids!r:.200}, expected a list of token ids (not a bool mask), or None for all"
            )
        chosen = chosen.astype(np.int64)
        allowed = np.zeros(self._sets.shape[1], dtype=bool)
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(allowed)):
            raise ValueError(f"allowed returned {chosen.tolist()}, expected ids from 0 to {len(allowed) - 1}")
        allowed[chosen] = True
        allowed &= self._sets[base]
        if not allowed.any():
            raise ValueError(
                f"allowed returned {chosen.tolist()!r:.200} after {turn.completion!r} (prompt {turn.prompt_text!r}), "
                "which leaves no token after forbidden and min_new_tokens: return at least one more, or None"
            )
        key = np.packbits(allowed).tobytes()
        if key not in self._places:
            if self._count == len(self._sets):
                self._sets = np.concatenate([self._sets, np.zeros_like(self._sets)])
            self._sets[self._count] = allowed
            self._places[key] = self._count
            self._count += 1
        return self._places[key]


def as_rule(
    allowed: Rule | Sequence[str | int] | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_tokens: int,
    ends: Sequence[int],
    longest: int,
) -> Rule | None:
    """Return a rule, made of a list of texts or token ids if it is one.

    Args:
        allowed: a rule, which is returned as it is; texts, one of which is the whole turn; or token ids, of which the
            turn consists until it ends.
        tokenizer: the policy's tokenizer.
        num_tokens: size of the vocabulary.
        ends: ids that end a turn.
        longest: maximum tokens of a turn.

    Raises:
        TypeError: if it is none of these.
        ValueError: if a list is empty, an id is outside the vocabulary, or a text has no token or more than fit into a
            turn.
    """
    if allowed is None or (callable(allowed) and not isinstance(allowed, type)):
        return cast("Rule | None", allowed)
    expected = (
        'expected a list of texts, such as ["yes", "no"], a list of token ids, or a function from the turn so far to '
        "the ids that are allowed next"
    )
    if isinstance(allowed, (str, bytes, Mapping)) or not isinstance(allowed, Iterable):
        raise TypeError(f"allowed is {allowed!r:.200}, {expected}")
    entries = plain(list(allowed))
    if not entries:
        raise ValueError(f"allowed is empty, which leaves no token: {expected}")
    if all(isinstance(entry, str) for entry in entries):
        return _one_of(entries, tokenizer, ends=ends, longest=longest)
    whole = all(isinstance(entry, numbers.Integral) and not isinstance(entry, bool) for entry in entries)
    if not whole:
        raise TypeError(f"allowed is {allowed!r:.200}, {expected}")
    ids = [int(entry) for entry in entries]
    if min(ids) < 0 or max(ids) >= num_tokens:
        raise ValueError(f"allowed is {allowed!r:.200}, expected ids from 0 to {num_tokens - 1}")
    later = sorted({*ids, *ends})
    return lambda turn: later if turn.completion_ids else ids


def _one_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, ends: Sequence[int], longest: int) -> Rule:
    """Return the rule that a turn is one of these texts, and then ends."""
    following: dict[tuple[int, ...], set[int]] = {}
    for text in texts:
        ids = text_ids(text, tokenizer)
        if not ids or len(ids) > longest:
            raise ValueError(
                f"allowed has {text!r:.200}, which has {len(ids)} tokens, expected 1 to max_new_tokens, {longest}"
            )
        if not ends and len(ids) < longest:
            raise ValueError(f"allowed has {text!r:.200}, which cannot end: the tokenizer has no EOS, give stop=[id]")
        for position, token in enumerate(ids):
            following.setdefault(tuple(ids[:position]), set()).add(token)
        following.setdefault(tuple(ids), set()).update(ends)
    return lambda turn: following.get(tuple(turn.completion_ids), ends)


def next_ids(turn: Turn, texts: Sequence[str]) -> list[int]:
    """Token ids by which a turn so far continues one of these texts, or ends a turn after it; for ``allowed=``."""
    so_far = turn.completion_ids
    ends = turn_ends(turn.tokenizer).ids
    allowed = list[int]()
    for text in texts:
        ids = text_ids(text, turn.tokenizer)
        if ids == so_far:
            allowed += ends
        elif ids[: len(so_far)] == so_far:
            allowed.append(ids[len(so_far)])
    return allowed


def _array(given: Any, said: str) -> np.ndarray:
    try:
        return np.asarray(given)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # rows of unequal length, a sparse tensor
        raise TypeError(f"{said} {given!r:.200}, expected integers ({error})") from error
