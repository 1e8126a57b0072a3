"""Rows and metrics of several ranks, told to one process."""

import pytest
import torch
from tensordict import TensorDict

from algos import DQN, PPO, TRPO
from algos.ranks import collectives
from tests.helpers.resumable_agents import AGENTS


def alone_but_told_otherwise(monkeypatch, rank=0, count=2):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: count)


def receive(monkeypatch, values_of):
    """Let torch gather what ``values_of`` makes of the value of this process."""

    def all_gather_object(values, own):
        values[:] = values_of(own)

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)


@pytest.mark.parametrize("name", ["trpo", "dqn"])
def test_algorithms_that_train_in_one_process_say_so(name, monkeypatch):
    assert PPO.several_processes and not TRPO.several_processes and not DQN.several_processes
    alone_but_told_otherwise(monkeypatch)
    with pytest.raises(ValueError, match=f"{name.upper()} trains in one process, not in 2"):
        AGENTS[name]()


def test_ranks_have_equal_rows_repeated_ones_weigh_0(monkeypatch):
    batch = TensorDict({"x": torch.arange(5), "weight": torch.ones(5)}, batch_size=[5])
    batch["log_weight"] = torch.ones(5)
    shares = []
    for rank in range(3):
        alone_but_told_otherwise(monkeypatch, rank, 3)
        shares.append(collectives.local_rows(batch))
    assert [part["x"].tolist() for part in shares] == [[0, 1], [2, 3], [4, 4]]
    assert [part["weight"].tolist() for part in shares] == [[1, 1], [1, 1], [1, 0]]
    assert batch["weight"].sum() == 5  # the batch itself is unchanged
    with pytest.raises(ValueError, match="num_episodes is 8, which 3 processes cannot share"):
        collectives.local_count(8, "num_episodes")


def test_rows_of_ranks_keep_groups_and_allowed_tokens(monkeypatch):
    def rollout(length, sets, group):
        columns = {"group": torch.full((2, length), group), "allowed": torch.ones(2, length, dtype=torch.int64)}
        found = TensorDict(columns | {"mask": torch.ones(2, length, dtype=torch.bool)}, batch_size=[2, length])
        return found.set_non_tensor("allowed_sets", sets)

    one, other = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(), torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 1]]).bool()
    alone_but_told_otherwise(monkeypatch)
    receive(monkeypatch, lambda own: [own, rollout(4, other, 0)])
    found = collectives.gather_rows(rollout(3, one, 5))
    assert found.shape == (4, 4) and found["mask"].sum(1).tolist() == [3, 3, 4, 4]
    assert found["group"][:, 0].tolist() == [5, 5, 6, 6]
    allowed = found.get_non_tensor("allowed_sets")[found["allowed"][:, 0]]
    assert allowed.tolist() == [one[1].tolist()] * 2 + [other[1].tolist()] * 2
    receive(monkeypatch, lambda own: [{"reward/failed": 3, "kl": 1.0}, {"reward/failed": 1, "kl": 2.0}])
    assert collectives.mean({}) == {"reward/failed": 4, "kl": 1.5}
