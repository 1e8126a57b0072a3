"""Scoring of finished turns while others are still generated."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from textenv.envs.task import FunctionTask, Task, rows_of
from textenv.envs.turn import Turn
from textenv.rewards.scores import Scores, merge, read_scores
from textenv.rewards.workers import in_thread

MIN_PORTION = 1 / 4
"""Minimum number of turns scored in a call while others are generated, as a fraction of the batch's episodes."""


_Portions = list[tuple[list[Turn], Scores]]
"""Turns that were scored in one call, and their scores, call by call."""


class EarlyScores:
    """Scores of a batch's turns, computed in portions, one after another in a thread, until one fails.

    Raises:
        ValueError: if a reward function of the task needs whole batches.
    """

    def __init__(self, task: Task) -> None:
        if isinstance(task, FunctionTask) and task.rewards.by_batch:
            raise ValueError(
                f"reward {task.rewards.__name__!r} needs whole batches (Normalize, whiten, pairs), but "
                "score_while_generating passes parts: leave it out, or use a reward that scores each row by itself"
            )
        self.task = task
        self.forget()

    def forget(self) -> None:
        """Give up the batch; only a call that has begun goes on."""
        self._offered: set[Turn] = set()
        self._portions: Future[_Portions | Exception] = in_thread(list)  # none yet

    def offer(self, turns: Sequence[Turn], *, least: float) -> None:
        """Begin to score the turns that were not offered before, if there are at least ``least`` of them."""
        new_turns = [turn for turn in turns if turn not in self._offered]
        if len(new_turns) < least:
            return

        # One more portion, in a thread, after the earlier ones
        offered = self._offered
        offered.update(new_turns)
        rows = rows_of(new_turns)  # not in the thread: decoding uses the tokenizer, as generation does
        earlier_portions = self._portions

        def score_portion() -> _Portions:
            """Wait for the earlier portions, and add this one: its turns and their scores."""
            portions = earlier_portions.result()
            if isinstance(portions, Exception):
                raise portions
            is_given_up = offered is not self._offered
            if is_given_up:
                return portions
            with torch.no_grad():  # a setting of each thread
                returned = self.task.score(new_turns)
                scores = read_scores(returned, rows, name=type(self.task).__name__)
            return [*portions, (new_turns, scores)]

        self._portions = in_thread(score_portion)

    def score(self, turns: Sequence[Turn]) -> Scores:
        """Return the scores in the order of these turns, or raise the error of the portion that failed."""
        self.offer(turns, least=1)
        portions = self._portions.result()
        if isinstance(portions, Exception):
            self.forget()  # a repeated call scores the whole batch
            raise portions

        index_of_turn = {turn: index for index, turn in enumerate(turns)}
        pieces = []
        for portion_turns, scores in portions:
            indices = [index_of_turn[turn] for turn in portion_turns]
            pieces.append((indices, scores))
        return merge(len(turns), pieces)
