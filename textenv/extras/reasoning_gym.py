"""`ReasoningGym`: the datasets of the package ``reasoning-gym``, with their own verifiers, as one-turn tasks."""

import dataclasses
import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from textenv.envs.turn import Turn
from textenv.extras.safe_eval import FUNCTIONS, is_harmless
from textenv.optional import package
from textenv.prompts.prompts import SPLITS, Prompt, content_hash

MAX_TRIES = 200
"""Attempts for one prompt before a dataset counts as too small for its split."""
EVAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Datasets whose verifier passes the policy's answer to ``eval``."""
INTEGRALS = frozenset({"intermediate_integration", "simple_integration"})
"""Datasets of `SYMPY` whose answers may call functions."""
SYMPY = INTEGRALS | {"countdown", "polynomial_multiplication", "puzzle24"}
"""Datasets whose verifier passes the policy's answer to ``sympy.parse_expr``, which also evaluates it."""


class _DatasetConfig(Protocol):
    seed: int


class _Dataset(Protocol):
    """What is used of a dataset of the package."""

    size: int
    seed: int
    config: _DatasetConfig

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Generate the item of an index: ``question``, ``answer`` and ``metadata``."""

    def score_answer(self, answer: str, entry: dict[str, object]) -> float:
        """Score an answer to an item."""


class ReasoningGym:
    """A dataset of ``reasoning-gym``: an endless sequence of generated questions, scored by its verifier.

    Prompt: the question. Score: the package's ``score_answer`` of the text in the last ``<answer>`` element,
    or of the whole completion, stripped, if it has no tags. Best score: 1. Columns: question, answer
    (None in ``boxnet``, ``graph_color``, ``propositional_logic``, ``rubiks_cube``, ``rush_hour``) and metadata.

    Some verifiers evaluate the policy's text (`EVAL`, `SYMPY`). These get an empty answer instead of a text that
    `textenv.extras.safe_eval` refuses. Sympy can still take minutes to simplify a long wrong integral
    (`INTEGRALS`), so limit the tokens of these completions. If a verifier raises an error, the score is 0.

    The prompt for a given ``number`` and ``seed`` is the same in every process, except that ``isomorphic_strings``,
    ``ransom_note``, ``polynomial_multiplication`` (questions) and ``knight_swap``, ``word_ladder`` (reference answers)
    iterate over sets of strings: set PYTHONHASHSEED for these. ``acre`` draws from ``size`` pregenerated questions.

    Args:
        dataset: name of a dataset, such as ``"chain_sum"``; ``composite`` is not supported.
        split: ``"train"`` or ``"test"``; the hash of a question decides its split.
        extract: function that extracts the answer from a completion; None for `answer_of`.
        config: the dataset's settings, except ``seed``.

    Raises:
        ImportError: if the package is not installed.
        ValueError: on an unknown name, split or setting, and from `sample_prompts` if the split seems to be empty.

    Example:
        >>> task = ReasoningGym("chain_sum", min_terms=2, max_terms=2)  # doctest: +SKIP
        >>> task.sample_prompts([0], seed=1)[0].content  # doctest: +SKIP
        'State the final answer to the following arithmetic problem: 6880 + 4403 ='
    """

    def __init__(
        self, dataset: str = "chain_sum", split: str = "train", *,
        extract: Callable[[str], str] | None = None, **config: object,
    ) -> None:  # fmt: skip
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, expected one of {sorted(SPLITS)}")
        self.name = dataset
        self.split = split
        self.extract = extract or answer_of
        self._dataset = _create(dataset, config)
        self._size = self._dataset.size

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """See `textenv.envs.task.Task.sample_prompts`."""
        prompts: dict[int, Prompt] = {}
        for number in map(int, numbers):
            if number not in prompts:
                prompts[number] = self._draw(seed, number)
        return [prompts[int(number)] for number in numbers]

    def score(self, turns: Sequence[Turn]) -> list[float]:
        """See `textenv.envs.task.Task.score`."""
        scores = []
        for turn in turns:
            answer = self.extract(turn.completion)
            scores.append(self.verify(answer, turn.prompt.columns))
        return scores

    def verify(self, answer: str, entry: Mapping[str, object]) -> float:
        """Return the package's score for an answer to a prompt with these columns; 0 if the verifier fails."""
        if self._is_refused(answer):
            answer = ""
        try:
            return float(self._dataset.score_answer(answer, dict(entry)))
        except Exception:  # boxnet, coin_flip, game_of_life, prime_factorization raise on some texts
            return 0.0

    def _is_refused(self, answer: str) -> bool:
        """Whether the verifier would evaluate an answer that may do harm."""
        functions: frozenset[str] = frozenset()
        if self.name in INTEGRALS:
            functions = FUNCTIONS
        if self.name in SYMPY:
            return not is_harmless(answer, sympy=True, functions=functions)
        if self.name in EVAL:
            return not is_harmless(answer)
        return False

    def _draw(self, seed: int, number: int) -> Prompt:
        """Draw questions until one is of this split; ValueError after `MAX_TRIES`."""
        last_failure: Exception | None = None
        for attempt in range(MAX_TRIES):
            try:
                entry = self._entry(random.Random(f"{seed}/{number}/{attempt}"))
            except Exception as error:  # the generator fails on this seed, in basic_arithmetic by a division by 0
                last_failure = error
                continue
            columns = {name: entry[name] for name in ("question", "answer", "metadata")}
            prompt = Prompt(entry["question"], columns)
            if content_hash(prompt) % 4 in SPLITS[self.split]:
                return prompt

        draws = f"{MAX_TRIES} draws"
        if last_failure is not None:
            draws += f", the last of which failed ({last_failure!r:.200})"
        raise ValueError(
            f"reasoning-gym's {self.name!r} gave no question of split {self.split!r} in {draws}: these settings give "
            "too few different questions; choose settings with more"
        ) from last_failure

    def _entry(self, rng: random.Random) -> dict[str, Any]:
        """Generate an item from a fresh seed and a random index, as the package seeds items by seed + index."""
        dataset = self._dataset
        dataset_seed = rng.randrange(2**31)
        dataset.seed = dataset_seed
        dataset.config.seed = dataset_seed
        dataset.size = self._size  # word_ladder lowers the size when it finds no puzzle

        # Some datasets use the global generators, whose states are restored
        global_seed = rng.randrange(2**32)
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        try:
            random.seed(global_seed)
            np.random.seed(global_seed)
            index = rng.randrange(self._size)
            return dict(dataset[index])
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def answer_of(completion: str) -> str:
    """Return the text in the last pair of answer tags, or else the whole text, stripped."""
    tagged = package("reasoning_gym.utils", "reasoning-gym").extract_answer(completion)
    if tagged is None:
        return completion.strip()
    return str(tagged)


