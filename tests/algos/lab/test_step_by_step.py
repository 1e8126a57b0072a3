"""What is shown of each step is what the environment itself says and draws when the words are played again."""

import re

import gymnasium
import pytest

from algos import LMPolicy, MLPPolicy, evaluate
from algos.lab.step_by_step import play_step_by_step, play_turn_by_turn, plays_in_words
from algos.make import make_vector_environment
from tests.helpers.speaking import AIM, PAYING_LAKE, WORDS, SpokenLake, make_speaker
from textenv import TokenVectorEnv
from textenv.lm.loading import load_tokenizer


def lake():
    return make_vector_environment("FrozenLake-v1", 2, **PAYING_LAKE)


def check_replay(steps, cell_of, *, seed):
    """Play the words of one episode again; compare frames, cells and rewards. Returns the number of steps."""
    env = gymnasium.make("FrozenLake-v1", render_mode="rgb_array", **PAYING_LAKE)
    cell, _ = env.reset(seed=seed)
    over = False
    is_complete = not steps[-1].wrote  # a limit of the text has not cut it
    for step in steps[: len(steps) - is_complete]:
        assert not over and cell_of(step.read) == cell
        assert (step.frame == env.render()).all()
        cell, reward, terminated, truncated, _ = env.step(WORDS.index(step.wrote))
        over = terminated or truncated
        assert step.reward == reward
    assert over == is_complete
    if is_complete:
        end = steps[-1]
        assert (end.read, end.wrote, end.reward) == ("", "", 0.0) and (end.frame == env.render()).all()
    return len(steps) - is_complete


def test_a_network_is_shown_with_its_words():
    env = lake()
    policy = make_speaker(env, 3)
    steps = []
    result = play_step_by_step(env, policy, steps.append, num_episodes=1, seed=5)
    assert all(step.read.startswith(f"{AIM}\n") for step in steps[:-1])
    length = check_replay(steps, lambda read: int(read.removesuffix(".").split()[-1]), seed=5)
    assert length == int(result.rollout["mask"].sum()) and sum(step.reward for step in steps) == result.mean_return
    # The policy plays as it does when nobody watches
    plain = evaluate(gymnasium.make("FrozenLake-v1", **PAYING_LAKE), policy, num_episodes=1, seed=5)
    assert (plain.rollout["action"] == result.rollout["action"]).all()


@pytest.mark.heavy
def test_a_conversation_is_shown_turn_by_turn():
    policy = LMPolicy.load("embedded")
    options = {"tokenizer": load_tokenizer("embedded"), "num_envs": 1, "allowed": WORDS, "max_turns": 8}
    env = TokenVectorEnv(lambda: SpokenLake("rgb_array"), max_length=128, **options)  # room for eight whole turns
    task = env.task
    steps = []
    rewards = []
    for seed in range(3):
        first = len(steps)
        rewards += play_turn_by_turn(env, policy, steps.append, num_episodes=1, seed=seed).returns
        check_replay(steps[first:], lambda read: int(read.split()[-1]), seed=seed)
    assert env.task is task and sum(step.reward for step in steps) == sum(rewards)
    assert {step.wrote for step in steps} > {WORDS[0], WORDS[1]}


def test_words_of_a_registered_conversation_are_shown():
    env = make_vector_environment("textenv/Words-v0", 4, env="FrozenLake-v1", env_kwargs=PAYING_LAKE, history=1)
    policy = LMPolicy.load("embedded")
    assert plays_in_words(env, policy)
    steps = []
    play_step_by_step(env, policy, steps.append, num_episodes=1, seed=2)

    def cell_of(read):
        row, column = re.search(r"Row (\d), column (\d)\.", read).groups()
        return 4 * int(row) + int(column)

    check_replay(steps, cell_of, seed=2)
    assert len(steps) > 2 and {len(step.read.splitlines()) for step in steps[:-1]} == {2}, "what is new, and the aim"


def test_without_frames_only_words_are_shown():
    env = lake()
    steps = []
    play_step_by_step(env, make_speaker(env, 3), steps.append, with_frames=False, num_episodes=2)
    assert [step.frame for step in steps] == [None] * len(steps)
    assert sum(not step.wrote for step in steps) == 2, "the end of each episode"


class PlainLake(gymnasium.Wrapper):
    """FrozenLake as a class that has no argument ``render_mode``."""

    def __init__(self):
        super().__init__(gymnasium.make("FrozenLake-v1", **PAYING_LAKE))


gymnasium.register("PlainLake-v0", entry_point=PlainLake)


@pytest.mark.parametrize("env_id, arguments, make_policy", [
    ("PlainLake-v0", {}, lambda env: make_speaker(env, 3)),
    ("textenv/Words-v0", {"env": "PlainLake-v0", "history": 1}, lambda env: LMPolicy.load("embedded")),
])  # fmt: skip
def test_an_environment_without_a_render_mode_is_shown_in_words(env_id, arguments, make_policy):
    env = make_vector_environment(env_id, 1, **arguments)
    steps = []
    play_step_by_step(env, make_policy(env), steps.append, with_frames=False, num_episodes=1, max_steps=3)
    assert len(steps) > 1 and steps[0].wrote in WORDS and steps[0].frame is None


def test_without_frames_a_render_mode_of_the_environment_is_not_used():
    env = make_vector_environment("FrozenLake-v1", 1, render_mode="rgb_array", **PAYING_LAKE)
    steps = []
    play_step_by_step(env, make_speaker(env, 3), steps.append, with_frames=False, num_episodes=1)
    assert {step.frame for step in steps} == {None}


@pytest.mark.parametrize(("limit", "length"), [(3, 3), (None, 5), (9, 5)])
def test_an_episode_ends_at_the_shorter_limit(limit, length):
    env = make_vector_environment("CartPole-v1", 1, max_episode_steps=5)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    policy.texts = lambda observation: [str(row[0]) for row in observation]
    policy.words = lambda action: [WORDS[int(x)] for x in action]
    steps = []
    play_step_by_step(env, policy, steps.append, num_episodes=1, max_steps=limit)
    assert len(steps) == length + 1


@pytest.mark.heavy
def test_only_language_models_in_games_have_words():
    env = lake()
    silent = MLPPolicy(env.single_observation_space, env.single_action_space)
    assert plays_in_words(env, make_speaker(env, 1)) and not plays_in_words(env, silent)
    text = make_vector_environment("textenv/Copy-v0", 1)
    assert not plays_in_words(text, LMPolicy.load("embedded"))
    without_id = gymnasium.vector.SyncVectorEnv([SpokenLake])
    assert not plays_in_words(without_id, make_speaker(env, 1))
    turned = gymnasium.wrappers.vector.TransformReward(env, abs)
    assert not plays_in_words(turned, make_speaker(env, 1)), "a single environment would lack the wrapper"


def test_frames_that_cannot_be_drawn_are_refused():
    env = lake()
    env.metadata = env.metadata | {"render_modes": ["ansi"]}
    with pytest.raises(gymnasium.error.Error, match="it has no render_mode 'rgb_array'"):
        play_step_by_step(env, make_speaker(env, 1), print)
