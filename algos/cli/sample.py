"""``algos sample``: a trained language model completes texts or chats, beside the model that it started from."""

import logging
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from algos.cli.arguments import ModelCommand, load_newest, one_thread
from algos.cli.tables import print_table
from algos.storage.run_files import BEST, POLICY
from algos.storage.run_folder import newest_agent, run_folder_of
from textenv.embedded.folder import EMBEDDED
from textenv.rendering import printable

if TYPE_CHECKING:
    from algos.policies.lm import LMPolicy
    from algos.policies.policy import Policy

logger = logging.getLogger(__name__)


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
    """Second model to show beside it: base (the model that the run started from), another run, a model's folder, or its
    name on the hub: owner/name."""
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

    def run(self) -> dict[str, object]:
        """Load the models, and show what each writes."""
        from algos.training.save import read_description

        description = read_description(self.folder)
        if description["policy"] != "LMPolicy":
            raise ValueError(f"{self.folder} holds a {description['policy']}, but only a language model writes texts")
        if self.compare_to is not None:
            refuse_same_model(self.compare_to, self.folder, flag="--compare-to")
        one_thread()
        self._warn_of_chats()
        policies = self._policies()
        samples = []
        for prompt, answers in self._answers(policies):
            samples.append({"prompt": prompt} | answers)
            if not self.json:
                title = ""
                if self.prompt:  # one that was typed stands above its answers already
                    title = prompt
                _show(title, answers)
        return {"samples": samples}

    def _warn_of_chats(self) -> None:
        """Log a warning if the run was trained on chats, whose template or system message is left out here."""
        if self.system_prompt is not None:
            return
        run = run_folder_of(self.folder)
        if run.name == BEST:
            run = run.parent
        is_chat, system_prompt = chat_of_training(run)
        flags = "--chat"
        if system_prompt is not None:
            flags = f"--system-prompt {shlex.quote(printable(system_prompt))}"
        if is_chat and not self.chat:
            logger.warning("the run was trained on chats, which this prompt is not: %s asks as in the training", flags)
        elif system_prompt is not None:
            logger.warning("chats of the training began with a system message: %s asks as in the training", flags)

    def _policies(self) -> "dict[str, LMPolicy]":
        """Load the models to show, by name; all of them end their answers where one of them does.

        The base model draws its tokens as the run does, so that only the training differs.
        """
        policy, _ = load_newest(self.folder)
        policies = {self.folder: policy}
        if self.compare_to is not None:
            compared_policy = load_policy(model_name(self.compare_to, self.folder))
            policies = {self.compare_to: compared_policy} | policies
            if self.compare_to == "base":
                compared_policy.lm.temperature = policy.temperature
                compared_policy.top_k = policy.top_k
                compared_policy.top_p = policy.top_p
        stops = [stop for policy in policies.values() for stop in policy.lm.stop]
        for policy in policies.values():
            policy.lm.stop = (*stops, *self.stop)
        return policies

    def _answers(self, policies: "dict[str, LMPolicy]") -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each prompt with the answer of each model; prompts that are typed continue each model's own chat."""
        is_chat = self.chat or self.system_prompt is not None
        start = []
        if self.system_prompt is not None:
            start = [{"role": "system", "content": self.system_prompt}]
        chats = dict.fromkeys(policies, start)

        # A prompt of the command line starts a chat of its own
        for number, text in enumerate(self.prompt or _typed_lines()):
            answers = {}
            for name, policy in policies.items():
                prompt: str | list[dict[str, str]] = text
                chat = [*chats[name], {"role": "user", "content": text}]
                if is_chat:
                    prompt = chat
                (answer,) = policy.generate(
                    [prompt],
                    seed=self.seed + number,
                    max_new_tokens=self.max_new_tokens,
                    deterministic=self.deterministic,
                )
                answers[name] = answer
                if not self.prompt:
                    chats[name] = [*chat, {"role": "assistant", "content": answer}]
            yield text, answers


