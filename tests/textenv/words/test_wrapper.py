"""`LanguageWrapper` against the environment inside it, stepped by numbers, and against Gymnasium's checkers."""

import gymnasium
import minigrid  # noqa: F401  (registers its environments)
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from algos import LMPolicy, collect
from tests.helpers.errors import refused
from textenv import TokenVectorEnv
from textenv.envs.string_env import TokenEnv
from textenv.words.wrapper import MAX_CHARACTERS, LanguageWrapper, language_wrapper_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's own, that a wrapper is checked

TOY_TEXT = [
    "FrozenLake-v1",
    "FrozenLake8x8-v1",
    "CliffWalking-v1",
    "CliffWalkingSlippery-v1",
    "Taxi-v4",
    "Blackjack-v1",
]
CONTROL = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"]
BOX2D = ["LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3"]
MINIGRID = ["MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0", "MiniGrid-GoToDoor-5x5-v0"]
ENVIRONMENTS = [*TOY_TEXT, *CONTROL, *BOX2D, *MINIGRID]


def describe_anything(observation):
    return str(observation)


def make(env_id, **options):
    return LanguageWrapper(gymnasium.make(env_id), **options)


def drawn_words(env, count, seed):
    rng = np.random.default_rng(seed)
    return [str(rng.choice(env.words)) for _ in range(count)]


class Choices(gymnasium.Env):
    """Observes a number, takes actions of any space, and remembers them."""

    observation_space = spaces.Discrete(5)

    def __init__(self, action_space):
        self.action_space = action_space
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(5))
        return self.state, {}

    def step(self, action):
        self.actions.append(action)
        return self.state, 1.0, False, False, {}


# --- Gymnasium's contract --------------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", [None, "free"], ids=["closed", "free"])
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_the_checker_of_gymnasium_passes(env_id, actions):
    env = make(env_id, actions=actions)
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_rewards_and_ends_are_those_of_the_environment(env_id):
    env = make(env_id)
    numbers_env = gymnasium.make(env_id)
    env.reset(seed=3)
    numbers_env.reset(seed=3)
    table = [(text, env.action_words.action(indices)) for text, indices in texts_and_indices(env)]
    rng = np.random.default_rng(0)
    for _ in range(60):
        text, action = table[rng.integers(len(table))]
        _, *outcome, _ = env.step(text)
        _, *expected, _ = numbers_env.step(action)
        assert outcome == expected
        if any(outcome[1:]):
            env.reset(seed=4)
            numbers_env.reset(seed=4)


def texts_and_indices(env):
    """Texts of all actions with the index of each word, by counting: the last choice changes fastest."""
    counts = [len(words) for words in env.action_words.choices]
    return list(zip(env.words, np.ndindex(*counts), strict=True))


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_equal_seeds_and_words_give_equal_texts(env_id):
    transcripts = []
    for _ in range(2):
        env = make(env_id)
        texts = [env.reset(seed=7)[0]]
        for word in drawn_words(env, 40, seed=1):
            observation, _, terminated, truncated, _ = env.step(word)
            texts.append(observation)
            if terminated or truncated:
                texts.append(env.reset()[0])
        transcripts.append(texts)
    assert transcripts[0] == transcripts[1]
    assert len(set(transcripts[0])) > 1


def test_what_is_not_text_passes_through():
    env = LanguageWrapper(gymnasium.make("FrozenLake-v1", render_mode="rgb_array", is_slippery=False))
    env.reset(seed=0)
    assert env.render().shape == env.unwrapped.render().shape
    assert env.unwrapped.desc.shape == (4, 4)
    remade = gymnasium.make(env.spec)
    assert remade.unwrapped.spec.kwargs["is_slippery"] is False
    assert remade.reset(seed=0)[0] == env.reset(seed=0)[0]
    assert env.spec.max_episode_steps == 100


# --- actions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "words", "text", "action"),
    [
        (spaces.Discrete(3, start=-1), ("-1", "0", "1"), "-1", -1),
        (spaces.MultiDiscrete([2, 3]), ("0 0", "0 1", "0 2", "1 0", "1 1", "1 2"), "1 2", [1, 2]),
        (spaces.MultiBinary(2), ("0 0", "0 1", "1 0", "1 1"), "1 0", [1, 0]),
        (spaces.Box(-1, 1, (1,)), ("-1", "-0.5", "0", "0.5", "1"), "-0.5", [-0.5]),
    ],
)
def test_a_text_becomes_the_action_of_its_words(space, words, text, action):
    env = LanguageWrapper(Choices(space))
    env.reset(seed=0)
    env.step(text)
    assert env.words == words
    np.testing.assert_array_equal(env.unwrapped.actions, [action])
    assert env.unwrapped.actions[0] in space


def test_own_words_of_several_choices_are_joined_by_a_space():
    env = LanguageWrapper(Choices(spaces.MultiDiscrete([2, 2])), actions=[["left", "right"], ["stay", "jump"]])
    env.reset(seed=0)
    env.step("right jump")
    assert env.words == ("left stay", "left jump", "right stay", "right jump")
    np.testing.assert_array_equal(env.unwrapped.actions, [[1, 1]])


