"""``algos tune``: search for hyper-parameters."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from algos import presets
from algos.cli.arguments import Command, json_object, one_thread
from algos.config import AlgorithmName


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Search for hyper-parameters by Optuna, starting from the preset; the same command continues a search."""

    env: tyro.conf.Positional[str]
    """Gymnasium id, such as CartPole-v1 or textenv/Copy-v0; module:id first imports the module that registers it."""
    algo: AlgorithmName = "ppo"
    """Algorithm whose hyper-parameters are searched."""
    trials: int = 50
    """Finished trials in the end, those of an earlier command included."""
    total_steps: int | None = None
    """Steps of each training; by default those of the preset."""
    seeds: int = 1
    """Trainings per trial, with seeds 1, 2, ...; a trial counts as much as their mean."""
    num_episodes: int = 20
    """Episodes of each evaluation (text: prompts of the test split)."""
    seed: int = 1
    """Seed of the search."""
    run_dir: Path | None = None
    """Folder for study.log and best.yaml (for algos train --config); default runs/tune-ENV-ALGO."""
    model: str = "embedded"
    """Text only: the embedded model, a folder written by save_pretrained, or a hub name."""
    device: str | None = None
    """Device of all models: auto (the GPU, if there is one), cpu, cuda, cuda:1 or mps; None is the CPU."""
    env_kwargs: str = "{}"
    """Further arguments of the environment as a JSON object, such as '{"dataset": "chain_sum"}'."""

    def run(self) -> dict[str, Any]:
        """Search, print the trials, write the best configuration."""
        recipe = presets.recipe(self.env, self.algo, self.model)
        recipe = replace(
            recipe,
            total_steps=recipe.total_steps if self.total_steps is None else self.total_steps,
            model=self.model,
            device=self.device,
            env_kwargs=json_object(self.env_kwargs, "--env-kwargs"),
        )
        run_dir = self.run_dir or Path("runs") / f"tune-{self.env.replace('/', '-').replace(':', '-')}-{self.algo}"
        one_thread()
        from algos.comparison.tune import tune

        options = {"trials": self.trials, "seeds": self.seeds, "num_episodes": self.num_episodes, "seed": self.seed}
        try:
            return tune(recipe, run_dir=run_dir, quiet=self.json, **options)
        except KeyboardInterrupt as stop:
            print(f"algos: stopped; the same command continues the search in {run_dir}", file=sys.stderr)
            raise SystemExit(130) from stop
