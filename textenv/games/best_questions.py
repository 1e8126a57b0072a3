"""`BestQuestions`: the best play of `TwentyQuestions`, and its value, by dynamic programming over what is left."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from textenv.games.twenty_questions import ANIMALS, ATTRIBUTES, phrase, read_topic


class BestQuestions:
    """The best player of `TwentyQuestions`, by dynamic programming over the animals that are left.

    A node's value is exact. A branch is left out only if the value it would have were every question allowed
    is no better than a branch already worked out.

    Args:
        max_questions: as in the game.

    Example:
        >>> player = BestQuestions()
        >>> player.value(frozenset(ANIMALS))
        Fraction(33, 40)
        >>> player(["the rules"]), player(["the rules", "Is it a mammal?", "yes"])
        ('Is it a mammal?', 'Is it a carnivore?')
    """

    def __init__(self, *, max_questions: int = 20) -> None:
        self.max_questions = max_questions
        self._best: dict[tuple[frozenset[str], int], tuple[Fraction, str]] = {}
        self._bounds: dict[tuple[int, int], Fraction] = {}

    def __call__(self, conversation: Sequence[str]) -> str:
        """The next question, from the rules and the questions and replies so far."""
        left = frozenset(ANIMALS)
        for said, reply in zip(conversation[1::2], conversation[2::2], strict=True):
            topic, _ = read_topic(said)
            yes = frozenset(name for name in left if topic in ANIMALS[name])
            left = yes if reply.startswith("yes") else left - yes - {topic} if reply.startswith("no") else left
        return f"Is it {phrase(self.choose(left, len(conversation) // 2)[1])}?"

    def value(self, left: frozenset[str], asked: int = 0) -> Fraction:
        """The expected return of the best play if the secret is uniform over the animals that are left."""
        return self.choose(left, asked)[0] if left and asked < self.max_questions else Fraction(0)

    def choose(self, left: frozenset[str], asked: int) -> tuple[Fraction, str]:
        """The best value and the attribute or animal to ask about."""
        if (left, asked) not in self._best:
            best = (Fraction(-1), "")
            for bound, topic, parts in sorted(self._options(left, asked), key=lambda each: -each[0]):
                if bound <= best[0]:
                    break
                now = self._reward(asked) if topic in ANIMALS else Fraction(0)
                value = (now + sum(len(part) * self.value(part, asked + 1) for part in parts)) / len(left)
                best = max(best, (value, topic), key=lambda each: each[0])
            self._best[left, asked] = best
        return self._best[left, asked]

    def _reward(self, asked: int) -> Fraction:
        return 1 - Fraction(asked, self.max_questions)

    def _options(self, left: frozenset[str], asked: int) -> list[tuple[Fraction, str, list[frozenset[str]]]]:
        """Upper bound, topic, and the sets that may be left after asking about it."""
        options = []
        for topic in ATTRIBUTES:
            yes = frozenset(name for name in left if topic in ANIMALS[name])
            if 0 < len(yes) < len(left):
                options.append((self._split_bound(len(yes), len(left), asked), topic, [yes, left - yes]))
        named = self._name_bound(len(left), asked)
        return options + [(named, name, [left - {name}]) for name in ANIMALS if name in left]

    def _bound(self, count: int, asked: int) -> Fraction:
        """The value of ``count`` animals if every yes-or-no question were allowed."""
        if count == 0 or asked >= self.max_questions:
            return Fraction(0)
        if (count, asked) not in self._bounds:
            splits = [self._split_bound(part, count, asked) for part in range(1, count // 2 + 1)]
            self._bounds[count, asked] = max([self._name_bound(count, asked), *splits])
        return self._bounds[count, asked]

    def _split_bound(self, part: int, count: int, asked: int) -> Fraction:
        rest = count - part
        return (part * self._bound(part, asked + 1) + rest * self._bound(rest, asked + 1)) / count

    def _name_bound(self, count: int, asked: int) -> Fraction:
        return (self._reward(asked) + (count - 1) * self._bound(count - 1, asked + 1)) / count
