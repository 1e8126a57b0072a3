"""`LanguageModel`: a model of `AutoModelForCausalLM` or `AutoModelForSeq2SeqLM`, scored only where needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from textenv.lm.choices import hard_choices
from textenv.lm.ends import TurnEnds, remember_model, turn_ends
from textenv.lm.loading import (
    EMBEDDED,
    check_adapter,
    load_causal_lm,
    load_tokenizer,
    plain_model,
    setting,
    trunk_of,
    vocabulary_size,
)
from textenv.lm.memory import check_memory_options, precision, trunk_output
from textenv.lm.padding import without_padding
from textenv.lm.sampling import restrict
from textenv.lm.scoring import TokenScores, normalized, rounding
from textenv.lm.seq2seq import Seq2Seq
from textenv.rollout import Allowed, Evaluation, allowed_tokens, texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK_ELEMENTS = 2**23
"""Maximum number of logits scored at a time (32 MiB in float32); larger batches are scored in chunks."""
FINISHES: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    **dict.fromkeys(
        ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
        lambda c: lambda x: c * torch.tanh(x / c),
    ),
    **dict.fromkeys(("logit_scale", "lm_head_multiplier"), lambda c: lambda x: x * c),
    **dict.fromkeys(("logits_scaling", "logits_mup_width_multiplier"), lambda c: lambda x: x / c),
}
"""Functions of the logits x after the output layer, by configuration setting c (Gemma, Cohere, Granite, MiniCPM3)."""

FINISHES_OF_TYPE: dict[tuple[str, str], Callable[[float], Callable[[Tensor], Tensor]]] = {
    ("hyperclovax", "logits_scaling"): lambda c: lambda x: x * c,
}
"""The same for the model types that read a setting of this name in another way than the others."""


class LanguageModel(nn.Module):
    """Language model as a distribution over the tokenizer's ids; an encoder-decoder reads a prompt in its encoder.

    Dropout is always off, in training too: scoring must be repeatable. As the reference of a KL penalty the model is
    frozen, and `evaluate` builds no graph.

    Args:
        model: a `transformers` model, decoder-only or encoder-decoder, maybe with adapters inside its layers (`peft`).
        tokenizer: the model's tokenizer; logits beyond the tokenizer's ids are dropped everywhere.
        temperature: divides the logits in both sampling and scoring; > 0.
        gradient_checkpointing: recompute the activations inside layers in the backward pass instead of keeping them.
        autocast: ``torch.bfloat16`` for the matrix products of trunk and logits; weights keep their dtype (by default
            float32), and log-probabilities are float32. None computes in the dtype of the weights.
        stop: texts and token ids that end the model's turns, in addition to its own ends (`turn_ends`).

    Raises:
        ValueError: if temperature is not positive, autocast is another dtype, the tokenizer has ids beyond the model's
            vocabulary, or the model is unsuitable: not causal, without gradient checkpointing
            (if requested), with prompt tuning, or with logits other than its output layer over its trunk.

    Example:
        >>> reference = LanguageModel.load("embedded").requires_grad_(False)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        stop: Sequence[str | int] = (),
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a number > 0 (1 leaves the logits as they are)")
        check_adapter(model)
        check_memory_options(plain_model(model), gradient_checkpointing=gradient_checkpointing, autocast=autocast)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.gradient_checkpointing, self.autocast = gradient_checkpointing, autocast
        self.stop = tuple(stop)
        """Texts and token ids that end a turn, in addition to `turn_ends`; an agent adds those of its environment."""
        remember_model(tokenizer, plain_model(model))
        self.num_tokens = vocabulary_size(tokenizer)
        self.seq2seq = Seq2Seq.of(model, tokenizer)  # None for a decoder-only model
        self.hard_choices = hard_choices(plain_model(model))
        """What the model takes by the order of scores, where rounding may make its outputs jump; see `hard_choices`."""
        self.context = _context(model.config.get_text_config())
        """Maximum text length, in tokens, up to which logits do not depend on the length; None without a limit."""
        self.cached: dict[int, bool] = {}
        """By maximum text length of a decoder: True if its cache agreed with a plain forward pass."""
        self._check_forward()
        size = cast("nn.Embedding", model.get_input_embeddings()).weight.shape[0]
        if self.num_tokens > size:
            raise ValueError(
                f"the tokenizer has ids up to {self.num_tokens - 1}, the model's vocabulary ends at {size - 1}: they "
                "do not belong together. Load both from one folder, or call "
                "model.resize_token_embeddings(len(tokenizer))."
            )

    @classmethod
    def load(cls, name: str | Path = EMBEDDED, *, dtype: torch.dtype | None = None, **options: Any) -> LanguageModel:
        """Load a model by name or path, in float32 by default; options are the constructor's."""
        return cls(load_causal_lm(name, dtype=dtype), load_tokenizer(name), **options)

    def train(self, mode: bool = True) -> LanguageModel:
        """Stay in evaluation mode: dropout during scoring would add noise to every ratio."""
        return super().train(False)

    def frozen_copy(self) -> LanguageModel:
        """Return a frozen copy; if only some parameters train (LoRA), it shares the others (`FrozenLanguageModel`)."""
        if len({p.requires_grad for p in self.parameters()}) == 1:
            return copy.deepcopy(self).requires_grad_(False)
        return FrozenLanguageModel(self)

    @property
    def turn_ends(self) -> TurnEnds:
        """What ends the model's own turns: EOS, the ids of its ``generation_config``, its chat template's end."""
        return turn_ends(self.tokenizer, plain_model(self.model))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    @property
    def hidden_size(self) -> int:
        """Width of the trunk's output."""
        return self.model.get_output_embeddings().weight.shape[1]

    def hidden(
        self, tokens: Tensor, prompt_length: Tensor | None = None, length: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Trunk output at every position: int64 ``[B, L]`` to ``[B, L, hidden_size]``.

        An encoder-decoder model needs ``prompt_length``, int64 ``[B]``; its output counts from the prompt's end on.
        With ``length``, int64 ``[B]``, other models need only read so many tokens of each row.

        Raises:
            ValueError: if the rows are longer than the model's context, or the prompt_length is missing.
        """
        self.check_length(tokens.shape[1])
        if self.seq2seq is not None:
            return self.seq2seq.hidden(self.trunk, tokens, prompt_length)
        if length is not None:
            packable = None if self.gradient_checkpointing else trunk_of(self.model)
            return without_padding(self.trunk, tokens, length, packable)
        if "attention_mask" not in inputs:  # padding is on the right, so causal attention does not read it
            inputs["attention_mask"] = torch.ones_like(tokens)
        return self.trunk(input_ids=tokens, use_cache=False, **inputs)

    def trunk(self, part: str = "", /, **inputs: Any) -> Tensor:
        """Run the model without its output layer, or its part "encoder" or "decoder"; return the last hidden state."""
        return trunk_output(
            trunk_of(self.model, part),
            gradient_checkpointing=self.gradient_checkpointing,
            autocast=self.autocast,
            **inputs,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits over the tokenizer's ids: ``[m, hidden_size]`` to ``[m, num_tokens]``."""
        finish = _logit_finish(self.model.config)
        with precision(self.model, self.autocast):
            logits = self.model.get_output_embeddings()(hidden)
            logits = logits if self.seq2seq is None else self.seq2seq.finish(logits, self.model)
            return (logits if finish is None else finish(logits))[..., : self.num_tokens]

    def check_length(self, length: int) -> None:
        """Raise a ValueError if texts of this many tokens are longer than the model's context."""
        if self.context is not None and length > self.context:
            longrope = "longrope" in str(setting(self.model.config, "rope_parameters"))
            why = " (with LongRoPE, its original length, as longer texts change all probabilities)" if longrope else ""
            raise ValueError(
                f"the texts may be {length} tokens long, but the model has {self.context} positions{why}: lower "
                "max_prompt_tokens, max_new_tokens (--max-new-tokens) or max_length, or use a longer context."
            )

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """Log-probability and entropy of the actions where the rollout's mask is True, 0 elsewhere; no value."""
        return self.score(self.hidden(*texts(rollout)), rollout)

    def score(self, hidden: Tensor, rollout: TensorDict) -> Evaluation:
        """Like `evaluate`, from the trunk's output ``[B, T, hidden_size]``, for callers that also use that output."""
        mask = rollout["mask"]
        scores = self.score_actions(hidden[mask], action=rollout["action"][mask], allowed=allowed_tokens(rollout))
        log_prob, entropy = (_scattered(mask, score) for score in scores)
        return Evaluation(log_prob, entropy, None)

    def score_actions(self, hidden: Tensor, *, action: Tensor, allowed: Allowed | None) -> tuple[Tensor, ...]:
        """Log-probability of each action and entropy of its distribution, in chunks: two float32 ``[m]``, nats.

        With gradients, the logits of a chunk are recomputed in the backward pass, so at most `CHUNK_ELEMENTS` logits
        are in memory at a time. ``hidden`` is ``[m, hidden_size]``, ``action`` int64 ``[m]``.
        """
        head = self.model.get_output_embeddings()
        plain = type(head) is nn.Linear and head.bias is None and self.autocast is None
        if not plain or self.seq2seq is not None or _logit_finish(self.model.config) is not None:
            return self._in_chunks(self._score_chunk, hidden, action, allowed=allowed)

        def logits(part: Tensor, start: int) -> Tensor:
            permitted = None if allowed is None else allowed.rows(start, start + len(part))
            return restrict(self.logits(part), temperature=self.temperature, allowed=permitted)

        return TokenScores.apply(hidden, head.weight, action, logits, self.temperature, self._rows_at_once)

    def divergence(self, rollout: TensorDict, other: LanguageModel) -> Tensor:
        """Exact KL(self‖other) of the next token where the mask is True, nats, 0 elsewhere: float32 ``[B, T]``.

        Only this model gets a gradient; the other uses its own temperature. Logits are computed in chunks, as in
        `score_actions`.

        Raises:
            ValueError: if the vocabularies differ.
        """
        if other.num_tokens != self.num_tokens:
            raise ValueError(
                f"this model has {self.num_tokens} tokens, the other {other.num_tokens}: the exact KL needs "
                "the same tokenizer in both"
            )
        mask, row = rollout["mask"], texts(rollout)
        hidden = self.hidden(*row)[mask]
        with torch.no_grad():
            other_hidden = other.hidden(*row)[mask]

        def chunk(own: Tensor, others: Tensor, allowed: Tensor | None) -> tuple[Tensor, ...]:
            log_probs, probability = self._normalized(own, allowed)
            with torch.no_grad():
                other_log_probs, _ = other._normalized(others, allowed)
            return ((probability * (log_probs - other_log_probs)).sum(-1),)

        (kl,) = self._in_chunks(chunk, hidden, other_hidden, allowed=allowed_tokens(rollout))
        return _scattered(mask, kl)

    @property
    def _rows_at_once(self) -> int:
        return max(1, CHUNK_ELEMENTS // self.num_tokens)

    def _in_chunks(
        self, function: Callable[..., tuple[Tensor, ...]], *columns: Tensor, allowed: Allowed | None
    ) -> tuple[Tensor, ...]:
        """Apply a function of rows and their allowed tokens, in chunks of at most `CHUNK_ELEMENTS` logits."""
        count, size = len(columns[0]), self._rows_at_once
        recompute = torch.is_grad_enabled() and count > size
        call = partial(checkpoint, function, use_reentrant=False) if recompute else function
        parts = []
        for start in range(0, max(count, 1), size):
            permitted = None if allowed is None else allowed.rows(start, start + size)
            parts.append(call(*(column[start : start + size] for column in columns), permitted))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _score_chunk(self, hidden: Tensor, action: Tensor, allowed: Tensor | None) -> tuple[Tensor, ...]:
        log_probs, probability = self._normalized(hidden, allowed)
        # Below -1e3 the probability is 0; its product with the lowest finite logit would have a NaN gradient.
        entropy = -torch.linalg.vecdot(probability, log_probs.clamp(min=-1e3))
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy

    def _normalized(self, hidden: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        return normalized(restrict(self.logits(hidden), temperature=self.temperature, allowed=allowed))

    @torch.no_grad()
    def perplexity(self, texts: list[str]) -> float:
        """Perplexity per token of whole texts, without each text's first token (one-token texts do not count)."""
        batch = self.tokenizer(texts, padding=True, split_special_tokens=True)
        columns = (torch.tensor(batch[name], device=self.device) for name in ("input_ids", "attention_mask"))
        return self.token_log_probs(*columns).neg().mean().exp().item()

    def token_log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Log-probability of every real token after each row's first, row after row, float32.

        Both inputs are int64 ``[B, L]``; the mask is 1 on real tokens, and padding may be on either side.
        """
        # Move padding to the right, where it needs no position ids, which some models do not accept.
        mask, order = attention_mask.sort(dim=1, descending=True, stable=True)
        tokens, scored = input_ids.gather(1, order), mask[:, 1:].bool()
        hidden = self.hidden(tokens)
        return self.score_actions(hidden[:, :-1][scored], action=tokens[:, 1:][scored], allowed=None)[0]

    @torch.no_grad()
    def _check_forward(self) -> None:
        """Check that the output layer over the trunk gives the model's own logits, which ignore later tokens."""
        name = type(self.model).__name__
        tokens = torch.arange(3, device=self.device).unsqueeze(0) % self.num_tokens
        start, place = torch.ones_like(tokens[:, 0]), torch.arange(3, device=self.device).unsqueeze(0)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        try:
            if self.seq2seq is not None:
                inputs, place = self.seq2seq.inputs(tokens, start)
            with precision(self.model, self.autocast):
                own = self.model(**inputs).logits[0, place[0]]
            own, ours = own[:, : self.num_tokens], self.logits(self.hidden(tokens, start)[0])
            prefix = self.logits(self.hidden(tokens[:, :2], start)[0])
            gap, ahead = (own - ours).abs().max().item(), (ours[:2] - prefix).abs().max().item()
        except Exception as error:  # an unsuitable model may raise anything
            raise ValueError(
                f"{name} cannot read a text of three tokens here ({type(error).__name__}: {error}): give a model of "
                "AutoModelForCausalLM or AutoModelForSeq2SeqLM, such as GPT-2, Llama or T5, in a dtype that it supports"
            ) from error
        # In low precision a product may round differently in another shape: by a fraction of up to 2^-7 in bfloat16.
        if gap > max(1e-3, 2 * torch.finfo(own.dtype).eps) * own.abs().max().item():
            raise ValueError(
                f"the logits of {name} are not its output layer over its trunk (they differ by up to {gap:.3g}): it "
                f"has a step that is not supported here; use another model. Supported are {', '.join(FINISHES)}."
            )
        if ahead > rounding(ours):
            raise ValueError(
                f"{name} is not causal: its logits change with later tokens (by up to {ahead:.3g}), so it cannot "
                "be sampled from. Use a causal model (some need is_decoder=True or causal=True)."
            )


class FrozenLanguageModel(LanguageModel):
    """Frozen snapshot of a language model, computed by the modules of the model that continues training.

    The snapshot substitutes copies of the trainable parameters (`torch.func.functional_call`) and shares the others.
    So the reference of a policy with an adapter only costs the adapter's memory: it is the base model if the adapter
    is new, and the adapted model if the adapter was trained before. Its outputs have no gradient.

    Raises:
        ValueError: in `evaluate`, if more parameters are trainable than at construction: those would drift.

    Example:
        >>> reference = LMPolicy(get_peft_model(model, lora), tokenizer).reference()  # doctest: +SKIP
    """

    def __init__(self, lm: LanguageModel) -> None:
        nn.Module.__init__(self)
        # Not registered as submodules: their trainable parameters do not belong to this module.
        self._live: ForwardWrapper
        self.__dict__ |= {"model": lm.model, "_live": ForwardWrapper(lm)}
        self.tokenizer, self.temperature = lm.tokenizer, lm.temperature
        self.num_tokens, self.context, self.cached = lm.num_tokens, lm.context, lm.cached
        self.seq2seq, self.hard_choices = lm.seq2seq, lm.hard_choices
        self.gradient_checkpointing, self.autocast = lm.gradient_checkpointing, lm.autocast
        trained = {name: p for name, p in lm.named_parameters() if p.requires_grad}
        self._names = list(trained)
        self.initial = nn.ParameterList(nn.Parameter(p.detach().clone(), False) for p in trained.values())

    def trunk(self, part: str = "", /, **inputs: Any) -> Tensor:
        """See `LanguageModel.trunk`."""
        return self._call(lambda lm: lm.trunk(part, **inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `LanguageModel.logits`."""
        return self._call(lambda lm: lm.logits(hidden))

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `LanguageModel.evaluate`."""
        late = {name for name, p in self._live.inner.named_parameters() if p.requires_grad} - set(self._names)
        if late:
            raise ValueError(
                f"{len(late)} parameters are trainable now but were frozen when this reference was made (such as "
                f"{min(late)}), so it would change: make the reference after choosing the trainable parameters"
            )
        return super().evaluate(rollout)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Weights in use, under the names of the model that trains."""
        return self._live.inner.state_dict(*args, **options) | dict(zip(self._names, self.initial, strict=True))

    @torch.no_grad()
    def _call(self, function: Callable[[LanguageModel], Tensor]) -> Tensor:
        weights = {f"inner.{name}": p for name, p in zip(self._names, self.initial, strict=True)}
        return functional_call(self._live, weights, (partial(function, self._live.inner),))


class ForwardWrapper(nn.Module):
    """Module around another one whose forward pass is any function, for what acts in forward passes (other weights)."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call the function, which has no arguments."""
        return function()


def _scattered(mask: Tensor, values: Tensor) -> Tensor:
    """Return float32 ``[B, T]``: the values where the mask is True, 0 elsewhere (NaN would survive a product)."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values)


def _context(config: Any) -> int | None:
    """Value of `LanguageModel.context`: number of positions, with LongRoPE only those with short factors."""
    rope = setting(config, "rope_parameters") or {}
    kinds = [x for x in (rope, *rope.values()) if isinstance(x, dict)]  # for all layers, or per layer type
    switched = [x for x in kinds if x.get("rope_type") == "longrope" and x["short_factor"] != x["long_factor"]]
    limits = [x["original_max_position_embeddings"] for x in switched]
    limits.append(setting(config, "max_position_embeddings"))
    return min((limit for limit in limits if limit and limit > 0), default=None)  # XLNet has -1


def _logit_finish(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Function that the model applies to logits after the output layer, else None; see the tables of this file."""
    decoder_config = vars(config).get("decoder", config)
    settings = vars(decoder_config)  # faster than getattr, and called at every step
    for name, finish in FINISHES.items():
        setting_value = settings.get(name)
        if isinstance(getattr(type(decoder_config), name, None), property):
            setting_value = getattr(decoder_config, name)  # computed from other settings: MiniCPM3
        if setting_value:
            return FINISHES_OF_TYPE.get((decoder_config.model_type, name), finish)(setting_value)
    return None


@runtime_checkable
class HoldsLanguageModel(Protocol):
    """A policy over tokens, such as `algos.LMPolicy`."""

    lm: LanguageModel


def language_model_of(holder: Any) -> LanguageModel | None:
    """The language model itself, or the one of a policy over tokens; None for anything else."""
    if isinstance(holder, HoldsLanguageModel):
        return holder.lm
    return holder if isinstance(holder, LanguageModel) else None
