"""Serialization of the state that a run needs to resume: numbers, text, arrays and random generators.

Values become JSON and tensors. Nothing is pickled, and reading executes no code.
"""

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from textenv.json_files import Json
from textenv.state import Stateful

BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    "MT19937": np.random.MT19937,
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}
"""NumPy's bit generators by name."""
DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Devices on which a generator of torch may be."""
SEQUENCES: dict[str, type[Any]] = {"size": torch.Size, "list": list, "tuple": tuple}
"""Sequence types by their names in JSON; `torch.Size` comes first because it is a tuple too."""
MAPPINGS: dict[str, type[Any]] = {"Counter": Counter, "OrderedDict": OrderedDict}
"""Types of dictionaries, beside plain ones, by their names in JSON."""
FACTORIES: dict[str, type[Any]] = {each.__name__: each for each in (int, float, str, list, dict, set)}
"""What a defaultdict may make of a missing key, by the names in JSON; one of another factory becomes a dict."""


def saved_state(owner: object) -> Mapping[str, object] | None:
    """Return the state of an object that is `Stateful`; None for others."""
    return owner.state_dict() if isinstance(owner, Stateful) else None


def restore_state(owner: object, state: object) -> None:
    """Restore what `saved_state` returned, unless that was None."""
    if state is not None and isinstance(owner, Stateful):
        owner.load_state_dict(state)


class Fields(dict[str, object]):
    """Fields of a saved dataclass, by name; `set_attributes` puts them into the existing instance."""


def to_json(value: object, tensors: dict[str, Tensor]) -> Json:
    """Convert a value to JSON; its arrays and tensors go into ``tensors``, keyed by number.

    A value that JSON does not have becomes an object whose first key says what it is, such as ``{"array": "3"}``.

    Args:
        value: None, a number, text, an array, a tensor, a random generator, or dataclasses, sequences and dictionaries
            of these.
        tensors: dictionary to add to, see `write_tensors`.

    Raises:
        TypeError: on anything else.
    """
    # Arrays, numbers and text; NumPy's numbers first, because some are floats too
    if isinstance(value, Tensor):
        return {"tensor": _put(value.detach(), tensors)}
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_to_json(value, tensors)
    if value is None or isinstance(value, (int, float, str)):
        return value

    # Random generators
    if isinstance(value, np.random.Generator):
        return {"numpy_generator": to_json(value.bit_generator.state, tensors)}
    if isinstance(value, torch.Generator):
        return {"torch_generator": _put(value.get_state(), tensors), "device": str(value.device)}

    # Sequences, dictionaries and dataclasses
    if isinstance(value, deque):
        return {"deque": [to_json(item, tensors) for item in value], "maxlen": value.maxlen}
    for name, sequence in SEQUENCES.items():
        if isinstance(value, sequence):
            return {name: [to_json(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        entries = [_entry_to_json(key, item, tensors) for key, item in value.items()]
        return {"dict": entries, **_type_of_mapping(value)}
    if dataclasses.is_dataclass(value) and all(field.init for field in dataclasses.fields(value)):
        names = [field.name for field in dataclasses.fields(value)]
        return {"fields": {name: to_json(getattr(value, name), tensors) for name in names}}
    raise TypeError(f"a {type(value).__name__} cannot be saved, only numbers, text, arrays and random generators can")


def _array_to_json(value: np.ndarray | np.generic, tensors: dict[str, Tensor]) -> Json:
    """Convert an array or a number of NumPy; text becomes a list, because tensors cannot hold it."""
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        return {"words": array.astype(str).tolist(), "dtype": array.dtype.str}
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype} cannot be saved, only numbers and text can")
    kind = "number"
    if isinstance(value, np.ndarray):
        kind = "array"
    return {kind: _put(torch.from_numpy(array.copy()), tensors)}


def _put(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under the next number, and return the number."""
    number = str(len(tensors))
    tensors[number] = tensor
    return number


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, which refuses tensors that share memory: later ones are copied.

    Raises:
        OSError, SafetensorError: if the file cannot be written.
    """
    from safetensors.torch import save_file

    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if address in addresses:
            tensor = tensor.clone()
        addresses.add(address)
        separate[name] = tensor.contiguous()
    save_file(separate, path, metadata=metadata)


def write_weights(path: Path, module: nn.Module) -> None:
    """Write a module's weights to a file for `safetensors.torch.load_model`, under one name each.

    Weights may be parts of one block of memory, as those of an LSTM on CUDA are.

    Raises:
        OSError, SafetensorError: if the file cannot be written.
    """
    seen = set()
    weights = {}
    for name, tensor in sorted(module.state_dict().items()):
        address = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and address in seen:
            continue
        seen.add(address)
        weights[name] = tensor
    write_tensors(path, weights)


def _type_of_mapping(value: Mapping[Any, Any]) -> dict[str, str]:
    """Details that say which dictionary to restore; none for a plain one."""
    if isinstance(value, defaultdict):
        for name, factory in FACTORIES.items():
            if value.default_factory is factory:
                return {"factory": name}
        return {}
    for name, mapping in MAPPINGS.items():
        if isinstance(value, mapping):
            return {"type": name}
    return {}


def _entry_to_json(key: object, item: object, tensors: dict[str, Tensor]) -> Json:
    """Convert key and item of a dictionary; an error names the key."""
    try:
        return [to_json(key, tensors), to_json(item, tensors)]
    except TypeError as error:
        raise TypeError(f"{key}: {error}") from None


def from_json(saved: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore a value from the result of `to_json`.

    Raises:
        ValueError: on text or a generator of a kind that `to_json` does not save. Damaged data may raise other errors.
    """
    if not isinstance(saved, dict):
        return saved
    first, *_ = saved.items()  # further keys are details, such as a dtype
    kind, content = first

    # Arrays
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "array":
        return tensors[content].numpy().copy()
    if kind == "number":
        array = tensors[content].numpy().copy()
        return array[()]
    if kind == "words":
        if np.dtype(str(saved["dtype"])).kind not in "SU":
            raise ValueError(f"text of dtype {saved['dtype']!r:.50} was saved, expected a bytes or str dtype")
        return np.array(content, dtype=saved["dtype"])

    # Random generators
    if kind == "numpy_generator":
        return _numpy_generator(from_json(content, tensors))
    if kind == "torch_generator":
        return _torch_generator(tensors[content], saved["device"])

    # Dictionaries, dataclasses and sequences
    if kind == "dict":
        entries = {from_json(key, tensors): from_json(item, tensors) for key, item in content}
        if "factory" in saved:
            return defaultdict(FACTORIES[saved["factory"]], entries)
        if "type" in saved:
            return MAPPINGS[saved["type"]](entries)
        return entries
    if kind == "fields":
        return Fields({name: from_json(item, tensors) for name, item in content.items()})
    if kind == "deque":
        return deque((from_json(item, tensors) for item in content), saved.get("maxlen"))  # earlier versions saved none
    return SEQUENCES[kind](from_json(item, tensors) for item in content)


