"""Our PPO on CartPole-v1 beside other libraries', run alternately on one CPU thread, and beside the bare work.

The peers' scripts, their configurations and how to install them: ``../shared/peers/README.md``. Each run is a process
of its own. Its clock counts the seconds of its one thread, so that other work on the machine slows nobody in the table.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from alternation import CPU, HERE, NoFigureError, empty_row, interpreter, measure as run_once, row

ROOT = Path(__file__).parents[2]
FAST = {
    "sb3": "fast", "skrl": "fast-native", "cleanrl_style": "fast-native", "tianshou": "fast", "torchrl": "fast-gymvec",
    "pufferlib": "fast",
}  # fmt: skip
CLEANRL = dict.fromkeys(FAST, "cleanrl")
ENVIRONMENTS = {"pufferlib": "puffer"}
"""Of those peers that do not run in the environment ``control``."""
FOLLOWERS = {"sb3": "fast", "skrl": "fast-native"}
MEASURES = {
    "fast train": ("fast", "train", 3.0, FAST),
    "cleanrl train": ("cleanrl", "train", 3.0, CLEANRL),
    "zoo train": ("zoo", "train", 3.0, {"sb3": "zoo"}),
    "fast rollout": ("fast", "rollout", 1.5, FOLLOWERS),
    "fast solve": ("fast", "solve", 60.0, FOLLOWERS),
}
"""Of each measure: our configuration, the mode, seconds at most, and each peer with the configuration that it runs."""
FIGURES = {
    "train": [("train", "steps/s", "sps", True), ("train memory", "MB", "rss_mb", False)],
    "rollout": [("rollout", "steps/s", "sps", True)],
    "solve": [("time to 475", "s", "solve_s", False)],
}
"""What is read off a run of each mode: its name and unit, its key in the script's answer, whether more is better."""
WORLDS = ("pendulum", "lstm", "cnn")
CLOCK = (
    "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def control(*, seeds, chosen, peers=ROOT / "../shared/peers"):
    """Rows of the table: one for each measure, peer and figure; ``seeds`` is the number of pairs."""
    scripts = Path(peers).resolve() / "control"
    if not scripts.is_dir():
        raise SystemExit(f"--peers {peers}: there is no folder {scripts}, which the peers' scripts are in")
    rows, floors = [], None
    for measure, (config, mode, seconds, rivals) in MEASURES.items():
        if not chosen(measure):
            continue
        floors = measure_floor(scripts) if floors is None else floors
        runs = play(scripts, config, mode, seconds, rivals, pairs=seeds)
        for peer in rivals:
            rows += compare(config, mode, ours=runs["ours"], theirs=runs[peer], peer=peer, floor=floors.get(config))
    return rows + [row for world in WORLDS if chosen(world) for row in other_world(world, pairs=seeds)]


def other_world(world, *, pairs):
    """A row of `worlds.py`: ours beside Stable-Baselines3's."""
    names = {"suite": "control", "case": f"{world} train", "unit": "steps/s", "peer_name": "sb3"}
    found = {"ours": [], "sb3": []}
    try:
        for _ in range(pairs):
            for library, python in (("ours", sys.executable), ("sb3", interpreter("control"))):
                (done,) = run_once(python, HERE / "worlds.py", world, "--library", library)
                found[library].append(done["ours"])
                print(f"{world} train, {library}: {done['ours']:,.0f} steps/s", flush=True)
    except NoFigureError as error:
        return [empty_row(**names, note=str(error), ours=found["ours"])]
    return [row(**names, ours=found["ours"], peer=found["sb3"], rate=True)]


def play(scripts, config, mode, seconds, rivals, *, pairs):
    """What every run answered, in rounds of ours and each peer, with a seed a round: ``{name: [answer, ...]}``."""
    runs = {name: [] for name in ["ours", *rivals]}
    for seed in range(1, pairs + 1):
        for name in runs:
            if name == "ours":
                python, script = sys.executable, ROOT / "examples/benchmarks/control_ours.py"
            else:
                python, script = interpreter(ENVIRONMENTS.get(name, "control")), scripts / f"peer_{name}.py"
            options = ["--config", rivals.get(name, config), "--mode", mode, "--seed", str(seed)]
            options += ["--max-steps", str(10**9), "--timeout", str(seconds)]
            runs[name].append(answer(scripts, python, script, *options))
            print(f"{config} {mode}, seed {seed}, {name}: {runs[name][-1]}", flush=True)
    return runs


def answer(scripts, python, script, *options):
    """The ``JSON`` line of a script, or ``{"error": why}``."""
    if not Path(python).exists():
        return {"error": f"not installed: {python} is missing, see {scripts.parent}/README.md"}
    path = os.pathsep.join([str(scripts), str(ROOT)] if python == sys.executable else [str(scripts)])
    # By a shell that waits, for a process inherits the peak memory of the one that started it.
    process = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", python, "-W", "ignore", "-c", CLOCK, script, *options],
        env=os.environ | {"PYTHONPATH": path, "BENCH_CPU": str(CPU)},
        capture_output=True,
        text=True,
    )
    found = re.search(r"^JSON (.*)$", process.stdout, re.MULTILINE)
    if found is None:
        return {"error": (process.stderr.strip() or "no answer").splitlines()[-1]}
    result = json.loads(found[1])
    return {"error": f"too slow: not out of its warm-up in the time, {result}"} if result.get("sps") == 0 else result


def measure_floor(scripts):
    """Steps a second of the bare work, by configuration and mode."""
    found = answer(scripts, interpreter("control"), scripts / "floor.py")
    print(f"floor: {found}", flush=True)
    names = {name.split()[0]: figures for name, figures in found.items() if isinstance(figures, dict)}
    return {
        config: {"train": figures["floor_sps"], "rollout": figures["rollout_floor_sps"]}
        for config, figures in names.items()
    }


def compare(config, mode, *, ours, theirs, peer, floor):
    """Rows of one measure and peer, medians of the pairs; above 1 a ratio always means that ours is better.

    A run that did not reach the goal counts as infinitely long; a pair with a failed run is left out, and noted.
    """
    rows = []
    for figure, unit, key, more_is_better in FIGURES[mode]:
        pairs = [
            [float("inf") if run[key] is None else run[key] for run in pair]
            for pair in zip(ours, theirs, strict=True)
            if not any("error" in run for run in pair)
        ]
        mine, its = ([pair[side] for pair in pairs] for side in (0, 1))
        errors = [run["error"] for run in [*ours, *theirs] if "error" in run]
        row = {
            "suite": "control",
            "case": f"{config} {figure}",
            "unit": unit,
            "ours": statistics.median(mine) if pairs else None,
            "peer": statistics.median(its) if pairs else None,
            "peer_name": peer,
            "ratio": ratio(mine, its, more_is_better=more_is_better) if pairs else None,
            "floor_share": None,
            "pairs": len(pairs),
            "note": errors[0] if errors else "",
            "values": {"ours": mine, "peer": its},
        }
        if floor and pairs and key == "sps":
            row["floor_share"] = row["ours"] / floor[mode]
        rows.append(row)
    return rows


def ratio(ours, theirs, *, more_is_better):
    """Median over the pairs of how many times better ours is."""
    if more_is_better:
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(1.0 if a == b else b / a for a, b in zip(ours, theirs, strict=True))
