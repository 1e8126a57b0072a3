"""The same PPO on CartPole and on a language model, put side by side."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algos import presets

TASKS = ("CartPole-v1", "textenv/Reviews-v0")
EPISODES = {"CartPole-v1": 20, "textenv/Reviews-v0": 288}
"""Episodes of each evaluation; prompts of the test split in text."""


@dataclass
class Run:
    """One training run and its evaluations."""

    env: str
    seed: int
    policy: str
    parameters: int
    before: dict[str, float]
    after: dict[str, float]
    history: list[dict[str, float]]
    samples: list[tuple[str, str, str]] = field(default_factory=list)
    """Text only: prompt, answer before, answer after."""


def compare(run_dir: Path, *, seeds: int = 3, quiet: bool = False) -> dict[str, Any]:
    """Train both, print a table, write ``report.html`` and ``report.png``.

    Args:
        run_dir: folder for the report and a run folder for each training.
        seeds: runs of each, at least 1.
        quiet: print nothing.

    Returns:
        ``mean_return``, ``steps`` and ``seconds`` of each environment, over the seeds, and where the report is.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}, expected at least 1")
    from algos.report import print_table, summary, write_report

    start = time.perf_counter()
    run_dir.mkdir(parents=True, exist_ok=True)
    _make_embedded()
    jobs = [(env, seed, run_dir, quiet) for seed in range(1, seeds + 1) for env in reversed(TASKS)]
    # Two processes on one thread each beat one process on two threads.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(_run, *zip(*jobs, strict=True)))
    result = {env: summary([run for run in runs if run.env == env]) for env in TASKS}
    seconds = time.perf_counter() - start
    page = write_report(run_dir, runs, seconds=seconds)
    (run_dir / "report.json").write_text(json.dumps([dataclasses.asdict(run) for run in runs]), encoding="utf-8")
    if not quiet:
        print_table(result)
        print(f"{seconds:.0f} s. The report is in {page.resolve()} (the picture in {page.with_suffix('.png').name}).")
    return result | {"report": str(page.resolve()), "seconds": seconds}


def _make_embedded() -> None:
    """Once, before the workers start."""
    from textenv.lm.loading import EMBEDDED, model_folder

    model_folder(EMBEDDED)


def _run(env_id: str, seed: int, run_dir: Path, quiet: bool) -> Run:
    """Train and evaluate once, in a process of its own."""
    import torch

    from algos.algorithms import make_agent
    from algos.environments import make_policy, make_vector_environment
    from algos.evaluation import summarise

    torch.set_num_threads(1)
    recipe = presets.recipe(env_id)
    arguments: dict[str, Any] = {} if recipe.kl_coefficient is None else {"kl_coefficient": recipe.kl_coefficient}
    env = make_vector_environment(env_id, recipe.num_envs, **arguments)
    if arguments:
        arguments["split"] = "test"
    test_env = make_vector_environment(env_id, min(EPISODES[env_id], 64), **arguments)
    policy = make_policy(env, seed=seed)
    agent = make_agent("ppo", env, policy, dataclasses.replace(recipe.config, seed=seed))
    before, asked = summarise(test_env, policy, episodes=EPISODES[env_id], seed=seed), _samples(test_env, policy)

    def report(metrics: dict[str, float]) -> None:
        if not quiet and int(metrics["iteration"]) % 10 == 0 and "episode/return" in metrics:
            returns = metrics["episode/return"]
            print(f"{env_id} seed {seed}: {metrics['steps']:>6.0f} steps, mean return {returns:.3g}", flush=True)

    folder = run_dir / f"{env_id.replace('/', '-')}-{seed}"
    history = agent.learn(recipe.total_steps, run_dir=folder, on_iteration=report)
    after = summarise(test_env, policy, episodes=EPISODES[env_id], seed=seed)
    samples = [(p, first, last) for (p, first), (_, last) in zip(asked, _samples(test_env, policy), strict=True)]
    size = sum(p.numel() for p in policy.parameters())
    return Run(env_id, seed, type(policy).__name__, size, before, after, history, samples)


def _samples(env: Any, policy: Any, count: int = 8) -> list[tuple[str, str]]:
    """A few prompts of a text environment and the policy's answers; none in control."""
    from algos.evaluation import evaluate
    from textenv.rollout import is_episode_env, sequences

    if not is_episode_env(env.unwrapped):
        return []

    _, rollout = evaluate(env, policy, episodes=count)
    found = []
    for tokens, mask in zip(sequences(rollout).tolist(), rollout["mask"], strict=True):
        start = int(mask.int().argmax()) + 1
        end = start + int(mask.sum())
        answer = env.tokenizer.decode(tokens[start:end], skip_special_tokens=True)
        found.append((env.tokenizer.decode(tokens[:start]), answer))
    return found
