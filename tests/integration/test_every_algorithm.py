"""What every policy-gradient algorithm must do alike: masks, padding, cuts, the first ratio, seeds, wrong configs."""

import json
import math
from functools import partial
from typing import get_args

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

import algos
from algos import PPO, Collector, LSTMPolicy, MLPPolicy, PPOConfig, QPolicy, collect, evaluate
from algos.a2c import A2C, A2CConfig
from algos.config import AlgorithmName
from algos.dqn import DQNConfig
from algos.grpo import GRPO, GRPOConfig
from algos.losses import (
    ClipCovLoss,
    KLCovLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    dual_clipped_policy_loss,
    fixed_length_mean,
    gspo_policy_loss,
    opsm_policy_loss,
    sequence_mean,
    thresholded_policy_loss,
    token_mean,
)
from algos.make import find_algorithm, make_policy
from algos.minibatches import minibatches
from algos.presets import VALUE_POLICIES, recipe
from algos.reinforce import REINFORCE, REINFORCEConfig
from algos.reinforce_plus_plus import REINFORCEPlusPlusConfig
from algos.rloo import RLOO, RLOOConfig
from algos.training.metrics import reference_metrics, rollout_metrics
from algos.trpo import TRPO, TRPOConfig
from tests.helpers.control_envs import ExactCritic, chain, signals
from tests.helpers.models import make_gpt2
from tests.helpers.oracle import name_of
from tests.helpers.rollouts import ANSWERS, other_weights, padded, spoil, spoil_policy, with_empty_rows
from tests.helpers.small_agents import cartpole, gradients, lm_policy, mlp_for, scored
from tests.helpers.text_envs import GOOD, Script, play, text_env
from textenv import KLPenalty

FIXED = partial(fixed_length_mean, length=6)
STEPS = dict(num_steps=None, num_episodes=8, bootstrap_truncated=False)
PASSES = dict(num_epochs=2, minibatch_size=3)
CONFIGS = {
    "a2c": A2CConfig(**STEPS),
    "grpo": GRPOConfig(num_episodes=8, group_size=4, **PASSES),
    "grpo, fixed length": GRPOConfig(num_episodes=8, group_size=4, aggregation=FIXED, scale_by_std=False, **PASSES),
    "ppo": PPOConfig(**STEPS, **PASSES, clip_range_vf=0.1),
    "ppo, dual clip": PPOConfig(**STEPS, **PASSES, policy_loss=partial(dual_clipped_policy_loss, limit=1.1)),
    "ppo, sequence mean": PPOConfig(**STEPS, **PASSES, aggregation=sequence_mean),
    "ppo, threshold": PPOConfig(**STEPS, **PASSES, policy_loss=partial(thresholded_policy_loss, threshold=1.1)),
    "ppo, clip-cov": PPOConfig(**STEPS, **PASSES, policy_loss=ClipCovLoss(fraction=0.3, low=0.01)),
    "ppo, kl-cov": PPOConfig(**STEPS, **PASSES, policy_loss=KLCovLoss(fraction=0.3)),
    "reinforce": REINFORCEConfig(num_episodes=8),
    "reinforce_plus_plus": REINFORCEPlusPlusConfig(num_episodes=8, **PASSES),
    "rloo": RLOOConfig(num_episodes=8, group_size=4),
    "trpo": TRPOConfig(**STEPS, critic_epochs=2, minibatch_size=3, conjugate_gradient_steps=5),
}
KINDS = pytest.mark.parametrize("kind", sorted(CONFIGS))
EIGHT = [*ANSWERS, (GOOD, GOOD, 2, 7)]


def agent(kind, env, policy, *, penalty=None, **options):
    """An algorithm with its config above and these numbers in it."""
    config = CONFIGS[kind]
    name = name_of(config)
    if name == "trpo":
        options = {key: x for key, x in options.items() if key not in ("micro_batch_size", "ent_coef")}
    # Control's eps, under which a gradient that is nothing but rounding moves nothing.
    given = {field: getattr(config, field) for field in config.__dataclass_fields__} | {"adam_eps": 1e-5}
    return find_algorithm(name)(env, policy, type(config)(**(given | options)), penalty=penalty)


def passes(kind, **options):
    """What of these the config has."""
    return {name: x for name, x in options.items() if name in CONFIGS[kind].__dataclass_fields__}


