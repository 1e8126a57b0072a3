"""Programs that ask the model: what it reads, what becomes of their rewards, and of those that fail."""

import asyncio
import contextlib
import logging
import threading
import time

import numpy as np
import pytest
import torch

from algos import PPO, PPOConfig, collect, evaluate
from algos.advantages import discounted_returns
from tests.helpers.conversations import CHAT_WORDS, Walk, chat_tokenizer
from tests.helpers.engines import FakeEngine
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.programs import played, program_env, reader_policy, turns_of, walk, word_policy
from textenv import LimitReached, ProgramVectorEnv, TokenVectorEnv
from textenv.rewards.training import NOW
from textenv.rollout import episode_of_row, join_episodes, number_in_episode

EOS = WORDS.index("<eos>")
UNREADABLE = [CHAT_WORDS.index(word) for word in ("<pad>", "<|im_start|>")]
"""Tokens that the text of an answer hides."""


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# --- what the model reads ---------------------------------------------------------------------------------------------


def test_a_dialogue_is_the_rollout_of_the_same_string_environment():
    rollout, _ = played(walk, max_length=128)
    env = TokenVectorEnv(
        Walk, tokenizer=make_tokenizer(WORDS), num_envs=3, max_prompt_tokens=4, max_new_tokens=4, pay_at="end"
    )
    expected = collect(env, word_policy(), num_episodes=8, seed=1)
    assert set(rollout.keys()) == set(expected.keys()) and rollout["reward"].sum() > 0
    for column in expected.keys():
        assert torch.equal(rollout[column], expected[column]), column


def test_a_chat_is_read_as_the_template_writes_it():
    """Against transformers' rendering of the messages that the program sent."""
    tokenizer = chat_tokenizer()
    asked = []

    def play(ask, task):
        chat = [{"role": "system", "content": "d"}, user(task)]
        for reply in ("a a", "b", "c"):
            asked.append(list(chat))
            chat += [assistant(ask(chat)), user(reply)]
        return 1.0

    policy = reader_policy(tokenizer)
    rollout, env = played(
        play,
        1,
        policy=policy,
        episodes=4,
        tasks=["a", "b c"],
        tokenizer=tokenizer,
        max_length=200,
        forbidden=UNREADABLE,
    )
    contexts = [context for turns in turns_of(rollout) for context, _ in turns]
    assert len(rollout) == 4 and len(asked) == len(contexts) == 12 and env.metrics["programs/rows"] == 1
    for chat, context in zip(asked, contexts, strict=True):
        assert context == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def threads_of_thought(ask, task):
    """Two conversations at once, a summary, and a return to the first."""
    first = [user(task)]
    second = [user("c")]
    first += [assistant(ask(first)), user("a")]
    second += [assistant(ask(second)), user("b b")]
    first += [assistant(ask(first)), user("d")]
    second += [assistant(ask(second))]
    ask([user("good")])
    last = ask(first)
    return {"last": float(len(last)), "second": 1.0}


