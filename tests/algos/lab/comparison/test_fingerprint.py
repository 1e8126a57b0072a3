"""Code and files that change between two calls of `compare`: the settings alone do not show it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from algos import Case, PPOConfig
from algos.lab.comparison.fingerprint import changed_code, fingerprint
from algos.recipe import Recipe

ROOT = Path(__file__).parents[4]


class Slots:
    __slots__ = ("paid",)

    def __init__(self, paid):
        self.paid = paid

    def __call__(self, completions):
        return [self.paid] * len(completions)

    def score(self, completions):
        return self(completions)


paid = "a value of the module, with the name of the enclosed ones"


def paying(paid):
    return lambda completions: [paid] * len(completions)


def prints_of(reward, **arguments):
    env_kwargs = {"prompts": ["a film"], "reward": reward, **arguments}
    return fingerprint(Case("textenv/Prompts-v0", env_kwargs=env_kwargs).recipe)


TWO_REWARDS = {
    "a lambda": (lambda completions: [1.0] * len(completions), lambda completions: [2.0] * len(completions)),
    "an enclosed value": (paying(1.0), paying(2.0)),
    "an enclosed list": (paying([1.0, "a"]), paying([1.0, "b"])),
    "an enclosed set": (paying({"a"}), paying({"b"})),
    "an enclosed array": (paying(np.ones(3)), paying(np.zeros(3))),
    "slots": (Slots(1.0), Slots(2.0)),
    "a method": (Slots(1.0).score, Slots(2.0).score),
}


@pytest.mark.parametrize("kind", TWO_REWARDS)
def test_another_function_of_the_same_name_is_another(kind):
    first, second = TWO_REWARDS[kind]
    assert len(changed_code(prints_of(first), prints_of(second))) == 1
    assert changed_code(prints_of(first), prints_of(first)) == []


@pytest.mark.parametrize("field", ["policy_loss", "aggregation"])
def test_another_loss_is_another(field):
    losses = (lambda log_ratio, **_: -log_ratio, lambda log_ratio, **_: -2 * log_ratio)
    first, second = (fingerprint(Recipe(config=PPOConfig(**{field: loss}))) for loss in losses)
    assert changed_code(first, second) == [f"config.{field} has changed"]


REWARD = """
def helper(text):
    return {paid}

def score(completions):
    return [helper(text) for text in completions]
"""


def test_an_edited_file_is_another_reward(tmp_path):
    """That of a helper too; a comment, or another function of the file, is no change."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARD.format(paid=1.0))
    before = prints_of(f"{rewards}:score")
    rewards.write_text("# paid for each\n" + REWARD.format(paid=1.0) + "\ndef unused():\n    pass\n")
    assert changed_code(before, prints_of(f"{rewards}:score")) == []
    rewards.write_text(REWARD.format(paid=2.0))
    (change,) = changed_code(before, prints_of(f"{rewards}:score"))
    assert change == "env_kwargs.reward.helper has changed"
    weighted = prints_of([f"{rewards}:score=0.5"])
    rewards.write_text(REWARD.format(paid=3.0))
    assert changed_code(weighted, prints_of([f"{rewards}:score=0.5"])) == ["env_kwargs.reward.0.helper has changed"]


def test_an_edited_file_of_prompts_is_another(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a film\n")
    before = prints_of(len, prompts=str(prompts))
    prompts.write_text("a book\n")
    assert changed_code(before, prints_of(len, prompts=str(prompts))) == [f"{prompts} has changed"]


def test_prompts_name_no_code_and_long_ones_no_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "harmful.py").write_text("raise SystemExit('imported')\n")
    prints_of(len, prompts=["harmful:run", "x" * 10_000])
    assert "harmful" not in sys.modules


PROGRAM = """
import json
from algos.lab.comparison.fingerprint import fingerprint
from algos.recipe import Recipe

def score(completions):
    return [float(text in {"good", "fine", "great"}) for text in completions]

print(json.dumps(fingerprint(Recipe(env="textenv/Prompts-v0", env_kwargs={"reward": score}))))
"""


@pytest.mark.heavy
def test_equal_code_has_equal_prints_in_every_process():
    outputs = set()
    for seed in "12":
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1
