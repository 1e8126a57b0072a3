"""State outside the agent: kept by a resume to the bit, frozen by evaluations, used by `algos evaluate`."""

import functools
import json
import logging
import random
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
import torch

from algos import PPO, Callback, EvaluateEvery, LMPolicy, PPOConfig, evaluate
from algos.cli import main
from algos.storage.env_state import load_objects
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import Rewards, TextVectorEnv
from textenv.envs.task import FunctionTask
from textenv.importing import load_function
from textenv.rewards import Normalize, clip
from textenv.rewards.training import evaluation

PROMPTS = ["a b", "c", "d a b", "b b", "a d"]
TOTAL = 100
"""Steps of three iterations."""


def length(completions):
    return [float(len(text)) for text in completions]


class Curriculum:
    """A reward that asks for longer texts the more of them it has seen."""

    def __init__(self):
        self.seen = 0

    def __call__(self, completions, evaluating):
        if not evaluating:
            self.seen += sum(map(len, completions))
        return [len(text) - self.seen / 100 for text in completions]

    def score(self, completions):
        return self(completions, evaluating=False)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class OwnTask(FunctionTask):
    """A task whose scores are normalized, without a word about state."""

    def __init__(self):
        super().__init__(PROMPTS, length)
        self.normalize = Normalize(length)

    def score(self, turns):
        return self.normalize(completions=[turn.completion for turn in turns])


def a_closure():
    inner = Normalize(length)
    return lambda completions: [x for x in inner(completions=completions)]  # noqa: C416 (a function inside)


def a_default():
    def score(completions, normalize=Normalize(length)):  # noqa: B008 (on purpose)
        return normalize(completions=completions)

    return score


def decorated(function):
    normalize = Normalize(function)

    @functools.wraps(function)
    def normalized(completions):
        return normalize(completions=completions)

    return normalized


class OfClass:
    """Its state is an attribute of the class, in this process too."""

    def __call__(self, completions):
        return self.normalize(completions=completions)


def of_class():
    OfClass.normalize = Normalize(length)
    return OfClass()


class InSlot:
    __slots__ = ("normalize",)

    def __init__(self):
        self.normalize = Normalize(length)

    def __call__(self, completions):
        return self.normalize(completions=completions)


class ReadsGlobal:
    def __call__(self, completions):
        return GLOBAL["normalize"](completions=completions)


GLOBAL = {}


def reads_global():
    GLOBAL["normalize"] = Normalize(length)
    return ReadsGlobal()


def an_attribute():
    def score(completions):
        return score.normalize(completions=completions)

    score.normalize = Normalize(length)
    return score


def memoized():
    normalize = Normalize(length)

    @functools.lru_cache
    def normalized(texts):
        return tuple(normalize(completions=list(texts)))

    return lambda completions: list(normalized(tuple(completions)))


class InModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.normalize = Normalize(length)

    def forward(self, completions):
        return self.normalize(completions=completions)


def global_generators():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return lambda completions: [random.random() + np.random.rand() + torch.rand(()).item() for _ in completions]


def weighted():
    return Rewards({"long": Normalize(length), "b": (lambda completions: [text.count("b") for text in completions], 2)})


REWARDS = {
    "Normalize": lambda: Normalize(length),
    "inside clip": lambda: clip(Normalize(length), -1, 1),
    "among Rewards": weighted,
    "around Rewards": lambda: Normalize(Rewards(length, workers=2)),
    "closure": a_closure,
    "own object": Curriculum,
    "method": lambda: Curriculum().score,
    "partial": lambda: functools.partial(Curriculum().score),
    "own task": OwnTask,
    "default": a_default,
    "inside a decorator": lambda: decorated(length),
    "attribute of a class": of_class,
    "in a slot": InSlot,
    "variable that a method reads": reads_global,
    "attribute of a function": an_attribute,
    "inside a cache": memoized,
    "in a torch module": InModule,
    "global random generators": global_generators,
}


def make_env(reward):
    tokenizer = make_tokenizer(WORDS)
    given = {"task": reward} if isinstance(reward, OwnTask) else {"prompts": PROMPTS, "reward": reward}
    return TextVectorEnv(**given, tokenizer=tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=5)


def make_agent(reward):
    env = make_env(reward)
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, num_epochs=1, bootstrap_truncated=False)
    return PPO(env, LMPolicy(make_gpt2(), env.tokenizer), config)


