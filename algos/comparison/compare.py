"""A study: any environments, algorithms and seeds, measured by the same quantities."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos import presets
from algos.comparison.summary import Case, RunResult, summary, update_kl
from algos.config import CONFIGS
from algos.training.run_folder import holds_run

if TYPE_CHECKING:
    from algos.agent import Agent

DEFAULT_CASES = ("CartPole-v1:ppo", "textenv/Reviews-v0:ppo")
TEXT_EPISODES, CONTROL_EPISODES = 288, 20
"""Episodes of each evaluation; prompts of the test split in text."""


def parse_cases(texts: Iterable[str]) -> list[Case]:
    """Cases from ``ENV`` or ``ENV:ALGO,ALGO``, where ``ENV`` may be ``module:id``.

    Raises:
        ValueError: on an environment or algorithm that there is not, or that do not go together.
    """
    import gymnasium

    import textenv  # noqa: F401 (registers the environments)
    from textenv.rewards.calling import read_module

    cases = []
    for text in texts:
        env, _, algorithms = text.rpartition(":")
        if env not in gymnasium.registry and not (env and set(algorithms.split(",")) <= set(CONFIGS)):
            env, algorithms = text, "ppo"
        module, _, env_id = env.rpartition(":")
        if module:
            read_module(module)
        try:
            gymnasium.spec(env_id)
        except gymnasium.error.Error as error:
            raise ValueError(f"case {text!r}: {error}") from error
        cases += [Case(env, algorithm) for algorithm in algorithms.split(",")]
    for case in cases:
        presets.recipe(case.env, case.algorithm)
    if not cases or len(set(cases)) < len(cases):
        raise ValueError(
            f"cases are {', '.join(map(str, cases)) or 'none'}: give each once, such as CartPole-v1:ppo,a2c"
        )
    return cases


def compare(
    run_dir: Path,
    *,
    cases: Sequence[Case],
    seeds: int = 3,
    total_steps: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train every case, print a table, write ``report.html``, ``report.png``, ``curves.csv`` and ``summary.csv``.

    Args:
        run_dir: folder for the report and a run folder for each training.
        cases: what is trained; see `parse_cases`.
        seeds: runs of each, at least 1.
        total_steps: budget of every run; None is each recipe's own.
        overwrite: remove runs of these cases and seeds that are in the folder; else they are refused.
        quiet: print nothing.

    Returns:
        What the table shows of each case, and where the report is.
    """
    from algos.comparison.report import print_table, write_report

    start = time.perf_counter()
    run_dir.mkdir(parents=True, exist_ok=True)
    runs = train_all(cases, seeds=seeds, run_dir=run_dir, total_steps=total_steps, overwrite=overwrite, quiet=quiet)
    (run_dir / "report.json").write_text(json.dumps([dataclasses.asdict(run) for run in runs]), encoding="utf-8")
    seconds = time.perf_counter() - start
    page = write_report(run_dir, runs, seconds=seconds)
    result = {str(case): summary([run for run in runs if run.case == case], study=runs) for case in cases}
    if not quiet:
        print_table(result)
        print(f"{seconds:.0f} s. The report is in {page.resolve()} (picture and CSV files beside it).")
    flat = {case: {name: figure.mean for name, figure in figures.items()} for case, figures in result.items()}
    return flat | {"report": str(page.resolve()), "seconds": seconds}


