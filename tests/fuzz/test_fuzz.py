"""A short run of every fuzzing target, and what the long ones have found; `make fuzz` is the long one."""

import hashlib
import json

import numpy as np
import pytest
import torch

from algos import load
from algos.cli import main
from algos.storage.checkpoint import CHECKPOINT_FORMAT, read_checkpoint
from algos.storage.run_files import MANIFEST, STATE, TENSORS
from algos.training.run import Run
from algos.training.save import read_description
from tests.fuzz import fuzzing
from tests.fuzz.fuzz_inputs import TARGETS, BrokenError, Tally, Target, attempt, fuzz, limited
from tests.helpers.models import WORDS
from textenv import load_prompts
from textenv.envs.action_masks import ActionMasks
from textenv.prompts.prompts import PromptList
from textenv.rewards import numeric_answer
from textenv.rewards.scores import RewardError, Rows, Scores, read_scores

SLOW = {"parquet": 20, "resumed": 60, "saved_agents": 100}
"""Inputs, where each takes milliseconds."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_reader_reads_or_refuses_in_words(name):
    inputs = SLOW.get(name, 300)
    tally = fuzz(name, inputs, start=1000)  # other inputs than the first of the long run
    assert tally.inputs >= inputs and tally.read + sum(tally.errors.values()) == tally.inputs


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda dice: {}["a"], "KeyError"),
        (lambda dice: b"\xff".decode(), "UnicodeDecodeError does not say"),
        (lambda dice: json.loads("{"), "JSONDecodeError does not say"),
        (lambda dice: int("x"), "ValueError does not say 'file'"),
        (lambda dice: [None for _ in iter(int, 1)], "HangError|not done after"),
    ],
)
def test_fuzzing_finds_readers_that_break_the_contract(does, said, monkeypatch):
    monkeypatch.setattr("tests.fuzz.fuzz_inputs.SECONDS", 0.2)
    with pytest.raises(BrokenError, match=said), limited():
        attempt(Target(does, says="file"), b"", Tally())


# --- what was found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        [1 + 2j, 0.0],
        [np.complex64(1), 0.0],
        [torch.tensor(1j), 0.0],
        [np.array([1 + 2j, 0]), 0.0],
        [b"1", 0.0],
        [np.ma.masked, 0.0],
        [np.ma.masked_array([1.0, 2.0], [True, False]), 0.0],
        [torch.ones(2).to_sparse(), 0.0],
        [torch.ones(2, device="meta"), 0.0],
        Scores(score=[1.0]),
        Scores(score=[1.0, 2.0], parts={"a": [1.0]}),
    ],
    ids=repr,
)
def test_a_reward_is_a_real_number_or_none(returned):
    """Complex numbers, bytes and objects without a value are refused."""
    rows = Rows({"prompts": ["p", "q"], "completions": ["a", "b"], "completion_ids": [[1, 2], [3]]})
    with pytest.raises(RewardError, match="reward 'f' returned"):
        read_scores(returned, rows, name="f")


def test_scores_beyond_float32_become_infinite():
    rows = Rows({"prompts": ["p"], "completions": ["a"], "completion_ids": [[1, 2]]})
    (earned,) = read_scores([np.array([1e300, 1.0])], rows, name="f", finite=False).score
    assert earned.tolist() == [np.inf, 1.0]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("half \ud800", "prompt 0: 'half .*is not valid Unicode"),
        ([{"role": "user", "content": "half \ud800"}], "prompt 0: 'half .*is not valid Unicode"),
        ({"a": 1, 2: 3}, "prompt 0 has the columns \\['2', 'a'\\]"),
        (np.array(3.0), "prompt 0 is 3.0, expected text"),
    ],
)
def test_prompts_no_tokenizer_reads_are_refused(prompt, said):
    with pytest.raises(ValueError, match=said):
        PromptList([prompt]).prompt(0)


@pytest.mark.parametrize("returned", [[[]], [[1], [2, 3]], torch.ones(2).to_sparse(), {"a"}], ids=repr)
def test_a_rule_that_returns_no_list_of_ids_is_refused(returned):
    masks = ActionMasks(len(WORDS), rule=lambda turn: returned)
    with pytest.raises(TypeError, match="allowed returned"):
        masks.index(lambda i: None, np.array([0]))


def test_actions_of_unequal_lengths_are_refused():
    with pytest.raises(TypeError, match=r"actions are \[\[1\], \[2, 3\]\], expected integers"):
        ActionMasks(9, forbidden=[8]).check([[1], [2, 3]], np.array([0, 1]), np.array([1, 1]))


@pytest.mark.parametrize("completion", [3, None, [3], [{"role": "assistant"}], [{"content": [5]}]], ids=repr)
def test_an_answer_is_text_or_messages(completion):
    with pytest.raises(TypeError, match="completion is .*, expected text, or messages"):
        numeric_answer()(completions=[completion], answer=["1"])


def sealed(folder, **files):
    """A checkpoint of these contents whose checksums are right."""
    folder = folder / "checkpoints" / "step-000000000064"
    folder.mkdir(parents=True)
    whole = {STATE: fuzzing.written(STATE), TENSORS: fuzzing.written(TENSORS)} | files
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in whole.items()}
    whole[MANIFEST] = json.dumps({"format": CHECKPOINT_FORMAT, "steps": 64, "files": sums}).encode()
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "state", [b"[]", b"{", b"\xff", b"{}", b'{"tensor": "99"}', b'{"no such kind": 1}', b"[" * 100_000], ids=repr
)
def test_a_checkpoint_of_something_else_is_refused(state, tmp_path):
    with pytest.raises(ValueError, match="the checkpoint .*step-000000000064 "):
        read_checkpoint(sealed(tmp_path, **{STATE: state}))


def test_a_checkpoint_without_parts_fits_no_agent(tmp_path):
    state = json.dumps({"dict": [["algorithm", "PPO"]]}).encode()
    with pytest.raises(ValueError, match=r"the checkpoint .* does not fit: KeyError: '\w+'"):
        Run(fuzzing.agent()).restore(sealed(tmp_path, **{STATE: state}))


def test_broken_metrics_come_from_the_checkpoint(tmp_path):
    """When a run goes on, what its metrics file has lost is read from there."""
    folder = sealed(tmp_path)
    first, second, *rest = fuzzing.written("metrics.jsonl").split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, second[:40], *rest]))
    steps = [json.loads(line)["steps"] for line in (first, second)]
    run = Run(fuzzing.agent())
    run.restore(folder)
    assert [row["steps"] for row in run.history][:2] == steps


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b"train", b"config: 3", b"env: --json"], ids=repr)
def test_broken_options_exit_with_2_and_a_sentence(content, tmp_path, capsys):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--resume", str(tmp_path)])
    assert stop.value.code == 2 and "run.yaml" in capsys.readouterr().err


def test_too_deep_json_exits_with_2_and_a_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of the run is free there
    with pytest.raises(SystemExit) as stop:
        main(["train", "CartPole-v1", "--policy-kwargs", "[" * 100_000])
    assert stop.value.code == 2 and "not JSON" in capsys.readouterr().err


DESCRIBED = {"format": 2, "environment": None, "policy": "MLPPolicy", "policy_arguments": {}}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        b"[]",
        *(json.dumps(DESCRIBED | change).encode() for change in ({"environment": 3}, {"policy": None})),
    ],
    ids=repr,
)
def test_a_broken_description_of_an_agent_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_description(tmp_path)


def test_broken_weights_or_arguments_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DESCRIBED))
    with pytest.raises(ValueError, match="does not match the MLPPolicy in config.json: KeyError"):
        load(tmp_path)


def test_bytes_for_a_text_name_file_and_record(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "prompts.parquet"
    stored = arrow.array([b"the film", b"\xe1 film"])
    parquet.write_table(arrow.table({"prompt": arrow.Array.from_buffers(arrow.string(), 2, stored.buffers())}), path)
    records = load_prompts(path)
    assert records[0]["prompt"] == "the film"
    with pytest.raises(ValueError, match=r"prompts\.parquet, record 2: not UTF-8"):
        records[1]
