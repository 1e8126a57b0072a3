"""The rollout: one schema for control and for text.

A rollout is a `TensorDict` with batch size ``[B, T]``. These are the first two dimensions of every column, and a column
of single numbers has no others (``[B, T]``, never ``[B, T, 1]``). In control a row is one environment slot, T steps
long. In text a row is one whole episode: it starts at position 0 and is padded on the right, so causal attention needs
no attention mask. Where a task gives the model a new context in the middle of an episode, the episode goes on in a
further row, which begins with this context (see below).

=============================  ======================================  ===========================================
key                            control                                 text
=============================  ======================================  ===========================================
``observation``                ``[B, T, *]``                           int64, the token at position t; the state
                                                                       at t is the prefix ``[:, :t+1]``
``next_observation``           ``[B, T, *]``, the final observation    absent (the same tokens as ``action``)
                               where an episode ends
``action``                     int64 or float32                        int64, the token at position t+1
``reward``                     float32, the environment's              float32, per turn (at its end) or per token
``terminated``, ``truncated``  bool; only ``terminated`` stops         ``terminated`` by EOS, a stop or the task;
                               bootstrapping, both cut the trace       ``truncated`` by a limit or the task
``mask``                       False on autoreset steps and where an   True on the tokens that the policy chose;
                               environment fails                       all False in a row whose scores are all None,
                                                                       and so are ``terminated``, ``truncated``
``life_lost``                  bool, True where ``info["lives"]``      absent
                               fell; absent without such an entry
``is_init``                    True on an episode's first observation  True where an episode begins, at position 0
``log_prob``                   under the behaviour policy, nats        the same
``state``                      ``[B, T, *]``, state of a recurrent     absent
                               policy before the action, detached
``action_mask``/``allowed``    bool ``[B, T, A]``, if there is one     int64 index into ``allowed_sets``
``next_action_mask``           bool ``[B, T, A]``, for                 absent
                               ``next_observation``
``group``                      int64, the slot, or rows that share     int64, rows that share a prompt, and the
                               a reset seed                            agent
``episode``                    absent                                  int64, the episode of the row; absent where
                                                                       each row is an episode
``agent``                      absent                                  int64, the agent of the row; absent where
                                                                       games have one agent
``reward_parts``               absent                                  float32 ``[B, T, K, 2]``, only with several
                                                                       rewards: for each its unweighted sum over
                                                                       the episode, and its weight
``staleness``                  int64, number of updates between the    the same
                               weights that chose the action and the
                               present ones; only with asynchronous
                               workers
``value``, ``next_value``,     added by the code that needs them       the same
``advantage``,
``value_target``,
``reference_log_prob``,
``kl``
=============================  ======================================  ===========================================

In text no column holds the length of the prompt: the prompt is all tokens before the first one that the policy chose
(`prompt_lengths`). Everything after it belongs to the answer, replies of the environment too. Encoder-decoder models
read prompt and answer apart.

In a rollout with the column ``episode`` some episode has several rows. They stand one below the other, in the order of
time, and are one sequence of steps: the successor of a row's last step is the first step of the episode's next row.
Only the last row of an episode has ``terminated`` or ``truncated``. Returns, advantages, groups, and metrics of
episodes join the rows along time (`join_episodes`, `join_column`). Everything else is by row: what a model reads,
minibatches, and the aggregations and policy losses that average over a row (`algos.losses`).

A text rollout may also hold ``allowed_sets`` (non-tensor): a bool tensor ``[S, n]`` whose row 0 allows every
token. In control and in text, one True entry of ``mask`` is one step.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, NotRequired, ParamSpec, Protocol, TypedDict, TypeGuard, TypeVar, runtime_checkable

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

WAITING = "waiting"
"""Key of ``info`` of a step in control: bool ``[num_envs]``, slots whose action was not used, such as agents who are
not to move. They are False in the rollout's ``mask``. What is no bool for each slot is not read."""
OUTLIER_FACTOR = 4
"""How many times the tolerance a hundredth of the log-probabilities may move below 32 bits; see `ratio_gap`."""
P = ParamSpec("P")
T = TypeVar("T")


