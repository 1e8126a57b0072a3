"""Objects of another process: what tests see of an answer, whose code runs in a process that they do not trust.

Plain data are copied. All else stays where it is, and the other process has a `Remote`, which asks for each operation.
Messages are JSON, so nothing that arrives can run code. Imported by these processes: the standard library alone.
"""

import builtins
import importlib
import io
import json
import math
import operator
import os
import re
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from typing import Any
from weakref import WeakValueDictionary

MAX_MESSAGE_BYTES = 2**26
"""Largest message that is read, in bytes."""
MAX_PRINTED = 2**20
"""Characters that are kept of what is printed until the next reply."""

Encoded = Any
"""None, a switch, text, an ordinary number, or a list that begins with the name of a kind."""


class OtherProcessEndedError(BaseException):
    """The other process has ended, or sent what is no message."""


def read_frame(descriptor: int) -> bytes:
    """Return a message of this file descriptor, of which four bytes give the length."""
    length = int.from_bytes(_read_exactly(descriptor, 4), "big")
    if length > MAX_MESSAGE_BYTES:
        raise OtherProcessEndedError(f"a message has {length} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return _read_exactly(descriptor, length)


def frame(message: bytes) -> bytes:
    """Return a message with its length before it."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(message)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    return len(message).to_bytes(4, "big") + message


def _read_exactly(descriptor: int, length: int) -> bytes:
    chunks = []
    while length > 0:
        chunk = os.read(descriptor, min(length, 2**20))
        if not chunk:
            raise OtherProcessEndedError("the other process has closed its end")
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


class Remote:
    """An object of the other process.

    Calls, attributes, items, iteration and conversions are done there. Comparisons and arithmetic are done there only
    if both operands live there: asked "are you equal to 4?", an answer would learn what is expected of it, and agree.
    """

    __slots__ = ("__weakref__", "_sandbox_id", "_sandbox_peer")
    _sandbox_id: int
    _sandbox_peer: "Peer"

    def __init__(self, peer: "Peer", remote_id: int) -> None:
        object.__setattr__(self, "_sandbox_peer", peer)
        object.__setattr__(self, "_sandbox_id", remote_id)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in _VISIBLE_NAMES:
            raise AttributeError(f"{name} of an object in another process")
        return self._sandbox_peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._sandbox_peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._sandbox_peer.request("delattr", self, name)

    def __call__(self, *arguments: object, **keywords: object) -> object:  # noqa: D102
        return self._sandbox_peer.request("call", self, *arguments, **keywords)

    def __instancecheck__(self, instance: object) -> bool:
        return _lives_remotely(instance) and self._sandbox_peer.request("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: object) -> bool:
        return _lives_remotely(subclass) and self._sandbox_peer.request("issubclass", subclass, self) is True

    def __exit__(self, kind: object, error: object, traceback: object) -> object:
        return self._sandbox_peer.request("exit", self, kind, error, None)


_VISIBLE_NAMES = {"__name__", "__qualname__", "__dict__", "__annotations__", "__members__", "__slots__"}
"""Names with two underscores that are asked for; numpy, for example, reads memory at addresses in others."""

_OPERATIONS: dict[str, Callable[..., object]] = {
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem, "len": len, "iter": iter,
    "next": next, "reversed": reversed, "bool": bool, "str": str, "repr": repr, "format": format, "hash": hash,
    "int": int, "float": float, "complex": complex, "index": operator.index, "round": round, "neg": operator.neg,
    "pos": operator.pos, "abs": abs, "invert": operator.invert, "floor": math.floor, "ceil": math.ceil,
    "trunc": math.trunc, "enter": lambda manager: manager.__enter__(),
}  # fmt: skip
"""Operations of an object by itself, which a `Remote` forwards."""
_OPERATIONS_OF_TWO = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "matmul": operator.matmul,
    "truediv": operator.truediv, "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift,
}  # fmt: skip
"""Operations that a `Remote` forwards if the second operand lives there too."""


def _wait_for(awaitable: Any) -> object:
    import asyncio

    async def wait() -> object:
        return await awaitable

    return asyncio.run(wait())


_SERVED: dict[str, Callable[..., object]] = {
    **_OPERATIONS, **_OPERATIONS_OF_TWO, "getattr": getattr, "setattr": setattr, "delattr": delattr,
    "isinstance": isinstance, "issubclass": issubclass, "await": _wait_for,
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "exit": lambda manager, *error: manager.__exit__(*error),
}  # fmt: skip


def _forwarding(name: str) -> Callable[..., object]:
    def forward(self: Remote, *operands: object) -> object:
        return self._sandbox_peer.request(name, self, *operands)

    return forward


def _forwarding_of_two(name: str) -> Callable[..., object]:
    def forward(self: Remote, second: object) -> object:
        if not _lives_remotely(second):
            return NotImplemented
        return self._sandbox_peer.request(name, self, second)

    return forward


for _name in _OPERATIONS:
    setattr(Remote, f"__{_name}__", _forwarding(_name))
for _name in _OPERATIONS_OF_TWO:
    setattr(Remote, f"__{_name}__", _forwarding_of_two(_name))


class _Attached:
    """Mixin of numbers, texts and containers whose class is the other process's own, such as named tuples."""

    def __getattr__(self, name: str) -> object:
        if "_remote" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_remote"], name)


_BASES: tuple[Any, ...] = (int, float, str, bytes, tuple, frozenset, list, dict, set)
_ATTACHED = {base: type(f"Remote{base.__name__.title()}", (_Attached, base), {}) for base in _BASES}


def _remote_of(value: object) -> object:
    """Return the `Remote` that stands behind a value, if there is one."""
    if type(value) is Remote:
        return value
    if isinstance(value, type) and issubclass(value, BaseException):
        return value.__dict__.get("_remote")
    if isinstance(value, _Attached | BaseException):
        return value.__dict__.get("_remote")
    return None


def _lives_remotely(value: object) -> bool:
    return _remote_of(value) is not None


class _Containers:
    """Mutable containers of a request and its reply, in the order in which both processes meet them.

    The arguments are copies. What the call changed in them is sent back, so that sorting in place works.
    """

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._index_by_id: dict[int, int] = {}
        self._snapshots: list[tuple[object, ...]] = []

    def index(self, container: object) -> int | None:
        return self._index_by_id.get(id(container))

    def add(self, container: object) -> None:
        self._index_by_id[id(container)] = len(self.items)
        self.items.append(container)

    def take_snapshots(self) -> None:
        self._snapshots = [_parts(container) for container in self.items]

    def changed(self) -> list[int]:
        """Return the indices of the arguments that have other parts than when the snapshots were taken."""
        indices = []
        for index, snapshot in enumerate(self._snapshots):
            parts = _parts(self.items[index])
            if len(parts) != len(snapshot) or not all(map(operator.is_, parts, snapshot)):
                indices.append(index)
        return indices


def _parts(container: Any) -> tuple[object, ...]:
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return tuple(container)


_CONTAINER_KINDS: dict[type, str] = {
    list: "list", set: "set", dict: "dict", bytearray: "bytearray", deque: "deque", Counter: "Counter",
    OrderedDict: "OrderedDict", defaultdict: "defaultdict",
}  # fmt: skip
_CONTAINER_CLASSES = {kind: container_class for container_class, kind in _CONTAINER_KINDS.items()}
_DATES: dict[type, tuple[str, ...]] = {
    date: ("year", "month", "day"),
    time: ("hour", "minute", "second", "microsecond"),
    datetime: ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    timedelta: ("days", "seconds", "microseconds"),
}
_DATE_CLASSES = {date_class.__name__: date_class for date_class in _DATES}
_LARGEST_JSON_NUMBER = 2**63
_ARRAY_DTYPE = re.compile(r"[<>|=]?[biufcSU]\d+")


class Peer:
    """One end of the connection of two processes: asks the other one for operations, and does what it asks for.

    Args:
        reader: file descriptor of what the other process writes.
        writer: file descriptor of what it reads.
        guarded: the other process is not trusted. It may use what it has been passed, but not look behind it: no
            attributes that begin with an underscore, none of functions, classes or frames.
        printed: buffer of what this process prints; replies carry it to the other one's ``sys.stdout``.

    Attributes:
        ended: a request has failed because the other process has ended.
    """

    def __init__(self, reader: int, writer: int, *, guarded: bool, printed: io.BytesIO | None = None) -> None:
        self._reader = reader
        self._writer = writer
        self._guarded = guarded
        self._printed = printed
        self.ended = False
        self._lock = threading.RLock()
        self._exported: dict[int, object] = {}
        self._export_ids: dict[int, int] = {}
        self._remotes: WeakValueDictionary[int, Remote] = WeakValueDictionary()
        self._classes: dict[int, type] = {}

    def request(self, operation: str, *operands: object, **keywords: object) -> Any:
        """Let the other process do an operation, and return its result or raise what it raised."""
        with self._lock, self._noticing_the_end():
            containers = _Containers()
            arguments = [self._encode(operand, containers) for operand in operands]
            by_keyword = [[name, self._encode(value, containers)] for name, value in keywords.items()]
            self._send(["request", operation, arguments, by_keyword])
            # Until the reply arrives, the other process may ask back, for a function that it was passed
            while True:
                message = self._receive()
                if message[0] != "request":
                    break
                self._serve(message)
            result = self._read_reply(message, containers)
        if message[0] == "raised":
            # In `all(map(answer, inputs))`, it would end the loop before an input that the answer gets wrong
            if isinstance(result, StopIteration | StopAsyncIteration) and operation != "next":
                raise RuntimeError(f"a call raised {type(result).__name__}, which only next() may do") from result
            raise result
        return result

    def serve_requests(self) -> None:
        """Do what the other process asks for, until it ends."""
        while True:
            self._serve(self._receive())

    def send_reply(self, value: object) -> None:
        """Send a reply that nobody has asked for; `receive_reply` reads it."""
        self._send(["returned", self._encode(value, _Containers()), [], self._take_printed()])

    def receive_reply(self) -> object:
        """Return the value of such a reply."""
        return self._read_reply(self._receive(), _Containers())

    # Messages

    @contextmanager
    def _noticing_the_end(self) -> Iterator[None]:
        try:
            yield
        except OtherProcessEndedError:
            self.ended = True
            raise

    def _send(self, message: list[Any]) -> None:
        data = frame(json.dumps(message, separators=(",", ":")).encode())
        while data:
            try:
                sent = os.write(self._writer, data)
            except BrokenPipeError as error:
                raise OtherProcessEndedError from error
            data = data[sent:]

    def _receive(self) -> list[Any]:
        message = read_frame(self._reader)
        try:
            content = json.loads(message)
        except ValueError as error:
            raise OtherProcessEndedError from error
        if not isinstance(content, list) or len(content) != 4:
            raise OtherProcessEndedError("the message is no list of four")
        return content

    def _serve(self, message: list[Any]) -> None:
        containers = _Containers()
        try:
            # What is asked for, and by which arguments
            _, operation, arguments, by_keyword = message
            operands = [self._decode(argument, containers) for argument in arguments]
            keywords = {name: self._decode(value, containers) for name, value in by_keyword}
            containers.take_snapshots()
            if self._guarded:
                _guard(operation, operands, is_ours=arguments[0][0] == "yours")

            # The reply: the result, and the arguments that have changed
            result = _SERVED[operation](*operands, **keywords)
            encoded = self._encode(result, containers)
            changed = containers.changed()
            changes = [[index, self._encode_parts(containers.items[index], containers)] for index in changed]
            reply = ["returned", encoded, changes, self._take_printed()]
        except OtherProcessEndedError:
            raise
        except BaseException as error:
            reply = ["raised", self._encode_safely(error), [], self._take_printed()]
        self._send(reply)

    def _read_reply(self, message: list[Any], containers: _Containers) -> Any:
        try:
            kind, encoded, changes, printed = message
            if kind not in ("returned", "raised"):
                raise ValueError(kind)
            num_arguments = len(containers.items)
            result = self._decode(encoded, containers)
            if kind == "raised" and not isinstance(result, BaseException):
                raise ValueError(result)
            for index, parts in changes:
                self._change(containers.items[:num_arguments][index], parts, containers)
            text = printed[:MAX_PRINTED]
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise OtherProcessEndedError("the reply cannot be read") from error
        if text:
            sys.stdout.write(text)
        return result

    def _take_printed(self) -> str:
        if self._printed is None:
            return ""
        text = self._printed.getvalue()[:MAX_PRINTED].decode(errors="replace")
        self._printed.seek(0)
        self._printed.truncate()
        return text

    # From objects to messages

    def _encode(self, value: Any, containers: _Containers) -> Encoded:
        kind = type(value)
        # What JSON has itself
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            if abs(value) < _LARGEST_JSON_NUMBER:
                return value
            return ["int", hex(value)]

        # What came from the other process, copies, and at last what stays here
        remote = _remote_of(value)
        if isinstance(remote, Remote):
            return ["yours", remote._sandbox_id]
        if kind in _CONTAINER_KINDS:
            return self._encode_container(value, containers)
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self._encode(part, containers) for part in value]]
        encoded = _encode_constant(value)
        if encoded is not None:
            return encoded
        if kind is slice:
            bounds = (value.start, value.stop, value.step)
            return ["slice", [self._encode(bound, containers) for bound in bounds]]
        return self._encode_object(value, containers)

    def _encode_container(self, container: Any, containers: _Containers) -> Encoded:
        index = containers.index(container)
        if index is not None:
            return ["same", index]
        containers.add(container)
        option: object = None
        if isinstance(container, deque):
            option = container.maxlen
        elif isinstance(container, defaultdict) and container.default_factory in _BASES:
            option = getattr(container.default_factory, "__name__", None)
        kind = _CONTAINER_KINDS[type(container)]
        return [kind, self._encode_parts(container, containers), option]

    def _encode_parts(self, container: Any, containers: _Containers) -> Encoded:
        if isinstance(container, dict):
            items = container.items()
            return [[self._encode(key, containers), self._encode(value, containers)] for key, value in items]
        if isinstance(container, bytearray):
            return container.hex()
        return [self._encode(part, containers) for part in container]

    def _encode_object(self, value: Any, containers: _Containers) -> Encoded:
        if isinstance(value, BaseException):
            arguments = [self._encode(argument, containers) for argument in value.args]
            return ["error", self._encode_class(type(value)), arguments, str(value), self._export(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error_class", self._encode_class(value)]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", self._export(value)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__, self._export(value)]
        for base in _BASES:
            if isinstance(value, base):
                return ["attached", self._export(value), self._encode(base(value), containers)]
        return ["mine", self._export(value)]

    def _encode_class(self, error_class: type) -> Encoded:
        remote = _remote_of(error_class)
        if isinstance(remote, Remote):
            return ["yours", remote._sandbox_id]
        if _known_class(error_class.__module__, error_class.__qualname__) is error_class:
            return ["known", error_class.__module__, error_class.__qualname__]
        bases = [base for base in error_class.__bases__ if issubclass(base, BaseException)]
        return ["new", error_class.__name__, self._export(error_class), self._encode_class(bases[0])]

    def _encode_safely(self, error: BaseException) -> Encoded:
        try:
            encoded = self._encode(error, _Containers())
            json.dumps(encoded)
        except BaseException:
            encoded = ["error", ["known", "builtins", "RuntimeError"], [], "", None]
        return encoded

    def _export(self, value: object) -> int:
        export_id = self._export_ids.get(id(value))
        if export_id is None:
            export_id = len(self._exported)
            self._exported[export_id] = value
            self._export_ids[id(value)] = export_id
        return export_id

    # From messages to objects. Wrong ones raise a TypeError, ValueError or LookupError

    def _decode(self, encoded: Encoded, containers: _Containers) -> Any:
        if not isinstance(encoded, list):
            if encoded is None or isinstance(encoded, bool | int | float | str):
                return encoded
            raise ValueError("a JSON object")
        kind, *fields = encoded

        # Objects of ours, of the other process, and copies
        if kind in _CONTAINER_CLASSES:
            return self._decode_container(kind, *fields, containers=containers)
        if kind == "same":
            return containers.items[fields[0]]
        if kind == "yours":
            return self._exported[fields[0]]
        if kind == "mine":
            return self._remote(fields[0])
        if kind in ("tuple", "frozenset", "slice"):
            parts = [self._decode(part, containers) for part in fields[0]]
            if kind == "slice":
                return slice(*parts)
            return {"tuple": tuple, "frozenset": frozenset}[kind](parts)
        if kind == "attached":
            value = self._decode(fields[1], containers)
            attached: Any = _ATTACHED[type(value)](value)
            attached.__dict__["_remote"] = self._remote(fields[0])
            return attached
        if kind == "error":
            return self._decode_error(*fields, containers=containers)
        if kind == "error_class":
            return self._decode_class(fields[0])
        if kind == "coroutine":
            return self._coroutine(self._remote(fields[0]))
        if kind == "module":
            name, remote_id = fields
            return _imported(name) or self._remote(remote_id)
        return _decode_constant(kind, fields)

    def _decode_container(self, kind: str, parts: Encoded, option: Any, *, containers: _Containers) -> Any:
        container = _CONTAINER_CLASSES[kind]()
        if isinstance(container, deque):
            container = deque(maxlen=option)
        elif isinstance(container, defaultdict) and option is not None:
            factories = {base.__name__: base for base in _BASES}
            container.default_factory = factories[option]
        containers.add(container)
        self._change(container, parts, containers)
        return container

    def _change(self, container: Any, parts: Encoded, containers: _Containers) -> None:
        """Replace all parts of a container."""
        if isinstance(container, bytearray):
            container[:] = bytes.fromhex(parts)
        elif isinstance(container, dict):
            items = [(self._decode(key, containers), self._decode(value, containers)) for key, value in parts]
            container.clear()
            for key, value in items:
                container[key] = value
        else:
            decoded = [self._decode(part, containers) for part in parts]
            container.clear()
            if isinstance(container, set):
                container.update(decoded)
            else:
                container.extend(decoded)

    def _remote(self, remote_id: int) -> Remote:
        if type(remote_id) is not int:
            raise ValueError(remote_id)
        remote = self._remotes.get(remote_id)
        if remote is None:
            remote = Remote(self, remote_id)
            self._remotes[remote_id] = remote
        return remote

    def _coroutine(self, remote: Remote) -> Coroutine[Any, Any, object]:
        async def wait() -> object:
            return self.request("await", remote)

        return wait()

    def _decode_error(
        self, encoded_class: Encoded, arguments: Encoded, text: str, remote_id: int | None, *, containers: _Containers
    ) -> BaseException:
        error_class = self._decode_class(encoded_class)
        decoded = [self._decode(argument, containers) for argument in arguments]
        try:
            error = error_class(*decoded)
        except Exception:  # its class needs other arguments than those that it keeps
            error = error_class.__new__(error_class)
            error.args = tuple(decoded)
        if _lives_remotely(error_class) and remote_id is not None:
            error.__dict__.update(_remote=self._remote(remote_id), _text=str(text))
        return error

    def _decode_class(self, encoded: Encoded) -> type[BaseException]:
        kind, *fields = encoded
        if kind == "known":
            error_class = _known_class(*fields)
        elif kind == "yours":
            error_class = self._exported[fields[0]]
        else:
            name, remote_id, base = fields
            error_class = self._classes.get(remote_id)
            if error_class is None:
                names = {"_remote": self._remote(remote_id), "__str__": _text_of, "__getattr__": _Attached.__getattr__}
                error_class = type(str(name), (self._decode_class(base),), names)
                self._classes[remote_id] = error_class
        if isinstance(error_class, type) and issubclass(error_class, BaseException):
            return error_class
        raise ValueError(f"{encoded} is no class of errors")


def _text_of(error: BaseException) -> str:
    text: str = error.__dict__.get("_text", "")
    return text


def _imported(name: str) -> types.ModuleType | None:
    """Return a module that changes nothing when it is imported: of numpy or the standard library; None for others."""
    parts = name.split(".")
    packages = sys.stdlib_module_names - {"antigravity", "idlelib", "test", "this", "turtledemo"} | {"numpy"}
    if parts[0] not in packages or any(part.startswith("_") for part in parts):
        return None
    return importlib.import_module(name)


def _known_class(module: str, name: str) -> object:
    """Return a class of errors of the standard library, or None."""
    if "." in name:
        return None
    return getattr(_imported(module), name, None)


def _encode_constant(value: Any) -> Encoded:
    """Return the message of a value without parts that may be objects; None for all other values."""
    kind = type(value)
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", *map(hex, (value.start, value.stop, value.step))]
    if value is Ellipsis:
        return ["Ellipsis"]
    if kind in _DATES and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, [getattr(value, field) for field in _DATES[kind]]]
    if isinstance(value, type | types.BuiltinFunctionType):
        name: str = value.__name__
        if getattr(builtins, name, None) is value:
            return ["builtin", name]
    return _encode_number(value, kind)


