"""`LMPolicy`: a language model with a value head, as a policy over tokens."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from algos.policies.critic import VALUE_HEAD_FILE, Critic, fresh_head
from algos.policies.policy import LinearValue, Observation, Policy, Step
from algos.policies.random_streams import UniformStreams
from textenv.device import find_device
from textenv.embedded.folder import EMBEDDED
from textenv.envs.limits import StopConditions, check_at_least
from textenv.envs.turn import Turn
from textenv.lm.adapter_config import ADAPTER_CONFIG
from textenv.lm.decoding import Decoder
from textenv.lm.ends import remove_end_ids, write_end_ids
from textenv.lm.loading import (
    BASE,
    add_lora,
    check_same_logits,
    is_adapted,
    load_causal_lm,
    merged,
    model_folder,
    save_model,
    trial_logits,
)
from textenv.lm.model import LanguageModel
from textenv.lm.origin import ORIGIN_FILE
from textenv.lm.sampling import greedy, restrict, sample, truncate
from textenv.lm.seq2seq import Seq2SeqDecoder
from textenv.names import check_names
from textenv.prompts.prompts import as_prompt, rows_by_position
from textenv.prompts.tokenize import prompt_ids, warn_of_unread_columns, warn_of_unwritten
from textenv.rewards.reward_model import RewardModel
from textenv.rollout import Evaluation, following, scoring_inputs

if TYPE_CHECKING:
    from peft import PeftConfig

CRITIC_FOLDER = "critic"
"""Subfolder for the critic in a saved policy's folder."""
CHAT_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
"""File and folder of chat templates in a tokenizer's folder."""
TOKEN_HEAD_KEY = "tokens"
"""Name of `LMPolicy.token_head` among the value head's weights in a saved policy's folder."""
IDS_OF_STOP = "ids_of_stop"
"""Name of a saved option: ids that the folder's ``generation_config`` has only because ``stop`` has them."""
MIN_PRETRAINED_PARAMETERS = 10_000_000
"""A model with fewer parameters counts as made for tests, such as the embedded one, and not as pretrained."""


