"""`check_reward` against reward functions with one bug each, which one check finds and no other."""

import asyncio
import io
import itertools
import json
import time

import pytest
from rich.console import Console

from tests.helpers.models import WORDS, make_tokenizer
from textenv import check_reward, rewards
from textenv.checks.reward_checker import REWARD_CHECKS, TYPE, run_reward_checks
from textenv.checks.reward_probes import PROBES, make_rows
from textenv.envs.task import FunctionTask
from textenv.rewards import load_function


def good(prompts, completions, **columns):
    return [1 / (1 + len(text)) for text in completions]


def returns_one_too_few(prompts, completions, **columns):
    return good(prompts, completions)[1:]


def returns_text(completions):
    return [f"{len(text)}" for text in completions]


def returns_lists(completions):
    return [[0.5] for text in completions]


def returns_one_number(completions):
    return 0.5


def divides_zero_by_zero(completions):
    """On one ordinary answer; as NaN, not as an exception, as tensors do."""
    return [float("nan") if " truly superb" in text else len(text) for text in completions]


def pays_without_bound(completions):
    return [float("inf") if " truly superb" in text else len(text) for text in completions]


calls = itertools.count()


def draws_lots(completions):
    """Never the same twice: what compares two calls in other ways is then not run."""
    number = next(calls)
    return [len(text) + 10.0 * number for text in completions]


def knows_the_batch_size(completions):
    return [len(text) + 10.0 * len(completions) for text in completions]


def pays_every_second_row(completions):
    return [len(text) + 50.0 * (row % 2) for row, text in enumerate(completions)]


def reads_padding(completions):
    """Cuts every row where the longest one would not fit."""
    longest = max(map(len, completions))
    return [len(text) - (20.0 if longest > 5000 else 0.0) for text in completions]


def likes_everything(completions):
    return [1.0] * len(completions)


def applies_to_nothing(completions):
    return [None] * len(completions)


def takes_the_first_word(completions):
    return [float(len(text.split()[0])) for text in completions]


def averages_word_lengths(completions):
    counts = [(len(text), len(text.split())) for text in completions]
    return [letters / words if words else float("nan") for letters, words in counts]


BROKEN = {
    returns_one_too_few: TYPE,
    returns_text: TYPE,
    returns_lists: TYPE,
    returns_one_number: TYPE,
    divides_zero_by_zero: "finite",
    pays_without_bound: "finite",
    draws_lots: "deterministic",
    knows_the_batch_size: "batch invariant",
    pays_every_second_row: "order invariant",
    reads_padding: "padding invariant",
    likes_everything: "varied",
    applies_to_nothing: "varied",
    takes_the_first_word: "odd answers",
    averages_word_lengths: "odd answers",
}


def test_every_check_has_a_function_of_its_own():
    assert set(BROKEN.values()) == {TYPE, *REWARD_CHECKS}


@pytest.mark.parametrize("function", BROKEN)
def test_each_bug_is_found_by_its_check_alone(function):
    report = run_reward_checks(function)
    run = {result.name for result in report.results}
    if BROKEN[function] not in (TYPE, "deterministic"):
        assert run == {TYPE, *REWARD_CHECKS}
    found = {result.name for result in report.broken}
    assert found == {BROKEN[function]}
    with pytest.raises(ValueError, match=f"{function.__name__}.*checks failed") as caught:
        check_reward(function)
    assert BROKEN[function] in str(caught.value)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "function",
    [
        good,
        rewards.matches("good|joy|superb"),
        rewards.format_tags("think", "answer"),
        rewards.length_window(100, 150, edge=50),
        rewards.repetition(1),
        rewards.unfinished(),
        rewards.forbidden_words(["boring", "superb"]),
        rewards.keyword_count(["joy", "superb"], most=2),
        rewards.sentiment(),
        rewards.clip(good, 0.0, 0.01),
    ],
)
def test_sound_functions_pass(function):
    said = None
    if function.__name__ == "format_tags":
        said = ["<think>a</think><answer>b</answer>", "a", "b", "<answer>c</answer>"] * 2
    report = check_reward(function, completions=said)
    tried = [name for name in PROBES if said or name != "all possible answers"]
    assert not report.broken and [probe.name for probe in report.probes] == tried
    report.raise_if_broken()


def test_completions_that_are_of_a_column_are_named_so():
    """A label, such as "good", may be no answer at all."""
    rows = [{"prompt": f"write {number}", "tone": "good"} for number in range(8)]
    report = check_reward(lambda completions, **columns: [float(len(text)) for text in completions], rows)
    assert report.columns == ["tone"] and "entries of the columns: tone." in str(report)
    report = check_reward(lambda completions: [float(len(text)) for text in completions])
    assert report.columns == [] and "entries of" not in str(report)


