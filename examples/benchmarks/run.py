"""Benchmarks: one command, one table, and the same as JSON.

python examples/benchmarks/run.py --suite classic --seeds 5
python examples/benchmarks/run.py --suite learning --seeds 5 --json learning.json
python examples/benchmarks/run.py --suite control --json control.json
python examples/benchmarks/run.py --suite text --peers ../shared/peers --json text.json

classic   returns after training, beside published figures; resumed from runs/published, as the next three
minigrid  the same on MiniGrid, beside rl-baselines3-zoo
mujoco    the same on MuJoCo, beside CleanRL
off-policy  the same of SAC and TD3, beside rl-baselines3-zoo
learning  seconds until a small language model has learnt the task that the peers are measured on
control   steps a second, seconds to 475 and memory of PPO on CartPole, in turn with the peers'
text      speed and memory of generation, sampling, log-probs and PPO iterations, in turn with the peers'
growth    how seconds and memory grow with batch, response, vocabulary, environments, iterations; a PNG beside the JSON
real      memory and speed of the recipes for SmolLM2, each in a process of its own
startup   CPU seconds of imports and of a first iteration; the ratio is what they need at least divided by ours
gpu       generation and update of a decoder of half a billion parameters; not on CUDA, the same code in miniature

A ratio above 1 means that ours is better. The JSON says which machine and commit it was; where other work was running,
that its figures are not final. `page.py` makes the tables of docs/results from it. BENCH_CPU says which processor
everything is pinned to, PEERS_HOME where the peers' interpreters are.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from control import control
from gpu import gpu, ready
from growth import draw, growth
from learning import learning
from page import depends, machine, record, save_table
from published import classic, minigrid, mujoco, off_policy
from real import real
from startup import startup
from text import text

SUITES = {
    "classic": (classic, "algorithms"),
    "minigrid": (minigrid, "control"),
    "mujoco": (mujoco, "control"),
    "off-policy": (off_policy, "algorithms"),
    "control": (control, "control"),
    "learning": (learning, "text"),
    "text": (text, "text"),
    "growth": (growth, "text"),
    "real": (real, "text"),
    "gpu": (gpu, "text"),
    "startup": (startup, "control"),
}
"""Suites, and what decides their figures (`page.KINDS`)."""
BESIDE_PEERS = {"control", "text"}
"""Suites that run the peers' scripts."""
PEERS = Path(__file__).resolve().parents[3] / "shared" / "peers"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), required=True)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case, or pairs of runs")
    parser.add_argument("--cases", nargs="*", default=[], help="only cases whose name has one of these in it")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with the peers' scripts (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--device", default="auto", help="of gpu and real: auto, cpu, cuda, cuda:1, mps (%(default)s)")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, expected at least 1")
    more = {"peers": options.peers.resolve()} if options.suite in BESIDE_PEERS else {}
    if options.suite in {"gpu", "real"}:
        try:
            more = {"device": ready(options.device)}
        except ValueError as error:
            parser.exit(2, f"{error}\n")
    about = machine("python " + " ".join(map(shlex.quote, sys.argv)))
    measure, kind = SUITES[options.suite]
    rows = measure(
        seeds=options.seeds,
        chosen=lambda name: not options.cases or any(part in name for part in options.cases),
        **more,
    )
    if not rows:
        parser.error(f"--cases {options.cases} name no case of the suite {options.suite}")
    _print(rows)
    if options.json:
        if all("ratio" in row for row in rows):
            kept = record(rows, about) | {"depends": depends(kind)}
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            if not kept["final"]:
                print(f"other work took {kept['others']} cores meanwhile: not final", file=sys.stderr)
        else:
            names = [name for name in rows[0] if name not in ("suite", "values")]
            save_table(options.json, names, [[_cell(row.get(x)) for x in names] for row in rows], about, kind=kind)
        if options.suite == "growth":
            options.json.with_suffix(".png").write_bytes(draw(rows))


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