def in_two_groups(rollout):
    rollout["group"] = torch.arange(2).repeat_interleave(4)[:, None].expand(rollout.shape)
    return rollout


def text(scores=None):
    """Environment, policy and a rollout of eight answers in two groups."""
    env, policy = text_env(Script(scores=scores)), lm_policy()
    return env, policy, scored(in_two_groups(play(env, EIGHT)), policy)


def control(policy_class=MLPPolicy):
    """Eight episodes of CartPole in two groups; padded, as they are unequally long."""
    env = cartpole(4)
    policy = policy_class(env.single_observation_space, env.single_action_space, hidden=HIDDEN[policy_class])
    rollout = collect(env, policy, num_episodes=8, group_size=4, seed=0)
    # Episodes of unequal worth, for the return of CartPole is but their length.
    rollout["reward"] = rollout["reward"] * rollout["observation"][..., 3].tanh().where(rollout["mask"], 0.0)
    return env, policy, rollout


HIDDEN = {MLPPolicy: (16,), LSTMPolicy: 8}
MADE = {"text": text, "control": control, "recurrent": partial(control, LSTMPolicy)}
WHERE = pytest.mark.parametrize("where", sorted(MADE))


# --- what must not matter --------------------------------------------------------------------------------------------


def updated(kind, env, policy, rollout, *, spoilt=False, **options):
    """All figures of an update and the new weights, which have moved."""
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    penalty = KLPenalty(other_weights(policy), 0.2) if kind != "ppo, threshold" else None
    policy = spoil_policy(policy, seed=1) if spoilt and policy.sequential else policy
    made = agent(kind, env, policy, penalty=penalty, **(dict(learning_rate=1e-2, micro_batch_size=2) | options))
    metrics = {}
    if penalty is not None:
        penalty(rollout, policy)
        metrics = reference_metrics(rollout, coefficient=0.2)
    metrics |= made.update(rollout) | rollout_metrics(rollout)
    after = {name: p.detach().clone() for name, p in policy.named_parameters()}
    assert any(not torch.equal(before[name], x) for name, x in after.items())
    return metrics, after


@pytest.mark.heavy
@WHERE
@KINDS
def test_what_stands_outside_the_mask_changes_no_bit(kind, where):
    more = dict(ent_coef=0.01) | (passes(kind, minibatch_size=50) if where == "control" else {})
    more["micro_batch_size"] = 20 if where == "control" else 2
    metrics, weights = updated(kind, *MADE[where](), **more)
    env, policy, rollout = MADE[where]()
    found, others = updated(kind, env, policy, spoil(rollout, seed=1), spoilt=True, **more)
    assert found == metrics and all(map(math.isfinite, found.values()))
    assert all(torch.equal(weights[name], x) for name, x in others.items())


@pytest.mark.heavy
@KINDS
def test_ten_pad_columns_change_no_figure_or_weight(kind):
    (metrics, weights), (env, policy, rollout) = updated(kind, *text()), text()
    found, others = updated(kind, env, policy, padded(rollout, 10))
    # Fifteen conjugate gradients make more of rounding.
    near = dict(rel=2e-3, abs=1e-4) if kind == "trpo" else dict(rel=1e-4, abs=1e-5)
    assert len(metrics) >= 6 and found == pytest.approx(metrics, **near)
    for name, x in others.items():
        torch.testing.assert_close(x, weights[name], atol=near["abs"] * 10, rtol=0, msg=name)


@pytest.mark.heavy
@KINDS
def test_empty_rows_move_nothing_and_are_counted(kind):
    """In which the policy chose nothing, though the environment paid; in TRPO they shift rounding."""
    (metrics, weights), (env, policy, rollout) = updated(kind, *text()), text()
    found, others = updated(kind, env, policy, with_empty_rows(rollout, 2))
    if "reference/kl" in metrics:  # of each episode, the empty ones too
        metrics["reference/kl"] *= 8 / 10
    assert (metrics.pop("rollout/empty_rows"), found.pop("rollout/empty_rows")) == (0, 2)
    near = dict(rel=2e-3, abs=1e-4) if kind == "trpo" else dict(rel=1e-4, abs=1e-5)
    assert found == pytest.approx(metrics, **near)
    for name, x in others.items():
        torch.testing.assert_close(x, weights[name], atol=near["abs"] * 10, rtol=0, msg=name)


