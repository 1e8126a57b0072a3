"""Record the digests of the functions that fast paths stand for, after both have been compared.

TEXTENV_FAST=0 python -m tests.helpers.digests     # writes into closed_form.py and beside every @accelerated
"""

import importlib
import inspect
import re
from pathlib import Path

from textenv import acceleration

ROOT = Path(__file__).parents[2]
CLOSED_FORM = ROOT / "algos" / "fast" / "closed_form.py"
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
    for path in {path for path, *_ in decorated()}:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = DECORATED.sub(lambda m, of=module: m[1] + plain_digest(of, m[4]) + m[3], path.read_text())
        path.write_text(text)
    text = CLOSED_FORM.read_text()
    for name in re.findall(r'^    "([\w.]+:[\w.]+)": "\w*",$', text, re.MULTILINE):
        importlib.import_module(name.partition(":")[0])
        text = re.sub(rf'("{re.escape(name)}": )"\w*"', rf'\1"{acceleration.digest(name)}"', text)
    CLOSED_FORM.write_text(text)


if __name__ == "__main__":
    assert not acceleration.FAST, "set TEXTENV_FAST=0, so that plain classes are there"
    record()
