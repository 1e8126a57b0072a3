"""``algos check`` and ``algos check-reward``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tyro

from algos.cli.arguments import Command, json_object, one_thread
from textenv.importing import read_module


@dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Look for common bugs of text environments; exit status 1 if one is found."""

    env: tyro.conf.Positional[str]
    """Gymnasium id of a text environment; module:id first imports the module that registers it."""
    env_kwargs: str = "{}"
    """Arguments of the environment as a JSON object."""

    def run(self) -> dict[str, Any]:
        """Check every variant of the environment."""
        import gymnasium

        found: dict[str, str] = {}
        sound = True
        module, _, env_id = self.env.rpartition(":")
        arguments = json_object(self.env_kwargs, "--env-kwargs")
        if module:
            read_module(module)
        try:
            gymnasium.spec(env_id)
            one_thread()
            from textenv.checks.env_checker import checked_variants, run_checks

            for form, make in checked_variants(env_id, **arguments):
                results = run_checks(make())
                found |= {f"{form}: {result.name}": result.verdict for result in results}
                sound = sound and not any(result.problem for result in results)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"cannot make {self.env!r}: {error}") from error
        return found | {"sound": sound}


@dataclass(frozen=True, kw_only=True)
class CheckReward(Command):
    """Look for common bugs of a reward function, and show its rewards for cheating; exit status 1 on a bug."""

    prints: ClassVar[bool] = True
    function: tyro.conf.Positional[str]
    """Function to check: my_rewards.py:name or package.module:name."""
    prompts: Path | None = None
    """File of prompts with the columns that the function needs, and optionally completions; default: reviews."""
    rows: int = 32
    """Number of prompts to use from the file."""

    def run(self) -> dict[str, Any]:
        """Load the function, check it, and print the report."""
        from rich.console import Console

        from textenv.checks.reward_checker import run_reward_checks
        from textenv.prompts.files import load_prompts
        from textenv.rewards import load_function

        function = load_function(self.function)
        data: dict[str, Any] = {}
        if self.prompts is not None:
            if self.rows < 1:
                raise ValueError(f"--rows is {self.rows}, expected at least 1")
            records = load_prompts(self.prompts)[: self.rows]
            names = [name for name in records[0] if name not in ("prompt", "completion")]
            data = {
                "prompts": [record["prompt"] for record in records],
                "completions": [record["completion"] for record in records] if "completion" in records[0] else None,
                "columns": {name: [record.get(name) for record in records] for name in names},
            }
        report = run_reward_checks(function, **data)
        if not self.json:
            Console().print(report)
        results = {result.name: result.verdict for result in report.results}
        probes = {probe.name: probe.mean for probe in report.probes}
        return {"results": results, "probes": probes, "sound": not report.broken}
