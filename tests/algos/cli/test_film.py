"""Films and transcripts of an evaluation, and Gymnasium's recording wrappers around text environments."""

import json
import sys

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics

import algos
from algos import LMPolicy, presets
from algos.cli import main
from algos.cli.film import film_episodes
from algos.lab.step_by_step import play_step_by_step
from algos.make import make_vector_environment
from tests.helpers.speaking import make_speaker
from textenv.rendering import CAPTION_LINES, HEIGHT, LINE_HEIGHT, WIDTH

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # imageio's reader of mp4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Saved agents, for control and for text."""
    folder = tmp_path_factory.mktemp("runs")
    algos.PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), seed=1).save(folder / "control")
    for name in ("Copy", "GuessNumber"):
        env = gymnasium.make_vec(f"textenv/{name}-v0", num_envs=2)
        algos.PPO(env, LMPolicy.load("embedded"), presets.TEXT).save(folder / name)
    return folder


def evaluated(capsys, *words):
    capsys.readouterr()
    main(["evaluate", *map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.heavy
@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_a_film_of_control_has_a_frame_for_every_state(ending, runs, tmp_path, capsys):
    path = tmp_path / f"film.{ending}"
    result = evaluated(capsys, runs / "control", "--num-episodes", "1", "--video", path)
    film = imageio.imread(path)
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    played = algos.evaluate(env, algos.load(runs / "control"), num_episodes=1, seed=0)
    assert film.shape == (len(played.rollout["mask"][0]) + 1, 400, 600, 3), "the start, then each step"
    env.reset(seed=0)
    assert np.abs(film[0].astype(int) - env.render()).mean() < (0.01 if ending == "gif" else 3)
    assert result["episodes"] == 1 and [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.heavy
def test_a_film_of_text_grows_by_a_token_a_frame(runs, tmp_path, capsys):
    path, lines = tmp_path / "film.gif", tmp_path / "out.jsonl"
    evaluated(capsys, runs / "Copy", "--num-episodes", "2", "--video", path, "--transcripts", lines)
    film = imageio.imread(path)
    assert film.shape[1:] == (HEIGHT, WIDTH, 3)
    ink = (film != 255).any(axis=-1).mean(axis=(1, 2))  # of the letters, and the background of the policy's
    policy = algos.load(runs / "Copy")
    env = gymnasium.make_vec("textenv/Copy-v0", num_envs=2, split="test")
    rollout = algos.evaluate(env, policy, num_episodes=2, seed=0).rollout
    lengths = rollout["mask"].sum(dim=1).tolist()
    assert len(film) == sum(lengths) + 2 * (1 + 10), "the prompt, each token, and a second at the end"
    assert (np.diff(ink[: lengths[0]]) > 0).all()


@pytest.mark.heavy
@pytest.mark.parametrize("ending", ["gif", "mp4"])
def test_words_stand_under_each_frame_of_a_game(ending, tmp_path):
    env = make_vector_environment("FrozenLake-v1", 2, is_slippery=False)
    policy = make_speaker(env, 3)
    path = tmp_path / f"film.{ending}"
    film_episodes(env, policy, path, num_episodes=1, seed=5)
    film = imageio.imread(path)

    # A frame for each step, the end, and a second to see it
    steps = []
    play_step_by_step(env, policy, steps.append, num_episodes=1, seed=5)
    assert film.shape == (len(steps) + 2, 256 + CAPTION_LINES * LINE_HEIGHT, WIDTH, 3)
    left = (WIDTH - 256) // 2
    for picture, step in zip(film, steps, strict=False):
        game = picture[:256, left : left + 256].astype(int)
        assert np.abs(game - step.frame).mean() < (2 if ending == "gif" else 6)
        words = picture[256:].astype(int)
        assert bool((words < 100).any()) == bool(step.wrote), "black letters, but not at the end"
        wrote = (words[..., 1] > words[..., 0] + 60).any(axis=1)
        assert bool(wrote[2 * LINE_HEIGHT : 3 * LINE_HEIGHT].any()) == bool(step.wrote), "green, after two lines"
        assert not wrote[: 2 * LINE_HEIGHT - 4].any() and not wrote[3 * LINE_HEIGHT + 4 :].any()


def test_a_game_that_draws_nothing_is_not_filmed(tmp_path):
    env = make_vector_environment("FrozenLake-v1", 2)
    env.metadata = {"render_modes": []}
    with pytest.raises(ValueError, match="FrozenLake-v1 cannot be filmed, leave --video out"):
        film_episodes(env, make_speaker(env, 3), tmp_path / "film.gif")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_a_long_evaluation_is_filmed_in_part(runs, tmp_path, capsys):
    """The result of the evaluation is the same."""
    words = [runs / "control", "--num-episodes", "5", "--seed", "4"]
    plain, filmed = evaluated(capsys, *words), evaluated(capsys, *words, "--video", tmp_path / "x.gif")
    assert filmed | {"seconds": 0} == plain | {"seconds": 0}
    env = gymnasium.make("CartPole-v1")
    first = algos.evaluate(env, algos.load(runs / "control"), num_episodes=3, seed=4)
    assert len(imageio.imread(tmp_path / "x.gif")) == int(first.rollout["mask"].sum()) + 3


@pytest.mark.heavy
def test_transcripts_have_every_episode_with_its_score(runs, tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    result = evaluated(capsys, runs / "Copy", "--num-episodes", "6", "--transcripts", path)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 6 and all(entry["prompt"].startswith("copy ") for entry in found)
    assert np.mean([entry["score"] for entry in found]) == pytest.approx(result["mean_return"])
    evaluated(capsys, runs / "GuessNumber", "--num-episodes", "2", "--transcripts", path)
    for entry in map(json.loads, path.read_text().splitlines()):
        roles = [turn["role"] for turn in entry["turns"]]
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"]
        assert "".join(turn["content"] for turn in entry["turns"]) == entry["completion"]


WRONG = {
    "another format": (["control", "--video", "film.avi"], "ends in .gif or .mp4"),
    "no such folder": (["control", "--video", "nowhere/film.gif"], "nowhere does not exist: make it first"),
    "a folder": (["Copy", "--transcripts", "taken"], "taken, which is a folder: name a file in it"),
    "transcripts of control": (["control", "--transcripts", "out.jsonl"], "is for text"),
    "no pictures": (["control", "--video", "film.gif", "--env", "Blind-v0"], "cannot be filmed"),
    "no episodes": (["control", "--video", "film.gif", "--num-episodes", "0"], "at least 1"),
}


class Blind(gymnasium.Env):
    """CartPole's spaces, no pictures, and no episodes either."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        pass

    def reset(self, **options):
        raise AssertionError("played")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_output_is_refused_before_any_episode(case, runs, tmp_path, capsys, monkeypatch):
    (run, *words), sentence = WRONG[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    monkeypatch.setitem(gymnasium.registry, "Blind-v0", gymnasium.envs.registration.EnvSpec("Blind-v0", Blind))
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(runs / run), *words])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in said and said.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_a_missing_encoder_says_what_to_install(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(SystemExit):
        main(["evaluate", str(runs / "control"), "--video", str(tmp_path / "film.gif")])
    assert "extra video): pip install " in capsys.readouterr().err


@pytest.mark.heavy
def test_gymnasium_recorders_fit_text_environments(tmp_path):
    env = RecordVideo(gymnasium.make("textenv/Copy-v0", render_mode="rgb_array"), str(tmp_path / "videos"))
    env = RecordEpisodeStatistics(env)
    env.action_space.seed(1)
    env.reset(seed=1)
    steps, over = 0, False
    while not over:
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        steps, over = steps + 1, terminated or truncated
    env.close()
    with pytest.raises(ValueError, match="RecordEpisodeStatistics wraps a text environment.*pass the unwrapped"):
        algos.evaluate(env, LMPolicy.load("embedded"))
    assert info["episode"]["l"] == steps
    (path,) = tmp_path.glob("videos/*.mp4")
    film = imageio.imread(path)
    assert film.shape == (steps + 1, HEIGHT, WIDTH, 3) and film[-1].mean() < film[0].mean()


def test_gymnasium_statistics_count_text_episodes():
    env = RecordVectorStatistics(gymnasium.make_vec("textenv/Periods-v0", num_envs=2, max_new_tokens=3))
    env.action_space.seed(1)
    env.reset(seed=1)
    returns, found = np.zeros(2), []
    for _ in range(3):
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        returns += reward
        found.append(info.get("episode"))
    assert (terminated | truncated).all() and found[-1]["l"].tolist() == [3, 3]
    assert found[-1]["r"].tolist() == returns.tolist()
