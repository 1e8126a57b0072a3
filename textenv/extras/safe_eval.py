"""Filter for texts that will be evaluated as Python: short arithmetic, lists and a few functions."""

import ast
import math
from collections.abc import Collection

MAX_LENGTH = 1000
"""Maximum characters of a text to evaluate."""
MAX_DEGREE = 40
"""Maximum product of nested exponents: ``(9**9)**9`` is refused, ``x**12`` is not."""
FUNCTIONS = frozenset({"exp", "log", "ln", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sqrt",
                       "Abs", "Integral"})  # fmt: skip
"""Functions allowed in an integral."""


def is_harmless(text: str, *, sympy: bool = False, functions: Collection[str] = ()) -> bool:
    """Return True if Python may evaluate a text: bounded arithmetic, lists, and calls of ``functions``.

    Invalid Python fails at once in ``eval`` and is harmless there. ``sympy.parse_expr`` accepts more than Python
    (``5!``); with ``sympy``, anything but plain Python is refused.

    Args:
        text: the policy's text.
        sympy: True if ``sympy.parse_expr`` will evaluate the text, False for ``eval``.
        functions: names of functions that the text may call.
    """
    # Text; two underscores would reach the inside of objects
    if len(text) > MAX_LENGTH or "__" in text:
        return False

    # Syntax
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deep
        return not sympy

    # Operations
    try:
        return _degree(tree.body, functions) <= MAX_DEGREE
    except ValueError:
        return False


def _degree(node: ast.expr, functions: Collection[str]) -> int:
    """Return the largest product of nested exponents in an expression, at least 1.

    Raises:
        ValueError: on a node that is not allowed.
    """
    match node:
        # Leaves, sequences and calls
        case ast.Constant() | ast.Name():
            return 1
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return max((_degree(part, functions) for part in parts), default=1)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in functions:
            degrees = [_degree(part, functions) for part in parts]
            if name == "exp":
                degrees += map(_hidden_degree, parts)
            return max(degrees, default=1)
        # Operators, of numbers only: a multiplication would repeat a text or a list
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _degree(operand, functions)
        case ast.BinOp(left=left, right=right) if _is_text(left) or _is_text(right):
            pass
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), left=left, right=right):
            return max(_degree(left, functions), _degree(right, functions))
        case ast.BinOp(op=ast.Pow(), left=ast.Name(id="E"), right=right) if "exp" in functions:
            return max(_degree(right, functions), _hidden_degree(right))
        case ast.BinOp(op=ast.Pow(), left=base, right=right):
            exponent = _exponent(right)
            if exponent is not None:
                return _degree(base, functions) * exponent
    raise ValueError(f"{type(node).__name__} is not allowed")


def _hidden_degree(argument: ast.expr) -> int:
    """Return a bound of the powers that SymPy makes of an argument of exp: exp(n log a) becomes a**n, exactly."""
    nodes = list(ast.walk(argument))
    if not any(isinstance(node, ast.Name) and node.id in ("log", "ln") for node in nodes):
        return 1
    bound = 1.0
    for node in nodes:
        if not isinstance(node, ast.Constant):
            continue
        if not isinstance(node.value, (int, float)) or abs(node.value) > MAX_DEGREE:
            return MAX_DEGREE + 1
        number = abs(float(node.value))
        bound *= max(2.0, number)
        if number:
            bound *= max(1.0, 1 / number)
    return math.ceil(min(bound, MAX_DEGREE + 1))


def _is_text(node: ast.expr) -> bool:
    """Return True for a text or a sequence."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    return isinstance(node, (ast.List, ast.Tuple))


def _exponent(node: ast.expr) -> int | None:
    """Return the numerator of an integer or fractional exponent, at least 1; None for anything else."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _exponent(inner)
        case ast.BinOp(op=ast.Div(), left=inner, right=ast.Constant(value=int(divisor))) if divisor > 0:
            return _exponent(inner)
        case ast.Constant(value=int(value)):
            return max(1, value)
    return None
