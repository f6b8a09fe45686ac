"""Bounds of requests for which llama.cpp would compute for long before anybody can end it.

Here are those that the schema of a field cannot say. How many entries each field may have is in
`orchestrator.serve.requests`. How much work a grammar is cannot be told from its text, so the
native server counts it while it is done (`patches/native/server/moe-edge-bounds.h`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.serve.wire import Refusal, inner

# Texts in `logit_bias` are as many entries as they have tokens.
MOST_BIAS_CHARS = 16384
# Of a name in a schema: llama.cpp's regular expressions recurse over each of its characters, and
# those of the names around it.
MOST_NAME_CHARS = 256
# Of an object: for each of its optional properties llama.cpp copies the list of those behind it,
# and for each of these again.
MOST_PROPERTIES = 512
_SHAPES = ("json_schema", "response_format", "tools")


def settle_bounds(_route: str, data: dict[str, Any]) -> None:
    """Raises Refusal for a request that is more than what is bounded here; never changes it."""
    n_chars = sum(map(len, _texts(data.get("logit_bias"))))
    _refuse_above("the texts of logit_bias", n_chars, MOST_BIAS_CHARS, "characters")
    for name in _SHAPES:
        _check_schemas(name, data.get(name))


def _refuse_above(what: str, n: int, most: int, of: str) -> None:
    if n > most:
        raise Refusal(400, f"{what}: {n} {of}, and {most} is the most that is taken")


def _texts(bias: Any) -> Iterator[str]:
    if isinstance(bias, dict):
        yield from bias
        return
    for each in bias or ():
        if isinstance(each[0], str):
            yield each[0]


def _check_schemas(name: str, asked: Any) -> None:
    """Of a schema, or of anything that has some in it."""
    level = [asked]
    while level:
        for each in level:
            if isinstance(each, dict):
                reference = each.get("$ref")
                names = [*each, reference] if isinstance(reference, str) else each
                longest = max(map(len, names), default=0)
                _refuse_above(f"a name in {name}", longest, MOST_NAME_CHARS, "characters")
                properties = each.get("properties")
                n = len(properties) if isinstance(properties, dict) else 0
                _refuse_above(f"an object in {name}", n, MOST_PROPERTIES, "properties")
        level = inner(level)
