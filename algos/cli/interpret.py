"""``algos interpret``: what training changed inside a policy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from algos.cli.arguments import ModelCommand, json_object, one_thread
from algos.cli.sample import load_policy, model_name
from algos.cli.tables import print_table
from algos.config import field_values
from textenv.prompts.files import load_prompts

OF_TEXT, OF_CONTROL = ("tokens", "prompt", "prompts", "model", "neurons"), ("env", "wrapper", "env_kwargs", "dims")
"""Options for language models alone, and for control alone."""


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

    def run(self) -> dict[str, Any]:
        """Load the policies, compare them, write the page."""
        from algos.lab.comparison.report import write_findings
        from algos.training.save import read_description

        if not Path(self.folder).is_dir():
            raise FileNotFoundError(
                f"there is no folder {self.folder}: give that of a run, as the page is written into it"
            )
        policy = read_description(self.folder)["policy"]
        given, foreign = field_values(self), OF_CONTROL if policy == "LMPolicy" else OF_TEXT
        if flags := [f"--{name.replace('_', '-')}" for name in foreign if given[name]]:
            raise ValueError(f"{', '.join(flags)}: not for {self.folder}, which holds a {policy}; leave it out")
        one_thread()
        findings = self._text() if policy == "LMPolicy" else self._control()
        page = write_findings(Path(self.folder) / "interpret", f"What training changed in {self.folder}", findings)
        if not self.json:
            for finding in findings:
                print(finding.title)
                print_table(finding.rows[:10], finding.columns)
            print(f"All rows and pictures: {page}")
        tables = {x.name: [dict(zip(x.columns, row, strict=True)) for row in x.rows] for x in findings}
        return {"page": str(page)} | tables

    def _text(self) -> list[Any]:
        """Compare language models."""
        from algos.lab.insight.language import interpret_language

        prompts = [*self.prompt, *(load_prompts(self.prompts) if self.prompts is not None else ())]
        if not prompts or self.tokens is None:
            raise ValueError("a language model needs prompts: add --prompt TEXT (or --prompts FILE) --tokens A B")
        first, *others = self.model or ("base",)
        named = (first, self.folder, *others)
        models = {name: load_policy(model_name(name, self.folder)).lm for name in named}
        return interpret_language(models, prompts, self.tokens, neurons=self.neurons)

    def _control(self) -> list[Any]:
        """Compare a policy with itself before training."""
        from algos.lab.insight.control import control_run, interpret_control

        env_kwargs = json_object(self.env_kwargs or "{}", "--env-kwargs")
        found = control_run(self.folder, env_id=self.env, wrappers=self.wrapper, env_kwargs=env_kwargs)
        return interpret_control(*found, dims=self.dims or ())
