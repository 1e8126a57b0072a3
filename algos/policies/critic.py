"""`Critic`: a separate value model for a language-model policy."""

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from textenv.lm.loading import from_pretrained, merged, merged_trunk, plain_model, save_model, trunk_of
from textenv.lm.memory import check_memory_options, trunk_output
from textenv.lm.model import LanguageModel
from textenv.lm.padding import without_padding
from textenv.lm.seq2seq import Seq2Seq
from textenv.rewards.reward_model import RewardModel
from textenv.rollout import rounding_tolerance

HEAD = "value_head.safetensors"
"""File name of a value head's weights (on the policy's or the critic's trunk), next to the trunk's own files."""
FOLDS = 4
"""Parts of a rollout in `fit_head`."""
DECAYS, RIDGES = (0.0, 0.8), (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
CANDIDATES = tuple(product(DECAYS, RIDGES))
"""What `fit_head` chooses from: weight of the sums over earlier rollouts (the last is their decay), and ridge."""


class Critic(nn.Module):
    """Causal trunk with a scalar head: the value of every prefix. It shares no weights with the policy.

    It costs a second model, but policy loss and value loss do not change each other's features (Ziegler et al. 2019
    share the trunk, Ouyang et al. 2022 do not). Dropout is always off. The head computes in fp32, whatever the trunk's
    dtype.

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
        self.trunk, self.head, self.tokenizer = trunk.eval(), head.float(), tokenizer
        self.seq2seq = Seq2Seq.of(trunk, tokenizer)
        self.gradient_checkpointing = False
        self.autocast: torch.dtype | None = None

    @classmethod
    def from_language_model(cls, lm: LanguageModel) -> Self:
        """Make a critic from a copy of a language model's trunk and a zero-initialized head; all weights train.

        Adapters (LoRA) are merged into the copy's weights.
        """
        trunk = (merged_trunk if lm.seq2seq is None else merged)(lm.model).requires_grad_(True)
        return cls(trunk, fresh_head(lm.hidden_size, lm.device), lm.tokenizer)

    @classmethod
    def from_reward_model(cls, reward_model: RewardModel) -> Self:
        """Make a critic from a float32 copy of a reward model; all weights train. The value of a text is its score.

        Raises:
            ValueError: unless the reward model is causal with one raw score, linear in its trunk's output.
        """
        model = plain_model(reward_model.model)
        name, score = type(model).__name__, dict(model.named_modules(remove_duplicate=False)).get("score")
        if model.config.num_labels != 1 or not isinstance(score, nn.Linear):
            raise ValueError(
                f"a critic needs a causal model with one raw score, but {name} has {model.config.num_labels} "
                f"labels and the score layer {score}: give a decoder of AutoModelForSequenceClassification with "
                "num_labels=1 (not an encoder such as BERT; merge an adapter on the score first)"
            )
        trunk = merged_trunk(reward_model.model).float().requires_grad_(True)
        critic = cls(trunk, copy.deepcopy(score).requires_grad_(True), reward_model.tokenizer)
        critic._check_scores(reward_model)
        return critic

    @classmethod
    def load(cls, folder: str | Path, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype | None = None) -> Self:
        """Load a critic written by `save`; float32 by default."""
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

        weights = load_file(Path(folder) / HEAD)
        dtype = torch.float32 if dtype is None else dtype
        whole = from_pretrained(AutoConfig, folder).is_encoder_decoder
        trunk = from_pretrained(
            AutoModelForSeq2SeqLM if whole else AutoModel, folder, use_safetensors=True, dtype=dtype
        )
        head = nn.Linear(weights["weight"].shape[1], 1, bias="bias" in weights, device="cpu")
        head.load_state_dict(weights)
        return cls(trunk, head, tokenizer)

    def save(self, folder: Path, *, metadata: dict[str, str]) -> None:
        """Write a plain `transformers` folder (for `AutoModel`), and the head with this metadata."""
        from safetensors.torch import save_file

        save_model(self.trunk, folder)
        save_file(self.head.state_dict(), folder / HEAD, metadata=metadata)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: dropout would add noise to the values."""
        return super().train(False)

    def compute_like(self, lm: LanguageModel) -> None:
        """Use a language model's memory options (gradient checkpointing, autocast).

        Raises:
            ValueError: if the language model's vocabulary differs, or the trunk's layers cannot be checkpointed.
        """
        read = self.tokenizer.get_vocab()
        strange = [token for token, index in lm.tokenizer.get_vocab().items() if read.get(token) != index]
        if strange:
            raise ValueError(
                f"{len(strange)} tokens of the policy are missing or have other ids in the critic's tokenizer (such as "
                f"{min(strange)!r}): a critic reads the policy's ids, so use the same tokenizer for both"
            )
        check_memory_options(self.trunk, gradient_checkpointing=lm.gradient_checkpointing, autocast=lm.autocast)
        self.gradient_checkpointing, self.autocast = lm.gradient_checkpointing, lm.autocast

    def hidden(self, tokens: Tensor, prompt_length: Tensor | None = None, length: Tensor | None = None) -> Tensor:
        """Trunk output at every position, ``[B, L, hidden size]``; arguments as for `LanguageModel.hidden`."""
        if self.seq2seq is not None:
            return self.seq2seq.hidden(self._run, tokens, prompt_length)
        if length is not None:
            return without_padding(self._run, tokens, length, None if self.gradient_checkpointing else self.trunk)
        return self._run(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)

    def values(self, *row: Tensor) -> Tensor:
        """Values of each row's prefixes, float32 ``[B, L]``; arguments as for `LanguageModel.hidden`."""
        return self.head(self.hidden(*row).float()).squeeze(-1)

    def _run(self, part: str = "", /, **inputs: Any) -> Tensor:
        trunk = trunk_of(self.trunk, part) if part else self.trunk
        options: Any = {"gradient_checkpointing": self.gradient_checkpointing, "autocast": self.autocast}
        return trunk_output(trunk, **options, **inputs)

    @torch.no_grad()
    def _check_scores(self, reward_model: RewardModel) -> None:
        """Raise a ValueError unless the values of a text are the scores of its prefixes (the model is causal)."""
        ids = torch.arange(3, device=self.trunk.device).unsqueeze(0) % reward_model.model.config.vocab_size
        known = torch.ones_like(ids)
        scores = torch.cat([reward_model.score_ids(ids[:, :stop], known[:, :stop]) for stop in (1, 2, 3)])
        gap = (self.values(ids)[0].cpu() - scores).abs().max().item()
        if gap > rounding_tolerance(reward_model.model.dtype) * max(1.0, scores.abs().max().item()):
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


@torch.no_grad()
def fit_head(
    weights: Sequence[Tensor],
    bias: Tensor | None,
    features: Sequence[Tensor],
    *,
    target: Tensor,
    mask: Tensor,
    earlier: dict[str, Tensor] | None = None,
) -> Tensor:
    """Fit a linear value to a rollout in closed form; return values ``[B, L]`` by fits that have not seen their row.

    The values of a fold of rows come from a ridge regression on the other folds and on earlier rollouts. Its candidate
    (weight of earlier rollouts, strength of the ridge) is the one that predicted earlier rollouts best or, in the first
    one, the other folds. So no value depends on its row's return, as in RLOO. Then ``weights`` and ``bias`` are fitted
    to all rows. Non-finite numbers change nothing.

    Args:
        weights, bias: ``[H]`` for each kind of features and ``[1]``, changed in place.
        features: float32 ``[B, L, H]``, L > T; the ridge treats kinds alike, whatever their size.
        target, mask: return from each entry on, and bool, ``[B, T]``.
        earlier: what is remembered of earlier rollouts, updated in place; empty at first.
    """
    earlier = {} if earlier is None else earlier
    sizes = [len(weight) for weight in weights]
    x, y = torch.cat(list(features), dim=-1), target[mask]
    seen = x[:, : mask.shape[1]][mask]
    if not (len(y) and seen.isfinite().all() and y.isfinite().all()):
        return x @ torch.cat(list(weights)) + (0.0 if bias is None else bias)
    if not earlier:  # float32 could not tell apart features far from 0
        center = seen.mean(0) if bias is not None else torch.zeros_like(seen[0])
        spread = [part.square().mean().sqrt().clamp(min=1e-6) for part in (seen - center).split(sizes, dim=1)]
        scale = torch.cat([value.expand(size) for value, size in zip(spread, sizes, strict=True)])
        empty = x.new_zeros(len(center) + 1, len(center) + 2)
        earlier.update({"center": center, "scale": scale, "sums": empty})
    x = (x - earlier["center"]) / earlier["scale"]
    x = torch.cat([x, torch.full_like(x[..., :1], float(bias is not None))], dim=-1)
    fold = torch.arange(len(mask), device=x.device) % FOLDS
    of = fold[mask.nonzero()[:, 0]]
    seen = x[:, : mask.shape[1]][mask]
    folds, last = _cross_fit([(seen[of == i], y[of == i]) for i in range(FOLDS)], earlier)
    slope = last[:-1] / earlier["scale"]
    for weight, part in zip(weights, slope.split(sizes), strict=True):
        weight.copy_(part)
    if bias is not None:
        bias.copy_(last[-1:] - slope @ earlier["center"])
    return (x @ folds[fold].unsqueeze(-1)).squeeze(-1)


def _cross_fit(parts: Sequence[tuple[Tensor, Tensor]], earlier: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Solutions for each fold by the others ``[FOLDS, H + 1]``, and for all ``[H + 1]``; updates ``earlier``.

    Args:
        parts: features ``[N, H + 1]``, the last of which is the constant, and targets ``[N]`` of each fold.
        earlier: sums ``[H + 1, H + 2]`` and, after the first rollout, squared errors of the candidates.
    """
    sums = torch.stack([x.T @ torch.cat([x, y[:, None]], dim=1) for x, y in parts])
    total = sums.sum(0)

    def without(*left_out: int) -> Tensor:
        """Sums of the other folds, added up: from ``total``, rounding would leave something of the folds left out."""
        kept = [i for i in range(FOLDS) if i not in left_out]
        return sums[kept].sum(0)

    def solve(own: Tensor, candidates: Sequence[tuple[float, float]] = CANDIDATES) -> Tensor:
        """Solutions ``[candidates, H + 1]``."""
        return torch.stack([_ridge(own + decay * earlier["sums"], strength) for decay, strength in candidates])

    def missed(solutions: Tensor, i: int) -> Tensor:
        """Squared errors in a fold ``[candidates]``."""
        x, y = parts[i]
        return (y[:, None] - x @ solutions.T).square().sum(0)

    solved = [solve(without(i)) for i in range(FOLDS)]
    errors = torch.stack([missed(solutions, i) for i, solutions in enumerate(solved)])
    if "errors" in earlier:
        chosen = [int(earlier["errors"].argmin())] * FOLDS
        errors = torch.cat([errors, DECAYS[-1] * earlier["errors"][None]])
    else:
        first = CANDIDATES[: len(RIDGES)]  # nothing is earlier
        chosen = []
        for i in range(FOLDS):
            missed_by_others = [missed(solve(without(i, j), first), j) for j in range(FOLDS) if j != i]
            chosen.append(int(torch.stack(missed_by_others).sum(0).argmin()))
    errors = errors.sum(0)
    folds = torch.stack([solutions[best] for solutions, best in zip(solved, chosen, strict=True)])
    last = solve(total, [CANDIDATES[int(errors.argmin())]])[0]
    earlier.update({"errors": errors, "sums": total + DECAYS[-1] * earlier["sums"]})
    return folds, last


def _ridge(sums: Tensor, strength: float) -> Tensor:
    """Least squares from sums ``[H, H + 1]`` with a ridge relative to the features' variance; the last is constant."""
    square, product = sums[:, :-1], sums[:, -1]
    spread = square.diagonal().sum() - square[-1].square().sum() / square[-1, -1].clamp(min=1.0)
    ridge = (spread / (len(square) - 1)).clamp(min=1e-6).repeat(len(square))
    ridge[-1] *= 1e-9  # the intercept is hardly penalized
    solution = torch.linalg.solve_ex(square + (strength * ridge).diag(), product)[0]
    if not solution.isfinite().all():  # singular: the features hardly vary
        solution = torch.zeros_like(product)
        solution[-1] = product[-1] / square[-1, -1].clamp(min=1.0)
    return solution
