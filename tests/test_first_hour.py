"""The checklist of docs/gpu.md: that each line finds what it is there to find. No GPU is needed."""

import re
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import gymnasium
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples/benchmarks"))

import first_hour  # noqa: E402
import gpu_checks  # noqa: E402
import waits  # noqa: E402
from first_hour import Line  # noqa: E402
from waits import CountedOperations, Named, Waits  # noqa: E402

from algos import DQN  # noqa: E402
from tests.helpers import forks  # noqa: E402

LIBRARY_FUNCTION = """
def loop(rows):
    for row in rows:
        row.sum().item()

def warned(count):
    for _ in range(count):
        torch._C._warn()
"""
"""Functions that wait in every iteration."""


@pytest.fixture
def planted():
    """The functions of `LIBRARY_FUNCTION`, as if they stood in a file of the library."""
    names = {"torch": torch}
    exec(compile(LIBRARY_FUNCTION, str(ROOT / "algos" / "planted.py"), "exec"), names)
    return Namespace(**names)


# Devices


@pytest.fixture(scope="module")
def trained():
    agent = gpu_checks.text_agent("cpu")
    agent.learn(64)
    return agent


def test_every_tensor_of_an_agent_is_found(trained):
    found = {id(tensor) for _, tensor in gpu_checks.named_tensors(trained)}
    states = [x for state in trained.optimizer.adam.state.values() for x in state.values()]
    reference = trained.penalty.reference
    layers = trained.policy.decoder.cache.layers
    tensors = [
        *trained.policy.parameters(), *trained.policy.buffers(), *states, *reference.parameters(),
        *(x for layer in layers for x in vars(layer).values() if isinstance(x, torch.Tensor)),
    ]  # fmt: skip
    assert len(states) >= 3 * len([*trained.policy.parameters()])
    assert len(layers) == 2
    assert {id(x) for x in tensors} <= found


def test_critic_and_replay_buffer_are_found():
    agent = gpu_checks.text_agent("cpu", with_critic=True)
    names = [name for name, _ in gpu_checks.named_tensors(agent)]
    assert any(name.startswith("policy.critic.trunk.") for name in names)
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    dqn = DQN(env, device="cpu", learning_starts=8, batch_size=4)
    dqn.learn(16)
    names = [name for name, _ in gpu_checks.named_tensors(dqn)]
    assert any(name.startswith("buffer.") for name in names)
    assert any(name.startswith("target.network.") for name in names)


def test_a_tensor_on_another_device_is_named(trained):
    wrong = gpu_checks.misplaced(gpu_checks.named_tensors(trained), "cpu")
    assert not wrong
    state = next(iter(trained.optimizer.adam.state.values()))
    kept = state["exp_avg"]
    state["exp_avg"] = kept.to("meta")
    trained.policy.planted = torch.zeros(1, device="meta")  # an attribute, and no buffer
    try:
        wrong = gpu_checks.misplaced(gpu_checks.named_tensors(trained), "cpu")
    finally:
        state["exp_avg"] = kept
        del trained.policy.planted
    assert len(wrong) == 2
    assert "policy.planted is on meta" in wrong
    assert any(".exp_avg is on meta" in sentence for sentence in wrong)


def test_parts_that_belong_on_the_cpu_are_no_failure():
    tensors = [("collector.action_mask", torch.zeros(1)), ("policy.head", torch.zeros(1))]
    assert gpu_checks.misplaced(tensors, "meta") == ["policy.head is on cpu"]


# Waits


def test_a_wait_in_a_loop_is_found_and_named(planted):
    counted = Waits()
    with CountedOperations(counted, "cpu"):
        planted.loop(torch.zeros(5, 2))
    assert counted.counts == {"algos/planted.py:loop": 5}
    (sentence,) = waits.judged(counted, {}, 5)
    assert sentence == "algos/planted.py:loop waits 5 times in 5 iterations and is not named"
    assert waits.judged(counted, {"algos/planted.py:loop": Named("", once=4)}, 5)
    assert not waits.judged(counted, {"algos/planted.py:loop": Named("", each=1)}, 5)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
    ],
)
def test_operations_that_wait_on_cuda_are_counted(operation):
    counted = Waits()
    with CountedOperations(counted, "cpu"):
        operation(torch.ones(3))
    assert counted.counts.total() == 1


def test_arithmetic_does_not_wait():
    counted = Waits()
    with CountedOperations(counted, "cpu"):
        (torch.ones(3, 3) @ torch.ones(3, 3)).sum().sqrt()
    assert not counted.counts


