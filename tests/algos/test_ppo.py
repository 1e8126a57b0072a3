"""An update: junk outside the mask, padding, cuts, empty rows, orders, and that it learns."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from algos import GRPO, PPO, MLPPolicy, PPOConfig, collect
from algos.losses import sequence_mean
from algos.training.metrics import EpisodeMeter, reference_metrics, rollout_metrics
from tests.helpers.models import make_gpt2, make_llama
from tests.helpers.rollouts import (
    ANSWERS,
    after_the_end,
    spoil,
    with_empty_rows,
)
from tests.helpers.small_agents import (
    agent_of,
    cartpole,
    close_gradients,
    control_rollout,
    gradients,
    lm_policy,
    mlp_for,
    scored,
)
from tests.helpers.text_envs import EOS, GOOD, Script, play, text_env
from textenv import KLPenalty
from textenv.errors import InvariantError

BUSY = dict(num_epochs=2, minibatch_size=3, micro_batch_size=2, learning_rate=1e-2, clip_range_vf=0.1,
            ent_coef=0.01)  # fmt: skip


# --- NaN × 0 ----------------------------------------------------------------------------------------------------------


def make_lm():
    env, policy = text_env(), lm_policy()
    return env, policy, scored(play(env, ANSWERS), policy), BUSY


def make_mlp():
    env, policy, rollout = control_rollout()
    return env, policy, rollout, BUSY | dict(minibatch_size=50, micro_batch_size=20)


@pytest.mark.parametrize("make", [make_lm, make_mlp])
def test_the_check_of_kl_0_sees_masked_entries_only(make):
    _, policy, rollout, _ = make()
    KLPenalty(copy.deepcopy(policy).requires_grad_(False), 0.1)(spoil(rollout, 0), policy)


def test_returns_ignore_what_follows_an_episodes_end():
    _, _, rollout, _ = make_lm()
    expected = sorted(zip([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 4.0], map(len, ANSWERS), strict=True))
    assert sorted(zip(*EpisodeMeter().finished(rollout), strict=True)) == expected
    after = after_the_end(rollout)
    rollout["reward"] = rollout["reward"].masked_fill(after, torch.nan)
    rollout["terminated"] = rollout["terminated"] | after
    assert sorted(zip(*EpisodeMeter().finished(rollout), strict=True)) == expected


# --- padding inside metrics -------------------------------------------------------------------------------------------


def test_logged_figures_equal_those_of_transformers():
    """Entropy, value and KL figures of unpadded rows by `transformers`, over the policy's own tokens."""
    env, policy, rollout, _ = make_lm()
    other = lm_policy(lambda: make_gpt2(seed=5)).lm.requires_grad_(False)
    penalty = KLPenalty(other, 0.5)
    penalty(rollout, policy)
    agent = agent_of(env, policy, penalty=penalty)
    metrics = reference_metrics(rollout, coefficient=0.5) | agent.update(rollout) | rollout_metrics(rollout)
    rows = [unpadded(policy, rollout, row) for row in range(len(ANSWERS))]
    entropy, value = (torch.cat([row[k] for row in rows]).detach() for k in ("entropy", "value"))
    kl = torch.cat([row["log_prob"].detach() for row in rows]) - torch.cat(
        [unpadded(policy, rollout, row, model=other.model)["log_prob"] for row in range(len(ANSWERS))]
    )
    expected = {"policy/entropy": entropy.mean(), "value/mean": value.mean(), "reference/kl": kl.sum() / len(ANSWERS),
                "reference/kl_per_step": kl.mean(), "policy/approx_kl": 0, "policy/clip_frac": 0}  # fmt: skip
    for name, figure in expected.items():
        assert metrics[name] == pytest.approx(float(figure), abs=1e-5), name


