"""Transcript: token ids of the running episodes; in a row ids are only appended, and no text is tokenized again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from textenv.envs.action_masks import ActionMasks, WordRule
from textenv.envs.limits import Limits, StopConditions
from textenv.envs.tools import Tools
from textenv.envs.turn import TRUNCATED, Continuation, ToolCall, Turn
from textenv.lm.ends import closing_ids
from textenv.prompts.messages import Message, with_answer
from textenv.prompts.prompts import Messages, Prompt, TurnLimits
from textenv.prompts.tokenize import (
    answer_ids,
    begins_message,
    is_chat,
    prompt_ids,
    reply_ids,
    separate_ids,
    without_end,
)
from textenv.rendering import draw, shade
from textenv.rewards.scores import Scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class OverlongPromptError(ValueError):
    """Prompt with more tokens than ``max_prompt_tokens``."""


class _UnscoredTurn(NamedTuple):
    """Finished turn without a reward yet."""

    episode: int
    row: int
    last_token: int | None
    """Column of the turn's last token; None if another text has replaced the row's."""
    turn: Turn


@cache
def _warn_of_no_room(max_length: int) -> None:
    """Log a warning that episodes are cut, once for each length: such a game may never be played to its end."""
    logger.warning(
        "an episode was truncated before its end, because its text has no room for the next turn (max_length is %d "
        "tokens): raise max_length, as far as the model reads so many, or lower max_new_tokens",
        max_length,
    )


class Transcript:
    """Token ids, one episode per row: a prompt, then the policy's tokens; in a conversation, replies in between.

    An episode whose task gives the model a new context goes on in a further row, which is added at the end. So the
    first row of episode i is row i. A game of several agents is an episode for each of them, one behind the other: game
    g has the episodes ``agents * g`` to ``agents * g + agents - 1``, of which one is played at a time.

    Rows are padded on the right with the tokenizer's pad token, else EOS, else 0. The arrays without a description
    have the shape ``[rows]``; they may have room for more rows than there are (``num_rows``).

    Args:
        rows: number of episodes.
        tokenizer: the policy's tokenizer.
        limits: length limits; ``width`` is the maximum length of a row.
        masks: masks of allowed tokens.
        ends: conditions that end a turn.
        agents: number of agents of a game.
        one_row: write a new context over the row of its episode, instead of a further row; for `TextVectorEnv.step`.
        earlier_turns: ``"transcript"`` appends a reply to the answers as they were written. ``"template"``: each later
            turn of a chat has a new context, all messages as the chat template writes them.
    """

    def __init__(
        self,
        rows: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limits: Limits,
        masks: ActionMasks,
        ends: StopConditions,
        agents: int = 1,
        one_row: bool = False,
        earlier_turns: Literal["transcript", "template"] = "transcript",
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.masks = masks
        self.ends = ends
        self.agents = agents
        self.one_row = one_row
        self.earlier_turns = earlier_turns
        self.tools: Tools | None = None
        self.pad = _padding_id(tokenizer)

        # Tokens and what belongs to each of them
        shape = (rows, limits.width)
        self.tokens = np.full(shape, self.pad, dtype=np.int64)
        self.chosen = np.zeros(shape, dtype=bool)
        """Bool ``[rows, width]``: tokens that the policy chose."""
        self.reward = np.zeros(shape, dtype=np.float32)
        """float32 ``[rows, width]``: reward of each token."""
        self.allowed = np.zeros(shape, dtype=np.int64)
        """int64 ``[rows, width]``: row of ``masks.sets`` that applied when the token was chosen."""

        # Where each row stands
        self.num_rows = rows
        """Number of rows so far."""
        self._rows = np.arange(rows)
        self.episode = np.arange(rows)
        """Episode of each row."""
        self.row_number = np.zeros(rows, dtype=np.int64)
        """Number of each row in its episode, from 0; with ``one_row`` that of the context that is written there."""
        self.stay = np.zeros(rows, dtype=np.int64)
        """Number of times that the episode had gone to another row before it came to this one, the last time."""
        self._last_row = np.arange(rows)
        """By episode: the row that was begun last."""
        self._last_stay = np.zeros(rows, dtype=np.int64)
        """By episode: the highest number in ``stay``."""
        self.length = np.zeros(rows, dtype=np.int64)
        self.prompt_length = np.zeros(rows, dtype=np.int64)
        self.turn_start = np.zeros(rows, dtype=np.int64)
        self.turn_limit = np.zeros(rows, dtype=np.int64)
        """Length of the text at which the current turn is cut."""
        self.turn_index = np.zeros(rows, dtype=np.int64)
        """Index of the current turn in its episode, from 0."""
        self.next_mask = np.zeros(rows, dtype=np.int64)
        """Row of ``masks.sets`` for the next token."""
        self.terminated = np.zeros(rows, dtype=bool)
        self.truncated = np.zeros(rows, dtype=bool)
        self.end_reason: list[str] = [""] * rows

        # Prompts and rewards
        self.has_score = np.zeros(rows, dtype=bool)
        """Episodes with a reward for at least one turn; the rows of others are False in the rollout's mask."""
        self.group = np.zeros(rows, dtype=np.int64)
        self.prompts: list[Prompt | None] = [None] * rows
        """Prompt of each row; None in rows that are not begun, such as those of an agent who has not been asked yet."""
        self._messages: list[Messages] = [()] * rows
        """Chat with which each row begins: the prompt's, or with ``earlier_turns="template"`` all messages so far."""
        self.last_turn: list[Turn | None] = [None] * rows
        """Turn of each row that ended last."""
        self._limits_of_turn: dict[int, TurnLimits] = {}
        """By row: limits of its present turn besides ``limits``, if it has any."""
        self.tool_calls: list[list[ToolCall]] = [[] for _ in range(rows)]
        self._unscored: list[_UnscoredTurn] = []

    def begin(self, first_row: int, prompt: Prompt, *, group: int = 0) -> int:
        """Begin a game in this row and, if it has several agents, those below it; raise as `ids` does.

        Returns:
            Row of the agent who begins.
        """
        ids = self.ids(prompt)
        for agent in range(self.agents):
            row = first_row + agent

            # Forget the row's former episode, which may have been abandoned
            self.has_score[row] = False
            if self._unscored:
                self._unscored = [entry for entry in self._unscored if entry.row != row]

            self.group[row] = group * self.agents + agent
            self.row_number[row] = 0
            self.stay[row] = 0
            self.tool_calls[row] = []
        self._check_agent(prompt)
        row = first_row + prompt.agent
        self._write_prompt(row, prompt, ids, turn_index=0)
        return row

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            OverlongPromptError: if the prompt has more tokens than the limit.
            ValueError: if it has no token, or an id outside the vocabulary.
        """
        ids = self._prompt_ids(prompt)
        max_length = self.limits.max_prompt_tokens
        if len(ids) > max_length:
            raise OverlongPromptError(
                f"{_description(prompt)} has {len(ids)} tokens, the limit is {max_length}: shorten it, "
                "raise max_prompt_tokens, or leave out such prompts by overlong='skip' (--overlong skip)"
            )
        return ids

    def append(self, rows: np.ndarray | slice, actions: np.ndarray) -> np.ndarray:
        """Append a token of the policy to each of these rows; return the rows whose turn is over.

        Args:
            rows: int64 indices, or a slice, which is faster.
            actions: int64, one token id per row.
        """
        indices = self._rows[rows]
        position = self.length[rows]
        length = position + 1

        # Write into flat arrays, which is faster
        flat = indices * self.tokens.shape[1] + position
        self.tokens.reshape(-1)[flat] = actions
        self.chosen.reshape(-1)[flat] = True
        if self.masks.active:
            self.allowed.reshape(-1)[flat] = self.next_mask[rows]
        self.length[rows] = length

        # Some tokens end a turn at once. Others may complete a stop text: only after these the text is searched
        ended = self.ends.is_end[actions]
        if self.ends.texts:
            enough = length - self.turn_start[rows] >= self.limits.min_new_tokens
            candidates = self.ends.may_complete[actions] & ~ended & enough
            for i in np.flatnonzero(candidates):
                turn = self._turn(indices[i], terminated=True)
                ended[i] = turn.find_completed(self.ends.texts) is not None
        if self._limits_of_turn:
            ended |= self._completed_own_stop(indices)
        if self.masks.complete_turns:
            ended |= self._complete(indices)
        # Here it says that the turn ended. `finish` or `continue_or_end` will write whether the episode did
        self.terminated[rows] = ended

        # A limit ends a turn, too; the other turns go on
        over = ended | (length >= self.turn_limit[rows])
        if self.masks.active:
            self._look_ahead(indices[~over])
        return indices[over]

    def play(self, rows: np.ndarray, turns: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Append token ids to each of these rows until its turn is over.

        Args:
            rows: int64 indices.
            turns: for each of these rows the ids to append; those after the end of the turn are dropped.

        Returns:
            How many ids were appended to each row (int64, like ``rows``), and the rows whose turn is over.
        """
        num_appended = np.zeros(len(rows), dtype=np.int64)
        over = np.zeros(len(rows), dtype=bool)
        length = np.array([len(turn) for turn in turns])
        while True:
            going_on = np.flatnonzero(~over & (num_appended < length))
            if not len(going_on):
                return num_appended, rows[over]

            # Rows that go on have all got the same number of tokens
            position = int(num_appended[going_on[0]])
            tokens = np.array([turns[i][position] for i in going_on.tolist()])
            current_rows = rows[going_on]
            tokens = self.masks.check(tokens, slice(None), self.next_mask[current_rows])
            rows_over = self.append(current_rows, tokens)
            over[going_on] = np.isin(current_rows, rows_over)
            num_appended[going_on] += 1

    def write(self, row: int, completion: object) -> None:
        """Append a completion that was made elsewhere, token ids or a text.

        Raises:
            ValueError: if a policy could not have written it here: a token is forbidden, or follows the turn's end.
        """
        # Token ids. A text is ended as the chat template ends a message, or by EOS, if there is one
        ids = completion
        end: list[int] = []
        if isinstance(completion, str):
            prompt = self.prompts[row]
            assert prompt is not None, "call begin first"
            end = closing_ids(self.tokenizer, chat=is_chat(prompt))
            text = without_end(completion, self.tokenizer).removesuffix(str(self.tokenizer.decode(end)))
            if isinstance(self.masks.rule, WordRule):  # it has the words as they are read by themselves
                ids = separate_ids(text, self.tokenizer)
            else:
                ids = answer_ids(text, self.tokenizer, is_message=begins_message(prompt))
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
            token = self.masks.check(ids[position : position + 1], slice(None), self.next_mask[rows])
            over = len(self.append(rows, token)) > 0

        # The turn is still open: append the end to a text. Ids stay without an end, but must not end with padding
        if over:
            return
        if end:
            for end_id in end:
                if not over:
                    over = len(self.append(rows, np.array([end_id]))) > 0
        elif ids[-1] == self.pad:
            raise ValueError(f"it ends with the padding token {self.pad}: cut off padding")

    def close_turns(self, rows: np.ndarray) -> dict[int, Turn]:
        """Return, by row, the turns that have just ended in these rows, and add them to the unscored ones."""
        turns = {}
        for row in rows:
            turn = self._turn(row, terminated=bool(self.terminated[row]))
            turns[int(row)] = turn
            self.last_turn[row] = turn
            last_token = int(self.length[row]) - 1
            self._unscored.append(_UnscoredTurn(int(self.episode[row]), int(row), last_token, turn))
        return turns

    def finish(self, turns: Mapping[int, Turn]) -> None:
        """End the episodes after their only turn, for a task without ``reply``."""
        for row, turn in turns.items():
            if not turn.terminated:
                reason = "length"
            elif turn.completion_ids[-1] in self.ends.model_ends.ids:
                reason = "eos"
            else:
                reason = "stop"
            self._end(row, turn, terminated=turn.terminated, reason=reason)

    def continue_or_end(self, row: int, turn: Turn, reply: object) -> int | None:
        """Append the environment's reply to a turn, or begin a row with a new context, or end the game.

        Args:
            row: row of the turn.
            turn: the turn that has just ended; its ``last`` is set.
            reply: a text, messages with results of tools, a `Continuation`, a `Prompt` whose content is all that the
                model sees next, or None or TRUNCATED to end the game.

        Returns:
            Row of the next turn; None if the game is over.

        Raises:
            TypeError: if the reply is none of these.
            ValueError: if a new context has no token, or an id outside the vocabulary; or if a `Continuation` is not
                behind the last turn of a row of this game.
        """
        self.tool_calls[row] = turn.tool_calls

        # The task ends the game
        if reply is None or reply is TRUNCATED:
            self._end(row, turn, terminated=reply is None, reason="task")
            return None
        if not isinstance(reply, (str, list, Prompt, Continuation)):
            raise TypeError(
                f"reply returned {reply!r:.200} after {turn.completion!r}, expected text, a Prompt, a Continuation, "
                "None or TRUNCATED"
            )

        # A limit ends it: no further turn, or no space for the reply and one more token, or word
        if turn.index + 1 >= self.limits.max_turns:
            self._end(row, turn, terminated=False, reason="turns")
            return None
        if isinstance(reply, Prompt):
            return self._continue_anew(row, turn, reply)
        if not isinstance(reply, Continuation) and self._messages[row] and self.earlier_turns == "template":
            return self._continue_by_template(row, turn, reply)
        if isinstance(reply, Continuation):
            continuation = reply
        else:
            ids = reply_ids(reply, turn.prompt, turn.completion_ids, self.tokenizer)
            continuation = Continuation(turn, ids, self._next_limits(row, reply))
        after = continuation.after
        ids = list(continuation.ids)
        next_row = self._row_of(after, row)
        if self.one_row and after is not turn:  # of whose row this one has been written over
            context = replace(after.prompt, limits=continuation.limits)
            return self._write_anew(row, turn, context, after.context_ids + after.completion_ids + ids)
        start = self.length[next_row]
        stop = start + len(ids)
        if stop + self.masks.room > self.tokens.shape[1]:
            _warn_of_no_room(self.limits.width)
            self._end(row, turn, terminated=False, reason="length")
            return None

        # It goes on: write the reply, and begin the next turn
        turn.last = False
        self._hide_turn_of_tools(turn, reply)
        self.tokens[next_row, start:stop] = ids
        self._begin_turn(next_row, stop, continuation.limits)
        self.turn_index[next_row] = turn.index + 1
        self.terminated[[row, next_row]] = False
        if next_row != row:
            self._enter(next_row, row, turn)
        self._look_ahead(np.array([next_row]))
        return next_row

    def _continue_anew(self, row: int, turn: Turn, context: Prompt) -> int | None:
        """Go on with a game in a row that begins with this context; return as `continue_or_end`, raise as `begin`."""
        # The game keeps the columns and the state of its prompt
        prompt = replace(context, columns=turn.prompt.columns, state=turn.prompt.state, row=turn.prompt.row)
        ids = self._prompt_ids(prompt)
        self._check_agent(prompt)
        return self._write_anew(row, turn, prompt, ids)

    def _continue_by_template(self, row: int, turn: Turn, reply: str | list[Message]) -> int | None:
        """Go on with a chat in a row that begins with all messages as the template writes them.

        Returns:
            As `continue_or_end`.

        Raises:
            ValueError: if the template refuses the messages.
        """
        answer: Message = {"role": "assistant", "content": turn.completion}
        new_messages: list[Message] = []
        if isinstance(reply, str):
            new_messages.append({"role": "user", "content": reply})
        else:
            assert self.tools is not None
            answer = self.tools.schemas.message(turn, number=turn.index)
            new_messages += _with_call_ids(reply, answer)
        chat = tuple(with_answer(self._messages[row], [answer, *new_messages]))

        # The task still knows the episode by its first prompt
        limits = self._next_limits(row, reply)
        ids = self._prompt_ids(replace(turn.prompt, content=chat, ids=None))
        next_row = self._write_anew(row, turn, replace(turn.prompt, limits=limits), ids)
        if next_row is not None:
            self._messages[next_row] = chat
            self._hide_turn_of_tools(turn, reply)
        return next_row

    def _next_limits(self, row: int, reply: str | list[Message]) -> TurnLimits:
        """Return the limits of the turn after a reply; with results of tools the model still answers the question."""
        if isinstance(reply, list):
            return self._limits_of_turn.get(row, TurnLimits())
        return TurnLimits()

    def _hide_turn_of_tools(self, turn: Turn, reply: object) -> None:
        """Forget a turn that the task never sees, because results of tools follow it."""
        if isinstance(reply, list):
            self._unscored = [entry for entry in self._unscored if entry.turn is not turn]

    def _write_anew(self, row: int, turn: Turn, prompt: Prompt, ids: Sequence[int]) -> int | None:
        """Go on with a game in a row that begins with these ids of a prompt; return as `continue_or_end`."""
        if len(ids) + self.masks.room > self.tokens.shape[1]:
            _warn_of_no_room(self.limits.width)
            self._end(row, turn, terminated=False, reason="length")
            return None

        # The row of the turn ends here, but neither terminated nor truncated: the game goes on
        turn.last = False
        self.terminated[row] = False
        next_row = row
        if self.one_row:
            self.row_number[row] += 1
            for index, entry in enumerate(self._unscored):
                if entry.turn is turn:
                    self._unscored[index] = entry._replace(last_token=None)
        else:
            episode = self._first_row_of_game(row) + prompt.agent
            next_row = episode
            if self.prompts[episode] is not None:
                next_row = self._add_row()
                self.episode[next_row] = episode
                self.group[next_row] = self.group[episode]
                self.row_number[next_row] = self.row_number[self._last_row[episode]] + 1
                self._last_row[episode] = next_row
                self._enter(next_row, row, turn)
        self._write_prompt(next_row, prompt, ids, turn_index=turn.index + 1)
        return next_row

    def _enter(self, next_row: int, row: int, turn: Turn) -> None:
        """Count that a game goes from ``row``, where this turn has ended, to a row of an episode that has begun."""
        episode = self.episode[next_row]
        self._last_stay[episode] += 1
        self.stay[next_row] = self._last_stay[episode]
        if episode == self.episode[row]:
            self.tool_calls[next_row] = turn.tool_calls

    def _first_row_of_game(self, row: int) -> int:
        """Return the first row of the first agent in the game of this row."""
        return int(self.episode[row]) // self.agents * self.agents

    def _check_agent(self, prompt: Prompt) -> None:
        """Raise a ValueError if there is no such agent as the one who reads this prompt."""
        if not 0 <= prompt.agent < self.agents:
            raise ValueError(f"{_description(prompt)} is for agent {prompt.agent}, expected 0 to {self.agents - 1}")

    def _row_of(self, turn: Turn, row: int) -> int:
        """Return the row that ends with this turn, in the game that is played in ``row``.

        Raises:
            ValueError: if no row of the game does.
        """
        if self.last_turn[row] is turn or self.one_row:
            return row
        game = self._first_row_of_game(row)
        for earlier_row in range(self.num_rows):
            if self.last_turn[earlier_row] is turn and self._first_row_of_game(earlier_row) == game:
                return earlier_row
        raise ValueError(f"after is the turn {turn.completion!r:.200}, expected the last turn of a row of this game")

    @property
    def unscored(self) -> list[Turn]:
        """Finished turns without a reward yet, in the order of episodes, and of time in an episode."""
        if len(self._unscored) > 1:
            self._unscored.sort(key=_episode_and_index)
        return [entry.turn for entry in self._unscored]

    @property
    def unscored_episodes(self) -> list[int]:
        """Episode of each turn in `unscored`. Read `unscored` first, because it sorts the turns."""
        return [entry.episode for entry in self._unscored]

    def assign_reward(self, scores: Scores) -> np.ndarray:
        """Assign the scores of the turns in `unscored` to tokens; there are no unscored turns afterwards.

        A single number becomes the reward of the turn's last token; an array has a reward for each token.

        Returns:
            Sum of the scores in each episode, float32 ``[rows]``.
        """
        sums = np.zeros(len(self.length), dtype=np.float32)
        if not self._unscored:
            return sums

        # A failed turn leaves out its whole episode
        failed_episodes = {self._unscored[index].episode for index in scores.failed}
        for (episode, row, last_token, turn), score in zip(self._unscored, scores.score, strict=True):
            if score is None or episode in failed_episodes:
                continue
            self.has_score[episode] = True
            sums[episode] += np.sum(score)
            if last_token is None:
                continue
            if isinstance(score, np.ndarray):
                stop = last_token + 1
                start = stop - len(turn.completion_ids)
                self.reward[row, start:stop] = score
            else:
                self.reward[row, last_token] = score
        self._unscored = []
        return sums

    def render(self, row: int) -> str:
        """Return the text of one row so far for a terminal, each chosen token shaded by its reward."""
        tokens, chosen, values = self._shown(row)
        return shade(tokens, self.tokenizer, chosen=chosen, values=values)

    def draw(self, row: int) -> np.ndarray:
        """Return an image of one row so far; see `textenv.rendering.draw`."""
        tokens, chosen, values = self._shown(row)
        return draw(tokens, self.tokenizer, chosen=chosen, values=values)

    def rollout(self) -> TensorDict:
        """Return the finished episodes as a rollout ``[rows, T]``; see `textenv.rollout`."""
        rows = slice(None, self.num_rows)
        steps = int(self.length[rows].max()) - 1
        shape = (self.num_rows, steps)

        # The action of column t is the token at position t + 1: columns about actions are shifted by one
        states = (rows, slice(None, steps))
        actions = (rows, slice(1, steps + 1))
        column = np.arange(steps)  # [T]
        episode = self.episode[rows, None]  # [rows, 1], like the following ones
        has_score = self.has_score[episode]
        is_last = (column == self.length[rows, None] - 2) & has_score
        columns = {
            "observation": self.tokens[states],
            "action": self.tokens[actions],
            "reward": self.reward[actions],
            "terminated": is_last & self.terminated[rows, None],
            "truncated": is_last & self.truncated[rows, None],
            "mask": self.chosen[actions] & has_score,
            "is_init": (column == 0) & (self.row_number[rows, None] == 0),
            "group": np.broadcast_to(self.group[rows, None], shape),
        }
        if self.row_number[rows].any():
            columns["episode"] = np.broadcast_to(episode, shape)
        if self.agents > 1:
            columns["agent"] = np.broadcast_to(episode % self.agents, shape)

        # Keep only the masks of allowed tokens that this rollout uses, and number them from 0
        if self.masks.active:
            mask_index = np.where(columns["mask"], self.allowed[actions], 0)
            used_masks, new_index = np.unique(mask_index, return_inverse=True)
            columns["allowed"] = new_index.reshape(shape)

        tensors = {name: torch.from_numpy(array.copy()) for name, array in columns.items()}
        rollout = TensorDict(tensors, batch_size=shape)
        if self.masks.active:
            allowed_sets = self.masks.sets[used_masks]
            rollout["allowed_sets"] = NonTensorData(allowed_sets, batch_size=rollout.batch_size)
        return rollout

    def _shown(self, row: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the tokens of one row so far; for each, whether the policy chose it, and its reward."""
        length = int(self.length[row])
        return self.tokens[row, :length].tolist(), self.chosen[row, :length], self.reward[row, :length]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt of any length; raise as `ids` does."""
        if prompt.ids is not None:
            ids = list(prompt.ids)
        elif self.tools:
            ids = self.tools.schemas.prompt_ids(prompt)
        else:
            ids = prompt_ids(prompt, self.tokenizer)
        num_tokens = self.ends.num_tokens
        if min(ids) < 0 or max(ids) >= num_tokens:
            raise ValueError(f"{_description(prompt)} has ids outside the vocabulary, expected 0 to {num_tokens - 1}")
        return ids

    def _add_row(self) -> int:
        """Return the index of a further row. If there is no room for it, the room is doubled."""
        row = self.num_rows
        self.num_rows += 1
        room = len(self.length)
        if row == room:
            for name, array in vars(self).items():
                if isinstance(array, np.ndarray):
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self._rows = np.arange(2 * room)
            self.prompts += [None] * room
            self._messages += [()] * room
            self.last_turn += [None] * room
            self.end_reason += [""] * room
            self.tool_calls += [[] for _ in range(room)]
        return row

    def _write_prompt(self, row: int, prompt: Prompt, ids: Sequence[int], *, turn_index: int) -> None:
        """Write a prompt over the text of a row, and begin a turn behind it."""
        self.tokens[row] = self.pad
        self.chosen[row] = False
        self.reward[row] = 0
        self.terminated[row] = False
        self.truncated[row] = False
        self.end_reason[row] = ""

        self.prompts[row] = prompt
        self._messages[row] = prompt.messages
        self.last_turn[row] = None
        self.tokens[row, : len(ids)] = ids
        self.prompt_length[row] = len(ids)

        self._begin_turn(row, len(ids), prompt.limits)
        self.turn_index[row] = turn_index
        self._look_ahead(np.array([row]))

    def _begin_turn(self, row: int, start: int, limits: TurnLimits) -> None:
        """Begin a turn of the policy at this length of the text."""
        max_new_tokens = self.limits.max_new_tokens
        if limits.max_new_tokens is not None:
            max_new_tokens = min(max_new_tokens, max(limits.max_new_tokens, self.masks.room))
        self.length[row] = start
        self.turn_start[row] = start
        self.turn_limit[row] = min(start + max_new_tokens, self.tokens.shape[1])
        self._limits_of_turn.pop(row, None)
        if limits != TurnLimits():
            self._limits_of_turn[row] = limits

    def _turn(self, row: int, *, terminated: bool) -> Turn:
        """Return the current turn of a row, as far as it is written."""
        ids = self.tokens[row, : self.length[row]].tolist()
        start = self.turn_start[row]
        prompt = self.prompts[row]
        assert prompt is not None, "call begin first"
        stop_texts: tuple[str, ...] = ()
        if terminated:
            stop_texts = (*self.ends.stop_texts, *self._own_stop_texts(row))
        return Turn(
            prompt,
            prompt_ids=ids[: self.prompt_length[row]],
            context_ids=ids[:start],
            completion_ids=ids[start:],
            terminated=terminated,
            tokenizer=self.tokenizer,
            stop=stop_texts,
            index=int(self.turn_index[row]),
            tool_calls=self.tool_calls[row],
        )

    def _end(self, row: int, turn: Turn, *, terminated: bool, reason: str) -> None:
        """End the game of a row with this turn: in each agent's episode, the row that was begun last is its end."""
        turn.last = False
        self.terminated[row] = False
        first_episode = self._first_row_of_game(row)
        for episode in range(first_episode, first_episode + self.agents):
            last_row = int(self._last_row[episode])
            last_turn = self.last_turn[last_row]
            if last_turn is not None:  # else the agent was never asked
                last_turn.last = True
                self.terminated[last_row] = terminated
                self.truncated[last_row] = not terminated
        self.end_reason[row] = reason

    def _completed_own_stop(self, rows: np.ndarray) -> np.ndarray:
        """Return True for the rows whose turn has just completed a text that only this turn ends with."""
        is_completed = np.zeros(len(rows), dtype=bool)
        for i, row in enumerate(rows.tolist()):
            stop_texts = self._own_stop_texts(row)
            if stop_texts and self.length[row] - self.turn_start[row] >= self.limits.min_new_tokens:
                turn = self._turn(row, terminated=True)
                is_completed[i] = turn.find_completed(stop_texts) is not None
        return is_completed

    def _own_stop_texts(self, row: int) -> tuple[str, ...]:
        """Return the texts that end the present turn of a row, besides those of ``ends``."""
        limits = self._limits_of_turn.get(int(row))
        return () if limits is None else limits.stop

    def _complete(self, rows: np.ndarray) -> np.ndarray:
        """Return True for the rows whose turn is a word that ends it by itself (`WordRule`)."""
        is_complete = np.zeros(len(rows), dtype=bool)
        for i, row in enumerate(rows.tolist()):
            turn_ids = self.tokens[row, self.turn_start[row] : self.length[row]]
            is_complete[i] = tuple(turn_ids.tolist()) in self.masks.complete_turns
        return is_complete

    def _look_ahead(self, rows: np.ndarray) -> None:
        """Compute the mask of the next token in these rows."""

        def turn_so_far(i: int) -> Turn:
            return self._turn(rows[i], terminated=False)

        new_tokens = self.length[rows] - self.turn_start[rows]
        self.next_mask[rows] = self.masks.index(turn_so_far, new_tokens)


def _padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the tokenizer's pad token, else of EOS, else 0."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _episode_and_index(entry: _UnscoredTurn) -> tuple[int, int]:
    """Return the key by which unscored turns are sorted: by episode, and from its first turn to its last."""
    return entry.episode, entry.turn.index


def _with_call_ids(results: Sequence[Message], answer: Message) -> list[Message]:
    """Return messages with results of tools, with the identifiers of the calls that the answer makes."""
    calls = answer.get("tool_calls", [])
    if len(calls) != len(results):  # a call that could not be read is no call
        return list(results)
    return [result | {"tool_call_id": call["id"]} for result, call in zip(results, calls, strict=True)]


def _description(prompt: Prompt) -> str:
    """Describe a prompt for an error: its row in the data, and its content."""
    row = "" if prompt.row is None else f" {prompt.row}"
    return f"prompt{row} ({prompt.content!r:.200})"
