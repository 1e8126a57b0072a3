"""CPU seconds of imports and of a first iteration, each in a fresh process, in turn with what they need at least."""

import subprocess
import sys
import tempfile
from resource import RUSAGE_CHILDREN, getrusage

from alternation import row

FIRST = """
from algos.cli import main
main(["train", "CartPole-v1", "--total-steps", "1", "--run-dir", "run", "--overwrite"])
"""
CASES = {
    "import textenv": ("import textenv", "import gymnasium"),
    "import algos": ("import algos", "import gymnasium"),
    "algos train CartPole-v1, first iteration": (FIRST, "import torch, tensordict, gymnasium"),
}
"""Of each case, what is run and what it is compared with."""


def startup(*, seeds, chosen):
    """Rows of the table; ``seeds`` is the number of pairs."""
    rows = []
    for case, codes in CASES.items():
        if chosen(case):
            seconds = [[spent(code) for code in codes] for _ in range(seeds + 1)][1:]  # the first reads the files
            ours, least = zip(*seconds, strict=True)
            rows.append(row("startup", case, unit="s", peer_name=codes[1], ours=ours, peer=least))
    return rows


def spent(code):
    """CPU seconds of a process that runs this."""
    with tempfile.TemporaryDirectory() as folder:
        before = getrusage(RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=folder)
        after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
