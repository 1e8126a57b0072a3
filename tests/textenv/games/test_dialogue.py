"""The games: each oracle earns the best return, dialogues word for word, and whatever a policy may write."""

import functools
import warnings
from fractions import Fraction

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from textenv import TokenVectorEnv
from textenv.embedded.training import train_tokenizer
from textenv.games import (
    BestQuestions,
    BinarySearch,
    Calculator,
    CalculatorPlayer,
    GuessNumber,
    TwentyQuestions,
    evaluate,
)
from textenv.games.dialogue import MAX_ACTION
from textenv.games.guess_number import last_whole_number
from textenv.games.twenty_questions import ANIMALS, ATTRIBUTES

GAMES = [GuessNumber, Calculator, TwentyQuestions]
HELP = "Write 'calc: ' and an expression to have it computed, or 'answer: ' and a whole number to finish."
HOSTILE = [
    "", " ", "\n\n", "\x00", "x" * 100_000, "is it " * 20_000,
    "9" * 3999, "calc: " + "9" * 3990, "answer: " + "9" * 3990,
    "calc: 9**9**9**9", "calc: __import__('os')", "calc:", "answer:", "calc: " + "(" * 190, "calc: " + "-" * 190 + "1",
    "calc: " + "(" * 90 + "1" + ")" * 90, "calc: ٣ + ٤", "answer: ٣", "٤٢", "calc: 1 2", "calc: 007",
    "calc: ()", "calc: *1",
    "answer: 1e9", "answer: -", "is it ?", "is it a ٣?", "is it not a mammal?", "is it a seal or a wolf?", "-", "1.5",
    "calc: " + "9*" * 97 + "9", "answer: \ud800", "calc: 1; 2", "calc: lambda: 0", "calc: 0x10", "calc: 1 if 1 else 2",
]  # fmt: skip


def play(env, player, **reset):
    """Return, number of the player's turns."""
    conversation, total, ended = [env.reset(**reset)[0]], 0.0, False
    while not ended:
        said = player(conversation)
        reply, reward, terminated, truncated, _ = env.step(said)
        assert env.action_space.contains(said) and env.observation_space.contains(reply) and not truncated
        conversation += [said, reply]
        total, ended = total + reward, terminated
    return total, len(conversation) // 2


def replies(env, *texts):
    """What a game answers to texts said one after the other: (reply, reward, terminated) each."""
    return [env.step(text)[:3] for text in texts]


# --- best play -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(1, 100), (0, 0), (-5, 2), (1, 127), (1, 128)])
def test_binary_search_finds_every_number(low, high):
    env, turns = GuessNumber(low, high), []
    for secret in range(low, high + 1):
        total, used = play(env, BinarySearch(low, high), options={"secret": secret})
        assert total == env.best_return == 1
        turns.append(used)
    assert max(turns) == env.max_guesses == int(np.ceil(np.log2(high - low + 2)))


def test_fewer_guesses_find_fewer_numbers():
    env = GuessNumber(1, 10, max_guesses=3)
    wins = [play(env, BinarySearch(1, 10), options={"secret": secret})[0] for secret in range(1, 11)]
    assert sum(wins) == 7 and env.best_return == 0.7


@pytest.mark.parametrize("size", [{}, {"terms": 2, "digits": 1}, {"terms": 8, "digits": 6, "max_turns": 2}])
def test_the_calculator_player_answers_every_question(size):
    env = Calculator(**size)
    assert [play(env, CalculatorPlayer(), seed=seed) for seed in range(200)] == [(env.best_return, 2)] * 200


def test_the_best_questions_earn_the_optimum():
    env, player = TwentyQuestions(), BestQuestions()
    results = [play(env, player, options={"secret": secret}) for secret in ANIMALS]
    assert np.mean([total for total, _ in results]) == pytest.approx(env.best_return, abs=1e-12)
    # By hand: three halvings leave 2; naming one of them hits at once or, as often, after 1 more question.
    assert np.mean([turns - 1 for _, turns in results]) == 3.5
    assert env.best_return == 1 - 3.5 / 20


