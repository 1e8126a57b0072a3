"""What a benchmark was run on, and the tables of docs that are made from its JSON.

    python examples/benchmarks/page.py docs/results/*.md         # rewrites them
    python examples/benchmarks/page.py --check                   # which figures are older than what they measure

A page has ``<!-- data/NAME.json -->`` (outside docs/results: ``results/data/NAME.json``) before each of its tables, and
an empty line after it. The files have either ``rows`` of `run.py`, or ``columns`` and ``rows`` of texts. ``depends``
has a digest of each file that decides a figure: of its syntax, without docstrings and imports, so that moving
a file or rewording it makes no figure old.
"""

import ast
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "results" / "data"
MARK = re.compile(r"(<!-- ((?:results/)?data/[\w-]+\.json) -->\n\n)(?:`.*\n\n(?:\|.*\n)*\n)?")
LEARNING = (
    "algos/ppo.py", "algos/agent.py", "algos/collection.py", "algos/advantages.py", "algos/losses.py",
    "algos/envs/gymnasium_results.py", "algos/minibatches.py", "algos/optimizer.py", "algos/fast/*.py",
    "algos/policies/*.py", "algos/presets.py",
)  # fmt: skip
"""What decides how PPO learns, and how fast; of the kinds below, what else does."""
KINDS = {
    "control": (*LEARNING,),
    "algorithms": (*LEARNING, "algos/*.py"),
    "text": (*LEARNING, "textenv/lm/*.py", "textenv/envs/*.py", "textenv/kl/*.py", "textenv/prompts/tokenize.py"),
    "words": (*LEARNING, "textenv/words/*.py", "textenv/lm/*.py"),
    "programs": ("textenv/programs/*.py", "textenv/lm/*.py", "textenv/envs/*.py"),
    "reward models": ("algos/finetuning/*.py", "textenv/lm/*.py"),
    "insight": ("algos/lab/insight/*.py", "textenv/lm/*.py"),
    "memory": ("algos/lab/memory_plan.py", "textenv/lm/*.py", *LEARNING),
    "processes": ("algos/envs/*.py", "textenv/envs/*.py"),
    "penalties": (*LEARNING, "textenv/kl/*.py"),
    "scaling": ("algos/ranks/collectives.py", "examples/benchmarks/scaling_model.py", *LEARNING),
}  # fmt: skip
MOST = 0.2
"""Number of cores that other work may take while final figures are measured."""
LIBRARIES = ("torch", "tensordict", "transformers", "gymnasium", "numpy")


def machine(command):
    """`provenance`, and for `record` when it began and what else the machine had done by then."""
    return provenance(command) | {"others": others_seconds(), "began": time.time()}


def provenance(command):
    """Command, date, commit, processor, cores and versions."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cpu = platform.processor()
    if sys.platform == "linux":
        model_name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = model_name[1] if model_name else cpu
    return {
        "command": command, "date": date.today().isoformat(), "commit": commit,
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)),
        "libraries": {name: version(name) for name in LIBRARIES},
    }  # fmt: skip


def others_seconds():
    """Seconds for which the processors have worked for anything but this process and those that it has run (Linux)."""
    if sys.platform != "linux":
        return float("nan")
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


@cache
def digest(source):
    """Digest of what a Python source does: its syntax tree without docstrings and imports."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [each for each in block if not _says_nothing(each)] or [ast.Pass()])
    return sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def _says_nothing(node):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def depends(*kinds):
    """Digests of the files that decide figures of these kinds, by path."""
    paths = {path for kind in kinds for pattern in KINDS[kind] for path in ROOT.glob(pattern)}
    return {str(path.relative_to(ROOT)): digest(path.read_text()) for path in sorted(paths)}


def outdated(data, known=None):
    """Files that a result depends on and that have changed since; a digest that any file has now is no change."""
    known = digests() if known is None else known
    return [path for path, found in data.get("depends", {}).items() if found not in known]


def digests():
    """Digests of all our sources."""
    return {
        digest(path.read_text())
        for folder in ("algos", "textenv", "examples")
        for path in ROOT.glob(f"{folder}/**/*.py")
    }


def save_table(path, columns, rows, about, *, kind):
    """Write a table that a script has measured; ``about``: of `machine`, at the beginning."""
    data = record([], about) | {"depends": depends(kind), "columns": columns, "rows": rows}
    _write(path, data)


def save_table_of_runs(path, columns, rows, command, *, kinds, raw=None):
    """Write a table of runs that were made before: the load of the machine, as it is today, says nothing of them.

    Args:
        path: of the JSON file.
        columns: of the table.
        rows: of the table, texts.
        command: that makes the runs.
        kinds: of `KINDS`, whose files decide the figures.
        raw: further fields, such as what a figure is drawn from.
    """
    _write(path, provenance(command) | {"depends": depends(*kinds), "columns": columns, "rows": rows} | (raw or {}))


def _write(path, data):
    Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
    began = about.pop("began")
    others_at_start = about.pop("others")
    load = round((others_seconds() - others_at_start) / (time.time() - began), 2)
    return about | {"others": load, "final": load <= MOST, "rows": kept}


def print_and_save(rows, about, path, *, kinds):
    """Print a table of rows that a script has measured, and write it.

    Args:
        rows: as of `alternation.row`.
        about: of `machine`, at the beginning.
        path: of the JSON file; None: it is only printed.
        kinds: of `KINDS`, whose files decide the figures.
    """
    data = record(rows, about) | {"depends": depends(*kinds)}
    print(table(data))
    if path is not None:
        _write(path, data)


def table(data):
    """Lines of a table, and the line that says where it comes from."""
    if "columns" in data:
        cells = [data["columns"], ["---"] * len(data["columns"]), *data["rows"]]
        return "\n".join([_about(data), "", *(f"| {' | '.join(map(str, row))} |" for row in cells), "", ""])
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
    return "\n".join([f"{_about(data)} Ours in the same unit.", "", *lines, "", ""])


def _about(data):
    """Sentence that says where a table comes from."""
    where = f"{data['cpu']}, {data['cores']} cores" if "cpu" in data else data["machine"]
    final = "" if data.get("final", True) else f"; **not final: other work took {data['others']:.1f} cores**"
    return f"`{data['command']}`, {data['date']}, commit {data['commit']}, {where}{final}."


def _number(x):
    return "–" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def rewritten(page):
    """Text of a page with its tables as their data has them."""

    def fresh(found):
        return found[1] + table(json.loads((page.parent / found[2]).read_text()))

    return MARK.sub(fresh, page.read_text())


def check():
    """Print which figures are older than the code that they measure."""
    known = digests()
    for path in sorted(DATA.glob("*.json")):
        data = json.loads(path.read_text())
        if changed := outdated(data, known):
            shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            print(f"{path.relative_to(ROOT)}, commit {data['commit']}: older than {shown}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    for name in [] if sys.argv[1:] == ["--check"] else sys.argv[1:]:
        Path(name).write_text(rewritten(Path(name)))
