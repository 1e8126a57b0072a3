"""`Gateway`: programs in other processes and languages that ask a language model over HTTP, as a vector environment."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from textenv.envs.vector_env import TextVectorEnv
from textenv.gateway.answers import Piece
from textenv.gateway.processes import Process, Processes
from textenv.gateway.requests import CompletionRequest
from textenv.gateway.server import CompletionServer
from textenv.gateway.sessions import GoneError, Session, Sessions
from textenv.json_files import parse_json
from textenv.names import check_names, refuse_unknown
from textenv.programs.builtin import tasks_of_split
from textenv.programs.run import Ask, ProgramEnded, ProgramStopped, Question, read_question
from textenv.programs.task import checked_tasks
from textenv.programs.vector_env import MADE_HERE, ProgramVectorEnv
from textenv.prompts.template_variables import template_defaults

if TYPE_CHECKING:
    from starlette.requests import Request
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
TIMEOUT = 600.0
"""Default time limit of a program between an answer and its next request, in seconds; it includes its start."""
FOR_FUNCTIONS = ("play", "agents", "opponents")
"""Arguments that only programs in process have."""
GONE = "the episode is over: it has its reward, its program took too long, or the training has ended"
SECONDS_TO_WARN = 10
"""Time without a program that connects after which a warning says so; the next one comes after a minute."""
MODEL = "policy"
"""Name of the model in answers; requests may name any."""


class Gateway(ProgramVectorEnv):
    """Programs that ask over HTTP: an agent in any language is trained by the address of its model.

    A server on this machine answers OpenAI's protocol with the policy that is being trained (`CompletionServer`).
    Each episode is a session with an address of its own. The program plays the episode: it asks for chats or
    completions, several at once if it likes, and sends its reward, which ends the episode.

    - ``POST /sessions/NAME/v1/chat/completions`` and ``/completions``: answers of the policy.
    - ``GET /sessions/NAME``: ``{"task": ..., "seed": ...}``.
    - ``POST /sessions/NAME/reward``: ``{"reward": R}``: a number, numbers by name, which are added, or null, which
      leaves the episode out.

    With ``command``, the program is started for each episode, and finds in its environment variables
    ``OPENAI_BASE_URL`` (the address of its session, with ``/v1``), ``OPENAI_API_KEY`` and ``TEXTENV_SESSION`` (the
    address of its session). Without, programs that run elsewhere on this machine connect to `url` with the key `token`.
    Each brings a name of its own for every episode: in the path, as the key ``KEY:NAME``, or as the header
    ``X-Session-ID``, as harnesses of verifiers do. If no episode is free, they wait; and an iteration waits until each
    slot has a program.

    The answers are samples of the policy as it is. So requests for another distribution (``temperature`` other than 1,
    which stands for the policy's own, ``top_p``, penalties, ``logit_bias``) are refused, and ``seed`` has no effect.
    Messages that continue what the model has read and written in this episode are appended to it, as in
    `ProgramVectorEnv`. A request's ``chat_template_kwargs`` must be those of the environment. What the model writes in
    tags of calls becomes ``tool_calls`` if the request has ``tools``.

    Args:
        command: the program with its arguments, such as ``"python agent.py"``; None waits for programs that connect.
        tasks: tasks of any kind that JSON can hold, as in `ProgramVectorEnv`.
        tokenizer: the policy's tokenizer. Messages need its chat template.
        num_envs: number of programs that run at the same time.
        timeout: seconds that programs may take between an answer and their next request or reward, or from their start
            to their first request; None: no limit.
        port: port of 127.0.0.1 to listen on; 0 takes a free one.
        token: key that programs must bring; None makes one.
        arguments: other arguments of `ProgramVectorEnv`: ``max_turns``, ``max_length``, ``max_new_tokens``, ….

    An episode fails, and is left out of the update, if its program ends without a reward or takes too long. The first
    failure of an iteration is logged with the end of the program's output.

    Raises:
        ValueError: as `ProgramVectorEnv`, or if the command is empty.
        FileNotFoundError: if there is no such program.
        ImportError: without the extra ``service``.
        OSError: if the port cannot be used.

    Example:
        >>> env = Gateway("python agent.py", tasks=tasks, tokenizer=tok, num_envs=8)  # doctest: +SKIP
    """

    @check_names
    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        *,
        tasks: Sequence[object] | None = None,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: int = 8,
        timeout: float | None = TIMEOUT,
        port: int = 0,
        token: str | None = None,
        **arguments: Any,
    ) -> None:
        _check_arguments(arguments)

        # The programs
        processes = None
        if command is not None:
            processes = Processes(command)
        if tasks is not None:
            tasks = checked_tasks(tasks)
            _task_as_json(tasks[0])
        sessions = Sessions(may_join=command is None)
        play = _SessionProgram(sessions, processes)
        options = arguments | {"tasks": tasks, "num_envs": num_envs, "timeout": timeout}
        super().__init__(play, tokenizer=tokenizer, **options)

        # The server, which ends with the environment
        answerer = _PolicyAnswerer(sessions, tokenizer)
        addresses = _Addresses(sessions)
        routes = [
            ("GET", "/sessions/{session}", addresses.task),
            ("POST", "/sessions/{session}/reward", addresses.reward),
        ]
        server = CompletionServer(answerer, token=token, port=port, routes=routes)
        play.server = server.start()
        self.url = server.address
        """Address to which programs connect; their model is at ``{url}/sessions/NAME/v1``, or at ``{url}/v1``."""
        self.token = server.token
        """Key that programs must bring."""
        self._finalizer = weakref.finalize(self, _close, sessions, processes, server)

    @property
    def user_objects(self) -> dict[str, object]:
        """See `TextVectorEnv.user_objects`: the programs run elsewhere, so there is no state of theirs here."""
        objects = super().user_objects
        del objects["task"]
        return objects

    def close_extras(self, **kwargs: object) -> None:
        """End the server, and the programs that it has started."""
        self.task.close_waiting()
        self._finalizer()
        super().close_extras(**kwargs)


def _check_arguments(arguments: Mapping[str, object]) -> None:
    """Raise a TypeError that says what to do if there are arguments that a gateway does not have."""
    for name in arguments:
        if name in FOR_FUNCTIONS:
            raise TypeError(f"Gateway has no {name}: use a ProgramVectorEnv, whose programs are functions")
        if name in MADE_HERE:
            raise TypeError(f"Gateway has no {name}: programs get tasks=, and send their rewards to their session")
    signatures = [inspect.signature(each) for each in (Gateway, ProgramVectorEnv, TextVectorEnv)]
    accepted = [name for signature in signatures for name in signature.parameters]
    accepted = [name for name in dict.fromkeys(accepted) if name not in (*MADE_HERE, *FOR_FUNCTIONS)]
    refuse_unknown(arguments, accepted, owner="Gateway")


def make_gateway(
    *,
    tokenizer: PreTrainedTokenizerBase,
    command: str | Sequence[str] | None,
    split: str = "train",
    tasks: Any = None,
    **arguments: Any,
) -> Gateway:
    """Make a `Gateway`, for ``textenv/Program-v0``.

    Args:
        tokenizer: the policy's tokenizer.
        command: see `Gateway`.
        split: see `textenv.programs.builtin.make_program_env`.
        tasks: tasks, or a file of them as in `textenv.load_prompts`.
        arguments: other arguments of `Gateway`.

    Raises:
        ValueError: without a command: a training by name makes an environment to evaluate, too, and programs that
            connect would have to know the addresses of both.
    """
    if command is None:
        raise ValueError(
            "command is None, expected a program with its arguments: programs that connect by themselves are trained "
            "in Python, by textenv.Gateway"
        )
    tasks_here = cast("Sequence[object] | None", tasks_of_split(tasks, split))
    return Gateway(command, tasks=tasks_here, tokenizer=tokenizer, **arguments)


def _close(sessions: Sessions, processes: Processes | None, server: CompletionServer) -> None:
    """End the sessions, the programs that were started, and the server."""
    sessions.close()
    if processes is not None:
        processes.close()
    server.close()


class _SessionProgram:
    """The program of an episode, in the environment's process: it waits for the reward of the one that asks over HTTP.

    Args:
        sessions: the sessions of the server.
        processes: starts the programs; None: they connect.
    """

    server: CompletionServer

    def __init__(self, sessions: Sessions, processes: Processes | None) -> None:
        self._sessions = sessions
        self._processes = processes
        self.waits_for_client = processes is None
        """True if a program connects later: until then its time does not count (`ProgramRun`)."""
        self.__name__ = "gateway"
        if processes is not None:
            self.__name__ = " ".join(processes.words)

    def __call__(self, ask: Ask, task: object = None, *, rng: np.random.Generator) -> object:
        session = Session(ask.run, task, seed=int(rng.integers(2**31)))
        self._sessions.begin(session)
        process: Process | None = None
        try:
            if self._processes is not None:
                process = self._processes.start(self._variables(session), on_end=session.fail)
            else:
                self._wait_for_client(session)
            reward = session.wait_for_reward()
        except BaseException:
            if process is not None:
                process.kill()
            raise
        finally:
            self._sessions.end(session)
        if process is not None:
            process.let_end()
        return reward

    def _wait_for_client(self, session: Session) -> None:
        """Wait until a program connects; warn now and then while there is none."""
        session.run.on_stop(session.is_claimed.set)
        seconds = SECONDS_TO_WARN
        while not session.is_claimed.wait(seconds):
            seconds = 6 * SECONDS_TO_WARN
            if self._sessions.is_first_unclaimed(session):
                logger.warning(
                    "%d episodes wait for programs to connect to %s: as many must play at the same time as the "
                    "environment has slots (num_envs), else none goes on",
                    self._sessions.num_unclaimed,
                    self.server.address,
                )

    def _variables(self, session: Session) -> dict[str, str]:
        """Return the environment variables with which a program finds its session."""
        address = f"{self.server.address}/sessions/{session.name}"
        return {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": self.server.token,
            "TEXTENV_SESSION": address,
        }


class _Addresses:
    """What the server answers besides completions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def task(self, request: Request, content: bytes) -> object:
        """Return task and seed of a session."""
        session = await self._sessions.find(request.path_params["session"])
        return {"task": json.loads(_task_as_json(session.task)), "seed": session.seed}

    async def reward(self, request: Request, content: bytes) -> object:
        """Set the reward of a session."""
        body = parse_json(content)
        if not isinstance(body, dict) or "reward" not in body:
            raise ValueError(f"the request is {body!r:.200}, expected {{'reward': R}}")
        self._sessions.running(request.path_params["session"]).set_reward(body["reward"])
        return {"reward": body["reward"]}


class _PolicyAnswerer:
    """Lets the policy that plays the environment answer requests."""

    model = MODEL

    def __init__(self, sessions: Sessions, tokenizer: PreTrainedTokenizerBase) -> None:
        self._sessions = sessions
        self._tokenizer = tokenizer

    async def answer(self, request: CompletionRequest, session: str | None) -> AsyncGenerator[Piece, None]:
        """See `textenv.gateway.server.Answerer.answer`; each answer is one piece."""
        _check_same_distribution(request)
        _check_same_template(request, self._tokenizer)
        questions = [self._question(request) for _ in range(request.num_choices)]
        run = (await self._sessions.find(session)).run
        try:
            answers = [_put(run.put, question) for question in questions]
            for choice, (question, answer) in enumerate(zip(questions, answers, strict=True)):
                text = await _result(answer)
                assert question.turn is not None
                finish = "stop" if question.turn.terminated else "length"
                yield Piece(choice, question.turn, text, None, finish, question.message)
        finally:
            for question in questions:  # nobody waits for them any more
                question.answer.cancel()

    @staticmethod
    def _question(request: CompletionRequest) -> Question:
        """Return what a request asks, as the question of a program."""
        options: dict[str, object] = {"stop": request.stop}
        if request.max_tokens is not None:
            options["max_tokens"] = request.max_tokens
        return read_question(0, request.content, options, tools=request.tools)


def _check_same_distribution(request: CompletionRequest) -> None:
    """Raise a ValueError if the answer to a request would be no sample of the policy, or has more than the text."""
    if request.temperature not in (None, 1):
        raise ValueError(
            f"temperature is {request.temperature}, but the answers must be samples of the policy as it is: set it at "
            "the policy, LMPolicy.load(..., temperature=) or --temperature, and leave it out here"
        )
    if request.logprobs:
        raise ValueError("logprobs are not known while the policy is trained: leave them out; the rollout has them")
    if isinstance(request.content, list) and not request.chat:
        raise ValueError("prompt is a list of token ids, expected a text: the environment makes the tokens")


def _check_same_template(request: CompletionRequest, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if a request sets variables of the chat template otherwise than the environment."""
    variables = template_defaults(tokenizer)
    for name, value in request.chat_template_kwargs.items():
        if name not in variables or variables[name] != value:
            raise ValueError(
                f"chat_template_kwargs has {name}={value!r:.100}, but the policy is trained with the variables "
                f"{variables!r:.200}: set them at the environment, Gateway(..., chat_template_kwargs=), and leave them "
                "out here"
            )


def _put(put: Callable[[Question], Future[str]], question: Question) -> Future[str]:
    """Put a question to the policy; raise a `GoneError` if the episode is over."""
    try:
        return put(question)
    except (ProgramStopped, ProgramEnded) as error:
        raise GoneError(GONE) from error


async def _result(answer: Future[str]) -> str:
    """Wait for an answer; raise a `GoneError` if the episode is given up."""
    try:
        return await asyncio.wrap_future(answer)
    except (ProgramStopped, ProgramEnded) as error:
        raise GoneError(GONE) from error


def _task_as_json(task: object) -> str:
    """Return a task as JSON; raise a TypeError or ValueError if JSON cannot hold it."""
    try:
        return json.dumps(task, default=_as_json, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"the task is {task!r:.200}, which JSON cannot hold: {error}") from error


def _as_json(value: object) -> object:
    """Return what JSON can hold of a value that it does not know: NumPy's numbers and arrays."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"the task has {value!r:.200}, expected what JSON can hold: texts, numbers, lists and objects")
