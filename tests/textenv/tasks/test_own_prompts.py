"""`textenv/Prompts-v0`: prompts and rewards of one's own, from files and from Python."""

import functools
import json

import gymnasium
import numpy as np
import pytest

from algos import LMPolicy
from tests.helpers.chat_templates import template_tokenizer
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.tool_calls import multiply
from textenv.envs.task import FunctionTask
from textenv.tasks.own_prompts import Prompts, read_rewards

PROMPTS = [f"number {i}" for i in range(40)]


def zero(completions):
    return [0.0] * len(completions)


def contents(task):
    return {task.prompt(index).content for index in range(len(task.prompts))}


def test_the_splits_share_no_prompt(tmp_path):
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in PROMPTS))
    train, test = (
        contents(Prompts(split, prompts=tmp_path / "own.jsonl", reward=zero, prompt_column="q"))
        for split in ("train", "test")
    )
    assert not train & test and train | test == set(PROMPTS) and len(test) < len(train)


@pytest.mark.parametrize("kind", ["list", "pandas", "pyarrow", "datasets"])
def test_the_column_of_rows_in_memory_is_named_too(kind):
    rows = [{"q": text, "n": i} for i, text in enumerate(PROMPTS)]
    if kind == "pandas":
        rows = pytest.importorskip("pandas").DataFrame(rows)
    elif kind == "pyarrow":
        rows = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    elif kind == "datasets":
        rows = pytest.importorskip("datasets").Dataset.from_list(rows)
    with pytest.raises(ValueError, match="expected one named 'prompt'"):
        contents(Prompts("train", prompts=rows, eval_prompts=["another"], reward=zero))
    for split in ("train", "test"):
        task = Prompts(split, prompts=rows, reward=zero, prompt_column="q")
        assert task.prompt(0).content in PROMPTS
        assert PROMPTS[task.prompt(0).columns["n"]] == task.prompt(0).content


def test_a_column_that_rows_in_memory_lack_is_refused():
    """Or that stands beside one named prompt, which was read instead, without a word."""
    for rows, says in (
        ([{"q": "a", "prompt": "b"}], "prompt 0: it has both columns, 'prompt' and 'q'"),
        ([{"question": "a"}], r"prompt 0: it has the columns \['question'\] but not 'q'"),
    ):
        with pytest.raises(ValueError, match=says):
            contents(Prompts("train", prompts=rows, eval_prompts=[{"q": "z"}], reward=zero, prompt_column="q"))


