"""Diagnosis of a violated invariant: find its cause and write the batch to the run's folder."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from algos.policies.policy import Policy
from algos.storage.run_files import VIOLATION_BATCH, VIOLATION_REPORT
from algos.training.invariants import CAUSES, NonFiniteError, first_not_finite, not_finite
from textenv.errors import MAX_LISTED_ENTRIES, PLACE, InvariantError

TERM_ADVICE = (
    "The inputs of this term are finite. Are rewards too large to be squared in float32, or does a loss of your own "
    "divide by 0 or take its log?"
)
GRADIENT_ADVICE = (
    "Every term of the loss is finite. Is the learning rate too high, or a function without a gradient there?"
)
WEIGHTS_ADVICE = "The weights themselves are not finite: since loading, or since an earlier step?"
OVERFLOW_ADVICE = "Did the policy overflow? Try a lower learning rate or another dtype."

LossOf = Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""Function from a part of a minibatch to its loss, and quantities for the log."""


def explain_step(
    loss_of: LossOf,
    parts: Sequence[TensorDict],
    *,
    parameters: Sequence[nn.Parameter],
    policy: Policy | None,
    quantities: dict[str, Tensor],
    step: str,
) -> NonFiniteError:
    """Return the error for a loss or gradient that is not finite: it names the first such tensor, and its rows.

    Bisection finds the first `MAX_LISTED_ENTRIES` units (rows or single steps) whose own loss or gradient is not
    finite. Then their columns, the policy's evaluation and their loss terms are checked, in the order of computation.

    Args:
        loss_of: the loss that failed.
        parts: all parts of the minibatch.
        parameters: the trained parameters.
        policy: the policy, whose `evaluate` is called; None skips this check.
        quantities: values for the log, including ``update/grad_norm``.
        step: name of the step in the error message.
    """
    batch = parts[0]
    if len(parts) > 1:
        batch = TensorDict.cat(list(parts))

    # Units whose own loss or gradient is not finite
    units: list[int] = []
    start = 0
    for part in parts:
        units_of_part = _nonfinite_units(loss_of, part, parameters, most=MAX_LISTED_ENTRIES - len(units))
        units += [start + unit for unit in units_of_part]
        start += len(part)

    # The first tensor that is not finite
    bad = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    if units:
        tensor, bad_in_units, advice = _first_nonfinite_tensor(loss_of, batch[units], parameters, policy)
        bad[units] = bad_in_units
    else:  # the cause is another loss, or only the sum overflows
        tensor = "gradient"
        advice = GRADIENT_ADVICE
        term = _first_nonfinite_term(quantities)
        if term is not None:
            tensor = term
            advice = TERM_ADVICE
    values = ", ".join(f"{name} {x.item():.3g}" for name, x in quantities.items())
    return NonFiniteError(
        f"not finite, so {step} was not taken and the weights are unchanged ({values}). {advice}",
        tensor=tensor,
        batch=batch,
        bad=bad,
    )


def _nonfinite_units(loss_of: LossOf, part: TensorDict, parameters: Sequence[nn.Parameter], *, most: int) -> list[int]:
    """Return the first units of a part whose own loss or gradient is not finite, at most so many."""
    if most <= 0 or not len(part) or not _nonfinite_parameters(loss_of, part, parameters):
        return []
    if len(part) == 1:
        return [0]

    half = len(part) // 2
    first = _nonfinite_units(loss_of, part[:half], parameters, most=most)
    second = _nonfinite_units(loss_of, part[half:], parameters, most=most - len(first))
    return first + [half + unit for unit in second]


def _nonfinite_parameters(loss_of: LossOf, part: TensorDict, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the indices of parameters whose gradient is not finite; all indices if the loss is not finite."""
    loss, _ = loss_of(part)
    if not loss.isfinite():
        return list(range(len(parameters)))
    if not loss.requires_grad:
        return []
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    indices = []
    for i, gradient in enumerate(gradients):
        if gradient is not None and not gradient.isfinite().all():
            indices.append(i)
    return indices


def _first_nonfinite_tensor(
    loss_of: LossOf, units: TensorDict, parameters: Sequence[nn.Parameter], policy: Policy | None
) -> tuple[str, Tensor, str]:
    """Find the first tensor in some units that is not finite, in the order of computation.

    Returns:
        Name of the tensor; bool tensor of the units' shape, True where it is not finite (everywhere, if that cannot be
        said); and advice.
    """
    # Columns
    column = first_not_finite(units)
    if column is not None:
        name, bad = column
        return name, bad, CAUSES[name]

    # Weights
    everywhere = torch.ones(units.batch_size, dtype=torch.bool, device=units.device)
    if "mask" in units.keys():
        everywhere = units["mask"]
    weights: dict[str, nn.Parameter] = {}
    if isinstance(policy, nn.Module):
        weights = dict(policy.named_parameters())
    for name, weight in weights.items():
        if not weight.isfinite().all():
            return name, everywhere, WEIGHTS_ADVICE

    # The policy's evaluation
    if policy is not None:
        with torch.no_grad():
            evaluation = policy.evaluate(units)
        for name, output in evaluation._asdict().items():
            if output is None:
                continue
            bad = not_finite(output, units)
            if bad.any():
                return f"evaluate().{name}", bad, OVERFLOW_ADVICE

    # Terms of the loss
    _, quantities = loss_of(units)
    term = _first_nonfinite_term(quantities)
    if term is not None:
        return term, everywhere, TERM_ADVICE

    # Gradient
    indices = _nonfinite_parameters(loss_of, units, parameters)
    if indices:
        for name, weight in weights.items():
            if weight is parameters[indices[0]]:
                return f"gradient of {name}", everywhere, GRADIENT_ADVICE
    return "gradient", everywhere, GRADIENT_ADVICE


def _first_nonfinite_term(quantities: dict[str, Tensor]) -> str | None:
    """Return the log name of the first loss term that is not finite."""
    for name, quantity in quantities.items():
        if not name.startswith("update/") and not math.isfinite(quantity.item()):
            return name
    return None


def write_violation(error: InvariantError, folder: str | Path, **when: int) -> Path:
    """Write the batch of an error to ``violation.safetensors``, which `safetensors.torch.load_file` reads.

    ``violation.json`` gets the error message, ``when``, and the columns that are not tensors.

    Args:
        error: an error with a batch.
        folder: the run's folder.
        when: steps and iteration, for JSON.

    Returns:
        The path of ``violation.safetensors``.
    """
    from safetensors.torch import save_file

    assert error.batch is not None
    columns = {name: error.batch[name] for name in error.batch.keys()}

    # Tensors; positions in the rollout become two columns
    tensors = {name: column for name, column in columns.items() if isinstance(column, Tensor)}
    if PLACE in tensors:
        position = tensors.pop(PLACE)
        tensors["row"] = position >> 32
        tensors["column"] = position & (2**32 - 1)
    # Cloned, because columns may be views of one tensor, which safetensors refuses.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    batch_path = Path(folder) / VIOLATION_BATCH
    save_file(copies, batch_path)

    # The error, and the other columns
    other_columns = {name: column for name, column in columns.items() if name not in tensors and name != PLACE}
    report = {"error": str(error), "tensor": error.tensor, "rows": error.rows} | when | {"others": other_columns}
    report_path = Path(folder) / VIOLATION_REPORT
    report_path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    return batch_path
