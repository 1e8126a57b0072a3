"""Damaged and hostile run folders: every command that reads a run, with every damage of every file of it.

    python tests/fuzz/damaged_runs.py               # all commands and damages, 83,000; four hours on one core
    python tests/fuzz/damaged_runs.py --every 20    # one in 20

A command must end in seconds with its result, or with exit status 1 or 2 and a sentence, never with a traceback.
`tests/fuzz/test_damaged_runs.py` runs a part of them.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from algos.cli import main as algos

SECONDS = 20
"""Time that a command on a damaged run may take, in seconds of processor time; most take less than one."""
MEMORY = 3 * 2**30
"""Memory that a command may take in addition, in bytes."""
DEEP = 10_000
"""Levels of a nested file."""

JSON_VALUES = {
    "null": None,
    "a text": "x",
    "another text": "../../etc/passwd",
    "a function": "subprocess:Popen",
    "a word": "nan",
    "a list": [],
    "a list of lists": [[1], ["x"]],
    "an object": {},
    "an object of objects": {"a": {"b": None}},
    "true": True,
    "a negative number": -1,
    "a fraction": 0.5,
    "a number of 400 digits": 10**400,
    "a number beyond memory": 10**9,
    "a float beyond float32": 1e300,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "a megabyte": "a" * 2**20,
    "unpaired surrogates": "\ud800",
    "escape sequences": "\x1b[2J\x1b]0;mine\x07",
}
LAUGHS = "\n".join(
    ["env: CartPole-v1", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
)
"""A "billion laughs": a list of 9^12 entries in 12 lines."""


# --- the runs ---------------------------------------------------------------------------------------------------------


def make_runs(folder: Path) -> dict[str, Path]:
    """Train a run of control and one of text, with checkpoints, samples, evaluations and the best agent."""
    small = ["--total-steps", "64", "--num-envs", "2", "--num-episodes", "2", "--checkpoint-every", "32", "--json"]
    often = ["--eval-every", "32", "--eval-num-episodes", "2", "--sample-every", "1"]
    control, text = folder / "control", folder / "text"
    quietly(["train", "CartPole-v1", "--run-dir", str(control), "--config.num-steps", "16", *small, *often])
    text_options = ["--kl-coef", "0.1", "--max-new-tokens", "4", "--lora", "r=2", "--config.num-episodes", "4"]
    quietly(["train", "textenv/Copy-v0", "--run-dir", str(text), *text_options, *small, *often])
    return {"control": control, "text": text}


def quietly(words: list[str]) -> None:
    """Run a command without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        algos(words)


# --- the commands -----------------------------------------------------------------------------------------------------


def commands(kind: str, run: Path) -> dict[str, list[str]]:
    """Every command that reads a run, by name."""
    folder = str(run)
    found = {
        "show": ["show", folder],
        "doctor": ["doctor", folder],
        "runs": ["runs", folder],
        "report": ["report", folder, "--out", str(run.parent / "report.html")],
        "evaluate": ["evaluate", folder, "--num-episodes", "1"],
        "evaluate best": ["evaluate", f"{folder}/best", "--num-episodes", "1"],
        "resume": ["train", "--resume", folder, "--num-episodes", "1", "--quiet"],
        "config": ["train", "--config", f"{folder}/run.yaml", "--run-dir", str(run.parent / "new"), "--overwrite",
                   "--num-episodes", "1", "--quiet"],
    }  # fmt: skip
    if kind == "text":
        found |= {
            "sample": ["sample", folder, "--prompt", "copy 1 2 =", "--max-new-tokens", "2", "--compare-to", "base"],
            "merge": ["merge", folder, str(run.parent / "merged")],
            "plan": ["plan", "--config", f"{folder}/run.yaml"],
        }
    else:
        found |= {"interpret": ["interpret", folder]}
    return found


