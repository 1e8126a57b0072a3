"""`Programs`: programs that ask a language model, as a task of `TextVectorEnv`."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal
from weakref import WeakSet

import numpy as np

from textenv.envs.limits import check_at_least, check_tokenizer
from textenv.envs.task import rows_of
from textenv.envs.tool_schemas import ToolSchemas
from textenv.envs.tools import Tools
from textenv.envs.turn import TRUNCATED, Continuation, Cut, Turn
from textenv.programs.opponents import BatchOpponent, Opponents, answer_for_opponents, opponent_metrics
from textenv.programs.run import LimitReached, ProgramRun, Question
from textenv.prompts.prompts import Prompt, TurnLimits, by_position, shuffled_indices
from textenv.prompts.tokenize import prompt_ids, reply_ids
from textenv.rewards.scores import RewardError, Scores, read_scores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_Reply = Prompt | Continuation | Literal[Cut.TRUNCATED] | None
ENOUGH_FAILURES = 8
"""Number of programs after whose failure, without a success, no more are tried."""
MAX_KEPT_TOOLS = 1000
"""Number of lists of tools that are kept once they are read."""
RNG = "rng"
"""Name of the argument with which a program gets its random generator."""


class Programs:
    """Programs as a task (`textenv.envs.task.SeveralAgents`): the first question is the prompt, later ones are replies.

    Args:
        play: see `ProgramVectorEnv`.
        tasks: see `ProgramVectorEnv`.
        tokenizer: the policy's tokenizer.
        agents: number of agents.
        max_turns: maximum number of questions of a program.
        room: maximum number of tokens before an answer: ``max_length`` less the shortest answer.
        words: texts that a question may allow; empty if the environment has no list of them.
        timeout: seconds that the programs may take for each step, or None.
        opponents: who plays the other agents; None: the policy plays all.

    Raises:
        TypeError, ValueError: as `ProgramVectorEnv`.
    """

    def __init__(
        self,
        play: Callable[..., object],
        tasks: Sequence[object] | None,
        *,
        tokenizer: PreTrainedTokenizerBase,
        agents: int,
        max_turns: int,
        room: int,
        words: Sequence[str],
        timeout: float | None,
        opponents: Opponents | None = None,
    ) -> None:
        check_tokenizer(tokenizer)
        check_at_least("agents", agents, 1)
        check_at_least("max_turns", max_turns, 1)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}, expected seconds above 0, or None")

        # The program, its tasks and limits
        self.play = play
        self.tasks = None if tasks is None else checked_tasks(tasks)
        self.tokenizer = tokenizer
        self.agents = agents
        self.max_turns = max_turns
        self.room = room
        self.word_of_text = {word.strip(): word for word in words}
        """Texts that a question may allow, by what the model writes, without spaces around it."""
        self.timeout = timeout
        self.opponents = opponents
        self.tools: Tools | None = None
        """Tools of the environment, which prompts show; set by the environment."""
        self.continues_chats = True
        """False if every question of messages begins a row (``earlier_turns="template"``); set by the environment."""
        self.name = str(getattr(play, "__name__", type(play).__name__))
        """Name of the program, for errors."""

        # How it is called
        self._takes_task = _takes_task(play, self.name, agents=agents, has_tasks=tasks is not None)
        self._takes_rng = RNG in _parameters(play)
        self._num_failed = 0
        self._has_succeeded = False
        self._running: WeakSet[ProgramRun] = WeakSet()
        self._schemas_of: dict[str, ToolSchemas] = {}
        """Tools of questions, by their JSON."""

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Start programs, and return their first questions; see `textenv.envs.task.Task.sample_prompts`."""
        runs = [self._start(number, seed) for number in numbers]
        prompts = []
        for run, reply in zip(runs, self._next_replies(runs), strict=True):
            prompt = reply
            if not isinstance(prompt, Prompt):
                # The program has ended before the policy was asked: one token stands for it, and is left out
                prompt = Prompt((0,), state=run, limits=TurnLimits(max_new_tokens=1), ids=(0,))
            prompts.append(prompt)
        return prompts

    def reply(self, turns: Sequence[Turn]) -> list[_Reply]:
        """Answer the programs, and return their next questions; see `textenv.envs.task.Conversation.reply`."""
        runs: list[ProgramRun] = []
        for turn in turns:
            run = turn.prompt.state
            if run.question is not None:
                run.give_answer(turn, self._answer(turn))
            runs.append(run)
        return self._next_replies(runs)

    def _answer(self, turn: Turn) -> str:
        """Return the text of an answer; of words, the one that was allowed, without the tokenizer's spaces."""
        return self.word_of_text.get(turn.completion.strip(), turn.completion)

    def score(self, turns: Sequence[Turn]) -> Scores:
        """Return what the programs returned; see `textenv.envs.task.Task.score`."""
        runs = runs_of([turn for turn in turns if turn.last])
        for run in runs:
            if run.end is None:  # the environment has ended the episode, by a limit that tools have reached
                self._end_at_limit(run, self._deadline())
        self._report(runs)

        # The last turn of an agent, in the row that was begun last, gets its reward
        rewards: list[object] = []
        failed_turns = []
        for index, turn in enumerate(turns):
            run = turn.prompt.state
            reward = None
            if run.has_failed:
                failed_turns.append(index)
            elif turn.last and run.rows:  # without rows, the turn only stands for a program that has not asked
                reward = self._reward(run, turn.prompt.agent)
            rewards.append(reward)
        scores = read_scores(rewards, rows_of(turns), name=self.name)
        return Scores(score=scores.score, parts=scores.parts, failed=frozenset(failed_turns))

    def available(self, turn: Turn) -> Sequence[str] | None:
        """Return the texts, one of which answers the present question; None: all that the environment allows."""
        question = turn.prompt.state.question
        return None if question is None else question.allowed

    def close_waiting(self) -> None:
        """Give up all programs that still run."""
        for run in list(self._running):
            run.stop()
        self._running.clear()

    def _start(self, number: int, seed: int) -> ProgramRun:
        """Start a program; its task and random numbers depend on number and seed only."""
        arguments = []
        if self._takes_task:
            arguments.append(self._task(number, seed))
        options: dict[str, object] = {}
        if self._takes_rng:
            options[RNG] = np.random.default_rng([seed, number])
        run = ProgramRun(self.play, arguments, options, agents=self.agents)
        if self.opponents is not None:
            self.opponents.draw(run, seed=seed, number=number)
        self._running.add(run)
        run.start()
        return run

    def _task(self, number: int, seed: int) -> object:
        """Return the task at this position of the order that the seed defines; None if there are no tasks."""
        if self.tasks is None:
            return None
        count = len(self.tasks)
        epoch, position = divmod(number, count)
        return self.tasks[int(shuffled_indices(count, seed, epoch)[position])]

    def _deadline(self) -> float | None:
        """Return the time until which programs must ask their next question, or return."""
        return None if self.timeout is None else time.monotonic() + self.timeout

    def _next_replies(self, runs: Sequence[ProgramRun]) -> list[_Reply]:
        """Wait for the next question of each program to the policy, and return them as replies.

        Questions to opponents are answered here, all together, until none is left.
        """
        replies: dict[ProgramRun, _Reply] = {}
        waiting_runs = list(runs)
        while waiting_runs:
            deadline = self._deadline()
            asks_opponent = []
            for run in waiting_runs:
                reply = self._next_reply(run, deadline)
                if isinstance(reply, Question):
                    asks_opponent.append(run)
                else:
                    replies[run] = reply
            answer_for_opponents(asks_opponent, self.word_of_text)
            waiting_runs = asks_opponent
        return [replies[run] for run in runs]

    def _next_reply(self, run: ProgramRun, deadline: float | None) -> _Reply | Question:
        """Wait for a program's next question until a time, and return it as a reply.

        Returns:
            The reply; None if the program has returned, TRUNCATED if it has failed or reached a limit. A question to an
            opponent is returned as it is.
        """
        question = run.next_question(deadline)
        while question is not None:
            if run.num_questions > self.max_turns:
                self._end_at_limit(run, deadline)
                break
            try:
                if question.agent in run.learners:
                    return self._as_reply(run, question)
                self._check_for_opponent(run, question)
                return question
            except (ValueError, LimitReached) as error:  # the chat template refuses it, or it is too long
                run.refuse_question(error)
            question = run.next_question(deadline)
        self._running.discard(run)
        return TRUNCATED if run.has_failed or run.has_reached_limit else None

    def _check_for_opponent(self, run: ProgramRun, question: Question) -> None:
        """Raise as `_as_reply`, or a ValueError, if an opponent cannot answer a question as the policy could."""
        if question.tools or self.tools is not None:
            raise ValueError(
                f"the opponent {run.opponent_name!r} cannot call functions: leave out tools=, or let the policy play "
                "all agents (no opponents)"
            )
        if isinstance(run.opponent, BatchOpponent):
            self._as_reply(run, question)  # only to refuse what a model could not read

    def _end_at_limit(self, run: ProgramRun, deadline: float | None) -> None:
        """Let the program return its reward, without a further question."""
        error = LimitReached(
            f"the episode has had max_turns={self.max_turns} turns: catch this error and return a reward, or give the "
            "environment a higher max_turns"
        )
        run.finish(error, deadline)

    def _as_reply(self, run: ProgramRun, question: Question) -> Prompt | Continuation:
        """Return a question as a reply.

        Raises:
            ValueError: if the model cannot read it.
            LimitReached: if it has too many tokens.
        """
        words = self.word_of_text.values()
        if question.allowed is not None and not set(words).issuperset(question.allowed):
            raise ValueError(
                f"allowed is {list(question.allowed)}, expected texts among those of the environment, "
                f"ProgramVectorEnv(allowed={list(words) or '[...]'})"
            )

        # It begins a row, or is appended to one
        schemas = self._schemas(question)
        reply: Prompt | Continuation
        added = None
        if self.continues_chats or isinstance(question.content, str):
            added = run.find_row(question)
        if question.row is None:
            prompt = Prompt(question.content, state=run, agent=question.agent, limits=question.limits)
            if schemas is None:
                ids = prompt_ids(prompt, self.tokenizer)
            else:
                ids = schemas.prompt_ids(prompt)
            reply = replace(prompt, ids=tuple(ids))
            num_tokens = len(ids)
        else:
            turn = question.row.turn
            assert added is not None
            ids = reply_ids(added, turn.prompt, turn.completion_ids, self.tokenizer)
            reply = Continuation(turn, ids, question.limits)
            num_tokens = len(turn.context_ids) + len(turn.completion_ids) + len(ids)

        # An answer must have room behind it
        if num_tokens > self.room:
            raise LimitReached(
                f"the text has {num_tokens} tokens with this question, and only {self.room} of max_length are left for "
                "it: ask with a shorter text, catch this error and return a reward, or raise max_length"
            )
        return reply

    def _schemas(self, question: Question) -> ToolSchemas | None:
        """Return the functions that a prompt shows: the question's, or the environment's; a ValueError if both."""
        if not question.tools:
            return None if self.tools is None else self.tools.schemas
        if self.tools is not None:
            raise ValueError("the question has tools, and so has the environment (tools=): leave out one of them")

        # Each list of tools is read once
        key = json.dumps(question.tools, sort_keys=True)
        if key not in self._schemas_of:
            if len(self._schemas_of) >= MAX_KEPT_TOOLS:
                self._schemas_of.clear()
            self._schemas_of[key] = ToolSchemas(question.tools, self.tokenizer)
        question.schemas = self._schemas_of[key]
        return question.schemas

    def _reward(self, run: ProgramRun, agent: int) -> object:
        """Return the reward of an agent; raise a `RewardError` unless the program has returned one for each agent."""
        assert run.end is not None
        result = run.end.result
        is_number = isinstance(result, np.ndarray) and result.ndim == 0
        count: int | None = None
        if isinstance(result, (list, tuple, np.ndarray)) and not is_number:
            count = len(result)
        if self.agents > 1 and result is not None and count != self.agents:
            raise RewardError(
                f"{self.name} returned {result!r:.200}, expected a list of {self.agents} rewards, one for each agent"
            )
        return run.results[agent]

    def _report(self, runs: Sequence[ProgramRun]) -> None:
        """Log the failures of programs.

        Raises:
            RuntimeError: if all programs have failed so far, and none runs any more, or `ENOUGH_FAILURES` have failed:
                it is a mistake in the program.
        """
        failed_runs = [run for run in runs if run.has_failed]
        self._num_failed += len(failed_runs)
        if len(failed_runs) < len(runs):
            self._has_succeeded = True
        if not failed_runs:
            return

        # Raise the first failure, or log it
        first = failed_runs[0]
        what_happened = first.failure() or "It returned without a question."
        all_have_failed = not self._running or self._num_failed >= ENOUGH_FAILURES
        if all_have_failed and not self._has_succeeded:
            raise RuntimeError(
                f"all {self._num_failed} programs {self.name!r} failed, the first of these {len(failed_runs)} like "
                f"this:\n{what_happened}"
            ) from None  # the traceback that matters is in the message
        logger.warning(
            "%d of %d programs %r failed, and their episodes are left out of the update; the first like this:\n%s",
            len(failed_runs),
            len(runs),
            self.name,
            what_happened,
        )


