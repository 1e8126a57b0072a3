"""`ProgramRun`: a program in a thread of its own, which asks questions and waits for the answers."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from textenv.envs.limits import check_at_least
from textenv.envs.tool_schemas import ToolSchemas
from textenv.envs.turn import Turn
from textenv.programs.threads import run_in_thread
from textenv.prompts.messages import Message, is_messages, read_messages
from textenv.prompts.prompts import TurnLimits
from textenv.prompts.special_tokens import check_unicode

OTHER_DISTRIBUTION = {
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "best_of",
}  # fmt: skip
"""Options of other services with which the answers would not be samples of the policy."""

SECONDS_BETWEEN_LOOKS = 0.1
"""How often it is looked whether a program has connected."""
HIDDEN_FILES = {__file__, str(Path(__file__).with_name("task.py")), str(inspect.getsourcefile(Future))}
"""Files that are left out of the traceback of a program."""
Content = str | tuple[Message, ...]
"""All that the model is to read: a text, or a chat."""
FunctionSchemas = tuple[Mapping[str, Any], ...]
"""JSON schemas of functions, as in OpenAI's protocol."""


class LimitReached(RuntimeError):  # noqa: N818  (the name says what has happened)
    """Raised by ``ask`` when an episode may have no further turn; a program may catch it and return its reward."""


class ProgramEnded(RuntimeError):  # noqa: N818  (the name says what has happened)
    """Raised by ``ask`` when its program has already returned."""


class ProcessFailedError(RuntimeError):
    """A program in another process has failed. The text tells how; a traceback of this process would not."""


class ProgramStopped(BaseException):  # noqa: N818  (a request to end, as asyncio.CancelledError)
    """Raised by ``ask`` in a program whose episode has been given up. Do not catch it."""


@dataclass
class Row:
    """What a program has asked in one row of the rollout, and been answered."""

    agent: int
    content: Content
    """All questions and answers, as the program knows them."""
    turn: Turn
    """The turn of the last answer."""
    tools: FunctionSchemas
    """Functions that its prompt shows."""


@dataclass(eq=False)
class Question:
    """One question of a program: a call of ``ask``, or a request over HTTP."""

    agent: int
    content: Content
    limits: TurnLimits
    allowed: tuple[str, ...] | None
    """Texts, one of which is the answer; None: all that the environment allows."""
    seed: int = 0
    """Seed with which a `textenv.programs.opponents.BatchOpponent` samples its answer."""
    tools: FunctionSchemas = ()
    """JSON schemas of functions that the model may call, and the program runs."""
    schemas: ToolSchemas | None = None
    """The same, once they are read; None without tools."""
    row: Row | None = None
    """The row that it continues; None if it begins one."""
    answer: Future[str] = field(default_factory=Future)
    turn: Turn | None = None
    """The turn of the policy's answer; None before, and if another has answered."""
    message: Message | None = None
    """The policy's answer as a message, which may call `tools`; None without tools."""


@dataclass
class _End:
    """A program has returned, or failed."""

    result: object = None
    error: BaseException | None = None


