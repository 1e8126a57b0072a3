"""The content of a rollout of texts: padding, EOS, shifts, scores, ends, ids and text."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.overrides import TorchFunctionMode

from algos import LMPolicy, collect
from tests.helpers.cut_episodes import cut_episodes
from tests.helpers.models import ALL_MODELS, WORDS, make_gpt2, make_llama, make_tokenizer
from tests.helpers.reward_models import make_model
from tests.helpers.rollouts import padded
from tests.helpers.small_agents import agent_of, lm_policy, random_table, scored, table_model
from tests.helpers.text_envs import EOS, PAD, Script, play, text_env
from textenv import KLPenalty, LanguageModel, RewardModel, TextEnv, TextVectorEnv
from textenv.rollout import (
    LogProbs,
    allowed_tokens,
    join_column,
    join_episodes,
    least_precise_dtype,
    ratio_gap,
    to_device,
)

ANSWERS = [(5, 1, EOS), (EOS,), (3, 3, 3, 3, 3), (6, 5, 0, 2, EOS)]


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_MODELS)
def test_padding_of_a_rollout_moves_no_number(name):
    policy = lm_policy(ALL_MODELS[name])
    rollout = play(text_env(), ANSWERS)
    mask = rollout["mask"]
    for row in range(len(ANSWERS)):
        alone = rollout[row : row + 1, : int(mask[row].nonzero().max()) + 1]
        expected, values = policy.evaluate(alone), policy.values(alone)
        here = alone["mask"][0]
        for columns, token in [(0, PAD), (1, PAD), (3, EOS), (7, 0)]:
            wide = padded(rollout, columns, token)[row : row + 1]
            steps = len(here)
            found = policy.evaluate(wide)
            for one, other in zip([*found, *policy.values(wide)], [*expected, *values], strict=True):
                torch.testing.assert_close(one[0, :steps][here], other[0][here], atol=1e-5, rtol=1e-5)


def unpadded_log_probs(model, tokens):
    with torch.no_grad():
        full = model(torch.tensor([tokens])).logits[0, :-1, : len(WORDS)].float().log_softmax(-1)
    return full.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", ALL_MODELS)
def test_padding_moves_no_log_prob_in_scoring(name, side):
    lm = LanguageModel(ALL_MODELS[name](), make_tokenizer(WORDS))
    texts = [[1, 2, 3, 5, 0, 2], [4, 0], [6, 6, 1]]
    expected = torch.cat([unpadded_log_probs(lm.model, text) for text in texts])
    for pads in range(4):
        width = 6 + pads
        left = {"left": 1.0, "right": 0.0, "both": 0.5}[side]
        ids, mask = torch.full((3, width), PAD), torch.zeros(3, width, dtype=torch.long)
        for row, text in enumerate(texts):
            start = int((width - len(text)) * left)
            ids[row, start : start + len(text)] = torch.tensor(text)
            mask[row, start : start + len(text)] = 1
        found = lm.token_log_probs(ids, mask).detach()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_padding_moves_no_reward_of_a_classifier(name):
    model = make_model(name, labels=2)
    classifier = RewardModel(model, make_tokenizer(WORDS))
    texts = [[1, 2, 3, 5], [4], [6, 0]]
    with torch.no_grad():
        plain = [model(input_ids=torch.tensor([text])).logits[0].softmax(-1)[1] for text in texts]
    for left, right in [(0, 0), (3, 0), (0, 7), (2, 2)]:
        for text, expected in zip(texts, plain, strict=True):
            ids = torch.tensor([[PAD] * left + text + [PAD] * right, [1] * (left + len(text) + right)])
            mask = torch.tensor([[0] * left + [1] * len(text) + [0] * right, [1] * (left + len(text) + right)])
            torch.testing.assert_close(classifier.score_ids(ids, mask)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pad", [EOS, None])
def test_a_wrong_pad_id_hides_no_last_token(pad):
    """`transformers` finds the last token by the model's pad id, our padding is the tokenizer's."""
    right = RewardModel(make_model("gpt2", labels=2), make_tokenizer(WORDS))
    other = RewardModel(make_model("gpt2", labels=2, pad=pad), make_tokenizer(WORDS))
    texts = ["a b c d good", "b", "bad bad"]
    torch.testing.assert_close(other.scores(texts), right.scores(texts), atol=1e-6, rtol=0)


# --- EOS, shifts, the score's place -----------------------------------------------------------------------------------


def test_pad_equal_to_eos_does_not_hide_eos():
    env = text_env(tokenizer=make_tokenizer(WORDS, pad="<eos>"))
    rollout = play(env, ANSWERS)
    chosen = rollout["action"].masked_fill(~rollout["mask"], -1)
    assert (chosen == EOS).sum(1).tolist() == [1, 1, 0, 1]
    assert rollout["mask"].sum(1).tolist() == [3, 1, 5, 5]
    assert rollout["terminated"].sum(1).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_the_logit_of_eos_gets_its_gradient(make):
    """Of the weights that make EOS's logit: Σ (1 - p(EOS)) h where EOS was chosen, less Σ p(EOS) h elsewhere."""
    tokenizer = make_tokenizer(WORDS, pad="<eos>")
    policy = lm_policy(make, tokenizer=tokenizer)
    rollout, output = play(text_env(tokenizer=tokenizer), ANSWERS), policy.lm.model.get_output_embeddings()
    output.weight = nn.Parameter(output.weight.detach().clone())  # not the embeddings', which have a gradient too
    policy.evaluate(rollout).log_prob.sum().backward()
    hidden = policy.lm.hidden(rollout["observation"])[rollout["mask"]].detach()
    ends = rollout["action"][rollout["mask"]] == EOS
    slope = ends.float() - policy.lm.logits(hidden).detach().softmax(-1)[:, EOS]
    assert ends.sum() == 3 and slope[ends].min() > 0.01
    torch.testing.assert_close(output.weight.grad[EOS], slope @ hidden, atol=1e-5, rtol=1e-5)