def rows(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith("time/")} for line in lines]


def weights(agent):
    return torch.cat([x.detach().flatten() for x in agent.policy.parameters()])


@pytest.mark.heavy
@pytest.mark.parametrize("kind", REWARDS)
def test_a_resumed_reward_goes_on_from_its_state(kind, tmp_path):
    """Metrics, samples, tokens and weights, to the last bit."""
    one, other = tmp_path / "whole", tmp_path / "interrupted"
    whole = make_agent(REWARDS[kind]())
    whole.learn(TOTAL, run_dir=one, sample_every=2)
    first = make_agent(REWARDS[kind]())
    first.learn(TOTAL, run_dir=other, sample_every=2, on_iteration=lambda metrics: metrics["iteration"] == 2)
    second = make_agent(REWARDS[kind]())
    second.learn(TOTAL, run_dir=other, sample_every=2, resume=other)
    for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        assert rows(other / name) == rows(one / name), name
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.heavy
def test_normalized_scores_are_those_of_numpy():
    """Mean and deviation of all scores so far, as the training pays them; evaluations between change nothing."""
    seen, paid = [], []

    def noted(completions):
        scores = [len(text) + 0.1 * text.count("a") for text in completions]
        seen.append(scores)
        return scores

    class Look(Callback):
        def on_rollout(self, run, rollout):
            paid.append([reward[reward != 0].sum().item() for reward in rollout["reward"]])
            so_far = np.concatenate(trained())
            expected = (np.array(seen[-1]) - so_far.mean()) / so_far.std()
            np.testing.assert_allclose(sorted(paid[-1]), sorted(expected), atol=1e-5)

    evaluated = []

    def trained():
        return [scores for place, scores in enumerate(seen) if place not in evaluated]

    class Evaluate(Callback):
        def on_iteration(self, run, metrics):
            evaluated.append(len(seen))
            result = evaluate(test_env, run.agent.policy, num_episodes=8)
            so_far = np.concatenate(trained())
            expected = (np.array(seen[-1]) - so_far.mean()) / so_far.std()
            np.testing.assert_allclose(sorted(result.returns), sorted(expected), atol=1e-5)

    reward = Normalize(noted)
    test_env = make_env(reward)
    make_agent(reward).learn(TOTAL, callbacks=[Look(), Evaluate()])
    assert reward.count == sum(map(len, trained())) < sum(map(len, seen))


@pytest.mark.heavy
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "its own"])
@pytest.mark.parametrize(
    "kind", ["Normalize", "among Rewards", "own object", "own task", "default", "in a slot", "in a torch module"]
)
def test_evaluations_use_and_leave_the_training_state(kind, shared, tmp_path):
    """Whether the environment of the evaluation has the training's reward or one of its own."""
    returns, histories = [], []
    for evaluated in (False, True):
        reward = REWARDS[kind]()
        agent = make_agent(reward)
        test_env = make_env(reward if shared else REWARDS[kind]())
        callbacks = [EvaluateEvery(test_env, every=60, num_episodes=8)] if evaluated else []
        history = agent.learn(TOTAL, callbacks=callbacks)
        histories.append([{name: x for name, x in row.items() if name.startswith("episode/")} for row in history])
        if evaluated:
            returns = [row["eval/mean_return"] for row in history if "eval/mean_return" in row]
    assert histories[0] == histories[1]
    training_env = make_env(reward)
    assert returns[-1] == evaluate(training_env, agent.policy, num_episodes=8).mean_return


def test_an_evaluation_before_any_training_says_so(caplog):
    reward = Normalize(length)
    agent = make_agent(reward)
    played = evaluate(agent.env, agent.policy, num_episodes=8)
    assert reward.count == 0 and played.mean_return == pytest.approx(0, abs=1e-6)
    assert "no training has made statistics yet" in caplog.text


