"""Prompts: their content, sources, order and splits."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Protocol, Self, TypeVar, overload, runtime_checkable
from zlib import crc32

import numpy as np

from textenv.prompts.messages import Message, is_messages, read_messages
from textenv.prompts.special_tokens import check_unicode

ItemT = TypeVar("ItemT")
logger = logging.getLogger(__name__)
RESERVED = {"prompts", "completions", "prompt_ids", "completion_ids", "terminated", "tool_calls", "tokenizer"}
"""A reward function's own arguments; prompt columns may not use these names."""
Messages = tuple[Message, ...]
"""A chat: ``({"role": "user", "content": "..."}, ...)``."""
MAX_SUMMARIZED_PROMPTS = 100
"""Largest number of prompts of which `PromptList.summary` has a checksum."""


@runtime_checkable
class _Indexable(Protocol):
    """Anything with a length and items: also `datasets.Dataset`, which is not a `collections.abc.Sequence`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits of a single turn, besides those of the environment."""

    max_new_tokens: int | None = None
    """Maximum number of tokens; None, or more than the environment's: the environment's."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, besides the environment's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, with the data that belongs to it."""

    content: str | tuple[int, ...] | Messages
    """Text, token ids, or chat messages, rendered by the tokenizer's chat template. A chat that ends with an
    assistant's message is continued there."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The dataset's other columns, for the reward."""
    state: Any = None
    """Data that the task keeps for this one episode, such as a running game."""
    row: int | None = field(default=None, compare=False)
    """Row in the user's data, counted from 0, for errors."""
    agent: int = 0
    """Who reads it, in a game of several agents."""
    limits: TurnLimits = TurnLimits()
    """Limits of the turn after it."""
    ids: tuple[int, ...] | None = None
    """Token ids of the content, if they are known."""

    @property
    def messages(self) -> Messages:
        """Messages of a chat; none if the prompt is a text or token ids."""
        if isinstance(self.content, str):
            return ()
        return tuple(message for message in self.content if isinstance(message, dict))


def _spelled(value: object) -> str:
    """Spell texts, numbers and containers of these; other objects, such as images, are left out."""
    if isinstance(value, (str, int, float, np.generic, NoneType)):
        return repr(value)
    value = _in_python(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_spelled, value))}]"
    return ""


def _in_python(value: object) -> object:
    """Return an array or a tensor as lists of numbers; any other value as it is, and a tensor without numbers too."""
    if not hasattr(value, "tolist"):
        return value
    try:
        return value.tolist()
    except RuntimeError:
        return value


def by_position(rows: Sequence[ItemT]) -> Sequence[ItemT]:
    """Return rows so that index i gives the i-th row; pandas would look indices up among the table's labels.

    Args:
        rows: a pandas Series becomes a list of its values, a data frame a list of mappings from column to value, and so
            do arrays and tables of pyarrow; any other sequence is returned as it is.

    Raises:
        ValueError: if two columns of a data frame or table have the same name.
    """
    if hasattr(rows, "to_pylist"):
        _check_columns_differ(getattr(rows, "column_names", ()))
        in_python: Sequence[ItemT] = rows.to_pylist()
        return in_python
    if not hasattr(rows, "iloc"):
        return rows
    return _rows_of_pandas(rows)


def rows_by_position(rows: Sequence[ItemT], name: str) -> Sequence[ItemT]:
    """Return what `by_position` does; raise a ValueError, with this name, if it is no sequence of rows.

    A mapping from column to values, or from split to rows, would be read as the names of its columns or splits.
    """
    rows = by_position(rows)
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, _Indexable):
        raise ValueError(
            f"{name} is {rows!r:.200}, expected a sequence of rows: texts, id lists, chats or mappings (for a dataset, "
            "give one split; for a streamed one, open its file with textenv.load_prompts)"
        )
    return rows


def _check_columns_differ(names: Sequence[str]) -> None:
    """Raise a ValueError if two columns of a table have the same name."""
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ValueError(f"the table has several columns named {', '.join(repeated)}: rename them")


def _rows_of_pandas(table: Any) -> list[Any]:
    """Return the values of a pandas Series, or the rows of a data frame; raise as `by_position`."""
    if not hasattr(table, "columns"):
        return table.tolist()
    names = [str(name) for name in table.columns]
    _check_columns_differ(names)
    values_by_row = table.itertuples(index=False, name=None)
    return [dict(zip(names, values, strict=True)) for values in values_by_row]