def test_columns_are_passed_row_by_row():
    n = 8
    columns = {"answer": [str(row) for row in range(n)]}
    completions = [f"it is {row if row % 2 else 99}" for row in range(n)]
    for function in (rewards.numeric_answer(), rewards.token_f1("answer")):
        report = check_reward(function, ["?"] * n, completions, columns)
        assert report.mean == pytest.approx(0.5 if function.__name__ == "numeric_answer" else 0.25)
    none = check_reward(rewards.exact_answer(), ["?"] * 4, ["1", "2", "3", "4"], {"answer": [None, "2", "9", None]})
    assert none.mean == 0.5


def test_default_answers_are_varied_cut_and_whole():
    rows = make_rows(None, None, None)
    assert len(rows) == 16 and len({row.answer for row in rows}) == 16 and len({row.prompt for row in rows}) > 12
    assert [row.ended for row in rows] == [row.answer.endswith(".") for row in rows] == [True, True, True, False] * 4


def test_chats_tokenizers_and_signatures_of_every_kind():
    chats = [[{"role": "user", "content": f"say {word}"}] for word in WORDS[:6]]
    seen = {}

    def reward(*, prompts, completions, completion_ids, terminated):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, terminated=terminated)
        return [len(answer[0]["content"]) + ids[-1] if ids else 0.0 for answer, ids in
                zip(completions, completion_ids, strict=True)]  # fmt: skip

    answers = [f"{word} good" if row % 2 else word for row, word in enumerate(WORDS[:6])]
    check_reward(reward, chats, answers, tokenizer=make_tokenizer(WORDS))
    assert seen["prompts"] == chats and all(len(answer) == 1 for answer in seen["completions"])
    messages = [[{"role": "assistant", "content": text}] for text in answers]
    check_reward(reward, chats, messages, tokenizer=make_tokenizer(WORDS))

    class Composite:
        def __call__(self, completions):
            return good(None, completions)

    check_reward(Composite())


@pytest.mark.heavy
def test_async_functions_are_awaited_in_any_loop():
    async def slow(completions):
        await asyncio.sleep(0.001)
        return good(None, completions)

    check_reward(slow)

    async def notebook():
        return check_reward(slow)

    assert asyncio.run(notebook()).name == "slow"
    bad = run_reward_checks(rewards.clip(slow, 0.0, 1.0))
    assert not bad.broken


@pytest.mark.heavy
def test_time_is_measured_after_the_first_call():
    state = []

    def reward(completions):
        time.sleep(0.5 if not state else 0.032)
        state.append(1)
        return good(None, completions)

    assert 0.002 <= run_reward_checks(reward).seconds_per_row < 0.02


def needs_answer(prompts, completions, answer):
    return [float(x == y) for x, y in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "said"),
    [
        (needs_answer, {}, ValueError, "needs the column 'answer'.*columns="),
        (rewards.exact_answer(), {}, ValueError, "exact_answer.*needs the column 'answer'"),
        (lambda completions, **columns: columns["gold"], {}, ValueError, "KeyError.*'gold'.*columns="),
        (good, {"prompts": ["a"] * 5, "completions": ["b"] * 4}, ValueError, "5.*4.*same number"),
        (good, {"completions": ["b"]}, ValueError, "at least 4"),
        (good, {"columns": {"x": [1] * 4}, "prompts": ["a"] * 8}, ValueError, "'x': 4"),
        ("good", {}, TypeError, "'good', expected a function"),
    ],
)
def test_what_cannot_be_checked_is_refused(function, arguments, error, said):
    with pytest.raises(error, match=said):
        check_reward(function, **arguments)


def notes(function, **arguments):
    return {probe.name: probe.note for probe in run_reward_checks(function, **arguments).probes if probe.note}


@pytest.mark.heavy
def test_a_hackable_reward_is_seen_before_training():
    best, mean = "scores above the best ordinary completion", "scores above ordinary completions on average"
    assert notes(rewards.keyword_count(["superb", "joy", "boring"], most=9))["very long"] == best
    assert notes(good)["empty"] == best  # the shorter the better
    polite = notes(lambda completions: [float(any(mark in x for mark in ".!")) for x in completions])
    assert polite["only punctuation"] == mean and "empty" not in polite
    echo = notes(lambda prompts, completions: [float(x in y) for x, y in zip(prompts, completions, strict=True)],
                 completions=["no", "yes", *make_rows(None, None, None)[0].prompt.split()])  # fmt: skip
    assert echo["the prompt repeated"] == best and "only punctuation" not in echo
    stuck = notes(lambda completions: [max(map(x.split().count, x.split()), default=0) for x in completions])
    assert stuck["one token repeated"] == best
    open_ended = notes(lambda completions, terminated: [float(not x) for x in terminated])
    assert set(open_ended) == {"one token repeated", "the longest allowed", "very long"}

    def fragile(completions):
        if max(map(len, completions)) > 2500 and completions[0] == completions[1]:
            raise MemoryError("too long")
        return good(None, completions)

    assert notes(fragile)["very long"] == "raised MemoryError: too long"
    own = ["b", "c", "d", "e"]
    swapped = notes(
        lambda prompts, completions: [float(x != y) for x, y in zip(prompts, completions, strict=True)],
        prompts=own, completions=["b", "c", "d", "x"],
    )  # fmt: skip
    assert swapped["another row's answer"] == mean


