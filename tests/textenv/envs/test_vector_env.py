"""The vector environment: what it refuses, and a reward that failed."""

import numpy as np
import pytest

from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.text_envs import EOS, prompt_env
from textenv import TextVectorEnv
from textenv.prompts.prompts import PromptList
from textenv.rewards.scores import RewardError


def test_a_failed_reward_is_not_paid_later():
    def fails(prompts, completions, **_):
        if "bad" in completions[0]:
            raise RuntimeError("no")
        return [1.0]

    env = prompt_env(num_envs=1, reward=fails)
    env.reset(seed=0)
    env.step(np.array([WORDS.index("bad")]))
    with pytest.raises(RewardError, match="raised RuntimeError: no"):
        env.step(np.array([EOS]))
    env.reset()
    assert env.step(np.array([0]))[1][0] == 0
    assert env.step(np.array([EOS]))[1][0] == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"prompts": [{"prompt": "a", "completions": 1}]}, ValueError, r"named \['completions'\]"),
        ({"tokenizer": "gpt2"}, TypeError, "expected that of AutoTokenizer"),
        ({"stop": np.int64(99)}, ValueError, "ids from 0 to 8"),
        ({"forbidden": 99}, ValueError, "ids from 0 to 8"),
        ({"reward": lambda completions, answer: [0.0]}, ValueError, "needs the column 'answer', but got"),
    ],
)
def test_more_wrong_input(arguments, kind, message):
    with pytest.raises(kind, match=message):
        prompt_env(**arguments)


def test_wrong_tasks_and_actions_are_refused():
    class Short(PromptList):
        def sample_prompts(self, numbers, *, seed):
            return super().sample_prompts(numbers[:1], seed=seed)

        def score(self, turns):
            return [0.0] * len(turns)

    tokenizer = make_tokenizer(WORDS)
    for task in (["a"], Short, PromptList(["a"])):
        with pytest.raises(TypeError, match="expected an object with sample_prompts and score"):
            TextVectorEnv(task, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="sample_prompts of Short returned 1 values for 2"):
        TextVectorEnv(Short(["a"]), tokenizer=tokenizer, num_envs=2).reset(seed=0)
    env = prompt_env(num_envs=2)
    env.start_episodes(2)
    with pytest.raises(ValueError, match=r"of shape \(3,\), expected integers of shape \(2,\)"):
        env.advance(np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="group_size is 0"):
        env.start_episodes(2, group_size=0)
