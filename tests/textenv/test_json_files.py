"""JSON files: one error that names the file and the position."""

import pytest

from textenv.json_files import parse_json, read_json


@pytest.mark.parametrize("content", [b'{"k": [1, "\xc3\xa9"]}', b'\xef\xbb\xbf{"k": [1, "\xc3\xa9"]}'])
def test_json_is_read_with_and_without_a_bom(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert read_json(path, what="a state", kind=dict) == parse_json(content) == {"k": [1, "é"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"k": ', r"state\.json is not JSON in UTF-8 \(Expecting value: line 1 column 7.*\), expected a state"),
        (b'{"k": "\xff"}', r"state\.json is not JSON in UTF-8 \(.*position 7.*\), expected a state"),
        (b"[" * 100_000, r"state\.json is not JSON in UTF-8 \(.*recursion.*\), expected a state"),
        (b"[1]", r"state\.json holds \[1\] \(list\), expected a state"),
    ],
)
def test_a_broken_file_is_named_with_the_position(tmp_path, content, message):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_json(path, what="a state", kind=dict)


def test_a_missing_file_stays_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "state.json", what="a state")
