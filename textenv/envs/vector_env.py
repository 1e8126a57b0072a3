"""`TextVectorEnv`: text generation as a vector environment. State = prefix, action = next token.

Four kinds of index are used here and in the modules beside it:

- slot: place in the batch that the model reads
- row: row of the transcript and of the rollout; in `TextVectorEnv.step`, row i is slot i
- episode: index of an episode. It has several rows where the task gives the model a new context
- prompt number: position in the prompt order, equal within a group
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.core import RenderFrame
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict

from textenv.device import move
from textenv.envs.action_masks import ActionMasks, Rule, as_rule, as_token_ids
from textenv.envs.early_scores import MIN_PORTION, EarlyScores
from textenv.envs.episode_batch import EpisodeBatch, Info, OpenTurn, end_info, final_info
from textenv.envs.limits import Limits, StopConditions, check_at_least, check_tokenizer
from textenv.envs.step_slots import StepSlots
from textenv.envs.task import (
    Conversation,
    FunctionTask,
    SeveralAgents,
    ShortRows,
    Task,
    WritesChats,
    choose_task,
    rows_of,
    score_turns,
)
from textenv.envs.tools import Tools, check_tool_timeout
from textenv.envs.transcript import OverlongPromptError, Transcript
from textenv.envs.turn import Turn, samples
from textenv.kl.penalty import KLPenalty
from textenv.lm.earlier_turns import warn_of_earlier_turns
from textenv.lm.ends import TurnEnds, as_stops
from textenv.names import check_names
from textenv.prompts.lengths import TOKENIZED_PROMPTS, LengthBounds
from textenv.prompts.plain_text import warn_of_opened_tag
from textenv.prompts.prompts import Prompt, PromptList, PromptOrder, as_prompt
from textenv.prompts.samplers import PromptDraws, PromptSampler, as_sampler
from textenv.prompts.template_variables import set_template_variables
from textenv.prompts.tokenize import is_chat, warn_of_unread_columns, warn_of_unwritten
from textenv.rewards.composite import RewardFunction, Rewards
from textenv.rewards.metrics import reward_metrics
from textenv.rewards.scores import Scores, check_count, read_scores, reward_parts
from textenv.rewards.training import evaluation
from textenv.rollout import EpisodeEnv, Sample, episode_of_row, num_episodes_of
from textenv.state import frozen_states, set_states, states_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
PromptListT = TypeVar("PromptListT", bound=PromptList)
RENDER_MODES = ["ansi", "human", "rgb_array"]

DEFAULT_SLOTS = 64
"""Maximum number of slots for whole episodes if ``num_envs`` is None."""
MIN_EPISODES_OF_WARNING = 8
"""A batch of at least this many episodes in a single slot logs a warning."""
_warn_once = functools.cache(logger.warning)

TextObservation = dict[str, np.ndarray]
"""``tokens`` int64 ``[num_envs, max_length]``, right-padded, and ``length`` int64 ``[num_envs, 1]``."""


class EnvState(TypedDict):
    """State of a `TextVectorEnv` between rollouts."""

    prompt_order: dict[str, int] | None
    """See `PromptOrder.state`."""
    np_random: np.random.Generator
    objects: NotRequired[Mapping[str, Mapping[str, object]]]
    """States of `user_objects` and of the sampler, by name; absent before version 0.10."""


class ScoredTurns(NamedTuple):
    """Turns of finished episodes."""

    turns: list[Turn]
    episodes: list[int]
    """Episode of each turn."""
    scores: Scores


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
        sampler: chooses ``prompts`` by what the policy has earned so far: `textenv.ByPassRate`, `textenv.Curriculum`,
            one of your own, or a text (`textenv.prompts.samplers`). The environment works with a copy. None: every
            prompt is used once before one repeats. Evaluations use no sampler.
        tools: functions that the model may call, see `Tools`; rewards may ask for ``tool_calls`` (`Turn.tool_calls`).
        tool_timeout: time limit in seconds of the calls of one step, or None.
        chat_template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``. They become
            defaults in ``tokenizer.chat_template``, so that all that use this tokenizer, and the policy that is saved,
            render the same (`textenv.prompts.template_variables`).
        earlier_turns: what the model sees of its earlier answers in a chat. ``"transcript"``: what it wrote, to which
            replies are appended. ``"template"``: what the chat template shows of them, which may be without thoughts;
            each later turn is then a further row of the episode. If the two differ, ``"transcript"`` logs a warning.
        num_envs: number of slots. None: one slot for `step`, and up to 64 for whole episodes (but one if the task is a
            conversation, which may hold a process for each slot).
        max_prompt_tokens: maximum length of a prompt, in tokens.
        overlong: what to do with longer prompts: ``"error"`` or ``"skip"``, which leaves them out and counts them
            (`skipped_prompts`, and ``prompts/skipped`` in the log). The constructor checks all ``prompts``.
        max_new_tokens: maximum length of a turn, in tokens. A turn that reaches it is passed to the task unfinished;
            without ``reply`` the episode then ends as ``truncated``.
        min_new_tokens: minimum length of a turn, in tokens, before it may end.
        max_turns: maximum number of turns of an episode, which is ``truncated`` after the last one; turns that call
            tools count. None: 1, or 6 with tools.
        max_length: maximum length of an episode's text in tokens, prompt and replies included; None allows
            ``max_turns * (max_prompt_tokens + max_new_tokens)``. Where a task gives the model a new context, the length
            counts from there; a task of `textenv.envs.task.ShortRows`, such as games with a ``history``, says how many
            turns a text may have.
        stop: texts and token ids that end a turn, in addition to the model's own ends (`textenv.lm.ends`): EOS, the
            ids of its ``generation_config``, and the chat template's end of an assistant message.
        forbidden: token ids that no turn may contain (such as all ids of `textenv.lm.ends.turn_ends`, for a fixed
            length).
        allowed: for constrained decoding: texts, one of which is the whole turn; token ids, of which a turn consists
            until it ends; or a function from the turn so far (`Turn`) to the ids allowed next (None: all). An episode
            is truncated before a turn for which the longest text has no room.
        autoreset_mode: Gymnasium's autoreset mode.
        score_while_generating: score finished turns in another thread while `advance` generates others; for slow
            rewards. A call of the reward gets at least a quarter as many turns as there are episodes, the last call the
            remaining ones. The scores are the same.
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
        prompts: Sequence[object] | None = None,
        reward: RewardFunction | Rewards | None = None,
        sampler: PromptSampler | str | None = None,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Callable[..., object]] = (),
        tool_timeout: float | None = 10.0,
        chat_template_kwargs: Mapping[str, object] | None = None,
        earlier_turns: Literal["transcript", "template"] = "transcript",
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
        _check_options(
            num_envs, overlong=overlong, render_mode=render_mode, score_while_generating=score_while_generating
        )
        check_tool_timeout(tool_timeout)
        check_tokenizer(tokenizer)
        set_template_variables(tokenizer, chat_template_kwargs)
        _check_earlier_turns(earlier_turns, tokenizer)

        # The task, and how its episodes are played
        self.task = choose_task(task, prompts, reward)
        self.tokenizer = tokenizer
        self._chat_template = tokenizer.chat_template
        self._agents = self.task.agents if isinstance(self.task, SeveralAgents) else 1
        self.earlier_turns: Literal["transcript", "template"] = earlier_turns
        """What the model sees of its earlier answers in a chat."""
        self.penalty: KLPenalty | None = penalty
        self.num_envs = 1 if num_envs is None else num_envs
        """Number of slots of `step`."""
        self._many_slots_by_default = num_envs is None and not isinstance(self.task, Conversation)
        self.render_mode = render_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": RENDER_MODES, "render_fps": 10, "autoreset_mode": self.autoreset_mode}

        # Limits, ends of turns, tools, masks of allowed tokens
        if max_turns is None:
            max_turns = 6 if tools else 1
        self._limits = Limits(
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            max_turns=max_turns,
            max_length=max_length,
            max_turns_per_row=_max_turns_per_row(self.task, tools),
            stop=as_stops(stop),
        )
        self.ends = StopConditions(tokenizer, self._limits.stop)
        self.tools: Tools | None = None
        if tools:
            self.tools = Tools(tools, tokenizer, tool_timeout)
        self._masks = _masks_of(forbidden, allowed, limits=self._limits, ends=self.ends)

        # Spaces
        self.max_length = self._limits.width
        """Maximum length of a prefix, in tokens."""
        self._define_spaces(self.max_length)

        # `step`
        self._step_slots = StepSlots(self._transcript(self.num_envs, one_row=True))

        # Prompts, which may replace the task
        self._order = PromptOrder()
        self._overlong = overlong
        self.skipped_prompts = 0
        """Number of prompts that ``overlong="skip"`` leaves out."""
        self._has_chats = False
        """Whether one of the prompts of a list is a chat."""
        self._draws: PromptDraws | None = None
        """Draws the prompts by the sampler, if there is one."""
        self._prepare_prompts(sampler)

        # Whole episodes: the batch that is being generated, and results of the last one
        self._early: EarlyScores | None = None
        if score_while_generating:
            self._early = EarlyScores(self.task)  # the task that `_prepare_prompts` has left
        self._batch: EpisodeBatch | None = None
        self.scored_turns = ScoredTurns([], [], Scores(score=[]))
        """Turns of the episodes returned last; see `report`."""
        self.metrics: dict[str, float] = {}
        """Metrics of the rewards, texts and calls of the episodes returned last; see `textenv.rewards.metrics`."""

    def _prepare_prompts(self, sampler: PromptSampler | str | None) -> None:
        """Check all prompts; replace `task` if some are skipped. Needs `_step_slots`.

        Raises:
            ValueError: if a prompt does not fit, or if prompts are to be skipped or drawn that the task makes itself.
        """
        if isinstance(self.task, PromptList):
            self.task = self._checked_prompts(self.task)
            if self._has_chats:
                warn_of_opened_tag(self.tokenizer)
        elif self._overlong == "skip":
            raise ValueError(
                f"overlong is 'skip', but {type(self.task).__name__} makes its prompts itself: leave it out"
            )
        if sampler is not None:
            self._draws = _draws_of(sampler, self.task)
        self._warn_of_earlier_turns()

    def _warn_of_earlier_turns(self) -> None:
        """Log a warning if chats may have several turns, and the template shows earlier answers differently."""
        if self._limits.max_turns == 1 or self.earlier_turns == "template":
            return
        if isinstance(self.task, PromptList) and not self._has_chats:
            return
        if isinstance(self.task, WritesChats) and not self.task.chat:
            return
        reply_roles = []
        if isinstance(self.task, Conversation):
            reply_roles.append("user")
        if self.tools:
            reply_roles.append("tool")
        warn_of_earlier_turns(self.tokenizer, reply_roles=reply_roles)

    def _checked_prompts(self, prompt_list: PromptListT) -> PromptListT:
        """Check all prompts now, not hours after the start, and log what the texts of chats lack.

        Returns:
            The list; with ``overlong="skip"`` without the prompts that are too long.

        Raises:
            ValueError: if a prompt does not fit, or none is left.
        """
        # In one pass, because prompts may be read from a disk
        bounds = LengthBounds()
        fitting = []
        overlong = []
        for index in range(len(prompt_list.prompts)):
            prompt = prompt_list.prompt(index)
            if not self._fits(prompt, bounds, may_estimate=index >= TOKENIZED_PROMPTS):
                overlong.append(prompt)
                continue
            fitting.append(index)
            if is_chat(prompt):
                self._has_chats = True
                warn_of_unwritten(prompt.messages, self.tokenizer)
                warn_of_unread_columns(prompt)

        # Leave out those that are too long
        if not overlong:
            return prompt_list
        if not fitting:
            self._step_slots.transcript.ids(overlong[0])  # raises the error that says what to do
        self.skipped_prompts = len(overlong)
        logger.warning(
            "%d of %d prompts have more than max_prompt_tokens=%d tokens and are left out, the first in row %s",
            len(overlong),
            len(prompt_list.prompts),
            self._limits.max_prompt_tokens,
            overlong[0].row,
        )
        return prompt_list.only(fitting)

    def _fits(self, prompt: Prompt, bounds: LengthBounds, *, may_estimate: bool) -> bool:
        """Return whether a prompt is short enough.

        Args:
            prompt: the prompt.
            bounds: upper bounds of prompts' lengths, to which this prompt's length is added if it is tokenized.
            may_estimate: whether an upper bound may do. Tokenizing takes time.

        Raises:
            ValueError: if it does not fit; if it is too long, only with ``overlong="error"``.
        """
        if may_estimate:
            bound = bounds.bound(prompt)
            if bound is not None and bound <= self._limits.max_prompt_tokens:
                return True
        try:
            num_tokens = len(self._step_slots.transcript.ids(prompt))
        except OverlongPromptError:
            if self._overlong == "error":
                raise
            return False
        bounds.note(prompt, num_tokens)
        return True

    def _define_spaces(self, max_length: int) -> None:
        num_tokens = self.ends.num_tokens
        self.single_action_space = spaces.Discrete(num_tokens)
        self.single_observation_space = spaces.Dict(
            tokens=spaces.Box(0, num_tokens - 1, (max_length,), np.int64),
            length=spaces.Box(0, max_length, (1,), np.int64),
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_mask(self) -> torch.Tensor | None:
        """Bool ``[num_envs, n]``: tokens allowed in each slot; None if no token is ever forbidden.

        If all slots have the same mask, it is one row, expanded.
        """
        if not self._masks.active:
            return None
        mask_index = self._step_slots.next_mask
        if self._batch is not None:
            mask_index = self._batch.next_mask
        if (mask_index == mask_index[0]).all():
            return self._masks.sets[mask_index[0]].expand(len(mask_index), -1)
        return self._masks.sets[mask_index]

    @property
    def limits(self) -> Limits:
        """Length limits and stop sequences, as they were given."""
        return self._limits

    @property
    def forbidden(self) -> Sequence[int]:
        """Token ids that no turn may contain, sorted."""
        return self._masks.forbidden

    @property
    def has_rule(self) -> bool:
        """Whether ``allowed`` says which tokens a turn may have."""
        return self._masks.rule is not None

    @property
    def context_number(self) -> np.ndarray:
        """int64 ``[num_envs]``: how often the task has given each slot of `step` a new context in its episode."""
        return self._step_slots.transcript.row_number.copy()

    @property
    def prompt_order(self) -> dict[str, int] | None:
        """Position in the order of prompts, to save and restore; see `PromptOrder.state`."""
        return self._order.state

    @prompt_order.setter
    def prompt_order(self, saved: dict[str, int] | None) -> None:
        self._order.state = saved

    @property
    def sampler(self) -> PromptSampler | None:
        """The environment's copy of its sampler; None without one, and in an evaluation (`fork`)."""
        if self._draws is None:
            return None
        return self._draws.sampler

    @property
    def settings(self) -> dict[str, int | float | str | bool | None]:
        """Limits, ends of turns, and what is known of prompts and rewards: a run resumed with others says so."""
        limits = self._limits
        settings: dict[str, int | float | str | bool | None] = {
            "max_prompt_tokens": limits.max_prompt_tokens,
            "max_new_tokens": limits.max_new_tokens,
            "max_turns": limits.max_turns,
            "turns_end_with": str(self.ends),
        }
        if isinstance(self.task, PromptList):
            settings["prompts"] = self.task.summary
        if isinstance(self.task, FunctionTask):
            weights = {name: weight for name, (_, weight) in self.task.rewards.functions.items()}
            settings["rewards"] = str(weights)
        return settings

    @property
    def user_objects(self) -> dict[str, object]:
        """See `EpisodeEnv.user_objects`: the task with its rewards, the tools, and the rule ``allowed``."""
        functions = {} if self.tools is None else self.tools.functions
        return {"task": self.task, "tools": functions, "allowed": self._masks.rule}

    def state_dict(self) -> EnvState:
        """Prompt order, random generator and the states of `user_objects` and sampler, between rollouts.

        Episodes of `step` are not saved: they restart.
        """
        return {
            "prompt_order": self.prompt_order,
            "np_random": self.np_random,
            "objects": states_of(self._stateful_parts),
        }

    def load_state_dict(self, state: EnvState) -> None:
        """Restore the state that `state_dict` returned; log which objects and saved states do not fit each other."""
        self.prompt_order = state["prompt_order"]
        self.np_random = state["np_random"]
        mismatches = set_states(self._stateful_parts, state.get("objects", {}))
        if mismatches:
            logger.warning(
                "objects and saved states that do not match (such an object starts afresh): %s", ", ".join(mismatches)
            )

    def to(self, device: torch.device) -> None:
        """Move the task's models to a device; the reference of `penalty` follows the policy by itself."""
        move(self.task, device)

    def end_turns_like(self, model_ends: TurnEnds, stop: Sequence[str | int] = ()) -> None:
        """Add the ends of turns of a model and its policy; agents call this with those of theirs before they play.

        Args:
            model_ends: the model's own ends.
            stop: the policy's texts and token ids that end a turn, in addition to the environment's. They replace those
                of the policy that played before.

        Raises:
            ValueError: on an id outside the vocabulary, or if ``forbidden`` and ``min_new_tokens`` then leave no token
                at the beginning of a turn.
        """
        policy_stop = as_stops(stop)
        current_ends = self.ends.model_ends
        has_ids = {*model_ends.ids} <= {*current_ends.ids}
        has_texts = {*model_ends.texts} <= {*current_ends.texts}
        if has_ids and has_texts and policy_stop == self.ends.policy_stop:
            return

        # The first two may raise. If so, nothing has changed yet
        end_ids = self.ends.ids_with(model_ends, policy_stop)
        self._masks.forbid_before_minimum(end_ids)
        self.ends.add(model_ends, policy_stop)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Context of an evaluation; see `EpisodeEnv.fork`. It uses no sampler."""
        draws = self._draws
        self._draws = None
        try:
            with self._order.fork(), frozen_states(self.user_objects), evaluation():
                yield
        finally:
            self._draws = draws

    def close_extras(self, **kwargs: object) -> None:
        """Close an environment of the task that waits for its episode (`textenv.envs.string_env.StringGames`)."""
        close_waiting = getattr(self.task, "close_waiting", None)  # only some tasks have it
        if close_waiting is not None:
            close_waiting()

    # --- plain Gymnasium -------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[TextObservation, Info]:
        """Begin new episodes; with ``options={"reset_mask": bool [num_envs]}``, only where it is True.

        Raises:
            ValueError: if the environment is closed, or a prompt does not fit.
        """
        self._check_open()
        self._check_template()
        if self._agents > 1:
            raise ValueError(
                f"step and reset are for one agent, and these games have {self._agents}: collect whole episodes, as "
                "agents do (start_episodes, or algos.collect)"
            )
        if self._early is not None:
            self._early.forget()
        self._restart_prompts(seed)
        mask = np.ones(self.num_envs, dtype=bool)
        if options is not None and "reset_mask" in options:
            mask = np.asarray(options["reset_mask"])
            if mask.dtype != bool or mask.shape != (self.num_envs,):
                raise ValueError(f"reset_mask is {mask.dtype} {mask.shape}, expected bool ({self.num_envs},)")
            if not self._step_slots.started and not mask.all():
                raise ValueError("reset_mask leaves out slots that have no episode yet: reset all slots first")

        # Begin; the episodes of these slots, and those of a batch, are given up
        self._batch = None
        self._step_slots.started = True
        if self._draws is not None and mask.all():
            self._draws.forget()
        self._begin(np.flatnonzero(mask))
        self._show()
        return self._step_slots.observe(), self._info()

    def step(self, actions: np.ndarray) -> tuple[TextObservation, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Append one token to every slot.

        Args:
            actions: int64 ``[num_envs]``.

        Returns:
            Observation, reward float32 ``[num_envs]`` (the score where a turn ended), terminated, truncated, info.
            Where an episode ended, ``info`` has ``prompt``, ``completion`` (of the last turn) and ``end_reason``:
            ``"eos"`` (one of the model's own ends), ``"stop"`` or ``"length"``; in a conversation ``"task"``,
            ``"turns"`` or ``"length"``. In SAME_STEP mode these are inside ``final_info``, and ``final_obs`` is the
            final prefix.

        Raises:
            ValueError: on an invalid action, an episode that is over, or a closed environment.
        """
        # Append the tokens
        self._check_open()
        slots = self._step_slots
        transcript = slots.transcript
        resetting = slots.ended.nonzero()[0]
        actions = slots.check_actions(actions, self.autoreset_mode)
        ended_turns = slots.append(actions)

        # Reply to the turns that ended, and score them
        last_turns, _ = self._end_turns(transcript, ended_turns)
        turns = transcript.unscored
        if turns:
            scores = score_turns(self.task, turns)
        else:
            scores = Scores(score=[])
        reward = transcript.assign_reward(scores)

        # End episodes, and begin others as the autoreset mode says
        done = np.zeros(self.num_envs, dtype=bool)
        if last_turns:
            done[list(last_turns)] = True
        slots.returns += reward
        if self._draws is not None:
            self._learn_from_slots(self._draws, done)
        terminated = transcript.terminated & done
        truncated = transcript.truncated & done
        slots.ended = done
        info: Info = end_info(self.num_envs, last_turns, transcript.end_reason)
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._begin(resetting)
        self._show()
        if self.autoreset_mode is AutoresetMode.SAME_STEP and last_turns:
            info = final_info(slots.observe(), done.copy(), info)
            self._begin(np.array(list(last_turns)))
        return slots.observe(), reward, terminated, truncated, self._info() | info

    def render(self) -> tuple[RenderFrame, ...] | None:
        """Text of each slot so far, with chosen tokens shaded by their reward; None without a render mode.

        Mode ``"human"`` prints the text and returns None; mode ``"rgb_array"`` returns an image for each slot, uint8
        ``[height, width, 3]``.
        """
        if self.render_mode is None:
            return None
        return self._step_slots.render(self.render_mode)

    # --- whole episodes --------------------------------------------------------------------------------------

    def start_episodes(
        self, episodes: int, *, seed: int | None = None, group_size: int = 1, slots: int | None = None
    ) -> TextObservation:
        """Start a batch of exactly this many episodes and return the first observation.

        Args:
            episodes: number of episodes of the next rollout; a multiple of ``group_size``. A game of several agents is
                an episode for each of them.
            seed: restarts the order of prompts, as in `reset`; None continues it.
            group_size: number of neighbouring episodes, or games, that share a prompt.
            slots: number of slots for this batch. None: ``num_envs``, with its default for whole episodes.

        Returns:
            Observation, as from `reset`; a slot with length 0 is idle.
        """
        self._check_open()
        self._check_template()
        if self._early is not None:
            self._early.forget()
        self._restart_prompts(seed)
        check_at_least("episodes", episodes, 1)
        check_at_least("group_size", group_size, 1)
        if episodes % group_size:
            raise ValueError(f"episodes is {episodes}, expected a multiple of group_size, which is {group_size}")
        if episodes % (group_size * self._agents):
            raise ValueError(
                f"episodes is {episodes}, expected a multiple of {group_size * self._agents}: each game is an episode "
                f"for each of its {self._agents} agents, and group_size is {group_size}"
            )
        # End the episodes of `step`, which needs a `reset` afterwards
        if self._draws is not None:
            self._draws.forget()
        self._step_slots.give_up()
        self._masks.forget()

        num_games = episodes // self._agents
        prompt_numbers = np.repeat(self._order.next(num_games // group_size), group_size * self._agents)
        if slots is None:
            slots = self._default_slots(episodes)
        self._batch = EpisodeBatch(self._transcript(episodes), prompt_numbers.tolist(), slots)
        self._refill()
        return self._batch.observe()

    def _default_slots(self, episodes: int) -> int:
        """Return the number of slots for a batch of whole episodes; log a warning once if a single slot is slow."""
        if self._many_slots_by_default:
            return min(episodes, DEFAULT_SLOTS)
        if self.num_envs == 1 and episodes >= MIN_EPISODES_OF_WARNING:
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

    @property
    def running_episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """See `EpisodeEnv.running_episodes`."""
        return self._current_batch().running_episodes

    def advance(self, actions: np.ndarray) -> tuple[TextObservation, np.ndarray]:
        """Append one token to every running slot. Slots that finish get the next prompts once enough slots are idle.

        Args:
            actions: int64 ``[slots]``; entries of idle slots are ignored.

        Returns:
            Observation, and bool ``[slots]``: slots that now hold another episode, a further row of theirs, or none.
        """
        batch = self._current_batch()
        running = np.flatnonzero(batch.running)
        actions = self._masks.check(actions, running, batch.next_mask)
        rows = batch.row[running]
        ended_turns = batch.transcript.append(rows, actions[running])
        changed = self._end_turns_and_refill(batch, ended_turns)
        return batch.observe(), changed

    @property
    def open_turns(self) -> list[OpenTurn]:
        """Current turn of each running slot, to be generated elsewhere for `play_turns`."""
        return self._current_batch().open_turns

    def play_turns(self, turns: Sequence[Sequence[int]]) -> np.ndarray:
        """Append token ids to each of the `open_turns`, as `advance` would; return how many were appended, int64.

        Ids after the end of a turn are dropped; a turn without an end stays open.

        Raises:
            ValueError: if an id is forbidden.
        """
        batch = self._current_batch()
        num_appended, ended_turns = batch.transcript.play(batch.row[batch.running], turns)
        self._end_turns_and_refill(batch, ended_turns)
        return num_appended

    def take_episodes(self) -> TensorDict:
        """Return the finished episodes in the schema of `textenv.rollout`, with scores; see `EpisodeEnv.take_episodes`.

        Raises:
            ValueError: if an episode is still running.
            RewardError: if a reward fails; the episodes are kept, and this can be called again.
        """
        batch = self._current_batch()
        if batch.running.any():
            raise ValueError(f"{batch.running.sum()} episodes are still running: call advance until none is")
        turns = batch.transcript.unscored
        episodes = batch.transcript.unscored_episodes
        score = None if self._early is None else self._early.score
        scores = score_turns(self.task, turns, score)
        returns = batch.transcript.assign_reward(scores)
        if self._draws is not None:
            scored = np.flatnonzero(batch.transcript.has_score[: len(batch.prompt_numbers)])
            prompt_numbers = np.array(batch.prompt_numbers)[scored]
            self._draws.learn(prompt_numbers.tolist(), returns[scored].tolist())
        self._batch = None  # only now, so that this can be called again after a reward has failed
        return self._rollout(batch.transcript, turns, episodes, scores)

    def given_episodes(self, prompts: Sequence[object], completions: Sequence[object], scores: object) -> TensorDict:
        """Return a rollout (`textenv.rollout`) of episodes that were generated and scored elsewhere.

        Args:
            prompts: as in the constructor; equal prompts form a group.
            completions: token ids, or texts. An episode of ids is ``truncated`` unless the ids end its turn. Texts get
                the chat template's end of a message, or EOS if the prompt is no chat.
            scores: one entry per completion, as a reward function returns them.

        Raises:
            ValueError: if the lists have different lengths, an entry does not fit this environment, or a score is not
                finite.
        """
        if not (_is_list(prompts) and _is_list(completions)) or not 0 < len(prompts) == len(completions):
            raise ValueError(
                f"prompts is {prompts!r:.100} and completions {completions!r:.100}: "
                "expected two lists of equal length, with one entry per episode"
            )

        # Write the texts; equal prompts have the same group
        transcript = self._transcript(len(prompts))
        groups: dict[tuple[int, ...], int] = {}
        for row, (content, completion) in enumerate(zip(prompts, completions, strict=True)):
            prompt = as_prompt(row, _without_tensor(content))
            self._check_padding(row, prompt)
            ids = tuple(transcript.ids(prompt))
            group = groups.setdefault(ids, len(groups))
            transcript.begin(row, prompt, group=group)
            try:
                transcript.write(row, _without_tensor(completion))
            except ValueError as error:
                raise ValueError(f"completion {row} does not fit: {error}") from error

        # End the episodes, and give them their scores
        turn_of_row = transcript.close_turns(np.arange(len(prompts)))
        transcript.finish(turn_of_row)
        rows = list(turn_of_row)
        turns = list(turn_of_row.values())
        checked_scores = read_scores(scores, rows_of(turns), name="scores")
        transcript.assign_reward(checked_scores)
        return self._rollout(transcript, turns, rows, checked_scores)

    def samples(self, episodes: Sequence[int]) -> list[Sample]:
        """See `EpisodeEnv.samples`. The ``completion`` of a conversation includes the replies."""
        return samples(episodes, *self.scored_turns)

    def report(self, turns: list[Turn], episodes: list[int], scores: Scores) -> None:
        """Store finished turns, the episode of each turn, and their scores; `samples` and `metrics` read them."""
        self.scored_turns = ScoredTurns(turns, episodes, scores)
        self.metrics = reward_metrics(scores, [turn.completion_ids for turn in turns])
        if turns:
            self.metrics["text/cut_turns"] = sum(not turn.terminated for turn in turns) / len(turns)
        if self._masks.complete_turns:  # turns that are words of a list are alike, which is no sign of a hacked reward
            del self.metrics["text/distinct_2"]
        if self.sampler is not None:
            self.metrics |= self.sampler.metrics()
        if self._overlong == "skip":
            self.metrics["prompts/skipped"] = float(self.skipped_prompts)
        if self.tools:
            num_episodes = len(set(episodes))
            num_calls = 0
            num_errors = 0
            for turn in turns:
                if turn.last:  # has the calls of the whole episode
                    num_calls += len(turn.tool_calls)
                    num_errors += sum(call["error"] for call in turn.tool_calls)
            self.metrics["tools/calls"] = num_calls / num_episodes
            self.metrics["tools/errors"] = num_errors / num_episodes

    # --- internal --------------------------------------------------------------------------------------------

    def _rollout(self, transcript: Transcript, turns: list[Turn], episodes: list[int], scores: Scores) -> TensorDict:
        """Return the rollout of scored episodes; store their texts and metrics."""
        self.report(turns, episodes, scores)
        rollout = transcript.rollout()
        if len(scores.parts) > 1:
            parts_of_episode = reward_parts(scores, episodes, episodes=num_episodes_of(rollout))
            parts = torch.from_numpy(parts_of_episode)[episode_of_row(rollout)]  # [B, K, 2]
            rollout["reward_parts"] = parts[:, None].expand(*rollout.shape, *parts.shape[1:])  # [B, T, K, 2]
        return rollout

    @property
    def _stateful_parts(self) -> dict[str, object]:
        """What has a state that a resumed run needs, by name: `user_objects`, and the sampler."""
        return self.user_objects | {"sampler": self.sampler}

    def _learn_from_slots(self, draws: PromptDraws, done: np.ndarray) -> None:
        """Tell the sampler the returns of the episodes of `step` that are over, bool ``[num_envs]``."""
        slots = np.flatnonzero(done)
        prompt_numbers = self._step_slots.transcript.group[slots]  # equal to the groups: `step` is for one agent
        has_score = self._step_slots.transcript.has_score[slots]
        draws.learn(prompt_numbers[has_score].tolist(), self._step_slots.returns[slots[has_score]].tolist())
        draws.forget(prompt_numbers.tolist())

    def _check_padding(self, row: int, prompt: Prompt) -> None:
        """Raise a ValueError if a prompt of token ids starts or ends with padding."""
        pad = self.tokenizer.pad_token_id
        if pad in (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id):
            return
        if pad in (prompt.content[0], prompt.content[-1]):  # in a text these are characters, never equal to an id
            raise ValueError(f"prompt {row} starts or ends with the padding token {pad}: cut off padding")

    def _transcript(self, rows: int, *, one_row: bool = False) -> Transcript:
        """Return an empty transcript for this many episodes; see `Transcript` for ``one_row``."""
        agents = 1 if one_row else self._agents
        transcript = Transcript(
            rows,
            self.tokenizer,
            limits=self._limits,
            masks=self._masks,
            ends=self.ends,
            agents=agents,
            one_row=one_row,
            earlier_turns=self.earlier_turns,
        )
        transcript.tools = self.tools
        return transcript

    def _restart_prompts(self, seed: int | None) -> None:
        """Seed the random generator and start the prompt order anew, or continue it with None."""
        super().reset(seed=seed)
        self._order.start(self.np_random, anew=seed is not None)

    def _begin_rows(self, transcript: Transcript, rows: np.ndarray, prompt_numbers: Sequence[int]) -> np.ndarray:
        """Begin games in these rows, with the prompts of these numbers.

        Returns:
            int64, the rows of the agents who begin; those with a single agent are ``rows``.
        """
        source = self.task if self._draws is None else self._draws
        prompts = source.sample_prompts(prompt_numbers, seed=self._order.seed)
        check_count(prompts, len(rows), name=f"sample_prompts of {type(self.task).__name__}", item="Prompt")
        begun_rows = []
        for row, prompt, prompt_number in zip(rows, prompts, prompt_numbers, strict=True):
            begun_rows.append(transcript.begin(int(row), prompt, group=prompt_number))
        return np.array(begun_rows)

    def _begin(self, slots: np.ndarray) -> None:
        """Begin new episodes in these slots, for `step`."""
        if len(slots):
            prompt_numbers = self._order.next(len(slots))
            self._begin_rows(self._step_slots.transcript, slots, prompt_numbers)
            self._step_slots.begin(slots)

    def _refill(self) -> np.ndarray:
        """Begin the batch's next episodes in idle slots, once enough slots are idle; return the slots that got one."""
        batch = self._current_batch()
        slots, rows = batch.refill()
        if len(rows):
            prompt_numbers = [batch.prompt_numbers[row] for row in rows]
            batch.row[slots] = self._begin_rows(batch.transcript, rows, prompt_numbers)
        return slots

    def _end_turns_and_refill(self, batch: EpisodeBatch, ended_turns: np.ndarray) -> np.ndarray:
        """Reply to the turns that ended in these rows, and begin further episodes in slots that are idle now.

        Returns:
            Bool ``[slots]``: slots that now hold another episode, a further row of theirs, or none.
        """
        last_turns, next_rows = self._end_turns(batch.transcript, ended_turns)
        changed = np.zeros(len(batch.row), dtype=bool)
        if next_rows:
            moved = batch.move(next_rows)
            changed[moved] = True
        if last_turns:
            released = batch.release(list(last_turns))
            changed[released] = True
            refilled = self._refill()
            changed[refilled] = True
        if self._early is not None:
            self._early.offer(batch.transcript.unscored, least=MIN_PORTION * len(batch.prompt_numbers))
        return changed

    def _end_turns(self, transcript: Transcript, rows: np.ndarray) -> tuple[dict[int, Turn], dict[int, int]]:
        """Reply to the turns that ended in these rows.

        Returns:
            By row, the last turns of games that are over; and the next rows of games that go on in another one.
        """
        if not len(rows):
            return {}, {}
        turns = transcript.close_turns(rows)

        # Turns that call tools get the results. The others get the conversation's reply; without one their episodes end
        replies: dict[int, object] = {}
        if self.tools:
            replies |= self.tools.reply(turns)
        without_calls = {row: turn for row, turn in turns.items() if row not in replies}
        if not isinstance(self.task, Conversation):
            transcript.finish(without_calls)
        elif without_calls:
            task_replies = self.task.reply(list(without_calls.values()))
            check_count(
                task_replies,
                len(without_calls),
                name=f"reply of {type(self.task).__name__}",
                item="text, Prompt, None or TRUNCATED",
            )
            replies |= zip(without_calls, task_replies, strict=True)

        last_turns: dict[int, Turn] = {}
        next_rows: dict[int, int] = {}
        if not isinstance(self.task, Conversation):
            last_turns |= without_calls
        for row, reply in replies.items():
            next_row = transcript.continue_or_end(row, turns[row], reply)
            if next_row is None:
                last_turns[row] = turns[row]
            elif next_row != row:
                next_rows[row] = next_row
        return last_turns, next_rows

    def _current_batch(self) -> EpisodeBatch:
        if self._batch is None:
            raise ValueError("no episodes were started: call start_episodes first")
        return self._batch

    def _show(self) -> None:
        """Print the slots in render mode ``"human"``."""
        if self.render_mode == "human":
            self.render()

    def _info(self) -> Info:
        """Return Gymnasium's ``action_mask``, int8 ``[num_envs, n]``, if some tokens are not allowed."""
        mask = self.action_mask
        if mask is None:
            return {}
        return {"action_mask": mask.numpy().astype(np.int8)}

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("this environment is closed: make a new one")

    def _check_template(self) -> None:
        if self.tokenizer.chat_template != self._chat_template:
            raise ValueError(
                "the tokenizer's chat template is another one than when this environment was made, by hand or by the "
                "chat_template_kwargs of another environment: give each its own tokenizer"
            )


def _is_list(values: object) -> bool:
    """Return True for a list, an array or another container with a length, but not for a text or a mapping."""
    return isinstance(values, Sized) and not isinstance(values, (str, bytes, Mapping))


def _without_tensor(entry: object) -> object:
    """Return a tensor as an array in main memory; anything else as it is."""
    return entry.cpu().numpy() if isinstance(entry, torch.Tensor) else entry


def _check_options(
    num_envs: int | None, *, overlong: str, render_mode: str | None, score_while_generating: object
) -> None:
    """Raise a ValueError if one of these arguments of the constructor is wrong."""
    if num_envs is not None:
        check_at_least("num_envs", num_envs, 1)
    if render_mode not in (None, *RENDER_MODES):
        raise ValueError(f"render_mode is {render_mode!r}, expected 'ansi', 'human', 'rgb_array' or None")
    if overlong not in ("error", "skip"):
        raise ValueError(f"overlong is {overlong!r}, expected 'error' or 'skip'")
    if not isinstance(score_while_generating, (bool, np.bool_)):
        raise ValueError(f"score_while_generating is {score_while_generating!r:.200}, expected True or False")


def _check_earlier_turns(earlier_turns: object, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError unless the argument ``earlier_turns`` is one that the tokenizer allows."""
    if earlier_turns not in ("transcript", "template"):
        raise ValueError(f"earlier_turns is {earlier_turns!r}, expected 'transcript' or 'template'")
    if earlier_turns == "template" and not tokenizer.chat_template:
        raise ValueError(
            "earlier_turns is 'template', but the tokenizer has no chat template: set tokenizer.chat_template, or "
            "leave it out"
        )


def _max_turns_per_row(task: Task, tools: Sequence[Callable[..., object]]) -> int | None:
    """Return how many turns the task lets a row have; None: all, as with tools, whose calls would be turns, too."""
    if isinstance(task, ShortRows) and not tools:
        return task.max_turns_per_row
    return None


def _masks_of(
    forbidden: Sequence[int],
    allowed: Rule | Sequence[str | int] | None,
    *,
    limits: Limits,
    ends: StopConditions,
) -> ActionMasks:
    """Return the masks of allowed tokens.

    Raises:
        ValueError: if they leave no token, or a limit leaves no room for a text in ``allowed``.
    """
    rule = as_rule(
        allowed,
        ends.tokenizer,
        num_tokens=ends.num_tokens,
        ends=ends.ids,
        longest=limits.max_new_tokens,
    )
    masks = ActionMasks(
        ends.num_tokens,
        forbidden=as_token_ids(forbidden),
        ends=ends.ids,
        min_new_tokens=limits.min_new_tokens,
        rule=rule,
    )

    # Room for the longest text
    if limits.max_new_tokens < masks.room:
        raise ValueError(
            f"max_new_tokens is {limits.max_new_tokens}, which would cut a word, expected at least {masks.room}, "
            "the tokens of the longest word: raise it"
        )
    if limits.max_length is not None and limits.max_length < limits.max_prompt_tokens + masks.room:
        raise ValueError(
            f"max_length is {limits.max_length}, expected at least max_prompt_tokens, {limits.max_prompt_tokens}, and "
            f"the tokens of the longest text in allowed, {masks.room}: lower max_prompt_tokens or raise max_length"
        )
    return masks


def _draws_of(sampler: PromptSampler | str, task: Task) -> PromptDraws:
    """Return the draws of a sampler; raise a ValueError if the task makes its prompts itself."""
    if not isinstance(task, PromptList):
        raise ValueError(f"sampler is given, but {type(task).__name__} makes its prompts itself: leave it out")
    return PromptDraws(as_sampler(sampler), task)
