"""`Guided`: constrained decoding by a JSON schema, a regular expression or a grammar, as an ``allowed=`` rule."""

import json
from typing import Any, Literal

import numpy as np

from textenv.envs.turn import Turn
from textenv.lm.ends import turn_ends
from textenv.lm.loading import vocabulary_size
from textenv.optional import package


class Guided:
    """Rule for ``allowed=``: the tokens after which a turn can still become a text of a grammar (by ``llguidance``).

    ``form`` is ``"json_schema"`` (JSON without white space unless its ``x-guidance`` allows it), ``"regex"`` (for the
    whole turn) or ``"lark"``, as in ``allowed=Guided("regex", "yes|no")``. What ends the model's turns, such as EOS, is
    allowed where the text is complete, and only there. A turn that reaches ``max_new_tokens`` is cut off: bound the
    texts (``maxLength``, ``{1,20}``). A ValueError says why llguidance refuses a grammar or, at the first token, a
    tokenizer.
    """

    def __init__(self, form: Literal["json_schema", "regex", "lark"], grammar: Any) -> None:
        llguidance = package("llguidance", "guidance")
        if form == "json_schema" and isinstance(grammar, dict):
            lark = "start: %json " + json.dumps({"x-guidance": {"whitespace_flexible": False}} | grammar)
        elif form in ("regex", "lark") and isinstance(grammar, str):
            lark = grammar if form == "lark" else f"start: /{llguidance.regex_to_lark(grammar)}/"
        else:
            expected = "json_schema and a dict, or regex or lark and a text"
            raise ValueError(f"Got ({form!r}, {grammar!r:.60}): expected {expected}")
        self.grammar = '%llguidance {"no_forcing": true}\n' + lark  # else one spelling of a forced text is allowed
        if message := llguidance.LLMatcher.validate_grammar(self.grammar):
            raise ValueError(f"llguidance refuses the {form} {grammar!r:.200}: {message}")
        self._tokenizer: Any = None

    def __call__(self, turn: Turn) -> np.ndarray:
        """Return the allowed ids, int64."""
        if turn.tokenizer is not self._tokenizer:
            self._n = vocabulary_size(turn.tokenizer)
            tokens = package("llguidance.hf", "guidance").from_tokenizer(turn.tokenizer, self._n)
            self._matcher = package("llguidance", "guidance").LLMatcher(tokens, self.grammar, log_level=0)
            self._tokenizer = turn.tokenizer
        self._matcher.reset()
        if not self._matcher.consume_tokens(turn.completion_ids):  # half a microsecond a token
            self._tokenizer = None  # a matcher stays in its error
            raise ValueError(f"{turn.completion!r:.200} does not fit the grammar: {self._matcher.get_error():.200}")
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._n, bitorder="little")

        # Where llguidance allows EOS, the turn may end in any way
        eos = turn.tokenizer.eos_token_id
        if eos is not None and mask[eos]:
            mask[list(turn_ends(turn.tokenizer).ids)] = 1
        return np.flatnonzero(mask)
