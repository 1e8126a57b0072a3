"""Prompts: lists, tables, columns and lengths; splits by content, and an order that is saved as two integers."""

import json

import numpy as np
import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, SFTConfig, TextLoss, collect, evaluate, sft
from tests.helpers.conversations import Parrot, chat_tokenizer
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import EOS, GOOD, prompt_env
from textenv import Rewards, TextVectorEnv, TokenVectorEnv, check_no_overlap, split_prompts
from textenv.prompts.prompts import Prompt, PromptList, as_prompt
from textenv.prompts.tokenize import unread_columns, warn_of_unwritten
from textenv.rewards.transforms import clip


def test_a_prompt_has_messages_only_if_it_is_a_chat():
    message = {"role": "user", "content": "hello"}
    assert Prompt((message,)).messages == (message,)
    assert Prompt("hello").messages == Prompt((1, 2)).messages == ()


def test_every_prompt_comes_once_a_pass():
    """Each pass has an order of its own."""
    deck = PromptList([[i] for i in range(50)])
    first, second = ([p.content[0] for p in deck.sample_prompts(range(k, k + 50), seed=3)] for k in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [p.content[0] for p in deck.sample_prompts(range(50), seed=4)]


@pytest.mark.heavy
def test_an_order_is_saved_as_two_integers():
    prompts = [[i % 6, i // 6] for i in range(30)]
    whole = collect(prompt_env(prompts), policy(), num_episodes=40, seed=3)["observation"][:, :2].tolist()
    env = prompt_env(prompts)
    collect(env, policy(), num_episodes=13, seed=3)
    saved = json.loads(json.dumps(env.prompt_order))
    fresh = prompt_env(prompts)
    fresh.prompt_order = saved
    rest = collect(fresh, policy(), num_episodes=27)["observation"][:, :2].tolist()
    assert rest == whole[13:]


def test_two_environments_may_share_a_task():
    alone, deck = prompt_env(), prompt_env()
    other = TextVectorEnv(deck.task, tokenizer=deck.tokenizer, max_prompt_tokens=4)
    for env in (alone, deck):
        env.reset(seed=1)
    other.reset(seed=9)
    for _ in range(5):
        assert (alone.reset()[0]["tokens"] == deck.reset()[0]["tokens"]).all()
        other.reset()


def policy():
    return LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)


def test_splits_cannot_overlap():
    texts = [f"prompt {i % 150}" for i in range(300)]
    rows = [{"prompt": text.replace(" ", "  " if i % 2 else " "), "id": i} for i, text in enumerate(texts)]
    train, test = split_prompts(rows, "train"), split_prompts(rows, "test")
    assert len(train) + len(test) == 300 and len(test) > 30
    assert not {" ".join(r["prompt"].split()) for r in train} & {" ".join(r["prompt"].split()) for r in test}
    check_no_overlap(train, test)
    with pytest.raises(ValueError, match="1 of 2 test prompts .* first at 1: 'prompt 1'"):
        check_no_overlap(["prompt 1", "x"], ["y", {"prompt": "prompt 1"}])
    with pytest.raises(ValueError, match="expected one of"):
        split_prompts(texts, "validation")


def test_chats_are_rendered_and_rewarded_as_messages():
    """TRL's convention; ids against transformers' own rendering."""
    seen, tokenizer = [], chat_tokenizer()
    messages = [{"role": "user", "content": "a b"}]
    env = prompt_env(
        [{"prompt": messages}], 1, lambda prompts, completions, **_: seen.append((prompts, completions)) or [0.0],
        tokenizer=tokenizer, max_prompt_tokens=8,
    )  # fmt: skip
    observation, _ = env.reset(seed=0)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert observation["tokens"][0, : observation["length"][0, 0]].tolist() == expected
    env.step(np.array([GOOD]))
    env.step(np.array([tokenizer.eos_token_id]))
    assert seen == [([messages], [[{"role": "assistant", "content": seen[0][1][0][0]["content"]}]])]
    assert seen[0][1][0][0]["content"].strip() == "good"
    with pytest.raises(ValueError, match="no chat template"):
        prompt_env([messages])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("a", "expected a sequence"),
        ([], "empty"),
        ([3.5], "prompt 0 is 3.5"),
        ([""], "prompt 0 is empty"),
        ([{"text": "a"}], "expected one named 'prompt'"),
        ([[{"role": "user"}]], "expected {'role'"),
        (iter(["a"]), "expected a sequence"),
    ],
)
def test_wrong_prompts_are_refused_by_index(prompts, message):
    with pytest.raises(ValueError, match=message):
        prompt_env(prompts)


