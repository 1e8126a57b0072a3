"""Collect rollouts, in control step by step and in text by whole episodes. No other module knows autoreset.

`algos.envs.gymnasium_results` checks what an environment returns, and reads the autoreset mode that it declares.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict, pad

from algos.envs.flatten import pack
from algos.envs.gymnasium_results import (
    STEPS_WITHOUT_AN_END,
    EnvironmentAdvice,
    autoreset_mode,
    by_slot,
    check_info,
    flags,
    flat_observations,
    merge_masks,
    read_action_mask,
    read_lives,
    reset_each,
    warn_of_unread_masks,
    with_final_observations,
)
from algos.envs.spaces import fit_actions
from algos.envs.subprocess_env import FAILED
from algos.policies.generator import Generator, collect_turns
from algos.policies.policy import Policy, Step, check_available, check_policy, check_step, refuse_strings
from algos.policies.random_streams import episode_seeds, row_seeds
from textenv.envs.kept_sets import KeptSets
from textenv.envs.limits import check_at_least
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.loading import misread_tokens
from textenv.lm.model import LanguageModel, language_model_of
from textenv.names import check_names
from textenv.rollout import WAITING, EpisodeEnv, LogProbs, is_episode_env

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from algos.policies.lm import LMPolicy

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)
"""Logs a warning once, though several collectors may play in an environment."""

Columns = dict[str, list[Any]]
"""For each column of a rollout, a list with one entry per step: an array or a tensor ``[N, ...]``, or None."""
_COMPARED: "WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase]" = WeakKeyDictionary()
"""The policy's tokenizer that an environment's was compared with: only once, because vocabularies are large."""
MOST_RESETS = 3
"""Largest number of further steps where a rollout has only reset slots: one suffices unless the environment fails."""
ENOUGH_STEPS_OF_TURNS = 32
"""Steps of a rollout from which on few of the rewards that come while an agent waits are cut off by its end."""


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


class _Outcome(NamedTuple):
    """One step in N slots: the actions of the policy, and the environment's answer, checked and copied."""

    step: Step
    """The policy's actions."""
    observation: np.ndarray
    """Flat, ``[N, ...]``. In SAME_STEP mode a slot that is done shows the next episode's first one."""
    reward: np.ndarray
    """``[N]``, of the environment's dtype."""
    terminated: np.ndarray
    """Bool ``[N]``."""
    truncated: np.ndarray
    """Bool ``[N]``."""
    done: np.ndarray
    """Bool ``[N]``: terminated or truncated."""
    action_mask: np.ndarray | None
    """Bool ``[N, A]``, of this observation; None if the environment has none."""
    info: Mapping[str, Any]
    """The environment's own, not copied."""