def _create(name: str, config: dict[str, object]) -> _Dataset:
    """Create a dataset of the package; ValueError on an unknown name or wrong settings."""
    # Name
    factory = package("reasoning_gym.factory", "reasoning-gym")
    if name == "composite":
        raise ValueError("dataset is 'composite', which mixes others: make a ReasoningGym of each of them instead")
    if name not in factory.DATASETS:
        similar_names = difflib.get_close_matches(name, factory.DATASETS, n=5, cutoff=0.5)
        hint = "see reasoning_gym.factory.DATASETS"
        if similar_names:
            hint = f"did you mean {', '.join(similar_names)}?"
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")

    # Settings
    _, config_class = factory.DATASETS[name]
    settings = sorted({field.name for field in dataclasses.fields(config_class)} - {"seed"})
    unknown = sorted(set(config) - set(settings))
    if unknown:
        names = ", ".join(unknown)
        if "seed" in unknown:
            names += " (the seed is an argument of sample_prompts)"
        raise ValueError(f"{name} has no setting {names}; its settings are {', '.join(settings)}")
    try:
        return factory.create_dataset(name, seed=0, **config)
    except (AssertionError, TypeError) as error:  # the package checks settings with assert
        raise ValueError(f"{name} does not accept the settings {config}: {error}") from error
