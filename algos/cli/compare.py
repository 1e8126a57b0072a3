"""``algos compare``: several training runs side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from algos.cli.arguments import Command, WholeNumber
from algos.cli.pass_rates import PassRateOptions
from algos.lab.comparison.compare import DEFAULT_CASES, compare


@dataclass(frozen=True, kw_only=True)
class Compare(PassRateOptions, Command):
    """Train algorithms on environments and compare the runs in an HTML page, figures and CSV files.

    The same command goes on after an interruption: finished runs are kept.
    """

    prints: ClassVar[bool] = True
    cases: tyro.conf.Positional[tuple[str, ...]] = DEFAULT_CASES
    """ENV, ENV:ALGO,ALGO or ENV:ALGO,ALGO:POLICY,POLICY, such as CartPole-v1:ppo,a2c textenv/Reviews-v0:ppo,grpo
    CartPole-v1:ppo:lstm; ENV may be module:id."""
    seeds: int = 3
    """Runs per case."""
    total_steps: WholeNumber | None = None
    """Steps of every run; by default those of each case's preset."""
    wrapper: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Function that wraps each environment of all cases, as in algos train."""
    run_dir: Path = Path("runs/compare")
    """Folder for the runs, report.html, curves.csv, summary.csv, curves.pdf and .svg, and paper.pdf, .svg, .tex and
    .csv."""
    dynamics_every: int = 0
    """Iterations between measurements of each training's own dynamics, as in algos train, plotted in the report."""
    overwrite: bool = False
    """Train again what the folder has of these cases and seeds; without this option, runs with the same settings are
    kept, and others are an error."""

    def run(self) -> dict[str, object]:
        """Train the cases and write the report."""
        report = compare(
            self.cases,
            seeds=self.seeds,
            total_steps=self.total_steps,
            wrappers=self.wrapper,
            run_dir=self.run_dir,
            dynamics_every=self.dynamics_every,
            overwrite=self.overwrite,
            quiet=self.json,
            **self.sampling_arguments(),
        )
        return dict(report)
