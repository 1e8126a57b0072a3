"""`LMPolicy`: a language model with a value head, as a policy over tokens."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from algos.policies.critic import HEAD, Critic, fit_head, fresh_head
from algos.policies.policy import Observation, Policy, Step
from algos.policies.random_streams import UniformStreams
from algos.ranks import collectives
from textenv.device import find_device
from textenv.envs.limits import StopConditions
from textenv.envs.turn import Turn
from textenv.lm.adapter_config import ADAPTER_CONFIG
from textenv.lm.decoding import Decoder
from textenv.lm.loading import (
    BASE,
    EMBEDDED,
    add_lora,
    check_same_logits,
    is_adapted,
    load_causal_lm,
    merged,
    save_model,
    trial_logits,
)
from textenv.lm.model import LanguageModel
from textenv.lm.origin import ORIGIN_FILE
from textenv.lm.sampling import greedy, restrict, sample, truncate
from textenv.lm.seq2seq import Seq2SeqDecoder
from textenv.names import check_names
from textenv.prompts.prompts import as_prompt, by_position
from textenv.prompts.tokenize import prompt_ids
from textenv.rewards.reward_model import RewardModel
from textenv.rollout import Evaluation, following, texts

CRITIC = "critic"
"""Subfolder for the critic in a saved policy's folder."""
TOKENS = "tokens"
"""Name of `LMPolicy.token_head` among the value head's weights in a saved policy's folder."""
TINY = 10_000_000
"""Parameters below which a model counts as made for tests, such as the embedded one, and not as pretrained."""


