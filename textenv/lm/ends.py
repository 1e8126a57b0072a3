"""What ends a model's turn: token ids and texts.

Environments, `LMPolicy.generate`, ``algos serve``, engines that generate text, and `check_text_env` ask here, so that
they agree.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from textenv.lm.loading import plain_model, setting, vocabulary_size
from textenv.prompts.messages import Message
from textenv.prompts.special_tokens import special_tokens
from textenv.prompts.tokenize import render, text_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_ANSWER = "\U000f0002"
"""A private-use character as the content of an assistant message: the template's text after it ends the message."""


class TurnEnds(NamedTuple):
    """What ends a model's own turn."""

    ids: tuple[int, ...]
    """Token ids that end a turn, each by itself; the tokenizer's EOS comes first, if there is one."""
    texts: tuple[str, ...] = ()
    """Texts that end a turn."""


def as_stops(stop: Iterable[str | int] | str | int) -> tuple[str | int, ...]:
    """Return the ends in an argument ``stop``, one or several.

    Raises:
        TypeError: if it is something else.
    """
    if isinstance(stop, (str, int, np.integer)):
        return (stop,)
    if isinstance(stop, Mapping) or not isinstance(stop, Iterable):
        raise TypeError(f"stop is {stop!r:.200}, expected texts and token ids, such as ['.', 5]")
    return tuple(stop)


class _EndSettings(NamedTuple):
    """What a ``generation_config`` says about the end of a text."""

    eos: object = None
    """The ``eos_token_id``: an id, a list of ids, or None; from a file it is unchecked, so it may be anything."""
    stop_strings: object = None
    """A text, a list of texts, or None; from a file it is unchecked, too."""
    by_default: bool = False
    """True if ``eos`` is the default of a configuration's class, and nobody's choice."""


_MODEL_CONFIGS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[GenerationConfig | None, PreTrainedConfig]] = (
    WeakKeyDictionary()
)
"""``generation_config`` and configuration of a tokenizer's model, for environments, which get no model."""
_FILE_SETTINGS: WeakKeyDictionary[PreTrainedTokenizerBase, _EndSettings] = WeakKeyDictionary()
"""Settings from the ``generation_config.json`` beside the files of a tokenizer."""
_TURN_ENDS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, TurnEnds]] = WeakKeyDictionary()
"""What `turn_ends` depends on, and the result; cached, because rules for ``allowed=`` ask at every token."""