class ProgramRun:
    """A program that plays one episode, or one game of several agents.

    Args:
        play: function that gets a function ``ask`` for each agent, then ``arguments``; it may be ``async``.
        arguments: further arguments of ``play``.
        options: keyword arguments of ``play``.
        agents: number of agents.

    Example:
        >>> run = ProgramRun(lambda ask: len(ask("1 + 1 =")))
        >>> run.start()
        >>> question = run.next_question(deadline=None)
        >>> question.content
        '1 + 1 ='
    """

    def __init__(
        self,
        play: Callable[..., object],
        arguments: Sequence[object] = (),
        options: dict[str, object] | None = None,
        *,
        agents: int = 1,
    ) -> None:
        self._play = play
        self._arguments = arguments
        self._options = options or {}
        self._agents = agents

        # What it has asked, and what came of it
        self.question: Question | None = None
        """The question that the model is answering."""
        self.num_questions = 0
        self.num_abandoned = 0
        """Questions whose answer nobody waited for any more: a client over HTTP had gone."""
        self.rows: list[Row] = []
        """Rows of the rollout, in the order in which they were begun."""
        self.end: _End | None = None
        """What came of the program; None while it runs."""
        self.has_timed_out = False
        self.has_reached_limit = False
        self.is_present = not getattr(play, "waits_for_client", False)
        """False while the program is one that has not connected yet: its time has not begun."""

        # Who plays which agent
        self.learners = frozenset(range(agents))
        """Agents that the policy plays."""
        self.opponent: Any = None
        """Who plays the others (`textenv.programs.opponents.Opponent`)."""
        self.opponent_name = ""
        self.opponent_rng = np.random.default_rng(0)

        # The two threads meet here
        self._events: queue.SimpleQueue[Question | _End] = queue.SimpleQueue()
        self._refusal: BaseException | None = None
        self._lock = threading.Lock()
        self._unanswered: set[Question] = set()
        self._on_stop: Callable[[], None] | None = None

    @property
    def results(self) -> list[object]:
        """What the program has returned for each agent; None for those who are left out, or all if it has failed."""
        if self.end is None or self.has_failed or self.end.result is None:
            return [None] * self._agents
        if self._agents == 1:
            return [self.end.result]
        return list(cast("Sequence[object]", self.end.result))

    @property
    def rewards(self) -> list[float] | None:
        """Rewards of all agents as numbers; None if one of them is left out."""
        numbers = []
        for result in self.results:
            parts = [result]
            if isinstance(result, Mapping):
                parts = list(result.values())
            if any(part is None for part in parts):
                return None
            numbers.append(sum(float(cast("float", part)) for part in parts))
        return numbers

    @property
    def num_left_out(self) -> int:
        """Number of agents of the policy for which the program has returned None."""
        if self.has_failed:
            return 0
        results = self.results
        return sum(results[agent] is None for agent in self.learners)

    @property
    def has_failed(self) -> bool:
        """True if the program has ended by an error, or without having asked."""
        return self.end is not None and (self.end.error is not None or not self.num_questions)

    def start(self) -> None:
        """Start the program in a thread."""
        run_in_thread(self._run)

    # --- in the program's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Call the program, and report what came of it."""
        try:
            if _is_async(self._play):
                asks: list[Ask] = [AsyncAsk(self, agent) for agent in range(self._agents)]
                coroutine = cast("Coroutine[Any, Any, object]", self._play(*asks, *self._arguments, **self._options))
                result = asyncio.run(coroutine)
            else:
                asks = [Ask(self, agent) for agent in range(self._agents)]
                result = self._play(*asks, *self._arguments, **self._options)
            end = _End(result)
        except BaseException as error:  # noqa: BLE001  (also SystemExit: the thread's caller reports it)
            end = _End(error=error)
        self._events.put(end)
        self._refuse(ProgramEnded("the program has already returned: ask before that"))

    def put(self, question: Question) -> Future[str]:
        """Put a question to the model; raise if the episode is over."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._unanswered.add(question)
        self._events.put(question)
        return question.answer

    # --- in the environment's thread -------------------------------------------------------------------------

    def next_question(self, deadline: float | None) -> Question | None:
        """Wait for the program's next question, or for its end, until a time of `time.monotonic`.

        Returns:
            The question; None if the program has ended (`end`), or time is up: then it is stopped and has failed.
        """
        # Wait for what comes next
        self.question = None
        if self.end is not None:
            return None
        start = time.monotonic()
        try:
            event = self._next_event(deadline)
            while isinstance(event, Question) and event.answer.done():  # nobody waits for it any more
                event = self._next_event(deadline)
        except queue.Empty:
            self.has_timed_out = True
            message = (
                f"the program did not ask its next question, nor end, within {time.monotonic() - start:.0f} seconds: "
                "end it earlier, or raise timeout="
            )
            self.end = _End(error=TimeoutError(message))
            self.stop()
            return None

        # Its end, or a question
        if isinstance(event, _End):
            self.end = event
            return None
        self.question = event
        self.num_questions += 1
        return event

    def _next_event(self, deadline: float | None) -> Question | _End:
        """Return the next question or the end; raise `queue.Empty` if time is up."""
        if deadline is None:
            return self._events.get()
        seconds = max(deadline - time.monotonic(), 0.0)
        while not self.is_present:
            with suppress(queue.Empty):
                return self._events.get(timeout=SECONDS_BETWEEN_LOOKS)
        return self._events.get(timeout=seconds)

    def give_answer(self, turn: Turn, answer: str) -> None:
        """Give the program the model's answer to its `question`, and note in which row of the rollout it stands.

        Args:
            turn: the turn of the answer.
            answer: its text.
        """
        question = self.question
        assert question is not None
        question.turn = turn
        if question.schemas is not None:
            question.message = question.schemas.message(turn, number=turn.index)
        content = _with_answer(question, answer)
        if question.row is None:
            self.rows.append(Row(question.agent, content, turn, question.tools))
        else:
            question.row.content = content
            question.row.turn = turn
        self.give_text(answer)

    def give_text(self, text: str) -> None:
        """Give the program the text that answers its `question`."""
        question = self.question
        assert question is not None
        with self._lock:
            self._unanswered.discard(question)
        if question.answer.cancelled():
            self.num_abandoned += 1
        with suppress(InvalidStateError):  # nobody waits for it any more
            question.answer.set_result(text)

    def refuse_question(self, error: Exception) -> None:
        """Let the `question` raise this error in the program."""
        question = self.question
        assert question is not None
        with self._lock:
            self._unanswered.discard(question)
        _raise_in(question, error)

    def find_row(self, question: Question) -> str | list[Message] | None:
        """Set the row that a question continues: the latest one of its agent with which its content begins.

        Returns:
            What the question adds to this row, which may be nothing; None if it begins a row.
        """
        for row in reversed(self.rows):
            if row.agent == question.agent and row.tools == question.tools:
                added = added_content(row, question.content)
                if added is not None:
                    question.row = row
                    return added
        question.row = None
        return None

    def finish(self, error: LimitReached, deadline: float | None) -> None:
        """Let the open questions and all further ones raise this error, and wait for the program's end."""
        self.has_reached_limit = True
        self._refuse(error)
        while self.next_question(deadline) is not None:
            pass  # questions that were put before

    def stop(self) -> None:
        """Give the program up: whatever it asks raises `ProgramStopped`."""
        self._refuse(ProgramStopped("the episode has been given up"))
        with self._lock:
            on_stop = self._on_stop
        if on_stop is not None:
            on_stop()

    def on_stop(self, function: Callable[[], None]) -> None:
        """Let a function be called when the program is given up; at once if it already is."""
        with self._lock:
            self._on_stop = function
            is_stopped = isinstance(self._refusal, ProgramStopped)
        if is_stopped:
            function()

    def _refuse(self, error: BaseException) -> None:
        """Let the open questions and all further ones raise this error; the first refusal stays."""
        with self._lock:
            if self._refusal is None or isinstance(error, ProgramStopped):
                self._refusal = error
            questions = list(self._unanswered)
            self._unanswered.clear()
        for question in questions:
            _raise_in(question, error)

    def failure(self) -> str:
        """Return the traceback of the program's error, without the lines of ``ask``; an empty text if it has none.

        Of a `ProcessFailedError` it is the text.
        """
        if self.end is None or self.end.error is None:
            return ""
        error = self.end.error
        if isinstance(error, ProcessFailedError):
            return str(error)
        summary = traceback.TracebackException.from_exception(error)
        summary.stack = traceback.StackSummary.from_list(
            [frame for frame in summary.stack if frame.filename not in HIDDEN_FILES]
        )
        return "".join(summary.format()).rstrip()


