"""``algos check`` and ``algos check-reward``: look for bugs in environments and rewards."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import tyro

from algos.cli.arguments import Command, json_object, one_thread
from textenv.importing import read_module
from textenv.startup import load_torch

if TYPE_CHECKING:
    from textenv.checks.reward_checker import RewardCheckReport


@dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Look for common bugs of text environments; exit status 1 if one is found."""

    env: tyro.conf.Positional[str]
    """Gymnasium id of a text environment; module:id first imports the module that registers it."""
    env_kwargs: str = "{}"
    """Arguments of the environment as a JSON object."""

    def run(self) -> dict[str, object]:
        """Check every variant of the environment."""
        import gymnasium

        module, _, env_id = self.env.rpartition(":")
        env_kwargs = json_object(self.env_kwargs, "--env-kwargs")
        if module:
            read_module(module)

        # Each variant, such as a vector environment, has its own results
        verdicts: dict[str, object] = {}
        sound = True
        try:
            gymnasium.spec(env_id)
            one_thread()
            from textenv.checks.env_checker import checked_variants, run_checks

            for variant, make_env in checked_variants(env_id, **env_kwargs):
                for result in run_checks(make_env()):
                    verdicts[f"{variant}: {result.name}"] = result.verdict
                    if result.problem:
                        sound = False
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"cannot make {self.env!r}: {error}") from error
        verdicts["sound"] = sound
        return verdicts


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

    def run(self) -> dict[str, object]:
        """Load the functions, check them, and print the reports."""
        if not self.functions:
            raise ValueError("there is no function to check: give one, such as my_rewards.py:score")
        load_torch()
        from textenv.checks.reward_checker import run_reward_checks
        from textenv.console import PipeConsole
        from textenv.prompts.files import load_prompts
        from textenv.tasks.own_prompts import read_rewards

        rewards = read_rewards(self.functions)
        weights = [weight for _, weight in rewards.functions.values()]
        prompts = None
        if self.prompts is not None:
            if self.rows < 1:
                raise ValueError(f"--rows is {self.rows}, expected at least 1")
            prompts = load_prompts(self.prompts, prompt_column=self.prompt_column)[: self.rows]

        # Each function alone, then their weighted sum
        reports = {}
        for name, (function, _) in rewards.functions.items():
            reports[name] = run_reward_checks(function, prompts)
        is_weighted_sum = len(weights) > 1 or any(weight != 1 for weight in weights)
        if is_weighted_sum and not any(report.broken for report in reports.values()):
            reports["in all"] = run_reward_checks(rewards, prompts)

        if not self.json:
            for report in reports.values():
                PipeConsole().print(report)
        results = {name: _report_for_json(report) for name, report in reports.items()}
        if len(results) == 1:
            return next(iter(results.values()))
        sound = all(result["sound"] for result in results.values())
        return {"rewards": results, "sound": sound}


def _report_for_json(report: "RewardCheckReport") -> dict[str, object]:
    """Return the verdicts of a report, and the mean reward of each probe."""
    results = {result.name: result.verdict for result in report.results}
    probes = {probe.name: probe.mean for probe in report.probes}
    return {"results": results, "probes": probes, "sound": not report.broken}
