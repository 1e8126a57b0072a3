"""``algos compare``: several training runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from algos.comparison.compare import DEFAULT_CASES


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train any environments with any algorithms and compare them, on a page and in CSV files."""

    cases: tyro.conf.Positional[tuple[str, ...]] = DEFAULT_CASES
    """ENV or ENV:ALGO,ALGO, such as CartPole-v1:ppo,a2c textenv/Reviews-v0:ppo,grpo."""
    seeds: int = 3
    """Runs per case."""
    total_steps: int | None = None
    """Steps of every run; by default those of each case's preset."""
    run_dir: Path = Path("runs/compare")
    """Folder for the runs, report.html, report.png, curves.csv and summary.csv."""
    overwrite: bool = False
    """Remove existing runs of these cases and seeds from the folder; without it they are refused."""
    json: bool = False
    """Print one JSON object at the end, instead of a table."""

    def run(self) -> dict[str, Any]:
        """Train the cases and write the report."""
        from algos.comparison.compare import compare, parse_cases

        return compare(
            parse_cases(self.cases),
            seeds=self.seeds,
            run_dir=self.run_dir,
            total_steps=self.total_steps,
            overwrite=self.overwrite,
            quiet=self.json,
        )
