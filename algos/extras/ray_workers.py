"""Rollout workers on Ray: environments, and copies of the policy, in other processes or on other machines.

Asynchronous workers go on during the update, with weights that are at most ``staleness`` updates old when the update
learns from their rollout. Three policies differ then: the one that sampled, the one before the update, and the one
being updated (IMPACT, Luo et al. 2020; decoupled PPO, Hilton et al. 2022). Ratios are taken to the first one
(``ratio_tolerance``), or to the second and weighted (`algos.importance`); docs/results/staleness.md compares both.
"""

import copy
import io
import logging
import os
import re
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict, cast

import numpy as np
import torch
from gymnasium.utils.seeding import np_random
from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.collection import Collector
from algos.config import ClippedConfig, Config, GroupsConfig, weighs_samples
from algos.policies.policy import Policy
from algos.policies.random_streams import ACTIONS, episode_seeds, stream_seed
from algos.ranks import collectives
from algos.storage.env_state import PartState, changed_arguments, env_state, note_settings, set_env_state
from algos.storage.weights import load_weights, trained_weights
from algos.training.learner import Learner
from algos.training.unsaved import UnsavedState
from textenv.envs.task import FunctionTask
from textenv.envs.turn import Turn
from textenv.envs.vector_env import TextVectorEnv
from textenv.extras.human import HumanReward
from textenv.optional import package
from textenv.programs.vector_env import ProgramVectorEnv
from textenv.prompts.prompts import PromptOrder
from textenv.rewards.scores import Scores, merge
from textenv.rewards.training import NOW, training
from textenv.rollout import is_episode_env, num_episodes_of
from textenv.state import set_states, states_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MakeEnv = Callable[[int], VectorEnv]
"""Function of a number of slots that makes an environment."""
MAX_PRINTED = 10_000
"""Characters that a worker's code prints in a rollout and that are printed here."""
MAX_REPLACED = 10
"""Number of workers that may end by themselves before the run ends too."""
Arguments = dict[str, Any]
"""Keyword arguments of a collector's method, which checks them."""
PlayedTurns = tuple[list[Turn], list[int], Scores]
"""Turns of text, the episode of each one, and their scores."""


class WorkerState(TypedDict, total=False):
    """What a worker goes on from: in text, ``objects`` alone; in control, all others."""

    objects: dict[str, dict[str, Any]]
    """States of the environment's rewards and other objects, see `textenv.state.states_of`."""
    generator: torch.Generator
    memory: dict[str, object]
    """The policy's memory of its slots."""
    environment: list[PartState] | None
    """See `algos.storage.env_state.env_state`."""
    collector: dict[str, Any]


class _RemoteMethod(Protocol):
    def remote(self, *arguments: object) -> object:
        """Begin a call; return Ray's reference of its result."""


class _Actor(Protocol):
    """A `Worker` in its process, as Ray shows it."""

    start: _RemoteMethod
    collect: _RemoteMethod


@contextmanager
def rollout_workers(
    agent: Learner[Config], make_env: MakeEnv, workers: int | str, *, staleness: int = 0
) -> Iterator[None]:
    """Context in which Ray workers collect an agent's rollouts, each in its share of the environment slots.

    Args:
        agent: the agent. Its environment is never stepped; it has as many slots as all workers together, and owns the
            order of prompts.
        make_env: makes a worker's environment, like the agent's, with this number of slots; called in each worker.
        workers: number of workers on this machine, or ``ray://HOST:PORT`` for as many as that cluster has CPUs. A
            cluster that was joined before, by ``ray.init``, is used, and left running.
        staleness: maximum number of updates between the weights that act and the update that learns from it.

    Raises:
        ValueError: on arguments or an agent that workers cannot work with.
        ConnectionError: if Ray cannot be started or joined.
    """
    problem = _problem(agent, workers, staleness)
    if problem is not None:
        raise ValueError(f"workers {problem}")
    own_collector = agent.collector
    ray = package("ray", "ray")
    with ExitStack() as cleanup:
        # Ray, which ends with this context if it begins here
        if not ray.is_initialized():
            cleanup.callback(ray.shutdown)
            join_cluster(ray, str(workers))
        if str(workers).isdecimal():
            num_workers = int(workers)
        else:
            num_workers = int(ray.cluster_resources()["CPU"])

        # The agent's collector is replaced, and goes on afterwards with the seed that comes next
        worker_collector = WorkerCollector(agent, make_env, num_workers, staleness)
        agent.collector = worker_collector
        cleanup.callback(worker_collector.close)
        try:
            yield
        finally:
            agent.collector = own_collector
            own_collector.seed = worker_collector.seed


