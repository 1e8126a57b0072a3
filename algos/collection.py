"""Collecting rollouts: the only module that handles autoreset."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, pad

from algos import losses
from algos.envs.flatten import flatten, flatten_one
from algos.envs.spaces import fit_actions
from algos.envs.subprocess_env import FAILED
from algos.generator import Generator, collect_turns
from algos.policies.policy import Policy, check_policy, check_step, refuse_strings
from algos.policies.random_streams import episode_seeds
from algos.ranks import collectives
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.model import language_model_of
from textenv.names import check_names
from textenv.rollout import EpisodeEnv, is_episode_env, masked_mean

Columns = dict[str, list[Any]]
logger = logging.getLogger(__name__)
ENDLESS = 10_000
"""Steps of every slot without the end of any episode, after which a warning is logged."""


@check_names
def collect(
    env: VectorEnv,
    policy: Policy,
    *,
    num_steps: int | None = None,
    num_episodes: int | None = None,
    group_size: int = 1,
    seed: int | None = None,
    deterministic: bool = False,
) -> TensorDict:
    """Reset the environment, with ``seed``, and collect one rollout; arguments as of `Collector.collect`."""
    return Collector(env, policy, seed=seed).collect(
        num_steps=num_steps, num_episodes=num_episodes, group_size=group_size, deterministic=deterministic
    )


class Collector:
    """Runs a policy in an environment; each rollout continues where the last one stopped.

    Args:
        env: a vector environment in any of Gymnasium's three autoreset modes, or one of whole episodes
            (`textenv.rollout.EpisodeEnv`).
        policy: the policy that acts.
        seed: seed of the environment's first reset; None takes a random one.
        generator: engine that generates the policy's texts (`algos.generator`); None: the policy itself.

    Example:
        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=2)  # doctest: +SKIP
        >>> Collector(env, policy, seed=1).collect(num_steps=8).batch_size  # doctest: +SKIP
        torch.Size([2, 8])
    """

    _last: ClassVar[WeakKeyDictionary[VectorEnv, "Collector"]] = WeakKeyDictionary()
    """Last collector of each environment: a collector continues only its own episodes."""

    def __init__(
        self, env: VectorEnv, policy: Policy, *, seed: int | None = None, generator: Generator | None = None
    ) -> None:
        check_policy(policy, call="Collector(env, policy), in this order")
        refuse_strings(env)
        agree_on_ends(env, policy)
        self.env, self.policy, self.generator = env, policy, generator
        self.seed = seed
        """Seed of the next reset; None once used."""
        self.observation: Any = None
        """Observation to act on next; None before the first reset."""
        self.ended = np.zeros(0, dtype=bool)
        """bool ``[N]``: slots whose next step only resets them (NEXT_STEP mode)."""
        self.action_mask: torch.Tensor | None = None
        """bool ``[N, A]`` from the environment's ``info["action_mask"]``; None if it has none."""
        self.is_init = np.zeros(0, dtype=bool)
        """bool ``[N]``: slots at the first observation of an episode."""
        self.group_seeds: np.random.Generator | None = None
        """Generator of the groups' reset seeds (control); None before the first group."""

    @check_names
    def collect(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        group_size: int = 1,
        deterministic: bool = False,
    ) -> TensorDict:
        """Run the policy and return a rollout in the schema of `textenv.rollout`.

        Args:
            num_steps: steps per slot; the rollout is ``[num_envs, num_steps]``.
            num_episodes: exact number of whole episodes. In control each slot plays its share from a fresh reset, so
                that short episodes are not favoured; a slot's later steps are False in the mask. An aborted episode
                (`algos.envs.subprocess_env`) is masked out too, and replayed except in a group.
            group_size: number of neighbouring episodes that share a prompt or, in control, a reset seed; above 1, every
                row is one episode, in control too.
            deterministic: take the most probable action instead of a sample.

        Returns:
            The rollout, with ``log_prob`` of the policy as it acted. With ``num_steps``, a failed step is
            False in the mask and True in ``is_init`` and ``truncated``, so the step before it counts as truncated.

        Raises:
            ValueError: if not exactly one of ``num_steps`` and ``num_episodes`` is given, or it does not fit the
                environment; if the group size does not divide the episodes, or slots cannot be seeded one by one.
        """
        if (num_steps is None) == (num_episodes is None):
            raise ValueError(f"num_steps is {num_steps} and num_episodes is {num_episodes}: give exactly one of them")
        if group_size != 1 and (group_size < 1 or num_episodes is None or num_episodes % group_size):
            raise ValueError(
                f"group_size is {group_size}, num_episodes {num_episodes}: give a size of at least 1 that divides them"
            )
        if is_episode_env(self.env):
            if num_episodes is None:
                raise ValueError("a text environment is collected in whole episodes: give num_episodes, not num_steps")
            if self.generator is not None and not deterministic:
                found = collect_turns(self.generator, self.env, self.policy, num_episodes, group_size, self.seed)
                self.seed = None
                return found
            seeds = None if deterministic else episode_seeds(num_episodes, self.policy.generator)
            return self.play_episodes(self.env, num_episodes, group_size=group_size, seeds=seeds)
        if num_episodes is None:
            assert num_steps is not None
            self._begin()
            columns: Columns = defaultdict(list)
            for _ in range(num_steps):
                self._step(columns, deterministic)
            return _rollout(columns)
        if group_size > 1:
            return self._collect_groups(num_episodes, group_size, deterministic)
        self.observation = None  # whole episodes start from a reset
        slots = self.env.num_envs
        return self._collect_episodes(np.bincount(np.arange(num_episodes) % slots, minlength=slots), deterministic)

    def resume(self) -> None:
        """Continue mid-episode, after the environment's state was restored to match this collector's."""
        self._last[self.env] = self

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next rollout starts; the environment's own state is saved separately."""
        return {
            "seed": self.seed,
            "observation": self.observation,
            "ended": self.ended,
            "action_mask": self.action_mask,
            "is_init": self.is_init,
            "group_seeds": self.group_seeds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.seed, self.observation, self.ended = state["seed"], state["observation"], state["ended"]
        self.action_mask, self.is_init = state["action_mask"], state["is_init"]
        self.group_seeds = state["group_seeds"]

    @torch.no_grad()
    def play_episodes(
        self, env: EpisodeEnv, episodes: int, *, group_size: int = 1, seeds: np.ndarray | None
    ) -> TensorDict:
        """Collect whole episodes of text; each samples from its own of the seeds (None: the most probable tokens)."""
        policy, deterministic = self.policy, seeds is None
        observation = env.start_episodes(episodes, seed=self.seed, group_size=group_size)
        self.seed = None
        policy.reset(seeds=_in_slots(seeds, env))
        log_prob = np.zeros((episodes, observation["tokens"].shape[1]), dtype=np.float32)
        while (running := env.running).any():
            step = policy.act(observation, action_mask=env.action_mask, deterministic=deterministic)
            check_step(step, policy, slots=len(env.running))
            log_prob[env.cursor] = step.log_prob.cpu().numpy()[running]
            observation, changed = env.advance(step.action.cpu().numpy())
            if changed.any():
                policy.reset(changed, seeds=_in_slots(seeds, env))
        policy.reset()
        rollout = env.take_episodes()
        rollout["log_prob"] = torch.from_numpy(log_prob[:, : rollout.shape[1]].copy())
        return rollout

    def _collect_groups(self, num_episodes: int, group_size: int, deterministic: bool) -> TensorDict:
        """Collect one episode per row, in as many rounds of all slots as needed."""
        if self.group_seeds is None:
            self.group_seeds, self.seed = np.random.default_rng(self.seed), None
        slots, groups = self.env.num_envs, num_episodes // group_size
        seeds = self.group_seeds.integers(2**31, size=groups).repeat(group_size)
        turns = []
        for start in range(0, num_episodes, slots):
            own = seeds[start : start + slots]
            self._begin(seed=np.resize(own, slots).tolist())
            counts = (np.arange(slots) < len(own)).astype(int)
            turns.append(self._collect_episodes(counts, deterministic, replay=False))
        longest = max(turn.shape[1] for turn in turns)
        # Padding after an episode is False in every mask.
        rollout = TensorDict.cat([pad(turn, [0, 0, 0, longest - turn.shape[1]]) for turn in turns])
        group = torch.arange(groups, device="cpu").repeat_interleave(group_size)
        rollout["group"] = group[:, None].expand(rollout.shape)
        return rollout

    def _collect_episodes(self, counts: np.ndarray, deterministic: bool, *, replay: bool = True) -> TensorDict:
        """Collect a number of whole episodes per slot; an aborted one is masked out, and replayed or given up."""
        self._begin()
        dealt, left = counts > 0, counts.copy()
        first = np.zeros(len(left), dtype=int)  # column where the current episode began
        columns: Columns = defaultdict(list)
        while (left > 0).any():
            self._step(columns, deterministic)
            if len(columns["mask"]) == ENDLESS and (left == counts).all():
                logger.warning(
                    "no episode has ended in %d steps: an environment without an end needs a limit, such as "
                    "max_episode_steps=1000 where it is registered or made", ENDLESS,
                )  # fmt: skip
            playing = left > 0
            # Slots that have played their share keep stepping until the last is done, with mask, ends and starts False.
            for name in ("mask", "is_init", "terminated", "truncated"):
                columns[name][-1] = columns[name][-1] & playing
            columns["reward"][-1] = np.where(playing, columns["reward"][-1], 0)
            done = columns["terminated"][-1] | columns["truncated"][-1]
            failed = done & ~columns["mask"][-1]
            for slot in np.flatnonzero(failed):
                _wipe(columns, int(slot), since=int(first[slot]))
            left -= done & ~failed if replay else done
            first[done] = len(columns["mask"])
        self.observation = None  # the slots are mid-episode: the next call resets them
        # In a group, an episode that was given up keeps its row.
        return _rollout(columns)[torch.from_numpy(dealt)]

    def _begin(self, *, seed: list[int] | None = None) -> None:
        """Reset the environment unless its episodes are this collector's; given seeds, reset each slot with one."""
        env = self.env
        if seed is None and self.observation is not None and self._last.get(env) is self:
            return
        self.resume()
        if seed is None:
            with _environment_advice():
                observation, info = env.reset(seed=self.seed)
        else:
            observation, info = _reset_each(env, seed)
        self.observation = flatten(env.single_observation_space, observation).copy()
        self.action_mask = _action_mask(info, env)
        self.seed = None
        self.ended = np.zeros(env.num_envs, dtype=bool)
        self.is_init = np.ones(env.num_envs, dtype=bool)
        self.policy.reset()

    def _step(self, columns: Columns, deterministic: bool) -> None:
        """Act once in every slot and append to the columns."""
        env = self.env
        mode = autoreset_mode(env)

        # Act
        step = self.policy.act(self.observation, action_mask=self.action_mask, deterministic=deterministic)
        slots = len(self.is_init)
        space = env.single_action_space
        check_step(step, self.policy, slots=slots, action_shape=space.shape)
        # For the environment; the rollout keeps the sampled action
        action = fit_actions(space, step.action.cpu().numpy())
        with _environment_advice():
            observation, reward, terminated, truncated, info = env.step(action)
        # Copied, because an environment may reuse the arrays it returned.
        observation = flatten(env.single_observation_space, observation).copy()
        reward = _by_slot("reward", reward, env, slots=slots)
        terminated = _by_slot("terminated", terminated, env, slots=slots, dtype=bool)
        truncated = _by_slot("truncated", truncated, env, slots=slots, dtype=bool)
        done = terminated | truncated
        # In SAME_STEP mode a slot that is done shows the next episode already, in which an action must be available.
        ended = None if mode is AutoresetMode.SAME_STEP else done
        action_mask = _action_mask(info, env, ended=ended)

        # Slots in which this was no step: the environment only reset itself, or it failed
        no_step = self.ended
        is_init = self.is_init
        if FAILED in info:
            failed = np.asarray(info[FAILED], dtype=bool)
            no_step = no_step | failed
            is_init = is_init | failed

        # What followed the action, where `observation` is the next episode's first already
        next_observation = observation
        next_action_mask = action_mask
        if mode is AutoresetMode.SAME_STEP and done.any():
            next_observation = self._with_final(observation, info, done)
            final_action_mask = _action_mask(info.get("final_info", {}), env, ended=np.ones_like(done))
            next_action_mask = _merge(action_mask, final_action_mask, done)

        columns["observation"].append(self.observation)
        columns["action_mask"].append(self.action_mask)
        columns["state"].append(step.state)
        columns["action"].append(step.action)
        columns["log_prob"].append(step.log_prob)
        columns["reward"].append(reward)
        columns["terminated"].append(terminated)
        columns["truncated"].append(truncated)
        columns["next_observation"].append(next_observation)
        columns["next_action_mask"].append(next_action_mask)
        columns["mask"].append(~no_step)
        columns["is_init"].append(is_init)

        self._prepare_next(observation, action_mask, done)

    def _prepare_next(self, observation: np.ndarray, action_mask: torch.Tensor | None, done: np.ndarray) -> None:
        """Keep what the next step begins with; reset the slots that are done if the environment does not."""
        env = self.env
        mode = autoreset_mode(env)
        if mode is AutoresetMode.DISABLED and done.any():
            # Some environments remove this mask from the options, so each call gets its own dictionary.
            observation, info = env.reset(options={"reset_mask": done.copy()})
            observation = flatten(env.single_observation_space, observation).copy()
            action_mask = _merge(action_mask, _action_mask(info, env, ended=~done), done)
        self.observation = observation
        self.action_mask = action_mask

        # Slots whose next step is the first of an episode; in NEXT_STEP mode their next step only resets them
        if mode is AutoresetMode.NEXT_STEP:
            begun = self.ended
            self.ended = done
        else:
            begun = done
            self.ended = np.zeros_like(done)
        self.is_init = begun
        if begun.any():
            self.policy.reset(begun)

    def _with_final(self, observation: np.ndarray, info: Mapping[str, Any], done: np.ndarray) -> np.ndarray:
        """Observations of a step, in done slots the last ones of the episodes, which SAME_STEP has in ``info``."""
        with_final = observation.copy()
        for slot in np.flatnonzero(done):
            final = flatten_one(self.env.single_observation_space, info["final_obs"][slot])
            with_final[slot] = _final_observation(self.env, final, observation.shape[1:])
        return with_final


def agree_on_ends(env: VectorEnv, policy: Policy) -> None:
    """Let a text environment end turns where the policy's language model ends its own; others are left alone."""
    lm = language_model_of(policy)
    if lm is not None and isinstance(env, TextVectorEnv):
        env.end_turns_like(lm.turn_ends)


@contextmanager
def _environment_advice() -> Iterator[None]:
    """Add a hint at Gymnasium's checker to an exception that an environment raises."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "the environment raised this: for mistakes in its reset, step or spaces, run "
            "gymnasium.utils.env_checker.check_env on one environment"
        )
        raise


def add_log_probs(rollout: TensorDict, *, policy: Policy, given: Sequence[Any] | None = None) -> None:
    """Write ``log_prob`` into a text rollout: the policy's own, or given lists of one number for each chosen token."""
    mask, found = rollout["mask"], torch.zeros(rollout.shape)
    if given is None:
        with torch.no_grad():
            found = policy.evaluate(rollout.to(policy.device)).log_prob.cpu()
    elif not isinstance(given, Sized) or len(given) != len(mask):
        said = f"has {len(given)} rows" if isinstance(given, Sized) else f"is {given!r:.200}, not a list,"
        raise ValueError(f"log_probs {said} for {len(mask)} responses: give a list of numbers for each")
    for row, numbers in enumerate(() if given is None else given):
        own, count = torch.empty(0, device="cpu"), int(mask[row].sum())
        with suppress(TypeError, ValueError, RuntimeError):
            own = torch.as_tensor(numbers, dtype=torch.float32, device="cpu").detach()
        if count and (own.shape != (count,) or not ((own <= 0) & own.isfinite()).all()):
            raise ValueError(
                f"log_probs[{row}] is {numbers!r:.200}, expected {count} numbers of at most 0 and finite: the "
                "logarithm of the probability of each token (a text gets its EOS here, so give ids)"
            )
        found[row, mask[row]] = own.flatten()[:count]
    rollout["log_prob"] = torch.where(mask, found, 0.0)


@torch.no_grad()
def with_importance_weights(
    rollout: TensorDict, *, policy: Policy, limit: float
) -> tuple[TensorDict, dict[str, float]]:
    """Score a rollout again by the policy, and weight its steps by what another engine sampled them with.

    Truncated importance sampling (Yao et al. 2025).

    Args:
        rollout: with ``log_prob`` of the engine that sampled.
        policy: the policy before its update, π_old.
        limit: largest weight.

    Returns:
        A copy with ``log_prob`` of π_old and ``importance_weight`` min(π_old / π_sampler, limit); metrics.
    """
    mask = rollout["mask"]
    (log_prob,) = collectives.map_rows(lambda rows: [policy.evaluate(rows).log_prob], rollout)
    log_ratio = losses.log_ratio(log_prob=log_prob, old_log_prob=rollout["log_prob"], mask=mask)
    weight = torch.where(mask, log_ratio.exp().clamp(max=limit), 0.0)
    metrics = {
        "policy/sampler_gap": masked_mean(log_ratio.abs(), mask=mask).item(),
        "policy/importance_weight": masked_mean(weight, mask=mask).item(),
    }
    columns = {"log_prob": torch.where(mask, log_prob, 0.0), "importance_weight": weight}
    return rollout.copy().update(columns), metrics


def _in_slots(seeds: np.ndarray | None, env: EpisodeEnv) -> np.ndarray | None:
    """Seed of the episode in each slot, int64 ``[num_envs]``; 0 in idle slots, where it is not read."""
    if seeds is None:
        return None
    found = np.zeros(len(env.running), dtype=np.int64)
    found[env.running] = seeds[env.cursor[0]]
    return found


def _wipe(columns: Columns, slot: int, *, since: int) -> None:
    """Clear a slot's columns from ``since`` on."""
    for name in ("mask", "is_init", "terminated", "truncated", "reward"):
        for column in columns[name][since:]:
            column[slot] = 0


def _reset_each(env: VectorEnv, seeds: list[int]) -> tuple[Any, dict[str, Any]]:
    """Reset every slot with its own seed.

    Raises:
        ValueError: if the environment does not support it; Gymnasium's own batched ones do not.
    """
    advice = (
        "group_size needs an environment that accepts one reset seed per slot: "
        'gymnasium.make_vec(id, num_envs=n, vectorization_mode="sync")'
    )
    try:
        observation, info = env.reset(seed=seeds)  # type: ignore[arg-type]  # SyncVectorEnv and AsyncVectorEnv do
    except (TypeError, gymnasium.error.Error) as error:
        raise ValueError(f"{type(env.unwrapped).__name__} accepts no list of seeds ({error}): {advice}") from error
    seen = flatten(env.single_observation_space, observation)
    first = {seed: slot for slot, seed in reversed(list(enumerate(seeds)))}
    if not all(np.array_equal(seen[slot], seen[first[seed]]) for slot, seed in enumerate(seeds)):
        raise ValueError(f"{type(env.unwrapped).__name__} starts differently with equal seeds: {advice}")
    return observation, info


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """Return the environment's autoreset mode, one of Gymnasium's three.

    Raises:
        ValueError: if its metadata does not declare one.
    """
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f"{type(env.unwrapped).__name__}.metadata['autoreset_mode'] is {mode!r}, expected a member of "
            "gymnasium.vector.AutoresetMode: set the mode that step() implements, for example "
            "metadata = {'autoreset_mode': AutoresetMode.NEXT_STEP}"
        )
    return mode


