"""Environments and rewards in processes: what fails is replaced and masked, and no process outlives its parent."""

import gc
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import PPO, Collector, MLPPolicy, PPOConfig, collect, evaluate
from algos.advantages import gae
from algos.cli import main
from algos.envs.env_worker import Worker
from algos.envs.subprocess_env import EnvironmentFailure, SubprocessVectorEnv
from algos.make import make_vector_environment
from algos.policies.policy import Policy, Step, step_values
from algos.training.metrics import EpisodeMeter

# Processes get the environments themselves, and import neither this file nor PyTorch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def counting(trouble=None, *, at=3, length=5, once=None):
    """Makes an environment that observes how many steps it took, and goes wrong at one of them.

    Args:
        trouble: called with the environment and the five that a step returns; may return others.
        at: the step at which it is.
        length: of an episode.
        once: file that is made at the trouble, so that it happens once; without it, each time.
    """

    class Counting(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def observe(self):
            return np.array([self.count], dtype=np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count = 0
            return self.observe(), {"seeded": -1 if seed is None else seed}

        def step(self, action):
            self.count += 1
            returned = self.observe(), float(self.count), self.count >= length, False, {}
            if trouble is not None and self.count == at and not (once is not None and os.path.exists(once)):
                if once is not None:
                    open(once, "w").close()
                returned = trouble(self, returned)
            return returned

    return Counting


def exits(env, returned):
    os._exit(3)


def raises(env, returned):
    raise RuntimeError("boom")


def hangs(env, returned):
    time.sleep(1000)


def hangs_with_the_interpreter(env, returned):
    """A match that takes for ever and lets no thread run."""
    import re

    re.match("(a+)+$", "a" * 60 + "b")


def kills_itself(env, returned):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_child(env, returned):
    import subprocess

    subprocess.Popen(["sleep", "1000"], env=os.environ)
    os._exit(3)


def replaced(place, value):
    return lambda env, returned: (*returned[:place], value, *returned[place + 1 :])


TROUBLES = {
    "dies": (exits, "ended with status 3"),
    "killed": (kills_itself, "ended by SIGKILL"),
    "raises": (raises, "RuntimeError: boom"),
    "leaves early": (lambda env, returned: sys.exit(4), "SystemExit: 4"),
    "wrong shape": (replaced(0, np.zeros(2, dtype=np.float32)), r"shape \(2,\), expected \(1,\)"),
    "not sendable": (lambda env, returned: (*returned[:4], {"f": lambda: 0}), "cannot be sent"),
}
WRONG = {
    "not a number": (replaced(0, np.array([np.nan], dtype=np.float32)), "not finite"),
    "infinite reward": (replaced(1, np.inf), "reward is inf"),
    "no reward": (replaced(1, "much"), "reward is 'much'"),
    "no bool": (replaced(2, 1), "terminated is 1"),
    "no info": (replaced(4, None), "info is None"),
    "no step": (lambda env, returned: returned[:4], "expected a tuple of 5"),
}
"""What a worker finds wrong in a step, which its process then reports as it does a wrong shape."""


def steps(env, count):
    """Step with actions of 0; returns what each step returned."""
    return [env.step(np.zeros(env.num_envs, dtype=np.int64)) for _ in range(count)]


def alive(group=None):
    """Processes that run, by id: this process's children since the test began, or those of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:  # it has just ended
            continue
        state, parent, _, session = rest.split()[:4]
        if state != "Z" and (int(parent) == os.getpid() if group is None else int(session) == group):
            found.append(int(stat.parent.name))
    return [one for one in found if one not in BEFORE]


BEFORE = set()
"""Children that other tests have left, such as multiprocessing's own tracker of resources."""


def ends(ids, within=20.0):
    """Whether all these processes end within that many seconds."""
    end = time.monotonic() + within
    while any(Path(f"/proc/{one}").exists() and "\nState:\tZ" not in status(one) for one in ids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def status(one):
    try:
        return Path(f"/proc/{one}/status").read_text()
    except OSError:
        return "\nState:\tZ"


@pytest.fixture(scope="module", autouse=True)
def what_lived_before_is_no_garbage():
    """Each test collects garbage, which takes a second if it looks at all that other tests and torch have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_child_is_left():
    BEFORE.clear()
    BEFORE.update(alive())
    yield
    gc.collect()
    assert ends(alive())


# As Gymnasium's own.


@pytest.mark.heavy
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_it_steps_as_gymnasium_does(env_id):
    make = partial(gymnasium.make, env_id, max_episode_steps=12)
    with closing(SubprocessVectorEnv([make] * 2)) as ours, closing(
        SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    ) as theirs:  # fmt: skip
        assert ours.action_space == theirs.action_space and ours.observation_space == theirs.observation_space
        assert ours.metadata == theirs.metadata
        ours.action_space.seed(0)
        for seed in (3, [8, 5]):
            assert_equal(ours.reset(seed=seed), theirs.reset(seed=seed))
            for _ in range(30):
                action = ours.action_space.sample()
                assert_equal(ours.step(action), theirs.step(action))


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    assert ours[-1].keys() == theirs[-1].keys()
    for key, value in theirs[-1].items():
        for one, other in zip(ours[-1][key], value, strict=True):  # slots, or the keys of a final info
            np.testing.assert_array_equal(one, other)


@pytest.mark.heavy
def test_dict_observations_arrive_flat_final_ones_too():
    env = make_vector_environment("Blackjack-v1", 2, process_timeout=30)
    sync = make_vector_environment("Blackjack-v1", 2)
    with closing(env):
        assert_equal(env.reset(seed=1), sync.reset(seed=1))
        for _ in range(5):
            ours, theirs = (one.step(np.ones(2, dtype=np.int64)) for one in (env, sync))
            assert_equal(ours, theirs)
        assert env.spec.id == "Blackjack-v1"


@pytest.mark.heavy
def test_a_worker_imports_no_torch_nor_callers_script():
    def loaded(env, returned):
        import sys

        heavy = [name for name in ("torch", "transformers", "test_subprocess_env", "pytest") if name in sys.modules]
        return *returned[:4], {"heavy": ",".join(heavy)}

    with closing(SubprocessVectorEnv([counting(loaded, at=1)])) as env:
        env.reset(seed=0)
        assert steps(env, 1)[0][4]["heavy"][0] == ""


@pytest.mark.heavy
def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="expected a timeout above 0"):
        SubprocessVectorEnv([counting()], timeout=0)
    with pytest.raises(ValueError, match="cannot be made in its own process: .*NameNotFound"):
        SubprocessVectorEnv([partial(gymnasium.make, "Nothing-v0")])
    with pytest.raises(ValueError, match="expected None for a text environment"):
        make_vector_environment("textenv/Copy-v0", 2, process_timeout=60)
    with closing(SubprocessVectorEnv([counting()])) as env:
        with pytest.raises(ValueError, match="expected one for each of 1"):
            env.reset(seed=[1, 2])
        with pytest.raises(ValueError, match="each environment resets itself"):
            env.reset(options={"reset_mask": np.ones(1, dtype=bool)})
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        env.reset()


# What fails is reported, replaced and left out.


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(TROUBLES))
def test_after_a_failed_step_the_other_slots_go_on(name, tmp_path, caplog):
    trouble, words = TROUBLES[name]
    broken = counting(trouble, at=3, once=str(tmp_path / "tripped"))
    with closing(SubprocessVectorEnv([counting(), broken])) as env:
        env.reset(seed=[10, 20])
        steps(env, 2)
        assert not caplog.records
        observation, reward, terminated, truncated, info = steps(env, 1)[0]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        said = record.getMessage()
        assert "environment 1 failed: " in said and "seed 20, episode 1, after 2 steps" in said
        assert "restart 1 of 10, seed " in said
        assert re.search(words, said), said
        # The other has taken its third step, this one starts anew; its last good observation was its second.
        assert observation.tolist() == [[3.0], [0.0]] and reward.tolist() == [3.0, 0.0]
        assert info["worker_failed"].tolist() == [False, True] and not terminated.any()
        assert truncated.tolist() == [False, True] and info["final_obs"][1].tolist() == [2.0]
        assert f"seed {info['seeded'][1]}," in said and info["seeded"][1] not in (20, -1)
        observation, _, _, _, info = steps(env, 1)[0]
        assert observation.tolist() == [[4.0], [1.0]] and "worker_failed" not in info


@pytest.mark.heavy
def test_a_step_that_is_none_is_an_error():
    for trouble, words in WRONG.values():
        worker = Worker()
        worker.make(counting(trouble))
        worker.reset(0, None)
        worker.step(0)
        worker.step(0)
        with pytest.raises(ValueError, match=words):
            worker.step(0)


@pytest.mark.heavy
def test_a_reset_without_a_seed_keeps_the_last_seed(tmp_path, caplog):
    broken = counting(TROUBLES[min(TROUBLES)][0], at=3, once=str(tmp_path / "tripped"))
    with closing(SubprocessVectorEnv([broken])) as env:
        env.reset(seed=5)
        env.reset()
        info = steps(env, 3)[-1][-1]
        assert "seed 5, episode 2, after 2 steps" in caplog.text and info["seeded"][0] not in (5, -1)


@pytest.mark.heavy
def test_a_worker_is_waited_for_until_the_time_limit(tmp_path, caplog):
    broken = counting(hangs, once=str(tmp_path / "tripped"))
    with closing(SubprocessVectorEnv([counting(), broken])) as env:
        env.reset(seed=0)
        env.processes[1].timeout = 0.5
        assert steps(env, 3)[2][4]["worker_failed"].tolist() == [False, True]
        assert "no answer within 0.5 s" in caplog.text


@pytest.mark.heavy
def test_a_process_that_was_stopped_is_replaced(caplog):
    with closing(SubprocessVectorEnv([counting()])) as env:
        env.reset(seed=0)
        env.processes[0].timeout = 0.5
        (worker,) = alive()
        os.kill(worker, signal.SIGSTOP)
        assert steps(env, 1)[0][4]["worker_failed"].tolist() == [True]
        assert alive() != [worker] and len(alive()) == 1


@pytest.mark.heavy
def test_too_many_failures_end_it_in_one_sentence(caplog):
    env = SubprocessVectorEnv([counting(), counting(raises, at=2)], max_restarts=2)
    env.reset(seed=5)
    words = (
        r"environment 1 failed 3 times, max_restarts is 2, .*: RuntimeError: boom \(3 times\), the last time with seed"
    )
    with pytest.raises(EnvironmentFailure, match=words) as caught:
        steps(env, 10)
    assert "\n" not in str(caught.value) and "boom (seed 6, episode 1, after 1 steps)" in caplog.messages[0]
    assert not alive()


@pytest.mark.heavy
def test_a_replacement_starts_in_the_same_folder(tmp_path, monkeypatch):
    def where(env, returned):
        return *returned[:4], {"folder": os.getcwd()}

    home = os.getcwd()
    (tmp_path / "elsewhere").mkdir()
    with closing(SubprocessVectorEnv([counting(where, at=2)])) as env:
        env.reset(seed=0)
        monkeypatch.chdir(tmp_path / "elsewhere")
        (worker,) = alive()
        os.kill(worker, signal.SIGKILL)
        assert [list(info.get("folder", [])) for *_, info in steps(env, 3)] == [[], [], [home]]


def forks(env, returned):
    os.fork()
    return returned


@pytest.mark.heavy
def test_a_forked_process_does_not_answer_too(tmp_path):
    once = str(tmp_path / "forked")
    with closing(SubprocessVectorEnv([counting(forks, at=2, once=once)], timeout=30)) as env:
        env.reset(seed=0)
        assert [float(reward[0]) for _, reward, *_ in steps(env, 4)] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.heavy
def test_an_error_text_cannot_control_the_terminal(tmp_path, caplog, capfd):
    def hostile(env, returned):
        raise RuntimeError("\x1b[2Jgone\x1b]0;title\x07")

    with closing(SubprocessVectorEnv([counting(hostile, at=2, once=str(tmp_path / "raised"))])) as env:
        env.reset(seed=0)
        steps(env, 3)
    for shown in (capfd.readouterr().err, caplog.text):
        assert r"\x1b[2Jgone" in shown and not {"\x1b", "\x07"} & {*shown}


@pytest.mark.heavy
def test_a_failed_reset_is_retried_then_reseeded(tmp_path, caplog):
    def stubborn(bad, once=None):
        class Stubborn(counting()):
            def reset(self, *, seed=None, options=None):
                if seed == bad and not (once is not None and os.path.exists(once)):
                    if once is not None:
                        open(once, "w").close()
                    raise RuntimeError("no such level")
                return super().reset(seed=seed)

        return Stubborn

    with closing(SubprocessVectorEnv([stubborn(7, str(tmp_path / "tripped")), stubborn(8)])) as env:
        _, info = env.reset(seed=7)
        assert info["seeded"][0] == 7 and info["seeded"][1] not in (7, 8, -1)
        assert len(caplog.records) == 3 and "after 0 steps" in caplog.text


@pytest.mark.heavy
def test_an_interrupted_answer_is_not_read_later():
    with closing(SubprocessVectorEnv([counting()])) as env:
        env.reset(seed=0)
        env.processes[0].ask("step", 0)  # Ctrl-C: nobody reads this answer
        assert env.reset(seed=0)[0].tolist() == [[0.0]]
        assert steps(env, 2)[1][0].tolist() == [[2.0]]


# What is learnt from.


class Valued(torch.nn.Module, Policy):
    """A policy whose action is 0 and whose value is the observation."""

    def act(self, observation, **options):
        return Step(action=torch.zeros(len(observation), dtype=torch.int64), log_prob=torch.zeros(len(observation)))

    def values(self, rollout):
        return step_values(lambda observation: observation.squeeze(-1), rollout)


@pytest.mark.heavy
def test_nothing_flows_over_the_gap(tmp_path, caplog):
    """Slot 1 fails at its third step; hand-worked with V = 10 × steps so far, gamma .5 and lambda .5."""
    broken = counting(raises, at=3, once=str(tmp_path / "tripped"))
    policy = Valued()
    with closing(SubprocessVectorEnv([counting(), broken])) as env:
        collector = Collector(env, policy, seed=0)
        rollout = collector.collect(num_steps=5)
        following = collector.collect(num_steps=3)
    assert rollout["observation"][1, :, 0].tolist() == [0, 1, 2, 0, 1]
    assert rollout["mask"][1].tolist() == [True, True, False, True, True] and rollout["mask"][0].all()
    assert rollout["is_init"][1].tolist() == [True, False, True, True, False]
    assert rollout["truncated"][1].tolist() == [False, False, True, False, False]
    value, next_value = (10 * x for x in policy.values(rollout))
    advantage, _ = gae(
        reward=rollout["reward"], value=value, next_value=next_value, terminated=rollout["terminated"],
        truncated=rollout["truncated"], mask=rollout["mask"], gamma=0.5, gae_lambda=0.5,
    )  # fmt: skip
    # Rewards 1, 2 | 1, 2; values 0, 10 | 0, 10; what follows is worth 10, 20 | 10, 20 whatever comes after the gap.
    # delta = 1 + 5 - 0 = 6 and 2 + 10 - 10 = 2, in both parts; A = 6 + .25 · 2 = 6.5 and 2.
    assert advantage[1].tolist() == [6.5, 2.0, 0.0, 6.5, 2.0]
    # Slot 0 ends at its fifth step; in slot 1 the episode that was begun anew does, after 1 + 2 + 3 + 4 + 5.
    meter = EpisodeMeter()
    assert meter.finished(rollout) == ([15.0], [5])
    assert meter.finished(following) == ([15.0], [5])


@pytest.mark.heavy
def test_a_gap_at_the_edge_of_rollouts(tmp_path, caplog):
    """The failing step is the last of a rollout, then the first of one."""
    for steps_each in (3, 2):
        broken = counting(raises, at=3, once=str(tmp_path / f"tripped{steps_each}"))
        meter = EpisodeMeter()
        with closing(SubprocessVectorEnv([broken])) as env:
            collector = Collector(env, Valued(), seed=0)
            finished = [meter.finished(collector.collect(num_steps=steps_each)) for _ in range(4)]
        assert [x for x in finished if x[0]] == [([15.0], [5])]


@pytest.mark.heavy
def test_failed_episodes_are_replayed_groups_given_up(tmp_path, caplog):
    broken = counting(raises, at=3, once=str(tmp_path / "tripped"))
    with closing(SubprocessVectorEnv([counting(), broken])) as env:
        policy = MLPPolicy(env.single_observation_space, env.single_action_space)
        returns, rollout = evaluate(env, policy, num_episodes=4)
        assert returns == [15.0] * 4 and rollout["mask"].sum() == 20
        (tmp_path / "tripped").unlink()
        groups = collect(env, policy, num_episodes=4, group_size=2, seed=0)
    assert groups["mask"].sum(1).tolist() == [5, 0, 5, 5] and groups["group"][:, 0].tolist() == [0, 0, 1, 1]
    assert EpisodeMeter().finished(groups)[0] == [15.0] * 3


@pytest.mark.heavy
def test_training_ends_by_a_clear_error_and_saves(tmp_path, caplog):
    env = SubprocessVectorEnv([counting(), counting(raises, at=4)], max_restarts=6)
    agent = PPO(
        env,
        MLPPolicy(env.single_observation_space, env.single_action_space),
        PPOConfig(num_steps=8, minibatch_size=8, num_epochs=1, normalize_rewards=True),
    )
    history = agent.learn(28)
    assert [row["rollout/steps"] for row in history] == [14, 14]
    with pytest.raises(RuntimeError, match="failed 7 times"):
        agent.learn(1000, run_dir=tmp_path)
    assert (tmp_path / "config.json").is_file() and not alive()


@pytest.mark.heavy
def test_the_command_line_trains_in_processes(tmp_path, capfd):
    arguments = ["train", "CartPole-v1", "--process-timeout", "60", "--num-envs", "2", "--total-steps", "64"]
    more = ["--config.num-steps", "16", "--config.minibatch-size", "16", "--num-episodes", "2", "--json"]
    main([*arguments, *more, "--run-dir", str(tmp_path)])
    assert '"episodes": 2' in capfd.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "textenv/Copy-v0", "--process-timeout", "60", "--run-dir", str(tmp_path)])


# No process stays.


@pytest.mark.heavy
def test_all_processes_end_with_the_environment():
    for end in (lambda env: env.close(), lambda env: None):
        env = SubprocessVectorEnv([counting()] * 2)
        workers = alive()
        assert len(workers) == 2
        end(env)
        del env
        gc.collect()
        assert not alive() and ends(workers)


@pytest.mark.heavy
def test_what_a_process_has_started_ends_with_it(tmp_path, caplog):
    broken = counting(leaves_a_child, once=str(tmp_path / "tripped"))
    with closing(SubprocessVectorEnv([broken])) as env:
        env.reset(seed=0)
        (session,) = alive()
        steps(env, 3)
        assert ends(alive(session))


PROGRAM = """
import gymnasium, numpy as np, os, signal, sys, threading, time
from pathlib import Path
from algos.envs.subprocess_env import SubprocessVectorEnv
BEFORE = set()
{functions}
env = SubprocessVectorEnv([counting({trouble}, at=2)] * 2, timeout={timeout})
env.reset(seed=0)
print(*alive(), flush=True)
{then}
"""
FUNCTIONS = "\n".join(inspect.getsource(x) for x in (counting, hangs, hangs_with_the_interpreter, steps, alive))
"""The program imports no PyTorch either."""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("trouble", "timeout", "then", "kill"),
    [
        ("None", 60, "steps(env, 1); time.sleep(1000)", True),
        ("hangs", 60, "steps(env, 5)", True),
        # No thread runs there: the watchdog ends it. The limit is also that of making the environment
        ("hangs_with_the_interpreter", 6, "threading.Thread(target=steps, args=(env, 5)).start(); time.sleep(1); "
         "os.kill(os.getpid(), 9)", False),
        ("None", 60, "raise SystemExit('an exception')", False),
    ],
    ids=["between steps", "in a step", "in a step without end", "an exception"],
)  # fmt: skip
def test_no_process_outlives_its_parent(trouble, timeout, then, kill):
    program = PROGRAM.format(functions=FUNCTIONS, trouble=trouble, timeout=timeout, then=then)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        if kill:
            time.sleep(0.2)
            assert all(Path(f"/proc/{worker}").exists() for worker in workers)
            parent.kill()
        parent.wait()
    assert ends(workers)


REWARDS = """
import multiprocessing, sys
from tests.helpers import slow_rewards
from textenv.rewards.composite import Rewards
if __name__ == "__main__":
    reward = Rewards(slow_rewards.{name}, workers=2, processes=True, timeout={timeout})
    earned = reward(prompts=["", ""], completions=["a", "b"]).score
    workers = [process.pid for process in multiprocessing.active_children()]
    print(*workers, *[int(pid) for pid in earned if pid > 1], flush=True)
    reward(prompts=["", ""], completions=["{answer}", "{answer}"])
    sys.stdin.read()
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "answer", "timeout"),
    [
        ("hangs", "a", None),
        ("hangs", "hang", None),
        ("hangs_with_the_interpreter", "hang", 1),
        ("starts_a_process", "a", None),
    ],
    ids=["between calls", "in a call", "in a call without end", "processes of its own"],
)
def test_no_process_of_a_reward_outlives_its_parent(name, answer, timeout):
    program = REWARDS.format(name=name, answer=answer, timeout=timeout)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == (4 if name == "starts_a_process" else 2)
        time.sleep(0.5)
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        parent.kill()
    assert ends(workers)


@pytest.mark.heavy
@pytest.mark.parametrize("process_timeout", [None, 60.0], ids=["here", "processes"])
def test_an_own_environment_is_named_with_its_module(tmp_path, monkeypatch, process_timeout):
    (tmp_path / "own_module.py").write_text(
        "import gymnasium\ngymnasium.register('Own-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with closing(make_vector_environment("own_module:Own-v0", 2, process_timeout=process_timeout)) as env:
            assert env.reset(seed=0)[0].shape == (2, 4)
    finally:
        gymnasium.registry.pop("Own-v0", None)
        sys.modules.pop("own_module", None)
    with pytest.raises(ValueError, match=r"no_module could not be imported: .*PYTHONPATH"):
        make_vector_environment("no_module:Own-v0", 2)
