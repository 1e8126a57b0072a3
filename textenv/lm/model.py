"""`LanguageModel`: a model of `AutoModelForCausalLM` or `AutoModelForSeq2SeqLM`, scored only where needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, SupportsFloat, TypeVar, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from textenv.embedded.folder import EMBEDDED
from textenv.lm.choices import hard_choices
from textenv.lm.ends import TurnEnds, as_stops, remember_model, turn_ends
from textenv.lm.frozen_layers import FrozenLayers
from textenv.lm.loading import (
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
from textenv.rollout import Allowed, ReferenceEvaluation, allowed_tokens, scoring_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ResultT = TypeVar("ResultT")
CHUNK_ELEMENTS = 2**23
"""Maximum number of logits scored at a time (32 MiB in float32); larger batches are scored in chunks."""
CHUNK_ELEMENTS_ON_CUDA = 2**27
"""The same on CUDA (512 MiB): each chunk reads the weight of the output layer and adds to its gradient."""


def _soft_cap(cap: float, logits: Tensor) -> Tensor:
    return cap * torch.tanh(logits / cap)


def _multiply(factor: float, logits: Tensor) -> Tensor:
    return logits * factor


def _divide(divisor: float, logits: Tensor) -> Tensor:
    return logits / divisor


LOGIT_FINISHES: dict[str, Callable[[float, Tensor], Tensor]] = {
    "final_logit_softcapping": _soft_cap,
    "logits_soft_cap": _soft_cap,
    "output_logit_soft_cap": _soft_cap,
    "logit_scale": _multiply,
    "lm_head_multiplier": _multiply,
    "logits_scaling": _divide,
    "logits_mup_width_multiplier": _divide,
}
"""What models do with logits after the output layer, by the setting that asks for it (Gemma, Cohere, Granite, …).

