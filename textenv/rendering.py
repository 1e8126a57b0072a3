"""Readable texts: each chosen token is shaded by its reward, or by any other column of a rollout."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

HEIGHT, WIDTH, LINE = 360, 640, 20
"""Height and width of a picture, and height of a text line, in pixels."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Levels of a `sparkline`."""


def text_of(renderable: Any, *, widest: int | None = None) -> str:
    """Return a rich table or text as text: as wide as the terminal or, if the output is none, as its contents.

    Args:
        renderable: what rich can print.
        widest: maximum width in characters where the output is no terminal; longer cells are folded. None: no limit.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        needed = console.measure(renderable, options=console.options.update(width=100_000)).maximum
        console.width = needed if widest is None else min(needed, widest)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def render_rollout(
    rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, *, column: str = "log_prob"
) -> str:
    """Render the episode in a row of a text rollout for a terminal, each chosen token shaded by a float column.

    Such as ``"log_prob"`` (nats), ``"reward"``, ``"kl"`` or ``"advantage"``; positive values are green, negative ones
    red, brightest at the row's largest absolute value. Raises a KeyError if the rollout has no such column.
    """
    if column not in rollout.keys():
        raise KeyError(f"the rollout has no column {column!r}; it has {', '.join(sorted(rollout.keys()))}")
    tokens, chosen, values = episode_tokens(rollout, row, column)
    return shade(tokens, tokenizer, chosen=chosen, values=values)


def rollout_html(rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, *, column: str = "log_prob") -> str:
    """The same for a notebook, as a paragraph of HTML; values are shown under the pointer."""
    tokens, chosen, values = episode_tokens(rollout, row, column)
    parts, backgrounds = pieces(tokens, tokenizer), _backgrounds(chosen, values)
    spans = [
        f'<span title="{column} {value:.4g}" style="color:#fff;background:rgb{background}">{escape(text)}</span>'
        if own else escape(text)
        for text, own, value, background in zip(parts, chosen, values, backgrounds, strict=True)
    ]  # fmt: skip
    return f'<p style="white-space:pre-wrap">{"".join(spans)}</p>'


def rollout_frames(rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Draw one episode of a text rollout as it grows: its prompt, then a picture for each chosen token; see `draw`."""
    tokens, chosen, values = episode_tokens(rollout, row, "reward")
    for end in [int(chosen.argmax()), *(np.flatnonzero(chosen) + 1).tolist()]:
        yield draw(tokens[:end], tokenizer, chosen=chosen[:end], values=values[:end])


def episode_tokens(rollout: TensorDict, row: int, column: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Tokens of one episode; for each, whether the policy chose it, and its value in a column."""
    mask = rollout["mask"][row].cpu().numpy()
    steps = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else len(mask)
    tokens = [*rollout["observation"][row, :1].tolist(), *rollout["action"][row, :steps].tolist()]
    values = np.concatenate([[0.0], rollout[column][row, :steps].float().cpu().numpy()])
    return tokens, np.concatenate([[False], mask[:steps]]), values


def answer_tokens(
    rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, columns: Iterable[str], *, most: int = 1024
) -> dict[str, list[Any]]:
    """Tokens of one episode from its first answer on, at most so many: their ``text``, ``chosen``, and float columns.

    Columns that the rollout does not have are left out.
    """
    tokens, chosen, _ = episode_tokens(rollout, row, "reward")
    part = slice(first := int(chosen.argmax()), first + most)
    shown = {name: episode_tokens(rollout, row, name)[2][part] for name in columns if name in rollout.keys()}
    values = {name: np.nan_to_num(column).round(5).tolist() for name, column in shown.items()}
    return {"text": pieces(tokens[part], tokenizer), "chosen": chosen[part].tolist()} | values


def shade(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, chosen: np.ndarray, values: np.ndarray) -> str:
    """Add ANSI colours to a text: chosen tokens are underlined on a background shaded by value, others are plain.

    ``chosen`` is bool and ``values`` float, ``[len(tokens)]`` each; values of other than chosen tokens have no effect.
    """
    starts = ("\x1b[4;97;48;2;{};{};{}m".format(*background) for background in _backgrounds(chosen, values))
    parts = zip(pieces(tokens, tokenizer), chosen, starts, strict=True)
    return "".join(f"{start}{text}\x1b[0m" if own and text else text for text, own, start in parts)


def draw(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, chosen: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Draw a text as a picture, uint8 ``[HEIGHT, WIDTH, 3]``, coloured as by `shade`; of a long text, only the end."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), LINE * 3 // 4)
    letter, backgrounds = font.getlength("m"), _backgrounds(chosen, values)
    lines: list[list[Any]] = [[]]
    for text, was_chosen, background in zip(pieces(tokens, tokenizer), chosen, backgrounds, strict=True):
        for character in text.replace("\t", " "):
            if character == "\n" or len(lines[-1]) == int(WIDTH // letter):
                lines.append([])
            if character != "\n":
                lines[-1].append((character, background, was_chosen))
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    for row, line in enumerate(lines[-(HEIGHT // LINE) :]):
        for column, (character, background, was_chosen) in enumerate(line):
            x, y = column * letter, row * LINE
            if was_chosen:
                canvas.rectangle((x, y, x + letter, y + LINE), fill=background)
            canvas.text((x, y), character, font=font, fill="white" if was_chosen else "black")
    return np.asarray(image)


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return each token's part of the decoded text, escaped; a character of several tokens belongs to the last."""
    found, before = [], ""
    for end in range(1, len(tokens) + 1):
        whole = str(tokenizer.decode(list(tokens[:end])))
        split = end < len(tokens) and whole.endswith("\N{REPLACEMENT CHARACTER}")
        found.append("" if split else printable(whole[len(before) :]))
        before = before if split else whole
    return found


def printable(text: str) -> str:
    """Escape control characters, characters that change text direction, and non-standard line endings.

    Newlines and tabs stay. An escaped completion can neither control a terminal nor imitate other text.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character.encode("unicode_escape").decode()
        for character in text
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in one line of at most ``width`` characters; more values are averaged in neighbouring groups.

    The lowest mean is ▁ and the highest █, a constant curve is flat; a group without a finite value is a space.

    Example:
        >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 0, 3, 3, 1, 1], 3)
        ('▁▃▆█', '▁█▃')
    """
    numbers = np.array(values, dtype=float)
    groups = np.array_split(numbers, min(width, len(numbers))) if len(numbers) else []
    means = np.array([group[np.isfinite(group)].mean() if np.isfinite(group).any() else np.nan for group in groups])
    low, high = (np.nanmin(means), np.nanmax(means)) if np.isfinite(means).any() else (0.0, 0.0)
    levels = np.nan_to_num((means - low) / (high - low or 1.0) * (len(BLOCKS) - 1), nan=-1.0).round().astype(int)
    return "".join(" " if level < 0 else BLOCKS[level] for level in levels.tolist())


def _backgrounds(chosen: np.ndarray, values: np.ndarray) -> list[tuple[int, int, int]]:
    """Red, green and blue for each token, by its value relative to the largest; all black if one is not finite."""
    shown = np.where(chosen, values, 0.0)
    largest = np.abs(shown).max(initial=0.0)
    fractions = shown / largest if 0 < largest < np.inf else np.zeros_like(shown)
    levels = np.where(fractions == 0, 0, np.round(40 + 160 * np.abs(fractions))).astype(int).tolist()
    return [(level, 0, 0) if value < 0 else (0, level, 0) for level, value in zip(levels, fractions, strict=True)]