def runs_of(turns: Sequence[Turn]) -> list[ProgramRun]:
    """Return the programs of these turns, each once."""
    return list(dict.fromkeys(turn.prompt.state for turn in turns))


def program_metrics(runs: Sequence[ProgramRun]) -> dict[str, float]:
    """Compute the log metrics of programs that have ended.

    Returns:
        - ``reward/left_out``: number of rewards that were None.
        - ``reward/failed``, ``programs/failed``: number of programs that raised an error, took too long or did not ask.
        - ``programs/timeouts``: those of them that took too long.
        - ``programs/limit``: those of them that did not catch `LimitReached`.
        - ``programs/abandoned``: number of answers that no program waited for any more.
        - ``programs/questions``: mean number of questions of a program.
        - ``programs/rows``: mean number of rows of a program, 1 for each agent if every question continues the last.
        - those of `textenv.programs.opponents.opponent_metrics`.
    """
    count = len(runs)
    metrics = {
        "reward/failed": sum(run.has_failed for run in runs),
        "reward/left_out": sum(run.num_left_out for run in runs),
        "programs/failed": sum(run.has_failed for run in runs),
        "programs/timeouts": sum(run.has_timed_out for run in runs),
        "programs/limit": sum(run.end is not None and isinstance(run.end.error, LimitReached) for run in runs),
        "programs/abandoned": sum(run.num_abandoned for run in runs),
        "programs/questions": sum(run.num_questions for run in runs) / count,
        "programs/rows": sum(len(run.rows) for run in runs) / count,
    }
    return metrics | opponent_metrics(runs)


