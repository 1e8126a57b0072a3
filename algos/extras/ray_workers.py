"""Rollout workers on Ray: environments, and copies of the policy, in other processes or on other machines.

Asynchronous workers go on during the update, with weights that are at most ``staleness`` updates old when their rollout
is learned from. `algos.collection.with_importance_weights` corrects for that: the policies that acted, before the
update and in it are three (IMPACT, Luo et al. 2020; decoupled PPO, Hilton et al. 2022).
"""

import copy
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from gymnasium.utils.seeding import np_random
from gymnasium.vector import VectorEnv

from algos.collection import Collector
from algos.config import ClippedConfig
from algos.policies.random_streams import episode_seeds
from algos.ranks import collectives
from algos.storage.env_state import env_state, set_env_state
from algos.storage.serialization import load_weights, trained_weights
from algos.training.learner import Learner
from textenv.envs.task import FunctionTask
from textenv.envs.vector_env import TextVectorEnv
from textenv.extras.human import HumanReward
from textenv.optional import package
from textenv.prompts.prompts import PromptOrder
from textenv.rewards.scores import merge
from textenv.rewards.training import NOW, training
from textenv.rollout import is_episode_env
from textenv.state import set_states, states_of

logger = logging.getLogger(__name__)
MakeEnv = Callable[[int], VectorEnv]


@contextmanager
def rollout_workers(agent: Learner, make_env: MakeEnv, workers: int | str, *, staleness: int = 0) -> Iterator[None]:
    """Context in which Ray workers collect an agent's rollouts, each in its share of the environment slots.

    Args:
        agent: its environment has as many slots as all workers; nobody plays there, but it has the order of prompts.
        make_env: function of a number of slots that makes an environment like the agent's; called in each worker.
        workers: their number on this machine, or ``ray://HOST:PORT``: as many as that cluster has CPUs. A cluster that
            was joined before, by ``ray.init``, is used, and left running.
        staleness: maximum number of updates between the weights that act and the update that learns from it.
    """
    _check(agent, workers, staleness)
    before, ray = agent.collector, package("ray", "ray")
    with ExitStack() as ends:
        if not ray.is_initialized():
            ends.callback(ray.shutdown)
            join_cluster(ray, str(workers))
        count = int(workers if str(workers).isdecimal() else ray.cluster_resources()["CPU"])
        agent.collector = own = WorkerCollector(agent, make_env, count, staleness)
        ends.callback(own.close)
        try:
            yield
        finally:
            agent.collector, before.seed = before, own.seed


def join_cluster(ray: Any, workers: str) -> None:
    """Start Ray for a number of workers, or join a cluster; raises a ConnectionError if that fails."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where: dict[str, Any] = {"address": workers}
    if workers.isdecimal():
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or Ray writes one to the home folder
        where = {"address": "local", "num_cpus": int(workers), "include_dashboard": False}
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ones too
        raise ConnectionError(f"Ray could not be started or joined ({where['address']}): {error}") from error


def _check(agent: Learner, workers: int | str, staleness: int) -> None:
    name, config, env = type(agent).__name__, agent.config, agent.env
    corrected = isinstance(config, ClippedConfig) and config.max_importance_weight
    rewards = env.task.rewards if isinstance(env, TextVectorEnv) and isinstance(env.task, FunctionTask) else None
    asked = rewards and any(isinstance(function, HumanReward) for function, _ in rewards.functions.values())
    for wrong, said in (
        (not re.fullmatch(r"[1-9]\d*|ray://.+", str(workers)), f"are {workers}, expected a number, or ray://HOST:PORT"),
        (collectives.world_size() > 1, "collect for a single learning process: use either torchrun or workers"),
        (agent.collector.generator is not None, "play by the policy itself: use none, or leave the generator out"),
        (agent.policy.trained_by_values, f"do not know the rate at which {name} explores: use none, or PPO"),
        (is_episode_env(env) and not isinstance(env, TextVectorEnv), f"cannot play a {type(env).__name__}: use none"),
        (asked, "score in other processes, but HumanReward asks at this terminal: use none"),
        (staleness < 0 or (staleness and not corrected), f"with staleness {staleness} need PPO or GRPO and "
         "max_importance_weight=2, which corrects for the older weights (staleness 0 waits for the present ones)"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"workers {said}")


class Worker:
    """Environment slots and a copy of the policy; Ray runs it in a process of its own."""

    def start(self, make_env: MakeEnv, slots: int, policy: Any, seed: int, state: Any) -> None:
        """Make the environment, and go on from the state after an earlier `collect`, if it was saved completely."""
        self.env, self.policy = make_env(slots), policy
        if not isinstance(self.env, VectorEnv) or self.env.num_envs != slots:
            raise ValueError(f"make_env({slots}) returned {self.env!r:.200}, expected that number of environment slots")
        self.collector = Collector(self.env, policy, seed=seed)
        policy.generator.manual_seed(seed + 2**32)
        state = copy.deepcopy(state)  # Ray's arrays are read-only
        if isinstance(self.env, TextVectorEnv):
            set_states(self.env.user_objects, state["objects"])
        elif state is not None and state["environment"] is not None:
            set_env_state(self.env, state["environment"])
            policy.generator.set_state(state["generator"].get_state())
            policy.memory = dict(state["memory"])
            self.collector.load_state_dict(state["collector"])
            self.collector.resume()

    def collect(self, started: None, weights: Mapping[str, Any], job: dict[str, Any], now: Any) -> tuple[Any, Any, Any]:
        """Return a rollout, this worker's state, and in text the turns, their rows and scores."""
        load_weights(self.policy, weights)
        with training(*now):
            if not isinstance(self.env, TextVectorEnv):
                rollout = self.collector.collect(**job).clone()
                own = {"generator": self.policy.generator, "memory": dict(self.policy.memory)}
                state = {"environment": env_state(self.env), "collector": self.collector.state_dict()}
                return rollout, own | state, None
            self.env.prompt_order = job.pop("order")
            rollout = self.collector.play_episodes(self.env, **job)
        turns, *others = cast("Any", self.env.taken)
        bare = [replace(turn, prompt=replace(turn.prompt, state=None), tokenizer=None) for turn in turns]
        return rollout, {"objects": states_of(self.env.user_objects)}, (bare, *others)


