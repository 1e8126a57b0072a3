"""Films of episodes: the frames of a control environment, or a text as it grows."""

from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import TransformObservation

from algos.envs.wrapping import make_wrapped
from algos.evaluation import evaluate
from algos.storage.run_folder import replacing
from algos.training.save import VECTOR_ONLY
from textenv.rendering import rollout_frames
from textenv.rollout import is_episode_env

PALETTE = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"
"""Filter of ffmpeg that gives each frame a palette: nothing is kept in memory, and few colours stay as they are."""
GIF = {"codec": "gif", "pixelformat": "pal8", "macro_block_size": 1, "output_params": ["-filter_complex", PALETTE]}


def film_episodes(env: Any, policy: Any, path: Path, **options: Any) -> None:
    """Play episodes in one slot and write them to one film, which appears when it is complete.

    Args:
        env: environment to play, made by its id; in control a single one of its kind is played.
        policy: the policy that plays.
        path: file to write, ``.gif`` or ``.mp4``.
        options: further arguments of `algos.evaluation.evaluate`.

    Raises:
        ValueError: if the environment draws no pictures.
    """
    from imageio.v2 import get_writer

    fps = env.metadata.get("render_fps", 10)
    encoding: dict[str, Any] = GIF if path.suffix.lower() == ".gif" else {"macro_block_size": 2}
    add_episodes = _add_text if is_episode_env(env) else _add_control
    with replacing(path) as draft, get_writer(draft, ".mp4", fps=fps, **encoding) as film:  # by ffmpeg, a gif too
        add_episodes(film, env, policy, **options)


def _add_text(film: Any, env: Any, policy: Any, **options: Any) -> None:
    rollout = evaluate(env, policy, **options).rollout
    for row in range(len(rollout)):
        for frame in rollout_frames(rollout, row, policy.tokenizer):
            film.append_data(frame)
        for _ in range(env.metadata.get("render_fps", 10)):  # a second to read the end
            film.append_data(frame)


def _add_control(film: Any, env: Any, policy: Any, **options: Any) -> None:
    def show(observation: Any) -> Any:
        film.append_data(single.render())
        return observation

    try:
        if "rgb_array" not in env.metadata.get("render_modes", ()):
            raise gymnasium.error.Error("it has no render_mode 'rgb_array'")
        arguments = {name: x for name, x in env.spec.kwargs.items() if name not in VECTOR_ONLY}
        wrappers = env.spec.kwargs.get("wrappers", ())
        with make_wrapped(env.spec.id, wrappers, **arguments | {"render_mode": "rgb_array"}) as single:
            evaluate(TransformObservation(single, show, None), policy, **options)
    except gymnasium.error.Error as error:  # also of a package that is not installed
        raise ValueError(f"{env.spec.id} cannot be filmed, leave --video out: {error}") from error
