"""Activations of a policy's hidden layers, read by hooks."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from textenv.lm.model import language_model_of
from textenv.rollout import prompt_lengths

ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
"""Python modules whose classes are activation functions."""
FEATURES = "features"
"""Layer that the last linear layer of the actor reads, or a language model's output layer."""


def activations(policy: Any, rollout: TensorDict) -> dict[str, Tensor]:
    """Read the outputs ``[n, units]`` of activation functions, by module, and `FEATURES`; differentiable.

    Args:
        policy: a policy with a module ``actor`` or ``network``, or with a language model.
        rollout: steps ``[B, T]``, or ``[n]`` unless the policy is sequential; n is the number of True in its mask.

    Returns:
        Outputs by the name of the module in the policy. Units of a convolution are its channels.

    Raises:
        TypeError: if the policy has no such module.
    """
    lm = language_model_of(policy)
    mask = rollout["mask"]
    children: dict[str, nn.Module] = {}
    if isinstance(policy, nn.Module):
        children = dict(policy.named_children())
    actor = children.get("actor", children.get("network", lm))
    if actor is None:
        raise TypeError(f"a {type(policy).__name__} has no module actor or network: its hidden layers are unknown")

    # What the hooks collect
    outputs: dict[str, Tensor] = {}
    actor_inputs: list[Tensor] = []

    def keep(name: str, x: Tensor) -> None:
        if x.shape[: mask.ndim] == mask.shape:
            x = x[mask]
        if x.ndim > 2:  # a convolution's [n, channels, *]
            x = x.movedim(1, -1).flatten(0, -2)
        outputs[name] = x

    def keep_output(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        keep(name, output)

    def keep_features(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        keep(FEATURES, inputs[0])

    def keep_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        actor_inputs.append(inputs[0])

    # One pass of the networks with hooks
    with ExitStack() as hooks:
        for name, module in policy.named_modules():
            if type(module).__module__ in ACTIVATION_MODULES:
                hooks.enter_context(module.register_forward_hook(partial(keep_output, name)))
        if lm is not None:
            hidden = lm.hidden(rollout["observation"], prompt_lengths(rollout))
            keep(FEATURES, hidden.float())
            return outputs
        leaves = [module for module in actor.modules() if not list(module.children())]
        hooks.enter_context(leaves[-1].register_forward_pre_hook(keep_features))
        hooks.enter_context(leaves[0].register_forward_pre_hook(keep_input))
        policy.output(rollout)
        if "critic" in children:
            children["critic"](actor_inputs[0])  # it reads what the actor reads
    return outputs
