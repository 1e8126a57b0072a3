"""The file of feedback: what a line says, what survives a kill, several writers, and agreement."""

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from filelock import FileLock

from tests.helpers.feedback import Scripted, better, call, lines
from textenv import HumanReward
from textenv.extras.human import FeedbackFile, Question
from textenv.extras.human.feedback_file import krippendorff_alpha

ROOT = Path(__file__).parents[4]


def test_a_removed_answer_cannot_be_undone(path):
    def answer(question):
        if question.number == 1:
            return "up"
        path.write_text("")
        return "undo"

    with pytest.raises(ValueError, match="no longer has the answer to undo"):
        call(HumanReward(path, annotator=Scripted(answer)), ["a", "b"])


def test_a_line_reads_as_triples_and_preferences(path):
    """It says who answered what, and when."""
    call(HumanReward(path, scale="0-5", annotator=Scripted(["4", "skip"])), ["a", "b"])
    call(HumanReward(path, scale="pairs", annotator=Scripted(better)), ["a", "b", "=", "c"])
    score, skipped, pair, tie = lines(path)
    assert score | {"time": 0} == {
        "prompt": "p", "completion": "a", "score": 0.8, "answer": "4", "scale": "0-5", "time": 0, "annotator": "script",
    }  # fmt: skip
    assert abs(datetime.fromisoformat(score["time"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert skipped["score"] is None and tie["chosen"] is None and set(tie["completions"]) == {"=", "c"}
    assert (pair["chosen"], pair["rejected"], pair["answer"]) == (
        "b",
        "a",
        better(Question("p", pair["completions"], "pairs")),
    )
    assert FeedbackFile(path).scored() == [{"prompt": "p", "completion": "a", "score": 0.8}]
    assert FeedbackFile(path).preferences() == [{"prompt": "p", "chosen": "b", "rejected": "a"}]


def test_only_the_answer_of_a_line_counts(path):
    """Of one that was corrected or written by hand."""
    common = {"prompt": "p", "time": "t", "annotator": "me"}
    records = [
        {"completion": "a", "score": 1.0, "answer": "down", "scale": "thumbs"},
        {"completion": "b", "answer": "down", "scale": "thumbs"},
        {"completions": ["c", "d"], "chosen": "d", "rejected": "c", "answer": "first", "scale": "pairs"},
        {"completions": ["e", "f"], "answer": "second", "scale": "pairs"},
        {"completions": ["g", "h"], "chosen": "g", "rejected": "h", "answer": "tie", "scale": "pairs"},
    ]
    path.parent.mkdir()
    path.write_text("".join(json.dumps(common | record) + "\n" for record in records))
    file = FeedbackFile(path)
    assert [(row["completion"], row["score"]) for row in file.scored()] == [("a", 0.0), ("b", 0.0)]
    assert [(row["chosen"], row["rejected"]) for row in file.preferences()] == [("c", "d"), ("f", "e")]


def test_each_answer_is_synced_before_the_next(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))

    def answer(question):
        written = path.read_bytes() if path.exists() else b""
        assert written.count(b"\n") == question.number - 1
        assert synced == [] or synced[-1] == len(written)
        return "up"

    call(HumanReward(path, annotator=Scripted(answer)), ["a", "b", "c"])
    assert len(synced) == 3


def test_half_a_line_is_put_aside_and_asked_again(path):
    call(HumanReward(path, annotator=Scripted(["up", "up"])), ["a", "\u00e9\U0001f600\ud800"])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first + 1, first + 30, len(whole) - 2):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match=r"answers.jsonl ended with an incomplete .*now in .*answers.jsonl.half"):
            human = HumanReward(path, annotator=(annotator := Scripted(["down"])))
        assert path.read_bytes() == whole[:first]
        assert path.with_name("answers.jsonl.half").read_bytes().endswith(whole[first:cut] + b"\n")
        assert call(human, ["a", "\u00e9\U0001f600\ud800"]) == [1.0, 0.0] and len(annotator.questions) == 1


def test_a_last_line_without_its_end_is_kept(path):
    call(HumanReward(path, annotator=Scripted(["up", "down"])), ["a", "b"])
    path.write_bytes(path.read_bytes()[:-1])
    assert call(HumanReward(path, annotator=Scripted([])), ["a", "b"]) == [1.0, 0.0]
    assert path.read_bytes().endswith(b"}\n")


