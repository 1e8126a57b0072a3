"""Fuzzing the readers of outside data: whatever stands in a file or comes back from a user's function is either read
or refused by an error that says what was wrong; nothing else is raised, and nothing hangs.

    python tests/fuzz/fuzzing.py --inputs 100000
    python tests/fuzz/fuzzing.py --inputs 2000 --targets scores prompts

An input is a string of bytes drawn (and made short where it fails) by hypothesis; a target builds from it what it
hands to a reader: mutations of real files, or Python objects. `tests/fuzz/test_fuzz.py` runs a few hundred of each.
"""

import contextlib
import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

ALLOWED = (ValueError, TypeError, OSError)
"""What a reader may raise, in words of its own."""
BARE = (UnicodeError, json.JSONDecodeError)
"""ValueErrors that speak of bytes, and not of files."""
SECONDS = 5.0
"""Of processor time for the inputs of one string of bytes; more is a hang."""
CHUNK = 5_000
"""Strings of bytes that hypothesis draws with one seed: it remembers them all."""
TURNS = 10
"""Inputs from one string of bytes, each beginning at another place of it: to draw is what takes the time."""


class BrokenError(Exception):
    """A reader did what it must not."""


class HangError(BrokenError):
    """It took too long."""


class Dice:
    """Choices by bytes, two for each; the first of everything when they are used up."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def below(self, n):
        pair = self.data[self.at : self.at + 2]
        self.at += 2
        return int.from_bytes(pair, "little") % n

    def of(self, items):
        return items[self.below(len(items))]

    @property
    def left(self):
        return self.at < len(self.data)


# --- what is drawn ---------------------------------------------------------------------------------------------------

LEAVES = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308,
    -1e39, float("nan"), float("inf"), float("-inf"), "", " ", "a", "ab c", "1", "-1", "NaN", "\0", "\n", "\ud800",
    "\u202e", "é", "a" * 3000, "prompt", "up", "thumbs", "pairs", "5", "float32", "../..", "__class__", "PCG64",
    "int64", "O", "user",
]  # fmt: skip
KEYS = [
    "prompt", "answer", "role", "content", "a", "", "scale", "completion", "completions", "prompts", "\ud800",
    "tensor", "array", "dict", "list", "words", "dtype", "fields", "numpy_generator", "format", "steps", "n", "shape",
    "__class__",
]  # fmt: skip
SNIPPETS = [
    b'"', b"\n", b"\r", b"\r\n", b",", b"\t", b"\0", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800",
    b"\\", b"[", b"]", b"{", b"}", b":", b"null", b"NaN", b"Infinity", b"-", b"1e999", b"9" * 5000, b"[" * 3000,
    b"[" * 60, b'{"a":' * 3000, b"x" * 70_000, b"\xe2\x80\xae", b'"prompt"', b"{}", b"[]", b"0", b"\xf0\x9f\x98\x80",
    b"''",
]  # fmt: skip


def anything(dice, depth=3):
    """A value that JSON can hold, or almost."""
    kind = dice.below(6) if depth else 5
    if kind == 0:
        return [anything(dice, depth - 1) for _ in range(dice.below(4))]
    if kind == 1:
        return {dice.of(KEYS): anything(dice, depth - 1) for _ in range(dice.below(4))}
    return dice.of(LEAVES)


def changed(tree, dice):
    """The tree with up to three of its places taken out, exchanged or replaced; it is itself changed."""
    root = [tree]
    for _ in range(dice.below(4)):
        owner, place = dice.of(_places(root))
        action = dice.below(4)
        if action == 0 and owner is not root:
            del owner[place]
        elif action == 1:
            other, there = dice.of(_places(root))
            owner[place] = json.loads(json.dumps(other[there]))
        elif action == 2 and isinstance(owner, dict):
            owner[dice.of(KEYS)] = owner.pop(place)
        else:
            owner[place] = anything(dice)
    return root[0]


def _places(root):
    found, left = [], [root]
    while left:
        owner = left.pop()
        for place in list(owner) if isinstance(owner, dict) else range(len(owner)):
            found.append((owner, place))
            if isinstance(owner[place], (dict, list)):
                left.append(owner[place])
    return found


def edited(data, dice):
    """The bytes with up to three places cut off, flipped, put in, taken out or written twice."""
    for _ in range(dice.below(4)):
        at, action = dice.below(len(data) + 1), dice.below(5)
        if action == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << dice.below(8))]) + data[at + 1 :]
        elif action == 1:
            data = data[:at]
        elif action == 2:
            data = data[:at] + dice.of(SNIPPETS) + data[at:]
        elif action == 3:
            data = data[:at] + data[at + dice.below(40) :]
        else:
            data = data[:at] + data[at : at + dice.below(40)] * 2 + data[at:]
    return data


def text_of(dice, words, most=30):
    """Some of these words, a few of them many times."""
    said = []
    while dice.left and len(said) < most:
        times = 3000 if dice.below(64) == 1 else dice.of([1, 1, 1, 1, 1, 1, 2, 3, 40])
        said.append(dice.of(words) * (times if len(said) < 6 else 1))
    return "".join(said)


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Target:
    """A reader, and what is given to it."""

    read: Callable[[Dice], object]
    """Builds an input and reads it."""
    says: str = ""
    """What every error must say, a regular expression: the name of what was given."""
    longest: int = 48
    """Most bytes of an input."""


@dataclass
class Tally:
    """What came of the inputs so far."""

    inputs: int = 0
    read: int = 0
    errors: Counter = field(default_factory=Counter)


TARGETS: dict[str, Target] = {}


def target(**options):
    """Register a function as the target of its name."""

    def register(function):
        TARGETS[function.__name__] = Target(function, **options)
        return function

    return register


def attempt(chosen, data, tally):
    """Read one input, and raise `BrokenError` if the reader does what it must not."""
    tally.inputs += 1
    try:
        chosen.read(Dice(data))
        tally.read += 1
    except BrokenError:
        raise
    except ALLOWED as error:
        if isinstance(error, BARE) or not re.search(chosen.says, str(error), re.DOTALL) or not str(error).strip():
            raise BrokenError(f"{type(error).__name__} does not say {chosen.says!r}: {str(error)[:300]!r}") from error
        tally.errors[type(error).__name__] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise BrokenError(f"{type(error).__name__}: {str(error)[:300]!r}") from error


@contextlib.contextmanager
def limited():
    """`HangError` after so much processor time; the alarm clock is pytest-timeout's."""

    def stop(*_):
        raise HangError(f"it was not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fuzz(name, inputs, *, start=0):
    """Give a target so many inputs; returns the tally, or raises what the shortest that failed did."""
    chosen, tally = TARGETS[name], Tally()
    chunk = start
    while tally.inputs < inputs:
        chunk += 1

        @seed(chunk)
        @settings(
            max_examples=min(CHUNK, -(-(inputs - tally.inputs) // TURNS)),
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.binary(min_size=2 * TURNS, max_size=chosen.longest))
        def look(data):
            for begun in dict.fromkeys(data[2 * turn :] + data[: 2 * turn] for turn in range(TURNS)):
                with limited():
                    attempt(chosen, begun, tally)

        look()
    return tally
