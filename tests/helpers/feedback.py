"""People who answer by a script, and what their file holds."""

import json


class Scripted:
    """Answers by a list in order, or by a function of the question; keeps what it was asked."""

    name = "script"

    def __init__(self, answers):
        self.answers, self.questions = answers, []

    def ask(self, question):
        self.questions.append(question)
        return self.answers(question) if callable(self.answers) else self.answers[len(self.questions) - 1]

    @property
    def shown(self):
        return [question.responses for question in self.questions]


def call(human, completions, prompt="p", **columns):
    return human(prompts=[prompt] * len(completions), completions=completions, **columns)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def better(question):
    """Prefers the later letter; `=` ties with everything."""
    first, second = question.responses
    return "tie" if "=" in (first, second) else "first" if first > second else "second"
