"""`LSTMPolicy`: its memory begins and ends with the episode, and the unchanged PPO learns with it."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import algos
from algos import PPO, Collector, LSTMPolicy, MLPPolicy, PPOConfig, collect, evaluate, presets
from algos.make import find_algorithm
from tests.helpers.errors import refused
from tests.helpers.models import load_example
from tests.helpers.small_agents import cartpole

TOTAL_STEPS = 150_000
MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)


def lstm_for(env, *, spread=True, **options):
    """A policy whose actions and values depend on what it remembers."""
    policy = LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=16, **options)
    if spread:
        with torch.no_grad():
            policy.actor.weight.mul_(200)
            policy.lstm.weight_hh_l0.mul_(2)
            policy.encoder[0].weight.mul_(30)
    return policy


def by_hand(policy, observations):
    """Outputs ``[T, hidden]`` of one episode from a state of zeros, by the equations of the LSTM."""
    lstm, hidden, cell = policy.lstm, torch.zeros(policy.hidden), torch.zeros(policy.hidden)
    outputs = []
    for observation in observations:
        inputs = lstm.weight_ih_l0 @ policy.encoder(observation) + lstm.bias_ih_l0
        i, f, g, o = (inputs + lstm.weight_hh_l0 @ hidden + lstm.bias_hh_l0).chunk(4)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs)


def episodes_of(rollout, slot):
    """The slot's True entries, cut after each end, with the one under way."""
    row = rollout[slot][rollout["mask"][slot]]
    stops = [0, *((row["terminated"] | row["truncated"]).nonzero()[:, 0] + 1).tolist(), len(row)]
    return [row[a:b] for a, b in zip(stops[:-1], stops[1:], strict=True) if b > a]


