"""Episodes step by step: what a language model read and wrote in a game, beside the rendered frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from algos.envs.flatten import flatten_one
from algos.envs.wrapping import NO_LIMIT, VECTOR_ONLY, single_environment, vector_wrappers
from algos.evaluation import EvaluationResult, evaluate
from algos.make import WORDS, make_vector_environment
from textenv.envs.turn import TRUNCATED
from textenv.prompts.prompts import Prompt
from textenv.rollout import is_episode_env

if TYPE_CHECKING:
    from textenv.envs.task import Conversation
    from textenv.envs.turn import Turn

NOT_OF_ONE_GAME = (*VECTOR_ONLY, "task", "penalty", "kl_coef")
"""Arguments of ``textenv/Words-v0`` that are not needed to play one game at a time."""


class WordStep(NamedTuple):
    """One step of a game, or its end."""

    frame: np.ndarray | None
    """Picture of what the model described, before the step, uint8 ``[height, width, 3]``; None without pictures."""
    read: str
    """What the model read: everything, or in a conversation what is new; empty at the end."""
    wrote: str
    """What the model wrote; empty at the end."""
    reward: float
    """What the step was paid."""


ShowStep = Callable[[WordStep], object]
"""Function that is called with each step, and once at the end of each episode."""


@runtime_checkable
class WritesWords(Protocol):
    """Policy for control that reads descriptions of observations and writes words for actions."""

    def texts(self, observation: Any) -> list[str]:
        """What the model reads, one text for each observation of a batch."""

    def words(self, action: Any) -> list[str]:
        """What the model writes, one text for each action of a batch."""


def plays_in_words(env: VectorEnv, policy: object) -> bool:
    """Return True if a language model plays a game here: as the network of a policy, or in ``textenv/Words-v0``.

    False with wrappers of all slots at once, because a single environment is played, which would lack them.
    """
    spec = env.spec
    if spec is None or vector_wrappers(env):
        return False
    if is_episode_env(env):
        return spec.id == WORDS
    return isinstance(policy, WritesWords)


def play_step_by_step(
    env: VectorEnv,
    policy: Any,
    show_step: ShowStep,
    *,
    with_frames: bool = True,
    max_steps: int | None = None,
    **options: Any,
) -> EvaluationResult:
    """Play episodes of a game one after another, and show each step.

    Args:
        env: environment that `plays_in_words` is True for; a single one of its kind is played.
        policy: the policy that plays.
        show_step: called with each step.
        with_frames: render a frame of each step.
        max_steps: steps after which an episode is truncated; None: the game's own limit.
        options: further arguments of `algos.evaluation.evaluate`.

    Raises:
        gymnasium.error.Error: if the environment draws no pictures, or a package for that is not installed.
    """
    spec = env.spec
    assert spec is not None  # as the environment was made by its id

    # A conversation, turn by turn
    if is_episode_env(env):
        arguments = {name: value for name, value in spec.kwargs.items() if name not in NOT_OF_ONE_GAME}
        game_kwargs = arguments.get("env_kwargs") or {}
        arguments["env_kwargs"] = {**game_kwargs, **_render_mode(game_kwargs, with_frames=with_frames)}
        if max_steps is not None:
            arguments["max_turns"] = min(arguments.get("max_turns", max_steps), max_steps)
        wrappers = spec.kwargs.get("wrappers", ())
        games: Any = make_vector_environment(spec.id, 1, wrappers=wrappers, **arguments)
        try:
            return play_turn_by_turn(games, policy, show_step, **options)
        finally:
            games.close()

    # Control
    if with_frames and "rgb_array" not in env.metadata.get("render_modes", ()):
        raise gymnasium.error.Error("it has no render_mode 'rgb_array'")
    limits = {}
    if max_steps is not None:
        own_limit = spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
        if own_limit in (None, NO_LIMIT):
            own_limit = max_steps
        limits["max_episode_steps"] = min(own_limit, max_steps)
    single = single_environment(env, **_render_mode(spec.kwargs, with_frames=with_frames), **limits)
    try:
        return evaluate(_ShownSteps(single, policy, show_step), policy, **options)
    finally:
        single.close()


def _render_mode(env_kwargs: Mapping[str, Any], *, with_frames: bool) -> dict[str, str | None]:
    """Return the argument ``render_mode``; empty without frames, as the class of an environment may not have it."""
    if with_frames:
        return {"render_mode": "rgb_array"}
    if "render_mode" in env_kwargs:
        return {"render_mode": None}
    return {}


def play_turn_by_turn(env: Any, policy: Any, show_step: ShowStep, **options: Any) -> EvaluationResult:
    """Play episodes of a `textenv.TokenVectorEnv` with one slot, and show each turn.

    Args:
        env: the environment, whose task is replaced while it plays. There are frames if the string environments have
            the ``render_mode`` ``"rgb_array"``.
        policy: the policy that plays.
        show_step: called with each turn.
        options: further arguments of `algos.evaluation.evaluate`.
    """
    task = env.task
    env.task = _ShownTurns(task, show_step)
    try:
        return evaluate(env, policy, **options)
    finally:
        env.task = task


class _ShownSteps(gymnasium.Wrapper):
    """Shows each step of an environment in the words of a policy."""

    def __init__(self, env: gymnasium.Env, policy: WritesWords, show_step: ShowStep) -> None:
        super().__init__(env)
        self._policy = policy
        self._show_step = show_step
        self._observation: Any = None

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._observation, info = self.env.reset(**options)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step, and show it with the frame from before it."""
        frame = _frame(self.env)
        batch = flatten_one(self.env.observation_space, self._observation)[np.newaxis]
        (read,) = self._policy.texts(batch)
        (wrote,) = self._policy.words(np.asarray(action)[np.newaxis])
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        self._show_step(WordStep(frame, read, wrote, float(reward)))
        if terminated or truncated:
            self._show_step(WordStep(_frame(self.env), "", "", 0.0))
        return self._observation, reward, terminated, truncated, info


