"""The page shows what a language model read and wrote in a game, beside the frames."""

import base64
import io
import json
from pathlib import Path

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest

from algos.config import PPOConfig
from algos.lab.comparison.compare import compare
from algos.lab.comparison.episodes import (
    FRAME_SIZE,
    MAX_FRAME_CHARACTERS,
    MAX_STEPS,
    common_opening,
    read_episodes,
    record_episode,
    write_episodes,
)
from algos.lab.comparison.page import page_data
from algos.lab.comparison.report import report_page
from algos.lab.comparison.runs import read_runs
from algos.lab.comparison.summary import Case
from algos.make import make_vector_environment
from algos.policies.mlp import MLPPolicy
from tests.helpers.browser import Browser, needs_chromium
from tests.helpers.errors import refused
from tests.helpers.finished_runs import run_of
from tests.helpers.speaking import AIM, PAYING_LAKE, WORDS, make_speaker

STEP = {"frame": None, "read": "cell 0", "wrote": "left", "reward": 0.0}


def png(colour, size=(2, 2)):
    file = io.BytesIO()
    imageio.imwrite(file, np.full((*size, 3), colour, np.uint8), extension=".png")
    return base64.b64encode(file.getvalue()).decode()


def run_with(folder, episodes, name="a"):
    """A run whose folder has these episodes."""
    run = run_of(1, returns=[1.0], after=1.0)
    run.name, run.folder = name, str(folder / name)
    (folder / name).mkdir()
    write_episodes(folder / name, episodes)
    return run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A network that speaks, and one that doesn't."""
    folder = tmp_path_factory.mktemp("study")
    options = {"config": PPOConfig(num_steps=16, minibatch_size=32), "num_envs": 2, "total_steps": 64}
    lake = {"env_kwargs": PAYING_LAKE}
    cases = [
        Case("FrozenLake-v1", policy=make_speaker, name="speaks", **lake, **options),
        Case("FrozenLake-v1", name="is silent", **lake, **options),
    ]
    return folder, compare(cases, seeds=2, run_dir=folder, processes=0, quiet=True)


@pytest.mark.heavy
def test_the_page_shows_an_episode_before_and_after(study):
    folder, _ = study
    runs = read_runs([folder])
    (entry,) = read_episodes(runs)
    assert (entry["case"], entry["seed"], entry["opening"]) == ("speaks", 1, AIM)
    assert [episode["title"].partition(":")[0] for episode in entry["episodes"]] == [
        "before training",
        "after training",
    ]
    page = (folder / "report.html").read_text()
    assert page.count('<ol class="steps">') == 2 == page.count(">the end<")
    for episode in entry["episodes"]:
        for step in episode["steps"]:
            assert step["source"] in page and step["read"] in page
    assert not list(folder.glob("*silent*/words.json")) and len(list(folder.glob("*speaks*/words.json"))) == 2


@pytest.mark.heavy
def test_one_game_is_compared_in_three_ways(tmp_path):
    """By a small network, by a language model in its stead, and by one in a conversation."""
    lake = {"is_slippery": False, "max_episode_steps": 6}
    steps = {"config": PPOConfig(num_steps=8, minibatch_size=16), "num_envs": 2, "total_steps": 16}
    in_words = {"env": "FrozenLake-v1", "env_kwargs": lake, "history": 1}
    episodes = {"config": PPOConfig(num_steps=None, num_episodes=4, minibatch_size=8), "num_envs": 4, "total_steps": 16}
    cases = [
        Case("FrozenLake-v1", env_kwargs=lake, **steps),
        Case("FrozenLake-v1", "ppo", "words", env_kwargs=lake, **steps),
        Case("textenv/Words-v0", env_kwargs=in_words, **episodes),
    ]
    compare(cases, seeds=1, run_dir=tmp_path, processes=0, quiet=True)
    runs = read_runs([tmp_path])
    names = ["FrozenLake-v1:ppo", "FrozenLake-v1:ppo:words", "textenv/Words-v0:ppo"]
    assert [run.case for run in runs] == names
    assert {run.game_name for run in runs} == {"FrozenLake-v1 (is_slippery=false, max_episode_steps=6)"}
    assert {run.after["episodes"] for run in runs} == {20}

    # The steps of all three are steps of the game
    titles = {panel["title"]: panel["lines"] for panel in page_data(runs)["panels"]}
    title = "episode length, steps or tokens: FrozenLake-v1 (is_slippery=false, max_episode_steps=6)"
    assert [line["name"] for line in titles[title]] == names
    conversation = runs[2].history
    lines = (Path(runs[2].folder) / "metrics.jsonl").read_text().splitlines()
    turns = np.cumsum([json.loads(line)["rollout/turns"] for line in lines])
    assert [row["steps"] for row in conversation] == turns.tolist()
    assert conversation[-1]["steps"] < conversation[-1]["tokens"] >= 16

    # Both models are shown; each text of the conversation is one observation
    entries = read_episodes(runs)
    assert [entry["case"] for entry in entries] == names[1:]
    first_steps = [entry["episodes"][0]["steps"][0] for entry in entries]
    assert first_steps[0]["read"] == first_steps[1]["read"] and all(step["source"] for step in first_steps)
    assert all(step["wrote"] in WORDS for step in first_steps)


