"""The registered environments: ``gymnasium.make("textenv/Reviews-v0")`` and ``gymnasium.make_vec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textenv.envs.text_env import TextEnv
    from textenv.envs.vector_env import TextVectorEnv

NAMES = ("Periods", "Reviews", "Copy", "Sort", "GuessNumber", "Calculator", "TwentyQuestions", "ReasoningGym")
BEST = {"TwentyQuestions": 33 / 40}
"""Mean return of the best play, where it is not 1."""


def register_envs() -> None:
    """Register every task as ``textenv/NAME-v0``; ``import textenv`` calls it."""
    import gymnasium

    for name in NAMES:
        if f"textenv/{name}-v0" not in gymnasium.registry:
            gymnasium.register(
                f"textenv/{name}-v0",
                entry_point="textenv.registration:make_env",
                vector_entry_point="textenv.registration:make_vector_env",
                kwargs={"task": name},
                reward_threshold=BEST.get(name, 1.0),
            )


def make_env(task: str, **arguments: Any) -> TextEnv:
    """A ready-made task as a single environment; the arguments are those of `make_vector_env`."""
    from textenv.envs.text_env import TextEnv

    return TextEnv(**_environment(task, **arguments))


def make_vector_env(task: str, num_envs: int = 1, **arguments: Any) -> TextVectorEnv:
    """A ready-made task in ``num_envs`` slots.

    Args:
        task: one of `NAMES`; ``"ReasoningGym"`` needs a ``dataset`` too.
        num_envs: slots.
        arguments: ``model`` (``"embedded"``, a local folder or a hub name), ``split`` (``"train"`` or
            ``"test"``: prompts that never overlap), ``kl_coef`` (β towards the model as it was loaded;
            0 measures the KL only, None does not), the task's own, and those of `TextVectorEnv`.
    """
    from textenv.envs.vector_env import TextVectorEnv

    return TextVectorEnv(num_envs=num_envs, **_environment(task, **arguments))


def _environment(
    task: str, *, model: str = "embedded", split: str = "train", kl_coef: float | None = None, **arguments: Any
) -> dict[str, Any]:
    """Arguments for the environment's constructor, with tokenizer, task and penalty made."""
    from textenv.kl.penalty import KLPenalty
    from textenv.lm.loading import load_tokenizer
    from textenv.tasks.builtin import make_task

    tokenizer = load_tokenizer(model)
    task_object, limits, rest = make_task(task, tokenizer=tokenizer, split=split, **arguments)

    def reference() -> Any:
        from textenv.lm.model import LanguageModel

        return LanguageModel.load(model).requires_grad_(False)

    penalty = KLPenalty(reference, kl_coef) if kl_coef is not None else None
    return {"task": task_object, "tokenizer": tokenizer, "penalty": penalty} | limits | rest
