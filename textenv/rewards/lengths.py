"""Rewards for length, repetition and termination of a completion."""

import math

from textenv.rewards.answer import TextReward, by_text
from textenv.rewards.metrics import repeated


def length_window(least: int, most: int, *, edge: int = 0) -> TextReward:
    """Reward 1 for `least` to `most` tokens, falling linearly to 0 over `edge` tokens on either side.

    Tokens are the policy's own, EOS included (the unit of ``max_new_tokens``), so languages without spaces are
    treated alike. The soft edge is that of DAPO (Yu et al. 2025, eq. 13).

    Raises:
        ValueError: unless 0 <= least <= most and edge >= 0.

    Example:
        >>> ids = [[5, 6], [5, 6, 7], [5] * 6]
        >>> length_window(3, 4, edge=2)(prompts=["a"] * 3, completions=["b c", "b c d", "b" * 6], completion_ids=ids)
        [0.5, 1.0, 0.0]
    """
    if not 0 <= least <= most or edge < 0:
        raise ValueError(f"least, most and edge are {least}, {most}, {edge}: expected 0 <= least <= most and 0 <= edge")

    def length_window(completion_ids: list[list[int]], **columns: object) -> list[float]:
        scores = []
        for ids in completion_ids:
            tokens_outside = max(least - len(ids), len(ids) - most, 0)
            if edge:
                scores.append(1 - min(tokens_outside / edge, 1.0))
            else:
                scores.append(float(tokens_outside == 0))
        return scores

    return length_window


def overlong(limit: int, buffer: int) -> TextReward:
    """Punish answers that come near a limit: from 0 at ``limit - buffer`` tokens to -1 at the limit and beyond.

    This is DAPO's soft overlong punishment (Yu et al. 2025, eq. 13); add it to another reward (`Rewards`).

    Args:
        limit: largest length, in the policy's tokens, EOS included; usually ``max_new_tokens``.
        buffer: tokens before it in which the punishment grows.

    Raises:
        ValueError: unless 0 < buffer <= limit.

    Example:
        >>> ids = [[5] * 16, [5] * 18, [5] * 20]
        >>> overlong(20, 4)(prompts=["a"] * 3, completions=["b"] * 3, completion_ids=ids)
        [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"limit is {limit} and buffer {buffer}, expected 0 < buffer <= limit")
    window = length_window(0, limit - buffer, edge=buffer)

    def overlong(completion_ids: list[list[int]], **columns: object) -> list[float]:
        return [score - 1 for score in window(completion_ids=completion_ids)]

    return overlong


def repetition(n: int = 3) -> TextReward:
    """Reward minus the fraction of the completion's word n-grams that repeat an earlier one; 0 without repetition.

    The penalty of Yeo et al. (2025, arXiv:2502.03373, appendix), unscaled. Words are separated by white space.

    Raises:
        ValueError: if n is below 1.

    Example:
        >>> repetition(2)(prompts=["a"] * 2, completions=["so good so good so good", "so good and so true"])
        [-0.6, 0.0]
    """
    if n < 1:
        raise ValueError(f"n is {n}, expected at least 1 word")

    def score(text: str) -> float:
        return 0.0 - repeated([text.split()], n)  # 0.0 without repetition, where a minus sign would give -0.0

    return by_text("repetition", score)


def unfinished(penalty: float = 1.0) -> TextReward:
    """Reward ``-penalty`` if the policy did not end its completion itself (the missing-EOS penalty), else 0.

    It uses only the column ``terminated`` (True after EOS, a stop token or a stop text), never the tokens, because
    the environment defines which token ends a completion.

    Raises:
        ValueError: if the penalty is negative or not finite.

    Example:
        >>> unfinished(2.0)(prompts=["a"] * 2, completions=["b.", "b c d"], terminated=[True, False])
        [0.0, -2.0]
    """
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}, expected a finite number of at least 0")

    def unfinished(terminated: list[bool], **columns: object) -> list[float]:
        return [0.0 if ended else -penalty for ended in terminated]

    return unfinished
