"""A stand-in for another engine: our own policy behind the interface `Generator`, wrong by a known amount if asked."""

import copy

import numpy as np
import torch

from algos.policies.random_streams import UniformStreams


class FakeEngine:
    """Samples by a copy of the policy, with these amounts added to tokens' logits; reports its own log-probs.

    With ``ids_past_the_end`` it never stops by itself, and with ``piece`` it returns a turn in pieces of this length.
    """

    def __init__(self, *, shift=None, ids_past_the_end=False, piece=10**9):
        self.shift, self.ids_past_the_end, self.piece = shift or {}, ids_past_the_end, piece
        self.asked, self.updates = [], 0

    def update_weights(self, policy):
        self.model, self.updates, self.known = copy.deepcopy(policy.lm.model), self.updates + 1, {}

    @torch.no_grad()
    def generate(self, turns, *, seeds, sampling):
        self.asked.append(list(turns))
        return [self.one(turn, seed, sampling) for turn, seed in zip(turns, seeds, strict=True)]

    def logits(self, prefix):
        if prefix not in self.known:
            self.known[prefix] = self.model(torch.tensor([prefix])).logits[0, -1].float()
        return self.known[prefix]

    def one(self, turn, seed, sampling):
        streams, ids, log_probs = UniformStreams(np.array([seed])), [], []
        while len(ids) < min(turn.max_new_tokens, self.piece):
            logits = self.logits((*turn.prefix, *ids))[: sampling.num_tokens] / sampling.temperature
            for token, amount in self.shift.items():
                logits[token] += amount
            allowed = set(range(len(logits)) if turn.allowed is None else turn.allowed)
            allowed -= set(sampling.ends if len(ids) < turn.min_new_tokens else ())
            logits[[token for token in range(len(logits)) if token not in allowed]] = torch.finfo(torch.float32).min
            weights = (logits - logits.max()).exp().cumsum(0)
            ids.append(int(torch.searchsorted(weights, streams.next() * weights[-1], right=True)))
            log_probs.append(float(logits.log_softmax(0)[ids[-1]]))
            if ids[-1] in sampling.ends and not self.ids_past_the_end:
                break
        return ids, log_probs
