"""Games of several agents with one policy: each has its own episode, with its own text, rewards and group."""

import pytest
import torch

from algos import GRPO, PPO, RLOO, GRPOConfig, PPOConfig, RLOOConfig, collect
from tests.helpers.conversations import CHAT_WORDS, chat_tokenizer
from tests.helpers.models import WORDS
from tests.helpers.programs import played, program_env, reader_policy, turns_of, word_policy
from textenv.rollout import episode_of_row, num_episodes_of

UNREADABLE = [CHAT_WORDS.index(word) for word in ("<pad>", "<|im_start|>")]


def talk(first, second, task):
    """Three answers of each; the first one is paid for the words of the second, and the second nothing."""
    one, other = f"{task} a", f"{task} b"
    words = 0
    for _ in range(3):
        answer = first(one)
        one += answer
        other += answer + " d"
        answer = second(other)
        words += len(answer.split())
        other += answer
        one += answer + " c"
    return words, 0.0


def test_each_agent_reads_its_own_text():
    tokenizer = chat_tokenizer()
    policy = reader_policy(tokenizer)

    def play(first, second, task):
        one, other = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
        for _ in range(3):
            for ask, chat, listener in ((first, one, other), (second, other, one)):
                answer = ask(chat)
                chat.append({"role": "assistant", "content": answer})
                listener.append({"role": "user", "content": answer or "-"})
        chats.append((one, other))
        return 1.0, -1.0

    chats = []
    rollout, env = played(
        play,
        1,
        policy=policy,
        episodes=8,
        agents=2,
        tasks=["c"],
        tokenizer=tokenizer,
        max_length=256,
        forbidden=UNREADABLE,
    )
    assert len(rollout) == num_episodes_of(rollout) == 8 and "episode" not in rollout.keys()
    assert rollout["agent"][:, 0].tolist() == [0, 1] * 4 and env.metrics["programs/rows"] == 2
    rows = iter(turns_of(rollout))
    for game in chats:
        for chat in game:
            turns = next(rows)
            answered = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
            assert len(turns) == len(answered) == 3
            for i, (context, answer) in zip(answered, turns, strict=True):
                expected = tokenizer.apply_chat_template(chat[:i], add_generation_prompt=True, return_dict=False)
                assert context == expected
                assert tokenizer.decode(answer, skip_special_tokens=True) == chat[i]["content"].strip()


def test_each_agent_gets_its_own_reward():
    rollout, env = played(talk, agents=2, tasks=["a", "b"], max_length=128, episodes=8)
    agent = rollout["agent"][:, 0]
    turns = turns_of(rollout)
    for row in range(0, 8, 2):
        written = [WORDS[token] for _, answer in turns[row + 1] for token in answer]
        words = sum(word not in ("<eos>", "<pad>") for word in written)
        assert rollout["reward"][row].sum() == words and rollout["reward"][row + 1].sum() == 0
    assert rollout["terminated"].sum(1).tolist() == [1] * 8 and agent.tolist() == [0, 1] * 4
    last = [int(row.nonzero().max()) for row in rollout["mask"]]
    assert all(rollout["terminated"][row, column] for row, column in enumerate(last))


def test_groups_are_those_of_one_task_and_one_agent():
    env = program_env(talk, 3, agents=2, tasks=["a", "b"], max_length=128)
    rollout = collect(env, word_policy(), num_episodes=16, group_size=4, seed=1)
    group = rollout["group"][:, 0]
    agent = rollout["agent"][:, 0]
    first_token = rollout["observation"][:, 0]
    assert len(group.unique()) == 4 and group.bincount().tolist() == [4] * 4
    for number in group.unique():
        assert len(agent[group == number].unique()) == len(first_token[group == number].unique()) == 1


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_games_are_the_same_in_any_number_of_slots(num_envs):
    options = dict(agents=2, tasks=["a", "b"], max_length=128, episodes=12)
    expected, _ = played(talk, 5, **options)
    rollout, _ = played(talk, num_envs, **options)
    for column in expected.keys():
        assert torch.equal(rollout[column], expected[column]), column