@pytest.fixture
def sync_modes(monkeypatch):
    """Values given to `torch.cuda.set_sync_debug_mode`, which needs CUDA."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_each_warning_of_torch_is_counted(monkeypatch, planted, sync_modes):
    """A warning that torch raises in C++, at one line, five times: its text alone is not that of CUDA."""
    monkeypatch.setattr(waits, "CUDA_WAITS", "Test message for TORCH_WARN")
    counted = Waits()
    with waits.counted_on_cuda(counted):
        planted.warned(5)
    assert counted.counts == {"algos/planted.py:warned": 5}
    assert sync_modes == ["warn", "default"]


def test_other_warnings_are_shown_and_not_counted(sync_modes):
    counted = Waits()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with waits.counted_on_cuda(counted):
            warnings.warn("something else", stacklevel=1)
            warnings.warn(f"{waits.CUDA_WAITS} (Triggered internally at CUDAFunctions.cpp:148.)", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["something else"]
    assert counted.counts == {"outside the library": 1}


@pytest.mark.long
@pytest.mark.parametrize("name", ["token", "update", "control", "control-update", "devices"])
def test_loops_wait_no_more_than_named_on_the_simulated_device(name):
    assert "RESULT" in forks.run(gpu_checks.main, name, "second").stdout


# The report


def printing(text, *, status=0):
    """Command of a line that prints this and exits with this status."""
    return lambda options: ["-c", f"import sys; print({text!r}); sys.exit({status})"]


def read(output, options):
    return output.splitlines()[-1], {}


@pytest.mark.heavy
def test_a_failed_line_is_named_with_what_to_do(tmp_path):
    options = Namespace(device="cpu")
    lines = [
        Line("breaks", "mend it", printing("ValueError: no such kernel", status=3), read),
        Line("hangs", "wait", lambda options: ["-c", "import time; time.sleep(60)"], read, minutes=0.02),
        Line("misread", "ask", printing("nothing of use"), first_hour.read_check),
        Line("graphs", "", printing(""), read, only_cuda=True),
        Line("works", "", printing("12 steps/s"), read),
    ]
    results = [first_hour.run(line, options, tmp_path) for line in lines]
    assert [result.status for result in results] == ["FAILED", "FAILED", "FAILED", "needs CUDA", "OK"]
    assert [result.figure for result in results][:2] == ["ValueError: no such kernel", "not done after 0.02 minutes"]
    assert results[0].advice.startswith("mend it; send ")
    assert "breaks.log" in results[0].advice
    assert results[-1].figure == "12 steps/s"
    assert not results[-1].advice


def test_waits_that_only_cpp_prints_are_a_failure():
    output = 'called a synchronizing CUDA operation\nRESULT {"figure": "1.0 waits"}'
    with pytest.raises(first_hour.CheckError, match=r"^1 waits inside operations written in C\+\+"):
        first_hour.read_waits(output, Namespace(device="cuda"))


def test_memory_outside_the_tolerance_is_a_failure():
    table = "| run | estimate / measured |\n| --- | --- |\n| A | 1.01 |\n| B | {} |"
    figure, _ = first_hour.read_memory(table.format("0.90"), Namespace(device="cuda"))
    assert figure == "estimate / measured 0.90 to 1.01 in 2 runs"
    for ratio in ("0.80", "1.40"):
        with pytest.raises(first_hour.CheckError, match=f"^estimate / measured is B {ratio}"):
            first_hour.read_memory(table.format(ratio), Namespace(device="cuda"))


def test_the_page_has_a_row_for_each_line():
    page = (ROOT / "docs" / "gpu.md").read_text()
    lines = page.partition("## The lines")[2].partition("## Waits")[0]
    rows = re.findall(r"^\| `([\w-]+)` \|", lines, flags=re.MULTILINE)
    assert rows == [line.name for line in first_hour.LINES]


def test_the_page_names_each_wait():
    page = (ROOT / "docs" / "gpu.md").read_text()
    sites = {site for named in gpu_checks.LOOPS.values() for site in named}
    missing = [site for site in sites if f"`{site.rpartition(':')[2]}`" not in page]
    assert not missing


def test_several_choices_move_with_the_policy():
    """Their first values were a tensor on the CPU, copied at every step and minibatch."""
    from algos.policies.distributions import MultiCategorical

    distribution = MultiCategorical(gymnasium.spaces.MultiDiscrete([2, 3], start=[1, 0])).to("meta")
    assert distribution.start.device.type == "meta"
    assert not distribution.state_dict()
