"""Attribution of a difference of logits to parts of a model: what each adds to it, and what goes if it is put back."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from algos.lab.insight.blocks import Blocks, Pair, before_norm, hook


class Attribution(NamedTuple):
    """Contributions to the logit difference of two sets of tokens, at the ends of n prompts.

    They are direct: without what later layers make of them, the final norm's scale held (Elhage et al. 2021).
    """

    difference: Tensor
    """Mean logit of the first set minus that of the second, ``[n]``."""
    parts: Tensor
    """Attention of each layer, MLP of each, embedding, output biases; their sum is it: ``[n, 2 * layers + 2]``."""
    heads: Tensor
    """Heads, then the bias behind them; they sum to a layer's attention: ``[n, layers, heads + 1]``."""
    lens: Tensor
    """Difference if the model ended after the embedding or a layer (nostalgebraist 2020), ``[n, layers + 1]``."""
    hidden: Tensor
    """Output of the final norm, ``[n, width]``."""
    neurons: Tensor
    """Neurons of each MLP, on request (otherwise 0 layers), ``[n, layers, neurons]``."""


def attribute(blocks: Blocks, rows: Sequence[Sequence[int]], pair: Pair, *, neurons: bool = False) -> Attribution:
    """Attribute the difference of a pair at the end of each prompt (lists of token ids), in groups of prompts."""
    groups = [_attribute(blocks, group, pair, neurons) for group in blocks.batches(rows)]
    return Attribution(*(torch.cat(column) for column in zip(*groups, strict=True)))


@torch.no_grad()
def _attribute(blocks: Blocks, rows: Sequence[Sequence[int]], pair: Pair, neurons: bool) -> Attribution:
    reading, (direction, offset) = blocks.read(rows), blocks.unembedding(pair)
    residual, hidden = reading[blocks.norm]
    folded, constant = before_norm(blocks.norm, residual, direction)
    start = reading[blocks.blocks[0]][0]
    attention, mlp = (torch.stack([reading[writer.last][1] for writer in part]) for part in blocks.writers.values())
    heads = []
    for writer in blocks.writers["attention"]:
        inputs, bias = writer.contributions(reading, folded)
        heads.append(torch.cat([inputs.unflatten(-1, (blocks.num_heads, -1)).sum(-1), bias[:, None]], 1))
    of_mlp = [writer.contributions(reading, folded)[0] for writer in blocks.writers["mlp"] if neurons]
    parts = (torch.cat([attention, mlp, start[None]]) * folded).sum(-1).T
    stream = torch.cat([start[None], attention + mlp]).cumsum(0)
    return Attribution(
        difference=hidden @ direction + offset,
        parts=torch.cat([parts, (constant + offset)[:, None]], 1),
        heads=torch.stack(heads, 1),
        lens=(blocks.norm(stream) @ direction + offset).T,
        hidden=hidden,
        neurons=torch.stack(of_mlp, 1) if neurons else torch.zeros(len(rows), 0, 0),
    )


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
