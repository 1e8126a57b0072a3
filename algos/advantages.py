"""Advantages and their normalization: pure functions over True entries (``mask`` is True).

Only the last part is no mathematics: the update of an actor-critic begins with `add_advantages`, which reads an agent,
and writes values and advantages into a rollout.
"""

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from algos.config import ActorCriticConfig, discount
from algos.ranks import collectives
from algos.training.learner import Learner
from algos.training.metrics import Metrics
from textenv.rollout import join_column, join_episodes, masked, masked_mean, next_values, split_column, waits_after

ROUNDING_SPREAD = 1e-6
"""Maximum standard deviation, relative to the largest magnitude, that counts as rounding error."""


@masked
def gae(
    *, reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor,
    gamma: float, gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalized advantage estimation over the True entries (Schulman et al. 2016, eq. 16).

    ``delta_t = r_t + gamma * next_value_t * (not terminated_t) - value_t`` and
    ``A_t = delta_t + gamma * lambda * A_next`` unless the episode was terminated or truncated at t, where *next* is
    the next True entry. A reward or an end on a False entry inside an episode belongs to the True entry before
    it; False entries after an episode's end have no effect.

    Args:
        reward: float32 ``[B, T]``, as are ``value`` and ``next_value``.
        value: value of the state at t.
        next_value: value of the episode's next True entry, or of its final observation.
        terminated: bool ``[B, T]``: episode over, ``next_value`` is not used.
        truncated: bool ``[B, T]``: episode cut, ``next_value`` is used.
        mask: bool ``[B, T]``.
        gamma: discount.
        gae_lambda: trace decay λ, a number or float32 ``[B, T]``.

    Returns:
        advantage and value target (advantage + value), float32 ``[B, T]``, 0 on False entries.
    """
    # NumPy, because torch is slower in loops over small arrays; time is the first axis.
    columns = (x.detach().cpu().numpy().T for x in (reward, value, next_value, terminated, truncated, mask))
    trace_decay: float | np.ndarray
    if isinstance(gae_lambda, Tensor):
        trace_decay = gae_lambda.cpu().numpy().T
    else:
        trace_decay = gae_lambda
    with np.errstate(all="ignore"):  # False entries may hold anything
        advantage, target = _gae(*columns, gamma=gamma, gae_lambda=trace_decay)
    return torch.from_numpy(advantage.T).to(value), torch.from_numpy(target.T).to(value)


def _gae(
    reward: np.ndarray, value: np.ndarray, next_value: np.ndarray, terminated: np.ndarray, truncated: np.ndarray,
    mask: np.ndarray, *, gamma: float, gae_lambda: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """`gae` on arrays ``[T, B]``."""
    reward, terminated, truncated = _fold(reward, terminated, truncated, mask)
    delta = np.where(mask, reward - value, 0) + np.where(mask & ~terminated, gamma * next_value, 0)
    # True entries decay the trace, episode ends cut it, False entries pass it on unchanged.
    decay = np.where(mask, gamma * gae_lambda * ~(terminated | truncated), 1).astype(delta.dtype)
    for t in reversed(range(len(delta) - 1)):
        delta[t] += decay[t] * delta[t + 1]
    return np.where(mask, delta, 0), np.where(mask, delta + value, 0)


def _fold(
    reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move rewards and ends on False entries inside an episode to the True entry before them."""
    done = terminated | truncated
    if not (mask[:-1] & ~done[:-1] & ~mask[1:]).any():  # no episode has such entries
        return reward, terminated, truncated
    reward = reward.copy()
    terminated = terminated.copy()
    truncated = truncated.copy()
    for t in reversed(range(len(mask) - 1)):
        # Later entries belong to this one, unless the episode ends here.
        later = ~mask[t + 1] & ~done[t]
        reward[t] += np.where(later, reward[t + 1], 0)
        terminated[t] |= later & terminated[t + 1]
        truncated[t] |= later & truncated[t + 1]
    return reward, terminated, truncated


def discounted_returns(
    *, reward: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor, gamma: float
) -> Tensor:  # fmt: skip
    """Discounted sum of rewards from each True entry to its episode's end: float32 ``[B, T]``, 0 elsewhere.

    Computed as `gae` with values of 0 and λ = 1; takes the same arguments.
    """
    zero = torch.zeros_like(reward)
    advantage, _ = gae(
        reward=reward, value=zero, next_value=zero, terminated=terminated, truncated=truncated, mask=mask,
        gamma=gamma, gae_lambda=1.0,
    )  # fmt: skip
    return advantage


def subtract_mean(x: Tensor, *, mask: Tensor) -> Tensor:
    """Subtract the mean over the True entries: REINFORCE's batch baseline (Williams 1992). 0 elsewhere."""
    return torch.where(mask, x - masked_mean(x, mask=mask), 0.0)


def leave_one_out(*, score: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    """Subtract the mean of the *other* scores of the group (Kool et al. 2019; Ahmadian et al. 2024, RLOO, eq. 9).

    Args:
        score: float32 ``[B]``, one per episode, as are the other rows here.
        group: int64 ``[B]``.
        counts: bool ``[B]``; rows with False are not used in baselines.

    Returns:
        float32 ``[B]``; 0 for rows that do not count, for rows alone in their group (no baseline), and in a group of
        equal scores.
    """
    total, size, has_signal = _group_statistics(score, group=group, counts=counts)
    baseline = (total - score) / (size - 1).clamp(min=1)  # mean of the other scores
    return torch.where(has_signal, score - baseline, 0.0)


def standardize_in_group(*, score: Tensor, group: Tensor, counts: Tensor, scale: bool = True) -> Tensor:
    """Subtract the group's mean and divide by its standard deviation (Shao et al. 2024, GRPO, section 4.1.2).

    Args:
        score: float32 ``[B]``, one per episode, as are the other rows here.
        group: int64 ``[B]``.
        counts: bool ``[B]``; rows with False do not enter mean or deviation.
        scale: False does not divide: dividing favours groups of little spread (Liu et al. 2025, "Dr. GRPO").

    Returns:
        float32 ``[B]``; 0 for rows that do not count, and in a group of equal scores.
    """
    total, size, has_signal = _group_statistics(score, group=group, counts=counts)
    centred = torch.where(has_signal, score - total / size.clamp(min=1), 0.0)
    if not scale:
        return centred
    squares, _, _ = _group_statistics(centred.square(), group=group, counts=counts)
    # Sample standard deviation (n - 1), plus TRL's small constant for groups of almost no spread.
    return centred / ((squares / (size - 1).clamp(min=1)).sqrt() + 1e-4)


def standardize_each_reward(*, parts: Tensor, charged: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    """Standardize each reward in its group, add them by weight, standardize the sum over the batch (Liu et al. 2026).

    Args:
        parts: float32 ``[B, K, 2]``: for each of K rewards, the unweighted reward and its weight. A weight of 0 means
            that the reward does not apply to the row.
        charged: float32 ``[B]``: further reward (a KL penalty). Its group's mean is subtracted; it is not scaled.
        group, counts: see `standardize_in_group`.

    Returns:
        float32 ``[B]``, with zeros where `standardize_in_group` has them.
    """
    total = standardize_in_group(score=charged, group=group, counts=counts, scale=False)
    for part in parts.unbind(1):
        score, weight = part.unbind(1)
        total += weight * standardize_in_group(score=score, group=group, counts=counts & (weight != 0))
    return standardize_in_group(score=total, group=torch.zeros_like(group), counts=counts)


def _group_statistics(x: Tensor, *, group: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row ``[B]``: sum and number of the values that count in its group, and whether the row has a signal.

    A row has a signal if it counts and the values of its group differ.
    """
    groups, index = group.unique(return_inverse=True)
    total = x.new_zeros(len(groups)).index_add_(0, index, torch.where(counts, x, 0.0))
    size = x.new_zeros(len(groups)).index_add_(0, index, counts.to(x.dtype))
    # Scores are compared for equality, because a rounding error of the mean is not a signal.
    low = x.new_full((len(groups),), torch.inf).scatter_reduce_(0, index, torch.where(counts, x, torch.inf), "amin")
    high = x.new_full((len(groups),), -torch.inf).scatter_reduce_(0, index, torch.where(counts, x, -torch.inf), "amax")
    values_differ = high > low
    return total[index], size[index], counts & values_differ[index]


@masked
def whiten(x: Tensor, *, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale to variance 1 over the True entries, and shift to mean 0 unless ``shift_mean`` is False.

    Args:
        x: ``[B, T]``.
        mask: bool ``[B, T]``; False entries have no effect and become 0.
        shift_mean: False keeps the mean.

    Returns:
        ``[B, T]``. A single entry, or entries that are equal up to rounding (`ROUNDING_SPREAD`), are not scaled: that
        would amplify rounding errors to size 1.
    """
    all_true = bool(mask.all())
    values = x if all_true else x[mask]
    if not values.numel():
        return torch.zeros_like(x)
    variance, mean = torch.var_mean(values, correction=0)
    std = variance.sqrt()
    varied = std > ROUNDING_SPREAD * values.abs().amax()
    scale = torch.where(varied, std + 1e-8, 1.0)
    white = (values - mean) / scale
    if not shift_mean:
        white = white + mean
    return white if all_true else torch.zeros_like(x).masked_scatter(mask, white)


def episode_returns(rollout: TensorDict) -> Tensor:
    """Sum of rewards of each row's episode, float32 ``[B]``, for rows of one episode; 0 for a row without a step.

    Episodes of several rows must have been joined (`textenv.rollout.join_episodes`).
    """
    rewards_to_go = discounted_returns(
        reward=rollout["reward"],
        terminated=rollout["terminated"],
        truncated=rollout["truncated"],
        mask=rollout["mask"],
        gamma=1.0,
    )
    first_step = rollout["mask"].int().argmax(1, keepdim=True)
    return rewards_to_go.gather(1, first_step).squeeze(1)


def after_waiting(*, next_value: Tensor, waits: Tensor) -> Tensor:
    """Bootstrap from the agent's own next turn.

    In turn-based games ``next_value`` belongs to an observation while another agent moves, for which no value is
    trained. So take the value of the first later observation in which this agent acts, or else of the last one.

    Args:
        next_value: float32 ``[B, T]``, value of the next observation, whoever acts then.
        waits: bool ``[B, T]``, where the agent waits after an entry (`textenv.rollout.waits_after`).
    """
    if not waits.any():
        return next_value
    next_value = next_value.clone()
    for t in reversed(range(waits.shape[1] - 1)):
        next_value[:, t] = torch.where(waits[:, t], next_value[:, t + 1], next_value[:, t])
    return next_value


def lambda_by_length(*, mask: Tensor, alpha: float) -> Tensor:
    """Trace decay of VAPO, 1 - 1/(α l) in a row of l steps and at least 0 (Yue et al. 2025, eq. 9).

    The weights λ^k of the temporal differences then add up to α l: they reach over the same fraction of each answer.

    Args:
        mask: bool ``[B, T]``; each row is an episode.
        alpha: α, above 0.

    Returns:
        float32 ``[B, T]``, the same number along each row.
    """
    length = mask.sum(1, keepdim=True).clamp(min=1)
    return (1 - 1 / (alpha * length)).clamp(min=0.0).expand(mask.shape)


# --- the update of an actor-critic -----------------------------------------------------------------------------------


def add_advantages(agent: Learner[ActorCriticConfig], rollout: TensorDict) -> Metrics:
    """Write ``value``, ``next_value``, ``advantage`` and ``value_target`` into a rollout, by GAE; return metrics.

    The rollout keeps the raw rewards; the advantages use scaled ones if the config asks for it.

    Args:
        agent: its policy provides the values, its config the discount, trace decay, reward clipping and scaling, and
            what ends an episode.
        rollout: ``[B, T]``, see `textenv.rollout`.
    """
    config = agent.config

    # Rows of one episode are one sequence; in most rollouts each row is an episode
    episodes = join_episodes(rollout)
    reward = _scaled_rewards(agent, episodes)

    # Values of the states, and of their successors in the same row, in the next one, or after waiting
    value, next_value, gae_lambda, metrics = _state_values(agent, rollout, episodes=episodes, reward=reward)
    next_value = next_values(rollout, value=value, next_value=next_value)
    if "next_observation" in rollout.keys():
        next_value = after_waiting(next_value=next_value, waits=waits_after(rollout))
    rollout["value"] = value
    rollout["next_value"] = next_value

    # Advantages and value targets, which may have a λ of their own
    inputs = {
        "reward": reward,
        "value": join_column(rollout["value"], rollout),
        "next_value": join_column(rollout["next_value"], rollout),
        "terminated": _ends(config, episodes),
        "truncated": episodes["truncated"],
        "mask": episodes["mask"],
    }
    advantage, value_target = gae(**inputs, gamma=discount(config.gamma), gae_lambda=gae_lambda)
    if config.value_gae_lambda is not None:
        _, value_target = gae(**inputs, gamma=discount(config.gamma), gae_lambda=config.value_gae_lambda)
    rollout["advantage"] = split_column(advantage, rollout)
    rollout["value_target"] = split_column(value_target, rollout)
    return metrics


def _scaled_rewards(agent: Learner[ActorCriticConfig], episodes: TensorDict) -> Tensor:
    """Return the rewards, float32 ``[E, T]``, clipped or scaled if the config asks for it."""
    config = agent.config
    reward = episodes["reward"]
    if config.clip_rewards is not None:
        reward = reward.clamp(-config.clip_rewards, config.clip_rewards)
        episodes = episodes.copy().set("reward", reward)
    if agent.reward_normalizer is not None:
        reward = agent.reward_normalizer(episodes)
    if config.whiten_rewards:
        reward = whiten(reward, mask=episodes["mask"], shift_mean=False)
    return reward


def _state_values(
    agent: Learner[ActorCriticConfig], rollout: TensorDict, *, episodes: TensorDict, reward: Tensor
) -> tuple[Tensor, Tensor, float | Tensor, Metrics]:
    """Return the values of states and successors, λ, and metrics. They are the critic's unless the config has others.

    Args:
        agent: has a policy with a critic or a linear head, or an `algos.vine.Vine`.
        rollout: ``[B, T]``.
        episodes: the same with one row for each episode, ``[E, T]``.
        reward: scaled rewards of these, ``[E, T]``.

    Returns:
        value and next_value, float32 ``[B, T]``, as `Policy.values` has them; gae_lambda, a number or float32
        ``[E, T]``; metrics.
    """
    config = agent.config

    # Means over sampled completions (VinePPO). Only between vine steps does λ apply; inside one it is 1
    if agent.vine is not None:
        vine_values = agent.vine(agent, rollout)
        gae_lambda_of_ends = torch.where(vine_values.ends, config.gae_lambda, 1.0)
        return vine_values.value, vine_values.next_value, gae_lambda_of_ends, vine_values.metrics

    # λ: constant, or by the length of the episode (VAPO)
    gae_lambda: float | Tensor = config.gae_lambda
    if config.length_adaptive_lambda is not None:
        gae_lambda = lambda_by_length(mask=episodes["mask"], alpha=config.length_adaptive_lambda)

    # The policy's critic; each rank evaluates its rows
    if agent.fitted_value is None:
        value, next_value = collectives.map_rows(agent.policy.values, rollout)
        return value, next_value, gae_lambda, {}

    # A linear head, fitted in closed form to the returns of other episodes of this rollout, and of earlier rollouts
    returns = discounted_returns(
        reward=reward,
        terminated=episodes["terminated"],
        truncated=episodes["truncated"],
        mask=episodes["mask"],
        gamma=discount(config.gamma),
    )
    value, next_value = agent.fitted_value(agent.policy, rollout, split_column(returns, rollout))
    return value, next_value, gae_lambda, {}


def _ends(config: ActorCriticConfig, episodes: TensorDict) -> Tensor:
    """Return the steps after which no value is added, bool ``[E, T]``."""
    ends = episodes["terminated"]

    # A lost life ends the episode, though the game goes on
    if config.end_with_life and "life_lost" in episodes.keys():
        ends = ends | episodes["life_lost"]

    # A limit without bootstrapping ends the episode like any other end
    if not config.bootstrap_truncated:
        ends = ends | episodes["truncated"]
    return ends
