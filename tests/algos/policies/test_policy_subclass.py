"""Policies of one's own: the pages' programs run, and a saved agent is loaded by naming its class."""

import importlib
import json
import re
import sys
import typing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from safetensors.torch import load_model, save_model
from torch import nn

import algos
from algos import PPO, LMPolicy, MLPPolicy, Policy, evaluate, losses
from algos.cli import main
from algos.policies import Step, step_values, unflatten
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import TextVectorEnv
from textenv.rollout import Evaluation

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def program(name):
    """The complete program of the page that defines this class."""
    blocks = re.findall(r"```python\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if f"class {name}(" in block]
    return block


@pytest.fixture
def doors(tmp_path, monkeypatch):
    """The module ``doors`` of the page, in the current folder."""
    (tmp_path / "doors.py").write_text(program("DoorPolicy"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("doors")
    sys.modules.pop("doors")
    gymnasium.registry.pop("Doors-v0")


def saved_agent(doors, folder="runs/doors", **options):
    env = gymnasium.make_vec("Doors-v0", num_envs=8, vectorization_mode="sync")
    policy = doors.DoorPolicy(env.single_observation_space, env.single_action_space, seed=1, **options)
    agent = PPO(env, policy, learning_rate=3e-3, gamma=0.0, seed=1)
    agent.learn(2048, run_dir=folder)
    return agent


@pytest.mark.heavy
def test_the_pages_policy_of_a_dict_learns_by_name(doors, capsys):
    agent = saved_agent(doors, hidden=24)
    assert evaluate("Doors-v0", agent.policy, num_episodes=20).mean_return > 5  # before: about 0
    main(["evaluate", "runs/doors", "--env", "doors:Doors-v0", "--policy-class", "doors:DoorPolicy", "--json"])
    assert json.loads(capsys.readouterr().out)["mean_return"] > 5
    loaded = algos.load("runs/doors", policy_class=doors.DoorPolicy)
    assert loaded.hidden == 24
    action, _ = loaded.predict({"door": 6, "speed": [0.0, 0.5]}, deterministic=True)
    assert action == agent.policy.predict({"door": 6, "speed": [0.0, 0.5]}, deterministic=True)[0]


def test_the_pages_policy_gets_the_parts_as_shown(doors):
    env = gymnasium.make_vec("Doors-v0", num_envs=2, vectorization_mode="sync")
    policy = doors.DoorPolicy(env.single_observation_space, env.single_action_space)
    observation, _ = env.reset(seed=0)
    for given in (observation, algos.collect(env, policy, num_steps=1, seed=0)["observation"][:, 0]):
        parts = unflatten(policy.observation_space, policy.read(given))
        assert parts["door"].tolist() == observation["door"].tolist()
        np.testing.assert_array_equal(parts["speed"].numpy(), observation["speed"])


def test_the_pages_plain_policy_runs():
    code = program("SharedTrunk").replace("learn(50_000)", "learn(256)").replace("num_episodes=20", "num_episodes=2")
    exec(compile(code, "page", "exec"), {"__name__": "__page__"})


@pytest.mark.long
def test_the_pages_program_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(program("DoorPolicy"), "doors.py", "exec"), {"__name__": "__main__"})
    gymnasium.registry.pop("Doors-v0")
    assert float(capsys.readouterr().out.splitlines()[-1]) > 15


@pytest.mark.heavy
def test_an_own_class_is_never_looked_up_from_a_folder(doors, tmp_path, capsys):
    saved_agent(doors)
    config = Path("runs/doors/config.json")
    description = json.loads(config.read_text())
    assert description["policy"] == "doors:DoorPolicy"
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')\n")
    for name in ("evil:DoorPolicy", "evil.py:DoorPolicy", "DoorPolicy"):
        config.write_text(json.dumps(description | {"policy": name}))
        with refused(ValueError, name, "only if you name it", "policy_class=", "--policy-class"):
            algos.load("runs/doors")
        assert algos.load("runs/doors", policy_class=doors.DoorPolicy).hidden == 32
    assert "evil" not in sys.modules
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "runs/doors", "--env", "doors:Doors-v0"])
    assert stop.value.code == 2 and "--policy-class" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_class_that_does_not_fit_is_refused(doors):
    saved_agent(doors)
    with refused(ValueError, "holds a DoorPolicy, but policy_class is MLPPolicy"):
        algos.load("runs/doors", policy_class=MLPPolicy)
    for wrong in (doors.Doors, doors.DoorPolicy.__init__, "doors:DoorPolicy"):
        with refused(TypeError, "policy_class is", r"load\(folder, saved\)"):
            algos.load("runs/doors", policy_class=wrong)


class Same:
    """A place for a class with the name of one of ours."""

    class MLPPolicy(MLPPolicy):
        """Always takes action 1."""

        def act(self, observation, *, action_mask=None, deterministic=False):
            step = super().act(observation, action_mask=action_mask, deterministic=deterministic)
            return step._replace(action=torch.ones_like(step.action))


def test_an_own_class_of_our_name_is_not_ours(tmp_path):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    policy = Same.MLPPolicy(env.single_observation_space, env.single_action_space)
    PPO(env, policy).save(tmp_path)
    with refused(ValueError, "Same.MLPPolicy", "only if you name it"):
        algos.load(tmp_path)
    loaded = algos.load(tmp_path, policy_class=Same.MLPPolicy)
    assert loaded.act(np.zeros((4, 4), np.float32)).action.tolist() == [1] * 4


class Plain(nn.Module, Policy):
    """A policy that saves and loads by itself."""

    def __init__(self, size):
        super().__init__()
        self.generator = torch.Generator()
        self.net, self.critic = nn.Linear(4, size), nn.Linear(4, 1)

    @torch.no_grad()
    def act(self, observation, *, action_mask=None, deterministic=False):
        log_probs = self.net(torch.from_numpy(observation)).log_softmax(-1)
        best = log_probs.argmax(-1, keepdim=True)
        return Step(best[:, 0], log_probs.gather(-1, best)[:, 0])

    def evaluate(self, rollout):
        log_probs = self.net(rollout["observation"]).log_softmax(-1)
        log_prob = log_probs.gather(-1, rollout["action"][..., None]).squeeze(-1)
        value = self.critic(rollout["observation"]).squeeze(-1)
        return Evaluation(log_prob, torch.zeros_like(log_prob), value)

    @torch.no_grad()
    def values(self, rollout):
        return step_values(lambda x: self.critic(x).squeeze(-1), rollout)

    def save(self, folder):
        save_model(self, folder / "weights.safetensors")
        return {"size": self.net.out_features}

    @classmethod
    def load(cls, folder, saved):
        policy = cls(saved["size"])
        load_model(policy, folder / "weights.safetensors")
        return policy


def test_an_own_policy_is_loaded_by_its_own_load(tmp_path):
    agent = PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), Plain(2), num_steps=8, minibatch_size=8)
    agent.learn(32)
    agent.save(tmp_path)
    loaded = algos.load(tmp_path, policy_class=Plain, device="cpu")
    seen = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert torch.equal(loaded.act(seen).log_prob, agent.policy.act(seen).log_prob)


