"""Readable texts: each chosen token is shaded by its reward, or by any other column of a rollout."""

from __future__ import annotations

import os
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import ImageFont
    from rich.console import RenderableType
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

HEIGHT = 360
"""Height of a picture, in pixels."""
WIDTH = 640
"""Width of a picture, in pixels."""
LINE_HEIGHT = 20
"""Height of a line of text in a picture, in pixels."""
CAPTION_LINES = 8
"""Lines of text under a frame."""
WROTE_COLOUR = (0, 120, 0)
"""Background of what a policy wrote, in a caption."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Levels of a `sparkline`, the lowest first."""
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of controls, format characters such as text direction, surrogates, line and paragraph ends."""
TokenColumns = dict[str, list[str] | list[bool] | list[float]]
"""By name, columns with one entry a token."""
_Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""


def text_of(renderable: RenderableType, *, widest: int | None = None) -> str:
    """Return a rich table or text as plain text: as wide as the terminal or, without a terminal, as its contents.

    Args:
        renderable: what rich can print.
        widest: maximum width in characters where the output is no terminal; longer cells are folded. None: no limit.
    """
    from textenv.console import PipeConsole

    console = PipeConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        without_limit = console.options.update(width=100_000)
        width = console.measure(renderable, options=without_limit).maximum
        if widest is not None:
            width = min(width, widest)
        console.width = width
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def render_rollout(
    rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, *, column: str = "log_prob"
) -> str:
    """Render one episode of a text rollout for a terminal; each chosen token is shaded by a float column.

    Positive values are green, negative ones red, brightest at the row's largest absolute value.

    Args:
        rollout: a rollout of texts.
        row: row of the episode.
        tokenizer: the policy's tokenizer.
        column: such as ``"log_prob"`` (nats), ``"reward"``, ``"kl"`` or ``"advantage"``.

    Raises:
        KeyError: if the rollout has no such column.
    """
    if column not in rollout.keys():
        raise KeyError(f"the rollout has no column {column!r}; it has {', '.join(sorted(rollout.keys()))}")
    tokens, chosen, values = episode_tokens(rollout, row, column)
    return shade(tokens, tokenizer, chosen=chosen, values=values)


def rollout_html(rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, *, column: str = "log_prob") -> str:
    """Render one episode like `render_rollout`, but as a paragraph of HTML; values are shown under the pointer."""
    tokens, chosen, values = episode_tokens(rollout, row, column)
    texts = pieces(tokens, tokenizer)
    backgrounds = _backgrounds(chosen, values)
    spans = []
    for text, was_chosen, value, background in zip(texts, chosen, values, backgrounds, strict=True):
        span = escape(text)
        if was_chosen:
            style = f"color:#fff;background:rgb{background}"
            span = f'<span title="{column} {value:.4g}" style="{style}">{span}</span>'
        spans.append(span)
    return f'<p style="white-space:pre-wrap">{"".join(spans)}</p>'


def rollout_frames(rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Draw one episode of a text rollout as it grows: its prompt, then a picture for each chosen token; see `draw`."""
    tokens, chosen, values = episode_tokens(rollout, row, "reward")
    prompt_end = int(chosen.argmax())
    ends = np.flatnonzero(chosen) + 1
    for end in [prompt_end, *ends.tolist()]:
        yield draw(tokens[:end], tokenizer, chosen=chosen[:end], values=values[:end])


