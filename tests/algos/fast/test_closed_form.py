"""PPO's update with a gradient by hand equals the one by autograd, and leaves to it what it does not cover."""

import ast
import copy
import functools
import importlib
import inspect
import linecache
import os
import shutil
import subprocess
import sys
import textwrap
import types
from functools import partial
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from torch import nn

from algos import PPO, GSDEPolicy, MLPPolicy, PPOConfig, evaluate, losses
from algos.advantages import add_advantages, whiten
from algos.fast import closed_form
from algos.losses import dual_clipped_policy_loss
from algos.minibatches import minibatches
from algos.policies.towers import tower
from algos.training.metrics import ratio_metrics
from tests.helpers.small_agents import cartpole
from textenv.acceleration import FAST, digest, find, syntax_digest

pytestmark = pytest.mark.skipif(not FAST, reason="the closed form needs the fast Adam")
ROOT = Path(__file__).parents[3]
SEED = {"num_steps": 32, "learning_rate": 1e-2, "seed": 1}


class FromOne(gym.ActionWrapper):
    """CartPole whose actions are 1 and 2, in an environment that skips a step at each reset."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = spaces.Discrete(2, start=1)

    def action(self, action):
        return action - 1


def relu(policy):
    for network in (policy.actor, policy.critic):
        for place in range(1, len(network), 2):
            network[place] = nn.ReLU()


ENVIRONMENTS = {
    "native": lambda: gym.make_vec("CartPole-v1", num_envs=4),
    "start": lambda: gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync", wrappers=[FromOne]),
    "taxi": lambda: gym.make_vec("Taxi-v4", num_envs=4, vectorization_mode="sync"),
    "box": lambda: gym.make_vec("Pendulum-v1", num_envs=4, max_episode_steps=20),
}
CONFIGS = {
    "ragged": {"minibatch_size": 48, "num_epochs": 3},
    "left over": {"num_steps": 4, "minibatch_size": 5, "num_epochs": 3},  # 5, 5 and 6 of 16 steps
    "whole": {"minibatch_size": 1_000, "num_epochs": 3, "ent_coef": 0.02},
    "rollout": {"minibatch_size": 30, "normalize_advantage": "rollout", "clip_range_vf": 0.05, "vf_coef": 0.8},
    "raw": {"minibatch_size": 64, "normalize_advantage": False, "clip_range": 0.02, "clip_higher": 0.05},
    "scheduled": {"minibatch_size": 64, "final_clip_range": 0.05, "final_learning_rate": 0.0, "max_grad_norm": 1e-3},
    "decay": {"minibatch_size": 64, "weight_decay": 0.1, "adam_betas": (0.8, 0.9), "adam_eps": 1e-3},
    "target": {"minibatch_size": 16, "num_epochs": 4, "target_kl": 1e-3, "normalize_rewards": True},
}


def agent_of(kind="native", *, hidden=(16, 8), change=lambda policy: None, **config):
    env = ENVIRONMENTS[kind]()
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=hidden, seed=3)
    change(policy)
    return fast(PPO(env, policy, PPOConfig(**SEED | config)))


def fast(agent):
    agent.in_closed_form = True
    return agent


def plain(agent):
    agent.in_closed_form = False
    return agent


def both(make, rollouts):
    """Two agents after the same updates, in closed form and plain, and the metrics of both."""
    agent, other = make(), plain(make())
    logs = [], []
    for _ in range(rollouts):
        rollout = agent.collect()
        logs[0].append(agent.update(rollout.clone()))
        logs[1].append(other.update(rollout.clone()))
        difference = max((a - b).abs().max().item() for a, b in zip(*map(weights, (agent, other)), strict=True))
        assert difference < 1e-4
        other.load_state_dict(copy.deepcopy(agent.state_dict()))  # the next rollout is that of one policy
    return agent, other, *logs


def weights(agent):
    return [p.detach() for p in agent.policy.parameters()]


@pytest.mark.heavy
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", ["native", "start", "box"])
def test_an_update_equals_the_plain_one(kind, config):
    _, _, ours, plain = both(lambda: agent_of(kind, **config), 3)
    for own, other in zip(ours, plain, strict=True):
        assert own.pop("update/path") == 2  # of the closed form
        assert own.keys() == other.keys() and own["update/minibatches"] == other["update/minibatches"]
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    if "target_kl" in config:
        assert ours[0]["update/minibatches"] < 30  # ended early


@pytest.mark.parametrize("kind", ["native", "box"])
@pytest.mark.parametrize("hidden", [(), (16,), (8, 24, 16)], ids=str)
@pytest.mark.parametrize("change", [lambda policy: None, relu], ids=["tanh", "relu"])
def test_a_first_gradient_equals_autograds(kind, hidden, change):
    """By the plain gradient that Adam's average holds after a single step: (1 - β₁) of it."""
    options = {"minibatch_size": 10_000, "num_epochs": 1, "ent_coef": 0.1}
    *agents, ours, _ = both(lambda: agent_of(kind, hidden=hidden, change=change, **options), 1)
    assert ours[0]["update/path"] == 2
    states = [agent.optimizer.adam.state for agent in agents]
    averages = [
        [state[p]["exp_avg"] for p in one.policy.parameters()] for state, one in zip(states, agents, strict=True)
    ]
    assert max(x.abs().max() for x in averages[1]) > 1e-3
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-7)


