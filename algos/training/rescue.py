"""What a training that fails leaves in its folder: the agent, the answers without a score, the batch that was wrong."""

import json
import logging
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from algos.ranks import collectives
from algos.storage.run_files import UNFINISHED, UNSCORED
from algos.storage.run_folder import BROKEN_OFF, FAILED, STOPPED, checkpoint_steps
from algos.training.diagnose import write_violation
from algos.training.invariants import InvariantError
from algos.training.run import Run
from algos.training.signals import Interrupted
from textenv.processes import end_if_forked
from textenv.rewards.scores import StopTraining

logger = logging.getLogger(__name__)


@contextmanager
def rescue(run: Run, run_dir: Path | None) -> Iterator[None]:
    """If training fails, save its results: the agent, unscored answers, the offending batch."""
    process = os.getpid()  # a process that is forked in the training must not save anything
    try:
        yield
    except KeyboardInterrupt as interrupt:
        end_if_forked(process, "other code")
        # A second Ctrl-C acts at once; report it like one after an iteration, without its traceback
        interruption = interrupt
        if not isinstance(interrupt, Interrupted):
            interruption = run.interruption("SIGINT")
        _rescue_results(interruption, run, run_dir)
        raise interruption from None
    except BaseException as error:
        end_if_forked(process, "other code")
        if isinstance(error, SystemExit):  # of an environment or a callback; Python ends without a word
            location = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning("line %s of %s ended the training by sys.exit", location.lineno, location.filename)
        if isinstance(error, InvariantError):
            error.add_note(f"in iteration {len(run.history) + 1}, after {run.steps} steps")
        _rescue_results(error, run, run_dir)
        raise


def _rescue_results(error: BaseException, run: Run, run_dir: Path | None) -> None:
    """Save what an error leaves of a training; add a note to the error if this fails too."""
    if run_dir is None:
        return
    try:
        _save_what_is_left(error, run, run_dir)
    except OSError as failure:  # a full disk may be the first error too
        error.add_note(f"not everything could be saved in {run_dir}: {failure}")


def _save_what_is_left(error: BaseException, run: Run, run_dir: Path) -> None:
    """Write the agent, the answers and the batch of an error, and add notes with their paths."""
    # Answers that a reward could not score: its error has them (see `textenv.envs.task.score_turns`). Every rank writes
    # its own.
    answers = getattr(error, "answers", None)
    if answers:
        path = _write_unscored(answers, run_dir)
        error.add_note(f"the {len(answers)} answers that were not scored are in {path}")
        advice = "after fixing the reward, resume the run"
        if isinstance(error, StopTraining):
            advice = "to go on, resume the run"
        error.add_note(f"{advice}: --resume {run_dir} (in Python resume=...)")
    if collectives.rank() > 0:
        return

    # The offending batch, and the metrics if the folder was lost
    if isinstance(error, InvariantError) and error.batch is not None:
        path = write_violation(error, run_dir, iteration=len(run.history) + 1, steps=run.steps)
        error.add_note(f"the batch is in {path}: safetensors.torch.load_file reads it")
    if isinstance(error, OSError) and run.logs is not None and run.logs.lost_folder() is not None:
        run.logs.write_again()

    # How the training ended
    (run_dir / UNFINISHED).write_text(_ending(error, run), encoding="utf-8")

    # Save an agent without steps only after a request to stop. After a failure the folder stays free for the next try.
    if run.steps or isinstance(error, (KeyboardInterrupt, StopTraining)):
        run.agent.save(run_dir)
        if not isinstance(error, Interrupted):
            error.add_note(f"the agent in its present state is saved in {run_dir}")


def _write_unscored(answers: Sequence[Mapping[str, object]], run_dir: Path) -> Path:
    """Write answers that could not be scored, one per line, into this rank's own file; return the file."""
    name = UNSCORED
    if collectives.rank() > 0:
        name = f"unscored-{collectives.rank()}.jsonl"
    lines = [json.dumps(answer, default=str) + "\n" for answer in answers]
    path = run_dir / name
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _ending(error: BaseException, run: Run) -> str:
    """Return the content of `UNFINISHED`: how an error ended the training."""
    if not isinstance(error, KeyboardInterrupt):
        return FAILED
    saved_steps = 0
    if run.newest_checkpoint is not None:
        saved_steps = checkpoint_steps(run.newest_checkpoint)
    return STOPPED if saved_steps == run.steps else BROKEN_OFF
