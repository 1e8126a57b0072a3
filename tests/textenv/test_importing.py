"""The user's files by name: they shadow nothing, find their neighbours at any time, and can be pickled."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from textenv import Rewards
from textenv.importing import load_function, read_module

SCORE = "def score(completions):\n    return [{} for _ in completions]\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def scores(path):
    return load_function(f"{path}:score")(["a"])


@pytest.mark.parametrize("name", ["math", "random", "json", "copy", "types", "numpy", "textenv"])
def test_a_file_hides_no_module_of_its_name(tmp_path, name):
    module = importlib.import_module(name)
    assert scores(write(tmp_path / f"{name}.py", SCORE.format(0.5))) == [0.5]
    assert importlib.import_module(name) is module


@pytest.mark.parametrize("name", ["colorsys", "wave"])  # those that nothing has imported yet
def test_standard_modules_stay_as_they_were(tmp_path, name):
    sys.modules.pop(name, None)
    scores(write(tmp_path / f"{name}.py", SCORE.format(1.0)))
    assert Path(importlib.import_module(name).__file__).parent == Path(importlib.__file__).parent.parent


def test_a_file_may_use_the_module_of_its_own_name(tmp_path):
    math = "from math import sqrt\nimport numpy\ndef score(completions):\n    return [sqrt(4.0) for _ in completions]\n"
    assert scores(write(tmp_path / "math.py", math)) == [2.0]
    numpy = "import numpy\ndef score(completions):\n    return [float(numpy.sqrt(4.0)) for _ in completions]\n"
    assert scores(write(tmp_path / "numpy.py", numpy)) == [2.0]


def test_a_neighbour_replaces_no_standard_module(tmp_path):
    write(tmp_path / "math.py", "sqrt = None\n")
    text = "def score(completions):\n    import math\n    return [math.sqrt(4.0) for _ in completions]\n"
    assert scores(write(tmp_path / "rewards.py", text)) == [2.0]


IMPORTS = {
    "name": "from found import VALUE",
    "module": "import found; VALUE = found.VALUE",
    "renamed": "import found as f; VALUE = f.VALUE",
    "package": "from inner.part import VALUE",
    "package by name": "import inner.part; VALUE = inner.part.VALUE",
    "package renamed": "import inner.part as part; VALUE = part.VALUE",
    "relative": "from .found import VALUE",
    "sibling": "from . import found; VALUE = found.VALUE",
    "folder": "from bare.part import VALUE",
    "string": "import importlib; VALUE = importlib.import_module('only_{0}').VALUE",
    "name of an installed package": "from rich import VALUE",
}


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("form", IMPORTS)
def test_neighbours_are_imported_at_any_time(tmp_path, form, when):
    loaded = {}
    for place in ("a", "b"):
        folder = tmp_path / place
        write(folder / "found.py", f"VALUE = '{place}'\n")
        write(folder / f"only_{place}.py", f"VALUE = '{place}'\n")
        write(folder / "rich.py", f"VALUE = '{place}'\n")
        write(folder / "inner" / "__init__.py", "")
        write(folder / "inner" / "part.py", "from found import VALUE\nfrom inner.deep import X\n")
        write(folder / "inner" / "deep.py", "from .other import X\n")
        write(folder / "inner" / "other.py", "X = 1\n")
        write(folder / "bare" / "part.py", "from found import VALUE\n")
        line = IMPORTS[form].format(place)
        body = f"def score(completions):\n    {line}\n    return [VALUE for _ in completions]\n"
        if when == "at once":
            body = f"{line}\ndef score(completions):\n    return [VALUE for _ in completions]\n"
        loaded[place] = load_function(f"{write(folder / 'rewards.py', body)}:score")
    assert [loaded[place](["?"]) for place in ("a", "b", "a")] == [["a"], ["b"], ["a"]]
    assert "found" not in sys.modules and not hasattr(importlib.import_module("rich"), "VALUE")


def test_an_imported_neighbour_is_not_imported_twice(tmp_path, monkeypatch):
    write(tmp_path / "shared_of_script.py", "class Error(Exception): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    script = importlib.import_module("shared_of_script")
    text = "from shared_of_script import Error\ndef score(completions):\n    raise Error\n"
    with pytest.raises(script.Error):
        scores(write(tmp_path / "rewards.py", text))


def test_a_file_named_in_a_string_runs_once(tmp_path):
    path = write(tmp_path / "named_by_string.py", SCORE.format(1.0))
    function = load_function(f"{path}:score")
    assert importlib.import_module("named_by_string").score is function
    assert pickle.loads(pickle.dumps(function)) is function


def test_two_files_of_one_name_are_pickled(tmp_path):
    functions = []
    for place in ("a", "b.c"):
        write(tmp_path / place / "found.py", f"VALUE = '{place}'\n")
        text = "def score(completions):\n    from found import VALUE\n    return [VALUE for _ in completions]\n"
        functions.append(load_function(f"{write(tmp_path / place / 'my rewards.v2.py', text)}:score"))
    assert pickle.loads(pickle.dumps(functions)) == functions
    program = "import pickle, sys; print([f(['?']) for f in pickle.load(sys.stdin.buffer)])"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(functions), capture_output=True)
    assert done.stdout.decode().strip() == "[['a'], ['b.c']]", done.stderr


def test_two_files_of_one_name_run_in_processes(tmp_path):
    functions = {}
    for place, value in {"a": 1.0, "b": 2.0}.items():
        write(tmp_path / place / "found.py", f"VALUE = {value}\n")
        text = "def score(completions):\n    from found import VALUE\n    return [VALUE for _ in completions]\n"
        functions[place] = load_function(f"{write(tmp_path / place / 'rewards.py', text)}:score")
    rewards = Rewards(functions, processes=True)
    assert rewards(prompts=["?"], completions=["4"]).parts == {"a": [1.0], "b": [2.0]}


def test_only_an_edited_file_is_read_again(tmp_path):
    path = write(tmp_path / "rewards.py", SCORE.format(0.5))
    first = load_function(f"{path}:score")
    assert load_function(f"{path}:score") is first
    path.write_text(SCORE.format(0.7))  # as long, within a second
    assert scores(path) == [0.7] and first(["a"]) == [0.5]


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "1/0", "import nowhere_at_all", "def ("])
def test_a_file_that_fails_says_so_each_time(tmp_path, text):
    path = write(tmp_path / "rewards.py", text)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rewards.py could not be imported: \w+"):
            load_function(f"{path}:score")


def test_local_modules_go_before_installed_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("this_is_local", None)
    write(tmp_path / "beside_local.py", "VALUE = 3\n")
    text = "from beside_local import VALUE\ndef late():\n    import beside_local\n    return beside_local.VALUE\n"
    write(tmp_path / "this_is_local.py", text)
    module = read_module("this_is_local")
    monkeypatch.chdir("/")
    assert module.late() == module.VALUE == 3 and importlib.import_module("this_is_local") is module


def test_no_other_local_file_shadows_a_module(tmp_path, monkeypatch):
    """Only the module that is named may come from the current folder."""
    write(tmp_path / "colorsys.py", "raise RuntimeError\n")
    write(tmp_path / "needs_colorsys.py", "import colorsys\nVALUE = colorsys.rgb_to_hls(1, 1, 1)\n")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("colorsys", None)
    assert read_module("needs_colorsys").VALUE


def test_ambiguous_module_names_are_refused(tmp_path, monkeypatch):
    for place in ("a", "b"):
        write(tmp_path / place / "twice_here.py", f"VALUE = '{place}'\n")
    monkeypatch.chdir(tmp_path / "a")
    assert read_module("twice_here").VALUE == "a"
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ValueError, match=r"imported from .*/a/twice_here.py before, so .*/b/twice_here.py cannot be"):
        read_module("twice_here")
    write(tmp_path / "b" / "math.py", SCORE.format(1.0))
    with pytest.raises(ValueError, match=r"math is a module of the standard library, .* math.py:FUNCTION"):
        load_function("math:score")


def test_the_own_name_of_a_file_is_no_name_for_it(tmp_path):
    name = load_function(f"{write(tmp_path / 'rewards.py', SCORE.format(1.0))}:score").__module__
    with pytest.raises(ValueError, match=r"expected a name such as package.module"):
        load_function(f"{name}:score")