def test_kl_an_episode_counts_collected_episodes_only():
    """In control, slots that are done play on outside the mask: those ends are no episodes of the rollout."""
    env = cartpole(3)
    policy, other = mlp_for(env), mlp_for(env, seed=4)
    rollout = collect(env, policy, num_episodes=4, seed=0)
    KLPenalty(other, 0.1)(rollout, policy)
    total = rollout["kl"][rollout["mask"]].sum().item()
    assert reference_metrics(rollout, coefficient=0.1)["reference/kl"] == pytest.approx(total / 4, rel=1e-4)


# --- how a batch is cut -----------------------------------------------------------------------------------------------


def unpadded(policy, rollout, row, model=None):
    """log_prob, entropy and value at one row's own tokens, by `transformers` on the bare sequence."""
    model, mask = policy.lm.model if model is None else model, rollout["mask"][row]
    stop = int(mask.nonzero().max()) + 1
    ids = rollout["observation"][row : row + 1, :stop]
    every = model(ids).logits[0].log_softmax(-1)[mask[:stop]]
    log_prob = every.gather(1, rollout["action"][row][mask][:, None])[:, 0]
    value = policy.value_head(model.base_model(ids).last_hidden_state[0, mask[:stop]])[:, 0]
    return {"log_prob": log_prob, "entropy": -(every.exp() * every).sum(-1), "value": value}


@pytest.mark.parametrize("micro", [1, 2, None])
@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_the_gradient_does_not_depend_on_micro_batches(make, micro):
    """Lengths 1, 3 and 5: by autograd on bare sequences, one mean over all nine tokens."""
    env, policy = text_env(Script(scores=[2.0, -1.0, 1.0])), lm_policy(make)
    rollout = scored(play(env, [(EOS,), (5, 1, EOS), (3, 3, 3, 3, 3)]), policy)
    options = dict(micro_batch_size=micro, normalize_advantage=False, ent_coef=0.03, vf_coef=0.4)
    agent_of(env, policy, **options).update(rollout)
    found, loss = gradients(policy), 0.0
    policy.zero_grad()
    for row in range(3):
        mask, own = rollout["mask"][row], unpadded(policy, rollout, row)
        error = (own["value"] - rollout["value_target"][row][mask]).square()
        gain = rollout["advantage"][row][mask] * own["log_prob"]
        loss = loss + (0.2 * error - gain - 0.03 * own["entropy"]).sum() / 9
    loss.backward()
    close_gradients(found, gradients(policy))


@pytest.mark.parametrize("micro", [1, 7, None])
def test_nor_does_the_gradient_of_single_steps(micro):
    env, policy, rollout = control_rollout(24 * 2)
    agent_of(env, policy, micro_batch_size=micro, vf_coef=0.4).update(rollout)
    found = gradients(policy)
    policy.zero_grad()
    steps = rollout[rollout["mask"]]
    gain = (steps["advantage"] - steps["advantage"].mean()) / steps["advantage"].std(correction=0)
    chosen = torch.distributions.Categorical(logits=policy.actor(steps["observation"])).log_prob(steps["action"])
    error = (policy.critic(steps["observation"])[:, 0] - steps["value_target"]).square()
    (0.2 * error - gain * chosen).mean().backward()
    close_gradients(found, gradients(policy))


# --- empty and constant rows ------------------------------------------------------------------------------------------


def test_a_rollout_without_any_step_moves_nothing():
    """NEXT_STEP slots that were all reset at once give such a rollout with ``steps=1``."""
    env, policy, rollout, options = make_lm()
    before = copy.deepcopy(policy.state_dict())
    rollout["mask"] = torch.zeros_like(rollout["mask"])
    agent_of(env, policy, **options).update(rollout)
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert rollout_metrics(rollout)["rollout/empty_rows"] == len(ANSWERS)


@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3])
def test_a_constant_reward_gives_no_policy_gradient(reward):
    """γ = λ = 1 and a fresh head: every advantage is the same number, so none is better than another."""
    env, policy = text_env(Script(scores=[reward] * len(ANSWERS))), lm_policy(head=False)
    rollout = scored(play(env, ANSWERS), policy)
    agent_of(env, policy, gamma=1.0, gae_lambda=1.0, vf_coef=0.0).update(rollout)
    assert all(g.abs().max() == 0 for g in gradients(policy).values())
    assert rollout_metrics(rollout)["advantage/mean"] == pytest.approx(reward)