LOSSES = {
    "clipped": clipped_policy_loss,
    "dual": partial(dual_clipped_policy_loss, limit=1.01),
    "higher": partial(clipped_policy_loss, clip_higher=0.5),
    "threshold": partial(thresholded_policy_loss, threshold=1.01),
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "opsm": partial(opsm_policy_loss, threshold=0.01),
    "clip-cov": ClipCovLoss(fraction=0.3, low=0.01),
    "kl-cov": KLCovLoss(fraction=0.3),
}
MEANS = {"fixed": FIXED, "sequence": sequence_mean, "token": token_mean}
CUTS = [pytest.param(kind, {}, id=kind) for kind in ("a2c", "reinforce", "reinforce_plus_plus", "rloo")]
CUTS += [pytest.param("grpo", {"aggregation": MEANS[how]}, id=f"grpo-{how}") for how in sorted(MEANS)]
CUTS += [pytest.param("ppo, sequence mean", {"aggregation": MEANS[how]}, id=f"ppo-{how}") for how in sorted(MEANS)]
CUTS += [pytest.param("ppo, dual clip", {"policy_loss": LOSSES[name]}, id=f"ppo-{name}") for name in sorted(LOSSES)]


@pytest.mark.heavy
@WHERE
@pytest.mark.parametrize(("kind", "options"), CUTS)
def test_the_gradient_does_not_depend_on_micro_batches(kind, options, where):
    """The second of two minibatches: where ratios have moved, so that clips and thresholds have something to say."""
    found = []
    for micro in (7, None) if where == "control" else (1, 2, None):
        env, policy, rollout = MADE[where]()
        size = 5 if policy.sequential else int(rollout["mask"].sum()) - 20
        # By Adam's usual eps, a gradient of nothing but rounding makes a step
        rates = dict(learning_rate=0.02, max_grad_norm=1e9, ent_coef=0.03, micro_batch_size=micro, adam_eps=1e-2)
        agent(kind, env, policy, **(rates | passes(kind, num_epochs=1, minibatch_size=size) | options)).update(rollout)
        found.append(gradients(policy))
    assert max(x.abs().max() for x in found[0].values()) > 1e-3
    for other in found[:-1]:
        for name, expected in found[-1].items():
            torch.testing.assert_close(other[name], expected, atol=2e-5, rtol=1e-3, msg=name)


# --- the first ratio -------------------------------------------------------------------------------------------------


@WHERE
@KINDS
def test_scoring_unlike_acting_is_refused(kind, where):
    env, policy, rollout = MADE[where]()
    before = [p.detach().clone() for p in policy.parameters()]
    rollout["log_prob"] = rollout["log_prob"] + 0.01
    with pytest.raises(RuntimeError, match="evaluate.. and act.. disagree"):
        agent(kind, env, policy, micro_batch_size=2).update(rollout)
    assert all(torch.equal(p, old) for p, old in zip(policy.parameters(), before, strict=True))


@pytest.mark.heavy
@WHERE
@KINDS
def test_the_ratio_is_one_before_the_first_step(kind, where):
    env, policy, rollout = MADE[where]()
    metrics = agent(kind, env, policy, learning_rate=1e-30).update(rollout)
    assert metrics.get("policy/sampler_gap", 0.0) < 1e-5
    if kind != "trpo":
        assert "policy/sampler_gap" in metrics and metrics.get("policy/approx_kl", 0.0) < 1e-9


# --- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("where", ["control", "text"])
@pytest.mark.parametrize("kind", ["a2c", "grpo", "ppo, dual clip", "reinforce", "rloo", "trpo"])
def test_a_seed_gives_one_run_and_another_seed_another(kind, where):
    def run(seed):
        if where == "control":
            env = cartpole(4)
            policy = mlp_for(env, seed=seed)
        else:
            env, policy = text_env(), lm_policy(head=False, seed=seed)
        made = agent(kind, env, policy, seed=seed, learning_rate=1e-2, **passes(kind, minibatch_size=100))
        history = made.learn(250 if where == "control" else 40)
        history = [{k: x for k, x in row.items() if not k.startswith("time/")} for row in history]
        return history, [p.detach().clone() for p in policy.parameters()]

    one, two, other = run(3), run(3), run(4)
    assert one[0] == two[0] and all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    assert one[0] != other[0] and len(one[0]) >= 2


