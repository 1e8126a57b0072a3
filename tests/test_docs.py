"""The page of metrics has them all, names and paths in pages exist, and the reference has each public name."""

import pkgutil
import re
from pathlib import Path

import pytest

import algos
import textenv

ROOT = Path(__file__).parent.parent
NAMING = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md")))
    if page.name != "CHANGELOG.md" and re.search(r"`(?:algos|textenv)\.\w", page.read_text())
]
ONLY_READ = re.compile(r"^```(shell|py|bash)$", re.MULTILINE)
SAYS_WHY = re.compile(r"\bCI\b|\b[Tt]ests? runs?\b")
WITH_CODE_TO_READ = [
    page
    for page in sorted((ROOT / "docs").glob("**/*.md"))
    if page.parent.name != "results" and ONLY_READ.search(page.read_text())  # results are measured, not run in CI
]
METRIC = re.compile(
    r'"((?:advantage|policy|reference|rollout|text|time|tools|update|value|episode|reward)/[a-z_0-9]+)"'
)
NO_METRIC = {"policy/weights", "text/event"}


def test_the_page_of_metrics_has_every_metric():
    code = "".join(path.read_text() for folder in ("algos", "textenv") for path in ROOT.glob(f"{folder}/**/*.py"))
    page = (ROOT / "docs/metrics.md").read_text()
    missing = {name for name in METRIC.findall(code) if f"`{name}`" not in page} - NO_METRIC
    assert len(METRIC.findall(code)) > 40 and not missing


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_paths_that_pages_name_exist(page):
    text = (ROOT / page).read_text()
    paths = re.findall(r"`([\w./-]+/|[\w./-]+\.(?:py|toml|txt))`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    if not (ROOT / "algos" / "fast").is_dir():  # the fast paths may be deleted
        missing = [path for path in missing if "algos/fast/" not in path]
    assert len(paths) > 8 and not missing


def test_modules_of_the_table_of_rooms_exist():
    """Each word in quotes, written in small letters, is a module or a folder of its row's room."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| room | contents |")[2].partition("\n\n")[0]
    missing, count = [], 0
    for line in table.splitlines():
        rooms, _, contents = line.strip("| ").partition(" | ")
        folders = [ROOT / room for room in re.findall(r"`([a-z]+/(?:[a-z]+/)?)(?:[a-z]+\.py)?`", rooms)]
        for word in re.findall(r"`([a-z]\w+)`", contents):
            count += 1
            if not any((folder / word).is_dir() or (folder / f"{word}.py").is_file() for folder in folders):
                missing.append((rooms, word))
    assert count > 30 and not missing


@pytest.mark.parametrize("page, title", [
    ("CONTRIBUTING.md", "## Where to look"), ("docs/concepts/invariants.md", "## A ratio that is not 1"),
])  # fmt: skip
def test_the_functions_on_the_way_of_a_number_exist(page, title):
    section = (ROOT / page).read_text().partition(title)[2].partition("\n## ")[0]
    section = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    code = "".join(path.read_text() for folder in ("algos", "textenv") for path in ROOT.glob(f"{folder}/**/*.py"))
    names = [path.rpartition(".")[2] for path in re.findall(r"`(\w+(?:\.\w+)?)`", section)]
    defined = r"(?:def |class |self\.|import |^    |^)NAME\b(?:\(|:| =|$)"
    assert len(names) > 4
    assert not [name for name in names if not re.search(defined.replace("NAME", name), code, re.MULTILINE)]


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.stem)
def test_every_name_with_its_module_exists(page):
    for path in re.findall(r"`((?:algos|textenv)(?:\.\w+)+)", page.read_text()):
        pkgutil.resolve_name(path)


@pytest.mark.parametrize("page", WITH_CODE_TO_READ, ids=lambda page: page.stem)
def test_code_that_no_test_runs_says_why(page):
    """Pages run ``python`` and ``sh``; code in another language, or the paragraph next to it, says what tests run."""
    parts = re.split(r"(```\w+\n.*?\n```\n)", page.read_text(), flags=re.DOTALL)
    unexplained = []
    for number in range(1, len(parts), 2):
        paragraph = parts[number - 1].strip().rpartition("\n\n")[2]
        following = parts[number + 1].strip().partition("\n\n")[0]
        if ONLY_READ.search(parts[number]) and not SAYS_WHY.search(paragraph + parts[number] + following):
            unexplained.append(parts[number])
    assert not unexplained


@pytest.mark.heavy
def test_the_later_code_of_the_page_for_trl_runs(tmp_path, monkeypatch):
    """Each section's code by itself, from its imports on."""
    page = (ROOT / "docs/from-trl.md").read_text().partition("## TRL's settings as presets")[2]
    presets, loop, own_loss = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for code in (presets, loop.replace("range(100)", "range(2)")):
        names = {"__name__": "script"}
        exec(compile(code, "docs/from-trl.md", "exec"), names)
    exec(compile(own_loss, "docs/from-trl.md", "exec"), {})
    assert names["metrics"]["reward/score"] == pytest.approx(sum(names["scores"]) / len(names["scores"]))


@pytest.mark.heavy
def test_the_grpo_script_of_the_trl_page_runs(tmp_path, monkeypatch):
    """From top to bottom; both halves have the same prompts, rewards and numbers."""
    page = (ROOT / "docs/from-trl.md").read_text().partition("## A GRPO script")[2].partition("## TRL's settings")[0]
    theirs, ours = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "script"}
    exec(compile(ours, "docs/from-trl.md", "exec"), names)
    assert (tmp_path / "runs/grpo/config.json").is_file()
    config = names["agent"].config
    for trl, value in {
        "num_generations": config.group_size, "per_device_train_batch_size": config.minibatch_size, "beta": 0.04,
        "learning_rate": config.learning_rate, "max_completion_length": 24, "seed": config.seed,
    }.items():  # fmt: skip
        (written,) = re.findall(rf"\b{trl}=([\d.e-]+)", theirs)
        assert float(written) == value, trl
    assert names["env"].task.rewards.functions["short"][1] == 0.2


def reference_pages():
    return "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))


def test_the_reference_shows_only_what_it_names():
    """A module's page lists its members, so a new helper is not public by accident."""
    modules = re.findall(r"automodule:: ([\w.]+)\n(?:   :members:(.*)\n)?", reference_pages())
    assert [module for module, members in modules if not members.strip()] == ["textenv.rewards"]  # its parts follow
    for module, members in modules:
        for name in filter(None, members.strip().split(", ")):
            assert not name.startswith("_") and hasattr(pkgutil.resolve_name(module), name), f"{module}.{name}"


def test_the_page_of_public_names_has_each_once():
    rows = (ROOT / "docs" / "reference" / "names.md").read_text()
    targets = re.findall(r"\{py:obj\}`(\w+) <([\w.]+)>`", rows)
    public = {name: package for package in (algos, textenv) for name in package.__all__}
    assert sorted(public) == sorted(name for name, _ in targets)
    assert f"These {len(public)} names" in rows
    for name, path in targets:
        assert pkgutil.resolve_name(path) is getattr(public[name], name), path


def test_the_reference_has_every_public_name():
    modules = re.findall(r"automodule:: ([\w.]+)", reference_pages())
    data = re.findall(r"autodata:: ([\w.]+)", reference_pages())
    for _, path in re.findall(r"\{py:obj\}`(\w+) <([\w.]+)>`", reference_pages()):
        if path in modules + data:
            continue
        named = pkgutil.resolve_name(path)
        assert named.__doc__
        assert path.rpartition(".")[0] == named.__module__  # the page of a module has what is defined there
        assert named.__module__ in modules
