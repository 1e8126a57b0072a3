"""Answers whose lengths are geometric, of a GPT-2 with random weights. Needs only torch, as peers have it too."""

import math

import torch


def end_with(model, probability):
    """Give EOS this probability after every text, or none: so lengths are geometric, and no rule has to see to it.

    The last normalisation makes rows of mean 0, so with a bias of 1 they have a product with a constant vector that is
    the same everywhere: EOS gets a constant logit. Those of the others are random and close to 0.
    """
    others = math.log(model.config.vocab_size - 1)
    logit = math.log(probability / (1 - probability)) + others if probability else -100.0
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[model.config.eos_token_id] = logit / model.config.n_embd
