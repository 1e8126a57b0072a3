"""``algos tune``: search for hyper-parameters."""

import logging
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from algos.cli.arguments import Command, WholeNumber, flag, one_thread, with_files
from algos.cli.tables import print_table
from algos.cli.train import UNSTORED_OPTIONS, Train, switches, train_command
from algos.config import AlgorithmName, field_values
from algos.recipe import OTHER_OPTIONS

logger = logging.getLogger(__name__)
OWN_OPTIONS = ("seed", "num_episodes", "quiet", "json", *UNSTORED_OPTIONS)
"""Options of a file for ``algos train`` that this command has itself, or that a search has no use for."""


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Search for hyper-parameters by Optuna, starting from the preset; the same command continues a search."""

    env: tyro.conf.Positional[str] = ""
    """Gymnasium id, such as CartPole-v1 or textenv/Copy-v0; may be left out with --config."""
    config: Path | None = None
    """File of options of algos train to start from, such as a run's run.yaml: your prompts, rewards, an adapter."""
    algo: AlgorithmName | None = None
    """Algorithm whose hyper-parameters are searched; default ppo."""
    total_steps: WholeNumber | None = None
    """Steps of each training; by default those of the preset."""
    model: str | None = None
    """Language model, for text or to play control in words: embedded, a folder written by save_pretrained, or a hub
    name."""
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

    def run(self) -> dict[str, object]:
        """Search, print the trials, write the best configuration."""
        if not self.env and self.config is None:
            raise ValueError("there is nothing to search for: give ENV, such as CartPole-v1, or --config FILE")
        train = self._train_command()
        recipe = train.recipe()
        _tell_of_unused(train)
        run_dir = self.run_dir
        if run_dir is None:
            run_dir = train.folder.with_name(f"tune-{train.folder.name}")

        # Search
        one_thread()
        from algos.lab.comparison.tune import tune

        try:
            result = tune(
                recipe,
                run_dir=run_dir,
                trials=self.trials,
                seeds=self.seeds,
                num_episodes=self.num_episodes,
                quiet=self.json,
            )
        except KeyboardInterrupt as stop:
            print(f"algos: stopped; the same command continues the search in {run_dir}", file=sys.stderr)
            raise SystemExit(130) from stop
        if not self.json:
            print_table(result.pop("best_trials"), ["trial", "mean return", "hyper-parameters"])
        return result

    def _train_command(self) -> "Train[Any]":
        """Return the ``algos train`` that the options stand for, with its preset and files."""
        words = ["train"]
        if self.env:
            words.append(self.env)
        values = {"config": self.config, "algo": self.algo, "total-steps": self.total_steps, "model": self.model}
        words += [f"--{name}={value}" for name, value in values.items() if value is not None]
        words += [f"--wrapper={wrapper}" for wrapper in self.wrapper]
        words = with_files(words, switches())

        # A second command, which is never chosen: with a single one, tyro expects no word "train"
        second: Any = tyro.conf.subcommand("tune")
        return tyro.cli(train_command(words) | Annotated[Tune, second], args=words, prog="algos")


def _tell_of_unused(train: "Train[Any]") -> None:
    """Log a warning of options that the trainings of a search do not have, nor what it writes."""
    values = field_values(train)
    unused = []
    for option in fields(train):
        name = option.name
        if name in OTHER_OPTIONS and name not in OWN_OPTIONS and values[name] != option.default:
            unused.append(f"{flag(name)} {values[name]}")
    if unused:
        logger.warning(
            "the trainings of a search do without %s, and best.yaml too: give them to algos train --config best.yaml "
            "again",
            ", ".join(unused),
        )
