"""Games of textarena for several players as programs, against the package's own loop."""

import random

import numpy as np
import pytest
import torch

from algos import PPO, PPOConfig, collect
from tests.helpers.conversations import chat_tokenizer
from tests.helpers.models import make_tokenizer
from tests.helpers.packages import lazy_import
from tests.helpers.programs import reader_policy
from textenv import ProgramVectorEnv, TextArena

textarena = lazy_import("textarena", reason="needs the extra textarena")

SQUARES = [str(square) for square in range(9)]


def bracketed(answer):
    return f"[{answer.strip()}]"


def asking(moves, read=None):
    """Function to ask that answers with these moves, and notes what it reads."""
    moves = iter(moves)

    def ask(content):
        if read is not None:
            read.append(content)
        return next(moves)

    return ask


def played_by_hand(name, seed, moves):
    """Rewards of the package's own loop; its random numbers are Python's."""
    game = textarena.make(f"{name}-raw")
    random.setstate(random.Random(seed).getstate())
    game.reset(num_players=len(moves), seed=seed)
    moves = [iter(agent_moves) for agent_moves in moves]
    done = False
    while not done:
        player, _ = game.get_observation()
        done, _ = game.step(action=f"[{next(moves[player])}]")
    rewards, _ = game.close()
    return [float((rewards or {}).get(player, 0)) for player in range(len(moves))]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([["0", "1", "2"], ["3", "4"]], [1, -1]),
        ([["0", "1", "8"], ["3", "4", "5"]], [-1, 1]),
        ([["4", "0", "2", "7", "5"], ["8", "1", "6", "3"]], [0, 0]),
    ],
)
def test_rewards_are_those_of_the_game(moves, expected):
    game = TextArena("TicTacToe-v0", action=bracketed)
    seeds = np.random.default_rng(5)
    rewards = game(*map(asking, moves), rng=np.random.default_rng(5))
    assert rewards == played_by_hand("TicTacToe-v0", int(seeds.integers(2**31)), moves) == expected


def test_each_agent_reads_its_own_side_and_nothing_twice():
    read = [[], []]
    game = TextArena("KuhnPoker-v0", action=bracketed, max_rounds=1)
    cards = []
    for seed in range(8):
        asks = [asking(["check", "fold", "fold"], texts) for texts in read]
        game(*asks, rng=np.random.default_rng(seed))
        firsts = [texts[0][0]["content"] for texts in read]
        cards.append([text.partition("card is: '")[2][0] for text in firsts])
        assert all(text.count("Starting round 1") == 1 for text in firsts)
        assert "You are Player 0" in firsts[0] and "You are Player 1" in firsts[1]
        for texts in read:
            texts.clear()
    assert len(set(map(tuple, cards))) > 3 and all(first != second for first, second in cards)


@pytest.mark.parametrize("name, said", [
    ("TruthAndDeception-v0", [["It is Fact 2, believe me", "Truly."], ["Is it?", "[Fact 1]"]]),
    ("SimpleNegotiation-v0", [[f"I have wood {i}" for i in range(9)], [f"I want wheat {i}" for i in range(9)]]),
])  # fmt: skip
def test_players_read_what_the_others_say(name, said):
    """And the names of those who said it, as the package's own wrapper for language models writes them."""
    read = [[], []]
    options = {"max_turns": 4}
    TextArena(name, chat=False, **options)(*map(asking, said, read), rng=np.random.default_rng(3))

    seed = int(np.random.default_rng(3).integers(2**31))
    raw = textarena.make(f"{name}-raw", **options)
    game = textarena.wrappers.LLMObservationWrapper(raw)
    random.setstate(random.Random(seed).getstate())
    game.reset(num_players=2, seed=seed)
    answers = [iter(of_player) for of_player in said]
    done = False
    shown = [[], []]
    while not done:
        player, text = game.get_observation()
        shown[player].append(text)
        done, _ = game.step(action=next(answers[player]))
    for player, other in ((0, 1), (1, 0)):
        assert len(read[player]) == len(shown[player]) >= 2
        assert said[other][0] in read[player][1]
        for mine, theirs in zip(read[player], shown[player], strict=True):
            names = raw.state.role_mapping
            spoken = [f"[{names.get(other, f'Player {other}')}] {text}" for text in said[other]]
            assert [text in mine for text in spoken] == [text in theirs for text in spoken]
            assert all(mine.count(text) <= 1 for text in (*spoken, *said[player]))


def test_a_wrong_move_is_told_to_the_one_who_made_it():
    read = [[], []]
    game = TextArena("TicTacToe-v0", action=bracketed, chat=False, rules="Play.")
    asks = [asking(["0", "1", "2"], read[0]), asking(["0", "3", "4"], read[1])]
    assert game(*asks, rng=np.random.default_rng(0)) == [1, -1]
    assert read[1][1].startswith(read[1][0] + "0\n") and "already occupied" in read[1][1]
    assert read[0][0].startswith("Play.\nCurrent Board")


def test_games_in_threads_do_not_disturb_each_other():
    """Their cards depend on number and seed only, whatever the number of slots."""

    def cards_with(num_envs):
        env = kuhn_env(num_envs)
        collect(env, reader_policy(env.tokenizer), num_episodes=24, seed=1)
        return [sample["prompt"].partition("card is: '")[2][0] for sample in env.samples(range(24))]

    random.seed(1)
    expected = random.random()
    random.seed(1)
    cards = cards_with(1)
    assert random.random() == expected
    assert cards_with(8) == cards and len(set(cards)) == 3


def kuhn_env(num_envs=8):
    words = ["check", "bet", "call", "fold", "a", "b", "<unk>", "<eos>", "<pad>"]
    game = TextArena("KuhnPoker-v0", action=bracketed, chat=False, rules="a", max_rounds=1)
    return ProgramVectorEnv(
        game, agents=2, tokenizer=make_tokenizer(words), num_envs=num_envs, max_length=256, allowed=words[:4]
    )


@pytest.mark.heavy
def test_a_policy_plays_both_sides_and_learns_from_the_zero_sum():
    env = kuhn_env()
    policy = reader_policy(env.tokenizer)
    before = [weight.clone() for weight in policy.parameters()]
    config = PPOConfig(num_steps=None, num_episodes=16, minibatch_size=16)
    rollout = collect(env, policy, num_episodes=32, seed=2)
    assert (
        rollout["reward"].sum() == 0 and rollout["reward"].any() and set(rollout["agent"].flatten().tolist()) == {0, 1}
    )
    PPO(env, policy, config).learn(100)
    assert any(not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def test_wrong_games_and_players_are_told():
    with pytest.raises(ValueError, match="NoSuchGame"):
        TextArena("NoSuchGame-v0")
    env = ProgramVectorEnv(TextArena("TicTacToe-v0"), agents=3, tokenizer=chat_tokenizer(), num_envs=1, max_length=256)
    with pytest.raises(RuntimeError, match=r"cannot be played by agents=3"):
        collect(env, reader_policy(env.tokenizer), num_episodes=3, seed=1)
