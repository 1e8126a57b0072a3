"""`Calculator`: an arithmetic question and a calculator tool. Optimal play uses the tool."""

import ast
import operator
import re
from collections.abc import Callable, Sequence

from textenv.games.dialogue import Game

MAX_EXPRESSION = 200
"""Maximum number of characters of an expression. Its value has no more digits, because there are no powers."""
_COMMAND = re.compile(r"\b(calc|answer)[^\S\n]*:([^\n]*)", re.IGNORECASE)
_OPERATORS: dict[type, Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_HELP = "Write 'calc: ' and an expression to have it computed, or 'answer: ' and a whole number to finish."


class Calculator(Game[int]):
    """Answer an arithmetic question with the help of a calculator.

    Prompt: a question such as ``What is 17 * 23 + 5?`` and the rules. Actions: any text; only its last
    ``calc: <expression>`` (whole numbers, ``+ - *`` and parentheses) or ``answer: <whole number>`` counts. Replies: the
    value, or an explanation of the mistake. Score: 1 for the right answer, 0 otherwise; any answer ends the episode.
    Without an answer the episode terminates after turn ``max_turns``. Optimal play: compute the question's expression,
    then answer its value (`CalculatorPlayer`). Best score: 1.

    Args:
        terms: number of terms in a question, 2 to 8.
        digits: number of digits in each term, 1 to 6.
        max_turns: number of turns before the episode ends; at least 2, which optimal play needs.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> env = Calculator()
        >>> print(env.reset(options={"expression": "17 * 23 + 5"})[0])
        What is 17 * 23 + 5? Write 'calc: ' and an expression to have it computed, or 'answer: ' and a whole \
number to finish. You have 6 turns.
        >>> env.step("calc: 17*23+5")[:3]
        ('396', 0.0, False)
        >>> env.step("answer: 396")[:3]
        ('Right.', 1.0, True)
    """

    OPTION = "expression"

    def __init__(self, *, terms: int = 3, digits: int = 2, max_turns: int = 6) -> None:
        ranges = (("terms", terms, 2, 8), ("digits", digits, 1, 6), ("max_turns", max_turns, 2, 1000))
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")
        super().__init__(turns=max_turns, max_observation=600)
        self.terms = terms
        self.digits = digits
        self.max_turns = max_turns
        self.best_return = 1.0
        """Return of optimal play."""

    def _begin(self, expression: object) -> str:
        if not isinstance(expression, str):
            raise ValueError(f"expression is {expression!r}, expected a text such as '2 * (3 + 4)'")
        self._secret = evaluate(expression)
        self._secret_in_words = str(self._secret)
        return f"What is {expression}? {_HELP} You have {self.max_turns} turns."

    def _draw(self) -> str:
        smallest = 0
        if self.digits > 1:
            smallest = 10 ** (self.digits - 1)
        numbers = self.np_random.integers(smallest, 10**self.digits, size=self.terms).tolist()
        signs = self.np_random.choice(list("+-*"), size=self.terms - 1).tolist()
        expression = str(numbers[0])
        for sign, number in zip(signs, numbers[1:], strict=True):
            expression += f" {sign} {number}"
        return expression

    def _play(self, action: str) -> tuple[str, float | None]:
        commands = _COMMAND.findall(action)
        if not commands:
            return _HELP, None
        name, argument = commands[-1]
        argument = argument.strip()

        # A use of the calculator
        if name.lower() == "calc":
            try:
                return str(evaluate(argument)), None
            except ValueError as error:
                return f"I cannot compute that: {error}", None

        # An answer
        if not re.fullmatch(rf"[+-]?[0-9]{{1,{MAX_EXPRESSION}}}\.?", argument):
            return "Write one whole number after 'answer:', as in 'answer: 42'.", None
        if int(argument.rstrip(".")) == self._secret:
            return "Right.", 1.0
        return f"Wrong, it is {self._secret}.", 0.0


def evaluate(expression: str) -> int:
    """Evaluate an expression of whole numbers, ``+ - *`` and parentheses. Nothing else is executed.

    Raises:
        ValueError: on anything else; the message says what is allowed.

    Example:
        >>> evaluate("2 * (3 - 10)")
        -14
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"it has {len(expression)} characters, at most {MAX_EXPRESSION} are read.")
    if not re.fullmatch(r"[0-9+*() \t-]+", expression):
        raise ValueError("use whole numbers, + - * and parentheses only, as in 'calc: 2 * (3 + 4)'.")
    try:
        return _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):  # the last two: parentheses nested too deep
        raise ValueError("that is not an expression; write one such as 'calc: 2 * (3 + 4)'.") from None


def _evaluate_node(node: ast.expr) -> int:
    """Evaluate a part of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _evaluate_node(node.left)
        right = _evaluate_node(node.right)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        operand = _evaluate_node(node.operand)
        return _OPERATORS[type(node.op)](operand)
    raise ValueError("use + - * between numbers only; there are no powers and no calls.")


class CalculatorPlayer:
    """Optimal player of `Calculator`: computes the question's expression and answers the value.

    Example:
        >>> player = CalculatorPlayer()
        >>> player(["What is 2 * 3? ..."]), player(["What is 2 * 3? ...", "calc: 2 * 3", "6"])
        ('calc: 2 * 3', 'answer: 6')
    """

    def __call__(self, conversation: Sequence[str]) -> str:
        """Return the next text, given the question and all texts since."""
        if len(conversation) == 1:
            expression, _, _ = conversation[0].removeprefix("What is ").partition("?")
            return f"calc: {expression}"
        return f"answer: {conversation[-1]}"
