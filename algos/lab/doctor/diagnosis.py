"""Diagnosis of runs: apply the rules to the folder of a run, or to all runs below a folder."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from algos.lab.doctor.evidence import MIN_ITERATIONS, Evidence, read_evidence
from algos.lab.doctor.rules import RULES, Rule
from algos.lab.doctor.signs import Figures
from algos.storage.run_files import METRICS, VIOLATION_BATCH, VIOLATION_REPORT
from algos.storage.run_folder import run_folder_of, status
from algos.storage.run_reader import DamagedRunError
from textenv.json_files import read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run."""

    rule: str
    """Name of the rule that found it."""
    message: str
    """What is wrong, with the figure."""
    advice: str
    """What to do."""
    figures: Figures
    metrics: tuple[str, ...]
    """What the rule looked at."""


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of a run."""

    run: str
    """Folder of the run."""
    algorithm: str
    environment: str
    state: str
    """See `algos.storage.run_folder.status`."""
    steps: int
    iterations: int
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader should know of the run, though it is no fault."""
    rules_applied: int = 0
    """Number of rules for which the run has something to look at, of all `RULES`."""

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def apply_rules(evidence: Evidence, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return what the rules find, in their order.

    A rule that another finding explains says nothing (`Rule.unless`). If a rule fails, this is logged.
    """
    findings: dict[str, Finding] = {}
    for rule in rules:
        try:
            figures = rule.check(evidence, rule.threshold)
            if figures is not None:
                message = rule.message.format(**figures)
                findings[rule.name] = Finding(rule.name, message, rule.advice, figures, rule.metrics)
        except Exception as error:  # a log from anywhere may hold anything, and no rule may end a training
            logger.warning("the rule %s of the run doctor failed: %.200r", rule.name, error)

    # Leave out those that another one explains which is not left out itself
    unless = {rule.name: rule.unless for rule in rules}

    def is_told(name: str) -> bool:
        return name in findings and not any(map(is_told, unless[name]))

    return [finding for name, finding in findings.items() if is_told(name)]


def examine(folder: str | Path) -> Diagnosis:
    """Return what is wrong with a run.

    Args:
        folder: folder of the run, or of one of its checkpoints; the run may still train.

    Raises:
        FileNotFoundError: if it holds no run.
    """
    # The run, also of a checkpoint
    folder = Path(folder)
    run = folder
    if not (folder / METRICS).is_file():
        run = run_folder_of(folder)
    if not (run / METRICS).is_file():
        raise FileNotFoundError(
            f"{folder} holds no run ({METRICS} is missing): 'algos runs FOLDER' lists the runs in a folder"
        )

    # What is known of it
    try:
        evidence = read_evidence(run)
    except DamagedRunError as error:
        advice = "Restore the file from a backup, or train again."
        finding = Finding("damaged_files", f"A file of the run cannot be read: {error}.", advice, {}, ())
        return Diagnosis(str(run), "", "", status(run), 0, 0, findings=[finding])

    # What that says
    steps = 0
    if evidence.metrics:
        steps = int(evidence.metrics[-1].get("steps", 0))
    return Diagnosis(
        run=str(run),
        algorithm=str(evidence.description.get("algorithm") or ""),
        environment=evidence.environment,
        state=evidence.state,
        steps=steps,
        iterations=len(evidence.metrics),
        findings=[*_failure(run, evidence), *apply_rules(evidence)],
        notes=_notes(run, evidence),
        rules_applied=sum(rule.applies_to(evidence) for rule in RULES),
    )


def _failure(run: Path, evidence: Evidence) -> list[Finding]:
    """Return the finding of a run that ended by an error; none for other runs."""
    if evidence.state != "failed":
        return []
    message = "The training ended by an error."
    advice = f"The log has the error. Once it is mended, go on: algos train --resume {run}."
    path = run / VIOLATION_REPORT
    if path.is_file():
        try:
            report = read_json(path, what="the description of a violation", kind=dict)
        except (OSError, ValueError) as error:
            logger.warning("%s", error)
        else:
            message = f"The training ended because an invariant was violated: {report.get('error')}"
            advice = f"Read the batch: safetensors.torch.load_file({str(run / VIOLATION_BATCH)!r})."
    return [Finding("training_failed", message, advice, {}, ())]


def _notes(run: Path, evidence: Evidence) -> list[str]:
    """Return what a reader should know before believing the rules."""
    notes = []
    num_iterations = len(evidence.metrics)
    if evidence.state == "running":
        notes.append("The run still trains: this is what its log says so far.")
    elif evidence.state == "stopped":
        notes.append(f"The training was interrupted. To go on: algos train --resume {run}")
    if num_iterations == 0:
        notes.append("No iteration has ended yet, so there is nothing to look at.")
    elif num_iterations < MIN_ITERATIONS and evidence.state != "failed":
        notes.append(
            f"There are only {num_iterations} iterations (a rollout and its update each), and most rules need "
            f"{MIN_ITERATIONS}: train longer (--total-steps), or make rollouts shorter (--config.num-steps, "
            "--config.num-episodes)."
        )
    return notes


def examine_all(paths: Iterable[str | Path]) -> list[Diagnosis]:
    """Examine runs, and all runs below folders that hold several, such as that of `compare`; each run once.

    Raises:
        FileNotFoundError: if a path is missing, or holds no run.
    """
    diagnoses: dict[Path, Diagnosis] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {path}: give the folder of a run, or one above runs")
        folders = [path]
        if not (path / METRICS).is_file():
            folders = sorted(metrics.parent for metrics in path.rglob(METRICS)) or [path]
        for folder in folders:
            if folder.resolve() not in diagnoses:
                diagnoses[folder.resolve()] = examine(folder)
    return list(diagnoses.values())


def findings_in_a_line(folder: str | Path) -> str | None:
    """Return a line that names what is wrong with a run and the command that explains it; None if nothing is.

    It is for the end of a training, and never raises: an error of the doctor is logged.
    """
    try:
        if not (Path(folder) / METRICS).is_file():  # the training has ended before its first iteration
            return None
        names = [finding.rule for finding in examine(folder).findings]
    except Exception as error:  # must not lose a run that has just ended well
        logger.warning("the run doctor could not examine %s: %.200r", folder, error)
        return None
    if not names:
        return None
    return f"something may be wrong with this run ({', '.join(names)}): algos doctor {folder} says what"
