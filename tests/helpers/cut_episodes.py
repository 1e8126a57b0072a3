"""Episodes in one row each, and the same episodes cut into rows at random."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from tests.helpers.rollouts import junk
from textenv.rollout import following


@dataclass
class Cut:
    """Episodes in one row each, the same ones in several rows, and where each entry has gone."""

    whole: TensorDict
    cut: TensorDict
    place: dict[tuple[int, int], tuple[int, int]]
    """Row and column in `cut` of each entry of `whole` up to the end of its episode."""
    whole_values: torch.Tensor
    """``[E, T + 1]``: values of all states, also of the one after the last action."""
    cut_values: torch.Tensor
    """``[B, W + 1]``, with junk where no state of the episode is."""

    def moved(self, column):
        """What a column of `whole` is in `cut`, 0 elsewhere."""
        moved = column.new_zeros(self.cut.shape)
        for (row, t), index in self.place.items():
            moved[index] = column[row, t]
        return moved


def cut_episodes(seed, *, episodes=6, steps=9):
    """Ragged episodes with gaps; rewards also in the gaps, and ends of both kinds. Rows of episodes are interleaved."""
    generator = torch.Generator().manual_seed(seed)

    def number(most):
        return int(torch.randint(most + 1, (), generator=generator))

    # In one row each
    whole = {
        "mask": torch.rand(episodes, steps, generator=generator) < 0.6,
        "reward": torch.randn(episodes, steps, generator=generator),
        "group": torch.arange(episodes)[:, None].expand(-1, steps) // 2,
        "observation": torch.randint(7, (episodes, steps), generator=generator),
        "action": torch.randint(7, (episodes, steps), generator=generator),
    }
    for name in ("terminated", "truncated", "is_init"):
        whole[name] = torch.zeros(episodes, steps, dtype=torch.bool)
    whole["is_init"][:, 0] = True
    ends = [1 + number(steps - 2) for _ in range(episodes)]
    for row, end in enumerate(ends):
        whole["mask"][row, [0, end]] = True
        whole["mask"][row, end + 1 :] = False
        whole["reward"][row, end + 1 :] = 0
        whole[("terminated", "truncated")[number(1)]][row, end] = True
    whole_values = torch.randn(episodes, steps + 1, generator=generator)

    # Parts of the episodes: episode, first and last column
    parts = []
    for row, end in enumerate(ends):
        starts = sorted({0, *(number(end) for _ in range(number(3)))})
        stops = [*starts[1:], end + 1]
        parts.append([(row, start, stop) for start, stop in zip(starts, stops, strict=True)])
    rows = [episode.pop(0) for episode in parts]
    while any(parts):
        episode = parts[number(episodes - 1)]
        if episode:
            rows.append(episode.pop(0))

    # Each part in a row of its own, after up to two columns of a prompt
    width = steps + 2
    cut = {name: torch.zeros(len(rows), width, dtype=column.dtype) for name, column in whole.items()}
    cut["episode"] = torch.tensor([row for row, _, _ in rows])[:, None].expand(-1, width)
    cut_values = junk((len(rows), width + 1), seed)
    place = {}
    for number_of_row, (row, start, stop) in enumerate(rows):
        first = number(2)
        for t in range(start, stop):
            place[row, t] = (number_of_row, first + t - start)
            for name, column in whole.items():
                cut[name][place[row, t]] = column[row, t]
            cut_values[place[row, t]] = whole_values[row, t]
        if stop == ends[row] + 1:
            cut_values[number_of_row, first + stop - start] = whole_values[row, stop]
        cut["group"][number_of_row] = whole["group"][row, 0]
        cut["is_init"][number_of_row] = False
        cut["is_init"][number_of_row, 0] = start == 0
    return Cut(
        TensorDict(whole, batch_size=[episodes, steps]),
        TensorDict(cut, batch_size=[len(rows), width]),
        place,
        whole_values,
        cut_values,
    )


class Reads:
    """A policy whose values are these numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def values(self, rollout):
        done = rollout["terminated"] | rollout["truncated"]
        return self.numbers[:, :-1], following(self.numbers, mask=rollout["mask"], done=done)
