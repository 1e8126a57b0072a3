"""How a text becomes an action, by the action's JSON schema."""

import pytest

from textenv.extras.openenv.actions import calls_tools, find_form
from textenv.extras.openenv.server import ActionRefusedError

TEXT, OBJECT, INTEGER = {"type": "string"}, {"type": "object"}, {"type": "integer"}
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DIRECTIONS = {"enum": ["UP", "DOWN"], "type": "string"}


def schema(required=(), **fields):
    return {"properties": fields, "required": list(required)}


@pytest.mark.parametrize(
    ("action", "kind", "field", "values"),
    [
        (schema(text=TEXT, metadata=OBJECT), "text", "text", []),
        (schema(text=OPTIONAL_TEXT), "text", "text", []),
        (schema(text=TEXT, kind={"const": "say", "type": "string"}), "text", "text", []),
        (schema(["text"], text=TEXT, number=INTEGER), "text", "text", []),
        (schema(way=DIRECTIONS), "value", "way", ["UP", "DOWN"]),
        (schema(way={"$ref": "#/$defs/Way"}) | {"$defs": {"Way": DIRECTIONS}}, "value", "way", ["UP", "DOWN"]),
        (schema(sure={"type": "boolean"}), "value", "sure", ["true", "false"]),
        (schema(n=INTEGER | {"minimum": 2, "maximum": 4}), "value", "n", ["2", "3", "4"]),
        (schema(n=INTEGER | {"minimum": 2}), "JSON", "n", []),
        (schema(n=INTEGER | {"minimum": 0, "maximum": 10**9}), "JSON", "n", []),
        (schema(values={"type": "array"}), "JSON", "values", []),
        (schema(text=TEXT, options=OBJECT), "JSON", "", []),
        (schema(["text", "n"], text=TEXT, n=INTEGER), "JSON", "", []),
    ],
)
def test_the_form_follows_from_the_schema(action, kind, field, values):
    form = find_form(action)
    assert (form.kind, form.field, list(form.values)) == (kind, field, values)
    assert bool(form.instructions) == (kind != "text")


@pytest.mark.parametrize(
    ("action", "options", "text", "expected"),
    [
        (schema(text=TEXT), {}, " a b\n", {"text": " a b\n"}),
        (schema(way=DIRECTIONS), {}, " UP", {"way": "UP"}),
        (schema(n=INTEGER), {}, "17", {"n": 17}),
        (schema(n=INTEGER), {"actions": [1, 2]}, "2", {"n": 2}),
        (schema(sure={"type": "boolean"}), {}, "true", {"sure": True}),
        (schema(values={"type": "array"}), {}, "[0.5, -1]", {"values": [0.5, -1]}),
        (schema(text=TEXT, n=INTEGER), {}, '{"text": "a", "n": 1}', {"text": "a", "n": 1}),
        (schema(text=TEXT, n=INTEGER), {"action_field": "text"}, "a", {"text": "a"}),
        (schema(text=TEXT, n=INTEGER), {"action_field": "n", "actions": [3]}, "3", {"n": 3}),
    ],
)
def test_a_text_becomes_an_action(action, options, text, expected):
    assert find_form(action, **options).action(text) == expected


@pytest.mark.parametrize(
    ("action", "text", "words"),
    [
        (schema(way=DIRECTIONS), "up", "expected one of: UP, DOWN"),
        (schema(n=INTEGER), "one", "expected JSON"),
        (schema(text=TEXT, n=INTEGER), "[1]", "expected a JSON object"),
    ],
)
def test_a_text_that_is_no_action_is_refused_in_words(action, text, words):
    with pytest.raises(ActionRefusedError, match=words):
        find_form(action).action(text)


@pytest.mark.parametrize(
    ("action", "options", "words"),
    [
        ({"oneOf": [schema(text=TEXT)]}, {}, "expected one kind of action, with named fields"),
        (schema(text=TEXT), {"action_field": "words"}, "action_field is 'words'.*fields text"),
        (schema(["n"], text=TEXT, n=INTEGER), {"action_field": "text"}, "alone required"),
        (schema(text=TEXT, n=INTEGER), {"actions": [1]}, "name one of them, action_field="),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(action, options, words):
    with pytest.raises(ValueError, match=words):
        find_form(action, **options)


@pytest.mark.parametrize("actions", ["film", {"film"}])
def test_actions_are_a_list(actions):
    """A text was read as a list of its letters."""
    with pytest.raises(TypeError, match="expected a list of values"):
        find_form(schema(text=TEXT), actions=actions)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (schema(type={"const": "call_tool"}, name=TEXT), True),
        (schema(["tool_name"], tool_name=TEXT), True),
        (schema(text=TEXT), False),
        (None, False),
    ],
)
def test_actions_that_call_tools_are_known_by_their_schema(action, expected):
    assert calls_tools(action) is expected