def test_log_probs_equal_a_lookup_table():
    """Prompt 1 2, response 3 0 EOS: the entries of the table at (2, 3), (3, 0), (0, EOS), and nothing else."""
    table, value = random_table(), torch.arange(1.0, 10.0)
    policy = LMPolicy(table_model(table), make_tokenizer(WORDS))
    policy.value_head.weight.data[0] = value
    rollout = play(text_env(Script([(1, 2)])), [(3, 0, EOS)])
    assert rollout["mask"].tolist() == [[False, True, True, True]]
    expected = torch.tensor([0.0, table[2, 3], table[3, 0], table[0, EOS]])
    torch.testing.assert_close(policy.evaluate(rollout).log_prob[0].detach(), expected, atol=1e-5, rtol=0)
    now, after = policy.values(rollout)
    assert now[0, 1:].tolist() == value[[2, 3, 0]].tolist()
    assert after[0, 1:].tolist() == value[[3, 0, EOS]].tolist()


def test_recorded_log_probs_equal_a_lookup_table():
    table = random_table()
    policy = LMPolicy(table_model(table), make_tokenizer(WORDS))
    rollout = collect(text_env(), policy, num_episodes=20)
    mask = rollout["mask"]
    expected = table[rollout["observation"][mask], rollout["action"][mask]]
    torch.testing.assert_close(rollout["log_prob"][mask], expected, atol=1e-5, rtol=0)


def test_the_score_is_discounted_from_the_last_token():
    """KL 0, V 0, γ .9, λ 1: the target k tokens before the end is score·.9^k, whether EOS or the limit ended it."""
    scores = [2.0, -1.0, 3.0, 0.5]
    env, policy = text_env(Script(scores=scores)), lm_policy(head=False)
    rollout = scored(play(env, ANSWERS), policy)
    KLPenalty(policy.reference(), 0.5)(rollout, policy)
    agent_of(env, policy, gamma=0.9, gae_lambda=1.0).update(rollout)
    for row, (score, answer) in enumerate(zip(scores, ANSWERS, strict=True)):
        expected = [score * 0.9**k for k in reversed(range(len(answer)))]
        for name in ("value_target", "advantage"):
            assert rollout[name][row][rollout["mask"][row]].tolist() == pytest.approx(expected, abs=1e-5)
        assert rollout["value_target"][row][~rollout["mask"][row]].abs().sum() == 0


