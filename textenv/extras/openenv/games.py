"""`OpenEnv`: environments on OpenEnv servers whose actions are texts, numbers or other values, as string games."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium

from textenv.envs.action_masks import WordRule
from textenv.envs.string_env import FAILED_KEY, StringGames
from textenv.envs.turn import Turn
from textenv.extras.openenv.actions import ActionForm, calls_tools, find_form
from textenv.extras.openenv.server import ActionRefusedError, Data, Server, observation_fields
from textenv.games.dialogue import text_space
from textenv.importing import load_function
from textenv.lm.ends import turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SESSIONS_AT_ONCE = 32
"""Maximum number of sessions that wait for the server at the same time."""
TIMEOUT = 60.0
"""Default time limit of a server's answer, in seconds."""
LEGAL = "legal_actions"
"""Field in which an observation lists the values that an action may have, in OpenEnv's games."""
EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of fields in which nothing stands."""
_log = logging.getLogger(__name__)
Describe = Callable[[dict[str, Any]], str]


class OpenEnv(StringGames):
    """Play an environment on an OpenEnv server, in one session per episode.

    Prompt: the first observation, and unless actions are texts, how to answer. Actions: any text fills a field of type
    string. Of a field with listed values (an enumeration, truth values, bounded integers, or ``legal_actions`` in the
    observations), the model writes one of them, and nothing else. Any other action is written as JSON. If the server
    refuses an action, or the text is none, the error message is the reply. Score: the environment's reward of the turn;
    ``done`` terminates. If the server or the environment fails, the episode is broken off with a warning, and left out
    of the update.

    Environments whose actions call tools (MCP: ``CallToolAction``) are played by `textenv.extras.openenv.tools`.

    Args:
        split: ignored, as the protocol has none.
        tokenizer: the policy's tokenizer.
        url: address of the server, such as ``http://localhost:8000``.
        action_field: field of the action that the answer fills; by default, the only one that is required, or the only
            one. The others keep their defaults.
        actions: values of this field; by default, those of its schema or of the first observation.
        describe: function from an observation (a dictionary of its fields) to a text, or its name,
            ``file.py:function``; by default its only field, if it is a text, else JSON.
        history: see `StringGames`.
        timeout: seconds to wait for an answer, and for a server to return.

    Raises:
        ConnectionError: if no OpenEnv server answers at the address.
        ValueError: on a wrong address, or actions that call tools or are not fields with names.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        tokenizer: PreTrainedTokenizerBase,
        url: str = "",
        action_field: str = "",
        actions: Sequence[object] | None = None,
        describe: str | Describe | None = None,
        history: int | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        # How the answer becomes an action, and an observation a text
        server = Server(url, timeout=timeout)
        if calls_tools(server.action_schema):
            raise ValueError(
                "the environment's actions call tools (MCP), which is played as a vector environment only: use "
                f'gymnasium.make_vec("textenv/OpenEnv-v0", url={url!r}, num_envs=...)'
            )
        form = find_form(server.action_schema, action_field=action_field, actions=actions)
        if form.defaults:
            _log.warning(
                "%s: the answer is the action's field %s; %s keep their defaults (action_field= names another field)",
                url,
                form.field,
                ", ".join(form.defaults),
            )
        if form.kind == "JSON" and form.field:
            form = _with_legal_actions(form, server)
        description: Any = as_text
        if isinstance(describe, str):
            description = load_function(describe)
        elif describe is not None:
            description = describe

        # The games, and their limits
        super().__init__(partial(_Episode, server, form, description), tokenizer=tokenizer, history=history)
        self._map = ThreadPoolExecutor(MAX_SESSIONS_AT_ONCE).map
        length = min(1024, tokenizer.model_max_length)
        self.limits: dict[str, Any] = {
            "max_prompt_tokens": length // 2,
            "max_new_tokens": 32,
            "max_turns": 20,
            "max_length": length,
        }
        if form.values:
            words = list(form.values)
            rule = WordRule(words, tokenizer, ends=turn_ends(tokenizer).ids, available=_legal_words)
            room = length - rule.num_tokens
            self.limits |= {"allowed": rule, "max_new_tokens": rule.num_tokens, "max_prompt_tokens": room}


class _Episode(gymnasium.Env[str, str]):
    """Episodes on a server, as an environment of strings.

    Args:
        server: the server.
        form: how a text becomes an action.
        describe: function from the fields of an observation to a text.
    """

    def __init__(self, server: Server, form: ActionForm, describe: Describe) -> None:
        self.observation_space = text_space(1_000_000)
        self.action_space = self.observation_space
        self.session = server.session()
        self._form = form
        self._describe = describe
        self.legal_words: tuple[str, ...] | None = None
        """Texts of the values that the action may have now; None: all."""

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        super().reset(seed=seed)
        text = self._observe(self.session.reset(seed))
        if self._form.instructions:
            text = f"{text}\n{self._form.instructions}"
        return text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        try:
            data = self.session.step(self._form.action(action))
            return self._observe(data), float(data["reward"] or 0), bool(data["done"]), False, {}
        except ActionRefusedError as error:
            return str(error), 0.0, False, False, {}
        except Exception as error:  # the other side may send anything
            _log.warning("%s failed, the episode is broken off: %r", self.session.address, error)
            return "", 0.0, False, True, {FAILED_KEY: True}

    def close(self) -> None:
        self.session.close()

    def _observe(self, data: Data) -> str:
        """Return an observation as a text, and note the actions that are legal now."""
        fields = observation_fields(data)
        legal = fields.get(LEGAL)
        self.legal_words = None
        if self._form.values and isinstance(legal, list) and legal and not data["done"]:
            words = tuple(word for word, value in self._form.values.items() if value in legal)
            if len(words) < len(legal):
                raise ValueError(
                    f"the observation has the {LEGAL} {legal!r:.200}, more than those of the first observation: name "
                    "all, actions=[...]"
                )
            self.legal_words = words
        return self._describe(fields)


def as_text(fields: dict[str, Any]) -> str:
    """Return an observation's only text, if its other fields are empty; else all fields as JSON."""
    texts = [value for value in fields.values() if isinstance(value, str)]
    others = [value for value in fields.values() if not isinstance(value, str) and value not in EMPTY]
    if len(texts) == 1 and not others:
        return texts[0]
    return json.dumps(fields, ensure_ascii=False)


def _with_legal_actions(form: ActionForm, server: Server) -> ActionForm:
    """Return a form whose values are the legal actions of a first observation, if it lists them."""
    session = server.session()
    legal = observation_fields(session.reset(0)).get(LEGAL)
    session.close()
    if not isinstance(legal, list) or not legal:
        return form
    values = {json.dumps(value): value for value in legal}
    return ActionForm("value", form.field, form.schema, values, form.defaults)


def _legal_words(turn: Turn) -> tuple[str, ...] | None:
    """Return the texts of the actions that are legal in a turn; None: all."""
    return turn.prompt.state.env.legal_words