class PromptList:
    """Prompts from any sequence, in shuffled order; every prompt is used once before one repeats.

    Seed and position define the whole order, so saving these two is enough. The list copies nothing into memory:
    `textenv.load_prompts` and a `datasets.Dataset` read from disk on demand.

    Args:
        prompts: texts, token ids, chat messages, or mappings with a ``"prompt"`` and other columns; also a Series or a
            data frame of pandas, or an array or a table of pyarrow, which are copied.

    Raises:
        ValueError: if it is not a sequence, or is empty.

    Example:
        >>> deck = PromptList(["one", "two", "three"])
        >>> sorted(prompt.content for prompt in deck.sample_prompts(range(3), seed=7))
        ['one', 'three', 'two']
    """

    def __init__(self, prompts: Sequence[object]) -> None:
        self.prompts = rows_by_position(prompts, "prompts")
        if not len(self.prompts):
            raise ValueError("prompts is empty, expected at least one")

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at this index of the sequence; raise as `as_prompt` does."""
        return as_prompt(row_of(self.prompts, index), self.prompts[index])

    @functools.cached_property
    def summary(self) -> str:
        """Number of rows, and a checksum of up to `MAX_SUMMARIZED_PROMPTS` of them."""
        count = len(self.prompts)
        step = math.ceil(count / MAX_SUMMARIZED_PROMPTS)
        checksum = 0
        for index in range(0, count, step):
            checksum = crc32(_spelled(self.prompts[index]).encode("utf-8", "backslashreplace"), checksum)
        return f"{count:,} with the checksum {checksum:08x}"

    def only(self, indices: Sequence[int]) -> Self:
        """Return a copy of this list that has only the prompts at these indices; it shares all else with this one."""
        selection = copy.copy(self)
        selection.prompts = Subset(self.prompts, np.array(indices, dtype=np.int64))
        selection.__dict__.pop("summary", None)  # a cached property, computed from all prompts
        return selection

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Return the prompts at these positions; see `textenv.envs.task.Task.sample_prompts`."""
        count = len(self.prompts)
        sampled = []
        for number in numbers:
            epoch, position = divmod(number, count)
            index = shuffled_indices(count, seed, epoch)[position]
            sampled.append(self.prompt(int(index)))
        return sampled