class LMPolicy(nn.Module, Policy):
    """Language model as a recurrent policy: its state is the text so far, of which it keeps a cache.

    The value comes from a critic with its own trunk, or from a linear head on the model's trunk, initialized to
    zero and computed in fp32 whatever the model's dtype. With ``fit_value_head``, ``token_head`` adds a linear function
    of the summed embeddings of the answer's tokens so far; otherwise ``token_head`` stays zero.

    Args:
        model: a decoder-only or encoder-decoder `transformers` model, trained in place; for a `peft` model only the
            adapters inside its layers are trained.
        tokenizer: the model's tokenizer.
        temperature: temperature of acting and scoring; a `reference` has the same.
        critic: a value model instead of the head on the trunk. It is trained too, with the policy's settings of
            ``gradient_checkpointing`` and ``autocast``.
        detach_value: keep the value's gradient out of the shared trunk.
        gradient_checkpointing: recompute activations in the backward pass (`LanguageModel`).
        autocast: ``torch.bfloat16`` computes in that dtype with float32 weights, both acting and scoring
            (`LanguageModel`).
        top_k: sample only from the k most probable tokens. In training the rollout holds the tokens that were kept, and
            all log-probabilities, of the reference too, are of the distribution among these.
        top_p: sample only from the fewest tokens whose probabilities sum to this, > 0 and <= 1; in training as
            ``top_k``.
        stop: texts and token ids that end a turn, in addition to the model's own ends (`textenv.lm.ends`): in
            `generate`, and in every text environment that the policy plays. An agent adds the stops of its environment,
            and they are saved with the policy.
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
        stop: Iterable[str | int] | str | int = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if top_k is not None:
            check_at_least("top_k", top_k, 1)
        if top_p is not None and not (isinstance(top_p, SupportsFloat) and 0 < top_p <= 1):
            raise ValueError(f"top_p is {top_p!r}, expected a number in (0, 1], or None for all tokens")
        if critic is not None and detach_value:
            raise ValueError(
                "detach_value is for a value head on the policy's trunk, but a critic has its own: omit it"
            )
        self.top_k = top_k
        self.top_p = top_p

        # Model
        self.lm = LanguageModel(
            model,
            tokenizer,
            temperature=temperature,
            gradient_checkpointing=gradient_checkpointing,
            autocast=autocast,
            stop=stop,
        )

        # Value: from a critic, or from heads on the model's trunk
        self.detach_value = detach_value
        self.critic = critic
        if critic is None:
            self.value_head = fresh_head(self.lm.hidden_size, self.lm.device)
            embedding_size = self.lm.model.get_input_embeddings().weight.shape[1]
            self.register_buffer("token_head", torch.zeros(embedding_size, device=self.lm.device))
        else:
            critic.compute_like(self.lm)

        # Sampling
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
        lora: "str | PeftConfig | None" = None,
        **options: Any,
    ) -> Self:
        """Load model and tokenizer; a saved policy is restored with its value head or critic.

        Args:
            name: ``"embedded"``, ``"smollm2"``, a local folder, a GGUF file, or a hub name.
            dtype: dtype of the weights; None means float32.
            critic: as in the constructor; ``"copy"``: a copy of the model; another text or path: folder or hub name of
                a reward model (`Critic.from_reward_model`).
            device: where to move all weights (`textenv.device.find_device`); None leaves them on the CPU.
            lora: train adapters only: a `peft.LoraConfig`, or a text as in `textenv.lm.loading.add_lora`; None trains
                all weights.
            options: constructor arguments; they override saved ones.
        """
        target_device = find_device(device)
        lm = load_language_model(name, dtype=dtype, lora=lora, seed=options.get("seed", 0))
        critic = make_critic(critic, lm)

        # A policy that was saved with a critic has it in a subfolder, in place of a value head
        folder = Path(model_folder(name))
        critic_folder = folder / CRITIC_FOLDER
        head_file = folder / VALUE_HEAD_FILE
        if (critic_folder / VALUE_HEAD_FILE).is_file():
            head_file = critic_folder / VALUE_HEAD_FILE
            if critic is None:
                critic = Critic.load(critic_folder, lm.tokenizer, dtype=dtype)
        if not head_file.is_file():
            return cls(lm.model, lm.tokenizer, critic=critic, **options).to(target_device)

        # Saved options, and the saved value head unless a critic replaces it
        weights, saved_options = _read_head(head_file)
        remove_end_ids(saved_options.pop(IDS_OF_STOP, []), lm.model)
        if critic is not None:  # it has a network of its own, whose gradient is not the policy's
            saved_options.pop("detach_value", None)
        policy = cls(lm.model, lm.tokenizer, critic=critic, **(saved_options | options))
        if critic is None:
            token_head = weights.pop(TOKEN_HEAD_KEY, policy.token_head)  # absent in version 0.4.0
            policy.token_head.copy_(token_head)
            policy.value_head.load_state_dict(weights)
        return policy.to(target_device)

    @property
    def num_actions(self) -> int:
        """Number of tokens to choose from."""
        return self.lm.num_tokens

    @property
    def default_learning_rate(self) -> float:
        """See `Policy.default_learning_rate`."""
        return default_learning_rate(self.lm)

    @property
    def truncates(self) -> bool:
        """True if top-k or top-p truncates the distribution."""
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
        """Conditions that end a turn, in `generate` and where the policy is served: the model's own, and ``stop``."""
        return StopConditions(self.tokenizer, self.lm.stop, self.lm.turn_ends)

    def reference(self) -> LanguageModel:
        """Frozen copy of the model for a KL penalty; only trained weights are copied (with LoRA, the adapter)."""
        return self.lm.frozen_copy()

    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is that of `TextVectorEnv`. Only tokens not yet in the cache are read."""
        if not isinstance(observation, dict):
            raise TypeError("a language model needs the observations of a text environment: use one, or an MLPPolicy")
        tokens = observation["tokens"]
        length = observation["length"].reshape(-1)
        decoder = self._decoder_for(tokens)

        # Copy to the device before the forward pass: a later copy would have to wait for it.
        allowed = None
        if action_mask is not None:
            if action_mask.stride(0) == 0:  # one row for all slots
                action_mask = action_mask[:1]
            allowed = action_mask.to(decoder.device)
        uniform = None
        if not deterministic and "streams" in self.memory:
            uniform = self.memory["streams"].next().to(decoder.device)

        # Logits of the next token, and the token
        logits = decoder.logits(tokens, length)
        logits = restrict(logits, temperature=self.temperature, allowed=allowed)
        kept = None
        if self.truncates:
            logits = truncate(logits, top_k=self.top_k, top_p=self.top_p)
            kept = logits > torch.finfo(logits.dtype).min
        if deterministic:
            action, log_prob = greedy(logits)
        else:
            action, log_prob = sample(logits, generator=self.generator, uniform=uniform)
        return Step(action, log_prob, kept=kept)

    def _decoder_for(self, tokens: np.ndarray) -> Decoder | Seq2SeqDecoder:
        """Decoder with its cache for tokens ``[N, L]``: the present one if it has this shape, else a new one."""
        if self.decoder is None or self.decoder.shape != tokens.shape:
            num_slots, max_length = tokens.shape
            self.decoder = make_decoder(self.lm, num_slots=num_slots, max_length=max_length)
        return self.decoder

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Clear the cache of these slots, and start random streams from their seeds; see `Policy.reset`."""
        # Cache
        if self.decoder is not None and rows is None and self.decoder.device != self.lm.device:
            self.decoder = None  # the policy was moved to another device
        if self.decoder is not None:
            self.decoder.reset(rows)

        # Streams
        if seeds is None:
            self.memory.clear()
        elif rows is None or not self.memory:
            self.memory["streams"] = UniformStreams(seeds)
        else:
            self.memory["streams"].begin(rows, seeds)

    @torch.no_grad()
    @check_names
    def generate(
        self, prompts: Sequence[object], *, max_new_tokens: int = 128, deterministic: bool = False, seed: int = 0
    ) -> list[str]:
        """Complete texts, or answer chats, by the same distribution as in training.

        Special tokens in a text are read as plain text, as in training. What only the environment knows is left out:
        ``allowed``, ``forbidden`` and ``min_new_tokens``.

        Args:
            prompts: texts, token ids, or chats (lists of messages), as for `textenv.TextVectorEnv`. A chat that ends
                with an assistant's message is continued after it.
            max_new_tokens: maximum length of a completion, in tokens; `ends` or the model's context end it earlier.
            deterministic: take the most probable token instead of a sample.
            seed: seed of the samples; a completion depends only on its prompt and the prompt's index in the list.

        Returns:
            The completions, without special tokens and stop texts.

        Raises:
            ValueError: on an empty or unsuitable prompt, if max_new_tokens is no integer of at least 1, or seed none of
                at least 0.
        """
        prompts = rows_by_position(prompts, "prompts")
        check_at_least("max_new_tokens", max_new_tokens, 1)
        check_at_least("seed", seed, 0)
        parsed_prompts = [as_prompt(i, prompt) for i, prompt in enumerate(prompts)]
        prompt_tokens = [prompt_ids(prompt, self.tokenizer) for prompt in parsed_prompts]
        for index, ids in enumerate(prompt_tokens):
            if min(ids) < 0 or max(ids) >= self.num_actions:
                raise ValueError(f"prompt {index} has ids outside the vocabulary, expected 0 to {self.num_actions - 1}")
        for prompt in parsed_prompts:
            warn_of_unwritten(prompt.messages, self.tokenizer)
            warn_of_unread_columns(prompt)
        num_rows = len(prompt_tokens)

        # Rows begin with the prompts. A completion ends at max_new_tokens or where the model's context ends, but has at
        # least one token
        prompt_length = np.array([len(ids) for ids in prompt_tokens])
        longest_prompt = max(prompt_length, default=0)
        max_length = longest_prompt + max_new_tokens
        if self.lm.context is not None:
            max_length = min(max_length, max(self.lm.context, longest_prompt + 1))
        tokens = np.zeros((num_rows, max_length), dtype=np.int64)
        for row, ids in enumerate(prompt_tokens):
            tokens[row, : len(ids)] = ids
        length = prompt_length.copy()
        length_limit = np.minimum(prompt_length + max_new_tokens, max_length)
        ends = self.ends

        def turn_of(row: int) -> Turn:
            completion = tokens[row, prompt_length[row] : length[row]].tolist()
            context = prompt_tokens[row]
            if self.lm.seq2seq is not None:  # the decoder writes a text of its own
                context = []
            return Turn(
                prompt=parsed_prompts[row],
                prompt_ids=prompt_tokens[row],
                context_ids=context,
                completion_ids=completion,
                terminated=False,
                tokenizer=self.tokenizer,
                stop=ends.stop_texts,
            )

        # A copy of the policy with an empty cache and a random stream for each row
        player = self.fork()
        player.decoder = None
        seeds = np.random.SeedSequence(seed).generate_state(num_rows)
        player.reset(seeds=seeds.astype(np.int64))

        # Token by token, until every completion has ended
        running = np.ones(num_rows, dtype=bool)
        while running.any():
            length_or_idle = np.where(running, length, 0)  # a row of length 0 is idle
            observation = {"tokens": tokens, "length": length_or_idle[:, None]}
            next_token = player.act(observation, deterministic=deterministic).action.cpu().numpy()
            tokens[running, length[running]] = next_token[running]
            length += running
            ended = ends.is_end[next_token]
            if ends.texts:
                candidates = running & ~ended & ends.may_complete[next_token]
                for row in np.flatnonzero(candidates).tolist():
                    ended[row] = turn_of(row).find_completed(ends.texts) is not None
            running &= ~ended & (length < length_limit)
        return [turn_of(row).completion for row in range(num_rows)]

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; logits are computed only at the True entries."""
        tokens, prompt_length, length = scoring_inputs(rollout)
        hidden = self.lm.hidden(tokens, prompt_length, length)
        log_prob, entropy, _ = self.lm.score(hidden, rollout)
        if self.critic is None:
            value = self._head_values(hidden, tokens, prompt_length)
        else:
            value = self.critic.values(tokens, prompt_length, length)
        return Evaluation(log_prob, entropy, value)

    def divergence(self, rollout: TensorDict, other: LanguageModel | Self) -> Tensor:
        """See `Policy.divergence`; ``other`` is a language model or an `LMPolicy`."""
        if isinstance(other, LanguageModel):
            return self.lm.divergence(rollout, other)
        return self.lm.divergence(rollout, other.lm)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        tokens, prompt_length, length = scoring_inputs(rollout, with_end_states=True)
        if self.critic is None:
            hidden = self.lm.hidden(tokens, prompt_length, length)
            value = self._head_values(hidden, tokens, prompt_length)
        else:
            value = self.critic.values(tokens, prompt_length, length)
        done = rollout["terminated"] | rollout["truncated"]
        return value[:, :-1], following(value, mask=rollout["mask"], done=done)

    @property
    def linear_value(self) -> LinearValue:
        """See `Policy.linear_value`; a head on the policy's trunk also reads the answer's embeddings."""
        if self.critic is not None:
            head = self.critic.head
            return LinearValue(self._value_features, [head.weight[0]], head.bias)
        head = self.value_head
        return LinearValue(self._value_features, [head.weight[0], self.token_head], head.bias)

    def _value_features(self, rollout: TensorDict) -> list[Tensor]:
        """Features of each kind that the value is linear in, float32 ``[B, T + 1, H]``."""
        tokens, prompt_length, length = scoring_inputs(rollout, with_end_states=True)
        if self.critic is not None:
            return [self.critic.hidden(tokens, prompt_length, length).float()]
        hidden = self.lm.hidden(tokens, prompt_length, length).float()
        return [hidden, self._summed_embeddings(tokens, prompt_length)]

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """See `Policy.value_parameters`."""
        if self.critic is None:
            return self.value_head.parameters()
        return self.critic.parameters()

    def save(self, folder: str | Path) -> dict[str, object]:
        """See `Policy.save`. Write a plain `transformers` folder, with the value head or ``critic/`` added.

        A model with an adapter becomes a `peft` folder: the adapter and its base model's name (`textenv.lm.loading`).
        ``generation_config.json`` lists all ids that end a turn, for other programs, but no texts (`write_end_ids`).
        """
        self._write(self.lm.model, Path(folder))
        return {}

    def merge(self, folder: str | Path) -> Path:
        """Write the policy with its adapter (LoRA) merged into the weights, as a plain `transformers` folder.

        The value head or critic is added as in `save`. The merged model is first read back from a temporary folder; if
        its logits differ from the policy's, nothing is written.

        Raises:
            ValueError: if the logits of the merged model differ by more than rounding.
        """
        folder = Path(folder)
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(prefix=".merged-", dir=folder) as draft:
                self._write(merged(self.lm.model), Path(draft))
                self._check_merged(draft)
                # Replace all files of a policy that was saved here before
                former_names = (ADAPTER_CONFIG, ORIGIN_FILE, BASE, VALUE_HEAD_FILE, CRITIC_FOLDER, *CHAT_TEMPLATES)
                new_names = [path.name for path in Path(draft).iterdir()]
                for name in {*former_names, *new_names}:
                    _remove(folder / name)
                for name in new_names:
                    (Path(draft) / name).replace(folder / name)
        except Exception:
            if is_new:
                _remove(folder)
            raise
        return folder

    def _check_merged(self, folder: str) -> None:
        """Raise a ValueError if the logits of the model in a folder differ from this policy's."""
        logits = trial_logits(self.lm.model)
        written: Any = load_causal_lm(folder)
        written_logits = trial_logits(written.to(self.lm.device))
        check_same_logits(logits, written_logits, dtype=self.lm.model.dtype, what="what was written")

    def _write(self, model: PreTrainedModel, folder: Path) -> None:
        """Write a model, the tokenizer, and the value head or critic with the policy's options."""
        from safetensors.torch import save_file

        # Model, with the ids that end a turn: its own, and then those of `stop`
        ends = self.ends
        own_ids = ends.model_ends.ids
        ids_of_stop = [token for token in ends.ids if token not in own_ids]
        save_model(model, folder)
        write_end_ids([*own_ids, *ids_of_stop], model, folder)

        # Tokenizer; one without a template leaves an earlier one where it is
        for name in CHAT_TEMPLATES:
            _remove(folder / name)
        self.lm.tokenizer.save_pretrained(folder)

        # Options that `load` restores, as metadata of the value head
        autocast = None
        if self.autocast is not None:
            autocast = str(self.autocast).removeprefix("torch.")
        options = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "detach_value": self.detach_value,
            "gradient_checkpointing": self.lm.gradient_checkpointing,
            "autocast": autocast,
            "stop": list(self.lm.stop),
            IDS_OF_STOP: ids_of_stop,
        }
        metadata = {"options": json.dumps(options)}

        # Value head or critic. Those of a policy that was saved here earlier are removed: `load` would restore them
        (folder / VALUE_HEAD_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder / CRITIC_FOLDER, ignore_errors=True)
        if self.critic is None:
            weights = self.value_head.state_dict() | {TOKEN_HEAD_KEY: self.token_head}
            save_file(weights, folder / VALUE_HEAD_FILE, metadata=metadata)
        else:
            self.critic.save(folder / CRITIC_FOLDER, metadata=metadata)

    def _head_values(self, hidden: Tensor, tokens: Tensor, prompt_length: Tensor) -> Tensor:
        """Values ``[B, L]`` by the heads, from the trunk's output ``[B, L, hidden size]``."""
        if self.detach_value:
            hidden = hidden.detach()
        value = self.value_head(hidden.float()).squeeze(-1)
        return value + self._summed_embeddings(tokens, prompt_length) @ self.token_head

    @torch.no_grad()
    def _summed_embeddings(self, tokens: Tensor, prompt_length: Tensor) -> Tensor:
        """Sum of the embeddings of the answer's tokens so far, float32 ``[B, L, embedding size]``."""
        in_answer = torch.arange(tokens.shape[1], device=tokens.device) >= prompt_length[:, None]
        embeddings = self.lm.model.get_input_embeddings()(tokens).float()
        return (embeddings * in_answer[..., None]).cumsum(1)


