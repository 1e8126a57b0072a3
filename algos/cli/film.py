"""Films of episodes: the frames of a control environment, with the words of a language model, or a text as it grows."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TransformObservation

from algos.envs.wrapping import single_environment
from algos.evaluation import evaluate
from algos.lab.step_by_step import WordStep, play_step_by_step, plays_in_words
from algos.storage.run_folder import replacing
from textenv.rendering import caption, rollout_frames
from textenv.rollout import is_episode_env

if TYPE_CHECKING:
    from algos.policies.policy import Policy

PALETTE_FILTER = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"
"""Filter of ffmpeg that gives each frame a palette: nothing is kept in memory, and few colours stay as they are."""

GIF_ENCODING: dict[str, Any] = {
    "codec": "gif",
    "pixelformat": "pal8",
    "macro_block_size": 1,
    "output_params": ["-filter_complex", PALETTE_FILTER],
}
"""Options of imageio's writer for a GIF."""

MP4_ENCODING: dict[str, Any] = {"macro_block_size": 2}
"""Options of imageio's writer for an MP4: width and height must be even."""

DEFAULT_FPS = 10
"""Frames per second of an environment that does not say its own."""

WORDS_FPS = 2
"""Frames per second of a film with words, which people read."""


def film_episodes(env: VectorEnv, policy: "Policy", path: Path, **options: Any) -> None:
    """Play episodes in one slot and write them to one film, which appears when it is complete.

    If a language model plays a game, what it reads and writes at each step stands under the frame.

    Args:
        env: environment to play, made by its id; in control a single one of its kind is played.
        policy: the policy that plays.
        path: file to write, ``.gif`` or ``.mp4``.
        options: further arguments of `algos.evaluation.evaluate`.

    Raises:
        ValueError: if the environment draws no pictures.
    """
    from imageio.v2 import get_writer

    encoding = MP4_ENCODING
    if path.suffix.lower() == ".gif":
        encoding = GIF_ENCODING
    in_words = plays_in_words(env, policy)
    fps = WORDS_FPS if in_words else _fps(env)
    with replacing(path) as draft, get_writer(draft, ".mp4", fps=fps, **encoding) as film:  # by ffmpeg, a gif too
        if in_words:
            _film_words(film, env, policy, **options)
        elif is_episode_env(env):
            _film_text(film, env, policy, **options)
        else:
            _film_control(film, env, policy, **options)


def _fps(env: VectorEnv) -> int:
    """Return the number of frames per second."""
    return env.metadata.get("render_fps", DEFAULT_FPS)


def _film_text(film: Any, env: Any, policy: Any, **options: Any) -> None:
    """Play episodes of text, and add a frame for each token."""
    rollout = evaluate(env, policy, **options).rollout
    for row in range(len(rollout)):
        for frame in rollout_frames(rollout, row, policy.tokenizer):
            film.append_data(frame)
        for _ in range(_fps(env)):  # a second to read the end
            film.append_data(frame)


def _film_words(film: Any, env: VectorEnv, policy: "Policy", **options: Any) -> None:
    """Play episodes of a game one after another, and add a frame with words for each step."""

    def add_frame(step: WordStep) -> None:
        assert step.frame is not None  # as frames are asked for
        film.append_data(caption(step.frame, step.read, step.wrote))
        if not step.wrote:
            for _ in range(WORDS_FPS):  # a second to see the end
                film.append_data(caption(step.frame, "", ""))

    try:
        play_step_by_step(env, policy, add_frame, **options)
    except gymnasium.error.Error as error:  # also of a package that is not installed
        name = "" if env.spec is None else env.spec.id
        raise ValueError(f"{name} cannot be filmed, leave --video out: {error}") from error


def _film_control(film: Any, env: VectorEnv, policy: "Policy", **options: Any) -> None:
    """Play episodes in a single environment of the same kind, and add a frame for each observation."""
    spec = env.spec
    assert spec is not None  # as the environment was made by its id

    def add_frame(observation: object) -> object:
        film.append_data(single.render())
        return observation

    try:
        if "rgb_array" not in env.metadata.get("render_modes", ()):
            raise gymnasium.error.Error("it has no render_mode 'rgb_array'")
        with single_environment(env, render_mode="rgb_array") as single:
            evaluate(TransformObservation(single, add_frame, None), policy, **options)
    except gymnasium.error.Error as error:  # also of a package that is not installed
        raise ValueError(f"{spec.id} cannot be filmed, leave --video out: {error}") from error
