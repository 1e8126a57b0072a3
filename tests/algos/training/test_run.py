"""The history of a run, saved and read."""

import json

from algos.storage.serialization import from_json, to_json
from algos.training.run import History


def test_a_history_is_the_same_after_it_was_saved():
    rows = [{"steps": 1, "a": 0.5}, {"steps": 2, "a": float("nan"), "b": 3.0}, {"steps": 3, "a": -1e300}, {"steps": 4}]
    tensors = {}
    saved = json.loads(json.dumps(to_json(History(rows).state(), tensors)))
    again = History.from_state(from_json(saved, tensors))
    again.append({"steps": 5, "a": 1.0})
    assert str(list(again)) == str([*rows, {"steps": 5, "a": 1.0}])
    assert list(History.from_state(History([]).state())) == []
