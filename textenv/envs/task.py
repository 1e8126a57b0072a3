"""Tasks: objects that sample prompts, reply to turns and score them, in batches."""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from textenv.envs.turn import Continuation, Cut, Turn
from textenv.prompts.messages import prompt_and_answer
from textenv.prompts.prompts import RESERVED, Prompt, PromptList
from textenv.prompts.tokenize import is_chat
from textenv.rewards.calling import check_columns
from textenv.rewards.composite import RewardFunction, Rewards
from textenv.rewards.scores import Rows, Scores, read_scores
from textenv.rewards.training import TRAINING_ARGUMENTS

if TYPE_CHECKING:
    import torch

MIN_EQUAL_SCORES = 32
"""A batch of at least this many completions that all have the same score logs a warning."""
MAX_CHECKED_PROMPTS = 10_000
"""Maximum number of prompts in which a task looks for columns when it is made."""
_warn_once = functools.cache(logging.getLogger(__name__).warning)  # there is a second environment, for evaluations


@runtime_checkable
class Task(Protocol):
    """Source of prompts and scores."""

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Return the prompts at these positions of the endless order that the seed defines.

        The result depends only on seed and numbers. So seed and position suffice to resume, and environments can share
        a task. A number that is repeated stands for a group.
        """

    def score(self, turns: Sequence[Turn]) -> Scores | Sequence[object]:
        """Return the score of each turn: one number each, or another form that `read_scores` accepts."""


@runtime_checkable
class Conversation(Task, Protocol):
    """Task that replies to turns, so that an episode can have several."""

    def reply(self, turns: Sequence[Turn]) -> Sequence[str | Prompt | Continuation | Literal[Cut.TRUNCATED] | None]:
        """Return the environment's text after each turn; None terminates the episode, `TRUNCATED` truncates it.

        A text is appended to all that the model has seen in this row; a `Continuation` to another row. The content of a
        `Prompt` replaces it: the episode goes on in a further row of the rollout, and the next `Turn.prompt` is the
        episode's with this content. If there is no room for it and an answer, the episode is truncated.

        Called once for each turn, in order, before the turn is scored.
        """


@runtime_checkable
class ShortRows(Conversation, Protocol):
    """Conversation that gives the model a new context before a text has more than a fixed number of turns."""

    max_turns_per_row: int | None
    """Maximum number of turns in a row of the rollout; None: all turns of an episode may be in one row."""


@runtime_checkable
class WritesChats(Conversation, Protocol):
    """Conversation that knows whether its prompts are chats."""

    chat: bool
    """True if prompts are chat messages, False if they are texts."""


@runtime_checkable
class SeveralAgents(Conversation, Protocol):
    """Conversation with several agents, of which one is asked at a time.

    Each agent has an episode of its own, with own rows and rewards. `Prompt.agent` says who reads a prompt: the one who
    begins (`sample_prompts`), or the one who is asked next (`reply`). A `Continuation` goes on in the row of any agent.
    """

    agents: int
    """Number of agents."""


class FunctionTask(PromptList):
    """Single-turn task: prompts from a sequence, scores by plain functions.

    For a chat prompt the functions get the messages, and the completion as one assistant message (TRL's
    convention). The beginning of an answer at the end of a chat belongs to the completion, not to the prompt.

    Args:
        prompts: see `PromptList`.
        reward: a reward function, or several as `textenv.Rewards`; called once for a batch of finished turns.
    """

    def __init__(self, prompts: Sequence[object], reward: RewardFunction | Rewards) -> None:
        super().__init__(prompts)
        self.rewards = reward if isinstance(reward, Rewards) else Rewards(reward)
        self.names: set[str] = set()
        """Names of the prompts' columns; a prompt without such a column gets None there."""
        for index in range(min(len(self.prompts), MAX_CHECKED_PROMPTS)):
            self.names.update(self.prompt(index).columns)
        training_names = sorted(self.names & TRAINING_ARGUMENTS)
        if training_names:
            names = ", ".join(training_names)
            _warn_once("the prompts have columns named %s: rewards get these, not the training's", names)

    def check_columns(self) -> None:
        """Raise a ValueError if a reward function needs a column that no prompt has."""
        for function, _ in self.rewards.functions.values():
            check_columns(function, self.names | RESERVED)

    def score(self, turns: Sequence[Turn]) -> Scores:
        """Score the turns; see `Task.score`."""
        rows = rows_of(turns, names=self.names)
        scores = self.rewards(tokenizer=rows.tokenizer, **rows.columns)
        is_paid = any(weight for _, weight in self.rewards.functions.values())
        if is_paid and len(turns) >= MIN_EQUAL_SCORES:
            distinct_scores = {str(score) for score in scores.score}
            if len(distinct_scores) == 1:
                hint = ""
                if is_chat(turns[0].prompt):
                    hint = ": they are chats, so completion[0]['content'] is the text"
                _warn_once("all %d completions of a batch have the same score%s", len(turns), hint)
        return scores

    def to(self, device: "torch.device") -> None:
        """Move the reward models to a device."""
        self.rewards.to(device)


