"""``algos sample``: a trained language model completes texts or chats, beside the model that it started from."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import tyro

from algos.cli.arguments import ModelCommand, load_newest, one_thread
from algos.cli.tables import print_table
from algos.storage.run_folder import newest_agent
from textenv.lm.loading import EMBEDDED
from textenv.rendering import printable


@dataclass(frozen=True, kw_only=True)
class Sample(ModelCommand):
    """Complete texts, or chat, with the language model of a run."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[str]
    """Run folder of a language model, also of one under way (its newest checkpoint), the folder ``best`` in it, or its
    name on the hub: user/name."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to complete or answer; may be repeated. Without it, each line that you type is one, until Ctrl-D."""
    compare_to: str | None = None
    """Second model to show beside it: base (the model that the run started from), another run, or a model's name."""
    chat: bool = False
    """Give the prompts as messages of a user, through the model's chat template; lines that you type are one chat."""
    system_prompt: str | None = None
    """Message that starts every chat."""
    max_new_tokens: int = 128
    """Maximum length of a completion, in tokens."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text or special token that ends an answer, in addition to what ended turns in training; may be repeated."""
    deterministic: bool = False
    """Take the most probable token instead of a sample."""
    seed: int = 0
    """Seed of the samples."""

    def run(self) -> dict[str, Any]:
        """Load the models, and show what each writes."""
        from algos.training.save import read_description

        description = read_description(self.folder)
        if description["policy"] != "LMPolicy":
            raise ValueError(f"{self.folder} holds a {description['policy']}, but only a language model writes texts")
        one_thread()
        policy, _ = load_newest(self.folder)
        policies: dict[str, Any] = {self.folder: policy}
        if self.compare_to is not None:
            policies = {self.compare_to: load_policy(model_name(self.compare_to, self.folder))} | policies
        stops = [stop for policy in policies.values() for stop in policy.lm.stop]
        for policy in policies.values():  # the model beside it ends its answers there too
            policy.lm.stop = (*stops, *self.stop)
        chat, found = self.chat or self.system_prompt is not None, []
        start = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "deterministic": self.deterministic}
        chats: dict[str, list[Any]] = {}
        for number, text in enumerate(self.prompt or _typed()):
            written = {}
            for name, policy in policies.items():
                asked = [*(start if self.prompt else chats.get(name, start)), {"role": "user", "content": text}]
                (written[name],) = policy.generate([asked if chat else text], seed=self.seed + number, **options)
                chats[name] = [*asked, {"role": "assistant", "content": written[name]}]
            found.append({"prompt": text} | written)
            if not self.json:
                _show(text if self.prompt else "", written)
        return {"samples": found}


def model_name(name: str, folder: str) -> str:
    """Name of a model to compare a run with; "base" becomes that of the model that the run started from."""
    from algos.make import is_ours
    from algos.training.save import read_description

    if name != "base":
        return name
    environment = read_description(folder)["environment"]
    if environment is None or not is_ours(environment["id"]):
        raise ValueError(f"{folder} does not say which model it started from: name that model instead of base")
    return str(environment["kwargs"].get("model", EMBEDDED))


def load_policy(name: str) -> Any:
    """Policy of a run's folder, or of a model."""
    from algos.policies.lm import LMPolicy
    from algos.training.save import load

    policy = load(name) if (newest_agent(name) / "policy").is_dir() else LMPolicy.load(name)
    if not isinstance(policy, LMPolicy):
        raise ValueError(f"{name} holds a {type(policy).__name__}, but only a language model writes texts")
    return policy


def _typed() -> Iterator[str]:
    """Lines typed until the end of the input."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if text.strip():
            yield text


def _show(title: str, written: dict[str, str]) -> None:
    from rich.console import Console
    from rich.text import Text

    if title:
        Console().print(Text(printable(title), style="italic"))
    print_table([written.values()], [*written] if len(written) > 1 else ())
