"""`TwentyQuestions` about sixteen animals, and `BestQuestions`, its optimal player."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from textenv.games.dialogue import Game

ATTRIBUTES = {
    "mammal": "a mammal",
    "carnivore": "a carnivore",
    "large": "large",
    "aquatic": "aquatic",
    "bird": "a bird",
    "fly": "able to fly",
}
"""Attributes to ask about, with the words that follow "is it". Each of the first four halves the animals."""
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


class TwentyQuestions(Game[str]):
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

    def _begin(self, secret: object) -> str:
        if not isinstance(secret, str) or secret not in ANIMALS:
            raise ValueError(f"secret is {secret!r}, expected one of {', '.join(ANIMALS)}")
        self._secret = secret
        self._secret_in_words = phrase(secret)
        return (
            f"I think of one of these animals: {', '.join(ANIMALS)}. "
            f"Ask whether it is {', '.join(ATTRIBUTES.values())} (large is larger than a cat), or name it: "
            "'is it a mammal?', 'is it an owl?'. "
            f"Name it in as few questions as you can; you have {self.max_questions}."
        )

    def _play(self, action: str) -> tuple[str, float | None]:
        topic, complaint = read_topic(action)
        if topic is None:
            return complaint, None
        if topic == self._secret:
            other_questions = self._turns - 1
            return f"Yes, it is {self._secret_in_words}.", 1 - other_questions / self.max_questions
        if topic in ANIMALS[self._secret]:
            return "yes", None
        return "no", None


def read_topic(text: str) -> tuple[str | None, str]:
    """Return the attribute or animal that a text asks about, or None and an explanation of the mistake."""
    questions = _QUESTION.findall(text)
    if not questions:
        return None, "Ask one question, such as 'is it a mammal?' or 'is it an owl?'."
    last_words = re.findall("[a-z]+", questions[-1].lower())
    words = {word.removesuffix("s") for word in last_words}
    topics = [word for word in (*ATTRIBUTES, *ANIMALS) if word in words]
    if not topics:
        return None, f"I cannot say. Ask about {', '.join(ATTRIBUTES)}, or name one of the animals."
    if len(topics) > 1 or "not" in words:
        return None, "Ask about one thing at a time, and without 'not'."
    return topics[0], ""


def phrase(topic: str) -> str:
    """Return the words that follow "is it" for an attribute or animal."""
    if topic in ATTRIBUTES:
        return ATTRIBUTES[topic]
    article = "an" if topic[0] in "aeiou" else "a"
    return f"{article} {topic}"


class _Option(NamedTuple):
    """A question that the optimal player may ask."""

    bound: Fraction
    """Upper bound of the value of asking it."""
    topic: str
    """The attribute or animal that it asks about."""
    outcomes: list[frozenset[str]]
    """The animals that may remain; after a name, those that remain if it is wrong."""


def _bound_of_option(option: _Option) -> Fraction:
    return option.bound


class BestQuestions:
    """Optimal player of `TwentyQuestions`, by dynamic programming over the remaining animals.

    Values are exact. A question is skipped only if the upper bound of its value is at most the value of a question
    that was evaluated before. The bound is the value if every yes-or-no question about the animals were allowed.

    Args:
        max_questions: number of questions before the episode ends.

    Example:
        >>> player = BestQuestions()
        >>> player.value(frozenset(ANIMALS))
        Fraction(33, 40)
        >>> player(["the rules"]), player(["the rules", "Is it a mammal?", "yes"])
        ('Is it a mammal?', 'Is it a carnivore?')
    """

    def __init__(self, *, max_questions: int = 20) -> None:
        self.max_questions = max_questions
        self._best_questions: dict[tuple[frozenset[str], int], tuple[Fraction, str]] = {}
        """Value and topic of the best question, by remaining animals and number of questions asked."""
        self._bounds: dict[tuple[int, int], Fraction] = {}
        """Upper bounds of values, by number of remaining animals and number of questions asked."""

    def __call__(self, conversation: Sequence[str]) -> str:
        """Return the next question for a conversation: the rules, then questions and replies in turn."""
        left = frozenset(ANIMALS)
        questions = conversation[1::2]
        replies = conversation[2::2]
        for question, reply in zip(questions, replies, strict=True):
            topic, _ = read_topic(question)
            with_topic = _animals_with(topic, left)
            if reply.startswith("yes"):
                left = with_topic
            elif reply.startswith("no"):
                left = left - with_topic - {topic}
        _, best_topic = self.choose(left, len(questions))
        return f"Is it {phrase(best_topic)}?"

    def value(self, left: frozenset[str], asked: int = 0) -> Fraction:
        """Return the expected return of optimal play if the secret is uniform over the remaining animals.

        Args:
            left: the remaining animals.
            asked: number of questions asked so far.
        """
        if not left or asked >= self.max_questions:
            return Fraction(0)
        value, _ = self.choose(left, asked)
        return value

    def choose(self, left: frozenset[str], asked: int) -> tuple[Fraction, str]:
        """Return the value of the best question, and the attribute or animal that it asks about.

        Args:
            left: the remaining animals, at least one.
            asked: number of questions asked so far, fewer than ``max_questions``.
        """
        state = (left, asked)
        if state in self._best_questions:
            return self._best_questions[state]

        # The most promising first; of equal ones, the first in the order of the tables
        best_value = Fraction(-1)
        best_topic = ""
        for option in sorted(self._options(left, asked), key=_bound_of_option, reverse=True):
            if option.bound <= best_value:
                break
            total = Fraction(0)
            if option.topic in ANIMALS:
                total += self._reward(asked)
            for outcome in option.outcomes:
                total += len(outcome) * self.value(outcome, asked + 1)
            value = total / len(left)
            if value > best_value:
                best_value = value
                best_topic = option.topic
        self._best_questions[state] = (best_value, best_topic)
        return best_value, best_topic

    def _reward(self, asked: int) -> Fraction:
        """Return the score for naming the animal after this number of questions."""
        return 1 - Fraction(asked, self.max_questions)

    def _options(self, left: frozenset[str], asked: int) -> list[_Option]:
        """Return the questions that tell remaining animals apart, or name one."""
        options = []
        for topic in ATTRIBUTES:
            with_topic = _animals_with(topic, left)
            without_topic = left - with_topic
            if with_topic and without_topic:
                bound = self._bound_of_question(asked, [len(with_topic), len(without_topic)])
                options.append(_Option(bound, topic, [with_topic, without_topic]))
        for name in ANIMALS:
            if name in left:
                bound = self._bound_of_name(asked, len(left))
                options.append(_Option(bound, name, [left - {name}]))
        return options

    def _bound(self, count: int, asked: int) -> Fraction:
        """Return the value of ``count`` animals if every yes-or-no question were allowed: an upper bound."""
        if count == 0 or asked >= self.max_questions:
            return Fraction(0)
        if (count, asked) not in self._bounds:
            bounds = [self._bound_of_name(asked, count)]
            for part in range(1, count // 2 + 1):
                bounds.append(self._bound_of_question(asked, [part, count - part]))
            self._bounds[count, asked] = max(bounds)
        return self._bounds[count, asked]

    def _bound_of_question(self, asked: int, counts: list[int]) -> Fraction:
        """Return the bound of a question that leaves one of these numbers of animals."""
        total = Fraction(0)
        for count in counts:
            total += count * self._bound(count, asked + 1)
        return total / sum(counts)

    def _bound_of_name(self, asked: int, count: int) -> Fraction:
        """Return the bound of a question that names one of ``count`` animals."""
        others = count - 1
        return (self._reward(asked) + others * self._bound(others, asked + 1)) / count


def _animals_with(topic: str | None, animals: frozenset[str]) -> frozenset[str]:
    """Return those of the animals that have this attribute; none if it is no attribute."""
    return frozenset(name for name in animals if topic in ANIMALS[name])
