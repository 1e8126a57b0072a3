"""`TextVectorEnv`: text generation as a vector environment. State = prefix, action = next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import NonTensorData, TensorDict

from textenv.kl import KLPenalty
from textenv.task import FunctionTask, Prompt, PromptList, RewardFunction, Task, score_turns
from textenv.transcript import Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Observation = dict[str, np.ndarray]
"""``tokens`` int64 ``[num_envs, max_length]``, right-padded, and ``length`` int64 ``[num_envs]``."""


class TextVectorEnv(VectorEnv[Observation, np.ndarray, np.ndarray]):
    """Text generation in ``num_envs`` slots, one token a step.

    It is stepped in one of two ways. Plain Gymnasium: `reset` and `step`, where each answer is scored when it
    ends. Whole episodes, as fast as batched generation: `start_episodes`, then `advance` until no slot is
    `running`, then `take_episodes`, where all answers are scored in one call.

    Args:
        task: deals prompts and scores answers; or give ``prompts`` and ``reward`` instead.
        prompts: texts, token ids, or mappings with a ``"prompt"`` and further columns for the reward.
        reward: ``f(prompts, completions, completion_ids=..., **columns) -> list[float]``.
        tokenizer: a `transformers` tokenizer; its size is the number of actions.
        num_envs: slots.
        max_prompt_tokens: longest prompt, in tokens.
        max_new_tokens: longest answer, in tokens; an answer cut there is ``truncated``.
        forbidden: ids that no answer may contain (EOS, for answers of fixed length).
        autoreset_mode: what follows the end of an episode, as Gymnasium defines it.
        penalty: a KL penalty that agents charge after each rollout.
        render_mode: ``"ansi"`` or None.

    Raises:
        ValueError: on an empty prompt list, forbidden ids outside the vocabulary, or a limit below 1.

    Example:
        >>> env = TextVectorEnv(prompts=["the film"], reward=count, tokenizer=tok)  # doctest: +SKIP
        >>> observation, info = env.reset(seed=1)  # doctest: +SKIP
    """

    def __init__(
        self,
        task: Task | None = None,
        *,
        prompts: Sequence[str | Sequence[int] | Mapping[str, Any]] | None = None,
        reward: RewardFunction | None = None,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: int = 1,
        max_prompt_tokens: int = 32,
        max_new_tokens: int = 32,
        forbidden: Sequence[int] = (),
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        penalty: KLPenalty | None = None,
        render_mode: str | None = None,
    ) -> None:
        for name, value in (("num_envs", num_envs), ("max_prompt_tokens", max_prompt_tokens)):
            _check_at_least_one(name, value)
        _check_at_least_one("max_new_tokens", max_new_tokens)
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode is {render_mode!r}, expected 'ansi' or None")
        self.task = _choose_task(task, prompts, reward)
        self.tokenizer, self.penalty, self.render_mode = tokenizer, penalty, render_mode
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": ["ansi"], "render_fps": 10, "autoreset_mode": self.autoreset_mode}
        self._limits = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        self._slots = Transcript(num_envs, tokenizer, **self._limits)
        self.allowed_sets = _allowed_sets(forbidden, self._slots.num_tokens)
        self.max_length = max_prompt_tokens + max_new_tokens
        """Longest prefix, in tokens."""
        self._define_spaces(self.max_length)
        if isinstance(self.task, PromptList):
            for prompt in self.task.prompts:  # one that cannot be asked is known now, not in hours
                self._slots.ids(prompt)
        self._ended = np.zeros(num_envs, dtype=bool)  # slots whose episode is over and that were not reset
        self._started = False
        self._batch: Transcript | None = None
        self._waiting: list[Prompt] = []
        self._episode = np.zeros(num_envs, dtype=np.int64)

    def _define_spaces(self, max_length: int) -> None:
        n = self._slots.num_tokens
        self.single_action_space = spaces.Discrete(n)
        self.single_observation_space = spaces.Dict(
            tokens=spaces.Box(0, n - 1, (max_length,), np.int64), length=spaces.Box(0, max_length, (), np.int64)
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_mask(self) -> torch.Tensor | None:
        """Bool ``[num_envs, n]``: the tokens allowed in each slot; None where nothing is forbidden."""
        return None if self.allowed_sets is None else self.allowed_sets[1].expand(self.num_envs, -1)

    # --- plain Gymnasium -------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin new episodes; ``options={"reset_mask": bool [num_envs]}`` in those slots only.

        Raises:
            ValueError: if the environment is closed, or a prompt does not fit.
        """
        self._check_open()
        super().reset(seed=seed)
        mask = np.ones(self.num_envs, dtype=bool)
        if options is not None and "reset_mask" in options:
            mask = np.asarray(options["reset_mask"])
            if mask.dtype != bool or mask.shape != (self.num_envs,):
                raise ValueError(f"reset_mask is {mask.dtype} {mask.shape}, expected bool ({self.num_envs},)")
            if not self._started and not mask.all():
                raise ValueError("reset_mask leaves out slots that have no episode yet: reset all of them first")
        self._batch, self._started = None, True
        self._begin(np.flatnonzero(mask))
        return self._observe(), self._info()

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Append one token to every slot.

        Args:
            actions: int64 ``[num_envs]``.

        Returns:
            Observation, reward float32 ``[num_envs]`` (the score, where an answer ended), terminated, truncated,
            info. Where an episode ended, ``info`` has ``end_reason`` (``"eos"`` or ``"length"``), ``prompt`` and
            ``completion``; in SAME_STEP mode they stand inside ``final_info``, and ``final_obs`` is the final prefix.

        Raises:
            ValueError: on a token that is no action, an episode that is over, or a closed environment.
        """
        actions = self._check_actions(actions)
        next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        resetting = np.flatnonzero(self._ended)
        rows = np.flatnonzero(~self._ended)
        done = np.zeros(self.num_envs, dtype=bool)
        done[rows] = self._slots.append(rows, actions[rows])
        ended = np.flatnonzero(done)
        reward = np.zeros(self.num_envs, dtype=np.float32)
        if len(ended):
            reward[ended] = score_turns(self.task, self._slots.turns(ended))
        terminated, truncated = self._slots.terminated & done, self._slots.truncated & done
        self._ended = done.copy()
        if next_step:
            self._begin(resetting)
            return self._observe(), reward, terminated, truncated, self._info() | self._end_info(ended)
        info = self._end_info(ended)
        if self.autoreset_mode is AutoresetMode.SAME_STEP and len(ended):
            info = self._final_info(ended, done, info)
            self._begin(ended)
        return self._observe(), reward, terminated, truncated, self._info() | info

    def render(self) -> tuple[str, ...] | None:
        """The text of each slot so far, in render mode ``"ansi"``."""
        if self.render_mode is None:
            return None
        return tuple(
            str(self.tokenizer.decode(ids[:length]))
            for ids, length in zip(self._slots.tokens, self._slots.length, strict=True)
        )

    # --- whole episodes --------------------------------------------------------------------------------------

    def start_episodes(self, episodes: int, *, seed: int | None = None, group_size: int = 1) -> Observation:
        """Deal prompts for exactly this many episodes, fill the slots and return the first observation.

        Args:
            episodes: rows of the coming rollout; prompts that fit a multiple of ``group_size``.
            seed: starts the prompts anew, as in `reset`; None goes on.
            group_size: neighbouring rows that share a prompt.

        Returns:
            As `reset`; a slot whose length is 0 has nothing to do.
        """
        self._check_open()
        super().reset(seed=seed)
        _check_at_least_one("episodes", episodes)
        self._started = False  # the slots' own episodes are over; `step` wants a `reset` afterwards
        self._ended[:] = False
        prompts = self.task.deal(episodes, self.np_random, group_size=group_size)
        self._batch = Transcript(episodes, self.tokenizer, **self._limits)
        for row, prompt in enumerate(prompts):
            self._batch.begin(row, prompt)
        self._next = min(self.num_envs, episodes)
        self._episode = np.where(np.arange(self.num_envs) < episodes, np.arange(self.num_envs), -1)
        return self._observe_batch()

    @property
    def running(self) -> np.ndarray:
        """Bool ``[num_envs]``: the slots that have an episode to go on with."""
        return self._episode >= 0

    @property
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column in the coming rollout of the next action of each running slot (two int64)."""
        episode = self._episode[self.running]
        return episode, self._current_batch().length[episode] - 1

    def advance(self, actions: np.ndarray) -> tuple[Observation, np.ndarray]:
        """Append one token to every running slot; a slot that ends is given the next prompt, while there are any.

        Args:
            actions: int64 ``[num_envs]``; what stands in idle slots is ignored.

        Returns:
            Observation, and bool ``[num_envs]``: the slots that hold another episode than before, or none.
        """
        batch, running = self._current_batch(), np.flatnonzero(self.running)
        self._check_vocabulary(actions, running)
        done = batch.append(self._episode[running], actions[running])
        changed = np.zeros(self.num_envs, dtype=bool)
        changed[running] = done
        for slot in running[done]:
            more = self._next < len(batch.length)
            self._episode[slot] = self._next if more else -1
            self._next += more
        return self._observe_batch(), changed

    def take_episodes(self) -> TensorDict:
        """Hand over the finished episodes in the schema of `textenv.rollout`, scored in one call.

        Raises:
            ValueError: if an episode is still under way.
        """
        batch = self._current_batch()
        if self.running.any():
            raise ValueError(f"{self.running.sum()} episodes are under way: call advance until none is running")
        rollout = batch.rollout(score_turns(self.task, batch.turns(range(len(batch.length)))))
        if self.allowed_sets is not None:
            rollout["allowed"] = rollout["mask"].long()
            rollout["allowed_sets"] = NonTensorData(self.allowed_sets, batch_size=rollout.batch_size)
        self._batch = None
        return rollout

    # --- inside ----------------------------------------------------------------------------------------------

    def _begin(self, rows: np.ndarray) -> None:
        if len(rows):
            for row, prompt in zip(rows, self.task.deal(len(rows), self.np_random), strict=True):
                self._slots.begin(row, prompt)
            self._ended[rows] = False

    def _observe(self) -> Observation:
        return {"tokens": self._slots.tokens.copy(), "length": self._slots.length.copy()}

    def _observe_batch(self) -> Observation:
        batch, running = self._current_batch(), self.running
        return {"tokens": batch.tokens[self._episode], "length": np.where(running, batch.length[self._episode], 0)}

    def _current_batch(self) -> Transcript:
        if self._batch is None:
            raise ValueError("no episodes were started: call start_episodes first")
        return self._batch

    def _info(self) -> dict[str, Any]:
        return {} if self.action_mask is None else {"action_mask": self.action_mask.numpy().astype(np.int8)}

    def _end_info(self, ended: np.ndarray) -> dict[str, Any]:
        if not len(ended):
            return {}
        info = {name: np.full(self.num_envs, None, dtype=object) for name in ("end_reason", "prompt", "completion")}
        for row, turn in zip(ended, self._slots.turns(ended), strict=True):
            info["end_reason"][row] = "eos" if turn.terminated else "length"
            info["prompt"][row], info["completion"][row] = turn.prompt_text, turn.completion
        here = np.isin(np.arange(self.num_envs), ended)
        return info | {f"_{name}": here.copy() for name in info}

    def _final_info(self, ended: np.ndarray, done: np.ndarray, info: dict[str, Any]) -> dict[str, Any]:
        """What SAME_STEP mode says of the episodes that ended: as Gymnasium does, an object array with holes."""
        observation, final = self._observe(), np.full(self.num_envs, None, dtype=object)
        for slot in ended:
            final[slot] = {name: column[slot] for name, column in observation.items()}
        return {"final_obs": final, "_final_obs": done, "final_info": info, "_final_info": done.copy()}

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("this environment is closed: make a new one")

    def _check_actions(self, actions: np.ndarray) -> np.ndarray:
        self._check_open()
        if not self._started:
            raise ValueError("no episode is under way: call reset before step")
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or not np.issubdtype(actions.dtype, np.integer):
            raise ValueError(
                f"actions are {actions.dtype} of shape {actions.shape}, expected integers of shape ({self.num_envs},)"
            )
        self._check_vocabulary(actions, np.arange(self.num_envs))
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            raise ValueError(
                f"the episodes in slots {np.flatnonzero(self._ended).tolist()} are over: "
                'call reset(options={"reset_mask": mask}) for them first'
            )
        return actions

    def _check_vocabulary(self, actions: np.ndarray, slots: np.ndarray) -> None:
        n = self._slots.num_tokens
        for slot in slots[(actions[slots] < 0) | (actions[slots] >= n)]:
            raise ValueError(f"action {actions[slot]} in slot {slot} is outside the vocabulary of 0 to {n - 1}")
        if self.allowed_sets is None:
            return
        for slot in slots[~self.allowed_sets[1].numpy()[actions[slots]] & ~self._ended[slots]]:
            raise ValueError(
                f"action {actions[slot]} in slot {slot} is a forbidden token here: choose one where "
                "info['action_mask'] is 1"
            )


def _check_at_least_one(name: str, value: int) -> None:
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")


def _choose_task(task: Task | None, prompts: Any, reward: RewardFunction | None) -> Task:
    if task is not None and prompts is None and reward is None:
        return task
    if task is None and prompts is not None and reward is not None:
        return FunctionTask(prompts, reward)
    raise ValueError("give either a task, or both prompts and reward")


def _allowed_sets(forbidden: Sequence[int], num_tokens: int) -> torch.Tensor | None:
    """Bool ``[2, num_tokens]``: everything, and everything but the forbidden ids; None if there are none."""
    if not len(forbidden):
        return None
    if min(forbidden) < 0 or max(forbidden) >= num_tokens or len(set(forbidden)) >= num_tokens:
        raise ValueError(
            f"forbidden is {sorted(forbidden)}, expected ids from 0 to {num_tokens - 1} that leave at least one token"
        )
    sets = torch.ones(2, num_tokens, dtype=torch.bool)
    sets[1, list(forbidden)] = False
    return sets
