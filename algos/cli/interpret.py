"""``algos interpret``: what training changed inside a policy."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from algos.cli.arguments import ModelCommand, flag, json_object, one_thread
from algos.cli.sample import load_policy, model_name, refuse_same_model
from algos.cli.tables import print_table
from algos.config import field_values
from textenv.prompts.files import load_prompts

if TYPE_CHECKING:
    from algos.lab.insight.finding import Finding

TEXT_OPTIONS = ("tokens", "prompt", "prompts", "model", "neurons")
"""Options for language models alone."""

CONTROL_OPTIONS = ("env", "wrapper", "env_kwargs", "dims")
"""Options for control alone."""

MAX_PRINTED_ROWS = 10
"""Rows of each table that are printed; the page has all."""


@dataclass(frozen=True, kw_only=True)
class Interpret(ModelCommand):
    """Find what training changed in a policy, as a page, tables and pictures in RUN/interpret.

    In a language model: tokens, layers and heads; in a policy for control: observations, hidden units and actions.
    """

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[str]
    """Run folder, or the folder ``best`` in it."""
    tokens: tuple[str, str] | None = None
    """Text only: two tokens whose logits are subtracted, such as " good" " bad"; or two sets: " good| great" " bad"."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text only: text at whose end the models are compared; may be repeated."""
    prompts: Path | None = None
    """Text only: file of more prompts: .jsonl, .csv, .tsv or .parquet, with a column prompt."""
    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text only: models to compare with: base (the default: the model that the run started from), other runs, or models
    by name; changes are those from the first to the run."""
    neurons: int = 0
    """Text only: number of MLP neurons to list, those that changed most."""
    env: str | None = None
    """Control only: environment other than the policy's own; module:id first imports the module that registers it."""
    wrapper: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Control only: function that wraps each environment, which is run only if it is named, as in algos train."""
    env_kwargs: str = ""
    """Control only: arguments of the environment that replace those of the run, as in algos evaluate."""
    dims: tuple[int, int] | None = None
    """Control only: numbers, from 0, of the two observations that the map is over."""

    def run(self) -> dict[str, object]:
        """Load the policies, compare them, write the page."""
        from algos.lab.comparison.report import write_findings
        from algos.training.save import read_description

        if not Path(self.folder).is_dir():
            raise FileNotFoundError(
                f"there is no folder {self.folder}: give that of a run, as the page is written into it"
            )
        policy_name = read_description(self.folder)["policy"]
        is_text = policy_name == "LMPolicy"
        foreign_options: tuple[str, ...] = TEXT_OPTIONS
        if is_text:
            foreign_options = CONTROL_OPTIONS
        values = field_values(self)
        flags = [flag(name) for name in foreign_options if values[name]]
        if flags:
            raise ValueError(f"{', '.join(flags)}: not for {self.folder}, which holds a {policy_name}; leave it out")

        # Compare
        one_thread()
        if is_text:
            findings = self._compare_language_models()
        else:
            findings = self._compare_control()

        # Write, and print
        page = write_findings(Path(self.folder) / "interpret", f"What training changed in {self.folder}", findings)
        if not self.json:
            for finding in findings:
                print(finding.title)
                print_table(finding.rows[:MAX_PRINTED_ROWS], finding.columns)
            print(f"All rows and pictures: {page}")
        result: dict[str, object] = {"page": str(page)}
        for finding in findings:
            result[finding.name] = [dict(zip(finding.columns, row, strict=True)) for row in finding.rows]
        return result

    def _compare_language_models(self) -> "list[Finding]":
        """Compare the run's language model with others, by default with the one that it started from."""
        from algos.lab.insight.language import interpret_language

        prompts: list[object] = [*self.prompt]
        if self.prompts is not None:
            prompts += load_prompts(self.prompts)
        if not prompts or self.tokens is None:
            raise ValueError("a language model needs prompts: add --prompt TEXT (or --prompts FILE) --tokens A B")
        first, *others = self.model or ("base",)
        for name in (first, *others):
            refuse_same_model(name, self.folder, flag="--model")
        models = {}
        for name in (first, self.folder, *others):
            models[name] = load_policy(model_name(name, self.folder)).lm
        return interpret_language(models, prompts, self.tokens, neurons=self.neurons)

    def _compare_control(self) -> "list[Finding]":
        """Compare a policy for control with itself before training."""
        from algos.lab.insight.control import control_run, interpret_control

        env_kwargs = json_object(self.env_kwargs or "{}", "--env-kwargs")
        compared = control_run(self.folder, env_id=self.env, wrappers=self.wrapper, env_kwargs=env_kwargs)
        return interpret_control(*compared, dims=self.dims or ())
