"""Values to JSON and tensors, and back."""

import torch

from algos.storage.checkpoint import read_checkpoint, write_checkpoint


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
