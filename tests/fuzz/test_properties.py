"""Properties on random inputs: each function against a slow and obvious version of itself, in Python's floats."""

import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings, strategies as st
from tensordict import TensorDict

from algos import losses
from algos.advantages import discounted_returns, gae, leave_one_out, standardize_in_group, whiten
from algos.finetuning.packing import Example, pack
from algos.minibatches import shuffle_and_split
from tests.helpers.models import WORDS
from tests.helpers.text_envs import EOS, PAD, Script, play, text_env
from textenv.envs.action_masks import ActionMasks
from textenv.kl.estimators import k1, k2, k3
from textenv.lm.sampling import greedy, restrict, sample, truncate
from textenv.prompts.prompts import PromptList, PromptOrder
from textenv.rollout import following, masked_mean

checked = settings(derandomize=True, deadline=None, database=None, max_examples=60)
"""The same inputs in every run."""

NUMBER = st.integers(-80, 80).map(lambda n: n / 8)
"""Exact in float32, so that only the sums are rounded."""
JUNK = [math.nan, math.inf, -math.inf, 3e38, 1.0]
SHARE = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def grid(draw, rows, columns, element):
    return [[draw(element) for _ in range(columns)] for _ in range(rows)]


@st.composite
def batches(draw, *numbers, flags=(), rows=3, columns=6):
    """Columns by name, ``[B][T]``, and a mask; outside the mask numbers are junk."""
    shape = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    mask = grid(draw, *shape, st.booleans())
    found = {name: grid(draw, *shape, NUMBER) for name in numbers} | {
        n: grid(draw, *shape, st.booleans()) for n in flags
    }
    junk = draw(st.sampled_from(JUNK))
    for name in numbers:
        if name != "reward":  # which belongs to the entry before, where a False one is inside an episode
            found[name] = [
                [x if m else junk for x, m in zip(*row, strict=True)] for row in zip(found[name], mask, strict=True)
            ]
    return found, mask


def tensors(columns, mask):
    return {name: torch.tensor(x) for name, x in columns.items()} | {"mask": torch.tensor(mask)}


def entries(mask):
    return [(b, t) for b, row in enumerate(mask) for t, m in enumerate(row) if m]


def close(found, expected, mask, tolerance=1e-4):
    """Equal at the True entries, and 0 elsewhere."""
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            wanted = expected[b, t] if m else 0.0
            assert found[b, t].item() == pytest.approx(wanted, abs=tolerance, rel=tolerance), (b, t)


# --- advantages ------------------------------------------------------------------------------------------------------


def steps_of(columns, mask, row):
    """The True entries of a row: place, reward, terminated, done, with what stands on the False ones after each."""
    found = []
    for t in (t for t, m in enumerate(mask[row]) if m):
        reward, terminated, truncated = (columns[name][row][t] for name in ("reward", "terminated", "truncated"))
        after = t + 1
        while not (terminated or truncated) and after < len(mask[row]) and not mask[row][after]:
            reward += columns["reward"][row][after]
            terminated, truncated = columns["terminated"][row][after], columns["truncated"][row][after]
            after += 1
        found.append((t, reward, terminated, terminated or truncated))
    return found


ENDED_LATER = {
    "reward": [[1.0, 2.0]],
    "value": [[0.5, 0.0]],
    "next_value": [[3.0, 9.0]],
    "terminated": [[False, True]],
    "truncated": [[False, False]],
}
ADVANTAGES = batches("reward", "value", "next_value", flags=("terminated", "truncated"))


