"""Conversations: a string environment stepped token by token, its words in the state but not in the mask."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from algos import PPO, LMPolicy, PPOConfig, collect
from algos.advantages import gae
from tests.helpers.conversations import CHAT_WORDS, Parrot, chat_tokenizer
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import TRUNCATED, Prompt, TextVectorEnv, TokenVectorEnv
from textenv.envs.string_env import TokenEnv

EOS, GOOD, BAD, DOT = (WORDS.index(word) for word in ("<eos>", "good", "bad", "."))
TEXT = spaces.Text(100, charset="".join(map(chr, range(32, 127))))


def make_env(num_envs=1, make=Parrot, **options):
    arguments = dict(
        tokenizer=make_tokenizer(WORDS), num_envs=num_envs, max_prompt_tokens=4, max_new_tokens=4, max_length=40
    )
    return TokenVectorEnv(make, **(arguments | options))


def play(env, tokens, seed=0):
    """Step through these tokens in slot 0; returns observation, rewards, terminated, truncated, info of the last."""
    observation, _ = env.reset(seed=seed)
    rewards, states = [], [ids(observation)]
    for token in tokens:
        observation, reward, terminated, truncated, info = env.step(np.array([token]))
        rewards.append(float(reward[0]))
        states.append(ids(observation))
    return states, rewards, bool(terminated[0]), bool(truncated[0]), info


def ids(observation, slot=0):
    return observation["tokens"][slot, : observation["length"][slot, 0]].tolist()


def test_answers_are_appended_and_turns_paid():
    states, rewards, terminated, truncated, info = play(make_env(), [GOOD, EOS, BAD, GOOD, GOOD, EOS, EOS])
    for before, after, token in zip(states[:-1], states[1:], [GOOD, EOS, BAD, GOOD, GOOD, EOS, EOS], strict=True):
        assert after[: len(before) + 1] == [*before, token]
    assert states[2][-3:] == [EOS, 0, 0] and states[6][-2:] == [EOS, 1]
    assert rewards == [0, 1, 0, 0, 0, 2, 0]
    assert (terminated, truncated, info["end_reason"][0]) == (True, False, "task")
    assert states[-1][-1] == EOS  # the last words of the game are not read by anyone


def test_paid_at_the_end_the_last_turn_gets_everything():
    _, rewards, *_ = play(make_env(pay_at="end"), [GOOD, EOS, GOOD, GOOD, EOS, EOS])
    assert rewards == [0, 0, 0, 0, 0, 3]


def test_the_game_hears_the_answer_without_its_end():
    game = Parrot()
    env = TokenEnv(game, tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, max_new_tokens=4, stop=["."])
    env.reset(seed=0)
    for token in (GOOD, BAD, EOS, GOOD, DOT):
        env.step(token)
    assert [text.split() for text in game.heard] == [["good", "bad"], ["good"]]


def test_a_cut_turn_goes_on_up_to_the_limits():
    """`max_turns` and `max_length` truncate the episode."""
    states, rewards, terminated, truncated, info = play(make_env(max_turns=2), [GOOD] * 4 + [EOS])
    assert rewards == [0, 0, 0, 4, 0] and states[4][-2:] == [0, 0]
    assert (terminated, truncated, info["end_reason"][0]) == (False, True, "turns")
    env = make_env(max_length=7)
    states, _, terminated, truncated, info = play(env, [GOOD, EOS], seed=first_seed_with(2))
    assert not truncated and len(states[-1]) == 6  # two tokens of prompt, two of the turn, two of the answer
    _, _, terminated, truncated, info = play(env, [GOOD, EOS, EOS], seed=first_seed_with(2))
    assert (terminated, truncated, info["end_reason"][0]) == (False, True, "length")
    _, rewards, terminated, truncated, info = play(make_env(max_length=6), [GOOD, EOS], seed=first_seed_with(2))
    assert (rewards, truncated, info["end_reason"][0]) == ([0, 1], True, "length")  # no room for the answer


def first_seed_with(prompt_length):
    return next(seed for seed in range(20) if make_env().reset(seed=seed)[0]["length"][0, 0] == prompt_length)


def test_what_the_game_calls_a_truncation_is_one():
    def make():
        return Parrot(end="truncated")

    *_, terminated, truncated, info = play(make_env(make=make), [EOS, EOS, EOS])
    assert (terminated, truncated, info["end_reason"][0]) == (False, True, "task")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_batched_path_equals_the_step_path(mode):
    """Same prompts, same actions: tokens, masks, rewards and flags."""
    policy = LMPolicy(make_gpt2(n_positions=64), make_tokenizer(WORDS), seed=3)
    rollout = collect(make_env(3, max_turns=4), policy, num_episodes=9, seed=5)
    assert (rollout["mask"].sum(1) < rollout["is_init"].shape[1]).all()
    env = make_env(1, max_turns=4, autoreset_mode=mode)
    observation, _ = env.reset(seed=5)
    for row in range(9):
        for t in torch.nonzero(rollout["mask"][row])[:, 0].tolist():
            assert ids(observation) == rollout["observation"][row, : t + 1].tolist()
            action = rollout["action"][row, t].numpy()[None]
            observation, reward, terminated, truncated, info = env.step(action)
            assert reward[0] == rollout["reward"][row, t]
            assert (terminated[0], truncated[0]) == (rollout["terminated"][row, t], rollout["truncated"][row, t])
        if mode is AutoresetMode.NEXT_STEP:
            observation, *_ = env.step(np.array([0]))
        elif mode is AutoresetMode.DISABLED:
            observation, _ = env.reset(options={"reset_mask": np.array([True])})


def test_the_policy_scores_what_it_sampled():
    policy = LMPolicy(make_gpt2(n_positions=64), make_tokenizer(WORDS), seed=1)
    rollout = collect(make_env(3), policy, num_episodes=8)
    evaluation = policy.evaluate(rollout)
    mask = rollout["mask"]
    torch.testing.assert_close(evaluation.log_prob[mask], rollout["log_prob"][mask], atol=1e-5, rtol=0)
    for row in range(8):
        said = rollout["action"][row][mask[row]].tolist()
        ends = [t for t, token in enumerate(said) if token == EOS]
        assert rollout["reward"][row].sum() == said.count(GOOD)
        assert len(ends) <= 3
    assert (rollout["reward"] * ~mask).sum() == 0


def test_advantages_see_the_policys_own_tokens_only():
    """GAE with gaps on a real conversation: the same as with the game's words cut out."""
    policy = LMPolicy(make_gpt2(n_positions=64), make_tokenizer(WORDS), seed=1)
    torch.nn.init.normal_(policy.value_head.weight)
    rollout = collect(make_env(3), policy, num_episodes=8)
    value, next_value = policy.values(rollout)
    columns = {key: rollout[key] for key in ("reward", "terminated", "truncated", "mask")}
    whole, _ = gae(value=value, next_value=next_value, gamma=0.9, gae_lambda=0.8, **columns)
    for row in range(8):
        own = rollout["mask"][row]
        cut = {key: x[row][own][None] for key, x in columns.items()}
        values = value[row][own]
        following = torch.cat([values[1:], next_value[row][own][-1:]])[None]
        alone, _ = gae(value=values[None], next_value=following, gamma=0.9, gae_lambda=0.8, **cut)
        torch.testing.assert_close(whole[row][own], alone[0])


