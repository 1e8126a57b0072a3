"""``algos interpret``: what training changed inside a policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from algos.cli.arguments import ModelCommand, one_thread
from algos.cli.sample import load_policy, model_name
from algos.cli.tables import print_table
from algos.training.run_folder import replacing
from textenv.prompts.files import load_prompts

SHOWN = 10
"""Maximum number of rows of a table in the terminal."""
ON_PAGE = 100
"""Maximum number of rows of a table in the page; the CSV file has all of them."""


@dataclass(frozen=True, kw_only=True)
class Interpret(ModelCommand):
    """Find what training changed in a language model: tokens, layers, heads. Writes a page into RUN/interpret."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[str]
    """Run folder of a trained language model, or the folder ``best`` in it."""
    tokens: tuple[str, str]
    """Two tokens whose logits are subtracted, such as " good" " bad"; or two sets: " good| great" " bad| poor"."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text at whose end the models are compared; may be repeated."""
    prompts: Path | None = None
    """File of more prompts: .jsonl, .csv, .tsv or .parquet, with a column prompt."""
    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Models to compare with: base (the default: the model that the run started from), other runs, or models by name;
    changes are those from the first to the run."""
    neurons: int = 0
    """Number of MLP neurons to list, those that changed most."""

    def run(self) -> dict[str, Any]:
        """Load the models, compare them, write the page."""
        if not Path(self.folder).is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}: give a run's, where the page is written too")
        prompts = [*self.prompt, *(load_prompts(self.prompts) if self.prompts is not None else ())]
        if not prompts:
            raise ValueError("no prompt is given: add --prompt TEXT, or --prompts FILE")
        one_thread()
        first, *others = self.model or ("base",)
        policies = {name: load_policy(model_name(name, self.folder)) for name in (first, self.folder, *others)}
        findings = interpret(policies, prompts=prompts, tokens=self.tokens, neurons=self.neurons)
        page = write_page(Path(self.folder) / "interpret", f"What changed from {first} to {self.folder}", findings)
        if not self.json:
            for finding in findings:
                print(finding.title)
                print_table(finding.rows[:SHOWN], finding.columns)
            print(f"All rows and pictures: {page}")
        tables = {x.name: [dict(zip(x.columns, row, strict=True)) for row in x.rows] for x in findings}
        return {"page": str(page)} | tables


def interpret(policies: Mapping[str, Any], **options: Any) -> Sequence[Any]:
    """Findings about policies by name, of which the first is that before training: for language models only.

    The options are those of `algos.insight.language.interpret_language`.
    """
    from algos.insight.language import interpret_language
    from textenv.lm.model import language_model_of

    models = {name: lm for name, policy in policies.items() if (lm := language_model_of(policy)) is not None}
    if len(models) < len(policies):
        kinds = ", ".join(type(policy).__name__ for policy in policies.values())
        raise ValueError(f"the policies are {kinds}, expected language models: no other kind is interpreted yet")
    return interpret_language(models, **options)


def write_page(folder: Path, title: str, findings: Sequence[Any]) -> Path:
    """Replace a folder by ``interpret.html`` and the files of the findings; return the path of the page."""
    from algos.comparison.report import STYLE, escape, html_table

    parts = [f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><style>{STYLE}</style><h1>{escape(title)}</h1>']
    with replacing(folder) as draft:
        draft.mkdir()
        for finding in findings:
            finding.write(draft)
            shown = finding.rows[:ON_PAGE]
            rows = [[(f"{x:.4g}" if isinstance(x, float) else str(x), "") for x in row] for row in shown]
            picture = "" if finding.draw is None else f'<img alt="" src="{finding.name}.png">'
            table = html_table([(name, "") for name in finding.columns], rows)
            parts.append(
                f'<h2>{escape(finding.title)}</h2>{picture}<div class="wide">{table}</div>'
                f'<p><a href="{finding.name}.csv">All {len(finding.rows)} rows</a></p>'
            )
        (draft / "interpret.html").write_text("\n".join(parts) + "\n", encoding="utf-8")
    return folder / "interpret.html"
