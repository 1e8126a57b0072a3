"""Dynamic sampling: groups without a learning signal are replaced by new ones (DAPO, Yu et al. 2025, section 3.2).

If all episodes of a group have the same return, all their advantages are 0. They cost as much as the others to
generate, and in the update they only make the weights of the others smaller. So `refill_groups` collects further groups
in their place. `algos.agent.Agent.collect` calls it if ``config.max_refills`` is not 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.advantages import episode_returns, standardize_in_group
from algos.collection import Collector
from algos.config import GroupsConfig, GRPOConfig
from algos.ranks import collectives
from algos.training.invariants import check_finite
from algos.training.metrics import EpisodeMeter, LeftOut, Metrics, count_turns
from textenv.envs.turn import Turn
from textenv.envs.vector_env import ScoredTurns, TextVectorEnv
from textenv.rewards.scores import merge
from textenv.rollout import episode_of_row, join_episodes, num_episodes_of


class _Collection(NamedTuple):
    """A rollout, by starts: a start is a prompt or reset seed, whose episodes are compared with one another.

    In a game of several agents a start has a group for each agent. They are kept or left out together.
    """

    rollout: TensorDict
    start_of_row: Tensor
    """int64 ``[B]``, numbers from 0 in the order of the rollout."""
    has_signal: Tensor
    """bool ``[starts]``: the returns of a group of the start differ."""
    scored_turns: ScoredTurns | None
    """Turns of the episodes; None in control."""


def refill_groups(collector: Collector, rollout: TensorDict, config: GroupsConfig) -> tuple[TensorDict, LeftOut]:
    """Replace groups without a signal by further ones, which are collected now.

    As many groups are collected as still lack a signal, and again, at most ``config.max_refills`` times. Then groups
    without a signal fill up the rollout, the earliest ones first, as if there were no refills. So a rollout always has
    its number of episodes: as many minibatches, the same weight of each episode, the same share for each rank.

    Only the environment's returns decide. A KL penalty in the reward is charged later, to the rollout that is
    returned. With ``normalize_each_reward`` a group has a signal if one of its rewards differs. Each rank refills its
    own part of the rollout.

    Args:
        collector: has collected the rollout, and collects more.
        rollout: this rank's part ``[b, t]``.
        config: says how often to refill, and the size of a group.

    Returns:
        This rank's part with other groups, in the order in which they were collected: the rollout itself if nothing
        was missing. And what was left out on all ranks.

    Raises:
        InvariantError: if a reward is not finite.
    """
    # Collect until nothing is missing
    collections = [_collection(collector, rollout, config)]
    num_starts = len(collections[0].has_signal)
    episodes_per_start = num_episodes_of(rollout) // num_starts
    missing = num_starts - int(collections[0].has_signal.sum())
    while missing and len(collections) <= config.max_refills:
        refill = collector.collect(num_episodes=missing * episodes_per_start, group_size=config.group_size)
        collections.append(_collection(collector, refill, config))
        missing -= int(collections[-1].has_signal.sum())

    # Keep the groups with a signal, and as many others as are needed
    kept_parts = []
    left_out_parts = []
    kept_starts = _kept_starts(collections, num_starts)
    for collection, is_kept in zip(collections, kept_starts, strict=True):
        is_kept_row = is_kept[collection.start_of_row]
        if is_kept_row.any():
            kept_parts.append(_rows(collection.rollout, is_kept_row))
        if not is_kept_row.all():
            left_out_parts.append(_rows(collection.rollout, ~is_kept_row))
    if len(collections) > 1:
        rollout = collectives.join_rows(kept_parts)
        _report(collector, collections, kept_starts)

    num_generated = sum(len(collection.has_signal) for collection in collections)
    counts: Metrics = {
        "refills/collections": len(collections) - 1,
        "refills/episodes": num_generated * episodes_per_start,
        "refills/groups": num_generated,
        "refills/left_out_groups": num_generated - num_starts,
        "refills/silent_groups": missing,
    }
    return rollout, _over_ranks(_left_out(left_out_parts, counts))


def _collection(collector: Collector, rollout: TensorDict, config: GroupsConfig) -> _Collection:
    """Find the starts of a rollout, and which of them have a signal; raise as `refill_groups`."""
    check_finite(rollout, "reward")  # a return that is not a number differs from none
    episodes = join_episodes(rollout)
    num_agents = 1
    if "agent" in rollout.keys():
        num_agents = int(rollout["agent"].max()) + 1
    starts, start_of_row = (rollout["group"][:, 0] // num_agents).unique(return_inverse=True)
    start_of_episode = torch.searchsorted(starts, episodes["group"][:, 0] // num_agents)
    has_signal = torch.zeros_like(starts, dtype=torch.bool)
    has_signal[start_of_episode[_differs(episodes, config)]] = True
    scored_turns = None
    if isinstance(collector.env, TextVectorEnv):
        scored_turns = collector.env.scored_turns
    return _Collection(rollout, start_of_row, has_signal, scored_turns)


def _differs(episodes: TensorDict, config: GroupsConfig) -> Tensor:
    """Return where an episode's return, or one of its rewards, differs from the mean of its group, bool ``[E]``.

    In a group with a signal this is so for some episodes, in another for none.
    """
    group = episodes["group"][:, 0]
    included = episodes["mask"].any(dim=1)
    scores = [(episode_returns(episodes), included)]
    if isinstance(config, GRPOConfig) and config.normalize_each_reward and "reward_parts" in episodes.keys():
        scores = []
        for part in episodes["reward_parts"][:, 0].unbind(1):
            score, weight = part.unbind(1)
            scores.append((score, included & (weight != 0)))
    differs = torch.zeros_like(included)
    for score, counts in scores:
        centred = standardize_in_group(score=score, group=group, counts=counts, scale=False)
        differs = differs | (centred != 0)
    return differs


def _kept_starts(collections: Sequence[_Collection], num_starts: int) -> Sequence[Tensor]:
    """Return for each collection which starts are learnt from, bool ``[starts]``; they are ``num_starts`` in all."""
    has_signal = torch.cat([collection.has_signal for collection in collections])
    num_silent = num_starts - int(has_signal.sum())
    silent_starts = (~has_signal).nonzero().flatten()
    is_kept = has_signal.clone()
    is_kept[silent_starts[:num_silent]] = True
    return is_kept.split([len(collection.has_signal) for collection in collections])


def _rows(rollout: TensorDict, is_selected: Tensor) -> TensorDict:
    """Return the selected rows, bool ``[B]``, of whole episodes, which are numbered from 0 again."""
    rows = rollout[is_selected]
    if "episode" in rows.keys():
        _, episode = episode_of_row(rows).unique(return_inverse=True)
        rows["episode"] = episode[:, None].expand(rows.shape)
    return rows


def _report(collector: Collector, collections: Sequence[_Collection], kept_starts: Sequence[Tensor]) -> None:
    """Give a text environment all turns that were generated, for its metrics.

    For its samples the episodes have the numbers of the new rollout, and those that were left out come after them.
    """
    env = collector.env
    if not isinstance(env, TextVectorEnv):
        return

    # New numbers of the episodes of each collection
    episodes_were_kept = []
    for collection, is_kept in zip(collections, kept_starts, strict=True):
        was_kept = is_kept.new_zeros(num_episodes_of(collection.rollout))
        was_kept[episode_of_row(collection.rollout)] = is_kept[collection.start_of_row]
        episodes_were_kept.append(was_kept)
    was_kept = torch.cat(episodes_were_kept)
    new_number = torch.where(was_kept, was_kept.cumsum(0) - 1, was_kept.sum() + (~was_kept).cumsum(0) - 1)

    # Their turns and scores
    turns: list[Turn] = []
    episodes: list[int] = []
    scores_of_turns = []
    first_episode = 0
    for collection, was_kept in zip(collections, episodes_were_kept, strict=True):
        assert collection.scored_turns is not None
        new_turns, numbers, scores = collection.scored_turns
        scores_of_turns.append((range(len(turns), len(turns) + len(new_turns)), scores))
        turns += new_turns
        episodes += [int(new_number[first_episode + number]) for number in numbers]
        first_episode += len(was_kept)
    env.report(turns, episodes, merge(len(turns), scores_of_turns))


def _left_out(parts: Sequence[TensorDict], counts: Metrics) -> LeftOut:
    """Return what is logged and counted of the rows that were left out."""
    returns = []
    lengths = []
    num_steps = 0
    num_turns = 0
    for part in parts:
        part_returns, part_lengths = EpisodeMeter().finished(part)
        returns += part_returns
        lengths += part_lengths
        num_steps += int(part["mask"].sum())
        num_turns += count_turns(part["mask"])
    return LeftOut(returns, lengths, steps=num_steps, turns=num_turns, metrics=counts)


def _over_ranks(left_out: LeftOut) -> LeftOut:
    """Return what was left out on all ranks: sums, but the largest number of collections."""
    of_ranks = collectives.gather(left_out)
    metrics = {name: sum(rank.metrics[name] for rank in of_ranks) for name in left_out.metrics}
    metrics["refills/collections"] = max(rank.metrics["refills/collections"] for rank in of_ranks)
    return LeftOut(
        returns=[x for rank in of_ranks for x in rank.returns],
        lengths=[x for rank in of_ranks for x in rank.lengths],
        steps=sum(rank.steps for rank in of_ranks),
        turns=sum(rank.turns for rank in of_ranks),
        metrics=metrics,
    )