def _final_observation(env: VectorEnv, final: Any, shape: tuple[int, ...]) -> Any:
    """Return an episode's last observation in SAME_STEP mode, or raise if a wrapper did not transform it."""
    if np.shape(final) != shape:
        raise ValueError(
            f"{env} returns observations of shape {shape}, but info['final_obs'] has {np.shape(final)}: a wrapper "
            "does not change final_obs. Use AutoresetMode.NEXT_STEP, or wrap each single environment: "
            "gymnasium.make_vec(id, wrappers=[...])"
        )
    return final


def _by_slot(name: str, values: Any, env: VectorEnv, *, slots: int, dtype: Any = None) -> np.ndarray:
    """Copy what a step returned for each slot into an array ``[N]`` of a dtype; None keeps its own.

    Raises:
        ValueError: if it has another shape, which would be broadcast.
    """
    array = np.asarray(values)
    if array.shape != (slots,):
        raise ValueError(
            f"{type(env.unwrapped).__name__}.step returned {name} of shape {array.shape}, expected one number for each "
            f"of {slots} slots, ({slots},)"
        )
    return array.astype(array.dtype if dtype is None else dtype)


def _action_mask(info: dict[str, Any], env: VectorEnv, *, ended: np.ndarray | None = None) -> torch.Tensor | None:
    """Read the mask of available actions from an info dictionary; None if it has none.

    Args:
        info: of a reset or a step.
        env: the environment.
        ended: bool ``[N]``, slots in which no action follows. If no action is available there, as is usual at the end
            of a game, all count as available. None: an action follows in every slot.

    Raises:
        ValueError: if it is not a mask of the action space, or allows no action where one follows.
    """
    if "action_mask" not in info:
        return None
    here = np.asarray(info.get("_action_mask", np.ones(env.num_envs, dtype=bool)))
    # Gymnasium fills slots without a mask with zeros or None; all their actions are available.
    space = env.single_action_space
    open_everywhere = np.ones(space.n if isinstance(space, spaces.Discrete) else 1, dtype=bool)
    rows = [np.asarray(row) if said else open_everywhere for row, said in zip(info["action_mask"], here, strict=True)]
    if any(row.shape != open_everywhere.shape for row in rows):
        raise ValueError(
            f"info['action_mask'] has shape {rows[int(here.argmax())].shape} in a slot, expected one entry for each "
            f"action of {space}"
        )
    mask = np.stack(rows).astype(bool)

    # Slots in which no action is available
    closed = ~mask.any(axis=1)
    stuck = closed if ended is None else closed & ~ended
    if stuck.any():
        raise ValueError(
            f"info['action_mask'] allows no action in slot {int(stuck.argmax())}, whose episode goes on: allow at "
            "least one, or end the episode there (terminated)"
        )
    mask[closed] = True
    return torch.from_numpy(mask)


