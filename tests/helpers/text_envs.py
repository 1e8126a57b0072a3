"""Text environments over the nine words, scripted or with a reward, and rollouts of given answers."""

import numpy as np
from gymnasium.vector import AutoresetMode

from tests.helpers.models import WORDS, make_tokenizer
from textenv import Prompt, TextVectorEnv

EOS, PAD, GOOD, BAD = (WORDS.index(word) for word in ("<eos>", "<pad>", "good", "bad"))
PROMPTS = [(0, 1), (2,), (3, 0, 1)]


class Script:
    """A task that deals these prompts in turn and scores by a list (one number an episode) or a function."""

    def __init__(self, prompts=PROMPTS, scores=None):
        self.dealt, self.scores = list(prompts), scores

    def sample_prompts(self, numbers, *, seed):
        return [Prompt(self.dealt[number % len(self.dealt)]) for number in numbers]

    def score(self, turns):
        if self.scores is None:
            return [float(turn.completion_ids.count(GOOD)) for turn in turns]
        return self.scores[: len(turns)] if isinstance(self.scores, list) else self.scores(turns)


def text_env(task=None, *, tokenizer=None, **options):
    """Slots fewer than episodes, so that they are refilled."""
    tokenizer = make_tokenizer(WORDS) if tokenizer is None else tokenizer
    defaults = dict(num_envs=3, max_prompt_tokens=4, max_new_tokens=5)
    return TextVectorEnv(Script() if task is None else task, tokenizer=tokenizer, **(defaults | options))


def play(env, answers, *, seed=None):
    """The rollout of exactly these answers, one an episode, by the batched path."""
    env.start_episodes(len(answers), seed=seed)
    left = [list(answer) for answer in answers]
    while env.running.any():
        actions = np.zeros(env.num_envs, dtype=np.int64)
        actions[env.running] = [left[row].pop(0) for row in env.cursor[0]]
        env.advance(actions)
    return env.take_episodes()


def good(prompts, completions, **columns):
    return [float(text.split().count("good")) for text in completions]


def text_arguments(**options):
    arguments = dict(prompts=["a b", "c", "d a b"], reward=good, tokenizer=make_tokenizer(WORDS),
                     max_prompt_tokens=4, max_new_tokens=5)  # fmt: skip
    return arguments | options


def make_env(reward=good, num_envs=3, **options):
    return TextVectorEnv(**text_arguments(reward=reward, num_envs=num_envs, **options))


DISABLED = AutoresetMode.DISABLED


def text_vector_env(num_envs=3, **options):
    """Its episodes begin when `reset` asks for them."""
    return make_env(num_envs=num_envs, autoreset_mode=DISABLED, **options)


def rewarded(reward, answers, **options):
    """The rollout of these answers with this reward."""
    return play(make_env(reward, **options), answers, seed=0)


REWARDED = [(GOOD, EOS), (BAD, GOOD, EOS), (BAD, BAD, BAD, BAD, BAD), (EOS,)]


def figures_of(reward, answers):
    """What the log says of them."""
    env = make_env(reward)
    play(env, answers)
    return env.metrics


def prompt_env(prompts=("a b", "c", "d a b"), num_envs=2, reward=good, **options):
    return make_env(reward, num_envs, prompts=prompts, **options)


def paid(rollout):
    return [row[mask].tolist() for row, mask in zip(rollout["reward"], rollout["mask"], strict=True)]


def zero(prompts, completions, **columns):
    return [0.0] * len(completions)
