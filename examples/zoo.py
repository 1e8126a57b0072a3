"""One PPO on 33 worlds: only the environment's name differs within a kind; one table and one page.

python examples/zoo.py                                  # two seeds of every world: an hour on two cores
python examples/zoo.py --worlds CartPole chain_sum --seeds 1 --budget 0.1
python examples/zoo.py --presets                        # the second table: worlds with a preset of their own

A kind has one policy class, one preset and one number of slots (`KINDS`). Each world is trained by a process of its own
with a time limit, so that a failure costs one row. The extras box2d, minigrid, openenv, reasoning-gym, textarena,
textworld and verifiers are needed, and the package openenv for its server; a world whose package is missing says so.
"""

import argparse
import atexit
import dataclasses
import functools
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from algos import Case, LMPolicy, PPOConfig, presets
from algos.lab.comparison.compare import train_all
from algos.lab.comparison.report import table_rows
from algos.lab.comparison.summary import RunResult, summary
from algos.make import make_policy
from textenv import TokenVectorEnv, Verifiers
from textenv.errors import InvariantError

FOLDER = Path(__file__).parent / "worlds"
CONTROL = PPOConfig(
    minibatch_size=256, learning_rate=1e-3, final_learning_rate=1e-4, ent_coef=0.01, normalize_rewards=True
)  # fmt: skip
OF_CONTROL = {"config": CONTROL, "num_envs": 16}
KINDS: dict[str, dict[str, Any]] = {
    "numbers": {"policy": lambda env, seed: make_policy(env, policy="mlp", seed=seed)} | OF_CONTROL,
    "images": {"policy": lambda env, seed: make_policy(env, policy="cnn", seed=seed)} | OF_CONTROL,
    "text": {"config": presets.TEXT_EMBEDDED, "num_envs": 64, "kl_coef": 0.01},
}
"""What the worlds of a kind share: policy class, preset and number of slots."""


class World(NamedTuple):
    """A world and what it needs besides its name."""

    env: Any
    """Gymnasium id, or function of the number of slots."""
    kind: str
    steps: int
    """Steps of a run: actions, or tokens that the model writes."""
    env_kwargs: dict[str, Any] = {}
    needs: str = ""
    """What stands between the world and the agent."""


def _minigrid(name: str, steps: int) -> World:
    wrapper = "minigrid.wrappers:ImgObsWrapper"
    return World(f"minigrid:MiniGrid-{name}-v0", "images", steps, {"wrappers": [wrapper]}, f"`--wrapper {wrapper}`")


def _reasoning(dataset: str) -> World:
    short = {"max_prompt_tokens": 96, "max_new_tokens": 16}  # the embedded model reads 128 tokens
    return World("textenv/ReasoningGym-v0", "text", 20_000, {"dataset": dataset} | short)


def text_arena(num_envs):
    """Make a game of the package textarena, which reads and writes strings, as an environment of tokens."""
    from textarena_game import make_game

    tokenizer = LMPolicy.load("embedded").tokenizer
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "123456789"]
    return TokenVectorEnv(
        make_game, tokenizer=tokenizer, num_envs=num_envs, max_prompt_tokens=24, max_new_tokens=1, max_turns=3,
        max_length=112, allowed=lambda turn: digits,
    )  # fmt: skip


def verifiers_taskset(num_envs):
    """Make a taskset of the package verifiers an environment."""
    sys.path.insert(0, str(FOLDER))
    tokenizer = LMPolicy.load("embedded").tokenizer
    limits = {"max_prompt_tokens": 24, "max_new_tokens": 12, "max_turns": 1}
    return TokenVectorEnv(Verifiers("praise_taskset"), tokenizer=tokenizer, num_envs=num_envs, **limits)


