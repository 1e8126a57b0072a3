"""Registered environments, for ``gymnasium.make("textenv/Reviews-v0")`` and ``gymnasium.make_vec``."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from textenv.foreign import our_names
from textenv.names import advice

if TYPE_CHECKING:
    from textenv.envs.text_env import TextEnv
    from textenv.envs.vector_env import TextVectorEnv
    from textenv.kl.coefficients import CoefficientLike
    from textenv.kl.penalty import KLPenalty

NAMES = (
    "Periods", "Reviews", "Copy", "Sort", "GuessNumber", "Calculator", "TwentyQuestions", "ReasoningGym", "TextWorld",
    "OpenEnv", "Words", "Prompts", "Program", "KuhnPoker", "TicTacToe"
)  # fmt: skip
PROGRAMS = ("Program", "KuhnPoker", "TicTacToe")
"""Programs that ask the model (`textenv.programs`), which exist as vector environments only."""
COMMAND = "command"
"""Argument of ``textenv/Program-v0`` with which the program asks over HTTP (`textenv.Gateway`)."""
OPTIMAL_RETURNS = {
    "TwentyQuestions": 33 / 40,
    "OpenEnv": None,
    "Words": None,
    "Prompts": None,
    "Program": None,
    "KuhnPoker": None,
    "TicTacToe": None,
}
"""Mean return of optimal play, for the environments where it is not 1; None if it is unknown."""


def register_envs() -> None:
    """Register every task as ``textenv/NAME-v0``; ``import textenv`` calls it."""
    import gymnasium

    for name in NAMES:
        env_id = f"textenv/{name}-v0"
        if env_id in gymnasium.registry:
            continue
        gymnasium.register(
            env_id,
            entry_point="textenv.registration:make_env",
            vector_entry_point="textenv.registration:make_vector_env",
            kwargs={"task": name},
            reward_threshold=OPTIMAL_RETURNS.get(name, 1.0),
        )


def make_env(task: str, **arguments: Any) -> TextEnv:
    """Make a built-in task as a single environment; the arguments are those of `make_vector_env`.

    Raises:
        ValueError: if it is a program.
    """
    if task in PROGRAMS:
        raise ValueError(
            f"textenv/{task}-v0 is a program, for which there is no single environment: use "
            f'gymnasium.make_vec("textenv/{task}-v0", num_envs=64)'
        )
    from textenv.envs.text_env import TextEnv

    return TextEnv(**_constructor_arguments(task, **arguments))


def make_vector_env(task: str, num_envs: int = 1, **arguments: Any) -> TextVectorEnv:
    """Make a built-in task as a vector environment with ``num_envs`` slots.

    Args:
        task: one of `NAMES`; ``"ReasoningGym"`` needs a ``dataset``, ``"OpenEnv"`` a ``url``,
            ``"Words"`` an ``env``, ``"Prompts"`` ``prompts`` and ``reward``, ``"Program"`` a ``play`` or a ``command``;
            ``"KuhnPoker"`` and ``"TicTacToe"`` may have ``opponents``.
        num_envs: number of slots.
        arguments: ``model`` (``"embedded"``, ``"smollm2"``, a folder, a GGUF file or a hub name); ``split``
            (``"train"`` or ``"test"``, which share no prompt except in games); ``kl_coef`` (β of a k1 KL penalty to the
            loaded model, in the reward; 0 only measures the KL; ``penalty`` takes other penalties); the task's
            arguments; and those of `TextVectorEnv`.
    """
    from textenv.envs.vector_env import TextVectorEnv

    if task not in NAMES:  # an argument of the user has replaced the name
        raise ValueError(
            f"task is {task!r:.200}, which no environment of textenv takes: the tasks of a program are tasks="
        )
    if task in PROGRAMS:
        return _make_program(task, num_envs, **arguments)
    if task == "OpenEnv":
        from textenv.tasks.openenv import calls_tools_at

        if calls_tools_at(arguments.get("url", "")):
            return _make_program(task, num_envs, **arguments)
    return TextVectorEnv(num_envs=num_envs, **_constructor_arguments(task, **arguments))


def _make_program(
    task: str, num_envs: int, *, model: str = "embedded", kl_coef: CoefficientLike | None = None, **arguments: Any
) -> TextVectorEnv:
    """Make a program as an environment, see `textenv.programs.builtin`; arguments as for `make_vector_env`."""
    from textenv.lm.loading import load_tokenizer
    from textenv.programs.builtin import make_program_env
    from textenv.prompts.template_variables import set_template_variables

    penalty = _penalty(model, kl_coef, arguments.pop("penalty", None))
    tokenizer = load_tokenizer(model)
    set_template_variables(tokenizer, arguments.get("chat_template_kwargs"))
    options: dict[str, Any] = dict(tokenizer=tokenizer, num_envs=num_envs, penalty=penalty)
    if task == "OpenEnv":
        from textenv.tasks.openenv import make_tool_env

        return make_tool_env(**options, **arguments)
    if task == "Program" and COMMAND in arguments:
        from textenv.gateway.vector_env import make_gateway

        return make_gateway(**options, **arguments)
    return make_program_env(task, **options, **arguments)


def _penalty(model: str, kl_coef: CoefficientLike | None, penalty: KLPenalty | None) -> KLPenalty | None:
    """Return the penalty that is given, or one to the model with this coefficient; None if neither is given.

    Raises:
        ValueError: if both are given.
    """
    from textenv.kl.penalty import KLPenalty
    from textenv.lm.model import LanguageModel

    if kl_coef is None:
        return penalty
    if penalty is not None:
        raise ValueError(f"kl_coef is {kl_coef} and penalty= is given: give one of them")

    def load_reference() -> LanguageModel:
        return LanguageModel.load(model).requires_grad_(False)

    return KLPenalty(load_reference, kl_coef)


def _constructor_arguments(
    task: str,
    *,
    model: str = "embedded",
    split: str = "train",
    kl_coef: CoefficientLike | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Return the arguments for the environment's constructor; create tokenizer, task and penalty."""
    from textenv.envs.vector_env import TextVectorEnv
    from textenv.lm.loading import load_tokenizer
    from textenv.prompts.template_variables import set_template_variables
    from textenv.tasks.builtin import make_task

    # Names of other libraries
    accepted = {*inspect.signature(TextVectorEnv).parameters, "model", "split", "kl_coef"}
    for name in arguments:
        if name not in accepted and not accepted.isdisjoint(our_names(name)):
            raise TypeError(f"textenv/{task}-v0 has no {name!r}: {advice(name, accepted)}")

    # First, because the default limits of prompts are their lengths
    tokenizer = load_tokenizer(model)
    set_template_variables(tokenizer, arguments.get("chat_template_kwargs"))
    try:
        task_object, limits, env_arguments = make_task(task, tokenizer=tokenizer, split=split, **arguments)
    except TypeError as error:
        # Explain an argument that neither the task nor the environment has
        match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if match is None:
            raise
        name = match[1]
        suggestion = advice(name, accepted)
        if not suggestion:
            raise
        raise TypeError(f"textenv/{task}-v0 has no {name!r}: {suggestion}") from error

    if kl_coef is not None:
        env_arguments["penalty"] = _penalty(model, kl_coef, env_arguments.get("penalty"))
    return {"task": task_object, "tokenizer": tokenizer} | limits | env_arguments
