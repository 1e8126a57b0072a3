"""The runs of a comparison as jobs: what each of them trains, what is refused before, and which have finished."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from algos.lab.comparison.fingerprint import changed_code, fingerprint
from algos.lab.comparison.record import CODE, changed_settings, read_record
from algos.lab.comparison.runs import folder_name
from algos.lab.comparison.summary import Case
from algos.statistics.pass_rates import Sampling
from algos.storage.run_folder import holds_run

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """One run of a comparison."""

    case: Case
    seed: int
    folder: Path
    overwrite: bool
    quiet: bool
    dynamics_every: int
    num_episodes: int | None
    """Episodes per evaluation; None: `TEXT_EPISODES` or `CONTROL_EPISODES` of `algos.lab.comparison.one_run`."""
    deterministic: bool
    """Evaluate with the most probable actions."""
    sampling: Sampling | None
    """How the evaluations sample each prompt several times; None: they do not."""
    code: Mapping[str, str]
    """`fingerprint` of the case's code and files, and of the votes' function, when the comparison was called."""

    @property
    def settings(self) -> dict[str, Any]:
        """What `Record` stores to know this run again."""
        return self.case.recipe.to_dict() | {
            "dynamics_every": self.dynamics_every,
            "num_episodes": self.num_episodes,
            "deterministic": self.deterministic,
            "sampling": None if self.sampling is None else self.sampling.settings,
            CODE: dict(self.code),
        }


def make_jobs(
    cases: Sequence[Case], seeds: Iterable[int], *, run_dir: Path, sampling: Sampling | None, **settings: Any
) -> list[Job]:
    """Return a job for each seed and case; ``sampling`` and ``settings`` are the further fields of `Job`."""
    jobs = []
    answer = None if sampling is None else sampling.answer
    prints = [fingerprint(case.recipe, answer=answer) for case in cases]
    for seed in seeds:
        for case, code in reversed([*zip(cases, prints, strict=True)]):
            folder = run_dir / folder_name(case, seed)
            jobs.append(Job(case=case, seed=seed, folder=folder, code=code, sampling=sampling, **settings))
    return jobs


def num_finished(jobs: Iterable[Job]) -> int:
    """Return how many of these jobs have a result in their folders."""
    count = 0
    for job in jobs:
        record = read_record(job.folder)
        if record is not None and record.result is not None:
            count += 1
    return count


def check_folder(job: Job) -> None:
    """Raise a FileExistsError if a job's folder holds a run that it may neither keep nor continue nor remove."""
    if job.overwrite or not holds_run(job.folder):
        return
    record = read_record(job.folder)
    advice = (
        "give another folder (--run-dir), or remove the runs of these cases (--overwrite, in Python overwrite=True)"
    )
    if record is None:
        raise FileExistsError(f"{job.folder} holds a run already, not one of compare: {advice}")
    changed = changed_settings(record.settings, job.settings)
    changes_of_code = changed_code(record.settings.get(CODE), job.code)
    if changed and changed == changes_of_code and record.result is None:  # perhaps what ended it is mended
        logger.warning("%s goes on with other code or files than it began with: %s", job.folder, "; ".join(changed))
    elif changed:
        raise FileExistsError(f"{job.folder} holds a run already, with other settings ({'; '.join(changed)}): {advice}")


def check_case(case: Case, sampling: Sampling | None, *, processes: int) -> None:
    """Raise a ValueError if a case cannot be built, sampled, or sent to other processes, if there are any."""
    from algos.evaluation import fit_sampling

    try:
        case.recipe.build(seed=1)
        if sampling is not None:
            fit_sampling(sampling, case.recipe.environment(1, split="test"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"case {case}: {error}") from error
    if processes:
        _check_importable(case, sampling)


def _check_importable(case: Case, sampling: Sampling | None) -> None:
    """Raise a ValueError if a case has functions that another process cannot import."""
    advice = "give processes=0, or define them in a file of their own that this program imports"
    try:
        data = pickle.dumps((case, sampling))
    except Exception as error:  # a lambda, a function inside a function, or whatever an object raises
        raise ValueError(f"case {case}: its functions cannot be sent to other processes ({error}): {advice}") from error
    main = sys.modules["__main__"]
    if b"__main__" in data and getattr(main, "__file__", None) is None:  # a notebook, or typed at a prompt
        raise ValueError(f"case {case}: its functions are of a notebook, which other processes cannot import: {advice}")