@checked
@given(ADVANTAGES, SHARE, SHARE)
@example((ENDED_LATER, [[True, False]]), 0.9, 0.5)  # the end on an entry that does not count is the one before's
def test_gae_is_the_sum_over_later_entries(batch, gamma, gae_lambda):
    columns, mask = batch
    expected, target = {}, {}
    for row in range(len(mask)):
        steps = steps_of(columns, mask, row)
        for i, (t, *_) in enumerate(steps):
            total, weight = 0.0, 1.0
            for place, reward, terminated, done in steps[i:]:
                value, coming = columns["value"][row][place], columns["next_value"][row][place]
                total += weight * (reward + (0.0 if terminated else gamma * coming) - value)
                weight *= gamma * gae_lambda
                if done:
                    break
            expected[row, t], target[row, t] = total, total + columns["value"][row][t]
    advantage, value_target = gae(**tensors(columns, mask), gamma=gamma, gae_lambda=gae_lambda)
    close(advantage, expected, mask)
    close(value_target, target, mask)


@checked
@given(batches("reward", flags=("terminated", "truncated")), SHARE)
def test_returns_are_discounted_to_the_episodes_end(batch, gamma):
    columns, mask = batch
    expected = {}
    for row in range(len(mask)):
        steps = steps_of(columns, mask, row)
        for i, (t, *_) in enumerate(steps):
            end = next((k for k in range(i, len(steps)) if steps[k][3]), len(steps) - 1)
            expected[row, t] = sum(gamma ** (k - i) * steps[k][1] for k in range(i, end + 1))
    close(discounted_returns(**tensors(columns, mask), gamma=gamma), expected, mask)


@checked
@given(batches("x"), st.booleans())
def test_whitening_uses_true_entries_only(batch, shift_mean):
    columns, mask = batch
    known = [columns["x"][b][t] for b, t in entries(mask)]
    mean = sum(known) / len(known) if known else 0.0
    deviation = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known)) if len(known) > 1 else 1.0
    expected = {}
    for b, t in entries(mask):
        # Entries that are all alike stay where the mean is.
        away = (columns["x"][b][t] - mean) / deviation if deviation else 0.0
        expected[b, t] = away if shift_mean else away + mean
    close(whiten(**tensors(columns, mask), shift_mean=shift_mean), expected, mask, tolerance=1e-3)


@checked
@given(st.lists(st.tuples(NUMBER, st.integers(0, 2), st.booleans()), min_size=1, max_size=9), st.booleans())
def test_group_baselines_leave_out_the_row_itself(rows, scale):
    score, group, counts = (torch.tensor(column) for column in zip(*rows, strict=True))
    others = leave_one_out(score=score, group=group, counts=counts)
    standard = standardize_in_group(score=score, group=group, counts=counts, scale=scale)
    for i, (x, g, counted) in enumerate(rows):
        peers = [y for y, h, c in rows if c and h == g]
        if not counted or len(set(peers)) < 2:
            assert others[i] == 0 and standard[i] == 0
            continue
        mean = sum(peers) / len(peers)
        assert others[i].item() == pytest.approx(x - (sum(peers) - x) / (len(peers) - 1), abs=1e-4)
        spread = math.sqrt(sum((y - mean) ** 2 for y in peers) / (len(peers) - 1)) + 1e-4 if scale else 1.0
        assert standard[i].item() == pytest.approx((x - mean) / spread, abs=1e-3)


# --- losses and KL ---------------------------------------------------------------------------------------------------