class Collector:
    """Runs a policy in an environment; each rollout continues where the last one stopped.

    Args:
        env: a vector environment in any of Gymnasium's three autoreset modes, or one of whole episodes
            (`textenv.rollout.EpisodeEnv`).
        policy: the policy that acts.
        seed: seed of the environment's first reset; None takes a random one.
        generator: engine that samples the policy's texts (`algos.policies.generator`), or None; deterministic rollouts
            always come from the policy itself.

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
        if seed is not None:
            check_at_least("seed", seed, 0)
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
        self.pays_while_waiting = False
        """Whether an agent has earned something so far while it waited for others."""
        self.has_warned = False
        """Whether a warning has said that such rewards may be cut off."""
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
            num_steps: steps per slot; the rollout is ``[num_envs, num_steps]``. It is longer if these only reset slots
                whose episodes had ended, so that the policy takes at least one step.
            num_episodes: exact number of whole episodes. In control they begin with a reset and are dealt evenly to the
                slots; taking the first that end would favour short ones. Steps of a slot after its last episode are
                False in the mask. An aborted episode (`algos.envs.subprocess_env`) is masked out too; it is replayed,
                except in a group.
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

        # Text, in which another policy may have played since
        agree_on_ends(self.env, self.policy)
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
        num_slots = self.env.num_envs
        slot_of_episode = np.arange(num_episodes) % num_slots
        counts = np.bincount(slot_of_episode, minlength=num_slots)
        self._reset()
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
            "ended": self.only_resets,  # name of version 0.9
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
        """Collect a number of steps in every slot: ``[num_envs, num_steps]``, or more until one is not a mere reset."""
        self._continue_or_reset()
        columns: Columns = defaultdict(list)
        for _ in range(num_steps):
            self._step(columns, deterministic)
        for _ in range(MOST_RESETS):
            if any(is_step.any() for is_step in columns["mask"]):
                break
            self._step(columns, deterministic)
        if self.pays_while_waiting and not self.has_warned and num_steps < ENOUGH_STEPS_OF_TURNS:
            self.has_warned = True
            logger.warning(
                "agents earn rewards while they wait for others, and a rollout has only %s steps: what an agent earns "
                "after a rollout's last step, before its next turn, is not learnt from. Take num_steps of at least %s",
                num_steps,
                ENOUGH_STEPS_OF_TURNS,
            )
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
            self._reset(slot_seeds=slot_seeds.tolist())
            plays_an_episode = np.arange(num_slots) < len(round_seeds)
            rounds.append(self._collect_episodes(plays_an_episode.astype(int), deterministic, replay=False))

        # Padding after an episode is False in every mask.
        _fill_rounds(rounds)
        longest = max(part.shape[1] for part in rounds)
        padded = [pad(part, [0, 0, 0, longest - part.shape[1]]) for part in rounds]
        rollout = TensorDict.cat(padded)
        group = torch.arange(num_groups, device="cpu").repeat_interleave(group_size)
        rollout["group"] = group[:, None].expand(rollout.shape)
        return rollout

    def _collect_episodes(self, counts: np.ndarray, deterministic: bool, *, replay: bool = True) -> TensorDict:
        """Collect whole episodes; those that an environment aborts are masked out. The environment was just reset.

        Args:
            counts: int ``[N]``, number of episodes of each slot.
            deterministic: take the most probable action instead of a sample.
            replay: whether another episode is played for an aborted one.

        Returns:
            The rollout, one row for each slot with episodes; an episode that was given up keeps its row.
        """
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

    def _continue_or_reset(self) -> None:
        """Reset the environment, unless this collector's episodes are still running in it."""
        if self.observation is None or self._last_collector.get(self.env) is not self:
            self._reset()

    def _reset(self, *, slot_seeds: list[int] | None = None) -> None:
        """Reset all slots, with a seed for each or, if there are none, with the collector's seed."""
        env = self.env
        self.resume()
        self.observation = None  # if the environment raises, the next call resets it again
        if slot_seeds is None:
            with EnvironmentAdvice():
                observation, info = env.reset(seed=self.seed)
        else:
            observation, info = reset_each(env, slot_seeds)
        check_info(info, env, method="reset")
        warn_of_unread_masks(info, env)
        self.observation = flat_observations(observation, env, method="reset")
        self.action_mask = _mask_tensor(read_action_mask(info, env))
        self.lives = read_lives(info, None)
        self.seed = None
        self.only_resets = np.zeros(env.num_envs, dtype=bool)
        self.is_init = np.ones(env.num_envs, dtype=bool)
        self.policy.reset()

    def _step(self, columns: Columns, deterministic: bool) -> None:
        """Act once in every slot and append to the columns."""
        outcome = self._act(deterministic)

        # Slots in which this was a step of the policy: the environment neither only reset, nor failed, nor made it wait
        slots = len(outcome.done)
        self.failed = flags(outcome.info, FAILED, slots=slots)
        waiting = flags(outcome.info, WAITING, slots=slots)
        if WAITING in outcome.info and (outcome.reward[waiting] != 0).any():
            self.pays_while_waiting = True
        is_step = ~(self.only_resets | self.failed | waiting)
        is_init = self.is_init | self.failed

        # Lives
        lives = read_lives(outcome.info, self.lives)
        life_lost = None
        if lives is not None and self.lives is not None:
            life_lost = (lives < self.lives) & is_step

        # The step
        next_observation, next_action_mask = self._successor(outcome)
        columns["observation"].append(self.observation)
        columns["action_mask"].append(self.action_mask)
        columns["state"].append(outcome.step.state)
        columns["action"].append(outcome.step.action)
        columns["log_prob"].append(outcome.step.log_prob)
        columns["reward"].append(outcome.reward)
        columns["terminated"].append(outcome.terminated)
        columns["truncated"].append(outcome.truncated)
        columns["next_observation"].append(next_observation)
        columns["next_action_mask"].append(_mask_tensor(next_action_mask))
        columns["life_lost"].append(life_lost)
        columns["mask"].append(is_step)
        columns["is_init"].append(is_init)
        self._prepare_next(outcome, lives, waiting)

    def _act(self, deterministic: bool) -> _Outcome:
        """Let the policy act on the present observation, and step the environment."""
        env = self.env
        mode = autoreset_mode(env)
        slots = len(self.is_init)

        # Policy
        step = self.policy.act(self.observation, action_mask=self.action_mask, deterministic=deterministic)
        space = env.single_action_space
        check_step(step, self.policy, slots=slots, action_shape=space.shape)
        if self.action_mask is not None and isinstance(space, spaces.Discrete):
            check_available(step, self.policy, action_mask=self.action_mask, space=space)

        # Environment. It may need another dtype, or bounds; the rollout keeps the sampled action.
        env_action = fit_actions(space, step.action.cpu().numpy())
        with EnvironmentAdvice():
            observation, reward, terminated, truncated, info = env.step(env_action)

        # Copies, because an environment may reuse the arrays that it returned
        check_info(info, env, method="step")
        observation = flat_observations(observation, env, method="step")
        reward = by_slot("reward", reward, env, slots=slots)
        terminated = by_slot("terminated", terminated, env, slots=slots, dtype=bool)
        truncated = by_slot("truncated", truncated, env, slots=slots, dtype=bool)
        done = terminated | truncated

        # In SAME_STEP mode a slot that is done shows the next episode already: an action must be available.
        no_action_follows = done
        if mode is AutoresetMode.SAME_STEP:
            no_action_follows = None
        action_mask = read_action_mask(info, env, no_action_follows=no_action_follows)
        return _Outcome(step, observation, reward, terminated, truncated, done, action_mask, info)

    def _successor(self, outcome: _Outcome) -> tuple[np.ndarray, np.ndarray | None]:
        """Observation and action mask that follow on the actions; of a slot that is done the final ones.

        In SAME_STEP mode ``info`` has the final ones, because the step returned the first of the next episode.
        """
        env = self.env
        done = outcome.done
        if autoreset_mode(env) is not AutoresetMode.SAME_STEP or not done.any():
            return outcome.observation, outcome.action_mask
        observation = with_final_observations(outcome.observation, outcome.info, done, env)
        final_info = outcome.info.get("final_info", {})
        final_action_mask = read_action_mask(final_info, env, no_action_follows=np.ones_like(done))
        return observation, merge_masks(outcome.action_mask, final_action_mask, done)

    def _prepare_next(self, outcome: _Outcome, lives: np.ndarray | None, waiting: np.ndarray) -> None:
        """Keep what the next step begins with. Reset slots that are done, if the environment does not (DISABLED)."""
        env = self.env
        mode = autoreset_mode(env)
        done = outcome.done
        observation = outcome.observation
        action_mask = outcome.action_mask
        if mode is AutoresetMode.DISABLED and done.any():
            # Some environments remove this mask from the options, so each call gets its own dictionary.
            observation, info = env.reset(options={"reset_mask": done.copy()})
            observation = flat_observations(observation, env, method="reset")
            reset_mask = read_action_mask(info, env, no_action_follows=~done)
            action_mask = merge_masks(action_mask, reset_mask, done)
            lives = read_lives(info, lives)
        self.observation = observation
        self.action_mask = _mask_tensor(action_mask)
        self.lives = lives

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