def join_cluster(ray: ModuleType, workers: str) -> None:
    """Start Ray for a number of workers, or join a cluster; raise a ConnectionError if that fails."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, object] = {"address": workers}
    if workers.isdecimal():
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or Ray writes one to the home folder
        options = {"address": "local", "num_cpus": int(workers), "include_dashboard": False}
    # Ray puts a handler of its own in place, which would end the program in the middle of an iteration
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ones too
        raise ConnectionError(f"Ray could not be started or joined ({options['address']}): {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _problem(agent: Learner[Config], workers: int | str, staleness: int) -> str | None:
    """Return what workers cannot do with this agent, as the rest of a sentence; None if there is nothing."""
    # The number of workers, and who else collects
    if not re.fullmatch(r"[1-9]\d*|ray://.+", str(workers)):
        return f"are {workers}, expected a number, or ray://HOST:PORT"
    if collectives.world_size() > 1:
        return "collect for a single learning process: use either torchrun or workers"
    if agent.collector.generator is not None:
        return "play by the policy itself: use none, or leave the generator out"

    if isinstance(agent.config, GroupsConfig) and agent.config.max_refills:
        return f"collect whole rollouts, but max_refills is {agent.config.max_refills}: use none, or set it to 0"

    # The policy and the environment
    env = agent.env
    if agent.policy.trained_by_values:
        return f"do not know the rate at which {type(agent).__name__} explores: use none, or PPO"
    if is_episode_env(env) and not isinstance(env, TextVectorEnv):
        return f"cannot play a {type(env).__name__}: use none"
    if isinstance(env, ProgramVectorEnv):
        return "send back what was written, but not the programs, of which the metrics are: use none, or torchrun"
    if isinstance(env, TextVectorEnv) and env.sampler is not None:
        return "each play a part of the episodes, but a sampler learns from all: use none, or leave the sampler out"
    if isinstance(env, TextVectorEnv) and isinstance(env.task, FunctionTask):
        for function, _ in env.task.rewards.functions.values():
            if isinstance(function, HumanReward):
                return "score in other processes, but HumanReward asks at this terminal: use none"

    # The age of the weights
    takes_old_ratios = isinstance(agent.config, ClippedConfig) and agent.config.ratio_tolerance is not None
    if staleness < 0 or (staleness and not weighs_samples(agent.config) and not takes_old_ratios):
        return (
            f"with staleness {staleness} need PPO, GRPO or REINFORCEPlusPlus, and either ratio_tolerance=1e9, with "
            "which ratios are taken to the older weights, or max_importance_weight=2, which corrects for them "
            "(docs/results/staleness.md; staleness 0 waits for the present weights)"
        )
    return None


class Words(NamedTuple):
    """What the code that a worker runs has said; nobody sees it in the worker's process."""

    printed: str
    """What was printed; of more than `MAX_PRINTED` characters the first, and how many follow."""
    warnings: list[tuple[str, int, str]]
    """Logger, level and text."""


class _Listener(logging.Handler):
    """Keeps warnings, also those of `warnings.warn`, and what is printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.printed = io.StringIO()
        self.warnings: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append((record.name, record.levelno, record.getMessage()))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context whose words are kept."""
        logging.getLogger().addHandler(self)
        logging.captureWarnings(True)
        try:
            with redirect_stdout(self.printed):
                yield
        finally:
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(self)

    def take(self) -> Words:
        """Return the words since the last call."""
        printed = self.printed.getvalue()
        num_left_out = len(printed) - MAX_PRINTED
        if num_left_out > 0:
            printed = f"{printed[:MAX_PRINTED]}… ({num_left_out} more characters)\n"
        words = Words(printed, self.warnings)
        self.printed = io.StringIO()
        self.warnings = []
        return words


