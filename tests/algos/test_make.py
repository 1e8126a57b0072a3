"""Environments in words and of strings by their id: made, trained, evaluated and resumed with a language model."""

import json
from contextlib import closing

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import algos
from algos import PPO, Case, LMPolicy, PPOConfig, Recipe, evaluate, presets
from algos.cli import main
from algos.make import has_text_spaces, is_text, make_vector_environment, remake_environment, takes_model
from algos.storage.saved_environment import runs_code
from algos.training.save import read_description
from tests.helpers.descriptions import FUNCTIONS
from tests.helpers.errors import refused
from textenv import TextVectorEnv
from textenv.importing import load_function
from textenv.words.wrapper import LanguageWrapper

GAME = """
import gymnasium
from gymnasium import spaces

class Count(gymnasium.Env):
    observation_space = spaces.Text(100)
    action_space = spaces.Text(1000, min_length=0)

    def __init__(self, letter="a"):
        self.letter = letter

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return "more", float(action.count(self.letter)), False, False, {}

gymnasium.register("CountLetters-v0", Count, max_episode_steps=2)
"""
SHORT = "--total-steps 60 --num-envs 4 --config.num-episodes 4 --config.minibatch-size 4 --num-episodes 2 --json"
LAKE = {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": False, "max_episode_steps": 3}, "instructions": ""}


class Talker(gymnasium.Env):
    """An environment of strings that needs an argument."""

    observation_space = action_space = spaces.Text(20)

    def __init__(self, needed):
        self.needed = needed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return "more", float(action.count(self.needed)), True, False, {}


gymnasium.register("NeedsArgument-v0", Talker)
gymnasium.register("Unread-v0", "no_such_module:Env")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a game and with functions of one's own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "letters.py").write_text(GAME)
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture
def here(files, monkeypatch):
    """The folder from which commands are typed."""
    monkeypatch.chdir(files)
    return files


def run(capsys, *words):
    """Run a command, and return what it prints as JSON."""
    main([str(word) for word in words])
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


# --- environments of strings ------------------------------------------------------------------------------------


def test_an_environment_with_text_spaces_is_known_by_its_id(here):
    for asks in (has_text_spaces, takes_model, is_text):
        assert asks("letters:CountLetters-v0")
        assert not asks("CartPole-v1")
        assert not asks("NeedsArgument-v0")
        assert not asks("nowhere:Missing-v0")
    assert takes_model("textenv/Copy-v0") and not has_text_spaces("textenv/Copy-v0")


def test_it_is_made_with_a_model_and_its_own_arguments(here):
    env = make_vector_environment("letters:CountLetters-v0", 3, model="embedded", letter="z", max_new_tokens=4)
    assert isinstance(env, TextVectorEnv) and env.num_envs == 3
    assert env.task.look_at_env().unwrapped.letter == "z"
    wrapped = make_vector_environment("letters:CountLetters-v0", 1, wrappers=["functions.py:Halved"])
    assert type(wrapped.task.look_at_env()).__name__ == "Halved"


@pytest.mark.heavy
def test_its_own_arguments_make_it(tmp_path, capsys):
    arguments = {"needed": "a", "max_new_tokens": 4, "wrappers": []}
    for asks in (has_text_spaces, takes_model, is_text):
        assert asks("NeedsArgument-v0", arguments)
    env = make_vector_environment("NeedsArgument-v0", 2, needed="a", max_new_tokens=4)
    assert isinstance(env, TextVectorEnv) and env.task.look_at_env().unwrapped.needed == "a"
    assert Case("NeedsArgument-v0", env_kwargs=arguments).recipe.config == presets.TEXT
    made = json.dumps({"needed": "a", "max_new_tokens": 4})
    words = ["--model", "embedded", "--env-kwargs", made, "--run-dir", tmp_path / "run", *SHORT.split()]
    assert run(capsys, "train", "NeedsArgument-v0", *words)["episodes"] == 2
    assert isinstance(algos.load(tmp_path / "run"), LMPolicy)


@pytest.mark.heavy
def test_train_plays_it_with_a_language_model(here, tmp_path, capsys):
    folder = tmp_path / "run"
    result = run(capsys, "train", "letters:CountLetters-v0", "--model", "embedded", "--run-dir", folder, *SHORT.split())
    assert result["episodes"] == 2
    policy = algos.load(folder)
    assert isinstance(policy, LMPolicy)
    with pytest.raises(SystemExit):
        main(["evaluate", str(folder), "--num-episodes", "2"])
    assert "--env letters:CountLetters-v0" in capsys.readouterr().err
    again = run(capsys, "evaluate", folder, "--env", "letters:CountLetters-v0", "--num-episodes", "2", "--json")
    assert again["episodes"] == 2
    assert len(evaluate("letters:CountLetters-v0", policy, num_episodes=3).returns) == 3


def test_stepping_strings_says_what_to_do_instead():
    env = SyncVectorEnv([lambda: LanguageWrapper(gymnasium.make("FrozenLake-v1"))])
    with refused(ValueError, "SyncVectorEnv", "TokenVectorEnv\\(make_env", "Words-v0"):
        PPO(env, LMPolicy.load("embedded"))


# --- environments in words --------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_words_are_trained_evaluated_and_resumed_by_name(tmp_path, capsys):
    folder = tmp_path / "run"
    made = json.dumps(LAKE)
    train = ["train", "textenv/Words-v0", "--env-kwargs", made, "--run-dir", folder, *SHORT.split()]
    result = run(capsys, *train)
    assert result["steps"] >= 60
    assert run(capsys, "evaluate", folder, "--num-episodes", "2", "--json")["episodes"] == 2
    longer = run(capsys, "train", "--resume", folder, "--total-steps", "120", "--json")
    assert longer["steps"] > result["steps"]


@pytest.mark.heavy
def test_a_function_of_ones_own_is_run_only_if_it_is_named(here, tmp_path, capsys):
    folder = tmp_path / "run"
    made = json.dumps(LAKE | {"describe": "functions.py:cell"})
    run(capsys, "train", "textenv/Words-v0", "--env-kwargs", made, "--run-dir", folder, *SHORT.split())
    description = read_description(folder)
    saved = description["environment"]["kwargs"]
    assert saved["describe"] == f"{here / 'functions.py'}:cell"
    with refused(ValueError, "only if you name them", "describe", "functions.py:cell"):
        remake_environment(description, num_envs=1)
    with closing(remake_environment(description, num_envs=1, env_kwargs={"describe": "functions.py:cell"})) as env:
        observation, _ = env.reset(seed=0)
        text = env.tokenizer.decode(observation["tokens"][0, : observation["length"][0, 0]])
    assert text == "0 0\n"


def test_other_wrappers_than_in_the_training_are_told(here, tmp_path, caplog):
    """A part of them, or another order; another name of the same function is not."""
    (here / "mine.py").write_text("def one(env):\n    return env\n\n\ndef two(env):\n    return env\n")
    (here / "copy").mkdir()
    (here / "copy" / "mine.py").write_text((here / "mine.py").read_text())
    both = ["mine.py:one", "mine.py:two"]
    PPO(make_vector_environment("CartPole-v1", 2, wrappers=both)).save(tmp_path / "agent")
    description = read_description(tmp_path / "agent")
    functions = [load_function(name) for name in both]
    for wrappers in (both, ["copy/mine.py:one", "copy/mine.py:two"], functions):
        remake_environment(description, num_envs=1, wrappers=wrappers).close()
    assert "was trained with the wrappers" not in caplog.text
    for wrappers in (both[:1], both[::-1]):
        caplog.clear()
        remake_environment(description, num_envs=1, wrappers=wrappers).close()
        assert "mine.py:one" in caplog.text and "was trained with the wrappers" in caplog.text
    PPO(make_vector_environment("CartPole-v1", 2)).save(tmp_path / "bare")
    caplog.clear()
    remake_environment(read_description(tmp_path / "bare"), num_envs=1, wrappers=both).close()
    assert "was trained with the wrappers none, and this environment has mine.py:one, mine.py:two" in caplog.text


def test_a_function_is_saved_by_its_name(here, tmp_path):
    cell = load_function("functions.py:cell")
    env = make_vector_environment("textenv/Words-v0", 2, **LAKE, describe=cell)
    agent = PPO(env, LMPolicy.load("embedded"), PPOConfig(num_steps=None, num_episodes=4))
    agent.save(tmp_path / "agent")
    saved = read_description(tmp_path / "agent")["environment"]
    assert saved["kwargs"]["describe"].endswith("functions.py:cell")


@pytest.mark.parametrize(
    ("env", "reason"), [("letters:CountLetters-v0", "letters:CountLetters-v0"), ("Unread-v0", "Unread-v0")]
)
def test_a_saved_environment_imports_nothing(env, reason):
    saved = {"id": "textenv/Words-v0", "kwargs": {"task": "Words", "env": env}, "module": None}
    with refused(ValueError, "only if you name them", reason):
        remake_environment({"environment": saved}, num_envs=1)


def test_names_of_functions_are_code_in_options_of_others():
    assert not runs_code("env_kwargs", {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}, "history": 1})
    assert runs_code("env_kwargs", {"env": "FrozenLake-v1", "describe": "mine.py:f"})
    assert runs_code("env_kwargs", {"env": "mine:Env-v0"})
    assert runs_code("env_kwargs", {"env": "FrozenLake-v1", "env_wrappers": ["mine.py:f"]})


