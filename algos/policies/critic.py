"""`Critic`: a separate value model for a language-model policy."""

import copy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from textenv.lm.loading import (
    from_pretrained,
    merged,
    merged_trunk,
    misread_tokens,
    plain_model,
    save_model,
    trunk_of,
)
from textenv.lm.memory import check_memory_options, trunk_output
from textenv.lm.model import LanguageModel
from textenv.lm.padding import without_padding
from textenv.lm.seq2seq import Seq2Seq
from textenv.rewards.reward_model import RewardModel
from textenv.rollout import rounding_tolerance

VALUE_HEAD_FILE = "value_head.safetensors"
"""File name of a value head's weights (on the policy's or the critic's trunk), next to the trunk's own files."""


class Critic(nn.Module):
    """Causal trunk with a scalar head: the value of every prefix. It shares no weights with the policy.

    A critic costs a second model, but the policy loss does not change the features of the value, and the value loss
    does not change the features of the policy (Ziegler et al. 2019 share the trunk, Ouyang et al. 2022 do not). Dropout
    is always off. The head computes in fp32, whatever the trunk's dtype.

    Args:
        trunk: a causal `transformers` model without output layer, or a whole encoder-decoder; trained in place.
        head: linear layer from the trunk's hidden size to 1.
        tokenizer: tokenizer whose ids the trunk reads.

    Example:
        >>> critic = Critic.from_language_model(LanguageModel.load("embedded"))  # doctest: +SKIP
        >>> policy = LMPolicy(model, tokenizer, critic=critic)  # doctest: +SKIP
    """

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.trunk = trunk.eval()
        self.head = head.float()
        self.tokenizer = tokenizer
        self.seq2seq = Seq2Seq.of(trunk, tokenizer)
        self.gradient_checkpointing = False
        self.autocast: torch.dtype | None = None

    @classmethod
    def from_language_model(cls, lm: LanguageModel) -> Self:
        """Make a critic from a copy of a language model's trunk and a zero-initialized head; all weights train.

        Adapters (LoRA) are merged into the copy's weights.
        """
        if lm.seq2seq is None:
            trunk = merged_trunk(lm.model)
        else:
            trunk = merged(lm.model)
        trunk.requires_grad_(True)
        head = fresh_head(lm.hidden_size, lm.device)
        return cls(trunk, head, lm.tokenizer)

    @classmethod
    def from_reward_model(cls, reward_model: RewardModel) -> Self:
        """Make a critic from a float32 copy of a reward model; all weights train. The value of a text is its score.

        Raises:
            ValueError: unless the reward model is causal with one raw score, linear in its trunk's output.
        """
        # The layer that computes the score becomes the value head
        model = plain_model(reward_model.model)
        modules = dict(model.named_modules(remove_duplicate=False))
        score_layer = modules.get("score")
        if model.config.num_labels != 1 or not isinstance(score_layer, nn.Linear):
            raise ValueError(
                f"a critic needs a causal model with one raw score, but {type(model).__name__} has "
                f"{model.config.num_labels} labels and the score layer {score_layer}: give a decoder of "
                "AutoModelForSequenceClassification with num_labels=1 (not an encoder such as BERT; merge an adapter "
                "on the score first)"
            )
        trunk = merged_trunk(reward_model.model).float().requires_grad_(True)
        head = copy.deepcopy(score_layer).requires_grad_(True)
        critic = cls(trunk, head, reward_model.tokenizer)
        critic._check_scores(reward_model)
        return critic

    @classmethod
    def load(cls, folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype | None = None) -> Self:
        """Load a critic written by `save`; float32 by default."""
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

        weights = load_file(Path(folder) / VALUE_HEAD_FILE)
        if dtype is None:
            dtype = torch.float32
        model_class: Any = AutoModel
        if from_pretrained(AutoConfig, folder).is_encoder_decoder:
            model_class = AutoModelForSeq2SeqLM
        trunk = from_pretrained(model_class, folder, use_safetensors=True, dtype=dtype)
        head = nn.Linear(weights["weight"].shape[1], 1, bias="bias" in weights, device="cpu")
        head.load_state_dict(weights)
        return cls(trunk, head, tokenizer)

    def save(self, folder: Path, *, metadata: dict[str, str]) -> None:
        """Write the trunk as a plain `transformers` folder (for `AutoModel`), and the head with this metadata."""
        from safetensors.torch import save_file

        save_model(self.trunk, folder)
        save_file(self.head.state_dict(), folder / VALUE_HEAD_FILE, metadata=metadata)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: dropout would add noise to the values."""
        return super().train(False)

    def compute_like(self, lm: LanguageModel) -> None:
        """Use a language model's memory options (gradient checkpointing, autocast).

        Raises:
            ValueError: if the language model's vocabulary differs, or the trunk's layers cannot be checkpointed.
        """
        misread = misread_tokens(lm.tokenizer, self.tokenizer)
        if misread:
            raise ValueError(
                f"{len(misread)} tokens of the policy are missing or have other ids in the critic's tokenizer (such "
                f"as {min(misread)!r}): a critic reads the policy's ids, so use the same tokenizer for both"
            )
        check_memory_options(self.trunk, gradient_checkpointing=lm.gradient_checkpointing, autocast=lm.autocast)
        self.gradient_checkpointing = lm.gradient_checkpointing
        self.autocast = lm.autocast

    def hidden(
        self,
        tokens: Tensor,
        prompt_length: Tensor | None = None,
        length: Tensor | None = None,
        *,
        share_beginnings: bool = False,
    ) -> Tensor:
        """Trunk output at every position, ``[B, L, hidden size]``; arguments as for `LanguageModel.hidden`."""
        if self.seq2seq is not None:
            return self.seq2seq.hidden(self._run, tokens, prompt_length)
        if length is not None:
            # Rows are not packed with gradient checkpointing, which reads layers again, outside the pack
            packed_trunk = None if self.gradient_checkpointing else self.trunk
            return without_padding(self._run, tokens, length, packed_trunk, share_beginnings=share_beginnings)
        return self._run(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)

    def values(
        self,
        tokens: Tensor,
        prompt_length: Tensor | None = None,
        length: Tensor | None = None,
        *,
        share_beginnings: bool = False,
    ) -> Tensor:
        """Values of each row's prefixes, float32 ``[B, L]``; arguments as for `LanguageModel.hidden`."""
        hidden = self.hidden(tokens, prompt_length, length, share_beginnings=share_beginnings)
        return self.head(hidden.float()).squeeze(-1)

    def _run(self, part: str = "", /, *, input_ids: Tensor, **inputs: object) -> Tensor:
        """Output of the trunk, or of its part "encoder" or "decoder", for these inputs, ``[B, L, hidden size]``."""
        trunk = self.trunk
        if part:
            trunk = trunk_of(self.trunk, part)
        return trunk_output(
            trunk,
            gradient_checkpointing=self.gradient_checkpointing,
            autocast=self.autocast,
            input_ids=input_ids,
            **inputs,
        )

    @torch.no_grad()
    def _check_scores(self, reward_model: RewardModel) -> None:
        """Raise a ValueError unless the value at each token is the reward model's score of the text up to there."""
        # Three tokens, and the score after each of them
        ids = torch.arange(3, device=self.trunk.device).unsqueeze(0) % reward_model.model.config.vocab_size
        attention_mask = torch.ones_like(ids)
        prefix_scores = []
        for length in (1, 2, 3):
            prefix_scores.append(reward_model.score_ids(ids[:, :length], attention_mask[:, :length]))
        scores = torch.cat(prefix_scores)

        # Compare, up to rounding
        gap = (self.values(ids)[0].cpu() - scores).abs().max().item()
        largest_score = max(1.0, scores.abs().max().item())
        if gap > rounding_tolerance(reward_model.model.dtype) * largest_score:
            raise ValueError(
                f"the values of {type(reward_model.model).__name__} at the tokens of a text differ by up to {gap:.3g} "
                "from its scores of the prefixes that end there: it is not causal, or has more than a linear layer "
                "after its trunk. Give a causal model of AutoModelForSequenceClassification."
            )


def fresh_head(hidden_size: int, device: torch.device) -> nn.Linear:
    """Value head initialized to zero, float32, so that it adds no noise to the first advantages."""
    head = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
