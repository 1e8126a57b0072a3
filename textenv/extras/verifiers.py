"""`Verifiers`: environments of the package ``verifiers``, with their tasks and rewards, in this process."""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import gymnasium
from gymnasium import spaces

from textenv.optional import package
from textenv.prompts.prompts import SPLITS
from textenv.rewards.scores import shown

logger = logging.getLogger(__name__)
MAX_TASKS = 10_000
"""Maximum number of tasks that are read from a taskset, which may be endless."""
ADVICE = "evaluate the policy with 'algos serve' and vf-eval instead"
"""What to do with a taskset whose episodes are more than one agent's answers."""


class UnplayableError(ValueError):
    """The environment of a taskset asks its agent for more than one answer at a time."""


class _TaskData(Protocol):
    image: str | None
    """Image of a container."""


class _Task(Protocol):
    """What is used of a task of the package."""

    NEEDS_CONTAINER: bool
    setup: object
    finalize: object
    toolsets: Callable[[object], object]
    key: object
    hash: str
    """A hexadecimal number."""
    config: object
    data: _TaskData

    def hooks(self, kind: str) -> Sequence[Callable[..., object]]:
        """Return the functions of the task that run at its stop, or give its rewards."""

    async def score(self, trace: object) -> None:
        """Add the rewards to what was played."""


class _Trace(Protocol):
    """What is used of an episode of the package."""

    task: object
    reward: float


class Verifiers:
    """Maker of string environments of a taskset: ``TokenVectorEnv(Verifiers("my_taskset"), tokenizer=tok)``.

    The environment of the taskset asks one agent for answers: once, or as often as its own code plays the user. The
    policy is this agent. The reward comes at the end: the weighted sum of the task's rewards. An episode that fails or
    is too slow is truncated with reward 0. A system prompt becomes the beginning of the first message. Tasks that need
    more than answers are refused.

    Args:
        taskset: name of an installed taskset, or of a module with one.
        split: ``"train"`` or ``"test"``; the hash of a task decides its split.
        config: the environment's configuration, as the part ``env`` of a file for ``vf-eval``.
        seconds: time limit of each answer of the environment, rewards included; above 0, or None for none.

    Raises:
        UnplayableError: at an episode whose environment asks for several answers at the same time (``best-of-n``), or
            for more than answers (``isolated-verifier``). It is a ValueError.
        ValueError: if a task needs more than answers, or the split has no task.
    """

    def __init__(
        self,
        taskset: str,
        split: str = "train",
        *,
        config: Mapping[str, Any] | None = None,
        seconds: float | None = 60.0,
    ) -> None:
        self.vf = package("verifiers.v1", "verifiers")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds is {seconds}, expected a number above 0, or None")
        self.seconds = seconds
        env_config = dict(config or {})
        env_config["taskset"] = {**env_config.get("taskset", {}), "id": taskset}
        self.env = self.vf.load_environment(self.vf.utils.loaders.resolve_env_config(env_config))

        # Tasks of this split
        all_tasks = list(itertools.islice(self.env.taskset, MAX_TASKS))
        parts_of_split = SPLITS.get(split, ())
        self.tasks = [task for task in all_tasks if int(task.hash, 16) % 4 in parts_of_split]
        if not self.tasks:
            raise ValueError(
                f"{taskset!r} has {len(all_tasks)} tasks, none of them in the split {split!r}: it needs more"
            )

        # The only agent, whose answers are all that each task needs, in both splits
        agents = [value for _, value in self.env.config if isinstance(value, self.vf.AgentConfig)]
        self.agent, *further_agents = agents
        if further_agents or any(map(self._needs_more_than_answers, all_tasks)):
            raise ValueError(f"{taskset!r} needs several agents, tools, a container or hooks: {ADVICE}")

    def _needs_more_than_answers(self, task: _Task) -> bool:
        """Whether a task has hooks, rewards that look into a container, a container or tools."""
        kind = type(task)
        if kind.setup is not self.vf.Task.setup or kind.finalize is not self.vf.Task.finalize or task.hooks("stop"):
            return True
        for reward in task.hooks("reward"):
            if "runtime" in inspect.signature(reward).parameters:
                return True
        return bool(kind.NEEDS_CONTAINER or task.data.image or kind.toolsets(task.config))

    def __call__(self) -> gymnasium.Env[str, str]:
        """Make an environment, for one episode at a time."""
        return _Episode(self)


