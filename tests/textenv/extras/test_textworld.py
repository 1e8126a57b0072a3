"""textenv/TextWorld-v0 with games that the package textworld makes, compiles and plays."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.packages import lazy_import
from textenv import TextVectorEnv
from textenv.embedded.training import train_tokenizer
from textenv.tasks.builtin import make_task

textworld = lazy_import("textworld", reason="install the extra: pip install '.[textworld]'")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    before = os.environ.get("TEXTENV_CACHE")
    os.environ["TEXTENV_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield os.environ["TEXTENV_CACHE"]
    os.environ.pop("TEXTENV_CACHE")
    os.environ |= {} if before is None else {"TEXTENV_CACHE": before}


def first_prompt(tokenizer, **options):
    """Its content is what the game says at first; its state has the game."""
    task, *_ = make_task("TextWorld", tokenizer=tokenizer, **{"games": 1} | options)
    return task.sample_prompts([0], seed=0)[0]


HOUSE = {"nb_rooms": 2, "quest_length": 2, "theme": "house"}


@pytest.fixture(scope="module")
def house(tokenizer, cache, tmp_path_factory):
    """A folder with one compiled game of two commands, `00000.z8`, with its description, and its first text."""
    os.environ["TEXTENV_CACHE"] = str(tmp_path_factory.mktemp("house"))
    text = first_prompt(tokenizer, **HOUSE).content
    (file,) = Path(os.environ["TEXTENV_CACHE"]).rglob("*.z8")
    os.environ["TEXTENV_CACHE"] = cache
    return file.parent, text


@pytest.mark.heavy
def test_a_walkthrough_wins_and_earns_its_score(tokenizer, house):
    folder, text = house
    prompt = first_prompt(tokenizer, games=folder)
    assert prompt.content == text and "$" not in text and not text.startswith(">") and "\n\n" not in text
    game = prompt.state.env
    commands = textworld.Game.load(str(folder / "00000.json")).metadata["walkthrough"]
    steps = [game.step(command) for command in commands]
    assert [reward for _, reward, *_ in steps] == [0, 1] and [over for _, _, over, *_ in steps] == [False, True]


@pytest.mark.heavy
def test_a_policy_cannot_command_the_interpreter(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    game = first_prompt(tokenizer).state.env
    for action in ("save", "look. save", "look then save", "script", "quit", "restart", "tw-trace-actions", "", "\0\1"):
        assert game.step(action)[:3] == ("That's not a verb I recognise.", 0.0, False), action
    assert "Room" in game.step("\n look \nsave")[0] and not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_equal_seeds_make_equal_games_in_every_process(tokenizer, house, tmp_path):
    """The other process has another seed for the hashes of texts."""
    program = f"""
from textenv.tasks.builtin import make_task
from textenv.embedded.training import train_tokenizer
task = make_task("TextWorld", tokenizer=train_tokenizer(), games=1, **{HOUSE})[0]
print(task.sample_prompts([0], seed=0)[0].content)
"""
    hashing = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    own = {"TEXTENV_CACHE": str(tmp_path), "PYTHONHASHSEED": hashing}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | own, capture_output=True, text=True, check=True
    )
    _, text = house
    assert done.stdout.removesuffix("\n") == text and len(text) > 100
    prompts = [make_task("TextWorld", tokenizer=tokenizer, games=1, split=split)[0] for split in ("train", "test")]
    assert len({task.sample_prompts([0], seed=1)[0].content for task in prompts}) == 2


def test_random_tokens_write_admissible_commands(tokenizer, cache):
    task, limits, _ = make_task("TextWorld", tokenizer=tokenizer, games=1, admissible=True)
    env, rng = (
        TextVectorEnv(task, tokenizer=tokenizer, num_envs=2, **limits | {"max_length": 1024}),
        np.random.default_rng(0),
    )
    env.start_episodes(6, seed=0)
    while env.running.any():
        mask = env.action_mask.numpy()
        env.advance(np.array([rng.choice(np.flatnonzero(row)) for row in mask]))
    rollout = env.take_episodes()
    turns = [turn for turn in env.scored_turns.turns if turn.terminated]
    assert len(turns) > 6 and "allowed" in rollout.keys()
    games = [textworld.Game.load(str(path.with_suffix(".json"))) for path in Path(cache).rglob("*.z8")]
    assert {turn.completion for turn in turns} <= {c for game in games for c in game.possible_admissible_commands}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"games": 0}, "games is 0 .*expected a number or a folder of .*z8 files"),
        ({"games": "nowhere"}, "games is 'nowhere'"),
        ({"levle": 3}, "settings among nb_rooms, nb_objects, quest_length, theme"),
        ({"quest_length": 0}, "cannot make a game of"),
    ],
)
def test_wrong_settings_give_a_sentence(options, said, tokenizer):
    with pytest.raises(ValueError, match=said):
        first_prompt(tokenizer, **options)


def test_a_game_without_its_description_is_refused(tokenizer, tmp_path):
    (tmp_path / "house.z8").write_bytes(b"")
    with pytest.raises(ValueError, match=r"house\.z8 lacks the \.json file"):
        first_prompt(tokenizer, games=tmp_path)