@pytest.mark.parametrize("cut", [False, True])
def test_ids_of_a_chat_are_those_of_its_template(cut):
    """Against transformers' own rendering of all messages; a turn that was cut gets its end mark from the template."""
    tokenizer, end = chat_tokenizer(), CHAT_WORDS.index("<|im_end|>")
    env = make_env(tokenizer=tokenizer, max_prompt_tokens=8, max_new_tokens=2)
    first = [GOOD, BAD] if cut else [GOOD, end]
    states, *_ = play(env, [*first, BAD, end], seed=first_chat_seed())
    messages = [
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "good bad" if cut else "good"},
        {"role": "user", "content": "a a"},
        {"role": "assistant", "content": "bad"},
        {"role": "user", "content": "b"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert states[-1] == expected


def first_chat_seed():
    for seed in range(20):
        env = make_env(tokenizer=chat_tokenizer(), max_prompt_tokens=8)
        if CHAT_WORDS.index("c") not in ids(env.reset(seed=seed)[0]):
            return seed
    raise AssertionError


@pytest.mark.heavy
def test_ppo_learns_in_a_conversation():
    """'good' is worth 1 a word: the return of three turns of up to four words rises."""
    policy = LMPolicy(make_gpt2(n_positions=64), make_tokenizer(WORDS), seed=0)
    env = make_env(32)
    config = PPOConfig(
        num_steps=None, num_episodes=32, minibatch_size=16, learning_rate=3e-3, gamma=1.0, bootstrap_truncated=False
    )
    history = PPO(env, policy, config).learn(6000)
    assert history[0]["episode/return"] < 4
    assert history[-1]["episode/return"] > 8


def test_a_token_env_passes_gymnasiums_checker():
    env = TokenEnv(Parrot, tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, render_mode="ansi")
    env.spec = None
    check_env(env, skip_render_check=True)


def test_equal_numbers_are_equal_games_in_a_group():
    env = make_env(4)
    observation = env.start_episodes(8, seed=0, group_size=4)
    assert len({tuple(ids(observation, slot)) for slot in range(4)}) == 1
    while env.running.any():
        env.advance(np.full(4, EOS))
    rollout = env.take_episodes()
    assert rollout["group"][:, 0].tolist() == [0] * 4 + [1] * 4


class Yes:
    """A conversation by the task protocol itself."""

    def __init__(self, reply):
        self.say = reply

    def sample_prompts(self, numbers, *, seed):
        return [Prompt("a") for _ in numbers]

    def reply(self, turns):
        return [self.say] * len(turns)

    def score(self, turns):
        return [0.0 for _ in turns]


@pytest.mark.parametrize(("reply", "ends"), [(None, (True, False)), (TRUNCATED, (False, True)), ("b", (False, False))])
def test_a_task_may_answer_end_or_truncate(reply, ends):
    env = TextVectorEnv(Yes(reply), tokenizer=make_tokenizer(WORDS), max_turns=2)
    env.reset(seed=0)
    _, _, terminated, truncated, _ = env.step(np.array([EOS]))
    assert (terminated[0], truncated[0]) == ends


def test_wrong_games_are_refused_with_a_reason():
    tokenizer = make_tokenizer(WORDS)
    with pytest.raises(TypeError, match="reply returned 3"):
        env = TextVectorEnv(Yes(3), tokenizer=tokenizer)
        env.reset(seed=0)
        env.step(np.array([EOS]))
    with pytest.raises(TypeError, match="give a function that makes one"):
        TokenVectorEnv(Parrot(), tokenizer=tokenizer, num_envs=2)
    with pytest.raises(TypeError, match="expected a Gymnasium environment or a function"):
        TokenEnv(3, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="expected a string"):
        TokenVectorEnv(lambda: gymnasium.make("CartPole-v1"), tokenizer=tokenizer).reset(seed=0)
    shared = Parrot()
    with pytest.raises(ValueError, match="a second time"):
        TokenVectorEnv(lambda: shared, tokenizer=tokenizer, num_envs=2, max_prompt_tokens=4).reset(seed=0)
    with pytest.raises(ValueError, match="pay_at is 'never'"):
        TokenEnv(Parrot, tokenizer=tokenizer, pay_at="never")
