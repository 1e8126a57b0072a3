"""What always holds while training: for each invariant a broken setup that training catches, names and keeps."""

import json
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import nn

from algos import (
    A2C,
    DQN,
    GRPO,
    PPO,
    REINFORCE,
    RLOO,
    TRPO,
    A2CConfig,
    DQNConfig,
    GRPOConfig,
    MLPPolicy,
    PPOConfig,
    QPolicy,
    REINFORCEConfig,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    TRPOConfig,
)
from algos.advantages import whiten
from algos.cli import main
from algos.config import Config
from algos.losses import clipped_policy_loss
from algos.minibatches import minibatches
from algos.optimizer import Optimizer
from algos.training.invariants import InvariantError, NonFiniteError, check_advantages, check_whitened
from tests.helpers.lora import lora_policy
from tests.helpers.models import make_gpt2
from tests.helpers.small_agents import cartpole, lm_policy, mlp_for
from tests.helpers.text_envs import text_env
from textenv import KLPenalty
from textenv.rollout import Evaluation

SMALL = dict(num_steps=16, num_epochs=2, minibatch_size=16, learning_rate=1e-3)
ROWS = dict(num_episodes=8, num_epochs=2, minibatch_size=4, learning_rate=1e-3)
ALGORITHMS = {
    "a2c": (A2C, A2CConfig(num_steps=16)),
    "grpo": (GRPO, GRPOConfig(num_episodes=8, group_size=4)),
    "ppo": (PPO, PPOConfig(**SMALL)),
    "reinforce": (REINFORCE, REINFORCEConfig(num_episodes=8)),
    "reinforce_plus_plus": (REINFORCEPlusPlus, REINFORCEPlusPlusConfig(num_episodes=8)),
    "rloo": (RLOO, RLOOConfig(num_episodes=8)),
    "trpo": (TRPO, TRPOConfig(num_steps=16)),
}
BY_VALUE = ["a2c", "ppo", "trpo"]


def control(policy=None, *, env=None, penalty=None, kind="ppo", **options):
    env = cartpole() if env is None else env
    make, config = ALGORITHMS[kind]
    config = config if not options else PPOConfig(**(SMALL | options))
    return make(env, mlp_for(env) if policy is None else policy(env), config, penalty=penalty)


def text(policy, *, penalty=None, **options):
    config = PPOConfig(num_steps=None, bootstrap_truncated=False, **(ROWS | options))
    return PPO(text_env(), policy, config, penalty=penalty)


def caught(agent, folder, tensor, *, kind=InvariantError, **options):
    """The error that ends a training, the batch on disk, and the rollout that it came from."""
    seen, update = [], agent.update

    def spy(rollout):
        seen.append(rollout)
        return update(rollout)

    agent.update = spy
    with pytest.raises(kind) as raised:
        agent.learn(400, run_dir=folder, **options)
    error, batch = raised.value, load_file(folder / "violation.safetensors")
    report = json.loads((folder / "violation.json").read_text())
    assert error.tensor == report["tensor"] == tensor and str(error).startswith(f"{tensor}: ")
    assert report["rows"] == error.rows and report["error"] == str(error)
    notes = "\n".join(error.__notes__)
    assert f"in iteration {report['iteration']}, after {report['steps']} steps" in notes
    assert str(folder / "violation.safetensors") in notes
    assert set(batch) >= {"mask", "action", "log_prob", "observation"}
    return error, batch, seen[-1] if seen else None


def same_entries(batch, rollout, *names):
    """A minibatch on disk says where in the rollout its entries stood."""
    for name in names:
        assert torch.equal(batch[name], rollout[name][batch["row"], batch["column"]])


class Says(MLPPolicy):
    """A perceptron that says something else than it should, by a function of the evaluation and the batch."""

    def __init__(self, env, change):
        super().__init__(env.single_observation_space, env.single_action_space, hidden=(16,))
        self.change = change

    def evaluate(self, rollout):
        return Evaluation(*self.change(super().evaluate(rollout), rollout))


def says(change):
    return lambda env: Says(env, change)