class Worker:
    """Environment slots and a copy of the policy; Ray runs it in a process of its own."""

    def __init__(self) -> None:
        self.listener = _Listener()

    def start(self, make_env: MakeEnv, slots: int, policy: Policy, seed: int, state: WorkerState | None) -> None:
        """Make the environment, and go on from the state after an earlier `collect`.

        Args:
            make_env: makes the environment.
            slots: number of environment slots of this worker.
            policy: copy of the agent's policy.
            seed: seed of the environment and, in control, of the actions.
            state: state that `collect` returned; in control None, or without an environment that could be saved, if
                this worker begins anew.
        """
        with self.listener.listening():
            self._start(make_env, slots, policy, seed, state)
            self.unsaved = UnsavedState(self, evaluated=False)

    def _start(self, make_env: MakeEnv, slots: int, policy: Policy, seed: int, state: WorkerState | None) -> None:
        """See `start`."""
        # Begin anew
        self.env = make_env(slots)
        self.policy = policy
        if not isinstance(self.env, VectorEnv) or self.env.num_envs != slots:
            raise ValueError(f"make_env({slots}) returned {self.env!r:.200}, expected that number of environment slots")
        self.collector = Collector(self.env, policy, seed=seed)
        policy.generator.manual_seed(stream_seed(seed, ACTIONS))

        # Go on, if the state was saved completely
        note_settings(self.env)
        state = copy.deepcopy(state)  # Ray's arrays are read-only
        if isinstance(self.env, TextVectorEnv):
            assert state is not None
            set_states(self.env.user_objects, state["objects"])
        elif state is not None and state["environment"] is not None:
            change = changed_arguments(self.env, state["environment"])
            if change:
                logger.warning("%s: its episodes begin anew", change)
                return
            set_env_state(self.env, state["environment"])
            policy.generator.set_state(state["generator"].get_state())
            policy.memory = dict(state["memory"])
            self.collector.load_state_dict(state["collector"])
            self.collector.resume()

    def collect(
        self, started: None, weights: Mapping[str, torch.Tensor], job: Arguments, now: tuple[int, float]
    ) -> tuple[TensorDict, WorkerState, PlayedTurns | None, Words]:
        """Collect a rollout.

        Args:
            started: result of `start`, which Ray waits for.
            weights: trained weights by name.
            job: arguments of `Collector.collect`; in text those of `Collector.play_episodes`, and ``order``, the order
                of prompts.
            now: step and progress of the training.

        Returns:
            The rollout, this worker's state, in text the turns, their episodes and scores (None in control), and what
            was said.
        """
        load_weights(self.policy, weights)
        with training(*now), self.listener.listening():
            if isinstance(self.env, TextVectorEnv):
                rollout, state, turns = self._play_episodes(self.env, job)
            else:
                rollout, state = self._play_steps(job)
                turns = None
            self.unsaved.warn()
        return rollout, state, turns, self.listener.take()

    def _play_steps(self, job: Arguments) -> tuple[TensorDict, WorkerState]:
        """Collect a rollout of control."""
        rollout = self.collector.collect(**job).clone()
        return rollout, {
            "generator": self.policy.generator,
            "memory": dict(self.policy.memory),
            "environment": env_state(self.env),
            "collector": self.collector.state_dict(),
        }

    def _play_episodes(self, env: TextVectorEnv, job: Arguments) -> tuple[TensorDict, WorkerState, PlayedTurns]:
        """Collect a rollout of text; the turns go without the environment's state and the tokenizer."""
        env.prompt_order = job.pop("order")
        rollout = self.collector.play_episodes(env, **job)
        turns, episodes, scores = env.scored_turns
        bare_turns = []
        no_tokenizer = cast("PreTrainedTokenizerBase", None)  # the environment here puts its own in
        for turn in turns:
            prompt = replace(turn.prompt, state=None)
            bare_turns.append(replace(turn, prompt=prompt, tokenizer=no_tokenizer))
        return rollout, {"objects": states_of(env.user_objects)}, (bare_turns, episodes, scores)


class _Call(NamedTuple):
    """A running `Worker.collect`."""

    worker: int
    rollout_number: int
    weights_version: int
    """Number of rollouts returned before the call, each of which was followed by an update."""


class _Part(NamedTuple):
    """Result of `Worker.collect`."""

    rollout: TensorDict
    state: WorkerState
    turns: PlayedTurns | None
    """In control None."""
    words: Words


