"""`InvariantError`: a condition that must always hold during training is violated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

PLACE = "place"
"""Column of minibatches, int64: ``row * 2**32 + column`` of each entry's position in the rollout."""
NAMED = 8
"""Maximum number of entries listed in an error."""


class InvariantError(RuntimeError):
    """A violated invariant; training stops, and the batch is saved in the run's folder.

    Args:
        message: what was found, what was expected, and the possible cause.
        tensor: name of the offending tensor: a column, a term of the loss, or a parameter.
        batch: batch that was processed.
        bad: bool, with the batch's shape: True at the offending entries; None if the tensor is not in the batch.

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
        """Indices of the first `NAMED` offending entries, in the rollout if known, else in the batch."""
        where = ""
        if batch is not None and bad is not None and bad.any():
            self.rows, count = _places(batch, bad), int(bad.sum())
            entries, whole = ("1 entry" if count == 1 else f"{count} entries"), PLACE in batch.keys() or batch.ndim == 2
            kind = "[row, column]" if len(self.rows[0]) == 2 else "[row]"
            named = ", ".join(map(str, self.rows)) + (", ..." if count > len(self.rows) else "")
            where = f" It is at {kind} {named} of the {'rollout' if whole else 'batch'}, {entries} in all."
        super().__init__(f"{tensor}: {message}{where}")


def _places(batch: TensorDict, bad: Tensor) -> list[list[int]]:
    if PLACE not in batch.keys():
        return bad.nonzero()[:NAMED].tolist()
    return [[place >> 32, place & (2**32 - 1)] for place in batch[PLACE][bad][:NAMED].tolist()]
