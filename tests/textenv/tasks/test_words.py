"""``textenv/Words-v0``: environments by name, in words, with limits that follow from them."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import textenv
from algos import LMPolicy, collect
from tests.helpers.chat_families import CHATML, byte_tokenizer
from tests.helpers.descriptions import FUNCTIONS
from tests.helpers.errors import refused
from textenv import check_text_env
from textenv.tasks.builtin import make_task

WORDS_ENV = "textenv/Words-v0"
LAKE = {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}


class Echo(gymnasium.Env):
    """Reads and writes strings; pays for the letter ``wanted``."""

    observation_space = action_space = spaces.Text(50, min_length=0)

    def __init__(self, wanted="a"):
        self.wanted = wanted

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return action[:50], float(self.wanted in action), False, False, {}


gymnasium.register("WordsEcho-v0", Echo, max_episode_steps=3)


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def make_vec(**options):
    return gymnasium.make_vec(WORDS_ENV, num_envs=2, **options)


def first_text(env):
    observation, _ = env.reset(seed=0)
    return env.tokenizer.decode(observation["tokens"][0, : observation["length"][0, 0]])


def play(env, words, seed=0):
    """Write these words in slot 0 of one; returns the rewards, and the flags of the last token."""
    env.reset(seed=seed)
    rewards = []
    for word in words:
        for token in env.tokenizer(word, add_special_tokens=False)["input_ids"]:
            _, reward, terminated, truncated, _ = env.step(np.array([token]))
        rewards.append(float(reward[0]))
    return rewards, bool(terminated[0]), bool(truncated[0])


DESCRIBED = [
    "FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1", "MountainCar-v0", "Acrobot-v1",
    "Pendulum-v1", "LunarLander-v3", "minigrid:MiniGrid-Empty-5x5-v0",
]  # fmt: skip
"""Environments with a description of their own, which the embedded model can read."""


@pytest.mark.heavy
@pytest.mark.parametrize("env_id", DESCRIBED)
def test_the_checker_of_text_environments_passes(env_id):
    check_text_env(gymnasium.make(WORDS_ENV, env=env_id))


def test_an_episode_of_words_is_one_of_the_environment(functions):
    env = gymnasium.make_vec(WORDS_ENV, **LAKE, describe=f"{functions}:cell", instructions="")
    words = ["down", "down", "right", "right", "down", "right"]
    assert play(env, words) == ([0, 0, 0, 0, 0, 1], True, False)
    assert play(env, ["right", "down"]) == ([0, 0], True, False)  # a hole
    assert first_text(env) == "0 0\n"


def test_the_time_limit_of_the_environment_truncates(functions):
    for limit in ({"max_episode_steps": 3}, {"env_kwargs": {"max_episode_steps": 3}}):
        env = gymnasium.make_vec(WORDS_ENV, env="FrozenLake-v1", describe=f"{functions}:cell", **limit)
        assert play(env, ["left"] * 2) == ([0, 0], False, False)
        assert play(env, ["left"] * 3) == ([0, 0, 0], False, True)


def test_limits_follow_from_words_and_observations(functions):
    """By hand: 100 steps of FrozenLake; with bytes, ``right`` has 5 tokens and every observation 4."""
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 4000
    _, limits, _ = make_task("Words", tokenizer=tokenizer, **LAKE, describe=f"{functions}:cell", instructions="")
    assert (limits["max_new_tokens"], limits["max_turns"]) == (5, 100)
    assert len("0 0\n") <= limits["max_prompt_tokens"] <= 20
    assert limits["max_length"] == 1024
    _, limits, _ = make_task(
        "Words", tokenizer=tokenizer, **LAKE, max_episode_steps=4, describe=f"{functions}:cell", instructions=""
    )
    needed = 4 + 4 * (5 + 5)  # each reply begins with a newline
    assert limits["max_turns"] == 4 and needed <= limits["max_length"] <= 3 * needed
    tokenizer.model_max_length = 64
    _, limits, _ = make_task("Words", tokenizer=tokenizer, **LAKE, describe=f"{functions}:cell", instructions="")
    assert limits["max_length"] == 64


def test_limits_of_ones_own_are_kept(functions):
    env = make_vec(**LAKE, describe=f"{functions}:cell", max_turns=7, max_length=50, max_prompt_tokens=20)
    assert env.max_length == 50
    rewards, terminated, truncated = play(
        gymnasium.make_vec(WORDS_ENV, **LAKE, describe=f"{functions}:cell", max_turns=2), ["left", "left"]
    )
    assert (terminated, truncated) == (False, True)


@pytest.mark.heavy
def test_functions_come_by_name_or_as_they_are(functions):
    assert first_text(make_vec(env="FrozenLake-v1", describe=f"{functions}:size", instructions="")) == "0 of 16\n"
    assert first_text(make_vec(env="FrozenLake-v1", describe=lambda o: f"at {o}", instructions="")) == "at 0\n"
    env = gymnasium.make_vec(WORDS_ENV, **LAKE, describe=f"{functions}:cell", env_wrappers=[f"{functions}:Halved"])
    assert play(env, ["down", "down", "right", "right", "down", "right"])[0][-1] == 0.5


def test_own_words_and_free_text():
    env = make_vec(env="CartPole-v1", actions=["left", "right"])
    assert "left, right" in first_text(env)
    assert env.action_mask.any(1).all() and not env.action_mask.all()
    free = make_vec(env="CartPole-v1", actions="free", max_new_tokens=8)
    free.reset(seed=0)
    assert free.action_mask is None


def test_the_chat_template_can_be_left_off():
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], template=CHATML, eos="<|im_end|>")
    for chat in (True, False):
        task, _, _ = make_task("Words", tokenizer=tokenizer, **LAKE, chat=chat)
        assert isinstance(task.sample_prompts([0], seed=0)[0].content, tuple) == chat


def test_an_environment_of_strings_is_played_as_it_is():
    env = gymnasium.make_vec(WORDS_ENV, env="WordsEcho-v0", env_kwargs={"wanted": "z"}, stop=["!"])
    assert first_text(env) == "hello\n"
    assert play(env, ["a!", "z!", "b!"]) == ([0, 1, 0], False, True)
    with refused(ValueError, "WordsEcho-v0", "leave out actions"):
        make_vec(env="WordsEcho-v0", actions=["a"])


def test_the_environment_is_registered_without_a_best_return():
    assert gymnasium.spec(WORDS_ENV).reward_threshold is None
    assert "Words" in textenv.registration.NAMES


# --- wrong arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["needs env="]),
        ({"env": "NoLake-v1"}, ["NoLake-v1", "module:id"]),
        ({"env": "no_module:NoLake-v1"}, ["no_module", "could not be imported"]),
        ({"env": "CarRacing-v3"}, ["describe="]),
        ({"env": "FrozenLake-v1", "describe": "nowhere.py:f"}, ["nowhere.py"]),
        ({"env": "FrozenLake-v1", "actions": ["a", "b"]}, ["4", "words"]),
        ({"env": "FrozenLake-v1", "describe": lambda o: "long " * 100}, ["first observation has", "128", "describe="]),
        ({"env": "FrozenLake-v1", "max_new_tokens": 1}, ["max_new_tokens is 1", "cut a word"]),
    ],
)
def test_wrong_arguments_are_errors_at_once(options, words):
    with refused(ValueError, *words):
        make_vec(**options)


def test_a_description_that_is_no_text_is_an_error_at_once(functions):
    with refused(TypeError, "wordless", "gave 0", "expected a text"):
        make_vec(env="FrozenLake-v1", describe=f"{functions}:wordless")


def test_an_unknown_argument_is_an_error():
    with refused(TypeError, "slippery"):
        make_vec(env="FrozenLake-v1", slippery=True)


class Longer(gymnasium.Env):
    """Its first observation is shorter than the later ones; it ends after ten steps."""

    observation_space = spaces.Discrete(20)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        return self.steps, 1.0, self.steps == 10, False, {}


gymnasium.register("WordsLonger-v0", Longer, max_episode_steps=10)


@pytest.mark.parametrize("history", [1, 2, 3])
def test_later_observations_have_room(history):
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], template=CHATML, eos="<|im_end|>")
    task, limits, _ = make_task(
        "Words", tokenizer=tokenizer, env="WordsLonger-v0", actions=["left", "right"], history=history,
        instructions="", describe=lambda number: "A door." if number == 0 else "A red lamp on a table. " * 6,
    )  # fmt: skip
    env = textenv.TextVectorEnv(task, tokenizer=tokenizer, num_envs=2, **limits)
    env.start_episodes(2, seed=0)
    while env.running.any():
        env.advance(env.action_mask.int().argmax(1).numpy())
    rollout = env.take_episodes()
    assert rollout["reward"].sum() == 20 and rollout["terminated"].any()


def test_words_of_a_list_have_no_metric_of_variety():
    """A training of six words was warned that its texts become alike."""
    env = gymnasium.make_vec("textenv/Words-v0", num_envs=4, env="FrozenLake-v1")
    collect(env, LMPolicy.load("embedded"), num_episodes=4)
    assert "text/distinct_2" not in env.metrics and "reward/failed" in env.metrics
