"""Action masks over tokens: forbidden tokens, minimum length of a turn, and a user's rule."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from textenv.lm.ends import turn_ends
from textenv.plain import plain
from textenv.prompts.plain_text import plain_text
from textenv.prompts.tokenize import answer_ids, begins_message, separate_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.envs.turn import Turn

Rule = Callable[["Turn"], "Collection[int] | None"]
"""Function from the turn so far to the ids allowed next (None allows all). It must depend on the turn alone."""

MAX_WORD_SETS = 1000
"""Number of sets of available words for which a `WordRule` remembers what may follow."""
_ALL_TOKENS = 0
"""Row of `ActionMasks.sets` that allows every token."""
NOT_FORBIDDEN = 1
"""Row of `ActionMasks.sets` without the forbidden ids."""
_BEFORE_MINIMUM = 2
"""Row of `ActionMasks.sets` without the forbidden ids and those that end a turn, which is still too short to end."""


class ActionMasks:
    """Masks of allowed tokens, each distinct one stored once, and the index of the mask for a turn's next token.

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
        self.min_new_tokens = min_new_tokens
        self.rule = rule
        self.complete_turns: frozenset[tuple[int, ...]] = frozenset()
        """Turns that are over without a token that ends them, see `WordRule`."""
        self.room = 1
        """Number of tokens for which a turn needs room, so that no text of the rule is cut."""
        if isinstance(rule, WordRule):
            self.complete_turns = rule.complete
        if isinstance(rule, (WordRule, TextRule)):
            self.room = rule.num_tokens
        self.active = bool(len(forbidden) or min_new_tokens or rule)
        """False if every token is allowed everywhere."""

        # The masks of the constants above; those of the rule follow, and the array grows with them
        self._sets = np.ones((3, num_tokens), dtype=bool)
        self._sets[NOT_FORBIDDEN:, list(forbidden)] = False
        self._count = 3
        self._index_of_mask: dict[bytes, int] = {}
        self.forbidden = sorted(forbidden)
        self.forbid_before_minimum(ends)

    def forbid_before_minimum(self, ends: Collection[int]) -> None:
        """Forbid these ids until a turn has its minimum length, in addition to those that are always forbidden.

        Raises:
            ValueError: if that leaves no token; then the masks stay as they were.
        """
        not_forbidden = self._sets[NOT_FORBIDDEN]
        before_minimum = not_forbidden.copy()
        before_minimum[list(ends)] = False
        num_tokens = len(not_forbidden)
        if not not_forbidden.any():
            raise ValueError(f"forbidden is {self.forbidden}, which leaves no token of {num_tokens}: forbid fewer")
        if self.min_new_tokens and not before_minimum.any():
            raise ValueError(
                f"forbidden is {self.forbidden}, and before min_new_tokens={self.min_new_tokens} the ends of a turn "
                f"{sorted(ends)} are forbidden too, which leaves no token of {num_tokens}: forbid fewer, or set "
                "min_new_tokens to 0"
            )
        self._sets[_BEFORE_MINIMUM] = before_minimum

    @property
    def sets(self) -> torch.Tensor:
        """Bool ``[S, num_tokens]``: the distinct masks; row 0 allows every token."""
        return torch.from_numpy(self._sets[: self._count])

    def index(self, turn_at: Callable[[int], Turn], new_tokens: np.ndarray) -> np.ndarray:
        """Return the row of `sets` that applies to the next token of each turn, int64 ``[k]``.

        Args:
            turn_at: function from i to the i-th turn so far.
            new_tokens: int64 ``[k]``, number of tokens in each turn.

        Raises:
            ValueError: if the user's rule returns an id outside the vocabulary, or leaves no token allowed.
        """
        if not self.active:
            return np.full(len(new_tokens), _ALL_TOKENS)
        index = np.where(new_tokens < self.min_new_tokens, _BEFORE_MINIMUM, NOT_FORBIDDEN)
        if self.rule is None:
            return index
        for i in range(len(index)):
            turn = turn_at(i)
            ids = self.rule(turn)
            if ids is not None:
                index[i] = self._add_mask(ids, int(index[i]), turn)
        return index

    def forget(self) -> None:
        """Drop the masks of the user's rule; call only when no position refers to them any more."""
        self._sets = self._sets[:3].copy()
        self._count = 3
        self._index_of_mask = {}

    def check(self, actions: object, slots: np.ndarray | slice, mask_index: np.ndarray) -> np.ndarray:
        """Return the actions as an array; check them in these slots only.

        Args:
            actions: token ids, one per slot.
            slots: indices or a slice.
            mask_index: int64, the row of `sets` that applies in each slot.

        Raises:
            TypeError: if the actions cannot be read as an array.
            ValueError: unless they are integers, one per slot, allowed by the masks.
        """
        num_tokens = self._sets.shape[1]
        actions = _array(actions, "actions are")
        if actions.shape != mask_index.shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions are {actions.dtype} of shape {actions.shape}, expected integers of shape {mask_index.shape}"
            )

        # Every id must be in the vocabulary
        chosen = actions[slots]
        outside = (chosen < 0) | (chosen >= num_tokens)
        if np.count_nonzero(outside):  # faster than outside.any()
            slot = np.arange(len(actions))[slots][outside][0]
            raise ValueError(
                f"action {actions[slot]} in slot {slot} is outside the vocabulary, expected 0 to {num_tokens - 1}"
            )

        # Every id must be allowed by the mask of its slot
        if not self.active:
            return actions
        forbidden = ~self._sets[mask_index[slots], chosen]
        if forbidden.any():
            slot = np.arange(len(actions))[slots][forbidden][0]
            raise ValueError(
                f"action {actions[slot]} in slot {slot} is forbidden here: choose one where info['action_mask'] is 1"
            )
        return actions

    def _add_mask(self, ids: Collection[int], base: int, turn: Turn) -> int:
        """Return the row of `sets` for ids that the rule returned, and add it if it is new.

        Args:
            ids: ids that the rule allows.
            base: row of `sets` that applies without the rule.
            turn: the turn so far, for errors.
        """
        # Check the ids
        if isinstance(ids, (set, frozenset)):
            ids = list(ids)
        chosen = _array(ids, "allowed returned")
        if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
            raise TypeError(
                f"allowed returned {ids!r:.200}, expected a list of token ids (not a bool mask), or None for all"
            )
        chosen = chosen.astype(np.int64)
        num_tokens = self._sets.shape[1]
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < num_tokens):
            raise ValueError(f"allowed returned {chosen.tolist()}, expected ids from 0 to {num_tokens - 1}")

        mask = np.zeros(num_tokens, dtype=bool)
        mask[chosen] = True
        mask &= self._sets[base]
        if not mask.any():
            raise ValueError(
                f"allowed returned {chosen.tolist()!r:.200} after {turn.completion!r} (prompt {turn.prompt_text!r}), "
                "which leaves no token after forbidden and min_new_tokens: return at least one more, or None"
            )

        # Store it once; a full array is doubled
        key = np.packbits(mask).tobytes()
        if key not in self._index_of_mask:
            if self._count == len(self._sets):
                self._sets = np.concatenate([self._sets, np.zeros_like(self._sets)])
            self._sets[self._count] = mask
            self._index_of_mask[key] = self._count
            self._count += 1
        return self._index_of_mask[key]


