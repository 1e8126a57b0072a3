"""Activation patching: what remains of a change if the base model's activations are put back into the tuned one."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from algos.insight.blocks import Blocks, Pair, hook


class Place(NamedTuple):
    """A layer's ``"attention"`` or ``"mlp"``, or one head of its attention."""

    layer: int
    part: str
    head: int = -1
    """-1 for the whole part."""

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part if self.head < 0 else f'head {self.head}'}"


@torch.no_grad()
def patch(
    base: Blocks, tuned: Blocks, rows: Sequence[Sequence[int]], pair: Pair, runs: Sequence[Sequence[Place]]
) -> Tensor:
    """Logit differences of the tuned model when it gets what the base writes at some places, ``[prompts, runs]``.

    All positions are patched, and what follows is the tuned model's (Vig et al. 2020). A head's output is what its own
    columns of the projection make of it, in either model. A run patches its places together.
    """
    (direction, offset), found = tuned.unembedding(pair), []
    for group in base.batches(rows):
        written: dict[Place, Tensor] = {}
        with ExitStack() as hooks:
            for place in {place for run in runs for place in run}:
                hooks.enter_context(_hook(base, place, written))
            base.hidden(group)
        columns = []
        for run in runs:
            with ExitStack() as hooks:
                for place in run:
                    hooks.enter_context(_hook(tuned, place, written))
                columns.append(tuned.hidden(group) @ direction + offset)
        found.append(torch.stack(columns, 1))
    return torch.cat(found)


def _hook(blocks: Blocks, place: Place, written: dict[Place, Tensor]) -> Any:
    """Context that keeps what a place writes, or, if that of another model is kept already, puts this in its stead."""
    writer = blocks.writers[place.part][place.layer]

    def use(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        own = output
        if place.head >= 0:
            without = inputs.clone()
            without.unflatten(-1, (blocks.num_heads, -1))[..., place.head, :] = 0
            own = module.forward(inputs) - module.forward(without)
        return output + (written.setdefault(place, own) - own)

    return hook(writer.last if place.head < 0 else writer.projection, use)