HAVE = [sum(1 << bit for bit, have in enumerate(ANIMALS.values()) if attribute in have) for attribute in ATTRIBUTES]


@functools.cache
def questions(left):
    """Questions before the right name, summed over the animals left, by trying everything; sets are bits."""
    count = left.bit_count()
    names = [1 << bit for bit in range(16) if left >> bit & 1]
    options = [count - 1 + questions(left & ~name) for name in names if count > 1]
    splits = [left & have for have in HAVE if 0 < left & have < left]
    options += [count + questions(yes) + questions(left & ~yes) for yes in splits]
    return min(options, default=0)


def test_the_dynamic_program_equals_a_full_one():
    animals, player, rng = list(ANIMALS), BestQuestions(), np.random.default_rng(0)
    for size in [*range(1, 17)] * 30:
        chosen = rng.choice(16, size=size, replace=False).tolist()
        mean = Fraction(questions(sum(1 << bit for bit in chosen)), size)
        assert player.value(frozenset(animals[bit] for bit in chosen)) == 1 - mean / 20
    assert questions(2**16 - 1) == 16 * 3.5


@functools.cache
def earned(left, asked, limit):
    """Best return times ``limit``, summed over the animals left, by trying everything."""
    if asked == limit or not left:
        return 0
    names = [1 << bit for bit in range(16) if left >> bit & 1]
    options = [limit - asked + earned(left & ~name, asked + 1, limit) for name in names]
    splits = [left & have for have in HAVE if 0 < left & have < left]
    return max(options + [earned(yes, asked + 1, limit) + earned(left & ~yes, asked + 1, limit) for yes in splits])


@pytest.mark.parametrize("limit", [2, 5])
def test_the_dynamic_program_knows_the_limit(limit):
    animals, player, rng = list(ANIMALS), BestQuestions(max_questions=limit), np.random.default_rng(1)
    for size in [*range(1, 13)] * 12:
        chosen = rng.choice(16, size=size, replace=False).tolist()
        best = Fraction(earned(sum(1 << bit for bit in chosen), 0, limit), limit * size)
        assert player.value(frozenset(animals[bit] for bit in chosen)) == best


@pytest.mark.parametrize("limit", [1, 3, 4, 8])
def test_the_best_questions_know_the_limit(limit):
    env, player = TwentyQuestions(max_questions=limit), BestQuestions(max_questions=limit)
    mean = np.mean([play(env, player, options={"secret": secret})[0] for secret in ANIMALS])
    assert mean == pytest.approx(env.best_return, abs=1e-12)
    by_hand = {1: 1 / 16, 3: 1 / 8, 8: 1 - 3.5 / 8}  # 3: two questions and 4 left, or one of 8, or just names
    assert limit not in by_hand or env.best_return == by_hand[limit]


def test_the_table_of_animals_can_be_halved_four_times():
    halves = list(ATTRIBUTES)[:4]
    assert all(sum(half in attributes for attributes in ANIMALS.values()) == 8 for half in halves)
    assert len({attributes & frozenset(halves) for attributes in ANIMALS.values()}) == len(ANIMALS) == 16


@pytest.fixture(scope="module")
def letters():
    """A tokenizer that any text survives."""
    return train_tokenizer()


@pytest.mark.parametrize(
    ("game", "player"),
    [(GuessNumber, BinarySearch()), (Calculator, CalculatorPlayer()), (TwentyQuestions, BestQuestions())],
)
def test_the_oracles_play_as_well_by_tokens(game, player, letters):
    """The policy sees token ids only; what the game said is what follows the policy's own tokens."""
    env = TokenVectorEnv(game, tokenizer=letters, max_prompt_tokens=500, max_new_tokens=40, max_length=2000)

    def tokens(observation):
        return observation["tokens"][0, : observation["length"][0, 0]].tolist()

    returns = []
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        seen, conversation, total, ended = 0, [], 0.0, False
        while not ended:
            conversation.append(letters.decode(tokens(observation)[seen:]).strip())
            conversation.append(player(conversation))
            said = [*letters.encode(conversation[-1]), letters.eos_token_id]
            seen = len(tokens(observation)) + len(said)
            for token in said:
                observation, reward, terminated, truncated, _ = env.step(np.array([token]))
                total += float(reward[0])
            ended = bool(terminated[0])
            assert not truncated[0]
        returns.append(total)
    assert (min(returns) > 0.75) if game is TwentyQuestions else (returns == [1] * 5)


