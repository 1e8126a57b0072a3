"""Rollout workers on a real Ray cluster of this machine, one for the whole module."""

import copy
import dataclasses
import os
import signal
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch

from algos import A2C, PPO, Callback, LSTMPolicy, PPOConfig
from algos.collection import Collector
from algos.extras.ray_workers import Worker, join_cluster, rollout_workers
from algos.ranks import collectives
from algos.storage.weights import trained_weights
from algos.training.loop import iterate
from algos.training.metrics import EpisodeMeter
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.one_process_ray import OneProcessRay
from tests.helpers.programs import program_env, word_policy
from tests.helpers.ranks import weights
from tests.helpers.resumable_agents import AGENTS, mlp, normalized
from tests.helpers.warm_start import path_of_python
from textenv import TextVectorEnv
from textenv.extras.human import HumanReward

SLOTS = 4


def forking(runtime_env):
    """Ray's environment of workers that are forked from a process that has loaded torch, which takes the most time."""
    return (runtime_env or {}) | {"py_executable": path_of_python()}


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    os.environ.update(RAY_worker_niceness="0")  # by default 15: beside other tests, workers would wait
    before = set(Path.home().glob(".ray/*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_RUNTIME_ENV_HOOK", f"{__name__}.{forking.__name__}")
        join_cluster(ray, "4")
    yield ray
    ray.shutdown()
    assert set(Path.home().glob(".ray/*")) == before  # no token is left


def cartpole(slots):
    return gym.make_vec("CartPole-v1", num_envs=slots)


def text(slots):
    tokenizer = make_tokenizer(WORDS)

    def reward(completions, log):
        log("length", [len(text) for text in completions])
        return [{"good": float(text.count("good")), "few": -len(text) / 100} for text in completions]

    prompts = ["a b", "c", "d a b", "b b", "a d"]
    return TextVectorEnv(
        prompts=prompts, reward=reward, tokenizer=tokenizer, num_envs=slots, max_prompt_tokens=4, max_new_tokens=5,
        forbidden=[3],
    )  # fmt: skip


def text_agent(name):
    """An agent of `AGENTS` in that environment."""
    agent = AGENTS[name]()
    agent.env = text(SLOTS)
    return agent


def stale_agent():
    env = cartpole(SLOTS)
    return PPO(env, mlp(env), num_steps=16, minibatch_size=32, max_importance_weight=2.0)


def learn(agent, iterations, folder=None, resume=None):
    """Metrics of the iterations, without times."""
    history = agent.learn(
        10**4, run_dir=folder, checkpoint_every=None if folder is None else 1, resume=resume,
        on_iteration=lambda metrics: metrics["iteration"] >= iterations,
    )  # fmt: skip
    return [{name: x for name, x in metrics.items() if not name.startswith("time/")} for metrics in history]


class Shares(Collector):
    """What two workers do, in this process."""

    make_env = staticmethod(cartpole)

    def collect(self, **counts):
        if self.observation is None:
            self.observation = []
            for place in range(2):
                self.observation.append(Worker())
                policy = copy.deepcopy(self.policy.fork())
                self.observation[-1].start(
                    self.make_env, SLOTS // 2, policy, collectives.local_seed(self.seed, place), None
                )
        own = trained_weights(self.policy)
        return collectives.join_rows([each.collect(None, own, counts, (0, 0.0))[0] for each in self.observation])


@pytest.mark.long
def test_texts_of_workers_equal_those_of_one_process(cluster, tmp_path):
    """And a run goes on from there in one process."""
    one, several, after = (text_agent("grpo_text") for _ in range(3))
    with rollout_workers(several, text, 2):
        wanted, found = one.collect(), several.collect()
        mask = wanted["mask"]
        assert torch.equal(found["mask"], mask)
        for column in ("observation", "action", "reward", "terminated", "truncated", "group", "reward_parts"):
            assert torch.equal(found[column][mask], wanted[column][mask]), column  # the padding is another
        assert torch.allclose(found["log_prob"], wanted["log_prob"], atol=1e-5)
        allowed = [x.get_non_tensor("allowed_sets")[x["allowed"]][x["mask"]] for x in (found, wanted)]
        assert torch.equal(*allowed) and not allowed[0].all()
        assert several.env.metrics == one.env.metrics and one.env.metrics["reward/log/length"] > 0
        assert several.env.samples(range(8)) == one.env.samples(range(8))
        assert several.env.prompt_order == one.env.prompt_order
        learn(several, 2, tmp_path / "run")
    found, wanted = learn(after, 4, tmp_path / "run", tmp_path / "run"), learn(one, 4)
    for metrics, other in zip(found, wanted, strict=True):
        assert metrics == pytest.approx(other, rel=1e-3, abs=1e-4)


class Mortal(gym.vector.VectorWrapper):
    """CartPole, one process of which kills itself, once, in the middle of a rollout. Its state can be saved."""

    def __init__(self, slots, folder):
        super().__init__(cartpole(slots))
        self.folder, self.taken = folder, 0
        (folder / f"pid-{os.getpid()}").touch()

    def step(self, actions):
        self.taken += 1
        if self.taken == 24:
            try:
                (self.folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return super().step(actions)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def recurrent_agent():
    """Everything that a worker has to know: memory, running statistics, and a schedule."""
    env = cartpole(SLOTS)
    policy = LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=8, normalize_observations=True)
    return PPO(env, policy, num_steps=16, minibatch_size=2, normalize_rewards=True, final_learning_rate=0.0)


@pytest.mark.long
@pytest.mark.bits
def test_control_rollouts_equal_and_resume_to_the_bit(cluster, tmp_path, caplog):
    """Those of the same shares in one process, though one worker is killed in a rollout, and one between two."""

    def mortal(slots):
        return Mortal(slots, tmp_path)

    def kill(metrics):
        if metrics["iteration"] == 3:
            os.kill(int(max(tmp_path.glob("pid-*"), key=os.path.getmtime).name.removeprefix("pid-")), signal.SIGKILL)

    one, several, after = (recurrent_agent() for _ in range(3))
    one.collector = Shares(one.env, one.policy, seed=one.config.seed)
    wanted = learn(one, 4)
    with rollout_workers(several, mortal, 2):
        assert learn(several, 2, tmp_path / "run") == wanted[:2]
    assert (tmp_path / "killed").exists() and caplog.text.count("a new one collects its rollout again") == 1
    with rollout_workers(after, mortal, 2):
        after.learn(
            10**4, resume=tmp_path / "run", on_iteration=lambda metrics: kill(metrics) or metrics["iteration"] == 4
        )
    assert torch.equal(weights(after), weights(one)) and caplog.text.count("has ended") == len(caplog.records) == 2


@pytest.mark.slow  # in CI by tests/algos/extras/test_ray_workers_order.py, in this process
def test_asynchronous_weights_are_one_version_old_and_runs_repeat(cluster):
    """Larger staleness: test_ray_workers_order.py."""
    runs = []
    for _ in range(2):
        agent = stale_agent()
        columns = []
        with rollout_workers(agent, cartpole, 2, staleness=1):
            for _ in range(6):
                metrics = iterate(agent, (EpisodeMeter(), EpisodeMeter()), on_rollout=columns.append)
        assert [int(column["staleness"].max()) for column in columns] == [0, 1, 1, 1, 1, 1]
        assert 0 < metrics["rollout/staleness"] <= 1
        assert 60 < metrics["rollout/steps"] <= 64 and metrics["policy/importance_weight"] != 1
        runs.append(weights(agent))
    assert torch.equal(*runs)


class Keep(Callback):
    def __init__(self, seen):
        self.seen = seen

    def on_rollout(self, run, rollout):
        self.seen.append(rollout)


@pytest.mark.slow  # in CI by tests/algos/extras/test_ray_workers_order.py, in this process
def test_asynchronous_texts_are_collected_once_each(cluster, tmp_path):
    """Also after a resume."""

    def agent():
        found = text_agent("ppo_text")
        found.config = dataclasses.replace(found.config, max_importance_weight=2.0)
        return found

    seen = []
    for iterations in (2, 4):
        several = agent()
        with rollout_workers(several, text, 2, staleness=1):
            several.learn(
                10**4, run_dir=tmp_path, checkpoint_every=1, resume=tmp_path if seen else None, callbacks=[Keep(seen)],
                on_iteration=lambda metrics, last=iterations: metrics["iteration"] >= last,
            )  # fmt: skip
    one = agent().collect()
    assert torch.equal(seen[0]["action"][one["mask"]], one["action"][one["mask"]])
    assert [rollout["group"][:, 0].tolist() for rollout in seen] == [
        list(range(start, start + 8)) for start in (0, 8, 16, 24)
    ]


@pytest.mark.long
def test_an_error_in_a_worker_is_raised_here(cluster):
    agent = stale_agent()
    said = r"make_env\(4\) returned"
    with pytest.raises(ValueError, match=said), rollout_workers(agent, lambda slots: cartpole(1), 1):
        agent.collect()
    assert type(agent.collector) is Collector and agent.collect().shape == (4, 16)  # goes on here


def test_what_workers_cannot_do_is_refused_in_words(tmp_path):
    env = cartpole(SLOTS)
    cases = (
        (AGENTS["dqn"](), 2, 0, "the rate at which DQN explores"),
        (A2C(env, mlp(env)), 2, 1, "staleness 1 need"),
        (PPO(env, mlp(env)), 2, 1, "max_importance_weight"),
        (stale_agent(), 2, -1, "staleness -1 need"),
        (AGENTS["grpo_refills"](), 2, 0, "max_refills is 2: use none, or set it to 0"),
    )
    for agent, workers, staleness, said in cases:
        with pytest.raises(ValueError, match=said), rollout_workers(agent, cartpole, workers, staleness=staleness):
            pass
    env = program_env(lambda agent: float(len(agent("a"))), SLOTS)
    agent = PPO(env, word_policy(), PPOConfig(num_episodes=SLOTS, num_steps=None))
    with pytest.raises(ValueError, match="programs, of which the metrics are"), rollout_workers(agent, text, 2):
        pass
    agent = text_agent("ppo_text")
    agent.env.task.rewards.functions["asked"] = (HumanReward(tmp_path / "answers.jsonl"), 1.0)
    with (
        pytest.raises(ValueError, match="HumanReward asks at this terminal: use none"),
        rollout_workers(agent, text, 2),
    ):
        pass


def statistics(agent):
    """Running statistics of the reward in the learning process."""
    (reward,) = (function for function, _ in agent.env.task.rewards.functions.values())
    return reward.state_dict()


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.bits
def test_rewards_in_workers_keep_their_state(count, cluster, tmp_path, caplog, monkeypatch):
    """One worker has the statistics of one process; of several, each has its own.

    The workers of the run that is not interrupted are in this process.
    """
    whole, first, second, one = (AGENTS["ppo_normalized"]() for _ in range(4))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", OneProcessRay())
        with rollout_workers(whole, normalized, count):
            expected = learn(whole, 4)
    with rollout_workers(first, normalized, count):
        learn(first, 2, tmp_path)
    with rollout_workers(second, normalized, count):
        assert learn(second, 4, tmp_path, tmp_path) == expected
    assert torch.equal(weights(second), weights(whole)) and statistics(second) == statistics(whole)
    learn(one, 4)
    assert statistics(whole)["count"] == statistics(one)["count"] / count == 32 / count
    if count == 1:
        assert statistics(whole) == statistics(one)
        return
    fewer = AGENTS["ppo_normalized"]()
    with rollout_workers(fewer, normalized, 1):
        learn(fewer, 5, tmp_path, tmp_path)
    assert "rewards with a state go on from that of the first" in caplog.text
    assert statistics(fewer)["count"] == 16 + 8
