"""Honest answers: what tests see of the objects of another process."""

import pytest

from tests.helpers.sandbox import closed_or_skip
from textenv.sandbox.running import CodeTester


@pytest.fixture(scope="module")
def closed():
    closed_or_skip()
    return CodeTester(seconds=5, memory_mb=1024, unsafe=False)


def failing(closed, code, tests):
    """The tests that do not pass, each tried alone."""
    return [test for test in tests if closed.count_passed(code, [test]) != 1]


def test_plain_data_come_back_equal_and_of_the_same_class(closed):
    values = """
import collections as c, datetime as d, decimal, fractions, math
values = [
    None, True, False, ..., 0, -1, 10**99, -(2**63), 1.5, -0.0, math.inf, 1j, "", "\\ud800é", b"a", bytearray(b"b"),
    [], [1, [2]], (1, (2,)), {1: {"a": [2]}}, {1, 2}, frozenset({3}), range(3, 9, 2), slice(1, None),
    c.deque([1, 2], maxlen=2), c.Counter("aab"), c.OrderedDict(a=1), c.defaultdict(list, {1: [2]}),
    d.date(2020, 1, 2), d.time(1, 2, 3), d.datetime(2020, 1, 2, 3), d.timedelta(1, 2), fractions.Fraction(1, 3),
    decimal.Decimal("1.50"), len, int, ValueError, math,
]
"""
    check = "for v in values:\n    assert same(v) == v and type(same(v)) is type(v) and repr(same(v)) == repr(v), v"
    tests = [
        values + check,
        "import math\nassert math.isnan(same(math.nan)) and same(10**5000) == 10**5000",
        "x = [1]\nx.append(x)\nassert same(x)[1] is x",
    ]
    assert failing(closed, "def same(x): return x", tests) == []


def test_arguments_are_changed_in_place_and_keep_their_identity(closed):
    code = """
def sort(x): x.sort()
def swap(matrix): matrix[0][0], matrix[1][1] = matrix[1][1], matrix[0][0]
def clear(mapping, items): mapping.clear(); items.add(3); return mapping
def grow(x): x += b"x"
"""
    tests = [
        "x = [3, 1, 2]\nassert sort(x) is None and x == [1, 2, 3]",
        "m = [[1, 2], [3, 4]]\nrow = m[0]\nswap(m)\nassert m == [[4, 2], [3, 1]] and m[0] is row",
        "d = {1: 2}\ns = {1}\nassert clear(d, items=s) is d and d == {} and s == {1, 3}",
        "b = bytearray(b'a')\ngrow(b)\nassert b == b'ax'",
    ]
    assert failing(closed, code, tests) == []


CLASSES = """
from dataclasses import dataclass
from collections import namedtuple
import enum

class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __enter__(self): return self
    def __exit__(self, kind, error, traceback): return kind is KeyError

@dataclass(order=True, frozen=True)
class Point:
    x: int
    y: int = 2
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)

class Color(enum.IntEnum):
    RED = 1

class Letter(enum.Enum):
    A = "a"

Pair = namedtuple("Pair", "a b")

class CodeError(ValueError):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code

def check(x):
    if x < 0: raise CodeError(x)
    return x

def count(n):
    yield from range(n)
"""


@pytest.mark.heavy
def test_classes_objects_generators_and_errors(closed):
    tests = [
        "s = Stack()\ns.push(1)\ns.push(2)\ns[0] = 5\nassert len(s) == 2 and list(s) == [5, 2] and s[0:2] == [5, 2]\n"
        "assert 2 in s and 3 not in s and s.items == [5, 2] and s.pop() == 2 and s and isinstance(s, Stack)",
        "s = Stack()\ntry: s.pop()\nexcept IndexError as e: assert 'empty' in str(e)\nelse: 1 / 0",
        "s = Stack()\ns.items = [7]\nassert s.pop() == 7 and hasattr(s, 'push') and not hasattr(s, 'x') and not s",
        "with Stack() as s: raise KeyError",
        "assert not isinstance(3, Stack) and callable(check) and check.__name__ == 'check'",
        "p = Point(1)\nassert p + p == Point(2, 4) != p and p < Point(2) and {p, Point(1)} == {p}",
        "p = Point(1)\nassert repr(p) == str(p) == f'{p}' == 'Point(x=1, y=2)' and max(p, Point(3)).x == 3",
        "try: Point(1).x = 3\nexcept AttributeError: pass\nelse: 1 / 0",
        "assert Color.RED == 1 and Color.RED.name == 'RED' and Letter.A.value == 'a' and Letter('a') is Letter.A",
        "assert Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1 and Pair(1, 2)._replace(a=5).a == 5",
        "try: check(-1)\nexcept CodeError as e: assert e.code == -1 and str(e) == 'code -1'\nelse: 1 / 0",
        "try: check(-1)\nexcept ValueError: pass\nelse: 1 / 0",
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and next(count(1)) == 0",
        """
import unittest
class Test(unittest.TestCase):
    def test(self):
        with self.assertRaises(CodeError): check(-2)
        self.assertEqual(check(3), 3)
result = unittest.TestLoader().loadTestsFromTestCase(Test).run(unittest.TestResult())
assert result.testsRun == 1 and result.wasSuccessful(), result
""",
    ]
    assert failing(closed, CLASSES, tests) == []


