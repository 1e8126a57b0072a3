"""What happens at the end of a turn: the task. It deals prompts, answers and scores, in batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

from textenv.envs.turn import Cut, Turn
from textenv.prompts.prompts import Prompt, PromptList
from textenv.prompts.tokenize import is_chat
from textenv.rewards.composite import RewardFunction, Rewards
from textenv.rewards.scores import Rows, Scores, miscount, read_scores


class Task(Protocol):
    """Where prompts come from and what an answer earns."""

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """The prompts that stand at these places of the endless order that the seed means.

        A function of seed and number and nothing else: so an order is resumed by two integers, two environments can
        share a task, and a group is one number several times.
        """
        ...

    def score(self, turns: Sequence[Turn]) -> Scores | Sequence[Any]:
        """What each turn earned, as `textenv.rewards.scores.read_scores` takes it: most simply one number for each."""
        ...


class Conversation(Task, Protocol):
    """A task that answers."""

    def reply(self, turns: Sequence[Turn]) -> Sequence[str | Literal[Cut.TRUNCATED] | None]:
        """What the environment says after each turn; None ends the episode, `TRUNCATED` does by a limit.

        Called once for each turn, in order, before the turn is scored.
        """
        ...


class FunctionTask(PromptList):
    """One turn: a prompt from a sequence, an answer, a score by plain functions.

    For a chat prompt the functions are given the messages, and the answer as one message of the assistant (TRL's
    convention).

    Args:
        prompts: see `PromptList`.
        reward: a reward function, or several as `textenv.Rewards`; called once for a batch of finished turns.
    """

    def __init__(self, prompts: Sequence[Any], reward: RewardFunction | Rewards) -> None:
        super().__init__(prompts)
        self.rewards = reward if isinstance(reward, Rewards) else Rewards(reward)
        looked_at = range(min(len(self.prompts), 10_000))
        self.names = {name for index in looked_at for name in self.prompt(index).columns}
        """Columns that a prompt may have; those that one has not are None for it."""

    def score(self, turns: Sequence[Turn]) -> Scores:
        """See `Task.score`."""
        rows = rows_of(turns, names=self.names)
        return self.rewards(tokenizer=rows.tokenizer, **rows.columns)


def choose_task(task: Task | None, prompts: Any, reward: RewardFunction | Rewards | None) -> Task:
    """The task given, or one of prompts and reward; raises unless it is one of the two."""
    if task is not None and prompts is None and reward is None:
        if isinstance(task, type) or not (hasattr(task, "sample_prompts") and hasattr(task, "score")):
            raise TypeError(
                f"task is {task!r:.200}, expected an object with sample_prompts and score; or give prompts and reward"
            )
        return task
    if task is None and prompts is not None and reward is not None:
        return FunctionTask(prompts, reward)
    raise ValueError("give either a task, or both prompts and reward")


def rows_of(turns: Sequence[Turn], *, names: Collection[str] = ()) -> Rows:
    """The turns as a reward function is given them.

    Raises:
        ValueError: if a column of the prompts has the name of another argument.
    """
    ours = {
        "prompts": [list(turn.prompt.content) if is_chat(turn.prompt) else turn.prompt_text for turn in turns],
        "completions": [_answer(turn) for turn in turns],
        "prompt_ids": [turn.prompt_ids for turn in turns],
        "completion_ids": [turn.completion_ids for turn in turns],
        "terminated": [turn.terminated for turn in turns],
    }
    names = {*names, *(name for turn in turns for name in turn.prompt.columns)}
    if taken := names & {*ours, "tokenizer"}:
        raise ValueError(f"the prompts have columns named {sorted(taken)}, which rewards are given: rename them")
    columns = {name: [turn.prompt.columns.get(name) for turn in turns] for name in sorted(names)}
    return Rows(ours | columns, tokenizer=turns[0].tokenizer if turns else None)


def _answer(turn: Turn) -> Any:
    return [{"role": "assistant", "content": turn.completion}] if is_chat(turn.prompt) else turn.completion


def score_turns(task: Task, turns: Sequence[Turn]) -> Scores:
    """Score the turns in one call of the task and check what comes back.

    Raises:
        RewardError: as `textenv.rewards.scores.read_scores`.
    """
    rows = rows_of(turns)
    try:
        return read_scores(task.score(turns), rows, name=type(task).__name__)
    except Exception as error:  # a task of one's own may raise anything: what was to be scored is kept all the same
        answers = [
            dict(zip(rows.columns, entries, strict=True)) for entries in zip(*rows.columns.values(), strict=True)
        ]
        vars(error)["answers"] = answers
        raise


def check_count(returned: Any, expected: int, *, name: str, item: str) -> None:
    """Raise a ValueError unless there is one item for each turn."""
    if given := miscount(returned, expected):
        raise ValueError(f"{name} returned {given} for {expected} completions: return a list with one {item} for each")
