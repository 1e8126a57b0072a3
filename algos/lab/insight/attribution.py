"""Attribution of a difference of logits to parts of a model: direct contributions, and activation patching."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from algos.lab.insight.blocks import Blocks, Pair, before_norm, hook


class Attribution(NamedTuple):
    """Contributions to the logit difference of two sets of tokens, at the ends of n prompts.

    Only direct contributions: without what later layers make of them, and with the final norm's scale as it is (Elhage
    et al. 2021).
    """

    difference: Tensor
    """Mean logit of the first set minus that of the second, ``[n]``."""
    parts: Tensor
    """Attention of each layer, MLP of each, embedding, output biases: ``[n, 2 * layers + 2]``, whose sum is the
    difference."""
    heads: Tensor
    """Heads, then the bias behind them: ``[n, layers, heads + 1]``, whose sum is a layer's attention."""
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
    reading = blocks.read(rows)
    direction, offset = blocks.unembedding(pair)

    # The difference is linear in the stream before the final norm, [n, width]
    residual, hidden = reading[blocks.norm]
    folded, constant = before_norm(blocks.norm, residual, direction)

    # What is added to the stream, [layers, n, width] and [1, n, width]
    attention = torch.stack([reading[writer.last][1] for writer in blocks.writers["attention"]])
    mlp = torch.stack([reading[writer.last][1] for writer in blocks.writers["mlp"]])
    embedding = reading[blocks.blocks[0]][0][None]
    contributions = (torch.cat([attention, mlp, embedding]) * folded).sum(-1).T
    output_biases = (constant + offset)[:, None]
    stream = torch.cat([embedding, attention + mlp]).cumsum(0)

    # Parts of an attention, and of an MLP
    heads = []
    for writer in blocks.writers["attention"]:
        inputs, bias = writer.contributions(reading, folded)
        of_heads = inputs.unflatten(-1, (blocks.num_heads, -1)).sum(-1)
        heads.append(torch.cat([of_heads, bias[:, None]], 1))
    of_neurons = torch.zeros(len(rows), 0, 0)
    if neurons:
        of_neurons = torch.stack([writer.contributions(reading, folded)[0] for writer in blocks.writers["mlp"]], 1)

    return Attribution(
        difference=hidden @ direction + offset,
        parts=torch.cat([contributions, output_biases], 1),
        heads=torch.stack(heads, 1),
        lens=(blocks.norm(stream) @ direction + offset).T,
        hidden=hidden,
        neurons=of_neurons,
    )


class Place(NamedTuple):
    """A layer's ``"attention"`` or ``"mlp"``, or one head of its attention."""

    layer: int
    part: str
    head: int = -1
    """-1 for the whole part."""

    def __str__(self) -> str:
        if self.head < 0:
            return f"layer {self.layer} {self.part}"
        return f"layer {self.layer} head {self.head}"


@torch.no_grad()
def patch(
    base: Blocks, tuned: Blocks, rows: Sequence[Sequence[int]], pair: Pair, runs: Sequence[Sequence[Place]]
) -> Tensor:
    """Measure logit differences of the tuned model with some outputs of the base, ``[prompts, runs]``.

    A run replaces the outputs at its places together, at all positions; what follows them is the tuned model's (Vig et
    al. 2020). A head's output is the part of the projection's that its own columns make, in either model.
    """
    direction, offset = tuned.unembedding(pair)
    components = {component for run in runs for component in run}
    differences = []
    for group in base.batches(rows):
        # Outputs of the base
        recorded: dict[Place, Tensor] = {}
        with ExitStack() as hooks:
            for component in components:
                hooks.enter_context(_hook(base, component, recorded))
            base.hidden(group)

        # The tuned model with them
        columns = []
        for run in runs:
            with ExitStack() as hooks:
                for component in run:
                    hooks.enter_context(_hook(tuned, component, recorded))
                columns.append(tuned.hidden(group) @ direction + offset)
        differences.append(torch.stack(columns, 1))
    return torch.cat(differences)


def _hook(blocks: Blocks, place: Place, recorded: dict[Place, Tensor]) -> RemovableHandle:
    """Context that records the output at a place or, if one is recorded already, replaces the output by it."""
    writer = blocks.writers[place.part][place.layer]

    def use(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        at_place = output
        if place.head >= 0:
            without_head = inputs.clone()
            without_head.unflatten(-1, (blocks.num_heads, -1))[..., place.head, :] = 0
            at_place = module.forward(inputs) - module.forward(without_head)
        return output + (recorded.setdefault(place, at_place) - at_place)

    if place.head < 0:
        return hook(writer.last, use)
    return hook(writer.projection, use)
