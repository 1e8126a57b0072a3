"""What a benchmark was run on, and the tables of docs/results that are made from its JSON.

    python examples/benchmarks/page.py docs/results/speed.md     # rewrites them

A page has ``<!-- data/NAME.json -->`` before each of its tables, and an empty line after it.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"(<!-- (data/[\w-]+\.json) -->\n\n)(?:`.*\n\n(?:\|.*\n)*\n)?")
MOST = 0.2
"""Number of cores that other work may take while final figures are measured."""
LIBRARIES = ("torch", "tensordict", "transformers", "gymnasium", "numpy")


def machine(command):
    """Command, date, commit, processor, cores and versions; for `record`, when it began."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    known = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    return {
        "command": command, "date": date.today().isoformat(), "commit": commit,
        "cpu": known[1] if known else platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "libraries": {name: version(name) for name in LIBRARIES}, "others": others_seconds(), "began": time.time(),
    }  # fmt: skip


def others_seconds():
    """Seconds for which the processors have worked for anything but this process and those that it has run (Linux)."""
    if sys.platform != "linux":
        return float("nan")
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def record(rows, about):
    """What is kept of a run: where, what else the machine did, and the rows, with a ratio for each pair of figures.

    Args:
        rows: of `run.py`.
        about: of `machine`, at the beginning.
    """
    kept = []
    for row in rows:
        row = dict(row)
        values = row.pop("values", None)
        if values and values["peer"] and row["ratio"] is not None:
            more = row["unit"].endswith("/s")  # is better
            pairs = zip(values["ours"], values["peer"], strict=True)
            row["ratios"] = sorted(round(a / b if more else b / a, 3) for a, b in pairs)
        if row["note"].startswith("not installed"):
            row["note"] = "not installed"  # not where
        kept.append({name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in row.items()})
    began, before = about.pop("began"), about.pop("others")
    load = round((others_seconds() - before) / (time.time() - began), 2)
    return about | {"others": load, "final": load <= MOST, "rows": kept}


def table(data):
    """Lines of a table, and the line that says where it comes from."""
    lines = ["| case | ours | peer | theirs | ratio (least to most) | share of the bare work |", "| --- " * 6 + "|"]
    for row in data["rows"]:
        if row["note"] == "not installed":
            continue
        share = "" if row["floor_share"] is None else f"{row['floor_share']:.2f}"
        if row["ratio"] is None:
            lines.append(f"| {row['case']} | {_number(row['ours'])} | {row['peer_name']} | {row['note'] or '–'} | | |")
            continue
        ratios = row.get("ratios") or [row["ratio"]]
        middle = f"{row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        theirs = f"{_number(row['peer'])} {row['unit']}"
        lines.append(f"| {row['case']} | {_number(row['ours'])} | {row['peer_name']} | {theirs} | {middle} | {share} |")
    where = f"{data['cpu']}, {data['cores']} cores"
    final = "" if data["final"] else f"; **not final: other work took {data['others']:.1f} cores**"
    note = f"`{data['command']}`, {data['date']}, commit {data['commit']}, {where}{final}. Ours in the same unit."
    return "\n".join([note, "", *lines, "", ""])


def _number(x):
    return "–" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def rewritten(page):
    """Text of a page with its tables as their data has them."""

    def fresh(found):
        return found[1] + table(json.loads((page.parent / found[2]).read_text()))

    return MARK.sub(fresh, page.read_text())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(rewritten(Path(name)))
