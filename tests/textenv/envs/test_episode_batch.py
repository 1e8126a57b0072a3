"""Which slots play which episode of a batch."""

import numpy as np

from textenv.envs.episode_batch import EpisodeBatch


class Lengths:
    """As much of a transcript as a batch of episodes looks at."""

    def __init__(self, rows):
        self.next_mask = self.length = np.zeros(rows, dtype=np.int64)
        self.agents = 1
        self.tokens = np.zeros((rows, 4), dtype=np.int64)


def test_idle_slots_are_not_released_with_the_last_one():
    batch = EpisodeBatch(Lengths(2), [0, 1], num_envs=4)
    assert batch.refill()[0].tolist() == [0, 1]
    assert batch.release([1]).tolist() == [1], "slots 2 and 3 were idle before"
    assert batch.running.tolist() == [True, False, False, False]