# --- ratio = 1, sampler against scorer -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_scoring_unlike_acting_is_caught_at_its_rows(kind, tmp_path):
    def change(said, rollout):
        return said.log_prob + 0.01 * (rollout["action"] == 1), said.entropy, said.value

    error, batch, rollout = caught(control(says(change), kind=kind), tmp_path, "log_prob")
    assert "tolerance 0.001" in str(error) and len(error.rows) == 8
    assert all(rollout["action"][row, column] == 1 for row, column in error.rows)
    same_entries(batch, rollout, "log_prob", "action")
    wrong = (batch["scored_log_prob"] - batch["log_prob"]).abs() > 1e-3
    assert torch.equal(wrong, (batch["action"] == 1) & batch["mask"])


def test_dropout_in_a_language_model_is_caught(tmp_path):
    policy = lm_policy(lambda: make_gpt2(resid_pdrop=0.5))
    agent = text(policy, micro_batch_size=2)
    agent.collect()  # a policy that begins to act with dropout on is refused
    policy.lm.model.train()
    error, batch, rollout = caught(agent, tmp_path, "log_prob")
    assert "dropout" in str(error) and batch["mask"].shape[0] == 2
    same_entries(batch, rollout, "log_prob", "observation")
    assert all(rollout["mask"][row, column] for row, column in error.rows)


# --- entropy >= 0 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_an_entropy_of_the_wrong_sign_is_caught(kind, tmp_path):
    def change(said, rollout):
        return said.log_prob, torch.where(rollout["action"] == 0, -said.entropy, said.entropy), said.value

    error, batch, rollout = caught(control(says(change), kind=kind), tmp_path, "entropy")
    assert all(rollout["action"][row, column] == 0 for row, column in error.rows)
    assert torch.equal(batch["entropy"] < 0, (batch["action"] == 0) & batch["mask"])


def test_a_differential_entropy_may_be_negative():
    env = SyncVectorEnv([lambda: gym.make("Pendulum-v1")] * 2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, log_std_init=-3.0)
    history = PPO(env, policy, PPOConfig(**SMALL)).learn(32)
    assert history[0]["policy/entropy"] < 0


# --- finite ----------------------------------------------------------------------------------------------------------


class Spoilt(gym.Wrapper):
    """Pays or shows something that is no number at the fifth step."""

    def __init__(self, env, what):
        super().__init__(env)
        self.what, self.steps = what, 0

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self.steps += 1
        if self.steps == 5 and self.what == "reward":
            reward = float("inf")
        if self.steps == 5 and self.what == "observation":
            observation = observation * float("nan")
        return observation, reward, *rest


def spoilt_cartpole(what, slots=3):
    makers = [lambda: gym.make("CartPole-v1") for _ in range(slots - 1)]
    return SyncVectorEnv([*makers, lambda: Spoilt(gym.make("CartPole-v1"), what)])


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
@pytest.mark.parametrize(("what", "column"), [("observation", 5), ("reward", 4)])
def test_a_nan_reward_or_observation_is_caught(what, column, kind, tmp_path):
    agent = control(env=spoilt_cartpole(what), kind=kind)
    error, batch, rollout = caught(agent, tmp_path, what, kind=NonFiniteError)
    assert rollout is None, "before anything was made from it"
    if kind in BY_VALUE:  # else each slot plays several episodes, and the wrapper counts on
        assert error.rows == [[2, column]]
    assert (~batch[what].isfinite()).any() and isinstance(error, FloatingPointError)