@pytest.mark.heavy
@pytest.mark.parametrize("path", [fast, plain])
def test_averages_without_a_gradient_end_at_zero(path):
    """Those of a hidden unit that goes off: 800 steps later they would be subnormal numbers, which are slow."""
    agent = path(agent_of(change=relu, minibatch_size=8, num_epochs=10))
    layer = agent.policy.actor[0]
    agent.update(agent.collect())
    with torch.no_grad():
        layer.bias[0] = -1e3
    for _ in range(5):
        metrics = agent.update(agent.collect())
    assert (metrics.get("update/path") == 2) == agent.in_closed_form
    average = agent.optimizer.adam.state[layer.weight]["exp_avg"]
    assert (average[0] == 0).all() and (average[1:] != 0).any()


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["native", "box"])
def test_weights_after_100_steps_are_the_same(kind):
    options = {"minibatch_size": 16, "num_epochs": 15, "learning_rate": 1e-3}
    _, _, ours, _ = both(lambda: agent_of(kind, **options), 1)
    assert ours[0]["update/minibatches"] >= 100 and ours[0]["update/path"] == 2


def test_a_checkpoint_goes_on_under_both_paths():
    """State of the same names and shapes; each path continues what the other has begun."""
    agents = [agent_of(minibatch_size=32) for _ in range(2)]
    rollouts = [agents[0].collect() for _ in range(3)]
    for turn, rollout in enumerate(rollouts):
        for number, agent in enumerate(agents):
            agent.in_closed_form = (turn + number) % 2 == 0
            own = rollout.clone()
            own["log_prob"] = agent.policy.evaluate(own).log_prob.detach().masked_fill(~own["mask"], 0)
            assert (agent.update(own).get("update/path") == 2) == agent.in_closed_form
    one, two = (agent.optimizer.state_dict() for agent in agents)
    assert one["state"].keys() == two["state"].keys()
    for place, state in one["state"].items():
        torch.testing.assert_close(state, two["state"][place], rtol=1e-3, atol=1e-5)
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values())  # a file holds nothing else
    torch.testing.assert_close(weights(agents[0]), weights(agents[1]), rtol=0, atol=1e-4)


class OtherLoss(PPO):
    def loss(self, batch, **options):
        return super().loss(batch, **options)


class OtherPolicy(MLPPolicy):
    def evaluate(self, rollout):
        return super().evaluate(rollout)


def frozen(policy):
    policy.actor[0].weight.requires_grad_(False)


def shared(policy):
    policy.critic[0] = policy.actor[0]


def wider(policy):
    policy.critic = tower(4, (64, 65), 1, gain=1.0, generator=policy.generator)


def hooked(policy):
    policy.actor[0].weight.register_hook(lambda gradient: 2 * gradient)


def make(policy_type=MLPPolicy, agent_type=PPO, kind="native", change=lambda policy: None, config=None, **more):
    env = ENVIRONMENTS[kind]()
    policy = policy_type(env.single_observation_space, env.single_action_space, seed=3)
    change(policy)
    return fast(agent_type(env, policy, PPOConfig(**SEED, minibatch_size=64, **(config or {})), **more))


