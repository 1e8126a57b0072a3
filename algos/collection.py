"""Collecting rollouts: the only module that handles autoreset."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, pad

from algos.envs.flatten import flatten, flatten_one, pack
from algos.envs.spaces import fit_actions
from algos.envs.subprocess_env import FAILED
from algos.policies.generator import Generator, collect_turns
from algos.policies.policy import Policy, check_policy, check_step, refuse_strings
from algos.policies.random_streams import episode_seeds, row_seeds
from textenv.envs.kept_sets import KeptSets
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.model import language_model_of
from textenv.names import check_names
from textenv.rollout import WAITING, EpisodeEnv, LogProbs, is_episode_env

if TYPE_CHECKING:
    from algos.policies.lm import LMPolicy

logger = logging.getLogger(__name__)

Columns = dict[str, list[Any]]
"""For each column of a rollout, a list with one entry per step: an array or a tensor ``[N, ...]``, or None."""

STEPS_WITHOUT_AN_END = 10_000
"""Steps per slot in which no episode has ended, after which a warning is logged."""


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
    """Reset the environment, with ``seed``, and collect one rollout; arguments as in `Collector.collect`."""
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
        generator: engine that generates the policy's texts (`algos.policies.generator`); None: the policy itself.

    Example:
        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=2)  # doctest: +SKIP
        >>> Collector(env, policy, seed=1).collect(num_steps=8).batch_size  # doctest: +SKIP
        torch.Size([2, 8])
    """

    _last_collector: ClassVar[WeakKeyDictionary[VectorEnv, "Collector"]] = WeakKeyDictionary()
    """Collector that used each environment last: a collector continues only episodes that it began."""

    def __init__(
        self, env: VectorEnv, policy: Policy, *, seed: int | None = None, generator: Generator | None = None
    ) -> None:
        check_policy(policy, call="Collector(env, policy), in this order")
        refuse_strings(env)
        agree_on_ends(env, policy)
        self.env = env
        self.policy = policy
        self.generator = generator
        self.seed = seed
        """Seed of the next reset; None once used."""
        self.observation: Any = None
        """Observation to act on next; None before the first reset."""

        # What the last step says of each slot
        self.failed = np.zeros(0, dtype=bool)
        """Bool ``[N]``: slots whose last step failed."""
        self.only_resets = np.zeros(0, dtype=bool)
        """bool ``[N]``: slots whose next step only resets them (NEXT_STEP mode)."""
        self.action_mask: torch.Tensor | None = None
        """bool ``[N, A]`` from the environment's ``info["action_mask"]``; None if it has none."""
        self.lives: np.ndarray | None = None
        """int ``[N]`` from the environment's ``info["lives"]``, as Atari games have it; None if it has none."""
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
            num_episodes: exact number of whole episodes. In control each slot plays its share, from a fresh reset,
                so that short episodes are not favoured. Steps of a slot after its share are False in the mask. An
                aborted episode (`algos.envs.subprocess_env`) is masked out too; it is replayed, except in a group.
            group_size: number of neighbouring episodes that share a prompt or, in control, a reset seed. Above 1, every
                row is one episode, in control too.
            deterministic: take the most probable action instead of a sample.

        Returns:
            The rollout, with ``log_prob`` of the policy as it acted. With ``num_steps``, a step at which the
            environment failed is False in the mask and True in ``is_init`` and ``truncated``: the episode counts as
            truncated at the step before.

        Raises:
            ValueError: if not exactly one of ``num_steps`` and ``num_episodes`` is given, or it does not fit the
                environment; if the group size does not divide the episodes, or slots cannot be seeded one by one.
        """
        if (num_steps is None) == (num_episodes is None):
            raise ValueError(f"num_steps is {num_steps} and num_episodes is {num_episodes}: give exactly one of them")
        for name, length in (("num_steps", num_steps), ("num_episodes", num_episodes)):
            if length is not None and length < 1:
                raise ValueError(f"{name} is {length}, expected at least 1")
        if group_size != 1 and (group_size < 1 or num_episodes is None or num_episodes % group_size):
            raise ValueError(
                f"group_size is {group_size} and num_episodes is {num_episodes}: give a group_size of at least 1 that "
                "divides num_episodes"
            )

        # Text
        if is_episode_env(self.env):
            if num_episodes is None:
                raise ValueError("a text environment is collected in whole episodes: give num_episodes, not num_steps")
            return self._collect_texts(self.env, num_episodes, group_size, deterministic)

        # Control
        if num_episodes is None:
            assert num_steps is not None
            return self._collect_steps(num_steps, deterministic)
        if group_size > 1:
            return self._collect_groups(num_episodes, group_size, deterministic)
        self.observation = None  # whole episodes start from a reset
        num_slots = self.env.num_envs
        slot_of_episode = np.arange(num_episodes) % num_slots
        counts = np.bincount(slot_of_episode, minlength=num_slots)
        return self._collect_episodes(counts, deterministic)

    def resume(self) -> None:
        """Mark the environment's present episodes as this collector's, so that the next rollout continues them.

        Call it after the environment's state was restored to match this collector's.
        """
        self._last_collector[self.env] = self

    def state_dict(self) -> dict[str, object]:
        """Return the state from which the next rollout starts; the environment's own state is saved separately."""
        return {
            "seed": self.seed,
            "observation": self.observation,
            "ended": self.only_resets,
            "action_mask": self.action_mask,
            "lives": self.lives,
            "is_init": self.is_init,
            "group_seeds": self.group_seeds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.seed = state["seed"]
        self.observation = pack(self.env.single_observation_space, state["observation"])
        self.only_resets = state["ended"]
        self.action_mask = state["action_mask"]
        self.lives = state.get("lives")  # states of version 0.11 and earlier have none
        self.is_init = state["is_init"]
        self.group_seeds = state["group_seeds"]

    @torch.no_grad()
    def play_episodes(
        self, env: EpisodeEnv, episodes: int, *, group_size: int = 1, seeds: np.ndarray | None
    ) -> TensorDict:
        """Collect whole episodes of text.

        Args:
            env: the environment.
            episodes: number of episodes.
            group_size: number of neighbouring episodes that share a prompt.
            seeds: int64 ``[episodes]``, seed of the tokens of each episode; None takes the most probable tokens.

        Returns:
            The rollout, with ``log_prob`` of the policy as it acted. A row is an episode, or with a column ``episode``
            a part of one (`textenv.rollout`).
        """
        policy = self.policy
        observation = env.start_episodes(episodes, seed=self.seed, group_size=group_size)
        self.seed = None
        policy.reset(seeds=_seeds_by_slot(seeds, env, env.running))
        log_probs = LogProbs()
        kept_sets = KeptSets()

        # A token in every running slot, until all episodes have ended
        running = env.running
        while running.any():
            step = policy.act(observation, action_mask=env.action_mask, deterministic=seeds is None)
            check_step(step, policy, slots=len(running))
            rows, columns = env.cursor  # of these tokens
            log_probs.record_step(rows, columns, step.log_prob, running=running)
            if step.kept is not None:
                kept_sets.record(rows, columns, step.kept.cpu()[torch.from_numpy(running)])
            observation, changed = env.advance(step.action.cpu().numpy())
            if changed.any():
                policy.reset(changed, seeds=_seeds_by_slot(seeds, env, changed))
            running = env.running
        policy.reset()
        return log_probs.added_to(kept_sets.added_to(env.take_episodes()))

    def _collect_texts(self, env: EpisodeEnv, num_episodes: int, group_size: int, deterministic: bool) -> TensorDict:
        """Collect whole episodes of text, generated by the engine if there is one, else by the policy."""
        if self.generator is not None and not deterministic:
            # An engine comes with these types only, see `algos.policies.generator.check_generator`.
            assert isinstance(env, TextVectorEnv)
            policy = cast("LMPolicy", self.policy)
            rollout = collect_turns(self.generator, env, policy, num_episodes, group_size, self.seed)
            self.seed = None
            return rollout
        seeds = None
        if not deterministic:
            seeds = episode_seeds(num_episodes, self.policy.generator)
        return self.play_episodes(env, num_episodes, group_size=group_size, seeds=seeds)

    def _collect_steps(self, num_steps: int, deterministic: bool) -> TensorDict:
        """Collect a number of steps in every slot: ``[num_envs, num_steps]``."""
        self._begin()
        columns: Columns = defaultdict(list)
        for _ in range(num_steps):
            self._step(columns, deterministic)
        return _rollout(columns)

    def _collect_groups(self, num_episodes: int, group_size: int, deterministic: bool) -> TensorDict:
        """Collect one episode per row, in as many rounds of all slots as needed."""
        num_slots = self.env.num_envs
        num_groups = num_episodes // group_size

        # A reset seed for each episode, the same in a group
        if self.group_seeds is None:
            self.group_seeds = np.random.default_rng(self.seed)
            self.seed = None
        seeds = self.group_seeds.integers(2**31, size=num_groups).repeat(group_size)

        # One episode per slot in each round; in the last round some slots may have none
        rounds = []
        for start in range(0, num_episodes, num_slots):
            round_seeds = seeds[start : start + num_slots]
            slot_seeds = np.resize(round_seeds, num_slots)  # repeated for slots that have no episode
            self._begin(seed=slot_seeds.tolist())
            plays_an_episode = np.arange(num_slots) < len(round_seeds)
            rounds.append(self._collect_episodes(plays_an_episode.astype(int), deterministic, replay=False))

        # Padding after an episode is False in every mask.
        longest = max(part.shape[1] for part in rounds)
        padded = [pad(part, [0, 0, 0, longest - part.shape[1]]) for part in rounds]
        rollout = TensorDict.cat(padded)
        group = torch.arange(num_groups, device="cpu").repeat_interleave(group_size)
        rollout["group"] = group[:, None].expand(rollout.shape)
        return rollout

    def _collect_episodes(self, counts: np.ndarray, deterministic: bool, *, replay: bool = True) -> TensorDict:
        """Collect whole episodes from a reset; those that an environment aborts are masked out.

        Args:
            counts: int ``[N]``, number of episodes of each slot.
            deterministic: take the most probable action instead of a sample.
            replay: whether another episode is played for an aborted one.

        Returns:
            The rollout, one row for each slot with episodes; an episode that was given up keeps its row.
        """
        self._begin()
        episodes_left = counts.copy()
        episode_start = np.zeros(len(counts), dtype=int)  # column in which a slot's present episode began
        columns: Columns = defaultdict(list)
        while (episodes_left > 0).any():
            self._step(columns, deterministic)
            num_columns = len(columns["mask"])
            if num_columns == STEPS_WITHOUT_AN_END and (episodes_left == counts).all():
                logger.warning(
                    "no episode has ended in %d steps: an environment without an end needs a limit, such as "
                    "max_episode_steps=1000 where it is registered or made",
                    STEPS_WITHOUT_AN_END,
                )

            # A slot that has played its share goes on until all have; its mask, ends and starts are False then.
            playing = episodes_left > 0
            for name in ("mask", "is_init", "terminated", "truncated"):
                columns[name][-1] = columns[name][-1] & playing
            columns["reward"][-1] = np.where(playing, columns["reward"][-1], 0)

            # Mask out episodes that were aborted in this step
            done = columns["terminated"][-1] | columns["truncated"][-1]
            aborted = done & self.failed
            for slot in np.flatnonzero(aborted):
                _wipe(columns, int(slot), since=int(episode_start[slot]))

            # Count those that have ended
            if replay:
                episodes_left -= done & ~aborted
            else:
                episodes_left -= done
            episode_start[done] = num_columns
        self.observation = None  # the slots are mid-episode: the next call resets them
        has_episodes = torch.from_numpy(counts > 0)
        return _rollout(columns)[has_episodes]

    def _begin(self, *, seed: list[int] | None = None) -> None:
        """Reset the environment, unless its present episodes were begun by this collector.

        With ``seed``, reset always, each slot with its own seed.
        """
        env = self.env
        has_begun = self.observation is not None and self._last_collector.get(env) is self
        if seed is None and has_begun:
            return
        self.resume()
        if seed is None:
            with _environment_advice():
                observation, info = env.reset(seed=self.seed)
        else:
            observation, info = _reset_each(env, seed)
        self.observation = flatten(env.single_observation_space, observation).copy()
        self.action_mask = _action_mask(info, env)
        self.lives = _lives(info, None)
        self.seed = None
        self.only_resets = np.zeros(env.num_envs, dtype=bool)
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
        # The environment may need another dtype, or bounds; the rollout keeps the sampled action.
        env_action = fit_actions(space, step.action.cpu().numpy())
        with _environment_advice():
            observation, reward, terminated, truncated, info = env.step(env_action)

        # Copied, because an environment may reuse the arrays that it returned.
        observation = flatten(env.single_observation_space, observation).copy()
        reward = _by_slot("reward", reward, env, slots=slots)
        terminated = _by_slot("terminated", terminated, env, slots=slots, dtype=bool)
        truncated = _by_slot("truncated", truncated, env, slots=slots, dtype=bool)
        done = terminated | truncated
        if mode is AutoresetMode.SAME_STEP:
            no_action_follows = None  # a slot that is done shows the next episode already: an action must be available
        else:
            no_action_follows = done
        action_mask = _action_mask(info, env, no_action_follows=no_action_follows)

        # Slots in which this was no step: the environment only reset itself, or it failed
        no_step = self.only_resets
        is_init = self.is_init
        self.failed = np.zeros(slots, dtype=bool)
        if FAILED in info:
            self.failed = np.asarray(info[FAILED], dtype=bool)
            no_step = no_step | self.failed
            is_init = is_init | self.failed
        waiting = np.zeros(slots, dtype=bool)
        if WAITING in info:
            waiting = np.asarray(info[WAITING], dtype=bool)
            no_step = no_step | waiting

        lives = _lives(info, self.lives)
        life_lost = None
        if lives is not None and self.lives is not None:
            life_lost = (lives < self.lives) & ~no_step

        # After the last action of an episode the next observation is the final one. In SAME_STEP mode `info` has it,
        # because `observation` is already the first one of the next episode.
        next_observation = observation
        next_action_mask = action_mask
        if mode is AutoresetMode.SAME_STEP and done.any():
            next_observation = self._with_final(observation, info, done)
            final_action_mask = _action_mask(info.get("final_info", {}), env, no_action_follows=np.ones_like(done))
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
        columns["life_lost"].append(life_lost)
        columns["mask"].append(~no_step)
        columns["is_init"].append(is_init)

        self.lives = lives
        self._prepare_next(observation, action_mask, done, waiting)

    def _prepare_next(
        self, observation: np.ndarray, action_mask: torch.Tensor | None, done: np.ndarray, waiting: np.ndarray
    ) -> None:
        """Keep what the next step begins with. Reset slots that are done, if the environment does not (DISABLED)."""
        env = self.env
        mode = autoreset_mode(env)
        if mode is AutoresetMode.DISABLED and done.any():
            # Some environments remove this mask from the options, so each call gets its own dictionary.
            observation, info = env.reset(options={"reset_mask": done.copy()})
            observation = flatten(env.single_observation_space, observation).copy()
            reset_mask = _action_mask(info, env, no_action_follows=~done)
            action_mask = _merge(action_mask, reset_mask, done)
            self.lives = _lives(info, self.lives)
        self.observation = observation
        self.action_mask = action_mask

        # Slots at the first observation of an episode. In NEXT_STEP mode these are the slots that this step has reset;
        # the slots that are done now are reset by the next step, or a later one if they wait.
        if mode is AutoresetMode.NEXT_STEP:
            self.is_init = self.only_resets & ~waiting
            self.only_resets = done | (self.only_resets & waiting)
        else:
            self.is_init = done
            self.only_resets = np.zeros_like(done)
        if self.is_init.any():
            self.policy.reset(self.is_init)

    def _with_final(self, observation: np.ndarray, info: Mapping[str, Any], done: np.ndarray) -> np.ndarray:
        """Copy the observations of a step, with the episodes' final ones in done slots (SAME_STEP, from ``info``)."""
        with_final = observation.copy()
        for slot in np.flatnonzero(done):
            final = flatten_one(self.env.single_observation_space, info["final_obs"][slot])
            _check_final_observation(self.env, final, observation.shape[1:])
            with_final[slot] = final
        return with_final


def agree_on_ends(env: VectorEnv, policy: Policy) -> None:
    """Let a text environment end turns as the policy's language model does; other environments are left alone."""
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


def add_log_probs(rollout: TensorDict, *, policy: Policy, log_probs: Sequence[object] | None = None) -> None:
    """Write the column ``log_prob`` into a text rollout.

    Args:
        rollout: is changed; on the policy's device.
        policy: scores the rollout if there are no ``log_probs``.
        log_probs: for each row a list, one number for each token that was chosen, nats.

    Raises:
        ValueError: if ``log_probs`` are not such lists.
    """
    mask = rollout["mask"]
    if log_probs is None:
        with torch.no_grad():
            column = policy.evaluate(rollout).log_prob
    else:
        column = _log_prob_column(log_probs, mask.cpu()).to(mask.device)
    rollout["log_prob"] = torch.where(mask, column, 0.0)


def _log_prob_column(log_probs: Sequence[object], mask: torch.Tensor) -> torch.Tensor:
    """Check lists of log-probabilities and put them where the mask ``[B, T]`` is True: float32 ``[B, T]``."""
    if not isinstance(log_probs, Sized):
        raise ValueError(
            f"log_probs is {log_probs!r:.200}, not a list, for {len(mask)} responses: give a list of numbers for each"
        )
    if len(log_probs) != len(mask):
        raise ValueError(
            f"log_probs has {len(log_probs)} rows for {len(mask)} responses: give a list of numbers for each"
        )

    # Row by row, as their lengths differ
    column = torch.zeros(mask.shape, device="cpu")
    for row, numbers in enumerate(log_probs):
        count = int(mask[row].sum())
        row_log_probs = torch.empty(0, device="cpu")
        with suppress(TypeError, ValueError, RuntimeError):  # whatever is not a number is reported below
            row_log_probs = torch.as_tensor(numbers, dtype=torch.float32, device="cpu").detach()
        possible = (row_log_probs <= 0) & row_log_probs.isfinite()
        if count and (row_log_probs.shape != (count,) or not possible.all()):
            raise ValueError(
                f"log_probs[{row}] is {numbers!r:.200}, expected {count} numbers of at most 0 and finite: the "
                "logarithm of the probability of each token. A response given as text gets an end token, which needs "
                "a number too: better give token ids"
            )
        column[row, mask[row]] = row_log_probs.flatten()[:count]
    return column


def _seeds_by_slot(seeds: np.ndarray | None, env: EpisodeEnv, changed: np.ndarray) -> np.ndarray | None:
    """Seed of the row in each slot that holds a new one, int64 ``[num_envs]``; 0 in other slots, where it is not read.

    Args:
        seeds: seed of each episode, int64 ``[episodes]``, or None.
        env: the environment that plays them.
        changed: bool ``[num_envs]``: slots that hold a new row, or none.
    """
    if seeds is None:
        return None
    running = env.running
    episodes, numbers = env.running_episodes
    begins_row = changed[running]  # by running slot
    by_slot = np.zeros(len(running), dtype=np.int64)
    by_slot[running & changed] = row_seeds(seeds[episodes[begins_row]], numbers[begins_row])
    return by_slot


def _wipe(columns: Columns, slot: int, *, since: int) -> None:
    """Mask out a slot's steps from the column ``since`` on, and remove their starts, ends and rewards."""
    for name in ("mask", "is_init", "terminated", "truncated", "reward"):
        for values in columns[name][since:]:
            values[slot] = 0


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

    # Each slot starts as the first one with the same seed
    rows = flatten(env.single_observation_space, observation)
    first_slots: dict[int, int] = {}
    for slot, seed in enumerate(seeds):
        first_slot = first_slots.setdefault(seed, slot)
        if not np.array_equal(rows[slot], rows[first_slot]):
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


def _check_final_observation(env: VectorEnv, final: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if a wrapper has not transformed an episode's last observation (SAME_STEP mode)."""
    if np.shape(final) != shape:
        raise ValueError(
            f"{env} returns observations of shape {shape}, but info['final_obs'] has {np.shape(final)}: a wrapper "
            "does not change final_obs. Use AutoresetMode.NEXT_STEP, or wrap each single environment: "
            "gymnasium.make_vec(id, wrappers=[...])"
        )


def _by_slot(name: str, values: object, env: VectorEnv, *, slots: int, dtype: type | None = None) -> np.ndarray:
    """Copy what a step returned, one value per slot: ``[N]``. It keeps its dtype, unless ``dtype`` is given.

    Raises:
        ValueError: if the values have another shape, which would be broadcast.
    """
    array = np.asarray(values)
    if array.shape != (slots,):
        raise ValueError(
            f"{type(env.unwrapped).__name__}.step returned {name} of shape {array.shape}, expected one number for each "
            f"of {slots} slots, ({slots},)"
        )
    if dtype is None:
        return array.copy()
    return array.astype(dtype)


def _action_mask(
    info: Mapping[str, Any], env: VectorEnv, *, no_action_follows: np.ndarray | None = None
) -> torch.Tensor | None:
    """Read the mask of available actions from an info dictionary; None if it has none.

    Args:
        info: of a reset or a step.
        env: the environment.
        no_action_follows: bool ``[N]``. If no action is available in such a slot, as is usual at the end of a game, all
            count as available. None: an action follows in every slot.

    Raises:
        ValueError: if it is not a mask of the action space, or allows no action where one follows.
    """
    if "action_mask" not in info:
        return None
    space = env.single_action_space
    num_actions = space.n if isinstance(space, spaces.Discrete) else 1
    all_available = np.ones(num_actions, dtype=bool)

    # Gymnasium fills slots without a mask with zeros or None; all their actions are available.
    has_mask = np.asarray(info.get("_action_mask", np.ones(env.num_envs, dtype=bool)))
    rows = []
    for slot_mask, is_mask in zip(info["action_mask"], has_mask, strict=True):
        row = np.asarray(slot_mask) if is_mask else all_available
        rows.append(row)
    if any(row.shape != all_available.shape for row in rows):
        raise ValueError(
            f"info['action_mask'] has shape {rows[int(has_mask.argmax())].shape} in a slot, expected one entry for "
            f"each action of {space}"
        )
    mask = np.stack(rows).astype(bool)

    # Slots in which no action is available
    closed = ~mask.any(axis=1)
    stuck = closed
    if no_action_follows is not None:
        stuck = closed & ~no_action_follows
    if stuck.any():
        raise ValueError(
            f"info['action_mask'] allows no action in slot {int(stuck.argmax())}, whose episode goes on: allow at "
            "least one, or end the episode there (terminated)"
        )
    mask[closed] = True
    return torch.from_numpy(mask)


def _lives(info: Mapping[str, Any], earlier: np.ndarray | None) -> np.ndarray | None:
    """Read the lives of all slots, int ``[N]``, from an info dictionary; None if it has none and ``earlier`` is None.

    Args:
        info: of a reset or a step.
        earlier: lives after the step before, which slots without an entry keep.
    """
    if "lives" not in info:
        return earlier
    lives = np.array(info["lives"])
    if lives.dtype.kind not in "iu" or lives.ndim != 1:  # an environment may mean something else by it
        return earlier
    if earlier is not None and "_lives" in info:  # Gymnasium fills slots without an entry with zeros
        lives = np.where(info["_lives"], lives, earlier)
    return lives


def _merge(masks: torch.Tensor | None, done_masks: torch.Tensor | None, done: np.ndarray) -> torch.Tensor | None:
    """Take the action masks of done slots from ``done_masks``, the others from ``masks``; None allows all actions."""
    if masks is None:
        if done_masks is None:
            return None
        masks = torch.ones_like(done_masks)
    elif done_masks is None:
        done_masks = torch.ones_like(masks)
    return torch.where(torch.from_numpy(done)[:, None], done_masks, masks)


def _rollout(columns: Columns) -> TensorDict:
    """Stack the steps along time, once, at the end: ``[N, T]``."""
    _fill_action_masks(columns)
    _fill_lost_lives(columns)
    num_steps = len(columns["mask"])
    num_slots = len(columns["mask"][0])
    data = {}
    for name, column in columns.items():
        if isinstance(column[0], torch.Tensor):
            data[name] = torch.stack(column, dim=1).cpu()
        elif column[0] is not None:
            data[name] = torch.from_numpy(np.stack(column, axis=1))
    data["reward"] = data["reward"].to(torch.float32)
    data["group"] = torch.arange(num_slots, device="cpu")[:, None].expand(num_slots, num_steps)
    return TensorDict(data, batch_size=[num_slots, num_steps])


def _fill_lost_lives(columns: Columns) -> None:
    """If some steps report lives, no life was lost in the others."""
    if any(lost is not None for lost in columns["life_lost"]):
        none_lost = np.zeros_like(columns["mask"][0])
        columns["life_lost"] = [none_lost if lost is None else lost for lost in columns["life_lost"]]


def _fill_action_masks(columns: Columns) -> None:
    """If some steps have an action mask, let the others allow all actions."""
    names = ("action_mask", "next_action_mask")
    masks = [mask for name in names for mask in columns[name] if mask is not None]
    if not masks:
        return
    all_available = torch.ones_like(masks[0])
    for name in names:
        columns[name] = [all_available if mask is None else mask for mask in columns[name]]