class _Episode(gymnasium.Env[str, str]):
    """An episode, which is also the agent that the environment of `verifiers` asks.

    What `verifiers` asks the agent is the observation; the action is the agent's answer. Both environments wait for
    each other: `verifiers` in the event loop of `_loop`, this one in the caller's thread.
    """

    def __init__(self, source: Verifiers) -> None:
        self.source = source
        self.observation_space = spaces.Text(2**20, min_length=0)
        self.action_space = self.observation_space
        self.playing: concurrent.futures.Future[float] | None = None
        """The present episode; None before the first one."""
        self.is_asking = False
        """Whether an interaction with the agent is open."""
        self.refusal: UnplayableError | None = None
        """Why the environment cannot be played; its own code may hide this error, in a group of errors."""

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        super().reset(seed=seed)
        self.close()
        tasks = self.source.tasks
        task = tasks[self.np_random.integers(len(tasks))]
        self.traces: list[_Trace] = []
        self.is_asking = False
        self.refusal = None
        self.questions = asyncio.Queue[str | None]()  # None: the episode is over
        self.answers = asyncio.Queue[str]()
        self.playing = asyncio.run_coroutine_threadsafe(self._play(task), _loop())
        self.playing.add_done_callback(lambda _: self.questions.put_nowait(None))
        observation, *_ = self._next()
        return observation, {}  # after a failure the first step truncates the episode

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        if self.playing is None:
            raise gymnasium.error.ResetNeeded("step before the first reset: call reset first")
        _loop().call_soon_threadsafe(self.answers.put_nowait, action)
        return self._next()

    def close(self) -> None:
        if self.playing is not None:
            self.playing.cancel()

    def _next(self) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Wait for the next question or the end; return a step that a failure truncates."""
        try:
            next_question = asyncio.run_coroutine_threadsafe(self.questions.get(), _loop())
            question = next_question.result(self.source.seconds)
            if self.refusal is not None:
                raise self.refusal
            if question is not None:
                return question, 0.0, False, False, {}
            assert self.playing is not None
            self.questions.put_nowait(None)  # for a further step
            return "", self.playing.result(), True, False, {}
        except UnplayableError:
            self.close()
            raise
        except Exception as error:  # foreign code may raise anything, or never answer
            self.close()
            logger.warning("an episode of verifiers broke off: %s", shown(error) or repr(error))
            return "", 0.0, False, True, {}

    async def _play(self, task: _Task) -> float:
        """Let `verifiers` play a task with this agent; return the sum of the rewards."""
        vf = self.source.vf
        env = self.source.env
        agents = vf.Agents(env.config, lambda *_: self)
        await env.setup(agents)
        await env.run(task, agents)
        info = vf.EnvInfo(id=env.config.env_id)
        episode = vf.Episode(env=info, task=self.traces[0].task, traces=self.traces)
        await env.finalize(task, episode)
        return sum(trace.reward for trace in self.traces)

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = UnplayableError(reason)
        raise self.refusal

    # The methods below are those of an agent of `verifiers`

    @contextlib.asynccontextmanager
    async def interaction(self, task: _Task, **options: object) -> AsyncIterator["_Episode"]:
        vf = self.source.vf
        kind = type(task)
        environment = type(self.source.env).__name__
        if options:
            self._refuse(f"{environment} asks its agent for {', '.join(options)}, not only answers: {ADVICE}")
        if self.is_asking:
            self._refuse(f"{environment} asks its agent for several answers at the same time: {ADVICE}")
        self.is_asking = True
        self.trace = vf.Trace(
            task=vf.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=self.source.agent),
            state=vf.state.state_cls(kind)(),
        )
        self.traces.append(self.trace)
        try:
            yield self
            await task.score(self.trace)
        finally:
            self.is_asking = False
        self.trace.ok = True

    async def run(self, task: _Task, **options: object) -> _Trace:
        async with self.interaction(task, **options):
            await self.turn()
        return self.trace

    async def turn(self, message: str | Sequence[object] | None = None) -> object:
        vf = self.source.vf
        data = self.trace.task.data
        nodes = self.trace.nodes
        if self.trace.num_turns == self.source.agent.max_turns:
            return vf.Segment(messages=[], terminated=True)

        # New messages: a text or messages, which begin with the task's prompt; the system prompt goes first
        messages: Any = message
        if message is None:
            messages = data.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if data.system_prompt and not nodes:
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        messages = [vf.dialects.parse_message(each) if isinstance(each, dict) else each for each in messages]

        # Ask the policy
        self.questions.put_nowait("\n\n".join(vf.types.content_text(each.content) for each in messages))
        answer = vf.AssistantMessage(content=await self.answers.get())

        # Append the messages to the trace; each one's parent is the one above it
        for new_message in (*messages, answer):
            parent = len(nodes) - 1 if nodes else None
            nodes.append(vf.MessageNode(message=new_message, sampled=new_message is answer, parent=parent))
        return vf.Segment(messages=[answer])


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all episodes, which runs in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
