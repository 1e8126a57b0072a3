"""Dynamic sampling: which groups are replaced, how often, what is counted, and the gradient of what is learnt from."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

from algos import GRPO, RLOO, Collector, GRPOConfig, InvariantError, MLPPolicy, RLOOConfig
from algos.policies.random_streams import ACTIONS, stream_seed
from tests.helpers.resumable_agents import AGENTS
from tests.helpers.rollouts import padded
from tests.helpers.small_agents import gradients, lm_policy, mlp_for
from tests.helpers.text_envs import Script, text_env
from textenv import Rewards, TextVectorEnv
from textenv.envs.task import FunctionTask

EQUAL, DIFFERENT = (2,), (3, 0)
"""Prompts whose answers all have the return .5, and whose answers have the returns 1, 2, 3, …"""
STARTS = [EQUAL, DIFFERENT, EQUAL, DIFFERENT, EQUAL, DIFFERENT, DIFFERENT, *[DIFFERENT] * 9]
"""Of the first four two lack a signal, of the next two one, and the seventh has one."""
STILL = dict(num_episodes=8, group_size=2, learning_rate=1e-30, max_grad_norm=1e9)


def by_prompt(turns):
    return [0.5 if turn.prompt.content == EQUAL else float(i + 1) for i, turn in enumerate(turns)]


def all_equal(turns):
    return [0.5] * len(turns)


def grpo(max_refills, *, scores=by_prompt, starts=STARTS, **options):
    env = text_env(Script(starts, scores=scores))
    config = GRPOConfig(**STILL, num_epochs=1, minibatch_size=99, max_refills=max_refills)
    return GRPO(env, lm_policy(), config, **options)


def collected(agent, *counts):
    """What a collector of the same seeds gives, if it is asked for these numbers of episodes."""
    agent.policy.generator.manual_seed(stream_seed(agent.config.seed, ACTIONS))
    collector = Collector(agent.env, agent.policy, seed=agent.config.seed)
    return [collector.collect(num_episodes=count, group_size=2) for count in counts]


def below(*parts):
    """The parts one below the other, padded."""
    width = max(part.shape[1] for part in parts)
    return TensorDict.cat([padded(part, width - part.shape[1]) for part in parts])


def assert_equal(rollout, expected):
    """Equal but for the names of the groups and the tokens of the padding."""
    for name in ("mask", "reward", "terminated", "truncated", "is_init", "log_prob"):
        assert torch.equal(rollout[name], expected[name]), name
    for name in ("observation", "action"):
        assert torch.equal(rollout[name][rollout["mask"]], expected[name][rollout["mask"]]), name


def groups(rollout):
    return rollout["group"][:, 0].tolist()


def test_without_refills_a_rollout_is_as_before():
    agent = grpo(0)
    rollout = agent.collect()
    (expected,) = collected(grpo(0), 8)
    assert_equal(rollout, expected)
    assert groups(rollout) == [0, 0, 1, 1, 2, 2, 3, 3] and agent.left_out.metrics == {}


def test_only_as_many_groups_as_are_missing_are_collected():
    rollout = grpo(5).collect()
    first, second, third = collected(grpo(5), 8, 4, 2)  # of 4 groups 2 are missing, of these 2 one
    assert_equal(rollout, below(first[2:4], first[6:8], second[2:4], third))
    assert groups(rollout) == [1, 1, 3, 3, 5, 5, 6, 6]


def test_the_earliest_silent_groups_stay_at_the_bound():
    rollout = grpo(1).collect()
    first, second = collected(grpo(1), 8, 4)
    assert_equal(rollout, below(first[:4], first[6:8], second[2:4]))
    assert groups(rollout) == [0, 0, 1, 1, 3, 3, 5, 5]


def test_if_no_group_ever_has_a_signal_the_first_rollout_stays():
    agent = grpo(2, scores=all_equal)
    rollout = agent.collect()
    first, *_ = collected(grpo(2, scores=all_equal), 8, 8, 8)
    width = first.shape[1]
    assert_equal(rollout[:, :width], first)
    assert not rollout["mask"][:, width:].any()
    assert agent.left_out.metrics["refills/silent_groups"] == 4


def test_counts_and_returns_are_of_all_episodes():
    (metrics,) = grpo(5).learn(1)
    parts = collected(grpo(5), 8, 4, 2)
    assert {name: x for name, x in metrics.items() if name.startswith("refills/")} == {
        "refills/collections": 2,
        "refills/episodes": 14,
        "refills/groups": 7,
        "refills/left_out_groups": 3,
        "refills/silent_groups": 0,
    }
    steps = sum(int(part["mask"].sum()) for part in parts)
    assert metrics["steps"] == metrics["rollout/steps"] == steps
    assert metrics["rollout/turns"] == 14 and metrics["rollout/silent_rows"] == 0
    # Of 8, 4 and 2 episodes those of the prompts that differ have their number in the call of the reward
    returns = [0.5, 0.5, 3, 4, 0.5, 0.5, 7, 8] + [0.5, 0.5, 3, 4] + [1, 2]
    assert metrics["episode/return"] == pytest.approx(np.mean(returns))
    assert metrics["episode/length"] == pytest.approx(steps / 14)
    assert metrics["reward/score"] == pytest.approx(np.mean(returns))


def test_steps_of_a_training_count_what_was_left_out():
    logged = []
    agent = grpo(2, scores=all_equal)
    history = agent.learn(60, loggers=[Log(logged)])
    assert history[-1]["steps"] == sum(metrics["rollout/steps"] for metrics in history) >= 60
    parts = collected(grpo(2, scores=all_equal), 8, 8, 8)
    assert history[0]["rollout/steps"] == sum(int(part["mask"].sum()) for part in parts)
    # What callbacks log before the update has the same count as the metrics after it
    steps_of_samples = [step for step, values in logged if "samples" in values]
    assert steps_of_samples == [history[0]["steps"]]


class Log:
    def __init__(self, logged):
        self.logged = logged

    def start(self, run_dir, config, *, step):
        pass

    def log(self, values, *, step):
        self.logged.append((step, values))

    def close(self):
        pass


@pytest.mark.parametrize("algorithm", [GRPO, RLOO])
def test_the_gradient_is_that_of_the_kept_groups(algorithm):
    def agent_with(max_refills, episodes=8):
        config = dict(STILL, num_episodes=episodes, max_refills=max_refills)
        if algorithm is GRPO:
            config |= dict(num_epochs=1, minibatch_size=99)
        return algorithm(text_env(Script(STARTS, scores=by_prompt)), lm_policy(), **config)

    agent = agent_with(5)
    agent.update(agent.collect())
    first, second, third = collected(agent_with(5), 8, 4, 2)
    other = agent_with(0)
    other.update(below(first[2:4], first[6:8], second[2:4], third))
    for name, gradient in gradients(other.policy).items():
        assert torch.equal(gradients(agent.policy)[name], gradient), name
    assert max(gradient.abs().max() for gradient in gradients(agent.policy).values()) > 1e-3


def test_samples_are_those_of_the_rows():
    agent = grpo(5)
    rollout = agent.collect()
    tokenizer = agent.env.tokenizer
    for row, sample in enumerate(agent.env.samples(range(8))):
        ids = rollout["action"][row][rollout["mask"][row]].tolist()
        assert sample["completion"].split() == tokenizer.decode(ids, skip_special_tokens=True).split()
        assert sample["score"] == rollout["reward"][row].sum()


def test_groups_without_a_score_are_replaced():
    """Of the first prompt no answer is scored, of the second one of two."""

    def scores(turns):
        by_content = {STARTS[0]: None, (4,): 1.0}
        return [by_content.get(turn.prompt.content, float(i)) for i, turn in enumerate(turns)]

    agent = grpo(1, scores=scores, starts=[EQUAL, (4,), DIFFERENT, DIFFERENT, DIFFERENT, DIFFERENT])
    rollout = agent.collect()
    assert groups(rollout) == [2, 2, 3, 3, 4, 4, 5, 5] and rollout["mask"].any(1).all()


def test_with_each_reward_one_that_differs_is_a_signal():
    def length(completion_ids, **columns):
        return [float(i) for i in range(len(completion_ids))]

    def minus_length(completion_ids, **columns):
        return [-float(i) for i in range(len(completion_ids))]

    def agent_with(each):
        task = FunctionTask(["a", "b"], Rewards({"one": length, "two": minus_length}))
        return GRPO(text_env(task), lm_policy(), max_refills=1, normalize_each_reward=each, **STILL)

    for each, silent in ((False, 4), (True, 0)):
        agent = agent_with(each)
        agent.collect()
        assert agent.left_out.metrics["refills/silent_groups"] == silent


def test_the_kl_is_charged_to_the_kept_groups():
    rewards = []
    agent = grpo(5, kl_coef=0.1)
    with torch.no_grad():
        for weight in agent.policy.parameters():
            weight.mul_(1.1)  # away from the reference
    update = agent.update

    def noted(rollout):
        rewards.append(rollout.clone())
        return update(rollout)

    agent.update = noted
    (metrics,) = agent.learn(1)
    (rollout,) = rewards
    expected = np.mean([3, 4, 7, 8, 3, 4, 1, 2]) - 0.1 * rollout["kl"].sum().item() / 8
    assert metrics["episode/penalised_return"] == pytest.approx(expected, rel=1e-5) and rollout["kl"].abs().sum() > 0


def cartpole_of(steps, reward=lambda reward: reward):
    def make():
        return gym.wrappers.TransformReward(gym.make("CartPole-v1", max_episode_steps=steps), reward)

    return SyncVectorEnv([make] * 3)


def test_control_is_refilled_too():
    """Episodes of 3 steps cannot fall: all returns are equal. Longer ones fall at different times."""
    for steps, silent, collections in ((3, 2, 4), (200, 0, 0)):
        env = cartpole_of(steps)
        agent = GRPO(env, mlp_for(env), num_episodes=8, group_size=4, max_refills=4, minibatch_size=64)
        (metrics,) = agent.learn(1)
        assert metrics["refills/silent_groups"] == silent and metrics["refills/collections"] == collections
        assert metrics["rollout/silent_rows"] == 4 * silent
    env = cartpole_of(3)
    agent = GRPO(env, mlp_for(env), num_episodes=8, group_size=4, max_refills=4, minibatch_size=64)
    assert agent.learn(1)[0]["steps"] == 5 * 8 * 3


def test_a_reward_that_is_not_a_number_is_no_missing_signal():
    env = cartpole_of(3, lambda reward: float("nan"))
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    with pytest.raises(InvariantError, match="reward"):
        GRPO(env, policy, num_episodes=8, group_size=4, max_refills=1).collect()


def test_the_groups_of_a_game_are_kept_together():
    """The second agent's returns never differ; where the first one's do, both have their rows, of all episodes."""
    agent = AGENTS["grpo_refilled_game"]()
    (metrics,) = agent.learn(1)
    assert metrics["refills/left_out_groups"] > 0
    assert metrics["refills/episodes"] == 4 * metrics["refills/groups"]  # two games of two agents
    agent = AGENTS["grpo_refilled_game"]()
    rollout = agent.collect()
    episode = rollout["episode"][:, 0]
    assert sorted(set(episode.tolist())) == list(range(12))
    assert (rollout["agent"][:, 0] == episode % 2).all()
    returns = torch.zeros(12).index_add_(0, episode, rollout["reward"].sum(1))
    firsts = returns[0::2].view(3, 2)  # games of a start, by start
    silent = int((firsts[:, 0] == firsts[:, 1]).sum())
    assert silent == agent.left_out.metrics["refills/silent_groups"]


def test_a_wrong_number_of_refills_is_refused():
    for config in (GRPOConfig, RLOOConfig):
        with pytest.raises(ValueError, match=f"{config.__name__}.max_refills is -1, expected an integer from 0"):
            config(max_refills=-1)
    with pytest.raises(TypeError, match="max_refills"):
        TextVectorEnv(max_refills=1)