class WorkerCollector(Collector):
    """Collector that joins the rows of Ray workers; see `rollout_workers`.

    In text, the order of prompts and the seeds of episodes are drawn here, so that prompts and tokens are those of one
    process; the state of a worker is that of its rewards, and the environment here has that of the first. In control,
    worker k has the streams of rank k (`algos.ranks.collectives.local_seed`).
    """

    def __init__(self, agent: Learner, make_env: MakeEnv, workers: int, staleness: int) -> None:
        control = not is_episode_env(agent.env)
        super().__init__(agent.env, agent.policy, seed=agent.config.seed if control else agent.collector.seed)
        self.slots = collectives.local_count(agent.env.num_envs, "num_envs", workers)
        self.ray, self.make_env, self.workers, self.staleness = package("ray", "ray"), make_env, workers, staleness
        self.rollouts = self.replaced = 0  # rollouts returned (the version of the weights), workers that have ended
        self._actors: dict[int, tuple[Any, Any]] = {}  # by number of the worker: actor, end of `Worker.start`
        self._running: dict[Any, tuple[int, int, int]] = {}  # by reference: worker, rollout, version of the weights
        self._parts: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # by rollout and worker
        self._states: dict[int, Any] = {}  # by worker: its state after the rollout returned last
        self._newest: dict[int, Any] = {}  # by worker: its state after the rollout collected last
        self._jobs: dict[int, Any] = {}  # by rollout: order of prompts and seeds of episodes (text)
        self._policy = self.ray.put(copy.deepcopy(self.policy.fork()).to("cpu"))  # with its frozen weights

    def close(self) -> None:
        """End the workers, and forget what they have collected."""
        for actor, _ in self._actors.values():
            self.ray.kill(actor)
        for kept in (self._actors, self._running, self._parts):
            kept.clear()

    def collect(self, **counts: Any) -> Any:
        """Return the next rollout; see `Collector.collect`. Idle workers begin one that is not too far ahead."""
        size = counts.setdefault("group_size", 1)
        if episodes := counts.get("num_episodes"):
            counts["num_episodes"] = size * collectives.local_count(
                episodes // size, "the number of groups", self.workers
            )
        weights = {name: x.detach().cpu().clone() for name, x in trained_weights(self.policy).items()}
        shared, now, last = self.ray.put(weights), self.rollouts, self.rollouts + self.staleness
        mine = [(now, worker) for worker in range(self.workers)]
        while True:
            for worker in sorted({*range(self.workers)} - {worker for worker, _, _ in self._running.values()}):
                number = next(n for n in range(now, last + 2) if (n, worker) not in self._parts)
                if number <= last:
                    self._begin_rollout(worker, number, counts, shared)
            if self._parts.keys() >= set(mine):
                break
            for reference in self.ray.wait(list(self._running), num_returns=1)[0]:
                self._take(reference)
        parts = [self._parts.pop(place) for place in mine]
        self.rollouts += 1
        self._jobs.pop(now, None)
        self._states = {worker: state for worker, (_, state, _) in enumerate(parts)}
        if isinstance(self.env, TextVectorEnv):
            _report(self.env, [(rollout, turns) for rollout, _, turns in parts])
            set_states(self.env.user_objects, self._states[0]["objects"])  # for evaluations and the saved agent
        else:
            self.seed = (self.seed or 0) + 1  # of a worker without a state
        return collectives.join_rows([rollout for rollout, _, _ in parts])

    def state_dict(self) -> dict[str, Any]:
        """See `Collector.state_dict`; with the workers' states. What has been collected ahead is not in it."""
        return super().state_dict() | {"rollouts": self.rollouts, "jobs": self._jobs, "workers": self._states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        self.close()
        super().load_state_dict(state)
        self.rollouts, self._jobs = state.get("rollouts", 0), dict(state.get("jobs", {}))
        self._states = state.get("workers", {})
        if len(self._states) != self.workers:
            said = "the run had %d workers, now there are %d: environments and actions begin anew from the seed"
            if is_episode_env(self.env):
                said = "the run had %d workers, now there are %d: rewards with a state go on from that of the first"
            if not is_episode_env(self.env) or states_of(self.env.user_objects):
                logger.warning(said, len(self._states), self.workers)
            self._states = {}
        self._newest = dict(self._states)

    def _begin_rollout(self, worker: int, number: int, counts: dict[str, Any], weights: Any) -> None:
        """Let a worker begin a rollout; one that replaces another has its last state, if it has one, or new streams."""
        if worker not in self._actors:
            seed = collectives.local_seed(self.seed or 0, worker + self.workers * self.replaced)
            actor, state = self.ray.remote(num_cpus=1)(Worker).remote(), self._newest.get(worker)
            if state is None and isinstance(self.env, TextVectorEnv):
                state = {"objects": states_of(self.env.user_objects)}
            started = actor.start.remote(self.make_env, self.slots, self._policy, seed, state)
            self._actors[worker] = actor, started
        job = counts
        if isinstance(self.env, TextVectorEnv):
            episodes, size = counts["num_episodes"], counts["group_size"]
            if self.seed is not None:  # as a first reset does
                order, (self.env.np_random, _) = PromptOrder(), np_random(self.seed)
                order.start(self.env.np_random, anew=True)
                self.env.prompt_order, self.seed = order.state, None
            if number not in self._jobs:
                before: Any = self.env.prompt_order
                self._jobs[number] = before, episode_seeds(episodes * self.workers, self.policy.generator)
                self.env.prompt_order = _later(before, self.workers * episodes // size)
            before, seeds = self._jobs[number]
            job = {"episodes": episodes, "group_size": size, "order": _later(before, worker * episodes // size)}
            job["seeds"] = seeds[worker * episodes :][:episodes]
        actor, started = self._actors[worker]
        self._running[actor.collect.remote(started, weights, job, NOW.get()[:2])] = worker, number, self.rollouts

    def _take(self, reference: Any) -> None:
        """Keep what a worker has collected; replace it if it has ended (not too often), and raise its own errors."""
        worker, number, version = self._running.pop(reference)
        try:
            rollout, state, turns = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            self.replaced += 1
            why = f"worker {worker} has ended: {error}".splitlines()[0]
            if self.replaced > 10:
                raise ChildProcessError(f"{why} (the {self.replaced}th that has ended)") from error
            logger.warning("%s; a new one collects its rollout again", why)
            self.ray.kill(self._actors.pop(worker)[0])
            return
        if self.staleness:
            rollout["staleness"] = torch.full(rollout.shape, number - version)
        self._parts[number, worker] = rollout, state, turns
        self._newest[worker] = state


def _later(order: dict[str, int], count: int) -> dict[str, int]:
    return order | {"position": order["position"] + count}


def _report(env: TextVectorEnv, parts: list[tuple[Any, Any]]) -> None:
    """Give an environment the turns of all workers, for its samples and metrics."""
    turns, rows, pieces = list[Any](), list[int](), list[Any]()
    for worker, (rollout, (own, local_rows, scores)) in enumerate(parts):
        pieces.append((range(len(turns), len(turns) + len(own)), scores))
        turns += [replace(turn, tokenizer=env.tokenizer) for turn in own]
        rows += [worker * len(rollout) + row for row in local_rows]
    env.report(turns, rows, merge(len(turns), pieces))