# --- dialogues -----------------------------------------------------------------------------------------------------


def test_a_game_of_guessing_word_for_word():
    env = GuessNumber(1, 20)
    assert env.reset(options={"secret": 7})[0] == (
        "I have chosen a whole number from 1 to 20. You have 5 guesses. Write a number; I will say higher or lower."
    )
    assert replies(env, "between 1 and 20, so 10", "is it 3?", "no idea", "25", "8")  == [
        ("lower", 0.0, False),
        ("higher", 0.0, False),
        ("I saw no whole number. Write one from 1 to 20.", 0.0, False),
        ("That is out of range. Write a number from 1 to 20.", 0.0, False),
        ("lower\nThat was your last guess; it is 7.", 0.0, True),
    ]  # fmt: skip


def test_a_question_with_the_calculator_word_for_word():
    env = Calculator(max_turns=4)
    assert env.reset(options={"expression": "17 * 23 + 5"})[0] == f"What is 17 * 23 + 5? {HELP} You have 4 turns."
    assert replies(env, "hm", "First CALC : 17*(23 + 5)", "calc: 17 ** 2", "The answer: 400.") == [
        (HELP, 0.0, False),
        ("476", 0.0, False),
        ("I cannot compute that: use + - * between numbers only; there are no powers and no calls.", 0.0, False),
        ("Wrong, it is 396.", 0.0, True),
    ]
    env.reset(options={"expression": "17 * 23 + 5"})
    assert replies(env, "calc: 17*23+5\nanswer: 396") == [("Right.", 1.0, True)]
    env.reset(options={"expression": "2 - 5"})
    assert replies(env, "a", "b", "answer: three", "answer: 3\ncalc: 2 - 5")[2:] == [
        ("Write one whole number after 'answer:', as in 'answer: 42'.", 0.0, False),
        ("-3\nThat was your last turn; it is -3.", 0.0, True),
    ]


def test_twenty_questions_word_for_word():
    env = TwentyQuestions(max_questions=8)
    rules, _ = env.reset(options={"secret": "owl"})
    assert rules.startswith("I think of one of these animals: seal, wolf, ") and rules.endswith("; you have 8.")
    unclear = "I cannot say. Ask about mammal, carnivore, large, aquatic, bird, fly, or name one of the animals."
    assert replies(env, "Is it a mammal?", "CAN IT FLY", "owl", "is it green?", "Is it a swan? Is it a bird?") == [
        ("no", 0.0, False),
        ("yes", 0.0, False),
        ("Ask one question, such as 'is it a mammal?' or 'is it an owl?'.", 0.0, False),
        (unclear, 0.0, False),
        ("yes", 0.0, False),
    ]
    assert replies(env, "is it a bird or a fish", "is it the owl?") == [
        ("yes", 0.0, False),  # a fish is not among the words it knows
        ("Yes, it is an owl.", 1 - 6 / 8, True),
    ]
    env = TwentyQuestions(max_questions=2)
    env.reset(options={"secret": "owl"})
    assert replies(env, "is it a wolf or a seal?", "is it a butterfly?") == [
        ("Ask about one thing at a time, and without 'not'.", 0.0, False),
        ("no\nThat was your last question; it is an owl.", 0.0, True),
    ]
    env.reset(options={"secret": "owl"})
    assert replies(env, "is it not a bird?") == [("Ask about one thing at a time, and without 'not'.", 0.0, False)]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1-5", 5), ("-5", -5), ("x=-5", -5), ("1.5", None), ("50.", 50), ("7, or 8!", 8), ("0012", 12), ("٣", None),
     ("a7b", 7), ("3 to 4.5", 3), ("9" * 5000, 10**18), ("-" + "9" * 5000, -(10**18)), ("", None)],
)  # fmt: skip
def test_the_last_whole_number_is_the_guess(text, number):
    assert last_whole_number(text) == number


