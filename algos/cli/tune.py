"""``algos tune``: search for hyper-parameters."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from algos.cli.arguments import Command, one_thread, with_files
from algos.cli.tables import print_table
from algos.cli.train import switches, train_command
from algos.config import AlgorithmName


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Search for hyper-parameters by Optuna, starting from the preset; the same command continues a search."""

    env: tyro.conf.Positional[str] = ""
    """Gymnasium id, such as CartPole-v1 or textenv/Copy-v0; may be left out with --config."""
    config: Path | None = None
    """File of options of algos train to start from, such as a run's run.yaml: your prompts, rewards, an adapter."""
    algo: AlgorithmName | None = None
    """Algorithm whose hyper-parameters are searched; default ppo."""
    total_steps: int | None = None
    """Steps of each training; by default those of the preset."""
    model: str | None = None
    """Text only: the embedded model, a folder written by save_pretrained, or a hub name."""
    wrapper: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Function that wraps each environment, as in algos train."""
    trials: int = 50
    """Finished trials in the end, those of an earlier command included."""
    seeds: int = 1
    """Trainings per trial, with seeds 1, 2, ...; a trial counts as much as their mean."""
    num_episodes: int = 20
    """Episodes of each evaluation (text: prompts of the test split)."""
    run_dir: Path | None = None
    """Folder for study.log and best.yaml (for algos train --config); default runs/tune-ENV-ALGO-SEED."""

    def run(self) -> dict[str, Any]:
        """Search, print the trials, write the best configuration."""
        if not self.env and self.config is None:
            raise ValueError("there is nothing to search for: give ENV, such as CartPole-v1, or --config FILE")
        given = {"config": self.config, "algo": self.algo, "total-steps": self.total_steps, "model": self.model}
        flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
        flags += [f"--wrapper={each}" for each in self.wrapper]
        words = with_files(["train", *([self.env] if self.env else []), *flags], switches())
        other: Any = tyro.conf.subcommand("tune")
        train: Any = tyro.cli(train_command(words) | Annotated[Tune, other], args=words, prog="algos")
        recipe = train.recipe()
        run_dir = self.run_dir or train.folder.with_name(f"tune-{train.folder.name}")
        one_thread()
        from algos.lab.comparison.tune import tune

        options = {"trials": self.trials, "seeds": self.seeds, "num_episodes": self.num_episodes}
        try:
            result = tune(recipe, run_dir=run_dir, quiet=self.json, **options)
        except KeyboardInterrupt as stop:
            print(f"algos: stopped; the same command continues the search in {run_dir}", file=sys.stderr)
            raise SystemExit(130) from stop
        if not self.json:
            print_table(result.pop("best_trials"), ["trial", "mean return", "hyper-parameters"])
        return result