# --- permutations -----------------------------------------------------------------------------------------------------


def orders(agent, rollout):
    """The serial numbers of an update's units in the order in which they are evaluated, one list an epoch."""
    seen, evaluate = [], agent.policy.evaluate

    def spy(batch):
        seen.extend(batch["serial"].flatten(1)[:, 0].tolist() if batch.ndim > 1 else batch["serial"].tolist())
        return evaluate(batch)

    agent.policy.evaluate = spy
    agent.update(rollout)
    size = len(seen) // agent.config.num_epochs
    return [seen[start : start + size] for start in range(0, len(seen), size)]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["steps", "rows"])
def test_each_epoch_visits_every_sample_once(kind):
    if kind == "steps":
        env, policy, rollout = control_rollout()
        serial = torch.arange(rollout.numel()).view(rollout.shape)
        expected = serial[rollout["mask"]].tolist()
    else:
        env, policy = text_env(), lm_policy()
        rollout = with_empty_rows(collect(env, policy, num_episodes=20), 2)
        serial, expected = torch.arange(22)[:, None].expand(rollout.shape), list(range(2, 22))
    rollout["serial"] = serial
    found = orders(agent_of(env, policy, num_epochs=4, minibatch_size=7, micro_batch_size=3), rollout)
    assert all(sorted(epoch) == expected for epoch in found)
    assert len({tuple(epoch) for epoch in [*found, expected]}) == 5


# --- GAE learns -------------------------------------------------------------------------------------------------------


def learning_curve(gae_lambda, seed):
    """Returns of 12 small updates: 8 tokens, score = share of the word "good" among them, paid at the end."""
    task = Script(scores=lambda turns: [turn.completion_ids.count(GOOD) / 8 for turn in turns])
    env = text_env(task, num_envs=32, max_new_tokens=8, forbidden=[EOS])
    policy = lm_policy(lambda: make_gpt2(seed=seed), head=False, seed=seed)
    options = dict(num_episodes=32, num_epochs=2, minibatch_size=16, learning_rate=2e-3, max_grad_norm=1.0, seed=seed)
    agent = agent_of(env, policy, gamma=1.0, gae_lambda=gae_lambda, vf_coef=0.1, **options)
    return [row["episode/return"] for row in agent.learn(12 * 32 * 8)]


@pytest.mark.long
def test_gae_learns_as_fast_as_one_step_advantages():
    """Area under the curve on six of eight seeds, and clearly so on their mean."""
    curves = {lam: torch.tensor([learning_curve(lam, seed) for seed in range(8)]) for lam in (0.95, 0.0)}
    gae, one_step = (curves[lam].mean(1) for lam in (0.95, 0.0))
    assert (curves[0.95][:, -3:].mean(1) > 0.85).all() and curves[0.95][:, 0].mean() < 0.4
    assert (gae > one_step - 0.02).sum() >= 6 and gae.mean() > one_step.mean() + 0.1, (gae, one_step)


# --- a generator whose log-probabilities are off by a known amount ---------------------------------------------------


