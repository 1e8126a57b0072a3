"""Run folders whose files name code: at every key of every file stands a name that leaves a mark if it is looked up.

    python -m tests.fuzz.named_code             # every key and name; half an hour on one core
    python -m tests.fuzz.named_code --every 20  # one in 20

An audit hook sees what is imported, executed, opened and started meanwhile. It cannot be taken away again, so this is a
program of its own; `tests/fuzz/test_named_code.py` runs a part of it.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.fuzz.damaged_runs import algos, commands, make_runs
from textenv import RewardModel

CANARY = "canary_of_attacks"
"""Name of a module on the path, which nobody may import, execute or open."""
FILES = {
    "config.json": ("evaluate", "show", "doctor", "sample", "interpret"),
    "run.yaml": ("resume", "plan"),
    "policy/adapter_config.json": ("evaluate",),
    "policy/tokenizer_config.json": ("sample",),
    "policy/base/config.json": ("evaluate",),
    "state.json": ("resume",),
}
"""Commands that read a file; of checkpoints the newest one."""
MORE_KEYS = {
    "config.json": [("environment", "kwargs", name) for name in (
        "task", "reward", "tools", "allowed", "penalty", "tokenizer", "classifier", "prompts", "wrappers", "env_id",
        "vector_kwargs", "vectorization_mode", "process_timeout", "extract", "additional_wrappers", "entry_point",
    )] + [("environment", "module"), ("environment", "wrappers"), ("environment", "entry_point"), ("policy_class",)],
    "run.yaml": [("reward",), ("wrapper",), ("workers",), ("trust_remote_code",), ("env_kwargs", "reward"),
                 ("env_kwargs", "task"), ("policy_kwargs", "critic"), ("logger",), ("policy_class",)],
    "policy/adapter_config.json": [(name,) for name in (
        "megatron_core", "megatron_config", "tokenizer_kwargs", "tokenizer_name_or_path", "adapters", "auto_mapping",
        "eva_config", "corda_config", "loftq_config", "runtime_config", "arrow_config", "peft_type", "revision",
    )] + [("auto_mapping", "parent_library")],
    "policy/tokenizer_config.json": [("auto_map",), ("auto_map", "AutoTokenizer"), ("tokenizer_class",), ("backend",),
                                     ("tokenizer_file",), ("custom_tokenizer",)],
    "policy/base/config.json": [("auto_map",), ("auto_map", "AutoModelForCausalLM"), ("attn_implementation",),
                                ("quantization_config",), ("text_config", "auto_map"), ("model_type",)],
    "state.json": [],
}  # fmt: skip
"""Keys that a file need not have, by the end of its path."""


def values(home: Path) -> dict[str, object]:
    """What is named, by name."""
    file = home / f"{CANARY}.py"
    prompts = {"task": "Prompts", "prompts": ["a b"], "split": "train"}
    return {
        "a function of a module": f"{CANARY}:attack",
        "a function of a file": f"{file}:attack",
        "a module": CANARY,
        "a method": f"{CANARY}.attack",
        "a file": str(file),
        "functions": [f"{CANARY}:attack"],
        "a task with a reward": prompts | {"reward": f"{CANARY}:attack"},
        "a program": prompts | {"reward": "subprocess:Popen"},
        "an id with a module": f"{CANARY}:CartPole-v1",
        "a map to code": {"AutoConfig": f"{CANARY}.Attack", "AutoModelForCausalLM": f"{CANARY}.Attack"},
        "trust": {"trust_remote_code": True, "auto_map": {"AutoTokenizer": [None, f"{CANARY}.Attack"]}},
        "true": True,
        "Megatron": {"megatron_core": CANARY, "tensor_model_parallel_size": 1},
    }


def attacks(runs: dict[str, Path], home: Path) -> Iterator[tuple[str, str, list[str], str]]:
    """Yield a kind of run, a command, the file with its keys and its new content."""
    for kind, run in runs.items():
        for end, readers in FILES.items():
            paths = sorted(path for path in run.rglob("*") if str(path.relative_to(run)).endswith(end))
            paths = [run / end] if (run / end).is_file() else paths
            if not paths:
                continue
            path = paths[-1]
            text = path.read_text()
            tree = __import__("yaml").safe_load(text) if path.suffix == ".yaml" else json.loads(text)
            keys = [*_keys(tree), *MORE_KEYS[end]]
            for place in keys:
                for what, value in values(home).items():
                    changed = _with(tree, place, value)
                    if changed is None:
                        continue
                    name = f"{path.relative_to(run)} {'.'.join(map(str, place))}: {what}"
                    for command in readers:
                        if command in commands(kind, run):
                            yield kind, command, [str(path.relative_to(run)), name], json.dumps(changed)


def _keys(tree, before=()) -> Iterator[tuple]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:1]) if isinstance(tree, list) else ()
    for key, value in pairs:
        if len(before) < 5:
            yield (*before, key)
            yield from _keys(value, (*before, key))


def _with(tree, place, value):
    """A copy of a tree with another value at a place; None if there is no such place."""
    changed = copy.deepcopy(tree)
    owner = changed
    for key in place[:-1]:
        if isinstance(owner, dict) and key not in owner:
            owner[key] = {}
        owner = owner[key]
        if not isinstance(owner, (dict, list)):
            return None
    owner[place[-1]] = value
    return changed


class Watch:
    """Audit hook that remembers what must not happen while it is on."""

    def __init__(self, home: Path) -> None:
        self.home, self.seen, self.on = str(home), [], False
        self.known = {name.partition(".")[0] for name in sys.modules}
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.spawn"):
            if "git" not in str(arguments[:2]) and "/bin/uname" not in str(arguments):  # of `provenance`
                self.seen.append(f"{event} {arguments!r:.200}")
        elif event == "import":
            root = str(arguments[0]).partition(".")[0]
            if CANARY in str(arguments[0]) or (root not in self.known and root not in sys.stdlib_module_names):
                self.seen.append(f"{event} {arguments[0]}")
        elif event == "exec" or event == "compile":
            name = getattr(arguments[0], "co_filename", arguments[-1])
            if CANARY in str(name) or self.home in str(name):
                self.seen.append(f"{event} {name}")
        elif event == "open" and isinstance(arguments[0], str) and f"{CANARY}.py" in arguments[0]:
            self.seen.append(f"{event} {arguments[0]}")
        elif event == "socket.connect":
            self.seen.append(f"{event} {arguments[1:]!r:.200}")


def quiet_command(words: list[str]) -> str:
    """Run a command; return how it ended."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            algos(words)
        return ""
    except SystemExit:
        return err.getvalue()
    except Exception as error:  # what is damaged is another test's
        return repr(error)