@pytest.mark.heavy
def test_failures_are_counted_on_after_a_resume(tmp_path):
    """Not in evaluations."""

    def fails(prompts, completions):
        if "c" in prompts:
            raise ValueError("not about this")
        return length(completions)

    def agent():
        return make_agent(Rewards(fails, on_error="skip", max_failed=1.0, pause=0))

    whole, first, second = agent(), agent(), agent()
    whole.learn(TOTAL, callbacks=[EvaluateEvery(make_env(whole.env.task.rewards), every=60, num_episodes=8)])
    first.learn(TOTAL, run_dir=tmp_path, on_iteration=lambda metrics: metrics["iteration"] == 2)
    second.learn(TOTAL, run_dir=tmp_path, resume=tmp_path)
    counts = [(agent.env.task.rewards.seen, agent.env.task.rewards.failed) for agent in (whole, second)]
    assert counts[0] == counts[1] and counts[0][1] > 0


@pytest.mark.heavy
def test_what_listens_keeps_its_state_too(tmp_path):
    class Mean:
        def __init__(self):
            self.seen = []

        def __call__(self, metrics):
            self.seen.append(metrics["episode/return"])
            return metrics["iteration"] == stop

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    stop, first, second = 2, Mean(), Mean()
    make_agent(length).learn(TOTAL, run_dir=tmp_path, on_iteration=first)
    stop = 6
    history = make_agent(length).learn(TOTAL, run_dir=tmp_path, resume=tmp_path, on_iteration=second)
    assert second.seen == [row["episode/return"] for row in history] and second.seen[:2] == first.seen


@pytest.mark.heavy
def test_another_reward_begins_anew_and_is_named(tmp_path, caplog):
    make_agent(length).learn(TOTAL, run_dir=tmp_path, on_iteration=lambda metrics: metrics["iteration"] == 2)
    reward = Normalize(length)
    make_agent(reward).learn(TOTAL, run_dir=tmp_path, resume=tmp_path)
    assert (
        "objects and saved states that do not match (such an object starts afresh): task.rewards.functions.length.0"
        in caplog.text
    )
    assert reward.count > 0


def test_a_reward_with_a_state_is_refused_in_processes():
    with pytest.raises(ValueError, match="'Curriculum' has a state .*each call gets a copy, whose state is lost"):
        Rewards(Curriculum(), processes=True)


def test_a_state_that_cannot_be_saved_is_named(tmp_path):
    class Odd(Curriculum):
        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(TypeError, match="task.rewards.functions.Odd.0.*seen.*a set cannot be saved"):
        make_agent(Odd()).learn(TOTAL, run_dir=tmp_path, checkpoint_every=10)


@pytest.mark.heavy
def test_a_saved_agent_has_the_state_of_its_rewards(tmp_path):
    agent = make_agent(weighted())
    agent.learn(TOTAL, run_dir=tmp_path)
    env = make_env(weighted())
    load_objects(tmp_path, env)
    before = [f.state_dict() for f in (agent.env.task.rewards, agent.env.task.rewards.functions["long"][0])]
    assert [f.state_dict() for f in (env.task.rewards, env.task.rewards.functions["long"][0])] == before
    assert before[1]["count"] > 0
    (tmp_path / "objects.safetensors").write_bytes(b"\x08" + bytes(20))
    with pytest.raises(ValueError, match=r"objects.safetensors cannot be read"):
        load_objects(tmp_path, env)


REWARD_FILE = """
from textenv.rewards import Normalize
def raw(completions):
    return [float(len(text)) for text in completions]
scale = Normalize(raw)
def mine(completions):
    return scale(completions=completions)
"""


