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
    functions: tyro.conf.Positional[tuple[str, ...]]
    """Functions to check, as in algos train: my_rewards.py:name or package.module:name, or with a weight
    my_rewards.py:name=0.5; several, or one with a weight, are checked alone and then as what they pay in all."""
    prompts: Path | None = None
    """File of prompts with the columns that the function needs, and optionally completions; default: reviews."""
    prompt_column: str = "prompt"
    """Name of the prompt's column."""
    rows: int = 32
    """Number of prompts to use from the file."""

    def run(self) -> dict[str, Any]:
        """Load the functions, check them, and print the reports."""
        from rich.console import Console

        from textenv.checks.reward_checker import run_reward_checks
        from textenv.prompts.files import load_prompts
        from textenv.tasks.own_prompts import read_rewards

        if not self.functions:
            raise ValueError("there is no function to check: give one, such as my_rewards.py:score")
        rewards = read_rewards(self.functions)
        prompts = None
        if self.prompts is not None:
            if self.rows < 1:
                raise ValueError(f"--rows is {self.rows}, expected at least 1")
            prompts = load_prompts(self.prompts, prompt_column=self.prompt_column)[: self.rows]
        reports = {name: run_reward_checks(function, prompts) for name, (function, _) in rewards.functions.items()}
        is_sum = len(rewards.functions) > 1 or any(weight != 1 for _, weight in rewards.functions.values())
        if is_sum and not any(report.broken for report in reports.values()):
            reports["in all"] = run_reward_checks(rewards, prompts)
        if not self.json:
            for report in reports.values():
                Console().print(report)
        described = {name: _described(report) for name, report in reports.items()}
        if len(described) == 1:
            return next(iter(described.values()))
        return {"rewards": described, "sound": all(report["sound"] for report in described.values())}


def _described(report: Any) -> dict[str, Any]:
    """Return a `textenv.checks.reward_checker.RewardCheckReport` for JSON."""
    results = {result.name: result.verdict for result in report.results}
    probes = {probe.name: probe.mean for probe in report.probes}
    return {"results": results, "probes": probes, "sound": not report.broken}