A function gets the value of that setting in the configuration, and the logits.
"""
LOGIT_FINISHES_OF_TYPE: dict[tuple[str, str], Callable[[float, Tensor], Tensor]] = {
    ("hyperclovax", "logits_scaling"): _multiply,
}
"""Exceptions, by model type and setting: types that use a setting in another way."""


class LanguageModel(nn.Module):
    """Language model as a distribution over the tokenizer's ids; an encoder-decoder reads a prompt in its encoder.

    Dropout is always off, in training too: scoring must be repeatable. For the reference of a KL penalty, freeze the
    model: then `evaluate` builds no graph.

    Args:
        model: a `transformers` model, decoder-only or encoder-decoder, maybe with adapters inside its layers (`peft`).
        tokenizer: the model's tokenizer; logits beyond the tokenizer's ids are dropped everywhere.
        temperature: divides the logits in both sampling and scoring; > 0.
        gradient_checkpointing: recompute the activations inside layers in the backward pass instead of keeping them.
        autocast: ``torch.bfloat16`` for the matrix products of trunk and logits; weights keep their dtype (by default
            float32), and log-probabilities are float32. None computes in the dtype of the weights.
        stop: texts and token ids that end the model's turns, in addition to its own ends (`turn_ends`).

    Raises:
        ValueError: if temperature is no positive number, autocast is another dtype, the tokenizer has ids beyond the
            model's vocabulary, or the model is unsuitable: not causal, without gradient checkpointing (if requested),
            with prompt tuning, or with logits that are not its output layer applied to its trunk.

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
        stop: Iterable[str | int] | str | int = (),
    ) -> None:
        super().__init__()
        if not (isinstance(temperature, SupportsFloat) and temperature > 0):
            raise ValueError(f"temperature is {temperature!r}, expected a number > 0 (1 leaves the logits as they are)")
        check_adapter(model)
        check_memory_options(plain_model(model), gradient_checkpointing=gradient_checkpointing, autocast=autocast)

        # Model, tokenizer and options
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.gradient_checkpointing = gradient_checkpointing
        self.autocast = autocast
        self.stop = as_stops(stop)
        """Texts and token ids that end a turn, in addition to `turn_ends`; an agent adds those of its environment."""
        remember_model(tokenizer, plain_model(model))

        # What the model is like
        self.num_tokens = vocabulary_size(tokenizer)
        self.seq2seq = Seq2Seq.of(model, tokenizer)
        """How an encoder-decoder reads rows; None for a decoder-only model."""
        self.hard_choices = hard_choices(plain_model(model))
        """What the model chooses by the order of scores, so that rounding may make outputs jump; see `hard_choices`."""
        self.context = _context(model.config.get_text_config())
        """Maximum text length, in tokens; None without a limit. With LongRoPE it is the original length, because longer
        texts change all logits."""
        self.cached: dict[int, bool] = {}
        """Whether a cached decoder agreed with a plain forward pass, by the maximum text length of the decoder."""

        # Whether it is suitable
        self._check_forward()
        embedding = cast("nn.Embedding", model.get_input_embeddings())
        vocabulary = embedding.weight.shape[0]
        if self.num_tokens > vocabulary:
            raise ValueError(
                f"the tokenizer has ids up to {self.num_tokens - 1}, the model's vocabulary ends at {vocabulary - 1}: "
                "they do not belong together. Load both from one folder, or call "
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
        requires_grad = {parameter.requires_grad for parameter in self.parameters()}
        if requires_grad == {True, False}:  # some parameters train, others do not
            return FrozenLanguageModel(self)
        return copy.deepcopy(self).requires_grad_(False)

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
        self,
        tokens: Tensor,
        prompt_length: Tensor | None = None,
        length: Tensor | None = None,
        *,
        share_beginnings: bool = False,
        frozen_layers: FrozenLayers | None = None,
        **inputs: object,
    ) -> Tensor:
        """Trunk output at every position: int64 ``[B, L]`` to ``[B, L, hidden_size]``.

        An encoder-decoder model needs ``prompt_length``, int64 ``[B]``; its output is valid from the last token of the
        prompt on. With ``length``, int64 ``[B]``, other models need only read so many tokens of each row, and with
        ``share_beginnings`` on a CPU the tokens with which several rows begin only once. With ``frozen_layers`` as well
        the layers below the first one that trains read each row once (`FrozenLayers`; not with autocast).

        Raises:
            ValueError: if the rows are longer than the model's context, or the prompt_length is missing.
        """
        self.check_length(tokens.shape[1])
        if self.seq2seq is not None:
            return self.seq2seq.hidden(self.trunk, tokens, prompt_length)
        if length is not None:
            packable_model = None if self.gradient_checkpointing else trunk_of(self.model)
            if self.autocast is not None:
                frozen_layers = None
            return without_padding(
                self.trunk,
                tokens,
                length,
                packable_model,
                share_beginnings=share_beginnings,
                frozen_layers=frozen_layers,
            )
        if "attention_mask" not in inputs:  # padding is on the right, so causal attention does not read it
            inputs["attention_mask"] = torch.ones_like(tokens)
        return self.trunk(input_ids=tokens, use_cache=False, **inputs)

    def trunk(self, part: str = "", /, *, input_ids: Tensor, **inputs: object) -> Tensor:
        """Run the model without its output layer, or its part "encoder" or "decoder"; return the last hidden state."""
        return trunk_output(
            trunk_of(self.model, part),
            gradient_checkpointing=self.gradient_checkpointing,
            autocast=self.autocast,
            input_ids=input_ids,
            **inputs,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits over the tokenizer's ids: ``[m, hidden_size]`` to ``[m, num_tokens]``."""
        finish = _logit_finish(self.model.config)
        with precision(self.model, self.autocast):
            logits = self.model.get_output_embeddings()(hidden)
            if self.seq2seq is not None:
                logits = self.seq2seq.finish(logits, self.model)
            if finish is not None:
                logits = finish(logits)
            return logits[..., : self.num_tokens]

    def check_length(self, length: int) -> None:
        """Raise a ValueError if texts of this many tokens are longer than the model's context."""
        if self.context is None or length <= self.context:
            return
        reason = ""
        if "longrope" in str(setting(self.model.config, "rope_parameters")):
            reason = " (with LongRoPE, its original length, as longer texts change all probabilities)"
        raise ValueError(
            f"the texts may be {length} tokens long, but the model has {self.context} positions{reason}: lower "
            "max_prompt_tokens, max_new_tokens (--max-new-tokens) or max_length, or use a longer context."
        )

    def evaluate(self, rollout: TensorDict) -> ReferenceEvaluation:
        """Log-probability and entropy of the actions where the rollout's mask is True, 0 elsewhere; no value."""
        return self.score(self.hidden(*scoring_inputs(rollout)), rollout)

    def score(self, hidden: Tensor, rollout: TensorDict) -> ReferenceEvaluation:
        """Like `evaluate`, from the trunk's output ``[B, T, hidden_size]``, for callers that also use that output."""
        mask = rollout["mask"]
        scored = mask.nonzero(as_tuple=True)  # once: each index by a mask would wait for the device to count it
        action = rollout["action"][scored]
        allowed = allowed_tokens(rollout, entries=scored)
        log_prob, entropy = self.score_actions(hidden[scored], action=action, allowed=allowed)
        return ReferenceEvaluation(_scattered(mask, log_prob), _scattered(mask, entropy))

    def score_actions(self, hidden: Tensor, *, action: Tensor, allowed: Allowed | None) -> tuple[Tensor, ...]:
        """Log-probability of each action and entropy of its distribution, in chunks: two float32 ``[m]``, nats.

        With gradients, the logits of a chunk are recomputed in the backward pass, so at most `CHUNK_ELEMENTS` logits
        are in memory at a time. ``hidden`` is ``[m, hidden_size]``, ``action`` int64 ``[m]``.
        """
        # `TokenScores` has the gradients of a linear layer without bias; others are left to autograd
        head = self.model.get_output_embeddings()
        is_linear = type(head) is nn.Linear and head.bias is None and self.autocast is None
        if not is_linear or self.seq2seq is not None or _logit_finish(self.model.config) is not None:
            return self._in_chunks(self._score_chunk, hidden, action, allowed=allowed)

        def logits(chunk: Tensor, start: int) -> Tensor:
            allowed_rows = None
            if allowed is not None:
                allowed_rows = allowed.rows(start, start + len(chunk))
            return restrict(self.logits(chunk), temperature=self.temperature, allowed=allowed_rows)

        return TokenScores.apply(hidden, head.weight, action, logits, self.temperature, self._rows_at_once)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probability of each next token, nats: ``[m, hidden_size]`` to float32 ``[m, num_tokens]``.

        Differentiable any number of times, which `score_actions` is not.
        """
        log_probs, _ = self._normalized(hidden, None)
        return log_probs

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
        # Both models read the whole rows; the KL needs what they give at True entries
        mask = rollout["mask"]
        scored = mask.nonzero(as_tuple=True)
        inputs = scoring_inputs(rollout)
        hidden = self.hidden(*inputs)[scored]
        with torch.no_grad():
            other_hidden = other.hidden(*inputs)[scored]

        # KL, a chunk of logits at a time
        def kl_of_chunk(hidden: Tensor, other_hidden: Tensor, allowed: Tensor | None) -> tuple[Tensor, ...]:
            log_probs, probability = self._normalized(hidden, allowed)
            with torch.no_grad():
                other_log_probs, _ = other._normalized(other_hidden, allowed)
            log_ratio = log_probs - other_log_probs
            return ((probability * log_ratio).sum(-1),)

        (kl,) = self._in_chunks(kl_of_chunk, hidden, other_hidden, allowed=allowed_tokens(rollout, entries=scored))
        return _scattered(mask, kl)

    @property
    def _rows_at_once(self) -> int:
        return max(1, self._chunk_elements // self.num_tokens)

    @property
    def _chunk_elements(self) -> int:
        """Maximum number of logits that are scored at a time."""
        if self.device.type == "cuda":
            return CHUNK_ELEMENTS_ON_CUDA
        return CHUNK_ELEMENTS

    def _in_chunks(
        self, function: Callable[..., tuple[Tensor, ...]], *columns: Tensor, allowed: Allowed | None
    ) -> tuple[Tensor, ...]:
        """Apply a function of rows and their allowed tokens, in chunks of at most `CHUNK_ELEMENTS` logits."""
        count = len(columns[0])
        size = self._rows_at_once
        recomputes = torch.is_grad_enabled() and count > size

        results = []
        for start in range(0, max(count, 1), size):
            chunk = [column[start : start + size] for column in columns]
            allowed_rows = None
            if allowed is not None:
                allowed_rows = allowed.rows(start, start + size)
            if recomputes:
                results.append(checkpoint(function, *chunk, allowed_rows, use_reentrant=False))
            else:
                results.append(function(*chunk, allowed_rows))
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

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
        input_ids = torch.tensor(batch["input_ids"], device=self.device)
        attention_mask = torch.tensor(batch["attention_mask"], device=self.device)
        log_prob = self.token_log_probs(input_ids, attention_mask)
        return log_prob.neg().mean().exp().item()

    def token_log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Log-probability of every real token after each row's first, row after row, float32.

        Both inputs are int64 ``[B, L]``; the mask is 1 on real tokens, and padding may be on either side.
        """
        # Move padding to the right, where it needs no position ids, which some models do not accept.
        mask, order = attention_mask.sort(dim=1, descending=True, stable=True)
        tokens = input_ids.gather(1, order)
        scored = mask[:, 1:].bool()
        hidden = self.hidden(tokens)
        log_prob, _ = self.score_actions(hidden[:, :-1][scored], action=tokens[:, 1:][scored], allowed=None)
        return log_prob

    @torch.no_grad()
    def _check_forward(self) -> None:
        """Check that the output layer, applied to the trunk, gives the model's logits, which ignore later tokens."""
        model_name = type(self.model).__name__
        tokens = torch.arange(3, device=self.device).unsqueeze(0) % self.num_tokens
        prompt_length = torch.ones_like(tokens[:, 0])

        # Logits of three tokens: by the model itself, by trunk and output layer, and of a prefix
        try:
            expected = self._model_logits(tokens, prompt_length)
            logits = self.logits(self.hidden(tokens, prompt_length)[0])
            prefix_logits = self.logits(self.hidden(tokens[:, :2], prompt_length)[0])
            gap = (expected - logits).abs().max().item()
            prefix_gap = (logits[:2] - prefix_logits).abs().max().item()
        except Exception as error:  # an unsuitable model may raise anything
            raise ValueError(
                f"{model_name} cannot read a text of three tokens here ({type(error).__name__}: {error}): give a model "
                "of AutoModelForCausalLM or AutoModelForSeq2SeqLM, such as GPT-2, Llama or T5, in a dtype that it "
                "supports"
            ) from error

        # In low precision a product may round differently in another shape: by a fraction of up to 2^-7 in bfloat16.
        tolerance = max(1e-3, 2 * torch.finfo(expected.dtype).eps)
        if gap > tolerance * expected.abs().max().item():
            raise ValueError(
                f"the logits of {model_name} are not its output layer applied to its trunk (they differ by up to "
                f"{gap:.3g}): it has a step that is not supported here; use another model. Supported are "
                f"{', '.join(LOGIT_FINISHES)}."
            )
        if prefix_gap > rounding(logits):
            raise ValueError(
                f"{model_name} is not causal: its logits change with later tokens (by up to {prefix_gap:.3g}), so it "
                "cannot be sampled from. Use a causal model (some need is_decoder=True or causal=True)."
            )

    def _model_logits(self, tokens: Tensor, prompt_length: Tensor) -> Tensor:
        """Logits of one text ``[1, L]`` by the model's own forward pass: ``[L, num_tokens]``."""
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        columns = torch.arange(tokens.shape[1], device=self.device).unsqueeze(0)
        if self.seq2seq is not None:
            inputs, columns = self.seq2seq.inputs(tokens, prompt_length)
        with precision(self.model, self.autocast):
            logits = self.model(**inputs).logits[0, columns[0]]
        return logits[:, : self.num_tokens]


class FrozenLanguageModel(LanguageModel):
    """Frozen snapshot of a language model, computed by the modules of the model that continues training.

    The snapshot substitutes copies of the trainable parameters (`torch.func.functional_call`) and shares the others.
    So the reference of a policy with an adapter only costs the adapter's memory: the reference is the base model if the
    adapter is new, and the adapted model if the adapter was trained before. Outputs have no gradient.

    Raises:
        ValueError: in `evaluate`, if more parameters are trainable than at construction: those would drift.

    Example:
        >>> reference = LMPolicy(get_peft_model(model, lora), tokenizer).reference()  # doctest: +SKIP
    """

    def __init__(self, lm: LanguageModel) -> None:
        nn.Module.__init__(self)
        # Not registered as submodules: their trainable parameters do not belong to this module.
        self._live: ForwardWrapper[LanguageModel]
        self.__dict__ |= {"model": lm.model, "_live": ForwardWrapper(lm)}

        self.tokenizer = lm.tokenizer
        self.temperature = lm.temperature
        self.num_tokens = lm.num_tokens
        self.context = lm.context
        self.cached = lm.cached
        self.seq2seq = lm.seq2seq
        self.hard_choices = lm.hard_choices
        self.gradient_checkpointing = lm.gradient_checkpointing
        self.autocast = lm.autocast

        # Copies of what trains
        self._names: list[str] = []
        self.initial = nn.ParameterList()
        for name, parameter in lm.named_parameters():
            if parameter.requires_grad:
                self._names.append(name)
                self.initial.append(nn.Parameter(parameter.detach().clone(), requires_grad=False))

    def trunk(self, part: str = "", /, *, input_ids: Tensor, **inputs: object) -> Tensor:
        """See `LanguageModel.trunk`."""
        return self._call(lambda lm: lm.trunk(part, input_ids=input_ids, **inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `LanguageModel.logits`."""
        return self._call(lambda lm: lm.logits(hidden))

    def evaluate(self, rollout: TensorDict) -> ReferenceEvaluation:
        """See `LanguageModel.evaluate`."""
        trainable = {name for name, parameter in self._live.inner.named_parameters() if parameter.requires_grad}
        newly_trainable = trainable - set(self._names)
        if newly_trainable:
            raise ValueError(
                f"{len(newly_trainable)} parameters are trainable now but were frozen when this reference was made "
                f"(such as {min(newly_trainable)}), so it would change: make the reference after choosing the "
                "trainable parameters"
            )
        return super().evaluate(rollout)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Weights in use, under the names of the model that trains."""
        live_weights = self._live.inner.state_dict(*args, **options)
        return live_weights | dict(zip(self._names, self.initial, strict=True))

    @torch.no_grad()
    def _call(self, function: Callable[[LanguageModel], Tensor]) -> Tensor:
        """Call a function of the live model, which has the initial weights meanwhile."""
        weights = {f"inner.{name}": p for name, p in zip(self._names, self.initial, strict=True)}
        return functional_call(self._live, weights, (partial(function, self._live.inner),))


class ForwardWrapper(nn.Module, Generic[ModuleT]):
    """Module around another one, whose forward pass calls any function.

    Tools that act in forward passes, such as `functional_call` with other weights and FSDP, then act in this function.
    """

    def __init__(self, inner: ModuleT) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, function: Callable[[], ResultT]) -> ResultT:
        """Call the function, which has no arguments."""
        return function()


def _scattered(mask: Tensor, values: Tensor) -> Tensor:
    """Return float32 ``[B, T]``: the values where the mask is True, 0 elsewhere (NaN would survive a product)."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values)


def position_limits(config: PreTrainedConfig) -> list[int]:
    """Return the number of positions of a model, in a list that is empty if there is no limit."""
    limits = [setting(config, name) for name in ("max_position_embeddings", "max_seq_len")]  # the latter: MPT
    return [limit for limit in limits if limit and limit > 0]  # XLNet has -1


def _context(config: PreTrainedConfig) -> int | None:
    """Value of `LanguageModel.context`: number of positions, with LongRoPE only those with short factors."""
    limits = position_limits(config)
    rope_parameters = setting(config, "rope_parameters") or {}
    for rope in (rope_parameters, *rope_parameters.values()):  # for all layers, or per layer type
        if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
            continue
        if rope["short_factor"] != rope["long_factor"]:
            limits.append(rope["original_max_position_embeddings"])
    return min(limits, default=None)


def _logit_finish(config: PreTrainedConfig) -> Callable[[Tensor], Tensor] | None:
    """Return the function that the model applies to logits after the output layer; None if there is none."""
    decoder_config = vars(config).get("decoder", config)
    settings = vars(decoder_config)  # faster than getattr, and called at every step
    for name, usual_finish in LOGIT_FINISHES.items():
        setting_value = settings.get(name)
        if isinstance(getattr(type(decoder_config), name, None), property):
            setting_value = getattr(decoder_config, name)  # computed from other settings: MiniCPM3
        if setting_value:
            finish = LOGIT_FINISHES_OF_TYPE.get((decoder_config.model_type, name), usual_finish)
            return partial(finish, setting_value)
    return None


class HoldsLanguageModel(Protocol):
    """A policy over tokens, such as `algos.LMPolicy`."""

    lm: LanguageModel


def language_model_of(holder: object) -> LanguageModel | None:
    """The language model itself, or the one of a policy over tokens; None for anything else."""
    lm = getattr(holder, "lm", holder)
    return lm if isinstance(lm, LanguageModel) else None