@pytest.mark.parametrize("limit", [None, 9])
@MODES
def test_sampling_and_scoring_are_the_lstm_per_episode(mode, limit):
    """Over several rollouts that cut episodes anywhere; with rows of one step, and of a reset only."""
    env = cartpole(3, mode, **({} if limit is None else dict(max_episode_steps=limit)))
    policy = lstm_for(env)
    collector = Collector(env, policy, seed=4)
    rollouts = []
    for steps in (20, 1, 1, 1, 33, 7):
        rollout = collector.collect(num_steps=steps)
        rollout["scored"], _, rollout["evaluated"] = (x.detach() for x in policy.evaluate(rollout))
        rollout["value"], rollout["next_value"] = policy.values(rollout)
        rollouts.append(rollout)
    count = 0
    for slot in range(3):
        for episode in episodes_of(torch.cat(rollouts, dim=1), slot):
            with torch.no_grad():
                seen = torch.cat([episode["observation"], episode["next_observation"][-1:]])
                hidden = by_hand(policy, seen)
                log_prob = policy.actor(hidden[:-1]).log_softmax(-1).gather(1, episode["action"][:, None])[:, 0]
                value = policy.critic(hidden)[:, 0]
            expected = dict(
                log_prob=log_prob, scored=log_prob, evaluated=value[:-1], value=value[:-1], next_value=value[1:]
            )
            for name, x in expected.items():
                torch.testing.assert_close(episode[name], x, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
            count += 1
    assert count > (12 if limit else 6) and torch.cat(rollouts, dim=1)["log_prob"].std() > 0.1


@pytest.mark.heavy
@pytest.mark.parametrize(("minibatch", "micro"), [(1, None), (3, None), (3, 1), (3, 2), (6, 2)])
@MODES
def test_every_ratio_is_one_in_minibatches_of_any_size(mode, minibatch, micro):
    env = cartpole(6, mode)
    policy = lstm_for(env, normalize_observations=True)
    config = PPOConfig(
        num_steps=24, minibatch_size=minibatch, micro_batch_size=micro, learning_rate=1e-30, num_epochs=2
    )
    agent, gaps, score = PPO(env, policy, config), [], policy.evaluate

    def watch(part):
        result = score(part)
        gaps.append((result.log_prob - part["log_prob"])[part["mask"]].abs().max().item())
        return result

    policy.evaluate = watch
    agent.learn(5 * 6 * 24 - 60)
    assert len(gaps) >= 5 * 2 * 6 // minibatch and max(gaps) < 1e-5


@MODES
def test_what_stands_on_false_entries_has_no_effect(mode):
    """NaN in every float column there: losses, values and gradients are the clean ones bit for bit."""
    env = cartpole(4, mode)
    policy = lstm_for(env)
    collector = Collector(env, policy, seed=1)
    rollouts = [collector.collect(num_steps=30)]
    while (mode is AutoresetMode.NEXT_STEP) and rollouts[-1]["mask"][:, 0].all():
        rollouts.append(collector.collect(num_steps=30))  # one that begins with a reset row
    found = []
    for spoil in (False, True):
        rollout = rollouts[-1].clone()
        hole = ~rollout["mask"]
        for name in ("observation", "next_observation", "state", "reward", "log_prob") if spoil else ():
            rollout[name][hole] = torch.nan
        if spoil:
            rollout["action"][hole] = 10**6
        agent = PPO(env, copy.deepcopy(policy), PPOConfig(num_steps=30, minibatch_size=2))
        metrics = agent.update(rollout)
        found.append((metrics, torch.cat([p.detach().flatten() for p in agent.policy.parameters()])))
    assert hole.any() == (mode is AutoresetMode.NEXT_STEP)
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_reset_rows_are_survived_with_and_without_a_step():
    env = cartpole(2, AutoresetMode.NEXT_STEP, max_episode_steps=3)
    policy = lstm_for(env)
    collector = Collector(env, policy, seed=1)
    collector.collect(num_steps=3)
    rollout = collector.collect(num_steps=1)
    assert rollout["mask"].tolist() == [[False, True]] * 2  # the resets, and a step
    for part in (rollout, rollout[:, :1]):
        PPO(env, policy, PPOConfig(num_steps=1, minibatch_size=2)).update(part.clone())


def test_the_state_column_is_the_one_before_the_action():
    env = cartpole(2, AutoresetMode.SAME_STEP)
    policy = lstm_for(env)
    rollout = collect(env, policy, num_steps=60)
    assert rollout["state"].shape == (2, 60, 2, 16) and not rollout["state"].requires_grad
    zero = (rollout["state"] == 0).all(-1).all(-1)
    assert torch.equal(zero, rollout["is_init"]) and rollout["is_init"].sum() > 3
    assert "state" not in collect(env, MLPPolicy(*spaces_of(env)), num_steps=3).keys()


def test_only_states_of_rows_in_mid_episode_are_read():
    env = cartpole(2, AutoresetMode.SAME_STEP)
    policy = lstm_for(env)
    collector = Collector(env, policy, seed=2)
    collector.collect(num_steps=5)
    rollout = collector.collect(num_steps=60)
    other = rollout.clone()
    other["state"][:, 1:] = 7.0
    assert torch.equal(policy.evaluate(rollout).log_prob, policy.evaluate(other).log_prob)
    other["state"][:, 0] = 7.0
    assert not torch.equal(policy.evaluate(rollout).log_prob[:, 0], policy.evaluate(other).log_prob[:, 0])
    other["is_init"][:, 0] = True
    zero = rollout.clone()
    zero["state"][:, 0] = 0.0
    assert torch.equal(policy.evaluate(zero).log_prob, policy.evaluate(other).log_prob)


def spaces_of(env):
    return env.single_observation_space, env.single_action_space


@pytest.mark.heavy
def test_evaluating_in_mid_training_disturbs_no_memory():
    """Not even in another number of slots; and the same weights come out as without a look."""

    def train(look):
        env, other = cartpole(2, AutoresetMode.SAME_STEP), cartpole(3, AutoresetMode.NEXT_STEP)
        policy = lstm_for(env, normalize_observations=True)
        agent = PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=2))

        def peek(_):
            if look:
                evaluate(other, policy, num_episodes=4)

        agent.learn(120, on_iteration=peek)
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    assert torch.equal(train(False), train(True))