class EndsAtInfinity(gym.Env):
    """Shows infinity at its end, after four steps."""

    observation_space = gym.spaces.Box(-float("inf"), float("inf"), (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, is_terminated):
        self.is_terminated = is_terminated

    def observe(self):
        return np.array([np.inf if self.time == 4 else self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        is_over = self.time == 4
        return self.observe(), 1.0, is_over and self.is_terminated, is_over and not self.is_terminated, {}


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_infinite_last_observation_is_caught_where_it_is_bootstrapped(mode, algorithm):
    """Where tanh makes its value finite, too; after a termination it is not read."""
    env = SyncVectorEnv([lambda: EndsAtInfinity(False)] * 2, autoreset_mode=mode)
    with pytest.raises(NonFiniteError, match="next_observation"):
        algorithm(env, num_steps=8).learn(32)
    env = SyncVectorEnv([lambda: EndsAtInfinity(True)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    algorithm(env, num_steps=8).learn(32)


def test_dqn_does_not_remember_what_is_no_number(tmp_path):
    env = spoilt_cartpole("reward")
    agent = DQN(env, QPolicy(env.single_observation_space, env.single_action_space), DQNConfig())
    error, _, _ = caught(agent, tmp_path, "reward", kind=NonFiniteError)
    assert error.rows == [[2, 4]] and len(agent.buffer) == 0


def test_dqn_names_the_loss_that_divides_by_zero(tmp_path):
    env = cartpole()
    config = DQNConfig(learning_starts=32, batch_size=8, loss=lambda worth, target: ((worth - target) / 0.0).mean())
    agent = DQN(env, QPolicy(env.single_observation_space, env.single_action_space), config)
    with pytest.raises(NonFiniteError, match="^value/loss: not finite, so step 1 of the optimiser was not taken"):
        agent.learn(200, run_dir=tmp_path)
    assert load_file(tmp_path / "violation.safetensors")["reward"].shape == (8,)


@pytest.mark.parametrize("kind", BY_VALUE)
def test_a_critic_that_overflows_is_caught(kind, tmp_path):
    agent = control(kind=kind)
    agent.policy.critic[-1].bias.data.fill_(torch.inf)
    error, batch, _ = caught(agent, tmp_path, "value", kind=NonFiniteError)
    assert batch["value"].isinf().all() and error.rows[:2] == [[0, 0], [0, 1]]


def test_weights_that_are_no_numbers_are_caught(tmp_path):
    agent = control()
    agent.policy.actor[-1].bias.data.fill_(torch.nan)
    caught(agent, tmp_path, "log_prob", kind=NonFiniteError)


def divides_by_zero(*, log_ratio, advantage, mask, clip_range):
    return -(log_ratio.exp() * advantage) / (advantage > 0)


def without_a_slope(*, log_ratio, advantage, mask, clip_range):
    from_itself = log_ratio - log_ratio.detach()  # 0 to the last bit, where a root has no slope
    return from_itself.square().sqrt()


@pytest.mark.parametrize("micro", [None, 5])
def test_a_loss_that_divides_by_zero_is_caught(micro, tmp_path):
    agent = control(policy_loss=divides_by_zero, micro_batch_size=micro)
    before = [p.clone() for p in agent.policy.parameters()]
    error, batch, rollout = caught(agent, tmp_path, "policy/loss", kind=NonFiniteError)
    assert "step 1 of the optimiser" in str(error) and "divide by 0" in str(error)
    assert all(torch.equal(p, old) for p, old in zip(agent.policy.parameters(), before, strict=True))
    wrong = {(int(row), int(column)) for row, column in zip(batch["row"], batch["column"], strict=True)}
    assert len(batch["advantage"]) == 16 and {tuple(place) for place in error.rows} <= wrong
    values = {(int(r), int(c)): a for r, c, a in zip(batch["row"], batch["column"], batch["advantage"], strict=True)}
    assert all(values[tuple(place)] <= 0 for place in error.rows)
    assert len(error.rows) == min(8, int((batch["advantage"] <= 0).sum()))
    same_entries(batch, rollout, "log_prob", "value_target")


def test_an_infinite_slope_is_caught_in_the_gradient(tmp_path):
    error, _, _ = caught(control(policy_loss=without_a_slope), tmp_path, "gradient of actor.0.weight")
    assert "without a gradient" in str(error) and isinstance(error, NonFiniteError)


def test_a_nan_value_of_evaluate_is_caught_at_its_rows(tmp_path):
    def change(said, rollout):
        left = rollout["observation"][..., 0] < 0
        return said.log_prob, said.entropy, said.value.masked_fill(left, torch.nan)

    error, _, rollout = caught(control(says(change)), tmp_path, "evaluate().value")
    assert all(rollout["observation"][row, column, 0] < 0 for row, column in error.rows)


def log_prob_without_a_slope(said, rollout):
    return said.log_prob + (said.log_prob - said.log_prob.detach()).square().sqrt(), said.entropy, said.value


def test_trpo_names_the_actors_gradient(tmp_path):
    agent = control(says(log_prob_without_a_slope), kind="trpo")
    error, _, _ = caught(agent, tmp_path, "gradient of actor.0.weight", kind=NonFiniteError)
    assert "the actor's step was not taken" in str(error)


def test_an_auxiliary_loss_that_is_no_number_is_caught(tmp_path):
    env = cartpole()
    agent = PPO(env, mlp_for(env), PPOConfig(**SMALL), auxiliary=lambda policy: policy.actor[0].bias.sum() * torch.inf)
    error, _, _ = caught(agent, tmp_path, "auxiliary/loss", kind=NonFiniteError)
    assert error.rows == []


def test_an_infinite_loss_of_finite_gradient_is_caught():
    weight, batch = nn.Parameter(torch.ones(1)), TensorDict({}, batch_size=[2])
    descent = Optimizer([weight], Config())
    with pytest.raises(NonFiniteError, match="it: not finite"):
        descent.step(lambda part: ((weight + torch.inf).sum(), {"it": torch.tensor(torch.inf)}), batch)
    assert weight.item() == 1


# --- the mask is inert -----------------------------------------------------------------------------------------------


class Unmasked(KLPenalty):
    """A penalty of one's own that left the mask out."""

    def __call__(self, rollout, policy):
        super().__call__(rollout, policy)
        rollout["kl"] = rollout["kl"] + 0.1


def test_a_penalty_off_the_mask_is_caught(tmp_path):
    agent = control(penalty=Unmasked(mlp_for(cartpole(), seed=3), 0.1), num_steps=64)
    error, batch, _ = caught(agent, tmp_path, "kl")
    assert not batch["mask"].all() and not any(batch["mask"][row, column] for row, column in error.rows)


@pytest.mark.parametrize("name", ["advantage", "value_target"])
def test_advantages_outside_the_mask_are_caught(name):
    mask = torch.tensor([[True, False, True], [True, True, False]])
    rollout = TensorDict({"mask": mask, "advantage": 1.0 * mask, "value_target": 1.0 * mask}, batch_size=[2, 3])
    check_advantages(rollout)
    rollout[name][1, 2] = 0.5
    with pytest.raises(InvariantError) as raised:
        check_advantages(rollout)
    assert raised.value.tensor == name and raised.value.rows == [[1, 2]]
    with pytest.raises(InvariantError, match=name):  # where all but TRPO begin an update
        next(iter(minibatches(rollout, sequential=False, generator=torch.Generator(), size=4, num_epochs=1)))


def test_an_aggregation_off_the_mask_is_caught(tmp_path):
    def everything(*, mask):
        return torch.full(mask.shape, 1 / mask.numel())

    error, batch, _ = caught(text(lm_policy(), aggregation=everything), tmp_path, "weight")
    assert not batch["mask"].all() and (batch["weight"] > 0).all() and len(error.rows[0]) == 2


# --- advantages ------------------------------------------------------------------------------------------------------

BROKEN_WHITENING = {
    "mean kept": lambda x, mask: whiten(x, mask=mask, shift_mean=False) + 0.1,
    "not at all": lambda x, mask: x,
    "variance for deviation": lambda x, mask: (x - x[mask].mean()) / x[mask].var(),
}


@pytest.mark.parametrize("how", sorted(BROKEN_WHITENING))
def test_whitening_that_does_not_whiten_is_caught(how):
    raw = 5 + 2 * torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    white = torch.where(mask, BROKEN_WHITENING[how](raw, mask), 0.0)
    with pytest.raises(InvariantError, match="mean is .* standard deviation") as raised:
        check_whitened(TensorDict({"mask": mask, "advantage": white}, batch_size=[6, 7]), raw=raw)
    assert raised.value.tensor == "advantage"


class Rich(gym.Wrapper):
    """Pays so much that the squares of advantages, or the advantages themselves, overflow."""

    def __init__(self, env, scale):
        super().__init__(env)
        self.scale = scale

    def step(self, action):
        observation, reward, *flags_and_info = self.env.step(action)
        return observation, self.scale * reward, *flags_and_info


@pytest.mark.parametrize("kind", ["ppo", "reinforce", "trpo"])
def test_whitening_that_overflows_is_caught(kind, tmp_path):
    env = SyncVectorEnv([lambda: Rich(gym.make("CartPole-v1"), 1e25)] * 4)
    error, batch, _ = caught(control(env=env, kind=kind), tmp_path, "advantage")
    assert "overflow when they are squared: scale the rewards down" in str(error)
    assert batch["advantage_before"][batch["mask"]].abs().max() > 1e24


@pytest.mark.parametrize("kind", BY_VALUE)
def test_advantages_that_overflow_are_caught(kind, tmp_path):
    env = SyncVectorEnv([lambda: Rich(gym.make("CartPole-v1"), 3e38)] * 4)
    caught(control(env=env, kind=kind), tmp_path, "advantage", kind=NonFiniteError)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 7.3, 1e6])
def test_equal_advantages_need_no_spread(scale):
    raw = torch.full((3, 4), scale)
    batch = TensorDict({"mask": raw.isfinite()}, batch_size=[3, 4])
    check_whitened(batch.set("advantage", whiten(raw, mask=batch["mask"])), raw=raw)


# --- the reference ---------------------------------------------------------------------------------------------------


def test_kl_above_0_to_equal_weights_is_caught(tmp_path):
    policy = lm_policy(lambda: make_gpt2(resid_pdrop=0.5))
    reference = policy.reference()
    reference.model.train()
    error, batch, _ = caught(text(policy, penalty=KLPenalty(reference, 0.1)), tmp_path, "kl")
    assert "same weights" in str(error) and batch["kl"].shape == batch["mask"].shape == (8, batch["mask"].shape[1])
    assert all(batch["mask"][row, column] for row, column in error.rows)


def test_an_estimator_not_0_at_equality_is_caught(tmp_path):
    policy = lm_policy()
    penalty = KLPenalty(policy.reference(), 0.1, estimator=lambda log_ratio: log_ratio + 0.5)
    caught(text(policy, penalty=penalty), tmp_path, "kl")


@pytest.mark.parametrize("hidden_from_autograd", [False, True])
@pytest.mark.parametrize("make", ["text", "control"])
def test_a_reference_that_is_trained_is_caught(make, hidden_from_autograd, tmp_path):
    """One weight of it, in a step of an optimiser or behind autograd's back."""
    policy = lm_policy() if make == "text" else mlp_for(cartpole())
    reference = policy.reference()
    name, weight = list(reference.named_parameters())[2]
    agent = (text if make == "text" else control)(
        policy if make == "text" else lambda _: policy, penalty=KLPenalty(reference, 0.1)
    )

    def train(metrics):
        with torch.no_grad():
            (weight.data if hidden_from_autograd else weight).view(-1)[3].add_(1e-6)

    error, _, _ = caught(agent, tmp_path, f"reference.{name}", on_iteration=train)
    assert "in iteration 2" in error.__notes__[0] and "1 of its" in str(error)


@pytest.mark.heavy
def test_a_reference_may_share_what_does_not_train():
    policy = lora_policy()
    history = text(policy, penalty=KLPenalty(policy.reference(), 0.1)).learn(100)
    assert len(history) > 1


# --- a step that is skipped ------------------------------------------------------------------------------------------


def state_of(agent):
    """Weights, and the optimiser's moments and counts."""
    moments = [x for state in agent.optimizer.adam.state.values() for x in state.values()]
    return [x.detach().clone() for x in (*agent.policy.parameters(), *moments)]


@pytest.mark.parametrize("algorithm", [(PPO, PPOConfig), (A2C, A2CConfig)], ids=["ppo", "a2c"])
def test_a_nan_first_minibatch_is_skipped_too(algorithm):
    class Broken(MLPPolicy):
        def evaluate(self, rollout):
            found = super().evaluate(rollout)
            return found._replace(log_prob=found.log_prob * torch.nan)

    env, (agent, config) = cartpole(), algorithm
    policy = Broken(env.single_observation_space, env.single_action_space)
    before = [p.detach().clone() for p in policy.parameters()]
    history = agent(env, policy, config(num_steps=16, skip_nonfinite=True)).learn(64)
    assert history[0]["update/skipped"] >= 1
    assert all(map(torch.equal, before, policy.parameters()))
    with pytest.raises(NonFiniteError, match="not finite"):
        agent(env, policy, config(num_steps=16)).learn(64)


def test_a_taken_action_scored_impossible_is_caught():
    """Its ratio is 0, and so is its gradient."""

    class Impossible(MLPPolicy):
        def evaluate(self, rollout):
            found = super().evaluate(rollout)
            return found._replace(log_prob=found.log_prob - torch.inf)

    env = cartpole()
    policy = Impossible(env.single_observation_space, env.single_action_space)
    with pytest.raises(InvariantError, match="inf nats away"):
        PPO(env, policy, PPOConfig(num_steps=16, skip_nonfinite=True)).learn(64)


@pytest.mark.parametrize("micro", [None, 5])
def test_a_skipped_step_changes_nothing_and_is_counted(micro):
    """The third minibatch of the first update has a loss that is no number."""
    calls, states = [], []

    def loss(*, log_ratio, advantage, mask, clip_range):
        calls.append(len(states))
        found = clipped_policy_loss(log_ratio=log_ratio, advantage=advantage, mask=mask, clip_range=clip_range)
        return found * torch.nan if len(states) == 2 else found

    agent = control(policy_loss=loss, micro_batch_size=micro, skip_nonfinite=True, target_kl=10.0)
    step = agent.optimizer.step

    def spy(*arguments):
        before = state_of(agent)
        totals = step(*arguments)
        states.append((before, state_of(agent), totals))
        return totals

    agent.optimizer.step = spy
    history = agent.learn(120)
    assert [metrics["update/skipped"] for metrics in history] == [1] + [0] * (len(history) - 1)
    assert all(torch.tensor(list(metrics.values())).isfinite().all() for metrics in history)
    for number, (before, after, totals) in enumerate(states):
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert same == (number == 2) == (not totals)
    assert len(states[2][0]) > len(list(agent.policy.parameters()))  # the moments are there to be compared


def test_a_skipped_trpo_step_leaves_the_actor():
    env = cartpole()
    agent = TRPO(env, Says(env, log_prob_without_a_slope), TRPOConfig(num_steps=16, skip_nonfinite=True))
    before = [p.clone() for p in agent.policy.actor.parameters()]
    assert [metrics["update/skipped"] for metrics in agent.learn(100)] == [1, 1]
    assert all(map(torch.equal, before, agent.policy.actor.parameters()))


def test_without_a_folder_the_error_still_says_when():
    agent = control(policy_loss=divides_by_zero)
    with pytest.raises(NonFiniteError) as raised:
        agent.learn(100)
    assert raised.value.__notes__ == ["in iteration 1, after 0 steps"] and raised.value.batch is not None


# --- what is healthy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_healthy_control_raises_nothing(kind):
    env = cartpole()
    policy = mlp_for(env, normalize_observations=True)
    agent = control(lambda _: policy, env=env, kind=kind, penalty=KLPenalty(policy.reference(), 0.01))
    history = agent.learn(400)
    assert len(history) > 1 and all(metrics["update/skipped"] == 0 for metrics in history)


def test_healthy_dqn_raises_nothing():
    env = cartpole()
    config = DQNConfig(learning_starts=64, batch_size=16)
    agent = DQN(env, QPolicy(env.single_observation_space, env.single_action_space, hidden=(16,)), config)
    assert agent.learn(400)[-1]["update/skipped"] == 0


@pytest.mark.heavy
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_healthy_grpo_on_text_raises_nothing(place):
    policy = lm_policy()
    penalty = KLPenalty(policy.reference(), 0.01, "k1" if place == "reward" else "k2", place)
    agent = GRPO(text_env(), policy, GRPOConfig(num_episodes=8, group_size=4, minibatch_size=4), penalty=penalty)
    assert len(agent.learn(100)) > 1


@pytest.mark.filterwarnings("ignore:.*The reward is an inf value")
def test_the_command_tells_a_violation_by_its_status(tmp_path, monkeypatch, capsys):
    (tmp_path / "endless.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Endless(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        observation, _, *rest = super().step(action)\n"
        "        return observation, float('inf'), *rest\n"
        "gymnasium.register('Endless-v0', Endless)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(SystemExit) as stop:
            main(["train", "endless:Endless-v0", "--total-steps", "600", "--run-dir", str(tmp_path / "run")])
    finally:
        gym.registry.pop("Endless-v0", None)
        sys.modules.pop("endless", None)
    said = capsys.readouterr().err
    assert stop.value.code == 1 and "Traceback" not in said
    assert "algos: reward: found [inf" in said and "algos: the batch is in" in said
    assert (tmp_path / "run" / "violation.safetensors").is_file()