@functools.lru_cache(maxsize=2)
def shuffled_indices(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the prompts in one pass over all, int64 ``[count]``."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class PromptOrder:
    """State of prompt sampling: a seed, and a position in the endless order that the seed defines."""

    def __init__(self) -> None:
        self._seed_and_position: tuple[int, int] | None = None
        self._was_restored = False

    @property
    def state(self) -> dict[str, int] | None:
        """``seed`` and ``position``, to save and restore; None before the first start.

        The next `start` keeps a restored state, even if ``anew``, because a resumed run also seeds its environment.
        """
        if self._seed_and_position is None:
            return None
        seed, position = self._seed_and_position
        return {"seed": seed, "position": position}

    @state.setter
    def state(self, saved: Mapping[str, int] | None) -> None:
        if saved is None:
            self._seed_and_position = None
        else:
            self._seed_and_position = (int(saved["seed"]), int(saved["position"]))
        self._was_restored = saved is not None

    @property
    def seed(self) -> int:
        """Seed of the order; call `start` first."""
        assert self._seed_and_position is not None
        return self._seed_and_position[0]

    def start(self, rng: np.random.Generator, *, anew: bool) -> None:
        """Draw a new order if there is none, or if ``anew`` and no state was restored.

        Args:
            rng: generator that gives the seed.
            anew: True if the user has just given a seed, so that the order begins again.
        """
        if self._seed_and_position is None or (anew and not self._was_restored):
            seed = int(rng.integers(2**62))
            self._seed_and_position = (seed, 0)
        self._was_restored = False

    def next(self, n: int) -> range:
        """Return the next n positions; call `start` first."""
        assert self._seed_and_position is not None
        seed, position = self._seed_and_position
        end = position + n
        self._seed_and_position = (seed, end)
        return range(position, end)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Context with a new, separate order; on exit, this order continues unchanged."""
        seed_and_position = self._seed_and_position
        was_restored = self._was_restored
        self._seed_and_position = None
        self._was_restored = False
        try:
            yield
        finally:
            self._seed_and_position = seed_and_position
            self._was_restored = was_restored


def as_prompt(index: int, prompt: object) -> Prompt:
    """Convert one item of a dataset to a `Prompt`.

    Raises:
        ValueError: if a mapping has no ``"prompt"``, or the prompt is empty, not valid Unicode, or of another type;
            the message has the index.
    """
    # The prompt's column of a row
    columns: Mapping[str, object] = {}
    if isinstance(prompt, Mapping):
        columns = {str(name): value for name, value in prompt.items() if name != "prompt"}
        prompt = _prompt_column(index, prompt, columns)
    prompt = _in_python(prompt)

    # A text, a chat or token ids
    content: str | tuple[int, ...] | Messages
    if isinstance(prompt, str):
        content = prompt
    elif is_messages(prompt):
        content = tuple(read_messages(prompt, where=f"prompt {index}", from_data=True))
    elif isinstance(prompt, bytes | bytearray):
        raise ValueError(f"prompt {index} is {prompt!r:.200}, which are bytes: decode them to text")
    elif isinstance(prompt, Sequence) and all(map(_is_token_id, prompt)):
        content = tuple(int(token) for token in prompt)
    else:
        raise ValueError(f"prompt {index} is {prompt!r:.200}, expected text, a list of token ids, or chat messages")

    # Neither empty nor broken Unicode
    if not content:
        raise ValueError(f"prompt {index} is empty: a policy needs at least one token to start from")
    if not isinstance(content[0], int):
        try:
            check_unicode(content)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    return Prompt(content, columns, row=index)


def _is_token_id(token: object) -> bool:
    return isinstance(token, (int, np.integer)) and not isinstance(token, bool)


def _prompt_column(index: int, row: Mapping[str, object], columns: Mapping[str, object]) -> object:
    """Return the prompt of a row; raise a ValueError if it has none, or a column with a reserved name."""
    if "prompt" not in row:
        hint = ""
        if {"role", "content"} <= set(row):
            hint = "; a chat is a list of messages, also if there is only one"
        raise ValueError(f"prompt {index} has the columns {sorted(map(str, row))}, expected one named 'prompt'{hint}")
    reserved_names = sorted(set(columns) & RESERVED)
    if reserved_names:
        raise ValueError(
            f"prompt {index} has columns named {reserved_names}, but a reward function has "
            "other arguments of these names: rename them"
        )
    return row["prompt"]


# --- splits --------------------------------------------------------------------------------------------------------

SPLITS = {"train": range(3), "test": range(3, 4)}
"""Quarters of the prompts (by content hash) in each split."""


class Subset(Sequence[ItemT]):
    """Selected items of a sequence, read on demand."""

    def __init__(self, items: Sequence[ItemT], indices: np.ndarray) -> None:
        self._items = by_position(items)
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> Subset[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | Subset[ItemT]:
        if isinstance(index, slice):
            return Subset(self._items, self._indices[index])
        return self._items[int(self._indices[index])]

    def row(self, index: int) -> int:
        """Return the index of an item in the sequence from which the items were selected."""
        return row_of(self._items, int(self._indices[index]))


def row_of(items: Sequence[object], index: int) -> int:
    """Return the row of an item in the user's data; ``items`` is this data or a `Subset` of it."""
    if isinstance(items, Subset):
        return items.row(index)
    return int(index)


def split_prompts(prompts: Sequence[ItemT], split: str, *, all_if_few: bool = False) -> Subset[ItemT]:
    """Return the prompts of one split: ``"train"`` has about three quarters, ``"test"`` the others.

    A prompt's split depends on its content alone. So the splits cannot overlap, even by copies with other white space,
    and prompts that are added later do not move the others.

    Args:
        prompts: the prompts of both splits.
        split: ``"train"`` or ``"test"``.
        all_if_few: give all prompts to both splits if one would get none; the log says so.

    Raises:
        ValueError: if the split is unknown, or gets no prompt.

    Example:
        >>> len(split_prompts([f"prompt {i}" for i in range(100)], "test"))
        18
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {sorted(SPLITS)}")
    prompts = rows_by_position(prompts, "prompts")
    indices = []
    count = 0
    for index, prompt in enumerate(prompts):
        quarter = content_hash(as_prompt(index, prompt)) % 4
        if quarter in SPLITS[split]:
            indices.append(index)
        count += 1
    if all_if_few and not 0 < len(indices) < count:
        logger.warning("%d prompts are too few to hold some out: training and evaluation use them all", count)
        indices = list(range(count))
    if not indices:
        raise ValueError(f"none of the {len(prompts)} prompts is in split {split!r}: give more prompts")
    return Subset(prompts, np.array(indices))


def check_no_overlap(train: Sequence[object], test: Sequence[object]) -> None:
    """Raise a ValueError if a prompt is in both, by content; for splits not made by `split_prompts`."""
    train = rows_by_position(train, "train")
    test = rows_by_position(test, "test")
    train_hashes = {content_hash(as_prompt(index, prompt)) for index, prompt in enumerate(train)}
    in_both = []
    for index, prompt in enumerate(test):
        if content_hash(as_prompt(index, prompt)) in train_hashes:
            in_both.append(index)
    if in_both:
        first = in_both[0]
        raise ValueError(
            f"{len(in_both)} of {len(test)} test prompts are also training prompts, the first at {first}: "
            f"{as_prompt(first, test[first]).content!r:.200}. Remove them from one of the two, or "
            "use split_prompts."
        )


def content_hash(prompt: Prompt) -> int:
    """Return a 64-bit hash of the content alone; runs of white space count as one space."""
    if isinstance(prompt.content, str):
        text = _with_single_spaces(prompt.content)
    elif prompt.messages:
        messages = []
        for message in prompt.messages:
            messages.append((str(message["role"]), _with_single_spaces(str(message.get("content", "")))))
        text = repr(messages)
    else:
        text = _with_single_spaces(repr(prompt.content))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _with_single_spaces(text: str) -> str:
    return " ".join(text.split())
