"""`TwentyQuestions` about sixteen animals, and `BestQuestions`, its optimal player."""

import re
from collections.abc import Sequence
from fractions import Fraction

from textenv.games.dialogue import Game

ATTRIBUTES = {
    "mammal": "a mammal",
    "carnivore": "a carnivore",
    "large": "large",
    "aquatic": "aquatic",
    "bird": "a bird",
    "fly": "able to fly",
}
"""Attributes to ask about, and their words after "is it". Each of the first four halves the animals."""
ANIMALS: dict[str, frozenset[str]] = {
    name: frozenset(attributes.split())
    for name, attributes in {
        "seal": "mammal carnivore large aquatic",
        "wolf": "mammal carnivore large",
        "mink": "mammal carnivore aquatic",
        "weasel": "mammal carnivore",
        "manatee": "mammal large aquatic",
        "horse": "mammal large",
        "muskrat": "mammal aquatic",
        "hamster": "mammal",
        "shark": "carnivore large aquatic",
        "python": "carnivore large",
        "frog": "carnivore aquatic",
        "owl": "carnivore bird fly",
        "swan": "large aquatic bird fly",
        "ostrich": "large bird",
        "duck": "aquatic bird fly",
        "butterfly": "fly",
    }.items()
}
"""Animals and their attributes; large means larger than a cat."""
_QUESTION = re.compile(r"\b(?:is|can)\s+it\b([^?\n]*)", re.IGNORECASE)


class TwentyQuestions(Game):
    """Identify one of sixteen animals with as few questions as possible.

    Prompt: the animals, the attributes, and the rules. Actions: any text; its last question ``is it <attribute>?`` or
    ``is it a <animal>?`` counts (also ``can it fly?``). Replies: ``yes`` or ``no``, or an explanation of the mistake,
    which also uses up a question. Score: ``1 - q / max_questions`` for naming the animal after q other questions, which
    ends the episode; 0 on every other turn; the episode terminates after question ``max_questions``. Optimal play:
    `BestQuestions`. Best score: 33/40 on average with 20 questions (3.5 before the right name).

    Args:
        max_questions: number of questions before the episode ends.

    Raises:
        ValueError: if ``max_questions`` is below 1.

    Example:
        >>> env = TwentyQuestions()
        >>> rules, info = env.reset(options={"secret": "owl"})
        >>> env.step("Is it a mammal?")[:3]
        ('no', 0.0, False)
        >>> env.step("A bird... is it an owl?")[:3]
        ('Yes, it is an owl.', 0.95, True)
    """

    TURN = "question"

    def __init__(self, *, max_questions: int = 20) -> None:
        if not max_questions >= 1:
            raise ValueError(f"max_questions is {max_questions}, expected at least 1")
        super().__init__(turns=max_questions, max_observation=1000)
        self.max_questions = max_questions

    @property
    def best_return(self) -> float:
        """Mean return of optimal play over all animals."""
        return float(BestQuestions(max_questions=self.max_questions).value(frozenset(ANIMALS)))

    def _draw(self) -> str:
        return list(ANIMALS)[int(self.np_random.integers(len(ANIMALS)))]

    def _begin(self, secret: str) -> str:
        if secret not in ANIMALS:
            raise ValueError(f"secret is {secret!r}, expected one of {', '.join(ANIMALS)}")
        self._secret, self._shown = secret, phrase(secret)
        return (
            f"I think of one of these animals: {', '.join(ANIMALS)}. "
            f"Ask whether it is {', '.join(ATTRIBUTES.values())} (large is larger than a cat), or name it: "
            "'is it a mammal?', 'is it an owl?'. "
            f"Name it in as few questions as you can; you have {self.max_questions}."
        )

    def _play(self, action: str) -> tuple[str, float | None]:
        topic, complaint = read_topic(action)
        if topic == self._secret:
            return f"Yes, it is {self._shown}.", 1 - (self._turns - 1) / self.max_questions
        return complaint or ("yes" if topic in ANIMALS[self._secret] else "no"), None


def read_topic(text: str) -> tuple[str | None, str]:
    """Return the attribute or animal that a text asks about, or None and an explanation of the mistake."""
    questions = _QUESTION.findall(text)
    if not questions:
        return None, "Ask one question, such as 'is it a mammal?' or 'is it an owl?'."
    words = {word.removesuffix("s") for word in re.findall("[a-z]+", questions[-1].lower())}
    topics = [word for word in (*ATTRIBUTES, *ANIMALS) if word in words]
    if not topics:
        return None, f"I cannot say. Ask about {', '.join(ATTRIBUTES)}, or name one of the animals."
    if len(topics) > 1 or "not" in words:
        return None, "Ask about one thing at a time, and without 'not'."
    return topics[0], ""


def phrase(topic: str) -> str:
    """Return the words for an attribute or animal after "is it"."""
    return ATTRIBUTES.get(topic) or f"{'an' if topic[0] in 'aeiou' else 'a'} {topic}"


class BestQuestions:
    """Optimal player of `TwentyQuestions`, by dynamic programming over the remaining animals.

    Values are exact. A branch is pruned only if its upper bound (its value if every yes-or-no question were allowed)
    is at most the value of a branch already evaluated.

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
        """Return the next question, given the rules and the questions and replies so far."""
        left = frozenset(ANIMALS)
        for said, reply in zip(conversation[1::2], conversation[2::2], strict=True):
            topic, _ = read_topic(said)
            yes = frozenset(name for name in left if topic in ANIMALS[name])
            left = yes if reply.startswith("yes") else left - yes - {topic} if reply.startswith("no") else left
        return f"Is it {phrase(self.choose(left, len(conversation) // 2)[1])}?"

    def value(self, left: frozenset[str], asked: int = 0) -> Fraction:
        """Return the expected return of optimal play if the secret is uniform over the remaining animals."""
        return self.choose(left, asked)[0] if left and asked < self.max_questions else Fraction(0)

    def choose(self, left: frozenset[str], asked: int) -> tuple[Fraction, str]:
        """Return the best value and the attribute or animal to ask about."""
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
        """Return upper bound, topic, and possible sets of remaining animals for each question."""
        parts = {}
        for topic in ATTRIBUTES:
            yes = frozenset(name for name in left if topic in ANIMALS[name])
            if 0 < len(yes) < len(left):
                parts[topic] = [yes, left - yes]
        parts |= {name: [left - {name}] for name in ANIMALS if name in left}
        return [
            (self._bound_of([*map(len, each)], asked, topic in ANIMALS), topic, each) for topic, each in parts.items()
        ]

    def _bound(self, count: int, asked: int) -> Fraction:
        """Return the value of ``count`` animals if every yes-or-no question were allowed: an upper bound."""
        if count == 0 or asked >= self.max_questions:
            return Fraction(0)
        if (count, asked) not in self._bounds:
            splits = [self._bound_of([part, count - part], asked, False) for part in range(1, count // 2 + 1)]
            self._bounds[count, asked] = max([self._bound_of([count - 1], asked, True), *splits])
        return self._bounds[count, asked]

    def _bound_of(self, sizes: list[int], asked: int, named: bool) -> Fraction:
        """Bound of a question that leaves one of these numbers of animals; if ``named``, it names another."""
        won = self._reward(asked) if named else Fraction(0)
        return (won + sum(size * self._bound(size, asked + 1) for size in sizes)) / (sum(sizes) + named)
