"""`KeptSets`: the tokens that top-k and top-p kept, recorded while a text rollout is played."""

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor


class KeptSets:
    """Sets of tokens that a truncated distribution could give; the number of a rollout's rows is not known before.

    With them policy, scorer and reference score the distribution that was sampled from. A set takes a byte for each
    token of the vocabulary.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._sets: list[Tensor] = []

    def record(self, rows: np.ndarray, columns: np.ndarray, kept: Tensor) -> None:
        """Record the sets, bool ``[n, tokens]``, of the actions at these rows and columns ``[n]``."""
        self._rows.append(rows.copy())
        self._columns.append(columns.copy())
        self._sets.append(kept)

    def added_to(self, rollout: TensorDict) -> TensorDict:
        """Return the rollout with ``allowed`` and ``allowed_sets`` (`textenv.rollout`), if any set was recorded.

        They replace the environment's, of which the sets are parts.
        """
        if not self._sets:
            return rollout
        sets = torch.cat(self._sets)
        every_token = torch.ones_like(sets[:1])
        index = np.zeros(rollout.shape, dtype=np.int64)
        index[np.concatenate(self._rows), np.concatenate(self._columns)] = np.arange(1, len(sets) + 1)
        rollout["allowed"] = torch.from_numpy(index)
        rollout["allowed_sets"] = NonTensorData(torch.cat([every_token, sets]), batch_size=rollout.batch_size)
        return rollout
