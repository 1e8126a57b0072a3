"""`LogProbs`: log-probabilities of the tokens of a text rollout, recorded while it is played."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from textenv.rollout import in_order


class LogProbs:
    """Log-probabilities by row and column of the next rollout, whose number of rows is not known in advance."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def record(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray | Sequence[float]) -> None:
        """Record log-probabilities, nats, of the actions at these rows and columns; all three are ``[n]``."""
        self._rows.append(rows.copy())
        self._columns.append(columns.copy())
        self._values.append(np.asarray(values, dtype=np.float32))

    def added_to(self, rollout: TensorDict) -> TensorDict:
        """Return the rollout with the column ``log_prob``, 0 where none was recorded, and its rows `in_order`."""
        column = np.zeros(rollout.shape, dtype=np.float32)
        if self._rows:
            index = (np.concatenate(self._rows), np.concatenate(self._columns))
            column[index] = np.concatenate(self._values)
        rollout["log_prob"] = torch.from_numpy(column)
        return in_order(rollout)
