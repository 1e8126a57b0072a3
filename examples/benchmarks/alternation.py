"""Ours and a peer in turn, on one CPU and one thread: fresh processes, medians of pairs, rows of the table."""

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

CPU = int(os.environ.get("BENCH_CPU", "0"))
"""The processor that ours and the peers are pinned to."""
PEERS_HOME = Path(os.environ.get("PEERS_HOME", "~/.cache/peers")).expanduser()
"""Where ``setup.sh`` of the peers puts their interpreters."""
HERE = Path(__file__).parent


class NoFigureError(Exception):
    """Why something could not be measured; it becomes a note in the table."""


def interpreter(environment):
    """Python of a peers' environment."""
    return PEERS_HOME / environment / "bin" / "python"


def measure(python, script, *arguments, timeout=3600):
    """Run a script that prints lines ``RESULT {...}``; returns them as dicts.

    Args:
        python: the interpreter.
        script: the file.
        arguments: of the script.
        timeout: seconds.

    Raises:
        NoFigureError: if the interpreter is not there, or the script fails; says why.
    """
    if not Path(python).exists():
        raise NoFigureError(f"not installed ({python}): run setup.sh of the peers")
    paths = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "BENCH_CPU": str(CPU), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [str(python), str(Path(script).resolve()), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tempfile.gettempdir(),
            env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            preexec_fn=lambda: os.sched_setaffinity(0, {CPU}),
        )
    except subprocess.TimeoutExpired as error:
        raise NoFigureError(f"{Path(script).name} was not done after {timeout} s") from error
    lines = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line[:7] == "RESULT "]
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or ["it printed no RESULT"]
        raise NoFigureError(f"{Path(script).name} failed: {said[-1][:200]}")
    return lines


def row(suite, case, *, unit, peer_name, ours, peer, rate=False, floor=None, note=""):
    """A row of the table: medians, and the median of the pairs' ratios, above 1 where ours is better.

    Args:
        suite: its name.
        case: what was measured.
        unit: of ours and the peer's.
        peer_name: who is compared with.
        ours: a figure for each pair.
        peer: likewise.
        rate: True where more is better, False for seconds and megabytes.
        floor: what the bare work comes to, in the same unit.
        note: what else there is to say.
    """
    ratios = [o / p if rate else p / o for o, p in zip(ours, peer, strict=True)]
    middle = statistics.median(ours)
    return {
        "suite": suite,
        "case": case,
        "unit": unit,
        "ours": middle,
        "peer": statistics.median(peer),
        "peer_name": peer_name,
        "ratio": statistics.median(ratios),
        "floor_share": None if floor is None else middle / floor if rate else floor / middle,
        "note": note,
        "values": {"ours": list(ours), "peer": list(peer), "floor": floor},
    }


def empty_row(suite, case, *, unit, peer_name, note, ours=()):
    """A row of a peer that gave no figure."""
    middle = statistics.median(ours) if ours else None
    return dict(suite=suite, case=case, unit=unit, ours=middle, peer=None, peer_name=peer_name, ratio=None,
                floor_share=None, note=note)  # fmt: skip
