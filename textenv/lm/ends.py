"""What ends a model's turn: token ids and texts. All who need to know it ask here, so that they agree.

These are environments, `LMPolicy.generate`, ``algos serve``, engines that generate text, and `check_text_env`.
"""

from __future__ import annotations

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


class _Source(NamedTuple):
    """Where a model says which ids end its texts."""

    generation: Any
    """Its ``generation_config``; None if it has none."""
    config: Any = None
    """The model's own configuration; None if only its folder is known."""


_SOURCES: WeakKeyDictionary[PreTrainedTokenizerBase, _Source] = WeakKeyDictionary()
"""Models by their tokenizers, for an environment, which is given a tokenizer only."""


_CACHE: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, TurnEnds]] = WeakKeyDictionary()
"""What `turn_ends` depends on, and its result: rules for ``allowed=`` ask at every token."""


def remember_model(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Note the model to which a tokenizer belongs, so that `turn_ends` of the tokenizer has the model's ids."""
    _SOURCES[tokenizer] = _source_of(model)


def turn_ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> TurnEnds:
    """Find what ends a model's turn.

    These are the tokenizer's EOS; every id of ``eos_token_id`` and every text of ``stop_strings`` in the model's
    ``generation_config``; and the chat template's own end of an assistant message.

    Args:
        tokenizer: the model's tokenizer.
        model: the model. None: the one that was made with this tokenizer (`remember_model`), or else the
            ``generation_config.json`` in the folder from which the tokenizer was loaded, if there is one on this disk.
    """
    source = _beside(tokenizer) if model is None else _source_of(model)
    generation = source.generation
    written = None if generation is None else (generation.eos_token_id, generation.stop_strings)
    of_config = None if source.config is None else setting(source.config.get_text_config(), "eos_token_id")
    state = (len(tokenizer), tokenizer.eos_token, tokenizer.chat_template, written, of_config)
    cached = _CACHE.get(tokenizer)
    if cached is None or cached[0] != state:
        from_template = template_end(tokenizer)
        ids = [*_eos(tokenizer), *_generation_ids(source, tokenizer), *from_template.ids]
        texts = [*_generation_texts(source), *from_template.texts]
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
        if token and token != tokenizer.bos_token:
            ids.append(_added_tokens(tokenizer)[token])
    return TurnEnds(tuple(dict.fromkeys(ids)))


def _eos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _source_of(model: PreTrainedModel) -> _Source:
    return _Source(setting(model, "generation_config"), model.config)


def _beside(tokenizer: PreTrainedTokenizerBase) -> _Source:
    """Return the model of a tokenizer: the one that is remembered, or what its folder or the hub's cache holds."""
    from transformers import GenerationConfig

    if tokenizer not in _SOURCES:
        generation = None
        if tokenizer.name_or_path:
            try:
                generation = GenerationConfig.from_pretrained(tokenizer.name_or_path, local_files_only=True)
            except (OSError, ValueError, TypeError, RecursionError):
                generation = None  # no such file, or no valid one: the model's loader complains
        _SOURCES[tokenizer] = _Source(generation)
    return _SOURCES[tokenizer]


def _generation_ids(source: _Source, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of ``eos_token_id`` that are in the vocabulary; never an ordinary token that only a class's default names.

    A model made from a configuration has the default of its class there (2 in Llama's), which may be any token of
    another tokenizer, such as ``#``.
    """
    generation = source.generation
    if generation is None:
        return []
    written = generation.eos_token_id
    listed = written if isinstance(written, (list, tuple)) else [written]
    ids = [token for token in listed if isinstance(token, int) and 0 <= token < vocabulary_size(tokenizer)]
    chosen = not generation._from_model_config or isinstance(written, (list, tuple))
    if source.config is not None and written != setting(source.config.get_text_config(), "eos_token_id"):
        chosen = True
    if chosen:
        return ids
    named = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return [token for token in ids if token in special_tokens(tokenizer).values() and token not in named]


def _generation_texts(source: _Source) -> list[str]:
    written = None if source.generation is None else source.generation.stop_strings
    listed = [written] if isinstance(written, str) else written
    return [text for text in listed or () if isinstance(text, str) and text]


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
    try:
        rendered = render(chat, tokenizer, add_generation_prompt=False)
    except ValueError:  # the template takes no such chat
        return ""
    _, shown, after = rendered.rpartition(_ANSWER)
    return after.lstrip() if shown else ""


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of special tokens and of other tokens that were added to the vocabulary, by their spelling."""
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    return added | special_tokens(tokenizer)


def _added_token_at_start(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the longest special or added token with which a text begins; empty if it begins with none."""
    starts = [token for token in _added_tokens(tokenizer) if token.strip() and text.startswith(token)]
    return max(starts, key=len, default="")
