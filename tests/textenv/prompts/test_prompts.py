"""Prompts: from lists and files, chats, splits by content, an order that is saved as two integers, action masks."""

import csv
import json
import tracemalloc

import numpy as np
import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, collect, evaluate
from tests.helpers import text_envs
from tests.helpers.conversations import Parrot, chat_tokenizer
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import EOS, GOOD, good
from textenv import (
    PromptList,
    RewardError,
    Rewards,
    TextVectorEnv,
    TokenVectorEnv,
    check_no_overlap,
    load_prompts,
    split_prompts,
)
from textenv.envs.action_masks import ActionMasks
from textenv.rewards.transforms import clip

ROWS = [
    {"prompt": "a b", "answer": "1"},
    {"prompt": 'say "hi",\nplease', "answer": "2, or 3"},
    {"prompt": "çé 🎬", "answer": ""},
]


def make_env(prompts=("a b", "c", "d a b"), num_envs=2, reward=good, **options):
    return text_envs.make_env(reward, num_envs, prompts=prompts, **options)


def write(path, rows):
    kind = path.suffix.lower()
    if kind == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    elif kind in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(rows)
        data.to_parquet(str(path)) if path.suffix else data.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.tsv", "p.parquet", "folder", "P.JSONL", "p.TSV", "p.Parquet"])
