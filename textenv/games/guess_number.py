"""`GuessNumber`: find a secret number from replies "higher" and "lower". Optimal play is binary search."""

import re
from collections.abc import Sequence

from textenv.games.dialogue import Game

MAX_BOUND = 10**12
"""Maximum absolute value of the bounds."""
# A number with commas between its thousands, such as 5,123
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)
# A whole number that is not part of a longer one or of a decimal; "1-5" is 1 and 5, not -5.
_WHOLE_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)(?:(?<![\w)])-)?\d++(?!\.\d)", re.ASCII)


class GuessNumber(Game[int]):
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
        if max_guesses is None:
            max_guesses = (high - low + 1).bit_length()  # enough for binary search
        self.low = low
        self.high = high
        self.max_guesses = max_guesses
        super().__init__(turns=self.max_guesses, max_observation=500)

    @property
    def best_return(self) -> float:
        """Mean return of binary search: g guesses distinguish ``2**g - 1`` numbers."""
        num_secrets = self.high - self.low + 1
        num_distinguished = min(num_secrets, 2**self.max_guesses - 1)
        return float(num_distinguished / num_secrets)

    def _draw(self) -> int:
        return int(self.np_random.integers(self.low, self.high, endpoint=True))

    def _begin(self, secret: object) -> str:
        if not isinstance(secret, int) or not self.low <= secret <= self.high:
            raise ValueError(f"secret is {secret!r}, expected a whole number from {self.low} to {self.high}")
        self._secret = secret
        self._secret_in_words = str(secret)
        guesses = "guess" if self.max_guesses == 1 else "guesses"
        return (
            f"I have chosen a whole number from {self.low} to {self.high}. You have {self.max_guesses} {guesses}. "
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
        if self._secret > guess:
            return "higher", None
        return "lower", None


def last_whole_number(text: str) -> int | None:
    """Return the last whole number in a text, or None; one of more than 18 digits as ±10**18, out of every range."""
    without_commas = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    numbers = _WHOLE_NUMBER.findall(without_commas)
    if not numbers:
        return None
    last = numbers[-1]
    digits = last.lstrip("-").lstrip("0") or "0"
    magnitude = 10**18
    if len(digits) <= 18:
        magnitude = int(digits)
    if last.startswith("-"):
        return -magnitude
    return magnitude


class BinarySearch:
    """Optimal player of `GuessNumber`: always guesses the middle of the remaining range.

    Args:
        low: smallest possible secret.
        high: largest possible secret.

    Example:
        >>> player = BinarySearch(1, 10)
        >>> player(["the rules"]), player(["the rules", "5", "higher"])
        ('5', '8')
    """

    def __init__(self, low: int = 1, high: int = 100) -> None:
        self.low = low
        self.high = high

    def __call__(self, conversation: Sequence[str]) -> str:
        """Return the next guess for a conversation: the rules, then guesses and replies in turn."""
        low = self.low
        high = self.high
        guesses = conversation[1::2]
        replies = conversation[2::2]
        for text, reply in zip(guesses, replies, strict=True):
            guess = last_whole_number(text)
            if guess is not None and reply.startswith("higher"):
                low = max(low, guess + 1)
            elif guess is not None and reply.startswith("lower"):
                high = min(high, guess - 1)
        return str((low + high) // 2)
