"""What a penalty counts as an episode when its coefficient adapts."""

import torch
from tensordict import TensorDict

from textenv import KLPenalty
from textenv.kl.coefficients import AdaptiveCoefficient


def rollout_of(kl, *, terminated=(), truncated=()):
    """One row with a KL a step, and where episodes end."""
    ends = {name: torch.zeros(1, len(kl), dtype=torch.bool) for name in ("terminated", "truncated")}
    for name, places in (("terminated", terminated), ("truncated", truncated)):
        ends[name][0, list(places)] = True
    mask = torch.ones(1, len(kl), dtype=torch.bool)
    return TensorDict({"kl": torch.tensor([kl]), "mask": mask} | ends, batch_size=[1, len(kl)])


class Noted(AdaptiveCoefficient):
    def __init__(self):
        super().__init__(0.1, target=1.0)
        self.seen = []

    def update(self, *, kl, steps):
        self.seen.append(kl)
        super().update(kl=kl, steps=steps)


def test_an_adaptive_coefficient_counts_cut_episodes():
    """2 + 4 nats in two episodes, one of which was truncated: 3 nats an episode."""
    coefficient = Noted()
    KLPenalty(None, coefficient).update(rollout_of([2.0, 1.0, 3.0], terminated=[0], truncated=[2]))
    assert coefficient.seen == [3.0]


def test_kl_of_an_open_episode_counts_after_a_resume():
    """1 nat before the checkpoint and 4 after it, in one episode; and the next one begins from 0."""
    before, after = Noted(), Noted()
    first, second = KLPenalty(None, before), KLPenalty(None, after)
    first.update(rollout_of([0.25, 0.75]))
    second.load_state_dict(first.state_dict())
    second.update(rollout_of([4.0], terminated=[0]))
    second.update(rollout_of([2.0], truncated=[0]))
    assert before.seen == [None] and after.seen == [5.0, 2.0]