def as_token_ids(forbidden: Sequence[int] | int) -> list[int]:
    """Return the ids of the argument ``forbidden`` of `TextVectorEnv`, one or several.

    Raises:
        TypeError: if it has something else, such as texts or a mask.
    """
    ids = np.atleast_1d(_array(forbidden, "forbidden is"))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(f"forbidden is {forbidden!r:.200}, expected a list of token ids, such as [0, 5]")
    return ids.tolist()


def as_rule(
    allowed: Rule | Sequence[str | int] | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_tokens: int,
    ends: Sequence[int],
    longest: int,
) -> Rule | None:
    """Return the rule for the argument ``allowed`` of `TextVectorEnv`; None if that is None.

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
        return TextRule(entries, tokenizer, ends=ends, longest=longest)
    if not all(isinstance(entry, numbers.Integral) and not isinstance(entry, bool) for entry in entries):
        raise TypeError(f"allowed is {allowed!r:.200}, {expected}")
    ids = [int(entry) for entry in entries]
    if min(ids) < 0 or max(ids) >= num_tokens:
        raise ValueError(f"allowed is {allowed!r:.200}, expected ids from 0 to {num_tokens - 1}")
    return _rule_of_ids(ids, ends=ends)


def _rule_of_ids(ids: list[int], *, ends: Sequence[int]) -> Rule:
    """Return a rule for turns of these ids only: at least one of them, then more or an end."""
    ids_or_ends = sorted({*ids, *ends})

    def rule(turn: Turn) -> list[int]:
        return ids_or_ends if turn.completion_ids else ids

    return rule


class TextRule:
    """Rule for turns that are one of these texts, and then end as the model ends its turns.

    Args:
        texts: one or more texts.
        tokenizer: the policy's tokenizer.
        ends: ids that end a turn.
        longest: maximum tokens of a turn.

    Raises:
        ValueError: if a text has no token, or more than fit into a turn.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, ends: Sequence[int], longest: int
    ) -> None:
        self._ends = tuple(ends)
        self._next_of: dict[bool, dict[tuple[int, ...], set[int]]] = {True: {}, False: {}}
        """By whether the turn is a message of a chat, and by its token ids so far, those that may follow."""
        self.num_tokens = 0
        """Number of tokens of the longest text."""
        for is_message, next_of in self._next_of.items():
            for text in texts:
                ids = answer_ids(text, tokenizer, is_message=is_message)
                self._check(text, len(ids), longest)
                self.num_tokens = max(self.num_tokens, len(ids))
                for position, token in enumerate(ids):
                    next_of.setdefault(tuple(ids[:position]), set()).add(token)
                next_of.setdefault(tuple(ids), set()).update(ends)

    def _check(self, text: str, num_tokens: int, longest: int) -> None:
        """Raise a ValueError unless a turn can be this text."""
        if not 1 <= num_tokens <= longest:
            raise ValueError(
                f"allowed has {text!r:.200}, which has {num_tokens} tokens, expected 1 to max_new_tokens, {longest}"
            )
        if not self._ends and num_tokens < longest:
            raise ValueError(f"allowed has {text!r:.200}, which cannot end: the tokenizer has no EOS, give stop=[id]")

    def __call__(self, turn: Turn) -> Collection[int]:
        """Return the ids that continue the turn; see `Rule`."""
        next_of = self._next_of[begins_message(turn.prompt)]
        return next_of.get(tuple(turn.completion_ids), self._ends)