def remember_model(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Note the model to which a tokenizer belongs, so that `turn_ends` of the tokenizer has the model's ids."""
    _MODEL_CONFIGS[tokenizer] = (setting(model, "generation_config"), model.config)


def turn_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> TurnEnds:
    """Find what ends a model's turn.

    These are the tokenizer's EOS; every id of ``eos_token_id`` and every text of ``stop_strings`` in the model's
    ``generation_config``; and the chat template's own end of an assistant message.

    Args:
        tokenizer: the model's tokenizer.
        model: the model. None: the one that was made with this tokenizer (`remember_model`), or else the
            ``generation_config.json`` in the folder from which the tokenizer was loaded, if there is one on this disk.
    """
    # The model's settings
    if model is not None:
        settings = _settings_of(setting(model, "generation_config"), model.config)
    elif tokenizer in _MODEL_CONFIGS:
        settings = _settings_of(*_MODEL_CONFIGS[tokenizer])
    else:
        settings = _settings_beside(tokenizer)

    # Without a change since the last call, the same result
    state = (len(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template, settings)
    cached = _TURN_ENDS.get(tokenizer)
    if cached is not None:
        cached_state, cached_ends = cached
        if cached_state == state:
            return cached_ends

    # Each end once, in this order
    from_template = template_end(tokenizer)
    ids = [*_eos(tokenizer), *_ids_in(settings, tokenizer), *from_template.ids]
    texts = [*_texts_in(settings), *from_template.texts]
    ends = TurnEnds(tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(texts)))
    _TURN_ENDS[tokenizer] = (state, ends)
    return ends


def write_end_ids(ids: Sequence[int], model: PreTrainedModel, folder: Path) -> None:
    """Write the ids that end a turn into the ``generation_config.json`` of a saved model, for other programs.

    They know no other ends: without this, `generate` of `transformers` goes on after a chat template's end. The model
    itself stays as it is. If its ``generation_config`` lists just these ids, the file stays, too. Texts that end a turn
    are not written: with ``stop_strings`` in the file, `generate` raises an error for everyone who does not give it the
    tokenizer.

    Args:
        ids: all ids that end a turn; the first one is also what `generate` pads with, if there is no padding token.
        model: the model, with or without an adapter.
        folder: where it was saved.
    """
    generation = setting(plain_model(model), "generation_config")
    if generation is None:
        return
    listed = [token for token in _as_list(generation.eos_token_id) if token is not None]
    has_all = all(token in listed for token in ids)
    has_no_other = all(token in ids for token in listed)
    if has_all and has_no_other:
        return

    written = copy.deepcopy(generation)
    written.eos_token_id = list(ids) or None
    written._from_model_config = False  # they are no default of a configuration's class
    written.save_pretrained(folder)


def remove_end_ids(ids: Sequence[int], model: PreTrainedModel) -> None:
    """Remove ids from the ``eos_token_id`` of a loaded model's ``generation_config``, if they are there."""
    generation = setting(plain_model(model), "generation_config")
    if generation is not None and ids:
        listed = _as_list(generation.eos_token_id)
        own_ids = [token for token in listed if token not in ids]
        generation.eos_token_id = own_ids or None


def closing_ids(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[int]:
    """Return the token ids that close an answer: in a chat those of its template, else EOS; none without either."""
    if chat:
        from_template = template_end(tokenizer)
        if from_template.ids:
            return [from_template.ids[0]]
        if from_template.texts:
            return text_ids(from_template.texts[0], tokenizer)
    return _eos(tokenizer)


def ids_after_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that the chat template writes after the end of the last assistant message, such as a line break."""
    text = _text_after_answer(tokenizer)
    end = _added_token_at_start(text, tokenizer)
    text_after_end = text.removeprefix(end)
    if not end or not text_after_end:
        return []
    return list(tokenizer(text_after_end, add_special_tokens=False, verbose=False)["input_ids"])


def template_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    """Find how the chat template ends an assistant message: by a token, by a text, or not at all.

    A template that writes nothing after the last message may end it by the token that begins the next one (GLM). White
    space before the end is not part of it: a model may write it or not.
    """
    text = _text_after_answer(tokenizer)
    if text:
        token = _added_token_at_start(text, tokenizer)
        if token:
            return TurnEnds((_added_tokens(tokenizer)[token],))
        return TurnEnds((), (text.splitlines()[0].rstrip(),))

    # Nothing ends the last message: look at the beginning of another one after it
    ids = []
    for role in ("user", "tool"):
        token = _added_token_at_start(_text_after_answer(tokenizer, following=role), tokenizer)
        if token and _added_tokens(tokenizer)[token] != tokenizer.bos_token_id:
            ids.append(_added_tokens(tokenizer)[token])
    return TurnEnds(tuple(dict.fromkeys(ids)))


def _eos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the id of EOS; an empty list if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        return []
    return [int(tokenizer.eos_token_id)]


def _settings_of(generation: GenerationConfig | None, config: PreTrainedConfig) -> _EndSettings:
    """Read a model's ``generation_config``; ``config`` is the model's configuration."""
    if generation is None:
        return _EndSettings()
    eos = generation.eos_token_id
    by_default = bool(generation._from_model_config) and not isinstance(eos, (list, tuple))
    if eos != setting(config.get_text_config(), "eos_token_id"):
        by_default = False
    return _EndSettings(eos, generation.stop_strings, by_default)


def _settings_beside(tokenizer: PreTrainedTokenizerBase) -> _EndSettings:
    """Read the ``generation_config.json`` in a tokenizer's folder, or in the hub's cache, if there is a valid one."""
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    if tokenizer in _FILE_SETTINGS:
        return _FILE_SETTINGS[tokenizer]

    content: object = None
    if tokenizer.name_or_path:
        with suppress(OSError, ValueError, RecursionError):  # the loader of the model explains what is wrong
            path = cached_file(tokenizer.name_or_path, GENERATION_CONFIG_NAME, local_files_only=True)
            content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        content = {}

    eos = content.get("eos_token_id")
    by_default = bool(content.get("_from_model_config")) and not isinstance(eos, list)
    _FILE_SETTINGS[tokenizer] = _EndSettings(eos, content.get("stop_strings"), by_default)
    return _FILE_SETTINGS[tokenizer]


def _ids_in(settings: _EndSettings, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of ``eos_token_id`` that are in the vocabulary.

    A model made from a configuration has the default of the configuration's class there (2 for Llama). With another
    tokenizer this id may be any token, such as ``#``. So a default counts only if it is a special token, and neither
    BOS, padding nor the unknown token.
    """
    ids = []
    for token in _as_list(settings.eos):
        if type(token) is int and 0 <= token < vocabulary_size(tokenizer):
            ids.append(token)
    if not settings.by_default:
        return ids
    with_other_use = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    special_ids = special_tokens(tokenizer).values()
    return [token for token in ids if token in special_ids and token not in with_other_use]


def _texts_in(settings: _EndSettings) -> list[str]:
    """Return the texts of ``stop_strings``."""
    return [text for text in _as_list(settings.stop_strings) if isinstance(text, str) and text]


def _as_list(value: object) -> list[object]:
    """Return a list or tuple as a list, and anything else as its only entry."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


def _text_after_answer(tokenizer: PreTrainedTokenizerBase, *, following: str = "") -> str:
    """Return what the chat template writes after an assistant's content, without white space before it.

    Args:
        tokenizer: tokenizer with a chat template, or without: then the text is empty.
        following: role of a message after the answer; none if it is empty.
    """
    if not tokenizer.chat_template:
        return ""
    chat: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
    if following:
        chat.append({"role": following, "content": "."})
    # Some templates refuse a chat without a system message
    system: Message = {"role": "system", "content": "."}
    for beginning in ([], [system]):
        try:
            rendered = render([*beginning, *chat], tokenizer, add_generation_prompt=False)
        except ValueError:  # the template takes no such chat
            continue
        if _ANSWER not in rendered:
            return ""
        _, _, text_after_answer = rendered.rpartition(_ANSWER)
        return text_after_answer.lstrip()
    return ""


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of special tokens and of other tokens that were added to the vocabulary, by their spelling."""
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    return added | special_tokens(tokenizer)


def _added_token_at_start(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the longest special or added token with which a text begins; empty if it begins with none."""
    starts = [token for token in _added_tokens(tokenizer) if token.strip() and text.startswith(token)]
    return max(starts, key=len, default="")
