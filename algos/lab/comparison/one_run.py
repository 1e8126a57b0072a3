"""One run of a comparison: evaluated, trained, evaluated again, and kept in its folder; imports torch."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from algos.evaluation import evaluate, summarise
from algos.lab.comparison.episodes import Episode, record_episode, write_episodes
from algos.lab.comparison.games import describes_a_game, in_steps_of_the_game, solved_return
from algos.lab.comparison.jobs import Job
from algos.lab.comparison.record import Record, write_record
from algos.lab.comparison.summary import RunResult, update_kl
from algos.lab.insight.dynamics import Dynamics
from algos.storage.env_state import share_objects
from algos.storage.run_folder import checkpoints
from algos.training.metrics import Metrics
from algos.training.run import Callback, Run
from algos.training.save import spec_of
from textenv.rollout import is_episode_env

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv
    from tensordict import TensorDict

    from algos.agent import Agent
    from algos.policies.policy import Policy

TEXT_EPISODES = 288
"""Episodes per evaluation in text: prompts of the test split."""
CONTROL_EPISODES = 20
"""Episodes per evaluation in control, and in games in words."""


class _Performance(NamedTuple):
    """What an evaluation measures of a policy."""

    scores: dict[str, float]
    """Numbers of `summarise`."""
    samples: list[tuple[str, str]]
    """A few prompts and completions; none in control."""
    episode: Episode | None
    """A game that a language model has played, step by step."""


def train(job: Job, *, restarts: bool) -> RunResult:
    """Train and evaluate one run, and keep the result in its folder.

    Args:
        job: the run.
        restarts: True if its folder holds this run already, unfinished; it goes on from its newest checkpoint, if any.
    """
    torch.set_num_threads(1)
    recipe = job.case.recipe
    agent = recipe.build(job.seed)
    policy = agent.policy

    # Evaluation before the training: of the initial weights, also when a checkpoint is restored afterwards
    num_episodes = job.num_episodes
    if not num_episodes:
        is_game = describes_a_game(agent.env.spec) or not is_episode_env(agent.env)
        num_episodes = CONTROL_EPISODES if is_game else TEXT_EPISODES
    test_env = recipe.environment(min(num_episodes, 64), split="test")
    performance_before = _measure(test_env, policy, job, num_episodes=num_episodes)

    # Training
    record = Record(job.case.name, job.seed, job.settings, None)
    history = _learn(agent, job, record, restarts=restarts)

    # Evaluation after the training, with the states that rewards have now
    share_objects(agent.env, test_env)
    performance_after = _measure(test_env, policy, job, num_episodes=num_episodes)

    # What the folder keeps
    write_episodes(job.folder, {"before": performance_before.episode, "after": performance_after.episode})
    result = _result(job, agent, before=performance_before, after=performance_after, history=history)
    write_record(job.folder, record._replace(result=result))
    return result


def _measure(test_env: VectorEnv, policy: Policy, job: Job, *, num_episodes: int) -> _Performance:
    """Evaluate a policy in the test environment, with the job's seed."""
    options: dict[str, Any] = {"num_episodes": num_episodes, "deterministic": job.deterministic}
    if job.sampling is not None:
        options = {"sampling": job.sampling}
    return _Performance(
        scores=summarise(test_env, policy, seed=job.seed, **options),
        samples=_samples(test_env, policy),
        episode=record_episode(test_env, policy, seed=job.seed, deterministic=job.deterministic),
    )


def _learn(agent: Agent[Any], job: Job, record: Record, *, restarts: bool) -> list[Metrics]:
    """Train in the job's folder, from the newest checkpoint if the run goes on; return the metrics of all iterations.

    Args:
        agent: the agent of the job's recipe.
        job: the run.
        record: what the folder keeps while the run has not finished.
        restarts: see `train`.
    """
    total_steps = job.case.recipe.total_steps
    resume = None
    if restarts and checkpoints(job.folder):
        resume = job.folder
    callbacks: list[Callback] = [_StoreRecord(job.folder, record)]
    if job.dynamics_every:
        callbacks.append(Dynamics(job.dynamics_every))
    return agent.learn(
        total_steps,
        run_dir=job.folder,
        on_iteration=partial(_print_progress, job),
        callbacks=callbacks,
        diagnose=_Measurements(),
        checkpoint_every=max(1, int(total_steps) // 10),
        resume=resume,
        overwrite=resume is None and (restarts or job.overwrite),
    )


class _StoreRecord(Callback):
    """Stores the record when the run starts: one that cannot start changes nothing."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder = folder
        self.record = record

    def on_start(self, run: Run) -> None:
        """See `Callback.on_start`."""
        write_record(self.folder, self.record)


def _print_progress(job: Job, metrics: Metrics) -> None:
    """Print steps and mean return of every tenth iteration, unless the job is quiet."""
    if not job.quiet and int(metrics["iteration"]) % 10 == 0 and "episode/return" in metrics:
        progress = f"{metrics['steps']:>6.0f} steps, mean return {metrics['episode/return']:.3g}"
        print(f"{job.case} seed {job.seed}: {progress}", flush=True)


class _Measurements:
    """Measures each iteration (a ``diagnose`` of `algos.training.loop.learn`): `update_kl` and ``time/processor``.

    ``time/processor`` are the seconds that all processors spent on this process since the last iteration.
    """

    def __init__(self) -> None:
        self._last = time.process_time()

    def __call__(self, agent: Agent[Any], rollout: TensorDict) -> dict[str, float]:
        """Return the measurements of an iteration."""
        metrics = update_kl(agent, rollout)
        now = time.process_time()
        metrics["time/processor"] = now - self._last
        self._last = now
        return metrics


def _samples(env: Any, policy: Policy, count: int = 8) -> list[tuple[str, str]]:
    """Return a few prompts of a text environment and the policy's completions; none in control."""
    if not is_episode_env(env.unwrapped):
        return []
    evaluate(env, policy, num_episodes=count)
    return [(sample["prompt"], sample["completion"]) for sample in env.unwrapped.samples(range(count))]


def _result(
    job: Job, agent: Agent[Any], *, before: _Performance, after: _Performance, history: list[Metrics]
) -> RunResult:
    """Return what the report needs of a run that has finished."""
    case = job.case
    policy = agent.policy
    samples = []
    for (prompt, completion_before), (_, completion_after) in zip(before.samples, after.samples, strict=True):
        samples.append((prompt, completion_before, completion_after))

    # Numbers, texts and lists, as JSON has them
    return RunResult(
        env=case.env_id,
        algorithm=case.algorithm_name,
        seed=job.seed,
        policy=type(policy).__name__,
        parameters=sum(p.numel() for p in policy.parameters()),
        best=solved_return(spec_of(agent.env)),
        before=before.scores,
        after=after.scores,
        history=in_steps_of_the_game(history, env_id=case.env_id, env_kwargs=case.recipe.env_kwargs),
        samples=samples,
        name=str(case),
        label=case.name,
        folder=str(job.folder),
        game=case.game,
        trained_parameters=sum(p.numel() for p in policy.parameters() if p.requires_grad),
    )