def test_cheating_that_earns_as_much_is_noted():
    as_much = "scores as much as ordinary completions on average"
    constant_but_for_one = notes(lambda completions: [0.5 + (text == " x") - (text == " y") for text in completions],
                                 completions=[" x", " y", " z", " w"])  # fmt: skip
    for name in ("empty", "only punctuation", "one token repeated", "very long"):
        assert constant_but_for_one[name] == as_much
    sound = notes(rewards.exact_answer(), columns={"answer": [str(i) for i in range(8)]})
    assert sound == {}


QUESTIONS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]


def contains(completions, answer):
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


@pytest.mark.heavy
@pytest.mark.parametrize("reward, is_noted", [(contains, True), (rewards.numeric_answer(), False)])
def test_an_answer_listing_all_answers_is_tried(reward, is_noted):
    found = {probe.name: probe for probe in check_reward(reward, QUESTIONS).probes}["all possible answers"]
    assert bool(found.note) == is_noted and found.answer == "1, 2, 3, 4, 5, 6, 7, 8"
    labels = notes(lambda completions: [float("yes" in text) for text in completions],
                   completions=["yes", "no", "yes", "maybe"])  # fmt: skip
    assert labels["all possible answers"] == "scores above ordinary completions on average"
    assert "all possible answers" not in {probe.name for probe in check_reward(good).probes}


class Rows(list):
    """Any sequence, such as a dataset."""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "prompts",
    [
        QUESTIONS,
        Rows(QUESTIONS * 20),
        [row | {"completion": row["answer"] if i % 2 else "no"} for i, row in enumerate(QUESTIONS)],
        [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in QUESTIONS],
        [row | {"prompt": [3, 1, 2]} for row in QUESTIONS],
    ],
    ids=["rows", "dataset", "completions", "chats", "tokens"],
)
def test_prompts_are_those_of_an_environment(prompts):
    seen = []

    def reward(prompts, completions, answer, prompt_ids, tool_calls, tokenizer=None):
        seen.append((len(completions), type(prompts[0]), len(prompt_ids[0]) > 0))
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return contains(texts, answer)

    check_reward(reward, prompts, tokenizer=make_tokenizer(WORDS))
    kind = list if isinstance(prompts[0]["prompt"], list) and isinstance(prompts[0]["prompt"][0], dict) else str
    assert seen[0] == (min(len(prompts), 32), kind, True)
    assert FunctionTask(prompts, lambda completions, answer: [1.0] * len(completions)).names >= {"answer"}


def test_prompts_without_what_is_needed_are_refused():
    with pytest.raises(ValueError, match="the prompts are token ids, .* give their tokenizer"):
        check_reward(good, [[1, 2]] * 4)
    with pytest.raises(ValueError, match="answer are in the prompts and in columns"):
        check_reward(contains, QUESTIONS, columns={"answer": ["a"] * 8})
    with pytest.raises(ValueError, match="expected one named 'prompt'"):
        check_reward(good, [{"question": "a"}] * 4)


def test_the_longest_answer_is_counted_in_tokens():
    lengths = []

    def reward(completion_ids):
        lengths.append([len(ids) for ids in completion_ids])
        return [float(len(ids)) for ids in completion_ids]

    words = [" ".join(WORDS[: n + 1]) for n in range(6)]
    check_reward(reward, completions=words, tokenizer=make_tokenizer(WORDS))
    assert [256] * 6 in lengths and [2000] * 6 in lengths and [64] * 6 in lengths


def test_the_table_escapes_terminal_and_markup():
    def hostile(completions):
        if "" in completions:
            raise ValueError("\x1b[2J[red]pwned[/red][/]")
        return good(None, completions)

    hostile.__name__ = "[bold]\x1b]0;title\x07"
    completions = ["\x1b[31m[/] x", "[link=http://x]y", "\u202ez", "w w"]
    out = io.StringIO()
    Console(file=out, width=200, no_color=True).print(run_reward_checks(hostile, completions=completions))
    text = out.getvalue()
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "[bold]\\x1b" in text and "[red]pwned[/red][/]" in text and "holds" in text and "ms per row" in text


