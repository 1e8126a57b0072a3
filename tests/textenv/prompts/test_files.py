"""Prompts in files: of every kind, with other columns, broken, and larger than memory."""

import csv
import json
import os
import tracemalloc

import numpy as np
import pytest

from tests.helpers.text_envs import EOS, prompt_env
from textenv import load_prompts
from textenv.prompts.prompts import PromptList

ROWS = [
    {"prompt": "a b", "answer": "1"},
    {"prompt": 'say "hi",\nplease', "answer": "2, or 3"},
    {"prompt": "çé 🎬", "answer": ""},
]


def write(path, rows):
    kind = path.suffix.lower()
    if kind == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    elif kind in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(rows)
        data.to_parquet(str(path)) if path.suffix else data.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.tsv", "p.parquet", "folder", "P.JSONL", "p.TSV", "p.Parquet"])
def test_files_of_every_kind_are_sequences(tmp_path, name):
    prompts = load_prompts(write(tmp_path / name, ROWS))
    assert len(prompts) == 3
    assert [dict(prompts[i]) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert [prompt.columns["answer"] for prompt in PromptList(prompts).sample_prompts(range(3), seed=0)]


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    for name in ("p.jsonl", "p.csv"):
        path = write(tmp_path / name, ROWS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert [dict(row) for row in load_prompts(path)] == ROWS


def test_a_data_sets_columns_reach_the_reward(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a b", "answer": 7}]).save_to_disk(str(tmp_path / "d"))
    seen = []
    env = prompt_env(
        datasets.load_from_disk(str(tmp_path / "d")), 1, lambda prompts, answer, **_: seen.append(answer) or [1.0]
    )
    env.reset(seed=0)
    env.step(np.array([EOS]))
    assert seen == [[7]]


def test_a_parquet_file_is_read_as_it_is_now(tmp_path):
    """`datasets` gives its own copy of a file of the same time, as tar and rsync write it."""
    pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "own.parquet"
    for texts in (["first"], ["second"], ["second", "third"]):
        parquet.write_table(arrow.table({"prompt": texts}), path)
        os.utime(path, (1e9, 1e9))
        assert [row["prompt"] for row in load_prompts(path)] == texts
    parquet.write_table(arrow.table({"prompt": arrow.array([], arrow.string())}), path)
    with pytest.raises(ValueError, match="own.parquet has no records"):
        load_prompts(path)


def test_another_column_may_be_the_prompt(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": "a", "n": 1}])
    assert load_prompts(path, prompt_column="question")[0] == {"prompt": "a", "n": 1}
    with pytest.raises(ValueError, match=r"columns \['question', 'n'\]"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "record 2: not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n[1]\n', "record 2.* not an object"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "record 2: not JSON in UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n' + b"[" * 100_000, "record 2: not JSON"),
        ("p.jsonl", b"", "has no records"),
        ("p.csv", b"prompt,answer\na,1\nb\n", "record 2: 1 values for the 2 columns"),
        ("p.csv", b'prompt\n"a\n', "not CSV"),
        ("p.csv", b"prompt,prompt\na,b\n", "repeated names"),
        ("p.csv", b"prompt\n\xff\n", "not CSV in UTF-8"),
        ("p.parquet", b"not parquet", "could not be read"),
        ("p.docx", b"x", "is not a .jsonl"),
    ],
)
def test_broken_files_are_refused_by_record(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        [dict(row) for row in load_prompts(path)]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        load_prompts(tmp_path / "nowhere.jsonl")


@pytest.mark.heavy
def test_prompts_may_be_more_than_memory(tmp_path):
    """100 MB of prompts; what stays in memory is less than a hundredth of them."""
    path = tmp_path / "large.jsonl"
    line = json.dumps({"prompt": "a b", "filler": "x" * 2000}) + "\n"
    with path.open("w") as file:
        file.writelines(line for _ in range(50_000))
    tracemalloc.start()
    deck = PromptList(load_prompts(path))
    dealt = [deck.sample_prompts([number], seed=0)[0].content for number in range(0, 100_000, 5000)]
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dealt == ["a b"] * 20
    assert path.stat().st_size > 100e6 and kept < 1.5e6
