"""Same seed, same result: whatever is played beside an episode, and whatever the training is logged by."""

import numpy as np
import pytest
import torch

from algos import Collector, collect
from tests.helpers.models import make_gpt2, make_llama
from tests.helpers.small_agents import CONTROL, agent_of, cartpole, lm_policy, mlp_for, random_table, table_model
from tests.helpers.text_envs import Script, text_env

EPISODES = 24


def played(make, num_envs, *, episodes=EPISODES, **options):
    """The same episodes in so many slots: rows end at their own times, so free slots are filled at different ones."""
    policy = lm_policy(make, seed=3)
    env = text_env(num_envs=num_envs, max_new_tokens=12, **options)
    return collect(env, policy, num_episodes=episodes, seed=1)


@pytest.mark.parametrize("num_envs", [1, 2, 7, 24, 31], ids=lambda n: f"{n}_slots")
def test_an_episode_is_the_same_in_any_number_of_slots(num_envs):
    table = random_table()
    expected = played(lambda: table_model(table), 5)
    found = played(lambda: table_model(table), num_envs)
    lengths = expected["mask"].sum(-1)
    assert len(set(lengths.tolist())) > 2, "rows of one length refill alike and show nothing"
    for column in ("observation", "action", "log_prob", "reward", "mask"):
        assert torch.equal(found[column], expected[column]), column


@pytest.mark.heavy
@pytest.mark.parametrize("make", [make_gpt2, make_llama], ids=["gpt2", "llama"])
def test_on_real_models_log_probs_agree(make):
    one, several = played(make, 1), played(make, 7)
    assert torch.equal(one["action"], several["action"])
    torch.testing.assert_close(one["log_prob"], several["log_prob"], atol=1e-5, rtol=0)


def test_episodes_of_a_rollout_and_rollouts_differ():
    table = random_table()
    policy, env = lm_policy(lambda: table_model(table), seed=3), text_env(Script([(0,)]))
    collector = Collector(env, policy, seed=1)
    texts = [tuple(row) for _ in range(2) for row in collector.collect(num_episodes=16)["action"].tolist()]
    assert len(set(texts)) > 16


def test_without_seeds_the_policys_generator_draws():
    table = random_table()
    policy, env = lm_policy(lambda: table_model(table), seed=3), text_env()
    observation, _ = env.reset(seed=1)
    policy.reset(seeds=np.array([1, 1, 1]))
    before = policy.generator.get_state()
    policy.act(observation)
    assert torch.equal(policy.generator.get_state(), before)
    policy.reset()
    policy.act(observation)
    assert not torch.equal(policy.generator.get_state(), before)


def test_a_control_policy_refuses_streams():
    with pytest.raises(ValueError, match=r"MLPPolicy draws the actions of all slots from policy.generator"):
        mlp_for(cartpole()).reset(seeds=np.zeros(4, dtype=np.int64))


def trained(make_agent, steps, **options):
    agent = make_agent()
    history = agent.learn(steps, **options)
    logged = [{name: x for name, x in metrics.items() if not name.startswith("time/")} for metrics in history]
    return logged, torch.cat([p.detach().flatten() for p in agent.policy.parameters()])


def control_agent():
    env = cartpole()
    return agent_of(env, mlp_for(env), **(CONTROL | {"learning_rate": 1e-3}))


def text_agent():
    return agent_of(text_env(), lm_policy(), learning_rate=1e-3)


@pytest.mark.heavy
@pytest.mark.parametrize("make", [control_agent, text_agent], ids=["control", "text"])
def test_how_training_is_logged_changes_nothing(make, tmp_path, capsys):
    """TensorBoard writes from a thread of its own, the bar from another; both are handed figures, not generators."""
    plain, weights = trained(make, 200)
    logged, other = trained(make, 200, run_dir=tmp_path, progress=True, on_iteration=lambda m: np.random.rand() > 2)
    assert logged == plain
    assert torch.equal(other, weights)
