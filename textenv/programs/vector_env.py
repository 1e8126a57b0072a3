"""`ProgramVectorEnv`: an ordinary function that asks a language model, as a vector environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from textenv.envs.action_masks import Rule, WordRule
from textenv.envs.limits import StopConditions, check_at_least, check_tokenizer
from textenv.envs.turn import Turn
from textenv.envs.vector_env import DEFAULT_SLOTS, TextObservation, TextVectorEnv
from textenv.names import check_names, refuse_unknown
from textenv.programs.opponents import Opponent, Opponents
from textenv.programs.run import Question
from textenv.programs.task import Programs, program_metrics, runs_of
from textenv.prompts.prompts import Prompt
from textenv.rewards.scores import Scores

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

MAX_TURNS = 20
"""Default maximum number of questions in an episode."""
MAX_LENGTH = 1024
"""Default maximum number of tokens of a text."""
TIMEOUT = 60.0
"""Default time limit of a program for each step, in seconds."""


MADE_HERE = ("self", "arguments", "task", "prompts", "reward", "sampler", "max_prompt_tokens", "overlong")
"""Arguments that only other environments have: a program has its tasks, its reward and its questions."""
ANSWER_ARGUMENTS = (
    "tokenizer", "num_envs", "max_prompt_tokens", "max_length", "max_new_tokens", "min_new_tokens", "stop", "forbidden",
    "allowed",
)  # fmt: skip
"""Arguments of `TextVectorEnv` that decide how an answer is written."""


class _Questions:
    """Questions as a task with one turn each and no reward."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = iter(questions)

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Return the questions in their order, whatever the numbers."""
        prompts = []
        for _ in numbers:
            question = next(self._questions)
            prompts.append(Prompt(question.content, state=_Asked(question), limits=question.limits))
        return prompts

    def score(self, turns: Sequence[Turn]) -> list[float]:
        """Return 0 for each turn."""
        return [0.0] * len(turns)


class _Asked(NamedTuple):
    """State of a prompt that is a question, as in `ProgramRun`."""

    question: Question


class ProgramVectorEnv(TextVectorEnv):
    """A program that asks the model, in ``num_envs`` slots: an agent that you already have becomes an environment.

    The program is an ordinary function. It gets a function ``ask``, with which it asks the model as it would ask a
    service, and returns its reward. Each episode is a call of the program in a thread of its own; the questions of all
    threads are answered together.

    ``ask`` takes all that the model is to read: messages, or a text. If they continue what the model has read and
    written, only what is new is appended, and no token is made twice. If not (a summary, an edited history, another
    thread of thought), a further row of the same episode begins, with the same reward. With
    ``earlier_turns="template"`` every question of messages begins a row, and the model reads what its chat template
    makes of them, as at a server.

    Args:
        play: the program, ``play(ask, task)``, or without ``tasks`` ``play(ask)``; it may be ``async``. It returns a
            reward, a dictionary of named rewards, which are added, or None, which leaves the episode out. With several
            agents it is ``play(ask_0, ask_1, task)``, and returns a list with such a reward for each. An argument named
            ``rng`` gets NumPy's random generator of the episode; with other random numbers a resumed training differs.
            All episodes call the same object at the same time: what belongs to an episode is kept in local variables.
        tasks: tasks of any kind, such as rows of a data set, in shuffled order as prompts are.
        tokenizer: the policy's tokenizer. Messages need its chat template.
        num_envs: number of programs that run at the same time.
        agents: number of agents, which have the same policy. A game is an episode for each agent.
        opponents: None: the policy plays all agents. Else a list, or a mapping from name (in the log) to opponent. An
            opponent is a function from what an agent reads to its answer (it may have arguments ``allowed`` and
            ``rng``), an earlier policy (`algos.League`), or None, the policy itself. An opponent is drawn for each
            game, and the agent that the policy plays; the episodes of the other agents are empty.
        max_turns: maximum number of questions of a program, all agents together. A further one raises `LimitReached`
            in the program, which may catch it and return its reward.
        max_length: maximum number of tokens of a text, answers included; None: 1,024, or as many as the model reads. A
            question that does not fit raises `LimitReached`, too.
        max_new_tokens: maximum number of tokens of an answer; ``ask(..., max_tokens=n)`` lowers it for one question.
        allowed: texts, one of which is the whole answer. ``ask(..., allowed=[...])`` allows only some of them. Or as in
            `TextVectorEnv`.
        timeout: seconds that programs may take between an answer and their next question or their return; None: no
            limit. A program that takes longer has failed.
        arguments: other arguments of `TextVectorEnv`: ``stop``, ``forbidden``, ``min_new_tokens``, ``tools``
            (which opponents cannot call), ``chat_template_kwargs``, ``earlier_turns``, ….

    The episode of a program that fails is left out of the update: if it raises an error, takes too long, or never asks.
    The log has the number of failures and the first one's traceback. If all fail from the beginning, it is raised.

    Raises:
        TypeError: if ``play`` is no function with these arguments.
        ValueError: as `TextVectorEnv`.

    Example:
        >>> def play(ask, task):
        ...     return float(task["answer"] in ask(task["question"]))
        >>> tasks = [{"question": "1 + 1 =", "answer": "2"}]
        >>> env = ProgramVectorEnv(play, tasks=tasks, tokenizer=tok, num_envs=8)  # doctest: +SKIP
    """

    task: Programs

    @check_names
    def __init__(
        self,
        play: Callable[..., object],
        *,
        tasks: Sequence[object] | None = None,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: int = DEFAULT_SLOTS,
        agents: int = 1,
        opponents: Sequence[Opponent] | Mapping[str, Opponent] | None = None,
        max_turns: int = MAX_TURNS,
        max_length: int | None = None,
        max_new_tokens: int = 32,
        allowed: Rule | Sequence[str | int] | None = None,
        timeout: float | None = TIMEOUT,
        **arguments: Any,
    ) -> None:
        accepted = [*inspect.signature(ProgramVectorEnv).parameters, *inspect.signature(TextVectorEnv).parameters]
        accepted = [name for name in accepted if name not in MADE_HERE]
        refuse_unknown(arguments, dict.fromkeys(accepted), owner="ProgramVectorEnv")
        if max_length is None:
            check_tokenizer(tokenizer)
            max_length = min(MAX_LENGTH, tokenizer.model_max_length)
        check_at_least("max_length", max_length, 2)
        if arguments.pop("score_while_generating", False):
            raise ValueError(
                "score_while_generating is True, but programs return their rewards themselves, while others still "
                "run: leave it out"
            )

        # A list of texts becomes a rule of words, of which a question may allow only some
        words: list[str] = []
        tokens_of_answer = 1
        if (
            isinstance(allowed, Collection)
            and not isinstance(allowed, str)
            and all(isinstance(text, str) for text in allowed)
        ):
            words = [str(text) for text in allowed]
            ends = StopConditions(tokenizer, arguments.get("stop", ())).ids
            rule = WordRule(words, tokenizer, ends=ends, available=self._available)
            tokens_of_answer = rule.num_tokens
            allowed = rule

        # The task; a question needs room for an answer behind it
        pool = None
        if opponents is not None:
            pool = Opponents(opponents, agents=agents)
        room = max_length - tokens_of_answer
        task = Programs(
            play,
            tasks,
            tokenizer=tokenizer,
            agents=agents,
            max_turns=max_turns,
            room=room,
            words=words,
            timeout=timeout,
            opponents=pool,
        )
        arguments |= dict(
            tokenizer=tokenizer,
            num_envs=num_envs,
            max_prompt_tokens=room,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            allowed=allowed,
        )
        super().__init__(task, max_turns=max_turns, **arguments)
        task.tools = self.tools
        task.continues_chats = self.earlier_turns == "transcript"
        self._answering_env: TextVectorEnv | None = None
        self._answer_arguments = {name: arguments[name] for name in ANSWER_ARGUMENTS if name in arguments}

    def start_episodes(
        self, episodes: int, *, seed: int | None = None, group_size: int = 1, slots: int | None = None
    ) -> TextObservation:
        """See `TextVectorEnv.start_episodes`; programs of episodes that were not finished are given up."""
        self.task.close_waiting()
        return super().start_episodes(episodes, seed=seed, group_size=group_size, slots=slots)

    def given_episodes(self, prompts: Sequence[object], completions: Sequence[object], scores: object) -> TensorDict:
        """Raise a ValueError: episodes of programs are those that the programs play."""
        raise ValueError(
            "texts that were written elsewhere (step, given_episodes) are no episodes of a program: use a TextVectorEnv"
        )

    def answering_env(self, questions: Sequence[Question]) -> TextVectorEnv:
        """Return an environment of single answers to these questions, for a `BatchOpponent`, with this one's limits.

        Its episodes are the questions in their order, and all scores are 0. It is used again: be done with it before
        the next call.
        """
        task = _Questions(questions)
        if self._answering_env is None:
            self._answering_env = TextVectorEnv(task, **self._answer_arguments)
        self._answering_env.task = task
        return self._answering_env

    def report(self, turns: list[Turn], episodes: list[int], scores: Scores) -> None:
        """See `TextVectorEnv.report`; the metrics of `program_metrics` are added."""
        super().report(turns, episodes, scores)
        self.metrics |= program_metrics(runs_of(turns))

    def _begin(self, slots: np.ndarray) -> None:
        """See `TextVectorEnv._begin`; programs that still run in these slots are given up."""
        for slot in slots.tolist():
            prompt = self._step_slots.transcript.prompts[slot]
            if prompt is not None:
                prompt.state.stop()
        super()._begin(slots)

    def _available(self, turn: Turn) -> Collection[str] | None:
        """Return the texts that the present question of a program allows; None: all."""
        return self.task.available(turn)