def test_an_agent_may_begin_anew_and_another_may_never_be_asked():
    def play(first, second, third):
        second("a")
        text = "b"
        text += first(text) + " c"
        second("d")
        first(text)
        return 1.0, 2.0, 3.0

    rollout, env = played(play, agents=3, episodes=6)
    assert episode_of_row(rollout).tolist() == [0, 1, 1, 2, 3, 4, 4, 5]
    assert rollout["agent"][:, 0].tolist() == [0, 1, 1, 2] * 2
    assert rollout["reward"].sum(1).tolist() == [1, 0, 2, 0] * 2
    assert rollout["mask"].any(1).tolist() == [True, True, True, False] * 2
    assert [len(turns) for turns in turns_of(rollout)] == [2, 1, 1, 0] * 2
    assert rollout["is_init"].sum(1).tolist() == [1, 1, 0, 1] * 2
    assert not env.metrics["programs/failed"]


def test_recorded_log_probs_are_those_of_scoring():
    tokenizer = chat_tokenizer()
    policy = reader_policy(tokenizer)
    rollout, _ = played(talk, policy=policy, agents=2, tasks=["a", "b"], tokenizer=tokenizer, max_length=128)
    scored = policy.evaluate(rollout).log_prob
    assert torch.allclose(rollout["log_prob"][rollout["mask"]], scored[rollout["mask"]], atol=1e-5)


@pytest.mark.parametrize("result", [1.0, (1.0,), (1.0, 2.0, 3.0), "ab", {"a": 1.0, "b": 2.0}])
def test_one_reward_for_each_agent_is_expected(result):
    def play(first, second):
        first("a")
        return result

    with pytest.raises(ValueError, match="expected a list of 2 rewards, one for each agent"):
        played(play, agents=2)


def test_named_rewards_and_none_are_of_each_agent():
    def play(first, second):
        first("a")
        second("b")
        return {"won": 1.0, "style": 0.5}, None

    rollout, env = played(play, agents=2, episodes=4)
    assert rollout["reward"].sum(1).tolist() == [1.5, 0] * 2
    assert rollout["mask"].any(1).tolist() == [True, False] * 2
    assert env.metrics["reward/won"] == 1.0 and env.metrics["reward/style"] == 0.5


def test_games_need_a_multiple_of_their_agents():
    env = program_env(talk, agents=2, tasks=["a"], max_length=128)
    with pytest.raises(ValueError, match="episodes is 7, expected a multiple of 2: each game is an episode"):
        collect(env, word_policy(), num_episodes=7)
    with pytest.raises(ValueError, match="step and reset are for one agent"):
        env.reset()
    with pytest.raises(TypeError, match=r"expected talk\(ask_0, ask_1, ask_2, task\)"):
        program_env(talk, agents=3, tasks=["a"])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        (PPO, PPOConfig(num_episodes=32, num_steps=None)),
        (GRPO, GRPOConfig(num_episodes=32, group_size=8)),
        (RLOO, RLOOConfig(num_episodes=32, group_size=8)),
    ],
)
def test_self_play_learns_a_game_in_which_both_are_paid_for_their_own_word(algorithm, config):
    """The first for 'good', the second for 'bad': by what they have read, one policy plays both."""

    def play(first, second):
        return first("a", max_tokens=1).strip() == "good", second("b", max_tokens=1).strip() == "bad"

    env = program_env(play, 16, agents=2)
    agent = algorithm(env, word_policy(head=True), config, learning_rate=1e-2, seed=1)
    agent.learn(4000)
    rollout = collect(env, agent.policy, num_episodes=64, seed=2)
    returns = rollout["reward"].sum(1)
    assert returns[0::2].mean() > 0.9 and returns[1::2].mean() > 0.9
