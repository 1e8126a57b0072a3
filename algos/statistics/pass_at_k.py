"""pass@k and maj@k of the samples of one prompt, without bias: the mean over all subsets of k samples, exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(passes: Sequence[bool] | np.ndarray, k: int) -> float:
    """Return the probability that at least one of k samples passes: 1 − C(n−c, k) / C(n, k) (Chen et al. 2021).

    It is computed as a product of n − c + 1 … n, as there, because the binomials themselves overflow.

    Args:
        passes: bool ``[n]``, whether each sample passes; c of them do.
        k: number of samples, from 1 to n.

    Example:
        >>> pass_at_k([True, False, False, False], 2)  # 3 of the 6 pairs have the first sample
        0.5
    """
    num_samples = len(passes)
    num_passed = int(np.sum(passes))
    if num_samples - num_passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def majority_at_k(answers: Sequence[Hashable | None], passes: Sequence[bool] | np.ndarray, k: int) -> float:
    """Return the probability that the most frequent answer of k samples passes, over all subsets of k samples.

    Of answers that are equally frequent, each is chosen with the same probability. If samples with the chosen answer do
    not all pass or all fail (a reward may look at more than the answer), one of them is chosen at random. A subset
    without answers fails.

    The subsets are not enumerated: the counts of the answers in a subset have a multivariate hypergeometric
    distribution. For each number of votes of the winner, the answers are added one after another.

    Args:
        answers: answer of each sample, ``[n]``; None abstains from the vote.
        passes: bool ``[n]``, whether each sample passes.
        k: number of samples, from 1 to n.

    Example:
        >>> majority_at_k(["12", "12", "7"], [True, True, False], 3)
        1.0
        >>> majority_at_k(["12", "12", "7"], [True, True, False], 2)  # 1 once, and twice a tie
        0.6666666666666666
    """
    # Votes of each answer, and how many of these samples pass
    num_votes: dict[Hashable, int] = {}
    num_passed: dict[Hashable, int] = {}
    for answer, has_passed in zip(answers, passes, strict=True):
        if answer is not None:
            num_votes[answer] = num_votes.get(answer, 0) + 1
            num_passed[answer] = num_passed.get(answer, 0) + bool(has_passed)
    num_abstentions = len(answers) - sum(num_votes.values())

    # With all samples there is one subset
    pass_rates = {answer: num_passed[answer] / votes for answer, votes in num_votes.items()}
    if k == len(answers):
        most_votes = max(num_votes.values(), default=0)
        winners = [pass_rates[answer] for answer, votes in num_votes.items() if votes == most_votes]
        if not winners:
            return 0.0
        return sum(winners) / len(winners)

    probability = 0.0
    for winning_votes in range(1, min(k, max(num_votes.values(), default=0)) + 1):
        probability += _passes_with_votes(num_votes, pass_rates, num_abstentions, winning_votes, k)
    return probability


def _passes_with_votes(
    num_votes: dict[Hashable, int],
    pass_rates: dict[Hashable, float],
    num_abstentions: int,
    winning_votes: int,
    k: int,
) -> float:
    """Return the probability that the winner of k samples has exactly these votes, and passes."""
    most_winners = k // winning_votes

    # `chance[s, t]`: probability that of s samples of the answers so far none has more votes than the winner, and t
    # answers have as many. `passing[s, t]`: the same, times the sum of the pass rates of these t answers.
    chance = np.zeros((k + 1, most_winners + 1))
    passing = np.zeros((k + 1, most_winners + 1))
    for drawn in range(min(k, num_abstentions) + 1):
        chance[drawn, 0] = 1.0
    num_samples = num_abstentions

    for answer, votes in num_votes.items():
        new_chance = np.zeros_like(chance)
        new_passing = np.zeros_like(passing)
        for drawn in range(min(votes, winning_votes) + 1):
            # Probability that `drawn` of s + drawn samples are of this answer, for all s up to k − drawn
            weights = np.zeros((k + 1 - drawn, 1))
            for earlier in range(min(k - drawn, num_samples) + 1):
                weights[earlier] = _hypergeometric(num_samples, earlier, votes, drawn)
            if drawn < winning_votes:
                new_chance[drawn:] += weights * chance[: k + 1 - drawn]
                new_passing[drawn:] += weights * passing[: k + 1 - drawn]
            else:
                one_more = weights * chance[: k + 1 - drawn, :-1]
                new_chance[drawn:, 1:] += one_more
                new_passing[drawn:, 1:] += weights * passing[: k + 1 - drawn, :-1] + one_more * pass_rates[answer]
        chance = new_chance
        passing = new_passing
        num_samples += votes

    return float((passing[k, 1:] / np.arange(1, most_winners + 1)).sum())


@functools.lru_cache(maxsize=2**16)  # each number of winning votes, and each prompt, needs the same ones
def _hypergeometric(num_others: int, others_drawn: int, votes: int, votes_drawn: int) -> float:
    """Return the probability of these draws from two kinds, C(others) · C(votes) / C(all), from exact integers."""
    ways = math.comb(num_others, others_drawn) * math.comb(votes, votes_drawn)
    return ways / math.comb(num_others + votes, others_drawn + votes_drawn)
