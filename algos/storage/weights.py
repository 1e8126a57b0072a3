"""Weights of a policy in a checkpoint: those that the training changes; a checksum stands for the frozen ones."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from textenv.lm.origin import checksum


def trained_weights(module: object) -> dict[str, Tensor]:
    """Return the trainable weights and all buffers; frozen weights are restored by loading the model.

    Raises:
        TypeError: if ``module`` is not a `torch.nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a {type(module).__name__} cannot be saved: checkpoints need a torch.nn.Module as policy")
    weights = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return weights | dict(module.named_buffers())


def frozen_checksum(module: nn.Module) -> int | None:
    """Return a checksum of the weights that `trained_weights` leaves out; None if there are none."""
    checksums = [checksum(parameter) for parameter in module.parameters() if not parameter.requires_grad]
    if not checksums:
        return None
    return zlib.crc32(str(checksums).encode())


@torch.no_grad()
def load_weights(module: object, saved: Mapping[str, Tensor]) -> None:
    """Restore the weights that `trained_weights` returned.

    Raises:
        ValueError: if the module is a different one; names the differing weights.
    """
    present = trained_weights(module)
    saved = dict(saved)
    if "token_head" in present and "token_head" not in saved:  # absent in version 0.4.0
        saved["token_head"] = torch.zeros_like(present["token_head"])

    # Names and shapes must be equal
    different = sorted(present.keys() ^ saved.keys())
    for name in present.keys() & saved.keys():
        if present[name].shape != saved[name].shape:
            different.append(name)
    if different:
        raise ValueError(
            f"the policy is not the one that was saved ({', '.join(different[:5])} differ): make it in the same way"
        )
    for name, tensor in present.items():
        tensor.copy_(saved[name])
