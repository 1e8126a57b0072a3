"""`LMPolicy`: a causal language model with a value head, as a policy over tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from algos.policy import Observation, Step
from textenv.lm.adapters import save_model
from textenv.lm.decoding import Decoder
from textenv.lm.loading import EMBEDDED, no_progress_bars
from textenv.lm.model import LanguageModel
from textenv.lm.sampling import greedy, restrict, sample, truncate
from textenv.rollout import Evaluation, following, sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LMPolicy(nn.Module):
    """Any decoder-only model as a recurrent policy: its cache is the hidden state, the prefix is the state.

    The value head is one linear layer on the model's trunk, zero at the start, so that it adds no noise to the
    first advantages; it computes in fp32 whatever the model's dtype.

    Args:
        model: a decoder-only `transformers` model; the policy trains it in place, or only the adapters inside its
            layers where it is a `peft` model.
        tokenizer: its tokenizer.
        temperature: one for acting and scoring; a reference made by `reference` has it too.
        detach_value: True keeps the value's gradient out of the trunk.
        top_k: sample from that many most probable tokens only. For generation: a policy that samples so cannot be
            trained, for its probabilities would be those of a support that moves with its weights.
        top_p: sample from the fewest tokens whose probabilities reach this, > 0 and <= 1; likewise.
        seed: of the sampled tokens.

    Raises:
        ValueError: as `LanguageModel` does, and on a ``top_k`` or ``top_p`` that is out of range.

    Example:
        >>> policy = LMPolicy.load("embedded")  # doctest: +SKIP
    """

    sequential = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float = 1.0,
        detach_value: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}, expected at least 1, or None for all tokens")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, expected a probability above 0, or None for all tokens")
        self.top_k, self.top_p = top_k, top_p
        self.lm = LanguageModel(model, tokenizer, temperature=temperature)
        self.detach_value = detach_value
        self.value_head = nn.Linear(self.lm.hidden_size, 1, device=self.lm.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.generator = torch.Generator(device=self.lm.device).manual_seed(seed)
        self._decoder: Decoder | None = None

    @classmethod
    def load(cls, name: str | Path = EMBEDDED, *, dtype: torch.dtype | None = None, **options: Any) -> LMPolicy:
        """Load model and tokenizer: ``"embedded"``, a local folder, or a hub name; float32 unless told otherwise.

        A saved policy comes back with its value head. The options are those of the constructor.
        """
        lm = LanguageModel.load(name, dtype=dtype)
        saved = Path(name) / "value_head.safetensors"
        if not saved.is_file():
            return cls(lm.model, lm.tokenizer, **options)
        return cls._restore(lm, saved, options)

    @property
    def num_actions(self) -> int:
        """Tokens to choose from."""
        return self.lm.num_tokens

    @property
    def sampling_only(self) -> bool:
        """Whether actions come from less than the whole distribution, so that the policy cannot be trained."""
        return self.top_k is not None or self.top_p is not None

    @property
    def temperature(self) -> float:
        """What divides the logits, in acting and scoring."""
        return self.lm.temperature

    def reference(self) -> LanguageModel:
        """The model as it is now, for a KL penalty: a copy of what trains (of LoRA the adapter), no more."""
        return self.lm.frozen_copy()

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is that of `TextVectorEnv`. Only new tokens are read."""
        assert isinstance(observation, dict), "a language model reads the observations of a text environment"
        tokens, length = observation["tokens"], observation["length"]
        if self._decoder is None or self._decoder.shape != tokens.shape:
            self._decoder = self.lm.decoder(num_slots=tokens.shape[0], max_length=tokens.shape[1])
        allowed = None if action_mask is None else action_mask.to(self.lm.device)
        logits = restrict(self._decoder.logits(tokens, length), temperature=self.temperature, allowed=allowed)
        logits = truncate(logits, top_k=self.top_k, top_p=self.top_p)
        return Step(*(greedy(logits) if deterministic else sample(logits, generator=self.generator)))

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Forget what was read in these slots."""
        if self._decoder is not None:
            self._decoder.reset(rows)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; logits exist only at the True entries."""
        hidden = self.lm.hidden(rollout["observation"])
        log_prob, entropy, _ = self.lm.score(hidden, rollout)
        return Evaluation(log_prob, entropy, self._value(hidden))

    def divergence(self, rollout: TensorDict, other: LanguageModel | LMPolicy) -> Tensor:
        """See `Policy.divergence`; the other is a language model, or another policy of this kind."""
        return self.lm.divergence(rollout, other if isinstance(other, LanguageModel) else other.lm)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        value = self._value(self.lm.hidden(sequences(rollout)))
        done = rollout["terminated"] | rollout["truncated"]
        return value[:, :-1], following(value, mask=rollout["mask"], done=done)

    def update_normalizer(self, rollout: TensorDict) -> None:
        """Nothing is normalised."""

    def save(self, folder: Path) -> dict[str, Any]:
        """See `Policy.save`. The folder is a plain `transformers` folder with a value head beside it.

        Of a model with an adapter it is a `peft` folder: the adapter, and the name of its base (`textenv.lm.adapters`).
        """
        from safetensors.torch import save_file

        with no_progress_bars():
            save_model(self.lm.model, folder)
        self.lm.tokenizer.save_pretrained(folder)
        options = {"temperature": self.temperature, "detach_value": self.detach_value}
        save_file(
            self.value_head.state_dict(), folder / "value_head.safetensors", metadata={"options": json.dumps(options)}
        )
        return {}

    @classmethod
    def _restore(cls, lm: LanguageModel, saved: Path, options: dict[str, Any]) -> LMPolicy:
        from safetensors import safe_open

        with safe_open(saved, framework="pt") as file:
            options = json.loads(file.metadata()["options"]) | options
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        policy = cls(lm.model, lm.tokenizer, **options)
        policy.value_head.load_state_dict(weights)
        return policy

    def _value(self, hidden: Tensor) -> Tensor:
        hidden = hidden.detach() if self.detach_value else hidden
        return self.value_head(hidden.float()).squeeze(-1)
