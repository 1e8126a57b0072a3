"""Models whose outputs may jump: those with experts, and with attention that reads only the keys of highest score.

A router chooses the experts with the highest scores. Where two scores are nearly equal, the same product in another
shape may round them to the other order. Then another expert computes, and log-probabilities jump by tenths of a nat.
So two computations of one log-probability are equal in most places, and far apart in a few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY_LIMITS = ("keep_window_size", "index_topk", "indexer_budget")
"""Settings of configurations: the number of keys that attention keeps (Doge, DeepSeek V3.2, Qwen 4)."""


def hard_choices(model: PreTrainedModel) -> tuple[str, ...]:
    """Name what a model chooses by the order of scores (experts, keys), for messages; empty for other models."""
    choices = []
    if any("experts" in name.rpartition(".")[2] for name, _ in model.named_modules()):
        choices.append("experts")
    config = model.config.get_text_config()
    for name in KEY_LIMITS:
        if getattr(config, name, None):
            choices.append(f"the keys of attention ({name})")
    return tuple(choices)