def choose_task(task: Task | None, prompts: Sequence[object] | None, reward: RewardFunction | Rewards | None) -> Task:
    """Return the task, or one made of prompts and reward.

    Raises:
        TypeError: if the task is not one.
        ValueError: unless either the task is given or both prompts and reward; if a reward function needs a column
            that no prompt has.
    """
    if task is not None and prompts is None and reward is None:
        if isinstance(task, type) or not isinstance(task, Task):
            raise TypeError(
                f"task is {task!r:.200}, expected an object with sample_prompts and score; or give prompts and reward"
            )
        return task
    if task is None and prompts is not None and reward is not None:
        function_task = FunctionTask(prompts, reward)
        function_task.check_columns()
        return function_task
    raise ValueError("give either a task, or both prompts and reward")


def rows_of(turns: Sequence[Turn], *, names: Collection[str] = ()) -> Rows:
    """Return the columns of the turns, as reward functions receive them.

    Args:
        turns: finished turns.
        names: names of prompt columns, besides those of these turns' prompts.

    Raises:
        ValueError: if a prompt column has the name of another argument.
    """
    # Prompts and completions, and the names of all prompt columns
    prompts = []
    completions = []
    names = set(names)
    for turn in turns:
        prompt, completion = _prompt_and_completion(turn)
        prompts.append(prompt)
        completions.append(completion)
        names.update(turn.prompt.columns)
    reserved_names = names & RESERVED
    if reserved_names:
        raise ValueError(
            f"the prompt columns {sorted(reserved_names)} have names of other reward arguments: rename them"
        )

    # A reward function's own arguments, and then the prompt columns
    columns: dict[str, list[object]] = {
        "prompts": prompts,
        "completions": completions,
        "prompt_ids": [turn.prompt_ids for turn in turns],
        "completion_ids": [turn.completion_ids for turn in turns],
        "terminated": [turn.terminated for turn in turns],
        "tool_calls": [turn.tool_calls for turn in turns],
    }
    for name in sorted(names):
        columns[name] = [turn.prompt.columns.get(name) for turn in turns]
    tokenizer = turns[0].tokenizer if turns else None
    return Rows(columns, tokenizer=tokenizer)


def _prompt_and_completion(turn: Turn) -> tuple[object, object]:
    """Return a turn's prompt and completion for rewards: two texts, or for a chat two lists of messages."""
    if not is_chat(turn.prompt):
        return turn.prompt_text, turn.completion
    return prompt_and_answer(turn.prompt.messages, turn.completion)


def score_turns(task: Task, turns: Sequence[Turn], score: Callable[[Sequence[Turn]], object] | None = None) -> Scores:
    """Score the turns in one call of the task, or of ``score``, and check the result.

    Raises:
        RewardError: as `textenv.rewards.scores.read_scores`. This and any error of the task have ``answers``: for each
            turn a dictionary of what the reward received.
    """
    rows = rows_of(turns)
    if score is None:
        score = task.score
    try:
        return read_scores(score(turns), rows, name=type(task).__name__)
    except Exception as error:  # user code may raise anything
        answers = []
        for entries in zip(*rows.columns.values(), strict=True):
            answers.append(dict(zip(rows.columns, entries, strict=True)))
        vars(error)["answers"] = answers
        raise