def agree_on_ends(env: VectorEnv, policy: Policy) -> None:
    """Let a text environment end turns as the policy does, also by its ``stop``; other environments are left alone.

    A warning names an environment of whole episodes that is no `TextVectorEnv`, and so cannot be told the ``stop``.

    Raises:
        ValueError: if they read ids differently.
    """
    lm = language_model_of(policy)
    if lm is None:
        return
    if isinstance(env, TextVectorEnv):
        _check_vocabulary(env, lm)
        env.end_turns_like(lm.turn_ends, lm.stop)
    elif lm.stop and is_episode_env(env):
        _warn_once(
            "%s ends turns by its own rules, not by the policy's stop %s: give these to the environment",
            type(env).__name__,
            lm.stop,
        )


def _check_vocabulary(env: TextVectorEnv, lm: LanguageModel) -> None:
    """Raise a ValueError unless each token of the model has its id in the environment too."""
    if env.tokenizer is lm.tokenizer or _COMPARED.get(env.tokenizer) is lm.tokenizer:
        return
    misread = misread_tokens(lm.tokenizer, env.tokenizer)
    if misread:
        raise ValueError(
            f"{len(misread)} tokens of the policy are missing or have other ids in the environment's tokenizer "
            f"(such as {min(misread)!r}), so rewards would read other texts than the policy writes: make the "
            "environment with tokenizer=policy.tokenizer"
        )
    _COMPARED[env.tokenizer] = lm.tokenizer


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


def _mask_tensor(action_mask: np.ndarray | None) -> torch.Tensor | None:
    """Action mask as policies and rollouts have it, in the same memory."""
    if action_mask is None:
        return None
    return torch.from_numpy(action_mask)


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


def _fill_rounds(rounds: Sequence[TensorDict]) -> None:
    """If some rounds have action masks or lost lives, add these columns to the others, as within a rollout."""
    for name, fill_value in (("action_mask", True), ("next_action_mask", True), ("life_lost", False)):
        columns = [part[name] for part in rounds if name in part.keys()]
        if not columns:
            continue
        shape_of_entry = columns[0].shape[2:]
        for part in rounds:
            if name not in part.keys():
                part[name] = columns[0].new_full((*part.shape, *shape_of_entry), fill_value)


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