def _merge(before: torch.Tensor | None, after: torch.Tensor | None, done: np.ndarray) -> torch.Tensor | None:
    """Take action masks of done slots from ``after`` and of the others from ``before``; None allows all actions."""
    if before is None and after is None:
        return None
    some = before if before is not None else after
    assert some is not None
    before, after = (torch.ones_like(some) if x is None else x for x in (before, after))
    return torch.where(torch.from_numpy(done)[:, None], after, before)


def _rollout(columns: Columns) -> TensorDict:
    """Stack the steps along time, once, at the end: ``[N, T]``."""
    steps, slots = len(columns["mask"]), len(columns["mask"][0])
    data = {}
    names = "action_mask", "next_action_mask"
    said = next((mask for name in names for mask in columns[name] if mask is not None), None)
    if said is not None:
        columns |= {name: [torch.ones_like(said) if x is None else x for x in columns[name]] for name in names}
    for name, column in columns.items():
        if isinstance(column[0], torch.Tensor):
            data[name] = torch.stack(column, dim=1).cpu()
        elif column[0] is not None:
            data[name] = torch.from_numpy(np.stack(column, axis=1))
    data["reward"] = data["reward"].to(torch.float32)
    data["group"] = torch.arange(slots, device="cpu")[:, None].expand(slots, steps)
    return TensorDict(data, batch_size=[slots, steps])
