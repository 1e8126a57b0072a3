"""Activations of a policy's hidden layers, read by hooks."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from textenv.lm.model import language_model_of
from textenv.rollout import prompt_lengths

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
FEATURES = "features"
"""Layer that the last linear layer of the actor reads, or a language model's output layer."""


def activations(policy: Any, rollout: TensorDict) -> dict[str, Tensor]:
    """Outputs ``[n, units]`` of activation functions, by module, and `FEATURES`, at the True entries; differentiable.

    Units of a convolution are its channels. The rollout is ``[B, T]``, or ``[n]`` unless the policy is sequential.
    Raises a TypeError for a policy without a module ``actor`` or ``network``.
    """
    lm, mask, found, read = language_model_of(policy), rollout["mask"], dict[str, Tensor](), list[Tensor]()
    parts = dict(policy.named_children()) if isinstance(policy, nn.Module) else {}
    actor = parts.get("actor", parts.get("network", lm))
    if actor is None:
        raise TypeError(f"a {type(policy).__name__} has no module actor or network: its hidden layers are unknown")

    def keep(name: str, module: nn.Module, inputs: Any, output: Any = None) -> None:
        x = inputs[0] if output is None else output
        x = x[mask] if x.shape[: mask.ndim] == mask.shape else x
        found[name] = x.movedim(1, -1).flatten(0, -2) if x.ndim > 2 else x

    with ExitStack() as hooks:
        for name, module in policy.named_modules():
            if type(module).__module__ in ACTIVATIONS:
                hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        if lm is not None:
            keep(FEATURES, lm, [lm.hidden(rollout["observation"], prompt_lengths(rollout)).float()])
            return found
        leaves = [x for x in actor.modules() if not list(x.children())]
        hooks.enter_context(leaves[-1].register_forward_pre_hook(partial(keep, FEATURES)))
        hooks.enter_context(leaves[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])))
        policy.output(rollout)
        if "critic" in parts:
            parts["critic"](read[0])  # it reads what the actor reads
    return found
