"""`FrozenLanguageModel`: a reference without a second copy of what does not train."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call

from textenv.lm.model import LanguageModel
from textenv.rollout import Evaluation


class FrozenLanguageModel(LanguageModel):
    """A language model as it was at one moment, computed by the modules of the one that goes on training.

    The values of the parameters that train are kept and stand in for them here (`torch.func.functional_call`);
    the others are shared. So the reference of a policy with an adapter costs the adapter: it is the base model where
    the adapter is fresh, and the adapted one where it was trained before. It has no gradient.

    Args:
        lm: of which some parameters train.

    Raises:
        ValueError: when called, if parameters train by then that did not before: they would drift.

    Example:
        >>> reference = LMPolicy(get_peft_model(model, lora), tokenizer).reference()  # doctest: +SKIP
    """

    def __init__(self, lm: LanguageModel) -> None:
        nn.Module.__init__(self)
        # No submodules: what they train is none of ours.
        self._live: _Methods
        self.__dict__ |= {"model": lm.model, "_live": _Methods(lm)}
        self.tokenizer, self.temperature = lm.tokenizer, lm.temperature
        self.num_tokens, self.context, self.cached = lm.num_tokens, lm.context, lm.cached
        self.gradient_checkpointing, self.autocast = lm.gradient_checkpointing, lm.autocast
        trained = {name: p for name, p in lm.named_parameters() if p.requires_grad}
        self._names = list(trained)
        self.initial = nn.ParameterList(nn.Parameter(p.detach().clone(), False) for p in trained.values())

    def trunk(self, **inputs: Any) -> Tensor:
        """See `LanguageModel.trunk`."""
        return self._call("trunk", **inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `LanguageModel.logits`."""
        return self._call("logits", hidden)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `LanguageModel.evaluate`."""
        late = {name for name, p in self._live.lm.named_parameters() if p.requires_grad} - set(self._names)
        if late:
            raise ValueError(
                f"{len(late)} parameters train now that were frozen when this reference was made (such as "
                f"{min(late)}), so it would drift: make the reference after choosing what trains"
            )
        return super().evaluate(rollout)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights in force, under the names of the model that trains."""
        return self._live.lm.state_dict(*args, **options) | dict(zip(self._names, self.initial, strict=True))

    @torch.no_grad()
    def _call(self, method: str, *args: Any, **inputs: Any) -> Tensor:
        weights = {f"lm.{name}": p for name, p in zip(self._names, self.initial, strict=True)}
        return functional_call(self._live, weights, (method, *args), inputs)


class _Methods(nn.Module):
    """A language model's methods as the forward pass that `functional_call` calls."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, method: str, *args: Any, **inputs: Any) -> Tensor:
        return getattr(self.lm, method)(*args, **inputs)
