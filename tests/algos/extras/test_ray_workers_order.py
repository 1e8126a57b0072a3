"""Which prompts workers get and how old their weights are, by hand, with workers that run in this process in turn."""

import logging
import sys
import warnings

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import GRPO, PPO, PPOConfig
from algos.extras.ray_workers import Worker, rollout_workers
from algos.storage.weights import trained_weights
from algos.training.loop import iterate
from algos.training.metrics import EpisodeMeter
from tests.helpers.one_process_ray import OneProcessRay
from tests.helpers.ranks import weights
from tests.helpers.resumable_agents import mlp
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import text_vector_env

EIGHT = ["a", "b", "c", "d", "a b", "b c", "c d", "d a"]


def text(slots):
    return text_vector_env(num_envs=slots, prompts=EIGHT)


def text_agent(**fields):
    return GRPO(text(4), lm_policy(), num_steps=None, num_episodes=8, minibatch_size=8, group_size=2, **fields)


def learn(agent, iterations, **options):
    """Metrics of the iterations, without times."""
    history = agent.learn(10**4, on_iteration=lambda metrics: metrics["iteration"] >= iterations, **options)
    return [{name: x for name, x in metrics.items() if not name.startswith("time/")} for metrics in history]


def column(agent, rollout, name):
    """Prompts or completions of the episodes."""
    return [sample[name] for sample in agent.env.samples(range(len(rollout)))]


@pytest.mark.heavy
@pytest.mark.parametrize("first", [min, max])
@pytest.mark.parametrize("staleness", [0, 1])
def test_workers_get_each_prompt_once_in_its_order(first, staleness, monkeypatch):
    """Eight episodes are four groups of two: two rollouts go once through eight prompts, whoever is faster."""
    monkeypatch.setitem(sys.modules, "ray", OneProcessRay(first))
    several = text_agent(max_importance_weight=2.0)
    one = text_agent(max_importance_weight=2.0)
    asked, answers, groups = [], [], []
    with rollout_workers(several, text, 2, staleness=staleness):
        for _ in range(4):
            rollout = several.collect()
            asked.append(column(several, rollout, "prompt"))
            answers.append(column(several, rollout, "completion"))
            groups.append(rollout["group"][:, 0].tolist())
    for number in range(4):
        alone = one.collect()
        assert asked[number] == column(one, alone, "prompt")
        assert answers[number] == column(one, alone, "completion"), "each episode has a seed of its own"
    for rollout in asked:
        assert rollout[0::2] == rollout[1::2], "the episodes of a group share a prompt"
    once = [rollout[0::2] for rollout in asked]
    assert sorted(once[0] + once[1]) == sorted(once[2] + once[3]) == sorted(EIGHT)
    assert groups == [[0, 0, 1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6, 7, 7], [8, 8, 9, 9, 10, 10, 11, 11],
                      [12, 12, 13, 13, 14, 14, 15, 15]]  # fmt: skip


def control(slots):
    return gym.make_vec("CartPole-v1", num_envs=slots)


def set_version(policy, version):
    """The policy prefers action 0 to action 1 by as many nats as this version of its weights is old."""
    last = policy.actor[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([float(version), 0.0]))


def version_of(rollout):
    """Version of the weights by which each row acted, from the log-probabilities of its actions."""
    log_prob = rollout["log_prob"].double()
    preferred = torch.where(rollout["action"] == 0, log_prob, torch.log1p(-log_prob.exp()))
    odds = preferred - torch.log1p(-preferred.exp())
    masked = torch.where(rollout["mask"], odds, torch.nan)
    return masked.nanmean(dim=1).round().long()


BY_HAND = {
    # Both are waited for; nobody goes ahead.
    0: [[0, 0], [1, 1], [2, 2], [3, 3]],
    # Worker 0 has played rollouts 0 and 1 before worker 1 has played rollout 0; then it waits. Worker 1 begins its next
    # rollout when it has finished one, still by the version before.
    1: [[0, 0], [0, 0], [1, 1], [2, 2]],
    # Worker 0 has played rollouts 0, 1 and 2 by version 0 before worker 1 has played rollout 0, and stays two ahead.
    2: [[0, 0], [0, 0], [0, 1], [1, 2]],
}
"""By staleness: version of the weights of each of two workers in four rollouts, if worker 0 always finishes first."""


