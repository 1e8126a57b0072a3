"""Episodes in words for the page: recorded before and after a training, and read from the run's folder."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos.lab.comparison.summary import RunResult, by_case
from algos.storage.run_files import EPISODES
from algos.storage.run_folder import replacing
from algos.storage.run_reader import DamagedRunError
from textenv.json_files import read_json

if TYPE_CHECKING:
    import numpy as np
    from gymnasium.vector import VectorEnv

MAX_STEPS = 30
"""Maximum number of steps of an episode on a page."""
FRAME_SIZE = 160
"""Maximum width and height of a frame on a page, in pixels."""
FRAME_COLOURS = 64
"""Maximum number of colours of a frame on a page."""
MAX_FRAME_CHARACTERS = 1_000_000
"""Maximum characters of all frames in a page; where they end, only the words are shown."""
WHEN = {"before": "before training", "after": "after training"}
"""Names of the episodes in the file, and their titles."""

Episode = dict[str, Any]
"""``frames``: PNG files in base64. ``steps``: of each ``frame`` (index or None), ``read``, ``wrote``, ``reward``."""


def record_episode(env: VectorEnv, policy: Any, *, seed: int, deterministic: bool = False) -> Episode | None:
    """Play the first `MAX_STEPS` steps of an episode; equal frames are kept once.

    Args:
        env: environment of the evaluation.
        policy: the policy that plays; its generator is unchanged afterwards.
        seed: seed of the start state and of the sampled actions.
        deterministic: take the most probable actions.

    Returns:
        The episode, without frames if the environment cannot draw any; None if no language model plays a game.
    """
    from algos.lab.step_by_step import WordStep, play_step_by_step, plays_in_words

    if not plays_in_words(env, policy):
        return None
    steps: list[WordStep] = []
    options: dict[str, Any] = {"num_episodes": 1, "max_steps": MAX_STEPS, "seed": seed, "deterministic": deterministic}
    try:
        play_step_by_step(env, policy, steps.append, **options)
    except Exception:  # of any kind: a renderer may lack a package, a display or a driver
        steps.clear()
        play_step_by_step(env, policy, steps.append, with_frames=False, **options)

    index_of_frame: dict[str, int] = {}
    rows = []
    for step in steps:
        index = None
        if step.frame is not None:
            index = index_of_frame.setdefault(_png(step.frame), len(index_of_frame))
        rows.append({"frame": index, "read": step.read, "wrote": step.wrote, "reward": step.reward})
    return {"frames": list(index_of_frame), "steps": rows}


def _png(frame: np.ndarray) -> str:
    """Return a frame as a small PNG file in base64."""
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((FRAME_SIZE, FRAME_SIZE))
    file = io.BytesIO()
    image.quantize(FRAME_COLOURS).save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def write_episodes(folder: Path, episodes: Mapping[str, Episode | None]) -> None:
    """Write the episodes of a run into its folder, by their names in `WHEN`; nothing if there are none."""
    recorded = {name: episode for name, episode in episodes.items() if episode is not None}
    if recorded:
        with replacing(folder / EPISODES) as draft:
            draft.write_text(json.dumps(recorded), encoding="utf-8")


def read_episodes(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return what the page shows: for each case the episodes of its first run that has some.

    Each entry has ``case``, ``seed``, ``opening`` (with which all texts that were read begin) and ``episodes``. An
    episode has ``title``, ``ending`` (a text below the last frame) and ``steps``. A step has ``source`` (the frame, for
    ``<img>``, or ""), ``read`` (without the opening), ``wrote`` and ``reward``. The frames have at most
    `MAX_FRAME_CHARACTERS` characters.

    Raises:
        DamagedRunError: if a file has other contents.
    """
    first_runs = []
    for of_case in by_case(runs).values():
        having = [run for run in of_case if run.folder and Path(run.folder, EPISODES).is_file()]
        first_runs += having[:1]
    entries = []
    for run in first_runs:
        path = Path(run.folder, EPISODES)
        content = read_json(path, what="episodes in words", kind=dict)
        try:
            entries.append(_entry(run, content, max_characters=MAX_FRAME_CHARACTERS // len(first_runs)))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedRunError(
                f"{path} is damaged, expected episodes in words: remove it ({error!r:.200})"
            ) from error
    return entries


def _entry(run: RunResult, content: Mapping[str, Episode], *, max_characters: int) -> dict[str, Any]:
    """Return what the page shows of a run."""
    texts = [step["read"] for name in WHEN if name in content for step in content[name]["steps"] if step["read"]]
    opening = common_opening(texts)
    episodes = []
    for name, title in WHEN.items():
        if name in content:
            steps = list(_shown_steps(content[name], opening, max_characters=max_characters // len(WHEN)))
            total = sum(step["reward"] for step in steps)
            length = sum(bool(step["wrote"]) for step in steps)
            sentence = f"{title}: return {total:.3g} in {length} steps"
            ending = "the end"
            if length == MAX_STEPS:
                sentence = f"{title}: return {total:.3g} in the first {length} steps"
                ending = f"after {length} steps"
            episodes.append({"title": sentence, "steps": steps, "ending": ending})
    return {"case": run.case, "seed": run.seed, "opening": opening.strip(), "episodes": episodes}


def _shown_steps(episode: Episode, opening: str, *, max_characters: int) -> Iterator[dict[str, Any]]:
    """Iterate over what the page shows of an episode's steps, as far as the frames fit."""
    frames = [f"data:image/png;base64,{_checked(frame)}" for frame in episode["frames"]]
    characters_left = max_characters
    for step in episode["steps"][: MAX_STEPS + 1]:
        source = ""
        if step["frame"] is not None:
            source = frames[step["frame"]]
            characters_left -= len(source)
        if characters_left < 0:
            source = ""
        read = str(step["read"]).removeprefix(opening)
        yield {"source": source, "read": read, "wrote": str(step["wrote"]), "reward": float(step["reward"])}


def _checked(frame: str) -> str:
    """Return a frame in base64; raise a ValueError if it is anything else."""
    base64.b64decode(frame, validate=True)
    return frame


def common_opening(texts: Sequence[str]) -> str:
    """Return the whole lines with which all of these texts begin; empty if a text has no others.

    Example:
        >>> common_opening(["Find the goal.\\nrow 1", "Find the goal.\\nrow 2"])
        'Find the goal.\\n'
    """
    prefix = os.path.commonprefix([*texts])
    opening = prefix[: prefix.rfind("\n") + 1]
    if any(text == opening for text in texts):
        return ""
    return opening
