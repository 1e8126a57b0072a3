"""`Guided`: constrained decoding by a JSON schema, a regular expression or a grammar, as an ``allowed=`` rule."""

import json
from typing import Literal

import numpy as np

from textenv.envs.turn import Turn
from textenv.lm.ends import turn_ends
from textenv.lm.loading import vocabulary_size
from textenv.optional import package


class Guided:
    """Rule for ``allowed=``: the tokens after which a turn can still become a text of a grammar (by ``llguidance``).

    The tokens that end the model's turns, such as EOS, are allowed where the text is complete, and only there. A turn
    that reaches ``max_new_tokens`` is cut off, so bound the length of the texts (``maxLength``, ``{1,20}``).

    Args:
        form: ``"json_schema"`` (JSON without white space, unless the schema's ``x-guidance`` allows it), ``"regex"``
            (which the whole turn matches) or ``"lark"``.
        grammar: the schema, a dictionary; or the regular expression or grammar, a text.

    Raises:
        ValueError: if llguidance refuses the grammar, or, at the first token, the tokenizer.

    Example:
        >>> rule = Guided("regex", "yes|no")  # doctest: +SKIP
    """

    def __init__(self, form: Literal["json_schema", "regex", "lark"], grammar: object) -> None:
        llguidance = package("llguidance", "guidance")

        # A lark grammar
        if form == "json_schema" and isinstance(grammar, dict):
            schema = {"x-guidance": {"whitespace_flexible": False}} | grammar
            lark = f"start: %json {json.dumps(schema)}"
        elif form == "regex" and isinstance(grammar, str):
            lark = f"start: /{llguidance.regex_to_lark(grammar)}/"
        elif form == "lark" and isinstance(grammar, str):
            lark = grammar
        else:
            expected = "json_schema and a dict, or regex or lark and a text"
            raise ValueError(f"Got ({form!r}, {grammar!r:.60}): expected {expected}")

        # Without `no_forcing`, only one way to split a forced text into tokens is allowed
        self.grammar = '%llguidance {"no_forcing": true}\n' + lark
        message = llguidance.LLMatcher.validate_grammar(self.grammar)
        if message:
            raise ValueError(f"llguidance refuses the {form} {grammar!r:.200}: {message}")
        self._tokenizer: object = None

    def __call__(self, turn: Turn) -> np.ndarray:
        """Return the allowed ids, int64 ``[n]``."""
        # The matcher of this tokenizer
        if turn.tokenizer is not self._tokenizer:
            self._num_tokens = vocabulary_size(turn.tokenizer)
            tokens = package("llguidance.hf", "guidance").from_tokenizer(turn.tokenizer, self._num_tokens)
            self._matcher = package("llguidance", "guidance").LLMatcher(tokens, self.grammar, log_level=0)
            self._tokenizer = turn.tokenizer

        # The tokens that the grammar allows after those of the turn
        self._matcher.reset()
        if not self._matcher.consume_tokens(turn.completion_ids):  # half a microsecond a token
            self._tokenizer = None  # a matcher stays in its error
            raise ValueError(f"{turn.completion!r:.200} does not fit the grammar: {self._matcher.get_error():.200}")
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._num_tokens, bitorder="little")

        # Where llguidance allows EOS, the turn may end in any way
        eos = turn.tokenizer.eos_token_id
        if eos is not None and mask[eos]:
            mask[list(turn_ends(turn.tokenizer).ids)] = 1
        return np.flatnonzero(mask)
