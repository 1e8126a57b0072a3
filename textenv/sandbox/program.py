"""The process that tests an answer: it starts the two that run the answer and the tests, and ends them.

``python -c "from sandbox.program import main; main()"``, with the order on its standard input: see `Order`. Imports
here are relative and of the standard library alone, because the process starts without our packages.
"""

import _ast
import builtins
import importlib
import io
import json
import os
import select
import signal
import stat
import sys
import time
import types
from contextlib import suppress
from typing import Any, NamedTuple

from .confinement import confine, end_with_parent, limit
from .remote import OtherProcessEndedError, Peer, Remote, read_frame

PASSED = b"1"
"""Byte that is written for a test that passes."""
FAILED = b"0"
"""Byte that is written for a test that fails."""
BROKEN = b"!"
"""Byte before the message of an error that is not the answer's."""

_FILE_BYTES = 2**24
_OPEN_FILES = 64
_FOLDER_BYTES = 2**26
_FOLDER_ENTRIES = 1000
_SECONDS_BETWEEN_LOOKS = 0.1
"""How often the size of the folder is looked at, in seconds."""


class Order(NamedTuple):
    """What to run. A second message, which only the process of the tests reads, is the list of tests."""

    code: str
    folder: str
    readable: list[str]
    seconds: int
    memory_bytes: int
    confined: bool


def main() -> None:
    """Run the tests, and write a byte for each (`PASSED`, `FAILED`) to the standard output."""
    processes = []
    parent_has_gone = False
    try:
        order = Order(*json.loads(read_frame(0)))
        requests = os.pipe()
        replies = os.pipe()
        end = os.pipe()

        # The answer's process is the first one: no memory that it copies has ever held a test
        for run in (_run_answer, _run_tests):
            process = os.fork()
            if process == 0:
                _run_and_exit(run, order, requests, replies, end)
            processes.append(process)
        for descriptor in (*requests, *replies, end[1]):
            os.close(descriptor)
        parent_has_gone = _wait_for_end(end[0], order)
    except BaseException as error:
        os.write(1, BROKEN + repr(error).encode(errors="replace"))
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    if parent_has_gone:
        _remove(order.folder)


def _run_and_exit(run: Any, order: Order, requests: Any, replies: Any, end: Any) -> None:
    try:
        end_with_parent()
        run(order, requests, replies, end)
    except OtherProcessEndedError:
        pass
    except BaseException as error:
        os.write(1, BROKEN + repr(error).encode(errors="replace"))
    finally:
        os._exit(0)


def _wait_for_end(end: int, order: Order) -> bool:
    """Wait until the tests have ended, the time is over, the folder is full or our own parent has gone.

    Returns whether the parent has gone, or wants us to end.
    """
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(0, 0)  # reports that the other end is closed, and no data
    deadline = time.monotonic() + 2 * order.seconds
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        events = poll.poll(1000 * min(remaining, _SECONDS_BETWEEN_LOOKS))
        descriptors = [descriptor for descriptor, _ in events]
        if descriptors or _is_full(order.folder):
            return 0 in descriptors


def _remove(folder: str) -> None:
    """Remove the folder of a parent that may have been killed."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _is_full(folder: str) -> bool:
    """Return whether a folder has too many files or bytes, or parts that cannot be looked at."""
    num_bytes = 0
    num_entries = 0
    folders = [folder]
    while folders:
        # What is in the next folder
        try:
            entries = list(os.scandir(folders.pop()))
        except FileNotFoundError:  # removed meanwhile; the others count
            continue
        except OSError:
            return True

        # How large it is
        for entry in entries:
            num_entries += 1
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                return True
            num_bytes += 512 * status.st_blocks
            if stat.S_ISDIR(status.st_mode):
                folders.append(entry.path)
            if num_bytes > _FOLDER_BYTES or num_entries > _FOLDER_ENTRIES:
                return True
    return False


def _close_off(order: Order, kept: dict[int, int]) -> None:
    """Limit this process and close it off; it keeps these file descriptors, by their new numbers, and no others."""
    limit(order.seconds, order.memory_bytes, _FILE_BYTES, _OPEN_FILES)
    if order.confined:
        confine(order.folder, order.readable)
    highest = max(*kept, *kept.values()) + 1
    copies = {number: os.dup2(descriptor, highest + number) for number, descriptor in kept.items()}
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for number, copy in copies.items():
        os.dup2(copy, number)
    os.closerange(max(kept) + 1, _OPEN_FILES)


# The answer's process


def _run_answer(order: Order, requests: tuple[int, int], replies: tuple[int, int], end: tuple[int, int]) -> None:
    """Execute the answer, then do what the tests ask for."""
    os.close(end[1])
    _close_off(order, {3: requests[0], 4: replies[1]})
    printed = io.BytesIO()
    sys.stdout = io.TextIOWrapper(printed, encoding="utf-8", errors="replace", write_through=True)
    peer = Peer(3, 4, guarded=False, printed=printed)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)

    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(order.code, "<answer>", "exec"), module.__dict__)
    peer.send_reply(_Names(module.__dict__))
    peer.serve_requests()


class _Names:
    """Names that the tests look up in the answer."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.lookup = names.__getitem__