class _ShownTurns:
    """Task that plays the string environments of another task, one at a time, and shows each turn."""

    def __init__(self, games: Conversation, show_step: ShowStep) -> None:
        self._games = games
        self._show_step = show_step
        self._read = ""

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> Sequence[Any]:
        """Start a game; see `textenv.envs.task.Task.sample_prompts`."""
        prompts = self._games.sample_prompts(numbers, seed=seed)
        self._read = _text_of(prompts[0])
        return prompts

    def reply(self, turns: Sequence[Turn]) -> Sequence[Any]:
        """Step the game, and show the turn with the frame from before it."""
        (turn,) = turns
        game = turn.prompt.state
        frame = _frame(game.env)
        (reply,) = self._games.reply(turns)
        self._show_step(WordStep(frame, self._read, turn.completion.strip(), game.rewards.get(turn.index, 0.0)))
        if reply is not None and reply is not TRUNCATED:
            self._read = _text_of(reply)
        else:
            self._show_step(WordStep(_frame(game.env), "", "", 0.0))
        return [reply]

    def score(self, turns: Sequence[Turn]) -> Any:
        """Return the rewards of the turns; see `textenv.envs.task.Task.score`."""
        return self._games.score(turns)


def _text_of(content: Any) -> str:
    """Return the text of a reply, or of a prompt, which may be a chat."""
    if isinstance(content, Prompt):
        content = content.content
    if not isinstance(content, str):
        content = "\n".join(str(message["content"]) for message in content)
    return content.strip()


def _frame(env: gymnasium.Env) -> np.ndarray | None:
    """Return the picture of an environment, uint8 ``[height, width, 3]``; None if it is not made to draw one."""
    if env.render_mode != "rgb_array":
        return None
    picture: Any = env.render()
    return np.asarray(picture, dtype=np.uint8)
