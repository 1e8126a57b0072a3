"""Decoder blocks of a `transformers` model: what each part adds to the residual stream, read by hooks.

The model is not converted, and its architecture is checked: the parts must add up to the stream before the final norm.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from textenv.lm.loading import plain_model, setting, trunk_of
from textenv.lm.memory import POSITIONS_AT_ONCE
from textenv.lm.model import LanguageModel

PROJECTIONS = {
    "attention": r"(self_attn|attn|attention|self_attention)(\.attention)?\.(o_proj|out_proj|c_proj|dense)",
    "mlp": r"((mlp|ffn)\.)?(down_proj|c_proj|fc2|fc_out|dense_4h_to_h)",
}
"""Names, in a block, of the last linear layers of its attention and its MLP."""
POST_NORMS = {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
"""Norms between these layers and the residual stream, in blocks that have both (Gemma 2 and 3, OLMo 2)."""
MAX_UNEXPLAINED = 1e-3
"""Maximum length, as a fraction of the stream's, of what the parts leave unexplained."""
Pair = tuple[Sequence[int], Sequence[int]]
"""Two sets of token ids, whose mean logits are subtracted."""
Positions = Tensor | tuple[Tensor, ...]
"""Values of a module at all positions; the first of several."""
Reading = dict[nn.Module, tuple[Tensor, Tensor]]
"""Input and output of modules at the last positions of n prompts, ``[n, width]`` each."""


class Writer(NamedTuple):
    """An attention or an MLP, by its last modules."""

    projection: nn.Module
    last: nn.Module
    """Module whose output is added to the stream: the projection, or a norm behind it."""

    def contributions(self, reading: Reading, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Split the output along directions ``[n, width]`` into inputs of the projection and a constant (biases).

        The inputs are the heads' outputs side by side, or the MLP's neurons. Returns ``[n, inputs]`` and ``[n]``.
        """
        projection_inputs, _ = reading[self.projection]
        inputs = projection_inputs.detach().requires_grad_()
        with torch.enable_grad():
            output = self.projection.forward(inputs)  # with an adapter's part, if it has one
        constant = torch.zeros(len(direction))
        if self.last is not self.projection:
            direction, constant = before_norm(self.last, output.detach(), direction)
        (gradient,) = torch.autograd.grad(output, inputs, direction)
        bias = self.projection.forward(torch.zeros_like(inputs)).detach()
        return (inputs * gradient).detach(), constant.to(bias) + (bias * direction).sum(-1)


class Blocks:
    """The blocks of a language model, adapters included, in float32; a policy's temperature is left out.

    Raises a ValueError for an encoder-decoder, blocks of an unknown kind, and weights that are not float32; `read` also
    if the parts do not add up.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.model = plain_model(lm.model)
        config = lm.model.config.get_text_config()
        self.num_heads = setting(config, "num_attention_heads")
        self.blocks, norms = _blocks_and_norms(trunk_of(lm.model), setting(config, "num_hidden_layers"))

        # What this cannot take apart
        if lm.seq2seq is not None:
            raise self._unknown("it is an encoder-decoder")
        if type(lm) is not LanguageModel:
            raise self._unknown("a reference that shares weights with its policy; load the base by its name")
        if lm.model.dtype != torch.float32:
            raise self._unknown(f"its weights are {lm.model.dtype}, not float32")
        if not (norms and self.num_heads):
            raise self._unknown("it has no list of attention blocks before a norm")

        self.lm = LanguageModel(lm.model, lm.tokenizer)
        self.norm = norms[-1]
        self.writers = {part: [self._writer(block, part) for block in self.blocks] for part in PROJECTIONS}

    def _writer(self, block: nn.Module, part: str) -> Writer:
        modules = dict(block.named_modules())
        projections = [module for name, module in modules.items() if re.fullmatch(PROJECTIONS[part], name)]
        if len(projections) != 1:
            raise self._unknown(f"{len(projections)} layers of a block may be the last one of its {part}")
        projection = projections[0]
        last = projection
        if {*POST_NORMS.values()} <= modules.keys():
            last = modules[POST_NORMS[part]]
        return Writer(projection, last)

    def _unknown(self, reason: str) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} cannot be taken apart ({reason}): expected a decoder whose attention and MLP "
            "are added to one stream, such as GPT-2, Llama, Qwen, Mistral, Gemma, OPT, GPT-NeoX or Phi"
        )

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Split the token ids of prompts into groups that are read at once, so that memory does not grow with them."""
        longest = max(map(len, rows))
        size = max(1, POSITIONS_AT_ONCE // longest)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    @torch.no_grad()
    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Output of the final norm at each row's last position, ``[n, width]``."""
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return _ends(self.lm.hidden(tokens.to(self.lm.device)), rows)

    def read(self, rows: Sequence[Sequence[int]]) -> Reading:
        """Read the first block, the final norm and all writers' modules, for a group of `batches`."""
        writers = [writer for writers_of_part in self.writers.values() for writer in writers_of_part]
        modules = {self.blocks[0], self.norm}
        for writer in writers:
            modules |= {writer.projection, writer.last}

        # One pass, with hooks
        reading: Reading = {}

        def keep(module: nn.Module, inputs: Positions, output: Positions) -> None:
            reading[module] = (_ends(inputs, rows), _ends(output, rows))

        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(hook(module, keep))
            hidden = self.hidden(rows)

        # What enters the first block and what is added to it must be the stream, and its norm the output
        residual, normed = reading[self.norm]
        start, _ = reading[self.blocks[0]]
        added = [start, *(reading[writer.last][1] for writer in writers)]
        adds_up = all(x.shape == residual.shape for x in added)
        if adds_up:
            adds_up = _is_close(sum(added), residual) and _is_close(normed, hidden)
        if not adds_up:
            raise self._unknown("its parts do not add up to its residual stream")
        return reading

    def unembedding(self, pair: Pair) -> tuple[Tensor, float]:
        """Return direction and offset: ``hidden @ direction + offset`` is the difference of the sets' mean logits.

        Where logits are capped or scaled (Gemma 2, Cohere), it is the difference before that.
        """
        head: nn.Module = self.model.get_output_embeddings()
        with torch.enable_grad():
            hidden = torch.zeros(1, self.lm.hidden_size, device=self.lm.device, requires_grad=True)
            first, second = (head(hidden)[0, list(tokens)].mean() for tokens in pair)
            difference = first - second
            (direction,) = torch.autograd.grad(difference, hidden)
        return direction[0], difference.item()

    @torch.no_grad()
    def patterns(self, row: Sequence[int]) -> Tensor:
        """Attention of each head from a prompt's last position to all, ``[layers, heads, length]``."""
        with ExitStack() as stack:
            stack.callback(self.model.set_attn_implementation, self.model.config._attn_implementation)
            self.model.set_attn_implementation("eager")  # the others do not return their weights
            tokens = torch.tensor([row], device=self.lm.device)
            weights = self.model(tokens, output_attentions=True).attentions
        if not weights or None in weights:
            raise self._unknown("its attention returns no weights")
        return torch.stack(weights)[:, 0, :, -1]  # from [layers, 1, heads, length, length]


