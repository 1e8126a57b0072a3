"""Transcript: token ids of the running episodes; ids are only appended, and no text is tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from textenv.envs.action_masks import ActionMasks
from textenv.envs.limits import Limits, StopConditions
from textenv.envs.tools import Tools
from textenv.envs.turn import TRUNCATED, Turn
from textenv.lm.ends import closing_ids
from textenv.prompts.prompts import Prompt
from textenv.prompts.tokenize import is_chat, prompt_ids, reply_ids, text_ids, without_end
from textenv.rendering import draw, shade
from textenv.rewards.scores import Scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OverlongPromptError(ValueError):
    """Prompt with more tokens than ``max_prompt_tokens``."""


class Transcript:
    """Token ids, one episode per row: a prompt, then the policy's tokens; in a conversation, replies in between.

    Padding is the tokenizer's pad token, else EOS, else 0.
    """

    def __init__(
        self, rows: int, tokenizer: PreTrainedTokenizerBase, *, limits: Limits, masks: ActionMasks, ends: StopConditions
    ) -> None:
        self.tokenizer, self.limits, self.masks, self.ends = tokenizer, limits, masks, ends
        self.tools: Tools | None = None
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad = 0 if pad is None else int(pad)
        shape = (rows, limits.width)
        self.tokens = np.full(shape, self.pad, dtype=np.int64)
        self.chosen = np.zeros(shape, dtype=bool)
        """Bool ``[rows, width]``: tokens that the policy chose."""
        self.reward = np.zeros(shape, dtype=np.float32)
        """float32 ``[rows, width]``: reward of each token."""
        self.allowed = np.zeros(shape, dtype=np.int64)
        """int64 ``[rows, width]``: row of ``masks.sets`` that applied when the token was chosen."""
        self._rows = np.arange(rows)
        self.length = np.zeros(rows, dtype=np.int64)
        self.prompt_length = np.zeros(rows, dtype=np.int64)
        self.turn_start = np.zeros(rows, dtype=np.int64)
        self.turn_limit = np.zeros(rows, dtype=np.int64)
        """Length of the text at which the current turn is cut."""
        self.turn = np.zeros(rows, dtype=np.int64)
        """Index of the current turn, from 0."""
        self.open = np.zeros(rows, dtype=np.int64)
        """Row of ``masks.sets`` for the next token."""
        self.terminated = np.zeros(rows, dtype=bool)
        self.truncated = np.zeros(rows, dtype=bool)
        self.end_reason: list[str] = [""] * rows
        self.applies = np.zeros(rows, dtype=bool)
        """Rows with a reward for at least one turn; the others are False in the rollout's mask."""
        self.group = np.zeros(rows, dtype=np.int64)
        self.prompts: list[Prompt | None] = [None] * rows
        self.tool_calls: list[list[dict[str, Any]]] = [[] for _ in range(rows)]
        self._unpaid: list[tuple[int, int, Turn]] = []

    def begin(self, row: int, prompt: Prompt, *, group: int = 0) -> None:
        """Start an episode in this row; raises as `ids` does."""
        ids = self.ids(prompt)
        self.tokens[row] = self.pad
        self.chosen[row] = False
        self.reward[row] = 0
        self.tokens[row, : len(ids)] = ids
        self.prompt_length[row] = len(ids)
        self._begin_turn(row, len(ids))
        self.turn[row] = 0
        self.terminated[row] = self.truncated[row] = self.applies[row] = False
        if self._unpaid:  # from an abandoned episode
            self._unpaid = [entry for entry in self._unpaid if entry[0] != row]
        self.prompts[row], self.group[row], self.end_reason[row], self.tool_calls[row] = prompt, group, "", []
        self._look_ahead(np.array([row]))

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            OverlongPromptError: if the prompt has more tokens than the limit.
            ValueError: if it has no token, or an id outside the vocabulary.
        """
        n, most = self.ends.num_tokens, self.limits.max_prompt_tokens
        ids = self.tools.prompt_ids(prompt) if self.tools else prompt_ids(prompt, self.tokenizer)
        if min(ids) < 0 or max(ids) >= n:
            raise ValueError(f"{_named(prompt)} has ids outside the vocabulary, expected 0 to {n - 1}")
        if len(ids) > most:
            raise OverlongPromptError(
                f"{_named(prompt)} has {len(ids)} tokens, the limit is {most}: shorten it, raise max_prompt_tokens, "
                "or leave out such prompts by overlong='skip' (--overlong skip)"
            )
        return ids

    def append(self, rows: np.ndarray | slice, actions: np.ndarray) -> np.ndarray:
        """Append the policy's tokens to these rows (int64 indices, or a slice); return rows whose turn is over."""
        indices = self._rows[rows]
        position = self.length[rows]
        length = position + 1

        # Write into flat arrays, which is faster
        flat = indices * self.tokens.shape[1] + position
        self.tokens.reshape(-1)[flat] = actions
        self.chosen.reshape(-1)[flat] = True
        if self.masks.active:
            self.allowed.reshape(-1)[flat] = self.open[rows]
        self.length[rows] = length

        # A turn is ended by some tokens, or by a stop text, which only some tokens can complete
        ended = self.ends.token[actions]
        if self.ends.texts:
            enough = length - self.turn_start[rows] >= self.limits.min_new_tokens
            candidates = self.ends.may_complete[actions] & ~ended & enough
            for i in np.flatnonzero(candidates):
                turn = self._turn(indices[i], terminated=True)
                ended[i] = turn.completed(self.ends.texts) is not None
        self.terminated[rows] = ended  # of the turn; `finish` or `answer` sets the episode's

        # It is over at a limit, too; the others go on
        over = ended | (length >= self.turn_limit[rows])
        if self.masks.active:
            self._look_ahead(indices[~over])
        return indices[over]

    def play(self, rows: np.ndarray, turns: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Append token ids to each of these rows until its turn is over; return how many, and rows that are over."""
        taken, over = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
        length = np.array([len(turn) for turn in turns])
        while len(here := np.flatnonzero(~over & (taken < length))):
            place = int(taken[here[0]])
            tokens = np.array([turns[i][place] for i in here.tolist()])
            tokens = self.masks.check(tokens, slice(None), self.open[rows[here]])
            over[here] = np.isin(rows[here], self.append(rows[here], tokens))
            taken[here] += 1
        return taken, rows[over]

    def write(self, row: int, completion: Any) -> None:
        """Append a completion made elsewhere, ids or a text; raise a ValueError if it cannot be one of this policy."""
        # Token ids; a text is ended as the chat template ends a message, or by EOS, if there is one
        ids = completion
        end: list[int] = []
        if isinstance(completion, str):
            prompt = self.prompts[row]
            end = closing_ids(self.tokenizer, chat=prompt is not None and is_chat(prompt))
            text = without_end(completion, self.tokenizer).removesuffix(str(self.tokenizer.decode(end)))
            ids = text_ids(text, self.tokenizer)
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype.kind in "OUS" or not (len(ids) or end):
            raise ValueError(f"it is {completion!r:.200}, expected a text, or a list of at least one token id")

        # One by one, as the policy would choose them
        rows = np.array([row])
        over = False
        for position in range(len(ids)):
            if over:
                raise ValueError(
                    f"it has {len(ids)} tokens, but ends after {position} by EOS, the end of a turn, a stop or "
                    f"max_new_tokens={self.limits.max_new_tokens}: cut off the rest (padding, too)"
                )
            token = self.masks.check(ids[position : position + 1], slice(None), self.open[rows])
            over = len(self.append(rows, token)) > 0

        # The end of a turn that is not over: that of a text, or where the ids end, unless that is padding
        if over:
            return
        if end:
            for end_id in end:
                if not over:
                    over = len(self.append(rows, np.array([end_id]))) > 0
        elif ids[-1] == self.pad:
            raise ValueError(f"it ends with the padding token {self.pad}: cut off padding")

    def turns(self, rows: np.ndarray) -> dict[int, Turn]:
        """Turns that have just ended in these rows, for the task to reply to and score."""
        turns = {int(row): self._turn(row, terminated=bool(self.terminated[row])) for row in rows}
        self._unpaid += [(row, int(self.length[row]) - 1, turn) for row, turn in turns.items()]
        return turns

    def finish(self, turns: Mapping[int, Turn]) -> None:
        """End the episodes after their only turn, for a task without ``reply``."""
        for row, turn in turns.items():
            reason = "length"
            if turn.terminated:
                reason = "eos" if turn.completion_ids[-1] in self.ends.own.ids else "stop"
            self._end(row, turn, terminated=turn.terminated, reason=reason)

    def answer(self, row: int, turn: Turn, reply: Any) -> None:
        """Append the environment's reply to a turn, or end the episode.

        Raises:
            TypeError: if the reply is not text, None or TRUNCATED.
        """
        self.tool_calls[row] = turn.tool_calls
        if reply is None or reply is TRUNCATED:
            self._end(row, turn, terminated=reply is None, reason="task")
            return
        if not isinstance(reply, (str, list)):
            raise TypeError(
                f"reply returned {reply!r:.200} after {turn.completion!r}, expected text, None or TRUNCATED"
            )
        if turn.index + 1 >= self.limits.max_turns:
            self._end(row, turn, terminated=False, reason="turns")
            return
        ids, at = reply_ids(reply, turn.prompt, turn.completion_ids, self.tokenizer), self.length[row]
        if at + len(ids) >= self.tokens.shape[1]:
            self._end(row, turn, terminated=False, reason="length")
            return
        turn.last = False
        if isinstance(reply, list):  # the results of tools: the task does not know of this turn
            self._unpaid = [entry for entry in self._unpaid if entry[2] is not turn]
        self.tokens[row, at : at + len(ids)] = ids
        self._begin_turn(row, at + len(ids))
        self.turn[row] += 1
        self.terminated[row] = False
        self._look_ahead(np.array([row]))

    @property
    def unpaid(self) -> list[Turn]:
        """Finished turns without a reward yet, in row order."""
        if len(self._unpaid) > 1:
            self._unpaid.sort(key=lambda entry: entry[:2])
        return [turn for _, _, turn in self._unpaid]

    @property
    def unpaid_rows(self) -> list[int]:
        """Row of each turn in `unpaid`."""
        return [row for row, _, _ in self._unpaid]

    def assign_reward(self, scores: Scores) -> np.ndarray:
        """Assign each unpaid turn's score to its last token, or per token; return the sums, float32 ``[rows]``."""
        paid = np.zeros(len(self.length), dtype=np.float32)
        if not self._unpaid:
            return paid
        failed = {self._unpaid[index][0] for index in scores.failed}
        for (row, position, turn), earned in zip(self._unpaid, scores.earned, strict=True):
            if earned is None or row in failed:
                continue
            self.applies[row] = True
            tokens = slice(position + 1 - len(turn.completion_ids), position + 1)
            self.reward[row, tokens if isinstance(earned, np.ndarray) else position] = earned
            paid[row] += np.sum(earned)
        self._unpaid = []
        return paid

    def render(self, row: int) -> str:
        """Text of one row so far for a terminal, each chosen token shaded by its reward."""
        return shade(**self._shown(row))

    def draw(self, row: int) -> np.ndarray:
        """Image of one row so far; see `textenv.rendering.draw`."""
        return draw(**self._shown(row))

    def rollout(self) -> TensorDict:
        """Return the finished episodes as a rollout ``[rows, T]``; see `textenv.rollout`."""
        rows, steps = len(self.length), int(self.length.max()) - 1
        last = (np.arange(steps) == (self.length - 2)[:, None]) & self.applies[:, None]
        columns = {
            "observation": self.tokens[:, :steps],
            "action": self.tokens[:, 1 : steps + 1],
            "reward": self.reward[:, 1 : steps + 1],
            "terminated": last & self.terminated[:, None],
            "truncated": last & self.truncated[:, None],
            "mask": self.chosen[:, 1 : steps + 1] & self.applies[:, None],
            "is_init": np.broadcast_to(np.arange(steps) == 0, (rows, steps)),
            "group": np.broadcast_to(self.group[:, None], (rows, steps)),
        }
        if self.masks.active:
            used, allowed = np.unique(np.where(columns["mask"], self.allowed[:, 1 : steps + 1], 0), return_inverse=True)
            columns["allowed"] = allowed.reshape(rows, steps)
        rollout = TensorDict(
            {name: torch.from_numpy(x.copy()) for name, x in columns.items()}, batch_size=[rows, steps]
        )
        if self.masks.active:
            rollout["allowed_sets"] = NonTensorData(self.masks.sets[used], batch_size=rollout.batch_size)
        return rollout

    def _shown(self, row: int) -> dict[str, Any]:
        """Arguments of `shade` and `draw` for one row so far."""
        part = (row, slice(int(self.length[row])))
        return {
            "tokens": self.tokens[part].tolist(),
            "tokenizer": self.tokenizer,
            "chosen": self.chosen[part],
            "values": self.reward[part],
        }

    def _begin_turn(self, row: int, at: int) -> None:
        """Begin a turn of the policy at this text length."""
        self.length[row] = self.turn_start[row] = at
        self.turn_limit[row] = min(at + self.limits.max_new_tokens, self.tokens.shape[1])

    def _turn(self, row: int, *, terminated: bool) -> Turn:
        ids = self.tokens[row, : self.length[row]].tolist()
        start = self.turn_start[row]
        prompt = self.prompts[row]
        assert prompt is not None, "call begin first"
        return Turn(
            prompt,
            prompt_ids=ids[: self.prompt_length[row]],
            context_ids=ids[:start],
            completion_ids=ids[start:],
            terminated=terminated,
            tokenizer=self.tokenizer,
            stop=self.ends.stop_texts if terminated else (),
            index=int(self.turn[row]),
            tool_calls=self.tool_calls[row],
        )

    def _end(self, row: int, turn: Turn, *, terminated: bool, reason: str) -> None:
        turn.last = True
        self.terminated[row], self.truncated[row], self.end_reason[row] = terminated, not terminated, reason

    def _look_ahead(self, rows: np.ndarray) -> None:
        """Compute the mask of the next token in these rows."""
        self.open[rows] = self.masks.index(
            lambda i: self._turn(rows[i], terminated=False), self.length[rows] - self.turn_start[rows]
        )


def _named(prompt: Prompt) -> str:
    """Return a prompt for an error, with its row in the data."""
    number = "" if prompt.row is None else f" {prompt.row}"
    return f"prompt{number} ({prompt.content!r:.200})"
