"""`TextVectorEnv`: text generation as a vector environment. State = prefix, action = next token."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict

from textenv.device import move
from textenv.envs.action_masks import ActionMasks, Rule, as_rule
from textenv.envs.early_scores import PORTION, EarlyScores
from textenv.envs.episode_batch import EpisodeBatch, OpenTurn, end_info, final_info
from textenv.envs.limits import Limits, StopConditions, check_at_least
from textenv.envs.task import Conversation, Task, choose_task, rows_of, score_turns
from textenv.envs.tools import Tools
from textenv.envs.transcript import OverlongPromptError, Transcript
from textenv.envs.turn import Turn, samples
from textenv.kl.penalty import KLPenalty
from textenv.lm.ends import TurnEnds
from textenv.names import check_names
from textenv.prompts.lengths import TOKENIZED_PROMPTS, LengthBounds
from textenv.prompts.plain_text import warn_of_opened_tag
from textenv.prompts.prompts import PromptList, PromptOrder, as_prompt
from textenv.prompts.tokenize import is_chat
from textenv.rewards.composite import RewardFunction, Rewards
from textenv.rewards.metrics import reward_metrics
from textenv.rewards.scores import Scores, check_count, read_scores, reward_parts
from textenv.rewards.training import evaluation
from textenv.rollout import EpisodeEnv
from textenv.state import frozen_states, set_states, states_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Deck = TypeVar("Deck", bound=PromptList)
RENDER_MODES = ["ansi", "human", "rgb_array"]

DEFAULT_SLOTS = 64
"""Slots in which whole episodes are generated, if ``num_envs`` is not given."""
MANY_EPISODES = 8
"""Episodes from which on one slot is worth a warning."""
_warn_once = functools.cache(logger.warning)

TextObservation = dict[str, np.ndarray]
"""``tokens`` int64 ``[num_envs, max_length]``, right-padded, and ``length`` int64 ``[num_envs, 1]``."""


class TextVectorEnv(VectorEnv[TextObservation, np.ndarray, np.ndarray], EpisodeEnv):
    """Text generation in ``num_envs`` slots, one token per step.

    It has two interfaces. Plain Gymnasium: `reset` and `step`, which scores each completion when it ends. Whole
    episodes, as fast as batched generation: `start_episodes`, then `advance` until no slot is `running`, then
    `take_episodes`, which scores all completions in one call (but see ``score_while_generating``).

    Args:
        task: samples prompts and scores completions; or give ``prompts`` and ``reward`` instead. With a ``reply``
            method, the episode is a conversation.
        prompts: texts, token ids, chats, or mappings with a ``"prompt"`` and further columns for the reward.
        reward: ``f(prompts, completions, completion_ids=..., **columns) -> list[float]``, or several (`Rewards`).
        tokenizer: a `transformers` tokenizer; its size is the number of actions.
        tools: functions that the model may call, see `Tools`; rewards may ask for ``tool_calls`` (`Turn.tool_calls`).
        tool_timeout: time limit in seconds of the calls of one step, or None.
        num_envs: number of slots. None: whole episodes are generated in up to 64 slots at once (a conversation's in
            one, which may hold a process), and `step` has one.
        max_prompt_tokens: maximum length of a prompt, in tokens.
        overlong: what to do with longer prompts: ``"error"`` or ``"skip"``, which leaves them out and counts them
            (`skipped_prompts`, and ``prompts/skipped`` in the log). Given prompts are all checked in the constructor.
        max_new_tokens: maximum length of a turn, in tokens. A turn that reaches it is passed to the task unfinished;
            without ``reply`` the episode then ends as ``truncated``.
        min_new_tokens: minimum length of a turn, in tokens, before it may end.
        max_turns: maximum turns of a conversation, ``truncated`` after the last (calls count); None: 1, with tools 6.
        max_length: maximum length of an episode's text in tokens, prompt and replies included; None allows
            ``max_turns * (max_prompt_tokens + max_new_tokens)``.
        stop: texts and token ids that end a turn, in addition to what ends the model's own: EOS, the ids of its
            ``generation_config``, and the chat template's end of an assistant message (`textenv.lm.ends`).
        forbidden: token ids that no turn may contain (such as all ids of `textenv.lm.ends.turn_ends`, for a fixed
            length).
        allowed: for constrained decoding: texts, one of which is the whole turn; token ids, of which a turn consists
            until it ends; or a function from the turn so far (`Turn`) to the ids allowed next (None: all).
        autoreset_mode: Gymnasium's autoreset mode.
        score_while_generating: score finished turns of `advance` in another thread while others are generated, in
            several calls of at least a quarter of the episodes; for slow rewards. The scores are the same.
        penalty: KL penalty that agents apply after each rollout.
        render_mode: ``"ansi"``, ``"human"`` (printed at each step), ``"rgb_array"`` (images) or None.

    Raises:
        ValueError: on an empty prompt list, a prompt that does not fit, ids outside the vocabulary, or an
            invalid limit.

    Example:
        >>> env = TextVectorEnv(prompts=["the film"], reward=count, tokenizer=tok)  # doctest: +SKIP
        >>> observation, info = env.reset(seed=1)  # doctest: +SKIP
    """

    @check_names
    def __init__(
        self,
        task: Task | None = None,
        *,
        prompts: Sequence[Any] | None = None,
        reward: RewardFunction | Rewards | None = None,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Callable[..., Any]] = (),
        tool_timeout: float | None = 10.0,
        num_envs: int | None = None,
        max_prompt_tokens: int = 32,
        overlong: Literal["error", "skip"] = "error",
        max_new_tokens: int = 32,
        min_new_tokens: int = 0,
        max_turns: int | None = None,
        max_length: int | None = None,
        stop: Sequence[str | int] = (),
        forbidden: Sequence[int] = (),
        allowed: Rule | Sequence[str | int] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        score_while_generating: bool = False,
        penalty: KLPenalty | None = None,
        render_mode: str | None = None,
    ) -> None:
        check_at_least("num_envs", 1 if num_envs is None else num_envs, 1)
        if render_mode not in (None, *RENDER_MODES):
            raise ValueError(f"render_mode is {render_mode!r}, expected 'ansi', 'human', 'rgb_array' or None")
        if overlong not in ("error", "skip"):
            raise ValueError(f"overlong is {overlong!r}, expected 'error' or 'skip'")
        self._overlong = overlong
        self.task = choose_task(task, prompts, reward)
        self._early = EarlyScores(self.task) if score_while_generating else None
        self.tokenizer, self.penalty, self.render_mode, self._order = tokenizer, penalty, render_mode, PromptOrder()
        self.num_envs = 1 if num_envs is None else num_envs
        """Number of slots of `step`."""
        self._several_by_default = num_envs is None and not isinstance(self.task, Conversation)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": RENDER_MODES, "render_fps": 10, "autoreset_mode": self.autoreset_mode}
        self._limits = Limits(
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            max_turns=(6 if tools else 1) if max_turns is None else max_turns,
            max_length=max_length,
            stop=(stop,) if isinstance(stop, (str, int, np.integer)) else tuple(stop),
        )
        self.ends = StopConditions(tokenizer, self._limits.stop)
        self.tools = Tools(tools, tokenizer, tool_timeout) if tools else None
        n, ends = self.ends.num_tokens, self.ends.ids
        rule = as_rule(allowed, tokenizer, num_tokens=n, ends=ends, longest=max_new_tokens)
        self._masks = ActionMasks(
            self.ends.num_tokens,
            forbidden=np.atleast_1d(np.asarray(forbidden, dtype=np.int64)).tolist(),
            ends=self.ends.ids,
            min_new_tokens=min_new_tokens,
            rule=rule,
        )
        self._slots = self._transcript(self.num_envs)
        self.max_length = self._limits.width
        """Maximum length of a prefix, in tokens."""
        self._define_spaces(self.max_length)
        self.skipped_prompts = 0
        """Number of prompts that ``overlong="skip"`` leaves out."""
        if isinstance(self.task, PromptList):
            self.task = self._checked_prompts(self.task)
            if is_chat(self.task.prompt(0)):
                warn_of_opened_tag(tokenizer)
        elif overlong == "skip":
            raise ValueError(
                f"overlong is 'skip', but {type(self.task).__name__} makes its prompts itself: leave it out"
            )
        self._ended, self._started = np.zeros(self.num_envs, dtype=bool), False  # ended: slots over and not reset yet
        self._batch: EpisodeBatch | None = None
        self.taken: tuple[list[Turn], list[int], Scores] = [], [], Scores(earned=[])  # returned last, see `report`
        self.metrics: dict[str, float] = {}
        """Metrics of the rewards, texts and calls of the episodes returned last; see `textenv.rewards.metrics`."""

    def _checked_prompts(self, deck: Deck) -> Deck:
        """Check all prompts now, not after hours; return the list without those that are too long and to be skipped.

        Raises:
            ValueError: if a prompt does not fit, or none is left.
        """
        bounds = LengthBounds()
        fitting = []
        overlong = []
        for index in range(len(deck.prompts)):
            prompt = deck.prompt(index)
            bound = bounds.bound(prompt) if index >= TOKENIZED_PROMPTS else None
            if bound is None or bound > self._limits.max_prompt_tokens:
                try:
                    bounds.note(prompt, len(self._slots.ids(prompt)))
                except OverlongPromptError:
                    if self._overlong == "error":
                        raise
                    overlong.append(prompt)
                    continue
            fitting.append(index)
        if not overlong:
            return deck
        if not fitting:
            self._slots.ids(overlong[0])  # which says what to do
        self.skipped_prompts = len(overlong)
        logger.warning(
            "%d of %d prompts have more than max_prompt_tokens=%d tokens and are left out, the first in row %s",
            len(overlong),
            len(deck.prompts),
            self._limits.max_prompt_tokens,
            overlong[0].row,
        )
        return deck.only(fitting)

    def _define_spaces(self, max_length: int) -> None:
        n = self.ends.num_tokens
        self.single_action_space = spaces.Discrete(n)
        self.single_observation_space = spaces.Dict(
            tokens=spaces.Box(0, n - 1, (max_length,), np.int64), length=spaces.Box(0, max_length, (1,), np.int64)
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_mask(self) -> torch.Tensor | None:
        """Bool ``[num_envs, n]``: tokens allowed in each slot; None if no token is ever forbidden."""
        if not self._masks.active:
            return None
        return self._masks.sets[(self._slots if self._batch is None else self._batch).open]

    @property
    def prompt_order(self) -> dict[str, int] | None:
        """Position in the order of prompts, to save and restore; see `PromptOrder.state`."""
        return self._order.state

    @prompt_order.setter
    def prompt_order(self, saved: dict[str, int] | None) -> None:
        self._order.state = saved

    @property
    def user_objects(self) -> dict[str, Any]:
        """See `EpisodeEnv.user_objects`: the task with its rewards, the tools, and the rule ``allowed``."""
        tools = {} if self.tools is None else self.tools.functions
        return {"task": self.task, "tools": tools, "allowed": self._masks.rule}

    def state_dict(self) -> dict[str, Any]:
        """Prompt order, random generator and the states of `user_objects`, between rollouts.

        Episodes of `step` are not saved: they restart.
        """
        return {
            "prompt_order": self.prompt_order,
            "np_random": self.np_random,
            "objects": states_of(self.user_objects),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; logs which objects have another state than the saved ones."""
        self.prompt_order = state["prompt_order"]
        self.np_random = state["np_random"]
        different = set_states(self.user_objects, state.get("objects", {}))  # absent before version 0.10
        if different:
            logger.warning("the state of %s is not that of the saved run: it begins anew", ", ".join(different))

    def to(self, device: torch.device) -> None:
        """Move the task's models to a device; the reference of `penalty` follows the policy by itself."""
        move(self.task, device)

    def end_turns_like(self, own: TurnEnds) -> None:
        """End turns also where a model ends its own; agents call it with their policy's before they play.

        Raises:
            ValueError: if ``forbidden`` and ``min_new_tokens`` then leave no token at the beginning of a turn.
        """
        if {*own.ids} <= {*self.ends.own.ids} and {*own.texts} <= {*self.ends.own.texts}:
            return
        self.ends.add(own)
        self._masks.forbid_before_minimum(self.ends.ids)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Context of an evaluation; see `EpisodeEnv.fork`."""
        with self._order.apart(), frozen_states(self.user_objects), evaluation():
            yield

    # --- plain Gymnasium -------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[TextObservation, dict[str, Any]]:
        """Begin new episodes; with ``options={"reset_mask": bool [num_envs]}``, only where it is True.

        Raises:
            ValueError: if the environment is closed, or a prompt does not fit.
        """
        self._check_open()
        self._seed(seed)
        mask = np.ones(self.num_envs, dtype=bool)
        if options is not None and "reset_mask" in options:
            mask = np.asarray(options["reset_mask"])
            if mask.dtype != bool or mask.shape != (self.num_envs,):
                raise ValueError(f"reset_mask is {mask.dtype} {mask.shape}, expected bool ({self.num_envs},)")
            if not self._started and not mask.all():
                raise ValueError("reset_mask leaves out slots that have no episode yet: reset all slots first")
        self._batch, self._started = None, True
        self._begin(np.flatnonzero(mask))
        self._show()
        return self._observe(), self._info()

    def step(self, actions: np.ndarray) -> tuple[TextObservation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Append one token to every slot.

        Args:
            actions: int64 ``[num_envs]``.

        Returns:
            Observation, reward float32 ``[num_envs]`` (the score where a turn ended), terminated, truncated, info.
            Where an episode ended, ``info`` has ``prompt``, ``completion`` (of the last turn) and ``end_reason``:
            ``"eos"`` (an end of the model's own), ``"stop"`` or ``"length"``, in a conversation ``"task"``,
            ``"turns"`` or ``"length"``. In SAME_STEP mode these are inside ``final_info``, and ``final_obs`` is the
            final prefix.

        Raises:
            ValueError: on an invalid action, an episode that is over, or a closed environment.
        """
        resetting = self._ended.nonzero()[0]
        actions = self._check_actions(actions, resetting)
        # If all slots are active (as at most steps), a slice, which is faster than an index array.
        rows = np.flatnonzero(~self._ended) if len(resetting) else slice(None)
        over = self._end_turns(self._slots, self._slots.append(rows, actions[rows]))
        turns = self._slots.unpaid
        reward = self._slots.assign_reward(score_turns(self.task, turns) if turns else Scores(earned=[]))
        done = np.zeros(self.num_envs, dtype=bool)
        if over:
            done[list(over)] = True
        terminated, truncated = self._slots.terminated & done, self._slots.truncated & done
        self._ended, info = done, end_info(self.num_envs, over, self._slots.end_reason)
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._begin(resetting)
        self._show()
        if self.autoreset_mode is AutoresetMode.SAME_STEP and over:
            info = final_info(self._observe(), done.copy(), info)
            self._begin(np.array(list(over)))
        return self._observe(), reward, terminated, truncated, self._info() | info

    def render(self) -> tuple[Any, ...] | None:
        """Text of each slot so far, with chosen tokens shaded by their reward; None without a render mode.

        Mode ``"human"`` prints the text and returns None; mode ``"rgb_array"`` returns an image for each slot, uint8
        ``[height, width, 3]``.
        """
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array":
            return tuple(self._slots.draw(row) for row in range(self.num_envs))
        frames = tuple(self._slots.render(row) for row in range(self.num_envs))
        if self.render_mode == "ansi":
            return frames
        several = self.num_envs > 1
        print("\n".join(f"[{slot}] {frame}" if several else frame for slot, frame in enumerate(frames)), flush=True)
        return None

    # --- whole episodes --------------------------------------------------------------------------------------

    def start_episodes(
        self, episodes: int, *, seed: int | None = None, group_size: int = 1, slots: int | None = None
    ) -> TextObservation:
        """Start a batch of exactly this many episodes and return the first observation.

        Args:
            episodes: number of rows of the next rollout; a multiple of ``group_size``.
            seed: restarts the order of prompts, as in `reset`; None continues it.
            group_size: number of neighbouring rows that share a prompt.
            slots: number of slots for this batch; None: ``num_envs``, or as many as that says if it was not given.

        Returns:
            Observation, as from `reset`; a slot with length 0 is idle.
        """
        self._check_open()
        self._seed(seed)
        check_at_least("episodes", episodes, 1)
        check_at_least("group_size", group_size, 1)
        if episodes % group_size:
            raise ValueError(f"episodes is {episodes}, expected a multiple of group_size, which is {group_size}")
        self._started = False  # ends the episodes of `step`, which needs a `reset` afterwards
        self._ended[:] = False
        self._masks.forget()
        numbers = np.repeat(self._order.next(episodes // group_size), group_size)
        if slots is None:
            slots = self._usual_slots(episodes)
        self._batch = EpisodeBatch(self._transcript(episodes), numbers.tolist(), slots)
        self._fill()
        return self._batch.observe()

    def _usual_slots(self, episodes: int) -> int:
        """Return the number of slots for a batch of whole episodes; log a warning once if a single one is slow."""
        if self._several_by_default:
            return min(episodes, DEFAULT_SLOTS)
        if self.num_envs == 1 and episodes >= MANY_EPISODES:
            advice = "%d episodes are generated one after another, in one slot: num_envs=%d is many times faster"
            _warn_once(advice, episodes, DEFAULT_SLOTS)
        return self.num_envs

    @property
    def running(self) -> np.ndarray:
        """Bool ``[slots]``: slots with a running episode."""
        return self._current_batch().running

    @property
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column, in the next rollout, of each running slot's next action (two int64 arrays)."""
        return self._current_batch().cursor

    def advance(self, actions: np.ndarray) -> tuple[TextObservation, np.ndarray]:
        """Append one token to every running slot; slots that finish get the next prompts, several at a time.

        Args:
            actions: int64 ``[slots]``; entries of idle slots are ignored.

        Returns:
            Observation, and bool ``[slots]``: slots that now hold another episode or none.
        """
        batch = self._current_batch()
        running = np.flatnonzero(batch.running)
        actions = self._masks.check(actions, running, batch.open)
        rows = batch.episode[running]
        changed = self._continue(batch, batch.transcript.append(rows, actions[running]))
        return batch.observe(), changed

    @property
    def open_turns(self) -> list[OpenTurn]:
        """Current turn of each running slot, to be generated elsewhere for `play_turns`."""
        return self._current_batch().open_turns

    def play_turns(self, turns: Sequence[Sequence[int]]) -> np.ndarray:
        """Append token ids to each of the `open_turns`, as `advance` would; return how many (int64) until its end.

        Ids after the end of a turn are dropped, one without an end stays open; a ValueError on an id that is forbidden.
        """
        batch = self._current_batch()
        taken, ended = batch.transcript.play(batch.episode[batch.running], turns)
        self._continue(batch, ended)
        return taken

    def take_episodes(self) -> TensorDict:
        """Return the finished episodes in the schema of `textenv.rollout`, with scores.

        Raises:
            ValueError: if an episode is still running.
            RewardError: if a reward fails; the episodes are kept, and this can be called again.
        """
        batch = self._current_batch()
        if batch.running.any():
            raise ValueError(f"{batch.running.sum()} episodes are still running: call advance until none is")
        turns, rows = batch.transcript.unpaid, batch.transcript.unpaid_rows
        scores = score_turns(self.task, turns, self._early.score if self._early else None)
        batch.transcript.assign_reward(scores)
        self._batch = None  # only now, so that this can be called again after a reward has failed
        return self._rollout(batch.transcript, turns, rows, scores)

    def given_episodes(self, prompts: Sequence[Any], completions: Sequence[Any], scores: Any) -> TensorDict:
        """Return a rollout (`textenv.rollout`) of episodes that were generated and scored elsewhere.

        Args:
            prompts: as of the constructor; equal ones are a group.
            completions: token ids, truncated unless they end with what ends a turn; or texts, which are ended as the
                chat template ends a message, or by EOS if the prompt is no chat.
            scores: one entry per completion, as a reward function returns them.

        Raises:
            ValueError: on different numbers of entries, or one that does not fit this environment or is not finite.
        """
        listed = all(isinstance(x, Sized) and not isinstance(x, (str, bytes, Mapping)) for x in (prompts, completions))
        if not listed or not 0 < len(prompts) == len(completions):
            said = f"prompts is {prompts!r:.100} and completions {completions!r:.100}"
            raise ValueError(f"{said}: expected two lists of equal length, with one entry per episode")
        transcript, groups = self._transcript(len(prompts)), dict[tuple[int, ...], int]()
        for row, given in enumerate(zip(prompts, completions, strict=True)):
            content, completion = (x.cpu().numpy() if isinstance(x, torch.Tensor) else x for x in given)
            prompt, pad = as_prompt(row, content), self.tokenizer.pad_token_id
            own = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
            if pad not in own and pad in (prompt.content[0], prompt.content[-1]):  # of ids: a text has characters
                raise ValueError(f"prompt {row} starts or ends with the padding token {pad}: cut off padding")
            transcript.begin(row, prompt, group=groups.setdefault(tuple(transcript.ids(prompt)), len(groups)))
            try:
                transcript.write(row, completion)
            except ValueError as error:
                raise ValueError(f"completion {row} does not fit: {error}") from error
        turns = transcript.turns(np.arange(len(prompts)))
        transcript.finish(turns)
        found = read_scores(scores, rows_of(list(turns.values())), name="scores")
        transcript.assign_reward(found)
        return self._rollout(transcript, list(turns.values()), list(turns), found)

    def samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """See `EpisodeEnv.samples`; the completion of a conversation has the replies too, ``turns`` its messages."""
        return samples(rows, *self.taken)

    def report(self, turns: list[Turn], rows: list[int], scores: Scores) -> None:
        """Take `samples` and `metrics` from these turns; ``rows`` has the episode of each, ``taken`` all three."""
        self.taken, count = (turns, rows, scores), len(set(rows))
        self.metrics = reward_metrics(scores, [turn.completion_ids for turn in turns])
        if self._overlong == "skip":
            self.metrics["prompts/skipped"] = float(self.skipped_prompts)
        if self.tools:
            failed = [call["error"] for turn in turns if turn.last for call in turn.tool_calls]
            self.metrics |= {"tools/calls": len(failed) / count, "tools/errors": sum(failed) / count}

    # --- internal --------------------------------------------------------------------------------------------

    def _rollout(self, transcript: Transcript, turns: list[Turn], rows: list[int], scores: Scores) -> TensorDict:
        """Return the rollout of scored episodes; keep their texts and metrics."""
        self.report(turns, rows, scores)
        rollout = transcript.rollout()
        if len(scores.parts) > 1:
            parts = torch.from_numpy(reward_parts(scores, rows, episodes=len(rollout)))
            rollout["reward_parts"] = parts[:, None].expand(*rollout.shape, *parts.shape[1:])
        return rollout

    def _transcript(self, rows: int) -> Transcript:
        transcript = Transcript(rows, self.tokenizer, limits=self._limits, masks=self._masks, ends=self.ends)
        transcript.tools = self.tools
        return transcript

    def _seed(self, seed: int | None) -> None:
        if self._early is not None:
            self._early.forget()
        super().reset(seed=seed)
        self._order.start(self.np_random, anew=seed is not None)

    def _deal(self, transcript: Transcript, rows: np.ndarray, numbers: Sequence[int]) -> None:
        """Begin episodes in these rows with the prompts at these positions."""
        prompts = self.task.sample_prompts(numbers, seed=self._order.seed)
        check_count(prompts, len(rows), name=f"sample_prompts of {type(self.task).__name__}", item="Prompt")
        for row, prompt, number in zip(rows, prompts, numbers, strict=True):
            transcript.begin(row, prompt, group=number)

    def _begin(self, slots: np.ndarray) -> None:
        """Begin new episodes in these slots, for `step`."""
        if len(slots):
            self._deal(self._slots, slots, self._order.next(len(slots)))
            self._ended[slots] = False

    def _fill(self) -> np.ndarray:
        """Begin the batch's next episodes in idle slots, while any are left; return these slots."""
        batch = self._current_batch()
        slots, rows = batch.refill()
        if len(rows):
            self._deal(batch.transcript, rows, [batch.numbers[row] for row in rows])
        return slots

    def _continue(self, batch: EpisodeBatch, ended: np.ndarray) -> np.ndarray:
        """After these rows' turns ended, reply to them and refill slots; return bool: slots that changed episodes."""
        over = self._end_turns(batch.transcript, ended)
        changed = np.zeros(len(batch.episode), dtype=bool)
        if over:
            changed[batch.release(list(over))] = True
            changed[self._fill()] = True
        if self._early is not None:
            self._early.offer(batch.transcript.unpaid, least=PORTION * len(batch.numbers))
        return changed

    def _end_turns(self, transcript: Transcript, rows: np.ndarray) -> dict[int, Turn]:
        """Let the task reply to the finished turns of these rows; return, by row, those that ended an episode."""
        if not len(rows):
            return {}
        turns = transcript.turns(rows)
        results: dict[int, Any] = self.tools.reply(turns) if self.tools else {}
        left = {row: turn for row, turn in turns.items() if row not in results}
        if not isinstance(self.task, Conversation):
            transcript.finish(left)
        elif left:
            replies = self.task.reply(list(left.values()))
            check_count(replies, len(left), name=f"reply of {type(self.task).__name__}", item="text, None or TRUNCATED")
            results |= zip(left, replies, strict=True)
        for row, said in results.items():
            transcript.answer(row, turns[row], said)
        return {row: turn for row, turn in turns.items() if turn.last}

    def _observe(self) -> TextObservation:
        return {"tokens": self._slots.tokens.copy(), "length": self._slots.length[:, None].copy()}

    def _current_batch(self) -> EpisodeBatch:
        if self._batch is None:
            raise ValueError("no episodes were started: call start_episodes first")
        return self._batch

    def _show(self) -> None:
        if self.render_mode == "human":
            self.render()

    def _info(self) -> dict[str, Any]:
        mask = self.action_mask
        return {} if mask is None else {"action_mask": mask.numpy().astype(np.int8)}

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("this environment is closed: make a new one")

    def _check_actions(self, actions: np.ndarray, ended: np.ndarray) -> np.ndarray:
        self._check_open()
        if not self._started or self._slots.unpaid:
            why = "the reward of a finished turn failed" if self._started else "no episode is running"
            raise ValueError(f"{why}: call reset before step")
        allowed = np.where(self._ended, 0, self._slots.open) if len(ended) else self._slots.open
        actions = self._masks.check(actions, slice(None), allowed)
        if self.autoreset_mode is AutoresetMode.DISABLED and len(ended):
            raise ValueError(
                f"the episodes in slots {ended.tolist()} are over: "
                'call reset(options={"reset_mask": mask}) for them first'
            )
        return actions
