"""What ends a model's turn: token ids and texts. All who need to know it ask here, so that they agree.

These are environments, `LMPolicy.generate`, ``algos serve``, engines that generate text, and `check_text_env`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from textenv.lm.loading import setting, vocabulary_size
from textenv.prompts.special_tokens import special_tokens
from textenv.prompts.tokenize import render, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANSWER = "\U000f0002"
"""A private-use character as the content of an assistant message: what the template writes after it is its end."""


class TurnEnds(NamedTuple):
    """What ends a model's own turn."""

    ids: tuple[int, ...]
    """Token ids that end a turn, each by itself; the tokenizer's EOS comes first, if there is one."""
    texts: tuple[str, ...] = ()
    """Texts that end a turn."""


class _Written(NamedTuple):
    """What a ``generation_config`` says about the end of a text."""

    eos: Any = None
    """Its ``eos_token_id``: an id, a list of ids, or None; of a file, anything."""
    stop_strings: Any = None
    by_default: bool = False
    """True if it is the default of a configuration's class, and nobody's choice."""


_MODELS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, Any]] = WeakKeyDictionary()
"""``generation_config`` and configuration of a tokenizer's model, for an environment, which is given no model."""
_FILES: WeakKeyDictionary[PreTrainedTokenizerBase, _Written] = WeakKeyDictionary()
"""What stands beside the files of a tokenizer."""
_CACHE: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, TurnEnds]] = WeakKeyDictionary()
"""What `turn_ends` depends on, and its result: rules for ``allowed=`` ask at every token."""


def remember_model(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Note the model to which a tokenizer belongs, so that `turn_ends` of the tokenizer has the model's ids."""
    _MODELS[tokenizer] = setting(model, "generation_config"), model.config


def turn_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> TurnEnds:
    """Find what ends a model's turn.

    These are the tokenizer's EOS; every id of ``eos_token_id`` and every text of ``stop_strings`` in the model's
    ``generation_config``; and the chat template's own end of an assistant message.

    Args:
        tokenizer: the model's tokenizer.
        model: the model. None: the one that was made with this tokenizer (`remember_model`), or else the
            ``generation_config.json`` in the folder from which the tokenizer was loaded, if there is one on this disk.
    """
    if model is not None:
        written = _written(setting(model, "generation_config"), model.config)
    elif tokenizer in _MODELS:
        written = _written(*_MODELS[tokenizer])
    else:
        written = _written_beside(tokenizer)
    state = (len(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template, written)
    cached = _CACHE.get(tokenizer)
    if cached is None or cached[0] != state:
        from_template = template_end(tokenizer)
        ids = [*_eos(tokenizer), *_written_ids(written, tokenizer), *from_template.ids]
        texts = [*_written_texts(written), *from_template.texts]
        cached = state, TurnEnds(tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(texts)))
        _CACHE[tokenizer] = cached
    return cached[1]


def closing_ids(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[int]:
    """Token ids that close an answer: in a chat as its template does, else EOS; empty if there is no such thing."""
    from_template = template_end(tokenizer) if chat else TurnEnds(())
    if from_template.ids:
        return [from_template.ids[0]]
    if from_template.texts:
        return text_ids(from_template.texts[0], tokenizer)
    return _eos(tokenizer)


def ids_after_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that the chat template writes after the end of the last assistant message, such as a line break."""
    text = _text_after_answer(tokenizer)
    token = _added_token_at_start(text, tokenizer)
    rest = text.removeprefix(token) if token else ""
    return list(tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"]) if rest else []


def template_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    """Find how the chat template ends an assistant message: by a token, by a text, or not at all.

    A template that writes nothing after the last message may end it by the token that begins the next one (GLM). White
    space before the end belongs to neither: a model may write it, or not.
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
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _written(generation: Any, config: Any) -> _Written:
    """Read a model's ``generation_config``; ``config`` is the model's configuration."""
    if generation is None:
        return _Written()
    eos = generation.eos_token_id
    by_default = bool(generation._from_model_config) and not isinstance(eos, (list, tuple))
    if eos != setting(config.get_text_config(), "eos_token_id"):
        by_default = False
    return _Written(eos, generation.stop_strings, by_default)


def _written_beside(tokenizer: PreTrainedTokenizerBase) -> _Written:
    """Read the ``generation_config.json`` in a tokenizer's folder, or in the hub's cache, if there is a valid one."""
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    if tokenizer not in _FILES:
        settings = None
        if tokenizer.name_or_path:
            with suppress(OSError, ValueError, RecursionError):  # of a model that cannot be loaded its loader tells
                path = cached_file(tokenizer.name_or_path, GENERATION_CONFIG_NAME, local_files_only=True)
                settings = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            settings = {}
        eos = settings.get("eos_token_id")
        by_default = bool(settings.get("_from_model_config")) and not isinstance(eos, list)
        _FILES[tokenizer] = _Written(eos, settings.get("stop_strings"), by_default)
    return _FILES[tokenizer]


def _written_ids(written: _Written, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of ``eos_token_id`` that are in the vocabulary; never an ordinary token that only a class's default names.

    A model made from a configuration has the default of its class there (2 in Llama's), which may be any token of
    another tokenizer, such as ``#``.
    """
    listed = written.eos if isinstance(written.eos, (list, tuple)) else [written.eos]
    ids = [token for token in listed if type(token) is int and 0 <= token < vocabulary_size(tokenizer)]
    if not written.by_default:
        return ids
    named = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return [token for token in ids if token in special_tokens(tokenizer).values() and token not in named]


def _written_texts(written: _Written) -> list[str]:
    listed = written.stop_strings if isinstance(written.stop_strings, (list, tuple)) else [written.stop_strings]
    return [text for text in listed if isinstance(text, str) and text]


def _text_after_answer(tokenizer: PreTrainedTokenizerBase, *, following: str = "") -> str:
    """Return what the chat template writes after an assistant's content, without white space before it.

    Args:
        tokenizer: tokenizer with a chat template, or without: then the text is empty.
        following: role of a message after the answer; none if it is empty.
    """
    if not tokenizer.chat_template:
        return ""
    chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
    if following:
        chat.append({"role": following, "content": "."})
    # Some templates refuse a chat without a system message
    for beginning in ([], [{"role": "system", "content": "."}]):
        try:
            rendered = render([*beginning, *chat], tokenizer, add_generation_prompt=False)
        except ValueError:  # the template takes no such chat
            continue
        _, shown, after = rendered.rpartition(_ANSWER)
        return after.lstrip() if shown else ""
    return ""


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of special tokens and of other tokens that were added to the vocabulary, by their spelling."""
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    return added | special_tokens(tokenizer)


def _added_token_at_start(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the longest special or added token with which a text begins; empty if it begins with none."""
    starts = [token for token in _added_tokens(tokenizer) if token.strip() and text.startswith(token)]
    return max(starts, key=len, default="")
