"""Diagnosis of a violated invariant: find its cause and write the batch to the run's folder."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from algos.training.invariants import CAUSES, NonFiniteError, first_not_finite, not_finite
from textenv.errors import NAMED, PLACE, InvariantError

BATCH_FILE, REPORT_FILE = "violation.safetensors", "violation.json"
"""Files in the run's folder: the batch's columns, and a description of the violation."""

TERM = (
    "The inputs of this term are finite. Are rewards too large to be squared in float32, or does a loss of your own "
    "divide by 0 or take its log?"
)
GRADIENT = "Every term of the loss is finite. Is the learning rate too high, or a function without a gradient there?"

LossOf = Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""Function from a part of a minibatch to its loss, and quantities for the log."""


def explain_step(
    loss_of: LossOf,
    parts: Sequence[TensorDict],
    *,
    parameters: Sequence[nn.Parameter],
    policy: Any,
    quantities: dict[str, Tensor],
    step: str,
) -> NonFiniteError:
    """Explain why a step's loss or gradient is not finite: name the first tensor that is not, and its rows.

    Bisection finds the first `NAMED` units (rows or single steps) whose own loss or gradient is not finite; then
    their columns, the policy's evaluation and their loss terms are checked, in the order of computation.

    Args:
        loss_of: the loss that failed.
        parts: all parts of the minibatch.
        parameters: the trained parameters.
        policy: its `evaluate` is called; None skips this check.
        quantities: values for the log, including ``update/grad_norm``.
        step: name of the step in the error message.
    """
    batch = parts[0] if len(parts) == 1 else TensorDict.cat(list(parts))
    found: list[int] = []
    start = 0
    for part in parts:
        found += [start + unit for unit in _spoilt_units(loss_of, part, parameters, most=NAMED - len(found))]
        start += len(part)
    bad = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    if found:
        tensor, bad[found], advice = _find_tensor(loss_of, batch[found], parameters, policy)
    else:  # the cause is another loss, or only the sum overflows
        tensor = _first_term(quantities) or "gradient"
        advice = GRADIENT if tensor == "gradient" else TERM
    values = ", ".join(f"{name} {x.item():.3g}" for name, x in quantities.items())
    return NonFiniteError(
        f"not finite, so {step} was not taken and the weights are unchanged ({values}). {advice}",
        tensor=tensor,
        batch=batch,
        bad=bad,
    )


def _spoilt_units(loss_of: LossOf, part: TensorDict, parameters: Sequence[nn.Parameter], *, most: int) -> list[int]:
    """Return the first units of a part whose own loss or gradient is not finite."""
    if most <= 0 or not len(part) or not _spoilt_parameters(loss_of, part, parameters):
        return []
    if len(part) == 1:
        return [0]
    half = len(part) // 2
    found = _spoilt_units(loss_of, part[:half], parameters, most=most)
    others = _spoilt_units(loss_of, part[half:], parameters, most=most - len(found))
    return found + [half + unit for unit in others]


def _spoilt_parameters(loss_of: LossOf, part: TensorDict, parameters: Sequence[nn.Parameter]) -> list[int] | None:
    """Return the indices of parameters whose gradient is not finite; all indices if the loss is not finite."""
    loss, _ = loss_of(part)
    if not loss.isfinite() or not loss.requires_grad:
        return [] if loss.isfinite() else list(range(len(parameters)))
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [i for i, slope in enumerate(slopes) if slope is not None and not slope.isfinite().all()]


def _find_tensor(
    loss_of: LossOf, units: TensorDict, parameters: Sequence[nn.Parameter], policy: Any
) -> tuple[str, Tensor, str]:
    """Return the name of the first non-finite tensor in some units, its position in them, and advice."""
    if (column := first_not_finite(units)) is not None:
        return *column, CAUSES[column[0]]
    everywhere = torch.ones(units.batch_size, dtype=torch.bool, device=units.device)
    everywhere = units["mask"] if "mask" in units.keys() else everywhere
    weights = dict(policy.named_parameters()) if isinstance(policy, nn.Module) else {}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            return name, everywhere, "The weights themselves are not finite: since loading, or since an earlier step?"
    if policy is not None:
        with torch.no_grad():
            evaluation = policy.evaluate(units)
        for name, said in evaluation._asdict().items():
            if said is not None and (bad := not_finite(said, units)).any():
                return f"evaluate().{name}", bad, "Did the policy overflow? Try a lower learning rate or another dtype."
    if (term := _first_term(loss_of(units)[1])) is not None:
        return term, everywhere, TERM
    spoilt = _spoilt_parameters(loss_of, units, parameters)
    names = [name for name, weight in weights.items() if spoilt and weight is parameters[spoilt[0]]]
    return f"gradient of {names[0]}" if names else "gradient", everywhere, GRADIENT


def _first_term(quantities: dict[str, Tensor]) -> str | None:
    """Return the log name of the first loss term that is not finite."""
    terms = (name for name in quantities if not name.startswith("update/"))
    return next((name for name in terms if not math.isfinite(quantities[name].item())), None)


def write_violation(error: InvariantError, folder: str | Path, **when: Any) -> Path:
    """Write the batch of an error to ``violation.safetensors``, which `safetensors.torch.load_file` reads.

    Beside it ``violation.json`` has the error message, ``when``, and the columns that are not tensors.

    Args:
        error: an error with a batch.
        folder: the run's folder.
        when: steps and iteration, for JSON.

    Returns:
        The path of the first file.
    """
    from safetensors.torch import save_file

    assert error.batch is not None
    columns = {name: error.batch[name] for name in error.batch.keys()}
    tensors = {name: x for name, x in columns.items() if isinstance(x, Tensor)}
    if PLACE in tensors:
        place = tensors.pop(PLACE)
        tensors |= {"row": place >> 32, "column": place & (2**32 - 1)}
    # Cloned, because columns may be views of one tensor, which safetensors refuses.
    save_file({name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()}, Path(folder) / BATCH_FILE)
    others = {name: x for name, x in columns.items() if name not in tensors and name != PLACE}
    report = {"error": str(error), "tensor": error.tensor, "rows": error.rows} | when | {"others": others}
    (Path(folder) / REPORT_FILE).write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    return Path(folder) / BATCH_FILE
