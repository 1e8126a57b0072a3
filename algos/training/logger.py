"""Logs of a run: JSON lines, TensorBoard, and a progress bar."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from algos.training.run_folder import replacing

BAR_METRICS = {"episode/return": "return", "policy/approx_kl": "approx_kl", "reference/kl": "KL", "sft/loss": "loss"}
"""Metrics shown beside the progress bar, and their labels."""


class Logs:
    """Log files and progress bar of a run, updated at every iteration, so that a crash loses nothing.

    Args:
        run_dir: existing folder for ``metrics.jsonl`` and ``tensorboard/``; None writes no files.
        total_steps: length of the progress bar.
        progress: show the progress bar.
        before: metrics of the iterations before a resume; later ones in the files are removed.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        *,
        total_steps: int,
        progress: bool,
        before: Sequence[Mapping[str, float]] = (),
    ) -> None:
        self._file = self._board = self._bar = None
        self._last: dict[str, float] = {}
        if run_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(run_dir)
            path = folder / "metrics.jsonl"
            with replacing(path) as new:  # so that the old file is never lost
                new.write_text("".join(json.dumps(metrics) + "\n" for metrics in before), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
            purge_step = int(before[-1]["steps"]) + 1 if before else None
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        if progress:
            self._bar, self._task = _progress_bar(total_steps)

    def __enter__(self) -> Self:
        return self

    def write(self, metrics: dict[str, float]) -> None:
        """Log one iteration; ``metrics["steps"]`` is the horizontal axis."""
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, int(metrics["steps"]))
        if self._bar is not None:
            self._last |= metrics  # a rollout in which no episode ended shows the last return
            shown = [f"{label} {self._last[name]:.3g}" for name, label in BAR_METRICS.items() if name in self._last]
            self._bar.update(self._task, completed=metrics["steps"], shown="  ".join(shown))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for closable in (self._file, self._board):
            if closable is not None:
                closable.close()
        if self._bar is not None:
            self._bar.stop()


def _progress_bar(total_steps: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    # On stderr, so that stdout stays clean for programs that read it.
    bar = Progress(
        BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} steps"), TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"), console=Console(stderr=True),
    )  # fmt: skip
    bar.start()
    return bar, bar.add_task("", total=total_steps, shown="")
