"""Films of episodes: the frames of a control environment, or a text as it grows."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from algos.training.run_folder import replacing
from algos.training.save import VECTOR_ONLY
from textenv.rendering import HEIGHT, WIDTH, rollout_frames

FILMED = 3
"""Maximum number of episodes in a film."""
PALETTE = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1:dither=none"
"""Filter of ffmpeg that gives each frame a palette: nothing is kept in memory, and few colours stay as they are."""
FORMATS: dict[str, dict[str, Any]] = {
    ".gif": {
        "codec": "gif",
        "pix_fmt_out": "pal8",
        "macro_block_size": 1,
        "output_params": ["-filter_complex", PALETTE],
    },
    ".mp4": {"macro_block_size": 2},
}
"""Arguments of the encoder by the ending of the file's name."""
Add = Callable[[np.ndarray], None]
"""Function that appends a frame, uint8 ``[height, width, 3]``, to a film."""


def check_output(path: Path, flag: str) -> None:
    """Raise an error, with advice, if a command cannot write this file after its work."""
    if path.is_dir():
        raise IsADirectoryError(f"{flag} is {path}, which is a folder: give the name of a file")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"{flag} is {path}, but nothing can be written there, give another folder: {error}") from error


def check_film(path: Path) -> None:
    """Raise an error, with advice, if a film cannot be written to this path."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--video is {path}, expected a file name that ends in {' or '.join(FORMATS)}")
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise ImportError("--video needs imageio-ffmpeg: pip install 'textenv[video]'") from error


def film_episodes(env: Any, policy: Any, path: Path, **options: Any) -> None:
    """Play episodes in one slot and write them to one film.

    Args:
        env: environment to play; in control a single one is made from its spec, with ``render_mode="rgb_array"``.
        policy: the policy that plays.
        path: file to write, in one of `FORMATS`.
        options: further arguments of `algos.evaluation.evaluate`.

    Raises:
        ValueError: if the environment draws no pictures.
    """
    from algos.evaluation import evaluate
    from textenv.rollout import is_episode_env

    if is_episode_env(env):
        vector: Any = env
        rollout, fps = evaluate(vector, policy, **options).rollout, vector.metadata.get("render_fps", 10)
        with _writer(path, (HEIGHT, WIDTH), fps=fps) as add:
            for row in range(len(rollout)):
                for frame in rollout_frames(rollout, row, policy.tokenizer):
                    add(frame)
                for _ in range(fps):  # a second to read the end
                    add(frame)
        return
    single, (height, width, _) = _single(env)
    with closing(single), _writer(path, (height, width), fps=single.metadata.get("render_fps", 30)) as add:
        evaluate(_Filmed(single, add), policy, **options)


class _Filmed(gymnasium.Wrapper):
    """Adds a frame to a film after each reset and step."""

    def __init__(self, env: gymnasium.Env, add: Add) -> None:
        super().__init__(env)
        self._add = add

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        result = super().reset(**options)
        self._add(self.env.render())  # type: ignore[arg-type]
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self._add(self.env.render())  # type: ignore[arg-type]
        return result


def _single(env: VectorEnv) -> tuple[gymnasium.Env, tuple[int, ...]]:
    """Single environment of the same kind that draws pictures, and their shape."""
    assert env.spec is not None, "made by its id"
    arguments = {name: x for name, x in env.spec.kwargs.items() if name not in VECTOR_ONLY}
    try:
        with warnings.catch_warnings(action="ignore"):  # about a render mode that the environment does not have
            single = gymnasium.make(env.spec.id, **arguments | {"render_mode": "rgb_array"})
        if "rgb_array" not in single.metadata.get("render_modes", ()):
            raise TypeError("it has no render_mode 'rgb_array'")
        single.reset()
        frame: Any = single.render()  # or says what is not installed
    except (gymnasium.error.Error, TypeError) as error:
        raise ValueError(f"{env.spec.id} cannot be filmed, leave --video out: {error}") from error
    return single, frame.shape


@contextmanager
def _writer(path: Path, size: tuple[int, int], *, fps: float) -> Iterator[Add]:
    """Write a film of frames of this height and width, one at a time; the file appears when it is complete."""
    from imageio_ffmpeg import write_frames

    with replacing(path) as draft:
        options = FORMATS[path.suffix] | {"fps": fps, "ffmpeg_log_level": "error"}
        with closing(write_frames(str(draft), size[::-1], **options)) as encoder:
            encoder.send(None)
            yield lambda frame: encoder.send(np.ascontiguousarray(frame))