def test_functions_are_found_in_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("HALF = 0.5\n")
    path = tmp_path / "my_rewards.py"
    path.write_text("from helper import HALF\nx = 3\ndef half(completions):\n    return [HALF for _ in completions]\n")
    assert load_function(f"{path}:half")(["a"]) == [0.5]
    assert load_function("textenv.rewards.numeric:numeric_answer") is rewards.numeric_answer
    monkeypatch.chdir(tmp_path)
    assert load_function("my_rewards:half")(["a"]) == [0.5]
    (tmp_path / "broken.py").write_text("1/0\n")
    (tmp_path / "wrong.py").write_text("def (\n")
    for name, said in {
        "my_rewards.py": "file.py:name or package.module:name",
        "my_rewards.py:": "expected file.py:name or package.module:name",
        "none.py:f": "no file none.py",
        "my_rewards.py:other": "no function named 'other'; its functions are half",
        "my_rewards.py:x": "a int, not a function, named",
        "broken.py:f": "broken.py could not be imported: ZeroDivisionError",
        "wrong.py:f": "SyntaxError",
        "no_module_here:f": "no_module_here could not be imported",
    }.items():
        with pytest.raises(ValueError, match=said):
            load_function(name)


@pytest.mark.heavy
def test_several_rewards_are_checked_by_their_sum():
    """Dense and named ones too."""
    from textenv import Rewards

    def dense(completion_ids):
        return [[0.5 if token % 7 == 0 else 0.0 for token in ids] for ids in completion_ids]

    def named(completions):
        return [{"length": len(text) / 100, "joy": text.count("joy"), "never": None} for text in completions]

    def by_column(completions):
        return {"length": [len(text) / 100 for text in completions], "joy": [text.count("joy") for text in completions]}

    for sound in (dense, named, by_column, Rewards({"dense": dense, "named": (named, 0.1)})):
        assert not run_reward_checks(sound).broken, sound
    scores = run_reward_checks(named), run_reward_checks(by_column)
    assert scores[0].mean == pytest.approx(scores[1].mean)

    def broken(completions):
        return [{"a": float("nan")} for _ in completions]

    assert [result.name for result in run_reward_checks(broken).broken]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["{file}:good"], 0),
        (["{file}:noisy"], 1),
        (["{file}:nothing"], 2),
        (["nowhere.py:good"], 2),
        (["{file}:by_answer"], 2),
        (["{file}:by_answer", "--prompts", "{data}"], 0),
    ],
)
def test_the_exit_status_says_whether_all_holds(words, status, tmp_path, capsys):
    from algos.cli import main

    file, data = tmp_path / "mine.py", tmp_path / "p.jsonl"
    file.write_text(
        "import random\n"
        "def good(completions): return [float(len(t)) for t in completions]\n"
        "def noisy(completions): return [random.random() for t in completions]\n"
        "def by_answer(completions, answer): return [float(a in t) for t, a in zip(completions, answer)]\n"
    )
    data.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in range(32)))
    for ending in ([], ["--json"]):
        given = 0
        try:
            main(["check-reward", *(word.format(file=file, data=data) for word in words), *ending])
        except SystemExit as end:
            given = end.code
        printed = capsys.readouterr()
        assert given == status
        assert len(printed.err if status == 2 else printed.out) > 100 or status == 2
    if status < 2:
        assert json.loads(printed.out)["sound"] == (status == 0)


def test_the_command_line_takes_several_functions(tmp_path, capsys):
    """With weights, and another column."""
    from algos.cli import main

    file, data = tmp_path / "mine.py", tmp_path / "p.jsonl"
    file.write_text(
        "def length(completions): return [float(len(t)) for t in completions]\n"
        "def by_answer(completions, answer): return [float(a in t) for t, a in zip(completions, answer)]\n"
    )
    data.write_text("".join(json.dumps({"question": f"say {i}", "answer": str(i)}) + "\n" for i in range(8)))
    words = ["check-reward", f"{file}:length=-0.2", f"{file}:by_answer", "--prompts", str(data)]
    with pytest.raises(SystemExit):
        main(words)
    assert "--prompt-column" in capsys.readouterr().err
    main([*words, "--prompt-column", "question", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] and list(found["rewards"]) == ["length", "by_answer", "in all"]
    parts = [found["rewards"][name]["probes"]["very long"] for name in found["rewards"]]
    assert parts[2] == pytest.approx(-0.2 * parts[0] + parts[1])
    main([*words, "--prompt-column", "question"])
    assert capsys.readouterr().out.count("Scores of completions that cheat") == 3