def checked_tasks(tasks: Sequence[object]) -> Sequence[object]:
    """Return the tasks by position; raise a TypeError if they are no list, a ValueError if there are none."""
    tasks = by_position(tasks)
    is_list = hasattr(tasks, "__getitem__") and hasattr(tasks, "__len__")
    if isinstance(tasks, (str, Mapping)) or not is_list:
        raise TypeError(f"tasks is {tasks!r:.200}, expected a list with one entry for each task")
    if not len(tasks):
        raise ValueError("tasks is empty, expected at least one")
    return tasks


def _parameters(play: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a program; raise a TypeError if it is no function."""
    if not callable(play) or isinstance(play, type):
        raise TypeError(f"play is {play!r:.200}, expected a function such as play(ask, task), or an object to call")
    return inspect.signature(play).parameters


def _takes_task(play: Callable[..., object], name: str, *, agents: int, has_tasks: bool) -> bool:
    """Return True if a program gets a task behind its functions to ask; raise a TypeError if its arguments differ."""
    by_position_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = []
    for parameter in _parameters(play).values():
        if parameter.name != RNG and parameter.kind in by_position_kinds:
            parameters.append(parameter)
    num_required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    num_given = agents + has_tasks
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in _parameters(play).values())
    if num_required <= num_given and (takes_any or num_given <= len(parameters)):
        return has_tasks

    # Say what it takes, and what it should take
    asks = "ask"
    if agents > 1:
        asks = ", ".join(f"ask_{agent}" for agent in range(agents))
    names = ", ".join(parameter.name for parameter in parameters)
    expected = f"{name}({asks}, task)"
    if not has_tasks:
        expected = f"{name}({asks}), or with tasks= {expected}"
    advice = ""
    if num_required == num_given + 1:
        advice = f". For another function to ask, give agents={agents + 1}"
    raise TypeError(f"play is {name}({names}), expected {expected}{advice}")