class Lottery(gym.Env):
    """One step: action a pays a / 2. With an entropy bonus of c the best policy is softmax(a / 2c)."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), float(action) / 2, True, False, {}


class OtherEngine(MLPPolicy):
    """Acts with the logit of action 0 raised by ``gap``, and records what it acted by, or hides it."""

    gap, hides = 0.0, False

    def act(self, observation, **options):
        bias = self.actor[-1].bias
        before = bias.detach().clone()
        with torch.no_grad():
            bias[0] += self.gap
        step = super().act(observation, **options)
        with torch.no_grad():
            bias.copy_(before)
        if self.hides:
            own = self.evaluate({"observation": torch.from_numpy(observation), "action": step.action}).log_prob
            step = step._replace(log_prob=own.detach())
        return step


def lottery_agent(gap, *, hides=False, **options):
    env = SyncVectorEnv([Lottery] * 16, autoreset_mode="SameStep")
    policy = OtherEngine(env.single_observation_space, env.single_action_space, hidden=(), seed=0)
    policy.gap, policy.hides = gap, hides
    fields = dict(num_steps=16, num_epochs=1, minibatch_size=256, clip_range=10.0, normalize_advantage=False,
                  ent_coef=0.5, max_grad_norm=10.0, learning_rate=0.1, final_learning_rate=0.0)  # fmt: skip
    return PPO(env, policy, PPOConfig(**(fields | options)))


def learnt_distribution(*args, **options):
    agent = lottery_agent(*args, ratio_tolerance=10.0, **options)
    agent.learn(60 * 256)
    return agent.policy.actor(torch.ones(1, 1)).softmax(-1)[0].detach()


def test_another_engines_log_probs_must_be_allowed():
    """Uniform, with action 0 raised by ln 2: it acts by 1/2, 1/4, 1/4, which is ln 3/2 and ln 3/4 off."""
    gap = math.log(2)
    with pytest.raises(InvariantError, match="before the first step of an update"):
        lottery_agent(gap).learn(1)
    agent = lottery_agent(gap, ratio_tolerance=0.5)
    for weight in agent.policy.actor.parameters():
        weight.data.zero_()
    rollout = collect(agent.env, agent.policy, num_steps=16)
    share = (rollout["action"] == 0).float().mean().item()
    expected = share * math.log(3 / 2) + (1 - share) * math.log(4 / 3)
    assert agent.update(rollout)["policy/sampler_gap"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.heavy
def test_recorded_log_probs_correct_for_another_engine():
    """The ratio to what the engine recorded corrects for it; the same samples passed off as our own mislead."""
    best = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    reference, corrected = learnt_distribution(0.0), learnt_distribution(math.log(3))
    misled = learnt_distribution(math.log(3), hides=True)
    assert (reference - best).abs().max() < 0.03
    assert (corrected - best).abs().max() < 0.03
    assert (misled - best).abs().max() > 0.06
    score = torch.tensor([0.0, 0.5, 1.0])
    assert (corrected * score).sum() == pytest.approx((reference * score).sum().item(), abs=0.03)


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


# --- A policy loss of the user's --------------------------------------------------------------------------------------


def as_column(*, log_ratio, advantage, mask, clip_range):
    return (-advantage * log_ratio).unsqueeze(-1)


def as_one_number(*, log_ratio, advantage, mask, clip_range):
    return (-advantage * log_ratio)[mask].mean()


def detached(*, log_ratio, advantage, mask, clip_range):
    return -advantage * log_ratio.detach()


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
@pytest.mark.parametrize(
    ("policy_loss", "message"),
    [
        (as_column, r"shape \(.+, 1\), expected one number"),
        (as_one_number, r"shape \(\), expected"),
        (detached, "gradient"),
    ],
)
def test_a_wrong_policy_loss_is_refused(algorithm, policy_loss, message):
    """Broadcasting would hide the first, and a critic that learns would hide the last."""
    env = cartpole(4)
    sizes = {"num_steps": 16} if algorithm is PPO else {"num_episodes": 4, "group_size": 2}
    with pytest.raises(ValueError, match=message):
        algorithm(env, mlp_for(env), policy_loss=policy_loss, minibatch_size=32, **sizes).learn(64)


def test_a_policy_loss_is_called_at_every_step():
    calls = []

    def counted(*, log_ratio, advantage, mask, clip_range):
        calls.append(tuple(log_ratio.shape))
        return -advantage * log_ratio

    env = cartpole(4)
    history = PPO(env, mlp_for(env), policy_loss=counted, num_steps=16, minibatch_size=32, num_epochs=2).learn(128)
    assert len(calls) == sum(row["update/minibatches"] for row in history) > 0
    assert {len(shape) for shape in calls} == {1}, "in control, minibatches are of steps"