@pytest.mark.parametrize("word", ["sideways", "", "Left", "left right"])
def test_an_unknown_word_is_an_error_that_lists_the_words(word):
    env = LanguageWrapper(gymnasium.make("CartPole-v1"), actions=["left", "right"])
    env.reset(seed=0)
    with refused(ValueError, f"'{word}'", "left, right"):
        env.step(word)


def test_an_action_that_is_no_text_is_an_error():
    env = LanguageWrapper(gymnasium.make("CartPole-v1"), actions=["left", "right"])
    env.reset(seed=0)
    with refused(TypeError, "expected a text", "left, right"):
        env.step(0)


def test_more_combinations_than_a_thousand_need_free_text():
    space = spaces.MultiDiscrete([11, 10, 10])
    with refused(ValueError, "1,100 combinations", "1,000", "actions='free'"):
        LanguageWrapper(Choices(space))
    env = LanguageWrapper(Choices(space), actions="free")
    env.reset(seed=0)
    env.step("I press 10 9 0.")
    np.testing.assert_array_equal(env.unwrapped.actions, [[10, 9, 0]])


def test_combinations_with_the_same_text_are_refused():
    with refused(ValueError, "two actions", "'a b c'"):
        LanguageWrapper(Choices(spaces.MultiDiscrete([2, 2])), actions=[["a", "a b"], ["b c", "c"]])


@pytest.mark.parametrize("actions", ["freely", ["left"], ["left", "left"], 3], ids=str)
def test_wrong_words_are_refused(actions):
    with refused(ValueError, "actions is", "words"):
        LanguageWrapper(gymnasium.make("CartPole-v1"), actions=actions)


def test_actions_without_words_are_refused():
    with refused(ValueError, "have no words", "bounds"):
        LanguageWrapper(Choices(spaces.Box(-np.inf, np.inf, (2,))))


# --- free text -------------------------------------------------------------------------------------------------


def test_free_text_steps_with_the_last_word():
    env = LanguageWrapper(gymnasium.make("FrozenLake-v1", is_slippery=False), actions="free")
    env.reset(seed=0)
    _, _, _, _, info = env.step("Not left. I go DOWN!")
    assert env.unwrapped.s == 4
    assert info["unreadable"] is False
    assert env.words is None


def test_an_unreadable_text_costs_a_turn():
    env = LanguageWrapper(gymnasium.make("FrozenLake-v1", is_slippery=False), actions="free")
    first, _ = env.reset(seed=0)
    env.step("down")
    state = env.unwrapped.s
    for _ in range(2):
        text, reward, terminated, truncated, info = env.step("hm")
        assert (reward, terminated, truncated, info["unreadable"]) == (0.0, False, False, True)
        assert all(word in text for word in ("left", "down", "right", "up"))
    assert env.unwrapped.s == state
    assert env.observation_space.contains(text)
    assert env.reset(seed=0)[0] == first


# --- descriptions ----------------------------------------------------------------------------------------------


def test_a_function_may_want_the_environment_too():
    def describe(observation, env):
        return f"{observation} of {env.observation_space.n}"

    env = LanguageWrapper(gymnasium.make("FrozenLake-v1"), describe=describe)
    assert env.reset(seed=0)[0] == "0 of 16"


@pytest.mark.parametrize("describe", [str, "{} here".format, lambda observation, precision=2: f"at {observation}"])
def test_a_function_of_the_observation_is_enough(describe):
    env = LanguageWrapper(gymnasium.make("FrozenLake-v1"), describe=describe)
    assert env.reset(seed=0)[0] == describe(0)


def test_a_reset_says_what_a_description_returned():
    with refused(TypeError, "describe", "number", "gave 0", "observation 0", "expected a text"):
        LanguageWrapper(gymnasium.make("FrozenLake-v1"), describe=number).reset(seed=0)
    with refused(ValueError, "novel", "20,001 characters", "at most 20,000"):
        LanguageWrapper(gymnasium.make("FrozenLake-v1"), describe=novel).reset(seed=0)


def number(observation):
    return observation


def novel(observation):
    return "x" * (MAX_CHARACTERS + 1)


def test_a_later_description_is_checked_as_well():
    env = LanguageWrapper(
        gymnasium.make("FrozenLake-v1", is_slippery=False), describe=lambda o: "start" if o == 0 else o
    )
    env.reset(seed=0)
    with refused(TypeError, "gave 4", "observation 4"):
        env.step("down")


def test_a_wrapper_neither_copies_nor_plays_its_environment():
    """An episode of a game makes one: a copy each time would take as long as the episode."""
    calls = []

    class Dear(Choices):
        def __deepcopy__(self, memo):
            calls.append("copy")
            return Dear(self.action_space)

        def reset(self, *, seed=None, options=None):
            calls.append("reset")
            return super().reset(seed=seed, options=options)

    env = LanguageWrapper(Dear(spaces.Discrete(2)), describe=describe_anything)
    assert calls == []
    env.reset(seed=0)
    assert calls == ["reset"]


