"""Scoring of finished turns while others are still generated."""

from collections.abc import Sequence

import torch

from textenv.envs.task import FunctionTask, Task, rows_of
from textenv.envs.turn import Turn
from textenv.rewards.scores import Scores, merge, read_scores
from textenv.rewards.workers import in_thread

PORTION = 1 / 4
"""Minimum number of turns in a call while others are generated, as a fraction of the batch's episodes."""


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
        self._known: set[Turn] = set()
        self._scored = in_thread(list)  # nothing yet

    def offer(self, turns: Sequence[Turn], *, least: float) -> None:
        """Begin to score those of these turns that are new, if there are at least this many."""
        new = [turn for turn in turns if turn not in self._known]
        if len(new) < least:
            return
        known, before = self._known, self._scored
        known.update(new)
        rows = rows_of(new)  # here, because decoding uses the tokenizer, as generation does

        def score() -> object:
            done = before.result()
            if isinstance(done, Exception) or known is not self._known:
                return done
            with torch.no_grad():  # a setting of each thread
                return [*done, (new, read_scores(self.task.score(new), rows, name=type(self.task).__name__))]

        self._scored = in_thread(score)

    def score(self, turns: Sequence[Turn]) -> Scores:
        """Return the scores in the order of these turns, or raise the error of the portion that failed."""
        self.offer(turns, least=1)
        outcome = self._scored.result()
        if isinstance(outcome, Exception):
            self.forget()  # a repeated call scores the whole batch
            raise outcome
        row = {turn: index for index, turn in enumerate(turns)}
        return merge(len(turns), [([row[turn] for turn in portion], scores) for portion, scores in outcome])
