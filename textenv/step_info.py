"""What `step` says beside observation and reward, in the form that Gymnasium's vector environments give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from textenv.envs.turn import Turn


def end_info(num_envs: int, over: Mapping[int, Turn], reasons: Sequence[str]) -> dict[str, Any]:
    """``end_reason``, ``prompt`` and ``completion`` of the slots whose episode is over, by its last turn."""
    if not over:
        return {}
    info = {name: np.full(num_envs, None, dtype=object) for name in ("end_reason", "prompt", "completion")}
    for slot, turn in over.items():
        info["end_reason"][slot] = reasons[slot]
        info["prompt"][slot], info["completion"][slot] = turn.prompt_text, turn.completion
    here = np.isin(np.arange(num_envs), list(over))
    return info | {f"_{name}": here.copy() for name in info}


def final_info(observation: Mapping[str, np.ndarray], done: np.ndarray, info: dict[str, Any]) -> dict[str, Any]:
    """What SAME_STEP mode says of the episodes that ended: as Gymnasium does, an object array with holes."""
    final = np.full(len(done), None, dtype=object)
    for slot in np.flatnonzero(done):
        final[slot] = {name: column[slot] for name, column in observation.items()}
    return {"final_obs": final, "_final_obs": done, "final_info": info, "_final_info": done.copy()}