def load_language_model(
    name: str | Path, *, dtype: torch.dtype | None, lora: "str | PeftConfig | None", seed: int, **options: Any
) -> LanguageModel:
    """Load a language model, with a new adapter if ``lora`` is given; arguments as for `LMPolicy.load`.

    Args:
        name: name or path of the model.
        dtype: dtype of the weights; None means float32.
        lora: the adapter.
        seed: seed of the adapter's weights.
        options: constructor arguments of `LanguageModel`.
    """
    lm = LanguageModel.load(name, dtype=dtype, **options)
    if lora is None:
        return lm
    return LanguageModel(add_lora(lm.model, lora, seed=seed), lm.tokenizer, **options)


def default_learning_rate(lm: LanguageModel) -> float:
    """Learning rate by size and adapter; `algos.config.Config.learning_rate` has the sources."""
    num_parameters = sum(p.numel() for p in lm.parameters())
    if num_parameters < MIN_PRETRAINED_PARAMETERS:
        return 5e-4
    if is_adapted(lm.model):
        return 1.4e-4
    return 1.41e-5


def make_decoder(lm: LanguageModel, *, num_slots: int, max_length: int) -> Decoder | Seq2SeqDecoder:
    """Make a decoder with its cache for texts of up to ``max_length`` tokens; see `Decoder`."""
    if lm.seq2seq is None:
        return Decoder(lm, num_slots=num_slots, max_length=max_length)
    return Seq2SeqDecoder(lm, num_slots=num_slots, max_length=max_length)


def _remove(path: Path) -> None:
    """Delete a file, or a folder with its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_critic(choice: Critic | str | Path | None, lm: LanguageModel) -> Critic | None:
    """Make the critic that `LMPolicy.load` was asked for: a copy, or one from a reward model; others stay as they are.

    Raises:
        ValueError: if the reward model does not have one score.
    """
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
    """Read the weights of a saved value head, and the policy's options from its metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        options = json.loads(file.metadata()["options"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    autocast = options.get("autocast")
    if autocast not in (None, "bfloat16"):
        raise ValueError(f"{path} has the autocast {autocast!r:.50}, expected null or 'bfloat16'")
    if autocast is not None:
        options["autocast"] = torch.bfloat16
    return weights, options
