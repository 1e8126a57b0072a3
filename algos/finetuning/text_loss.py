"""`TextLoss`: likelihood of plain text as a further term of PPO's loss, so that the policy forgets less."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from algos.finetuning.sft import check_context
from textenv.lm.model import HoldsLanguageModel, LanguageModel, language_model_of
from textenv.prompts.prompts import PromptList, as_prompt, rows_by_position
from textenv.prompts.tokenize import ending_ids, prompt_ids, without_end
from textenv.rollout import masked_mean


class TextLoss:
    """Pretraining-gradient term of PPO-ptx (Ouyang et al. 2022, eq. 2), negated: a callable ``(policy) -> loss``.

    Each call takes the next batch of an endless stream of blocks. The texts, each ended by EOS, are concatenated and
    cut into blocks, whose order is shuffled anew in every pass. A batch is a rollout whose mask is True everywhere
    except on padding of the last block, so the policy scores it like any other rollout, at its own temperature.

    Args:
        texts: plain texts; tokenized by the policy's tokenizer at the first call.
        coef: weight of the mean negative log-likelihood (nats per token); γ in the paper, which uses the sum.
        batch_size: blocks per call.
        max_length: predicted tokens per block.
        seed: seed of the block order.

    Raises:
        ValueError: if there are no texts or a number is out of range; when called, if ``max_length`` exceeds the
            model's context length, or the model is an encoder-decoder.

    Example:
        >>> auxiliary = TextLoss(["the film was good", "a dull plot"], coef=0.1)
        >>> auxiliary(policy).backward()  # doctest: +SKIP
    """

    def __init__(
        self, texts: Sequence[str], *, coef: float, batch_size: int = 8, max_length: int = 128, seed: int = 1
    ) -> None:
        texts = rows_by_position(texts, "texts")
        if not len(texts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts is {texts!r:.100}, expected a list of at least one text")
        if not coef >= 0:
            raise ValueError(f"coef is {coef}, expected a number of at least 0")
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"batch_size is {batch_size} and max_length {max_length}, expected at least 1 of each")
        self.texts = texts
        self.coef = coef
        self.batch_size = batch_size
        self.max_length = max_length
        self._seed = seed
        self._position = 0  # blocks so far
        self._tokenizer: PreTrainedTokenizerBase | None = None  # of the blocks

    def __call__(self, policy: HoldsLanguageModel) -> Tensor:
        """Loss term of the next batch, a differentiable float32 scalar."""
        lm = language_model_of(policy)
        if lm is None:
            raise TypeError(
                f"policy is a {type(policy).__name__}, expected an LMPolicy: TextLoss needs a language model"
            )
        if lm.seq2seq is not None:
            raise ValueError(
                "the policy's model is an encoder-decoder, which answers a prompt: it predicts no plain text, so "
                "TextLoss has nothing to teach it; train on pairs with sft before or between the trainings"
            )
        rollout = self.next_rollout(lm)
        log_prob = lm.evaluate(rollout).log_prob
        return -self.coef * masked_mean(log_prob, mask=rollout["mask"])

    def next_rollout(self, lm: LanguageModel) -> TensorDict:
        """Next batch in the schema of `textenv.rollout`: ``observation``, ``action`` and ``mask``."""
        # Blocks of the tokenizer's ids
        if lm.tokenizer is not self._tokenizer:
            check_context(lm, self.max_length)
            self._blocks = PromptList(self._cut(lm.tokenizer))
            self._tokenizer = lm.tokenizer
        positions = range(self._position, self._position + self.batch_size)
        self._position += self.batch_size
        blocks: list[Any] = [block.content for block in self._blocks.sample_prompts(positions, seed=self._seed)]

        # Padded on the right: tokens [B, L + 1], mask [B, L]
        longest = max(map(len, blocks))
        token_rows = []
        mask_rows = []
        for block in blocks:
            padding = longest - len(block)
            token_rows.append([*block, *[0] * padding])
            mask_rows.append([True] * (len(block) - 1) + [False] * padding)
        tokens = torch.tensor(token_rows, device=lm.device)
        mask = torch.tensor(mask_rows, device=lm.device)
        columns = {"observation": tokens[:, :-1], "action": tokens[:, 1:], "mask": mask}
        return TensorDict(columns, batch_size=mask.shape)

    def state_dict(self) -> dict[str, int]:
        """Seed and position of the stream."""
        return {"seed": self._seed, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a `state_dict`; texts and sizes must be the same."""
        self._seed = int(state["seed"])
        self._position = int(state["position"])

    def _cut(self, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
        """Cut the texts into blocks of ``max_length + 1`` ids.

        Blocks overlap by one id, so that every id but the very first is predicted.
        """
        # Each text, ended by EOS if there is one, or else as the tokenizer ends texts
        end = ending_ids(tokenizer)
        if tokenizer.eos_token_id is not None:
            end = [tokenizer.eos_token_id]
        text_ids = []
        for index, text in enumerate(self.texts):
            prompt = as_prompt(index, without_end(text, tokenizer))
            ids = prompt_ids(prompt, tokenizer) + end
            text_ids.append(np.array(ids, dtype=np.int64))
        all_ids = np.concatenate(text_ids)
        if len(all_ids) < 2:
            raise ValueError(f"the texts have {len(all_ids)} tokens in total, expected at least 2: give more text")

        block_size = self.max_length + 1
        starts = range(0, len(all_ids) - 1, self.max_length)
        return [all_ids[start : start + block_size] for start in starts]