class WorkerCollector(Collector):
    """Collector that joins the rows of Ray workers; see `rollout_workers`.

    In text, the order of prompts and the seeds of episodes are drawn here, so that prompts and tokens are those of one
    process. A worker's state is the state of its rewards; the environment here gets the state of the first worker. In
    control, worker k has the random streams of rank k (`algos.ranks.collectives.local_seed`).
    """

    def __init__(self, agent: Learner[Config], make_env: MakeEnv, workers: int, staleness: int) -> None:
        seed = agent.collector.seed
        if not is_episode_env(agent.env):
            seed = agent.config.seed
        super().__init__(agent.env, agent.policy, seed=seed)
        self.slots = collectives.local_count(agent.env.num_envs, "num_envs", workers)
        self.ray = package("ray", "ray")
        self.make_env = make_env
        self.workers = workers
        self.staleness = staleness
        self.rollouts = 0  # rollouts returned, which is also the version of the weights
        self.replaced = 0  # workers that have ended by themselves
        policy = copy.deepcopy(self.policy.fork()).to("cpu")
        self._policy = self.ray.put(policy)  # with its frozen weights

        self._actors: dict[int, tuple[_Actor, object]] = {}  # by worker: actor, reference of the end of `Worker.start`
        self._running: dict[object, _Call] = {}  # by Ray's reference
        self._parts: dict[tuple[int, int], _Part] = {}  # by rollout and worker
        self._repeated: set[tuple[int, str, str]] = set()  # warnings of workers: rollout, logger and text
        # By rollout, in text: order of prompts, seeds of episodes
        self._jobs: dict[int, tuple[dict[str, int], np.ndarray]] = {}
        # By worker: its state after the rollout that was returned last, and after the one that was collected last
        self._states: dict[int, WorkerState] = {}
        self._newest_states: dict[int, WorkerState] = {}

    def close(self) -> None:
        """End the workers, and forget what they have collected."""
        for actor, _ in self._actors.values():
            self.ray.kill(actor)
        self._actors.clear()
        self._running.clear()
        self._parts.clear()

    def collect(self, **counts: Any) -> TensorDict:
        """Return the next rollout; see `Collector.collect`. Idle workers begin one that is not too far ahead."""
        # Each worker's share of the episodes
        group_size = counts.setdefault("group_size", 1)
        num_episodes = counts.get("num_episodes")
        if num_episodes:
            num_groups = collectives.local_count(num_episodes // group_size, "the number of groups", self.workers)
            counts["num_episodes"] = group_size * num_groups

        # Collect, with the present weights where a rollout begins now
        weights = {name: weight.detach().cpu().clone() for name, weight in trained_weights(self.policy).items()}
        number = self.rollouts
        self._collect_parts(number, counts, self.ray.put(weights))
        parts = [self._parts.pop((number, worker)) for worker in range(self.workers)]
        self.rollouts += 1

        # What the next rollout, an evaluation and the saved agent begin with
        self._jobs.pop(number, None)
        self._repeated = {entry for entry in self._repeated if entry[0] > number}
        self._states = {worker: part.state for worker, part in enumerate(parts)}
        if isinstance(self.env, TextVectorEnv):
            _report(self.env, parts)
            set_states(self.env.user_objects, self._states[0]["objects"])
        else:
            self.seed = (self.seed or 0) + 1  # of a worker without a state
        return collectives.join_rows([part.rollout for part in parts])

    def _collect_parts(self, number: int, counts: Arguments, weights: object) -> None:
        """Keep the workers busy until all have collected their part of a rollout.

        Args:
            number: number of the rollout.
            counts: arguments of `Collector.collect` for each worker.
            weights: Ray's reference of the present weights.
        """
        parts = {(number, worker) for worker in range(self.workers)}
        while True:
            # Idle workers begin their first rollout that is not collected yet, unless it is too far ahead
            busy = {call.worker for call in self._running.values()}
            for worker in range(self.workers):
                next_number = number
                while (next_number, worker) in self._parts:
                    next_number += 1
                if worker not in busy and next_number <= number + self.staleness:
                    self._begin_rollout(worker, next_number, counts, weights)
            if parts <= self._parts.keys():
                return
            finished, _ = self.ray.wait(list(self._running), num_returns=1)
            for reference in finished:
                self._take(reference)

    def state_dict(self) -> dict[str, object]:
        """See `Collector.state_dict`; with the workers' states. What has been collected ahead is not in it."""
        return super().state_dict() | {"rollouts": self.rollouts, "jobs": self._jobs, "workers": self._states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        self.close()
        super().load_state_dict(state)
        self.rollouts = state.get("rollouts", 0)
        self._jobs = dict(state.get("jobs", {}))
        self._states = state.get("workers", {})

        # States of another number of workers do not fit
        if len(self._states) != self.workers:
            message = "the run had %d workers, now there are %d: environments and actions begin anew from the seed"
            if is_episode_env(self.env):
                message = "the run had %d workers, now there are %d: rewards with a state go on from that of the first"
            if not is_episode_env(self.env) or states_of(self.env.user_objects):
                logger.warning(message, len(self._states), self.workers)
            self._states = {}
        self._newest_states = dict(self._states)

    def _begin_rollout(self, worker: int, number: int, counts: Arguments, weights: object) -> None:
        """Let a worker begin a rollout; start the worker first if it does not run."""
        if worker not in self._actors:
            self._start_worker(worker)
        job = counts
        if isinstance(self.env, TextVectorEnv):
            job = self._text_job(self.env, worker, number, counts)
        actor, started = self._actors[worker]
        step_and_progress = NOW.get()[:2]
        reference = actor.collect.remote(started, weights, job, step_and_progress)
        self._running[reference] = _Call(worker, number, self.rollouts)

    def _start_worker(self, worker: int) -> None:
        """Start a worker from its last state if it has one, or else with random streams of its own."""
        seed = collectives.local_seed(self.seed or 0, worker + self.workers * self.replaced)
        actor = self.ray.remote(num_cpus=1)(Worker).remote()
        state = self._newest_states.get(worker)
        if state is None and isinstance(self.env, TextVectorEnv):
            state = {"objects": states_of(self.env.user_objects)}
        started = actor.start.remote(self.make_env, self.slots, self._policy, seed, state)
        self._actors[worker] = (actor, started)

    def _text_job(self, env: TextVectorEnv, worker: int, number: int, counts: Arguments) -> Arguments:
        """Return a worker's part of the order of prompts and of the seeds of a rollout, drawn with the first part."""
        num_episodes = counts["num_episodes"]
        group_size = counts["group_size"]
        num_prompts = num_episodes // group_size

        # As a first reset does
        if self.seed is not None:
            order = PromptOrder()
            env.np_random, _ = np_random(self.seed)
            order.start(env.np_random, anew=True)
            env.prompt_order = order.state
            self.seed = None

        # Draw the prompts and seeds of all workers
        if number not in self._jobs:
            first_order = env.prompt_order
            assert first_order is not None  # since the first reset
            self._jobs[number] = (first_order, episode_seeds(num_episodes * self.workers, self.policy.generator))
            env.prompt_order = _later(first_order, num_prompts * self.workers)

        # Take this worker's
        first_order, seeds = self._jobs[number]
        first_episode = worker * num_episodes
        return {
            "episodes": num_episodes,
            "group_size": group_size,
            "order": _later(first_order, worker * num_prompts),
            "seeds": seeds[first_episode : first_episode + num_episodes],
        }

    def _take(self, reference: object) -> None:
        """Keep what a worker has collected, or replace a worker that has ended.

        Raises:
            ChildProcessError: if too many workers have ended.
            Exception: an error that a worker's code raised.
        """
        call = self._running.pop(reference)
        try:
            part = _Part(*self.ray.get(reference))
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self.ray.exceptions.RayError as error:
            self.replaced += 1
            reason = f"worker {call.worker} has ended: {error}".splitlines()[0]
            if self.replaced > MAX_REPLACED:
                raise ChildProcessError(f"{reason} (the {self.replaced}th that has ended)") from error
            logger.warning("%s; a new one collects its rollout again", reason)
            actor, _ = self._actors.pop(call.worker)
            self.ray.kill(actor)
            return
        self._repeat(part.words, call)
        if self.staleness:
            age = call.rollout_number - call.weights_version
            part.rollout["staleness"] = torch.full(part.rollout.shape, age)
        self._parts[call.rollout_number, call.worker] = part
        self._newest_states[call.worker] = part.state

    def _repeat(self, words: Words, call: _Call) -> None:
        """Say here what a worker's code has said there; a warning of several workers once for each rollout."""
        print(words.printed, end="")  # as the code of a reward would here
        for name, level, text in words.warnings:
            entry = (call.rollout_number, name, text)
            if entry not in self._repeated:
                self._repeated.add(entry)
                logging.getLogger(name).log(level, "%s (worker %d)", text, call.worker)


def _later(order: dict[str, int], count: int) -> dict[str, int]:
    """Return the state of a prompt order after this number of further prompts."""
    return order | {"position": order["position"] + count}


def _report(env: TextVectorEnv, parts: list[_Part]) -> None:
    """Give an environment the turns of all workers, for its samples and metrics."""
    turns: list[Turn] = []
    episodes: list[int] = []
    scores_of_turns = []
    first_episode = 0
    for part in parts:
        assert part.turns is not None
        worker_turns, local_episodes, scores = part.turns
        first_turn = len(turns)
        scores_of_turns.append((range(first_turn, first_turn + len(worker_turns)), scores))
        for turn in worker_turns:
            turns.append(replace(turn, tokenizer=env.tokenizer))
        for episode in local_episodes:
            episodes.append(first_episode + episode)
        first_episode += num_episodes_of(part.rollout)
    env.report(turns, episodes, merge(len(turns), scores_of_turns))
