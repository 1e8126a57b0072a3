"""The shape of the code: one import direction, light control runs, small files."""

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from algos.config import CONFIGS

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("textenv/**/*.py"), *ROOT.glob("algos/**/*.py")])


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


LAYERS = {
    "textenv": """
        registration
        tasks checks programs gateway
        extras
        envs
        rewards kl
        lm
        prompts embedded games words
        rollout errors rendering progress acceleration device names foreign plain json_files loopback optional cache
        importing processes state sandbox console
    """,
    "algos": """
        cli
        lab
        presets recipe make evaluation
        extras
        ppo a2c reinforce reinforce_plus_plus rloo grpo trpo dqn sac td3
        agent
        minibatches replay agent_baseline agent_setup refills
        vine
        optimizer advantages importance finetuning
        training
        collection
        policies
        storage
        fast losses ranks config envs statistics
    """,
}
"""From the top: a room imports from its own line and those below."""


def imported_modules(path):
    """Our modules that a file imports anywhere, under TYPE_CHECKING and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from {inner if inner in MODULES else node.module} & MODULES.keys()


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.heavy
def test_textenv_never_imports_algos():
    for path in FILES:
        if path.is_relative_to(ROOT / "textenv"):
            assert not [name for name in imported_names(path) if name.split(".")[0] == "algos"], path


@pytest.mark.heavy
def test_no_files_import_each_other_in_a_circle():
    order = graphlib.TopologicalSorter({name: set(imported_modules(path)) - {name} for name, path in MODULES.items()})
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def rooms_of(package):
    """For each room of a package the rooms that it imports; a room is a folder or file at the top."""
    rooms = {}
    for name, path in MODULES.items():
        top, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        if top != package or room in ("", "__main__"):
            continue
        imported = [other for other in imported_modules(path) if other.startswith(f"{package}.")]
        rooms.setdefault(room, set()).update(other.split(".")[1] for other in imported)
    return {room: imported - {room} for room, imported in rooms.items()}


@pytest.mark.parametrize("package", LAYERS)
def test_rooms_import_only_from_below(package):
    levels = {room: level for level, line in enumerate(LAYERS[package].split("\n")) for room in line.split()}
    for room, imported in rooms_of(package).items():
        assert not [other for other in imported if levels[other] < levels[room]], room


@pytest.mark.parametrize("package", LAYERS)
def test_no_rooms_import_each_other_in_a_circle(package):
    try:
        graphlib.TopologicalSorter(rooms_of(package)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.heavy
def test_the_core_imports_neither_lab_nor_extras():
    for room, imported in rooms_of("algos").items():
        assert "lab" not in imported or room == "cli", room
        assert "extras" not in imported or room in ("cli", "lab"), room
    for room, imported in rooms_of("textenv").items():
        assert "extras" not in imported or room in ("tasks", "checks"), room


def test_a_folder_has_three_to_twenty_files():
    """The algorithms stand beside the core, one file each, and are not counted."""
    algorithms = {ROOT / "algos" / f"{name}.py" for name in CONFIGS}
    folders = Counter(path.parent for path in FILES if path not in algorithms)
    assert max(folders.values()) <= 20
    assert {folder.name for folder, count in folders.items() if count < 3} <= {"human"}


VAGUE = {
    "found", "said", "own", "given", "place", "whole", "known", "each", "other", "rest", "wanted", "taken", "before",
}  # fmt: skip
"""No names of locals, except in comprehensions."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def folded(path):
    """Lines of a file that hold more than one idea, and long functions whose phases have no name."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip()[0] == "#"}
    tree = ast.parse(text)
    inside = [x for x in ast.walk(tree) if isinstance(x, COMPREHENSIONS)]
    targets = {id(x) for comprehension in inside for part in comprehension.generators for x in ast.walk(part.target)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):  # a field may be named beside its counterpart, as before and after are
            targets |= {id(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in targets:
            if node.id in VAGUE:
                yield node.lineno, f"a local named {node.id}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Tuple):
                yield node.lineno, "several assignments"
        elif isinstance(node, ast.Call):
            if any(isinstance(x, ast.IfExp) for x in [*node.args, *(keyword.value for keyword in node.keywords)]):
                yield node.lineno, "a conditional expression inside a call"
        elif isinstance(node, ast.FunctionDef):
            body = node.body[bool(ast.get_docstring(node)) :]
            lines = range(body[0].lineno, node.end_lineno) if body else range(0)
            if len(lines) >= 20 and not comments & {*lines}:
                yield node.lineno, f"{node.name} is long and has no comment"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_one_idea_a_line(path):
    assert list(folded(path)) == []


MIRRORED = ("textenv", "algos")
"""Packages whose tests stand as its modules do: `tests/X/test_m.py` or `test_m_<aspect>.py` tests `X/m.py`."""


@pytest.mark.parametrize("package", MIRRORED)
def test_a_test_file_is_named_after_a_module(package):
    for path in ROOT.glob(f"tests/{package}/**/test_*.py"):
        modules = [module.stem for module in (ROOT / path.parent.relative_to(ROOT / "tests")).glob("*.py")]
        assert any(path.stem == f"test_{name}" or path.stem.startswith(f"test_{name}_") for name in modules), path


def test_tests_share_helpers_not_each_other():
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]:
        assert not re.findall(r"(?:from|import) tests\.[\w.]*\btest_\w*", path.read_text()), path


def test_every_row_of_the_pitfalls_names_its_tests():
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    table, _, lists = page.partition("## The tests")
    rows = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    sections = dict(re.findall(r"^\*\*(\d+)\*\*\n((?:\n?- .*\n?)*)", lists, re.MULTILINE))
    assert rows == list(sections) == [str(i + 1) for i in range(len(rows))]
    for row, section in sections.items():
        named = re.findall(r"^- `(tests/\S+\.py)::(test_\w+)`$", section, re.MULTILINE)
        assert named and len(named) == section.count("- "), f"row {row}"
        for path, name in named:
            if path.startswith("tests/algos/fast/") and not (ROOT / "algos" / "fast").is_dir():
                continue  # the fast paths may be deleted, with their tests
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"row {row}: {path}::{name}"


def test_there_is_not_a_word_about_text_in_ppo():
    words = (ROOT / "algos" / "ppo.py").read_text()
    names = {node.id for node in ast.walk(ast.parse(words)) if isinstance(node, ast.Name)}
    assert not names & {"isinstance", "tokenizer", "LMPolicy", "TextVectorEnv", "hasattr"}
    assert not [name for name in imported_names(ROOT / "algos" / "ppo.py") if ".lm" in name or "vector_env" in name]


@pytest.mark.heavy
def test_a_control_run_imports_nothing_heavy():
    program = """
