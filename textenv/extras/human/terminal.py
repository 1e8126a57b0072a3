"""`TerminalAnnotator`: asks in a terminal. The texts shown cannot control it or imitate messages of the program."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from textenv.extras.human.annotator import INSTRUCTIONS, QUIT, SKIP, UNDO, Question, content_text
from textenv.rendering import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

_KEYS = {"up": "u", "down": "d", "first": "1", "second": "2", "tie": "t", SKIP: "s", UNDO: "b", QUIT: "q"}
"""Key for each answer; a mark from 0 to 5 is its own key."""
_MEANINGS = {SKIP: "skip this one", UNDO: "back to the last one", QUIT: "quit (answers are saved)"}
"""What the legend says of an answer; the others are their own explanation."""


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
        self.name = name
        self._console = console
        self._read = read

    def ask(self, question: Question) -> str:
        """See `Annotator.ask`.

        Raises:
            RuntimeError: if there is no terminal.
        """
        # Show the question; what was typed before is no answer to it
        if self._read is None:
            _check_terminal()
        self._show(question)
        answer_of_key = {_key_of(answer): answer for answer in question.answers}
        read = self._read
        if read is None:
            _discard_input()
            read = _read_stdin

        # Read lines until one is an answer
        while True:
            self._print("> ", end="")
            line = read()
            typed = line.strip().lower()
            answer = answer_of_key.get(typed, typed)
            if not line:
                self._print("(end of input: quit)")
                return QUIT
            if answer in question.answers:
                return answer
            mistake = "not an answer to this question"
            if answer in (UNDO, _KEYS[UNDO]):
                mistake = "not possible: there is nothing to undo in this batch"
            self._print(f'"{printable(typed[:40])}" is {mistake}. Type one of these and Enter:\n{_legend(question)}')

    def _show(self, question: Question) -> None:
        from rich.rule import Rule
        from rich.text import Text

        self._out.print(Rule(Text(f"question {question.number} of {question.total}")))

        messages = question.prompt
        if not isinstance(messages, list):
            messages = [{"content": messages}]
        for message in messages:
            title = "prompt"
            if "role" in message:
                title = f"prompt, {message['role']}"
            self._out.print(_panel([message], title, "blue"))

        titles = ["response"]
        if len(question.responses) == 2:
            titles = ["first response", "second response"]
        for title, response in zip(titles, question.responses, strict=True):
            self._out.print(_panel(response, title, "green"))
        self._print(f"{INSTRUCTIONS[question.scale]}\n{_legend(question)}")

    @functools.cached_property
    def _out(self) -> Console:
        from rich.console import Console

        return self._console or Console(stderr=True)

    def _print(self, text: str, *, end: str = "\n") -> None:
        self._out.print(text, end=end, markup=False, highlight=False, emoji=False)


def _panel(content: object, title: str, colour: str) -> Panel:
    """Return a frame with the whole text, wrapped; the text cannot break out of it."""
    from rich.panel import Panel
    from rich.text import Text

    text = content_text(content)
    body = Text("(empty)", style="dim italic")
    if text:
        body = Text(printable(text), overflow="fold")
    return Panel(body, title=Text(printable(title)), title_align="left", border_style=colour)


def _legend(question: Question) -> str:
    """Return the keys of a question's answers with their meanings, in one line."""
    entries = []
    for answer in question.answers:
        key = _key_of(answer)
        meaning = _MEANINGS.get(answer, answer)
        if key == meaning:
            entries.append(key)
        else:
            entries.append(f"{key} = {meaning}")
    return "   ".join(entries)


def _key_of(answer: str) -> str:
    return _KEYS.get(answer, answer)


def _check_terminal() -> None:
    """Raise a RuntimeError unless stdin and stderr are terminals."""
    streams = {"stdin": sys.stdin, "stderr": sys.stderr}
    redirected = [name for name, stream in streams.items() if not stream.isatty()]
    if redirected:
        raise RuntimeError(
            f"a person must answer, but there is no terminal at {' and '.join(redirected)}: run this in a terminal "
            "without redirection, give HumanReward another annotator=, or ask nobody with fallback=reward_model, "
            "fraction=0"
        )


def _discard_input() -> None:
    """Discard input typed before the question was shown."""
    if sys.platform != "win32":
        import termios

        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def _read_stdin() -> str:
    """Return the next line of stdin, "" at the end of the input."""
    # Read bytes, so that an invalid byte in pasted text does not end training.
    return sys.stdin.buffer.readline().decode(errors="replace")