def test_the_exact_critic_has_no_advantage():
    """Tokens 0 1 2 3 EOS in a row, score 2 at the end, γ .9: V of a token is known, so every advantage is 0."""
    value = torch.zeros(9)
    value[[3, 2, 1, 0]] = 2 * 0.9 ** torch.arange(4.0)
    value[EOS] = 100.0  # after the end: must not count
    policy = LMPolicy(table_model(random_table()), make_tokenizer(WORDS))
    policy.value_head.weight.data[0] = value
    env = text_env(Script([(0,), (0, 1)], scores=[2.0, 2.0]))
    rollout = scored(play(env, [(1, 2, 3, EOS), (2, 3, EOS)]), policy)
    agent_of(env, policy, gamma=0.9, gae_lambda=0.95).update(rollout)
    assert rollout["advantage"].abs().max() < 1e-5


# --- terminated or truncated ------------------------------------------------------------------------------------------


def test_eos_at_the_limit_terminates():
    answers = {(3, 3, 3, 3, EOS): (True, False), (3, 3, 3, 3, 3): (False, True), (EOS,): (True, False)}
    rollout = play(text_env(), answers)
    for row, (answer, (terminated, truncated)) in enumerate(answers.items()):
        last = torch.zeros(rollout.shape[1], dtype=torch.bool)
        last[rollout["mask"][row].nonzero().max()] = True
        assert torch.equal(rollout["terminated"][row], last & terminated)
        assert torch.equal(rollout["truncated"][row], last & truncated)
        env = TextEnv(Script(), tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, max_new_tokens=5)
        env.reset()
        steps = [env.step(token)[2:4] for token in answer]
        assert steps == [(False, False)] * (len(answer) - 1) + [(terminated, truncated)]


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_value_after_a_text_needs_bootstrapping(bootstrap):
    """λ 0, γ 1, reward 0: the target is V(next), but 0 after EOS always, and after the limit by choice."""
    value = torch.arange(1.0, 10.0)
    policy = LMPolicy(table_model(random_table()), make_tokenizer(WORDS))
    policy.value_head.weight.data[0] = value
    env = text_env(Script([(0,)], scores=[0.0, 0.0]), max_new_tokens=3)
    rollout = scored(play(env, [(1, 2, EOS), (1, 2, 3)]), policy)
    agent_of(env, policy, gamma=1.0, gae_lambda=0.0, bootstrap_truncated=bootstrap).update(rollout)
    assert rollout["value_target"].tolist() == [[2.0, 3.0, 0.0], [2.0, 3.0, 4.0 if bootstrap else 0.0]]


# --- ids and text -----------------------------------------------------------------------------------------------------


def merging_tokenizer(bos=False):
    """Byte pairs: "ab" is one token, so the ids of a, b never survive decoding and encoding again."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"a": 0, "b": 1, "ab": 2, "<bos>": 3, "<eos>": 4}
    inner = Tokenizer(models.BPE(vocab, merges=[("a", "b")]))
    inner.decoder = decoders.Fuse()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>")


def test_state_ids_are_prompt_and_action_ids():
    seen = []

    def reward(prompts, completions, completion_ids, **_):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [0.0] * len(prompts)

    tokenizer = merging_tokenizer()
    assert tokenizer("ab")["input_ids"] == [2], "the tokenizer must merge, or this test guards nothing"
    env = TextVectorEnv(prompts=["ba"], reward=reward, tokenizer=tokenizer, max_new_tokens=5)
    observation, _ = env.reset(seed=0)
    ids = [1, 0]
    for action in [1, 0, 1, 0, 4]:
        assert observation["tokens"][0, : observation["length"][0, 0]].tolist() == ids
        observation, *_, info = env.step(np.array([action]))
        ids = ids + [action]
    assert seen == [("ba", "baba", [1, 0, 1, 0, 4])] and info["completion"][0] == "baba"
    rollout = play(env, [(1, 0, 1, 0, 4)])
    assert [*rollout["observation"][0, :1].tolist(), *rollout["action"][0].tolist()] == [1, 0, 1, 0, 1, 0, 4]
    assert seen[1] == seen[0]


@pytest.mark.parametrize("prompt", ["ab", "<bos>ab", (3, 2), "<bos><bos>ab"])
def test_a_prompt_begins_with_one_bos(prompt):
    env = TextVectorEnv(prompts=[prompt], reward=lambda **_: [0.0], tokenizer=merging_tokenizer(bos=True))
    observation, _ = env.reset(seed=0)
    assert observation["tokens"][0, : observation["length"][0, 0]].tolist() == [3, 2]


def test_the_prompt_leaks_into_no_response():
    seen = []

    def score(turns):
        seen.extend((turn.prompt_text, turn.completion, turn.completion_ids) for turn in turns)
        return [0.0] * len(turns)

    env = text_env(Script([(0, 1), (2,), (3, 0, 1)], scores=score), num_envs=2)
    play(env, [(EOS,), (5, 6, EOS)])
    expected = [("a b", "", [EOS]), ("c", " good bad", [5, 6, EOS])]
    assert seen == expected
    seen.clear()
    env.prompt_order = {"seed": 0, "position": 0}
    env.reset()
    for actions in ([EOS, 5], [0, 6], [EOS, EOS]):  # slot 0 is reset by the second step
        env.step(np.array(actions))
    assert sorted(seen) == sorted([*expected, ("d a b", "", [EOS])])


# --- episodes of several rows -----------------------------------------------------------------------------------------


def test_log_probs_of_a_step_are_kept_as_they_were():
    """A policy may write into one tensor at every step; slots that do not run have no entry."""
    rollout = TensorDict({"mask": torch.ones(2, 3, dtype=torch.bool)}, batch_size=[2, 3])
    log_prob = torch.tensor([-1.0, -2.0, -3.0])
    log_probs = LogProbs()
    for column, running in enumerate(([True, False, True], [False, False, True])):
        rows = np.flatnonzero(running) // 2
        log_probs.record_step(rows, np.full(len(rows), column), log_prob, running=np.array(running))
        log_prob -= 10
    assert log_probs.added_to(rollout)["log_prob"].tolist() == [[-1, 0, 0], [-3, -13, 0]]


class Sorts(TorchFunctionMode):
    """Counts how often rows are sorted."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.argsort
        return func(*args, **(kwargs or {}))


