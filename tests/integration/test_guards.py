"""Guards that the suite did not hold: each test names the line of code that could be taken out before."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torch import nn

from algos import LMPolicy, MLPPolicy, collect
from algos.losses import sequence_mean
from algos.storage.serialization import from_json, to_json
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import agent_of, lm_policy, scored
from tests.helpers.text_envs import EOS, play, text_env
from textenv import KLPenalty, TextVectorEnv
from textenv.envs.episode_batch import EpisodeBatch
from textenv.kl.coefficients import AdaptiveCoefficient
from textenv.lm.sampling import BLOCK, sample


class Noting(gym.Env):
    """Notes every action that it is given."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Box(-0.5, 0.25, (2,), np.float32)

    def __init__(self):
        self.given = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action):
        self.given.append(np.array(action))
        return np.zeros(1, dtype=np.float32), 0.0, False, False, {}


def test_actions_are_clipped_only_for_the_environment():
    single = Noting()
    policy = MLPPolicy(single.observation_space, single.action_space)
    rollout = collect(SyncVectorEnv([lambda: single]), policy, num_steps=50, seed=0)
    drawn, given = rollout["action"][0], torch.from_numpy(np.stack(single.given))
    assert (drawn.abs() > 0.5).any()
    torch.testing.assert_close(given, drawn.clamp(torch.tensor(-0.5), torch.tensor(0.25)))


def test_a_failed_reward_is_not_asked_after_a_reset():
    scored_now = []

    def fails_first(completions):
        scored_now.append(list(completions))
        if len(scored_now) == 1:
            raise RuntimeError("down")
        return [1.0] * len(completions)

    tokenizer = make_tokenizer(WORDS)
    env = TextVectorEnv(prompts=["a b"], reward=fails_first, tokenizer=tokenizer, num_envs=1)
    env.reset(seed=0)
    env.step(np.array([5]))
    with pytest.raises(ValueError, match="down"):
        env.step(np.array([EOS]))
    before = len(scored_now)
    env.reset()
    env.step(np.array([6]))
    reward = env.step(np.array([EOS]))[1]
    assert [text.split() for batch in scored_now[before:] for text in batch] == [["bad"]] and reward.tolist() == [1.0]


def test_a_stop_text_may_end_a_turn_after_the_minimum():
    """`min_new_tokens` tokens are enough: the second of two may complete "good"."""
    env = text_env(num_envs=1, stop=["good"], min_new_tokens=2)
    env.reset(seed=0)
    assert not env.step(np.array([5]))[2][0], "too early"
    env.reset(seed=0)
    env.step(np.array([0]))
    assert env.step(np.array([5]))[2][0]


def test_views_of_one_memory_are_saved_alone():
    x = torch.arange(6.0)
    views = {"whole": x, "matrix": x.view(2, 3), "turned": x.view(3, 2).T, "part": x[:2], "same": x}
    tensors = {}
    back = from_json(to_json(views, tensors), tensors)
    assert all(torch.equal(back[name], view) and back[name].shape == view.shape for name, view in views.items())
    assert len(tensors) == 4, "the same memory in the same shape is saved once"


class Lengths:
    """As much of a transcript as a batch of episodes looks at."""

    def __init__(self, rows):
        self.next_mask = self.length = np.zeros(rows, dtype=np.int64)
        self.tokens = np.zeros((rows, 4), dtype=np.int64)


def test_idle_slots_are_not_released_with_the_last_one():
    batch = EpisodeBatch(Lengths(2), [0, 1], num_envs=4)
    assert batch.refill()[0].tolist() == [0, 1]
    assert batch.release([1]).tolist() == [1], "slots 2 and 3 were idle before"
    assert batch.running.tolist() == [True, False, False, False]


@pytest.mark.parametrize("size", [3, 4 * BLOCK + 7])
def test_a_uniform_number_rounded_to_1_draws_an_action(size):
    logits = torch.zeros(1, size)
    logits[0, size // 2 :] = torch.finfo(torch.float32).min
    action, log_prob = sample(logits, uniform=torch.ones(1))
    assert 0 <= action.item() < size // 2 and log_prob.isfinite().all()


def rollout_of(kl, *, terminated=(), truncated=()):
    """One row with a KL a step, and where episodes end."""
    ends = {name: torch.zeros(1, len(kl), dtype=torch.bool) for name in ("terminated", "truncated")}
    for name, places in (("terminated", terminated), ("truncated", truncated)):
        ends[name][0, list(places)] = True
    mask = torch.ones(1, len(kl), dtype=torch.bool)
    return TensorDict({"kl": torch.tensor([kl]), "mask": mask} | ends, batch_size=[1, len(kl)])


class Noted(AdaptiveCoefficient):
    def __init__(self):
        super().__init__(0.1, target=1.0)
        self.seen = []

    def update(self, *, kl, steps):
        self.seen.append(kl)
        super().update(kl=kl, steps=steps)


def test_an_adaptive_coefficient_counts_cut_episodes():
    """2 + 4 nats in two episodes, one of which was truncated: 3 nats an episode."""
    coefficient = Noted()
    KLPenalty(None, coefficient).update(rollout_of([2.0, 1.0, 3.0], terminated=[0], truncated=[2]))
    assert coefficient.seen == [3.0]


def test_kl_of_an_open_episode_counts_after_a_resume():
    """1 nat before the checkpoint and 4 after it, in one episode; and the next one begins from 0."""
    before, after = Noted(), Noted()
    first, second = KLPenalty(None, before), KLPenalty(None, after)
    first.update(rollout_of([0.25, 0.75]))
    second.load_state_dict(first.state_dict())
    second.update(rollout_of([4.0], terminated=[0]))
    second.update(rollout_of([2.0], truncated=[0]))
    assert before.seen == [None] and after.seen == [5.0, 2.0]


def test_logged_means_are_over_tokens():
    """A long and a short answer; by sequences the loss weighs the short one's tokens more, and the log does not."""
    env, policy = text_env(), lm_policy()
    rollout = scored(play(env, [(5, 1, 2, 3, 0), (7,)]), policy)
    with torch.no_grad():
        entropy = policy.evaluate(rollout).entropy[rollout["mask"]]
        by_row = [policy.evaluate(rollout).entropy[row][rollout["mask"][row]].mean() for row in range(2)]
    assert abs(sum(by_row) / 2 - entropy.mean()) > 1e-3, "the two means differ, or the test guards nothing"
    metrics = agent_of(env, policy, aggregation=sequence_mean, num_episodes=2).update(rollout)
    assert metrics["policy/entropy"] == pytest.approx(entropy.mean().item(), abs=1e-5)


def longer(policy, tokens, length):
    return policy.act({"tokens": tokens, "length": np.array([[length]])}, deterministic=True).log_prob.item()


@pytest.mark.parametrize("change", ["length", "first token", "a token in the middle"])
def test_a_policy_notices_another_text_in_its_slot(change):
    """One token longer, with the same last token that was read; what stands before it is another text."""
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    first, other = np.zeros((1, 8), dtype=np.int64), np.zeros((1, 8), dtype=np.int64)
    first[0, :4], other[0, :5] = [1, 2, 3, 4], [1, 2, 3, 4, 5]
    if change == "length":
        other[0, :6], length = [1, 2, 3, 4, 5, 6], 6
    else:
        length = 5
        other[0, 0 if change == "first token" else 1] = 0
    longer(policy, first, 4)
    found = longer(policy, other, length)
    policy.reset()
    assert found == pytest.approx(longer(policy, other, length), abs=1e-5)
    assert isinstance(policy, nn.Module)
