"""Values to JSON and tensors, and back."""

import torch

from algos.storage.serialization import from_json, to_json


def test_views_of_one_memory_are_saved_alone():
    x = torch.arange(6.0)
    views = {"whole": x, "matrix": x.view(2, 3), "turned": x.view(3, 2).T, "part": x[:2], "same": x}
    tensors = {}
    back = from_json(to_json(views, tensors), tensors)
    assert all(torch.equal(back[name], view) and back[name].shape == view.shape for name, view in views.items())
    assert len(tensors) == 4, "the same memory in the same shape is saved once"