@pytest.mark.parametrize(
    ("expression", "value"),
    [("17*23+5", 396), ("2*(3-10)", -14), ("--3", 3), ("2-3-4", -5), ("-2*-3", 6), ("((7))", 7), ("0*9+1", 1),
     ("9*" * 99 + "9", 9**100)],
)  # fmt: skip
def test_values_by_hand(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["", "2**3", "4/2", "abs(1)", "1,2", "(1", "1 2", "()", "a", "2(3)", "1" * 201])
def test_what_is_no_sum_is_refused(expression):
    with pytest.raises(ValueError, match=r"^(it has|use|that is not)"):
        evaluate(expression)


# --- whatever a policy may write -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text)[:30])
@pytest.mark.parametrize("game", GAMES)
def test_any_text_gets_a_reply(game, text):
    env = game()
    env.reset(seed=0)
    reply, reward, *_ = env.step(text)
    assert reply and env.observation_space.contains(reply) and reward == 0


@pytest.mark.parametrize("game", GAMES)
def test_random_texts_get_replies_to_the_end(game):
    env = game()
    env.action_space.seed(0)
    for seed in range(30):
        env.reset(seed=seed)
        ended = [env.step(env.action_space.sample())[2] for _ in range(3)]
        while not ended[-1]:
            ended.append(env.step("calc: 1")[2])
        assert len(ended) <= 20


def test_a_text_is_read_up_to_a_length_and_no_further():
    env = GuessNumber(1, 10)
    env.reset(options={"secret": 7})
    assert env.step(" " * MAX_ACTION + "7")[:2] == ("I read at most 4000 characters; write less.", 0.0)
    assert env.step(" " * (MAX_ACTION - 1) + "7")[1] == 1


# --- Gymnasium -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", GAMES)
def test_gymnasiums_checker_passes_without_a_warning(game):
    """Rendering is left out: the games have none, and without a registered id the checker only warns of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(game(), skip_render_check=True)


@pytest.mark.parametrize("game", GAMES)
def test_same_seed_same_game(game):
    def secrets(seed):
        env = game()
        env.reset(seed=seed)
        first = env._secret
        env.reset()
        return first, env._secret

    assert secrets(3) == secrets(3)
    assert len({secrets(seed) for seed in range(20)}) > 10


def test_secrets_are_uniform():
    env = GuessNumber(1, 4)
    env.reset(seed=0)
    counts = np.zeros(4)
    for _ in range(4000):
        env.reset()
        counts[next((i for i in range(3) if env.step(str(i + 1))[1] == 1), 3)] += 1  # three guesses of four
    assert (abs(counts - 1000) < 150).all()  # 5 standard deviations of 27


@pytest.mark.parametrize("game", GAMES)
def test_a_step_out_of_order_is_an_error_that_teaches(game):
    env = game()
    with pytest.raises(RuntimeError, match=r"was called before reset: call reset\(\) first"):
        env.step("1")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="action 5 of type int, expected a str"):
        env.step(5)
    while not env.step("hello")[2]:
        pass
    with pytest.raises(RuntimeError, match=r"has ended: call reset\(\)"):
        env.step("1")
    with pytest.raises(ValueError, match=r"options \['level'\], expected none or"):
        env.reset(options={"level": 3})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GuessNumber(5, 4), "low is 5 and high is 4"),
        (lambda: GuessNumber(max_guesses=0), "max_guesses is 0, expected at least 1"),
        (lambda: GuessNumber(1, 5).reset(options={"secret": 6}), "secret is 6, expected a whole number from 1 to 5"),
        (lambda: Calculator(terms=1), "terms is 1, expected 2 to 8"),
        (lambda: Calculator(max_turns=1), "max_turns is 1, expected 2"),
        (lambda: Calculator().reset(options={"expression": "2/3"}), "use whole numbers"),
        (lambda: TwentyQuestions(max_questions=0), "max_questions is 0, expected at least 1"),
        (lambda: TwentyQuestions().reset(options={"secret": "cat"}), "secret is 'cat', expected one of seal, wolf"),
    ],
)
def test_wrong_arguments_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()
