"""Prompts: from lists and files, chats, splits by content, an order that is saved as two integers, action masks."""

import csv
import json
import tracemalloc

import numpy as np
import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, collect, evaluate
from tests.helpers import text_envs
from tests.helpers.conversations import chat_tokenizer
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import EOS, GOOD, good
from textenv import PromptList, RewardError, TextVectorEnv, check_no_overlap, load_prompts, split_prompts

ROWS = [
    {"prompt": "a b", "answer": "1"},
    {"prompt": 'say "hi",\nplease', "answer": "2, or 3"},
    {"prompt": "çé 🎬", "answer": ""},
]


def make_env(prompts=("a b", "c", "d a b"), num_envs=2, reward=good, **options):
    return text_envs.make_env(reward, num_envs, prompts=prompts, **options)


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_list(rows)
        data.to_parquet(str(path)) if path.suffix else data.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.tsv", "p.parquet", "folder"])
def test_a_file_is_a_sequence_of_mappings_whatever_its_kind(tmp_path, name):
    prompts = load_prompts(write(tmp_path / name, ROWS))
    assert len(prompts) == 3
    assert [dict(prompts[i]) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert [prompt.columns["answer"] for prompt in PromptList(prompts).sample_prompts(range(3), seed=0)]


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    for name in ("p.jsonl", "p.csv"):
        path = write(tmp_path / name, ROWS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert [dict(row) for row in load_prompts(path)] == ROWS


def test_a_data_set_from_disk_is_prompts_as_it_is_and_its_columns_reach_the_reward(tmp_path):
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


def test_every_prompt_comes_once_before_any_comes_again_and_each_pass_has_its_own_order():
    deck = PromptList([[i] for i in range(50)])
    first, second = ([p.content[0] for p in deck.sample_prompts(range(k, k + 50), seed=3)] for k in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [p.content[0] for p in deck.sample_prompts(range(50), seed=4)]


def test_the_order_is_saved_by_two_integers_and_resumed():
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


def test_splits_cannot_overlap_whatever_stands_around_a_prompt():
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


def test_chat_messages_are_rendered_by_the_template_and_the_reward_gets_messages():
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


def test_a_users_rule_constrains_acting_and_scoring_alike():
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


def test_rules_that_leave_nothing_or_name_no_token_are_refused():
    for rule, message in ((lambda turn: [], "leaves no token"), (lambda turn: [99], "expected ids from 0 to 8")):
        with pytest.raises(ValueError, match=message):
            make_env(allowed=rule).reset(seed=0)
    with pytest.raises(ValueError, match="leaves no token"):
        make_env(forbidden=range(9))
    with pytest.raises(ValueError, match="leaves no token"):
        make_env(forbidden=[i for i in range(9) if i != EOS], min_new_tokens=1)


def test_stop_tokens_and_texts_end_a_turn_and_pay_as_ended():
    env = make_env(num_envs=1, stop=[GOOD, "d c"])
    for actions, reason, text in (([0, GOOD], "stop", "a"), ([3, 2], "stop", ""), ([0, EOS], "eos", "a")):
        env.reset(seed=0)
        for token in actions:
            _, _, terminated, truncated, info = env.step(np.array([token]))
        assert (terminated[0], truncated[0], info["end_reason"][0]) == (True, False, reason)
        assert info["completion"][0].replace("good", "").strip() == text


def test_a_stop_text_that_is_a_special_token_is_looked_for_by_its_id():
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


def test_a_stop_text_that_was_passed_over_ends_no_later_turn():
    """ "good" comes too early and is passed over; "bad" ends with the same letter and completes nothing."""
    good, bad = WORDS.index("good"), WORDS.index("bad")
    env = make_env(["a"], 1, lambda prompts, completions, **_: [0.0], stop=["good"], min_new_tokens=2)
    env.reset(seed=0)
    ends = [env.step(np.array([token]))[2][0] for token in (good, 0, bad, 1, good)]
    assert ends == [False, False, False, False, True]


def test_an_order_that_was_set_survives_the_seed_of_a_training():
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


def test_evaluating_in_mid_training_does_not_pin_the_prompts():
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


@pytest.mark.parametrize(
    "rule", [lambda turn: np.ones(9, bool), lambda turn: [0.5], lambda turn: [[1]], lambda turn: 3]
)
def test_a_rule_that_returns_a_mask_is_refused(rule):
    with pytest.raises(TypeError, match="expected a list of token ids"):
        make_env(allowed=rule).reset(seed=0)


def test_a_rollout_holds_the_sets_that_it_uses_and_no_others():
    def varied(turn):
        return [0, 1, 2, 3, 4, 5, 6][: 1 + (sum(turn.completion_ids) + turn.prompt_ids[0]) % 7] + [EOS]

    env = make_env(num_envs=4, allowed=varied)
    for _ in range(3):
        rollout = collect(env, policy(), num_episodes=16)
        sets = rollout.get_non_tensor("allowed_sets")
        assert sorted(set(rollout["allowed"].flatten().tolist())) == list(range(len(sets)))
        assert sets[0].all() and len(sets) <= 8


def test_a_reward_that_failed_is_not_paid_in_the_next_episode():
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
