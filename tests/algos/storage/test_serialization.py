"""Values to JSON and tensors, and back."""

import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from algos.storage.checkpoint import read_checkpoint, write_checkpoint
from algos.storage.serialization import from_json, set_attributes, to_json, write_weights


def test_views_of_one_memory_are_saved_alone(tmp_path):
    """A file of safetensors has no tensors that share memory."""
    x = torch.arange(6.0)
    views = {"whole": x, "matrix": x.view(2, 3), "turned": x.view(3, 2).T, "part": x[:2], "same": x}
    views |= {"expanded": x[:1].expand(3), "empty": x[:0], "empty too": x[:0]}
    back = read_checkpoint(write_checkpoint(tmp_path, views, steps=1))
    assert back.keys() == views.keys()
    for name, view in views.items():
        assert torch.equal(back[name], view) and back[name].shape == view.shape
    back["whole"][0] = 7
    assert back["same"][0] == 0


class Parts(nn.Module):
    """Two matrices in one block of memory, as cuDNN lays those of an LSTM, and a layer that has two names."""

    def __init__(self, seed):
        super().__init__()
        block = torch.randn(12, generator=torch.Generator().manual_seed(seed))
        self.first = nn.Parameter(block[:6].view(2, 3))
        self.second = nn.Parameter(block[6:].view(3, 2))
        self.layer = nn.Linear(2, 3)
        self.same = self.layer


def test_weights_in_one_block_of_memory_are_saved_under_one_name_each(tmp_path):
    saved = Parts(0)
    loaded = Parts(1)
    loaded.first = nn.Parameter(loaded.first.detach().clone())  # as on a CPU, where weights are loaded
    loaded.second = nn.Parameter(loaded.second.detach().clone())
    write_weights(tmp_path / "weights.safetensors", saved)
    assert set(load_file(tmp_path / "weights.safetensors")) == {"first", "second", "layer.weight", "layer.bias"}
    load_model(loaded, str(tmp_path / "weights.safetensors"))
    for weight, expected in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("value", [
    deque([1, 2, 3], maxlen=3), deque([(1, 2)], maxlen=0), deque([1]), Counter("abca"), defaultdict(int, a=2),
    OrderedDict(b=1, a=2), defaultdict(list, {(0, 1): [3.5]}), {"nested": [deque([1], maxlen=2), Counter()]},
])  # fmt: skip
def test_containers_of_the_standard_library_keep_their_kind(value):
    tensors = {}
    found = from_json(json.loads(json.dumps(to_json(value, tensors))), tensors)
    assert found == value and repr(found) == repr(value)  # a deque's shows its limit, a defaultdict's its factory


Place = namedtuple("Place", ["x", "y"])


class Walker:
    """What an environment may keep: a place, a path of the last steps, and counts of a factory of its own."""

    def __init__(self):
        self.place = Place(0, 0)
        self.path = deque(maxlen=2)
        self.counts = defaultdict(lambda: 7)


def test_attributes_keep_the_kind_that_their_saved_form_does_not_know():
    walker = Walker()
    saved = json.loads(json.dumps(to_json({"place": Place(1, 2), "path": deque([1, 2]), "counts": {"a": 3}}, {})))
    del saved["dict"][1][1]["maxlen"]  # earlier versions saved none
    set_attributes(walker, from_json(saved, {}))
    walker.path.append(3)
    assert (walker.place.x, walker.place.y) == (1, 2)
    assert walker.path == deque([2, 3])
    assert walker.counts["a"] == 3 and walker.counts["b"] == 7
