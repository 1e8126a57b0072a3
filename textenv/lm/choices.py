"""Models whose outputs jump where a choice turns: experts, and attention that reads only the highest keys.

A router takes the experts with the highest scores. Where two scores are nearly equal, another shape of the same
product rounds them in the other order, another expert computes, and log-probabilities jump by tenths of a nat. So two
computations of one log-probability are equal in most places, and far apart in a few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY_LIMITS = ("keep_window_size", "index_topk", "indexer_budget")
"""Settings of configurations: the number of keys that attention keeps (Doge, DeepSeek V3.2, Qwen 4)."""


def hard_choices(model: PreTrainedModel) -> tuple[str, ...]:
    """Name what a model takes by the order of scores, for messages: experts, keys; empty for other models."""
    choices = []
    if any("experts" in name.rpartition(".")[2] for name, _ in model.named_modules()):
        choices.append("experts")
    config = model.config.get_text_config()
    choices += [f"the keys of attention ({name})" for name in KEY_LIMITS if getattr(config, name, None)]
    return tuple(choices)
