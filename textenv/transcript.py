"""The transcript: token ids of the episodes under way, appended to and never rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

from textenv.lm.loading import vocabulary_size
from textenv.task import Prompt, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """Rows of token ids: a prompt, then the policy's tokens.

    Args:
        rows: episodes held side by side.
        tokenizer: its EOS ends a turn; its pad (else EOS) fills what is not yet written.
        max_prompt_tokens: longest prompt.
        max_new_tokens: most tokens of a response.
    """

    def __init__(
        self, rows: int, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int, max_new_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.num_tokens = vocabulary_size(tokenizer)
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad = 0 if pad is None else int(pad)
        self.tokens = np.full((rows, max_prompt_tokens + max_new_tokens), self.pad, dtype=np.int64)
        self.length = np.zeros(rows, dtype=np.int64)
        self.prompt_length = np.zeros(rows, dtype=np.int64)
        self.terminated = np.zeros(rows, dtype=bool)
        self.truncated = np.zeros(rows, dtype=bool)
        self.prompts: list[Prompt | None] = [None] * rows

    def begin(self, row: int, prompt: Prompt) -> None:
        """Start an episode in this row; raises as `ids` does."""
        ids = self.ids(prompt)
        self.tokens[row] = self.pad
        self.tokens[row, : len(ids)] = ids
        self.length[row] = self.prompt_length[row] = len(ids)
        self.terminated[row] = self.truncated[row] = False
        self.prompts[row] = prompt

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ValueError: if the prompt has no token, an id outside the vocabulary, or more than the limit.
        """
        ids = prompt_ids(prompt, self.tokenizer)
        if min(ids) < 0 or max(ids) >= self.num_tokens:
            raise ValueError(f"prompt {prompt.content!r} has an id outside the tokenizer's 0 to {self.num_tokens - 1}")
        if len(ids) > self.max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.content!r} has {len(ids)} tokens, the limit is {self.max_prompt_tokens}: "
                "shorten it or raise max_prompt_tokens"
            )
        return ids

    def append(self, rows: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Write one token into each of these rows (int64 indices); returns bool, the rows that ended by it."""
        self.tokens[rows, self.length[rows]] = actions
        self.length[rows] += 1
        full = self.length[rows] - self.prompt_length[rows] >= self.max_new_tokens
        ended = actions == (-1 if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id)
        self.terminated[rows] = ended
        self.truncated[rows] = full & ~ended
        return full | ended

    def turns(self, rows: Sequence[int] | np.ndarray) -> list[Turn]:
        """The turns in these rows, for the task to score."""
        found = []
        for row in rows:
            ids, start = self.tokens[row, : self.length[row]].tolist(), self.prompt_length[row]
            prompt = self.prompts[row]
            assert prompt is not None, "a row is scored after it was begun"
            found.append(Turn(prompt, ids[:start], ids[start:], bool(self.terminated[row]), self.tokenizer))
        return found

    def rollout(self, scores: Sequence[float]) -> TensorDict:
        """The finished episodes as a rollout ``[rows, T]``, the score on each one's last token."""
        rows, steps = len(self.length), int(self.length.max()) - 1
        position = np.arange(steps)
        last = position == (self.length - 2)[:, None]
        group = np.array([prompt.group if prompt else 0 for prompt in self.prompts], dtype=np.int64)
        columns = {
            "observation": self.tokens[:, :steps],
            "action": self.tokens[:, 1 : steps + 1],
            "reward": np.where(last, np.asarray(scores, dtype=np.float32)[:, None], np.float32(0)),
            "terminated": last & self.terminated[:, None],
            "truncated": last & self.truncated[:, None],
            "mask": (position >= (self.prompt_length - 1)[:, None]) & (position <= (self.length - 2)[:, None]),
            "is_init": np.broadcast_to(position == 0, (rows, steps)),
            "group": np.broadcast_to(group[:, None], (rows, steps)),
        }
        return TensorDict({name: torch.from_numpy(x.copy()) for name, x in columns.items()}, batch_size=[rows, steps])


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt; text gets the tokenizer's own special tokens, a leading BOS once.

    Raises:
        ValueError: if there are none.
    """
    if not isinstance(prompt.content, str):
        return list(prompt.content)
    ids = list(tokenizer(prompt.content)["input_ids"])
    # A tokenizer that closes a text with EOS would end the answer before it begins, and a text that spells
    # out its BOS would get a second one.
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids.pop(0)
    if not ids:
        raise ValueError(f"prompt {prompt.content!r} has no tokens: a policy needs at least one to start from")
    return ids
