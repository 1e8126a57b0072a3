"""What the frozen layers of a model give for a text, which need not be computed twice.

With an adapter on the last layers only (``lora="r=16,layers=10"``), the layers below have the same outputs for a text
as long as the model lives. They are the greater part of the work if the same texts come back, as descriptions of
few observations do. If most texts are new, this is slower than reading them together.
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
"""Limit of the outputs that are remembered: 7,000 rows of 60 tokens, if a token has 576 numbers of float32."""


class FrozenLayers:
    """Outputs of the layers below the first one that trains, by the tokens of a row.

    Each row is read alone, whatever rows stand beside it. So a training that is resumed, which has to read all rows
    again, gets the same numbers to the bit. Copies begin without outputs.

    Args:
        max_bytes: limit of what is remembered, bytes; further rows are read each time.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._below: list[nn.Module] = []
        self._above: list[nn.Module] = []
        self._made_with: list[object] = []
        self._can_skip = False
        self._output_of_row: dict[bytes, Tensor] = {}
        self._num_bytes = 0

    def __reduce__(self) -> tuple[type[FrozenLayers], tuple[int]]:
        return FrozenLayers, (self.max_bytes,)

    def can_skip(self, model: PreTrainedModel, run: Trunk) -> bool:
        """Return True if the model has frozen layers whose outputs can take their place.

        They are forgotten if a weight or buffer has changed (of a frozen matrix: by torch's own counter, or in its
        first row). A model with hooks is run as it is.

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
        self._below = layers[:count]
        self._above = layers[count:]
        if count == 0 or _has_hooks(model):
            return False

        # All that their outputs depend on: what they use, and what is around the layers, such as embeddings
        in_above = {parameter for layer in self._above for parameter in layer.parameters()}
        around = [parameter for parameter in model.parameters() if parameter not in in_above]
        in_below = [parameter for layer in self._below for parameter in layer.parameters()]
        used = dict.fromkeys([*around, *in_below])
        if any(parameter.requires_grad for parameter in used):
            return False

        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        made_with = [*map(id, layers), autocast, *fingerprints([*used, *model.buffers()])]
        if made_with != self._made_with:
            self._made_with = made_with
            self._output_of_row.clear()
            self._num_bytes = 0
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
                size = output.numel() * output.element_size()
                if self._num_bytes + size <= self.max_bytes:
                    self._output_of_row[key] = output
                    self._num_bytes += size
            outputs.append(pad(output, (0, 0, 0, tokens.shape[1] - row_length)))
        return torch.stack(outputs)

    @contextmanager
    def skipped(self, output: Tensor) -> Iterator[None]:
        """Context in which the frozen layers compute nothing, and the layer above them gets this output."""

        def return_output(*inputs: object, **options: object) -> Tensor:
            return output

        with replaced_forwards(self._below, [return_output] * len(self._below)):
            yield

    def _read(self, run: Trunk, tokens: Tensor) -> Tensor:
        """Run the frozen layers for one row, int64 ``[L]``; return ``[L, size]``."""
        received: list[Tensor] = []

        def pass_on(hidden: Tensor, *inputs: object, **options: object) -> Tensor:
            received.append(hidden)
            return hidden

        # The layers above only pass on what they get. Outputs of inference mode could not be used in a training
        without_above = replaced_forwards(self._above, [pass_on] * len(self._above))
        with without_above, torch.inference_mode(False), torch.no_grad():
            run(input_ids=tokens[None], attention_mask=torch.ones_like(tokens[None]), use_cache=False)
        return received[0][0]

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


def _has_hooks(model: nn.Module) -> bool:
    """Return True if someone listens to a module of the model, or has replaced its forward pass."""
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return True
    return False


def fingerprints(tensors: Iterable[Tensor]) -> list[object]:
    """Return numbers that change with the weights.

    Of a weight that trains two numbers: one changes with any single number in it, the other if numbers only change
    places. Frozen ones may be many, so of a frozen matrix there are torch's counter of changes and two numbers of its
    first row, because the counter does not see what is written to `Tensor.data`.
    """
    numbers: list[object] = []
    for tensor in tensors:
        weight = tensor.detach()
        if weight.numel() == 0:
            continue
        numbers += [weight.device, weight.dtype]
        is_frozen_matrix = weight.ndim > 1 and not tensor.requires_grad
        if is_frozen_matrix and not tensor.is_inference():  # of an inference tensor torch counts no changes
            first_row = weight[:1].float()
            numbers += [tensor.data_ptr(), tensor._version]
            numbers += [torch.hash_tensor(first_row).item(), first_row.sum().item()]
            continue
        rows = weight.reshape(len(weight), -1).float() if weight.ndim else weight.reshape(1, 1).float()
        row_factors = torch.arange(1.0, len(rows) + 1, device=rows.device).sin()
        column_factors = torch.arange(1.0, rows.shape[1] + 1, device=rows.device).cos()
        weighted_sum = rows.T.mv(row_factors).dot(column_factors)
        numbers += [torch.hash_tensor(rows).item(), weighted_sum.item()]
    return numbers