UNCOVERED = {
    "PPO.loss was overridden": lambda: make(agent_type=OtherLoss),
    "MLPPolicy.evaluate was overridden": lambda: make(OtherPolicy),
    "the policy is a GSDEPolicy": lambda: make(GSDEPolicy, kind="box"),
    "other parameters": lambda: make(change=frozen),
    "other parameters than actor": lambda: make(change=shared),
    "has a hook": lambda: make(change=hooked),
    "equal hidden layers": lambda: make(change=wider),
    "actions are not available": lambda: make(kind="taxi"),
    "not clipped_policy_loss": lambda: make(config={"policy_loss": "dual_clipped_policy_loss"}),
    "policy_loss is not": lambda: make(config={"policy_loss": partial(dual_clipped_policy_loss, limit=2.0)}),
    "aggregation is not token_mean": lambda: make(config={"aggregation": "sequence_mean"}),
    "max_importance_weight is set": lambda: make(config={"max_importance_weight": 2.0}),
    "micro_batch_size is set": lambda: make(config={"micro_batch_size": 16}),
    "not one Adam": lambda: make(config={"value_learning_rate": 1e-3}),
    "a KL penalty": lambda: make(kl_coef=0.1),
    "an auxiliary loss": lambda: make(auxiliary=lambda policy: policy.actor[0].weight.square().sum()),
}  # fmt: skip
"""Updates that are not computed in closed form, by what the log says of them."""


@pytest.mark.parametrize("name", UNCOVERED)
def test_other_updates_are_plain_and_the_log_says_why(name, caplog):
    agents = [UNCOVERED[name](), plain(UNCOVERED[name]())]
    closed_form._log_once.cache_clear()
    with caplog.at_level("INFO", logger="algos.fast.closed_form"):
        found = [agent.update(agent.collect()) for agent in agents]
    lines = [line.getMessage() for line in caplog.records if line.name == "algos.fast.closed_form"]
    assert len(lines) == 1 and name in lines[0] and "PPO's update is not computed in closed form" in lines[0]
    assert "update/path" not in found[0] and found[0] == found[1]
    assert all(map(torch.equal, weights(agents[0]), weights(agents[1])))
    assert any(not torch.equal(a, b) for a, b in zip(weights(agents[0]), weights(UNCOVERED[name]()), strict=True))


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        ("advantage", float("nan")),
        ("value_target", float("inf")),
        ("log_prob", -9.0),
        ("observation", float("nan")),
    ],
)
def test_a_faulty_update_is_left_to_the_plain_one(column, bad):
    """With nothing changed."""
    agent = agent_of(minibatch_size=16)
    rollout = agent.collect()
    add_advantages(agent, rollout)
    sound = rollout.clone()
    rollout[column][:] = torch.where(rollout["mask"], bad, 0.0) if column == "log_prob" else rollout[column]
    rollout[column][0, 3] = bad
    before = [p.clone() for p in weights(agent)], agent.update_generator.get_state()
    assert closed_form.take_steps(agent, rollout, clip_range=0.2) is None
    assert all(map(torch.equal, before[0], weights(agent)))
    assert torch.equal(before[1], agent.update_generator.get_state())
    assert closed_form.take_steps(agent, sound, clip_range=0.2) is not None


def test_equal_advantages_are_left_to_the_plain_update():
    agent = agent_of(minibatch_size=32)
    rollout = agent.collect()
    add_advantages(agent, rollout)
    sound = rollout.clone()
    rollout["advantage"] = rollout["mask"].float()
    assert closed_form.take_steps(agent, rollout, clip_range=0.2) is None
    assert closed_form.take_steps(agent, sound, clip_range=0.2) is not None


@pytest.mark.heavy
def test_cartpole_is_learned_by_it():
    env = cartpole(8)
    agent = fast(PPO(env, None, PPOConfig(num_steps=64, minibatch_size=128, learning_rate=3e-3, seed=1)))
    assert [agent.update(agent.collect())["update/path"] for _ in range(24)] == [2] * 24
    assert evaluate(cartpole(8), agent.policy, num_episodes=20, seed=0).mean_return > 60


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.heavy), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_compiled_policy_updates_as_before(backend, tmp_path, monkeypatch):
    """Both trace what the policy computes, and its gradient; inductor takes a minute for C++ code of the trace."""
    # The compiler's own cache has code for the instructions of other runs, whatever ATEN_CPU_CAPABILITY says now
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    agents = [plain(agent_of(minibatch_size=32)) for _ in range(2)]
    agents[0].policy.evaluate = torch.compile(agents[0].policy.evaluate, dynamic=True, backend=backend)
    own, other = (agent.update(agent.collect()) for agent in agents)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*map(weights, agents), rtol=0, atol=1e-5)


