"""Readable texts: each chosen token is shaded by its reward, or by any other column of a rollout."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

_END = "\x1b[0m"
HEIGHT, WIDTH, LINE = 360, 640, 20
"""Height and width of a picture, and height of a text line, in pixels."""


def render_rollout(
    rollout: TensorDict, row: int, tokenizer: PreTrainedTokenizerBase, *, column: str = "log_prob"
) -> str:
    """Render one episode of a text rollout for a terminal, each chosen token shaded by a column.

    Args:
        rollout: see `textenv.rollout`.
        row: row of the episode.
        tokenizer: the policy's tokenizer.
        column: a float column such as ``"log_prob"`` (nats), ``"reward"``, ``"kl"`` or ``"advantage"``; green is
            above zero and red below, brightest at the row's largest absolute value.

    Raises:
        KeyError: if the rollout has no such column.
    """
    if column not in rollout.keys():
        raise KeyError(f"the rollout has no column {column!r}; it has {', '.join(sorted(rollout.keys()))}")
    mask = rollout["mask"][row].cpu().numpy()
    steps = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else len(mask)
    tokens = [*rollout["observation"][row, :1].tolist(), *rollout["action"][row, :steps].tolist()]
    chosen = np.concatenate([[False], mask[:steps]])
    values = np.concatenate([[0.0], rollout[column][row, :steps].float().cpu().numpy()])
    return shade(tokens, tokenizer, chosen=chosen, values=values)


def shade(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, chosen: np.ndarray, values: np.ndarray) -> str:
    """Add ANSI colours to a text: chosen tokens are underlined on a background shaded by value, others are plain.

    Args:
        tokens: ids.
        tokenizer: decodes them, special tokens included.
        chosen: bool ``[len(tokens)]``.
        values: float ``[len(tokens)]``; values at tokens that were not chosen have no effect.
    """
    scale = _scale(values[chosen])
    parts = []
    for text, was_chosen, value in zip(pieces(tokens, tokenizer), chosen, values, strict=True):
        parts.append(f"{_colour(value / scale if scale else 0.0)}{text}{_END}" if was_chosen and text else text)
    return "".join(parts)


def draw(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, chosen: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Draw a text as a picture, uint8 ``[HEIGHT, WIDTH, 3]``, coloured as by `shade`; only its end if too long."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), LINE * 3 // 4)
    letter, scale = font.getlength("m"), _scale(values[chosen])
    columns, lines = int(WIDTH // letter), HEIGHT // LINE
    placed, line, column = [], 0, 0
    for text, was_chosen, value in zip(pieces(tokens, tokenizer), chosen, values, strict=True):
        for character in text.replace("\t", " "):
            if character == "\n" or column == columns:
                line, column = line + 1, 0
            if character != "\n":
                placed.append((line, column, character, _background(value / scale if scale else 0.0), was_chosen))
                column += 1
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for at, column, character, colour, was_chosen in placed:
        x, y = column * letter, (at - max(0, line + 1 - lines)) * LINE
        if was_chosen:
            draw.rectangle((x, y, x + letter, y + LINE), fill=colour)
        draw.text((x, y), character, font=font, fill="white" if was_chosen else "black")
    return np.asarray(image)


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token, made safe by `printable`; joined, they are the decoded text.

    A character that consists of several tokens is returned with the last of them.
    """
    found, before = [], ""
    for end in range(1, len(tokens) + 1):
        whole = str(tokenizer.decode(list(tokens[:end])))
        if end < len(tokens) and whole.endswith("\N{REPLACEMENT CHARACTER}"):
            found.append("")
            continue
        found.append(printable(whole[len(before) :]))
        before = whole
    return found


def printable(text: str) -> str:
    """Escape control characters, characters that change text direction, and non-standard line endings.

    So a completion can neither control a terminal, nor imitate other text, nor start a new line in a log.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _colour(strength: float) -> str:
    """Return the ANSI code for underlined text on green (above zero) or red (below), from black at 0 to full at 1."""
    red, green, blue = _background(strength)
    return f"\x1b[4;97;48;2;{red};{green};{blue}m"


def _background(strength: float) -> tuple[int, int, int]:
    """Return red, green and blue for a value as a fraction of the largest."""
    level = round(40 + 160 * min(abs(strength), 1.0)) if strength else 0
    return (level, 0, 0) if strength < 0 else (0, level, 0)


def _scale(values: np.ndarray) -> float:
    """Return the largest absolute value; 0 if there are no values, or one is not finite."""
    return float(np.abs(values).max()) if values.size and np.isfinite(values).all() else 0.0
