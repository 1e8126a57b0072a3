"""Actions of an OpenEnv environment, read from the model's text by their JSON schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from textenv.extras.openenv.server import ActionRefusedError

TOOL_ACTIONS = ("call_tool", "list_tools")
"""Values of the field ``type`` by which MCP environments know their actions."""
MAX_VALUES = 64
"""Largest number of integers between a minimum and a maximum that are taken as single actions."""
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class ActionForm:
    """How a text becomes an action."""

    kind: Literal["text", "value", "JSON"]
    """``"text"``: the text fills the field. ``"value"``: it names a value of the field. ``"JSON"``: it is the value of
    the field, or without a field the whole action, as JSON."""
    field: str
    """Field of the action; empty: all fields."""
    schema: Schema
    """Schema of the field, or of the action."""
    values: dict[str, object] = dataclasses.field(default_factory=dict)
    """All values of the field by their texts; empty if the schema does not say."""
    defaults: tuple[str, ...] = ()
    """Other fields of the action, which keep their defaults."""

    @property
    def instructions(self) -> str:
        """What the model has to be told about the form of its answer; empty for texts."""
        if self.kind == "text":
            return ""
        if self.values:
            return f"Answer with one of: {', '.join(self.values)}"
        name = f"{self.field} as JSON" if self.field else "a JSON object"
        return f"Answer with {name}: {json.dumps(self.schema, ensure_ascii=False)}"

    def action(self, text: str) -> dict[str, object]:
        """Return the action of a text.

        Raises:
            ActionRefusedError: if it is none.
        """
        if self.kind == "text":
            return {self.field: text}
        if self.values:
            if text.strip() not in self.values:
                raise ActionRefusedError(f"expected one of: {', '.join(self.values)}")
            return {self.field: self.values[text.strip()]}
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ActionRefusedError(f"expected JSON: {error}") from error
        if self.field:
            return {self.field: value}
        if not isinstance(value, dict):
            raise ActionRefusedError("expected a JSON object")
        return value


def calls_tools(schema: object) -> bool:
    """Return True if the actions of an environment call tools (MCP)."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties"), Mapping):
        return False
    fields = schema["properties"]
    has_type = any(isinstance(entry, Mapping) and entry.get("const") in TOOL_ACTIONS for entry in fields.values())
    return has_type or "tool_name" in fields


def find_form(schema: object, *, action_field: str = "", actions: Sequence[object] | None = None) -> ActionForm:
    """Return how a text becomes an action.

    The text fills the field that the caller names, the only one that is required, or the only one that there is.
    If several are required, or none of several, the text is the whole action as JSON.

    Args:
        schema: JSON schema of the environment's action.
        action_field: the field that the caller names; empty: found as above.
        actions: values of the field; None: those of the schema, if it lists them.

    Raises:
        TypeError: if actions are no list.
        ValueError: if there is no such field, other fields are required, or the actions are not fields with names.
    """
    if actions is not None and (isinstance(actions, (str, bytes)) or not isinstance(actions, Sequence)):
        raise TypeError(f"actions is {actions!r:.200}, expected a list of values")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties"), Mapping):
        raise ValueError(f"the action's schema is {schema!r:.300}, expected one kind of action, with named fields")

    # The fields that are not fixed
    fields: dict[str, Schema] = {}
    for name, entry in schema["properties"].items():
        if name != "metadata" and isinstance(entry, Mapping) and "const" not in entry:
            fields[name] = _resolved(entry, schema)
    required = [name for name in schema.get("required", []) if name in fields]

    # The one that the text fills
    chosen = action_field
    if not action_field:
        for names in (required, list(fields)):
            if len(names) == 1:
                chosen = names[0]
                break
    if action_field and (action_field not in fields or {*required} - {action_field}):
        raise ValueError(
            f"action_field is {action_field!r}, and the action has the fields {', '.join(fields)} (required: "
            f"{', '.join(required)}): expected one of them, alone required"
        )
    if not chosen and actions is not None:
        raise ValueError(
            f"actions is {actions!r:.200}, but the action has the fields {', '.join(fields)}: name one of them, "
            "action_field="
        )
    if not chosen:
        return ActionForm("JSON", "", _whole_schema(fields, required))

    # Its values
    entry = fields[chosen]
    listed = _values(entry) if actions is None else list(actions)
    values = {_as_text(value): value for value in listed}
    defaults = tuple(name for name in fields if name != chosen)
    if values:
        return ActionForm("value", chosen, entry, values, defaults)
    if "string" in _types(entry):
        return ActionForm("text", chosen, entry, {}, defaults)
    return ActionForm("JSON", chosen, entry, {}, defaults)


def _resolved(entry: Schema, schema: Schema) -> Schema:
    """Return a field's schema, with the definition to which it refers."""
    reference = entry.get("$ref", "")
    prefix = "#/$defs/"
    if not isinstance(reference, str) or not reference.startswith(prefix):
        return entry
    definition = schema.get("$defs", {}).get(reference.removeprefix(prefix))
    if not isinstance(definition, Mapping):
        return entry
    return {**definition, **{name: value for name, value in entry.items() if name != "$ref"}}


def _whole_schema(fields: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    """Return the schema of an action that a model is shown."""
    return {"type": "object", "properties": dict(fields), "required": list(required)}


def _values(entry: Schema) -> list[object]:
    """Return all values of a field; empty if its schema does not list them."""
    if isinstance(entry.get("enum"), list):
        return list(entry["enum"])
    if _types(entry) == {"boolean"}:
        return [True, False]
    if _types(entry) != {"integer"}:
        return []
    low = entry.get("minimum")
    high = entry.get("maximum")
    if not isinstance(low, int) or not isinstance(high, int) or not 0 <= high - low < MAX_VALUES:
        return []
    return list(range(low, high + 1))


def _as_text(value: object) -> str:
    """Return a value as the model writes it: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _types(entry: Schema) -> set[object]:
    """Return the JSON types that a field of a schema may have."""
    return {kind.get("type") for kind in (entry, *entry.get("anyOf", ())) if "anyOf" not in kind}
