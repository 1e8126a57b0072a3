"""Rollouts made worse on purpose: padding, junk outside the mask, empty rows."""

import copy

import torch
from tensordict import TensorDict
from torch.nn import functional as F  # noqa: N812

from tests.helpers.text_envs import EOS, PAD
from textenv.rollout import Evaluation


def padded(rollout, columns, token=PAD):
    """The rollout with columns of padding on the right."""
    wide = {name: F.pad(x, (0, columns), value=token if x.dtype == torch.int64 else 0) for name, x in rollout.items()}
    return type(rollout)(wide, batch_size=[rollout.shape[0], rollout.shape[1] + columns])


JUNK = [float("nan"), float("inf"), -float("inf"), 1e30, 3.0]


def junk(shape, seed=0):
    chosen = torch.randint(len(JUNK), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(JUNK)[chosen]


ANSWERS = [(5, 1, EOS), (EOS,), (3, 3, 3, 3, 3), (6, 5, 0, 2, EOS), (1, EOS), (2, 2, 2, EOS), (5, 5, 5, 5, EOS)]


def spoil(rollout, seed):
    """Junk in every column outside the mask: NaN, infinities, and log-probabilities 200 nats away."""
    dirty, mask = rollout.clone(), rollout["mask"]
    for number, name in enumerate(sorted(rollout.keys())):
        x = rollout[name]
        outside = (~mask).view(*mask.shape, *[1] * (x.ndim - 2)).expand_as(x)
        if x.dtype == torch.float32:
            dirty[name] = torch.where(outside, junk(x.shape, seed + number), x)
        elif name in ("action", "observation"):
            dirty[name] = torch.where(outside & after_the_end(rollout), (x + 1) % 2, x)
    gap = ~mask & (junk(mask.shape, seed) == 3.0)
    dirty["log_prob"] = torch.where(gap, rollout["log_prob"] + 200, dirty["log_prob"])
    return dirty


def after_the_end(rollout):
    """True where the row's episode is over: what stands there is not even part of a text."""
    done = (rollout["terminated"] | rollout["truncated"]).int()
    return (done.cumsum(1) - done > 0) & ~rollout["mask"]


def spoil_policy(policy, seed):
    """Junk outside the mask in what the policy says, with a gradient: a sum, for `where` would stop it."""
    evaluate, values = policy.evaluate, policy.values

    def outside(mask):
        return torch.where(mask, 0.0, junk(mask.shape, seed))

    def dirty(rollout):
        return Evaluation(*(x + outside(rollout["mask"]) for x in evaluate(rollout)))

    policy.evaluate = dirty
    policy.values = lambda rollout: tuple(x + outside(rollout["mask"]) for x in values(rollout))
    return policy


def other_weights(policy):
    """A reference near the policy."""
    reference = copy.deepcopy(policy.lm if hasattr(policy, "lm") else policy).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in reference.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return reference


def with_empty_rows(rollout, count):
    """The rollout with rows on top in which the policy chose nothing, though the environment paid."""
    empty = rollout[:count].clone()
    empty["mask"] = torch.zeros_like(empty["mask"])
    empty["reward"] = empty["reward"] + 5
    return torch.cat([empty, rollout])


def draws(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_rollout(generator, rows, steps):
    flags = {"mask": 0.7, "is_init": 0.25, "terminated": 0.2, "truncated": 0.15}
    columns = {name: torch.rand(rows, steps, generator=generator) < share for name, share in flags.items()}
    columns["reward"] = torch.randn(rows, steps, generator=generator)
    return TensorDict(columns, [rows, steps])
