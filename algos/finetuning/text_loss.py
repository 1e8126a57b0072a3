"""`TextLoss`: likelihood of plain text as a term of PPO's loss, to reduce the policy's forgetting."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from algos.finetuning.sft import check_context
from textenv.lm.model import HoldsLanguageModel, LanguageModel
from textenv.prompts.prompts import PromptList, as_prompt, by_position
from textenv.prompts.tokenize import prompt_ids, without_end
from textenv.rollout import masked_mean


class TextLoss:
    """Pretraining-gradient term of PPO-ptx (Ouyang et al. 2022, eq. 2), negated: a callable ``(policy) -> loss``.

    Each call takes the next batch of an endless stream: the texts, each ended by EOS, are concatenated and cut into
    blocks, which are reshuffled in every pass. A batch of plain text is a rollout whose mask is True everywhere (except
    on padding of the last block), so the policy scores it like any other, at its own temperature.

    Args:
        texts: plain texts; tokenized by the policy's tokenizer at the first call.
        coef: weight of the mean negative log-likelihood (nats per token); γ in the paper, which uses the sum.
        batch_size: blocks per call.
        max_length: predicted tokens per block.
        seed: seed of the block order.

    Raises:
        ValueError: if there are no texts or a number is out of range; when called, if ``max_length`` exceeds the
            model's context length.

    Example:
        >>> auxiliary = TextLoss(["the film was good", "a dull plot"], coef=0.1)
        >>> auxiliary(policy).backward()  # doctest: +SKIP
    """

    def __init__(
        self, texts: Sequence[str], *, coef: float, batch_size: int = 8, max_length: int = 128, seed: int = 1
    ) -> None:
        texts = by_position(texts)
        if isinstance(texts, str) or not len(texts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts is {texts!r:.100}, expected a list of at least one text")
        if not coef >= 0:
            raise ValueError(f"coef is {coef}, expected a number of at least 0")
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"batch_size is {batch_size} and max_length {max_length}, expected at least 1 of each")
        self.texts, self.coef = texts, coef
        self.batch_size, self.max_length = batch_size, max_length
        self._seed, self._position = seed, 0
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def __call__(self, policy: HoldsLanguageModel) -> Tensor:
        """Loss term of the next batch, a differentiable float32 scalar."""
        if not (isinstance(policy, HoldsLanguageModel) and isinstance(policy.lm, LanguageModel)):
            raise TypeError(
                f"policy is a {type(policy).__name__}, expected an LMPolicy: TextLoss needs a language model"
            )
        rollout = self.next_rollout(policy.lm)
        log_prob = policy.lm.evaluate(rollout).log_prob
        return -self.coef * masked_mean(log_prob, mask=rollout["mask"])

    def next_rollout(self, lm: LanguageModel) -> TensorDict:
        """Next batch in the schema of `textenv.rollout`: ``observation``, ``action`` and ``mask``."""
        if lm.tokenizer is not self._tokenizer:
            check_context(lm, self.max_length)
            self._blocks, self._tokenizer = PromptList(self._cut(lm.tokenizer)), lm.tokenizer
        numbers = range(self._position, self._position + self.batch_size)
        self._position += self.batch_size
        blocks: list[Any] = [block.content for block in self._blocks.sample_prompts(numbers, seed=self._seed)]
        width = max(map(len, blocks))
        tokens = torch.tensor([[*block, *[0] * (width - len(block))] for block in blocks], device=lm.device)
        real = [[True] * (len(block) - 1) + [False] * (width - len(block)) for block in blocks]
        mask = torch.tensor(real, device=lm.device)
        return TensorDict({"observation": tokens[:, :-1], "action": tokens[:, 1:], "mask": mask}, batch_size=mask.shape)

    def state_dict(self) -> dict[str, int]:
        """Seed and position of the stream."""
        return {"seed": self._seed, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a `state_dict`; texts and sizes must be the same."""
        self._seed, self._position = int(state["seed"]), int(state["position"])

    def _cut(self, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
        """Cut texts into blocks of ``max_length + 1`` ids, overlapping by one, so all but the first are predicted."""
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        plain = (as_prompt(i, without_end(text, tokenizer)) for i, text in enumerate(self.texts))
        texts = (prompt_ids(text, tokenizer) + end for text in plain)
        ids = np.concatenate([np.array(text, dtype=np.int64) for text in texts])
        if len(ids) < 2:
            raise ValueError(f"the texts have {len(ids)} tokens in total, expected at least 2: give more text")
        return [ids[start : start + self.max_length + 1] for start in range(0, len(ids) - 1, self.max_length)]
