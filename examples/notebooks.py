"""Make executed notebooks of three tutorials, with jupytext and nbclient, in examples/notebooks/.

python examples/notebooks.py                  # 2 minutes on one core
python examples/notebooks.py --check          # says whether each is still its tutorial
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"
INSTALL = """\
# On a notebook service: upload the wheel that `make dist` writes, then run this. Once installed, it does nothing.
import glob, importlib.util

if importlib.util.find_spec("textenv") is None:
    (wheel,) = glob.glob("textenv-*.whl")
    %pip install --quiet {wheel}"""
"""First cell of code of each notebook."""
TUTORIALS = ("write-a-reward", "swap-in-an-environment", "control-and-text")


def convert(name):
    """Notebook of a tutorial: its Python is in cells, its links lead to the pages; what it prints is left out."""
    import jupytext
    import nbformat

    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    text = re.sub(r"```text\n.*?```\n\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"```shell\n(.*?)```", lambda found: "```console\n" + found[1] + "```", text, flags=re.DOTALL)
    text = re.sub(r"\]\(\.\./([^)]*)\)", r"](../../docs/\1)", text)
    text = re.sub(r"\]\(([a-z-]+\.md)\)", r"](../../docs/tutorials/\1)", text)
    book = jupytext.reads(text, fmt="md")
    book.cells.insert(1, nbformat.v4.new_code_cell(INSTALL))
    for place, cell in enumerate(book.cells):
        cell["id"] = f"{name}-{place}"[:64]
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return book


def execute(book, folder):
    """Run a notebook's cells in a folder, in a kernel of this Python."""
    from nbclient import NotebookClient

    return NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()


def sources(book):
    return [(cell.cell_type, cell.source) for cell in book.cells]


def main(check=False):
    import tempfile

    import nbformat

    FOLDER.mkdir(exist_ok=True)
    for name in TUTORIALS:
        path = FOLDER / f"{name}.ipynb"
        if check:
            same = path.is_file() and sources(nbformat.read(path, as_version=4)) == sources(convert(name))
            print(
                f"{path.name}: {'as its tutorial' if same else 'older than its tutorial: python examples/notebooks.py'}"
            )
            continue
        with tempfile.TemporaryDirectory() as folder:
            book = execute(convert(name), folder)
        for cell in book.cells:
            cell.metadata.pop("execution", None)  # times
            if cell.cell_type == "code":  # without warnings about this machine
                cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        nbformat.write(book, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(check="--check" in sys.argv)
