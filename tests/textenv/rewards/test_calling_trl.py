"""Reward functions of TRL 1.16, called by its trainer and by us: the same arguments, the same numbers."""

import asyncio
import inspect
import logging
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.text_envs import REWARDED, paid, play, rewarded
from tests.helpers.tool_calls import byte_tokenizer
from textenv import Rewards, TextVectorEnv
from textenv.rewards.training import TRL_ARGUMENTS, TrainerState, training

CHAT = "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}{% endfor %}"
ROWS = {"prompts": ["p", "q"], "completions": ["a b", "c"], "completion_ids": [[1, 2], [3]]}

ANSWERS = [
    r"<think>one third</think> It is \boxed{\frac{1}{3}}",
    r"It is \boxed{\frac{1}{2}}, is it? It is, it is, it is.",
    r"<think>never closed \boxed{4}",
    "<think>4</think> $4$ " + "and so on " * 5,
    "",
]
SOLUTIONS = [r"$\frac{1}{3}$", "$4$", "no number"]


@pytest.fixture(scope="module")
def grpo_trainer():
    """TRL's module, whose logger needs the state that its trainer makes."""
    pytest.importorskip("trl", "1.16", reason="pip install 'trl>=1.16': its reward functions and its trainer")
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="pip install 'trl>=1.16'")
    state = pytest.importorskip("accelerate").PartialState
    was_there = bool(state._shared_state)
    state()
    yield module
    if not was_there:
        state._reset_state()


@pytest.fixture(scope="module")
def loop():
    """The event loop in a thread, on which TRL's trainer runs async functions."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def by_trl(grpo_trainer, loop, function, prompts, completions, completion_ids, columns, *, step=0, max_steps=1):
    """What the trainer's own code makes of a reward function, and what that logged: rewards, extras, metrics."""
    from transformers import TrainerState

    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["f"],
        state=TrainerState(global_step=step, max_steps=max_steps),
        environments=None,
        async_loop=loop,
        extras={},
        metrics={},
    )
    trainer._log_completion_extra = lambda column, values: trainer.extras.setdefault(column, []).extend(values)
    trainer._log_metric = lambda name, value: trainer.metrics.setdefault(name, []).append(value)
    inputs = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)] or [{}] * len(
        prompts
    )
    calculate = inspect.unwrap(grpo_trainer.GRPOTrainer._calculate_rewards)
    rewards = calculate(trainer, inputs, prompts, completions, completion_ids)[:, 0]
    return [None if math.isnan(reward) else reward for reward in rewards.tolist()], trainer.extras, trainer.metrics