# --- it stands for exactly the functions that it was written for ------------------------------------------------------


def logged_path(agent, caplog):
    """1 if the steps were computed by autograd, 2 in closed form; and the lines of the log."""
    closed_form._log_once.cache_clear()
    caplog.clear()
    with caplog.at_level("INFO", logger="algos.fast.closed_form"):
        for _ in range(2):
            metrics = agent.update(agent.collect())
    return metrics.get("update/path", 1), [line.getMessage() for line in caplog.records]


def edited(name):
    """A function as it would be after an edit of its source: with a further statement, in the same module."""
    function = inspect.unwrap(find(name))
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    tree.body[0].decorator_list = []
    tree.body[0].body.insert(bool(ast.get_docstring(tree.body[0])), ast.parse("edited = True").body[0])
    text = ast.unparse(tree)
    file = f"<edited {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {}
    exec(compile(text, file, "exec"), function.__globals__ | {"__name__": function.__module__}, names)
    made = types.FunctionType(
        names[function.__name__].__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__ if names[function.__name__].__code__.co_freevars else None,
    )  # fmt: skip
    made.__kwdefaults__, made.__module__, made.__qualname__ = (
        function.__kwdefaults__, function.__module__, function.__qualname__
    )  # fmt: skip
    return made


def owner_of(name):
    """Module or class that holds a function, and its name there."""
    path, _, last = name.rpartition("." if "." in name.partition(":")[2] else ":")
    return (find(path) if ":" in path else importlib.import_module(path)), last


def test_the_recorded_digests_are_those_of_the_sources():
    """If a test failed above, mend `closed_form`; if all pass, record the digests (tests/helpers/digests.py)."""
    changed = [name for name, recorded in closed_form.STANDS_FOR.items() if digest(name) != recorded]
    assert not changed