def _numpy_generator(state: Any) -> np.random.Generator:
    """Restore a generator of NumPy from the state of its bit generator."""
    name = state["bit_generator"]
    if name not in BIT_GENERATORS:
        raise ValueError(f"a generator named {name!r} was saved, expected one of {', '.join(BIT_GENERATORS)}")
    bit_generator = BIT_GENERATORS[name]()
    bit_generator.state = state
    return np.random.Generator(bit_generator)


def _torch_generator(state: Tensor, device: str) -> torch.Generator:
    """Restore a generator of torch on a device."""
    if str(device).partition(":")[0] not in DEVICES:
        raise ValueError(f"a generator on {device!r:.50} was saved, expected one on {', '.join(DEVICES)}")
    generator = torch.Generator(device=device)
    generator.set_state(state.to(torch.uint8))
    return generator


def attributes(owner: object) -> dict[str, object]:
    """Return an object's attributes that can be saved; others (models, functions, spaces) are left out."""
    saved = {}
    for name, value in vars(owner).items():
        try:
            to_json(value, {})
        except TypeError:
            continue
        saved[name] = value
    return saved


def set_attributes(owner: object, saved: Mapping[str, object]) -> None:
    """Set saved attributes of an object; random generators, which others may share, are updated in place.

    What the saved form does not know is taken from the present value: the class of a named tuple, the factory of a
    defaultdict, and the limit of a deque that an earlier version saved.
    """
    for name, value in saved.items():
        present = vars(owner).get(name)
        if _set_generator(present, value):
            continue
        if not isinstance(value, Fields):
            setattr(owner, name, _like(present, value))
        elif dataclasses.is_dataclass(present) and not isinstance(present, type):
            setattr(owner, name, dataclasses.replace(present, **value))


def _like(present: object, value: object) -> object:
    """Return a restored value in the type of the present one, if that has more to it than the saved form."""
    if isinstance(present, defaultdict) and type(value) is dict:
        return defaultdict(present.default_factory, value)
    if isinstance(present, deque) and isinstance(value, deque) and value.maxlen is None:
        return deque(value, present.maxlen)
    if isinstance(present, tuple) and hasattr(present, "_make") and isinstance(value, tuple):
        return type(present)._make(value)
    return value


def _set_generator(present: object, value: object) -> bool:
    """Put a random generator into the state of another; return False unless both are generators of one kind."""
    if isinstance(present, torch.Generator) and isinstance(value, torch.Generator):
        present.set_state(value.get_state())
        return True
    if not (isinstance(present, np.random.Generator) and isinstance(value, np.random.Generator)):
        return False
    if type(present.bit_generator) is not type(value.bit_generator):
        return False
    present.bit_generator.state = value.bit_generator.state
    return True