def test_other_slots_without_a_reset_are_refused():
    env = cartpole(2, AutoresetMode.SAME_STEP)
    policy = lstm_for(env)
    policy.act(np.zeros((2, 4), np.float32))
    with refused(ValueError, "3 slots", "has 2", "reset\\(\\)", "algos.evaluate"):
        policy.act(np.zeros((3, 4), np.float32))
    policy.reset()
    policy.act(np.zeros((3, 4), np.float32))


def test_a_loaded_policy_plays_the_same_episode(tmp_path):
    env = cartpole(2, AutoresetMode.SAME_STEP)
    policy = lstm_for(env)
    loaded = algos.load(PPO(env, policy).save(tmp_path))
    one, two = (evaluate(env, p, num_episodes=4, seed=3)[1] for p in (policy, loaded))
    assert torch.equal(one["log_prob"], two["log_prob"]) and torch.equal(one["action"], two["action"])


@pytest.mark.slow
def test_memory_solves_cartpole_without_velocities():
    """On two seeds of three, and not without memory."""
    runs = [with_memory_and_without(seed) for seed in (1, 2, 3)]
    assert sum(min(run[LSTMPolicy]) >= 475 for run in runs) >= 2 and max(max(run[MLPPolicy]) for run in runs) < 150


def with_memory_and_without(seed):
    make_env, returns = load_example("hidden_velocities").make_env, {}
    for kind, changes in {LSTMPolicy: {}, MLPPolicy: {"minibatch_size": 8 * 64}}.items():
        env = make_env(32)
        policy = kind(*spaces_of(env), normalize_observations=True, seed=seed)
        history = PPO(env, policy, dataclasses.replace(presets.CARTPOLE_LSTM, seed=seed, **changes)).learn(TOTAL_STEPS)
        returns[kind] = [
            float(np.mean(evaluate(make_env(20), policy, num_episodes=20, deterministic=how, seed=seed)[0]))
            for how in (True, False)
        ]
        seconds = history[-1]["time/seconds"]
        print(f"{kind.__name__} seed {seed}: {returns[kind]} (deterministic, sampled), {seconds:.0f} s of training")
    return returns


@pytest.mark.heavy
def test_the_command_line_takes_the_recurrent_preset(tmp_path, capsys):
    """A minibatch is counted in rows there: the perceptrons' 256 steps would be 256 rows."""
    from algos.cli import main

    words = ["--policy", "lstm", "--total-steps", "2000", "--num-episodes", "2", "--run-dir", str(tmp_path), "--json"]
    main(["train", "CartPole-v1", *words])
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["policy"] == "LSTMPolicy" and saved["config"]["minibatch_size"] == 8
    assert saved["config"]["normalize_rewards"] and json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.heavy
@pytest.mark.parametrize("algo", ["a2c", "grpo", "reinforce", "reinforce_plus_plus", "rloo", "trpo"])
def test_every_algorithm_trains_it_by_its_own_config(algo, tmp_path):
    """PPO's preset was taken for all: RLOO trained without groups, GRPO ended in an AttributeError."""
    from algos.cli import main

    words = ["--policy", "lstm", "--algo", algo, "--total-steps", "100", "--num-episodes", "1", "--json"]
    main(["train", "CartPole-v1", *words, "--run-dir", str(tmp_path)])
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["policy"] == "LSTMPolicy" and saved["algorithm"] == find_algorithm(algo).__name__
    assert ("clip_range" in saved["config"]) == (algo in ("grpo", "reinforce_plus_plus"))
    assert (saved["config"]["num_episodes"] is None) == (algo in ("a2c", "trpo"))
