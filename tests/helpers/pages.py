"""Runs the code of a page: its ``python`` blocks in one process, its ``sh`` blocks by a shell, from first to last.

    python -m tests.helpers.pages docs/tutorials/*.md     # and writes what they print into the page's ``text`` blocks

A block ``shell`` is only read.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import gymnasium
import pytest

import textenv  # noqa: F401  # its environments are registered before those of a page, which are forgotten
from tests.helpers.warm_start import folder_of_commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def with_code(paths):
    """Those pages that have code which a test can run, in alphabetical order."""
    return sorted(path for path in paths if "```python" in path.read_text() or "```sh\n" in path.read_text())


OF_RUNS = ["runs.md", "watching.md", "evaluating.md", "parallel.md"]
GUIDES = [*OF_RUNS, "rewards.md", "environments.md"]
# In three parts, which take about as long as one another: the suite gives each test file to one process
GUIDES_OF_RUNS = with_code(DOCS / name for name in OF_RUNS)
TUTORIALS = with_code([*DOCS.glob("tutorials/*.md"), *DOCS.glob("concepts/*.md")])
OTHERS = ("algorithms", "export", "distillation", "index", "kl", "rewards", "environments")
OTHER_PAGES = with_code([ROOT / "README.md", *DOCS.glob("from-[csv]*.md"), *(DOCS / f"{name}.md" for name in OTHERS)])
TRAINING = {
    "README", "algorithms", "from-cleanrl", "from-stable-baselines3", "conversation", "distillation", "same-world",
    "train-your-agent", "what-changed", "your-model-and-lora", *(name.removesuffix(".md") for name in GUIDES),
}  # fmt: skip
"""Pages that train for more than ten seconds; `make learning` runs them in full length."""
assert {page.stem for page in [*GUIDES_OF_RUNS, *TUTORIALS, *OTHER_PAGES]} >= TRAINING

BLOCK = re.compile(r"```(python|sh|text)\n(.*?)```\n", re.DOTALL)
LENGTH = re.compile(r"(\.learn\(\s*|--total-steps )([\d_]+)")
"""The number of steps of a training."""


def run(page, *, divide_steps_by=1, commands=Path(sys.executable).parent):
    """Run a page in a folder of its own; returns it with what was printed in its ``text`` blocks.

    Environments that it registers are forgotten afterwards.

    Args:
        page: path of the page.
        divide_steps_by: its trainings have the page's number of steps divided by this.
        commands: folder of the command ``algos``.
    """

    def shortened(length):
        return f"{length[1]}{int(length[2]) // divide_steps_by}"

    names, printed, parts, end = {"__name__": "__page__"}, "", [], 0
    text = page.read_text()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(gymnasium.registry),
    ):
        for block in BLOCK.finditer(text):
            kind = block[1]
            code = LENGTH.sub(shortened, block[2])
            if kind == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(code, f"{page.name}: {code.splitlines()[0]}", "exec"), names)  # noqa: S102
                printed = out.getvalue()
            elif kind == "sh":
                path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
                environment = os.environ | {"PATH": path, "COLUMNS": "120"}
                done = subprocess.run(["sh", "-ec", code], capture_output=True, text=True, env=environment)
                assert done.returncode == 0, f"{page.name}: {code}\n{done.stderr}"
                printed = done.stdout
            else:
                lines = [line.rstrip() for line in printed.splitlines()]
                parts += [text[end : block.start()], "```text\n", "\n".join(lines).strip("\n"), "\n```\n"]
                end = block.end()
    return "".join([*parts, text[end:]])


def lengths(pages):
    """Parameters of a test: each page, those that train long in a twentieth of the steps; in full too (slow)."""
    parameters = []
    for page in pages:
        divisor = 20 if page.stem in TRAINING else 1
        if page.stem == "conversation":  # it prints every quarter of its iterations
            divisor = 8
        parameters.append(pytest.param(page, divisor, id=page.stem))
    for page in pages:
        if page.stem in TRAINING:
            parameters.append(pytest.param(page, 1, id=f"{page.stem}-in-full", marks=pytest.mark.slow))
    return parameters


def check_code(page, *, divide_steps_by):
    """Run a page: each block prints something. What, is not compared, so that long trainings may have fewer steps."""
    text = run(page, divide_steps_by=divide_steps_by, commands=folder_of_commands())
    assert re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL) == re.sub(
        r"```text\n.*?```", "", page.read_text(), flags=re.DOTALL
    )
    assert "```text\n```" not in text


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        path.write_text(run(path))
        print(name)