def test_a_set_order_survives_a_trainings_seed():
    prompts = [[i % 6, i // 6] for i in range(30)]
    config = PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4, seed=3)

    def trained_on(env):
        rows = []
        take = env.take_episodes
        env.take_episodes = lambda: rows.append(take()) or rows[-1]
        PPO(env, policy(), config).learn(1)
        return rows[0]["observation"][:, :2].tolist()

    env = prompt_env(prompts)
    first = trained_on(env)
    second = collect(env, policy(), num_episodes=4)["observation"][:, :2].tolist()
    fresh = prompt_env(prompts)
    fresh.prompt_order = env.prompt_order | {"position": 4}
    assert trained_on(fresh) == second != first


def test_evaluating_does_not_pin_the_prompts():
    prompts = [[i % 6, i // 6] for i in range(30)]
    plain, evaluated = prompt_env(prompts), prompt_env(prompts)
    for env in (plain, evaluated):
        env.reset(seed=1)
    for _ in range(3):
        evaluate(evaluated, policy(), num_episodes=5)
        assert plain.start_episodes(2)["tokens"].tolist() == evaluated.start_episodes(2)["tokens"].tolist()
    evaluate(evaluated, policy(), num_episodes=5)
    # And a seed given after it is honoured.
    assert plain.reset(seed=8)[0]["tokens"].tolist() == evaluated.reset(seed=8)[0]["tokens"].tolist()


def test_splits_of_chats_go_by_what_is_said():
    one = [{"role": "user", "content": "hi\nx"}]
    for other in ([{"content": "hi x", "role": "user"}], [{"role": "user", "content": "hi x", "tool_calls": None}]):
        with pytest.raises(ValueError, match="1 of 1 test prompts"):
            check_no_overlap([one], [other])
    check_no_overlap([one], [[{"role": "system", "content": "hi x"}]])


def table(labels):
    """A pandas data frame of 40 prompts, each of which is there twice, whose rows have these labels."""
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": f"prompt {i % 20}", "level": i} for i in range(40)]
    return rows, pandas.DataFrame(rows, index=labels)


LABELS = {
    "reversed": list(range(39, -1, -1)),
    "filtered": list(range(100, 140)),
    "equal": [0] * 40,
    "names": [f"row {i}" for i in range(40)],
    "shuffled": np.random.default_rng(0).permutation(40).tolist(),
}


@pytest.mark.parametrize("labels", LABELS)
def test_a_table_gives_its_rows_in_order(labels):
    rows, frame = table(LABELS[labels])
    texts = [row["prompt"] for row in rows]
    assert [PromptList(frame["prompt"]).prompt(i).content for i in range(40)] == texts
    assert [PromptList(frame).prompt(i).columns["level"] for i in range(40)] == list(range(40))
    for split in ("train", "test"):
        assert [*split_prompts(frame["prompt"], split)] == [*split_prompts(texts, split)]
        assert [*split_prompts(frame, split)] == [*split_prompts(rows, split)]
    train, test = (set(split_prompts(frame["prompt"], split)) for split in ("train", "test"))
    assert not train & test and len(train | test) == 20
    with pytest.raises(ValueError, match="40 of 40 test prompts .* the first at 0: 'prompt 0'"):
        check_no_overlap(frame["prompt"], frame)


def test_the_split_of_a_prompt_ignores_the_order():
    rows, frame = table(LABELS["shuffled"])
    for split in ("train", "test"):
        expected = {row["level"] for row in split_prompts(rows, split)}
        assert {row["level"] for row in split_prompts(frame.sample(frac=1, random_state=3), split)} == expected
        assert {row["level"] for row in split_prompts(frame.sort_index(), split)} == expected


def test_arrays_of_other_libraries_are_rows_and_ids():
    arrow = pytest.importorskip("pyarrow")
    texts = ["a b", "c"]
    assert [PromptList(arrow.array(texts)).prompt(i).content for i in range(2)] == texts
    table = arrow.table({"prompt": texts, "level": [4, 5]})
    assert [PromptList(table).prompt(i).columns for i in range(2)] == [{"level": 4}, {"level": 5}]
    ids = PromptList([torch.tensor([5, 6]), np.array([7])])
    assert ids.prompt(0).content == (5, 6) and ids.summary == PromptList([[5, 6], [7]]).summary
    with pytest.raises(ValueError, match="prompt 0 is .*meta.*, expected text, a list of token ids"):
        PromptList([torch.ones(3, device="meta")]).prompt(0)
    with pytest.raises(ValueError, match="several columns named prompt"):
        PromptList(arrow.Table.from_arrays([["a"], ["b"]], names=["prompt", "prompt"]))


def test_an_environment_and_a_policy_read_tables_too():
    pandas = pytest.importorskip("pandas")
    prompts = pandas.Series(["a b", "c", "d a b"], index=[7, 0, 2])
    plain, tabled = prompt_env(), prompt_env(prompts)
    assert plain.reset(seed=1)[0]["tokens"].tolist() == tabled.reset(seed=1)[0]["tokens"].tolist()
    assert policy().generate(prompts, max_new_tokens=3) == policy().generate(prompts.tolist(), max_new_tokens=3)


def test_columns_of_equal_names_are_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(ValueError, match="several columns named prompt"):
        PromptList(frame)


class Recorder:
    """A reward that is an object, which knows itself as ``self``."""

    def __init__(self):
        self.seen = {}

    def __call__(self, completions, **columns):
        self.seen = columns
        return [0.0] * len(completions)


@pytest.mark.parametrize("name", ["role", "self", "function", "columns", "content", "messages"])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: Rewards({"f": f, "g": (f, 0.5)}), lambda f: clip(f, 0, 1)])
def test_a_column_may_have_any_other_name(name, wrap):
    seen = {}

    def reward(completions, **columns):
        seen.update(columns)
        return [0.0] * len(completions)

    env = prompt_env([{"prompt": "a", name: "poet"}], 1, wrap(reward))
    env.reset(seed=0)
    env.step(np.array([EOS]))
    assert seen[name] == ["poet"]


def test_a_reward_object_gets_the_columns():
    recorder = Recorder()
    env = prompt_env([{"prompt": "a", "self": "poet", "level": 3}], 1, recorder)
    env.reset(seed=0)
    env.step(np.array([EOS]))
    assert recorder.seen["level"] == [3] and "self" not in recorder.seen


def test_one_message_is_no_chat():
    with pytest.raises(ValueError, match="a chat is a list of messages"):
        PromptList([{"role": "user", "content": "a"}]).prompt(0)


def long_deck(*, number=10_400, at=(10_321,)):
    """Short prompts, some of different lengths, with long ones in these rows."""
    prompts = ["a b", "c", "d a b", "d"] * (number // 4)
    for row in at:
        prompts[row] = "a b c d a b c d"
    return prompts


@pytest.mark.heavy
def test_a_prompt_that_is_too_long_is_found_in_any_row():
    with pytest.raises(ValueError, match=r"prompt 10321 \('a b c d a b c d'\) has 8 tokens, the limit is 4"):
        prompt_env(long_deck())


@pytest.mark.heavy
def test_a_prompt_of_another_type_is_found_in_any_row():
    with pytest.raises(ValueError, match="prompt 10321 .* expected text"):
        prompt_env([*long_deck()[:10_321], 3.5])


def test_an_error_names_the_row_of_the_data():
    rows = [{"prompt": f"{letter} {other}"} for letter in "abcd" for other in "abcd"]
    long = "a b c d a b c d"
    split = "test" if split_prompts([*rows, long], "test")[-1] == long else "train"
    with pytest.raises(ValueError, match="prompt 16 "):
        prompt_env(split_prompts([*rows, long], split))


def test_too_long_prompts_are_skipped_and_counted(caplog):
    prompts = long_deck(number=12, at=(3, 9))
    env = prompt_env(prompts, 4, overlong="skip")
    assert env.skipped_prompts == 2 and "2 of 12 prompts" in caplog.text and "row 3" in caplog.text
    kept = [text for text in prompts if len(text.split()) < 8]
    expected = collect(prompt_env(kept, 4), policy(), num_episodes=20, seed=3)
    found = collect(env, policy(), num_episodes=20, seed=3)
    assert found["observation"].tolist() == expected["observation"].tolist()
    assert env.metrics["prompts/skipped"] == 2
    assert len(env.task.prompts) == 10


def test_skipping_needs_one_prompt_that_fits():
    with pytest.raises(ValueError, match="the limit is 4"):
        prompt_env(["a b c d a"], overlong="skip")
    with pytest.raises(ValueError, match="expected 'error' or 'skip'"):
        prompt_env(overlong="cut")
    with pytest.raises(ValueError, match="makes its prompts itself"):
        TokenVectorEnv(Parrot, tokenizer=chat_tokenizer(), overlong="skip")


ROWS = [{"prompt": "a b", "completion": "good ."}] * 8
NO_ROWS = {
    "a text": "a b good", "columns": {"prompt": ["a b"] * 8, "completion": ["good ."] * 8}, "splits": {"train": ROWS},
}  # fmt: skip


@pytest.mark.parametrize("rows", NO_ROWS.values(), ids=NO_ROWS)
def test_what_is_no_sequence_of_rows_is_refused_everywhere(rows):
    """By its keys, sft would learn the names of columns or splits."""
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    readers = [
        PromptList,
        lambda rows: sft(policy, rows, SFTConfig(max_length=16)),
        lambda rows: sft(policy, ROWS, SFTConfig(max_length=16), held_out=rows),
        lambda rows: TextLoss(rows, coef=0.1),
        lambda rows: split_prompts(rows, "train"),
        lambda rows: check_no_overlap(["c"], rows),
        lambda rows: check_no_overlap(rows, ["c"]),
    ]
    for read in readers:
        with pytest.raises(ValueError, match="expected a sequence of rows"):
            read(rows)


def system_tokenizer(written):
    tokenizer = chat_tokenizer()
    message = "{{ m.content }} "
    if not written:
        message = "{% if m.role != 'system' %}" + message + "{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("written", [True, False])
def test_a_system_message_that_the_template_leaves_out_is_warned_of(written, caplog):
    tokenizer = system_tokenizer(written)
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    TextVectorEnv(prompts=[chat], reward=lambda completions: [0.0], tokenizer=tokenizer)
    assert ("does not write system messages" in caplog.text) == (not written)


QUESTION = [{"role": "user", "content": "b"}]


def test_every_prompt_is_looked_at_for_what_the_template_leaves_out(caplog):
    """Not the first alone; a prompt that is left out does not count."""
    tokenizer = system_tokenizer(False)
    tokenizer.name_or_path = "model-of-later-prompts"
    long_prompt = [{"role": "system", "content": "a"}, {"role": "user", "content": "b " * 9}]
    arguments = dict(reward=lambda completions: [0.0], tokenizer=tokenizer, max_prompt_tokens=4, overlong="skip")
    TextVectorEnv(prompts=[QUESTION, "a", long_prompt], **arguments)
    assert "does not write" not in caplog.text
    chat = [{"role": "system", "content": "a"}, *QUESTION]
    TextVectorEnv(prompts=[QUESTION, "a", chat], **arguments)
    assert "the chat template of model-of-later-prompts does not write system messages" in caplog.text
    assert "developer messages" not in caplog.text


def test_generate_looks_at_every_prompt_too(caplog):
    tokenizer = system_tokenizer(False)
    tokenizer.name_or_path = "model-that-generates"
    policy = LMPolicy(make_gpt2(len(tokenizer)), tokenizer)
    policy.generate([QUESTION, [{"role": "system", "content": "a"}, *QUESTION]], max_new_tokens=1)
    assert "the chat template of model-that-generates does not write system messages" in caplog.text


def test_what_a_template_leaves_out_is_found_once():
    """Further chats are not rendered for it, as there may be 100,000."""
    tokenizer = system_tokenizer(False)
    rendered = []
    apply_template = tokenizer.apply_chat_template

    def counted(*arguments, **options):
        rendered.append(arguments)
        return apply_template(*arguments, **options)

    tokenizer.apply_chat_template = counted
    chat = [{"role": "system", "content": "a"}, *QUESTION]
    warn_of_unwritten(QUESTION, tokenizer)
    assert not rendered
    warn_of_unwritten(chat, tokenizer)
    num_rendered = len(rendered)
    assert num_rendered > 0
    for _ in range(100):
        warn_of_unwritten(chat, tokenizer, has_tools=True)
    assert len(rendered) == num_rendered


TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([TOOL], ["tools"]),
        (np.array([TOOL]), ["tools"]),
        (json.dumps([TOOL]), ["tools"]),
        (json.dumps([TOOL], indent=2), ["tools"]),
        ([], []),
        ("[]", []),
        (None, []),
        ("hammer", []),
        (["hammer"], []),
    ],
)
def test_a_column_of_tools_is_told_from_others_of_this_name(column, expected):
    assert unread_columns(as_prompt(0, {"prompt": QUESTION, "tools": column})) == expected
    assert unread_columns(as_prompt(0, {"prompt": "a text", "tools": column})) == []


def test_columns_of_chats_that_only_sft_reads_are_warned_of(caplog):
    chat = [{"role": "user", "content": "b"}]
    tool = {"type": "function", "function": {"name": "add"}}
    tokenizer = chat_tokenizer()
    policy = LMPolicy(make_gpt2(len(tokenizer)), tokenizer)
    policy.generate([{"prompt": chat, "tools": ["hammer"]}], max_new_tokens=1)
    assert "only sft reads" not in caplog.text
    later = {"prompt": chat, "tools": [tool], "chat_template_kwargs": {"deep": False}}
    policy.generate([{"prompt": chat}, later], max_new_tokens=1)
    for name in ("tools", "chat_template_kwargs"):
        assert f"the column {name}, which only sft reads" in caplog.text