def main() -> None:
    """Carry out the attacks, and print what they reached."""
    parser = argparse.ArgumentParser(description="Name code in every file of a run.")
    parser.add_argument("--every", type=int, default=1, help="carry out one in so many")
    parser.add_argument("--only", default="", help="carry out those whose name contains this text")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    reached = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        runs = make_runs(home / "runs")
        library = home / "library"
        library.mkdir()
        marker = home / "it-ran"
        touch = f"Path({str(marker)!r}).touch()"
        code = f"from pathlib import Path\n{touch}\ndef attack(*a, **b): {touch}\n"
        (library / f"{CANARY}.py").write_text(code)
        sys.path.insert(0, str(library))
        for run in runs.values():
            for path in run.rglob("*.json"):
                path.chmod(0o644)
            (run / ".made-here").unlink(missing_ok=True)  # somebody else's
        wanted = [attack for attack in attacks(runs, library) if chosen.only in attack[2][1]][:: chosen.every]
        for kind, command in dict.fromkeys((kind, command) for kind, command, *_ in wanted):
            quiet_command(commands(kind, runs[kind])[command])  # imports what the command needs
        RewardModel.load()
        watch = Watch(library)
        for kind, command, (name, what), content in wanted:
            scratch = home / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(runs[kind], scratch / kind)
            (scratch / kind / name).write_text(content)
            words = commands(kind, scratch / kind)[command]
            watch.seen, watch.on = [], True
            said = quiet_command(words)
            watch.on = False
            if watch.seen or marker.exists():
                reached += 1
                print(f"{kind} {command} {what}\n    {sorted({*watch.seen})} {said[-200:]!r}", flush=True)
                marker.unlink(missing_ok=True)
        print(f"{reached} of {len(wanted)} attacks reached something", flush=True)
    os.chdir("/")
    sys.exit(reached > 0)


if __name__ == "__main__":
    main()