@pytest.mark.parametrize("staleness", BY_HAND)
def test_workers_act_with_weights_of_their_staleness(staleness, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", OneProcessRay(min))
    env = control(4)
    agent = PPO(env, mlp(env), PPOConfig(num_steps=8, minibatch_size=32, max_importance_weight=2.0))
    with rollout_workers(agent, control, 2, staleness=staleness):
        for number, versions in enumerate(BY_HAND[staleness]):
            set_version(agent.policy, number)
            rollout = agent.collect()
            expected = [version for version in versions for _ in range(2)]  # two slots each
            assert version_of(rollout).tolist() == expected
            if staleness:
                stale = rollout["staleness"]
                assert (stale == stale[:, :1]).all()
                assert stale[:, 0].tolist() == [number - version for version in expected]
            else:
                assert "staleness" not in rollout.keys()


def test_ratios_may_be_taken_to_the_older_weights(monkeypatch):
    """The gap to them is logged before the first step, and the weights move."""
    monkeypatch.setitem(sys.modules, "ray", OneProcessRay())
    env = control(4)
    agent = PPO(env, mlp(env), num_steps=16, minibatch_size=32, ratio_tolerance=1e9, learning_rate=1e-2)
    before = weights(agent).clone()
    with rollout_workers(agent, control, 2, staleness=1):
        for _ in range(4):
            metrics = iterate(agent, (EpisodeMeter(), EpisodeMeter()))
    assert metrics["rollout/staleness"] == 1 and metrics["policy/sampler_gap"] > 1e-4
    assert "policy/importance_weight" not in metrics and not torch.equal(weights(agent), before)


@pytest.mark.parametrize(("g", "goes_on"), [(9.0, True), (3.0, False)])
def test_a_worker_goes_on_only_with_the_same_arguments_of_its_environment(g, goes_on, caplog):
    def worker_of(g, state):
        env = gym.make_vec("Pendulum-v1", num_envs=2, g=g)
        worker = Worker()
        worker.start(lambda slots: env, 2, mlp(env), 1, state)
        return worker

    # After seven steps, an episode of 200 goes on or a new one begins
    job = {"num_steps": 7, "num_episodes": None}
    first = worker_of(9.0, None)
    own = trained_weights(first.policy)
    _, state, _, _ = first.collect(None, own, dict(job), (0, 0.0))
    with caplog.at_level(logging.WARNING):
        second = worker_of(g, state)
    assert ('"g": 9.0' in caplog.text and "its episodes begin anew" in caplog.text) == (not goes_on)
    second.collect(None, own, dict(job), (0, 0.0))
    played = [env.get_wrapper_attr("_elapsed_steps") for env in second.env.unwrapped.envs]
    assert played == [14 if goes_on else 7] * 2


def unsaved(slots):
    """CartPole in an environment whose state cannot be saved."""
    return SyncVectorEnv([lambda: Unsaved(gym.make("CartPole-v1"))] * slots, autoreset_mode=AutoresetMode.SAME_STEP)


class Unsaved(gym.Wrapper):
    pass


@pytest.mark.heavy
def test_a_lost_rollout_counts_once_and_unsaved_episodes_begin_anew(monkeypatch, caplog):
    """So the rollout and what follows it are others. With states: test_ray_workers.py."""
    histories, agents = [], []
    for lost in (None, 4):  # the first of the third rollout's two parts
        monkeypatch.setitem(sys.modules, "ray", OneProcessRay(lost=lost))
        env = unsaved(4)
        agents.append(PPO(env, mlp(env), num_steps=16, minibatch_size=32))
        with rollout_workers(agents[-1], unsaved, 2):
            histories.append(learn(agents[-1], 4))
        assert caplog.text.count("a new one collects its rollout again") == (lost is not None)
    wanted, found = histories
    assert [row["steps"] for row in found] == [64, 128, 192, 256]
    assert found[:2] == wanted[:2] and not torch.equal(*map(weights, agents))


@pytest.mark.heavy
def test_another_number_of_workers_begins_anew(monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", OneProcessRay())
    for workers, iterations in ((2, 2), (1, 3)):
        assert not caplog.records
        env = control(4)
        agent = PPO(env, mlp(env), num_steps=16, minibatch_size=32)
        with rollout_workers(agent, control, workers):
            resume = tmp_path if iterations == 3 else None
            assert len(learn(agent, iterations, run_dir=tmp_path, checkpoint_every=1, resume=resume)) == iterations
    assert "the run had 2 workers, now there are 1" in caplog.text


class Speaks:
    """Says what the code of a reward may say, and counts without saving its count."""

    calls = 0

    def __call__(self, completions):
        self.calls += 1
        logging.getLogger("rewards").warning("a key is missing")
        warnings.warn("an old argument", stacklevel=1)
        print("scored")
        return [0.0] * len(completions)


@pytest.mark.heavy
@pytest.mark.filterwarnings("default:an old argument")
def test_words_and_unsaved_states_of_workers_are_told(monkeypatch, caplog, capsys):
    """In the worker's process nobody hears them."""
    monkeypatch.setitem(sys.modules, "ray", OneProcessRay())

    def speaking(slots):
        return text_vector_env(num_envs=slots, prompts=EIGHT, reward=Speaks())

    agent = GRPO(speaking(4), lm_policy(), num_steps=None, num_episodes=8, minibatch_size=8, group_size=2)
    with rollout_workers(agent, speaking, 2):
        agent.collect()
    assert capsys.readouterr().out.count("scored") == 2
    said = [record.getMessage() for record in caplog.records]
    unsaved = "the training changes Speaks.calls, which no checkpoint has, nor an evaluation"
    for words in ("a key is missing (", unsaved):
        assert len([text for text in said if words in text and "(worker " in text]) == 1, words
    assert any("an old argument" in text and "(worker " in text for text in said)