def test_files_of_every_kind_are_sequences(tmp_path, name):
    prompts = load_prompts(write(tmp_path / name, ROWS))
    assert len(prompts) == 3
    assert [dict(prompts[i]) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert [prompt.columns["answer"] for prompt in PromptList(prompts).sample_prompts(range(3), seed=0)]


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    for name in ("p.jsonl", "p.csv"):
        path = write(tmp_path / name, ROWS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert [dict(row) for row in load_prompts(path)] == ROWS


def test_a_data_sets_columns_reach_the_reward(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a b", "answer": 7}]).save_to_disk(str(tmp_path / "d"))
    seen = []
    env = make_env(
        datasets.load_from_disk(str(tmp_path / "d")), 1, lambda prompts, answer, **_: seen.append(answer) or [1.0]
    )
    env.reset(seed=0)
    env.step(np.array([EOS]))
    assert seen == [[7]]


def test_another_column_may_be_the_prompt(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": "a", "n": 1}])
    assert load_prompts(path, prompt_column="question")[0] == {"prompt": "a", "n": 1}
    with pytest.raises(ValueError, match=r"columns \['question', 'n'\]"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "record 2: not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n[1]\n', "record 2.* not an object"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "record 2: not JSON in UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n' + b"[" * 100_000, "record 2: not JSON"),
        ("p.jsonl", b"", "has no records"),
        ("p.csv", b"prompt,answer\na,1\nb\n", "record 2: 1 values for the 2 columns"),
        ("p.csv", b'prompt\n"a\n', "not CSV"),
        ("p.csv", b"prompt,prompt\na,b\n", "repeated names"),
        ("p.csv", b"prompt\n\xff\n", "not CSV in UTF-8"),
        ("p.parquet", b"not parquet", "could not be read"),
        ("p.docx", b"x", "is not a .jsonl"),
    ],
)
def test_broken_files_are_refused_by_record(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        [dict(row) for row in load_prompts(path)]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        load_prompts(tmp_path / "nowhere.jsonl")


def test_prompts_may_be_more_than_memory(tmp_path):
    """100 MB of prompts; what stays in memory is less than a hundredth of them."""
    path = tmp_path / "large.jsonl"
    line = json.dumps({"prompt": "a b", "filler": "x" * 2000}) + "\n"
    with path.open("w") as file:
        file.writelines(line for _ in range(50_000))
    tracemalloc.start()
    deck = PromptList(load_prompts(path))
    dealt = [deck.sample_prompts([number], seed=0)[0].content for number in range(0, 100_000, 5000)]
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dealt == ["a b"] * 20
    assert path.stat().st_size > 100e6 and kept < 1.5e6


def test_every_prompt_comes_once_a_pass():
    """Each pass has an order of its own."""
    deck = PromptList([[i] for i in range(50)])
    first, second = ([p.content[0] for p in deck.sample_prompts(range(k, k + 50), seed=3)] for k in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [p.content[0] for p in deck.sample_prompts(range(50), seed=4)]


def test_an_order_is_saved_as_two_integers():
    prompts = [[i % 6, i // 6] for i in range(30)]
    whole = collect(make_env(prompts), policy(), num_episodes=40, seed=3)["observation"][:, :2].tolist()
    env = make_env(prompts)
    collect(env, policy(), num_episodes=13, seed=3)
    saved = json.loads(json.dumps(env.prompt_order))
    fresh = make_env(prompts)
    fresh.prompt_order = saved
    rest = collect(fresh, policy(), num_episodes=27)["observation"][:, :2].tolist()
    assert rest == whole[13:]


def test_two_environments_may_share_a_task():
    alone, deck = make_env(), make_env()
    other = TextVectorEnv(deck.task, tokenizer=deck.tokenizer, max_prompt_tokens=4)
    for env in (alone, deck):
        env.reset(seed=1)
    other.reset(seed=9)
    for _ in range(5):
        assert (alone.reset()[0]["tokens"] == deck.reset()[0]["tokens"]).all()
        other.reset()


def policy():
    return LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)


# --- splits ------------------------------------------------------------------------------------------------------


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


# --- chats -------------------------------------------------------------------------------------------------------


def test_chats_are_rendered_and_rewarded_as_messages():
    """TRL's convention; ids against transformers' own rendering."""
    seen, tokenizer = [], chat_tokenizer()
    messages = [{"role": "user", "content": "a b"}]
    env = make_env(
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
        make_env([messages])


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
        make_env(prompts)


# --- action masks ------------------------------------------------------------------------------------------------


def test_no_turn_ends_before_the_least_length():
    env = make_env(min_new_tokens=3, num_envs=4)
    rollout = collect(env, policy(), num_episodes=64)
    assert rollout["mask"].sum(1).min() == 4  # three tokens, then EOS (as transformers counts)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="is forbidden here"):
        env.step(np.full(4, EOS))


def allowed(turn):
    """Words in ascending order, as in constrained decoding; EOS once two stand there."""
    least = max([-1, *turn.completion_ids]) + 1
    return [*range(least, 5), *([EOS] if len(turn.completion_ids) >= 2 else [])] or [EOS]


def test_a_rule_constrains_acting_and_scoring_alike():
    """log-probs by hand: the softmax over the allowed ids alone, at each entry."""
    lm, acting = make_gpt2(), policy()
    rollout = collect(make_env(num_envs=4, allowed=allowed), acting, num_episodes=32)
    scored = acting.evaluate(rollout).log_prob
    logits = lm(rollout["observation"]).logits.detach()
    for row in range(32):
        mask = rollout["mask"][row]
        chosen = rollout["action"][row][mask].tolist()
        for k, t in enumerate(torch.nonzero(mask)[:, 0].tolist()):
            ids = sorted({*range(max([-1, *chosen[:k]]) + 1, 5), *([EOS] if k >= 2 else [])} or {EOS})
            expected = logits[row, t, ids].log_softmax(-1)[ids.index(chosen[k])]
            assert scored[row, t].item() == pytest.approx(expected.item(), abs=1e-5)
            assert rollout["log_prob"][row, t].item() == pytest.approx(expected.item(), abs=1e-5)


def test_impossible_rules_are_refused():
    for rule, message in ((lambda turn: [], "leaves no token"), (lambda turn: [99], "expected ids from 0 to 8")):
        with pytest.raises(ValueError, match=message):
            make_env(allowed=rule).reset(seed=0)
    with pytest.raises(ValueError, match="leaves no token"):
        make_env(forbidden=range(9))
    with pytest.raises(
        ValueError, match=rf"before min_new_tokens=1 the ends .*{EOS}.* are forbidden too.*leaves no token"
    ):
        make_env(forbidden=[i for i in range(9) if i != EOS], min_new_tokens=1)
    with pytest.raises(ValueError, match=r"forbidden is \[\], and before min_new_tokens=1 .*set min_new_tokens to 0"):
        ActionMasks(2, ends=[0, 1], min_new_tokens=1)
    ActionMasks(2, ends=[0, 1])


def test_stops_end_a_turn_and_pay():
    env = make_env(num_envs=1, stop=[GOOD, "d c"])
    for actions, reason, text in (([0, GOOD], "stop", "a"), ([3, 2], "stop", ""), ([0, EOS], "eos", "a")):
        env.reset(seed=0)
        for token in actions:
            _, _, terminated, truncated, info = env.step(np.array([token]))
        assert (terminated[0], truncated[0], info["end_reason"][0]) == (True, False, reason)
        assert info["completion"][0].replace("good", "").strip() == text


def test_a_special_stop_text_is_found_by_its_id():
    env = make_env(num_envs=1, stop=["<pad>"])
    env.reset(seed=0)
    _, _, terminated, _, info = env.step(np.array([WORDS.index("<pad>")]))
    assert terminated[0] and info["end_reason"][0] == "stop"


def test_a_stop_text_that_was_passed_over_cuts_nothing():
    seen = []
    env = make_env(["a"], 1, lambda prompts, completions, **_: seen.extend(completions) or [0.0], stop=["."],
                   min_new_tokens=3)  # fmt: skip
    for answer in ([0, 4, 1, 2, EOS], [0, 4, 1, 4]):
        env.reset(seed=0)
        for token in answer:
            _, _, terminated, _, info = env.step(np.array([token]))
        assert terminated[0]
    assert [text.split() for text in seen] == [["a", ".", "b", "c"], ["a", ".", "b"]]


def test_a_passed_stop_text_ends_no_later_turn():
    """ "good" comes too early and is passed over; "bad" ends with the same letter and completes nothing."""
    good, bad = WORDS.index("good"), WORDS.index("bad")
    env = make_env(["a"], 1, lambda prompts, completions, **_: [0.0], stop=["good"], min_new_tokens=2)
    env.reset(seed=0)
    ends = [env.step(np.array([token]))[2][0] for token in (good, 0, bad, 1, good)]
    assert ends == [False, False, False, False, True]


def test_a_set_order_survives_a_trainings_seed():
    prompts = [[i % 6, i // 6] for i in range(30)]
    config = PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4, seed=3)

    def trained_on(env):
        rows = []
        take = env.take_episodes
        env.take_episodes = lambda: rows.append(take()) or rows[-1]
        PPO(env, policy(), config).learn(1)
        return rows[0]["observation"][:, :2].tolist()

    env = make_env(prompts)
    first = trained_on(env)
    second = collect(env, policy(), num_episodes=4)["observation"][:, :2].tolist()
    fresh = make_env(prompts)
    fresh.prompt_order = env.prompt_order | {"position": 4}
    assert trained_on(fresh) == second != first


def test_evaluating_does_not_pin_the_prompts():
    prompts = [[i % 6, i // 6] for i in range(30)]
    plain, evaluated = make_env(prompts), make_env(prompts)
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


# --- tables ------------------------------------------------------------------------------------------------------


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


def test_an_environment_and_a_policy_read_tables_too():
    pandas = pytest.importorskip("pandas")
    prompts = pandas.Series(["a b", "c", "d a b"], index=[7, 0, 2])
    plain, tabled = make_env(), make_env(prompts)
    assert plain.reset(seed=1)[0]["tokens"].tolist() == tabled.reset(seed=1)[0]["tokens"].tolist()
    assert policy().generate(prompts, max_new_tokens=3) == policy().generate(prompts.tolist(), max_new_tokens=3)


def test_columns_of_equal_names_are_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(ValueError, match="several columns named prompt"):
        PromptList(frame)


# --- columns -----------------------------------------------------------------------------------------------------


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

    env = make_env([{"prompt": "a", name: "poet"}], 1, wrap(reward))
    env.reset(seed=0)
    env.step(np.array([EOS]))
    assert seen[name] == ["poet"]


def test_a_reward_object_gets_the_columns():
    recorder = Recorder()
    env = make_env([{"prompt": "a", "self": "poet", "level": 3}], 1, recorder)
    env.reset(seed=0)
    env.step(np.array([EOS]))
    assert recorder.seen["level"] == [3] and "self" not in recorder.seen


def test_one_message_is_no_chat():
    with pytest.raises(ValueError, match="a chat is a list of messages"):
        PromptList([{"role": "user", "content": "a"}]).prompt(0)


# --- lengths -----------------------------------------------------------------------------------------------------


def long_deck(*, number=10_400, at=(10_321,)):
    """Short prompts, some of different lengths, with long ones in these rows."""
    prompts = ["a b", "c", "d a b", "d"] * (number // 4)
    for row in at:
        prompts[row] = "a b c d a b c d"
    return prompts


def test_a_prompt_that_is_too_long_is_found_in_any_row():
    with pytest.raises(ValueError, match=r"prompt 10321 \('a b c d a b c d'\) has 8 tokens, the limit is 4"):
        make_env(long_deck())


def test_a_prompt_of_another_type_is_found_in_any_row():
    with pytest.raises(ValueError, match="prompt 10321 .* expected text"):
        make_env([*long_deck()[:10_321], 3.5])


def test_an_error_names_the_row_of_the_data():
    rows = [{"prompt": f"{letter} {other}"} for letter in "abcd" for other in "abcd"]
    long = "a b c d a b c d"
    split = "test" if split_prompts([*rows, long], "test")[-1] == long else "train"
    with pytest.raises(ValueError, match="prompt 16 "):
        make_env(split_prompts([*rows, long], split))


def test_too_long_prompts_are_skipped_and_counted(caplog):
    prompts = long_deck(number=12, at=(3, 9))
    env = make_env(prompts, 4, overlong="skip")
    assert env.skipped_prompts == 2 and "2 of 12 prompts" in caplog.text and "row 3" in caplog.text
    kept = [text for text in prompts if len(text.split()) < 8]
    expected = collect(make_env(kept, 4), policy(), num_episodes=20, seed=3)
    found = collect(env, policy(), num_episodes=20, seed=3)
    assert found["observation"].tolist() == expected["observation"].tolist()
    assert env.metrics["prompts/skipped"] == 2
    assert len(env.task.prompts) == 10


def test_skipping_needs_one_prompt_that_fits():
    with pytest.raises(ValueError, match="the limit is 4"):
        make_env(["a b c d a"], overlong="skip")
    with pytest.raises(ValueError, match="expected 'error' or 'skip'"):
        make_env(overlong="cut")
    with pytest.raises(ValueError, match="makes its prompts itself"):
        TokenVectorEnv(Parrot, tokenizer=chat_tokenizer(), overlong="skip")


@pytest.mark.parametrize(
    "rule", [lambda turn: np.ones(9, bool), lambda turn: [0.5], lambda turn: [[1]], lambda turn: 3]
)
def test_a_rule_that_returns_a_mask_is_refused(rule):
    with pytest.raises(TypeError, match="expected a list of token ids"):
        make_env(allowed=rule).reset(seed=0)


def test_a_rollout_holds_only_sets_it_uses():
    def varied(turn):
        return [0, 1, 2, 3, 4, 5, 6][: 1 + (sum(turn.completion_ids) + turn.prompt_ids[0]) % 7] + [EOS]

    env = make_env(num_envs=4, allowed=varied)
    for _ in range(3):
        rollout = collect(env, policy(), num_episodes=16)
        sets = rollout.get_non_tensor("allowed_sets")
        assert sorted(set(rollout["allowed"].flatten().tolist())) == list(range(len(sets)))
        assert sets[0].all() and len(sets) <= 8


def test_a_failed_reward_is_not_paid_later():
    def fails(prompts, completions, **_):
        if "bad" in completions[0]:
            raise RuntimeError("no")
        return [1.0]

    env = make_env(num_envs=1, reward=fails)
    env.reset(seed=0)
    env.step(np.array([WORDS.index("bad")]))
    with pytest.raises(RewardError, match="raised RuntimeError: no"):
        env.step(np.array([EOS]))
    env.reset()
    assert env.step(np.array([0]))[1][0] == 0
    assert env.step(np.array([EOS]))[1][0] == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"prompts": [{"prompt": "a", "completions": 1}]}, ValueError, r"named \['completions'\]"),
        ({"tokenizer": "gpt2"}, TypeError, "expected that of AutoTokenizer"),
        ({"stop": np.int64(99)}, ValueError, "ids from 0 to 8"),
        ({"forbidden": 99}, ValueError, "ids from 0 to 8"),
    ],
)
def test_more_wrong_input(arguments, kind, message):
    with pytest.raises(kind, match=message):
        make_env(**arguments)


def test_wrong_tasks_and_actions_are_refused():
    class Short(PromptList):
        def sample_prompts(self, numbers, *, seed):
            return super().sample_prompts(numbers[:1], seed=seed)

        def score(self, turns):
            return [0.0] * len(turns)

    tokenizer = make_tokenizer(WORDS)
    for task in (["a"], Short, PromptList(["a"])):
        with pytest.raises(TypeError, match="expected an object with sample_prompts and score"):
            TextVectorEnv(task, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="sample_prompts of Short returned 1 values for 2"):
        TextVectorEnv(Short(["a"]), tokenizer=tokenizer, num_envs=2).reset(seed=0)
    env = make_env(num_envs=2)
    env.start_episodes(2)
    with pytest.raises(ValueError, match=r"of shape \(3,\), expected integers of shape \(2,\)"):
        env.advance(np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="group_size is 0"):
        env.start_episodes(2, group_size=0)
