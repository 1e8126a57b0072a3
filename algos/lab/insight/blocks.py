"""Decoder blocks of a `transformers` model: what each part adds to the residual stream, read by hooks.

Nothing is converted, and no architecture is taken on trust: the parts must add up to the stream before the final norm.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
UNEXPLAINED = 1e-3
"""Maximum length, relative to the stream, of what the parts leave unexplained."""
Pair = tuple[Sequence[int], Sequence[int]]
"""Two sets of token ids, whose mean logits are subtracted."""
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
        inputs, constant = reading[self.projection][0].detach().requires_grad_(), torch.zeros(len(direction))
        with torch.enable_grad():
            output = self.projection.forward(inputs)  # with an adapter's part, if it has one
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
        config, self.model = lm.model.config.get_text_config(), plain_model(lm.model)
        lists = [
            (list(child), [m for m in parent.children() if any(p.ndim == 1 for p in m.parameters(recurse=False))])
            for parent in trunk_of(lm.model).modules()
            for child in parent.children()
            if isinstance(child, nn.ModuleList) and len(child) == setting(config, "num_hidden_layers")
        ]
        self.num_heads = setting(config, "num_attention_heads")
        for reason, wrong in {
            "it is an encoder-decoder": lm.seq2seq is not None,
            "a reference that shares weights with its policy; load the base by its name": type(lm) is not LanguageModel,
            f"its weights are {lm.model.dtype}, not float32": lm.model.dtype != torch.float32,
            "it has no list of attention blocks before a norm": not (lists and lists[0][1] and self.num_heads),
        }.items():
            if wrong:
                raise self._unknown(reason)
        self.lm, self.blocks, self.norm = LanguageModel(lm.model, lm.tokenizer), lists[0][0], lists[0][1][-1]
        self.writers = {part: [self._writer(block, part) for block in self.blocks] for part in PROJECTIONS}

    def _writer(self, block: nn.Module, part: str) -> Writer:
        modules = dict(block.named_modules())
        found = [module for name, module in modules.items() if re.fullmatch(PROJECTIONS[part], name)]
        if len(found) != 1:
            raise self._unknown(f"{len(found)} layers of a block may be the last one of its {part}")
        return Writer(found[0], modules[POST_NORMS[part]] if {*POST_NORMS.values()} <= modules.keys() else found[0])

    def _unknown(self, reason: str) -> ValueError:
        return ValueError(
            f"{type(self.model).__name__} cannot be taken apart ({reason}): expected a decoder whose attention and MLP "
            "are added to one stream, such as GPT-2, Llama, Qwen, Mistral, Gemma, OPT, GPT-NeoX or Phi"
        )

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Split the token ids of prompts into groups that are read at once, so that memory does not grow with them."""
        size = max(1, POSITIONS_AT_ONCE // max(map(len, rows)))
        return (rows[start : start + size] for start in range(0, len(rows), size))

    @torch.no_grad()
    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Output of the final norm at each row's last position, ``[n, width]``."""
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return _ends(self.lm.hidden(tokens.to(self.lm.device)), rows)

    def read(self, rows: Sequence[Sequence[int]]) -> Reading:
        """Read the first block, the final norm and all writers' modules, for a group of `batches`."""
        found: Reading = {}
        writers = [writer for part in self.writers.values() for writer in part]
        with ExitStack() as hooks:
            for module in {self.blocks[0], self.norm, *(module for writer in writers for module in writer)}:
                hooks.enter_context(hook(module, lambda m, x, y: found.update({m: (_ends(x, rows), _ends(y, rows))})))
            hidden = self.hidden(rows)
        residual, normed = found[self.norm]
        added = [found[self.blocks[0]][0], *(found[writer.last][1] for writer in writers)]
        fits = all(each.shape == residual.shape for each in added)
        gaps = [(sum(added) - residual, residual), (normed - hidden, hidden)] if fits else []
        if not fits or any((gap.norm(dim=-1) > UNEXPLAINED * x.norm(dim=-1)).any() for gap, x in gaps):
            raise self._unknown("its parts do not add up to its residual stream")
        return found

    def unembedding(self, pair: Pair) -> tuple[Tensor, float]:
        """Direction and offset: ``hidden @ direction + offset`` is the difference of the sets' mean logits.

        Of logits that are capped or scaled (Gemma 2, Cohere), it is the one before.
        """
        head: Any = self.model.get_output_embeddings()
        with torch.enable_grad():
            hidden = torch.zeros(1, self.lm.hidden_size, device=self.lm.device, requires_grad=True)
            first, second = (head(hidden)[0, list(tokens)].mean() for tokens in pair)
            (direction,) = torch.autograd.grad(first - second, hidden)
        return direction[0], (first - second).item()

    @torch.no_grad()
    def patterns(self, row: Sequence[int]) -> Tensor:
        """Attention of each head from a prompt's last position to all, ``[layers, heads, length]``."""
        with ExitStack() as stack:
            stack.callback(self.model.set_attn_implementation, self.model.config._attn_implementation)
            self.model.set_attn_implementation("eager")  # the others do not return their weights
            found = self.model(torch.tensor([row], device=self.lm.device), output_attentions=True).attentions
        if not found or None in found:
            raise self._unknown("its attention returns no weights")
        return torch.stack(found)[:, 0, :, -1]


def hook(module: nn.Module, use: Callable[[nn.Module, Any, Any], Any]) -> Any:
    """Context in which a module's calls end with ``use(module, input, output)``; a result replaces the output."""
    return module.register_forward_hook(
        lambda module, args, named, output: use(module, args[0] if args else named.get("hidden_states"), output),
        with_kwargs=True,
    )


@torch.no_grad()
def before_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a LayerNorm or RMSNorm, its scale held at x: ``norm(x) @ direction = x @ folded + constant``.

    Weight (Gemma's is 1 + weight), bias and centring are read off the module's outputs, whatever its class. Returns
    ``[n, width]`` and ``[n]``.
    """
    bias, signs = norm(torch.zeros_like(x[:1])), torch.ones_like(x[:1])
    constant = norm(signs) - bias
    signs[:, 1::2] = -1
    signed = norm(signs) - bias
    mean = float(constant.abs().max() < UNEXPLAINED * signed.abs().max())  # 1 if the norm takes off the mean, else 0
    weight = signed / (signs - mean * signs.mean(-1, keepdim=True))  # up to a factor, which is in the scale
    shape = weight * (x - mean * x.mean(-1, keepdim=True))
    scale = ((norm(x) - bias) * shape).sum(-1, keepdim=True) / shape.square().sum(-1, keepdim=True)
    folded = weight * direction * scale
    return folded - mean * folded.mean(-1, keepdim=True), (bias * direction).sum(-1).expand(len(x))


def _ends(value: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Last positions of a value of all positions, ``[n, length, k]`` or flat (OPT's MLP), as ``[n, k]``."""
    value = value[0] if isinstance(value, tuple) else value
    return value.reshape(len(rows), -1, value.shape[-1])[torch.arange(len(rows)), [len(row) - 1 for row in rows]]
