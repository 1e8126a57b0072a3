"""Data sets of the hub by name, from folders in its format; a misspelt file never asks the network."""

import socket
import sys

import pytest

from tests.helpers.hub_folders import question, write_hub_folder
from tests.helpers.packages import lazy_import
from textenv import load_prompts
from textenv.prompts.hub import parse_hub_name
from textenv.tasks.own_prompts import Prompts

lazy_import("datasets")


@pytest.fixture
def no_network(monkeypatch):
    """A connection fails the test."""

    def refuse(*arguments, **options):
        raise AssertionError(f"the network was asked: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf:openai/gsm8k", ("openai/gsm8k", None, None, None)),
        ("hf:openai/gsm8k:main", ("openai/gsm8k", None, "main", None)),
        ("hf:openai/gsm8k:main/test", ("openai/gsm8k", None, "main", "test")),
        ("hf:stanfordnlp/imdb:default/test", ("stanfordnlp/imdb", None, None, "test")),
        ("hf:a/b@1f2e:c/train[:100]", ("a/b", "1f2e", "c", "train[:100]")),
        ("hf:squad", ("squad", None, None, None)),
    ],
)
def test_a_name_has_configuration_split_and_revision(text, parts):
    assert parse_hub_name(text) == parts


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("hf:", ValueError, "is no name of a data set, expected hf:owner/name"),
        ("hf:a/b:c/", ValueError, "is no name of a data set"),
        ("hf:a b", ValueError, "is no name of a data set"),
        ("hf:a/b@", ValueError, "is no name of a data set"),
        ("hf:prompts.jsonl", FileNotFoundError, "a file is named without hf:"),
        ("hf:./folder", FileNotFoundError, "does not exist in"),
        ("hf:data/of/mine", FileNotFoundError, "does not exist in"),
        ("openai/gsm8k", FileNotFoundError, "a data set of the Hugging Face Hub is named hf:openai/gsm8k"),
        ("promts.jsonl", FileNotFoundError, "there is no file promts.jsonl in"),
        ("data/promts.jsonl", FileNotFoundError, "there is no file data/promts.jsonl in"),
    ],
)
def test_what_is_neither_file_nor_name_asks_no_network(text, error, message, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        load_prompts(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_configurations_and_splits_are_read(kind, tmp_path, no_network):
    name = f"hf:{write_hub_folder(tmp_path / 'sums', kind=kind)}"
    main = load_prompts(f"{name}:main", prompt_column="question")
    expected = [question("train", index) for index in range(12)]
    assert [{"question": row.pop("prompt"), **row} for row in main] == expected
    assert load_prompts(f"{name}:main/test", prompt_column=None)[3] == question("test", 3)
    assert len(load_prompts(f"{name}:main/train[:5]", prompt_column=None)) == 5
    assert len(load_prompts(f"{name}:hard", prompt_column=None)) == 3, "the only split, whatever its name"
    with pytest.raises(ValueError, match="record 1: it has the columns .*'question'.* but not 'prompt'"):
        load_prompts(f"{name}:main")


def test_without_configurations_the_data_set_is_its_default(tmp_path, no_network):
    folder = write_hub_folder(tmp_path / "plain", readme="")
    (folder / "hard" / "validation.jsonl").unlink()
    for name in (f"hf:{folder}", f"hf:{folder}:default/train"):
        assert len(load_prompts(name, prompt_column=None)) == 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "it has the configurations main, hard: name one, such as hf:{folder}:main"),
        (":nope", "it has the configurations main, hard: name one, such as hf:{folder}:main"),
        (":main/dev", "it has no split 'dev', but train, test: name one, such as hf:{folder}:main/train"),
    ],
)
def test_a_missing_configuration_or_split_says_which_there_are(name, message, tmp_path, no_network):
    folder = write_hub_folder(tmp_path / "sums")
    with pytest.raises(ValueError) as error:
        load_prompts(f"hf:{folder}{name}")
    assert message.format(folder=folder) in str(error.value)


def test_a_split_where_a_configuration_stands_is_recognised(tmp_path, no_network):
    folder = write_hub_folder(
        tmp_path / "sums", readme="---\nconfigs:\n- {config_name: default, data_files: main/*}\n---\n"
    )
    with pytest.raises(
        ValueError, match="'train' is a split of it, which follows the configuration: hf:.*:default/train"
    ):
        load_prompts(f"hf:{folder}:train")


def test_several_splits_without_train_ask_for_one(tmp_path, no_network):
    readme = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    readme += "  - {split: easy, path: main/train.jsonl}\n  - {split: late, path: main/test.jsonl}\n---\n"
    folder = write_hub_folder(tmp_path / "sums", readme=readme)
    with pytest.raises(ValueError, match="has the splits easy, late: name one, such as hf:.*:default/easy"):
        load_prompts(f"hf:{folder}")
    assert len(load_prompts(f"hf:{folder}:default/late", prompt_column=None)) == 12


def test_a_folder_in_the_hubs_format_is_told_apart(tmp_path):
    folder = write_hub_folder(tmp_path / "sums")
    with pytest.raises(ValueError, match=f"a folder in the format of the Hugging Face Hub is named hf:{folder}"):
        load_prompts(folder)


def test_rows_are_those_of_this_folder_now(tmp_path, no_network):
    """`datasets` alone gives those of another folder of the same name, and those from before a change."""
    first = write_hub_folder(tmp_path / "a" / "sums")
    second = write_hub_folder(tmp_path / "b" / "sums", rows=7)
    for folder, rows in ((first, 12), (second, 7), (first, 12)):
        assert len(load_prompts(f"hf:{folder}:main", prompt_column=None)) == rows
    lines = (first / "main" / "train.jsonl").read_text()
    (first / "main" / "train.jsonl").write_text(lines + lines)
    assert len(load_prompts(f"hf:{first}:main", prompt_column=None)) == 24


def test_a_folder_has_no_revision(tmp_path, no_network, monkeypatch):
    """`datasets` would read the folder of this name for any revision."""
    write_hub_folder(tmp_path / "sums")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="has the revision 'v1', but sums is a folder"):
        load_prompts("hf:sums@v1:main")


def test_a_broken_file_is_told_of(tmp_path, no_network):
    folder = write_hub_folder(tmp_path / "sums")
    (folder / "main" / "train.jsonl").write_text('{"question": \n')
    with pytest.raises(ValueError, match=r"could not be loaded: .*JSON parse error"):
        load_prompts(f"hf:{folder}:main")


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    folder = write_hub_folder(tmp_path / "sums")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"datasets is not installed \(extra data\): pip install 'datasets>=5'"):
        load_prompts(f"hf:{folder}:main")


def test_a_task_trains_and_tests_on_splits(tmp_path, no_network):
    name = f"hf:{write_hub_folder(tmp_path / 'sums')}"

    def reward(completions, answer, **columns):
        return [float(str(right) in text) for text, right in zip(completions, answer, strict=True)]

    options = dict(prompts=f"{name}:main", eval_prompts=f"{name}:main/test", reward=reward, prompt_column="question")
    for split in ("train", "test"):
        task = Prompts(split, **options)
        assert len(task.prompts) == 12 and task.prompt(2).columns == {"answer": 2, "level": 0}
        assert task.prompt(2).content == question(split, 2)["question"]
