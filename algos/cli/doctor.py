"""``algos doctor``: say what is wrong with runs."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, ClassVar

import tyro

from algos.cli.arguments import Command
from algos.cli.plan import Plan
from algos.cli.train import Train
from textenv.rendering import printable

if TYPE_CHECKING:
    from algos.lab.doctor.diagnosis import Diagnosis

INDENT = 4 * " "
"""What stands before each line of a paragraph."""
MAX_WIDTH = 100
"""Largest width of a paragraph, in characters."""


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Say what is wrong with runs, with the figure and what to do; exit status 1 if something is."""

    prints: ClassVar[bool] = True
    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders of runs, also of runs that still train, or folders above them, such as that of algos compare."""

    def run(self) -> dict[str, object]:
        """Examine the runs, and print what was found."""
        from algos.lab.doctor.diagnosis import examine_all

        diagnoses = examine_all(self.runs)
        if not self.json:
            _print_diagnoses(diagnoses)
        sound = all(diagnosis.sound for diagnosis in diagnoses)
        return {"runs": [{**asdict(diagnosis), "sound": diagnosis.sound} for diagnosis in diagnoses], "sound": sound}


def findings_of(command: object) -> list[str]:
    """Return the line with which a training ends if something is wrong with its run; none for other commands."""
    if not isinstance(command, Train) or isinstance(command, Plan):
        return []
    from algos.lab.doctor.diagnosis import findings_in_a_line

    line = findings_in_a_line(command.folder)
    if line is None:
        return []
    return [line]


def _print_diagnoses(diagnoses: Sequence["Diagnosis"]) -> None:
    """Print a paragraph for each finding below the run that has it; then, of several runs, how many have any."""
    from algos.lab.doctor.rules import RULES

    for diagnosis in diagnoses:
        # What the run is
        subject = "a run"
        if diagnosis.algorithm:
            subject = f"{diagnosis.algorithm} on {diagnosis.environment or 'an environment without an id'}"
        length = f"{diagnosis.steps:,} steps in {diagnosis.iterations:,} iterations"
        print(printable(f"{diagnosis.run}: {subject}, {diagnosis.state}, {length}"))

        # What is wrong with it
        for finding in diagnosis.findings:
            print(f"\n  {finding.rule}")
            _print_paragraph(finding.message)
            _print_paragraph(f"What to do: {finding.advice}")
        if diagnosis.findings and diagnosis.notes:
            print()
        for note in diagnosis.notes:
            _print_paragraph(note)
        if diagnosis.sound:
            _print_paragraph(
                f"Nothing wrong was found ({diagnosis.rules_applied} of {len(RULES)} rules had something to look at)."
            )
        print()

    if len(diagnoses) > 1:
        number = sum(not diagnosis.sound for diagnosis in diagnoses)
        print(f"Something is wrong with {number} of {len(diagnoses)} runs.")


def _print_paragraph(text: str) -> None:
    """Print a text, indented and folded to the terminal's width."""
    width = min(get_terminal_size().columns, MAX_WIDTH)
    paragraph = textwrap.fill(
        printable(text),
        width,
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,  # paths and options stay whole
        break_on_hyphens=False,
    )
    print(paragraph)