class Evaluation(NamedTuple):
    """Scores of a rollout's actions under a policy; each tensor is ``[B, T]`` and valid where ``mask`` is True."""

    log_prob: Tensor
    """log π(action | state), float32, nats."""
    entropy: Tensor
    """Entropy of π(· | state), float32, nats."""
    value: Tensor
    """Value of the state, float32."""


class ReferenceEvaluation(NamedTuple):
    """An `Evaluation` under a model that has no value, such as the reference of a KL penalty."""

    log_prob: Tensor
    """log π(action | state), float32, nats."""
    entropy: Tensor
    """Entropy of π(· | state), float32, nats."""
    value: None = None
    """No value of the state."""


@runtime_checkable
class Reference(Protocol):
    """Reference of a KL penalty: any object that scores the actions of a rollout."""

    def evaluate(self, rollout: TensorDict) -> Evaluation | ReferenceEvaluation:
        """Score the rollout's actions."""


class Sample(TypedDict):
    """Texts of an episode, for people. A message has ``role`` and ``content``."""

    prompt: str
    completion: str
    """What was written after the prompt: all turns and replies."""
    score: float | None
    """Sum of the turns' scores; None if no turn has one."""
    parts: dict[str, float | None]
    """With several rewards, the sum of each one's scores over the turns, by name; None if no turn has one."""
    chat: NotRequired[list[dict[str, str]]]
    """Messages of a prompt that is a chat."""
    logged: NotRequired[dict[str, float | None]]
    """Numbers that rewards logged for the last turn, by name."""
    turns: NotRequired[list[dict[str, str]]]
    """Messages after the prompt, if there are several turns."""


