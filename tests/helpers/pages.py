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

BLOCK = re.compile(r"```(python|sh|text)\n(.*?)```\n", re.DOTALL)


def run(page):
    """Run a page in a folder of its own; returns it with what was printed in its ``text`` blocks."""
    names, printed, parts, end = {"__name__": "__page__"}, "", [], 0
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in BLOCK.finditer(text):
            kind, code = block.groups()
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
