"""The live view: every label whole at 80 and 120 columns, lines where there is no terminal."""

import io
import re

import pytest
from rich.console import Console

from algos.training.live_view import CURVES, LiveView

CONFIG = {"algorithm": "PPO", "environment": "textenv/Prompts-v0"}
SAMPLE = {
    "steps": 0,
    "iteration": 1,
    "prompt": "The film was",
    "completion": " \x1b[31mgrand" * 40,
    "score": 0.5,
    "parts": {},
}


def shown(width, *, terminal):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    view = LiveView(1000, console)
    view.start(None, CONFIG, step=0)
    view.log({"samples": [SAMPLE]}, step=0)
    for step in range(100, 1100, 100):
        view.log({name: float(step) for name in CURVES} | {"steps": step}, step=step)
    view.close()
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_has_labels_curves_and_newest_sample(width):
    """Within its width."""
    text = shown(width, terminal=True)
    frame = text[text.rindex("╭") :].replace("\x1b[?25h", "")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).splitlines()
    assert max(map(len, lines)) == width
    for label in [*CURVES.values(), "PPO · textenv/Prompts-v0", "iteration 1, score 0.5", "The film was"]:
        assert any(label in line for line in lines), label
    assert sum("▁" in line and "█" in line for line in lines) == len(CURVES)
    assert "1,000 of 1,000 steps" in text and "film was…" not in text


def test_a_sample_cannot_control_the_terminal():
    assert "\x1b[31m" not in shown(80, terminal=True) and "\\x1b[31m" in shown(80, terminal=True)


def test_the_time_left_is_never_negative():
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    view = LiveView(1000, console)
    view.start(None, CONFIG, step=0)
    view.log({"steps": 1040, "episode/return": 1.0}, step=1040)
    assert "1,040 of 1,000 steps" in console.file.getvalue() and " 0:00 left" in console.file.getvalue()


def test_without_a_terminal_there_are_plain_lines():
    """For the first and the last iteration."""
    lines = shown(80, terminal=False).splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[0].startswith("100 of 1,000 steps") and lines[-1].startswith("1,000 of 1,000 steps")
    assert "return 1000" in lines[-1]
