"""``algos serve``: a language model behind OpenAI's protocol, for evaluation harnesses and other programs."""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import tyro

from algos.cli.arguments import ModelCommand, one_thread
from algos.cli.sample import check_model_name, load_policy
from textenv.rendering import printable


@dataclass(frozen=True, kw_only=True)
class Serve(ModelCommand):
    """Answer other programs on this machine with a language model, by OpenAI's protocol, until Ctrl-C."""

    prints: ClassVar[bool] = True
    announces: ClassVar[bool] = True
    folder: tyro.conf.Positional[str]
    """Run folder of a trained language model, the folder ``best`` in it, a model's folder, or its name on the hub:
    owner/name."""
    port: int = 8000
    """Port of 127.0.0.1 to listen on; 0 takes a free one."""
    token: str | None = None
    """Key that requests must bring; by default a new one, which is printed."""
    max_new_tokens: int = 512
    """Maximum length of an answer, in tokens; a request may ask for a shorter one."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text or special token that ends an answer, in addition to what ended turns in training and to a request's
    ``stop``; may be repeated."""

    def run(self) -> dict[str, object]:
        """Load the model, and serve."""
        from algos.extras.serving import PolicyAnswerer
        from textenv.gateway.server import CompletionServer

        one_thread()
        check_model_name(self.folder)
        policy = load_policy(self.folder)
        policy.lm.stop = (*policy.lm.stop, *self.stop)
        answerer = PolicyAnswerer(policy, self.folder, limit=self.max_new_tokens)
        server = CompletionServer(answerer, token=self.token, port=self.port)
        with contextlib.closing(answerer), server:
            print(f"model: {self.folder}\nOPENAI_BASE_URL={server.url}\nOPENAI_API_KEY={server.token}", flush=True)
            print(f"answers end with {printable(str(policy.ends))}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.wait()
        return {"served": self.folder}
