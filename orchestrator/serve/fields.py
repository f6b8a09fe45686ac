"""Which fields of a request llama.cpp gets to see, and what they may hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from orchestrator.serve.openapi import PATHS, SCHEMAS
from orchestrator.serve.requests import INNER, Schema
from orchestrator.serve.wire import Refusal

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
}
# A message has so many tokens at least, what the template has around it among them; a few always
# may be tried. Each takes 4 KiB until the prompt is made, and time.
MESSAGE_TOKENS, _FEW_MESSAGES = 4, 64
# No more than the context has any meaning here, and llama.cpp would take memory for more.
_LAST_N = ("repeat_last_n", "dry_penalty_last_n")


def request_schema(route: str) -> Schema:
    """What a POST to this path may have."""
    body = PATHS[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return _resolved(body)


def settle_fields(route: str, data: dict[str, Any], n_ctx: int) -> None:
    """Leaves in a request what this path's schema has, with values for a context of n_ctx tokens.

    Clients send fields that mean something to other servers alone, and null for what they leave
    open: both go. Raises Refusal for a value of another kind or beyond its bounds, for a field that
    is missing, and for those that steer llama.cpp from inside.
    """
    for name, why in INNER.items():
        if data.get(name) is not None and (name != "lora" or data[name]):
            raise Refusal(400, f"{name} cannot be set by a request: {why}")
    schema = request_schema(route)
    for name in [name for name, value in data.items() if value is None]:
        del data[name]
    for name in data.keys() - schema["properties"].keys():
        del data[name]
    fault = fault_of(schema, data, "")
    if fault is not None:
        raise Refusal(400, fault)
    for name in _LAST_N:
        if name in data:
            data[name] = n_ctx if data[name] < 0 else min(data[name], n_ctx)
    messages = data.get("messages", data.get("input"))
    if isinstance(messages, list) and len(messages) > max(_FEW_MESSAGES, n_ctx // MESSAGE_TOKENS):
        raise Refusal(
            400,
            f"{len(messages)} messages exceed the available context size, {n_ctx} tokens (--ctx)",
            "exceed_context_size_error",
        )


def fault_of(schema: Schema, value: Any, where: str) -> str | None:
    """Why a value of JSON is not what a schema says, in a sentence; None where it is. where: the
    value's name for people, "" for the whole request. A property that is null counts as absent."""
    return None if _fits(schema, value) else _fault(_resolved(schema), value, where)


def _fits(schema: Schema, value: Any) -> bool:
    schema = _resolved(schema)
    if "anyOf" in schema:
        return any(_fits(choice, value) for choice in schema["anyOf"])
    if not _is_kind(schema, value):
        return False
    if isinstance(value, list):
        return _all_fit(schema.get("items", {}), value)
    if isinstance(value, dict):
        has_all = all(value.get(name) is not None for name in schema.get("required", ()))
        return has_all and all(_fits(inner, each) for _, inner, each in _inside(schema, value))
    return True


def _all_fit(items: Schema, values: list[Any]) -> bool:
    """Prompts are lists of up to a hundred thousand whole numbers: those are looked at together."""
    if values and set(map(type, values)) == {int}:
        ends = min(values), max(values)
        for choice in map(_resolved, items.get("anyOf", [items])):
            if choice.get("type") in ("integer", "number") and all(_fits(choice, n) for n in ends):
                return True
    return all(_fits(items, each) for each in values)


def _inside(schema: Schema, value: dict[str, Any]) -> Iterator[tuple[str, Schema, Any]]:
    """(name, schema, value) of the properties that a schema says anything about."""
    for name, each in value.items():
        inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if inner is not None and each is not None:
            yield name, inner, each


def _fault(schema: Schema, value: Any, where: str) -> str:
    """Of a value that does not fit. Names are made for it alone."""
    if "anyOf" in schema:
        kind = "array" if isinstance(value, list) else "object" if isinstance(value, dict) else None
        near = [
            each for each in map(_resolved, schema["anyOf"]) if kind and each.get("type") == kind
        ]
        # The fault within the one choice that is a list or an object as the value is.
        return (
            _fault(near[0], value, where) if len(near) == 1 else f"{where} must be {_words(schema)}"
        )
    if not _is_kind(schema, value):
        return f"{where} must be {_words(schema)}"
    if isinstance(value, list):
        items = _resolved(schema["items"])
        at = next(number for number, each in enumerate(value) if not _fits(items, each))
        return _fault(items, value[at], f"{where}[{at}]")
    head = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if value.get(name) is None:
            return f"{head}{name} is missing"
    name, inner, each = next(each for each in _inside(schema, value) if not _fits(*each[1:]))
    return _fault(_resolved(inner), each, f"{head}{name[:80]}")


def _is_kind(schema: Schema, value: Any) -> bool:
    """Whether a value is of the schema's type, one of its words, and within its bounds."""
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(word) and value == word for word in words)
    kind = schema.get("type")
    if kind is None:
        return True
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    size = len(value) if isinstance(value, (str, list, dict)) else value
    least, most = _bounds(schema)
    return (least is None or size >= least) and (most is None or size <= most)


def _bounds(schema: Schema) -> tuple[Any, Any]:
    """(least, most) of a number, or of how many there are of what."""
    ends = {"array": "Items", "string": "Length", "object": "Properties"}
    end = ends.get(schema.get("type", ""))
    names = (f"min{end}", f"max{end}") if end else ("minimum", "maximum")
    return schema.get(names[0]), schema.get(names[1])


def _words(schema: Schema) -> str:
    """What a value has to be, for people."""
    if "anyOf" in schema:
        said = dict.fromkeys(_words(_resolved(choice)) for choice in schema["anyOf"])
        return " or ".join(said)
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return " or ".join(json.dumps(word) for word in words)
    kind = schema.get("type", "")
    least, most = _bounds(schema)
    name = _NAMES.get(kind, "something else")
    units = {"array": " items", "object": " entries", "string": " characters"}
    unit = units.get(kind, "")
    if unit and least is not None and most is None:
        return f"{name} that is not empty"
    if least is not None and most is not None:
        return f"{name} {'of' if unit else 'from'} {least} to {most}{unit}"
    if least is not None:
        return f"{name} from {least} on"
    if most is not None:
        return f"{name} of at most {most}{unit}" if unit else f"{name} up to {most}"
    return name


def _resolved(schema: Schema) -> Schema:
    """The schema that a reference names."""
    name = schema.get("$ref")
    return schema if name is None else SCHEMAS[name.rpartition("/")[2]]
