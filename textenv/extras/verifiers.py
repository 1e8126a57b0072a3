"""`Verifiers`: environments of the package ``verifiers``, with their tasks and rewards, in this process."""

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

from textenv.optional import package
from textenv.prompts.prompts import SPLITS
from textenv.rewards.scores import shown


class Verifiers:
    """Maker of string environments of a taskset: ``TokenVectorEnv(Verifiers("my_taskset"), tokenizer=tok)``.

    Its environment asks one agent for answers: once, or as often as its own code plays the user. The policy gives them.
    Reward, at the end: the task's weighted sum; an episode that fails or is too slow is truncated, with reward 0. A
    system prompt becomes the beginning of the first message. Tasks that need more than answers are refused.

    Args:
        taskset: name of an installed taskset, or of a module with one.
        split: ``"train"`` or ``"test"``; the hash of a task decides its split.
        config: the environment's configuration, as the part ``env`` of a file for ``vf-eval``.
        seconds: time limit of each answer of the environment, rewards included.
    """

    def __init__(
        self, taskset: str, split: str = "train", *, config: Mapping[str, Any] | None = None, seconds: float = 60.0
    ) -> None:
        self.vf = vf = package("verifiers.v1", "verifiers")
        block = dict(config or {})
        block["taskset"] = {**block.get("taskset", {}), "id": taskset}
        self.env, self.seconds = vf.load_environment(vf.utils.loaders.resolve_env_config(block)), seconds
        found = list(itertools.islice(self.env.taskset, 10_000))  # it may be endless
        self.tasks = [task for task in found if int(task.hash, 16) % 4 in SPLITS.get(split, ())]
        if not self.tasks:
            raise ValueError(f"{taskset!r} has {len(found)} tasks, none of them in the split {split!r}: it needs more")
        self.agent, *others = (value for _, value in self.env.config if isinstance(value, vf.AgentConfig))
        task, kind = self.tasks[0], type(self.tasks[0])
        hooks = kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize or task.hooks("stop")
        hooks = hooks or any("runtime" in inspect.signature(reward).parameters for reward in task.hooks("reward"))
        if others or hooks or kind.NEEDS_CONTAINER or task.data.image or kind.toolsets(task.config):
            more = "several agents, tools, a container or hooks"
            raise ValueError(f"{taskset!r} needs {more}: evaluate the policy with 'algos serve' and vf-eval instead")

    def __call__(self) -> gymnasium.Env[str, str]:
        """Make an environment, for one episode at a time."""
        return _Episode(self)


class _Episode(gymnasium.Env[str, str]):
    """An episode and its agent: what `verifiers` asks the agent is the observation, the action is the answer."""

    def __init__(self, source: Verifiers) -> None:
        self.source = source
        self.observation_space = self.action_space = spaces.Text(2**20, min_length=0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        task = self.source.tasks[self.np_random.integers(len(self.source.tasks))]
        self.traces, self.asked, self.answers = list[Any](), asyncio.Queue[str | None](), asyncio.Queue[str]()
        self.playing = asyncio.run_coroutine_threadsafe(self._play(task), _loop())
        self.playing.add_done_callback(lambda _: self.asked.put_nowait(None))
        return self._next()[0], {}  # after a failure the first step truncates the episode

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _loop().call_soon_threadsafe(self.answers.put_nowait, action)
        return self._next()

    def close(self) -> None:
        self.playing.cancel()

    def _next(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            asked = asyncio.run_coroutine_threadsafe(self.asked.get(), _loop()).result(self.source.seconds)
            if asked is not None:
                return asked, 0.0, False, False, {}
            self.asked.put_nowait(None)  # for a further step
            return "", self.playing.result(), True, False, {}
        except Exception as error:  # foreign code may raise anything, or never answer
            self.close()
            logging.getLogger(__name__).warning("an episode of verifiers broke off: %s", shown(error) or repr(error))
            return "", 0.0, False, True, {}

    async def _play(self, task: Any) -> float:
        vf, env = self.source.vf, self.source.env
        agents = vf.Agents(env.config, lambda *_: self)
        await env.setup(agents)
        await env.run(task, agents)
        episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=self.traces[0].task, traces=self.traces)
        await env.finalize(task, episode)
        return sum(trace.reward for trace in self.traces)

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator["_Episode"]:
        vf, kind = self.source.vf, type(task)
        row = vf.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash)
        agent, state = vf.AgentInfo(config=self.source.agent), vf.state.state_cls(kind)()
        self.trace = vf.Trace(task=row, agent=agent, state=state)
        self.traces.append(self.trace)
        yield self
        await task.score(self.trace)
        self.trace.ok = True

    async def run(self, task: Any) -> Any:
        async with self.interaction(task):
            await self.turn()
        return self.trace

    async def turn(self, message: Any = None) -> Any:
        vf, data, nodes = self.source.vf, self.trace.task.data, self.trace.nodes
        if self.trace.num_turns == self.source.agent.max_turns:
            return vf.Segment(messages=[], terminated=True)
        message = data.prompt if message is None else message
        new = [{"role": "user", "content": message}] if isinstance(message, str) else message
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt and not nodes else []
        typed = [vf.dialects.parse_message(each) if isinstance(each, dict) else each for each in (*system, *new)]
        self.asked.put_nowait("\n\n".join(vf.types.content_text(each.content) for each in typed))
        typed.append(vf.AssistantMessage(content=await self.answers.get()))
        for place, each in enumerate(typed, len(nodes)):
            nodes.append(vf.MessageNode(message=each, sampled=each is typed[-1], parent=place - 1 if place else None))
        return vf.Segment(messages=typed[-1:])


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
