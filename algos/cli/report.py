"""``algos report`` and ``algos watch``: runs as a page, written once or served while they train."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from algos.cli.arguments import Command


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write one HTML page about runs: curves, settings, prompts and answers with their tokens."""

    prints: ClassVar[bool] = True
    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders of runs or comparisons, or folders above them."""
    out: Path | None = None
    """Page to write; default report.html in the folder, or here if there are several."""

    def run(self) -> dict[str, object]:
        """Read the runs, and write the page."""
        from algos.lab.comparison.report import report

        result = report(*self.runs, out=self.out)
        if not self.json:
            number = len(result["runs"])
            noun = "run"
            if number > 1:
                noun = "runs"
            print(f"{number} {noun}: {result['report']}")
        return result


@dataclass(frozen=True, kw_only=True)
class Watch(Command):
    """Serve the page of runs to a browser on this machine, renewed while they train, until Ctrl-C."""

    prints: ClassVar[bool] = True
    announces: ClassVar[bool] = True
    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Folders of runs or comparisons, or folders above them; runs that begin later appear too."""
    port: int = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    every: float = 5.0
    """Seconds between refreshes."""

    def run(self) -> dict[str, object]:
        """Serve the page."""
        from algos.lab.comparison.page import render
        from algos.lab.comparison.report import report_page
        from algos.lab.comparison.runs import read_runs
        from textenv.loopback import LoopbackServer

        if not self.every >= 1:
            raise ValueError(f"--every is {self.every}, expected at least 1 second")
        missing = [str(path) for path in self.runs if not path.is_dir()]
        if missing:
            raise FileNotFoundError(f"there is no folder {', '.join(missing)}: give the folder that holds your runs")

        def page(path: str, query: dict[str, str], posted: object) -> str:
            """Return the page, as the runs are now; one that waits where there is nothing to show."""
            if path != "/" or posted is not None:
                raise FileNotFoundError(f"there is no {path:.100}, only the page /")
            try:
                return report_page(read_runs(self.runs), live=self.every)
            except FileNotFoundError:
                message = f"No run in {', '.join(map(str, self.runs))} has finished an iteration yet."
            except ValueError as error:  # a file of a run is damaged
                message = f"{error}."
            return render("waiting.html", title="Training report", message=message)

        # Until Ctrl-C
        with LoopbackServer(page, port=self.port) as server:
            print(f"open {server.url}\nCtrl-C ends it; the runs go on.", flush=True)
            with suppress(KeyboardInterrupt):
                server.serve_forever()
        return {"watched": [str(path) for path in self.runs]}