def test_interleaved_conversations_each_go_on_in_their_row():
    tokenizer = chat_tokenizer()
    policy = reader_policy(tokenizer)
    options = dict(policy=policy, tasks=["a", "b"], tokenizer=tokenizer, max_length=200, forbidden=UNREADABLE)
    rollout, env = played(threads_of_thought, episodes=4, **options)
    assert episode_of_row(rollout).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert env.metrics["programs/rows"] == 3 and env.metrics["programs/questions"] == 6
    rows = turns_of(rollout)
    assert [len(turns) for turns in rows] == [3, 2, 1] * 4
    for turns in rows:
        chat = []
        for context, answer in turns:
            if not chat:
                text = tokenizer.decode(context)
                chat = [user(text.split("user")[1].split("<|im_end|>")[0].strip())]
            else:
                chat.append(user({1: "a", 2: "d"}[len(chat) // 2] if rows.index(turns) % 3 == 0 else "b b"))
            assert context == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            chat.append(assistant(tokenizer.decode(answer, skip_special_tokens=True)))

    # The reward stands at the end of the row that was begun last, and all rows have it in their return
    ends = (rollout["terminated"] | rollout["truncated"]).any(1)
    assert ends.tolist() == [False, False, True] * 4 and (rollout["reward"] != 0).any(1).tolist() == ends.tolist()
    joined = join_episodes(rollout)
    columns = {name: joined[name] for name in ("reward", "terminated", "truncated", "mask")}
    returns = discounted_returns(**columns, gamma=1.0)
    assert torch.equal(
        returns[joined["mask"]], joined["reward"].sum(1, keepdim=True).expand_as(returns)[joined["mask"]]
    )


@pytest.mark.parametrize("play", [walk, lambda ask, rng: len(ask("a") + ask("b") + ask("a"))], ids=["walk", "anew"])
@pytest.mark.parametrize("num_envs", [1, 3, 8, 11], ids=lambda n: f"{n}_slots")
def test_programs_are_the_same_in_any_number_of_slots(play, num_envs):
    expected, _ = played(play, 5)
    rollout, _ = played(play, num_envs)
    for column in expected.keys():
        assert torch.equal(rollout[column], expected[column]), column


def test_a_question_that_is_asked_again_gets_another_sample():
    """Its row has random numbers of its own, and so has a row to which a program comes back."""
    answers = []

    def play(ask):
        answers.append([ask("a") for _ in range(20)])
        chat = "a"
        for _ in range(10):
            chat += ask(chat) + " a"
            ask("b")
        return 0.0

    played(play, episodes=1, max_turns=50, max_length=128)
    assert len(set(answers[0])) > 3


def test_recorded_log_probs_are_those_of_scoring():
    tokenizer = chat_tokenizer()
    policy = reader_policy(tokenizer)
    rollout, _ = played(threads_of_thought, policy=policy, tasks=["a", "b"], tokenizer=tokenizer, max_length=200)
    scored = policy.evaluate(rollout).log_prob
    mask = rollout["mask"]
    assert torch.allclose(rollout["log_prob"][mask], scored[mask], atol=1e-5)


def test_the_text_that_stopped_an_answer_is_not_written_twice():
    def play(ask):
        text = "a"
        text += ask(text, stop=["good", "b"]) + "good"
        ask(text + " c")
        return 1.0

    rollout, env = played(play, episodes=16, max_new_tokens=8)
    tokens = torch.cat([rollout["observation"][:, :1], rollout["action"]], 1)
    stopped = 0
    for number, turns, ids in zip(number_in_episode(rollout), turns_of(rollout), tokens.tolist(), strict=True):
        context, answer = turns[0]
        if number == 0 and answer[-1] == WORDS.index("good"):  # the text goes on in the row
            stopped += 1
            assert len(turns) == 2 and ids[len(context) + len(answer)] == WORDS.index("c")
    assert stopped > 3 and env.metrics["programs/rows"] <= 2 - stopped / 16


def test_max_tokens_and_allowed_hold_for_one_question():
    answers = []

    def play(ask):
        answers.append((ask("a", max_tokens=1), ask("b", allowed=["good"]), ask("c", allowed=["bad", "a"]), ask("d")))
        return 1.0

    rollout, env = played(play, episodes=20, allowed=["good", "bad", "a"])
    assert {b for _, b, _, _ in answers} == {"good"}
    assert {c for _, _, c, _ in answers} == {"bad", "a"}
    assert {d for *_, d in answers} == {a for a, *_ in answers} == {"good", "bad", "a"}
    assert rollout["mask"].sum(1).max() == 1

    def too_long(ask):
        ask("a", max_tokens=2)
        return 1.0

    rollout, _ = played(too_long, episodes=20, max_new_tokens=5)
    assert rollout["mask"].sum(1).max() == 2


# --- async, engines, training -----------------------------------------------------------------------------------------


async def asks_twice(ask, task):
    first, second = await asyncio.gather(ask(task), ask("b"))
    await asyncio.sleep(0.001)
    third = await ask(task + first + " c")
    return float(len(first + second + third))


def test_async_programs_may_ask_several_questions_at_once():
    rollout, env = played(asks_twice, tasks=["a", "d"], episodes=6)
    assert (
        env.metrics["programs/questions"] == 3
        and env.metrics["programs/rows"] == 2
        and env.metrics["programs/failed"] == 0
    )
    assert [len(turns) for turns in turns_of(rollout)] == [2, 1] * 6


def test_objects_with_an_async_call_are_programs():
    class Player:
        async def __call__(self, ask):
            return float(len(await ask("a")))

    rollout, env = played(Player(), episodes=4)
    assert len(rollout) == 4 and env.metrics["programs/failed"] == 0


def test_an_engine_plays_programs():
    env = program_env(walk, max_length=128)
    agent = PPO(env, word_policy(), PPOConfig(num_episodes=8, num_steps=None, num_epochs=1), generator=FakeEngine())
    history = agent.learn(200)
    assert history[-1]["programs/questions"] == 6 and history[-1]["programs/failed"] == 0


@pytest.mark.heavy
def test_ppo_learns_from_the_return_of_a_program():
    """To write 'good' where the answer before was read back, in both rows."""

    def play(ask):
        first = ask("a", max_tokens=1)
        second = ask(f"b {first}", max_tokens=1)
        return (first.strip() == "good") + (second.strip() == "good")

    env = program_env(play, 16)
    agent = PPO(env, word_policy(head=True), PPOConfig(num_episodes=64, num_steps=None, learning_rate=1e-2), seed=1)
    history = agent.learn(6000)
    assert history[0]["episode/return"] < 0.7 and history[-1]["episode/return"] > 1.8


# --- failures ---------------------------------------------------------------------------------------------------------


def fails_sometimes(fail):
    """A program whose every other call fails in this way."""
    lock, calls = threading.Lock(), []

    def play(ask):
        with lock:
            calls.append(None)
            number = len(calls)
        answer = ask("a")
        if number % 2:
            fail(ask, answer)
        return 1.0

    return play


def raises(ask, answer):
    raise KeyError("no such city")


def hangs(ask, answer):
    time.sleep(6.0)
    ask("b")


def leaves(ask, answer):
    raise SystemExit(3)


def asks_forever(ask, answer):
    while True:
        ask("b")


def asks_too_much(ask, answer):
    ask("a " * 100)


def asks_nothing(ask, answer):
    ask("")


def asks_a_chat(ask, answer):
    ask([user("a")])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (raises, "KeyError: 'no such city'"),
        (hangs, "TimeoutError: the program did not ask its next question"),
        (leaves, "SystemExit: 3"),
        (asks_forever, "max_turns=20 turns: catch this error and return a reward"),
        (asks_too_much, "the text has 100 tokens with this question"),
        (asks_nothing, "expected a text, or a list of messages"),
        (asks_a_chat, "the tokenizer has no chat template"),
        (lambda ask, answer: ask("b", temperature=0.5), "must be samples of the policy as it is"),
        (lambda ask, answer: ask("b", tokens=3), "expected max_tokens, stop or allowed"),
        (lambda ask, answer: ask("b", max_tokens=0), "max_tokens is 0"),
        (lambda ask, answer: ask("b", allowed=["a"]), "expected texts among those of the environment"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_program_that_fails_leaves_out_its_episode(fail, message, caplog):
    with caplog.at_level(logging.WARNING):
        timeout = 3.0 if fail is hangs else None  # long enough for the others on any machine
        rollout, env = played(fails_sometimes(fail), 8, episodes=8, timeout=timeout)
    assert env.metrics["programs/failed"] == env.metrics["reward/failed"] == 4
    assert message in caplog.text and "4 of 8 programs 'play' failed" in caplog.text
    scored = rollout["mask"].any(1)
    assert len(set(episode_of_row(rollout)[scored].tolist())) == 4
    assert rollout["reward"].sum() == 4 and not rollout["reward"][~scored].any()
    if fail is raises:
        assert "run.py" not in caplog.text and "test_vector_env.py" in caplog.text


def test_a_program_that_never_asks_leaves_out_its_episode(caplog):
    def play(ask, rng):
        if rng.random() < 0.5:
            return 1.0
        return float(len(ask("a")) > 0)

    rollout, env = played(play, 8, episodes=16)
    failed = env.metrics["programs/failed"]
    assert 0 < failed < 16 and rollout["mask"].any(1).sum() == 16 - failed
    assert "It returned without a question" in caplog.text


def test_a_mistake_in_all_programs_is_raised():
    def play(ask):
        return len(answer)  # noqa: F821

    with pytest.raises(RuntimeError, match="all 8 programs 'play' failed(.|\n)*NameError: name 'answer'"):
        played(play)


def test_a_program_may_catch_the_limits():
    """Its reward counts, and the episode is truncated only if its turns were used up."""

    def counts(ask):
        turns = 0
        try:
            while True:
                ask("a")
                turns += 1
        except LimitReached:
            return turns

    rollout, env = played(counts, max_turns=5)
    assert env.metrics["programs/failed"] == 0 and env.metrics["programs/questions"] == 6
    ends = rollout["truncated"].any(1)
    assert ends.sum() == 8 and not rollout["terminated"].any() and rollout["reward"].sum() == 40

    def shortens(ask):
        text = "a"
        for _ in range(6):
            text += ask(text) + " b " * 12
            try:
                ask(text)
            except LimitReached:
                text = "a"
        return 1.0

    rollout, env = played(shortens, max_length=40)
    assert env.metrics["programs/failed"] == 0 and rollout["terminated"].any(1).sum() == 8
    assert env.metrics["programs/rows"] > 1


def test_a_program_may_return_none():
    rollout, env = played(lambda ask, rng: None if len(ask("a")) > 4 else 1.0, episodes=32)
    left_out = env.metrics["reward/left_out"]
    assert 0 < left_out < 32 and (~rollout["mask"].any(1)).sum() == left_out and not env.metrics["programs/failed"]


@pytest.mark.parametrize("number", [np.array(2.0), np.float32(2), torch.tensor(2.0)])
def test_a_program_may_return_a_number_of_an_array(number):
    def pays(ask, rng):
        ask("a")
        return number

    rollout, env = played(pays)
    assert not env.metrics["programs/failed"] and rollout["reward"].sum(1).unique().tolist() == [2]


def test_a_question_after_the_end_raises_in_the_program():
    errors = []
    threads = []
    all_have_ended = threading.Event()

    def play(ask):
        def late():
            all_have_ended.wait()
            try:
                ask("b")
            except RuntimeError as error:
                errors.append(str(error))

        threads.append(threading.Thread(target=late))
        threads[-1].start()
        return float(len(ask("a")))

    played(play)
    all_have_ended.set()
    for thread in threads:
        thread.join()
    assert errors == ["the program has already returned: ask before that"] * 8


@pytest.mark.heavy
def test_a_question_that_is_open_when_its_program_returns_does_no_harm():
    def also(ask):
        with contextlib.suppress(RuntimeError):  # the program was faster
            ask("b")

    def play(ask):
        threading.Thread(target=also, args=(ask,), daemon=True).start()
        answer = ask("a")
        if len(answer) > 3:
            time.sleep(0.05)  # the other question is being answered
        return float(len(answer))

    for seed in range(3):
        rollout, env = played(play, 8, episodes=16, policy=word_policy(seed))
        assert env.metrics["programs/failed"] == 0 and (rollout["mask"].any(1)).all()


def test_programs_that_are_given_up_end():
    ended = threading.Semaphore(0)

    def play(ask):
        try:
            while True:
                ask("a")
        finally:
            ended.release()

    env = program_env(play, 4)
    env.start_episodes(8, seed=1)
    env.start_episodes(8, seed=1)
    env.close()
    for _ in range(8):
        assert ended.acquire(timeout=5)


def test_an_answer_goes_on_in_its_row_if_the_model_has_not_ended_it():
    """Cut by a limit, or by a stop text; behind EOS a row begins."""

    def cut(ask):
        text = "a"
        for _ in range(3):
            text += ask(text, max_tokens=2)
        return 1.0

    rollout, env = played(cut, episodes=8, forbidden=[EOS])
    assert env.metrics["programs/rows"] == 1
    assert [len(turns[0][1]) for turns in turns_of(rollout)] == [6] * 8, "three answers, one behind the other"

    def stopped(ask):
        text = "a"
        for _ in range(3):
            text += ask(text, stop="good") + "good"
        return 1.0

    rollout, env = played(stopped, episodes=8, forbidden=[EOS], max_new_tokens=60, max_length=200)
    assert env.metrics["programs/rows"] == 1

    def ended(ask):
        text = "a" + ask("a")
        ask(text)
        return 1.0

    rollout, env = played(ended, episodes=16)
    ended_by_eos = sum(turns[0][1][-1] == EOS for turns in turns_of(rollout)[:16] if turns)
    assert 1 < env.metrics["programs/rows"] < 2 and ended_by_eos > 0


def test_a_program_whose_questions_were_all_refused_is_left_out(caplog):
    """The policy has answered nothing, so there is nothing to train on."""

    def play(ask, rng):
        try:
            return 1.0 if ask("a " * (100 if rng.integers(2) else 3)) else 2.0
        except LimitReached:
            return -1.0

    rollout, env = played(play, episodes=12)
    assert not (rollout["reward"] < 0).any() and env.metrics["programs/failed"] == 0
    assert 0 < (~rollout["mask"].any(1)).sum() < 12


def test_arguments_with_defaults_keep_them():
    def play(ask, task="b", bonus=0.5):
        return len(ask(task)) * 0 + bonus

    rollout, _ = played(play, episodes=4)
    assert (rollout["reward"].sum(1) == 0.5).all()
    rollout, _ = played(play, episodes=4, tasks=["a"])
    assert (rollout["observation"][:, 0] == WORDS.index("a")).all()


def test_an_environment_of_programs_takes_no_texts_from_elsewhere():
    with pytest.raises(ValueError, match="are no episodes of a program"):
        program_env(walk).given_episodes(["a"], ["b"], [1.0])


def test_programs_know_that_they_are_evaluated():
    """By the context variable that rewards read, in the thread of the program, too."""
    seen = []

    def play(ask):
        seen.append(NOW.get().evaluating)
        ask("a")
        return 1.0

    env = program_env(play)
    collect(env, word_policy(), num_episodes=2)
    evaluate(env, word_policy(), num_episodes=2)
    assert seen == [False, False, True, True]


def test_a_reset_gives_up_the_programs_of_its_slots():
    def play(ask):
        text = "a" + ask("a")
        ask(text + " b")
        return 1.0

    env = program_env(play, 3)
    before = threading.active_count()
    for seed in range(20):
        env.reset(seed=seed)
    deadline = time.monotonic() + 5
    while threading.active_count() > before + 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 6
    env.close()


def test_step_plays_programs():
    env = program_env(walk, 2, max_length=128)
    env.reset(seed=1)
    total, ends = 0.0, 0
    for _ in range(400):
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        total += reward.sum()
        ends += (terminated | truncated).sum()
    assert ends > 4 and total > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(play=3), TypeError, "expected a function such as play"),
        (dict(play=Walk), TypeError, "expected a function such as play"),
        (dict(play=lambda: 1), TypeError, r"expected <lambda>\(ask\), or with tasks="),
        (dict(play=lambda ask: 1, tasks=["a"]), TypeError, r"expected <lambda>\(ask, task\)"),
        (
            dict(play=lambda ask, task: 1),
            TypeError,
            r"or with tasks= <lambda>\(ask, task\). For another function to ask, give agents=2",
        ),
        (dict(allowed="yes"), TypeError, "allowed is 'yes', expected a list of texts"),
        (dict(score_while_generating=True), ValueError, "programs return their rewards themselves"),
        (dict(max_turn=3), TypeError, "ProgramVectorEnv has no 'max_turn': did you mean 'max_turns'"),
        (dict(reward=len), TypeError, "ProgramVectorEnv has no 'reward'"),
        (dict(tasks=[]), ValueError, "tasks is empty"),
        (dict(tasks="abc"), TypeError, "expected a list with one entry for each task"),
        (dict(tasks={"a": 1}), TypeError, "expected a list with one entry for each task"),
        (dict(timeout=0), ValueError, "expected seconds above 0"),
        (dict(max_length=1), ValueError, "max_length is 1, expected an integer of at least 2"),
        (dict(agents=0), ValueError, "agents is 0"),
        (dict(tokenizer="gpt2"), TypeError, "tokenizer is 'gpt2'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_program(arguments, error, message):
    defaults = dict(play=lambda ask, task=None: 1.0, tokenizer=make_tokenizer(WORDS))
    with pytest.raises(error, match=message):
        ProgramVectorEnv(**(defaults | arguments))


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="reward 'play'"):

        def play(ask):
            return ask("a")

        played(play)