def _encode_number(value: Any, kind: type) -> Encoded:
    # Their modules are loaded if there is one of them
    fractions = sys.modules.get("fractions")
    if fractions and kind is fractions.Fraction:
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    decimals = sys.modules.get("decimal")
    if decimals and kind is decimals.Decimal:
        return ["Decimal", str(value)]
    numpy: Any = sys.modules.get("numpy")
    is_array = hasattr(numpy, "ndarray") and kind is numpy.ndarray
    is_scalar = hasattr(numpy, "generic") and isinstance(value, numpy.generic)
    if (is_array or is_scalar) and value.dtype.kind in "biufcSU":
        return ["array", value.dtype.str, list(value.shape), value.tobytes().hex(), is_scalar]
    return None


def _decode_constant(kind: str, fields: list[Any]) -> object:
    # Built-in classes
    if kind == "int":
        return int(fields[0], 16)
    if kind == "bytes":
        return bytes.fromhex(fields[0])
    if kind == "complex":
        return complex(*fields)
    if kind == "range":
        return range(*[int(field, 16) for field in fields])
    if kind == "Ellipsis":
        return Ellipsis
    if kind in _DATE_CLASSES:
        return _DATE_CLASSES[kind](*fields[0])
    if kind == "builtin" and fields[0] in vars(builtins):
        return getattr(builtins, fields[0])

    # Classes whose modules are imported only where they are met
    if kind == "Fraction":
        from fractions import Fraction

        return Fraction(*[int(field, 16) for field in fields])
    if kind == "Decimal":
        from decimal import Decimal

        return Decimal(fields[0])
    if kind == "array" and _ARRAY_DTYPE.fullmatch(fields[0]):
        import numpy as np

        dtype, shape, data, is_scalar = fields
        array = np.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()
        if is_scalar:
            return array[()]
        return array
    raise ValueError(f"no such kind: {kind!r:.100}")


def _guard(operation: str, operands: list[Any], *, is_ours: bool) -> None:
    """Raise a PermissionError if the process that is not trusted looks behind what it was passed.

    Only what this process has passed is operated on (``is_ours``), not ``eval``, which the other one may name as well.
    """
    error = PermissionError(f"{operation} of an object of the tests")
    if not is_ours or operation in ("isinstance", "issubclass", "await", "enter", "exit", "format"):
        raise error
    if operation in ("getattr", "setattr", "delattr"):
        target, name, *_ = operands
        is_code = isinstance(target, type | types.ModuleType | _CODE)
        if is_code or type(name) is not str or name.startswith("_"):
            raise error
        # Methods of built-in classes are more than they seem: "{0.__class__}".format reads attributes
        if isinstance(getattr(target, name, None), types.BuiltinMethodType):
            raise error


_CODE = (
    types.FunctionType
    | types.MethodType
    | types.GeneratorType
    | types.CoroutineType
    | types.AsyncGeneratorType
    | types.CodeType
    | types.FrameType
    | types.TracebackType
)
"""Objects that lead to the variables of the tests."""
