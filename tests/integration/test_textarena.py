"""The adapter of examples/textarena_game.py against the real package, by strings and by tokens."""

import sys

import numpy as np

from tests.helpers.models import EXAMPLES
from tests.helpers.packages import lazy_import
from textenv import TokenVectorEnv

lazy_import("textarena")
sys.path.insert(0, str(EXAMPLES))
textarena_game = lazy_import("textarena_game")

SETTINGS = dict(min_number=1, max_number=9, max_turns=20)


def guessing_game(secret):
    """A game whose secret is this, found by its seed."""
    env = textarena_game.TextArena("GuessTheNumber-v0", **SETTINGS)
    for seed in range(1000):
        rules, info = env.reset(seed=seed)
        if env.game.game_number == secret:
            return env, rules, seed
    raise AssertionError(f"no seed gives {secret}")


def test_a_game_by_strings_word_for_word():
    env, rules, _ = guessing_game(7)
    assert "You have to guess the number between 1 and 9 within 20 turns." in rules
    assert env.step("[3]")[:4] == ("The target number is higher.", 0.0, False, False)
    assert env.step("I think [8]!")[:4] == ("The target number is lower.", 0.0, False, False)
    said, reward, terminated, truncated, _ = env.step("[7]")
    assert (said, reward) == ("Congratulations! You guessed the correct number.", 1.0)
    assert terminated and not truncated


def test_halving_wins_as_the_example_says():
    won = 0
    for secret in range(1, 10):
        env, _, _ = guessing_game(secret)
        low, high, reward = 1, 9, 0.0
        for _ in range(3):
            guess = (low + high) // 2
            said, reward, over, *_ = env.step(f"[{guess}]")
            if over:
                break
            low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
        won += reward == 1
    assert won == 7


def test_what_textarena_pays_for_two_errors_in_a_row():
    env, _, _ = guessing_game(7)
    env.step("[3]")  # 4 away, of at most 8
    said, reward, terminated, *_ = env.step("three")
    assert said.startswith("You attempted an invalid move.") and (reward, terminated) == (0.0, False)
    said, reward, terminated, *_ = env.step("[3]")
    assert "has already guessed the number" in said and (reward, terminated) == (0.5, True)


def test_another_game_to_its_end():
    env = textarena_game.TextArena("TowerOfHanoi-v0")
    env.reset(seed=0)
    moves = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    steps = [env.step(move) for move in moves]
    assert [reward for _, reward, *_ in steps] == [0] * 6 + [1]
    assert [terminated for _, _, terminated, *_ in steps] == [False] * 6 + [True]
    assert "You moved disk 1 from A to C." in steps[0][0] and "[A C]" not in steps[0][0]


def test_rules_of_ones_own_and_brackets():
    env = textarena_game.Bracketed(textarena_game.TextArena("GuessTheNumber-v0", rules="guess", **SETTINGS))
    secret = guessing_game(7)
    assert env.reset(seed=secret[2])[0] == "guess"
    assert env.step(" 7\n")[1:3] == (1.0, True)
    env.reset(seed=secret[2])
    assert env.step("\nguess\n")[0].startswith("You attempted an invalid move.")  # own words change nothing


def test_same_seed_same_game():
    env = textarena_game.TextArena("GuessTheNumber-v0", **SETTINGS)

    def secrets(seed):
        env.reset(seed=seed)
        first = env.game.game_number
        env.reset()
        return first, env.game.game_number

    assert secrets(4) == secrets(4)
    assert len({secrets(seed) for seed in range(20)}) > 10


def test_a_game_by_tokens():
    """Halving by the replies that stand in the observation finds each of nine numbers in four guesses."""
    from textenv.embedded.training import train_tokenizer

    tokenizer = train_tokenizer()
    env = TokenVectorEnv(
        textarena_game.make_game, tokenizer=tokenizer, max_prompt_tokens=24, max_new_tokens=1, max_turns=4
    )

    def text(observation):
        return tokenizer.decode(observation["tokens"][0, : observation["length"][0, 0]])

    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        assert text(observation) == "guess a number from 1 to 9\n"
        low, high, ended = 1, 9, False
        while not ended:
            before, guess = text(observation), (low + high) // 2
            observation, reward, terminated, truncated, _ = env.step(
                np.array([tokenizer.convert_tokens_to_ids(str(guess))])
            )
            ended = bool(terminated[0])
            if not ended:
                assert reward[0] == 0 and not truncated[0]
                said = text(observation).removeprefix(f"{before}{guess}")
                assert said in ("\nThe target number is higher.\n", "\nThe target number is lower.\n")
                low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
        assert reward[0] == 1