class EpisodeEnv:
    """Base of vector environments that return whole episodes as a rollout (such as `TextVectorEnv`)."""

    penalty: Any = None
    """KL penalty that agents apply to each rollout (`textenv.kl.KLPenalty`), or None."""
    metrics: dict[str, float]
    """Metrics of the episodes returned last, by name, for the log."""

    @property
    def user_objects(self) -> dict[str, object]:
        """Objects that the environment calls, such as its task, by name; `textenv.state` looks for states in them."""
        return {}

    @property
    @abstractmethod
    def running(self) -> np.ndarray:
        """Bool ``[num_envs]``: slots with a running episode."""

    @property
    @abstractmethod
    def cursor(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column, in the next rollout, of each running slot's next action."""

    @property
    def running_episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Episode of each running slot, and the number of its present row in this episode, from 0 (two int64 arrays).

        By default each row is an episode.
        """
        rows, _ = self.cursor
        return rows, np.zeros_like(rows)

    @property
    @abstractmethod
    def action_mask(self) -> Tensor | None:
        """Bool ``[num_envs, n]``: allowed actions; None if every action is allowed."""

    def to(self, device: torch.device) -> None:
        """Move the environment's models, such as reward models, to a device; there are none by default."""

    @abstractmethod
    def fork(self) -> AbstractContextManager[None]:
        """Context of an evaluation: prompts come from a separate order.

        On exit, the original order continues, and the states of `user_objects` are restored.
        """

    @abstractmethod
    def start_episodes(self, episodes: int, *, seed: int | None = None, group_size: int = 1) -> dict[str, np.ndarray]:
        """Start exactly this many episodes and return the first observation; the rows of a group share a prompt."""

    @abstractmethod
    def advance(self, actions: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Step the running slots.

        Returns:
            Observation, and bool ``[num_envs]``: True where the slot now holds a new episode or a further row of its
            episode, or has become idle.
        """

    @abstractmethod
    def take_episodes(self) -> TensorDict:
        """Return the finished episodes as a rollout with their scores as rewards, in the rows of `cursor`.

        Further rows of episodes stand in the order in which they were begun; `in_order` sorts them.
        """

    def samples(self, episodes: Sequence[int]) -> list[Sample]:
        """Return the texts of episodes returned last, for people: a `Sample` for each of these; none by default."""
        return []


def is_episode_env(env: object) -> TypeGuard[EpisodeEnv]:
    """Return True if an environment returns whole episodes."""
    return isinstance(env, EpisodeEnv)


def least_precise_dtype(weights: Iterable[Tensor]) -> torch.dtype:
    """Return the floating-point dtype with the largest rounding error among these weights.

    For a float32 adapter on bfloat16 weights, it is bfloat16.
    """
    floating = [weight.dtype for weight in weights if weight.dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps)


def is_short(dtype: torch.dtype) -> bool:
    """Return True for floating-point numbers of less than 32 bits, such as bfloat16."""
    return torch.finfo(dtype).bits < 32


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the largest gap of log-probabilities that rounding explains, nats: 1e-3, or 0.1 below 32 bits.

    Two ways to compute the same numbers, such as with padding and without, agree if their gap is not larger.
    """
    return 0.1 if is_short(dtype) else 1e-3


def ratio_tolerance(dtype: torch.dtype) -> float:
    """Return the largest allowed `ratio_gap` between sampling and scoring of actions, nats: 1e-3, or 0.5 below 32 bits.

    With a model of 135 M parameters in bfloat16, 8,700 tokens differed by 0.04 nats in the mean between decoding and
    scoring, a hundredth of them by more than 0.16, and one by 0.55. Each of the two was as far from float32.
    """
    return 0.5 if is_short(dtype) else 1e-3


def start_tolerance(dtype: torch.dtype, choices: Sequence[str] = ()) -> float:
    """Return the largest `ratio_gap`, nats, of two policies that have just begun and are equal but for rounding.

    It is `ratio_tolerance`, but at least 0.1 for a model whose choices (see `ratio_gap`) may flip by rounding. After a
    flipped choice the rest of the row differs too, so in a minibatch of one row even the median moves.
    """
    tolerance = ratio_tolerance(dtype)
    if choices:
        tolerance = max(tolerance, rounding_tolerance(torch.bfloat16))
    return tolerance


def tolerance_note(dtype: torch.dtype, choices: Sequence[str] = ()) -> str:
    """Return a note on the entries that a tolerance holds for (see `ratio_gap`); an empty text if it holds for all."""
    if choices:
        names = " and ".join(choices)
        return f" for the median, because the model selects {names} by scores whose order rounding may change"
    if is_short(dtype):
        return f" for 99 % of them, {OUTLIER_FACTOR} times as much for the others, because {dtype} is rounded"
    return ""


def ratio_gap(gap: Tensor, *, mask: Tensor, dtype: torch.dtype = torch.float32, choices: Sequence[str] = ()) -> float:
    """Return one number for the gaps of two computations, nats, to compare with a tolerance.

    It is the largest gap, with two exceptions. Rounding below 32 bits moves a few of many thousand log-probabilities
    far, so there a hundredth of the entries (at least one) count a quarter. For a model with choices it is the median.

    Args:
        gap: absolute log-ratios of two computations of the same log-probabilities.
        mask: bool of the same shape; entries where it is False do not count.
        dtype: in which the log-probabilities were computed.
        choices: what the model selects by the order of scores (`textenv.lm.choices`). If rounding flips a choice, a few
            log-probabilities move far; a fault moves most of them. So the median tells these two apart.

    Returns:
        0 without True entries; NaN if a gap is NaN.
    """
    counted = gap[mask]
    if not counted.numel():
        return 0.0
    if choices:
        return counted.median().item()
    if not is_short(dtype):
        return counted.max().item()

    num_outliers = math.ceil(counted.numel() / 100)
    greatest = counted.topk(min(num_outliers + 1, counted.numel())).values
    others = greatest[num_outliers:]  # the largest of them, or nothing if all are outliers
    return torch.cat([greatest[:1] / OUTLIER_FACTOR, others]).max().item()


def masked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function with a ``mask``: it raises unless the mask is bool and all its tensors have one shape.

    The dtype check catches swapped arguments of equal shape; the shape check catches ``[B]`` against ``[B, 1]``,
    which would silently broadcast to ``[B, B]``.

    Raises:
        TypeError: if the mask is not bool.
        ValueError: if a tensor has another shape; the message names it and shows both shapes.

    Example:
        >>> masked_mean(torch.zeros(2, 3, 1), mask=torch.ones(2, 3, dtype=torch.bool))
        Traceback (most recent call last):
        ValueError: x has shape (2, 3, 1), mask has (2, 3): they must be equal
    """
    names = list(signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if "mask" in arguments:  # without it, the call below raises Python's own error
            _check_mask(arguments)
        return function(*args, **kwargs)

    return checked


def _check_mask(arguments: Mapping[str, Any]) -> None:
    """Raise as `masked` does; of the arguments only tensors are checked."""
    mask = arguments["mask"]
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}, expected torch.bool: pass the rollout's 'mask' column")
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, mask has {tuple(mask.shape)}: they must be equal")


@masked
def masked_mean(x: Tensor, *, mask: Tensor) -> Tensor:
    """Return the mean of ``x`` over the True entries; other entries (NaN included) have no effect."""
    return torch.where(mask, x, 0).sum() / mask.sum()


def sequences(rollout: TensorDict) -> Tensor:
    """Return the tokens of a text rollout with the last action appended: int64 ``[B, T+1]``."""
    return torch.cat([rollout["observation"][:, :1], rollout["action"]], dim=1)


def prompt_lengths(rollout: TensorDict) -> Tensor:
    """Return the length of each row's prompt in a text rollout, int64 ``[B]``: all tokens before the first action.

    1 for a row without a score, because its mask has no True entry.
    """
    return rollout["mask"].int().argmax(1) + 1


def to_device(rollout: TensorDict, device: torch.device) -> TensorDict:
    """Return the rollout on a device, with its ``allowed_sets``, which `TensorDict.to` leaves where they are."""
    moved = rollout.to(device)
    if "allowed_sets" in moved.keys():
        sets = moved.get_non_tensor("allowed_sets").to(device)
        moved["allowed_sets"] = NonTensorData(sets, batch_size=moved.batch_size)
    return moved


def scoring_inputs(rollout: TensorDict, *, with_end_states: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a model reads to score a text rollout.

    Args:
        rollout: a text rollout ``[B, T]``.
        with_end_states: also read the state after the last action of each episode, whose value bootstrapping needs.

    Returns:
        Tokens int64 ``[B, T]``, or with end states those of `sequences`, ``[B, T+1]``; lengths of the prompts ``[B]``;
        and how many tokens of each row are needed ``[B]``, at least 1.
    """
    tokens = rollout["observation"]
    needed = rollout["mask"]
    first_length = 1  # the state of column t has t + 1 tokens
    if with_end_states:
        tokens = sequences(rollout)
        needed = needed | rollout["terminated"] | rollout["truncated"]
        first_length = 2  # the state after the action of column t has t + 2
    steps = needed.shape[1]
    lengths = torch.arange(first_length, first_length + steps, device=needed.device)  # [T]
    needed_length = (needed * lengths).amax(1).clamp(min=1)  # [B]
    return tokens, prompt_lengths(rollout), needed_length


def following(values: Tensor, *, mask: Tensor, done: Tensor) -> Tensor:
    """Return the value of each entry's successor state: the episode's next True entry, or its final observation.

    Args:
        values: ``[B, T+1]``, the value at every position.
        mask: bool ``[B, T]``.
        done: bool ``[B, T]``, terminated or truncated.

    Returns:
        ``[B, T]``: entry t holds ``values`` at the first True entry after t, or at the position after the end of the
        episode.
    """
    steps = mask.shape[1]
    position = torch.arange(steps, device=mask.device).expand_as(mask)  # [B, T]

    # A stop is a position whose value is used: a True entry, or the one after the end of an episode
    stop_here = torch.where(mask, position, steps)
    stop_after = torch.where(done, position + 1, steps)
    no_stop = stop_here.new_full((len(mask), 1), steps)
    stop_at_next = torch.cat([stop_here[:, 1:], no_stop], dim=1)

    # The nearest stop after each position is a running minimum from the right
    stops = torch.minimum(stop_after, stop_at_next)
    nearest = stops.flip(1).cummin(dim=1).values.flip(1)
    return values.gather(1, nearest)


def episode_of_row(rollout: TensorDict) -> Tensor:
    """Return the episode of each row, int64 ``[B]``: the column ``episode``, else each row is an episode."""
    if "episode" in rollout.keys():
        return rollout["episode"][:, 0].contiguous()
    return torch.arange(len(rollout), device=rollout["mask"].device)


def num_episodes_of(rollout: TensorDict) -> int:
    """Return the number of episodes of a text rollout."""
    return int(episode_of_row(rollout).max()) + 1


def number_in_episode(rollout: TensorDict) -> Tensor:
    """Return the number of each row in its episode, from 0, int64 ``[B]``."""
    episode = episode_of_row(rollout)
    order = episode.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    first_position = torch.searchsorted(episode[order], episode)  # of the episode of each row
    return position - first_position


def in_order(rollout: TensorDict) -> TensorDict:
    """Return a text rollout with the rows of each episode one below the other, the first episode at the top."""
    if "episode" not in rollout.keys():
        return rollout
    return rollout[episode_of_row(rollout).argsort(stable=True)]


class _RecordedStep(NamedTuple):
    """Arguments of `LogProbs.record_step`."""

    rows: np.ndarray
    columns: np.ndarray
    log_prob: Tensor
    running: np.ndarray


class LogProbs:
    """Log-probabilities of tokens, recorded while a text rollout is played; its number of rows is not known before."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._steps: list[_RecordedStep] = []

    def record(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray | Sequence[float]) -> None:
        """Record log-probabilities, nats, of the actions at these rows and columns; all three are ``[n]``."""
        self._rows.append(rows.copy())
        self._columns.append(columns.copy())
        self._values.append(np.asarray(values, dtype=np.float32))

    def record_step(self, rows: np.ndarray, columns: np.ndarray, log_prob: Tensor, *, running: np.ndarray) -> None:
        """Record a step in all slots: it is read off its device by `added_to`, with all others at once.

        Args:
            rows: of the actions in the running slots, int64 ``[n]``.
            columns: of these actions, int64 ``[n]``.
            log_prob: float32 ``[N]``, nats. It is copied: a policy may write into the same tensor at every step.
            running: bool ``[N]``, n of them True.
        """
        self._steps.append(_RecordedStep(rows.copy(), columns.copy(), log_prob.clone(), running.copy()))

    def added_to(self, rollout: TensorDict) -> TensorDict:
        """Return the rollout with the column ``log_prob``, 0 where none was recorded, and its rows `in_order`."""
        if self._steps:
            log_probs = torch.stack([step.log_prob for step in self._steps]).cpu().numpy()
            for step, values in zip(self._steps, log_probs, strict=True):
                self.record(step.rows, step.columns, values[step.running])
            self._steps.clear()
        column = np.zeros(rollout.shape, dtype=np.float32)
        if self._rows:
            index = (np.concatenate(self._rows), np.concatenate(self._columns))
            column[index] = np.concatenate(self._values)
        rollout["log_prob"] = torch.from_numpy(column)
        return in_order(rollout)


def join_column(column: Tensor, rollout: TensorDict) -> Tensor:
    """Write the rows of each episode one behind the other along time; `split_column` takes them apart again.

    Args:
        column: ``[B, T, *]``.
        rollout: the rollout that the column belongs to.

    Returns:
        ``[E, R·T, *]`` for E episodes of at most R rows; 0 in rows that an episode does not have. If each row is an
        episode, the column itself.
    """
    if "episode" not in rollout.keys():
        return column
    return _joined(column, episode=episode_of_row(rollout), number=number_in_episode(rollout))


def _joined(column: Tensor, *, episode: Tensor, number: Tensor) -> Tensor:
    """Return what `join_column` does, given the episode of each row and its number in the episode, int64 ``[B]``."""
    num_episodes = int(episode.max()) + 1
    most_rows = int(number.max()) + 1
    joined = column.new_zeros(num_episodes, most_rows, *column.shape[1:])
    joined[episode, number] = column
    return joined.flatten(1, 2)


def split_column(joined: Tensor, rollout: TensorDict) -> Tensor:
    """Return a column ``[B, T, *]`` of a rollout from what `join_column` returns, ``[E, R·T, *]``."""
    if "episode" not in rollout.keys():
        return joined
    by_row = joined.unflatten(1, (-1, rollout.shape[1]))  # [E, R, T, *]
    return by_row[episode_of_row(rollout), number_in_episode(rollout)]


EPISODE_COLUMNS = (
    "reward",
    "terminated",
    "truncated",
    "mask",
    "is_init",
    "group",
    "agent",
    "reward_parts",
    "kl",
    "value",
    "next_value",
)
"""Columns that are joined along episodes: rewards, and all from which something is computed together with them."""


def join_episodes(rollout: TensorDict) -> TensorDict:
    """Return the `EPISODE_COLUMNS` of a rollout with one row for each episode, ``[E, R·T]``; see `join_column`.

    If each row is an episode already, it is the rollout itself.
    """
    if "episode" not in rollout.keys():
        return rollout
    episode = episode_of_row(rollout)
    number = number_in_episode(rollout)
    columns = {}
    for name in EPISODE_COLUMNS:
        if name in rollout.keys():
            columns[name] = _joined(rollout[name], episode=episode, number=number)
    return TensorDict(columns, batch_size=columns["mask"].shape)


def next_values(rollout: TensorDict, *, value: Tensor, next_value: Tensor) -> Tensor:
    """Return the values of all successor states, also of those in the next row of an episode.

    Args:
        rollout: the rollout.
        value: ``[B, T]``, value of each state.
        next_value: ``[B, T]``, value of each successor state that is in the same row (`following`).
    """
    if "episode" not in rollout.keys():
        return next_value

    # The value of the episode's next step, whatever the row
    joined_mask = join_column(rollout["mask"], rollout)
    joined_value = join_column(value, rollout)
    after_the_end = torch.zeros_like(joined_value[:, :1])
    joined_next_value = following(
        torch.cat([joined_value, after_the_end], dim=1), mask=joined_mask, done=torch.zeros_like(joined_mask)
    )

    # It applies to the last step of a row, if the episode has a later one
    is_last_of_row = _steps_after(rollout["mask"]) == 0
    goes_on = split_column(_steps_after(joined_mask), rollout) > 0
    return torch.where(is_last_of_row & goes_on, split_column(joined_next_value, rollout), next_value)


def _steps_after(mask: Tensor) -> Tensor:
    """Return the number of True entries after each entry of its row, int64 ``[B, T]``."""
    count = mask.cumsum(1)
    return count[:, -1:] - count


def waits_after(rollout: TensorDict) -> Tensor:
    """Return where an agent waits after an entry, in the same episode: bool ``[B, T]``; for control, see `WAITING`."""
    done = rollout["terminated"] | rollout["truncated"]
    waits = torch.zeros_like(done)
    waits[:, :-1] = ~done[:, :-1] & ~rollout["mask"][:, 1:] & ~rollout["is_init"][:, 1:]
    return waits


class Allowed(NamedTuple):
    """Allowed-token masks of m entries, each distinct mask stored once."""

    chosen: Tensor
    """int64 ``[m]``: the row of ``sets`` that applies at each entry."""
    sets: Tensor
    """bool ``[S, n]``: True for allowed tokens."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the tokens allowed at these entries, bool ``[stop - start, n]``: a part, as all take much memory."""
        return self.sets[self.chosen[start:stop]]


def allowed_tokens(rollout: TensorDict, *, entries: tuple[Tensor, ...] | None = None) -> Allowed | None:
    """Return the allowed tokens at each True entry of a text rollout; None if every token is allowed everywhere.

    Args:
        rollout: the rollout.
        entries: rows and columns of the True entries, if the caller knows them.
    """
    if "allowed" not in rollout.keys():
        return None
    if entries is None:
        entries = rollout["mask"].nonzero(as_tuple=True)
    chosen = rollout["allowed"][entries]
    return Allowed(chosen, rollout.get_non_tensor("allowed_sets").to(chosen.device))