@pytest.mark.parametrize("rows", [["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]])
def test_rows_without_the_column_may_stand_beside_a_file_with_it(rows, tmp_path, caplog):
    """A warning says so of rows with columns, since the name may be misspelt."""
    (tmp_path / "own.jsonl").write_text('{"q": "c"}\n')
    for split, expected in (("train", {"a", "b"}), ("test", {"c"})):
        task = Prompts(split, prompts=rows, eval_prompts=tmp_path / "own.jsonl", reward=zero, prompt_column="q")
        assert contents(task) == expected
    assert ("which prompt 0 lacks: its column 'prompt' is read" in caplog.text) == isinstance(rows[0], dict)


def test_too_few_prompts_are_in_both_splits(caplog):
    for split in ("train", "test"):
        assert contents(Prompts(split, prompts=["one", "four"], reward=zero)) == {"one", "four"}
    assert "too few to hold some out" in caplog.text


def test_evaluation_prompts_are_not_trained_on(caplog):
    """Those that both have are counted."""
    own = dict(prompts=PROMPTS, eval_prompts=["another"], reward=zero)
    assert contents(Prompts("train", **own)) == set(PROMPTS) and contents(Prompts("test", **own)) == {"another"}
    assert not caplog.text
    Prompts("train", **(own | {"eval_prompts": [PROMPTS[3], "another"]}))
    assert "1 of 2 test prompts are also training prompts" in caplog.text


def test_a_system_prompt_and_chat_make_messages():
    """Messages that are there already stay."""
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hello"}]
    made = Prompts(prompts=["hi", messages, messages[1:]], reward=zero, system_prompt="be brief", chat=True)
    brief = {"role": "system", "content": "be brief"}
    expected = {"hi": [brief, {"role": "user", "content": "hi"}], "mine": messages, "hello": [brief, messages[1]]}
    shown = [list(made.prompt(i).content) for i in range(len(made.prompts))]
    assert shown and all(chat in expected.values() for chat in shown)
    plain = Prompts(prompts=["hi"], reward=zero, chat=True)
    assert list(plain.prompt(0).content) == [{"role": "user", "content": "hi"}]
    with refused(ValueError, "prompt 0 is a list of token ids"):
        Prompts(prompts=[[1, 2]], reward=zero, chat=True)


def test_rewards_by_name_keep_their_weights(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def long(completions): return [float(len(text)) for text in completions]\n"
        "def vowels(completions): return [float(text.count('a')) for text in completions]\n"
    )
    (tmp_path / "other.py").write_text("def long(completions): return [1.0 for text in completions]\n")
    names = [f"{tmp_path}/rewards.py:long", f"{tmp_path}/rewards.py:vowels=-0.5", f"{tmp_path}/other.py:long=2"]
    scores = read_rewards(names)(prompts=["x"] * 2, completions=["banana", "sky"])
    assert scores.score == [6 - 1.5 + 2, 3 - 0 + 2]
    assert scores.parts == {"long": [6, 3], "vowels": [-1.5, 0], "other.long": [2, 2]}
    assert read_rewards(names[0])(prompts=["x"], completions=["sky"]).score == [3]
    assert read_rewards({"mine": (zero, 0.5)}).functions["mine"][1] == 0.5
    assert set(read_rewards([zero, f"{tmp_path / 'other.py'}:long"]).functions) == {"zero", "long"}


def test_rewards_of_one_name_get_names_of_their_own(tmp_path, caplog):
    for folder, value in {"a": 1, "b": 2, "c": 3}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(
            f"def score(completions): return [{value}.0 for _ in completions]"
        )
    scores = read_rewards([f"{tmp_path}/{folder}/rewards.py:score" for folder in "abc"])(
        prompts=["x"], completions=["y"]
    )
    assert scores.parts == {"score": [1], "score_2": [2], "score_3": [3]}
    assert f"score_3 is {tmp_path}/c/rewards.py:score" in caplog.text


class Constant:
    def __init__(self, value):
        self.value = value

    def __call__(self, completions):
        return [self.value for _ in completions]

    def doubled(self, completions):
        return [2 * self.value for _ in completions]


def test_one_object_may_be_given_several_times():
    def scaled(completions, factor):
        return [factor * len(text) for text in completions]

    one, two = Constant(10.0), Constant(20.0)
    lambdas = [lambda completions, i=i: [float(i) for _ in completions] for i in range(3)]
    partials = [functools.partial(scaled, factor=factor) for factor in (100.0, 200.0)]
    scores = read_rewards([*lambdas, *partials, one, two, one.doubled])(prompts=["x"], completions=["y"])
    assert scores.parts == {
        "<lambda>": [0], "<lambda>_2": [1], "<lambda>_3": [2], "scaled": [100], "scaled_2": [200],
        "Constant": [10], "Constant_2": [20], "doubled": [20],
    }  # fmt: skip


@pytest.mark.parametrize("entry", [Constant(1.0), Constant(1.0).doubled, len])
def test_a_reward_that_is_given_twice_is_refused(entry):
    with refused(ValueError, "is given twice"):
        read_rewards([entry, entry])


def test_a_changed_file_of_rewards_is_run_again(tmp_path):
    """It may load a model; training and evaluation each name it."""
    (tmp_path / "once.py").write_text(
        "from pathlib import Path\n"
        "with (Path(__file__).parent / 'log').open('a') as log: log.write('x')\n"
        "def f(completions): return [0.0] * len(completions)\n"
    )
    for _ in range(3):
        read_rewards([f"{tmp_path / 'once.py'}:f"])
    assert (tmp_path / "log").read_text() == "x"
    (tmp_path / "once.py").write_text("def f(completions): return [7.0] * len(completions)\n")
    assert read_rewards(f"{tmp_path / 'once.py'}:f")(prompts=["x"], completions=["y"]).score == [7]


def test_the_environment_is_made_by_name(tmp_path):
    """With limits that can be changed."""
    make_gpt2(n_positions=1024).save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    own = dict(model=str(tmp_path), prompts=["a b", "c"], reward=lambda completions: list(map(len, completions)))
    env = gymnasium.make_vec("textenv/Prompts-v0", num_envs=2, **own)
    assert env.max_length == 2 + 128 and env.spec.reward_threshold is None
    limits = {"max_prompt_tokens": 3, "max_new_tokens": 2}
    env = gymnasium.make_vec("textenv/Prompts-v0", num_envs=2, kl_coef=0.1, **limits, **own)
    assert isinstance(env.task, FunctionTask) and env.max_length == 5 and env.penalty.coef == 0.1
    env.reset(seed=0)
    env.step(np.array([5, 5]))
    _, reward, _, truncated, _ = env.step(np.array([5, 5]))
    assert truncated.all() and reward.tolist() == [len(" good good")] * 2


@pytest.mark.parametrize(("template", "chat"), [("qwen 3", True), ("chatml", True), ("chatml", False)])
def test_the_default_limit_counts_the_schemas_of_tools(tmp_path, template, chat):
    """Which the template shows, or the system message, or the text."""
    make_gpt2(n_positions=4096).save_pretrained(tmp_path)
    template_tokenizer(template).save_pretrained(tmp_path)
    prompts = ["What is 12 * 34?", "And 2 * 3?"]
    own = dict(model=str(tmp_path), prompts=prompts, reward=zero, chat=chat, max_new_tokens=8)
    plain = gymnasium.make_vec("textenv/Prompts-v0", num_envs=2, **own)
    env = gymnasium.make_vec("textenv/Prompts-v0", num_envs=2, tools=[multiply], **own)
    state, _ = env.reset(seed=0)
    assert state["length"].max() == env.limits.max_prompt_tokens > plain.limits.max_prompt_tokens + 100


def reads_128_tokens(folder):
    """Save a model that reads 128 tokens."""
    make_gpt2(n_positions=128).save_pretrained(folder)
    tokenizer = make_tokenizer(WORDS)
    tokenizer.model_max_length = 128
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_an_answer_has_the_room_that_its_own_prompt_leaves(tmp_path):
    """Whichever prompts the split, or another file, has beside it."""
    short = [" ".join("abcd"[int(digit)] for digit in np.base_repr(number, 4)) for number in range(40)]
    long = " ".join("a" * 80)
    arguments = dict(model=reads_128_tokens(tmp_path), num_envs=4, reward=zero)

    def last_tokens(split, **sources):
        """Number of tokens at which the answers of a split are cut, and of the split's longest prompt."""
        env = gymnasium.make_vec("textenv/Prompts-v0", split=split, **sources, **arguments).unwrapped
        check_length(env.max_length)
        count = len(env.task.prompts)
        env.start_episodes(count, seed=0, slots=count)
        turns = env.open_turns
        longest = max(len(turn.prefix) for turn in turns)
        return longest, {len(turn.prefix) + turn.max_new_tokens for turn in turns}

    check_length = LMPolicy.load(tmp_path).lm.check_length
    cuts = {split: last_tokens(split, prompts=[*short, long]) for split in ("train", "test")}
    assert {longest for longest, _ in cuts.values()} == {3, 80}, "one split has the long prompt"
    assert [tokens for _, tokens in cuts.values()] == [{128}, {128}]
    for split, longest in (("train", 80), ("test", 1)):
        assert last_tokens(split, prompts=[long], eval_prompts=["b"]) == (longest, {128})


def test_a_long_prompt_that_leaves_little_room_is_told(tmp_path, caplog):
    model = reads_128_tokens(tmp_path)

    def limits(longest, **options):
        """Limits of an environment whose longest prompt has so many tokens, and what the log says of them."""
        caplog.clear()
        prompts = ["a b", " ".join("a" * longest)]
        arguments = dict(model=model, prompts=prompts, eval_prompts=["b"], reward=zero, **options)
        env = gymnasium.make_vec("textenv/Prompts-v0", num_envs=2, **arguments)
        warnings = [r.getMessage() for r in caplog.records if "is cut there" in r.getMessage()]
        return env.limits.max_new_tokens, env.limits.width, warnings

    assert limits(96) == (128, 128, [])
    *numbers, (warning,) = limits(122)
    assert numbers == [128, 128]
    assert warning.startswith("the longest prompt has 122 tokens, which leaves 6 of the 128 tokens")
    *numbers, (warning,) = limits(3, max_prompt_tokens=120)
    assert numbers == [128, 128]
    assert warning.startswith("max_prompt_tokens is 120, which leaves 8 of the 128 tokens")

    # What it advises, and limits of the user
    assert limits(122, max_prompt_tokens=20, overlong="skip") == (128, 128, [])
    assert limits(122, max_new_tokens=100) == (100, 222, [])
    assert limits(122, max_new_tokens=100, max_length=128) == (100, 128, [])


@pytest.mark.parametrize(("own", "said"), [
    ({}, "has no prompts"),
    ({"prompts": PROMPTS}, "has no reward"),
    ({"prompts": PROMPTS, "reward": []}, "has no reward"),
    ({"prompts": [], "reward": zero}, "prompts is empty"),
    ({"prompts": "text", "reward": zero}, "there is no file text"),
    ({"prompts": 3, "reward": zero}, "prompts is 3"),
    ({"prompts": PROMPTS, "reward": 3}, "reward 'int' is 3"),
    ({"prompts": PROMPTS, "reward": lambda completions, answer: []}, "needs the column 'answer'"),
    ({"prompts": PROMPTS, "reward": zero, "promts": 3}, "did you mean 'prompts'"),
])  # fmt: skip
def test_what_is_missing_is_named_at_construction(own, said):
    """And what is of another kind."""
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=said):
        gymnasium.make_vec("textenv/Prompts-v0", **own)


def one(completions):
    return [1.0] * len(completions)


@pytest.mark.parametrize("reward", [[one, (zero, 0.5)], [(one, 1.0)], [(one, 0.5), (zero, 2.0)]])
def test_functions_may_have_weights(reward):
    weights = [entry[1] if isinstance(entry, tuple) else 1.0 for entry in reward]
    rewards = read_rewards(reward)
    scores = rewards(prompts=["?"], completions=["a"], completion_ids=[[7]])
    assert scores.score == [weights[0]]
    for wrong in ((one, 0.5), [(one, "much", 3)], [0.5]):
        with refused(TypeError, "is no function"):
            read_rewards(wrong)