def chat_of_training(run: Path) -> tuple[bool, str | None]:
    """Return whether a run was trained on chats, and the system message with which they began; None if they had none.

    Chats are asked for by options, or the prompts are chats themselves, as the recorded samples show; of these the last
    one counts.

    Raises:
        DamagedRunError: if options or samples cannot be read.
    """
    from algos.lab.run_summary import read_options
    from algos.storage.run_reader import read_samples

    options = read_options(run)
    system_prompt = options.get("system_prompt")
    is_chat = bool(options.get("chat")) or system_prompt is not None
    for sample in read_samples(run):
        match sample.get("chat"):
            case [{"role": "system", "content": str(content)}, *_]:
                is_chat = True
                system_prompt = content
            case [_, *_]:
                is_chat = True
    return is_chat, system_prompt


def refuse_same_model(name: str, folder: str, *, flag: str) -> None:
    """Raise a ValueError if a model to compare a run with is the run itself."""
    if name == "base":
        return
    if name == folder or (Path(name).is_dir() and Path(name).resolve() == Path(folder).resolve()):
        raise ValueError(f"{flag} is {name}, the run itself: name another model, or base, from which the run started")


def model_name(name: str, folder: str) -> str:
    """Return the name of a model to compare a run with; "base" becomes that of the model that the run started from.

    Raises:
        ValueError: if the run does not say which model that was.
        FileNotFoundError: as `check_model_name`.
    """
    from algos.make import is_ours
    from algos.training.save import read_description

    if name != "base":
        check_model_name(name)
        return name
    environment = read_description(folder)["environment"]
    if environment is None or not is_ours(environment["id"]):
        raise ValueError(f"{folder} does not say which model it started from: name that model instead of base")
    return str(environment["kwargs"].get("model", EMBEDDED))


def check_model_name(name: str, *, may_lack_owner: bool = False) -> None:
    """Refuse at once what is neither a folder nor the form of a name on the hub; say so if the hub will be asked.

    Args:
        name: folder, file or name of a model.
        may_lack_owner: accept names without an owner, which the oldest models of the hub have, such as gpt2.

    Raises:
        FileNotFoundError: if there is no such folder or file, and it is no ``owner/name``.
        ValueError: if it is the name of a built-in model, misspelt.
    """
    from algos.storage.hub import HUB_NAME
    from textenv.lm.loading import model_folder

    if Path(model_folder(name)).exists():
        return
    is_hub_name = re.fullmatch(HUB_NAME, name) and not Path(name).parent.is_dir()
    is_old_name = may_lack_owner and re.fullmatch(r"\w[\w.-]*", name)
    if not is_hub_name and not is_old_name:
        raise FileNotFoundError(
            f"there is no folder {name}: give the folder of a run or of a model, embedded, smollm2, a GGUF file, or a "
            "model of the hub as owner/name, such as openai-community/gpt2"
        )
    print(f"algos: there is no folder {name}, so the hub is asked for a model of this name", file=sys.stderr)


def load_policy(name: str) -> "LMPolicy":
    """Load the policy of a run's folder, or of a model; a ValueError if it is no language model."""
    from algos.policies.lm import LMPolicy
    from algos.training.save import load

    policy: Policy
    if (newest_agent(name) / POLICY).is_dir():
        policy = load(name)
    else:
        policy = LMPolicy.load(name)
    if not isinstance(policy, LMPolicy):
        raise ValueError(f"{name} holds a {type(policy).__name__}, but only a language model writes texts")
    return policy


def _typed_lines() -> Iterator[str]:
    """Yield the lines that are typed, but empty ones, until the end of the input."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def _show(title: str, answers: dict[str, str]) -> None:
    """Print the answers of the models side by side, below a title unless that is empty."""
    from rich.text import Text

    from textenv.console import PipeConsole

    if title:
        PipeConsole().print(Text(printable(title), style="italic"))
    header: list[str] = []
    if len(answers) > 1:
        header = [*answers]
    print_table([answers.values()], header)