def test_functions_and_objects_of_the_tests_are_passed_to_the_answer(closed):
    code = """
def apply(g, x): return g(x)
def compose(f, g): return lambda x: f(g(x))
def total(node):
    total = 0
    while node:
        total += node.value
        node.value = 0
        node = node.next
    return total
"""
    node = "class Node:\n    def __init__(self, v, n=None): self.value, self.next = v, n\n"
    tests = [
        "assert apply(lambda x: x + 1, 3) == 4",
        "calls = []\napply(calls.append, 3)\nassert calls == [3]",
        "assert compose(lambda x: x * 2, lambda x: x + 1)(3) == 8",
        "try: apply(lambda x: 1 / 0, 3)\nexcept ZeroDivisionError: pass\nelse: 1 / 0",
        "class E(Exception): pass\ndef g(x): raise E\ntry: apply(g, 3)\nexcept E: pass\nelse: 1 / 0",
        node + "n = Node(1, Node(2))\nassert total(n) == 3 and n.next.value == 0",
        "def check(candidate):\n    assert candidate(abs, -2) == 2\ncheck(apply)",
    ]
    assert failing(closed, code, tests) == []


@pytest.mark.heavy
def test_coroutines_printing_and_numpy(closed):
    code = """
import asyncio
import math
import numpy as np
async def double(x):
    await asyncio.sleep(0)
    return 2 * x
def hello(): print("hi")
def twice(x): return np.array(x) * 2
def scalar(x): return np.int64(x)
"""
    tests = [
        "import asyncio\nassert asyncio.run(double(2)) == 4",
        "import asyncio\nasync def main(): return await asyncio.gather(double(1), double(2))\n"
        "assert asyncio.run(main()) == [2, 4]",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as text: hello()\n"
        "assert text.getvalue() == 'hi\\n'",
        "assert np.allclose(twice([1, 2]), [2, 4]) and (twice([1, 2]) == np.array([2, 4])).all()",
        "import numpy\nassert twice(numpy.zeros((2, 3))).shape == (2, 3) and twice([1.5]).dtype == float",
        "assert math.isclose(scalar(3), 3) and 'hello' in globals() and globals().get('x') is None",
    ]
    assert failing(closed, code, tests) == []


def test_an_answer_may_have_the_name_of_a_built_in_function(closed):
    code = "def sum(a, b): return 10 * a + b\ndef f(x): return [x]"
    assert closed.count_passed(code, ["assert sum(1, 2) == 12"]) == 1
    assert closed.count_passed(code, ["assert sum(f(2)) == 2"]) == 1


def test_the_usual_imports_and_files_work(closed):
    code = """
import abc, argparse, array, ast, asyncio, base64, bisect, calendar, collections, concurrent.futures, contextlib, copy
import csv, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq, inspect, io, itertools, json
import locale, logging, math, numpy, operator, os, pathlib, pprint, queue, random, re, shutil, sqlite3, statistics
import string, struct, sys, tempfile, textwrap, threading, time, typing, unittest, uuid, zlib, zoneinfo
zone = zoneinfo.ZoneInfo("UTC")
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "a").write_text("x")
    os.rename(folder + "/a", folder + "/b")
sqlite3.connect("x.db").execute("create table t(a)")
with concurrent.futures.ThreadPoolExecutor(4) as threads:
    texts = list(threads.map(str, range(4)))
"""
    assert failing(closed, code, ["assert texts == ['0', '1', '2', '3'] and uuid.uuid4() and time.time() > 0"]) == []
