"""Callbacks: their order, what they see, and that evaluation while training is the same as afterwards."""

import json

import numpy as np
import pytest
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import algos
from algos import PPO, Callback, EvaluateEvery, PPOConfig, StopAtKL
from algos.evaluation import summarise
from algos.training.callbacks import RecordSamples
from tests.helpers.errors import refused
from tests.helpers.resumable_agents import ppo_cartpole, ppo_sync, ppo_text, text
from tests.helpers.small_agents import cartpole
from tests.helpers.text_envs import BAD, EOS, GOOD, good, make_env, play


def weights_of(agent):
    return [p.detach().clone() for p in agent.policy.parameters()]


def without_times(rows):
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "eval/"))} for row in rows]


class Noted(Callback):
    """Notes what it sees, and saves how often it was called."""

    def __init__(self):
        self.seen, self.count = [], 0

    def on_start(self, run):
        self.first = weights_of(run.agent)
        self.seen.append("start")

    def on_rollout(self, run, rollout):
        if len(run.history) == 0:
            assert all(map(torch.equal, self.first, weights_of(run.agent))), "the update comes after on_rollout"
            assert rollout["kl"].abs().max() < 1e-5, "the KL is in the rollout, and 0 before any update"
        self.seen.append("rollout")

    def on_iteration(self, run, metrics):
        self.count += 1
        metrics["noted/count"] = self.count
        self.seen.append("iteration")
        return self.count == 3

    def on_end(self, run):
        self.seen.append("end")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.heavy
def test_callbacks_run_in_order_and_can_end_training(tmp_path):
    """And they add metrics."""
    noted = Noted()
    history = ppo_text().learn(10_000, run_dir=tmp_path, callbacks=[noted], checkpoint_every=10_000)
    assert noted.seen == ["start", *["rollout", "iteration"] * 3, "end"]
    assert [row["noted/count"] for row in history] == [1, 2, 3]
    again = Noted()
    ppo_text().learn(10_000, resume=tmp_path, callbacks=[EvaluateEvery(make_env(), 10**6), again], run_dir=tmp_path,
                     on_iteration=lambda metrics: True, checkpoint_every=10_000)  # fmt: skip
    assert again.count == 4, "a callback's state is found by its class, whatever stands beside it"


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["control", "text"])
def test_evaluating_while_training_changes_nothing(case, tmp_path):
    """And its result is that of an evaluation afterwards."""
    make, env, total = (ppo_cartpole, cartpole(8), 1024) if case == "control" else (ppo_text, make_env(), 100)
    plain, watched = make(), make()
    expected = plain.learn(total)
    evaluation = EvaluateEvery(env, every=total // 3, num_episodes=7, seed=3)
    found = watched.learn(total, run_dir=tmp_path, callbacks=[evaluation])
    assert without_times(found) == without_times(expected)
    assert all(map(torch.equal, weights_of(plain), weights_of(watched)))
    scores = [row["eval/mean_return"] for row in found if "eval/mean_return" in row]
    assert 3 <= len(scores) <= 4 and "eval/mean_return" in found[-1]
    after = summarise(env, plain.policy, penalty=plain.penalty if case == "text" else None, num_episodes=7, seed=3)
    assert {f"eval/{name}": x for name, x in after.items() if name != "seconds"}.items() <= found[-1].items()
    best = algos.evaluate(env, algos.load(tmp_path / "best"), num_episodes=7, seed=3).mean_return
    assert best == pytest.approx(max(scores)), "the best agent is kept, not the last"


@pytest.mark.heavy
def test_the_best_agent_is_not_the_last_one(tmp_path):
    class Spoil(Callback):
        """Makes the policy worse after the first evaluation."""

        def on_iteration(self, run, metrics):
            if len(run.history) == 1:
                with torch.no_grad():
                    for p in run.agent.policy.parameters():
                        p.zero_()
                    run.agent.policy.actor[-1].bias[0] = 100  # always to the left: the pole falls in 10 steps

    env = cartpole(4)
    rows = ppo_cartpole().learn(1024, run_dir=tmp_path, callbacks=[EvaluateEvery(env, 1, num_episodes=5), Spoil()])
    scores = [row["eval/mean_return"] for row in rows]
    found, last = (
        algos.evaluate(env, algos.load(f), num_episodes=5).mean_return for f in (tmp_path / "best", tmp_path)
    )
    assert max(scores) == found > last == scores[-1]


def test_training_stops_at_a_score_or_without_progress():
    env = cartpole(4)
    rows = ppo_cartpole().learn(10**6, callbacks=[EvaluateEvery(env, every=200, num_episodes=5, stop_at=9.0)])
    assert [("eval/mean_return" in row) for row in rows].count(True) == 1 and rows[-1]["eval/mean_return"] >= 9

    class Worse(EvaluateEvery):
        """Pretends that the first evaluation was the best there is."""

        def on_iteration(self, run, metrics):
            ends = super().on_iteration(run, metrics)
            self.best = 1e9
            return ends

    rows = ppo_cartpole().learn(10**6, callbacks=[Worse(env, every=1, num_episodes=2, patience=3)])
    assert len(rows) == 4, "the first one is the best, and three come after it"


@pytest.mark.heavy
def test_a_resumed_run_goes_on_counting_evaluations(tmp_path):
    def evaluation():
        return EvaluateEvery(cartpole(4), every=200, num_episodes=3)

    whole = ppo_cartpole().learn(1024, run_dir=tmp_path / "a", callbacks=[evaluation()], checkpoint_every=1)
    stop = {"on_iteration": lambda metrics: metrics["iteration"] == 5}
    for options in (stop, {"resume": tmp_path / "b"}):
        last = evaluation()
        rows = ppo_cartpole().learn(1024, run_dir=tmp_path / "b", callbacks=[last], checkpoint_every=1, **options)
    times = {name for row in whole for name in row if name.startswith("time/")}
    a, b = ([{k: x for k, x in row.items() if k not in times} for row in rows] for rows in (whole, rows))
    assert a == b and last.best == max(row.get("eval/mean_return", 0) for row in whole)


def test_samples_have_texts_scores_and_kl(tmp_path):
    class Rollouts(Callback):
        def on_rollout(self, run, rollout):
            self.last = rollout.clone()

    seen, agent = Rollouts(), ppo_text()
    agent.learn(20, run_dir=tmp_path, callbacks=[seen], sample_every=1)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["iteration"] == rows[-1]["iteration"]]
    rollout = seen.last
    assert len(rows) == len(rollout) == 8
    for row, sample in enumerate(rows):
        mask = rollout["mask"][row]
        ids = rollout["action"][row][mask].tolist()
        assert sample["completion"].split() == agent.policy.tokenizer.decode(ids, skip_special_tokens=True).split()
        assert sample["score"] == sample["completion"].count("good")
        assert sample["kl"] == pytest.approx(rollout["kl"][row][mask].sum().item())
        first = int(mask.nonzero()[0]) + 1
        assert sample["prompt"] == agent.policy.tokenizer.decode(rollout["observation"][row][:first].tolist())


