"""The floor of generation: the matrix products of a GPT-2 over a static cache, and nothing else.

No environment, no sampler: the next tokens are given. Checked against `transformers` each time that it is made.
"""

import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention


class BareDecoding:
    """Decodes a batch of one prompt length in step; the model is a GPT-2 with the fused activation.

    Args:
        model: whose weights are used.
        rows: texts side by side.
        max_length: of a text, in tokens.
    """

    def __init__(self, model, *, rows, max_length):
        self.trunk, self.head = model.transformer, model.lm_head.weight
        self.rows, self.heads, self.size = rows, model.config.n_head, model.config.n_embd // model.config.n_head
        shape = (rows, self.heads, max_length, self.size)
        weight = self.head
        self.keys = [weight.new_zeros(shape) for _ in self.trunk.h]
        self.values = [weight.new_zeros(shape) for _ in self.trunk.h]
        tokens = torch.arange(5 * rows, device=weight.device).view(rows, 5) % model.config.vocab_size
        ours = (self.read(tokens[:, :4], 0), self.read(tokens[:, 4:], 4))[1]
        with torch.no_grad():
            gap = (model(tokens).logits[:, -1] - ours).abs().max().item()
        if gap > (1e-4 if weight.dtype == torch.float32 else 0.1):
            raise ValueError(f"the bare loop differs from transformers by {gap:.3g}: it is no floor of this model")

    @torch.inference_mode()
    def read(self, tokens, start):
        """Logits after int64 ``[rows, n]`` new tokens, which stand from that position on: ``[rows, vocabulary]``."""
        n = tokens.shape[1]
        stop = start + n
        x = (self.trunk.wte.weight[tokens] + self.trunk.wpe.weight[start:stop]).view(self.rows * n, -1)
        for block, keys, values in zip(self.trunk.h, self.keys, self.values, strict=True):
            q, k, v = _affine(block.attn.c_attn, _norm(block.ln_1, x)).view(self.rows, n, 3, self.heads, -1).unbind(2)
            keys[:, :, start:stop], values[:, :, start:stop] = k.transpose(1, 2), v.transpose(1, 2)
            mixed = scaled_dot_product_attention(
                q.transpose(1, 2), keys[:, :, :stop], values[:, :, :stop], is_causal=start == 0
            )
            x = x + _affine(block.attn.c_proj, mixed.transpose(1, 2).reshape(self.rows * n, -1))
            inner = gelu(_affine(block.mlp.c_fc, _norm(block.ln_2, x)), approximate="tanh")
            x = x + _affine(block.mlp.c_proj, inner)
        return _norm(self.trunk.ln_f, x.view(self.rows, n, -1)[:, -1]) @ self.head.T

    def run(self, prompts, new_tokens):
        """Read int64 ``[rows, n]`` and decode that many tokens."""
        width, token = prompts.shape[1], prompts[:, -1:]
        self.read(prompts, 0)
        for position in range(width, width + new_tokens - 1):
            self.read(token, position)


def _affine(layer, x):
    return torch.addmm(layer.bias, x, layer.weight)


def _norm(layer, x):
    return layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
