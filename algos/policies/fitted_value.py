"""`FittedValue`: a linear value head that is fitted in closed form to the returns of each rollout."""

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.policies.policy import Policy
from algos.ranks import collectives
from textenv.rollout import episode_of_row, following

FOLDS = 4
"""Number of parts into which `FittedValue.fit` splits the rows of a rollout."""
DECAYS = (0.0, 0.8)
"""Weights of earlier rollouts that a fit tries. The last one is also the factor by which the sums of earlier rollouts
decay at each rollout."""
RIDGES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
"""Strengths of the ridge that a fit tries, relative to the variance of the features."""
CANDIDATES = tuple(product(DECAYS, RIDGES))
"""Pairs of weight and strength that a fit tries. The first ones are those without earlier rollouts."""


class FittedValue:
    """Fits a policy's linear value head to each rollout in closed form (``config.fit_value_head``).

    It remembers statistics of earlier rollouts, which checkpoints save.
    """

    def __init__(self) -> None:
        self.statistics: dict[str, Tensor] = {}
        """Center and scale of the first rollout's features, sums over earlier rollouts, and squared errors of the
        `CANDIDATES`; empty before the first rollout."""

    @torch.no_grad()
    def __call__(self, policy: Policy, rollout: TensorDict, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Fit the policy's value head to a rollout; return the two tensors of `Policy.values`.

        The values of an episode come from a fit to other episodes and to earlier rollouts.

        Args:
            policy: has a `Policy.linear_value`, whose weights are changed.
            rollout: ``[B, T]``.
            returns: return from each entry on, ``[B, T]``.
        """
        mask = rollout["mask"]
        done = rollout["terminated"] | rollout["truncated"]
        linear_value = policy.linear_value
        assert linear_value is not None, "the agent has checked that the policy has a linear value head"
        features = collectives.map_rows(linear_value.features, rollout)
        value = self.fit(
            linear_value.weights,
            linear_value.bias,
            features,
            returns=returns,
            mask=mask,
            fold_of_row=episode_of_row(rollout) % FOLDS,
        )
        return value[:, :-1], following(value, mask=mask, done=done)

    @torch.no_grad()
    def fit(
        self,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        features: Sequence[Tensor],
        *,
        returns: Tensor,
        mask: Tensor,
        fold_of_row: Tensor | None = None,
    ) -> Tensor:
        """Fit a linear value in closed form; return values ``[B, L]`` by fits that have not seen their row.

        Rows are split into folds. The values of a fold come from a ridge regression on the other folds and on earlier
        rollouts, so no value depends on the return of its own row, as in RLOO. The weight of earlier rollouts and the
        strength of the ridge are chosen by their errors: on earlier rollouts, or in the first rollout on the other
        folds. Finally, ``weights`` and ``bias`` are fitted to all rows. If a number is not finite, nothing changes.

        Args:
            weights: ``[H]`` for each kind of features, changed in place.
            bias: ``[1]``, changed in place; None for no intercept.
            features: float32 ``[B, L, H]`` for each kind, L > T; the ridge treats kinds alike, whatever their scale.
            returns: return from each entry on, ``[B, T]``.
            mask: bool ``[B, T]``.
            fold_of_row: int64 ``[B]``, below `FOLDS`; all rows of an episode need the same. None: each row is an
                episode.
        """
        if fold_of_row is None:
            fold_of_row = torch.arange(len(mask), device=mask.device) % FOLDS
        sizes = [len(weight) for weight in weights]
        x = torch.cat(list(features), dim=-1)  # [B, L, H of all kinds]
        target = returns[mask]
        fit_features = x[:, : mask.shape[1]][mask]
        all_finite = fit_features.isfinite().all() and target.isfinite().all()
        if not (len(target) and all_finite):
            intercept: Tensor | float = 0.0
            if bias is not None:
                intercept = bias
            return x @ torch.cat(list(weights)) + intercept

        # Standardize with center and scale of the first rollout, because float32 is too coarse for features far from 0.
        # Append a constant feature for the bias
        if not self.statistics:
            self.statistics = _first_statistics(fit_features, sizes, centered=bias is not None)
        # A checkpoint is read on the CPU
        self.statistics = {name: statistic.to(x.device) for name, statistic in self.statistics.items()}
        center = self.statistics["center"]
        scale = self.statistics["scale"]
        x = (x - center) / scale
        constant = torch.full_like(x[..., :1], float(bias is not None))
        x = torch.cat([x, constant], dim=-1)  # [B, L, H + 1]

        # Fit
        fold_of_entry = fold_of_row[mask.nonzero()[:, 0]]
        fit_features = x[:, : mask.shape[1]][mask]
        folds = []
        for fold in range(FOLDS):
            in_fold = fold_of_entry == fold
            folds.append((fit_features[in_fold], target[in_fold]))
        solution_of_fold, solution = _cross_fit(folds, self.statistics)

        # Write the fit to all rows, in terms of the raw features
        slope = solution[:-1] / scale
        for weight, part in zip(weights, slope.split(sizes), strict=True):
            weight.copy_(part)
        if bias is not None:
            bias.copy_(solution[-1:] - slope @ center)

        # Values of each row, by the fit to the other folds
        solution_of_row = solution_of_fold[fold_of_row].unsqueeze(-1)  # [B, H + 1, 1]
        return (x @ solution_of_row).squeeze(-1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics of the rollouts so far."""
        return self.statistics

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.statistics = dict(state)


def _first_statistics(features: Tensor, sizes: Sequence[int], *, centered: bool) -> dict[str, Tensor]:
    """Return center and scale of a first rollout's features ``[N, H]``, and empty sums over earlier rollouts.

    All features of a kind get the same scale; ``sizes`` has the number of features of each kind.
    """
    center = features.mean(0) if centered else torch.zeros_like(features[0])
    scales = []
    for size, part in zip(sizes, (features - center).split(list(sizes), dim=1), strict=True):
        root_mean_square = part.square().mean().sqrt().clamp(min=1e-6)
        scales.append(root_mean_square.expand(size))
    sums = features.new_zeros(len(center) + 1, len(center) + 2)
    return {"center": center, "scale": torch.cat(scales), "sums": sums}


def _cross_fit(folds: Sequence[tuple[Tensor, Tensor]], statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Solve for each fold from the others ``[FOLDS, H + 1]``, and for all ``[H + 1]``; update ``statistics``.

    Args:
        folds: features ``[N, H + 1]``, the last of them constant, and targets ``[N]`` of each fold.
        statistics: sums ``[H + 1, H + 2]`` and, after the first rollout, squared errors of the candidates.
    """
    # Sums XᵀX and Xᵀy of each fold, [FOLDS, H + 1, H + 2]
    sums = torch.stack([x.T @ torch.cat([x, y[:, None]], dim=1) for x, y in folds])
    total = sums.sum(0)

    def sums_without(*left_out: int) -> Tensor:
        """Add up the sums of the other folds. ``total`` minus a fold would keep rounding errors of that fold."""
        kept = [fold for fold in range(FOLDS) if fold not in left_out]
        return sums[kept].sum(0)

    def solve(fold_sums: Tensor, candidates: Sequence[tuple[float, float]] = CANDIDATES) -> Tensor:
        """Solutions ``[candidates, H + 1]``."""
        return torch.stack([_ridge(fold_sums + decay * statistics["sums"], ridge) for decay, ridge in candidates])

    def squared_errors(solutions: Tensor, fold: int) -> Tensor:
        """Sum of squared errors in a fold ``[candidates]``."""
        x, y = folds[fold]
        return (y[:, None] - x @ solutions.T).square().sum(0)

    # All candidates for each fold, fitted to the other folds
    solutions = [solve(sums_without(fold)) for fold in range(FOLDS)]
    errors = torch.stack([squared_errors(solutions[fold], fold) for fold in range(FOLDS)])

    # The candidate of each fold: chosen without its targets
    if "errors" in statistics:
        best_candidates = [int(statistics["errors"].argmin())] * FOLDS
        errors = torch.cat([errors, DECAYS[-1] * statistics["errors"][None]])
    else:
        without_earlier = CANDIDATES[: len(RIDGES)]
        best_candidates = []
        for fold in range(FOLDS):
            errors_elsewhere = []
            for tested in range(FOLDS):
                if tested != fold:
                    fitted = solve(sums_without(fold, tested), without_earlier)
                    errors_elsewhere.append(squared_errors(fitted, tested))
            best_candidates.append(int(torch.stack(errors_elsewhere).sum(0).argmin()))
    solution_of_fold = torch.stack([solutions[fold][best_candidates[fold]] for fold in range(FOLDS)])

    # The fit to all folds, by the candidate that is best so far
    errors = errors.sum(0)
    best_candidate = CANDIDATES[int(errors.argmin())]
    solution = solve(total, [best_candidate])[0]
    statistics["errors"] = errors
    statistics["sums"] = total + DECAYS[-1] * statistics["sums"]
    return solution_of_fold, solution


def _ridge(sums: Tensor, strength: float) -> Tensor:
    """Solve least squares with a ridge from sums ``[H, H + 1]``; the last feature is the constant.

    The strength is relative to the mean variance of the features.
    """
    gram = sums[:, :-1]  # XᵀX: [H, H]
    moment = sums[:, -1]  # Xᵀy: [H]
    count = gram[-1, -1].clamp(min=1.0)  # of entries: the sum of squares of the constant feature, 1 (or 0 without bias)

    # Ridge on each feature, in proportion to the squared distances from the means; the intercept is hardly penalized
    total_variation = gram.diagonal().sum() - gram[-1].square().sum() / count
    ridge = (total_variation / (len(gram) - 1)).clamp(min=1e-6).repeat(len(gram))
    ridge[-1] *= 1e-9

    # Only the mean, if the matrix is singular because the features hardly vary
    solution, _ = torch.linalg.solve_ex(gram + (strength * ridge).diag(), moment)
    if not solution.isfinite().all():
        solution = torch.zeros_like(moment)
        solution[-1] = moment[-1] / count
    return solution
