"""`TerminalAnnotator`: asks in a terminal. The texts shown cannot control it or imitate messages of the program."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textenv.extras.human.annotator import QUIT, SKIP, UNDO, WANTED, Question, content_text
from textenv.rendering import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

_KEYS = {"up": "u", "down": "d", "first": "1", "second": "2", "tie": "t", SKIP: "s", UNDO: "b", QUIT: "q"}
"""Key for each answer; a mark is its own key."""
_MEANING = {SKIP: "skip this one", UNDO: "back to the last one", QUIT: "quit (answers are saved)"}


class TerminalAnnotator:
    """Show a question and read a key and Enter; end of input means quit.

    Args:
        name: name of the annotator, saved with each answer in the file.
        console: rich console for the output; None is stderr, which keeps stdout clean.
        read: returns the next input line, "" at the end of the input; None reads stdin.

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
            RuntimeError: if there is no terminal.
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
            undo = "not possible: there is nothing to undo in this batch"
            mistake = undo if answer in (UNDO, _KEYS[UNDO]) else "not an answer to this question"
            self._print(f'"{printable(typed[:40])}" is {mistake}. Type one of these and Enter:\n{_legend(question)}')

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
        self._print(f"{WANTED[question.scale]}\n{_legend(question)}")

    @functools.cached_property
    def _out(self) -> Console:
        from rich.console import Console

        return self._console or Console(stderr=True)

    def _print(self, text: str, *, end: str = "\n") -> None:
        self._out.print(text, end=end, markup=False, highlight=False, emoji=False)


def _panel(content: Any, title: str, colour: str) -> Panel:
    """Return a frame with the whole text, wrapped; the text cannot break out of it."""
    from rich.panel import Panel
    from rich.text import Text

    shown = content_text(content)
    body = Text(printable(shown), overflow="fold") if shown else Text("(empty)", style="dim italic")
    return Panel(body, title=Text(printable(title)), title_align="left", border_style=colour)


def _legend(question: Question) -> str:
    shown = ((_KEYS.get(answer, answer), _MEANING.get(answer, answer)) for answer in question.answers)
    return "   ".join(key if key == meaning else f"{key} = {meaning}" for key, meaning in shown)


def _check_terminal() -> None:
    """Raise a RuntimeError unless stdin and stderr are terminals."""
    blind = [name for name, stream in (("stdin", sys.stdin), ("stderr", sys.stderr)) if not stream.isatty()]
    if blind:
        raise RuntimeError(
            f"a person must answer, but there is no terminal at {' and '.join(blind)}: run this in a terminal without "
            "redirection, give HumanReward another annotator=, or ask nobody with fallback=reward_model, fraction=0"
        )


def _forget_typed() -> None:
    """Discard input typed before the question was shown."""
    if sys.platform != "win32":
        import termios

        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _read_stdin() -> str:
    # Read bytes, so that an invalid byte in pasted text does not end training.
    return sys.stdin.buffer.readline().decode(errors="replace")
