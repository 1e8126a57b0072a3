"""The documentation site is built without a warning, and every link in it leads somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]


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
    for path in tmp_path.glob("reference/*.html"):
        assert " at 0x" not in path.read_text() and "Alias for field" not in path.read_text(), path
    assert all(name in (tmp_path / "llms.txt").read_text() for name in ("metrics", "write-a-reward", "algorithms"))
