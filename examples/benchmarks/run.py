"""Benchmarks: one command, one table, and the same as JSON.

python examples/benchmarks/run.py --suite classic --seeds 5
python examples/benchmarks/run.py --suite learning --seeds 5 --json learning.json
python examples/benchmarks/run.py --suite control --json control.json
"""

import argparse
import json
from pathlib import Path

from classic import classic
from control import control
from learning import learning

SUITES = {"classic": classic, "control": control, "learning": learning}
BESIDE_PEERS = ("control",)
"""Suites that run other libraries' scripts too."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), required=True)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case")
    parser.add_argument("--cases", nargs="*", default=[], help="only cases whose name has one of these in it")
    parser.add_argument("--peers", type=Path, help="folder of the peers' scripts; by default ../shared/peers")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    if options.peers is not None and options.suite not in BESIDE_PEERS:
        parser.error(f"--peers is of the suites {', '.join(BESIDE_PEERS)}, {options.suite} runs no peers: leave it out")
    rows = SUITES[options.suite](
        seeds=options.seeds,
        chosen=lambda name: not options.cases or any(part in name for part in options.cases),
        **({} if options.peers is None else {"peers": options.peers}),
    )
    if not rows:
        parser.error(f"--cases {options.cases} name no case of the suite {options.suite}")
    _print(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _print(rows):
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row if name != "values"))
    table = Table(*names)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    Console(width=160).print(table)


def _cell(value):
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
