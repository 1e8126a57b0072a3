"""Programs that ask the nine-word model, and rollouts of them."""

import numpy as np

from algos import collect
from tests.helpers.conversations import LETTERS
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import lm_policy, random_table, table_model
from textenv import ProgramVectorEnv


def walk(ask, rng):
    """The walk `tests.helpers.conversations.Walk`, with the same random numbers, as texts."""
    last = int(np_random_of(rng).integers(4))
    text, total = "", 0.0
    for turn in range(6):
        text += " ".join([LETTERS[last], *"." * (turn % 3)]) + "\n"
        answer = ask(text)
        total += (last + 1.0) * answer.split().count("good")
        last = (last + len(answer.split())) % 4
        text += answer + "\n"
    return total


def np_random_of(rng):
    """The random numbers of a Gymnasium environment that a `TokenVectorEnv` has reset for the same episode."""
    from gymnasium.utils.seeding import np_random

    return np_random(int(rng.integers(2**31)))[0]


def program_env(play, num_envs=3, **options):
    arguments = dict(tokenizer=make_tokenizer(WORDS), num_envs=num_envs, max_new_tokens=4, max_length=64)
    return ProgramVectorEnv(play, **(arguments | options))


def word_policy(seed=3, **options):
    """Its next word depends on the last one only."""
    return lm_policy(lambda: table_model(random_table()), seed=seed, **options)


def reader_policy(tokenizer, seed=3):
    """Its next word depends on all that it has read."""
    return lm_policy(lambda: make_gpt2(len(tokenizer), n_positions=256), tokenizer=tokenizer, seed=seed)


def played(play, num_envs=3, *, policy=None, episodes=8, **options):
    """Rollout of a program, and its environment."""
    env = program_env(play, num_envs, **options)
    rollout = collect(env, word_policy() if policy is None else policy, num_episodes=episodes, seed=1)
    return rollout, env


def turns_of(rollout):
    """For each row its turns: the ids that the model saw, and those that it wrote."""
    rows = []
    for row in range(len(rollout)):
        tokens = [rollout["observation"][row, 0].item(), *rollout["action"][row].tolist()]
        chosen = [False, *rollout["mask"][row].tolist()]
        turns = []
        for start in range(1, len(chosen)):
            if chosen[start] and not chosen[start - 1]:
                stop = next((i for i in range(start, len(chosen)) if not chosen[i]), len(chosen))
                turns.append((tokens[:start], tokens[start:stop]))
        rows.append(turns)
    return rows


def write(env, *texts):
    """Play the next episode with these turns."""
    for text in texts:
        ids = env.tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in [*ids, env.tokenizer.eos_token_id]:
            if env.running.any():
                env.advance(np.array([token]))
