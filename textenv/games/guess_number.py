"""`GuessNumber`: find a secret number from replies "higher" and "lower". Optimal play is binary search."""

import re
from collections.abc import Sequence

from textenv.games.dialogue import Game

MAX_BOUND = 10**12
"""Maximum absolute value of the bounds."""
# A whole number that is not part of a longer one or of a decimal; "1-5" is 1 and 5, not -5.
_WHOLE_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)(?:(?<![\w)])-)?\d++(?!\.\d)", re.ASCII)


class GuessNumber(Game):
    """Guess a secret number, drawn uniformly from ``low`` to ``high``.

    Prompt: the rules. Actions: any text; the last whole number in it is the guess (digits 0 to 9 only). Replies:
    ``higher`` or ``lower`` (position of the secret), or an explanation of the mistake, which also uses up a guess.
    Score: 1 for the right guess, 0 on every other turn; the episode terminates with the right guess or after guess
    ``max_guesses``. Optimal play: binary search (`BinarySearch`). Best score: 1 for every secret with at least the
    default number of guesses, else `best_return` on average.

    Args:
        low: smallest possible secret.
        high: largest possible secret.
        max_guesses: number of guesses; by default the worst case of binary search, ``ceil(log2(high - low + 2))``.

    Raises:
        ValueError: if ``high`` is below ``low``, a bound is too large, or ``max_guesses`` is not at least 1.

    Example:
        >>> env = GuessNumber(1, 10)
        >>> print(env.reset(options={"secret": 7})[0])
        I have chosen a whole number from 1 to 10. You have 4 guesses. Write a number; I will say higher or lower.
        >>> env.step("It may be 5.")[:3]
        ('higher', 0.0, False)
        >>> env.step("7")[:3]
        ('Yes, it is 7.', 1.0, True)
    """

    TURN = "guess"

    def __init__(self, low: int = 1, high: int = 100, max_guesses: int | None = None) -> None:
        if not -MAX_BOUND <= low <= high <= MAX_BOUND:
            raise ValueError(f"low is {low} and high is {high}, expected {-MAX_BOUND} <= low <= high <= {MAX_BOUND}")
        if max_guesses is not None and max_guesses < 1:
            raise ValueError(f"max_guesses is {max_guesses}, expected at least 1, or None (enough for binary search)")
        self.low, self.high = low, high
        self.max_guesses = (high - low + 1).bit_length() if max_guesses is None else max_guesses
        super().__init__(turns=self.max_guesses, max_observation=500)

    @property
    def best_return(self) -> float:
        """Mean return of binary search: g guesses distinguish ``2**g - 1`` numbers."""
        return float(min(self.high - self.low + 1, 2**self.max_guesses - 1) / (self.high - self.low + 1))

    def _draw(self) -> int:
        return int(self.np_random.integers(self.low, self.high, endpoint=True))

    def _begin(self, secret: int) -> str:
        if not isinstance(secret, int) or not self.low <= secret <= self.high:
            raise ValueError(f"secret is {secret!r}, expected a whole number from {self.low} to {self.high}")
        self._secret, self._shown = secret, str(secret)
        guesses = f"{self.max_guesses} guess{'es' if self.max_guesses > 1 else ''}"
        return (
            f"I have chosen a whole number from {self.low} to {self.high}. You have {guesses}. "
            "Write a number; I will say higher or lower."
        )

    def _play(self, action: str) -> tuple[str, float | None]:
        guess = last_whole_number(action)
        if guess == self._secret:
            return f"Yes, it is {self._secret}.", 1.0
        if guess is None:
            return f"I saw no whole number. Write one from {self.low} to {self.high}.", None
        if not self.low <= guess <= self.high:
            return f"That is out of range. Write a number from {self.low} to {self.high}.", None
        return ("higher" if self._secret > guess else "lower"), None


def last_whole_number(text: str) -> int | None:
    """Return the last whole number in a text, or None; for more than 18 digits, ±10**18: out of every range."""
    numbers = _WHOLE_NUMBER.findall(text)
    if not numbers:
        return None
    digits = numbers[-1].lstrip("-").lstrip("0") or "0"
    size = int(digits) if len(digits) <= 18 else 10**18
    return -size if numbers[-1].startswith("-") else size


class BinarySearch:
    """Optimal player of `GuessNumber`: always guesses the middle of the remaining range.

    Args:
        low: as in the game.
        high: as in the game.

    Example:
        >>> player = BinarySearch(1, 10)
        >>> player(["the rules"]), player(["the rules", "5", "higher"])
        ('5', '8')
    """

    def __init__(self, low: int = 1, high: int = 100) -> None:
        self.low, self.high = low, high

    def __call__(self, conversation: Sequence[str]) -> str:
        """Return the next guess, given the rules and the guesses and replies so far."""
        low, high = self.low, self.high
        for said, reply in zip(conversation[1::2], conversation[2::2], strict=True):
            guess = last_whole_number(said)
            if guess is not None and reply.startswith("higher"):
                low = max(low, guess + 1)
            elif guess is not None and reply.startswith("lower"):
                high = min(high, guess - 1)
        return str((low + high) // 2)
