"""Action masks: lists of texts or tokens, rules, least lengths, and the sets that a rollout holds."""

import itertools

import numpy as np
import pytest
import torch

from algos import LMPolicy, collect
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import EOS, prompt_env, zero
from textenv import TextVectorEnv
from textenv.envs.action_masks import MAX_WORD_SETS, ActionMasks, WordRule, next_ids
from textenv.envs.turn import Turn
from textenv.prompts.prompts import Prompt


def play(allowed, *, episodes=64, max_new_tokens=6, **options):
    tokenizer = make_tokenizer(WORDS)
    policy = LMPolicy(make_gpt2(), tokenizer, seed=1, temperature=4.0)
    env = TextVectorEnv(
        prompts=["a b"], reward=lambda completions: [1.0] * len(completions), tokenizer=tokenizer, num_envs=8,
        allowed=allowed, max_new_tokens=max_new_tokens, **options,
    )  # fmt: skip
    rollout = collect(env, policy, num_episodes=episodes, seed=1)
    return [sample["completion"] for sample in env.samples(range(episodes))], rollout


def test_a_turn_is_one_of_the_texts():
    texts = ["a", "a b", "c"]
    answers, rollout = play(texts)
    assert {answer.strip() for answer in answers} == set(texts)
    by_function, same = play(lambda turn: next_ids(turn, texts))
    assert answers == by_function
    for name in ("action", "log_prob", "terminated", "truncated"):
        assert torch.equal(rollout[name], same[name]), name
    assert rollout["terminated"].any(1).all()


def test_a_turn_has_only_the_tokens_of_a_list():
    ids = make_tokenizer(WORDS)("a b", add_special_tokens=False)["input_ids"]
    answers, rollout = play(np.array(ids))
    assert {word for answer in answers for word in answer.split()} == {"a", "b"} and all(answers)
    assert rollout["terminated"].any() and len(set(answers)) > 2
    single, _ = play(ids, max_new_tokens=1)
    assert {answer.strip() for answer in single} == {"a", "b"}


@pytest.mark.parametrize("allowed, kind, said", [
    ("yes", TypeError, "allowed is 'yes', expected a list of texts"),
    ({"a": 1}, TypeError, "expected a list of texts"),
    (3, TypeError, "expected a list of texts"),
    ([True, False], TypeError, "expected a list of texts"),
    ([1.5], TypeError, "expected a list of texts"),
    (["a", 3], TypeError, "expected a list of texts"),
    (str, TypeError, "expected a list of texts"),
    ([], ValueError, "allowed is empty"),
    ([""], ValueError, "0 tokens, expected 1 to max_new_tokens, 6"),
    (["a b c a b c a"], ValueError, "7 tokens, expected 1 to max_new_tokens, 6"),
    ([-1], ValueError, "expected ids from 0 to"),
    ([10_000], ValueError, "expected ids from 0 to"),
])  # fmt: skip
def test_a_wrong_list_is_refused_at_construction(allowed, kind, said):
    with refused(kind, said):
        play(allowed)


def test_masks_of_many_rows_are_those_of_each_row():
    masks = ActionMasks(5, forbidden=[0], ends=[4], min_new_tokens=2, rule=lambda turn: turn)
    turns = [[1, 2], None, [3], None]
    together = masks.index(lambda i: turns[i], np.array([0, 1, 2, 3]))
    each = [masks.index(lambda i, turn=turn: turn, np.array([n]))[0] for n, turn in enumerate(turns)]
    assert together.tolist() == each
    assert [masks.sets[i].nonzero().squeeze(-1).tolist() for i in together] == [[1, 2], [1, 2, 3], [3], [1, 2, 3, 4]]


def policy():
    return LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)


def test_no_turn_ends_before_the_least_length():
    env = prompt_env(min_new_tokens=3, num_envs=4)
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
    rollout = collect(prompt_env(num_envs=4, allowed=allowed), acting, num_episodes=32)
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
            prompt_env(allowed=rule).reset(seed=0)
    with pytest.raises(ValueError, match="leaves no token"):
        prompt_env(forbidden=range(9))
    with pytest.raises(
        ValueError, match=rf"before min_new_tokens=1 the ends .*{EOS}.* are forbidden too.*leaves no token"
    ):
        prompt_env(forbidden=[i for i in range(9) if i != EOS], min_new_tokens=1)
    with pytest.raises(ValueError, match=r"forbidden is \[\], and before min_new_tokens=1 .*set min_new_tokens to 0"):
        ActionMasks(2, ends=[0, 1], min_new_tokens=1)
    ActionMasks(2, ends=[0, 1])


