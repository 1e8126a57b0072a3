"""Fast paths can be switched off, and a checkpoint resumes with and without them."""

import importlib
import inspect
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from gymnasium import spaces

from algos import MLPPolicy
from algos.policies import distributions, policy, towers, twin_critics
from tests.helpers.warm_start import folder_of_commands
from textenv.acceleration import FAST, syntax_digest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "algos" / "fast").is_dir(), reason="the fast paths are deleted")
TRAIN = (
    "train CartPole-v1 --num-envs 4 --seed 1 --config.num-steps 32 --config.num-epochs 1 --checkpoint-every 1 "
    "--num-episodes 1"
)


def train(run_dir, steps, *, fast):
    """Rows of the log of a run that starts or goes on, in a process of its own."""
    environment = os.environ | {"TEXTENV_FAST": str(int(fast)), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = str(run_dir)
    command = [f"{folder_of_commands()}/algos", *TRAIN.split(), "--run-dir", folder, "--resume", folder]
    subprocess.run([*command, "--total-steps", str(steps)], env=environment, check=True, capture_output=True)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.heavy
def test_a_checkpoint_resumes_under_the_other_setting(tmp_path):
    runs = []
    for fast in (True, False):
        begun = train(tmp_path / f"run{fast}", 200, fast=fast)
        resumed = train(tmp_path / f"run{fast}", 450, fast=not fast)
        assert bool(begun[0]["update/path"]) is fast and "update/path" not in begun[1]
        assert len(resumed) == 4 and resumed[:2] == begun
        runs.append(resumed)
    for row, other in zip(*runs, strict=True):
        for name in ("policy/loss", "value/loss", "policy/entropy", "update/grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=2e-3, abs=1e-4)


def tower(outputs):
    return towers.tower(5, (16, 16), outputs, gain=1.0, generator=torch.Generator().manual_seed(outputs))


def clipped_steps(adam):
    """Weights after three steps with long gradients."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = adam([{"params": [weight]}], lr=0.1, eps=1e-5, weight_decay=0.0, fused=True)
    for scale in (1.0, 10.0, 0.01):
        weight.grad = scale * torch.arange(4.0)
        optimizer.clip_grad_norm_(0.5, [0])
        optimizer.step()
    return weight.detach()


class PlainAdam(torch.optim.AdamW):
    def clip_grad_norm_(self, max_norm, groups):
        return torch.nn.utils.clip_grad_norm_(
            [p for group in groups for p in self.param_groups[group]["params"]], max_norm
        )


def values_and_gradient(twin_values):
    """Values of two critics for three rows, and the gradients of rows, weights and biases, one after another."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 5, 8), (2, 8, 8), (2, 8)], [(2, 1, 8), (2, 1, 8), (2, 1)]
    rows = OBSERVATION.clone().requires_grad_()
    weights, biases = ([torch.randn(size, generator=generator).requires_grad_() for size in group] for group in sizes)
    values = twin_values(rows, weights, biases)
    gradients = torch.autograd.grad(values.square().sum(), [rows, *weights, *biases])
    return torch.cat([part.flatten() for part in (values.detach(), *gradients)])


def drawn_gaussian(draw):
    distribution = distributions.Gaussian(spaces.Box(-1, 1, (5,)))
    distribution.log_std.data.copy_(OBSERVATION[0])
    action, log_prob = draw(distribution, OBSERVATION, OBSERVATION.flip(0))
    return torch.cat([action, log_prob[:, None]], dim=1)


def normalizing_policy():
    """A policy whose normalizer clips one number."""
    result = MLPPolicy(spaces.Box(-2, 2, (5,)), spaces.Discrete(2), normalize_observations=True)
    result.normalizer.add(OBSERVATION)
    result.normalizer.variance[2] = 1e-6
    return result


OBSERVATION = torch.linspace(-2, 2, 15).reshape(3, 5)
CASES = {
    "towers:act": (towers.act, lambda function: function(OBSERVATION.numpy(), tower(2))),
    "towers:value": (towers.value, torch.no_grad()(lambda function: function(OBSERVATION, tower(1)))),
    "towers:actor_and_critic": (
        towers.actor_and_critic, lambda function: function(OBSERVATION, tower(2), tower(1))
    ),
    "sampling:draw": (
        distributions.draw, lambda function: function(OBSERVATION, torch.Generator().manual_seed(1), False)
    ),
    "sampling:draw_gaussian": (distributions.draw_gaussian, drawn_gaussian),
    "reading:read_array": (
        policy.read_array, lambda function: torch.from_numpy(function(normalizing_policy(), OBSERVATION.numpy()))
    ),
    "adam:Adam": (PlainAdam, clipped_steps),
    "critics:twin_values": (twin_critics.twin_values, values_and_gradient),
}  # fmt: skip


@pytest.mark.parametrize("path", CASES)
def test_every_fast_path_equals_its_plain_form(path):
    plain, result = CASES[path]
    fast = resolve_name(f"algos.fast.{path}")
    if not isinstance(plain, type):
        plain = inspect.unwrap(plain)
        fast = partial(fast, plain)
    torch.testing.assert_close(result(fast), result(plain), atol=1e-5, rtol=1e-5)


def test_every_fast_path_is_named_at_its_plain_form():
    """And nothing else of ours is imported by `algos.fast` or imports it; PPO asks for its `closed_form`."""
    sources = {path: path.read_text() for room in ("algos", "textenv") for path in (ROOT / room).rglob("*.py")}
    named = re.findall(r'@accelerated\("algos\.fast\.(\w+):(\w+)", "\w{12}"\)', "".join(sources.values()))
    assert {":".join(one) for one in named} == set(CASES)
    for module, name in named:
        assert re.search(rf"^(def|class) {name}\(", sources[ROOT / "algos" / "fast" / f"{module}.py"], re.MULTILINE)
    for path, source in sources.items():
        inside = path.parent == ROOT / "algos" / "fast"
        ours = r"^\s*(from|import) (algos(?!\.fast\.)|textenv(?!\.acceleration))"
        forbidden = ours if inside else r"^\s*(from|import) algos\.fast"
        assert not re.search(forbidden, source, re.MULTILINE), path


PLAIN = """
from textenv.acceleration import accelerated

@accelerated("fast_of_this_test:double", "{digest}")
def double(x):
    {body}
"""


@pytest.mark.skipif(not FAST, reason="fast paths are off")
def test_a_plain_function_that_was_edited_runs_itself(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fast_of_this_test.py").write_text("def double(plain, x):\n    return 'fast'\n")
    (tmp_path / "undecorated_of_this_test.py").write_text("def double(x):\n    return 2 * x\n")
    digest = syntax_digest(importlib.import_module("undecorated_of_this_test").double)
    for number, (body, expected) in enumerate({"return 2 * x  # twice": "fast", "return 2.5 * x": 5.0}.items()):
        (tmp_path / f"plain_{number}_of_this_test.py").write_text(PLAIN.format(digest=digest, body=body))
        module = importlib.import_module(f"plain_{number}_of_this_test")
        assert module.double(2) == expected
    assert [line.getMessage().partition(" was edited")[0] for line in caplog.records] == ["plain_1_of_this_test:double"]