SHORT = {"num_steps": 8, "minibatch_size": 16, "num_epochs": 1}
"""A short update: which path it takes is decided before its first step."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", closed_form.STANDS_FOR)
def test_after_an_edit_the_update_is_by_autograd(name, monkeypatch, caplog):
    """Also after one in place, as by IPython's autoreload, and with a decorator that passes on the function's name."""
    agent = agent_of("box" if "Gaussian" in name else "native", **SHORT)
    function = find(name)
    wrapper = functools.wraps(function)(lambda *arguments, **options: function(*arguments, **options))
    replacement = edited(name)
    for owner, attribute, value in (
        (*owner_of(name), replacement),
        (inspect.unwrap(function), "__code__", replacement.__code__),
        (*owner_of(name), wrapper),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            path, lines = logged_path(agent, caplog)
        assert path == 1 and len(lines) == 1 and "edited or patched, so PPO's update is not" in lines[0], value
    assert logged_path(agent, caplog) == (2, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algos.ppo.minibatches", lambda *a, **k: minibatches(*a, **k)),
        ("algos.minibatches.whiten", lambda *a, **k: whiten(*a, **k)),
        ("algos.ppo.losses", types.SimpleNamespace(**vars(losses))),
        ("algos.ppo.ratio_metrics", lambda *a, **k: ratio_metrics(*a, **k)),
        ("algos.advantages.ROUNDING_SPREAD", 1e-3),
        ("algos.training.invariants.WHITE_TOLERANCE", 0.5),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_replaced_name_counts_where_it_is_used(name, value, monkeypatch, caplog):
    monkeypatch.setattr(name, value)
    path, lines = logged_path(agent_of(**SHORT), caplog)
    assert path == 1 and len(lines) == 1


def test_another_loss_of_a_known_name_counts_too(monkeypatch, caplog):
    monkeypatch.setitem(losses.NAMED, "clipped_policy_loss", dual_clipped_policy_loss)
    assert logged_path(agent_of(**SHORT), caplog)[0] == 1


def test_an_own_loss_is_called_whatever_its_name(caplog):
    calls = []

    def clipped_policy_loss(*, log_ratio, advantage, mask, clip_range):
        calls.append(clip_range)
        return -(log_ratio.exp() * advantage)

    def token_mean(*, mask):
        calls.append("weights")
        return losses.token_mean(mask=mask)

    for options in ({"policy_loss": clipped_policy_loss}, {"aggregation": token_mean}):
        calls.clear()
        assert logged_path(agent_of(**SHORT, **options), caplog)[0] == 1
        assert calls


def test_methods_of_an_object_count_too(caplog):
    for owner, method in (
        (lambda agent: agent, "loss"),
        (lambda agent: agent.optimizer, "step"),
        (lambda agent: agent.policy, "evaluate"),
        (lambda agent: agent.policy, "read"),
    ):
        agent = agent_of(**SHORT)
        own = owner(agent)
        setattr(own, method, functools.partial(getattr(own, method)))
        path, lines = logged_path(agent, caplog)
        assert path == 1 and len(lines) == 1 and method in lines[0]


def count_calls(calls, owner, name):
    """Replace a method of an object by one that counts its calls."""
    method = getattr(owner, name)

    def counted(*arguments, **options):
        calls.append(name)
        return method(*arguments, **options)

    setattr(owner, name, counted)


HOOKS = {
    "forward hook": lambda agent: agent.policy.actor[0].register_forward_hook,
    "forward pre-hook": lambda agent: agent.policy.critic[2].register_forward_pre_hook,
    "backward hook": lambda agent: agent.policy.actor[2].register_full_backward_hook,
    "hook of a tower": lambda agent: agent.policy.actor.register_forward_hook,
    "hook of all modules": lambda agent: nn.modules.module.register_module_forward_hook,
    "hook of a gradient": lambda agent: agent.policy.actor[0].weight.register_hook,
    "hook after a gradient": lambda agent: agent.policy.actor[0].bias.register_post_accumulate_grad_hook,
    "hook before a step": lambda agent: agent.optimizer.adam.register_step_pre_hook,
    "hook after a step": lambda agent: agent.optimizer.adam.register_step_post_hook,
}
"""Where a hook is registered."""


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_called(name):
    agent = agent_of(**SHORT)
    calls = []
    handle = HOOKS[name](agent)(lambda *arguments: calls.append(name))
    try:
        agent.update(agent.collect())
    finally:
        handle.remove()
    assert calls


METHODS = {
    "forward of a layer": lambda agent: (agent.policy.critic[0], "forward"),
    "forward of an activation": lambda agent: (agent.policy.actor[1], "forward"),
    "forward of a tower": lambda agent: (agent.policy.actor, "forward"),
    "score of a distribution": lambda agent: (agent.policy.distribution, "score"),
    "context of the steps": lambda agent: (agent, "sharded_weights"),
    "step of Adam": lambda agent: (agent.optimizer.adam, "step"),
    "clipping of Adam": lambda agent: (agent.optimizer.adam, "clip_grad_norm_"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_replaced_method_is_called(name):
    agent = agent_of(**SHORT)
    calls = []
    count_calls(calls, *METHODS[name](agent))
    agent.update(agent.collect())
    assert calls


@pytest.mark.parametrize("name", ["forward hook", "hook of all modules"])
def test_a_hook_is_called_when_acting(name):
    agent = agent_of()
    calls = []
    handle = HOOKS[name](agent)(lambda *arguments: calls.append(name))
    try:
        agent.policy.act(agent.env.reset(seed=1)[0])
    finally:
        handle.remove()
    assert calls
    number = len(calls)
    agent.policy.act(agent.env.reset(seed=1)[0])
    assert len(calls) == number


def test_a_sign_changes_the_digest_but_no_docstring():
    texts = ['def f(x):\n    "One."\n    return -x  # minus', "def f(x):\n    return -x", "def f(x):\n    return +x"]
    digests = []
    for number, text in enumerate(texts):
        names, file = {}, f"<digest {number}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), names)
        digests.append(syntax_digest(names["f"]))
    assert digests[0] == digests[1] != digests[2] and None not in digests


BEFORE_THE_STEPS = {
    "algos.advantages:add_advantages",
    "algos.advantages:_scaled_rewards",
    "algos.advantages:_state_values",
    "algos.advantages:_ends",
    "algos.advantages:gae",
    "algos.advantages:_gae",
    "algos.advantages:_fold",
    "algos.policies.mlp:MLPPolicy.value",
    "algos.policies.policy:ControlPolicy.values",
    "algos.policies.policy:step_values",
    "algos.config:discount",
    "algos.config:scheduled",
    "algos.optimizer:Optimizer.__init__",
    "algos.optimizer:check_dtypes",
    "algos.optimizer:Optimizer.schedule",
    "algos.ranks.collectives:map_rows",
    "algos.agent:Agent.config",
    "algos.agent:Agent.optimizer",
    "algos.agent:Agent.sharded_weights",
    "textenv.acceleration:fast_module",
    "textenv.rollout:join_column",
    "textenv.rollout:join_episodes",
    "textenv.rollout:next_values",
    "textenv.rollout:split_column",
    "algos.advantages:after_waiting",
    "textenv.rollout:waits_after",
}
"""What `PPO.update` calls before its steps, whichever way they are computed, and a context of nothing."""
INSIDE = {
    "algos.minibatches:places",
    "algos.training.metrics:MetricMeans.__init__",
    "algos.policies.policy:Policy.device",
    "algos.policies.policy:Policy.autocast",
    "algos.policies.distributions:_refuse_mask",
    "algos.ranks.collectives:world_size",
    "algos.ranks.collectives:_joined",
    "textenv.state:is_our_code",
    "textenv.state:_root",
}
"""What only words of errors, conditions of `closed_form` or empty objects depend on."""


@pytest.mark.parametrize("kind", ["native", "box"])
def test_every_function_that_the_steps_call_is_covered(kind):
    """And what it covers is called: by this update or by the other one."""
    agent = plain(agent_of(kind, minibatch_size=48, clip_range_vf=0.2, ent_coef=0.1, target_kl=1.0))
    rollout = agent.collect()
    called = set()

    def look(frame, event, _):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname.partition(".<locals>")[0]
        if event == "call" and module.partition(".")[0] in ("algos", "textenv") and "<" not in name:
            called.add(f"{module}:{name}")

    sys.setprofile(look)
    try:
        agent.update(rollout)
    finally:
        sys.setprofile(None)
    called = {name for name in called if not name.startswith("algos.fast.")}
    assert called <= {*closed_form.STANDS_FOR, *BEFORE_THE_STEPS, *INSIDE}
    other = "Categorical" if kind == "box" else "Gaussian"
    ours = {name for name in closed_form.STANDS_FOR if "fast" not in name and other not in name}
    assert ours - called <= {
        "algos.policies.towers:actor_and_critic",
        "algos.policies.distributions:_log_prob_and_entropy",
        "algos.policies.distributions:_masked",
    }


COPIES = """
import os, sys
import gymnasium, tensordict, torch  # once for all copies of our packages
sys.path.remove(os.environ["PYTHONPATH"])
# An editable installation would find in the checkout what a copy lacks.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
assert not [name for name in sys.modules if name.partition(".")[0] in ("algos", "textenv")]
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        sys.stdout = open(folder + "/printed", "w")
        import logging
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        from algos import PPO
        history = PPO(gymnasium.make_vec("CartPole-v1", num_envs=4), seed=1, num_steps=32).learn(300)
        print(history[0]["update/path"], history[0]["value/loss"], flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the same program prints with three copies of the packages: by name of the copy, lines."""
    home = tmp_path_factory.mktemp("copies")
    for copied, left_out in (("whole", ()), ("edited", ()), ("without fast paths", ("fast",))):
        for package in ("algos", "textenv"):
            shutil.copytree(
                ROOT / package, home / copied / package, ignore=shutil.ignore_patterns("__pycache__", *left_out)
            )
    path = home / "edited" / "algos" / "losses.py"
    half = path.read_text().replace("return 0.5 * squared_error", "return 0.25 * squared_error")
    path.write_text(half)
    folders = sorted(home.iterdir())
    environment = os.environ | {"PYTHONPATH": str(home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-P", "-c", COPIES, *map(str, folders)], env=environment, check=True, cwd=home)
    return {folder.name: (folder / "printed").read_text().splitlines() for folder in folders}


@pytest.mark.heavy
def test_an_edit_of_the_source_has_its_effect(printed):
    """Half the value loss, in a copy of the packages: without a word in between, nobody recorded a digest."""
    (whole,) = printed["whole"]
    assert whole.startswith("2 ")
    line, numbers = printed["edited"]
    assert line.startswith("WARNING algos.losses:value_loss was edited or patched, so PPO's update is not computed")
    assert numbers.startswith("1 ") and float(numbers.split()[1]) < 0.6 * float(whole.split()[1])


@pytest.mark.heavy
def test_the_folder_of_fast_paths_can_be_deleted(printed):
    (line,) = printed["without fast paths"]
    assert line.startswith("0 ")