def train_all(
    cases: Sequence[Case],
    *,
    seeds: int,
    run_dir: Path,
    total_steps: int | None = None,
    num_episodes: int | None = None,
    deterministic: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> list[RunResult]:
    """Train every case with seeds 1, 2, …, two runs at a time.

    Args:
        cases: what is trained.
        seeds: runs of each, at least 1.
        run_dir: each run gets a folder in it.
        total_steps: budget of every run; None is each recipe's own.
        episodes: of each evaluation; None is `TEXT_EPISODES` or `CONTROL_EPISODES`.
        deterministic: evaluate by the most probable actions.
        overwrite: remove the runs that are in these folders; else they are refused.
        quiet: print nothing.
    """
    if seeds < 1 or (total_steps is not None and total_steps < 1):
        raise ValueError(f"seeds is {seeds} and total_steps {total_steps}, expected at least 1 (or no total_steps)")
    if any(case.env.startswith("textenv/") for case in cases):
        from textenv.lm.loading import EMBEDDED, model_folder

        model_folder(EMBEDDED)  # made once, before the workers start
    for case, seed in itertools.product(cases, range(1, seeds + 1)):
        if holds_run(_folder(run_dir, case, seed)) and not overwrite:
            raise FileExistsError(
                f"{_folder(run_dir, case, seed)} holds a run already: give another folder (--run-dir), or remove the "
                "runs of these cases (--overwrite, in Python overwrite=True)"
            )
    for case in cases:  # what cannot be made is known now, and not when other cases have been trained
        try:
            _make_agent(case, seed=1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"case {case}: {error}") from error
    options = (run_dir, total_steps, num_episodes, deterministic, overwrite, quiet)
    jobs = [(case, seed, *options) for seed in range(1, seeds + 1) for case in reversed(cases)]
    # Two processes on one thread each beat one process on two threads.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(_run, *zip(*jobs, strict=True)))
    return sorted(runs, key=lambda run: (cases.index(run.case), run.seed))


def _run(
    case: Case,
    seed: int,
    run_dir: Path,
    total_steps: int | None,
    num_episodes: int | None,
    deterministic: bool,
    overwrite: bool,
    quiet: bool,
) -> RunResult:
    """Train and evaluate once, in a process of its own."""
    import torch

    from algos.evaluation import summarise
    from algos.make import is_ours, is_text, make_vector_environment

    torch.set_num_threads(1)
    recipe, agent = _recipe(case), _make_agent(case, seed)
    policy, text = agent.policy, is_text(case.env)
    arguments: dict[str, Any] = {"kl_coef": recipe.kl_coef, "split": "test"} if is_ours(case.env) else {}
    played = num_episodes or (TEXT_EPISODES if text else CONTROL_EPISODES)
    test_env = make_vector_environment(case.env, min(played, 64), **arguments)
    evaluation = {"num_episodes": played, "seed": seed, "deterministic": deterministic}
    before, asked = summarise(test_env, policy, **evaluation), _samples(test_env, policy)

    def report(metrics: dict[str, float]) -> None:
        if not quiet and int(metrics["iteration"]) % 10 == 0 and "episode/return" in metrics:
            returns = metrics["episode/return"]
            print(f"{case} seed {seed}: {metrics['steps']:>6.0f} steps, mean return {returns:.3g}", flush=True)

    budget, folder = total_steps or recipe.total_steps, _folder(run_dir, case, seed)
    history = agent.learn(budget, run_dir=folder, on_iteration=report, diagnose=update_kl, overwrite=overwrite)
    after = summarise(test_env, policy, **evaluation)
    samples = [(p, first, last) for (p, first), (_, last) in zip(asked, _samples(test_env, policy), strict=True)]
    size, spec = sum(p.numel() for p in policy.parameters()), agent.env.spec
    best = None if spec is None else spec.reward_threshold
    return RunResult(case.env, case.algorithm, seed, type(policy).__name__, size, best, before, after, history, samples)


def _folder(run_dir: Path, case: Case, seed: int) -> Path:
    """Folder of one run."""
    return run_dir / f"{str(case).replace('/', '-').replace(':', '-')}-{seed}"


def _recipe(case: Case) -> presets.Recipe:
    """The recipe of a case, once its module has registered the environment."""
    from textenv.rewards.calling import read_module

    if module := case.env.rpartition(":")[0]:
        read_module(module)
    return presets.recipe(case.env, case.algorithm)


def _make_agent(case: Case, seed: int) -> Agent:
    """Environment, policy and algorithm of a case, by its recipe."""
    from algos.config import GROUPED
    from algos.make import is_ours, make_agent, make_policy, make_vector_environment

    recipe = _recipe(case)
    arguments: dict[str, Any] = {"kl_coef": recipe.kl_coef} if is_ours(case.env) else {}
    env = make_vector_environment(case.env, recipe.num_envs, seed_each=case.algorithm in GROUPED, **arguments)
    policy = make_policy(env, policy=recipe.policy, seed=seed, **recipe.policy_kwargs)  # type: ignore[arg-type]
    config = dataclasses.replace(recipe.config, seed=seed)
    return make_agent(case.algorithm, env, policy, config, kl_coef=recipe.kl_coef)


def _samples(env: Any, policy: Any, count: int = 8) -> list[tuple[str, str]]:
    """A few prompts of a text environment and the policy's answers; none in control."""
    from algos.evaluation import evaluate
    from textenv.rollout import is_episode_env, sequences

    if not is_episode_env(env.unwrapped):
        return []
    _, rollout = evaluate(env, policy, num_episodes=count)
    found = []
    for tokens, mask in zip(sequences(rollout).tolist(), rollout["mask"], strict=True):
        start = int(mask.int().argmax()) + 1
        end = start + int(mask.sum())
        answer = env.tokenizer.decode(tokens[start:end], skip_special_tokens=True)
        found.append((env.tokenizer.decode(tokens[:start]), answer))
    return found