class WordRule:
    """Rule for turns that are one of these words. A word that no other word continues ends its turn by itself.

    After a word that another one continues, as ``go`` and ``go left``, an end of the turn is allowed, too.

    Args:
        words: different texts.
        tokenizer: the policy's tokenizer.
        ends: ids that end a turn.
        available: function from the turn so far to the words that may be written in it, the same for each token of
            the turn; None allows all.

    Raises:
        ValueError: if the tokenizer cannot write a word, if it writes two words by the same tokens, or if a word that
            another one continues cannot end.
    """

    def __init__(
        self,
        words: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        ends: Sequence[int],
        available: Callable[[Turn], Collection[str] | None] | None = None,
    ) -> None:
        # The tokens of each word
        word_of_ids: dict[tuple[int, ...], str] = {}
        for word in words:
            ids = tuple(separate_ids(word, tokenizer))
            if ids in word_of_ids:
                raise ValueError(
                    f"the tokenizer reads the words {word_of_ids[ids]!r} and {word!r} as the same tokens, so their "
                    "actions cannot be told apart: give other words (actions=)"
                )
            text = plain_text(list(ids), tokenizer)
            if not ids or text.strip() != word.strip():
                raise ValueError(
                    f"the tokenizer reads the word {word!r} as {text!r}, so no model can write it: give other words "
                    "(actions=)"
                )
            word_of_ids[ids] = word

        # Words that others continue
        beginnings = {ids[:position] for ids in word_of_ids for position in range(len(ids))}
        self.complete = frozenset(ids for ids in word_of_ids if ids not in beginnings)
        """Token ids of the words that no other word continues: each is a complete turn."""
        continued = [ids for ids in word_of_ids if ids in beginnings]
        if continued and not ends:
            raise ValueError(
                f"another word continues {word_of_ids[continued[0]]!r}, which therefore needs an end of the turn, but "
                "the tokenizer has no EOS: give other words (actions=)"
            )
        self.num_tokens = max([*map(len, self.complete), *(len(ids) + 1 for ids in continued)])
        """Number of tokens of the longest turn."""

        self._ids_of_word = {word: ids for ids, word in word_of_ids.items()}
        self._ends = tuple(ends)
        self._available = available
        self._next_of_all = self._next_of(words)
        self._next_of_words: dict[tuple[str, ...], dict[tuple[int, ...], set[int]]] = {}
        """By the words that may be written, what `_next_of` returns for them."""

    def __call__(self, turn: Turn) -> Collection[int]:
        """Return the ids that continue the turn; see `Rule`."""
        so_far = tuple(turn.completion_ids)
        available = None
        if self._available is not None:
            available = self._available(turn)
        if available is None:
            return self._next_of_all[so_far]

        # Environments have few sets of available words, and come back to them
        words = tuple(available)
        next_of = self._next_of_words.get(words)
        if next_of is None:
            if len(self._next_of_words) >= MAX_WORD_SETS:
                self._next_of_words.clear()
            next_of = self._next_of(words)
            self._next_of_words[words] = next_of
        return next_of.get(so_far, set())  # empty, if no word is available: an error of the masks

    def _next_of(self, words: Sequence[str]) -> dict[tuple[int, ...], set[int]]:
        """Return, by the token ids so far, the ids that lead to one of these words, or end the turn after it."""
        next_of: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            if word not in self._ids_of_word:
                raise ValueError(f"available returned the word {word!r:.200}, which is none of the rule's words")
            word_ids = self._ids_of_word[word]
            for position, token in enumerate(word_ids):
                next_of.setdefault(word_ids[:position], set()).add(token)
            if word_ids not in self.complete:
                next_of.setdefault(word_ids, set()).update(self._ends)
        return next_of


def next_ids(turn: Turn, texts: Sequence[str]) -> list[int]:
    """Return the token ids that continue one of these texts, or end the turn after it; for rules (``allowed``)."""
    so_far = turn.completion_ids
    ends = turn_ends(turn.tokenizer).ids
    is_message = begins_message(turn.prompt)
    allowed: list[int] = []
    for text in texts:
        ids = answer_ids(text, turn.tokenizer, is_message=is_message)
        if ids == so_far:
            allowed += ends
        elif ids[: len(so_far)] == so_far:
            allowed.append(ids[len(so_far)])
    return allowed


def _array(values: object, subject: str) -> np.ndarray:
    """Return values of a user as an array; ``subject`` begins the message of the TypeError if they are none."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # rows of unequal length, a sparse tensor
        raise TypeError(f"{subject} {values!r:.200}, expected integers ({error})") from error
