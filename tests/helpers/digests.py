"""Record the digests of the functions that fast paths stand for, if both compute the same.

TEXTENV_FAST=0 python -m tests.helpers.digests     # writes into algos/fast and beside every @accelerated

Then the tests that compare fast paths with plain functions run, for some minutes. If one fails, the former digests come
back: the fast path must be edited like the plain function first.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from textenv import acceleration

ROOT = Path(__file__).parents[2]
FAST = ROOT / "algos" / "fast"
COMPARISONS = ("tests/algos/fast", "tests/integration/test_fast_paths.py", "tests/textenv/lm/test_recording.py")
"""Tests that compare fast paths with plain functions."""
DECORATED = re.compile(r'(@accelerated\("[\w.:]+", ")(\w*)("\)\n(?:@.*\n)*(?:def|class) (\w+))')


def decorated():
    """Path, module, name and recorded digest of every decorated function or class."""
    for path in sorted([*ROOT.glob("algos/**/*.py"), *ROOT.glob("textenv/**/*.py")]):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for match in DECORATED.finditer(path.read_text()):
            yield path, module, match[4], match[2]


def plain_digest(module, name):
    """Digest of a decorated function or class; of a class only with ``TEXTENV_FAST=0``."""
    importlib.import_module(module)
    return acceleration.syntax_digest(inspect.unwrap(acceleration.find(f"{module}:{name}")))


def record():
    """Write the digests of the plain functions as they are; return the files that changed, with their former text."""
    former_texts = {}
    for path in {path for path, *_ in decorated()}:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = DECORATED.sub(lambda m, of=module: m[1] + plain_digest(of, m[4]) + m[3], path.read_text())
        former_texts[path] = path.read_text()
        path.write_text(text)
    for path in FAST.glob("*.py"):
        text = path.read_text()
        former_texts.setdefault(path, text)
        for name in re.findall(r'^    "([\w.]+:[\w.]+)": "\w*",$', text, re.MULTILINE):
            importlib.import_module(name.partition(":")[0])
            text = re.sub(rf'("{re.escape(name)}": )"\w*"', rf'\1"{acceleration.digest(name)}"', text)
        path.write_text(text)
    return {path: former for path, former in former_texts.items() if path.read_text() != former}


def main():
    assert not acceleration.FAST, "set TEXTENV_FAST=0, so that plain classes are there"
    former_texts = record()
    if not former_texts:
        return "all digests are as they were"
    environment = {name: value for name, value in os.environ.items() if name != "TEXTENV_FAST"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *COMPARISONS]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode == 0:
        return "recorded: " + ", ".join(str(path.relative_to(ROOT)) for path in former_texts)
    for path, former in former_texts.items():
        path.write_text(former)
    sys.exit("nothing is recorded, because a fast path differs from its plain function: edit it too, or remove it")


if __name__ == "__main__":
    print(main())