# The tests' process


def _run_tests(order: Order, requests: tuple[int, int], replies: tuple[int, int], end: tuple[int, int]) -> None:
    """Execute the tests, and write their results."""
    verdicts = 5
    _close_off(order, {0: 0, 3: replies[0], 4: requests[1], verdicts: 1, 6: end[1]})
    peer = Peer(3, 4, guarded=True)
    names = peer.receive_reply()
    if not isinstance(names, Remote):
        return
    tests = json.loads(read_frame(0))
    os.dup2(1, 0)

    space = _TestSpace(names.lookup, _TrustedNames(tests))
    for text in tests:
        verdict = PASSED
        try:
            exec(text, space)
        except BaseException:
            verdict = FAILED
        if peer.ended:
            return
        os.write(verdicts, verdict)


class _TestSpace(dict[str, Any]):
    """Names of the tests. What they have not set themselves is the answer's, except built-in functions and modules."""

    def __init__(self, lookup: Any, trusted: "_TrustedNames") -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._lookup = lookup
        self._trusted = trusted

    def __missing__(self, name: str) -> object:
        if name in self._trusted.modules:
            self[name] = importlib.import_module(_MODULES[name])
            return self[name]
        if name in self._trusted.builtins:
            raise KeyError(name)
        value = self._lookup(name)
        # A function or class is the same next time; a number may change
        if type(value) is Remote:
            self[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), self) is not self

    def get(self, name: str, default: Any = None) -> Any:
        """Return a name's value, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


_MODULES = {
    "np": "numpy", "numpy": "numpy", "math": "math", "cmath": "cmath", "statistics": "statistics",
    "itertools": "itertools", "functools": "functools", "collections": "collections", "operator": "operator",
    "re": "re", "json": "json",
}  # fmt: skip
"""Modules that tests use by these names without importing them, since answers do."""


class _TrustedNames:
    """Names that tests do not set, and that are nevertheless not the answer's: built-in functions and modules.

    A test that says ``len(f(2)) == 3`` means the real ``len``, although the answer may define another. But if all names
    of all tests are built-in, as in ``sum(10, 15) == 6``, then the answer has defined ``sum``, and is tested for it.

    Args:
        tests: all tests of an answer.
    """

    def __init__(self, tests: list[str]) -> None:
        # Names that any of the tests reads or sets, and those of which it reads an attribute
        read: set[str] = set()
        bound: set[str] = set()
        with_attributes: set[str] = set()
        for test in tests:
            for node in _syntax_nodes(test):
                if isinstance(node, _ast.Name) and isinstance(node.ctx, _ast.Load):
                    read.add(node.id)
                elif isinstance(node, _ast.Name):
                    bound.add(node.id)
                elif isinstance(node, _ast.arg):
                    bound.add(node.arg)
                elif isinstance(node, _ast.FunctionDef | _ast.AsyncFunctionDef | _ast.ClassDef):
                    bound.add(node.name)
                elif isinstance(node, _ast.alias):
                    bound.add((node.asname or node.name).partition(".")[0])
                elif isinstance(node, _ast.Attribute) and isinstance(node.value, _ast.Name):
                    with_attributes.add(node.value.id)

        # What is the answer's after all
        self.modules = (with_attributes & _MODULES.keys()) - bound
        self.builtins = set(vars(builtins))
        if not read - bound - self.modules - self.builtins:
            self.builtins = set()


def _syntax_nodes(test: str) -> list[_ast.AST]:
    """Return all nodes of a test's syntax tree; none if it has no valid syntax."""
    only_tree = 0x400
    nodes = []
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        waiting: list[Any] = [compile(test, "<tests>", "exec", only_tree)]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, _ast.AST):
                nodes.append(node)
                waiting += [getattr(node, field, None) for field in node._fields]
    return nodes
