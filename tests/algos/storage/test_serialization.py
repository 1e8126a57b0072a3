"""Values to JSON and tensors, and back."""

import torch
from safetensors.torch import load_file, load_model
from torch import nn

from algos.storage.checkpoint import read_checkpoint, write_checkpoint
from algos.storage.serialization import write_weights


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
