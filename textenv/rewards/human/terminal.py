"""`TerminalAnnotator`: asks in a terminal. What it shows cannot command the terminal or pass for its own words."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textenv.rendering import printable
from textenv.rewards.human.annotator import QUIT, SKIP, UNDO, Question

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

_KEYS = {"up": "u", "down": "d", "first": "1", "second": "2", "tie": "t", SKIP: "s", UNDO: "b", QUIT: "q"}
"""What is typed for each answer; a mark is typed as it is."""
_MEANING = {SKIP: "skip this one", UNDO: "back to the last one", QUIT: "quit (answers are saved)"}
_WANTED = {
    "thumbs": "Is this response good?",
    "0-5": "How good is this response, from 0 (useless) to 5 (could not be better)?",
    "pairs": "Which response is better?",
}


class TerminalAnnotator:
    """Shows a question between lines and reads a key and Enter; the end of the input means quit.

    Args:
        name: who asks; stands beside each answer in the file.
        console: where to show; None is stderr, so that what a program prints for others stays clean.
        read: returns the next line typed, "" at the end of the input; None reads stdin.

    Example:
        >>> TerminalAnnotator().ask(Question("the film", ("is good .",), "thumbs"))  # doctest: +SKIP
        'up'
    """

    def __init__(
        self, name: str = "terminal", *, console: Console | None = None, read: Callable[[], str] | None = None
    ) -> None:
        self.name, self._console, self._read = name, console, read

    def ask(self, question: Question) -> str:
        """See `Annotator.ask`.

        Raises:
            RuntimeError: if there is no terminal to ask in.
        """
        if self._read is None:
            _check_terminal()
        self._show(question)
        keys = {_KEYS.get(answer, answer): answer for answer in question.answers}
        if self._read is None:
            _forget_typed()
        while True:
            self._print("> ", end="")
            line = (self._read or _read_stdin)()
            typed = line.strip().lower()
            answer = keys.get(typed, typed)
            if not line:
                self._print("(end of input: quit)")
                return QUIT
            if answer in question.answers:
                return answer
            self._print(
                f'"{printable(typed[:40])}" is {_mistake(answer)}. Type one of these and Enter:\n{_choices(question)}'
            )

    def _show(self, question: Question) -> None:
        from rich.rule import Rule
        from rich.text import Text

        self._out.print(Rule(Text(f"question {question.number} of {question.total}")))
        messages = question.prompt if isinstance(question.prompt, list) else [{"content": question.prompt}]
        for message in messages:
            role = f", {message['role']}" if "role" in message else ""
            self._out.print(_panel([message], f"prompt{role}", "blue"))
        names = ("first response", "second response") if len(question.responses) == 2 else ("response",)
        for name, response in zip(names, question.responses, strict=True):
            self._out.print(_panel(response, name, "green"))
        self._print(f"{_WANTED[question.scale]}\n{_choices(question)}")

    @property
    def _out(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True)
        return self._console

    def _print(self, text: str, *, end: str = "\n") -> None:
        self._out.print(text, end=end, markup=False, highlight=False, emoji=False)


def _panel(content: Any, title: str, colour: str) -> Panel:
    """A text whole and wrapped, in a frame that it cannot leave."""
    from rich.panel import Panel
    from rich.text import Text

    shown = _text(content)
    body = Text(printable(shown), overflow="fold") if shown else Text("(empty)", style="dim italic")
    return Panel(body, title=Text(printable(title)), title_align="left", border_style=colour)


def _text(content: Any) -> str:
    """A text, or what the only message of a list says, as it is; anything else whole, as JSON."""
    if isinstance(content, list) and len(content) == 1 and set(content[0]) <= {"role", "content"}:
        content = content[0].get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _choices(question: Question) -> str:
    shown = ((_KEYS.get(answer, answer), _MEANING.get(answer, answer)) for answer in question.answers)
    return "   ".join(key if key == meaning else f"{key} = {meaning}" for key, meaning in shown)


def _mistake(answer: str) -> str:
    undo = answer in (UNDO, _KEYS[UNDO])
    return "not possible here, there is nothing to undo in this batch" if undo else "no answer to this question"


def _check_terminal() -> None:
    """Raise a RuntimeError unless a person can see and answer."""
    blind = [name for name in ("stdin", "stderr") if not getattr(sys, name).isatty()]
    if blind:
        raise RuntimeError(
            f"a person is to be asked, but there is no terminal at {' and '.join(blind)}: run this in one, without "
            "redirecting it, give HumanReward another annotator=, or ask nobody by fallback=reward_model, fraction=0"
        )


def _forget_typed() -> None:
    """Throw away what was typed before the question was shown: it was no answer to it."""
    if sys.platform != "win32":
        import termios

        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _read_stdin() -> str:
    # As bytes: a stray byte of a broken paste must not end a training.
    return sys.stdin.buffer.readline().decode(errors="replace")