def _blocks_and_norms(trunk: nn.Module, num_layers: int | None) -> tuple[list[nn.Module], list[nn.Module]]:
    """Blocks, the first list of as many modules as there are layers, and the norms beside this list; else none."""
    for parent in trunk.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return list(child), [module for module in parent.children() if _has_vector(module)]
    return [], []


def _has_vector(module: nn.Module) -> bool:
    """Whether a module itself has a vector of weights, as norms do."""
    return any(p.ndim == 1 for p in module.parameters(recurse=False))


def _is_close(x: Tensor | int, reference: Tensor) -> bool:
    """Whether vectors ``[n, width]`` differ by at most `MAX_UNEXPLAINED` of the reference's length."""
    gap = (x - reference).norm(dim=-1)
    return not (gap > MAX_UNEXPLAINED * reference.norm(dim=-1)).any()


def hook(module: nn.Module, use: Callable[..., object]) -> RemovableHandle:
    """Context in which a module's calls end with ``use(module, input, output)``; a result replaces the output."""

    def use_first_input(
        module: nn.Module, args: tuple[object, ...], keywords: dict[str, object], output: object
    ) -> object:
        first = keywords.get("hidden_states")
        if args:
            first = args[0]
        return use(module, first, output)

    return module.register_forward_hook(use_first_input, with_kwargs=True)


@torch.no_grad()
def before_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a LayerNorm or RMSNorm, with its scale at x: ``norm(x) @ direction = x @ folded + constant``.

    Weight (Gemma's is 1 + weight), bias and centring are read off the module's outputs, whatever its class. Returns
    folded ``[n, width]`` and constant ``[n]``.
    """
    bias = norm(torch.zeros_like(x[:1]))

    # A constant vector becomes 0 if the norm subtracts the mean; one of alternating signs shows the weight
    signs = torch.ones_like(x[:1])
    constant = norm(signs) - bias
    signs[:, 1::2] = -1
    signed = norm(signs) - bias
    centres = constant.abs().max() < MAX_UNEXPLAINED * signed.abs().max()
    mean = float(centres)  # factor of the mean: 1 or 0
    weight = signed / (signs - mean * signs.mean(-1, keepdim=True))  # up to a factor, which is in the scale

    # Scale of each row, by least squares
    shape = weight * (x - mean * x.mean(-1, keepdim=True))
    scale = ((norm(x) - bias) * shape).sum(-1, keepdim=True) / shape.square().sum(-1, keepdim=True)
    folded = weight * direction * scale
    folded = folded - mean * folded.mean(-1, keepdim=True)
    return folded, (bias * direction).sum(-1).expand(len(x))


def _ends(value: Positions, rows: Sequence[Sequence[int]]) -> Tensor:
    """Last positions of a value of all positions, ``[n, length, k]`` or flat (OPT's MLP), as ``[n, k]``."""
    if isinstance(value, tuple):
        value = value[0]
    by_row = value.reshape(len(rows), -1, value.shape[-1])
    last = [len(row) - 1 for row in rows]
    return by_row[torch.arange(len(rows)), last]