# --- the exact critic -------------------------------------------------------------------------------------------------


class TrainableExactCritic(ExactCritic):
    """With a weight that changes nothing, for an optimiser wants one."""

    def __init__(self, gamma):
        super().__init__(gamma)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return super().forward(observation) + 0 * self.weight


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "config"), [("a2c", A2CConfig), ("ppo", PPOConfig), ("trpo", TRPOConfig)])
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_every_advantage_of_the_exact_critic_is_zero(kind, config, mode, limit):
    for bootstrap, num_steps in ((True, 20), (True, 4), (False, 20)):
        env = chain(mode, limit)
        policy = mlp_for(env)
        collector = Collector(env, policy, seed=0)
        policy.critic = TrainableExactCritic(gamma=0.9)
        options = dict(gamma=0.9, gae_lambda=0.8, normalize_advantage=False, bootstrap_truncated=bootstrap)
        made, found = find_algorithm(kind)(env, policy, config(**options)), []
        for _ in range(60 // num_steps):
            rollout = collector.collect(num_steps=num_steps)
            made.update(rollout)
            found.append(rollout[rollout["mask"]])
        steps = torch.cat(found)
        cut = steps["truncated"] & ~steps["terminated"]
        assert steps["terminated"].sum() > 10 and cut.sum() >= (10 if limit else 0)
        counted = ~cut if not bootstrap and limit else torch.ones_like(cut)
        if bootstrap or not limit:
            assert steps["advantage"][counted].abs().max() < 1e-5
        else:
            assert steps["advantage"][cut].abs().min() > 1  # a limit that does not bootstrap is noticed


# --- rows of a policy whose minibatches are single steps -------------------------------------------------------------


def test_single_steps_keep_the_weight_of_their_row():
    """Every step is drawn once an epoch; its weight is that of its row, n minibatches' losses being a mean of them."""
    _, policy, rollout = control()
    mask = rollout["mask"]
    rollout["serial"] = torch.arange(mask.numel()).view(mask.shape)
    generator, entries = torch.Generator().manual_seed(0), int(mask.sum())
    for how in (sequence_mean, FIXED):
        expected, found = how(mask=mask), torch.zeros(mask.numel())
        for batch in minibatches(
            rollout, sequential=policy.sequential, generator=generator, size=37, num_epochs=3, aggregation=how
        ):
            assert batch["log_weight"].sum().item() == pytest.approx(1.0)
            found[batch["serial"]] += batch["weight"] * len(batch) / entries
        torch.testing.assert_close(found.view(mask.shape), 3 * expected)
        assert found.sum().item() == pytest.approx(3 * expected.sum().item(), rel=1e-4)


@pytest.mark.parametrize("aggregation", [sequence_mean, token_mean, FIXED])
def test_grpo_on_control_has_the_gradient_of_autograd(aggregation):
    env, policy, rollout = control()
    rates = dict(learning_rate=1e-30, max_grad_norm=1e9, aggregation=aggregation)
    agent("grpo", env, policy, num_epochs=1, minibatch_size=10_000, **rates).update(rollout)
    found = gradients(policy)
    policy.zero_grad()
    loss, mask = 0.0, rollout["mask"]
    for row in range(8):
        own = rollout[row][mask[row]]
        chosen = torch.distributions.Categorical(logits=policy.actor(own["observation"])).log_prob(own["action"])
        over = {token_mean: int(mask.sum()), sequence_mean: 8 * len(own), FIXED: 8 * 6}[aggregation]
        loss = loss - (own["advantage"] * chosen).sum() / over
    loss.backward()
    for name, expected in gradients(policy).items():
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-4, msg=name)
    assert len({int(n) for n in mask.sum(1)}) > 4


# --- wrong input -----------------------------------------------------------------------------------------------------