FUNCTIONS = {
    "accuracy_reward": (),
    "reasoning_accuracy_reward": (),
    "think_format_reward": (),
    "get_cosine_scaled_reward": (60,),
    "get_repetition_penalty_reward": (3, -1.0),
    "get_soft_overlong_punishment": (60, 40),
}
"""All of `trl.rewards`, with the arguments of those that make a function."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_reward_of_trl_pays_the_same_here(name, grpo_trainer, loop):
    pytest.importorskip("math_verify", reason="install the extra: pip install '.[math]'")
    rewards = pytest.importorskip("trl.rewards")
    public = {public for names in rewards._import_structure.values() for public in names}
    assert public == FUNCTIONS.keys()
    function = getattr(rewards, name)
    if FUNCTIONS[name]:
        function = function(*FUNCTIONS[name])

    # Here: all answers are played in an environment of chats, to each solution
    tokenizer = byte_tokenizer(CHAT)
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in ANSWERS]
    prompt = [{"role": "user", "content": "?"}]
    options = dict(tokenizer=tokenizer, num_envs=3, max_prompt_tokens=16, max_new_tokens=100)
    completions = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    paid_by_trl = []
    for solution in SOLUTIONS:
        env = TextVectorEnv(prompts=[{"prompt": prompt, "solution": solution}], reward=function, **options)
        here = [sum(row) if row else None for row in paid(play(env, ids, seed=0))]

        # There
        columns = {"solution": [solution] * len(ANSWERS)}
        there, _, _ = by_trl(grpo_trainer, loop, function, [prompt] * len(ANSWERS), completions, ids, columns)
        assert here == there
        paid_by_trl += there
    assert len(set(paid_by_trl)) > 1


def scheduled(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **kwargs):
    """Uses the whole interface."""
    done = trainer_state.global_step / trainer_state.max_steps
    lengths = [float(len(text)) for text in completions]
    log_metric("done", done)
    log_metric("done", done)
    log_metric("nothing", float("nan"))
    log_extra("length", lengths)
    return [None if answer[i] is None else done + lengths[i] + len(completion_ids[i]) for i in range(len(prompts))]


async def scheduled_async(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **kwargs):
    await asyncio.sleep(0)
    return scheduled(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **kwargs)


class ScheduledObject:
    async def __call__(self, completions, trainer_state, log_metric, log_extra=None, **kwargs):
        return scheduled(completions=completions, trainer_state=trainer_state, log_metric=log_metric,
                         log_extra=log_extra, **kwargs)  # fmt: skip


@pytest.mark.parametrize("function", [scheduled, scheduled_async])
def test_the_whole_interface_is_that_of_trl(function, grpo_trainer, loop):
    columns = {"answer": ["x", None]}
    there, extras, metrics = by_trl(
        grpo_trainer, loop, function, *ROWS.values(), columns, step=250, max_steps=1000
    )  # fmt: skip
    with training(250, 250 / 1000):
        here = Rewards(function)(**ROWS, **columns)
    assert here.score == there == [0.25 + 3 + 2, None]
    assert here.logged["length"] == extras["length"] == [3, 1]
    assert np.mean(here.logged["done"]) == np.mean(metrics["done"]) == 0.25


def test_an_object_with_an_async_call_takes_it_too():
    with training(250, 0.25):
        assert Rewards(ScheduledObject())(**ROWS, answer=["x", None]).score == [5.25, None]


def test_logging_infinity_costs_no_reward():
    def logs(completions, log_metric, log_extra, **columns):
        log_metric("mean", -math.inf)
        log_extra("each", [math.inf, 2.0])
        return [1.0, 2.0]

    result = Rewards(logs)(**ROWS)
    assert result.score == [1, 2] and result.logged == {"each": [None, 2.0]}


def test_arguments_reach_functions_that_name_them_only():
    assert set(TRL_ARGUMENTS) == {"trainer_state", "log_metric", "log_extra"}
    assert Rewards(lambda completions, **kwargs: [float(len(kwargs))] * 2)(**ROWS).score == [2, 2]
    assert Rewards(lambda completions, trainer_state=None: [float(trainer_state is None)] * 2)(**ROWS).score == [0, 0]
    column = Rewards(lambda completions, log_extra: log_extra)(**ROWS, log_extra=[1.0, 2.0])
    assert column.score == [1, 2], "a column of the prompts goes first"


@pytest.mark.parametrize(
    ("step", "progress", "expected"), [(0, 0.0, (0, 1)), (5000, 1.0, (5000, 5000)), (7, 7 / 40_000, (7, 40_000))]
)
def test_the_ratio_of_steps_is_the_progress(step, progress, expected):
    seen = []

    def reward(completions, trainer_state):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return [0.0] * len(completions)

    with training(step, progress):
        Rewards(reward)(**ROWS)
    assert seen == [expected]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_columns_are_logged_from_arrays_too(kind):
    """TRL extends its list by them."""

    def reward(completions, log_extra):
        log_extra("length", kind([3.0, 5.0]))
        return [0.0] * len(completions)

    assert Rewards(reward)(**ROWS).logged == {"length": [3.0, 5.0]}


def test_other_fields_of_the_state_are_refused():
    with pytest.raises(AttributeError, match="trainer_state has no 'epoch' here.*global_step / max_steps.*progress"):
        TrainerState(1, 2).epoch  # noqa: B018
    assert getattr(TrainerState(1, 2), "epoch", 0) == 0


def test_environments_are_refused_in_words():
    with pytest.raises(ValueError, match="needs TRL's 'environments'.*score.*ProgramVectorEnv.*environments=None"):
        rewarded(lambda completions, environments: [0.0] * len(completions), REWARDED)
    assert Rewards(lambda completions, environments=None: [1.0] * len(completions))(**ROWS).score == [1, 1]


def logs(*calls):
    """What a reward function logs by these calls of ``log_metric`` and ``log_extra``."""

    def reward(completions, log_metric, log_extra):
        for name, value in calls:
            (log_extra if isinstance(value, (list, str)) else log_metric)(name, value)
        return [0.0] * len(completions)

    return Rewards(reward)(**ROWS).logged


def test_what_trl_leaves_out_of_its_means_is_left_out():
    assert logs(("a", float("nan")), ("a", 3), ("b", [float("nan"), 2])) == {"a": [3, 3], "b": [None, 2]}
    assert logs(("a", np.float32(3)), ("b", [True, None]), ("c", torch.tensor(2))) == {
        "a": [3, 3], "b": [1, None], "c": [2, 2],
    }  # fmt: skip


def test_extra_texts_are_not_kept_and_a_line_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert logs(("text_of_this_test", ["x", "y"])) == {}
    assert "'text_of_this_test'" in caplog.text and "numbers only" in caplog.text


@pytest.mark.parametrize("call", [("a", "text"), ("a", [1.0]), ("a", ["x"] * 3), ("a", None)])
def test_wrong_values_are_refused(call):
    with pytest.raises(ValueError, match=r"log(_metric|_extra)?\('a'"):
        logs(call)
