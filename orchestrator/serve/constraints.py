"""Rewrites clients' JSON schemas into the subset of JSON Schema that llama.cpp enforces.

llama.cpp fails on some valid schemas and ignores some keywords. `Rewriter` expresses a schema in
keywords that llama.cpp turns into grammars, and lists each constraint that it cannot express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from orchestrator.serve.patterns import PatternError, of_words, translated

Schema = dict[str, Any]

# llama.cpp ignores larger repetition counts.
MOST_REPEATED = 2000
# An `enum` with at least this many texts is written as a pattern.
MANY_WORDS = 64
# Integers of llama.cpp's grammar have up to 16 digits.
_MOST_INTEGER = 10**16 - 1
# Limits for a schema after its references are resolved. A request may nest 100 deep.
MOST_NODES = 20_000
MOST_DEPTH = 110
# Keywords that constrain nothing. The specification counts `format` among them; llama.cpp enforces
# a few formats.
_ANNOTATIONS = frozenset(
    "$schema $id $anchor $comment $defs definitions title description default example examples "
    "deprecated readOnly writeOnly discriminator contentEncoding contentMediaType contentSchema "
    "format nullable xml externalDocs strict id $vocabulary $dynamicAnchor".split()
)
_OF_TYPE = {
    "object": "properties required additionalProperties minProperties maxProperties "
    "patternProperties propertyNames dependentRequired dependentSchemas dependencies "
    "unevaluatedProperties",
    "array": "items prefixItems additionalItems minItems maxItems uniqueItems contains minContains "
    "maxContains unevaluatedItems",
    "string": "pattern minLength maxLength",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_KEYWORDS = {kind: frozenset(words.split()) for kind, words in _OF_TYPE.items()}
_KEYWORDS["integer"] = _KEYWORDS["number"]
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# When schemas are merged, the larger or the smaller value of these keywords wins.
_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class _Conflict(Exception):
    """Raised if two schemas cannot be merged. The message names the keyword with the conflict."""


@dataclass
class Rewriter:
    """Rewrites a JSON schema into the keywords that llama.cpp can enforce.

    `where` is the schema's path in the request, for messages. `lost` lists the constraints that
    llama.cpp cannot enforce, as sentences that begin with a path.
    """

    root: Any
    where: str
    lost: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # of the definitions, by pointer
    _made: dict[str, Schema] = field(default_factory=dict)
    _anchors: dict[str, str] | None = None
    _n_nodes: int = 0
    _depth: int = 0

    def rewritten(self) -> Schema:
        """Rewrite the schema, and return the result, which llama.cpp fully enforces.

        Constraints that cannot be enforced are added to `lost`.
        """
        made = self._node(self.root, self.where)
        return {**made, "$defs": self._made} if self._made else made

    def _lose(self, where: str, why: str) -> None:
        """Record that the constraint at the path `where` cannot be enforced, because of `why`."""
        sentence = f"{where}: {why}"
        if sentence not in self.lost:
            self.lost.append(sentence)

    def _node(self, schema: Any, where: str) -> Schema:
        """Return a rewritten subschema.

        Returns {} if the schema has too many subschemas or is nested too deeply.
        """
        self._n_nodes += 1
        if self._n_nodes > MOST_NODES or self._depth > MOST_DEPTH:
            self._lose(self.where, "the schema is nested too deeply or has too many subschemas")
            return {}
        self._depth += 1
        try:
            return self._rewritten_node(schema, where)
        finally:
            self._depth -= 1

    def _rewritten_node(self, schema: Any, where: str) -> Schema:
        if schema is True or schema is None:
            return {}
        if schema is False or not isinstance(schema, dict):
            self._lose(
                where,
                "no value can match this schema"
                if schema is False
                else "a schema must be an object, or true",
            )
            return {}
        if "$ref" in schema:
            return self._reference(schema, where)
        if schema.get("nullable") is True and "type" in schema:
            kinds = _listed(schema["type"])
            schema = {**schema, "type": [*kinds, *(["null"] if "null" not in kinds else [])]}
        for word in ("not", "if", "$dynamicRef", "$recursiveRef"):
            if word in schema and not (word == "if" and not schema.keys() & {"then", "else"}):
                self._lose(f"{where}.{word}", f"this server cannot enforce `{word}`")
        if "allOf" in schema:
            return self._all_of(schema, where)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._any_of(schema, word, where)
        return self._plain(schema, where)

    # References

    def _reference(self, schema: Schema, where: str) -> Schema:
        pointer = self._pointer(schema["$ref"])
        try:
            target = self._at(pointer)
        except (KeyError, IndexError, ValueError, TypeError):
            self._lose(f"{where}.$ref", "the $ref names no part of the schema")
            return {}
        siblings = {name: each for name, each in schema.items() if name != "$ref"}
        if siblings.keys() - _ANNOTATIONS:
            return self._node({"allOf": [{"$ref": schema["$ref"]}, siblings]}, where)
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._made[name] = {}
            self._made[name] = self._node(target, self._path(pointer))
            if self._made[name] == {"$ref": f"#/$defs/{name}"}:
                self._lose(f"{where}.$ref", "the $ref names itself")
                self._made[name] = {}
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _pointer(self, reference: Any) -> str:
        """Return the JSON pointer of a `$ref` into this schema, without `#`.

        A reference to another document or to an unknown anchor gives a pointer that matches
        nothing.
        """
        address, _, fragment = str(reference).partition("#")
        own = self.root.get("$id", self.root.get("id")) if isinstance(self.root, dict) else None
        if address and address != own:
            return "/" + "\0"  # another document: a pointer that names nothing
        if fragment and not fragment.startswith("/"):
            if self._anchors is None:
                self._anchors = dict(_anchors(self.root, ""))
            return self._anchors.get(fragment, "/\0")
        return unquote(fragment)

    def _at(self, pointer: str) -> Any:
        """Return the part of the schema at a JSON pointer.

        Raises KeyError, IndexError, ValueError or TypeError if the pointer matches nothing.
        """
        target = self.root
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target[int(part)] if isinstance(target, list) else target[part]
        return target

    def _path(self, pointer: str) -> str:
        return self.where + pointer.replace("/", ".")

    # Combinations

    def _all_of(self, schema: Schema, where: str) -> Schema:
        base = {name: each for name, each in schema.items() if name != "allOf"}
        parts = schema["allOf"] if isinstance(schema["allOf"], list) else [schema["allOf"]]
        try:
            for number, part in enumerate(parts):
                base = merged(base, self._inlined(part, f"{where}.allOf[{number}]", 0))
        except _Conflict as conflict:
            self._lose(
                f"{where}.allOf",
                f"the schemas in allOf conflict in `{conflict}`, so they cannot be enforced "
                "together",
            )
        return self._node(base, where)

    def _inlined(self, part: Any, where: str, depth: int) -> Schema:
        """Return a subschema in which a `$ref` is replaced by the schema that it names."""
        if part is True:
            return {}
        if not isinstance(part, dict):
            raise _Conflict("type")
        if "$ref" not in part:
            return part
        if depth > 32:
            raise _Conflict("$ref")
        try:
            target = self._at(self._pointer(part["$ref"]))
        except (KeyError, IndexError, ValueError, TypeError):
            self._lose(f"{where}.$ref", "the $ref names no part of the schema")
            target = {}
        rest = {name: each for name, each in part.items() if name != "$ref"}
        return merged(self._inlined(target, where, depth + 1), rest)

    def _any_of(self, schema: Schema, word: str, where: str) -> Schema:
        parts = schema[word]
        if not isinstance(parts, list) or not parts:
            self._lose(f"{where}.{word}", f"the value of {word} must be a list of schemas")
            return self._node(_without(schema, word), where)
        base = _without(schema, word)
        if not base.keys() - _ANNOTATIONS:
            base = {}
        made = []
        for number, part in enumerate(parts):
            here = f"{where}.{word}[{number}]"
            try:
                if part is False:
                    continue
                part = merged(base, self._inlined(part, here, 0)) if base else part
            except _Conflict as conflict:
                self._lose(
                    here,
                    f"the keyword `{conflict}` conflicts with the same keyword of "
                    "the enclosing schema",
                )
                part = base
            made.append(self._node(part, here))
        if word == "oneOf" and not _are_disjoint(made):
            self._lose(
                f"{where}.oneOf", "a value could match several of the schemas, which oneOf forbids"
            )
        return made[0] if len(made) == 1 else {"anyOf": made} if made else {}

    # Schemas of one type

    def _plain(self, schema: Schema, where: str) -> Schema:
        if "const" in schema:
            return {"const": schema["const"]}
        kinds = self._kinds(schema, where)
        if "enum" in schema:
            return self._enum(schema, kinds, where)
        if not kinds:
            return {}
        made = [self._of_type(schema, kind, where) for kind in kinds]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _kinds(self, schema: Schema, where: str) -> list[str]:
        """Return the JSON types that a schema allows, or an empty list if it allows any type."""
        if "type" not in schema:
            found = [
                kind
                for kind in ("object", "array", "string", "number")
                if schema.keys() & _KEYWORDS[kind]
            ]
            return found[:1]
        kinds = [str(kind).lower() for kind in _listed(schema["type"])]
        if "any" in kinds:
            return []
        known = [kind for kind in kinds if kind in _TYPES]
        if len(known) < len(kinds) or not kinds:
            self._lose(f"{where}.type", "the value of `type` must name JSON types, such as string")
            return []
        return known

    def _enum(self, schema: Schema, kinds: list[str], where: str) -> Schema:
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            self._lose(
                f"{where}.enum", "the value of `enum` must be a list with at least one value"
            )
            return self._node(_without(schema, "enum"), where)
        of_type = [value for value in values if not kinds or _kinds_of(value) & set(kinds)]
        if not of_type:
            self._lose(
                f"{where}.enum", "none of the listed values has the type that the schema requires"
            )
        return _words(of_type or values)

    def _of_type(self, schema: Schema, kind: str, where: str) -> Schema:
        make = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }.get(kind)
        return make(schema, where) if make is not None else {"type": kind}

    def _object(self, schema: Schema, where: str) -> Schema:
        properties, required = schema.get("properties"), schema.get("required", [])
        made: Schema = {"type": "object"}
        if not isinstance(required, list):
            self._lose(
                f"{where}.required", "the value of `required` must be a list of property names"
            )
            required = []
        if properties is not None and not isinstance(properties, dict):
            self._lose(f"{where}.properties", "the value of `properties` must be an object")
            properties = None
        if properties is not None or required:
            made["properties"] = {}
            for name, each in (properties or {}).items():
                if each is False:
                    if name in required:
                        self._lose(
                            f"{where}.properties.{name}",
                            "the property is required, but no value can match its schema",
                        )
                    continue
                made["properties"][name] = self._node(each, f"{where}.properties.{name}")
            for name in required:
                made["properties"].setdefault(str(name), {})
            if required:
                made["required"] = [str(name) for name in required]
        rest = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        if isinstance(rest, dict):
            rest = self._node(rest, f"{where}.additionalProperties")
        if rest is not None:
            made["additionalProperties"] = rest
        if properties is None and required and rest is None:
            made["additionalProperties"] = True
        least, most = (self._count(schema, f"{end}Properties", where) for end in ("min", "max"))
        if least is not None and least > len(set(map(str, required))):
            self._lose(
                f"{where}.minProperties",
                "the limit on the number of properties is not enforced if some properties are "
                "optional",
            )
        n_closed = (
            len(made.get("properties", ())) if rest in (None, False) and properties else math.inf
        )
        if most is not None and most < n_closed:
            self._lose(
                f"{where}.maxProperties",
                "the limit on the number of properties is not enforced if some properties are "
                "optional",
            )
        for word in (
            "patternProperties",
            "propertyNames",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
        ):
            if schema.get(word):
                self._lose(f"{where}.{word}", f"this server cannot enforce `{word}`")
        return made

    def _array(self, schema: Schema, where: str) -> Schema:
        made: Schema = {"type": "array"}
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):
            items, first = None, items
        least, most = (self._count(schema, f"{end}Items", where) for end in ("min", "max"))
        if isinstance(first, list) and first:
            most = len(first) if most is None else most
            if least is not None and least > len(first):
                self._lose(f"{where}.minItems", "minItems is larger than the number of prefixItems")
            made["prefixItems"] = [
                self._node(each, f"{where}.prefixItems[{number}]")
                for number, each in enumerate(first[:most])
            ]
        else:
            if items is False:
                most = 0
            elif items is not None:
                made["items"] = self._node(items, f"{where}.items")
            self._bounds(made, least, most, "Items", where)
        if schema.get("uniqueItems") and (most is None or most > 1):
            self._lose(f"{where}.uniqueItems", "this server cannot enforce `uniqueItems`")
        if "contains" in schema:
            self._lose(f"{where}.contains", "this server cannot enforce `contains`")
        return made

    def _string(self, schema: Schema, where: str) -> Schema:
        made: Schema = {"type": "string"}
        least, most = (self._count(schema, f"{end}Length", where) for end in ("min", "max"))
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            try:
                made["pattern"] = translated(pattern, least or 0, most)
                return made
            except PatternError as error:
                self._lose(f"{where}.pattern", str(error))
        elif pattern is not None:
            self._lose(f"{where}.pattern", "the value of `pattern` must be a text")
        if least is None and most is None and isinstance(schema.get("format"), str):
            made["format"] = schema["format"]
        self._bounds(made, least, most, "Length", where)
        return made

    def _count(self, schema: Schema, name: str, where: str) -> int | None:
        """Return the value of a keyword such as minItems, which must be a whole number.

        Returns None if the keyword is absent or its value is not valid.
        """
        value = schema.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._lose(f"{where}.{name}", f"the value of {name} must be a whole number, 0 or more")
            return None
        return value

    def _bounds(
        self, made: Schema, least: int | None, most: int | None, of: str, where: str
    ) -> None:
        if least is not None and most is not None and least > most:
            self._lose(f"{where}.min{of}", f"min{of} is larger than max{of}")
            return
        for name, value in ((f"min{of}", least), (f"max{of}", most)):
            if value is None:
                continue
            if value > MOST_REPEATED:
                self._lose(
                    f"{where}.{name}",
                    f"this server enforces {name} only up to {MOST_REPEATED}",
                )
            else:
                made[name] = value

    def _limits(self, schema: Schema, where: str) -> tuple[Any, Any, bool, bool]:
        """Return the range of a number schema and whether its ends are excluded.

        The result is (minimum, maximum, minimum is exclusive, maximum is exclusive). A limit that
        is absent is None.
        """
        found: list[Any] = []
        for end, larger in (("Minimum", True), ("Maximum", False)):
            value, excluded = schema.get(end.lower()), schema.get(f"exclusive{end}")
            for name, each in ((end.lower(), value), (f"exclusive{end}", excluded)):
                if each is not None and not isinstance(each, (int, float)):
                    self._lose(f"{where}.{name}", f"the value of {name} must be a number")
            value = value if _are_numbers(value) else None
            is_excluded = excluded is True  # a flag in draft 4, a number later
            if isinstance(excluded, (int, float)) and not isinstance(excluded, bool):
                is_tighter = value is None or (excluded >= value if larger else excluded <= value)
                value, is_excluded = (excluded, True) if is_tighter else (value, is_excluded)
            found.append((value, is_excluded and value is not None))
        (least, least_excluded), (most, most_excluded) = found
        return least, most, least_excluded, most_excluded

    def _integer(self, schema: Schema, where: str) -> Schema:
        least: Any
        most: Any
        least, most, not_least, not_most = self._limits(schema, where)
        if any(isinstance(end, float) and not math.isfinite(end) for end in (least, most)):
            least = most = None
        least = None if least is None else int(least // 1) + 1 if not_least else math.ceil(least)
        most = None if most is None else math.ceil(most) - 1 if not_most else int(most // 1)
        least = None if least is not None and least <= -_MOST_INTEGER else least
        most = None if most is not None and most >= _MOST_INTEGER else most
        step = schema.get("multipleOf", 1)
        if least is not None and most is not None and least > most:
            self._lose(f"{where}.minimum", "no integer is between the minimum and the maximum")
            least = most = None
        elif step != 1:
            is_bounded = least is not None and most is not None
            if is_bounded and isinstance(step, int) and step > 0:
                values = range(-(-least // step) * step, most + 1, step)
                if 0 < len(values) <= MOST_REPEATED:
                    return {"enum": list(values)}
            self._lose(f"{where}.multipleOf", "this server cannot enforce this `multipleOf`")
        made: Schema = {"type": "integer"}
        if least is not None:
            made["minimum"] = least
        if most is not None:
            made["maximum"] = most
        return made

    def _number(self, schema: Schema, where: str) -> Schema:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if schema.get(name) not in (None, False):
                self._lose(
                    f"{where}.{name}",
                    "minimum, maximum and multipleOf are enforced for integers only",
                )
        return {"type": "number"}


def rewritten(schema: Any, where: str) -> tuple[Any, list[str]]:
    """Return (schema that llama.cpp can enforce, constraints of `schema` that are not enforced).

    The first value is `schema` itself if llama.cpp can enforce it unchanged. Each constraint is a
    sentence. `where` is the schema's path in the request, for these sentences.
    """
    rewriter = Rewriter(schema, where)
    made = rewriter.rewritten()
    is_same = json.dumps(made, sort_keys=True) == json.dumps(_bare(schema), sort_keys=True)
    return (schema if is_same else made), rewriter.lost


def rewritten_arguments(schema: Schema, where: str) -> tuple[Schema, list[str]]:
    """Rewrite the schema of a tool's arguments into a schema that llama.cpp can enforce.

    Returns (new schema, sentences about constraints that are not enforced). The new schema is one
    object with its properties at the top level, because many chat templates write the arguments one
    by one. `where` is the schema's path in the request, with which the sentences begin.
    """
    made, lost = rewritten(schema, where)
    if not schema:
        return schema, lost  # llama.cpp reads {} as a tool without arguments
    if "$ref" in made:
        rest = {"$defs": made["$defs"]}
        made = {**rest, **made["$defs"][made["$ref"].rpartition("/")[2]]}
    if made.get("type") == "object":
        return made, lost
    choices = [each for each in made.get("anyOf", ()) if each.get("type") == "object"]
    if made.keys() - _ANNOTATIONS:
        lost = [
            *lost,
            f"{where}: this server merges the alternatives of anyOf or oneOf into one object, "
            f"which may have the properties of all alternatives",
        ]
    flat: Schema = {"type": "object"}
    if choices:
        flat["properties"] = {}
        for choice in choices:
            for name, each in choice.get("properties", {}).items():
                have = flat["properties"].setdefault(name, each)
                if have != each:
                    flat["properties"][name] = {"anyOf": [*have.get("anyOf", [have]), each]}
        sets = [set(choice.get("required", ())) for choice in choices]
        required = [name for name in flat["properties"] if all(name in names for names in sets)]
        if required:
            flat["required"] = required
    return ({**flat, "$defs": made["$defs"]} if "$defs" in made else flat), lost


def _bare(schema: Any) -> Any:
    """Return a schema without the keywords that constrain nothing, such as `title`.

    Only the most common kinds of subschemas are searched.
    """
    if not isinstance(schema, dict):
        return schema
    made = {name: each for name, each in schema.items() if name not in _ANNOTATIONS}
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: _bare(each) for name, each in made["properties"].items()}
    for name in ("items", "additionalProperties"):
        if name in made:
            made[name] = _bare(made[name])
    if isinstance(made.get("anyOf"), list):
        made["anyOf"] = [_bare(each) for each in made["anyOf"]]
    if made.get("required") == []:
        del made["required"]
    if isinstance(schema.get("format"), str) and made.get("type") == "string":
        made["format"] = schema["format"]
    return made


def merged(first: Schema, second: Schema) -> Schema:
    """Return a schema that matches only the values that both schemas match.

    Raises _Conflict if a keyword has different values that cannot be combined.
    """
    made = dict(first)
    for name, value in second.items():
        if name not in made or made[name] == value or name in _ANNOTATIONS:
            made.setdefault(name, value)
            continue
        have = made[name]
        if name == "properties" and isinstance(have, dict) and isinstance(value, dict):
            both = {
                each: _merged_any(have[each], value[each]) for each in have.keys() & value.keys()
            }
            made[name] = {**have, **value, **both}
        elif name == "required" and isinstance(have, list) and isinstance(value, list):
            made[name] = [*have, *(each for each in value if each not in have)]
        elif name == "enum" and isinstance(have, list) and isinstance(value, list):
            made[name] = [each for each in have if each in value]
        elif name == "type":
            made[name] = _common_types(_listed(have), _listed(value))
        elif name in ("items", "additionalProperties"):
            made[name] = _merged_any(have, value)
        elif name in ("allOf",) and isinstance(have, list) and isinstance(value, list):
            made[name] = [*have, *value]
        elif name in _LARGER and _are_numbers(have, value):
            made[name] = max(have, value)
        elif name in _SMALLER and _are_numbers(have, value):
            made[name] = min(have, value)
        else:
            raise _Conflict(name)
    return made


def _merged_any(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second if first is True else first
    if "$ref" in first or "$ref" in second:
        return {"allOf": [first, second]}
    return merged(first, second)


def _common_types(first: list[Any], second: list[Any]) -> list[Any]:
    found = [kind for kind in first if kind in second]
    if "integer" in first + second and not found and "number" in first + second:
        found = ["integer"]
    if not found:
        raise _Conflict("type")
    return found


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _without(schema: Schema, word: str) -> Schema:
    return {name: each for name, each in schema.items() if name != word}


def _anchors(schema: Any, pointer: str) -> Iterable[tuple[str, str]]:
    """Yield (name, JSON pointer) of each `$anchor` in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$anchor"), str):
            yield schema["$anchor"], pointer
        for name, each in schema.items():
            yield from _anchors(each, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(schema, list):
        for number, each in enumerate(schema):
            yield from _anchors(each, f"{pointer}/{number}")


def _words(values: list[Any]) -> Schema:
    """Return a schema that matches exactly the given values.

    Many texts become a regular expression in which common prefixes are shared.
    """
    if len(values) >= MANY_WORDS and all(isinstance(value, str) for value in values):
        with suppress(PatternError):
            return {"type": "string", "pattern": of_words(values)}
    return {"enum": values}


def _kinds_of(value: Any) -> set[str]:
    """Return the JSON types of a value."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _are_disjoint(schemas: list[Schema]) -> bool:
    """Return whether no value can match two of these rewritten schemas.

    Only types, constants and constant properties are compared. Returns False if this is not
    enough to decide.
    """
    pairs = ((a, b) for n, a in enumerate(schemas) for b in schemas[n + 1 :])
    return all(_differ(a, b) for a, b in pairs)


def _differ(first: Schema, second: Schema) -> bool:
    values = [
        schema.get("enum", [schema["const"]] if "const" in schema else None)
        for schema in (first, second)
    ]
    if values[0] is not None and values[1] is not None:
        return not any(value in values[1] for value in values[0])
    kinds = [_possible(schema) for schema in (first, second)]
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return True
    if first.get("type") == second.get("type") == "object":
        one, other = first.get("properties", {}), second.get("properties", {})
        shared = set(first.get("required", ())) & set(second.get("required", ()))
        return any(_differ(one[name], other[name]) for name in shared)
    return False


def _possible(schema: Schema) -> set[str]:
    """Return the JSON types that values of a rewritten schema may have.

    Returns an empty set if they are unknown.
    """
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return set().union(*map(_kinds_of, values))
    kind = schema.get("type")
    return {"integer", "number"} if kind in ("integer", "number") else {kind} if kind else set()