class LMPolicy(nn.Module, Policy):
    """Language model as a recurrent policy: its state is the prefix, kept in a cache (T5, BART: prompt and answer).

    The value comes from a critic with its own trunk, or from a linear head on the model's trunk, initialized to
    zero and computed in fp32 whatever the model's dtype. ``fit_value_head`` adds ``token_head`` to it, which reads the
    sum of the embeddings of the answer's tokens so far; otherwise that is zero.

    Args:
        model: a decoder-only or encoder-decoder `transformers` model, trained in place; for a `peft` model only the
            adapters inside its layers are trained.
        tokenizer: the model's tokenizer.
        temperature: temperature for both acting and scoring; a `reference` has the same.
        critic: a value model instead of the head on the trunk. It is trained too, with the policy's settings of
            ``gradient_checkpointing`` and ``autocast``.
        detach_value: keep the value's gradient out of the shared trunk.
        gradient_checkpointing: recompute activations in the backward pass (`LanguageModel`).
        autocast: ``torch.bfloat16`` computes in that dtype with float32 weights, both acting and scoring
            (`LanguageModel`).
        top_k: sample only from the k most probable tokens. For generation: such a policy cannot be trained, because
            the support of its distribution changes with the weights.
        top_p: sample only from the fewest tokens whose probabilities sum to this, > 0 and <= 1; generation only.
        stop: texts and token ids that end a turn, in addition to the model's own ends (`textenv.lm.ends`). An agent
            adds those of its environment, and they are saved with the policy.
        seed: seed of token sampling.

    Raises:
        ValueError: as `LanguageModel` does; if ``top_k`` or ``top_p`` is out of range; if the critic has another
            vocabulary; if a critic and ``detach_value`` are given.

    Example:
        >>> policy = LMPolicy.load("embedded")  # doctest: +SKIP
    """

    sequential = True
    token_head: Tensor

    @check_names
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float = 1.0,
        critic: Critic | None = None,
        detach_value: bool = False,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str | int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}, expected at least 1, or None for all tokens")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, expected a number in (0, 1], or None for all tokens")
        if critic is not None and detach_value:
            raise ValueError(
                "detach_value is for a value head on the policy's trunk, but a critic has its own: omit it"
            )
        self.top_k, self.top_p = top_k, top_p
        self.lm = LanguageModel(
            model,
            tokenizer,
            temperature=temperature,
            gradient_checkpointing=gradient_checkpointing,
            autocast=autocast,
            stop=stop,
        )
        self.detach_value, self.critic = detach_value, critic
        if critic is None:
            self.value_head = fresh_head(self.lm.hidden_size, self.lm.device)
            width = self.lm.model.get_input_embeddings().weight.shape[1]
            self.register_buffer("token_head", torch.zeros(width, device=self.lm.device))
        else:
            critic.compute_like(self.lm)
        self.generator = torch.Generator().manual_seed(seed)
        self.decoder: Decoder | Seq2SeqDecoder | None = None
        self.memory: dict[str, UniformStreams] = {}

    @classmethod
    @check_names
    def load(
        cls,
        name: str | Path = EMBEDDED,
        *,
        dtype: torch.dtype | None = None,
        critic: Critic | str | Path | None = None,
        device: str | torch.device | None = None,
        lora: Any = None,
        **options: Any,
    ) -> Self:
        """Load model and tokenizer; a saved policy is restored with its value head or critic.

        Args:
            name: ``"embedded"``, ``"smollm2"``, a local folder, a GGUF file, or a hub name.
            dtype: dtype of the weights; None means float32.
            critic: as in the constructor; ``"copy"``: a copy of the model; otherwise folder or hub name of a reward
                model (`Critic.from_reward_model`).
            device: where to move all weights (`textenv.device.find_device`); None leaves them: on the CPU, if loaded.
            lora: train adapters only: a `peft.LoraConfig`, or a text as in `textenv.lm.loading.add_lora`; None trains
                all weights.
            options: constructor arguments; they override saved ones.
        """
        place = find_device(device)
        lm = LanguageModel.load(name, dtype=dtype)
        if lora is not None:
            lm = LanguageModel(add_lora(lm.model, lora, seed=options.get("seed", 0)), lm.tokenizer)
        critic = _critic(critic, lm)
        saved = [folder / HEAD for folder in (Path(name) / CRITIC, Path(name)) if (folder / HEAD).is_file()]
        if not saved:
            return cls(lm.model, lm.tokenizer, critic=critic, **options).to(place)
        if critic is None and saved[0].parent != Path(name):
            critic = Critic.load(saved[0].parent, lm.tokenizer, dtype=dtype)
        weights, saved_options = _read_head(saved[0])
        policy = cls(lm.model, lm.tokenizer, critic=critic, **(saved_options | options))
        if critic is None:
            policy.token_head.copy_(weights.pop(TOKENS, policy.token_head))
            policy.value_head.load_state_dict(weights)
        return policy.to(place)

    @property
    def num_actions(self) -> int:
        """Number of tokens to choose from."""
        return self.lm.num_tokens

    @property
    def default_learning_rate(self) -> float:
        """Learning rate by size and adapter; `algos.config.Config.learning_rate` has the sources."""
        if sum(p.numel() for p in self.lm.parameters()) < TINY:
            return 5e-4
        return 1.4e-4 if is_adapted(self.lm.model) else 1.41e-5

    @property
    def sampling_only(self) -> bool:
        """True if top-k or top-p truncates the distribution, so that the policy cannot be trained."""
        return self.top_k is not None or self.top_p is not None

    @property
    def temperature(self) -> float:
        """Divisor of the logits, in acting and scoring."""
        return self.lm.temperature

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the computation of trunk and logits, in acting and scoring; None means the dtype of the weights."""
        return self.lm.autocast

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; the environment needs the same one."""
        return self.lm.tokenizer

    @property
    def ends(self) -> StopConditions:
        """What ends a turn, in `generate` and where the policy is served: the model's own ends, and ``stop``."""
        return StopConditions(self.tokenizer, self.lm.stop, self.lm.turn_ends)

    def reference(self) -> LanguageModel:
        """Frozen copy of the model for a KL penalty; only trained weights are copied (with LoRA, the adapter)."""
        return self.lm.frozen_copy()

    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is that of `TextVectorEnv`. Only tokens not yet in the cache are read."""
        if not isinstance(observation, dict):
            raise TypeError("a language model needs the observations of a text environment: use one, or an MLPPolicy")
        tokens, length = observation["tokens"], observation["length"].reshape(-1)
        if self.decoder is None or self.decoder.shape != tokens.shape:
            kind = Decoder if self.lm.seq2seq is None else Seq2SeqDecoder
            self.decoder = kind(self.lm, num_slots=tokens.shape[0], max_length=tokens.shape[1])
        decoder = self.decoder
        allowed = None if action_mask is None else action_mask.to(decoder.device)
        # Before the forward pass: a later copy to the device would have to wait for it.
        streams = None if deterministic else self.memory.get("streams")
        uniform = None if streams is None else streams.next().to(decoder.device)
        logits = restrict(decoder.logits(tokens, length), temperature=self.temperature, allowed=allowed)
        logits = truncate(logits, top_k=self.top_k, top_p=self.top_p)
        if deterministic:
            return Step(*greedy(logits))
        return Step(*sample(logits, generator=self.generator, uniform=uniform))

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Clear the cache of these slots, and start the streams of their seeds; see `Policy.reset`."""
        if self.decoder is not None and rows is None and self.decoder.device != self.lm.device:
            self.decoder = None  # the policy was moved to another device
        if self.decoder is not None:
            self.decoder.reset(rows)
        if seeds is None:
            self.memory.clear()
        elif rows is None or not self.memory:
            self.memory["streams"] = UniformStreams(seeds)
        else:
            self.memory["streams"].begin(rows, seeds)

    @torch.no_grad()
    @check_names
    def generate(
        self, prompts: Sequence[Any], *, max_new_tokens: int = 128, deterministic: bool = False, seed: int = 0
    ) -> list[str]:
        """Complete texts, or answer chats, as in training: same distribution, special tokens in a text are plain text.

        Args:
            prompts: texts, token ids, or chats (lists of messages), as for `textenv.TextVectorEnv`. A chat that ends
                with an assistant's message is continued after it.
            max_new_tokens: maximum length of a completion, in tokens; `ends` or the model's context end it earlier.
            deterministic: take the most probable token instead of a sample.
            seed: seed of the samples; a completion depends on its own prompt and its place in the list only.

        Returns:
            The completions, without special tokens and stop texts.

        Raises:
            ValueError: on an empty or unsuitable prompt, or if max_new_tokens < 1.
        """
        prompts = by_position(prompts)
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts is {prompts!r:.100}, expected a list of texts, token ids or chats")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        asked = [as_prompt(i, prompt) for i, prompt in enumerate(prompts)]
        ids = [prompt_ids(prompt, self.tokenizer) for prompt in asked]
        start = np.array([len(each) for each in ids])
        longest = max(start, default=0)
        most = longest + max_new_tokens if self.lm.context is None else max(self.lm.context, longest + 1)
        tokens = np.zeros((len(ids), min(longest + max_new_tokens, most)), dtype=np.int64)
        for row, each in enumerate(ids):
            tokens[row, : len(each)] = each
        length = start.copy()
        limit = np.minimum(start + max_new_tokens, most)
        ends = self.ends

        def turn(row: int) -> Turn:
            answer = tokens[row, start[row] : length[row]].tolist()
            return Turn(asked[row], ids[row], [], answer, False, self.tokenizer, ends.stop_texts)

        # Token by token, until every answer has ended
        running = np.ones(len(ids), dtype=bool)
        player = self.fork()
        player.decoder = None
        player.reset(seeds=np.random.SeedSequence(seed).generate_state(len(ids)).astype(np.int64))
        while running.any():
            observation = {"tokens": tokens, "length": np.where(running, length, 0)[:, None]}
            chosen = player.act(observation, deterministic=deterministic).action.cpu().numpy()
            tokens[running, length[running]] = chosen[running]
            length += running
            ended = ends.token[chosen]
            if ends.texts:
                for row in np.flatnonzero(running & ~ended & ends.may_complete[chosen]).tolist():
                    ended[row] = turn(row).completed(ends.texts) is not None
            running &= ~ended & (length < limit)
        return [turn(row).completion for row in range(len(ids))]

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; logits are computed only at the True entries."""
        row = texts(rollout)
        hidden = self.lm.hidden(*row)
        log_prob, entropy, _ = self.lm.score(hidden, rollout)
        value = self._value(hidden, *row[:2]) if self.critic is None else self.critic.values(*row)
        return Evaluation(log_prob, entropy, value)

    def divergence(self, rollout: TensorDict, other: LanguageModel | Self) -> Tensor:
        """See `Policy.divergence`; ``other`` is a language model or an `LMPolicy`."""
        return self.lm.divergence(rollout, other if isinstance(other, LanguageModel) else other.lm)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        row = texts(rollout, whole=True)
        value = self._value(self.lm.hidden(*row), *row[:2]) if self.critic is None else self.critic.values(*row)
        return _now_and_next(value, rollout)

    @torch.no_grad()
    def fit_values(self, rollout: TensorDict, returns: Tensor, earlier: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `Policy.fit_values`; the fit is `algos.policies.critic.fit_head`."""

        def features_of(part: TensorDict) -> list[Tensor]:
            row = texts(part, whole=True)
            if self.critic is not None:
                return [self.critic.hidden(*row).float()]
            return [self.lm.hidden(*row).float(), self._read(*row[:2])]

        head = self.value_head if self.critic is None else self.critic.head
        features = collectives.map_rows(features_of, rollout)
        weights = [head.weight[0]] if self.critic is not None else [head.weight[0], self.token_head]
        value = fit_head(weights, head.bias, features, target=returns, mask=rollout["mask"], earlier=earlier)
        return _now_and_next(value, rollout)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """See `Policy.value_parameters`."""
        return (self.value_head if self.critic is None else self.critic).parameters()

    def save(self, folder: Path) -> dict[str, Any]:
        """See `Policy.save`. Writes a plain `transformers` folder, with the value head or ``critic/`` added.

        A model with an adapter becomes a `peft` folder: the adapter and the name of its base (`textenv.lm.loading`).
        """
        self._write(self.lm.model, folder)
        return {}

    def merge(self, folder: str | Path) -> Path:
        """Write the policy with its adapter (LoRA) merged into the weights, as a plain `transformers` folder.

        The value head or critic is added as in `save`. Nothing is written unless the model that is read back has the
        logits of the policy.

        Raises:
            ValueError: if the merged model has other logits, by more than rounding.
        """
        folder = Path(folder)
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(prefix=".merged-", dir=folder) as draft:
                self._write(merged(self.lm.model), Path(draft))
                self._check_merged(draft)
                of_earlier_policy = (ADAPTER_CONFIG, ORIGIN_FILE, BASE, HEAD, CRITIC)
                new = [path.name for path in Path(draft).iterdir()]
                for name in {*of_earlier_policy, *new}:
                    _remove(folder / name)
                for name in new:
                    (Path(draft) / name).replace(folder / name)
        except Exception:
            if is_new:
                _remove(folder)
            raise
        return folder

    def _check_merged(self, folder: str) -> None:
        """Raise a ValueError if the model in a folder has other logits than this policy's."""
        expected = trial_logits(self.lm.model)
        written: Any = load_causal_lm(folder)
        found = trial_logits(written.to(self.lm.device))
        check_same_logits(expected, found, dtype=self.lm.model.dtype, what="what was written")

    def _write(self, model: Any, folder: Path) -> None:
        from safetensors.torch import save_file

        save_model(model, folder)
        self.lm.tokenizer.save_pretrained(folder)
        options = {
            "temperature": self.temperature,
            "detach_value": self.detach_value,
            "gradient_checkpointing": self.lm.gradient_checkpointing,
            "autocast": None if self.autocast is None else str(self.autocast).removeprefix("torch."),
            "stop": list(self.lm.stop),
        }
        metadata = {"options": json.dumps(options)}
        # Otherwise `load` would restore the value head or critic of a policy saved here earlier.
        (folder / HEAD).unlink(missing_ok=True)
        shutil.rmtree(folder / CRITIC, ignore_errors=True)
        if self.critic is None:
            save_file(self.value_head.state_dict() | {TOKENS: self.token_head}, folder / HEAD, metadata=metadata)
        else:
            self.critic.save(folder / CRITIC, metadata=metadata)

    def _value(self, hidden: Tensor, tokens: Tensor, prompt_length: Tensor) -> Tensor:
        hidden = hidden.detach() if self.detach_value else hidden
        return self.value_head(hidden.float()).squeeze(-1) + self._read(tokens, prompt_length) @ self.token_head

    @torch.no_grad()
    def _read(self, tokens: Tensor, prompt_length: Tensor) -> Tensor:
        """Sum of the embeddings of the answer's tokens so far, float32 ``[B, L, embedding size]``."""
        answer = torch.arange(tokens.shape[1], device=tokens.device) >= prompt_length[:, None]
        return (self.lm.model.get_input_embeddings()(tokens).float() * answer[..., None]).cumsum(1)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _now_and_next(value: Tensor, rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """Values ``[B, T]`` of states and of the states after them, from those of every prefix ``[B, T + 1]``."""
    done = rollout["terminated"] | rollout["truncated"]
    return value[:, :-1], following(value, mask=rollout["mask"], done=done)


def _critic(choice: Critic | str | Path | None, lm: LanguageModel) -> Critic | None:
    if choice == "copy":
        return Critic.from_language_model(lm)
    if isinstance(choice, (str, Path)):
        try:
            return Critic.from_reward_model(RewardModel.load(choice))
        except ValueError as error:
            raise ValueError(
                f"critic is {choice}, which is no reward model of one score ({error}): give one, or 'copy' for a copy "
                "of the policy's own model"
            ) from error
    return choice


def _read_head(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of a saved value head, and the policy's options from its metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        options = json.loads(file.metadata()["options"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if options.get("autocast") not in (None, "bfloat16"):
        raise ValueError(f"{path} has the autocast {options['autocast']!r:.50}, expected null or 'bfloat16'")
    if options.get("autocast") is not None:
        options["autocast"] = torch.bfloat16
    return weights, options
