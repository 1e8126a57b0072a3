"""Variables of chat templates, such as ``enable_thinking``: written into the tokenizer's template as its defaults.

The template is the one thing that goes with a tokenizer everywhere: into environments, into the files of a run, into
other servers. So what a model is trained on is what it is asked with later, whoever renders the messages.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from textenv.prompts.special_tokens import check_unicode, first_special_token, strings

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers import PreTrainedTokenizerBase

ARGUMENT = "chat_template_kwargs"
"""Name of the argument that sets the variables, as in TRL and vLLM."""
MAX_DEPTH = 20
"""Largest number of lists and objects inside one another in a value."""
_DEFAULTS = re.compile(rf"\A\{{# {ARGUMENT} (.*?) #\}}.*\n")
"""The first line of a template with defaults: a comment that has them as JSON, and the statements that set them."""
_FUNCTIONS = {"raise_exception", "strftime_now"}
"""Functions that `transformers` gives to every template."""


def set_template_variables(tokenizer: PreTrainedTokenizerBase, variables: object) -> None:
    """Write default values of variables into a tokenizer's chat template; defaults that were set earlier are replaced.

    From then on the tokenizer's ``apply_chat_template`` renders as with these values as its arguments, here and in any
    other program. Arguments of a call still come first.

    Args:
        tokenizer: tokenizer with a chat template, which is changed.
        variables: mapping from names to values of JSON. None, or an empty mapping, changes nothing.

    Raises:
        ValueError: as `check_template_variables`.

    Example:
        >>> set_template_variables(tokenizer, {"enable_thinking": False})  # doctest: +SKIP
    """
    if variables is None or variables == {}:
        return
    defaults = check_template_variables(variables, tokenizer)

    # Statements on one line, behind which transformers' templates leave out the line break
    comment = json.dumps(defaults).replace("#", "\\u0023")
    line = f"{{# {ARGUMENT} {comment} #}}"
    for name, value in defaults.items():
        line += f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"

    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):  # several templates, by name
        tokenizer.chat_template = {name: f"{line}\n{_without_defaults(text)}" for name, text in template.items()}
    else:
        tokenizer.chat_template = f"{line}\n{_without_defaults(str(template))}"


def template_defaults(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the variables that `set_template_variables` has written into a tokenizer's chat template."""
    for text in _templates(tokenizer):
        match = _DEFAULTS.match(text)
        if match is not None:
            return dict(json.loads(match[1]))
    return {}


def check_template_variables(variables: object, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return variables for a tokenizer's chat template.

    Raises:
        ValueError: if they are no mapping of names to values of JSON, if the tokenizer has no template, if the template
            does not read one of them, or if one spells a special token.
    """
    if not isinstance(variables, Mapping):
        raise ValueError(
            f"{ARGUMENT} is {variables!r:.200}, expected variables of the chat template with their values, such as "
            "{'enable_thinking': False}"
        )
    if not tokenizer.chat_template:
        raise ValueError(
            f"{ARGUMENT} is {dict(variables)!r:.200}, but the tokenizer has no chat template that could read it: set "
            "tokenizer.chat_template, or leave it out"
        )

    # Names
    refuse_own_arguments(variables, where=ARGUMENT)
    read = variables_read(tokenizer)
    unread = sorted(str(name) for name in variables if name not in read)
    if unread:
        readable = ", ".join(sorted(read)) or "no variables"
        raise ValueError(
            f"{ARGUMENT} has {', '.join(unread)}, which the chat template never reads; it reads {readable}: correct "
            "the name, or leave it out"
        )

    # Values
    for name, value in variables.items():
        if not _is_json(value):
            raise ValueError(
                f"{ARGUMENT} has {name}={value!r:.200}, expected a value of JSON: true or false, a finite number, a "
                "text, null, or a list or object of these"
            )
    check_unicode(variables)
    for text in strings(variables):
        token = first_special_token(text, tokenizer)
        if token:
            raise ValueError(
                f"{ARGUMENT} has the text {text!r:.200}, which spells the special token {token!r}: remove it"
            )
    return {str(name): value for name, value in variables.items()}


def refuse_own_arguments(variables: Mapping[str, object], *, where: str) -> None:
    """Raise a ValueError if variables have names of what a template always gets, or of ``apply_chat_template`` itself.

    Args:
        variables: the variables by name.
        where: what has them, for the error.
    """
    reserved = sorted(str(name) for name in variables if name in _own_arguments())
    if reserved:
        raise ValueError(
            f"{where} has {', '.join(reserved)}, expected variables of the template only: messages, tools and special "
            "tokens are given to every template, and the last message decides whether an answer begins or goes on"
        )


def variables_read(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the names of the variables that a tokenizer's chat template reads and that may be set.

    Raises:
        ValueError: if the template is no valid one.
    """
    names: set[str] = set()
    for text in _templates(tokenizer):
        names |= _undeclared_variables(_without_defaults(text))
    return names - _own_arguments() - _FUNCTIONS


@functools.cache
def _own_arguments() -> frozenset[str]:
    """Return names of what a template always gets, and of the arguments of ``apply_chat_template``."""
    from transformers import PreTrainedTokenizerBase

    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    special_tokens = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    return frozenset({"messages", *arguments, *special_tokens}) - {"kwargs"}


@functools.lru_cache(maxsize=64)
def _undeclared_variables(template: str) -> frozenset[str]:
    """Return the names that a template reads without having set them; raise a ValueError if it cannot be read."""
    from jinja2 import TemplateSyntaxError, meta

    try:
        tree = _environment().parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"tokenizer.chat_template is no valid template: {error}") from error

    # A name that is set in a branch only counts as undeclared; if it is set before it is read, the template means a
    # variable of its own
    first_uses: dict[str, str] = {}
    for name in _names_in_order(tree):
        first_uses.setdefault(name.name, name.ctx)
    undeclared = meta.find_undeclared_variables(tree)
    return frozenset(name for name in undeclared if first_uses.get(name, "load") == "load")


def _names_in_order(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield the names in a template in the order in which they are used."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):  # what is assigned is read first
        children.reverse()
    for child in children:
        yield from _names_in_order(child)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment that parses what `transformers` parses: also ``break`` and ``{% generation %}`` blocks."""
    from jinja2 import parser
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Blocks that mark an answer; their content is read like any other."""

        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"])


def _templates(tokenizer: PreTrainedTokenizerBase) -> Iterable[str]:
    """Return the templates of a tokenizer, which may have several by name."""
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        return template.values()
    return [str(template)] if template else []


def _without_defaults(template: str) -> str:
    """Return a template without the line that `set_template_variables` has written."""
    return _DEFAULTS.sub("", template)


def _is_json(value: object, *, depth: int = 0) -> bool:
    """Return True for what JSON can hold, up to `MAX_DEPTH` levels of lists and objects."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_json(item, depth=depth + 1) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_json(item, depth=depth + 1) for item in value)
    return value is None or isinstance(value, (str, int))


def _literal(value: object) -> str:
    """Return a value of JSON as a literal of a template."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        items = [f"{_literal(name)}: {_literal(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        items = [_literal(item) for item in value]
        return f"[{', '.join(items)}]"
    return json.dumps(value, ensure_ascii=False)