READ_BY = {
    "config.json": ("show", "doctor", "runs", "report", "evaluate", "sample", "merge", "interpret"),
    "run.yaml": ("show", "doctor", "report", "resume", "config", "plan"),
    "metrics.jsonl": ("show", "doctor", "runs", "report", "evaluate", "resume"),
    "samples.jsonl": ("show", "report", "resume"),
    "tokens.jsonl": ("report",),
    ".failed": ("show", "doctor", "runs", "report", "resume"),
    ".holder.json": ("show", "doctor", "runs", "report", "resume"),
    ".lock": ("show", "doctor", "runs", "report", "resume"),
    "manifest.json": ("resume",),
    "state.json": ("resume",),
    "state.safetensors": ("resume",),
    "policy.safetensors": ("doctor", "evaluate", "interpret"),
    "adapter_config.json": ("evaluate", "sample", "merge"),
    "adapter_model.safetensors": ("evaluate", "merge"),
    "base.json": ("evaluate",),
    "value_head.safetensors": ("evaluate",),
    "tokenizer_config.json": ("evaluate", "sample"),
    "tokenizer.json": ("evaluate", "sample"),
    "best/config.json": ("evaluate best",),
}
"""Commands that read a file, by the end of its path."""


# --- the damages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A damaged run and a command on it."""

    kind: str
    command: str
    damage: str
    apply: Callable[[Path], None]
    """Damages a copy of the run."""

    def __str__(self) -> str:
        return f"{self.kind} {self.command}: {self.damage}"


def cases(runs: dict[str, Path]) -> Iterator[Case]:
    """Yield every command with every damage of the files that it reads."""
    for kind, run in runs.items():
        for end, readers in READ_BY.items():
            paths = sorted(path for path in run.rglob("*") if str(path.relative_to(run)).endswith(end))
            if end == "config.json":
                paths = [run / "config.json"]
            name = str(paths[-1].relative_to(run)) if paths else end  # of checkpoints the newest
            if not paths and end not in (".failed", ".holder.json", "tokens.jsonl"):
                continue
            for command in readers:
                if command not in commands(kind, run):
                    continue
                for damage, apply in damages(run / name, name):
                    yield Case(kind, command, f"{name}, {damage}", apply)


def damages(path: Path, name: str) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield the damages of a file of a run: their names, and functions of the folder of a copy."""

    def replaced(by: Callable[[Path], None]) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists() or target.is_symlink():
                target.unlink()
            by(target)

        return apply

    yield "missing", replaced(lambda target: None)
    yield "a folder", replaced(lambda target: target.mkdir())
    yield "a FIFO", replaced(os.mkfifo)
    yield "a link to itself", replaced(lambda target: target.symlink_to(target.name))
    yield "a link to /dev/zero", replaced(lambda target: target.symlink_to("/dev/zero"))
    yield "a link to a password", replaced(lambda target: target.symlink_to("/etc/passwd"))
    yield "a terabyte", replaced(_sparse)
    content = {
        "empty": b"",
        "not UTF-8": b"\xff\xfe\x00{",
        "nested deep": b"[" * DEEP,
        "nested deep, closed": b"[" * DEEP + b"]" * DEEP,
        "an object nested deep": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "a list": b"[1, 2]\n",
        "a number": b"7\n",
        "a text": b'"x"\n',
        "null": b"null\n",
        "an empty object": b"{}\n",
    }
    if name.endswith(".yaml"):
        content["laughs"] = LAUGHS.encode()
    for damage, data in content.items():
        yield damage, replaced(lambda target, data=data: target.write_bytes(data))
    if path.is_file():
        whole = path.read_bytes()
        yield "cut off", replaced(lambda target: target.write_bytes(whole[: len(whole) // 2]))
        flipped = bytes([whole[0] ^ 0x40]) + whole[1:] if whole else b"x"
        yield "with another first byte", replaced(lambda target: target.write_bytes(flipped))
    if path.suffix in (".json", ".jsonl", ".yaml") and path.is_file():
        yield from _other_values(path, replaced)


def _other_values(path: Path, replaced: Callable) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield one damage for each key of a file, at any depth, and each value of `JSON_VALUES`."""
    if path.suffix == ".yaml":
        import yaml

        tree = yaml.safe_load(path.read_text())
        write = json.dumps  # which YAML reads
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        tree = json.loads(lines[-1])

        def write(value):
            return "\n".join([*lines[:-1], json.dumps(value), ""])
    else:
        tree = json.loads(path.read_text())
        write = json.dumps

    def changed(target, keys, value):
        """Write the file with another value; only when a case is tried, as most cases are not."""
        copied = copy.deepcopy(tree)
        owner = copied
        for key in keys[:-1]:
            owner = owner[key]
        owner[keys[-1]] = value
        target.write_text(write(copied))

    for keys in _keys(tree):
        for what, value in JSON_VALUES.items():
            yield f"{'.'.join(map(str, keys))} is {what}", replaced(partial(changed, keys=keys, value=value))