def test_anothers_half_line_swallows_no_answer(path):
    def answer(question):
        if question.number == 2:
            with path.open("ab") as file:
                file.write(b'{"prompt": "ha')
        return "up"

    human = HumanReward(path, annotator=Scripted(answer))
    with pytest.warns(UserWarning, match="incomplete line"):
        call(human, ["a", "b"])
    assert [line["completion"] for line in lines(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ('{"prompt": "p', "not JSON in UTF-8"),
        ("[1]", "'scale' is one of thumbs"),
        ('{"prompt": "p", "completion": "c", "score": 1}', "'scale' is one of thumbs"),
        ('{"prompt": "p", "scale": "thumbs", "answer": "up"}', "the completion is missing"),
        ('{"prompt": "p", "completion": "c", "scale": "thumbs", "answer": "4"}', "'answer' is '4', expected up, down"),
        ('{"prompt": "p", "completions": "ab", "scale": "pairs", "answer": "tie"}', "expected a list of 2"),
        ("[" * 100_000, "not JSON in UTF-8"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(path, broken, says):
    call(HumanReward(path, annotator=Scripted(["up", "down"])), ["a", "b"])
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n\n{broken}\n{second}\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"answers.jsonl, line 3: .*{says}.*Correct or delete this line"):
        HumanReward(path)
    assert path.read_bytes() == before


def test_a_writer_waits_for_the_lock(path):
    human = HumanReward(path, annotator=Scripted(["up"]))
    with FileLock(f"{path}.lock"):
        thread = threading.Thread(target=call, args=(human, ["a"]))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not path.exists()
    thread.join(10)
    assert len(lines(path)) == 1


WRITER = """
import sys
from textenv import HumanReward

class Undoing:
    name, asked = sys.argv[2], 0
    def ask(self, question):
        self.asked += 1
        return "undo" if question.can_undo and self.asked % 3 == 0 else "up"

HumanReward(sys.argv[1], annotator=Undoing())(prompts=[sys.argv[2]] * 60, completions=[str(i) for i in range(60)])
"""


@pytest.mark.heavy
def test_two_processes_in_one_file_lose_nothing(path):
    children = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], cwd=ROOT) for name in ("one", "two")]
    assert [child.wait(60) for child in children] == [0, 0]
    given = sorted((line["prompt"], int(line["completion"])) for line in lines(path))
    assert given == [(name, i) for name in ("one", "two") for i in range(60)]


def test_alpha_is_that_of_krippendorffs_own_example():
    """Krippendorff 2011, section C, with missing values: four observers and twelve units."""
    observers = ["123321412 * * *", "1 2 3 3 2 2 4 1 2 5 * 3", "* 3 3 3 2 3 4 2 2 5 1 *", "1 2 3 3 2 4 4 1 2 5 1 *"]
    columns = zip(*(row.replace(" ", "").ljust(12, "*") for row in observers), strict=True)
    units = [[float(x) for x in column if x != "*"] for column in columns]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(units, squared=True) == pytest.approx(0.849, abs=5e-4)


def test_alpha_is_that_of_the_package():
    krippendorff = pytest.importorskip("krippendorff", reason="pip install krippendorff compares with the package")
    units = [[0.0, 0.2, 0.0], [1.0, 0.8], [0.4], [0.6, 0.6, 1.0]]
    table = [[unit[i] if i < len(unit) else float("nan") for unit in units] for i in range(3)]
    for squared, level in ((False, "nominal"), (True, "interval")):
        expected = krippendorff.alpha(reliability_data=table, level_of_measurement=level)
        assert krippendorff_alpha(units, squared=squared) == pytest.approx(expected, abs=1e-12)


def test_people_who_saw_a_pair_in_either_order_agree(tmp_path):
    file = FeedbackFile(tmp_path / "pairs.jsonl")
    from textenv.extras.human import Question

    for name, shown, answer in [("ann", ("x", "y"), "first"), ("bob", ("y", "x"), "second")]:
        file.append(Question("p", shown, "pairs"), answer, annotator=name)
    for name, answer in [("ann", "second"), ("bob", "second")]:
        file.append(Question("q", ("x", "y"), "pairs"), answer, annotator=name)
    assert file.agreement() == {"pairs": 1.0}
    assert [row["chosen"] for row in file.preferences()] == ["x", "x", "y", "y"]
