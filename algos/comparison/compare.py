"""Comparison of any environments, algorithms and seeds by the same metrics."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos import presets
from algos.comparison.runs import STUDY, folder_name, read_study
from algos.comparison.summary import Case, RunResult, by_case, summary, update_kl
from algos.config import CONFIGS, field_values
from algos.envs.wrapping import Wrapper
from algos.make import absolute_paths
from algos.training.run_folder import holds_run

if TYPE_CHECKING:
    from algos.comparison.report import Report

DEFAULT_CASES = ("CartPole-v1:ppo", "textenv/Reviews-v0:ppo")
TEXT_EPISODES, CONTROL_EPISODES = 288, 20
"""Episodes per evaluation; in text, prompts of the test split."""


def parse_cases(given: Iterable[Case | str]) -> list[Case]:
    """Return cases; texts are ``ENV`` or ``ENV:ALGO,ALGO``, where ``ENV`` may be ``module:id``.

    Raises a ValueError on an unknown environment or algorithm, two that do not fit together, or equal names.
    """
    import gymnasium

    import textenv  # noqa: F401 (registers the environments)
    from textenv.importing import read_module

    cases = list[Case]()
    for each in given:
        if isinstance(each, Case):
            cases.append(each)
            continue
        env, _, algorithms = each.rpartition(":")
        if env not in gymnasium.registry and not (env and set(algorithms.split(",")) <= set(CONFIGS)):
            env, algorithms = each, "ppo"
        module, _, env_id = env.rpartition(":")
        if module:
            read_module(module)
        try:
            gymnasium.spec(env_id)
        except gymnasium.error.Error as error:
            advice = "give an environment of a package, or your own, as module:id, such as my_envs:Chase-v0"
            raise ValueError(f"case {each!r}: {error} {advice}") from error
        parsed = [Case(env, algorithm) for algorithm in algorithms.split(",")]
        for case in parsed:
            recipe_of(case)
        cases += parsed
    names = [str(case) for case in cases]
    if not cases or len(set(names)) < len(names):
        raise ValueError(
            f"cases are {', '.join(names) or 'none'}: give each once, such as CartPole-v1:ppo,a2c, or "
            "give them different names (in Python name=...)"
        )
    return cases


def compare(
    cases: Sequence[Case | str],
    *,
    seeds: int = 3,
    run_dir: str | Path = "runs/compare",
    total_steps: int | None = None,
    processes: int = 2,
    overwrite: bool = False,
    quiet: bool = False,
    wrappers: Sequence[Wrapper] = (),
    dynamics_every: int = 0,
) -> Report:
    """Train every case, print a table, write ``report.html``, ``curves.csv``, ``summary.csv`` and a paper's figure.

    Args:
        cases: cases to train; strings as in `parse_cases`.
        run_dir: folder for the report and a run folder for each training; other cases that an earlier call has
            trained there stay in the report.
        quiet: print nothing.
        wrappers: what wraps each environment of all cases, see `algos.make.make_vector_environment`.
        seeds, total_steps, processes, overwrite, dynamics_every: see `train_all`.

    Returns:
        Mean metrics of each case, path of the report, and seconds; a notebook shows the page.
    """
    from algos.comparison.report import Report, print_summaries, write_report
    from textenv.importing import load_function

    start = time.perf_counter()
    run_dir = Path(run_dir).absolute()  # a reward or an environment may change the working folder
    for name in wrappers:
        if isinstance(name, str):
            load_function(name)  # its package may register the environments
    found = parse_cases(cases)
    if wrappers:
        found = [dataclasses.replace(x, env_kwargs=dict(x.env_kwargs or {}) | {"wrappers": wrappers}) for x in found]
    run_dir.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"overwrite": overwrite, "quiet": quiet, "dynamics_every": dynamics_every}
    names, runs = [str(case) for case in found], list[RunResult]()
    if (run_dir / STUDY).exists():  # cases of an earlier call whose runs are still there stay in the comparison
        runs = [run for run in read_study(run_dir / STUDY) if run.case not in names and Path(run.folder).is_dir()]
    runs += train_all(found, run_dir=run_dir, seeds=seeds, total_steps=total_steps, processes=processes, **options)
    (run_dir / STUDY).write_text(json.dumps([dataclasses.asdict(run) for run in runs]), encoding="utf-8")
    seconds = time.perf_counter() - start
    page = write_report(run_dir, runs)
    result = {case: summary(own, study=runs) for case, own in by_case(runs).items()}
    if not quiet:
        print_summaries(result)
        print(f"{seconds:.0f} s. The report is {page.resolve()} (CSV files and a figure for a paper beside it).")
    flat = {case: {name: figure.mean for name, figure in metrics.items()} for case, metrics in result.items()}
    return Report(flat | {"report": str(page.resolve()), "seconds": seconds})


def train_all(
    cases: Sequence[Case],
    *,
    run_dir: Path,
    seeds: int,
    total_steps: int | None = None,
    num_episodes: int | None = None,
    deterministic: bool = False,
    processes: int = 2,
    overwrite: bool = False,
    quiet: bool = False,
    dynamics_every: int = 0,
) -> list[RunResult]:
    """Train every case with seeds 1, 2, …, in run folders inside ``run_dir``.

    Args:
        cases, run_dir, quiet: see `compare`.
        seeds: runs per case, at least 1; with 5 or more the report has 95 % limits.
        total_steps: steps of every run; None takes each case's own.
        num_episodes: episodes per evaluation; None takes `TEXT_EPISODES` or `CONTROL_EPISODES`.
        deterministic: evaluate with the most probable actions.
        processes: parallel runs, each in its own process with one thread; 0: one run after another in this process.
        overwrite: remove existing runs of these cases and seeds from the folder; otherwise they are refused.
        dynamics_every: iterations between measurements by `algos.Dynamics`, plotted in the report; 0 measures none.
    """
    if seeds < 1 or (total_steps is not None and total_steps < 1):
        raise ValueError(f"seeds is {seeds} and total_steps {total_steps}, expected at least 1 (or total_steps=None)")
    if any(case.env_name.startswith("textenv/") for case in cases):
        from textenv.lm.loading import EMBEDDED, model_folder

        model_folder(EMBEDDED)  # created once, before the workers start
    for case, seed in itertools.product(cases, range(1, seeds + 1)):
        if holds_run(folder := run_dir / folder_name(str(case), seed)) and not overwrite:
            raise FileExistsError(
                f"{folder} holds a run already: give another folder (--run-dir), or remove the "
                "runs of these cases (--overwrite, in Python overwrite=True)"
            )
    cases = [case if total_steps is None else dataclasses.replace(case, total_steps=total_steps) for case in cases]
    cases = [dataclasses.replace(case, env_kwargs=absolute_paths(case.env_kwargs or {}) or None) for case in cases]
    for case in cases:  # fail before training, not after other cases have been trained
        try:
            recipe_of(case).build(seed=1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"case {case}: {error}") from error
    evaluation: dict[str, Any] = {"num_episodes": num_episodes, "deterministic": deterministic}
    options: dict[str, Any] = {"overwrite": overwrite, "quiet": quiet, "dynamics_every": dynamics_every}
    run = partial(_run, run_dir=run_dir, **options, **evaluation)
    jobs = zip(*((case, seed) for seed in range(1, seeds + 1) for case in reversed(cases)), strict=True)
    if not processes:
        runs = list(map(run, *jobs))
    else:  # two processes of one thread are faster than one of two threads
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs = list(pool.map(run, *jobs))
    order = [str(case) for case in cases]
    return sorted(runs, key=lambda run: (order.index(run.case), run.seed))


def _run(
    case: Case, seed: int, *, run_dir: Path, overwrite: bool, quiet: bool, dynamics_every: int, **evaluation: Any
) -> RunResult:
    """Train and evaluate one run, on one thread."""
    import torch

    from algos.evaluation import summarise
    from algos.insight.dynamics import Dynamics
    from algos.training.env_state import share_objects
    from textenv.rollout import is_episode_env

    torch.set_num_threads(1)
    recipe = recipe_of(case)
    agent = recipe.build(seed)
    policy = agent.policy
    played = evaluation["num_episodes"] or (TEXT_EPISODES if is_episode_env(agent.env) else CONTROL_EPISODES)
    test_env = recipe.environment(min(played, 64), split="test")
    evaluation |= {"num_episodes": played, "seed": seed}
    before, asked = summarise(test_env, policy, **evaluation), _samples(test_env, policy)

    def report(metrics: dict[str, float]) -> None:
        if not quiet and int(metrics["iteration"]) % 10 == 0 and "episode/return" in metrics:
            steps, returns = metrics["steps"], metrics["episode/return"]
            print(f"{case} seed {seed}: {steps:>6.0f} steps, mean return {returns:.3g}", flush=True)

    watching: Any = {"callbacks": [Dynamics(dynamics_every)] if dynamics_every else [], "diagnose": update_kl}
    folder = run_dir / folder_name(str(case), seed)
    history = agent.learn(recipe.total_steps, run_dir=folder, on_iteration=report, overwrite=overwrite, **watching)
    share_objects(agent.env, test_env)
    after = summarise(test_env, policy, **evaluation)
    samples = [(p, first, last) for (p, first), (_, last) in zip(asked, _samples(test_env, policy), strict=True)]
    size, spec = sum(p.numel() for p in policy.parameters()), agent.env.spec
    best = None if spec is None else spec.reward_threshold
    made_of = case.env_name.rpartition(":")[2], case.algorithm, seed, type(policy).__name__
    return RunResult(*made_of, size, best, before, after, history, samples, name=str(case), folder=str(folder))


def recipe_of(case: Case) -> presets.Recipe:
    """Return the recipe of a case, after importing the module that registers its environment."""
    from textenv.importing import read_module

    env_id = case.env if isinstance(case.env, str) else ""
    if module := env_id.rpartition(":")[0]:
        read_module(module)
    own = ("env", "policy", "config", "total_steps", "num_envs", "kl_coef", "env_kwargs")
    given = {name: value for name, value in field_values(case).items() if name in own and value is not None}
    return dataclasses.replace(presets.recipe(env_id, case.algorithm), **given)


def _samples(env: Any, policy: Any, count: int = 8) -> list[tuple[str, str]]:
    """Return a few prompts of a text environment and the policy's completions; none in control."""
    from algos.evaluation import evaluate
    from textenv.rollout import is_episode_env

    if not is_episode_env(env.unwrapped):
        return []
    evaluate(env, policy, num_episodes=count)
    return [(sample["prompt"], sample["completion"]) for sample in env.unwrapped.samples(range(count))]