WRONG = [
    (
        lambda: REINFORCEConfig(num_steps=16, num_episodes=None),
        "REINFORCEConfig.num_steps is 16.*set num_steps=None and num_episodes",
    ),
    (
        lambda: RLOOConfig(num_steps=16, num_episodes=None),
        "RLOOConfig.num_steps is 16.*set num_steps=None and num_episodes",
    ),
    (lambda: GRPOConfig(num_steps=16), "num_steps is 16 and num_episodes is 32: give one"),
    (lambda: RLOOConfig(num_episodes=10, group_size=4), "group_size is 4 and num_episodes is 10.*divides"),
    (lambda: GRPOConfig(num_episodes=8, group_size=1), "group_size is 1 .*at least 2"),
    (lambda: GRPOConfig(num_episodes=8, group_size=4.0), "group_size is 4.0"),
    (lambda: GRPOConfig(num_epochs=0), "GRPOConfig.num_epochs is 0, expected an integer of at least 1"),
    (lambda: GRPOConfig(clip_range=0.0), "GRPOConfig.clip_range is 0.0, expected a number above 0"),
    (lambda: REINFORCEConfig(gamma=1.5), "REINFORCEConfig.gamma is 1.5, expected a number from 0 to 1"),
    (lambda: A2CConfig(gae_lambda=-1), "A2CConfig.gae_lambda is -1"),
    (lambda: A2CConfig(micro_batch_size=0), "A2CConfig.micro_batch_size is 0"),
    (lambda: TRPOConfig(micro_batch_size=4), "TRPO does not use ent_coef and micro_batch_size"),
    (lambda: TRPOConfig(ent_coef=0.1), "TRPO does not use ent_coef and micro_batch_size"),
    (lambda: TRPOConfig(line_search_factor=1.0), "line_search_factor is 1.0, expected less than 1"),
    (lambda: TRPOConfig(max_kl=0.0), "TRPOConfig.max_kl is 0.0, expected a number above 0"),
    (lambda: find_algorithm("sarsa"), "algorithm is 'sarsa', expected one of ppo, a2c"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_configs_are_refused_with_what_to_do(make, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize("make", [A2C, REINFORCE, RLOO, GRPO, TRPO])
def test_environments_of_another_kind_are_refused(make):
    single = gym.make("CartPole-v1")
    with pytest.raises(TypeError, match="expected a vector environment"):
        make(single, MLPPolicy(single.observation_space, single.action_space))


@pytest.mark.parametrize("make", [A2C, TRPO])
def test_single_steps_of_text_are_refused(make):
    with pytest.raises(ValueError, match=r"config.num_steps is 128.*set num_steps=None and num_episodes"):
        make(text_env(), lm_policy())


def test_trpo_refuses_a_penalty_in_the_loss():
    env, policy = text_env(), lm_policy()
    with pytest.raises(ValueError, match=r"in the loss.*place='reward'"):
        TRPO(env, policy, CONFIGS["trpo"], penalty=KLPenalty(policy.reference(), 0.1, "k2", place="loss"))


# --- by name and on disk ---------------------------------------------------------------------------------------------


@pytest.mark.heavy
@KINDS
def test_an_agent_is_saved_with_config_and_policy(kind, tmp_path):
    """Functions in a config, partial ones too, are written as something that can be read."""
    env, policy, rollout = MADE["recurrent"]()
    made = agent(kind, env, policy)
    made.update(rollout)
    made.save(tmp_path)
    assert torch.equal(algos.load(tmp_path).evaluate(rollout).log_prob, policy.evaluate(rollout).log_prob)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (
        saved["algorithm"] == type(made).__name__ and saved["config"].keys() == made.config.__dataclass_fields__.keys()
    )


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "textenv/Periods-v0", "textenv/Reviews-v0"])
@pytest.mark.parametrize("algo", sorted(get_args(AlgorithmName)))
def test_every_recipe_fits_algorithm_and_environment(env_id, algo):
    text_only = env_id.startswith("textenv/")
    if algo in VALUE_POLICIES and text_only:
        with pytest.raises(ValueError, match=f"{algo} is not for text: expected one of ppo, a2c"):
            recipe(env_id, algo)
        return
    found = recipe(env_id, algo)
    assert name_of(found.config) == algo
    expected = {VALUE_POLICIES[algo]} if algo in VALUE_POLICIES else {"auto", "gsde"}
    assert found.policy in expected
    assert (found.kl_coef is not None) == text_only and (not text_only or found.config.num_episodes)
    with pytest.raises(ValueError, match="algorithm is 'sarsa', expected one of ppo"):
        recipe(env_id, "sarsa")


# --- they learn ------------------------------------------------------------------------------------------------------


def learn_to_say_good(kind, iterations, **options):
    """Mean score of the first and the last iterations: the share of "good" among 8 tokens, by chance about a ninth."""
    task = Script(scores=lambda turns: [turn.completion_ids.count(GOOD) / 8 for turn in turns])
    env = text_env(task, num_envs=32, max_new_tokens=8, forbidden=[7])
    policy = lm_policy(lambda: make_gpt2(seed=1), head=False, seed=1)
    options = dict(num_episodes=32, learning_rate=3e-3, max_grad_norm=1.0) | options
    history = agent(kind, env, policy, **options).learn(iterations * 32 * 8)
    scores = [row["episode/return"] for row in history]
    print(kind, [round(x, 2) for x in scores])
    return scores[0], sum(scores[-3:]) / 3


LEARNERS = {
    "a2c": dict(iterations=24, gamma=1.0, normalize_advantage=True, vf_coef=0.1),
    "grpo": dict(iterations=14, minibatch_size=16, num_epochs=2),
    "reinforce": dict(iterations=24, gamma=1.0),
    "reinforce_plus_plus": dict(iterations=14, gamma=1.0, minibatch_size=16, num_epochs=2),
    "rloo": dict(iterations=24),
    "trpo": dict(iterations=10, gamma=1.0, minibatch_size=16, max_kl=0.1),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(LEARNERS))
def test_a_tiny_language_model_learns_a_word(kind):
    first, last = learn_to_say_good(kind, **LEARNERS[kind])
    assert first < 0.4 and last > (0.5 if kind == "trpo" else 0.8)  # few steps of TRPO, for they cost the most


SOLVERS = {
    "a2c": A2CConfig(num_steps=8, learning_rate=2e-2),
    "dqn": DQNConfig(num_steps=8, learning_rate=1e-2, gamma=0.5, learning_starts=100, target_update_gradient_steps=20),
    "grpo": GRPOConfig(num_episodes=32, group_size=8, minibatch_size=64, learning_rate=2e-2),
    "ppo": PPOConfig(num_steps=8, minibatch_size=32, learning_rate=1e-2),
    "reinforce": REINFORCEConfig(num_episodes=16, gamma=0.5, learning_rate=2e-2),
    "reinforce_plus_plus": REINFORCEPlusPlusConfig(num_episodes=32, gamma=0.5, minibatch_size=64, learning_rate=2e-2),
    "rloo": RLOOConfig(num_episodes=16, group_size=4, learning_rate=2e-2),
    "trpo": TRPOConfig(num_steps=32, learning_rate=1e-2, max_kl=0.05),
}


@pytest.mark.heavy
@pytest.mark.parametrize("algo", sorted(SOLVERS))
def test_three_signals_are_learnt(algo):
    """Four signals an episode, 1 for each that is answered rightly: chance earns 4/3."""
    env = signals()
    policy = make_policy(env, policy="q" if algo == "dqn" else "mlp", hidden=(32,), seed=1)
    before = sum(evaluate(signals(), policy.reference(), num_episodes=40, seed=3)[0]) / 40
    find_algorithm(algo)(env, policy, SOLVERS[algo]).learn(2_000)
    after = sum(evaluate(signals(), policy, num_episodes=40, seed=3)[0]) / 40
    print(algo, before, after)
    assert before < 2.5 and after > 3.8


def test_anothers_config_or_policy_is_refused():
    env = cartpole()
    with pytest.raises(TypeError, match="config is a PPOConfig, but REINFORCE needs a REINFORCEConfig"):
        REINFORCE(env, mlp_for(env), PPOConfig())
    q_policy = QPolicy(env.single_observation_space, env.single_action_space)
    with pytest.raises(TypeError, match="QPolicy is trained by values of actions.* DQN"):
        PPO(env, q_policy, PPOConfig())


def test_an_environment_put_in_later_is_checked():
    """As the constructor checks it."""
    agent = PPO(cartpole(2), seed=1, num_steps=4)
    agent.env = gym.make_vec("Acrobot-v1", num_envs=2)
    with pytest.raises(ValueError, match="the MLPPolicy reads .* but the environment has"):
        agent.learn(16)


def test_an_environment_put_in_later_is_reset_first():
    agent = PPO(cartpole(2), seed=1, num_steps=4)
    agent.collect()
    agent.env = cartpole(3)
    rollout = agent.collect()
    assert rollout.shape == (3, 4) and rollout["is_init"][:, 0].all()