@pytest.mark.heavy
def test_a_recipe_in_words_builds_an_agent():
    recipe = Recipe(
        env="textenv/Words-v0",
        config=PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4),
        num_envs=4,
        env_kwargs={"env": "FrozenLake-v1", "history": 1},
    )
    agent = Recipe.from_dict(recipe.to_dict()).build(seed=1)
    history = agent.learn(30)
    assert history[-1]["episode/length"] > 0


def test_whether_it_reads_strings_is_asked_again_where_it_may_differ(tmp_path):
    """After a failure, with objects among the arguments, and when an id is registered anew."""
    running = tmp_path / "running"
    made = []

    class Game(gymnasium.Env):
        def __init__(self, text=True, check=None):
            made.append(text)
            if not running.exists():
                raise ConnectionError("no server")
            space = spaces.Text(5) if text and (check is None or check()) else spaces.Discrete(2)
            self.observation_space = self.action_space = space

    gymnasium.register("Asked-v0", Game, disable_env_checker=True)
    assert not has_text_spaces("Asked-v0")
    running.touch()
    assert has_text_spaces("Asked-v0") and has_text_spaces("Asked-v0") and len(made) == 2
    assert not has_text_spaces("Asked-v0", {"check": lambda: False})
    assert has_text_spaces("Asked-v0", {"check": lambda: True})
    gymnasium.registry.pop("Asked-v0")
    gymnasium.register("Asked-v0", Game, kwargs={"text": False}, disable_env_checker=True)
    assert not has_text_spaces("Asked-v0")
    gymnasium.registry.pop("Asked-v0")


class Lacking(gymnasium.Env):
    """An environment whose package is not there."""

    def __init__(self):
        raise gymnasium.error.DependencyNotInstalled("Dice is not installed, run `pip install dice`")


gymnasium.register("Lacking-v0", Lacking)


def test_a_missing_package_is_named_and_nothing_else():
    with pytest.raises(ValueError, match="'Lacking-v0', which needs a package: Dice is .*pip install dice`$"):
        make_vector_environment("Lacking-v0", 2)


def test_prompts_in_a_list_are_texts_and_no_files(tmp_path, monkeypatch):
    """One has the name of a file, and one is longer than such a name may be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello").touch()
    long_prompt = "long " * 60
    env = make_vector_environment(
        "textenv/Prompts-v0", 2, prompts=["hello", long_prompt], reward=lambda completions: [0.0] * len(completions)
    )
    assert {prompt.content for prompt in env.task.sample_prompts(range(2), seed=0)} == {"hello", long_prompt}
