"""Means of a minibatch, and episodes that a rollout has finished."""

import numpy as np
import torch
from tensordict import TensorDict

from algos import PPO
from algos.training.metrics import EpisodeMeter, ending_metrics, group_metrics, minibatch_means
from tests.helpers.rollouts import draws, random_rollout
from tests.helpers.small_agents import cartpole, mlp_for


def test_logged_means_are_sums_without_gradient():
    entries = {name: draws(4, 3, seed=seed).requires_grad_() for seed, name in enumerate("abc")}
    weight = draws(4, 3, seed=6)
    metrics = minibatch_means(TensorDict({"log_weight": weight}, batch_size=[4, 3]), entries)
    for name, x in entries.items():
        torch.testing.assert_close(metrics[name], (x.detach() * weight).sum(), atol=1e-10, rtol=0)
        assert not metrics[name].requires_grad


def episodes_one_by_one(rollouts):
    """Entry by entry: what begins, counts and ends in each slot."""
    state, ended = {}, []
    for rollout in rollouts:
        found = []
        for t in range(rollout.shape[1]):
            for slot in range(len(rollout)):
                entry = rollout[slot, t]
                if entry["is_init"]:
                    state[slot] = [0.0, 0]
                if slot in state:
                    state[slot][0] += entry["reward"].item()
                    state[slot][1] += int(entry["mask"])
                    if entry["terminated"] or entry["truncated"]:
                        episode = state.pop(slot)
                        if not entry["is_init"] or entry["mask"]:  # else its environment failed: nothing was finished
                            found.append(episode)
        ended.append(found)
    return ended


def test_the_episode_meter_equals_counting_entries():
    generator = torch.Generator().manual_seed(0)
    for rows, steps in [(1, 1), (3, 12), (4, 5), (2, 1)]:
        rollouts = [random_rollout(generator, rows, steps) for _ in range(5)]
        meter = EpisodeMeter()
        for rollout, expected in zip(rollouts, episodes_one_by_one(rollouts), strict=True):
            returns, lengths = meter.finished(rollout)
            assert lengths == [length for _, length in expected]
            np.testing.assert_allclose(returns, [total for total, _ in expected], atol=1e-9)


def test_ends_by_a_limit_and_failures_by_hand():
    """Rows: terminated; truncated; both, which is a termination; a failed environment; nothing has ended."""
    flags = {
        "mask": [[1, 1], [1, 1], [1, 1], [1, 0], [1, 1]],
        "is_init": [[1, 0], [1, 0], [1, 0], [1, 1], [1, 0]],
        "terminated": [[0, 1], [0, 0], [0, 1], [0, 0], [0, 0]],
        "truncated": [[0, 0], [0, 1], [0, 1], [0, 1], [0, 0]],
    }
    rollout = TensorDict({name: torch.tensor(rows).bool() for name, rows in flags.items()}, batch_size=[5, 2])
    assert ending_metrics(rollout) == {"episode/truncated": 1 / 3, "rollout/failed_episodes": 1}
    assert ending_metrics(rollout[4:]) == {}


def test_silent_rows_do_not_count_rows_without_a_step():
    rollout = TensorDict(
        {"mask": torch.tensor([[True], [True], [False]]), "advantage": torch.zeros(3, 1), "group": torch.zeros(3, 1)},
        batch_size=[3, 1],
    )
    assert group_metrics(rollout) == {"rollout/silent_rows": 2}


class Reports(PPO):
    """An algorithm of one's own with a value of its own for a metric that the loop measures too."""

    def update(self, rollout):
        return super().update(rollout) | {"advantage/std": 123.0}


def test_an_algorithms_own_metric_is_logged():
    env = cartpole(4)
    history = Reports(env, mlp_for(env), num_steps=16, minibatch_size=32).learn(64)
    assert history[0]["advantage/std"] == 123.0 and "value/explained_variance" in history[0]