def test_tokens_without_a_score_have_no_log_ratio(tmp_path):
    """Their reference is never asked: a difference to 0 would look like a policy far from it."""

    def every_second(completions):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    agent = text(PPO, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4), reward=every_second)
    agent.learn(20, run_dir=tmp_path, sample_every=1)
    tokens = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    tokens = [row for row in tokens if row["iteration"] == 1]
    assert any(not any(row["chosen"]) for row in tokens), "or nothing is tested"
    assert all(abs(x) < 1e-4 for row in tokens for x in row["log_ratio"]), "policy and reference are equal at first"


def test_parts_of_a_score_are_sampled_by_name():
    env = make_env(lambda completions, **columns: {"good": good(None, completions), "one": [1.0] * len(completions)})
    play(env, [(GOOD, EOS), (BAD, GOOD, EOS)])
    assert [sample["parts"] for sample in env.samples([1, 0])] == [{"good": 1.0, "one": 1.0}] * 2
    assert env.samples([1])[0]["score"] == 2.0


@pytest.mark.heavy
def test_training_ends_where_the_kl_leaves_its_limit():
    agent = ppo_text()
    rows = agent.learn(10**6, callbacks=[StopAtKL(0.05)])
    kl = np.array([row["reference/kl"] for row in rows])
    assert kl[-1] > 0.05 and (kl[:-1] <= 0.05).all()
    with pytest.raises(ValueError, match="needs a KL, but this agent has no penalty"):
        ppo_cartpole().learn(64, callbacks=[StopAtKL(0.05)])


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: EvaluateEvery(cartpole(), 0), "every is 0"),
        (lambda: EvaluateEvery(cartpole(), 100, num_episodes=0), "num_episodes is 0"),
        (lambda: EvaluateEvery(cartpole(), 100, patience=0), "patience is 0"),
        (lambda: StopAtKL(-1), "limit is -1"),
        (lambda: RecordSamples(0), "every is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_an_unplayable_environment_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError):
        ppo_cartpole().learn(64, callbacks=[EvaluateEvery("Acrobot-v1", 64)], run_dir=tmp_path)
    with pytest.raises(TypeError, match="expected an environment"):
        ppo_cartpole().learn(64, callbacks=[EvaluateEvery(3, 64)])


def test_the_environment_of_the_training_is_refused_for_evaluations():
    """Each evaluation would reset it; also inside a wrapper, or as one of its slots. Text is played in a fork."""
    agent = ppo_sync()
    slot = agent.env.envs[1]
    for env in (agent.env, RecordEpisodeStatistics(agent.env), slot):
        with pytest.raises(ValueError, match="env is the environment of the training.*: make another one"):
            agent.learn(64, callbacks=[EvaluateEvery(env, 64)])
    assert agent.steps == 0

    watched = ppo_text()
    watched.learn(20, callbacks=[EvaluateEvery(watched.env, every=1, num_episodes=4)])
    plain = ppo_text()
    plain.learn(20)
    assert all(map(torch.equal, weights_of(plain), weights_of(watched)))


@pytest.mark.parametrize("result", [12, "yes", 1.0, [True]])
def test_a_result_that_is_no_answer_is_refused(result):
    """Such as the length that ``file.write`` returns: it ended the training."""
    with refused(TypeError, "expected True to end the training, and None or False to go on"):
        ppo_cartpole().learn(1024, on_iteration=lambda metrics: result)


class Foreign(Callback):
    """One of Stable-Baselines3, with another base."""

    def _on_step(self):
        return True


def test_hooks_of_stable_baselines3_are_answered():
    with refused(TypeError, "Foreign has _on_step, a method of Stable-Baselines3's callbacks"):
        ppo_cartpole().learn(1024, callbacks=[Foreign()])


class OneArgument(Callback):
    def on_iteration(self, run):
        return None


class OtherHook(Callback):
    def on_step(self):
        raise AssertionError("nothing calls it")


def test_hooks_that_cannot_be_called_and_those_that_nothing_calls_are_named(caplog):
    words = "OneArgument.on_iteration is called with run, metrics: too many positional arguments"
    with refused(TypeError, words):
        ppo_cartpole().learn(1024, callbacks=[OneArgument()])
    ppo_cartpole().learn(64, callbacks=[OtherHook()])
    assert "OtherHook has on_step, which the training does not call: did you mean on_start?" in caplog.text


class GoesOn(Callback):
    """What Stable-Baselines3 means by True."""

    def on_iteration(self, run, metrics):
        return True


@pytest.mark.parametrize("options", [{"callbacks": [GoesOn()]}, {"on_iteration": lambda metrics: np.True_}])
def test_the_callback_that_ends_a_training_is_named(options, caplog):
    assert len(ppo_cartpole().learn(10_000, **options)) == 1
    (message,) = [record.getMessage() for record in caplog.records if "ends the training" in record.getMessage()]
    assert message.split()[0] in ("GoesOn.on_iteration", "<lambda>") and message.endswith("of 10000 steps")


def test_a_later_end_is_not_warned_of(caplog):
    """It is meant, as in the second iteration here."""

    class Second(Callback):
        def on_iteration(self, run, metrics):
            return metrics["iteration"] == 2

    assert len(ppo_cartpole().learn(10_000, callbacks=[Second()])) == 2
    assert "ends the training" not in caplog.text


def test_a_second_evaluation_of_the_same_names_is_refused():
    """Both would log ``eval/mean_return`` and save into ``best``."""
    agent = ppo_cartpole()
    evaluations = [EvaluateEvery(cartpole(4), 64), EvaluateEvery(cartpole(4), 64)]
    with pytest.raises(ValueError, match="callbacks has 2 EvaluateEvery, .*: give one"):
        agent.learn(64, callbacks=evaluations)
    assert agent.steps == 0


@pytest.mark.parametrize("name", ["callbacks", "loggers"])
def test_a_generator_is_no_list(name):
    """Callbacks from one were never called, without a word."""
    with pytest.raises(TypeError, match=f"{name} is <generator.*expected a list"):
        ppo_cartpole().learn(64, **{name: (each for each in [Noted()])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_at": float("nan")}, "stop_at is nan, expected a mean return"),
        ({"stop_at": "450"}, "stop_at is '450', expected a mean return"),
        ({"every": "2000"}, "every is '2000', expected a whole number, at least 1"),
        ({"num_episodes": 2.5}, "num_episodes is 2.5, expected a whole number"),
        ({"patience": 0}, "patience is 0, expected a whole number"),
    ],
)
def test_evaluations_that_mean_nothing_are_refused_when_they_are_made(options, message):
    with refused(ValueError, message):
        EvaluateEvery("CartPole-v1", **({"every": 1000} | options))
