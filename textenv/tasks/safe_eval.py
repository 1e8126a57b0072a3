"""Which texts may be handed to a function that evaluates them as Python: short sums, lists and a few functions."""

from __future__ import annotations

import ast
from collections.abc import Collection

MAX_LENGTH = 1000
"""Most characters of such a text."""
MAX_DEGREE = 40
"""Largest exponent, also of a power of powers, so that ``9**9**9`` is refused and ``x**12`` is not."""
FUNCTIONS = frozenset(
    ["exp", "log", "ln", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sqrt", "Abs", "Integral"]
)
"""What an integral may call."""
_LEAVES = (ast.Constant, ast.Name)
_SEQUENCES = (ast.List, ast.Tuple)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)


def is_harmless(text: str, *, sympy: bool = False, functions: Collection[str] = ()) -> bool:
    """Whether a text can be evaluated as Python: it runs nothing but arithmetic, and that on numbers of bounded size.

    What is no Python at all fails at once in ``eval`` and is harmless there. ``sympy.parse_expr`` reads more than
    Python (``5!``); with ``sympy``, anything but plain Python is refused.

    Args:
        text: what a policy wrote.
        sympy: whether ``sympy.parse_expr`` is to evaluate it, or else ``eval``.
        functions: names that it may call.
    """
    if len(text) > MAX_LENGTH or "__" in text:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deep
        return not sympy
    try:
        return _degree(tree.body, functions) <= MAX_DEGREE
    except ValueError:
        return False


def _degree(node: ast.expr, functions: Collection[str]) -> int:
    """The product of the exponents around any one part.

    Raises:
        ValueError: on a node that is not allowed.
    """
    if isinstance(node, _LEAVES):
        return 1
    if isinstance(node, _SEQUENCES):
        return max((_degree(part, functions) for part in node.elts), default=1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        return _degree(node.operand, functions)
    if isinstance(node, ast.BinOp) and not any(_is_text(side) for side in (node.left, node.right)):
        if isinstance(node.op, _ARITHMETIC):
            return max(_degree(node.left, functions), _degree(node.right, functions))
        if isinstance(node.op, ast.Pow) and (exponent := _exponent(node.right)) is not None:
            return _degree(node.left, functions) * exponent
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
        return max((_degree(part, functions) for part in node.args), default=1)
    raise ValueError(f"{type(node).__name__} is not allowed")


def _is_text(node: ast.expr) -> bool:
    """Whether a product with it would repeat it."""
    return isinstance(node, _SEQUENCES) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _exponent(node: ast.expr) -> int | None:
    """A whole or broken number in an exponent, made positive and rounded up, or None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _exponent(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _exponent(node.left)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return max(1, node.value)
    return None
