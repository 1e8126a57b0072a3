"""What the frozen layers of a model give for a text, which need not be computed twice.

With an adapter on the last layers only (``lora="r=16,layers=10"``), the layers below have the same outputs for a text
as long as the model lives. They are the greater part of the work if the same texts come back, as descriptions of
observations do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from textenv.lm.memory import Trunk, layers_of, replaced_forwards
from textenv.rollout import rounding_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_BYTES = 2**30
"""Limit of the outputs that are remembered: 7,000 texts of 60 tokens for a model with 576 numbers a token."""


class FrozenLayers:
    """Outputs of the layers below the first one that trains, by the tokens of a row.

    Each row is read alone. So its numbers do not depend on the rows beside it, and a resumed training has the same.

    Args:
        max_bytes: limit of what is remembered, bytes; beyond it, all is forgotten.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._layers: list[nn.Module] = []
        self._layers_above: list[nn.Module] = []
        self._made_with: list[object] = []
        self._can_skip = False
        self._output_of_row: dict[bytes, Tensor] = {}
        self._num_bytes = 0

    def look_at(self, model: PreTrainedModel, run: Trunk) -> bool:
        """Return True if the model has frozen layers that can be skipped; forget what other weights gave.

        Args:
            model: the model.
            run: its trunk.
        """
        # Layers below the first one that trains; the last one is always computed
        layers = layers_of(model)
        count = 0
        for layer in layers[:-1]:
            if trains(layer):
                break
            count += 1
        below = layers[:count]
        above = layers[count:]
        parameters_above = {parameter for layer in above for parameter in layer.parameters()}
        other_parameters = [parameter for parameter in model.parameters() if parameter not in parameters_above]
        if count == 0 or any(parameter.requires_grad for parameter in other_parameters):
            return False

        # Whether their weights are those of the last time
        made_with = [count, *fingerprints(other_parameters)]
        if made_with != self._made_with:
            self._made_with = made_with
            self._layers = below
            self._layers_above = above
            self._forget()
            self._can_skip = self._skips_well(model, run)
        return self._can_skip

    def outputs(self, run: Trunk, tokens: Tensor, length: Tensor) -> Tensor:
        """Outputs of the frozen layers ``[B, L, size]`` for rows int64 ``[B, L]`` of these lengths; 0 on padding."""
        outputs = []
        for row, row_length in zip(tokens, length.tolist(), strict=True):
            row_tokens = row[:row_length]
            key = row_tokens.cpu().numpy().tobytes()
            output = self._output_of_row.get(key)
            if output is None:
                output = self._read(run, row_tokens)
                self._remember(key, output)
            outputs.append(pad(output, (0, 0, 0, tokens.shape[1] - row_length)))
        return torch.stack(outputs)

    @contextmanager
    def skipped(self, output: Tensor) -> Iterator[None]:
        """Context in which the frozen layers compute nothing, and the layer above them gets this output."""

        def given(*inputs: object, **options: object) -> Tensor:
            return output

        with replaced_forwards(self._layers, [given] * len(self._layers)):
            yield

    def _read(self, run: Trunk, tokens: Tensor) -> Tensor:
        """Run the frozen layers for one row, int64 ``[L]``; return ``[L, size]``."""
        received: list[Tensor] = []

        def pass_on(hidden: Tensor, *inputs: object, **options: object) -> Tensor:
            received.append(hidden)
            return hidden

        # Outputs of inference mode could not be used in a training
        skip_layers_above = replaced_forwards(self._layers_above, [pass_on] * len(self._layers_above))
        with skip_layers_above, torch.inference_mode(False), torch.no_grad():
            run(input_ids=tokens[None], attention_mask=torch.ones_like(tokens[None]), use_cache=False)
        return received[0][0]

    def _remember(self, key: bytes, output: Tensor) -> None:
        """Keep the output of a row; forget all others first if they are too many."""
        size = output.numel() * output.element_size()
        if self._num_bytes + size > self.max_bytes:
            self._forget()
        self._output_of_row[key] = output
        self._num_bytes += size

    def _forget(self) -> None:
        """Forget all outputs."""
        self._output_of_row.clear()
        self._num_bytes = 0

    @torch.no_grad()
    def _skips_well(self, model: PreTrainedModel, run: Trunk) -> bool:
        """Return True if the layers above give the same from what is remembered as in a whole pass."""
        row = torch.arange(3, device=model.device) % model.config.vocab_size
        inputs = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None]), "use_cache": False}
        try:
            expected = run(**inputs)
            with self.skipped(self._read(run, row)[None]):
                outputs = run(**inputs)
        except Exception:  # a model may pass on more than one tensor from layer to layer
            return False
        tolerance = rounding_tolerance(expected.dtype) * max(1.0, expected.abs().max().item())
        return bool(((outputs - expected).abs() <= tolerance).all())


def trains(module: nn.Module) -> bool:
    """Return True if a module has weights that train."""
    return any(parameter.requires_grad for parameter in module.parameters())


def fingerprints(parameters: Iterable[nn.Parameter]) -> list[object]:
    """Return numbers that change with the weights.

    Of trained weights two numbers: one changes with any single weight, the other if weights only change places. Of
    frozen ones, which may be many, torch's counter of changes, and two numbers of their first rows, because the counter
    does not see what is written to `Tensor.data`.
    """
    numbers: list[object] = []
    for parameter in parameters:
        numbers += [parameter.device, parameter.dtype]
        if not parameter.requires_grad and not parameter.is_inference():  # of which torch counts no changes
            first_row = parameter.detach()[:1].float() if parameter.ndim else parameter.detach().float()
            numbers += [parameter.data_ptr(), parameter._version]
            numbers += [torch.hash_tensor(first_row).item(), first_row.sum().item()]
            continue
        weight = parameter.detach()
        rows = weight.reshape(len(weight), -1).float() if weight.ndim else weight.reshape(1, 1).float()
        row_factors = torch.arange(1.0, len(rows) + 1, device=rows.device).sin()
        column_factors = torch.arange(1.0, rows.shape[1] + 1, device=rows.device).cos()
        weighted_sum = (row_factors @ rows) @ column_factors
        numbers += [torch.hash_tensor(rows).item(), weighted_sum.item()]
    return numbers
