"""`InvariantError`: a condition that must always hold during training is violated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

PLACE = "place"
"""Column of minibatches, int64: each entry's position in the rollout, as ``row * 2**32 + column``."""
MAX_LISTED_ENTRIES = 8
"""Maximum number of entries that an error lists."""


class InvariantError(RuntimeError):
    """A violated invariant; training stops, and the batch is saved in the run's folder.

    Args:
        message: what was found, what was expected, and the possible cause.
        tensor: name of the offending tensor: a column, a term of the loss, or a parameter.
        batch: the batch that was processed.
        bad: bool, with the batch's shape, True at the offending entries; None if the tensor is not in the batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"reward": torch.tensor([[0.0, torch.inf]])}, batch_size=[1, 2])
        >>> print(InvariantError("infinite.", tensor="reward", batch=batch, bad=batch["reward"].isinf()))
        reward: infinite. It is at [row, column] [0, 1] of the rollout, 1 entry in all.
    """

    def __init__(
        self, message: str, *, tensor: str, batch: TensorDict | None = None, bad: Tensor | None = None
    ) -> None:
        self.tensor = tensor
        """Name of the offending tensor."""
        self.batch = None if batch is None else batch.detach()
        """The offending batch."""
        self.rows: list[list[int]] = []
        """Indices of the first `MAX_LISTED_ENTRIES` offending entries, in the rollout if known, else in the batch."""
        location = ""
        if batch is not None and bad is not None and bad.any():
            self.rows = _indices(batch, bad)
            location = " " + _location(batch, self.rows, count=int(bad.sum()))
        super().__init__(f"{tensor}: {message}{location}")


def _indices(batch: TensorDict, bad: Tensor) -> list[list[int]]:
    """Return the indices of the first offending entries, in the rollout if known, else in the batch."""
    if PLACE not in batch.keys():
        return bad.nonzero()[:MAX_LISTED_ENTRIES].tolist()
    indices = []
    for position in batch[PLACE][bad][:MAX_LISTED_ENTRIES].tolist():
        row = position >> 32
        column = position & (2**32 - 1)
        indices.append([row, column])
    return indices


def _location(batch: TensorDict, indices: list[list[int]], *, count: int) -> str:
    """Return a sentence that says where the ``count`` offending entries are; ``indices`` has the first ones."""
    kind = "[row, column]" if len(indices[0]) == 2 else "[row]"
    listed = ", ".join(map(str, indices))
    if count > len(indices):
        listed += ", ..."
    is_rollout = PLACE in batch.keys() or batch.ndim == 2
    owner = "rollout" if is_rollout else "batch"
    entries = "1 entry" if count == 1 else f"{count} entries"
    return f"It is at {kind} {listed} of the {owner}, {entries} in all."