def test_a_recorded_episode_is_one_of_the_game(study):
    folder, _ = study
    content = json.loads((next(folder.glob("*speaks-1")) / "words.json").read_text())
    env = gymnasium.make("FrozenLake-v1", render_mode="rgb_array", **PAYING_LAKE)
    for episode in content.values():
        cell, _ = env.reset(seed=1)
        pictures = {}
        for step in episode["steps"]:
            picture = imageio.imread(base64.b64decode(episode["frames"][step["frame"]]), extension=".png")
            assert max(picture.shape) == FRAME_SIZE
            # Equal states have one frame, and others have others (the elf looks to where it was told to go)
            assert pictures.setdefault(env.render().tobytes(), step["frame"]) == step["frame"]
            if step["wrote"]:
                assert step["read"] == f"{AIM}\nYou are in cell {cell}."
                cell, reward, *_ = env.step(WORDS.index(step["wrote"]))
                assert reward == step["reward"]
        assert len(set(pictures.values())) == len(pictures) == len(episode["frames"])


def test_a_case_reports_its_seconds_and_parameters(study):
    _, report = study
    for case in ("speaks", "is silent"):
        assert report[case]["processor seconds"] > 0
        assert report[case]["parameters"] == report[case]["trained parameters"] > 1000


def test_a_long_episode_is_shown_in_part(tmp_path):
    env = make_vector_environment("MountainCar-v0", 1)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    assert record_episode(env, policy, seed=1) is None
    policy.texts = lambda observation: [f"{row[0]:.3f}" for row in observation]
    policy.words = lambda action: [str(x) for x in action]
    episode = record_episode(env, policy, seed=1)
    assert [bool(step["wrote"]) for step in episode["steps"]] == [True] * MAX_STEPS + [False]
    page = report_page([run_with(tmp_path, {"before": episode})])
    assert "before training: return -30 in the first 30 steps" in page and ">after 30 steps<" in page


def test_an_environment_without_pictures_shows_words():
    env = make_vector_environment("FrozenLake-v1", 1)
    env.metadata = {"render_modes": []}
    episode = record_episode(env, make_speaker(env, 1), seed=1)
    assert episode["frames"] == [] and {step["frame"] for step in episode["steps"]} == {None}
    assert episode["steps"][0]["read"].startswith(AIM)


def test_frames_of_a_page_are_bounded(tmp_path):
    noise = np.random.default_rng(0)
    frames = [base64.b64encode(noise.bytes(30_000)).decode() for _ in range(MAX_STEPS)]
    episode = {"frames": frames, "steps": [STEP | {"frame": i} for i in range(MAX_STEPS)]}
    runs = [run_with(tmp_path, {"before": episode, "after": episode}, name) for name in "ab"]
    entries = read_episodes(runs)
    shown = [step for entry in entries for episode in entry["episodes"] for step in episode["steps"]]
    characters = sum(len(step["source"]) for step in shown)
    assert 0.5 * MAX_FRAME_CHARACTERS < characters <= MAX_FRAME_CHARACTERS
    assert len(shown) == 4 * MAX_STEPS and all(step["read"] for step in shown)


def test_words_cannot_be_markup(tmp_path):
    step = STEP | {"read": "<b>bold</b>\x1b[2J", "wrote": "<script>x"}
    page = report_page([run_with(tmp_path, {"after": {"frames": [], "steps": [step]}})])
    assert "&lt;b&gt;bold" in page and "&lt;script&gt;x" in page and "<script>x" not in page and "\x1b" not in page


@pytest.mark.parametrize(
    "episode",
    [
        {"frames": ['x" onerror="alert(1)'], "steps": [STEP]},
        {"frames": [], "steps": [STEP | {"frame": 0}]},
        {"frames": [], "steps": [{"read": "cell 0"}]},
        {"frames": [], "steps": [STEP | {"reward": "high"}]},
        [],
    ],
)
def test_damaged_episodes_are_refused(tmp_path, episode):
    run = run_with(tmp_path, {"after": episode})
    with refused(ValueError, "words.json is damaged", "remove it"):
        read_episodes([run])


def test_the_opening_of_all_texts_is_taken_out_once():
    assert common_opening(["a\nb\n1", "a\nb\n2"]) == "a\nb\n"
    assert common_opening(["a 1", "a 2"]) == ""
    assert common_opening(["a\n", "a\n1"]) == "", "one of them would be empty"
    assert common_opening([]) == ""


@pytest.mark.heavy
@needs_chromium
def test_a_browser_draws_frames_and_words(study):
    folder, _ = study
    with Browser() as browser:
        browser.open(f"file://{folder}/report.html")
        sizes = browser.run("[...document.querySelectorAll('.steps img')].map(x => x.naturalWidth)")
        assert len(sizes) > 2 and set(sizes) == {FRAME_SIZE}
        assert browser.run("document.querySelector('.steps .wrote').innerText") in WORDS
        assert browser.run("document.body.scrollWidth <= innerWidth"), "a long episode scrolls by itself"
        assert browser.problems == []