def _keys(tree, before=()) -> Iterator[tuple]:
    """Yield the path of each value; of a long list, that of its first one."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:1]) if isinstance(tree, list) else ()
    for key, value in pairs:
        if len(before) < 6:
            yield (*before, key)
            yield from _keys(value, (*before, key))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


# --- running ----------------------------------------------------------------------------------------------------------


class HangError(BaseException):
    """A command took too long; no command catches it."""


def attempt(case: Case, run: Path, scratch: Path) -> str:
    """Run a command on a damaged copy of a run; return what is wrong with the way it ended, or nothing."""
    shutil.rmtree(scratch, ignore_errors=True)
    folder = scratch / case.kind
    shutil.copytree(run, folder, symlinks=True)
    case.apply(folder)
    words = commands(case.kind, folder)[case.command]
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    problem = ""
    try:
        os.chdir(scratch)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited():
            algos(words)
    except SystemExit as stop:
        said = err.getvalue().strip()
        if case.command == "doctor" and stop.code == 1:  # what it finds is its result
            said += out.getvalue().strip()
        if stop.code not in (1, 2):
            problem = f"exit status {stop.code}"
        elif "Traceback" in said or not said:
            problem = f"no sentence: {said[-300:]!r}"
        elif max(map(len, said.splitlines())) > 2000:
            problem = f"a sentence of {len(said)} characters"
    except HangError:
        problem = f"not done after {SECONDS} seconds"
    except KeyboardInterrupt:
        problem = "interrupted"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {str(error)[:200]!r} in {Path(place.filename).name}:{place.lineno}"
    finally:
        os.chdir(before)
    return problem


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Limit the processor time, the time and the memory of what runs in this context."""

    def stop(*_):
        raise HangError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handlers = [(number, signal.signal(number, stop)) for number in (signal.SIGALRM, signal.SIGPROF)]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, 15 * SECONDS)  # nothing may wait for a pipe
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in handlers:
            signal.signal(number, handler)


def main() -> None:
    """Run the cases, and print those that end in another way than they should."""
    parser = argparse.ArgumentParser(description="Give every command every damaged run.")
    parser.add_argument("--every", type=int, default=1, help="run one in so many")
    parser.add_argument("--only", default="", help="run those whose name contains this text")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        runs = make_runs(Path(home) / "runs")
        wanted = [case for case in cases(runs) if chosen.only in str(case)][:: chosen.every]
        print(f"{len(wanted)} commands", flush=True)
        start, failed = time.perf_counter(), 0
        for case in wanted:
            began = time.perf_counter()
            if problem := attempt(case, runs[case.kind], Path(home) / "scratch"):
                failed += 1
                print(f"{case}\n    {problem}", flush=True)
            elif time.perf_counter() - began > SECONDS / 2:
                print(f"{case}\n    slow: {time.perf_counter() - began:.0f} s", flush=True)
        print(f"{failed} of {len(wanted)} in {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