def test_allowed_sets_move_with_the_rollout():
    """`TensorDict.to` leaves them on the CPU: each pass over a minibatch then copied all of them."""
    rollout = collect(text_env(forbidden=[1]), lm_policy(), num_episodes=4)
    moved = to_device(rollout, torch.device("meta"))
    assert moved.get_non_tensor("allowed_sets").device.type == "meta"
    assert rollout.get_non_tensor("allowed_sets").device.type == "cpu"
    unmoved = to_device(rollout, torch.device("cpu"))
    assert torch.equal(allowed_tokens(unmoved).rows(0, 9), allowed_tokens(rollout).rows(0, 9))


def test_the_rows_of_all_columns_are_sorted_once():
    rollout = cut_episodes(3).cut
    with Sorts() as sorts:
        joined = join_episodes(rollout)
    assert sorts.count == 1
    assert len(joined.keys()) > 3
    for name, column in joined.items():
        assert torch.equal(column, join_column(rollout[name], rollout))


# --- gaps of two computations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "short", "full"),
    [
        ([0.8], 0.2, 0.8),
        ([0.1, 0.8], 0.2, 0.8),  # one of few may be far: it counts a quarter
        ([0.3, 0.8, 0.4], 0.4, 0.8),
        ([0.1] * 97 + [0.8] * 3, 0.8, 0.8),  # three of a hundred may not
        ([0.1] * 297 + [0.8] * 3, 0.2, 0.8),
        ([0.1] * 296 + [0.8] * 4, 0.8, 0.8),
        ([0.0, math.inf], math.inf, math.inf),
        ([], 0.0, 0.0),
    ],
)
def test_a_hundredth_of_the_gaps_below_32_bits_counts_a_quarter(gaps, short, full):
    gap = torch.tensor([*gaps, 9.0])  # the last entry is not in the mask
    mask = torch.tensor([True] * len(gaps) + [False])
    for dtype, expected in {torch.bfloat16: short, torch.float16: short, torch.float32: full}.items():
        assert ratio_gap(gap, mask=mask, dtype=dtype) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gap_that_is_no_number_is_not_hidden(dtype):
    gap = torch.tensor([0.1, math.nan, 0.2])
    assert math.isnan(ratio_gap(gap, mask=torch.ones(3, dtype=torch.bool), dtype=dtype))


@pytest.mark.parametrize("short_first", [False, True])
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_the_least_precise_weight_decides(short, short_first):
    weights = [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=short)]
    assert least_precise_dtype(weights[::-1] if short_first else weights) is short
    assert least_precise_dtype([torch.zeros(1).double(), torch.zeros(1)]) is torch.float32