class OwnLM(LMPolicy):
    """A language model of one's own class."""


def test_a_language_model_of_ones_own_class_is_loaded(tmp_path):
    policy = OwnLM(make_gpt2(), make_tokenizer(WORDS), temperature=0.7)
    env = TextVectorEnv(
        prompts=["a b"], reward=lambda prompts, **_: [1.0] * len(prompts), tokenizer=policy.tokenizer, num_envs=2
    )
    PPO(env, policy, num_steps=None, num_episodes=4).save(tmp_path)
    with refused(ValueError, "OwnLM", "only if you name it"):
        algos.load(tmp_path)
    loaded = algos.load(tmp_path, policy_class=OwnLM)
    assert type(loaded) is OwnLM and loaded.temperature == 0.7


FILE = """
from algos import MLPPolicy

class Mine(MLPPolicy):
    pass
"""


def test_the_class_may_be_in_a_file(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILE)
    names = {"__name__": "elsewhere"}
    exec(FILE, names)
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    policy = names["Mine"](env.single_observation_space, env.single_action_space)
    PPO(env, policy, num_steps=8, minibatch_size=8).save(tmp_path / "agent")
    flags = ["--policy-class", f"{tmp_path / 'mine.py'}:Mine", "--num-episodes", "2", "--json"]
    main(["evaluate", str(tmp_path / "agent"), *flags])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