@pytest.mark.parametrize(
    "rule", [lambda turn: np.ones(9, bool), lambda turn: [0.5], lambda turn: [[1]], lambda turn: 3]
)
def test_a_rule_that_returns_a_mask_is_refused(rule):
    with pytest.raises(TypeError, match="expected a list of token ids"):
        prompt_env(allowed=rule).reset(seed=0)


def test_a_rollout_holds_only_sets_it_uses():
    def varied(turn):
        return [0, 1, 2, 3, 4, 5, 6][: 1 + (sum(turn.completion_ids) + turn.prompt_ids[0]) % 7] + [EOS]

    env = prompt_env(num_envs=4, allowed=varied)
    for _ in range(3):
        rollout = collect(env, policy(), num_episodes=16)
        sets = rollout.get_non_tensor("allowed_sets")
        assert sorted(set(rollout["allowed"].flatten().tolist())) == list(range(len(sets)))
        assert sets[0].all() and len(sets) <= 8


def test_no_word_is_cut_after_the_longest_prompt():
    """Prompts have at most 32 tokens by default."""
    tokenizer = make_tokenizer(WORDS)
    rule = WordRule(["a b c", "d"], tokenizer, ends=[EOS])
    arguments = dict(prompts=["a"], reward=zero, tokenizer=tokenizer, allowed=rule)
    with refused(ValueError, "max_length is 34", "max_prompt_tokens, 32", "longest text in allowed, 3"):
        TextVectorEnv(**arguments, max_length=34)
    assert TextVectorEnv(**arguments, max_length=35).max_length == 35


def word_rule(words, available):
    return WordRule(words, make_tokenizer(WORDS), ends=[EOS], available=lambda turn: available(turn.index))


def after(rule, *words, index=0):
    """Tokens that may follow these words of one token in a turn."""
    ids = [WORDS.index(word) for word in words]
    return rule(Turn(Prompt("d"), [3], [3], ids, terminated=False, tokenizer=make_tokenizer(WORDS), index=index))


A, B, C, D = (WORDS.index(word) for word in "abcd")


def test_only_available_words_may_follow():
    """By hand, of four words: the two of a turn by its index, in turn, as lists and as tuples."""
    sets = [("a b", "a b c"), ["a d", "c"], ("a d", "a b")]
    rule = word_rule(["a b", "a b c", "a d", "c"], lambda index: sets[index % 3])
    for _ in range(2):
        assert [after(rule, index=0), after(rule, "a", index=0), after(rule, "a", "b", index=0)] == [{A}, {B}, {C, EOS}]
        assert [after(rule, index=1), after(rule, "a", index=1)] == [{A, C}, {D}]
        assert [after(rule, "a", index=2), after(rule, "a", "b", index=2)] == [{B, D}, {EOS}]


@pytest.mark.heavy
def test_more_sets_of_words_than_are_remembered():
    words = ["a", "b", "c", "d", "good", "bad"]
    sets = [chosen for size in range(1, 7) for chosen in itertools.permutations(words, size)]
    assert len(sets) > MAX_WORD_SETS
    rule = word_rule(words, lambda index: sets[index])
    for _ in range(2):
        for index, chosen in enumerate(sets):
            assert after(rule, index=index) == {WORDS.index(word) for word in chosen}


def test_available_words_must_be_words_of_the_rule():
    with refused(ValueError, "available returned the word 'd', which is none of the rule's words"):
        after(word_rule(["a", "b"], lambda index: ["d"]))
    assert after(word_rule(["a", "b"], lambda index: ())) == set(), "the masks explain it"


def test_no_word_is_cut_by_max_new_tokens():
    tokenizer = make_tokenizer(WORDS)
    rule = WordRule(["a b c", "d"], tokenizer, ends=[EOS])
    arguments = dict(prompts=["a"], reward=zero, tokenizer=tokenizer, allowed=rule)
    with refused(ValueError, "max_new_tokens is 2", "cut a word", "at least 3"):
        TextVectorEnv(**arguments, max_new_tokens=2)
    assert TextVectorEnv(**arguments, max_new_tokens=3).max_length == 35


def test_one_mask_for_all_slots_is_one_row_and_acts_as_many():
    env = prompt_env(num_envs=3, forbidden=[2], min_new_tokens=2, max_new_tokens=4)
    observation, info = env.reset(seed=1)
    one = env.action_mask
    assert one.shape == (3, len(WORDS)) and one.stride(0) == 0
    assert np.array_equal(one.numpy().astype(np.int8), info["action_mask"])
    steps = []
    for mask in (one, one.clone(memory_format=torch.contiguous_format)):
        steps.append(policy().act(observation, action_mask=mask))
    assert torch.equal(steps[0].action, steps[1].action) and torch.equal(steps[0].log_prob, steps[1].log_prob)
