"""Serialization of the state that a run needs to resume: numbers, text, arrays and random generators.

Values become JSON and tensors. Nothing is pickled, and reading executes no code.
"""

import dataclasses
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from textenv.lm.origin import checksum
from textenv.state import Stateful

_KINDS = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
BIT_GENERATORS = {kind.__name__: kind for kind in _KINDS}
"""numpy's bit generators by name."""
DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Devices that torch's generators may be on."""
SEQUENCES: dict[str, Any] = {"size": torch.Size, "list": list, "tuple": tuple, "deque": deque}
"""Sequence types by their names in JSON; `torch.Size` is a tuple too, so it comes first."""


def saved_state(owner: Any) -> dict[str, Any] | None:
    """State of an object that is `Stateful`; None for others."""
    return owner.state_dict() if isinstance(owner, Stateful) else None


def restore_state(owner: Any, state: Any) -> None:
    """Restore what `saved_state` returned, unless that was None."""
    if state is not None and isinstance(owner, Stateful):
        owner.load_state_dict(state)


class Fields(dict[str, Any]):
    """Fields of a saved dataclass; `set_attributes` puts them into the existing instance."""


def to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON; its arrays and tensors go into ``tensors``, each once, keyed by number.

    Args:
        value: None, a number, text, an array, a tensor, a random generator, or dataclasses, sequences and dictionaries
            of these.
        tensors: dictionary to add to.

    Raises:
        TypeError: on anything else.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, Tensor):
        return {"tensor": _put(value.detach(), tensors)}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            return {"words": array.astype(str).tolist(), "dtype": array.dtype.str}
        if array.dtype.kind not in "biuf":
            raise TypeError(f"an array of {array.dtype} cannot be saved, only numbers and text can")
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: _put(torch.from_numpy(array.copy()), tensors)}
    if isinstance(value, np.random.Generator):
        return {"numpy_generator": to_json(value.bit_generator.state, tensors)}
    if isinstance(value, torch.Generator):
        return {"torch_generator": _put(value.get_state(), tensors), "device": str(value.device)}
    for name, sequence in SEQUENCES.items():
        if isinstance(value, sequence):
            return {name: [to_json(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[to_json(key, tensors), _entry_to_json(key, item, tensors)] for key, item in value.items()]}
    if dataclasses.is_dataclass(value) and all(field.init for field in dataclasses.fields(value)):
        names = [field.name for field in dataclasses.fields(value)]
        return {"fields": {name: to_json(getattr(value, name), tensors) for name in names}}
    raise TypeError(f"a {type(value).__name__} cannot be saved, only numbers, text, arrays and random generators can")


def _entry_to_json(key: Any, item: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert an entry of a dictionary; an error names its key."""
    try:
        return to_json(item, tensors)
    except TypeError as error:
        raise TypeError(f"{key}: {error}") from None


def from_json(saved: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore a value from the result of `to_json`."""
    if not isinstance(saved, dict):
        return saved
    ((kind, content), *_) = saved.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind in ("array", "number"):
        array = tensors[content].numpy().copy()
        return array if kind == "array" else array[()]
    if kind == "words":
        if np.dtype(str(saved["dtype"])).kind not in "SU":
            raise ValueError(f"text of dtype {saved['dtype']!r:.50} was saved, expected a bytes or str dtype")
        return np.array(content, dtype=saved["dtype"])
    if kind == "numpy_generator":
        state = from_json(content, tensors)
        name = state["bit_generator"]
        if name not in BIT_GENERATORS:
            raise ValueError(f"a generator named {name!r} was saved, expected one of {', '.join(BIT_GENERATORS)}")
        bits = BIT_GENERATORS[name]()
        bits.state = state
        return np.random.Generator(bits)
    if kind == "torch_generator":
        if str(saved["device"]).partition(":")[0] not in DEVICES:
            raise ValueError(f"a generator on {saved['device']!r:.50} was saved, expected one on {', '.join(DEVICES)}")
        generator = torch.Generator(device=saved["device"])
        generator.set_state(tensors[content].to(torch.uint8))
        return generator
    if kind == "dict":
        return {from_json(key, tensors): from_json(item, tensors) for key, item in content}
    if kind == "fields":
        return Fields({name: from_json(item, tensors) for name, item in content.items()})
    return SEQUENCES[kind](from_json(item, tensors) for item in content)


def attributes(owner: Any) -> dict[str, Any]:
    """Return an object's attributes that can be saved; the others (models, functions, spaces) are left out."""
    found = {}
    for name, value in vars(owner).items():
        try:
            to_json(value, {})
        except TypeError:
            continue
        found[name] = value
    return found


def set_attributes(owner: Any, saved: Mapping[str, Any]) -> None:
    """Set saved attributes of an object; random generators, which others may share, are updated in place."""
    for name, value in saved.items():
        present = vars(owner).get(name)
        if isinstance(present, torch.Generator) and isinstance(value, torch.Generator):
            present.set_state(value.get_state())
        elif isinstance(present, np.random.Generator) and isinstance(value, np.random.Generator):
            if type(present.bit_generator) is type(value.bit_generator):
                present.bit_generator.state = value.bit_generator.state
            else:
                setattr(owner, name, value)
        elif not isinstance(value, Fields):
            setattr(owner, name, value)
        elif dataclasses.is_dataclass(present) and not isinstance(present, type):
            setattr(owner, name, dataclasses.replace(present, **value))


def trained_weights(module: Any) -> dict[str, Tensor]:
    """Return the trainable weights and all buffers; frozen weights are restored by loading the model.

    Raises:
        TypeError: if it is not a `torch.nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a {type(module).__name__} cannot be saved: checkpoints need a torch.nn.Module as policy")
    return {name: x for name, x in module.named_parameters() if x.requires_grad} | dict(module.named_buffers())


def frozen_checksum(module: nn.Module) -> int | None:
    """Checksum of the weights that `trained_weights` leaves out; None if there are none."""
    checksums = [checksum(x) for _, x in module.named_parameters() if not x.requires_grad]
    return zlib.crc32(str(checksums).encode()) if checksums else None


@torch.no_grad()
def load_weights(module: Any, saved: Mapping[str, Tensor]) -> None:
    """Restore the weights that `trained_weights` returned.

    Raises:
        ValueError: if the module is a different one; names the differing weights.
    """
    present = trained_weights(module)
    new = {name: torch.zeros_like(x) for name, x in present.items() if name == "token_head"}  # absent in version 0.4.0
    saved = new | dict(saved)
    other = sorted(present.keys() ^ saved.keys())
    other += [name for name in present.keys() & saved.keys() if present[name].shape != saved[name].shape]
    if other:
        raise ValueError(
            f"the policy is not the one that was saved ({', '.join(other[:5])} differ): make it in the same way"
        )
    for name, tensor in present.items():
        tensor.copy_(saved[name])


def _put(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Return the tensor's number; views of equal layout on one memory share a number."""
    layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    for name, other in tensors.items():
        same_memory = tensor.data_ptr() == other.data_ptr() and tensor.numel()
        if same_memory and layout == (other.shape, other.stride(), other.dtype, other.device):
            return name
    name = str(len(tensors))
    tensors[name] = tensor
    return name
