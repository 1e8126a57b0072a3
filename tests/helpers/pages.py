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

BLOCK = re.compile(r"```(python|sh|text)\n(.*?)```\n", re.DOTALL)
LENGTH = re.compile(r"(\.learn\(|--total-steps )([\d_]+)")
"""The number of steps of a training."""


def run(page, *, divide_steps_by=1):
    """Run a page in a folder of its own; returns it with what was printed in its ``text`` blocks.

    Environments that it registers are forgotten afterwards.

    Args:
        page: path of the page.
        divide_steps_by: its trainings have the page's number of steps divided by this.
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
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
                environment = os.environ | {"PATH": path, "COLUMNS": "120"}
                done = subprocess.run(["sh", "-ec", code], capture_output=True, text=True, env=environment)
                assert done.returncode == 0, f"{page.name}: {code}\n{done.stderr}"
                printed = done.stdout
            else:
                lines = [line.rstrip() for line in printed.splitlines()]
                parts += [text[end : block.start()], "```text\n", "\n".join(lines).strip("\n"), "\n```\n"]
                end = block.end()
    return "".join([*parts, text[end:]])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        path.write_text(run(path))
        print(name)
