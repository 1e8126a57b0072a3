"""Direct attribution: a difference of logits, split exactly into what each part of the model adds to it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from algos.insight.blocks import Blocks, Pair, before_norm


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