def episode_tokens(rollout: TensorDict, row: int, column: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return the tokens of one episode; for each, whether the policy chose it, and its value in a column.

    The arrays, bool and float, have one entry a token. The first token is never chosen and has the value 0.
    """
    # Up to the last step of the episode
    mask = rollout["mask"][row].cpu().numpy()
    num_steps = len(mask)
    if mask.any():
        num_steps = int(np.flatnonzero(mask)[-1]) + 1

    first_token = rollout["observation"][row, :1].tolist()
    tokens = first_token + rollout["action"][row, :num_steps].tolist()
    chosen = np.concatenate([[False], mask[:num_steps]])
    values = np.concatenate([[0.0], rollout[column][row, :num_steps].float().cpu().numpy()])
    return tokens, chosen, values


def answer_tokens(
    rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, columns: Iterable[str], *, most: int = 1024
) -> TokenColumns:
    """Return at most ``most`` tokens of one episode, from its first answer on.

    Returns:
        Lists with one entry a token: ``text``, ``chosen`` (by the policy), and those of the float columns that the
        rollout has.
    """
    tokens, chosen, _ = episode_tokens(rollout, row, "reward")
    start = int(chosen.argmax())
    shown = slice(start, start + most)
    table: TokenColumns = {
        "text": pieces(tokens[shown], tokenizer),
        "chosen": chosen[shown].tolist(),
    }
    for column in columns:
        if column in rollout.keys():
            _, _, values = episode_tokens(rollout, row, column)
            table[column] = np.nan_to_num(values[shown]).round(5).tolist()
    return table


def shade(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, chosen: np.ndarray, values: np.ndarray) -> str:
    """Add ANSI colours to a text: chosen tokens are underlined on a background shaded by value, others are plain.

    ``chosen`` is bool and ``values`` float, ``[len(tokens)]`` each; only values of chosen tokens have an effect.
    """
    texts = pieces(tokens, tokenizer)
    backgrounds = _backgrounds(chosen, values)
    shaded = ""
    for text, was_chosen, (red, green, blue) in zip(texts, chosen, backgrounds, strict=True):
        if was_chosen and text:
            shaded += f"\x1b[4;97;48;2;{red};{green};{blue}m{text}\x1b[0m"
        else:
            shaded += text
    return shaded


def draw(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, chosen: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Draw a text as a picture, uint8 ``[HEIGHT, WIDTH, 3]``, coloured as by `shade`; only the end of a long text."""
    from PIL import Image, ImageDraw

    font = _font()
    letter_width = font.getlength("m")
    letters_per_line = int(WIDTH // letter_width)

    # Break the text into lines of characters, each with its background; None where the policy did not choose it
    lines: list[list[tuple[str, _Colour | None]]] = [[]]
    texts = pieces(tokens, tokenizer)
    for text, was_chosen, colour in zip(texts, chosen, _backgrounds(chosen, values), strict=True):
        background = colour if was_chosen else None
        for character in text.replace("\t", " "):
            if character == "\n" or len(lines[-1]) == letters_per_line:
                lines.append([])
            if character != "\n":
                lines[-1].append((character, background))

    # Draw the last lines
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    lines_per_picture = HEIGHT // LINE_HEIGHT
    for row, line in enumerate(lines[-lines_per_picture:]):
        y = row * LINE_HEIGHT
        for column, (character, background) in enumerate(line):
            x = column * letter_width
            if background is None:
                canvas.text((x, y), character, font=font, fill="black")
            else:
                canvas.rectangle((x, y, x + letter_width, y + LINE_HEIGHT), fill=background)
                canvas.text((x, y), character, font=font, fill="white")
    return np.asarray(image)


def caption(frame: np.ndarray, read: str, wrote: str) -> np.ndarray:
    """Write what a model read and wrote under a frame, in `CAPTION_LINES` lines.

    Args:
        frame: picture, uint8 ``[height, width, 3]``.
        read: text whose last lines are shown.
        wrote: text in a line of its own below, shaded as what the policy chose.

    Returns:
        The picture, uint8, with white at both sides if it is narrower than `WIDTH`.
    """
    from PIL import Image, ImageDraw

    font = _font()
    letters_per_line = int(max(WIDTH, frame.shape[1]) // font.getlength("m"))
    read_lines = []
    for line in printable(read).splitlines():
        read_lines += textwrap.wrap(line, letters_per_line) or [""]
    read_lines = read_lines[1 - CAPTION_LINES :]
    wrote_line = printable(wrote).replace("\n", " ")[:letters_per_line]

    # The frame in the middle, and the lines below it
    height, width, _ = frame.shape
    image = Image.new("RGB", (max(WIDTH, width), height + CAPTION_LINES * LINE_HEIGHT), "white")
    image.paste(Image.fromarray(frame), ((image.width - width) // 2, 0))
    canvas = ImageDraw.Draw(image)
    for row, line in enumerate(read_lines):
        canvas.text((0, height + row * LINE_HEIGHT), line, font=font, fill="black")
    y = height + len(read_lines) * LINE_HEIGHT
    if wrote_line:
        canvas.rectangle((0, y, font.getlength(wrote_line), y + LINE_HEIGHT - 1), fill=WROTE_COLOUR)
        canvas.text((0, y), wrote_line, font=font, fill="white")
    return np.asarray(image)


def _font() -> ImageFont.FreeTypeFont:
    """Return the font of pictures, whose letters have one width."""
    from matplotlib import font_manager
    from PIL import ImageFont

    return ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), LINE_HEIGHT * 3 // 4)


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return each token's part of the decoded text, escaped; a character of several tokens belongs to the last."""
    parts = []
    num_shown = 0  # characters of the text that the parts so far have
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(list(tokens[:end])))
        is_incomplete = end < len(tokens) and text.endswith("\N{REPLACEMENT CHARACTER}")
        if is_incomplete:
            parts.append("")
        else:
            parts.append(printable(text[num_shown:]))
            num_shown = len(text)
    return parts


def printable(text: str) -> str:
    """Escape control characters, characters that change text direction, and non-standard line endings.

    Newlines and tabs stay. An escaped completion can neither control a terminal nor imitate other text.
    """
    characters = []
    for character in text:
        if character not in "\n\t" and unicodedata.category(character) in _UNPRINTABLE:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in one line of at most ``width`` characters; more values are averaged in neighbouring groups.

    The lowest mean is ▁ and the highest █, a constant curve is flat; a group without a finite value is a space.

    Example:
        >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 0, 3, 3, 1, 1], 3)
        ('▁▃▆█', '▁█▃')
    """
    numbers = np.array(values, dtype=float)
    if not len(numbers):
        return ""

    # Mean of each group; NaN without a finite value
    means: list[float] = []
    for group in np.array_split(numbers, min(width, len(numbers))):
        finite = group[np.isfinite(group)]
        if len(finite):
            means.append(finite.mean())
        else:
            means.append(np.nan)
    if not np.isfinite(means).any():
        return " " * len(means)

    # Blocks, of equal steps from the lowest mean to the highest
    low = np.nanmin(means)
    span = np.nanmax(means) - low or 1.0
    blocks = []
    for mean in means:
        level = (mean - low) / span * (len(BLOCKS) - 1)
        if np.isfinite(level):
            blocks.append(BLOCKS[int(np.round(level))])
        else:
            blocks.append(" ")
    return "".join(blocks)


def _backgrounds(chosen: np.ndarray, values: np.ndarray) -> list[_Colour]:
    """Return a colour for each token, by its value relative to the largest; all are black if a value is not finite."""
    shown = np.where(chosen, values, 0.0)
    largest = np.abs(shown).max(initial=0.0)
    fractions = np.zeros_like(shown)
    if 0 < largest < np.inf:
        fractions = shown / largest

    # From dark to bright, but black for 0
    levels = np.where(fractions == 0, 0, np.round(40 + 160 * np.abs(fractions)))
    colours: list[_Colour] = []
    for level, fraction in zip(levels.astype(int).tolist(), fractions, strict=True):
        if fraction < 0:
            colours.append((level, 0, 0))
        else:
            colours.append((0, level, 0))
    return colours