@pytest.mark.parametrize(
    "describe", [lambda: "x", lambda a, b, c: "x", "describe", 3], ids=["none", "three", "text", "3"]
)
def test_what_cannot_describe_is_refused(describe):
    with refused(TypeError, "describe is", "observation"):
        LanguageWrapper(gymnasium.make("FrozenLake-v1"), describe=describe)


def test_an_image_needs_a_description_of_its_own():
    with refused(ValueError, "describe="):
        LanguageWrapper(gymnasium.make("CarRacing-v3"))
    env = LanguageWrapper(gymnasium.make("CarRacing-v3"), describe=lambda image: f"mean {image.mean():.0f}")
    assert env.reset(seed=0)[0].startswith("mean ")


# --- instructions ----------------------------------------------------------------------------------------------


def test_instructions_are_those_of_the_description_or_ones_own():
    env = gymnasium.make("FrozenLake-v1", is_slippery=False)
    instructions = LanguageWrapper(env).instructions
    assert all(word in instructions for word in ("left", "down", "right", "up"))
    assert LanguageWrapper(env, instructions="Go.").instructions == "Go."
    assert LanguageWrapper(env, instructions="").instructions == ""


def test_own_words_are_listed_instead_of_those_of_the_description():
    env = LanguageWrapper(gymnasium.make("FrozenLake-v1"), actions=["west", "south", "east", "north"])
    assert env.instructions == "Write one of west, south, east, north."
    long = LanguageWrapper(Choices(spaces.Discrete(30)))
    assert long.instructions == ""


def test_instructions_that_are_no_text_are_refused():
    with refused(TypeError, "instructions", "3", "expected a text"):
        LanguageWrapper(gymnasium.make("FrozenLake-v1"), instructions=3)


def test_the_wrapper_is_known_inside_other_wrappers():
    env = LanguageWrapper(gymnasium.make("FrozenLake-v1"))
    assert language_wrapper_of(gymnasium.wrappers.TimeLimit(env, 5)) is env
    assert language_wrapper_of(gymnasium.make("FrozenLake-v1")) is None


class Corridor(gymnasium.Env):
    """A step to the left is impossible at the left end."""

    observation_space = spaces.Discrete(5)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0
        return self.position, self._info()

    def step(self, action):
        assert self._info()["action_mask"][action], "forbidden"
        self.position += 2 * int(action) - 1
        return self.position, 1.0, self.position == 4, False, self._info()

    def _info(self):
        return {"action_mask": np.array([self.position > 0, True], dtype=np.int8)}


def test_an_action_in_free_text_that_the_mask_forbids_is_not_taken():
    """The corridor itself raises an error if it is."""
    env = LanguageWrapper(Corridor(), str, "free", instructions="")
    env.reset()
    reply, reward, terminated, truncated, info = env.step("0")
    assert reply == "That is not available now. Write one of: 1.\n0" and info == {"unreadable": True}
    assert (reward, terminated, truncated) == (0.0, False, False) and env.available_words is None
    assert env.step("I take 1")[0] == "1" and env.step("0")[0] == "0"


@pytest.mark.heavy
def test_only_available_words_are_written():
    """The embedded model before training would go left half of the time."""
    env = LanguageWrapper(Corridor(), str, ["left", "right"])
    env.reset()
    assert env.available_words == ("right",)
    assert env.available_words is env.available_words, "read once a turn"
    env.step("right")
    assert env.available_words is None, "all are available"

    policy = LMPolicy.load("embedded", seed=1)
    games = TokenVectorEnv(
        lambda: LanguageWrapper(Corridor(), str, ["left", "right"], instructions=""),
        tokenizer=policy.tokenizer,
        num_envs=4,
        max_turns=8,
        max_length=120,
    )
    rollout = collect(games, policy, num_episodes=16, seed=1)
    (at_start,) = {tuple(mask.nonzero().flatten().tolist()) for mask in _first_masks(rollout)}
    assert policy.tokenizer.decode(at_start).strip() == "r"
    evaluation = policy.evaluate(rollout)
    mask = rollout["mask"]
    torch.testing.assert_close(evaluation.log_prob[mask], rollout["log_prob"][mask], atol=1e-4, rtol=1e-3)


def _first_masks(rollout):
    """The tokens allowed at each episode's first action."""
    sets = rollout.get_non_tensor("allowed_sets")
    for row in range(len(rollout)):
        column = int(rollout["mask"][row].int().argmax())
        yield sets[rollout["allowed"][row, column]]


def test_an_environment_that_waits_is_closed():
    closed = []

    class Counted(Corridor):
        def close(self):
            closed.append(self)

    tokenizer = LMPolicy.load("embedded").tokenizer
    for make in (TokenEnv, TokenVectorEnv):
        closed.clear()
        games = make(lambda: LanguageWrapper(Counted(), str, ["left", "right"]), tokenizer=tokenizer, max_length=120)
        games.close()
        assert len(closed) == 1
