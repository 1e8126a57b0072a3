"""The pages: their code runs as it stands, that of metrics has them all, and the site is built without a warning."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers.pages import run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md"] + sorted(
    page
    for pattern in ("tutorials/*.md", "concepts/*.md", "from-[csv]*.md")
    for page in (ROOT / "docs").glob(pattern)
    if "```python" in page.read_text() or "```sh\n" in page.read_text()
)
METRIC = re.compile(
    r'"((?:advantage|policy|reference|rollout|text|time|tools|update|value|episode|reward)/[a-z_0-9]+)"'
)
NO_METRIC = {"policy/weights", "text/event"}


def test_the_page_of_metrics_has_every_metric():
    code = "".join(path.read_text() for folder in ("algos", "textenv") for path in ROOT.glob(f"{folder}/**/*.py"))
    page = (ROOT / "docs/metrics.md").read_text()
    missing = {name for name in METRIC.findall(code) if f"`{name}`" not in page} - NO_METRIC
    assert len(METRIC.findall(code)) > 40 and not missing


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_it_stands(page):
    text = run(page)
    assert re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL) == re.sub(
        r"```text\n.*?```", "", page.read_text(), flags=re.DOTALL
    )
    assert "```text\n```" not in text  # each says something


class Page(HTMLParser):
    """Links and anchors of a page of the site."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        self.anchors |= {names[key] for key in ("id", "name") if names.get(key)}
        if tag in ("a", "img", "link", "script"):
            self.links += [names[key] for key in ("href", "src") if names.get(key)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning(tmp_path):
    """And every link in it leads somewhere."""
    pytest.importorskip("sphinx", reason="install the extra: pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    pages = {path: Page(path) for path in tmp_path.glob("**/*.html") if "_static" not in path.parts}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or not (name or anchor):
                continue
            target = (path.parent / unquote(name).partition("?")[0]).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {anchor}
            if not target.exists() or (anchor and unquote(anchor) not in anchors):
                dead.append(f"{path.relative_to(tmp_path)}: {link}")
    assert len(pages) > 30 and not dead
    assert all(name in (tmp_path / "llms.txt").read_text() for name in ("metrics", "write-a-reward", "algorithms"))


def test_the_grpo_script_of_the_trl_page_runs(tmp_path, monkeypatch):
    """From top to bottom; both halves have the same prompts, rewards and numbers."""
    page = (ROOT / "docs/from-trl.md").read_text().partition("## A GRPO script")[2].partition("## TRL's settings")[0]
    theirs, ours = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "script"}
    with pytest.warns(UserWarning, match="k3"):
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