def test_replaced_layers_are_warned_of_when_the_agent_is_saved(tmp_path, caplog):
    """They are lost: `load` makes those of the constructor. A class that makes them keeps them, without a warning."""

    class ReLUPolicy(MLPPolicy):
        def __init__(self, *spaces, **options):
            super().__init__(*spaces, **options)
            self.actor[1] = nn.ReLU()

    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    spaces = env.single_observation_space, env.single_action_space
    own = PPO(env, ReLUPolicy(*spaces, hidden=(4, 4)), num_steps=8, minibatch_size=8)
    own.save(tmp_path)
    assert isinstance(algos.load(tmp_path, policy_class=ReLUPolicy).actor[1], nn.ReLU) and not caplog.records

    replaced = PPO(env, MLPPolicy(*spaces, hidden=(4, 4)), num_steps=8, minibatch_size=8)
    replaced.policy.actor[1] = nn.ReLU()
    replaced.policy.critic[0] = nn.Linear(4, 4, bias=False)
    replaced.learn(32, run_dir=tmp_path / "run", checkpoint_every=8)
    (record,) = caplog.records
    assert "the MLPPolicy has other layers than its constructor makes (actor.1, critic.0)" in record.getMessage()


# --- what is checked of an own policy --------------------------------------------------------------------------------


class OneActionOnly(gymnasium.Env):
    """Only action 3 of the actions 2, 3 and 4 is ever available."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(3, start=2)
    info: typing.ClassVar = {"action_mask": np.array([0, 1, 0], dtype=np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), self.info

    def step(self, action):
        assert action == 3
        return np.zeros(1, np.float32), 1.0, self.np_random.random() < 0.2, False, self.info


class NeverMasked(MLPPolicy):
    """Acts as if every action were available."""

    def act(self, observation, *, action_mask=None, deterministic=False):
        return super().act(observation, deterministic=deterministic)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_action_that_the_mask_forbids_is_refused(mode):
    env = SyncVectorEnv([OneActionOnly] * 3, autoreset_mode=mode)
    spaces = (env.single_observation_space, env.single_action_space)
    algos.collect(env, MLPPolicy(*spaces), num_steps=30)
    with refused(ValueError, "NeverMasked.act took action [24] in slot", "which action_mask forbids"):
        algos.collect(env, NeverMasked(*spaces), num_steps=30)


class Scores(MLPPolicy):
    """Changes what `evaluate` returns by a function."""

    def __init__(self, env, change):
        super().__init__(env.single_observation_space, env.single_action_space)
        self.change = change

    def evaluate(self, rollout):
        return self.change(super().evaluate(rollout))


@pytest.mark.parametrize("change, message", [
    (lambda scores: scores._replace(log_prob=scores.log_prob.detach()), "Scores.evaluate returned a log_prob without"),
    (lambda scores: scores._replace(entropy=None), "Scores.evaluate returned an Evaluation whose entropy is None"),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", [algos.PPO, algos.A2C, algos.TRPO])
def test_scores_that_cannot_be_learnt_from_are_refused(algorithm, change, message):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(ValueError, match=message):
        algorithm(env, Scores(env, change), num_steps=4).learn(8)


@pytest.mark.parametrize("algorithm", [algos.PPO, algos.RLOO])
def test_an_entropy_or_value_that_is_not_read_may_be_one_number(algorithm):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    parts = {"entropy": torch.zeros(())}
    if algorithm is algos.RLOO:
        parts["value"] = torch.zeros(())
    algorithm(env, Scores(env, lambda scores: scores._replace(**parts))).learn(8)


@pytest.mark.parametrize("algorithm", [algos.PPO, algos.A2C])
def test_scores_in_float64_are_learnt_from(algorithm):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    policy = Scores(env, lambda scores: scores._replace(log_prob=scores.log_prob.double()))
    before = [weight.clone() for weight in policy.parameters()]
    algorithm(env, policy, num_steps=16).learn(64)
    assert not all(map(torch.equal, before, policy.parameters()))


def test_an_own_loss_in_float64_is_the_loss_in_float32():
    def double(*, log_ratio, advantage, mask, clip_range):
        return losses.clipped_policy_loss(
            log_ratio=log_ratio.double(), advantage=advantage, mask=mask, clip_range=clip_range
        )

    policies = []
    for policy_loss in (double, losses.clipped_policy_loss):
        agent = algos.PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=32, policy_loss=policy_loss, seed=1)
        agent.learn(128)
        policies.append(agent.policy)
    for one, other in zip(*(policy.parameters() for policy in policies), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