def _raise_in(question: Question, error: BaseException) -> None:
    """Let ``ask`` raise this error, if it still waits."""
    with suppress(InvalidStateError):
        question.answer.set_exception(error)


class Ask:
    """Function with which a program asks the model; see `ProgramVectorEnv`."""

    def __init__(self, run: ProgramRun, agent: int) -> None:
        self.run = run
        self._agent = agent

    def __call__(self, content: object, **options: Any) -> str:
        """Ask the model, and wait for its answer.

        Args:
            content: all that the model is to read: a list of messages (with a chat template), or a text.
            options: ``max_tokens`` (int), ``stop`` (a text, or several, at which the answer ends) and ``allowed``
                (texts, one of which is the answer; they must be among the environment's ``allowed``).

        Returns:
            The answer, without the text that stopped it.

        Raises:
            TypeError, ValueError: if the content or an option cannot be read.
            LimitReached: if the episode may have no further turn, or no room for the question.
        """
        return self.run.put(read_question(self._agent, content, options)).result()

    def message(self, content: object, *, tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> Message:
        """Ask the model, which may call functions; see `__call__`.

        Args:
            content: all that the model is to read: messages, among them answers of this method, and for each of their
                calls ``{"role": "tool", "tool_call_id": ..., "content": ...}``.
            tools: JSON schemas as in OpenAI's protocol: ``[{"type": "function", "function": {"name": ...}}]``. The
                program runs the functions.
            options: see `__call__`.

        Returns:
            The answer as a message: ``{"role": "assistant", "content": ...}``, and ``"tool_calls"`` if it has calls
            that can be read; their arguments are objects.
        """
        question = read_question(self._agent, content, options, tools=tools)
        return _message_of(question, self.run.put(question).result())


class AsyncAsk(Ask):
    """`Ask` for programs that are ``async``: ``await ask(...)``."""

    async def __call__(self, content: object, **options: Any) -> str:  # type: ignore[override]
        """See `Ask`."""
        return await asyncio.wrap_future(self.run.put(read_question(self._agent, content, options)))

    async def message(  # type: ignore[override]
        self, content: object, *, tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> Message:
        """See `Ask.message`."""
        question = read_question(self._agent, content, options, tools=tools)
        return _message_of(question, await asyncio.wrap_future(self.run.put(question)))


def _message_of(question: Question, text: str) -> Message:
    """Return the answer to a question, whose text is given, as a message."""
    if question.message is not None:
        return question.message
    return {"role": "assistant", "content": text}


def _is_async(play: Callable[..., object]) -> bool:
    """Return True if a program is an ``async`` function, or an object with an ``async`` call."""
    return inspect.iscoroutinefunction(play) or inspect.iscoroutinefunction(getattr(play, "__call__", None))  # noqa: B004


def read_question(
    agent: int, content: object, options: dict[str, Any], *, tools: Sequence[Mapping[str, Any]] = ()
) -> Question:
    """Return a question from the arguments of ``ask`` or ``ask.message``; raise as `Ask` does."""
    # Options that there are not
    unknown = sorted(set(options) - {"max_tokens", "stop", "allowed"})
    if OTHER_DISTRIBUTION & set(unknown):
        raise TypeError(
            f"ask got {', '.join(unknown)}: the answers must be samples of the policy as it is, so set temperature "
            "at the policy, and leave out the rest"
        )
    if unknown == ["tools"]:
        raise TypeError("ask got tools: use ask.message(messages, tools=...), whose answer is a message")
    if unknown:
        raise TypeError(f"ask got {', '.join(unknown)}, expected max_tokens, stop or allowed")

    # Those that there are
    max_tokens = options.get("max_tokens")
    if max_tokens is not None:
        check_at_least("max_tokens", max_tokens, 1)
    limits = TurnLimits(max_tokens, _texts("stop", options.get("stop") or ()))
    allowed = options.get("allowed")
    if allowed is not None:
        allowed = _texts("allowed", allowed)
        if not allowed:
            raise ValueError("allowed is empty, expected at least one text")
    return Question(agent, _read_content(content), limits, allowed, tools=read_tools(tools))


def read_tools(tools: object) -> FunctionSchemas:
    """Return the schemas of functions; raise a ValueError if they are no functions with names."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools is {tools!r:.200}, expected a list of functions")
    for tool in tools:
        function = None
        if isinstance(tool, Mapping):
            function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tools has {tool!r:.200}, expected {{'type': 'function', 'function': {{'name': ..., 'parameters': "
                "...}}"
            )
    return tuple(tools)


def _read_content(content: object) -> Content:
    """Return a text or a chat that a program asks; raise a ValueError if it is neither."""
    if isinstance(content, str) and content:
        check_unicode(content)
        return content
    if is_messages(content):
        messages = tuple(read_messages(content, where="ask"))
        check_unicode(messages)
        return messages
    raise ValueError(
        f"ask got {content!r:.200}, expected a text, or a list of messages such as "
        "[{'role': 'user', 'content': '...'}]"
    )


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Return one text or several as a tuple; raise a TypeError if they are none, a ValueError if one is empty."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Collection) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} is {value!r:.200}, expected a text or a list of texts")
    if not all(texts):
        raise ValueError(f"{name} has an empty text")
    return tuple(str(text) for text in texts)


def _with_answer(question: Question, answer: str) -> Content:
    """Return what was asked with the answer behind it."""
    if isinstance(question.content, str):
        return question.content + answer
    message: Message = {"role": "assistant", "content": answer}
    if question.message is not None:
        message = question.message
    return (*question.content, message)


def added_content(row: Row, content: Content) -> str | list[Message] | None:
    """Return what a content adds to all that stands in a row; None if it does not continue the row."""
    if isinstance(content, str):
        if isinstance(row.content, str):
            return _added_text(row.content, content, row.turn)
        return None
    if isinstance(row.content, str):
        return None
    count = len(row.content)
    added_messages = list(content[count:])
    begins_with_row = [*map(_meaning, content[:count])] == [*map(_meaning, row.content)]
    if not begins_with_row or not added_messages:
        return None
    if added_messages[-1]["role"] == "assistant":  # an answer that is to be continued
        return None
    return added_messages


def _meaning(message: Message) -> dict[str, object]:
    """Return what a message means: programs may send back calls without identifiers, and empty fields."""
    meaning: dict[str, object] = {name: value for name, value in message.items() if value}
    if meaning.get("tool_calls"):
        meaning["tool_calls"] = [call.get("function") for call in message["tool_calls"]]
    return meaning


def _added_text(earlier_text: str, text: str, turn: Turn) -> str | None:
    """Return what a text adds to an earlier one, which ends with a turn; None if it does not continue it."""
    if not text.startswith(earlier_text):
        return None

    # The text that stopped the answer stands in the row, but not in the answer
    added = text.removeprefix(earlier_text)
    stop_text = turn.text.removeprefix(turn.completion)
    if not added.startswith(stop_text):
        return None

    # An answer that is to be continued: not behind a token with which the model has ended it
    has_end_token = turn.terminated and not stop_text
    if added == stop_text and has_end_token:
        return None
    return added.removeprefix(stop_text)