@pytest.mark.heavy
def test_the_commands_share_one_state(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"this film {i}"}) + "\n" for i in range(60)))
    results = {}
    for name, totals in (("whole", ["300"]), ("resumed", ["75", "300"])):
        (tmp_path / f"{name}.py").write_text(REWARD_FILE)
        words = [
            "--prompts",
            "prompts.jsonl",
            "--reward",
            f"{name}.py:mine",
            "--num-envs",
            "8",
            "--max-new-tokens",
            "4",
        ]
        words += ["--config.num-episodes", "16", "--config.minibatch-size", "16", "--config.num-epochs", "1"]
        words += ["--num-episodes", "8", "--json"]
        main(["train", *words, "--run-dir", name, "--total-steps", "300", *schedule(totals[0])])
        for total in totals[1:]:
            (tmp_path / f"{name}.py").write_text(REWARD_FILE + "# another process reads it again\n")
            main(["train", "--resume", name, "--total-steps", total, "--stop-at", "1e9"])
        results[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["resumed"]["mean_return"] == results["whole"]["mean_return"]
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert rows(tmp_path / "resumed" / file) == rows(tmp_path / "whole" / file)

    # algos evaluate, in what counts as another process: the file is read again
    (tmp_path / "whole.py").write_text(REWARD_FILE + "# once more\n")
    found = {}
    for function in ("mine", "raw"):
        main(["evaluate", "whole", "--reward", f"whole.py:{function}", "--num-episodes", "8", "--json"])
        found[function] = json.loads(capsys.readouterr().out)["mean_return"]
    state = load_function("whole.py:scale").state_dict()
    assert state["count"] >= 300 / 4
    assert found["mine"] == pytest.approx((found["raw"] - state["mean"]) / state["variance"] ** 0.5)


def schedule(total):
    """Options that end the first part of a training early without a change of its schedules."""
    return (
        ["--eval-every", total, "--stop-at", "-1e9"] if total != "300" else ["--eval-every", "75", "--stop-at", "1e9"]
    )


def test_a_function_may_ask_whether_it_is_evaluated():
    asked = []

    def noted(completions, evaluating):
        asked.append(evaluating)
        return length(completions)

    rewards = Rewards(noted)
    rewards(prompts=["a"], completions=["b"])
    with evaluation():
        rewards(prompts=["a"], completions=["b"])
    assert asked == [False, True]


@pytest.mark.heavy
def test_what_changes_and_is_not_saved_is_named_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING)

    class Counts:
        def __init__(self):
            self.calls, self.factor = 0, 2.0

        def __call__(self, completions):
            self.calls += 1
            return [self.factor * len(text) for text in completions]

    make_agent(Counts()).learn(TOTAL, run_dir=tmp_path, checkpoint_every=1)
    assert caplog.text.count("the training changes Counts.calls, which no checkpoint has") == 1
    assert "factor" not in caplog.text


class Keeps:
    """Pays the length of an answer, and keeps the answers, or something of them, in a container."""

    def __init__(self, container, keep):
        self.container = container
        self.keep = keep

    def __call__(self, completions):
        for text in completions:
            self.keep(self.container, text)
        return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("container", "keep"),
    [
        (set(), set.add),
        ([], list.append),
        (deque(maxlen=3), deque.append),
        ({}, lambda texts, text: texts.update(a=text)),
        (deque(maxlen=100), lambda lengths, text: lengths.append(len(text))),
        ([Fraction(1, 3)], list.append),
        ({"best": Fraction(1, 3)}, lambda numbers, text: numbers.update(best=numbers["best"] + 1)),
    ],
    ids=["set", "list", "deque", "dict of texts", "deque of numbers", "list that was not empty", "fraction"],
)
def test_containers_of_texts_that_change_are_named(container, keep, tmp_path, caplog):
    make_agent(Keeps(container, keep)).learn(64, run_dir=tmp_path, checkpoint_every=1)
    assert caplog.text.count("the training changes Keeps.container, which no checkpoint has") == 1


FILE_OF_REWARDS = """
class Counts:
    calls = 0

    def __call__(self, completions):
        self.calls += 1
        return [float(len(text)) for text in completions]

class Memory:
    seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

class Remembers:
    memory = Memory()

    def __call__(self, completions):
        self.memory.seen += len(completions)
        return [float(len(text)) for text in completions]

counts = Counts()
remembers = Remembers()
"""


@pytest.mark.heavy
def test_rewards_of_a_file_are_the_users_too(tmp_path, caplog):
    """The file's module is `textenv.importing.…`, but neither its warning nor its state may be lost."""
    caplog.set_level(logging.WARNING)
    (tmp_path / "rewards.py").write_text(FILE_OF_REWARDS)
    counts = load_function(f"{tmp_path}/rewards.py:counts")
    make_agent(counts).learn(TOTAL, run_dir=tmp_path / "counts", checkpoint_every=1)
    assert caplog.text.count("the training changes Counts.calls, which no checkpoint has") == 1

    remembers = load_function(f"{tmp_path}/rewards.py:remembers")
    agent = make_agent(remembers)
    agent.learn(TOTAL, run_dir=tmp_path / "remembers")
    seen = remembers.memory.seen
    remembers.memory.seen = 0
    load_objects(tmp_path / "remembers", agent.env)
    assert remembers.memory.seen == seen > 0