def clipped(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.heavy
@checked
@given(batches("log_prob", "old_log_prob", "advantage"), st.sampled_from([0.1, 0.2]), st.sampled_from([None, 0.3]))
def test_policy_losses_equal_a_loop(batch, clip_range, clip_higher):
    columns, mask = batch
    given_ = tensors(columns, mask)
    shrunk = {name: given_[name] / 8 for name in ("log_prob", "old_log_prob")}
    log_ratio = losses.log_ratio(**shrunk, mask=given_["mask"])
    common = {"log_ratio": log_ratio, "advantage": given_["advantage"], "mask": given_["mask"]}
    wanted = {name: {} for name in ("log_ratio", "gradient", "clipped", "dual", "threshold")}
    for b, row in enumerate(mask):
        logs = {t: (columns["log_prob"][b][t] - columns["old_log_prob"][b][t]) / 8 for t, m in enumerate(row) if m}
        for t, log in logs.items():
            ratio, advantage = math.exp(log), columns["advantage"][b][t]
            plain = clipped(ratio, advantage, clip_range, clip_range)
            wanted["log_ratio"][b, t], wanted["gradient"][b, t] = log, -advantage * log
            wanted["clipped"][b, t] = clipped(ratio, advantage, clip_range, clip_higher or clip_range)
            wanted["dual"][b, t] = min(plain, -2 * advantage) if advantage < 0 else plain
            mean = sum(math.exp(x) for x in logs.values()) / len(logs)
            wanted["threshold"][b, t] = plain if mean <= 1.7 else 0.0
            assume(abs(mean - 1.7) > 1e-4)
    found = {
        "log_ratio": log_ratio,
        "gradient": losses.policy_gradient_loss(**common),
        "clipped": losses.clipped_policy_loss(**common, clip_range=clip_range, clip_higher=clip_higher),
        "dual": losses.dual_clipped_policy_loss(**common, clip_range=clip_range, limit=2.0),
        "threshold": losses.thresholded_policy_loss(**common, clip_range=clip_range, threshold=1.7),
    }
    for name, loss in found.items():
        close(loss, wanted[name], mask)


@checked
@given(batches("value", "value_target", "old_value"), st.sampled_from([None, 0.5, 2.0]))
def test_the_value_loss_equals_a_loop(batch, clip_range):
    columns, mask = batch
    expected = {}
    for b, t in entries(mask):
        value, target, old = (columns[name][b][t] for name in ("value", "value_target", "old_value"))
        error = (value - target) ** 2
        if clip_range is not None:
            error = max(error, (min(max(value, old - clip_range), old + clip_range) - target) ** 2)
        expected[b, t] = error / 2
    close(losses.value_loss(**tensors(columns, mask), clip_range=clip_range), expected, mask)


@checked
@given(batches("x"))
def test_aggregations_weigh_tokens_or_rows_alike(batch):
    columns, mask = batch
    rows, count = [sum(row) for row in mask], len(entries(mask))
    assume(count)
    filled = sum(n > 0 for n in rows)
    own = torch.tensor(mask)
    close(losses.token_mean(mask=own), dict.fromkeys(entries(mask), 1 / count), mask)
    close(losses.sequence_mean(mask=own), {(b, t): 1 / rows[b] / filled for b, t in entries(mask)}, mask)
    close(losses.fixed_length_mean(mask=own, length=4), dict.fromkeys(entries(mask), 1 / 4 / filled), mask)
    mean = sum(columns["x"][b][t] for b, t in entries(mask)) / count
    assert masked_mean(torch.tensor(columns["x"]), mask=own).item() == pytest.approx(mean, abs=1e-4)


@checked
@given(batches("x", flags=("done",), columns=7))
def test_following_is_the_next_entry_of_the_episode(batch):
    columns, mask = batch
    steps = len(mask[0])
    values = torch.arange(len(mask) * (steps + 1)).reshape(len(mask), -1).double()
    found = following(values, mask=torch.tensor(mask), done=torch.tensor(columns["done"]))
    for b, t in entries(mask):
        place = t + 1
        if not columns["done"][b][t]:
            while place < steps and not mask[b][place]:
                place += 1
                if columns["done"][b][place - 1]:
                    break
        assert found[b, t] == values[b, place]


DISTRIBUTION = st.lists(st.integers(1, 40), min_size=4, max_size=4).map(lambda w: [x / sum(w) for x in w])


@checked
@given(DISTRIBUTION, DISTRIBUTION)
def test_kl_estimators_equal_their_definitions(p, q):
    log_ratio = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    exact = sum(a * x for a, x in zip(p, log_ratio, strict=True))
    x = torch.tensor(log_ratio, dtype=torch.float64)
    assert k2(x).tolist() == pytest.approx([y * y / 2 for y in log_ratio])
    assert k3(x).tolist() == pytest.approx([b / a - 1 + y for a, b, y in zip(p, q, log_ratio, strict=True)], abs=1e-12)
    assert (k3(x) >= -1e-15).all() and (k2(x) >= 0).all()
    for estimator in (k1, k3):
        assert (torch.tensor(p, dtype=torch.float64) * estimator(x)).sum().item() == pytest.approx(exact, abs=1e-12)


# --- choosing --------------------------------------------------------------------------------------------------------


@st.composite
def distributions(draw):
    """Logits of a row, some peaked, some flat, of sizes below and above where blocks begin; and what is allowed."""
    n = draw(st.sampled_from([1, 2, 5, 300, 1024, 1025, 2600]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(n, generator=generator) * draw(st.sampled_from([0.0, 1.0, 8.0, 40.0]))
    allowed = torch.rand(n, generator=generator) < draw(st.sampled_from([0.01, 0.5, 1.0]))
    allowed[draw(st.integers(0, n - 1))] = True
    return logits, allowed


@checked
@given(distributions(), st.integers(0, 2**20), st.sampled_from([0.3, 1.0, 2.5]))
def test_a_draw_inverts_the_distribution_function(distribution, seed, temperature):
    logits, allowed = distribution
    restricted = restrict(logits[None].expand(8, -1), temperature=temperature, allowed=allowed)
    uniform = torch.rand(8, 1, generator=torch.Generator().manual_seed(seed))[:, 0].tolist()
    action, log_prob = sample(restricted, generator=torch.Generator().manual_seed(seed))
    # In float64, one after the other.
    open_logits = [x / temperature if a else -math.inf for x, a in zip(logits.tolist(), allowed.tolist(), strict=True)]
    greatest = max(open_logits)
    weights = [math.exp(x - greatest) for x in open_logits]
    cumulative = list(accumulate(weights))
    for u, chosen, told in zip(uniform, action.tolist(), log_prob.tolist(), strict=True):
        assert allowed[chosen]
        low = cumulative[chosen - 1] if chosen else 0.0
        assert low / cumulative[-1] - 2e-6 <= u <= cumulative[chosen] / cumulative[-1] + 2e-6
        assert told == pytest.approx(open_logits[chosen] - greatest - math.log(cumulative[-1]), abs=1e-4)
    best, best_log_prob = greedy(restricted)
    assert (restricted[0, best] == restricted[0].max()).all()
    assert best_log_prob[0].item() == pytest.approx(-math.log(cumulative[-1]), abs=1e-4)


@checked
@given(st.permutations(range(9)), st.sampled_from([None, 1, 3, 20]), st.sampled_from([None, 0.1, 0.5, 0.83, 1.0]))
def test_truncation_keeps_the_most_probable_actions(ranks, top_k, top_p):
    logits = [rank / 3 for rank in ranks]
    order = sorted(range(9), key=lambda i: -logits[i])[:top_k]
    total, kept, before = sum(math.exp(logits[i]) for i in order), set(), 0.0
    for i in order:
        assume(top_p in (None, 1.0) or abs(before - top_p) > 1e-6)
        if top_p is None or before < top_p:
            kept.add(i)
        before += math.exp(logits[i]) / total
    found = truncate(torch.tensor([logits]), top_k=top_k, top_p=top_p)[0]
    assert {i for i in range(9) if found[i] == logits[i]} == kept
    assert all(found[i] == torch.finfo(torch.float32).min for i in range(9) if i not in kept)


TOKENS = st.sets(st.integers(0, 6))


@checked
@given(TOKENS, TOKENS, st.integers(0, 3), st.lists(st.none() | TOKENS, min_size=1, max_size=6))
def test_action_masks_are_sets(forbidden, ends, least, said):
    rule_says = iter([*said])
    everything = set(range(7))
    assume(everything - forbidden and (not least or everything - forbidden - ends))
    masks = ActionMasks(
        7, forbidden=sorted(forbidden), ends=sorted(ends), min_new_tokens=least, rule=lambda turn: next(rule_says)
    )
    for new, names in enumerate(said):
        allowed = (everything if names is None else names) - forbidden - (ends if new < least else set())
        if not allowed:
            break
        index = masks.index(lambda i: None, np.array([new]))
        assert set(np.flatnonzero(masks.sets[index[0]].numpy()).tolist()) == allowed
        for token in everything:
            if token in allowed:
                masks.check(np.array([token]), np.array([0]), index)
            else:
                with pytest.raises(ValueError, match="is forbidden here"):
                    masks.check(np.array([token]), np.array([0]), index)


# --- episodes --------------------------------------------------------------------------------------------------------

PROMPTS = [(0, 1), (2,), (3, 0, 1)]


@st.composite
def scripts(draw):
    """Limits of an environment, and what is said in each of some episodes."""
    most = draw(st.integers(1, 5))
    least = draw(st.integers(0, most))
    stop = draw(st.sets(st.sampled_from([4, 5]), max_size=1))
    ends = {EOS, *stop}
    goes_on = st.sampled_from([token for token in range(7) if token not in ends])
    anything = st.sampled_from([0, 1, 4, 5, EOS, EOS])
    streams = [
        [draw(goes_on if place < least else anything) for place in range(most)] for _ in range(draw(st.integers(1, 7)))
    ]
    answers = []
    for stream in streams:
        cut = next((place + 1 for place, token in enumerate(stream) if token in ends), most)
        answers.append(stream[:cut])
    options = dict(max_new_tokens=most, min_new_tokens=least, stop=sorted(stop), num_envs=draw(st.integers(1, 10)))
    return options, answers, ends


def worth(turns):
    return [float(sum(turn.completion_ids)) for turn in turns]


@checked
@given(scripts())
def test_a_rollout_is_its_episodes_written_out(script):
    options, answers, ends = script
    env = text_env(Script(PROMPTS, worth), **options)
    rollout = play(env, answers)
    texts = [[*PROMPTS[i % 3], *answer] for i, answer in enumerate(answers)]
    steps = max(map(len, texts)) - 1
    assert rollout.batch_size == (len(answers), steps)
    for row, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        padded = text + [PAD] * (steps + 1 - len(text))
        start, last, ended = len(text) - len(answer) - 1, len(text) - 2, answer[-1] in ends
        expected = {
            "observation": padded[:-1],
            "action": padded[1:],
            "reward": [float(sum(answer)) if t == last else 0.0 for t in range(steps)],
            "terminated": [t == last and ended for t in range(steps)],
            "truncated": [t == last and not ended for t in range(steps)],
            "mask": [start <= t <= last for t in range(steps)],
            "is_init": [t == 0 for t in range(steps)],
            "group": [row] * steps,
        }
        assert {name: rollout[name][row].tolist() for name in expected} == expected
        if options["min_new_tokens"]:
            sets = rollout.get_non_tensor("allowed_sets")[rollout["allowed"][row]]
            for t in range(start, last + 1):
                closed = ends if t - start < options["min_new_tokens"] else set()
                assert set(np.flatnonzero(~sets[t].numpy()).tolist()) == closed


@pytest.mark.heavy
@checked
@given(scripts(), st.sampled_from(["NextStep", "SameStep"]))
def test_steps_are_those_of_slots_played_by_hand(script, mode):
    """Every slot goes through all the answers, one after another."""
    options, answers, ends = script
    env = text_env(Script(PROMPTS, worth), **options, autoreset_mode=mode)
    slots = env.num_envs
    observation, _ = env.reset(seed=0)
    dealt = slots
    text = [list(PROMPTS[slot % 3]) for slot in range(slots)]
    said, over, turn = [[] for _ in range(slots)], [False] * slots, list(range(slots))
    for _ in range(12):
        for slot in range(slots):
            length = len(text[slot])
            assert observation["length"][slot, 0] == length
            assert observation["tokens"][slot].tolist() == text[slot] + [PAD] * (env.max_length - length)
        actions = np.array([0 if over[s] else answers[turn[s] % len(answers)][len(said[s])] for s in range(slots)])
        observation, reward, terminated, truncated, _ = env.step(actions)
        fresh = []
        for slot in range(slots):
            if over[slot]:  # NEXT_STEP: this step was the reset
                assert (reward[slot], terminated[slot], truncated[slot]) == (0, False, False)
                over[slot] = False
                fresh.append(slot)
                continue
            said[slot].append(int(actions[slot]))
            text[slot].append(int(actions[slot]))
            ended = actions[slot] in ends
            cut = not ended and len(said[slot]) == options["max_new_tokens"]
            paid = float(sum(said[slot])) if ended or cut else 0.0
            assert (reward[slot], terminated[slot], truncated[slot]) == (paid, ended, cut)
            if ended or cut:
                if mode == "SameStep":
                    fresh.append(slot)
                else:
                    over[slot] = True
        for slot in fresh:
            text[slot], said[slot], turn[slot] = list(PROMPTS[dealt % 3]), [], turn[slot] + slots
            dealt += 1


# --- cutting, packing, ordering --------------------------------------------------------------------------------------


@checked
@given(batches("x"), st.sampled_from([None, 1, 2, 5]), st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_an_epoch_holds_every_true_entry_once(batch, size, sequential, epochs, seed):
    _, mask = batch
    shape = len(mask), len(mask[0])
    number = torch.arange(shape[0] * shape[1]).reshape(shape)
    rollout = TensorDict({"mask": torch.tensor(mask), "number": number.clone()}, batch_size=shape)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for part in shuffle_and_split(rollout, size=size, sequential=sequential, generator=generator, num_epochs=epochs):
        found.append(part.clone())
        part["number"].fill_(-1)  # what a loss writes is in no other epoch, and not in the rollout
    assert torch.equal(rollout["number"], number)
    units = sum(map(any, mask)) if sequential else len(entries(mask))
    expected = [number[b, t].item() for b, t in entries(mask)]
    sizes = [units] if units else []
    if size is not None:
        sizes = [size] * (units // size) + [units % size] * (units % size > 0)
        if sizes[1:] and sizes[-1] == 1 < size:  # a step or row that is left over is not alone
            sizes[-2:] = [size + 1]
    assert [len(part) for part in found] == sizes * epochs
    for epoch in range(epochs):
        parts = found[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(x for part in parts for x in part["number"][part["mask"]].tolist()) == expected


@checked
@given(st.lists(st.integers(1, 9), max_size=12))
def test_packing_is_first_fit_of_the_longest_first(sizes):
    rows = pack([Example([i] * size, [True] * size) for i, size in enumerate(sizes)], max_length=9)
    expected = []
    for size in sorted(sizes, reverse=True):
        row = next((row for row in expected if sum(row) + size <= 9), None)
        if row is None:
            expected.append(row := [])
        row.append(size)
    assert [[len(example.ids) for example in row] for row in rows] == expected
    assert sorted(example.ids[0] for row in rows for example in row) == list(range(len(sizes)))


@checked
@given(st.integers(1, 9), st.integers(0, 2**40), st.lists(st.integers(0, 7), max_size=6))
def test_prompts_come_once_a_pass_in_any_portions(n, seed, cuts):
    deck, order = PromptList([f"prompt {i}" for i in range(n)]), PromptOrder()
    order.state = {"seed": seed, "position": 0}
    dealt = []
    for size in cuts:
        with order.fork():
            order.start(np.random.default_rng(0), anew=True)
            order.next(5)
        other = PromptOrder()
        other.state = order.state
        order = other
        dealt += deck.sample_prompts(order.next(size), seed=order.seed)
    assert dealt == deck.sample_prompts(range(sum(cuts)), seed=seed)
    for start in range(0, len(dealt) - n + 1, n):
        assert {prompt.content for prompt in dealt[start : start + n]} == {f"prompt {i}" for i in range(n)}


def test_scripts_use_words_of_the_tokenizer():
    assert (WORDS[EOS], WORDS[PAD], len(WORDS)) == ("<eos>", "<pad>", 9)