import sys, gymnasium
from algos import PPO, MLPPolicy, PPOConfig
env = gymnasium.make_vec("CartPole-v1", num_envs=2)
policy = MLPPolicy(env.single_observation_space, env.single_action_space)
PPO(env, policy, PPOConfig(num_steps=8, minibatch_size=8)).learn(16)
heavy = [m for m in ("transformers", "torchrl", "matplotlib", "tensorboard", "tokenizers") if m in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_importing_textenv_loads_nothing_heavy():
    program = "import gymnasium, textenv, sys; gymnasium.spec('textenv/Reviews-v0'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_packages_are_those_of_the_checkout():
    import algos
    import textenv

    assert Path(algos.__file__).parent == ROOT / "algos" and Path(textenv.__file__).parent == ROOT / "textenv"


PATCHES = {
    "tests/algos/fast/test_closed_form.py": "that an edit or a patch of a function takes effect is what it tests",
    "tests/algos/fast/test_reading.py": "as test_closed_form.py",
    "tests/algos/fast/test_sampling.py": "as test_closed_form.py",
    "tests/helpers/chunks.py": "real chunks of logits hold 8 million numbers",
    "tests/helpers/ranks.py": "real chunks of gradients hold millions of numbers too",
}
"""Files that may patch our modules and use their private names, and why."""


def lines_behind_the_public_names(tree):
    """Lines of a test that patch something of ours or use a private name of ours."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = {alias.asname or alias.name.split(".")[0] for alias in node.names if not module}
            if module and module.split(".")[0] in LAYERS:
                names = {alias.asname or alias.name for alias in node.names}
                yield from (node.lineno for alias in node.names if alias.name.startswith("_"))
                ours |= names
            ours |= names & LAYERS.keys()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = ast.unparse(node.args[0]).strip("'\"*").split(".")[0].split("(")[0]
            if node.func.attr in ("setattr", "delattr", "setitem") and first in ours | LAYERS.keys():
                yield node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            uses_private = isinstance(node.ctx, ast.Store) or re.match("_[^_]", node.attr)
            if node.value.id in ours and uses_private:
                yield node.lineno


@pytest.mark.heavy
def test_tests_reach_our_code_by_its_public_names():
    for path in ROOT.glob("tests/**/*.py"):
        name = str(path.relative_to(ROOT))
        if name not in PATCHES:
            assert list(lines_behind_the_public_names(ast.parse(path.read_text()))) == [], name