@functools.cache
def praise_server():
    """Start a server of the package OpenEnv; return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(FOLDER / "praise_server.py"), str(port), "200"])
    atexit.register(server.kill)
    for _ in range(240):
        with socket.socket() as line:
            if server.poll() is not None or line.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.5)
    return f"http://127.0.0.1:{port}"


def open_env(num_envs):
    """Make the environment on that server."""
    return gymnasium.make_vec("textenv/OpenEnv-v0", num_envs=num_envs, url=praise_server(), max_new_tokens=12)


LIMIT = {"max_episode_steps": 200}
WORLDS = {
    "CartPole": World("CartPole-v1", "numbers", 150_000),
    "Acrobot": World("Acrobot-v1", "numbers", 200_000),
    "MountainCar": World("MountainCar-v0", "numbers", 200_000),
    "MountainCarContinuous": World("MountainCarContinuous-v0", "numbers", 100_000),
    "Pendulum": World("Pendulum-v1", "numbers", 200_000),
    "LunarLander": World("LunarLander-v3", "numbers", 300_000),
    "BipedalWalker": World("BipedalWalker-v3", "numbers", 200_000),
    "Taxi": World("Taxi-v4", "numbers", 150_000),
    "CliffWalking": World("CliffWalking-v1", "numbers", 150_000, LIMIT),
    "FrozenLake": World("FrozenLake-v1", "numbers", 100_000, {"is_slippery": False}),
    "Blackjack": World("Blackjack-v1", "numbers", 100_000),
    "MiniGrid-Empty": _minigrid("Empty-5x5", 60_000),
    "MiniGrid-DoorKey": _minigrid("DoorKey-5x5", 100_000),
    "Periods": World("textenv/Periods-v0", "text", 60_000),
    "Reviews": World("textenv/Reviews-v0", "text", 40_000),
    "GuessNumber": World("textenv/GuessNumber-v0", "text", 30_000),
    "Calculator": World("textenv/Calculator-v0", "text", 30_000),
    "Copy": World("textenv/Copy-v0", "text", 30_000),
    "Sort": World("textenv/Sort-v0", "text", 30_000),
    **{name: _reasoning(name) for name in (
        "chain_sum", "basic_arithmetic", "simple_equations", "products", "gcd", "lcm", "count_bits", "count_primes",
        "coin_flip", "spell_backward",
    )},
    "TextArena": World(text_arena, "text", 12_000, {}, "`TokenVectorEnv` (a game of strings)"),
    "TextWorld": World("textenv/TextWorld-v0", "text", 20_000, {"admissible": True}),
    "verifiers": World(verifiers_taskset, "text", 20_000, {}, "`TokenVectorEnv(Verifiers(…))` (a taskset)"),
    "OpenEnv": World(open_env, "text", 20_000, {}, "a server at `url=`"),
}  # fmt: skip
PRESETS = {
    "Taxi-v4": World("Taxi-v4", "", 0),
    "CliffWalking-v1": World("CliffWalking-v1", "", 0, LIMIT),
    "FrozenLake8x8-v1 (not slippery)": World("FrozenLake8x8-v1", "", 0, {"is_slippery": False}),
    "Acrobot-v1": World("Acrobot-v1", "", 0),
}
"""Worlds with a preset of their own, in `algos.presets`."""
TIMEOUT = 900
"""Seconds that all seeds of a world may take."""


def case_of(name, world, budget):
    """Return what `algos.lab.comparison` trains for a world, and its number of steps."""
    case = Case(world.env, name=name, env_kwargs=world.env_kwargs, **KINDS.get(world.kind, {}))
    return case, max(1, int(budget * (world.steps or presets.recipe(world.env).total_steps)))


def train_one(name, worlds, *, seeds, budget, run_dir):
    """Train one world in this process, and write its runs (or the error that ended them) as JSON."""
    case, steps = case_of(name, worlds[name], budget)
    more = {} if worlds[name].kind else {"num_episodes": 100, "deterministic": True}
    options = {"processes": 0, "quiet": True, "overwrite": True, "total_steps": steps}
    try:
        found = [dataclasses.asdict(run) for run in train_all([case], seeds=seeds, run_dir=run_dir, **options, **more)]
    except InvariantError as error:
        found = {"violated": str(error)}
    (run_dir / f"{case.name}.json").write_text(json.dumps(found), encoding="utf-8")


def start(name, *, run_dir, options):
    """Train a world in a process of its own; return its row of the table."""
    began, file = time.perf_counter(), run_dir / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", name, "--run-dir", str(run_dir), *options]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        said = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        said = f"no end within {TIMEOUT} s"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"not run": said}
    print(f"{name}: {time.perf_counter() - began:.0f} s{'' if isinstance(found, list) else f', {found}'}", flush=True)
    return found


def row_of(name, world, found):
    """Return the cells of a world's row."""
    if isinstance(found, dict):
        ((verdict, said),) = found.items()
        said = said[:200].replace("|", "\\|")
        return [name, *["–"] * 5, f"{verdict}: {said}", world.needs]
    runs = [RunResult(**run) for run in found]
    figures, cells = summary(runs), {}
    for (label, _), (text, small) in table_rows({name: figures}):
        cells[label] = f"{text} ({small})" if small else text
    before, after = cells["return before training"], cells["return after training"]
    return [name, runs[0].policy, before, after, cells["steps"], cells["seconds of training"], "held", world.needs]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="*", help="only these (all: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each world (%(default)s)")
    parser.add_argument("--budget", type=float, default=1.0, help="factor of all numbers of steps (%(default)s)")
    parser.add_argument("--presets", action="store_true", help="worlds with a preset of their own instead")
    parser.add_argument("--processes", type=int, default=2, help="worlds at a time (%(default)s)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/zoo"), help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the table to this file too, as docs/results has it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    worlds = PRESETS if given.presets else WORLDS
    names = given.worlds or list(worlds)
    if unknown := sorted({*names} - {*worlds}):
        parser.error(f"there is no world {', '.join(unknown)}: the worlds are {', '.join(worlds)}")
    if given.seeds < 1 or given.budget <= 0:
        parser.error(f"--seeds is {given.seeds} and --budget {given.budget}: expected at least 1, and a number above 0")
    given.run_dir.mkdir(parents=True, exist_ok=True)
    if given.one:
        return train_one(given.one, worlds, seeds=given.seeds, budget=given.budget, run_dir=given.run_dir)
    options = ["--seeds", str(given.seeds), "--budget", str(given.budget), *(["--presets"] if given.presets else [])]
    sys.path.append(str(Path(__file__).parent / "benchmarks"))
    from page import machine, save_table

    began, about = time.perf_counter(), machine("python " + " ".join(sys.argv))
    with ThreadPoolExecutor(given.processes) as pool:
        found = pool.map(lambda name: start(name, run_dir=given.run_dir, options=options), names)
        rows = [row_of(name, worlds[name], each) for name, each in zip(names, found, strict=True)]
    header = ["world", "policy", "return before", "after", "steps", "seconds", "invariants", "needed"]
    table = [" | ".join(map(str, cells)) for cells in (header, ["---"] * len(header), *rows)]
    typed = " ".join([*(["--worlds", *names] if given.worlds else []), *options])
    spent = f"{time.perf_counter() - began:.0f} s, {given.processes} processes of one thread"
    lines = [
        "# One PPO, many worlds",
        "",
        f"`python examples/zoo.py {typed}`, {spent}; means, in brackets each seed.",
        "",
    ]
    page = "\n".join([*lines, *(f"| {line} |" for line in table), ""])
    (given.run_dir / "zoo.md").write_text(page, encoding="utf-8")
    print(page)
    if given.json is not None:
        save_table(given.json, header, rows, about, kind="text")
    return rows


if __name__ == "__main__":
    main()
